//! The kernels in plain Rust, for any processor.

// Loops over rows and halves index several register arrays at once.
#![allow(clippy::needless_range_loop)]

use super::activations::{self, ActivationTileMut, QuantizedBlock, RESIDUAL_STEPS, ResidualTileMut};
use super::kernel::{
    self, FloatKernel, FloatTile, Kernels, QuantKernel, QuantTile, ResidualKernel, ResidualRun, Source,
};
use super::layout::{BLOCK, Format, Kind, PANEL};
use crate::DType;
use half::{bf16, f16};
use std::slice;

/// Functions of this file; none needs any instruction set.
pub(super) const KERNELS: Kernels = Kernels {
    tile_rows: 4,
    quant,
    residual,
    float,
    expand_scales,
    unpack_nibbles: kernel::unpack_nibbles,
    quantize_row,
    quantize_row_wide,
    quantize_residual,
};

fn expand_scales(format: Format, scales: &[u8], d: &mut [f32], m: &mut [f32]) {
    kernel::expand_scales(format, scales, d, m, |halves| {
        std::array::from_fn(|i| f16::from_le_bytes([halves[2 * i], halves[2 * i + 1]]).to_f32())
    });
}

fn quantize_row(x: &[f32], to: &mut ActivationTileMut<'_, i8>, r: usize, rows: usize) {
    activations::quantize_row(x, to, r, rows, quantize_block);
}

fn quantize_row_wide(x: &[f32], to: &mut ActivationTileMut<'_, i16>, r: usize, rows: usize) {
    activations::quantize_row_wide(x, to, r, rows, quantize_block_wide);
}

fn quantize_residual(x: &[f32; BLOCK], to: &mut ResidualTileMut<'_>, r: usize) {
    activations::quantize_residual(x, to, r, residual_block);
}

/// Rounds `x / scale` to the nearest (even at a tie), with `scale = max|x| / 127`. The scale is NaN if `x` has a NaN.
fn quantize_block(x: &[f32; BLOCK], out: &mut [i8; BLOCK]) -> QuantizedBlock<1> {
    let (inverse, scale) = scale(x, 127.0);
    for (q, v) in out.iter_mut().zip(x) {
        *q = (v * inverse).round_ties_even() as i8;
    }
    QuantizedBlock { scale, sums: [out.iter().map(|&q| i32::from(q)).sum()] }
}

/// As [`quantize_block`], to 32767.
fn quantize_block_wide(x: &[f32; BLOCK], out: &mut [i16; BLOCK]) -> QuantizedBlock<2> {
    let (inverse, scale) = scale(x, 32767.0);
    for (q, v) in out.iter_mut().zip(x) {
        *q = (v * inverse).round_ties_even() as i16;
    }
    let sum = |q: &[i16]| q.iter().map(|&q| i32::from(q)).sum();
    QuantizedBlock { scale, sums: [sum(&out[..16]), sum(&out[16..])] }
}

/// What [`quantize_block`] leaves of `x`, in steps of its scale / [`RESIDUAL_STEPS`].
fn residual_block(x: &[f32; BLOCK], out: &mut [i8; BLOCK]) -> QuantizedBlock<1> {
    let mut first = [0; BLOCK];
    let scale = quantize_block(x, &mut first).scale / RESIDUAL_STEPS;
    for ((q, v), first) in out.iter_mut().zip(x).zip(first) {
        *q = ((v - f32::from(first) * (scale * RESIDUAL_STEPS)) / scale).round_ties_even() as i8;
    }
    QuantizedBlock { scale, sums: [out.iter().map(|&q| i32::from(q)).sum()] }
}

/// What to multiply `x` by, and the scale: `limit / max|x|` and `max|x| / limit`.
fn scale(x: &[f32; BLOCK], limit: f32) -> (f32, f32) {
    let max = x.iter().fold(0.0f32, |max, v| max.max(v.abs()));
    let inverse = if max > 0.0 { limit / max } else { 0.0 };
    (inverse, if x.iter().any(|v| v.is_nan()) { f32::NAN } else { max / limit })
}

fn quant(source: Source, _rows: usize) -> QuantKernel {
    match source {
        Source::Packed(Kind::U4) => |tile| quant_tile(tile, Kind::U4, |r| r, nibble),
        Source::Packed(Kind::U5) => |tile| quant_tile(tile, Kind::U5, |r| r, byte),
        Source::Packed(Kind::U6) => |tile| quant_tile(tile, Kind::U6, |r| r, byte),
        Source::Packed(Kind::I8) => |tile| quant_tile(tile, Kind::I8, |r| r, |w, k| i16::from(w[k].cast_signed())),
        // As wide as a 5-bit quant, and with the same sub-blocks.
        Source::UnpackedU4 => |tile| quant_tile(tile, Kind::U5, |r| r, byte),
    }
}

fn residual(source: Source) -> ResidualKernel {
    match source {
        Source::Packed(Kind::U4) => |run| residual_run(run, Kind::U4, nibble),
        Source::Packed(Kind::U5) | Source::UnpackedU4 => |run| residual_run(run, Kind::U5, byte),
        Source::Packed(Kind::U6 | Kind::I8) => unreachable!("they meet int16"),
    }
}

