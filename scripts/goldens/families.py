"""Tiny checkpoints of each model family, with the logits of transformers in float32: `fixtures/families/`.

`config.json` has the older spelling (`rope_theta`, `rope_scaling`, `torch_dtype`) that most published checkpoints have;
`config.v5.json` is what transformers 5 itself saved (`rope_parameters`, `dtype`, `layer_types`). Both give the same logits,
which is checked here, as is that each key that changes the mathematics changes these logits.
"""

import copy
import json
import shutil
import tempfile

import torch
from transformers import (
    AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM,
    Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM,
)

from common import FIXTURES, build, forward, save_golden, tokens_for, write_json

WIDE = dict(vocab_size=128, hidden_size=64, intermediate_size=80, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=256, rms_norm_eps=1e-5, bos_token_id=1, eos_token_id=2,
            pad_token_id=None, tie_word_embeddings=False, rope_parameters={"rope_type": "default", "rope_theta": 10000.0})
SMALL = WIDE | dict(hidden_size=48, intermediate_size=72, num_attention_heads=3, num_key_value_heads=1)
TINY = WIDE | dict(hidden_size=32, intermediate_size=48, num_attention_heads=2, num_key_value_heads=1)


def rope(theta, **scaling):
    return {"rope_type": "default", "rope_theta": theta} | scaling


FAMILIES = {
    "llama1": (LlamaForCausalLM, LlamaConfig(**SMALL | dict(num_key_value_heads=3, rms_norm_eps=1e-6))),
    "llama2": (LlamaForCausalLM, LlamaConfig(**WIDE)),
    "llama3": (LlamaForCausalLM, LlamaConfig(**WIDE | dict(num_attention_heads=2, num_key_value_heads=1, rope_parameters=rope(
        500000.0, rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
        original_max_position_embeddings=64)))),
    "llama-linear-rope": (LlamaForCausalLM, LlamaConfig(**TINY | dict(rope_parameters=rope(
        10000.0, rope_type="linear", factor=4.0)))),
    "llama-yarn": (LlamaForCausalLM, LlamaConfig(**TINY | dict(max_position_embeddings=512, rope_parameters=rope(
        10000.0, rope_type="yarn", factor=4.0, original_max_position_embeddings=128)))),
    "llama-bias": (LlamaForCausalLM, LlamaConfig(**TINY | dict(attention_bias=True, mlp_bias=True, hidden_act="gelu_pytorch_tanh"))),
    "mistral": (MistralForCausalLM, MistralConfig(**SMALL | dict(sliding_window=16, head_dim=16))),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config(**WIDE | dict(
        rms_norm_eps=1e-6, tie_word_embeddings=True, rope_parameters=rope(1000000.0), sliding_window=16, max_window_layers=1))),
    "qwen2-window": (Qwen2ForCausalLM, Qwen2Config(**TINY | dict(
        num_hidden_layers=3, use_sliding_window=True, sliding_window=16, max_window_layers=1))),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config(**SMALL | dict(
        num_attention_heads=2, num_key_value_heads=1, head_dim=32, rms_norm_eps=1e-6, rope_parameters=rope(1000000.0)))),
    "smollm2": (LlamaForCausalLM, LlamaConfig(**SMALL | dict(
        num_hidden_layers=3, tie_word_embeddings=True, rope_parameters=rope(100000.0)))),
}


def old_style(saved):
    """The same config as older transformers wrote it."""
    out = dict(saved)
    scaling = dict(out.pop("rope_parameters"))
    out["rope_theta"] = scaling.pop("rope_theta")
    kind = scaling.get("rope_type", "default")
    if kind == "linear":  # the oldest spelling of all
        scaling = {"type": "linear", "factor": scaling["factor"]}
    out["rope_scaling"] = None if kind == "default" else scaling
    out["torch_dtype"] = out.pop("dtype")
    out.pop("layer_types", None)
    if out.get("use_sliding_window") is False:
        out["sliding_window"] = 16  # as published: present, and without effect
    out["transformers_version"] = "4.44.0"
    return dict(sorted(out.items()))


