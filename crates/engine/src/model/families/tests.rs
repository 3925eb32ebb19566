//! Specs of published configs and fixtures, and refusals.

use std::path::PathBuf;

use expect_test::{Expect, expect};
use serde_json::json;

use super::*;
use crate::model::checkpoint::Checkpoint;

fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures")
}

fn config(name: &str) -> HfConfig {
    HfConfig::load(&fixtures().join(format!("configs/{name}.json"))).unwrap()
}

/// A spec in a few lines; equal neighbouring layers are told once.
fn summary(spec: &DecoderSpec) -> String {
    let mut out = format!(
        "vocab {} hidden {} tied {} eps {:e} positions {}\n",
        spec.n_vocab, spec.hidden, spec.tied, spec.final_norm_eps, spec.max_positions
    );
    let mut first = 0;
    for i in 0..spec.layers.len() {
        if spec.layers.get(i + 1) != Some(&spec.layers[i]) {
            let LayerSpec { attention: a, mlp, norm_eps } = &spec.layers[i];
            assert_eq!(*norm_eps, spec.final_norm_eps);
            out += &format!("layers {first}..={i}: heads {}/{} of {}", a.op.heads, a.op.kv_heads, a.op.head_dim);
            out += &format!(" scale {} window {:?} softcap {:?}", a.op.scale, a.op.window, a.op.softcap);
            out += &format!(" bias {}/{} qk_norm {:?} rope {:?};", a.qkv_bias, a.out_bias, a.qk_norm_eps, a.rope);
            out += &format!(" mlp {} {:?} bias {}\n", mlp.width, mlp.activation, mlp.bias);
            first = i + 1;
        }
    }
    for Rope { inv_freq: f, scale, pairing } in &spec.ropes {
        let (n, mid) = (f.len(), f.len() / 2);
        out += &format!("rope {pairing:?} x{scale}: {n} of {:?} .. {:?} .. {:?}\n", f[1], f[mid], f[n - 1]);
    }
    out
}

fn check(name: &str, expected: &Expect) {
    let (spec, _) = from_hf(&config(name)).unwrap();
    expected.assert_eq(&summary(&spec));
}

