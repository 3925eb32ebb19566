//! The kernels for AVX2 with FMA and F16C.
//!
//! Integer sums: `vpmaddubsw` multiplies unsigned quants by signed activations and adds pairs into i16. As long as the sum of
//! several such pairs fits in i16, they are added there, and `vpmaddwd` widens only the last sum: 8 groups of 4 columns
//! for 4 bits (8·2·15·127 = 30480), 4 for 5 bits (4·2·31·127 = 31496), 2 for 6 bits (2·2·63·127 = 32004). Signed 8-bit quants
//! are taken as |q| against the activation with q's sign (2·128·127 = 32512: one group). All of it is exact.

// Loops over rows and halves index several register arrays at once.
#![allow(clippy::needless_range_loop)]

use super::activations::{self, ActivationTileMut, QuantizedBlock};
use super::kernel::{self, FloatKernel, FloatTile, Kernels, QuantKernel, QuantTile, Source};
use super::layout::{BLOCK, Format, Kind, PANEL};
use crate::DType;
use std::arch::asm;
use std::arch::x86_64::*;

/// Functions of this file: all need AVX2, FMA and F16C.
pub(super) const KERNELS: Kernels = Kernels { tile_rows: 4, quant, float, expand_scales, unpack_nibbles, quantize_row };

/// 16 outputs: two registers of eight.
type Pair<T> = [T; 2];

#[target_feature(enable = "avx2,fma,f16c")]
fn expand_scales(format: Format, scales: &[u8], d: &mut [f32], m: &mut [f32]) {
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    fn halves(halves: &[u8; 32]) -> [f32; PANEL] {
        let mut out = [0.0; PANEL];
        // SAFETY: loads 2 × 16 bytes and stores 2 × 8 floats, within the arrays.
        unsafe {
            let from = halves.as_ptr().cast::<__m128i>();
            _mm256_storeu_ps(out.as_mut_ptr(), _mm256_cvtph_ps(_mm_loadu_si128(from)));
            _mm256_storeu_ps(out.as_mut_ptr().add(8), _mm256_cvtph_ps(_mm_loadu_si128(from.add(1))));
        }
        out
    }
    kernel::expand_scales(format, scales, d, m, |bytes| halves(bytes));
}

#[target_feature(enable = "avx2,fma,f16c")]
fn unpack_nibbles(packed: &[u8], out: &mut [u8]) {
    kernel::unpack_nibbles(packed, out);
}

#[target_feature(enable = "avx2,fma,f16c")]
fn quantize_row(x: &[f32], to: &mut ActivationTileMut<'_>, r: usize, rows: usize) {
    activations::quantize_row(x, to, r, rows, |x, q| quantize_block(x, q));
}

/// As [`super::portable::quantize_block`], bit for bit.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn quantize_block(x: &[f32; BLOCK], out: &mut [i8; BLOCK]) -> QuantizedBlock {
    // SAFETY: 4 × 8 floats, within the array.
    let v: [__m256; 4] = std::array::from_fn(|i| unsafe { _mm256_loadu_ps(x.as_ptr().add(8 * i)) });
    let sign = _mm256_set1_ps(-0.0);
    let abs = v.map(|v| _mm256_andnot_ps(sign, v));
    let max8 = _mm256_max_ps(_mm256_max_ps(abs[0], abs[1]), _mm256_max_ps(abs[2], abs[3]));
    let max4 = _mm_max_ps(_mm256_castps256_ps128(max8), _mm256_extractf128_ps::<1>(max8));
    let max2 = _mm_max_ps(max4, _mm_movehl_ps(max4, max4));
    let max = _mm_cvtss_f32(_mm_max_ss(max2, _mm_movehdup_ps(max2)));
    let inverse = _mm256_set1_ps(if max > 0.0 { 127.0 / max } else { 0.0 });
    let q = v.map(|v| _mm256_cvtps_epi32(_mm256_mul_ps(v, inverse)));
    let words = [_mm256_packs_epi32(q[0], q[1]), _mm256_packs_epi32(q[2], q[3])];
    let order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    let bytes = _mm256_permutevar8x32_epi32(_mm256_packs_epi16(words[0], words[1]), order);
    // SAFETY: 32 bytes, the whole array.
    unsafe { _mm256_storeu_si256(out.as_mut_ptr().cast(), bytes) };
    // The sums of 8 columns each, offset by 128 to be unsigned.
    let sums8 = _mm256_sad_epu8(_mm256_xor_si256(bytes, _mm256_set1_epi8(-128)), _mm256_setzero_si256());
    let sums16 = _mm256_add_epi64(sums8, _mm256_srli_si256::<8>(sums8));
    let sums = [_mm256_extract_epi32::<0>(sums16) - 16 * 128, _mm256_extract_epi32::<4>(sums16) - 16 * 128];
    let nan = |a, b| _mm256_cmp_ps::<_CMP_UNORD_Q>(a, b);
    let any_nan = _mm256_movemask_ps(_mm256_or_ps(nan(v[0], v[1]), nan(v[2], v[3]))) != 0;
    QuantizedBlock { scale: if any_nan { f32::NAN } else { max / 127.0 }, sums }
}

