#!/usr/bin/env python3
"""The official OpenAI client against a running server: `scripts/test_openai_client.py KWIRE_BINARY`.

Runs in the environment of `make venv`. Starts a server with the small model on a free port and stops it by its
process id.
"""
import subprocess
import sys
import unittest

import openai

from demo import free_port, stop, wait_until_healthy

KEY = "test-key"
# Under the template's own system message this small model answers the question with a song.
MESSAGES = [
    {"role": "system", "content": "You are a helpful assistant."},
    {"role": "user", "content": "What is the capital of France?"},
]


class OpenAiClient(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        port = free_port()
        base = f"http://127.0.0.1:{port}"
        command = [BINARY, "serve", "smollm2", "--host", "127.0.0.1", "--port", str(port), "--api-key", KEY]
        cls.server = subprocess.Popen(command)
        cls.addClassCleanup(stop, cls.server)
        wait_until_healthy(cls.server, base)
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


if __name__ == "__main__":
    BINARY = sys.argv.pop(1)
    unittest.main(verbosity=2)
