//! RMS normalization, alone and fused with the residual addition before it.
//!
//! `residual += delta; out = residual / sqrt(mean(residual^2) + eps) * weight`, all in f32 (Zhang & Sennrich 2019,
//! <https://arxiv.org/abs/1910.07467>; Hugging Face `LlamaRMSNorm`). Squares are summed in sixteen lanes and the lanes
//! by halving, so a row's result does not depend on the rows around it.

use crate::cpu::lanes::{Kernel, LANES, Lanes, dispatch};
use crate::cpu::par::{Disjoint, for_rows};
use crate::cpu::{Isa, Pool};

/// Adds `delta` to `residual` (where given) and writes the normalized rows to `out`. All matrices are
/// `rows × weight.len()`, row-major.
pub(crate) fn add_norm(
    pool: &mut Pool,
    isa: Isa,
    delta: Option<&[f32]>,
    residual: &mut [f32],
    weight: &[f32],
    eps: f32,
    out: &mut [f32],
) {
    let n_cols = weight.len();
    assert_eq!(residual.len(), out.len());
    assert_eq!(residual.len() % n_cols.max(1), 0);
    assert!(delta.is_none_or(|d| d.len() == residual.len()));
    let n_rows = residual.len() / n_cols.max(1);
    let (residual, out) = (Disjoint::new(residual), Disjoint::new(out));
    for_rows(pool, n_rows, n_cols / 4, |rows| {
        let (start, len) = (rows.start * n_cols, rows.len() * n_cols);
        // SAFETY: chunks of rows do not overlap.
        let (residual, out) = unsafe { (residual.slice(start, len), out.slice(start, len)) };
        let delta = delta.map(|d| &d[start..start + len]);
        dispatch(isa, AddNorm { delta, residual, weight, eps, out });
    });
}

struct AddNorm<'a> {
    delta: Option<&'a [f32]>,
    residual: &'a mut [f32],
    weight: &'a [f32],
    eps: f32,
    out: &'a mut [f32],
}

impl Kernel for AddNorm<'_> {
    type Out = ();
    #[inline(always)]
    fn run<L: Lanes>(self) {
        let n = self.weight.len();
        for (i, (row, out)) in self.residual.chunks_exact_mut(n).zip(self.out.chunks_exact_mut(n)).enumerate() {
            if let Some(delta) = self.delta {
                for (x, d) in row.iter_mut().zip(&delta[i * n..(i + 1) * n]) {
                    *x += d;
                }
            }
            let scale = rms_scale::<L>(row, self.eps);
            for ((o, x), w) in out.iter_mut().zip(row.iter()).zip(self.weight) {
                *o = x * scale * w;
            }
        }
    }
}

/// `1 / sqrt(mean(x^2) + eps)`.
#[inline(always)]
pub(crate) fn rms_scale<L: Lanes>(x: &[f32], eps: f32) -> f32 {
    let mut sum = [L::splat(0.0); 2];
    let whole = x.len() / LANES;
    for i in 0..whole {
        // SAFETY: `whole` vectors lie within `x`.
        let v = unsafe { L::load(x.as_ptr().add(i * LANES)) };
        sum[i % 2] = v.fma(v, sum[i % 2]);
    }
    // SAFETY: the rest of `x` is shorter than a vector.
    let tail = unsafe { L::load_part(x.as_ptr().add(whole * LANES), x.len() % LANES, 0.0) };
    let total = tail.fma(tail, sum[0]).add(sum[1]).sum();
    1.0 / (total / x.len() as f32 + eps).sqrt()
}

/// The operation in f64, as the formula reads.
pub mod reference {
    /// One row: `residual` after the addition, and the normalized row.
    pub fn add_norm(delta: Option<&[f32]>, residual: &[f32], weight: &[f32], eps: f32) -> (Vec<f32>, Vec<f32>) {
        let sum: Vec<f32> = (0..residual.len()).map(|i| residual[i] + delta.map_or(0.0, |d| d[i])).collect();
        let mean = sum.iter().map(|&x| f64::from(x).powi(2)).sum::<f64>() / sum.len() as f64;
        let scale = 1.0 / (mean + f64::from(eps)).sqrt();
        let out = sum.iter().zip(weight).map(|(&x, &w)| (f64::from(x) * scale * f64::from(w)) as f32).collect();
        (sum, out)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{Rng, assert_close};

    #[test]
    fn matches_the_reference_and_rows_do_not_depend_on_the_batch() {
        let mut rng = Rng::new(7);
        for (rows, cols) in [(1, 8), (3, 576), (70, 100), (5, 2049), (400, 64)] {
            let (delta, residual, weight) = (rng.normals(rows * cols), rng.normals(rows * cols), rng.normals(cols));
            for n_workers in [1, 2] {
                for isa in Isa::ALL.into_iter().filter(|isa| isa.is_available()) {
                    for delta in [None, Some(&delta[..])] {
                        let (mut sum, mut out) = (residual.clone(), vec![0.0; rows * cols]);
                        add_norm(&mut Pool::new(n_workers), isa, delta, &mut sum, &weight, 1e-5, &mut out);
                        for r in 0..rows {
                            let range = r * cols..(r + 1) * cols;
                            let d = delta.map(|d| &d[range.clone()]);
                            let (want_sum, want) = reference::add_norm(d, &residual[range.clone()], &weight, 1e-5);
                            assert_eq!(sum[range.clone()], want_sum);
                            assert_close(&out[range.clone()], &want, 2e-6);
                            let (mut alone, mut alone_out) = (residual[range.clone()].to_vec(), vec![0.0; cols]);
                            let pool = &mut Pool::new(1);
                            add_norm(pool, Isa::Portable, d, &mut alone, &weight, 1e-5, &mut alone_out);
                            assert_eq!(alone_out, out[range]);
                        }
                    }
                }
            }
        }
    }
}
