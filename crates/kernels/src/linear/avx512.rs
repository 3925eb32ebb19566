//! The kernels for AVX-512 with VNNI: `vpdpbusd` adds four products per lane, so one instruction is 16 outputs × 4 columns.
//!
//! Against int16 activations `vpdpwssd` adds two products per lane: of the even columns of a group, then of the odd ones.

// Loops over rows and halves index several register arrays at once.
#![allow(clippy::needless_range_loop)]

use super::avx2;
use super::kernel::{FloatKernel, FloatTile, Kernels, QuantKernel, QuantTile, ResidualKernel, ResidualRun, Source};
use super::layout::{BLOCK, Kind, PANEL};
use crate::DType;
use std::arch::x86_64::*;

/// Functions of this file: all need AVX-512 F, BW, VL and VNNI beside what [`avx2`] needs.
pub(super) const KERNELS: Kernels = Kernels { tile_rows: 8, quant, residual, float, ..avx2::KERNELS };

fn quant(source: Source, rows: usize) -> QuantKernel {
    match source {
        Source::Packed(Kind::U4) => by_rows::<Nibbles>(rows),
        Source::Packed(Kind::U5) | Source::UnpackedU4 => by_rows::<Bytes>(rows),
        Source::Packed(Kind::U6) => by_rows::<Wide<false, 16>>(rows),
        Source::Packed(Kind::I8) => by_rows::<Wide<true, BLOCK>>(rows),
    }
}

/// The kernel for residuals: all tiles in one call.
fn residual(source: Source) -> ResidualKernel {
    match source {
        Source::Packed(Kind::U4) => residual_run::<Nibbles>,
        Source::Packed(Kind::U5) | Source::UnpackedU4 => residual_run::<Bytes>,
        Source::Packed(Kind::U6 | Kind::I8) => unreachable!("they meet int16"),
    }
}

fn by_rows<Q: Quants>(rows: usize) -> QuantKernel {
    match rows {
        1 => quant_tile::<Q, 1>,
        2 => quant_tile::<Q, 2>,
        3 => quant_tile::<Q, 3>,
        4 => quant_tile::<Q, 4>,
        5 => quant_tile::<Q, 5>,
        6 => quant_tile::<Q, 6>,
        7 => quant_tile::<Q, 7>,
        8 => quant_tile::<Q, 8>,
        _ => unreachable!("at most tile_rows"),
    }
}

/// Quants of a block, two groups of 4 columns at a time.
trait Quants {
    const SUB_LEN: usize = BLOCK;
    const BLOCK_BYTES: usize = PANEL * BLOCK;
    /// Bytes of an activation.
    const X_BYTES: usize = 1;
    const HAS_MIN: bool = true;

    /// Pair `pair` of the block at `block`: 16 outputs × 4 columns each.
    ///
    /// # Safety
    /// AVX-512 BW; the block is readable.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw")]
    unsafe fn load(block: *const u8, pair: usize) -> [__m512i; 2] {
        // SAFETY: 128 bytes of the block.
        std::array::from_fn(|g| unsafe { _mm512_loadu_si512(block.add(128 * pair + 64 * g).cast()) })
    }

    /// Adds the products of a group with 4 activations, which are at `x`.
    ///
    /// # Safety
    /// AVX-512 VNNI; the activations are readable.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
    unsafe fn add(sum: __m512i, group: __m512i, x: *const u8) -> __m512i {
        // SAFETY: by this function's own condition.
        _mm512_dpbusd_epi32(sum, group, _mm512_set1_epi32(unsafe { x.cast::<i32>().read_unaligned() }))
    }
}

struct Nibbles;
struct Bytes;
struct Wide<const SIGNED: bool, const SUB_LEN: usize>;

