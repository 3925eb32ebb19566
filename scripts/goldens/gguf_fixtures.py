"""GGUF fixtures: raw blocks of each format with gguf-py's dequantization, and tiny whole models: `fixtures/gguf/`.

A model `NAME.gguf` has its golden in `NAME.golden.safetensors`: the file's weights, dequantized to float32 by gguf-py,
run by transformers in float32. gguf-py can't quantize K formats, so `quantize_k` below does, simply.
"""

import struct

import gguf
import numpy as np
import torch
from gguf.quants import dequantize, quantize
from safetensors.numpy import save_file
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from common import FIXTURES, build, save_golden, tokens_for
from gguf_model import LAYER, TOP, load, permute

T = gguf.GGMLQuantizationType
OUT = FIXTURES / "gguf"
ROWS, COLS = 4, 512

# Where the float16 scales lie in a block, in bytes; everything else may be any bits.
SCALES = {T.Q4_0: (0,), T.Q4_1: (0, 2), T.Q5_0: (0,), T.Q5_1: (0, 2), T.Q8_0: (0,), T.Q4_K: (0, 2), T.Q5_K: (0, 2), T.Q6_K: (208,)}


def raw_blocks(kind, rng):
    """Random bytes with finite scales, one of them 0, one subnormal and some negative."""
    block, size = gguf.GGML_QUANT_SIZES[kind]
    if kind in (T.F16, T.BF16):
        values = rng.standard_normal((ROWS, COLS)).astype(np.float32)
        values[0, :8] = [0.0, -0.0, 1e-7, -6e-8, 65504.0, -65504.0, 6.1e-5, 1.0]
        return quantize(values, kind)
    raw = rng.integers(0, 256, (ROWS, COLS // block, size), dtype=np.uint8)
    for at in SCALES[kind]:
        scale = (rng.standard_normal(raw.shape[:2]) * 0.05).astype(np.float16)
        scale[0, 0], scale[1, 1] = 0.0, 3e-7
        raw[..., at:at + 2] = scale[..., None].view(np.uint8)
    return raw.reshape(ROWS, -1)


def write_blocks():
    """`TYPE.raw` u8 [4, bytes a row] and `TYPE.f32` f32 [4, 512]."""
    rng, out = np.random.default_rng(7), {}
    for kind in (T.F16, T.BF16, *SCALES):
        raw = np.ascontiguousarray(raw_blocks(kind, rng)).view(np.uint8)
        values = dequantize(raw.view(np.float16) if kind == T.F16 else raw, kind).astype(np.float32)
        assert values.shape == (ROWS, COLS) and np.isfinite(values).all()
        out |= {f"{kind.name}.raw": raw, f"{kind.name}.f32": values}
    save_file(out, OUT / "blocks.safetensors")


def pack_scales(scale, minimum):
    """Eight 6-bit scales and eight 6-bit minima in 12 bytes, as Q4_K and Q5_K keep them."""
    packed = np.zeros((scale.shape[0], 12), np.uint8)
    packed[:, 0:4] = scale[:, :4] | (scale[:, 4:] >> 4) << 6
    packed[:, 4:8] = minimum[:, :4] | (minimum[:, 4:] >> 4) << 6
    packed[:, 8:12] = (scale[:, 4:] & 15) | (minimum[:, 4:] & 15) << 4
    return packed


def f16_bytes(x):
    return x.astype(np.float16)[:, None].view(np.uint8)


def safe(x):
    return np.where(x == 0, 1, x)


def quantize_k(w, kind):
    """Round to nearest with per-sub-block extremes; not llama.cpp's search, but valid blocks of the same layout."""
    blocks = w.reshape(-1, 256).astype(np.float32)
    n = len(blocks)
    if kind == T.Q6_K:
        sub = blocks.reshape(n, 16, 16)
        scale = np.abs(sub).max(-1) / 31
        d = np.float32(np.float16(scale.max(-1) / 127))
        scale = np.clip(np.rint(scale / safe(d)[:, None]), -128, 127).astype(np.int8)
        q = np.clip(np.rint(sub / safe(d[:, None] * scale)[..., None]), -32, 31).astype(np.int16).reshape(n, 2, 4, 32) + 32
        q = q.astype(np.uint8)
        low = np.stack([(q[:, :, 0] & 15) | (q[:, :, 2] & 15) << 4, (q[:, :, 1] & 15) | (q[:, :, 3] & 15) << 4], 2)
        high = (q[:, :, 0] >> 4) | (q[:, :, 1] >> 4) << 2 | (q[:, :, 2] >> 4) << 4 | (q[:, :, 3] >> 4) << 6
        raw = np.concatenate([low.reshape(n, 128), high.reshape(n, 64), scale.view(np.uint8), f16_bytes(d)], 1)
    else:
        bits = {T.Q4_K: 4, T.Q5_K: 5}[kind]
        sub = blocks.reshape(n, 8, 32)
        minimum = np.maximum(-sub.min(-1), 0)
        scale = (sub.max(-1) + minimum) / (2**bits - 1)
        d, dmin = (np.float32(np.float16(x.max(-1) / 63)) for x in (scale, minimum))
        scale = np.clip(np.rint(scale / safe(d)[:, None]), 0, 63).astype(np.uint8)
        minimum = np.clip(np.rint(minimum / safe(dmin)[:, None]), 0, 63).astype(np.uint8)
        q = (sub + (dmin[:, None] * minimum)[..., None]) / safe(d[:, None] * scale)[..., None]
        q = np.clip(np.rint(q), 0, 2**bits - 1).astype(np.uint8)
        pairs = q.reshape(n, 4, 2, 32)
        low = ((pairs[:, :, 0] & 15) | (pairs[:, :, 1] & 15) << 4).reshape(n, 128)
        parts = [f16_bytes(d), f16_bytes(dmin), pack_scales(scale, minimum)]
        if bits == 5:
            parts.append(sum((q[:, i] >> 4) << i for i in range(8)).astype(np.uint8))
        raw = np.concatenate(parts + [low], 1)
    raw = raw.reshape(w.shape[0], -1)
    error = np.abs(dequantize(raw, kind).reshape(w.shape) - w).max()
    assert error < 0.2 * np.abs(w).max(), (kind, error)
    return raw


def vocabulary(n):
    """A toy `llama` vocabulary: three specials, 64 of the byte tokens, then made-up pieces."""
    tokens = ["<unk>", "<s>", "</s>"] + [f"<0x{i:02X}>" for i in range(10, 74)]
    types = [2, 3, 3] + [6] * 64
    pieces = ["▁"] + [chr(c) for c in range(97, 123)] + [f"▁{chr(c)}" for c in range(97, 123)] + [f"{a}{b}" for a in "aeiou" for b in "nrst"]
    pieces = pieces[:n - len(tokens)]
    return tokens + pieces, types + [1] * len(pieces), [0.0] * len(tokens) + [-float(i) for i in range(len(pieces))]


def write_model(name, model, choose, tied):
    """The model as a GGUF file; `choose(part)` gives the type of a matrix."""
    c = model.config
    arch = c.model_type
    w = gguf.GGUFWriter(OUT / f"{name}.gguf", arch)
    w.add_name(name)
    if name == "llama-q5_1":
        w.add_custom_alignment(64)
    w.add_file_type({T.F16: 1, T.Q4_0: 2, T.Q8_0: 7, T.Q5_1: 9, T.Q4_K: 15}[choose("ffn_gate")])
    w.add_block_count(c.num_hidden_layers)
    w.add_context_length(c.max_position_embeddings)
    w.add_embedding_length(c.hidden_size)
    w.add_feed_forward_length(c.intermediate_size)
    w.add_head_count(c.num_attention_heads)
    w.add_head_count_kv(c.num_key_value_heads)
    w.add_rope_freq_base(c.rope_parameters["rope_theta"])
    w.add_layer_norm_rms_eps(c.rms_norm_eps)
    w.add_vocab_size(c.vocab_size)
    if arch == "llama":
        w.add_rope_dimension_count(c.hidden_size // c.num_attention_heads)
    tokens, types, scores = vocabulary(c.vocab_size)
    assert len(tokens) == c.vocab_size
    w.add_tokenizer_model("llama")
    w.add_tokenizer_pre("default")
    w.add_token_list(tokens)
    w.add_token_scores(scores)
    w.add_token_types(types)
    w.add_bos_token_id(1)
    w.add_eos_token_id(2)
    w.add_unk_token_id(0)
    w.add_add_bos_token(True)
    w.add_quantization_version(2)
    state = {k: v.numpy() for k, v in model.state_dict().items()}

    def add(gguf_name, hf, part, bias=False):
        for kind in ("weight", "bias"):
            if (value := state.get(f"{hf}.{kind}")) is None:
                continue
            if arch == "llama" and part in ("attn_q", "attn_k"):
                value = permute(value, c.num_attention_heads if part == "attn_q" else c.num_key_value_heads)
            value = np.ascontiguousarray(value)
            if value.ndim == 1:
                w.add_tensor(f"{gguf_name}.{kind}", value)
                continue
            q = choose(part)
            raw = quantize_k(value, q) if q in (T.Q4_K, T.Q5_K, T.Q6_K) else quantize(value, q)
            w.add_tensor(f"{gguf_name}.{kind}", raw, raw_dtype=q)

    for part, hf in TOP.items():
        if not (tied and part == "output"):
            add(part, hf, part)
    for i in range(c.num_hidden_layers):
        for part, hf in LAYER.items():
            add(f"blk.{i}.{part}", f"model.layers.{i}.{hf}", part)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()


def golden(name, original, seed):
    """Run the file as written, and say how far quantization took it from the model it came from."""
    loaded, _ = load(OUT / f"{name}.gguf")
    tokens = tokens_for(loaded.config.vocab_size, seed)
    logits = save_golden(OUT / f"{name}.golden.safetensors", loaded, tokens, stream=False)
    close = torch.cosine_similarity(logits, original(input_ids=tokens[None]).logits[0], dim=-1).mean().item()
    print(f"{name}: {(OUT / f'{name}.gguf').stat().st_size} bytes, std {logits.std(-1).mean():.2f}, cosine to the original {close:.4f}")
    assert close > 0.6


BASE = dict(vocab_size=128, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
            max_position_embeddings=256, rms_norm_eps=1e-5, bos_token_id=1, eos_token_id=2, pad_token_id=None,
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0})


def main():
    OUT.mkdir(parents=True, exist_ok=True)
    write_blocks()
    untied = BASE | dict(tie_word_embeddings=False)
    llama = build(LlamaForCausalLM, LlamaConfig(**untied), 50)
    tied = build(LlamaForCausalLM, LlamaConfig(**BASE | dict(tie_word_embeddings=True)), 51)
    qwen2 = build(Qwen2ForCausalLM, Qwen2Config(**BASE | dict(tie_word_embeddings=True, rms_norm_eps=1e-6, rope_parameters={
        "rope_type": "default", "rope_theta": 1000000.0})), 52)
    wide = build(LlamaForCausalLM, LlamaConfig(**untied | dict(
        hidden_size=256, intermediate_size=256, num_hidden_layers=1, num_key_value_heads=1)), 53)
    q8_embedding = lambda q: lambda part: T.Q8_0 if part in ("token_embd", "output") else q
    k_mix = {"token_embd": T.Q4_K, "output": T.Q6_K, "attn_v": T.Q6_K, "ffn_down": T.Q6_K, "attn_output": T.Q5_K, "ffn_up": T.Q5_K}
    for name, model, choose in [
        ("llama-f16", llama, lambda part: T.F16),
        ("llama-q4_0", llama, q8_embedding(T.Q4_0)),
        ("llama-q5_1", llama, q8_embedding(T.Q5_1)),
        ("llama-q8_0", llama, lambda part: T.Q8_0),
        ("llama-tied-q8_0", tied, lambda part: T.Q8_0),
        ("llama-q4_k_m", wide, lambda part: k_mix.get(part, T.Q4_K)),
        ("qwen2-q4_0", qwen2, q8_embedding(T.Q4_0)),
        ("qwen2-q8_0", qwen2, lambda part: T.Q8_0),
    ]:
        write_model(name, model, choose, tied=model.config.tie_word_embeddings)
        golden(name, model, 50)
    # Version 2 has the same layout as version 3: the same golden holds.
    raw = bytearray((OUT / "llama-q4_0.gguf").read_bytes())
    raw[4:8] = struct.pack("<I", 2)
    (OUT / "llama-q4_0-v2.gguf").write_bytes(raw)
    assert torch.equal(load(OUT / "llama-q4_0-v2.gguf")[0].lm_head.weight, load(OUT / "llama-q4_0.gguf")[0].lm_head.weight)


if __name__ == "__main__":
    main()
