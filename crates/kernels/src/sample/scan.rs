//! Vectorized passes over a row of logits.

use crate::cpu::Isa;
use crate::cpu::lanes::{Kernel, LANES, Lanes, dispatch};

/// Logits whose weights are summed to one partial sum.
pub(super) const BLOCK: usize = 512;

/// The greatest logit; `None` if there is a NaN or +inf, or nothing above -inf.
pub(super) fn max(isa: Isa, logits: &[f32]) -> Option<f32> {
    let (max, has_nan) = dispatch(isa, Max(logits));
    (!has_nan && max.is_finite()).then_some(max)
}

/// The lowest index whose logit equals `value`.
pub(super) fn position(isa: Isa, logits: &[f32], value: f32) -> Option<usize> {
    dispatch(isa, Position(logits, value))
}

/// Number of logits greater than `value`.
pub(super) fn count_above(isa: Isa, logits: &[f32], value: f32) -> usize {
    dispatch(isa, CountAbove(logits, value))
}

/// Sums of `exp((x - max) * inv_t)` over blocks of [`BLOCK`] logits.
pub(super) fn block_sums(isa: Isa, logits: &[f32], max: f32, inv_t: f32, sums: &mut Vec<f64>) {
    sums.clear();
    dispatch(isa, BlockSums { logits, max, inv_t, sums });
}

/// `exp((x - max) * inv_t)` in place.
pub(super) fn weigh(isa: Isa, values: &mut [f32], max: f32, inv_t: f32) {
    dispatch(isa, Weigh { values, max, inv_t });
}

/// Calls `push(index, logit)` in ascending order for logits above the threshold, which `push` returns anew.
pub(super) fn for_each_above(isa: Isa, logits: &[f32], threshold: f32, push: &mut dyn FnMut(u32, f32) -> f32) {
    dispatch(isa, Above { logits, threshold, push });
}

/// Vector `i` of `x`; beyond the end lanes hold `fill`.
///
/// Passes are plain loops over this: a closure per vector would be compiled without the instruction set.
#[inline(always)]
fn vector<L: Lanes>(x: &[f32], i: usize, fill: f32) -> L {
    let (start, left) = (i * LANES, x.len() - i * LANES);
    // SAFETY: as many elements as are read are left from `start`.
    unsafe {
        if left >= LANES { L::load(x.as_ptr().add(start)) } else { L::load_part(x.as_ptr().add(start), left, fill) }
    }
}

struct Max<'a>(&'a [f32]);

impl Kernel for Max<'_> {
    type Out = (f32, bool);
    #[inline(always)]
    fn run<L: Lanes>(self) -> (f32, bool) {
        // `max` drops a NaN in its first operand; what does not equal itself is a NaN.
        let mut acc = [L::splat(f32::NEG_INFINITY); 4];
        let mut equal = 0xffff;
        let (body, tail) = self.0.split_at(self.0.len() / (4 * LANES) * (4 * LANES));
        for chunk in body.chunks_exact(4 * LANES) {
            for (j, acc) in acc.iter_mut().enumerate() {
                // SAFETY: the chunk has four vectors.
                let v = unsafe { L::load(chunk.as_ptr().add(j * LANES)) };
                *acc = v.max(*acc);
                equal &= v.bits_eq(v);
            }
        }
        for x in tail.chunks(LANES) {
            // SAFETY: the chunk has as many elements as are read.
            let v = unsafe { L::load_part(x.as_ptr(), x.len(), f32::NEG_INFINITY) };
            acc[0] = v.max(acc[0]);
            equal &= v.bits_eq(v);
        }
        let max = acc[0].max(acc[1]).max(acc[2].max(acc[3])).max_lane();
        (max, equal != 0xffff)
    }
}

struct Position<'a>(&'a [f32], f32);

impl Kernel for Position<'_> {
    type Out = Option<usize>;
    #[inline(always)]
    fn run<L: Lanes>(self) -> Option<usize> {
        let value = L::splat(self.1);
        for i in 0..self.0.len().div_ceil(LANES) {
            let bits = vector::<L>(self.0, i, f32::NAN).bits_eq(value);
            if bits != 0 {
                return Some(i * LANES + bits.trailing_zeros() as usize);
            }
        }
        None
    }
}

struct CountAbove<'a>(&'a [f32], f32);

impl Kernel for CountAbove<'_> {
    type Out = usize;
    #[inline(always)]
    fn run<L: Lanes>(self) -> usize {
        let (value, mut n) = (L::splat(self.1), 0);
        for i in 0..self.0.len().div_ceil(LANES) {
            n += vector::<L>(self.0, i, f32::NEG_INFINITY).bits_gt(value).count_ones();
        }
        n as usize
    }
}

struct BlockSums<'a> {
    logits: &'a [f32],
    max: f32,
    inv_t: f32,
    sums: &'a mut Vec<f64>,
}

impl Kernel for BlockSums<'_> {
    type Out = ();
    #[inline(always)]
    fn run<L: Lanes>(self) {
        let (max, inv_t) = (L::splat(self.max), L::splat(self.inv_t));
        for block in self.logits.chunks(BLOCK) {
            let mut sum = L::splat(0.0);
            for i in 0..block.len().div_ceil(LANES) {
                sum = sum.add(vector::<L>(block, i, f32::NEG_INFINITY).sub(max).mul(inv_t).exp());
            }
            self.sums.push(f64::from(sum.sum()));
        }
    }
}

struct Weigh<'a> {
    values: &'a mut [f32],
    max: f32,
    inv_t: f32,
}

impl Kernel for Weigh<'_> {
    type Out = ();
    #[inline(always)]
    fn run<L: Lanes>(self) {
        let (max, inv_t) = (L::splat(self.max), L::splat(self.inv_t));
        for x in self.values.chunks_mut(LANES) {
            // SAFETY: the chunk has as many elements as are read and written.
            unsafe {
                let v = L::load_part(x.as_ptr(), x.len(), 0.0);
                v.sub(max).mul(inv_t).exp().store_part(x.as_mut_ptr(), x.len());
            }
        }
    }
}

struct Above<'a> {
    logits: &'a [f32],
    threshold: f32,
    push: &'a mut dyn FnMut(u32, f32) -> f32,
}

impl Kernel for Above<'_> {
    type Out = ();
    #[inline(always)]
    fn run<L: Lanes>(self) {
        let Self { logits, mut threshold, push } = self;
        for i in 0..logits.len().div_ceil(LANES) {
            let mut bits = vector::<L>(logits, i, f32::NEG_INFINITY).bits_gt(L::splat(threshold));
            while bits != 0 {
                let index = i * LANES + bits.trailing_zeros() as usize;
                // The threshold may have risen since the comparison.
                if logits[index] > threshold {
                    threshold = push(index as u32, logits[index]);
                }
                bits &= bits - 1;
            }
        }
    }
}