fn quant(source: Source, rows: usize) -> QuantKernel {
    match source {
        Source::Packed(Kind::U4) => by_rows::<Nibbles>(rows),
        Source::Packed(Kind::U5) => by_rows::<Bytes<2, BLOCK>>(rows),
        Source::Packed(Kind::U6) => by_rows::<Bytes<1, 16>>(rows),
        Source::Packed(Kind::I8) => by_rows::<Signed>(rows),
        Source::UnpackedU4 => by_rows::<Bytes<4, BLOCK>>(rows),
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
        _ => unreachable!("at most tile_rows"),
    }
}

/// Quants of a block, two groups of 4 columns at a time.
trait Quants {
    /// Pairs of groups whose products may be added in i16.
    const PAIRS_IN_I16: usize;
    const SUB_LEN: usize;
    const BLOCK_BYTES: usize;
    const SIGNED: bool = false;

    /// Pair `pair` of the block at `block`: 16 outputs × 4 columns each.
    ///
    /// # Safety
    /// AVX2; the block is readable.
    unsafe fn load(block: *const u8, pair: usize) -> [Pair<__m256i>; 2];
}

struct Nibbles;

impl Quants for Nibbles {
    const PAIRS_IN_I16: usize = 4;
    const SUB_LEN: usize = BLOCK;
    const BLOCK_BYTES: usize = Kind::U4.block_bytes();

    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn load(block: *const u8, pair: usize) -> [Pair<__m256i>; 2] {
        let mask = _mm256_set1_epi8(15);
        // SAFETY: 64 bytes of the block.
        let packed: Pair<__m256i> =
            std::array::from_fn(|h| unsafe { _mm256_loadu_si256(block.add(64 * pair + 32 * h).cast()) });
        let high = |packed| _mm256_and_si256(_mm256_srli_epi16::<4>(packed), mask);
        [packed.map(|packed| _mm256_and_si256(packed, mask)), packed.map(high)]
    }
}

struct Bytes<const PAIRS_IN_I16: usize, const SUB_LEN: usize>;

impl<const P: usize, const S: usize> Quants for Bytes<P, S> {
    const PAIRS_IN_I16: usize = P;
    const SUB_LEN: usize = S;
    const BLOCK_BYTES: usize = PANEL * BLOCK;

    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn load(block: *const u8, pair: usize) -> [Pair<__m256i>; 2] {
        // SAFETY: 128 bytes of the block.
        let load = |i: usize| unsafe { _mm256_loadu_si256(block.add(128 * pair + 32 * i).cast()) };
        [[load(0), load(1)], [load(2), load(3)]]
    }
}

struct Signed;

impl Quants for Signed {
    const PAIRS_IN_I16: usize = 1;
    const SUB_LEN: usize = BLOCK;
    const BLOCK_BYTES: usize = PANEL * BLOCK;
    const SIGNED: bool = true;

    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn load(block: *const u8, pair: usize) -> [Pair<__m256i>; 2] {
        // SAFETY: by this function's own condition.
        unsafe { <Bytes<1, BLOCK>>::load(block, pair) }
    }
}

