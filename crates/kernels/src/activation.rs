//! The gated activation of an MLP: `out = act(gate) * up` over merged rows `[gate | up]`.

use crate::Activation;
use crate::cpu::lanes::{Kernel, LANES, Lanes, dispatch};
use crate::cpu::par::{Disjoint, for_rows};
use crate::cpu::{Isa, Pool};

/// `gate_up` is `rows × 2 n_cols`, `out` is `rows × n_cols`, both row-major.
pub(crate) fn gated(pool: &mut Pool, isa: Isa, act: Activation, gate_up: &[f32], n_cols: usize, out: &mut [f32]) {
    assert_eq!(out.len() % n_cols, 0);
    assert_eq!(gate_up.len(), 2 * out.len());
    let n_rows = out.len() / n_cols;
    let out = Disjoint::new(out);
    for_rows(pool, n_rows, n_cols, |rows| {
        // SAFETY: chunks of rows do not overlap.
        let out = unsafe { out.slice(rows.start * n_cols, rows.len() * n_cols) };
        let gate_up = &gate_up[2 * rows.start * n_cols..2 * rows.end * n_cols];
        dispatch(isa, Gated { act, gate_up, n_cols, out });
    });
}

// [`Activation`] as a constant parameter, so that each has a loop of its own.
const SILU: u8 = 0;
const GELU_TANH: u8 = 1;
const GELU: u8 = 2;

struct Gated<'a> {
    act: Activation,
    gate_up: &'a [f32],
    n_cols: usize,
    out: &'a mut [f32],
}

impl Kernel for Gated<'_> {
    type Out = ();
    #[inline(always)]
    fn run<L: Lanes>(self) {
        match self.act {
            Activation::Silu => self.rows::<L, SILU>(),
            Activation::GeluTanh => self.rows::<L, GELU_TANH>(),
            Activation::Gelu => self.rows::<L, GELU>(),
        }
    }
}

impl Gated<'_> {
    #[inline(always)]
    fn rows<L: Lanes, const ACT: u8>(self) {
        let n = self.n_cols;
        for (row, out) in self.gate_up.chunks_exact(2 * n).zip(self.out.chunks_exact_mut(n)) {
            let (gate, up) = row.split_at(n);
            for i in (0..n / LANES * LANES).step_by(LANES) {
                // SAFETY: sixteen elements from `i` lie within all three slices of `n`.
                unsafe {
                    let g = L::load(gate.as_ptr().add(i));
                    apply::<L, ACT>(g).mul(L::load(up.as_ptr().add(i))).store(out.as_mut_ptr().add(i));
                }
            }
            let (i, rest) = (n / LANES * LANES, n % LANES);
            // SAFETY: `rest` elements from `i` lie within all three slices of `n`.
            unsafe {
                let g = L::load_part(gate.as_ptr().add(i), rest, 0.0);
                let u = L::load_part(up.as_ptr().add(i), rest, 0.0);
                apply::<L, ACT>(g).mul(u).store_part(out.as_mut_ptr().add(i), rest);
            }
        }
    }
}

#[inline(always)]
fn apply<L: Lanes, const ACT: u8>(x: L) -> L {
    match ACT {
        SILU => logistic_product(x, x),
        GELU_TANH => {
            // (1 + tanh u) / 2 = logistic(2u), which has no cancellation; u = sqrt(2/pi) (x + 0.044715 x^3).
            let cubic = x.mul(x).fma(L::splat(0.044_715), L::splat(1.0));
            logistic_product(x, x.mul(cubic).mul(L::splat(2.0 * 0.797_884_6)))
        }
        GELU => x.mul(normal_cdf(x)),
        _ => unreachable!("there are three activations"),
    }
}

/// `x * logistic(y)`.
#[inline(always)]
fn logistic_product<L: Lanes>(x: L, y: L) -> L {
    x.div(L::splat(0.0).sub(y).exp().add(L::splat(1.0)))
}

