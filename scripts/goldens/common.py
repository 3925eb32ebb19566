"""Shared by the golden generators: tiny random models whose logits depend visibly on every part, and their goldens.

Everything is float32, eager attention, one thread, fixed seeds.
"""

import json
import os
import pathlib

os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")

import torch
import transformers
from safetensors.torch import save_file

FIXTURES = pathlib.Path(__file__).resolve().parents[2] / "fixtures"
N_TOKENS = 48

transformers.utils.logging.disable_progress_bar()
torch.set_num_threads(1)
torch.set_grad_enabled(False)


def randomize(model, seed):
    """Random weights, none of them neutral: sharp attention, norm weights away from 1, biases away from 0.

    Embeddings are small, so that the norms' epsilon is visible against their mean square.
    """
    g = torch.Generator().manual_seed(seed)
    tied = model.config.tie_word_embeddings
    for name, p in sorted(model.named_parameters()):
        normal = torch.randn(p.shape, generator=g)
        if "norm" in name:
            p.copy_(torch.rand(p.shape, generator=g) + 0.5)
        elif name.endswith("bias"):
            p.copy_(normal * 0.5)
        elif "embed_tokens" in name:
            p.copy_(normal * (0.2 if tied else 0.1))
        else:
            gain = {"q_proj": 1.6, "k_proj": 1.6, "lm_head": 2.0}.get(name.split(".")[-2], 1.0)
            p.copy_(normal * gain / p.shape[-1] ** 0.5)


def build(cls, config, seed):
    """A float32 eager model of class `cls` with the weights of `randomize`."""
    config._attn_implementation = "eager"
    model = cls(config).float().eval()
    randomize(model, seed)
    return model


def tokens_for(vocab, seed, n=N_TOKENS):
    """`n` random ids, first of them 1."""
    g = torch.Generator().manual_seed(seed + 1000)
    tokens = torch.randint(0, vocab, (n,), generator=g)
    tokens[0] = 1
    return tokens


def forward(model, tokens):
    """Logits `[n, vocab]` and the residual stream: after the embedding, then after each layer, before the final norm."""
    stream = []
    layers = model.model.layers
    hooks = [layers[0].register_forward_pre_hook(lambda m, a, k: stream.append(a[0] if a else k["hidden_states"]), with_kwargs=True)]
    hooks += [l.register_forward_hook(lambda m, a, o: stream.append(o[0] if isinstance(o, tuple) else o)) for l in layers]
    logits = model(input_ids=tokens[None], use_cache=False).logits[0]
    for h in hooks:
        h.remove()
    assert logits.dtype == torch.float32 and len(stream) == len(layers) + 1
    return logits, [s[0] for s in stream]


def save_golden(path, model, tokens, stream=True):
    """Write `tokens` i32 [n], `logits` f32 [n, vocab] and, if wanted, the residual stream `hidden.I` f32 [n, hidden]."""
    logits, hidden = forward(model, tokens)
    out = {"tokens": tokens.to(torch.int32), "logits": logits.contiguous()}
    if stream:
        out |= {f"hidden.{i}": h.contiguous().clone() for i, h in enumerate(hidden)}
    save_file(out, path)
    return logits


def write_json(path, value):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
