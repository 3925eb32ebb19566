//! Attention of one token and head in f64, as the formula reads.

use crate::AttentionOp;

/// `keys` and `values` are those of positions `0..=position`, `head_dim` elements each.
pub fn attend(op: &AttentionOp, q: &[f32], keys: &[Vec<f32>], values: &[Vec<f32>]) -> Vec<f32> {
    let position = keys.len() - 1;
    let first = op.window.map_or(0, |w| (position + 1).saturating_sub(w));
    let score = |key: &Vec<f32>| {
        let dot: f64 = q.iter().zip(key).map(|(&a, &b)| f64::from(a) * f64::from(b)).sum();
        let score = dot * f64::from(op.scale);
        op.softcap.map_or(score, |cap| f64::from(cap) * (score / f64::from(cap)).tanh())
    };
    let scores: Vec<f64> = keys[first..].iter().map(score).collect();
    let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let weights: Vec<f64> = scores.iter().map(|s| (s - max).exp()).collect();
    let total: f64 = weights.iter().sum();
    (0..q.len())
        .map(|d| {
            let sum: f64 = weights.iter().zip(&values[first..]).map(|(w, v)| w * f64::from(v[d])).sum();
            (sum / total) as f32
        })
        .collect()
}
