//! Reference dequantization: every element format to f32, one block at a time, written to be read.
//!
//! Formulas and bit layouts follow ggml's `dequantize_row_*` (ggml-quants.c). All arithmetic is f32, in ggml's order.

use crate::DType;
use half::{bf16, f16};

/// Writes the `out.len()` elements of one row (or of any whole number of blocks).
///
/// # Panics
/// If `out` is no whole number of blocks, or `data` does not hold exactly that many.
pub fn dequantize(dtype: DType, data: &[u8], out: &mut [f32]) {
    assert_eq!(dtype.row_bytes(out.len()), Some(data.len()), "{dtype:?}: size");
    let blocks = data.chunks_exact(dtype.block_bytes()).zip(out.chunks_exact_mut(dtype.block_len()));
    for (block, out) in blocks {
        match dtype {
            DType::F32 => out[0] = f32::from_le_bytes([block[0], block[1], block[2], block[3]]),
            DType::F16 => out[0] = half_at(block, 0),
            DType::Bf16 => out[0] = bf16::from_le_bytes([block[0], block[1]]).to_f32(),
            DType::Q4_0 => q4_0(block, out),
            DType::Q4_1 => q4_1(block, out),
            DType::Q5_0 => q5_0(block, out),
            DType::Q5_1 => q5_1(block, out),
            DType::Q8_0 => q8_0(block, out),
            DType::Q4K => q4_k(block, out),
            DType::Q5K => q5_k(block, out),
            DType::Q6K => q6_k(block, out),
        }
    }
}

/// The f16 at byte `at`.
pub(crate) fn half_at(block: &[u8], at: usize) -> f32 {
    f16::from_le_bytes([block[at], block[at + 1]]).to_f32()
}

/// Low nibbles are elements 0..16, high nibbles 16..32.
fn nibble(nibbles: &[u8], i: usize) -> u8 {
    nibbles[i % 16] >> (i / 16 * 4) & 15
}

/// Bit 4 of element `i` of a 5-bit block, in its place.
fn high_bit(bits: &[u8], i: usize) -> u8 {
    (bits[i / 8] >> (i % 8) & 1) << 4
}

fn q4_0(block: &[u8], out: &mut [f32]) {
    let d = half_at(block, 0);
    for (i, y) in out.iter_mut().enumerate() {
        *y = d * (f32::from(nibble(&block[2..], i)) - 8.0);
    }
}

fn q4_1(block: &[u8], out: &mut [f32]) {
    let (d, m) = (half_at(block, 0), half_at(block, 2));
    for (i, y) in out.iter_mut().enumerate() {
        *y = d * f32::from(nibble(&block[4..], i)) + m;
    }
}

fn q5_0(block: &[u8], out: &mut [f32]) {
    let d = half_at(block, 0);
    for (i, y) in out.iter_mut().enumerate() {
        *y = d * (f32::from(nibble(&block[6..], i) | high_bit(&block[2..6], i)) - 16.0);
    }
}

fn q5_1(block: &[u8], out: &mut [f32]) {
    let (d, m) = (half_at(block, 0), half_at(block, 2));
    for (i, y) in out.iter_mut().enumerate() {
        *y = d * f32::from(nibble(&block[8..], i) | high_bit(&block[4..8], i)) + m;
    }
}

fn q8_0(block: &[u8], out: &mut [f32]) {
    let d = half_at(block, 0);
    for (y, &q) in out.iter_mut().zip(&block[2..]) {
        *y = d * f32::from(q.cast_signed());
    }
}

/// 6-bit scale and minimum of the 32-element sub-block `sub` of a Q4_K or Q5_K block (`get_scale_min_k4`).
pub(crate) fn k4_scale_min(packed: &[u8], sub: usize) -> (u8, u8) {
    if sub < 4 {
        (packed[sub] & 63, packed[sub + 4] & 63)
    } else {
        let (low, high) = (packed[sub + 4], packed[sub - 4] >> 6);
        (low & 15 | high << 4, low >> 4 | packed[sub] >> 6 << 4)
    }
}

fn q4_k(block: &[u8], out: &mut [f32]) {
    let (d, dmin) = (half_at(block, 0), half_at(block, 2));
    for (sub, out) in out.chunks_exact_mut(32).enumerate() {
        let (scale, min) = k4_scale_min(&block[4..16], sub);
        let (scale, min) = (d * f32::from(scale), dmin * f32::from(min));
        for (i, y) in out.iter_mut().enumerate() {
            *y = scale * f32::from(k_nibble(&block[16..], sub, i)) - min;
        }
    }
}

fn q5_k(block: &[u8], out: &mut [f32]) {
    let (d, dmin) = (half_at(block, 0), half_at(block, 2));
    for (sub, out) in out.chunks_exact_mut(32).enumerate() {
        let (scale, min) = k4_scale_min(&block[4..16], sub);
        let (scale, min) = (d * f32::from(scale), dmin * f32::from(min));
        for (i, y) in out.iter_mut().enumerate() {
            let q = k_nibble(&block[48..], sub, i) | (block[16 + i] >> sub & 1) << 4;
            *y = scale * f32::from(q) - min;
        }
    }
}

/// Sub-blocks 2n and 2n + 1 are the low and high nibbles of the same 32 bytes.
pub(crate) fn k_nibble(nibbles: &[u8], sub: usize, i: usize) -> u8 {
    nibbles[sub / 2 * 32 + i] >> (sub % 2 * 4) & 15
}

fn q6_k(block: &[u8], out: &mut [f32]) {
    let d = half_at(block, 208);
    for (i, y) in out.iter_mut().enumerate() {
        let scale = d * f32::from(block[192 + i / 16].cast_signed());
        *y = scale * (f32::from(q6_k_quant(block, i)) - 32.0);
    }
}

/// Element `i` of a Q6_K block, 0 to 63: each half of 128 elements has 64 bytes of nibbles and 32 of bit pairs.
pub(crate) fn q6_k_quant(block: &[u8], i: usize) -> u8 {
    let (half, quarter, j) = (i / 128, i % 128 / 32, i % 32);
    let low = block[half * 64 + quarter % 2 * 32 + j] >> (quarter / 2 * 4) & 15;
    let high = block[128 + half * 32 + j] >> (quarter * 2) & 3;
    low | high << 4
}
