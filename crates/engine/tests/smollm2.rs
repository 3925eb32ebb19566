//! The shipped model against transformers: the same GGUF weights, dequantized, in float32.

mod common;

use common::{Model, Options, fixture, smollm2};
use kwire_kernels::KvDtype;
use serde_json::Value;

/// As the server runs it.
const SERVED: Options = Options { kv_dtype: KvDtype::F16, max_len: 4096, max_step: 256, n_workers: 2 };

fn numbers<T: TryFrom<u64, Error: std::fmt::Debug>>(value: &Value) -> Vec<T> {
    value.as_array().unwrap().iter().map(|v| T::try_from(v.as_u64().unwrap()).unwrap()).collect()
}

fn json(name: &str) -> Value {
    serde_json::from_slice(&std::fs::read(fixture(name)).unwrap()).unwrap()
}

fn argmax(logits: &[f32]) -> u32 {
    let best = logits.iter().enumerate().fold(0, |best, (i, l)| if *l > logits[best] { i } else { best });
    u32::try_from(best).unwrap()
}

/// The reference's choice at one position.
struct Choice {
    /// Ours.
    token: u32,
    expected: u32,
    /// Between the reference's best two logits.
    gap: f32,
    /// Of our gap between the same two tokens.
    gap_error: f32,
    /// Greatest error of our logits of these two.
    error: f32,
}

/// Our choices along the reference's own continuation, so that one divergence does not hide the tokens after it.
fn choices(model: &mut Model, case: &Value) -> Vec<Choice> {
    let (prompt, output): (Vec<u32>, Vec<u32>) = (numbers(&case["prompt"]), numbers(&case["output"]));
    let tokens = [&prompt[..], &output[..output.len() - 1]].concat();
    let logits = model.logits(&tokens, SERVED.max_step);
    let n_vocab = logits.len() / tokens.len();
    let top_logits = case["top2_logits"].as_array().unwrap();
    let top_ids = case["top2_ids"].as_array().unwrap();
    let at = |i: usize| {
        let ours = &logits[(prompt.len() - 1 + i) * n_vocab..][..n_vocab];
        let reference: Vec<f32> =
            top_logits[i].as_array().unwrap().iter().map(|v| v.as_f64().unwrap() as f32).collect();
        let ids: Vec<usize> = numbers(&top_ids[i]);
        let errors = ids.iter().zip(&reference).map(|(&id, r)| (ours[id] - r).abs());
        let gap = reference[0] - reference[1];
        let gap_error = (ours[ids[0]] - ours[ids[1]]) - gap;
        Choice { token: argmax(ours), expected: output[i], gap, gap_error, error: errors.fold(0.0, f32::max) }
    };
    (0..output.len()).map(at).collect()
}

/// A divergence must be a near-tie of the reference (its gap at most twice the greatest logit error), and near-ties are rare.
#[test]
fn greedy_tokens_equal_the_reference_but_for_near_ties() {
    let mut model = Model::open(&smollm2(), SERVED);
    let golden = json("smollm2/greedy.json");
    let cases = golden["cases"].as_array().unwrap();
    let choices: Vec<_> = cases.iter().flat_map(|case| choices(&mut model, case)).collect();
    let max_error = choices.iter().map(|c| c.error).fold(0.0, f32::max);
    let diverging: Vec<_> = choices.iter().filter(|c| c.token != c.expected).collect();
    let widest = diverging.iter().map(|c| c.gap).fold(0.0, f32::max);
    let rms = (choices.iter().map(|c| c.gap_error * c.gap_error).sum::<f32>() / choices.len() as f32).sqrt();
    println!("rms gap error {rms:.4}");
    println!(
        "{} of {} tokens diverge, the widest gap among them is {widest:.4}; the maximum logit error is {max_error:.4}",
        diverging.len(),
        choices.len()
    );
    assert_eq!((cases.len(), choices.len()), (20, 20 * 64));
    assert!(max_error < 1.0, "logits are off by {max_error}");
    assert!(widest <= 2.0 * max_error, "a divergence at a gap of {widest} is no near-tie");
    assert!(diverging.len() * 100 <= choices.len(), "{} near-ties", diverging.len());
}

#[test]
fn perplexity_is_within_half_a_percent() {
    let mut model = Model::open(&smollm2(), SERVED);
    let golden = json("smollm2/perplexity.json");
    let tokens: Vec<u32> = numbers(&golden["tokens"]);
    let mut nll = 0.0;
    let mut next = 1;
    model.each_logits(&tokens, SERVED.max_step, |logits| {
        if let Some(&token) = tokens.get(next) {
            let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            let sum: f64 = logits.iter().map(|l| f64::from(l - max).exp()).sum();
            nll += sum.ln() - f64::from(logits[token as usize] - max);
        }
        next += 1;
    });
    let perplexity = (nll / (tokens.len() - 1) as f64).exp();
    let expected = golden["perplexity"].as_f64().unwrap();
    println!(
        "perplexity {perplexity:.4}, the reference has {expected:.4}: {:+.3} %",
        (perplexity / expected - 1.0) * 100.0
    );
    assert!((perplexity / expected - 1.0).abs() < 0.005);
}
