//! Logits of tiny random checkpoints against transformers in float32, and every config key that matters.

mod common;

use std::path::Path;

use common::{EXACT, Golden, Model, fixture, golden};
use kwire_engine::model::checkpoint::Checkpoint;
use serde_json::{Value, json};

/// Greatest absolute error that f32 weights, activations and cache may have against transformers' eager f32.
const F32_TOLERANCE: f32 = 1e-4;

/// Families whose weights are float: the error is rounding alone.
const FAMILIES: &[&str] = &[
    "llama1",
    "llama2",
    "llama2-f16",
    "llama2-sharded-bf16",
    "llama3",
    "llama-bias",
    "llama-linear-rope",
    "llama-yarn",
    "mistral",
    "qwen2",
    "qwen2-window",
    "qwen3",
    "smollm2",
];

#[test]
fn every_family_gives_the_reference_logits() {
    for name in FAMILIES {
        let golden = golden(&fixture(&format!("families/{name}/golden.safetensors")));
        let mut model = Model::open(&fixture(&format!("families/{name}")), EXACT);
        for chunk in [48, 7, 1] {
            let error = golden.max_error(&model.logits(&golden.tokens, chunk));
            println!("{name} in chunks of {chunk}: maximum error {error:.2e}");
            assert!(error < F32_TOLERANCE, "{name} in chunks of {chunk}: {error}");
        }
    }
}

/// GGUF files and the greatest absolute error each may have; the logits' standard deviation is about 2. With 8-bit weights
/// activations keep 16 bits, with fewer they have 8: these tiny random models amplify the rounding (a wrong permutation,
/// rotation or block layout gives errors above 4).
const GGUF: &[(&str, f32)] = &[
    ("llama-f16", F32_TOLERANCE),
    ("llama-q8_0", 1e-2),
    ("llama-tied-q8_0", 1e-2),
    ("qwen2-q8_0", 1e-2),
    ("llama-q5_1", 0.7),
    ("llama-q4_0", 0.7),
    ("llama-q4_0-v2", 0.7),
    ("llama-q4_k_m", 0.7),
    ("qwen2-q4_0", 0.7),
];

#[test]
fn gguf_files_give_the_reference_logits() {
    for (name, tolerance) in GGUF {
        let reference = golden(&fixture(&format!("gguf/{}.golden.safetensors", name.trim_end_matches("-v2"))));
        let mut model = Model::open(&fixture(&format!("gguf/{name}.gguf")), EXACT);
        let error = reference.max_error(&model.logits(&reference.tokens, 48));
        println!("{name}: maximum error {error:.2e}");
        assert!(error < *tolerance, "{name}: {error}");
    }
}

/// Every config key that changes the mathematics, with another value.
fn alterations(config: &Value) -> Vec<(String, Value)> {
    let mut alterations = Vec::new();
    let mut alter = |pointer: &str, value: Value| {
        if config.pointer(pointer).is_some_and(|old| *old != value) {
            alterations.push((pointer.to_owned(), value));
        }
    };
    let windowed = config["model_type"] == "mistral" || config["use_sliding_window"] == true;
    alter("/rms_norm_eps", json!(0.02));
    alter("/hidden_act", json!(if config["hidden_act"] == "silu" { "gelu" } else { "silu" }));
    alter("/attention_bias", json!(config["attention_bias"] != true));
    alter("/mlp_bias", json!(config["mlp_bias"] != true));
    alter("/tie_word_embeddings", json!(config["tie_word_embeddings"] != true));
    alter("/num_attention_heads", json!(config["num_attention_heads"].as_u64().unwrap() * 2));
    alter("/num_hidden_layers", json!(1));
    alter("/head_dim", json!(8));
    alter("/intermediate_size", json!(64));
    if config["num_attention_heads"] != config["num_key_value_heads"] {
        alter("/num_key_value_heads", config["num_attention_heads"].clone());
    }
    if windowed {
        alter("/sliding_window", json!(8));
        alter("/sliding_window", json!(40));
        alter("/use_sliding_window", json!(false));
        // Where there is a list, it decides.
        match config.get("layer_types") {
            Some(_) => alter("/layer_types/1", json!("full_attention")),
            None => alter("/max_window_layers", json!(2)),
        }
    }
    for rope in ["/rope_scaling", "/rope_parameters"] {
        alter(&format!("{rope}/factor"), json!(2.0));
        alter(&format!("{rope}/low_freq_factor"), json!(3.0));
        alter(&format!("{rope}/high_freq_factor"), json!(16.0));
        alter(&format!("{rope}/original_max_position_embeddings"), json!(32));
        alter(&format!("{rope}/rope_theta"), json!(1000.0));
    }
    alter("/rope_scaling", Value::Null);
    alter("/rope_theta", json!(1000.0));
    alterations
}

/// Either the altered config does not fit the weights, or the logits are far from the golden ones.
fn is_noticed(folder: &Path, config: &Value, reference: &Golden) -> bool {
    std::fs::write(folder.join("config.json"), serde_json::to_vec(config).unwrap()).unwrap();
    let checkpoint = Checkpoint::open(folder).unwrap();
    let Ok((spec, names)) = checkpoint.family() else { return true };
    let Ok(mut model) = Model::load(&checkpoint, spec, &names, EXACT) else { return true };
    reference.max_error(&model.logits(&reference.tokens, 48)) > 100.0 * F32_TOLERANCE
}

#[test]
fn every_config_key_that_matters_is_read() {
    let scratch = std::env::temp_dir().join(format!("kwire-golden-{}", std::process::id()));
    let mut n_altered = 0;
    for name in FAMILIES.iter().filter(|name| !["llama2-f16", "llama2-sharded-bf16"].contains(name)) {
        let source = fixture(&format!("families/{name}"));
        let reference = golden(&source.join("golden.safetensors"));
        std::fs::create_dir_all(&scratch).unwrap();
        std::fs::copy(source.join("model.safetensors"), scratch.join("model.safetensors")).unwrap();
        for style in ["config.json", "config.v5.json"] {
            let config: Value = serde_json::from_slice(&std::fs::read(source.join(style)).unwrap()).unwrap();
            assert!(!is_noticed(&scratch, &config, &reference), "{name}/{style} itself is right");
            for (pointer, value) in alterations(&config) {
                let mut altered = config.clone();
                *altered.pointer_mut(&pointer).unwrap() = value.clone();
                assert!(
                    is_noticed(&scratch, &altered, &reference),
                    "{name}/{style}: {pointer} = {value} changes nothing"
                );
                n_altered += 1;
            }
        }
        std::fs::remove_dir_all(&scratch).unwrap();
    }
    assert!(n_altered > 150, "{n_altered} alterations");
}