impl Quants for Nibbles {
    const BLOCK_BYTES: usize = Kind::U4.block_bytes();

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw")]
    unsafe fn load(block: *const u8, pair: usize) -> [__m512i; 2] {
        let mask = _mm512_set1_epi8(15);
        // SAFETY: 64 bytes of the block.
        let packed = unsafe { _mm512_loadu_si512(block.add(64 * pair).cast()) };
        [_mm512_and_si512(packed, mask), _mm512_and_si512(_mm512_srli_epi16::<4>(packed), mask)]
    }
}

impl Quants for Bytes {}

impl<const SIGNED: bool, const S: usize> Quants for Wide<SIGNED, S> {
    const SUB_LEN: usize = S;
    const X_BYTES: usize = 2;
    const HAS_MIN: bool = !SIGNED;

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
    unsafe fn add(sum: __m512i, group: __m512i, x: *const u8) -> __m512i {
        let even = _mm512_slli_epi16::<8>(group);
        let (even, odd) = if SIGNED {
            (_mm512_srai_epi16::<8>(even), _mm512_srai_epi16::<8>(group))
        } else {
            (_mm512_srli_epi16::<8>(even), _mm512_srli_epi16::<8>(group))
        };
        // SAFETY: by this function's own condition, 8 bytes.
        let x = unsafe { x.cast::<[i32; 2]>().read_unaligned() };
        _mm512_dpwssd_epi32(_mm512_dpwssd_epi32(sum, even, _mm512_set1_epi32(x[0])), odd, _mm512_set1_epi32(x[1]))
    }
}

/// See [`super::kernel`] for what it computes.
///
/// # Safety
/// As [`QuantKernel`], for `M` rows.
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512vnni")]
unsafe fn quant_tile<Q: Quants, const M: usize>(tile: &QuantTile) {
    // SAFETY: by this function's own condition.
    unsafe { tile_at::<Q, M>(tile, |r| r) }
}

/// # Safety
/// As [`ResidualKernel`].
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512vnni")]
unsafe fn residual_run<Q: Quants>(run: &ResidualRun<'_>) {
    for tile in run.tiles {
        // SAFETY: the caller vouches for the run; the list holds the tile's rows.
        unsafe {
            let (tile, rows) = run.tile(tile, Q::BLOCK_BYTES);
            let place = |r: usize| *rows.add(r) as usize;
            match tile.rows {
                1 => tile_at::<Q, 1>(&tile, place),
                2 => tile_at::<Q, 2>(&tile, place),
                3 => tile_at::<Q, 3>(&tile, place),
                4 => tile_at::<Q, 4>(&tile, place),
                5 => tile_at::<Q, 5>(&tile, place),
                6 => tile_at::<Q, 6>(&tile, place),
                7 => tile_at::<Q, 7>(&tile, place),
                8 => tile_at::<Q, 8>(&tile, place),
                _ => unreachable!("at most tile_rows"),
            }
        }
    }
}

/// Row `r` accumulates at `place(r)`.
///
/// # Safety
/// As [`quant_tile`].
#[inline]
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512vnni")]
unsafe fn tile_at<Q: Quants, const M: usize>(tile: &QuantTile, place: impl Fn(usize) -> usize) {
    debug_assert_eq!(tile.rows, M);
    let n_subs = BLOCK / Q::SUB_LEN;
    let n_pairs = Q::SUB_LEN / 8;
    // SAFETY: all accesses are within the tile's extents, which the caller vouches for.
    unsafe {
        let mut acc: [__m512; M] = std::array::from_fn(|r| _mm512_loadu_ps(tile.acc.add(place(r) * PANEL)));
        for b in 0..tile.n_blocks {
            tile.prefetch_share(b);
            for s in 0..n_subs {
                let sub = b * n_subs + s;
                let block = tile.quants.add(b * Q::BLOCK_BYTES);
                let x = tile.x.add(sub * Q::SUB_LEN * M * Q::X_BYTES);
                let mut sums = [_mm512_setzero_si512(); M];
                for pair in 0..n_pairs {
                    for (g, w) in Q::load(block, s * n_pairs + pair).into_iter().enumerate() {
                        for (r, sum) in sums.iter_mut().enumerate() {
                            *sum = Q::add(*sum, w, x.add(((2 * pair + g) * M + r) * 4 * Q::X_BYTES));
                        }
                    }
                }
                let d = _mm512_loadu_ps(tile.d.add(sub * PANEL));
                let m = _mm512_loadu_ps(tile.m.add(sub * PANEL));
                for r in 0..M {
                    let x_scale = _mm512_set1_ps(*tile.x_scale.add(b * M + r));
                    let sum = _mm512_cvtepi32_ps(sums[r]);
                    let u = if Q::HAS_MIN {
                        _mm512_fmadd_ps(d, sum, _mm512_mul_ps(m, _mm512_set1_ps(*tile.x_sum.add(sub * M + r))))
                    } else {
                        _mm512_mul_ps(d, sum)
                    };
                    acc[r] = _mm512_fmadd_ps(x_scale, u, acc[r]);
                }
            }
        }
        for (r, acc) in acc.iter().enumerate() {
            _mm512_storeu_ps(tile.acc.add(place(r) * PANEL), *acc);
        }
    }
}