/// See [`kernel`] for what it computes.
///
/// # Safety
/// As [`QuantKernel`], for `M` rows.
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn quant_tile<Q: Quants, const M: usize>(tile: &QuantTile) {
    debug_assert_eq!(tile.rows, M);
    let n_subs = BLOCK / Q::SUB_LEN;
    for b in 0..tile.n_blocks {
        tile.prefetch_share(b);
        for s in 0..n_subs {
            let sub = b * n_subs + s;
            // SAFETY: block and sub-block are within the tile's extents, which the caller vouches for.
            unsafe {
                let x = tile.x.add((b * BLOCK + s * Q::SUB_LEN) * M);
                let block = tile.quants.add(b * Q::BLOCK_BYTES);
                let sums = if Q::SIGNED { signed_sums::<Q, M>(block, x) } else { sums::<Q, M>(block, s, x) };
                let d = load_pair(tile.d.add(sub * PANEL));
                let m = load_pair(tile.m.add(sub * PANEL));
                for r in 0..M {
                    let x_scale = _mm256_broadcast_ss(&*tile.x_scale.add(b * M + r));
                    let x_sum = _mm256_broadcast_ss(&*tile.x_sum.add(sub * M + r));
                    for h in 0..2 {
                        let acc = tile.acc.add(r * PANEL + 8 * h);
                        let sum = _mm256_cvtepi32_ps(sums[r][h]);
                        let u = if Q::SIGNED {
                            _mm256_mul_ps(d[h], sum)
                        } else {
                            _mm256_fmadd_ps(d[h], sum, _mm256_mul_ps(m[h], x_sum))
                        };
                        _mm256_storeu_ps(acc, _mm256_fmadd_ps(x_scale, u, _mm256_loadu_ps(acc)));
                    }
                }
            }
        }
    }
}

/// # Safety
/// AVX; 16 floats are readable.
#[inline]
#[target_feature(enable = "avx2")]
unsafe fn load_pair(from: *const f32) -> Pair<__m256> {
    // SAFETY: by this function's own condition.
    unsafe { [_mm256_loadu_ps(from), _mm256_loadu_ps(from.add(8))] }
}

/// Four activations of a row, in each lane.
///
/// # Safety
/// AVX2; 4 bytes are readable.
#[inline]
#[target_feature(enable = "avx2")]
unsafe fn broadcast_group(x: *const i8) -> __m256i {
    // SAFETY: by this function's own condition; the read needs no alignment.
    _mm256_set1_epi32(unsafe { x.cast::<i32>().read_unaligned() })
}

/// Integer sums of sub-block `s` of a block for `M` rows; `x` begins at the sub-block.
///
/// # Safety
/// As [`quant_tile`].
#[inline]
#[target_feature(enable = "avx2")]
unsafe fn sums<Q: Quants, const M: usize>(block: *const u8, s: usize, x: *const i8) -> [Pair<__m256i>; M] {
    let n_pairs = Q::SUB_LEN / 8;
    let ones = _mm256_set1_epi16(1);
    let mut total = [[_mm256_setzero_si256(); 2]; M];
    for flush in 0..n_pairs / Q::PAIRS_IN_I16 {
        let mut words = [[_mm256_setzero_si256(); 2]; M];
        // A macro, repeated by hand: the compiler finds a loop too large to unroll and a closure too large to inline.
        macro_rules! add_pair {
            ($p:literal) => {
                let pair = flush * Q::PAIRS_IN_I16 + $p;
                // SAFETY: a pair of this sub-block.
                let w = unsafe { Q::load(block, s * n_pairs + pair) };
                for (g, w) in w.iter().enumerate() {
                    for (r, words) in words.iter_mut().enumerate() {
                        // SAFETY: a group of this sub-block and row.
                        let x = unsafe { broadcast_group(x.add(((pair * 2 + g) * M + r) * 4)) };
                        for h in 0..2 {
                            words[h] = _mm256_add_epi16(words[h], _mm256_maddubs_epi16(w[h], x));
                        }
                        keep_order(words);
                    }
                }
            };
        }
        add_pair!(0);
        if Q::PAIRS_IN_I16 > 1 {
            add_pair!(1);
        }
        if Q::PAIRS_IN_I16 > 2 {
            add_pair!(2);
            add_pair!(3);
        }
        for (total, words) in total.iter_mut().zip(words) {
            for h in 0..2 {
                total[h] = _mm256_add_epi32(total[h], _mm256_madd_epi16(words[h], ones));
            }
        }
    }
    total
}

