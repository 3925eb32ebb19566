//! Slow, readable linear layers that the fast paths are tested against.

use crate::dequantize::dequantize;
use crate::{DType, WeightPart};

/// One row: `out[o] = Σ_k w[o][k] * x[k] + bias[o]` over dequantized weights, summed in f64.
pub fn linear(parts: &[WeightPart<'_>], x: &[f32]) -> Vec<f32> {
    parts.iter().flat_map(|part| part_outputs(part, |_| x.to_vec())).collect()
}

/// As [`linear`], with activations rounded for quantized weights as the fast paths round them: each 32 columns to `q * s`, `s`
/// the largest magnitude / 127, `q` an integer. What is left between this and a fast path is f32 rounding.
pub fn linear_int8(parts: &[WeightPart<'_>], x: &[f32]) -> Vec<f32> {
    let rounded =
        |dtype: DType| if dtype.is_quantized() { x.chunks(32).flat_map(round_block).collect() } else { x.to_vec() };
    parts.iter().flat_map(|part| part_outputs(part, rounded)).collect()
}

/// The values that a block of activations is rounded to.
fn round_block(x: &[f32]) -> Vec<f32> {
    let max = x.iter().fold(0.0f32, |max, v| max.max(v.abs()));
    if max == 0.0 {
        return vec![0.0; x.len()];
    }
    let inverse = 127.0 / max;
    x.iter().map(|v| (v * inverse).round_ties_even() * (max / 127.0)).collect()
}

fn part_outputs(part: &WeightPart<'_>, x: impl Fn(DType) -> Vec<f32>) -> Vec<f32> {
    let x = x(part.dtype);
    let mut weights = vec![0.0; part.n_cols];
    let rows = part.data.chunks_exact(part.data.len() / part.n_rows);
    rows.enumerate()
        .map(|(o, row)| {
            dequantize(part.dtype, row, &mut weights);
            let sum: f64 = weights.iter().zip(&x).map(|(w, x)| f64::from(*w) * f64::from(*x)).sum();
            (sum + part.bias.map_or(0.0, |bias| f64::from(bias[o]))) as f32
        })
        .collect()
}
