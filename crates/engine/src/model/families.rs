//! Model families: from what a checkpoint declares to a spec and the names of its weights.
//!
//! The only file that knows vendors' names. A family is a pure function that starts from the common dense decoder and
//! changes what differs; a new one is a function, a table row and two fixtures.

use std::path::Path;

use kwire_kernels::{Activation, AttentionOp, Rope, RopePairing};
use serde_json::{Map, Number, Value};

use super::{
    checkpoint::{Meta, MetaValue, TensorInfo},
    config::{Fields, HfConfig, ModelError},
    rope::{self, MAX_CONTEXT, Scaling},
    spec::{AttentionSpec, DecoderSpec, LayerRole, LayerSpec, MlpSpec, WeightNames},
};

/// GGUF tensor of factors that divide the frequencies (Llama 3.1's scaling).
pub(crate) const ROPE_FACTORS: &str = "rope_freqs.weight";

// Bounds that no real model comes near and that keep products of sizes far from overflow.
const MAX_WIDTH: usize = 1 << 20;
const MAX_VOCAB: usize = 1 << 24;
const MAX_LAYERS: usize = 4096;

type HfFamily = fn(&Fields) -> Result<DecoderSpec, ModelError>;
type GgufFamily = fn(&GgufConfig<'_>) -> Result<DecoderSpec, ModelError>;

/// By `architectures[0]` of `config.json`.
const HF_FAMILIES: [(&str, HfFamily); 4] = [
    ("LlamaForCausalLM", llama),
    ("MistralForCausalLM", mistral),
    ("Qwen2ForCausalLM", qwen2),
    ("Qwen3ForCausalLM", qwen3),
];

/// By `general.architecture` of a GGUF file.
const GGUF_FAMILIES: [(&str, GgufFamily); 3] = [("llama", gguf_llama), ("qwen2", gguf_qwen2), ("qwen3", gguf_qwen3)];

/// Llama 1 to 3 and everything published in its shape (TinyLlama, SmolLM2, ...).
fn llama(c: &Fields) -> Result<DecoderSpec, ModelError> {
    let mut spec = dense(c, c.opt_count("num_key_value_heads", MAX_WIDTH)?, None)?;
    let (bias, mlp_bias) = (c.flag("attention_bias")?, c.flag("mlp_bias")?);
    for layer in &mut spec.layers {
        layer.attention.qkv_bias = bias;
        layer.attention.out_bias = bias;
        layer.mlp.bias = mlp_bias;
    }
    Ok(spec)
}

/// Mistral: every layer sees a sliding window, where there is one.
fn mistral(c: &Fields) -> Result<DecoderSpec, ModelError> {
    let mut spec = dense(c, Some(c.count("num_key_value_heads", MAX_WIDTH)?), None)?;
    let window = c.opt_count("sliding_window", MAX_CONTEXT)?;
    spec.layers.iter_mut().for_each(|layer| layer.attention.op.window = window);
    Ok(spec)
}

/// Qwen 2 and 2.5: biases on q, k and v; windows on the upper layers, if switched on.
fn qwen2(c: &Fields) -> Result<DecoderSpec, ModelError> {
    let mut spec = dense(c, Some(c.count("num_key_value_heads", MAX_WIDTH)?), None)?;
    spec.layers.iter_mut().for_each(|layer| layer.attention.qkv_bias = true);
    upper_windows(c, &mut spec)?;
    Ok(spec)
}

/// Qwen 3: a norm on each head of q and k, heads of their own size.
fn qwen3(c: &Fields) -> Result<DecoderSpec, ModelError> {
    let mut spec = dense(c, Some(c.count("num_key_value_heads", MAX_WIDTH)?), Some(128))?;
    let bias = c.flag("attention_bias")?;
    for layer in &mut spec.layers {
        layer.attention.qk_norm_eps = Some(layer.norm_eps);
        layer.attention.qkv_bias = bias;
        layer.attention.out_bias = bias;
    }
    upper_windows(c, &mut spec)?;
    Ok(spec)
}

fn gguf_llama(g: &GgufConfig<'_>) -> Result<DecoderSpec, ModelError> {
    // The converter permutes the rows of q and k from Hugging Face's layout to neighbouring pairs.
    gguf_dense(g, RopePairing::Interleaved)
}

fn gguf_qwen2(g: &GgufConfig<'_>) -> Result<DecoderSpec, ModelError> {
    gguf_dense(g, RopePairing::Half)
}

fn gguf_qwen3(g: &GgufConfig<'_>) -> Result<DecoderSpec, ModelError> {
    let mut spec = gguf_dense(g, RopePairing::Half)?;
    spec.layers.iter_mut().for_each(|layer| layer.attention.qk_norm_eps = Some(layer.norm_eps));
    Ok(spec)
}

/// Spec and names for a Hugging Face config.
pub(crate) fn from_hf(config: &HfConfig) -> Result<(DecoderSpec, WeightNames), ModelError> {
    let c = config.fields();
    let name = c.get("architectures").and_then(|a| a.get(0)).and_then(Value::as_str);
    let known = || format!("one of {}", HF_FAMILIES.map(|(name, _)| name).join(", "));
    let name = name.ok_or_else(|| c.wrong("architectures", known()))?;
    let Some((_, family)) = HF_FAMILIES.iter().find(|(known, _)| *known == name) else {
        return Err(c.unsupported("architectures", format!("this release runs {}", known())));
    };
    if c.get("quantization_config").is_some() {
        let next = "use the F16 or BF16 checkpoint, or a GGUF file of the quantized model";
        return Err(c.unsupported("quantization_config", next));
    }
    let spec = family(&c)?;
    c.finish(HARMLESS)?;
    let names = WeightNames { ignored: if spec.tied { HF_IGNORED_TIED } else { HF_IGNORED }, ..HF_NAMES };
    Ok((spec, names))
}

/// The pre-norm decoder that all families share: RMS norms, grouped-query attention, rotation, gated MLP. Without
/// `kv_heads` each head has keys and values of its own; `head_dim` is what a config that has none means, if not
/// `hidden_size` shared out among the heads.
fn dense(c: &Fields, kv_heads: Option<usize>, head_dim: Option<usize>) -> Result<DecoderSpec, ModelError> {
    let hidden = c.count("hidden_size", MAX_WIDTH)?;
    let heads = c.count("num_attention_heads", MAX_WIDTH)?;
    let head_dim = match c.opt_count("head_dim", MAX_WIDTH)?.or(head_dim) {
        Some(n) => n,
        None if hidden % heads == 0 => hidden / heads,
        None => return Err(c.wrong("num_attention_heads", format!("a divisor of hidden_size, {hidden}"))),
    };
    let activation = match c.opt_str("hidden_act")? {
        None | Some("silu" | "swish") => Activation::Silu,
        Some("gelu_pytorch_tanh" | "gelu_new") => Activation::GeluTanh,
        Some("gelu") => Activation::Gelu,
        Some(_) => return Err(c.unsupported("hidden_act", "silu, gelu and gelu_pytorch_tanh are")),
    };
    let (theta, scaling) = rope::from_hf(c)?;
    let parts = Dense {
        n_vocab: c.count("vocab_size", MAX_VOCAB)?,
        hidden,
        n_layers: c.count("num_hidden_layers", MAX_LAYERS)?,
        heads,
        kv_heads: kv_heads.unwrap_or(heads),
        head_dim,
        width: c.count("intermediate_size", MAX_WIDTH)?,
        activation,
        norm_eps: c.opt_positive("rms_norm_eps")?.unwrap_or(1e-6) as f32,
        tied: c.flag("tie_word_embeddings")?,
        max_positions: scaling.max_positions(c.count("max_position_embeddings", MAX_CONTEXT)?),
        rope: scaling.rope(theta, head_dim, RopePairing::Half),
    };
    parts.spec().map_err(|(what, expected)| c.wrong(what.hf, expected))
}

/// Windows by `layer_types`, or on layers from `max_window_layers` on; none unless `use_sliding_window`.
fn upper_windows(c: &Fields, spec: &mut DecoderSpec) -> Result<(), ModelError> {
    let n_layers = spec.layers.len();
    let window = c.opt_count("sliding_window", MAX_CONTEXT)?;
    let window = if c.flag("use_sliding_window")? { window } else { None };
    let first = match c.get("max_window_layers") {
        None => 28,
        Some(v) => v.as_u64().ok_or_else(|| c.wrong("max_window_layers", "an integer of at least 0"))?,
    };
    let types = match c.get("layer_types") {
        None => None,
        Some(Value::Array(types)) if types.len() == n_layers => Some(types),
        Some(_) => return Err(c.wrong("layer_types", format!("a list of {n_layers} layer types"))),
    };
    for (i, layer) in spec.layers.iter_mut().enumerate() {
        let windowed = match types.map(|t| t[i].as_str()) {
            None => i as u64 >= first,
            Some(Some("full_attention")) => false,
            Some(Some("sliding_attention")) if window.is_some() => true,
            Some(Some("sliding_attention")) => {
                return Err(c.wrong("sliding_window", "a window, as layer_types has sliding_attention"));
            }
            Some(_) => return Err(c.unsupported("layer_types", "full_attention and sliding_attention are")),
        };
        layer.attention.op.window = if windowed { window } else { None };
    }
    Ok(())
}

/// What a GGUF file says, without the `<arch>.` before its keys.
struct GgufConfig<'a> {
    fields: Fields,
    tensor: &'a dyn Fn(&str) -> Option<&'a TensorInfo>,
    rope_factors: Option<&'a [f32]>,
}

