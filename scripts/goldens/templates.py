"""Chat template goldens: what transformers' `apply_chat_template(tokenize=False)` gives: `fixtures/templates/goldens.json`.

Usage: templates.py SMOLLM2_GGUF. The templates beside the goldens are written for these tests, except `smollm2.jinja`, which is the
model's own. A case is `{template, tokenizer, special_tokens, messages, tools?, documents?, kwargs, now?}` with `expected`, or
`error` and `error_type`. `tokenizer` names one of `fixtures/tokenizers`; `special_tokens` are what it puts into the context.
`now` is the local time that `strftime_now` saw.
"""

import datetime
import json
import sys

import gguf
import transformers
from transformers import PreTrainedTokenizerFast
from transformers.utils import chat_template_utils

from common import FIXTURES
from gguf_model import metadata

OUT = FIXTURES / "templates"
NOW = datetime.datetime(2024, 7, 6, 9, 5, 3)


class FrozenTime(datetime.datetime):
    @classmethod
    def now(cls, tz=None):
        return NOW


chat_template_utils.datetime = FrozenTime

TOKENIZERS = {
    "llama-bpe": {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"},
    "llama-spm": {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"},
    "qwen2": {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"},
    "smollm": {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "unk_token": "<|endoftext|>", "pad_token": "<|im_end|>"},
}


def m(role, content=None, **more):
    return {"role": role, "content": content, **more}


HI = [m("user", "Hi there")]
TALK = [m("system", "You are terse."), m("user", "  What is 2+2?\n"), m("assistant", " 4 \n"), m("user", "And 3+3?")]
TWO_USERS = [m("user", "one"), m("user", "two")]
UNICODE = [m("user", "Grüße, 世界 😀 <b>&amp;</b> 'quoted' \"double\" \\ {{ not }} {% a tag %}"), m("assistant", "Ω\u2028\x7f</script>")]
ENDS_OPEN = [m("user", "Count."), m("assistant", "One, two, ")]
WEATHER = {"type": "function", "function": {
    "name": "get_weather", "description": "Weather in a place, in °C; \"now\" <or> later & so on.",
    "parameters": {"type": "object", "properties": {
        "city": {"type": "string", "description": "City"}, "days": {"type": "integer", "minimum": 1, "default": 1},
        "unit": {"type": "string", "enum": ["c", "f"]}}, "required": ["city"]}}}
CLOCK = {"type": "function", "function": {"name": "clock", "parameters": {}, "return": {"type": "string"}}}


def call(name, arguments, id=None):
    return ({"id": id} if id else {}) | {"type": "function", "function": {"name": name, "arguments": arguments}}


ASKED = [m("user", "Weather in Zürich?"), m("assistant", tool_calls=[call("get_weather", {"city": "Zürich", "days": 2}, "abcdefghi")])]
ANSWERED = ASKED + [m("tool", "{\"temp\": 21.5}", tool_call_id="abcdefghi"), m("assistant", "It is 21.5 °C.")]
TWO_CALLS = [m("user", "Both?"), m("assistant", "Let me see.", tool_calls=[
    call("get_weather", {"city": "Rome", "days": 1}, "aaaaaaaaa"), call("clock", {}, "bbbbbbbbb")]),
    m("tool", "18", tool_call_id="aaaaaaaaa"), m("tool", "12:00", tool_call_id="bbbbbbbbb")]
STRING_ARGUMENTS = [m("user", "x"), m("assistant", tool_calls=[call("f", "{\"a\": 1}", "123456789")])]
THINKING = [m("user", "q1"), m("assistant", "<think>\nfirst thought\n</think>\n\nanswer one"), m("user", "q2"),
            m("assistant", "<think>\nsecond thought\n</think>\n\nanswer two")]
REASONING = [m("user", "q"), m("assistant", "a", reasoning_content="because")]
PARTS = [m("user", [{"type": "text", "text": "Look: "}, {"type": "image_url", "image_url": {"url": "data:,"}}, {"type": "text", "text": " nice?"}]),
         m("assistant", "Yes."), m("user", []), m("user", {"k": "v"})]
TEXT_PARTS = [m("user", [{"type": "text", "text": " one "}, {"type": "text", "text": "two"}])]
NESTED = [m("user", {"b": [1, 2.5, None, True], "a": {"deep": "é", "list": [{"x": 1}]}}), m("assistant", "text"), m("user", 7)]
DOCS = [{"title": "First", "text": "Alpha.", "year": 1999}, {"title": "second", "text": "Beta."}]
STRINGS = [m("user", s) for s in (" x-y-z\nab x", "hello world-foo-bar-ÀÉß 123x", "12345", "it's o'clock-\tßtraße ǆ")]

GEN, NOGEN = {"add_generation_prompt": True}, {"add_generation_prompt": False}

# (template, tokenizer, messages, extra arguments of apply_chat_template)
CASES = [
    *[("smollm2", "smollm", x, k) for x in (HI, TALK, UNICODE) for k in (GEN, NOGEN)],
    ("smollm2", "smollm", ENDS_OPEN, {"continue_final_message": True}),
    ("smollm2", "smollm", TEXT_PARTS, GEN), ("smollm2", "smollm", ASKED, GEN), ("smollm2", "smollm", HI, {}),
    *[("chatml", "qwen2", x, k) for x in (HI, TALK, UNICODE) for k in (GEN, NOGEN)],
    ("chatml", "qwen2", ENDS_OPEN, {"continue_final_message": True}), ("chatml", "qwen2", [m("user", 5)], GEN),
    *[("llama2-inst", "llama-spm", x, GEN) for x in (HI, TALK, TWO_USERS, UNICODE, ENDS_OPEN, TALK[2:])],
    ("llama2-inst", "llama-spm", ENDS_OPEN, {"continue_final_message": True}),
    *[("llama3-header", "llama-bpe", x, k) for x in (HI, TALK) for k in (
        GEN, NOGEN, GEN | {"tools": [WEATHER]}, GEN | {"tools": [WEATHER, CLOCK], "tools_beside_question": False}, GEN | {"date_string": "1 April 2030"})],
    *[("llama3-header", "llama-bpe", x, GEN | {"tools": [WEATHER]}) for x in (ANSWERED, TWO_CALLS, STRING_ARGUMENTS, TALK[2:])],
    ("llama3-header", "llama-bpe", [m("user", "u"), m("tool", {"t": [1, "é"]})], GEN), ("llama3-header", "llama-bpe", HI, GEN | {"tools": []}),
    ("llama3-header", "llama-bpe", ENDS_OPEN, {"continue_final_message": True}),
    *[("mistral-loop", "llama-spm", x, k) for x in (HI, TALK, ANSWERED, TWO_CALLS) for k in ({}, {"tools": [WEATHER, CLOCK]})],
    ("mistral-loop", "llama-spm", TALK, {"max_turns": 2}), ("mistral-loop", "llama-spm", TWO_USERS, {}),
    ("mistral-loop", "llama-spm", [m("user", "x"), m("assistant", tool_calls=[call("f", {}, "short")])], {}),
    ("mistral-loop", "llama-spm", [m("user", "x"), m("system", "late")], {}),
    *[("qwen-tools", "qwen2", x, k) for x in (HI, TALK, ANSWERED, TWO_CALLS, STRING_ARGUMENTS, THINKING, REASONING)
      for k in (GEN, NOGEN | {"tools": [WEATHER, CLOCK]})],
    ("qwen-tools", "qwen2", HI, GEN | {"enable_thinking": False}), ("qwen-tools", "qwen2", HI, GEN | {"enable_thinking": True}),
    ("qwen-tools", "qwen2", HI, GEN | {"tools": []}), ("qwen-tools", "qwen2", TEXT_PARTS, GEN),
    *[("generation", "qwen2", x, k) for x in (HI, TALK) for k in (GEN, NOGEN)],
    ("oneline-roles", "llama-bpe", TALK, GEN), ("oneline-roles", "llama-bpe", TEXT_PARTS, GEN), ("oneline-roles", "qwen2", PARTS[:2], NOGEN),
    ("strings", "qwen2", STRINGS, {}), ("strings", "qwen2", [m("user", 5)], {}), ("strings", "qwen2", [m("user", "")], {}),
    ("macros", "qwen2", NESTED, {}), ("macros", "qwen2", TALK, {}),
    ("tojson", "qwen2", UNICODE, {}), ("tojson", "qwen2", NESTED, {"tools": [WEATHER]}), ("tojson", "qwen2", ANSWERED, {"tools": [WEATHER, CLOCK]}),
    ("missing", "qwen2", HI, {}), ("missing", "llama-spm", HI, {"name": "Ada", "flag": False}),
    *[("missing", "llama-bpe", HI, {k: True}) for k in (
        "explode", "concat", "index", "mutate", "private", "dunder", "unknown_call", "add_numbers")],
    ("parts", "qwen2", PARTS, GEN), ("parts", "qwen2", TALK, NOGEN), ("parts", "qwen2", [m("user", [{"type": "audio"}])], {}),
    ("parts", "qwen2", ASKED, GEN), ("parts", "qwen2", TEXT_PARTS, {"continue_final_message": True}),
    ("documents", "qwen2", HI, {}), ("documents", "qwen2", HI, {"documents": DOCS}),
    ("documents", "qwen2", TALK, {"documents": DOCS, "style": "loud", "level": 3, "settings": {"b": 1, "a": [None, "x"], "c": 0.5}}),
    ("documents", "qwen2", HI, {"style": "odd"}), ("documents", "qwen2", HI, {"documents": []}),
    ("expressions", "llama-bpe", TALK, {}), ("expressions", "llama-bpe", HI, {}),
    ("syntax-error", "qwen2", HI, {}), ("do-tag", "qwen2", HI, {}),
]


def tokenizer(name):
    return PreTrainedTokenizerFast(tokenizer_file=str(FIXTURES / f"tokenizers/{name}.tokenizer.json"), **TOKENIZERS[name])


def run(tokenizers, template, name, messages, kwargs):
    source = (OUT / f"{template}.jinja").read_text(encoding="utf-8")
    tok = tokenizers[name]
    kwargs = dict(kwargs)
    case = {"template": f"{template}.jinja", "tokenizer": name, "special_tokens": tok.special_tokens_map, "messages": messages}
    case |= {k: kwargs.pop(k) for k in ("tools", "documents") if k in kwargs}
    case["kwargs"] = kwargs
    if "strftime_now" in source:
        case["now"] = NOW.isoformat()
    try:
        given = {k: json.loads(json.dumps(case[k])) for k in ("messages", "tools", "documents", "kwargs") if k in case}
        extra = given.pop("kwargs")
        case["expected"] = tok.apply_chat_template(given.pop("messages"), chat_template=source, tokenize=False, **given, **extra)
    except Exception as e:
        case |= {"error": str(e), "error_type": type(e).__name__}
        print(f"{template}: {type(e).__name__}: {e}")
    return case


def main():
    OUT.mkdir(parents=True, exist_ok=True)
    smollm2 = metadata(gguf.GGUFReader(sys.argv[1]))["tokenizer.chat_template"]
    (OUT / "smollm2.jinja").write_text(smollm2, encoding="utf-8")
    tokenizers = {name: tokenizer(name) for name in TOKENIZERS}
    cases = [run(tokenizers, *c) for c in CASES]
    (OUT / "goldens.json").write_text(
        "[\n" + ",\n".join(json.dumps(c, ensure_ascii=False) for c in cases) + "\n]\n", encoding="utf-8")
    print(f"{len(cases)} cases, transformers {transformers.__version__}")


if __name__ == "__main__":
    main()
