"""A GGUF file's weights, dequantized by gguf-py to float32, in a transformers model; and the file's tokenizer."""

import gguf
import numpy as np
import tokenizers
import torch
from gguf.quants import dequantize
from tokenizers import decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

LAYER = {
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}
TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}

DIGITS_APART = pre_tokenizers.Sequence([
    pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)])


def hf_name(name):
    """`blk.0.attn_q.weight` in transformers' naming."""
    stem, _, kind = name.rpartition(".")
    if stem in TOP:
        return f"{TOP[stem]}.{kind}"
    _, layer, part = stem.split(".")
    return f"model.layers.{layer}.{LAYER[part]}.{kind}"


def permute(w, n_heads):
    """Rows of q or k from transformers' halves order to the interleaved pairs that llama.cpp's converter writes."""
    return w.reshape(n_heads, 2, w.shape[0] // n_heads // 2, *w.shape[1:]).swapaxes(1, 2).reshape(w.shape)


def unpermute(w, n_heads):
    """The inverse of `permute`."""
    return w.reshape(n_heads, w.shape[0] // n_heads // 2, 2, *w.shape[1:]).swapaxes(1, 2).reshape(w.shape)


def metadata(reader):
    return {k: f.contents() for k, f in reader.fields.items()}


def load(path):
    """The float32 eager model of a `llama` or `qwen2` GGUF file, and the file's metadata."""
    reader = gguf.GGUFReader(path)
    meta = metadata(reader)
    arch = meta["general.architecture"]
    key = lambda name, default=None: meta.get(f"{arch}.{name}", default)
    heads, kv_heads = key("attention.head_count"), key("attention.head_count_kv")
    state = {}
    for t in reader.tensors:
        w = np.array(dequantize(t.data, t.tensor_type), dtype=np.float32).reshape([int(n) for n in reversed(t.shape)])
        if arch == "llama" and ".attn_q." in t.name:
            w = unpermute(w, heads)
        if arch == "llama" and ".attn_k." in t.name:
            w = unpermute(w, kv_heads)
        state[hf_name(t.name)] = torch.from_numpy(np.ascontiguousarray(w))
    tied = "lm_head.weight" not in state
    common = dict(
        vocab_size=state["model.embed_tokens.weight"].shape[0], hidden_size=key("embedding_length"),
        intermediate_size=key("feed_forward_length"), num_hidden_layers=key("block_count"), num_attention_heads=heads,
        num_key_value_heads=kv_heads, max_position_embeddings=key("context_length"),
        rms_norm_eps=float(np.format_float_positional(np.float32(key("attention.layer_norm_rms_epsilon")))),
        rope_parameters={"rope_type": "default", "rope_theta": key("rope.freq_base", 10000.0)}, tie_word_embeddings=tied,
        bos_token_id=meta.get("tokenizer.ggml.bos_token_id"), eos_token_id=meta.get("tokenizer.ggml.eos_token_id"),
        pad_token_id=meta.get("tokenizer.ggml.padding_token_id"), attn_implementation="eager")
    cls, config = {"llama": (LlamaForCausalLM, LlamaConfig), "qwen2": (Qwen2ForCausalLM, Qwen2Config)}[arch]
    model = cls(config(**common)).float().eval()
    if tied:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model.load_state_dict(state, strict=True)
    return model, meta


def smollm2_tokenizer(meta):
    """The tokenizer that `tokenizer.ggml.pre = smollm` names: each digit apart, then GPT-2's split.

    Transformers' own conversion from GGUF leaves the digit split out; the published tokenizer has it.
    """
    tokens, types = meta["tokenizer.ggml.tokens"], meta["tokenizer.ggml.token_type"]
    merges = [tuple(m.split(" ")) for m in meta["tokenizer.ggml.merges"]]
    tok = tokenizers.Tokenizer(models.BPE({t: i for i, t in enumerate(tokens)}, merges))
    tok.pre_tokenizer = DIGITS_APART
    tok.decoder = decoders.ByteLevel()
    tok.add_special_tokens([tokenizers.AddedToken(t, normalized=False, special=True) for t, k in zip(tokens, types) if k == 3])
    named = {k: tokens[meta[f"tokenizer.ggml.{v}_token_id"]]
             for k, v in {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}.items()}
    return PreTrainedTokenizerFast(
        tokenizer_object=tok, chat_template=meta["tokenizer.chat_template"], model_max_length=8192,
        clean_up_tokenization_spaces=False, **named)