fn float(dtype: DType, rows: usize) -> FloatKernel {
    match dtype {
        DType::F32 => float_by_rows::<F32>(rows),
        DType::F16 => float_by_rows::<F16>(rows),
        DType::Bf16 => float_by_rows::<Bf16>(rows),
        _ => unreachable!("a block format"),
    }
}

fn float_by_rows<F: Float>(rows: usize) -> FloatKernel {
    match rows {
        1 => float_tile::<F, 1>,
        2 => float_tile::<F, 2>,
        3 => float_tile::<F, 3>,
        4 => float_tile::<F, 4>,
        5 => float_tile::<F, 5>,
        6 => float_tile::<F, 6>,
        7 => float_tile::<F, 7>,
        8 => float_tile::<F, 8>,
        _ => unreachable!("at most tile_rows"),
    }
}

/// A float format.
trait Float {
    const BYTES: usize;

    /// Sixteen values as f32.
    ///
    /// # Safety
    /// AVX-512 F; the values are readable.
    unsafe fn load(from: *const u8) -> __m512;
}

struct F32;
struct F16;
struct Bf16;

impl Float for F32 {
    const BYTES: usize = 4;

    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn load(from: *const u8) -> __m512 {
        // SAFETY: by this function's own condition; the load needs no alignment.
        unsafe { _mm512_loadu_ps(from.cast()) }
    }
}

impl Float for F16 {
    const BYTES: usize = 2;

    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn load(from: *const u8) -> __m512 {
        // SAFETY: as above.
        _mm512_cvtph_ps(unsafe { _mm256_loadu_si256(from.cast()) })
    }
}

impl Float for Bf16 {
    const BYTES: usize = 2;

    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn load(from: *const u8) -> __m512 {
        // SAFETY: as above.
        let words = unsafe { _mm256_loadu_si256(from.cast()) };
        _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(words)))
    }
}

/// `acc = fma(w, x, acc)` over the columns in order.
///
/// # Safety
/// As [`FloatKernel`], for `M` rows.
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512vnni")]
unsafe fn float_tile<F: Float, const M: usize>(tile: &FloatTile) {
    debug_assert_eq!(tile.rows, M);
    // SAFETY: all accesses are within the tile's extents, which the caller vouches for.
    unsafe {
        let mut acc: [__m512; M] = std::array::from_fn(|r| _mm512_loadu_ps(tile.acc.add(r * PANEL)));
        for k in 0..tile.n_cols {
            let w = F::load(tile.weights.add(k * PANEL * F::BYTES));
            for (r, acc) in acc.iter_mut().enumerate() {
                *acc = _mm512_fmadd_ps(w, _mm512_set1_ps(*tile.x.add(r * tile.x_stride + k)), *acc);
            }
        }
        for (r, acc) in acc.iter().enumerate() {
            _mm512_storeu_ps(tile.acc.add(r * PANEL), *acc);
        }
    }
}
