"""SmolLM2-135M-Instruct (Q4_1 GGUF) in float32 transformers: greedy continuations, logits, perplexity.

Usage: smollm2.py GGUF [--hf FOLDER] [--only greedy|perplexity|hf]. `--hf` also writes the dequantized model as a
Hugging Face folder (float32), which is not part of the repository.
"""

import argparse
import hashlib
import json
import math
import pathlib
import time

import torch
from safetensors.torch import save_file

from common import FIXTURES, write_json
from gguf_model import load, smollm2_tokenizer

N_NEW = 64
N_CONTEXT = 4096
LICENSE = "/usr/share/common-licenses/GPL-3"

PLAIN = [
    "The capital of France is",
    "Once upon a time, in a small village by the sea, there lived an old fisherman who",
    "def fibonacci(n):\n    \"\"\"Return the n-th Fibonacci number.\"\"\"\n",
    "Q: What is 17 + 25?\nA:",
    "The three laws of thermodynamics are:\n1.",
    "import numpy as np\n\nclass Matrix:\n    def __init__(self, rows, cols):\n",
    "Photosynthesis is the process by which",
    "In 1969, Neil Armstrong and Buzz Aldrin",
    "Dear Sir or Madam,\n\nI am writing to",
    "La Révolution française a commencé en",
    "{\"name\": \"Alice\", \"age\": 30, \"hobbies\": [",
    "The",
]
CHAT = [
    [{"role": "user", "content": "What is the capital of Italy?"}],
    [{"role": "user", "content": "Write a haiku about rain."}],
    [{"role": "system", "content": "You answer in one short sentence."}, {"role": "user", "content": "Why is the sky blue?"}],
    [{"role": "user", "content": "Give me three tips for sleeping better."}],
    [{"role": "user", "content": "Hi! My name is Ada."}, {"role": "assistant", "content": "Hello Ada, nice to meet you!"},
     {"role": "user", "content": "What is my name, and how many letters has it?"}],
    [{"role": "user", "content": "Write a Python function that reverses a string."}],
    [{"role": "system", "content": "You are a pirate."}, {"role": "user", "content": "Tell me about the sea, please. 🏴‍☠️"}],
    [{"role": "user", "content": "Summarize the following text in two sentences.\n\n" + (
        "A lighthouse is a tower that sends out light from a system of lamps and lenses, and serves as a beacon for navigation "
        "by ships. Lighthouses mark dangerous coastlines, hazardous shoals, reefs, rocks, and safe entries to harbors. Once "
        "widely used, the number of working lighthouses has declined, because they are costly to maintain and have become "
        "uneconomical since much cheaper, more sophisticated, and more effective electronic navigation came into use. ") * 2}],
]


def greedy(model, prompt):
    """64 argmax tokens with a KV cache, the two largest logits of each, and the logits of the last 4 prompt positions."""
    out = model(input_ids=torch.tensor([prompt]), use_cache=True)
    prompt_logits, logits = out.logits[0, -4:].clone(), out.logits[0, -1]
    output, values, ids = [], [], []
    for _ in range(N_NEW):
        top = logits.topk(2)
        output.append(top.indices[0].item())
        values.append([round(v, 5) for v in top.values.tolist()])
        ids.append(top.indices.tolist())
        out = model(input_ids=torch.tensor([output[-1:]]), past_key_values=out.past_key_values, use_cache=True)
        logits = out.logits[0, -1]
    return {"output": output, "top2_logits": values, "top2_ids": ids}, prompt_logits


def write_greedy(model, tokenizer, source):
    cases, logits = [], {}
    prompts = [(text, None) for text in PLAIN]
    prompts += [(tokenizer.apply_chat_template(m, tokenize=False, add_generation_prompt=True), m) for m in CHAT]
    for i, (text, messages) in enumerate(prompts):
        start = time.time()
        prompt = tokenizer(text, add_special_tokens=False).input_ids
        result, last = greedy(model, prompt)
        case = {"text": text, "prompt": prompt} | result | {"output_text": tokenizer.decode(result["output"])}
        cases.append(({"messages": messages} if messages else {}) | case)
        if i in (0, len(PLAIN)):
            last = last if i == 0 else last[-1:]  # to keep the file small
            logits |= {f"logits.{i}": last, f"prompt.{i}": torch.tensor(prompt, dtype=torch.int32)}
        margin = min(a - b for a, b in result["top2_logits"])
        print(f"{i}: {len(prompt)} tokens, least margin {margin:.4f}, {time.time() - start:.1f} s, {case['output_text']!r}", flush=True)
    lines = ",\n".join(compact(c) for c in cases)
    header = compact({"source": source, "n_new": N_NEW})[:-1]
    (FIXTURES / "smollm2").mkdir(parents=True, exist_ok=True)
    (FIXTURES / "smollm2/greedy.json").write_text(f'{header}, "cases": [\n{lines}\n]}}\n', encoding="utf-8")
    save_file({k: v.contiguous() for k, v in logits.items()}, FIXTURES / "smollm2/logits.safetensors")


def compact(value):
    return json.dumps(value, ensure_ascii=False)


def write_perplexity(model, tokenizer, source):
    text = pathlib.Path(LICENSE).read_text(encoding="utf-8")
    tokens = tokenizer(text, add_special_tokens=False).input_ids[:N_CONTEXT]
    assert len(tokens) == N_CONTEXT
    ids = torch.tensor(tokens)
    hidden = model.model(input_ids=ids[None], use_cache=False).last_hidden_state[0]
    nll = []
    for at in range(0, N_CONTEXT - 1, 256):
        rows = hidden[at:min(at + 256, N_CONTEXT - 1)]
        target = ids[at + 1:at + 1 + rows.shape[0]]
        logp = model.lm_head(rows).log_softmax(-1)
        nll.append(-logp.gather(1, target[:, None])[:, 0].double())
    mean = torch.cat(nll).mean().item()
    print(f"mean NLL {mean:.6f}, perplexity {math.exp(mean):.5f}")
    (FIXTURES / "smollm2").mkdir(parents=True, exist_ok=True)
    (FIXTURES / "smollm2/perplexity.json").write_text(compact({
        "source": source, "text": "the first 4096 tokens of the GNU GPL, version 3, without a BOS token",
        "n_positions": N_CONTEXT - 1, "mean_nll": mean, "perplexity": math.exp(mean),
        "mean_nll_by_256": [round(n.mean().item(), 6) for n in nll], "tokens": tokens}) + "\n", encoding="utf-8")


def write_hf(model, tokenizer, folder):
    """The chat template in both places: `chat_template.jinja` and, as older checkpoints have it, `tokenizer_config.json`."""
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder, save_jinja_files=False)
    (pathlib.Path(folder) / "chat_template.jinja").write_text(tokenizer.chat_template, encoding="utf-8")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("gguf")
    parser.add_argument("--hf")
    parser.add_argument("--only", choices=["greedy", "perplexity", "hf"])
    args = parser.parse_args()
    source = {"file": pathlib.Path(args.gguf).name, "sha256": hashlib.sha256(pathlib.Path(args.gguf).read_bytes()).hexdigest()}
    model, meta = load(args.gguf)
    tokenizer = smollm2_tokenizer(meta)
    if args.hf:
        write_hf(model, tokenizer, args.hf)
    if args.only in (None, "greedy"):
        write_greedy(model, tokenizer, source)
    if args.only in (None, "perplexity"):
        write_perplexity(model, tokenizer, source)


if __name__ == "__main__":
    main()