/// As [`sums`], of signed 8-bit quants.
///
/// # Safety
/// As [`quant_tile`].
#[inline]
#[target_feature(enable = "avx2")]
unsafe fn signed_sums<Q: Quants, const M: usize>(block: *const u8, x: *const i8) -> [Pair<__m256i>; M] {
    let ones = _mm256_set1_epi16(1);
    let mut total = [[_mm256_setzero_si256(); 2]; M];
    for pair in 0..BLOCK / 8 {
        // SAFETY: a pair of this block.
        let w = unsafe { Q::load(block, pair) };
        for (g, w) in w.iter().enumerate() {
            let abs = w.map(|w| _mm256_abs_epi8(w));
            for (r, total) in total.iter_mut().enumerate() {
                // SAFETY: a group of this block and row.
                let x = unsafe { broadcast_group(x.add(((pair * 2 + g) * M + r) * 4)) };
                for h in 0..2 {
                    let words = _mm256_maddubs_epi16(abs[h], _mm256_sign_epi8(x, w[h]));
                    total[h] = _mm256_add_epi32(total[h], _mm256_madd_epi16(words, ones));
                }
                keep_order(total);
            }
        }
    }
    total
}

/// No instruction, but the compiler computes these sums here. Left alone it reorders the additions row by row,
/// which keeps all quants of a block alive, and spills them.
#[inline]
#[target_feature(enable = "avx2")]
fn keep_order(sums: &mut Pair<__m256i>) {
    let [low, high] = sums;
    // SAFETY: the assembly is empty. It is not `pure`, so that such points keep their order.
    unsafe {
        asm!("/* {0} {1} */", inout(ymm_reg) * low, inout(ymm_reg) * high, options(nomem, nostack, preserves_flags))
    };
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
        _ => unreachable!("at most tile_rows"),
    }
}

/// A float format.
trait Float {
    const BYTES: usize;

    /// Eight values as f32.
    ///
    /// # Safety
    /// AVX2 and F16C; the values are readable.
    unsafe fn load(from: *const u8) -> __m256;
}

struct F32;
struct F16;
struct Bf16;

impl Float for F32 {
    const BYTES: usize = 4;

    #[inline]
    #[target_feature(enable = "avx2,f16c")]
    unsafe fn load(from: *const u8) -> __m256 {
        // SAFETY: by this function's own condition; the load needs no alignment.
        unsafe { _mm256_loadu_ps(from.cast()) }
    }
}

impl Float for F16 {
    const BYTES: usize = 2;

    #[inline]
    #[target_feature(enable = "avx2,f16c")]
    unsafe fn load(from: *const u8) -> __m256 {
        // SAFETY: as above.
        _mm256_cvtph_ps(unsafe { _mm_loadu_si128(from.cast()) })
    }
}

impl Float for Bf16 {
    const BYTES: usize = 2;

    #[inline]
    #[target_feature(enable = "avx2,f16c")]
    unsafe fn load(from: *const u8) -> __m256 {
        // SAFETY: as above.
        let words = unsafe { _mm_loadu_si128(from.cast()) };
        _mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(words)))
    }
}

/// `acc = fma(w, x, acc)` over the columns in order.
///
/// # Safety
/// As [`FloatKernel`], for `M` rows.
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn float_tile<F: Float, const M: usize>(tile: &FloatTile) {
    debug_assert_eq!(tile.rows, M);
    // SAFETY: all accesses are within the tile's extents, which the caller vouches for.
    unsafe {
        let mut acc: [Pair<__m256>; M] = std::array::from_fn(|r| load_pair(tile.acc.add(r * PANEL)));
        for k in 0..tile.n_cols {
            let column = tile.weights.add(k * PANEL * F::BYTES);
            let w = [F::load(column), F::load(column.add(8 * F::BYTES))];
            for (r, acc) in acc.iter_mut().enumerate() {
                let x = _mm256_broadcast_ss(&*tile.x.add(r * tile.x_stride + k));
                for h in 0..2 {
                    acc[h] = _mm256_fmadd_ps(w[h], x, acc[h]);
                }
            }
        }
        for (r, acc) in acc.iter().enumerate() {
            for h in 0..2 {
                _mm256_storeu_ps(tile.acc.add(r * PANEL + 8 * h), acc[h]);
            }
        }
    }
}