def variants(config):
    """Each altered config that the same weights still fit, by the key altered."""
    def alter(**kw):
        c = copy.deepcopy(config)
        for k, v in kw.items():
            setattr(c, k, v)
        return c

    rp = config.rope_parameters
    yield "rms_norm_eps", alter(rms_norm_eps=1e-3)
    yield "rope_theta", alter(rope_parameters=rp | {"rope_theta": rp["rope_theta"] * 3})
    yield "hidden_act", alter(hidden_act="relu" if config.hidden_act != "relu" else "silu")
    if config.hidden_act != "silu":
        yield "hidden_act=silu", alter(hidden_act="silu")
    if rp["rope_type"] != "default":
        yield "rope_type", alter(rope_parameters={"rope_type": "default", "rope_theta": rp["rope_theta"]})
    for key in ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"):
        if rp.get(key) is not None:
            yield key, alter(rope_parameters=rp | {key: type(rp[key])(rp[key] * 2)})
    if config.model_type != "qwen3":
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        yield "head_dim and head counts", alter(
            head_dim=head_dim // 2, num_attention_heads=config.num_attention_heads * 2,
            num_key_value_heads=config.num_key_value_heads * 2)
    if config.model_type == "mistral":
        yield "sliding_window", alter(sliding_window=15)
        yield "sliding_window=null", alter(sliding_window=None)
    if getattr(config, "use_sliding_window", False):
        yield "sliding_window", alter(sliding_window=15)
        yield "layer_types", alter(layer_types=["full_attention"] * config.num_hidden_layers)
        yield "max_window_layers", alter(layer_types=["sliding_attention"] * config.num_hidden_layers)


def check_sensitivity(name, cls, config, model, tokens, logits):
    """Print what each key does to the logits, and fail where it does too little."""
    state = model.state_dict()
    report = {}
    for key, altered in variants(config):
        altered._attn_implementation = "eager"
        other = cls(altered).float().eval()
        other.load_state_dict(state)
        report[key] = forward(other, tokens)[0]
    if config.tie_word_embeddings is False:
        other = copy.deepcopy(model)
        other.lm_head.weight = other.model.embed_tokens.weight
        report["tie_word_embeddings"] = forward(other, tokens)[0]
    for key in ("bias", "norm.weight"):
        chosen = [n for n in state if n.endswith(key)]
        if chosen:
            other = copy.deepcopy(model)
            other.load_state_dict({n: (torch.full_like(v, float(key != "bias")) if n in chosen else v) for n, v in state.items()})
            report[f"without {key}"] = forward(other, tokens)[0]
    for key, changed in report.items():
        diff = (changed - logits).abs().max().item()
        print(f"  {name}: {key}: {diff:.3g}")
        assert diff > 2e-2, (name, key, diff)


def reload(folder, config_name, dtype=torch.float32):
    """Load as a user would, with the named config."""
    with tempfile.TemporaryDirectory() as tmp:
        for f in folder.glob("model*"):
            shutil.copy(f, tmp)
        shutil.copy(folder / config_name, f"{tmp}/config.json")
        return AutoModelForCausalLM.from_pretrained(tmp, dtype=dtype, attn_implementation="eager").eval()


def write(name, model, tokens, stream=True, shard=None):
    """Save checkpoint, both configs and golden; returns the logits that a float32 load gives."""
    folder = FIXTURES / "families" / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    model.save_pretrained(folder, **({"max_shard_size": shard} if shard else {}))
    (folder / "generation_config.json").unlink(missing_ok=True)
    saved = json.loads((folder / "config.json").read_text())
    write_json(folder / "config.v5.json", saved)
    write_json(folder / "config.json", old_style(saved))
    loaded = reload(folder, "config.json")
    logits = save_golden(folder / "golden.safetensors", loaded, tokens, stream)
    assert torch.equal(logits, forward(reload(folder, "config.v5.json"), tokens)[0]), name
    return logits


def main():
    for i, (name, (cls, config)) in enumerate(FAMILIES.items()):
        seed = 10 + i
        model = build(cls, config, seed)
        tokens = tokens_for(config.vocab_size, seed)
        logits = write(name, model, tokens)
        assert torch.equal(logits, forward(model, tokens)[0]), name
        spread = logits.std(-1).mean().item()
        print(f"{name}: logits std {spread:.2f}, distinct argmax {logits.argmax(-1).unique().numel()}")
        assert 1.0 < spread < 3.5
        check_sensitivity(name, cls, config, model, tokens, logits)
        if name == "llama2":
            write("llama2-sharded-bf16", copy.deepcopy(model).to(torch.bfloat16), tokens, stream=False, shard="90KB")
            write("llama2-f16", copy.deepcopy(model).to(torch.float16), tokens, stream=False)
            assert len(list((FIXTURES / "families/llama2-sharded-bf16").glob("model-*.safetensors"))) == 2


if __name__ == "__main__":
    main()