impl GgufConfig<'_> {
    fn has(&self, name: &str) -> bool {
        (self.tensor)(name).is_some()
    }
}

/// Spec and names for a GGUF file. `tensor` looks tensors up; `rope_factors` are the values of [`ROPE_FACTORS`].
pub(crate) fn from_gguf<'a>(
    path: &Path,
    meta: &Meta,
    tensor: &'a dyn Fn(&str) -> Option<&'a TensorInfo>,
    rope_factors: Option<&'a [f32]>,
) -> Result<(DecoderSpec, WeightNames), ModelError> {
    let general = meta.get("general.architecture").map(|v| ("general.architecture".to_owned(), json(v)));
    let general = Fields::new(path, "", general.into_iter().collect());
    let known = || format!("one of {}", GGUF_FAMILIES.map(|(name, _)| name).join(", "));
    let arch =
        general.opt_str("general.architecture")?.ok_or_else(|| general.wrong("general.architecture", known()))?;
    let Some((arch, family)) = GGUF_FAMILIES.iter().find(|(known, _)| *known == arch) else {
        return Err(general.unsupported("general.architecture", format!("this release runs {}", known())));
    };
    let prefix = format!("{arch}.");
    let mut map: Map<String, Value> =
        meta.iter().filter_map(|(key, value)| Some((key.strip_prefix(&prefix)?.to_owned(), json(value)))).collect();
    map.sort_keys();
    let g = GgufConfig { fields: Fields::new(path, &prefix, map), tensor, rope_factors };
    let spec = family(&g)?;
    g.fields.finish(GGUF_HARMLESS)?;
    Ok((spec, GGUF_NAMES))
}

