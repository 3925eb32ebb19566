//! The inner kernels' contract: what a tile is, and which code serves an instruction set.
//!
//! A *tile* is up to [`Kernels::tile_rows`] activation rows against one panel (16 outputs) over a run of columns. It adds
//! to f32 accumulators `[row][16]`. For each (row, output) the float operations and their order are the same whatever the
//! tile's number of rows, which is what makes a row's result independent of its batch:
//!
//! `u = fma(d, I, m * S)`, `acc = fma(s, u, acc)` per block of 32 columns (two `u` and two steps where sub-blocks have 16),
//! with `I` the exact integer sum of `q * x`, `S` that of `x`, and `s` the activation scale. After each run of columns the
//! residuals of its outlier blocks follow, block by block, by the same two steps: they are tiles of one block.

use super::activations::{ActivationTileMut, ResidualTile, ResidualTileMut, Residuals};
use super::layout::{BLOCK, Format, Kind, PANEL};
use super::portable;
use crate::DType;
use crate::cpu::Isa;

/// One quantized tile. Row `r` of `rows`, interleaved: group of 4 columns `g` at `x[4 * (g * rows + r)]`, scale of block `b`
/// at `x_scale[b * rows + r]`, sum of sub-block `s` at `x_sum[s * rows + r]`.
pub(super) struct QuantTile {
    pub rows: usize,
    /// The panel's quants, from the first block on.
    pub quants: *const u8,
    /// `[sub-block][16]`.
    pub d: *const f32,
    /// `[sub-block][16]`.
    pub m: *const f32,
    /// Int8, or int16 (its groups' columns in the order 0, 2, 1, 3) where [`Kind::is_wide`].
    pub x: *const u8,
    pub x_scale: *const f32,
    /// Null where the format has no minimum.
    pub x_sum: *const f32,
    /// Blocks of 32 columns.
    pub n_blocks: usize,
    /// Memory that will be wanted next: `prefetch_bytes` for each block, brought to the cache meanwhile. Never read, so any
    /// address will do; null: none.
    pub prefetch: *const u8,
    pub prefetch_bytes: usize,
    /// `[row][16]`, read and written.
    pub acc: *mut f32,
}

#[cfg(target_arch = "x86_64")]
impl QuantTile {
    /// Prefetches block `b`'s share. With few rows a panel is used as fast as memory delivers it, and the processor's own
    /// prefetcher stops at each page.
    #[inline(always)]
    pub(super) fn prefetch_share(&self, b: usize) {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        if !self.prefetch.is_null() {
            for line in 0..self.prefetch_bytes.div_ceil(64) {
                // SAFETY: a prefetch never faults.
                unsafe {
                    _mm_prefetch::<_MM_HINT_T0>(self.prefetch.wrapping_add(b * self.prefetch_bytes + line * 64).cast());
                }
            }
        }
    }
}

/// The outlier blocks of a run of columns of a unit's rows: tiles of one block, of rows that need not be neighbours.
pub(super) struct ResidualRun<'a> {
    pub tiles: &'a [ResidualTile],
    pub residuals: &'a Residuals,
    /// Block of the row at which the run, and what follows, begins.
    pub first_block: usize,
    pub quants: *const u8,
    /// `[block][16]`.
    pub d: *const f32,
    /// `[block][16]`.
    pub m: *const f32,
    /// `[row of the unit][16]`, read and written.
    pub acc: *mut f32,
}

impl ResidualRun<'_> {
    /// A tile, and which rows of `acc` its rows are.
    ///
    /// # Safety
    /// The tile is one of the run's, and the run's pointers are valid for what the tile implies.
    #[inline(always)]
    pub(super) unsafe fn tile(&self, tile: &ResidualTile, block_bytes: usize) -> (QuantTile, *const u32) {
        let (block, first) = (tile.block as usize - self.first_block, tile.first as usize);
        let from = self.residuals;
        // SAFETY: the lists hold the tile's rows, and the run its block.
        unsafe {
            let tile = QuantTile {
                rows: tile.n_rows as usize,
                quants: self.quants.add(block * block_bytes),
                d: self.d.add(block * PANEL),
                m: self.m.add(block * PANEL),
                x: from.q.as_ptr().add(first * BLOCK).cast(),
                x_scale: from.scale.as_ptr().add(first),
                x_sum: from.sum.as_ptr().add(first),
                n_blocks: 1,
                prefetch: std::ptr::null(),
                prefetch_bytes: 0,
                acc: self.acc,
            };
            (tile, from.rows.as_ptr().add(first))
        }
    }
}

/// One float tile; row `r` of the activations begins at `x + r * x_stride`.
pub(super) struct FloatTile {
    pub rows: usize,
    /// The panel `[column][16]`, from the first column on.
    pub weights: *const u8,
    pub x: *const f32,
    pub x_stride: usize,
    pub n_cols: usize,
    /// `[row][16]`, read and written.
    pub acc: *mut f32,
}

