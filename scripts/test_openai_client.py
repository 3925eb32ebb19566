#!/usr/bin/env python3
"""The official OpenAI client against a running server: `scripts/test_openai_client.py KWIRE_BINARY`.

Runs in the environment of `make venv`. Starts a server with the small model on a free port and stops it by its
process id.
"""
import http.client
import json
import signal
import subprocess
import sys
import unittest

import openai

from demo import free_port, stop, wait_until_healthy

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
KEY = "test-key"
# Under the template's own system message this small model answers the question with a song.
MESSAGES = [
    {"role": "system", "content": "You are a helpful assistant."},
    {"role": "user", "content": "What is the capital of France?"},
]


def chat(**fields):
    return {"model": "smollm2", "messages": MESSAGES, "max_tokens": 4, **fields}


def completion(**fields):
    return {"model": "smollm2", "prompt": "Hi", "max_tokens": 4, **fields}


# Name, path, body (an object, or raw bytes), expected status, expected parameter.
BAD_REQUESTS = [
    ("broken JSON", CHAT, b'{"messages": [', 400, None),
    ("no JSON at all", COMPLETIONS, b"\xff\xfe\x00", 400, None),
    ("empty body", CHAT, b"", 400, None),
    ("a list as body", CHAT, [], 400, None),
    ("10 MB of brackets", CHAT, b"[" * 10_000_000, 400, None),
    ("10 MB prompt", COMPLETIONS, completion(prompt="x" * 10_000_000), 400, "prompt"),
    ("10 MB message", CHAT, chat(messages=[{"role": "user", "content": "x" * 10_000_000}]), 400, "messages"),
    ("40 MB body", COMPLETIONS, b" " * 40_000_000, 413, None),
    ("deeply nested JSON", CHAT, b'{"a":' * 10_000, 400, None),
    ("unknown model", CHAT, chat(model="gpt-4"), 404, "model"),
    ("model of the wrong type", CHAT, chat(model=3), 400, "model"),
    ("no messages", CHAT, {"model": "smollm2"}, 400, "messages"),
    ("empty messages", CHAT, chat(messages=[]), 400, "messages"),
    ("messages as a string", CHAT, chat(messages="Hi"), 400, "messages"),
    ("message without a role", CHAT, chat(messages=[{"content": "Hi"}]), 400, "messages[0].role"),
    ("content of the wrong type", CHAT, chat(messages=[{"role": "user", "content": 3}]), 400, "messages[0].content"),
    ("image part", CHAT, chat(messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]),
     400, "messages[0].content[0].type"),
    ("over-long prompt in tokens", COMPLETIONS, completion(prompt=[1] * 9_000), 400, "prompt"),
    ("over-long prompt in text", COMPLETIONS, completion(prompt="word " * 9_000), 400, "prompt"),
    ("token id beyond the vocabulary", COMPLETIONS, completion(prompt=[1, 10_000_000]), 400, "prompt[1]"),
    ("negative token id", COMPLETIONS, completion(prompt=[-1]), 400, "prompt[0]"),
    ("empty prompt", COMPLETIONS, completion(prompt=[]), 400, "prompt"),
    ("mixed prompt", COMPLETIONS, completion(prompt=["a", 1]), 400, "prompt[1]"),
    ("negative max_tokens", CHAT, chat(max_tokens=-1), 400, "max_tokens"),
    ("max_tokens as text", CHAT, chat(max_tokens="many"), 400, "max_tokens"),
    ("max_tokens beyond the context", CHAT, chat(max_tokens=1_000_000), 400, "max_tokens"),
    ("max_tokens beyond 64 bits", CHAT, chat(max_tokens=10**30), 400, "max_tokens"),
    ("n of zero", CHAT, chat(n=0), 400, "n"),
    ("huge n", CHAT, chat(n=1_000_000), 400, "n"),
    ("best_of", COMPLETIONS, completion(best_of=3), 400, "best_of"),
    ("suffix", COMPLETIONS, completion(suffix="x"), 400, "suffix"),
    ("temperature beyond f32", CHAT, chat(temperature=1e300), 400, "temperature"),
    ("negative temperature", CHAT, chat(temperature=-1), 400, "temperature"),
    ("temperature that is not a number", CHAT, b'{"messages": [], "temperature": NaN}', 400, None),
    ("top_p above one", CHAT, chat(top_p=2), 400, "top_p"),
    ("top_logprobs beyond the limit", CHAT, chat(logprobs=True, top_logprobs=1_000), 400, "top_logprobs"),
    ("logit_bias of a word", CHAT, chat(logit_bias={"word": 1}), 400, "logit_bias.word"),
    ("stop of the wrong type", CHAT, chat(stop={"a": 1}), 400, "stop"),
    ("too many stop strings", CHAT, chat(stop=["x"] * 1_000), 400, "stop"),
    ("stream as text", CHAT, chat(stream="yes"), 400, "stream"),
    ("stream_options without stream", CHAT, chat(stream_options={"include_usage": True}), 400, "stream_options"),
    ("JSON mode", CHAT, chat(response_format={"type": "json_object"}), 400, "response_format"),
    ("tools", CHAT, chat(tools=[{"type": "function", "function": {"name": "f"}}]), 400, "tools"),
    ("too many prefix names", CHAT, chat(kwire={"prefixes": [{"id": 1, "end": 1}] * 1_025}), 400, "kwire.prefixes"),
    ("nothing to tokenize", "/tokenize", {}, 400, "prompt"),
    ("10 MB to tokenize", "/tokenize", {"prompt": "x" * 10_000_000}, 400, "prompt"),
    ("token beyond the vocabulary to text", "/detokenize", {"tokens": [10_000_000]}, 400, "tokens[0]"),
    ("no such path", "/v1/nothing", {}, 404, None),
]