/// A metadata value as JSON, so that both formats are read the same way. Arrays stay opaque.
fn json(value: &MetaValue) -> Value {
    match value {
        MetaValue::U64(n) => Value::from(*n),
        MetaValue::I64(n) => Value::from(*n),
        MetaValue::F32(x) => Number::from_f64(f64::from(*x)).map_or_else(|| Value::from(x.to_string()), Value::Number),
        MetaValue::F64(x) => Number::from_f64(*x).map_or_else(|| Value::from(x.to_string()), Value::Number),
        MetaValue::Bool(b) => Value::from(*b),
        MetaValue::Str(s) => Value::from(s.as_str()),
        MetaValue::Array(a) => Value::from(vec![format!("{} elements", a.len())]),
    }
}

/// The shared decoder of a GGUF file (gguf.md, "LLM"); biases are there if their tensors are.
fn gguf_dense(g: &GgufConfig<'_>, pairing: RopePairing) -> Result<DecoderSpec, ModelError> {
    let f = &g.fields;
    let hidden = f.count("embedding_length", MAX_WIDTH)?;
    let heads = f.count("attention.head_count", MAX_WIDTH)?;
    let head_dim = match f.opt_count("attention.key_length", MAX_WIDTH)? {
        Some(n) => n,
        None if hidden % heads == 0 => hidden / heads,
        None => return Err(f.wrong("attention.head_count", format!("a divisor of embedding_length, {hidden}"))),
    };
    if f.opt_count("attention.value_length", MAX_WIDTH)?.is_some_and(|n| n != head_dim) {
        return Err(f.unsupported("attention.value_length", format!("values must be as long as keys, {head_dim}")));
    }
    let rotary_dim = f.opt_count("rope.dimension_count", MAX_WIDTH)?.unwrap_or(head_dim);
    if !rotary_dim.is_multiple_of(2) || rotary_dim > head_dim {
        return Err(f.wrong("rope.dimension_count", format!("an even number up to {head_dim}")));
    }
    let embed = (g.tensor)("token_embd.weight").and_then(|t| t.shape.first().copied());
    let scaling = rope::scaling_from_gguf(f)?;
    let parts = Dense {
        n_vocab: embed.filter(|n| *n <= MAX_VOCAB).ok_or_else(|| f.wrong("token_embd.weight", "a tensor"))?,
        hidden,
        n_layers: f.count("block_count", MAX_LAYERS)?,
        heads,
        kv_heads: f.opt_count("attention.head_count_kv", MAX_WIDTH)?.unwrap_or(heads),
        head_dim,
        width: f.count("feed_forward_length", MAX_WIDTH)?,
        activation: Activation::Silu,
        norm_eps: f.positive("attention.layer_norm_rms_epsilon")? as f32,
        tied: !g.has("output.weight"),
        max_positions: scaling.max_positions(f.count("context_length", MAX_CONTEXT)?),
        rope: gguf_rope(g, &scaling, rotary_dim, pairing)?,
    };
    let mut spec = parts.spec().map_err(|(what, expected)| f.wrong(what.gguf, expected))?;
    let no_window = f.get("attention.sliding_window").and_then(Value::as_u64) == Some(0);
    let window = if no_window { None } else { f.opt_count("attention.sliding_window", MAX_CONTEXT)? };
    let scale = f.opt_positive("attention.scale")?;
    for layer in &mut spec.layers {
        layer.attention.op.window = window;
        layer.attention.op.scale = scale.map_or(layer.attention.op.scale, |s| s as f32);
        layer.attention.qkv_bias = g.has("blk.0.attn_q.bias");
        layer.attention.out_bias = g.has("blk.0.attn_output.bias");
        layer.mlp.bias = g.has("blk.0.ffn_down.bias");
    }
    Ok(spec)
}