fn nibble(block: &[u8], k: usize) -> i16 {
    i16::from(block[k / 128 * 64 + k % 64] >> (k / 64 % 2 * 4) & 15)
}

fn byte(block: &[u8], k: usize) -> i16 {
    i16::from(block[k])
}

#[inline(always)]
fn residual_run(run: &ResidualRun<'_>, kind: Kind, quant: impl Fn(&[u8], usize) -> i16 + Copy) {
    for tile in run.tiles {
        // SAFETY: the caller of a kernel vouches for its run (`ResidualKernel`); the list holds the tile's rows.
        let (tile, rows) = unsafe {
            let (tile, rows) = run.tile(tile, kind.block_bytes());
            let n = tile.rows;
            (tile, slice::from_raw_parts(rows, n))
        };
        quant_tile(&tile, kind, |r| rows[r] as usize, quant);
    }
}

/// `quant(block, 64 * group + 4 * output + i)` is the integer at column `4 * group + i`; row `r` accumulates at `place(r)`.
#[inline(always)]
fn quant_tile(tile: &QuantTile, kind: Kind, place: impl Fn(usize) -> usize, quant: impl Fn(&[u8], usize) -> i16) {
    let (rows, n_blocks, n_subs) = (tile.rows, tile.n_blocks, BLOCK / kind.sub_len());
    // SAFETY: the caller of a kernel vouches for these extents (`QuantKernel`), here and below.
    let (quants, d, m, x_scale) = unsafe {
        (
            slice::from_raw_parts(tile.quants, n_blocks * kind.block_bytes()),
            slice::from_raw_parts(tile.d, n_blocks * n_subs * PANEL),
            slice::from_raw_parts(tile.m, n_blocks * n_subs * PANEL),
            slice::from_raw_parts(tile.x_scale, rows * n_blocks),
        )
    };
    // SAFETY: as above.
    let x_sum = |at: usize| if tile.x_sum.is_null() { 0.0 } else { unsafe { *tile.x_sum.add(at) } };
    for (b, block) in quants.chunks_exact(kind.block_bytes()).enumerate() {
        let q: [i16; PANEL * BLOCK] = std::array::from_fn(|k| quant(block, k));
        for r in 0..rows {
            // SAFETY: as above; rows have accumulators of their own.
            let acc = unsafe { slice::from_raw_parts_mut(tile.acc.add(place(r) * PANEL), PANEL) };
            for sub in b * n_subs..(b + 1) * n_subs {
                let mut sums = [0i32; PANEL];
                for group in sub * kind.sub_len() / 4..(sub + 1) * kind.sub_len() / 4 {
                    let at = group * rows + r;
                    // SAFETY: as above; x is a buffer of i8 or i16 accordingly.
                    let x: [i32; 4] = unsafe {
                        if kind.is_wide() {
                            let [a, c, b, d] = tile.x.cast::<[i16; 4]>().add(at).read();
                            [a, b, c, d].map(i32::from)
                        } else {
                            tile.x.cast::<[i8; 4]>().add(at).read().map(i32::from)
                        }
                    };
                    let q = &q[group % (BLOCK / 4) * 64..][..64];
                    for (sum, q) in sums.iter_mut().zip(q.as_chunks::<4>().0) {
                        *sum += (0..4).map(|i| i32::from(q[i]) * x[i]).sum::<i32>();
                    }
                }
                for o in 0..PANEL {
                    let (d, m) = (d[sub * PANEL + o], m[sub * PANEL + o]);
                    acc[o] += x_scale[b * rows + r] * (d * sums[o] as f32 + m * x_sum(sub * rows + r));
                }
            }
        }
    }
}

fn float(dtype: DType, _rows: usize) -> FloatKernel {
    match dtype {
        DType::F32 => |tile| float_tile(tile, f32::from_le_bytes),
        DType::F16 => |tile| float_tile(tile, |bytes| f16::from_le_bytes(bytes).to_f32()),
        DType::Bf16 => |tile| float_tile(tile, |bytes| bf16::from_le_bytes(bytes).to_f32()),
        _ => unreachable!("a block format"),
    }
}

#[inline(always)]
fn float_tile<const BYTES: usize>(tile: &FloatTile, to_f32: impl Fn([u8; BYTES]) -> f32) {
    // SAFETY: the caller of a kernel vouches for these extents (`FloatKernel`).
    let (weights, acc) = unsafe {
        (
            slice::from_raw_parts(tile.weights, tile.n_cols * PANEL * BYTES),
            slice::from_raw_parts_mut(tile.acc, tile.rows * PANEL),
        )
    };
    for (k, column) in weights.as_chunks::<BYTES>().0.as_chunks::<PANEL>().0.iter().enumerate() {
        let w = column.map(&to_f32);
        for (r, acc) in acc.as_chunks_mut::<PANEL>().0.iter_mut().enumerate() {
            // SAFETY: row `r` has `n_cols` values from `x + r * x_stride` on.
            let x = unsafe { *tile.x.add(r * tile.x_stride + k) };
            for (acc, w) in acc.iter_mut().zip(&w) {
                *acc += w * x;
            }
        }
    }
}
