//! Slow, readable linear layers that the fast paths are tested against.

use crate::dequantize::dequantize;
use crate::{DType, WeightPart};

/// One row: `out[o] = Σ_k w[o][k] * x[k] + bias[o]` over dequantized weights, summed in f64.
pub fn linear(parts: &[WeightPart<'_>], x: &[f32]) -> Vec<f32> {
    parts.iter().flat_map(|part| part_outputs(part, |_| x.to_vec())).collect()
}

/// As [`linear`], with activations rounded for quantized weights as the fast paths round them: each 32 columns to `q * s`, `q`
/// an integer. For weights of 6 and 8 bits `s` is the largest magnitude / 32767. For fewer bits it is that / 127, and if the
/// largest magnitude exceeds 1.5 times the root mean square of the row's 32-column largest magnitudes, what is left
/// is rounded to steps of `s / 254` and added. What differs between this and a fast path is f32 rounding.
pub fn linear_rounded(parts: &[WeightPart<'_>], x: &[f32]) -> Vec<f32> {
    let rounded = |dtype: DType| match dtype {
        DType::F32 | DType::F16 | DType::Bf16 => x.to_vec(),
        DType::Q6K | DType::Q8_0 => x.chunks(32).flat_map(|x| round_block(x, largest(x), 32767.0)).collect(),
        DType::Q4_0 | DType::Q4_1 | DType::Q4K | DType::Q5_0 | DType::Q5_1 | DType::Q5K => round_narrow(x),
    };
    parts.iter().flat_map(|part| part_outputs(part, rounded)).collect()
}

fn round_narrow(x: &[f32]) -> Vec<f32> {
    let squares: f64 = x.chunks(32).map(|x| f64::from(largest(x)).powi(2)).sum();
    let rms = (squares / (x.len() / 32) as f64).sqrt();
    let round = |x: &[f32]| {
        let max = largest(x);
        let mut rounded = round_block(x, max, 127.0);
        if f64::from(max) > 1.5 * rms {
            let rest: Vec<f32> = x.iter().zip(&rounded).map(|(x, rounded)| x - rounded).collect();
            rounded.iter_mut().zip(round_block(&rest, max / 254.0, 127.0)).for_each(|(rounded, rest)| *rounded += rest);
        }
        rounded
    };
    x.chunks(32).flat_map(round).collect()
}

fn largest(x: &[f32]) -> f32 {
    x.iter().fold(0.0f32, |max, v| max.max(v.abs()))
}

/// The multiples of `max / limit` nearest to the values.
fn round_block(x: &[f32], max: f32, limit: f32) -> Vec<f32> {
    let inverse = if max > 0.0 { limit / max } else { 0.0 };
    x.iter().map(|v| (v * inverse).round_ties_even() * (max / limit)).collect()
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