fn gguf_rope(g: &GgufConfig<'_>, scaling: &Scaling, dim: usize, pairing: RopePairing) -> Result<Rope, ModelError> {
    let theta = g.fields.opt_positive("rope.freq_base")?.unwrap_or(10_000.0);
    let mut rope = scaling.rope(theta, dim, pairing);
    if let Some(factors) = g.rope_factors {
        if factors.len() != rope.inv_freq.len() || factors.iter().any(|f| !f.is_finite() || *f <= 0.0) {
            let expected = format!("{} finite factors above 0", rope.inv_freq.len());
            return Err(g.fields.wrong(ROPE_FACTORS, expected));
        }
        rope.inv_freq.iter_mut().zip(factors).for_each(|(freq, factor)| *freq /= factor);
    }
    Ok(rope)
}

/// Sizes of the shared decoder.
struct Dense {
    n_vocab: usize,
    hidden: usize,
    n_layers: usize,
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
    width: usize,
    activation: Activation,
    norm_eps: f32,
    tied: bool,
    max_positions: usize,
    rope: Rope,
}

/// A key under the names of both formats.
struct KeyName {
    hf: &'static str,
    gguf: &'static str,
}

impl Dense {
    fn spec(self) -> Result<DecoderSpec, (KeyName, String)> {
        if !self.heads.is_multiple_of(self.kv_heads) {
            let key = KeyName { hf: "num_key_value_heads", gguf: "attention.head_count_kv" };
            return Err((key, format!("a divisor of the {} attention heads", self.heads)));
        }
        if !self.head_dim.is_multiple_of(2) {
            return Err((KeyName { hf: "head_dim", gguf: "attention.key_length" }, "an even number".to_owned()));
        }
        if !self.rope.scale.is_finite() || self.rope.inv_freq.iter().any(|f| !f.is_finite() || *f <= 0.0) {
            let key = KeyName { hf: "rope_theta", gguf: "rope.freq_base" };
            return Err((key, "a base and a scaling that give finite frequencies above 0".to_owned()));
        }
        let attention = AttentionSpec {
            op: AttentionOp {
                heads: self.heads,
                kv_heads: self.kv_heads,
                head_dim: self.head_dim,
                scale: (self.head_dim as f64).powf(-0.5) as f32,
                window: None,
                softcap: None,
            },
            qkv_bias: false,
            out_bias: false,
            qk_norm_eps: None,
            rope: Some(0),
        };
        let mlp = MlpSpec { width: self.width, activation: self.activation, bias: false };
        Ok(DecoderSpec {
            n_vocab: self.n_vocab,
            hidden: self.hidden,
            embed_scale: 1.0,
            tied: self.tied,
            layers: vec![LayerSpec { norm_eps: self.norm_eps, attention, mlp }; self.n_layers],
            ropes: vec![self.rope],
            final_norm_eps: self.norm_eps,
            max_positions: self.max_positions,
        })
    }
}