/// How a kernel finds its quants.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Source {
    /// As packed.
    Packed(Kind),
    /// 4-bit quants unpacked to a byte each by `Kernels::unpack_nibbles`.
    UnpackedU4,
}

/// Runs a tile.
///
/// # Safety
/// The instruction set is available, and all pointers are valid for the extents that the tile's fields imply.
pub(super) type QuantKernel = unsafe fn(&QuantTile);
/// As [`QuantKernel`], for all of a run's tiles.
pub(super) type ResidualKernel = unsafe fn(&ResidualRun<'_>);
/// As [`QuantKernel`].
pub(super) type FloatKernel = unsafe fn(&FloatTile);

/// The code of one instruction set. All functions need it to be available.
pub(super) struct Kernels {
    /// Rows of a full tile; the last tile of a batch may have fewer.
    pub tile_rows: usize,
    /// The kernel for tiles of so many rows.
    pub quant: fn(Source, usize) -> QuantKernel,
    /// The kernel for residuals.
    pub residual: fn(Source) -> ResidualKernel,
    /// As `quant`.
    pub float: fn(DType, usize) -> FloatKernel,
    /// Scales of the given scale area to `d` and `m`, `[sub-block][16]`.
    pub expand_scales: unsafe fn(Format, &[u8], &mut [f32], &mut [f32]),
    /// Each 64 bytes to 64 low, then 64 high nibbles.
    pub unpack_nibbles: unsafe fn(&[u8], &mut [u8]),
    /// Row `r` of the rows (the last argument) of a tile; see [`super::activations`].
    pub quantize_row: unsafe fn(&[f32], &mut ActivationTileMut<'_, i8>, usize, usize),
    /// As `quantize_row`, to int16.
    pub quantize_row_wide: unsafe fn(&[f32], &mut ActivationTileMut<'_, i16>, usize, usize),
    /// The residual of a block of the row that the last argument counts in its tile.
    pub quantize_residual: unsafe fn(&[f32; BLOCK], &mut ResidualTileMut<'_>, usize),
}

impl Kernels {
    pub(super) fn of(isa: Isa) -> &'static Self {
        match isa {
            Isa::Portable => &portable::KERNELS,
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => &super::avx2::KERNELS,
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => &super::avx512::KERNELS,
            #[cfg(not(target_arch = "x86_64"))]
            Isa::Avx2 | Isa::Avx512 => unreachable!("not available here"),
        }
    }
}

/// [`Kernels::expand_scales`] over a way to turn 16 f16 into f32; inlined into each instruction set's function.
#[inline(always)]
pub(super) fn expand_scales(
    format: Format,
    scales: &[u8],
    d: &mut [f32],
    m: &mut [f32],
    halves: impl Fn(&[u8; 32]) -> [f32; PANEL],
) {
    use super::layout::Scales;
    let per_record = format.scales.record_cols() / format.kind.sub_len() * PANEL;
    let zero = f32::from(format.zero);
    let records = scales.chunks_exact(format.scales.record_bytes());
    for ((record, d), m) in records.zip(d.chunks_exact_mut(per_record)).zip(m.chunks_exact_mut(per_record)) {
        let lines = record.as_chunks::<32>().0;
        let scale = halves(&lines[0]);
        let (d, m) = (d.as_chunks_mut::<PANEL>().0, m.as_chunks_mut::<PANEL>().0);
        match format.scales {
            Scales::Half => {
                d[0] = scale;
                m[0] = scale.map(|scale| -zero * scale);
            }
            Scales::HalfMin => {
                d[0] = scale;
                m[0] = halves(&lines[1]);
            }
            Scales::K4 => {
                let min = halves(&lines[1]);
                for ((line, d), m) in lines[2..].iter().zip(d).zip(m) {
                    *d = std::array::from_fn(|o| scale[o] * f32::from(line[o]));
                    *m = std::array::from_fn(|o| -(min[o] * f32::from(line[PANEL + o])));
                }
            }
            Scales::K6 => {
                for ((line, d), m) in record[32..].as_chunks::<PANEL>().0.iter().zip(d).zip(m) {
                    *d = std::array::from_fn(|o| scale[o] * f32::from(line[o].cast_signed()));
                    *m = d.map(|d| -zero * d);
                }
            }
        }
    }
}

/// [`Kernels::unpack_nibbles`]; inlined into each instruction set's function.
#[inline(always)]
pub(super) fn unpack_nibbles(packed: &[u8], out: &mut [u8]) {
    for (pair, out) in packed.as_chunks::<64>().0.iter().zip(out.as_chunks_mut::<128>().0) {
        let (low, high) = out.split_at_mut(64);
        for ((byte, low), high) in pair.iter().zip(low).zip(high) {
            *low = byte & 15;
            *high = byte >> 4;
        }
    }
}
