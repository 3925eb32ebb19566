//! Launches of the linear layers for few tokens: see `small_m.cuh`.

use super::Element;
use super::attention::encode;
use super::device::{Arg, Device, Launch};
use crate::{Activation, KernelError};

/// Most tokens; above them cuBLASLt is as fast.
pub const MAX_TOKENS: usize = 16;
/// Bytes of a line, the unit in which rows of weights are read.
const LINE_BYTES: usize = 128;
/// Shared memory of a CTA that leaves room for one of the next kernel, and all of it.
const HALF_SHARED: usize = 113 << 10;
const ALL_SHARED: usize = 220 << 10;
/// Weights of this many bytes are read so long that a deep ring is worth more than an early start of the next kernel.
const LARGE_BYTES: usize = 80 << 20;

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

    fn recipe(&self, n_sms: usize) -> Recipe {
        let tokens = if self.m <= 8 { 8 } else { 16 };
        let fixed_rows = self.f32_out || self.act.is_some();
        // Eights of rows of a CTA, in tiles of up to four.
        let share = (self.n / 8).div_ceil(n_sms);
        let rows = if fixed_rows { 4 } else { share.div_ceil(share.div_ceil(4)).clamp(2, 4) };
        let all_lines = Element::BYTES * self.k / LINE_BYTES;
        let short = all_lines < 8 || (!all_lines.is_multiple_of(8) && all_lines < 16);
        let lines = if short { all_lines } else { 8 };
        let x_bytes = match tokens {
            8 => (LINE_BYTES * self.m * lines).next_multiple_of(1024),
            _ => LINE_BYTES * tokens * lines,
        };
        let fixed = 1296 + (256 * rows + 32) * tokens;
        let stage = 1024 * lines * rows + x_bytes;
        let weights = Element::BYTES * self.k * self.n * if self.act.is_some() { 2 } else { 1 };
        let budget = if weights > LARGE_BYTES { ALL_SHARED } else { HALF_SHARED };
        // Two chunks at least, or nothing overlaps.
        let stages = ((budget - fixed) / stage).clamp(2, 16);
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
            encode(address, element, sizes, [Element::BYTES * self.k, LINE_BYTES], [width, tile_rows, lines])
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
        let launch = Launch { grid: [device.n_sms, 1, 1], threads: 288, shared_bytes };
        device.launch(&kernel, launch, &[Arg::Struct(&args), Arg::Struct(&w_map), Arg::Struct(&x_map)]);
        Ok(())
    }

    /// Lets all kernels of the family use the shared memory that they may need.
    pub fn allow_shared(device: &Device, element: Element) {
        for tokens in [8, 16] {
            let plain = (2..=4).map(|rows| format!("small_m_{}_t{tokens}_r{rows}", element.suffix()));
            let others = ["gated", "logits"].map(|kind| format!("small_m_{kind}_{}_t{tokens}_r4", element.suffix()));
            plain.chain(others).for_each(|kernel| device.allow_shared(&kernel, 227 << 10));
        }
    }
}