const HF_NAMES: WeightNames = WeightNames {
    embed: "model.embed_tokens",
    final_norm: "model.norm",
    head: "lm_head",
    layer: |role| match role {
        LayerRole::AttentionNorm => "model.layers.{i}.input_layernorm",
        LayerRole::Q => "model.layers.{i}.self_attn.q_proj",
        LayerRole::K => "model.layers.{i}.self_attn.k_proj",
        LayerRole::V => "model.layers.{i}.self_attn.v_proj",
        LayerRole::O => "model.layers.{i}.self_attn.o_proj",
        LayerRole::QNorm => "model.layers.{i}.self_attn.q_norm",
        LayerRole::KNorm => "model.layers.{i}.self_attn.k_norm",
        LayerRole::MlpNorm => "model.layers.{i}.post_attention_layernorm",
        LayerRole::Gate => "model.layers.{i}.mlp.gate_proj",
        LayerRole::Up => "model.layers.{i}.mlp.up_proj",
        LayerRole::Down => "model.layers.{i}.mlp.down_proj",
    },
    ignored: HF_IGNORED,
};

const HF_IGNORED: &[&str] = &["model.layers.{i}.self_attn.rotary_emb.inv_freq"];
// Some tools save the head again though it is tied; transformers lets the embedding win.
const HF_IGNORED_TIED: &[&str] = &["model.layers.{i}.self_attn.rotary_emb.inv_freq", "lm_head.weight"];

const GGUF_NAMES: WeightNames = WeightNames {
    embed: "token_embd",
    final_norm: "output_norm",
    head: "output",
    layer: |role| match role {
        LayerRole::AttentionNorm => "blk.{i}.attn_norm",
        LayerRole::Q => "blk.{i}.attn_q",
        LayerRole::K => "blk.{i}.attn_k",
        LayerRole::V => "blk.{i}.attn_v",
        LayerRole::O => "blk.{i}.attn_output",
        LayerRole::QNorm => "blk.{i}.attn_q_norm",
        LayerRole::KNorm => "blk.{i}.attn_k_norm",
        LayerRole::MlpNorm => "blk.{i}.ffn_norm",
        LayerRole::Gate => "blk.{i}.ffn_gate",
        LayerRole::Up => "blk.{i}.ffn_up",
        LayerRole::Down => "blk.{i}.ffn_down",
    },
    ignored: &[ROPE_FACTORS, "blk.{i}.attn_rot_embd", "rope_freqs"],
};

/// Keys of `config.json` that never change a forward pass: training, generation, bookkeeping.
const HARMLESS: &[&str] = &[
    "attention_dropout",
    "attention_probs_dropout_prob",
    "attn_implementation",
    "auto_map",
    "bad_words_ids",
    "begin_suppress_tokens",
    "bos_token_id",
    "cache_implementation",
    "chunk_size_feed_forward",
    "classifier_dropout",
    "decoder_start_token_id",
    "diversity_penalty",
    "do_sample",
    "dtype",
    "early_stopping",
    "embd_pdrop",
    "encoder_no_repeat_ngram_size",
    "eos_token_id",
    "exponential_decay_length_penalty",
    "finetuning_task",
    "forced_bos_token_id",
    "forced_eos_token_id",
    "gradient_checkpointing",
    "hidden_dropout",
    "hidden_dropout_prob",
    "id2label",
    "initializer_range",
    "is_decoder",
    "is_llama_config",
    "label2id",
    "length_penalty",
    "max_length",
    "max_new_tokens",
    "max_sequence_length",
    "min_length",
    "model_max_length",
    "model_type",
    "no_repeat_ngram_size",
    "num_beam_groups",
    "num_beams",
    "num_return_sequences",
    "output_attentions",
    "output_hidden_states",
    "output_scores",
    "pad_token_id",
    "prefix",
    "pretraining_tp",
    "problem_type",
    "remove_invalid_values",
    "repetition_penalty",
    "resid_pdrop",
    "return_dict",
    "return_dict_in_generate",
    "sep_token_id",
    "seq_length",
    "suppress_tokens",
    "task_specific_params",
    "temperature",
    "tf_legacy_loss",
    "tokenizer_class",
    "top_k",
    "top_p",
    "torch_dtype",
    "torchscript",
    "transformers.js_config",
    "transformers_version",
    "typical_p",
    "unk_token_id",
    "unsloth_fixed",
    "unsloth_version",
    "use_bfloat16",
    "use_cache",
    "use_flash_attention",
    "use_flash_attn",
];

/// Keys of a GGUF file, without `<arch>.`, that never change a forward pass, or only one whose type of scaling reads them.
const GGUF_HARMLESS: &[&str] =
    &["rope.scaling.finetuned", "rope.scaling.original_context_length", "tensor_data_layout", "vocab_size"];

#[cfg(test)]
mod tests;
