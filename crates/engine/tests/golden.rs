//! Logits of tiny random checkpoints against transformers in float32, and every config key that matters.

mod common;

use common::{Model, fixture, golden};

/// Greatest absolute error that f32 weights, activations and cache may have against transformers' eager f32.
const F32_TOLERANCE: f32 = 2e-4;

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
        let mut model = Model::open(&fixture(&format!("families/{name}")));
        for chunk in [48, 7, 1] {
            let error = golden.max_error(&model.logits(&golden.tokens, chunk));
            println!("{name} in chunks of {chunk}: maximum error {error:.2e}");
            assert!(error < F32_TOLERANCE, "{name} in chunks of {chunk}: {error}");
        }
    }
}
