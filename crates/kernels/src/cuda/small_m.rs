//! Launches of the linear layers for few tokens: see `small_m.cuh`.

use super::Element;
use super::device::{Arg, Device, Launch};
use super::tensor_map::{Promotion, encode};
use crate::{Activation, KernelError};

/// Most tokens; above them cuBLASLt is as fast.
pub const MAX_TOKENS: usize = 16;
/// Bytes of a line, the unit in which rows of weights are read.
const LINE_BYTES: usize = 128;
/// Shared memory of a CTA that leaves room for one of the next kernel, and all of it.
const HALF_SHARED: usize = 112 << 10;
const ALL_SHARED: usize = 220 << 10;
/// A CTA's share of the weights above which a deep ring is worth more than an early start of the next kernel.
const LARGE_SHARE: usize = 128 << 10;

/// `out[m][n] = x[m][k] · w[n][k]ᵀ + bias[n]`, or with `act` `act(x · gateᵀ) * (x · upᵀ)` for `w = [gate | up]` of `2n` rows.
#[derive(Debug, Clone, Copy)]
pub struct SmallM {
    /// Tokens.
    pub m: usize,
    /// Columns of the output.
    pub n: usize,
    /// Input features.
    pub k: usize,
    /// Whether the output is f32.
    pub f32_out: bool,
    /// Gated activation.
    pub act: Option<Activation>,
}

/// How a kernel of the family runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Recipe {
    /// Tokens the kernel is made for.
    tokens: usize,
    /// Eights of rows in a tile.
    rows: usize,
    /// Lines of a chunk.
    lines: usize,
    /// Chunks in the ring.
    stages: usize,
    shared_bytes: usize,
}

impl SmallM {
    /// Whether this path takes the product, and is the fastest one.
    pub fn takes(&self, device: &Device) -> bool {
        device.capability.0 >= 9
            && self.m <= MAX_TOKENS
            && self.n.is_multiple_of(8)
            && (Element::BYTES * self.k).is_multiple_of(LINE_BYTES)
    }

    /// What was fastest on an H200 for each kind and size; the comment above `SMALL_M` in `small_m.cuh` has it in words.
    fn recipe(&self, n_sms: usize) -> Recipe {
        let tokens = if self.m <= 8 { 8 } else { 16 };
        // Eights of rows of a CTA.
        let share = (self.n / 8).div_ceil(n_sms);
        let even = share.div_ceil(share.div_ceil(4)).clamp(2, 4);
        let (rows, lines) = match (self.act.is_some(), self.f32_out, tokens) {
            (_, true, 8) => (4, if self.m < 5 { 16 } else { 8 }),
            (true, _, 8) => (2, 16),
            (_, _, 8) => (if matches!(share, 1 | 3) { share } else { 2 }, 16),
            (false, false, _) => (even, 8),
            _ => (4, 8),
        };
        let all_lines = Element::BYTES * self.k / LINE_BYTES;
        let uneven = all_lines < 2 * lines && !all_lines.is_multiple_of(lines);
        let lines = if all_lines < lines || uneven { all_lines } else { lines };
        let x_bytes = match tokens {
            8 => (LINE_BYTES * self.m * lines).next_multiple_of(1024),
            _ => LINE_BYTES * tokens * lines,
        };
        let fixed = 1296 + (256 * rows + 32) * tokens;
        let stage = 1024 * lines * rows + x_bytes;
        let gates = if self.act.is_some() { 2 } else { 1 };
        let large = share * 8 * gates * Element::BYTES * self.k > LARGE_SHARE;
        let budget = if large { ALL_SHARED } else { HALF_SHARED };
        let stages = ((budget - fixed) / stage).min(16);
        assert!(stages > 0, "a chunk fits the shared memory");
        Recipe { tokens, rows, lines, stages, shared_bytes: fixed + stages * stage }
    }

    /// Enqueues it. Addresses are of device memory of the shapes above.
    pub fn launch(&self, device: &Device, element: Element, [x, w, bias, out]: [u64; 4]) -> Result<(), KernelError> {
        let recipe = self.recipe(device.n_sms);
        let Recipe { tokens, rows, lines, stages, shared_bytes } = recipe;
        let gates = if self.act.is_some() { 2 } else { 1 };
        let map = |address, n_rows: usize, tile_rows| {
            let width = LINE_BYTES / Element::BYTES;
            let sizes = [width, n_rows, self.k / width];
            encode(
                address,
                element,
                sizes,
                [Element::BYTES * self.k, LINE_BYTES],
                [width, tile_rows, lines],
                Promotion::L2_128,
            )
        };
        let w_map = map(w, gates * self.n, 8)?;
        let x_map = map(x, self.m, if tokens == 8 { self.m } else { 8 })?;
        let pair = |a: usize, b: usize| a as u64 | (b as u64) << 32;
        let act = match self.act {
            None | Some(Activation::Silu) => 0,
            Some(Activation::GeluTanh) => 1,
            Some(Activation::Gelu) => 2,
        };
        let args = [w, x, bias, 0, out, 0, 0, pair(0, self.m), pair(self.n, self.k), pair(lines, stages), pair(act, 0)];
        let kind = match (self.act.is_some(), self.f32_out) {
            (true, _) => "gated_",
            (_, true) => "logits_",
            _ => "",
        };
        let kernel = format!("small_m_{kind}{}_t{tokens}_r{rows}", element.suffix());
        let launch = Launch::new([device.n_sms, 1, 1], 288, shared_bytes);
        device.launch(&kernel, launch, &[Arg::Struct(&args), Arg::Struct(&w_map), Arg::Struct(&x_map)]);
        Ok(())
    }

    /// Lets all kernels of the family use the shared memory that they may need.
    pub fn allow_shared(device: &Device, element: Element) {
        let suffix = element.suffix();
        let plain = [(8, 1), (8, 2), (8, 3), (8, 4), (16, 2), (16, 3), (16, 4)];
        let plain = plain.map(|(tokens, rows)| format!("small_m_{suffix}_t{tokens}_r{rows}"));
        let others = [("gated", 8, 2), ("gated", 16, 4), ("logits", 8, 4), ("logits", 16, 4)];
        let others = others.map(|(kind, tokens, rows)| format!("small_m_{kind}_{suffix}_t{tokens}_r{rows}"));
        plain.iter().chain(&others).for_each(|kernel| device.allow_shared(kernel, 227 << 10));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_recipe_fits_a_multiprocessor() {
        for (n, k) in [(6144, 4096), (4096, 14_336), (14_336, 4096), (128_256, 4096), (960, 576), (576, 1536), (8, 64)]
        {
            for m in 1..=MAX_TOKENS {
                for (f32_out, act) in [(false, None), (true, None), (false, Some(Activation::Silu))] {
                    let recipe = SmallM { m, n, k, f32_out, act }.recipe(132);
                    assert!(recipe.shared_bytes <= 227 << 10 && (1..=16).contains(&recipe.stages), "{recipe:?}");
                    assert!(recipe.tokens >= m && recipe.lines * LINE_BYTES <= 2 * k, "{recipe:?}");
                }
            }
        }
    }
}
