//! The operation on one head, as the formulas read.

use crate::{Rope, RopePairing};

/// RMS norm of one head (where `norm` gives weights and epsilon), then its rotation at `position`.
pub fn head(x: &[f32], norm: Option<(&[f32], f32)>, rope: Option<&Rope>, position: usize) -> Vec<f32> {
    let mut x: Vec<f64> = match norm {
        None => x.iter().map(|&x| f64::from(x)).collect(),
        Some((weight, eps)) => {
            crate::norm::reference::add_norm(None, x, weight, eps).1.iter().map(|&x| f64::from(x)).collect()
        }
    };
    let Some(rope) = rope else { return x.iter().map(|&x| x as f32).collect() };
    let n_pairs = rope.inv_freq.len();
    for (i, freq) in rope.inv_freq.iter().enumerate() {
        let (a, b) = match rope.pairing {
            RopePairing::Half => (i, i + n_pairs),
            RopePairing::Interleaved => (2 * i, 2 * i + 1),
        };
        let (sin, cos) = f64::from(position as f32 * freq).sin_cos();
        let scale = f64::from(rope.scale);
        (x[a], x[b]) = (scale * (x[a] * cos - x[b] * sin), scale * (x[b] * cos + x[a] * sin));
    }
    x.iter().map(|&x| x as f32).collect()
}