/// `(1 + erf(x / sqrt 2)) / 2`, to about 2e-7 relative also in the tails: `erfcc` of Numerical Recipes (6.2), a Chebyshev
/// fit of `ln(erfc(z) / t) + z^2` in `t = 1 / (1 + z / 2)`.
#[inline(always)]
fn normal_cdf<L: Lanes>(x: L) -> L {
    #[rustfmt::skip]
    const FIT: [f32; 10] = [
        0.170_872_76, -0.822_152_26, 1.488_515_9, -1.135_204, 0.278_868_08, -0.186_288_06, 0.096_784_18, 0.374_091_95,
        1.000_023_7, -1.265_512_2,
    ];
    let (zero, one) = (L::splat(0.0), L::splat(1.0));
    let z = zero.sub(x).max(x).mul(L::splat(std::f32::consts::FRAC_1_SQRT_2));
    let t = one.div(z.fma(L::splat(0.5), one));
    let mut fit = zero;
    for c in FIT {
        fit = fit.fma(t, L::splat(c));
    }
    let tail = zero.sub(z).fma(z, fit).exp().mul(t).mul(L::splat(0.5));
    // The lower tail for x < 0, one minus it otherwise; step is 1 for x > 0 and 0 for x <= 0, exactly.
    let step = x.mul(L::splat(f32::MAX)).min(one).max(zero);
    step.fma(one.sub(tail.add(tail)), tail)
}

/// The activations in f64.
pub mod reference {
    use crate::Activation;

    /// `act(gate) * up`.
    pub fn gated(act: Activation, gate: f32, up: f32) -> f32 {
        let x = f64::from(gate);
        let y = match act {
            Activation::Silu => x / (1.0 + (-x).exp()),
            Activation::GeluTanh => {
                0.5 * x * (1.0 + ((2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x.powi(3))).tanh())
            }
            Activation::Gelu => 0.5 * x * (1.0 + erf(x / std::f64::consts::SQRT_2)),
        };
        (y * f64::from(up)) as f32
    }

    /// The error function: `2/sqrt(pi) exp(-x²) Σ 2^n x^(2n+1) / (2n+1)!!`, whose terms have one sign.
    fn erf(x: f64) -> f64 {
        if x.abs() > 6.0 {
            return x.signum();
        }
        let (mut term, mut sum) = (x, x);
        for n in 1..300 {
            term *= 2.0 * x * x / f64::from(2 * n + 1);
            sum += term;
        }
        sum * (-x * x).exp() * std::f64::consts::FRAC_2_SQRT_PI
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{Rng, assert_close};

    #[test]
    fn matches_the_reference() {
        let mut rng = Rng::new(11);
        for (rows, cols) in [(1, 16), (2, 1536), (300, 40), (7, 1001)] {
            let gate_up: Vec<f32> = rng.normals(2 * rows * cols).iter().map(|x| x * 4.0).collect();
            for act in [Activation::Silu, Activation::GeluTanh, Activation::Gelu] {
                let want: Vec<f32> = (0..rows * cols)
                    .map(|i| {
                        let at = i / cols * 2 * cols + i % cols;
                        reference::gated(act, gate_up[at], gate_up[at + cols])
                    })
                    .collect();
                for n_workers in [1, 2] {
                    let mut out = vec![0.0; rows * cols];
                    gated(&mut Pool::new(n_workers), Isa::detect(), act, &gate_up, cols, &mut out);
                    assert_close(&out, &want, 2e-6);
                    let mut portable = vec![0.0; rows * cols];
                    gated(&mut Pool::new(n_workers), Isa::Portable, act, &gate_up, cols, &mut portable);
                    assert_eq!(portable, out);
                }
            }
        }
    }

    #[test]
    fn extremes_are_finite() {
        for act in [Activation::Silu, Activation::GeluTanh, Activation::Gelu] {
            let mut out = [0.0; 4];
            let gate_up = [-1e4, -100.0, 0.0, 100.0, 1.0, 1.0, 1.0, 1.0];
            gated(&mut Pool::new(1), Isa::detect(), act, &gate_up, 4, &mut out);
            assert_eq!(out.map(|x| x + 0.0), [0.0, 0.0, 0.0, 100.0], "{act:?}");
        }
    }
}