def start_server(*flags):
    """A server that is ready, and its address."""
    port = free_port()
    base = f"http://127.0.0.1:{port}"
    server = subprocess.Popen([BINARY, "serve", "smollm2", "--host", "127.0.0.1", "--port", str(port), *flags])
    try:
        wait_until_healthy(server, base)
    except BaseException:
        stop(server)
        raise
    return server, base


class OpenAiClient(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.server, base = start_server("--api-key", KEY)
        cls.addClassCleanup(stop, cls.server)
        cls.client = openai.OpenAI(base_url=f"{base}/v1", api_key=KEY, max_retries=0)
        cls.addClassCleanup(cls.client.close)

    def chat(self, **more):
        more = {"temperature": 0, "max_tokens": 32, **more}
        return self.client.chat.completions.create(model="smollm2", messages=MESSAGES, **more)

    def test_models(self):
        self.assertEqual([m.id for m in self.client.models.list()], ["smollm2"])

    def test_chat(self):
        answer = self.chat()
        self.assertIn("Paris", answer.choices[0].message.content)
        self.assertEqual(answer.choices[0].finish_reason, "stop")
        self.assertEqual(answer.usage.total_tokens, answer.usage.prompt_tokens + answer.usage.completion_tokens)

    def test_a_stream_says_the_same(self):
        with self.chat(stream=True, stream_options={"include_usage": True}) as stream:
            chunks = list(stream)
        text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
        whole = self.chat()
        self.assertEqual(text, whole.choices[0].message.content)
        self.assertEqual(chunks[-1].usage.completion_tokens, whole.usage.completion_tokens)

    def test_completions(self):
        answer = self.client.completions.create(model="smollm2", prompt="One, two, three,", max_tokens=8, temperature=0)
        self.assertIn("four", answer.choices[0].text)

    def test_logprobs(self):
        content = self.chat(logprobs=True, top_logprobs=2).choices[0].logprobs.content
        self.assertEqual(len(content[0].top_logprobs), 2)
        self.assertLessEqual(content[0].logprob, 0)

    def test_several_answers_and_seeds(self):
        ask = {"n": 3, "temperature": 1, "seed": 7, "max_tokens": 12}
        first, again = ([c.message.content for c in self.chat(**ask).choices] for _ in range(2))
        self.assertEqual(len(first), 3)
        self.assertEqual(first, again)

    def test_stop_strings_are_left_out(self):
        answer = self.chat(stop=["Paris"])
        self.assertNotIn("Paris", answer.choices[0].message.content)
        self.assertEqual(answer.choices[0].finish_reason, "stop")

    def test_errors_have_types(self):
        with self.assertRaises(openai.NotFoundError):
            self.client.chat.completions.create(model="none", messages=MESSAGES)
        with self.assertRaises(openai.BadRequestError):
            self.chat(temperature=-1)
        with self.assertRaises(openai.AuthenticationError):
            openai.OpenAI(base_url=self.client.base_url, api_key="wrong", max_retries=0).models.list()

    def post(self, path, body):
        """Status and body of the answer to raw bytes, or to an object as JSON."""
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        connection = http.client.HTTPConnection(self.client.base_url.host, self.client.base_url.port, timeout=60)
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}"}
        try:
            connection.request("POST", path, raw, headers)
        except (BrokenPipeError, ConnectionResetError):
            pass  # the server answers before it has read everything
        try:
            response = connection.getresponse()
            return response.status, json.loads(response.read())
        finally:
            connection.close()

    def test_bad_requests_are_refused_by_name(self):
        for name, path, body, status, param in BAD_REQUESTS:
            with self.subTest(name):
                got, answer = self.post(path, body)
                error = answer["error"]
                self.assertEqual((got, error["code"], error["param"]), (status, status, param), error)
                self.assertTrue(error["message"] and error["type"], error)
        self.assertIsNone(self.server.poll())
        self.assertIn("Paris", self.chat().choices[0].message.content)