#[test]
fn published_configs() {
    check(
        "llama-2-7b",
        &expect![[r#"
        vocab 32000 hidden 4096 tied false eps 1e-5 positions 4096
        layers 0..=31: heads 32/32 of 128 scale 0.088388346 window None softcap None bias false/false qk_norm None rope Some(0); mlp 11008 Silu bias false
        rope Half x1: 64 of 0.86596435 .. 0.01 .. 0.00011547819
    "#]],
    );
    check(
        "llama-3.1-8b",
        &expect![[r#"
        vocab 128256 hidden 4096 tied false eps 1e-5 positions 131072
        layers 0..=31: heads 32/8 of 128 scale 0.088388346 window None softcap None bias false/false qk_norm None rope Some(0); mlp 14336 Silu bias false
        rope Half x1: 64 of 0.8146172 .. 0.000524846 .. 3.068926e-7
    "#]],
    );
    check(
        "tinyllama-1.1b-chat-v1.0",
        &expect![[r#"
        vocab 32000 hidden 2048 tied false eps 1e-5 positions 2048
        layers 0..=21: heads 32/4 of 64 scale 0.125 window None softcap None bias false/false qk_norm None rope Some(0); mlp 5632 Silu bias false
        rope Half x1: 32 of 0.7498942 .. 0.01 .. 0.00013335215
    "#]],
    );
    check(
        "smollm2-135m-instruct",
        &expect![[r#"
        vocab 49152 hidden 576 tied true eps 1e-5 positions 8192
        layers 0..=29: heads 9/3 of 64 scale 0.125 window None softcap None bias false/false qk_norm None rope Some(0); mlp 1536 Silu bias false
        rope Half x1: 32 of 0.69783056 .. 0.0031622779 .. 1.4330127e-5
    "#]],
    );
    check(
        "mistral-7b-v0.1",
        &expect![[r#"
        vocab 32000 hidden 4096 tied false eps 1e-5 positions 32768
        layers 0..=31: heads 32/8 of 128 scale 0.088388346 window Some(4096) softcap None bias false/false qk_norm None rope Some(0); mlp 14336 Silu bias false
        rope Half x1: 64 of 0.86596435 .. 0.01 .. 0.00011547819
    "#]],
    );
    check(
        "mistral-7b-v0.3",
        &expect![[r#"
        vocab 32768 hidden 4096 tied false eps 1e-5 positions 32768
        layers 0..=31: heads 32/8 of 128 scale 0.088388346 window None softcap None bias false/false qk_norm None rope Some(0); mlp 14336 Silu bias false
        rope Half x1: 64 of 0.8058422 .. 0.001 .. 1.2409378e-6
    "#]],
    );
    check(
        "qwen2.5-7b-instruct",
        &expect![[r#"
        vocab 152064 hidden 3584 tied false eps 1e-6 positions 32768
        layers 0..=27: heads 28/4 of 128 scale 0.088388346 window None softcap None bias true/false qk_norm None rope Some(0); mlp 18944 Silu bias false
        rope Half x1: 64 of 0.8058422 .. 0.001 .. 1.2409378e-6
    "#]],
    );
    check(
        "qwen2.5-7b-instruct-yarn",
        &expect![[r#"
        vocab 152064 hidden 3584 tied false eps 1e-6 positions 131072
        layers 0..=27: heads 28/4 of 128 scale 0.088388346 window None softcap None bias true/false qk_norm None rope Some(0); mlp 18944 Silu bias false
        rope Half x1.1386294: 64 of 0.8058422 .. 0.00060294115 .. 3.1023444e-7
    "#]],
    );
    check(
        "qwen3-8b",
        &expect![[r#"
        vocab 151936 hidden 4096 tied false eps 1e-6 positions 40960
        layers 0..=35: heads 32/8 of 128 scale 0.088388346 window None softcap None bias false/false qk_norm Some(1e-6) rope Some(0); mlp 12288 Silu bias false
        rope Half x1: 64 of 0.8058422 .. 0.001 .. 1.2409378e-6
    "#]],
    );
}

/// Against transformers' `LlamaRotaryEmbedding` (`scripts/goldens/rope.py`): torch's vectorized power is within one unit in
/// the last place of the exactly rounded one that is computed here; YaRN blends two such values.
#[test]
fn frequencies_equal_transformers() {
    let golden = std::fs::read(fixtures().join("configs/inv_freq/golden.json")).unwrap();
    let golden: Map<String, Value> = serde_json::from_slice(&golden).unwrap();
    assert_eq!(golden.len(), 9);
    for (name, golden) in golden {
        let (spec, _) = from_hf(&config(&name)).unwrap();
        let rope = &spec.ropes[0];
        let expected: Vec<f32> = serde_json::from_value(golden["inv_freq"].clone()).unwrap();
        assert_eq!(rope.inv_freq.len(), expected.len());
        for (i, (ours, theirs)) in rope.inv_freq.iter().zip(&expected).enumerate() {
            let ulps = ours.to_bits().abs_diff(theirs.to_bits());
            assert!(ulps <= 2, "{name}[{i}]: {ours:e} {theirs:e}");
        }
        assert_eq!(rope.scale, golden["scale"].as_f64().unwrap() as f32);
    }
}

/// The older and the transformers-5 spelling of every fixture mean the same.
#[test]
fn both_spellings_agree() {
    let mut n = 0;
    for folder in std::fs::read_dir(fixtures().join("families")).unwrap() {
        let folder = folder.unwrap().path();
        let [old, new] =
            ["config.json", "config.v5.json"].map(|f| from_hf(&HfConfig::load(&folder.join(f)).unwrap()).unwrap().0);
        assert_eq!(old, new, "{}", folder.display());
        n += 1;
    }
    assert!(n >= 13);
}

#[test]
fn windows_of_upper_layers() {
    let (spec, _) = Checkpoint::open(&fixtures().join("families/qwen2-window")).unwrap().family().unwrap();
    let windows: Vec<_> = spec.layers.iter().map(|l| l.attention.op.window).collect();
    assert_eq!(windows, [None, Some(16), Some(16)]);
}

/// A small config with changes on top; `null` in `changes` removes a key.
fn changed(base: &str, changes: Value) -> Result<DecoderSpec, String> {
    let mut map = match serde_json::from_slice(&std::fs::read(fixtures().join(base)).unwrap()).unwrap() {
        Value::Object(map) => map,
        other => panic!("{other}"),
    };
    let Value::Object(changes) = changes else { panic!("changes are an object") };
    map.extend(changes);
    let path = std::env::temp_dir().join(format!(
        "kwire-config-{}-{:?}.json",
        std::process::id(),
        std::thread::current().id()
    ));
    std::fs::write(&path, Value::Object(map).to_string()).unwrap();
    let result = HfConfig::load(&path).map_err(ModelError::from).and_then(|c| from_hf(&c)).map(|(spec, _)| spec);
    std::fs::remove_file(&path).unwrap();
    result.map_err(|e| e.to_string())
}

#[test]
fn unknown_keys_are_refused_unless_off_or_harmless() {
    let base = "families/llama2/config.json";
    for fine in [
        json!({"logit_scale": null}),
        json!({"use_secret_sauce": false}),
        json!({"embd_pdrop": 0.0}),
        json!({"_private": 7}),
        json!({"unsloth_version": "2025.1"}),
        json!({"expert_ids": []}),
    ] {
        assert!(changed(base, fine.clone()).is_ok(), "{fine}");
    }
    for refused in [
        json!({"logit_scale": 0.5}),
        json!({"use_secret_sauce": true}),
        json!({"num_local_experts": 8}),
        json!({"partial_rotary_factor": 0.5}),
        json!({"quantization_config": {"quant_method": "awq"}}),
        json!({"rope_interleaved": true}),
        json!({"sliding_window": 64}),
    ] {
        let key = refused.as_object().unwrap().keys().next().unwrap().clone();
        let error = changed(base, refused).unwrap_err();
        assert!(error.contains(&format!("{key:?}")) && error.contains("not supported"), "{error}");
    }
}

#[test]
fn faulty_values_are_named() {
    let base = "families/llama2/config.json";
    for (change, message) in [
        (json!({"hidden_size": null}), "key \"hidden_size\" is null; expected an integer from 1"),
        (json!({"hidden_size": 0}), "key \"hidden_size\" is 0"),
        (json!({"hidden_size": -4}), "key \"hidden_size\" is -4"),
        (json!({"hidden_size": 1e30}), "key \"hidden_size\" is 1e+30"),
        (json!({"num_hidden_layers": 4_000_000_000u64}), "expected an integer from 1 to 4096"),
        (json!({"num_key_value_heads": 3}), "key \"num_key_value_heads\" is 3; expected a divisor"),
        (json!({"head_dim": 15}), "key \"head_dim\" is 15; expected an even number"),
        (json!({"rms_norm_eps": "small"}), "key \"rms_norm_eps\""),
        (json!({"rope_theta": -1.0}), "key \"rope_theta\" is -1.0"),
        (json!({"rope_theta": 1e300}), "finite frequencies"),
        (json!({"hidden_act": "relu2"}), "\"hidden_act\": \"relu2\" is not supported"),
        (json!({"architectures": []}), "key \"architectures\""),
        (json!({"architectures": ["MambaForCausalLM"]}), "MambaForCausalLM"),
        (
            json!({"rope_scaling": {"type": "dynamic", "factor": 2.0}}),
            "\"rope_scaling.type\": \"dynamic\" is not supported",
        ),
        (json!({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}), "\"rope_scaling.rope_type\": \"longrope\""),
        (json!({"rope_scaling": {"rope_type": "linear"}}), "key \"rope_scaling.factor\" is missing"),
        (json!({"rope_scaling": {"rope_type": "linear", "factor": 2.0, "wobble": 1}}), "\"rope_scaling.wobble\""),
        (json!({"rope_scaling": {"rope_type": "linear", "factor": 2.0}, "rope_parameters": {}}), "keep one of the two"),
        (json!({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}), "\"rope_parameters.full_attention\""),
    ] {
        let error = changed(base, change.clone()).unwrap_err();
        assert!(error.contains(message), "{change}: {error}");
    }
}

#[test]
fn activations() {
    for (name, activation) in [
        ("silu", Activation::Silu),
        ("gelu", Activation::Gelu),
        ("gelu_pytorch_tanh", Activation::GeluTanh),
        ("gelu_new", Activation::GeluTanh),
    ] {
        let spec = changed("families/llama2/config.json", json!({"hidden_act": name})).unwrap();
        assert_eq!(spec.layers[0].mlp.activation, activation);
    }
}

#[test]
fn tied_heads_may_be_saved_again() {
    let (spec, names) = from_hf(&config("smollm2-135m-instruct")).unwrap();
    assert!(spec.tied && names.is_ignored("lm_head.weight"));
    let (spec, names) = from_hf(&config("llama-2-7b")).unwrap();
    assert!(!spec.tied && !names.is_ignored("lm_head.weight"));
    assert!(names.is_ignored("model.layers.31.self_attn.rotary_emb.inv_freq"));
    assert!(!names.is_ignored("model.layers.x.self_attn.rotary_emb.inv_freq"));
}

/// A GGUF file's metadata, made up.
fn gguf(arch: &str, pairs: &[(&str, MetaValue)], factors: Option<&[f32]>) -> Result<DecoderSpec, String> {
    let info = TensorInfo { dtype: kwire_kernels::DType::F32, shape: vec![128, 64], bytes: 128 * 64 * 4 };
    let base = [
        ("embedding_length", MetaValue::U64(64)),
        ("block_count", MetaValue::U64(2)),
        ("context_length", MetaValue::U64(256)),
        ("feed_forward_length", MetaValue::U64(96)),
        ("attention.head_count", MetaValue::U64(4)),
        ("attention.head_count_kv", MetaValue::U64(2)),
        ("attention.layer_norm_rms_epsilon", MetaValue::F32(1e-5)),
    ];
    let named = base.iter().chain(pairs).map(|(k, v)| (format!("{arch}.{k}"), v.clone()));
    let meta = Meta::from_pairs(named.chain([("general.architecture".to_owned(), MetaValue::Str(arch.to_owned()))]));
    let tensor = |name: &str| (name == "token_embd.weight").then_some(&info);
    from_gguf(Path::new("made-up.gguf"), &meta, &tensor, factors).map(|(spec, _)| spec).map_err(|e| e.to_string())
}

#[test]
fn gguf_metadata() {
    let plain = gguf("llama", &[], None).unwrap();
    expect![[r#"
        vocab 128 hidden 64 tied true eps 1e-5 positions 256
        layers 0..=1: heads 4/2 of 16 scale 0.25 window None softcap None bias false/false qk_norm None rope Some(0); mlp 96 Silu bias false
        rope Interleaved x1: 8 of 0.31622776 .. 0.01 .. 0.0003162278
    "#]].assert_eq(&summary(&plain));
    let qwen3 = gguf(
        "qwen3",
        &[("attention.key_length", MetaValue::U64(32)), ("attention.value_length", MetaValue::U64(32))],
        None,
    );
    expect![[r#"
        vocab 128 hidden 64 tied true eps 1e-5 positions 256
        layers 0..=1: heads 4/2 of 32 scale 0.17677669 window None softcap None bias false/false qk_norm Some(1e-5) rope Some(0); mlp 96 Silu bias false
        rope Half x1: 16 of 0.56234133 .. 0.01 .. 0.00017782794
    "#]].assert_eq(&summary(&qwen3.unwrap()));
    let factors = [1.0, 1.0, 1.0, 2.0, 4.0, 8.0, 8.0, 8.0];
    let scaled = gguf("llama", &[], Some(&factors)).unwrap();
    for (i, factor) in factors.iter().enumerate() {
        assert_eq!(scaled.ropes[0].inv_freq[i], plain.ropes[0].inv_freq[i] / factor);
    }
    let window = gguf("llama", &[("attention.sliding_window", MetaValue::U64(64))], None).unwrap();
    assert_eq!(window.layers[1].attention.op.window, Some(64));
    let text = |s: &str| MetaValue::Str(s.to_owned());
    let linear = [("rope.scaling.type", text("linear")), ("rope.scaling.factor", MetaValue::F32(4.0))];
    let linear = gguf("llama", &linear, None).unwrap();
    assert_eq!((linear.ropes[0].inv_freq[0], linear.max_positions), (0.25, 1024));
    let yarn = [
        ("rope.scaling.type", text("yarn")),
        ("rope.scaling.factor", MetaValue::F32(4.0)),
        ("rope.scaling.original_context_length", MetaValue::U64(256)),
    ];
    let yarn = gguf("qwen2", &yarn, None).unwrap();
    assert_eq!((yarn.ropes[0].scale, yarn.max_positions), (0.1 * 4f32.ln() + 1.0, 1024));
}

#[test]
fn faulty_gguf_metadata_is_named() {
    let text = |s: &str| MetaValue::Str(s.to_owned());
    for (pair, message) in [
        (("expert_count", MetaValue::U64(8)), "\"llama.expert_count\": 8 is not supported"),
        (("rope.scaling.type", text("longrope")), "\"llama.rope.scaling.type\": \"longrope\""),
        (("rope.scaling.type", text("linear")), "key \"llama.rope.scaling.factor\" is missing"),
        (("rope.dimension_count", MetaValue::U64(17)), "key \"llama.rope.dimension_count\" is 17"),
        (("attention.head_count", MetaValue::U64(0)), "key \"llama.attention.head_count\" is 0"),
        (("attention.head_count", MetaValue::U64(5)), "expected a divisor of embedding_length, 64"),
        (("attention.head_count_kv", MetaValue::I64(-1)), "key \"llama.attention.head_count_kv\" is -1"),
        (("rope.freq_base", MetaValue::F32(f32::NAN)), "key \"llama.rope.freq_base\" is \"NaN\""),
        (("attention.value_length", MetaValue::U64(8)), "\"llama.attention.value_length\": 8 is not supported"),
    ] {
        let error = gguf("llama", &[pair], None).unwrap_err();
        assert!(error.contains(message), "{error}");
    }
    assert!(gguf("gemma3", &[], None).unwrap_err().contains("\"general.architecture\": \"gemma3\" is not supported"));
    assert!(gguf("llama", &[], Some(&[1.0; 7])).unwrap_err().contains("8 finite factors"));
    assert!(gguf("llama", &[], Some(&[0.0; 8])).unwrap_err().contains("8 finite factors"));
    assert!(gguf("llama", &[("expert_count", MetaValue::U64(0))], None).is_ok());
}