class Resume(unittest.TestCase):
    def test_a_second_server_continues_a_stream_whose_server_was_killed(self):
        ask = {"prompt": "Once upon a time", "max_tokens": 40, "temperature": 0.8, "stream": True}

        def stream(server, client, kwire, n_chunks=None):
            extra = {"ignore_eos": True, "kwire": kwire}
            seen = []
            for chunk in client.completions.create(model="smollm2", extra_body=extra, **ask):
                seen.append(chunk)
                if len(seen) == n_chunks:
                    server.kill()
                    server.wait()
                    break
            return seen

        def text(chunks):
            return "".join(c.choices[0].text for c in chunks if c.choices)

        (first, first_base), (second, second_base) = start_server(), start_server()
        self.addCleanup(stop, second)
        self.addCleanup(stop, first)
        clients = [openai.OpenAI(base_url=f"{base}/v1", api_key="none", max_retries=0) for base in (first_base, second_base)]
        for client in clients:
            self.addCleanup(client.close)
        begun = stream(first, clients[0], {"report": True}, n_chunks=12)
        reports = [c.model_extra["kwire"] for c in begun if c.model_extra.get("kwire")]
        resume = {
            "prompt_token_ids": reports[0]["prompt_token_ids"],
            "output_token_ids": [t for r in reports for t in r["token_ids"]],
            "seed": reports[0]["seed"],
            "sent_chars": len(text(begun)),
        }
        rest = stream(second, clients[1], {"resume": resume})
        ask["seed"] = resume["seed"]
        whole = stream(second, clients[1], {"report": True})
        self.assertEqual(text(begun) + text(rest), text(whole))
        self.assertEqual(rest[-1].choices[0].finish_reason, "length")


class Shutdown(unittest.TestCase):
    def test_a_second_signal_ends_the_process_at_once(self):
        server, base = start_server("--shutdown-timeout", "3600")
        self.addCleanup(stop, server)
        client = openai.OpenAI(base_url=f"{base}/v1", api_key="none", max_retries=0)
        self.addCleanup(client.close)
        endless = {"max_tokens": 8000, "extra_body": {"ignore_eos": True}}
        stream = client.completions.create(model="smollm2", prompt="Once", stream=True, **endless)
        next(iter(stream))
        server.send_signal(signal.SIGTERM)
        while True:  # until new requests are refused
            try:
                client.completions.create(model="smollm2", prompt="Hi", max_tokens=1)
            except openai.InternalServerError:
                break
        next(iter(stream))
        self.assertIsNone(server.poll(), "the running answer goes on")
        server.send_signal(signal.SIGTERM)
        self.assertNotIn(server.wait(timeout=60), (0, -signal.SIGTERM, -signal.SIGKILL))


if __name__ == "__main__":
    BINARY = sys.argv.pop(1)
    unittest.main(verbosity=2)
