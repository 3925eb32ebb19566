//! The kernels for AVX2 with FMA and F16C.
//!
//! Integer sums: `vpmaddubsw` multiplies unsigned quants by int8 activations and adds pairs into i16. As long as the sum of
//! several such pairs fits in i16, they are added there, and `vpmaddwd` widens only the last sum: 8 groups of 4 columns
//! for 4 bits (8·2·15·127 = 30480), 4 for 5 bits (4·2·31·127 = 31496). Against int16 activations `vpmaddwd` multiplies, first
//! the even columns of a group, then the odd ones: as many instructions as signed 8-bit quants by int8 took. All of it is exact:
//! 32·128·32767 < 2^31.

// Loops over rows and halves index several register arrays at once.
#![allow(clippy::needless_range_loop)]

use super::activations::{self, ActivationTileMut, QuantizedBlock, RESIDUAL_STEPS, ResidualTileMut};
use super::kernel::{
    self, FloatKernel, FloatTile, Kernels, QuantKernel, QuantTile, ResidualKernel, ResidualRun, Source,
};
use super::layout::{BLOCK, Format, Kind, PANEL};
use crate::DType;
use std::arch::asm;
use std::arch::x86_64::*;

/// Functions of this file: all need AVX2, FMA and F16C.
pub(super) const KERNELS: Kernels = Kernels {
    tile_rows: 4,
    quant,
    residual,
    float,
    expand_scales,
    unpack_nibbles,
    quantize_row,
    quantize_row_wide,
    quantize_residual,
};

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
fn quantize_row(x: &[f32], to: &mut ActivationTileMut<'_, i8>, r: usize, rows: usize) {
    activations::quantize_row(x, to, r, rows, |x, q| quantize_block(x, q));
}

#[target_feature(enable = "avx2,fma,f16c")]
fn quantize_row_wide(x: &[f32], to: &mut ActivationTileMut<'_, i16>, r: usize, rows: usize) {
    activations::quantize_row_wide(x, to, r, rows, |x, q| quantize_block_wide(x, q));
}

#[target_feature(enable = "avx2,fma,f16c")]
fn quantize_residual(x: &[f32; BLOCK], to: &mut ResidualTileMut<'_>, r: usize) {
    activations::quantize_residual(x, to, r, |x, q| residual_block(x, q));
}

/// As [`super::portable::quantize_block`], bit for bit; so are the next two.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn quantize_block(x: &[f32; BLOCK], out: &mut [i8; BLOCK]) -> QuantizedBlock<1> {
    let v = load_block(x);
    let (inverse, scale) = scale(v, 127.0);
    let sum = store_bytes(v.map(|v| _mm256_cvtps_epi32(_mm256_mul_ps(v, _mm256_set1_ps(inverse)))), out);
    QuantizedBlock { scale, sums: [sum] }
}

#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn quantize_block_wide(x: &[f32; BLOCK], out: &mut [i16; BLOCK]) -> QuantizedBlock<2> {
    let v = load_block(x);
    let (inverse, scale) = scale(v, 32767.0);
    let q = v.map(|v| _mm256_cvtps_epi32(_mm256_mul_ps(v, _mm256_set1_ps(inverse))));
    let sums = std::array::from_fn(|half| {
        let words = _mm256_permute4x64_epi64::<0b11_01_10_00>(_mm256_packs_epi32(q[2 * half], q[2 * half + 1]));
        // SAFETY: 16 values of the array's 32.
        unsafe { _mm256_storeu_si256(out.as_mut_ptr().add(16 * half).cast(), words) };
        let sums = _mm256_madd_epi16(words, _mm256_set1_epi16(1));
        let sums = _mm_add_epi32(_mm256_castsi256_si128(sums), _mm256_extracti128_si256::<1>(sums));
        let sums = _mm_add_epi32(sums, _mm_srli_si128::<8>(sums));
        _mm_cvtsi128_si32(_mm_add_epi32(sums, _mm_srli_si128::<4>(sums)))
    });
    QuantizedBlock { scale, sums }
}

#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn residual_block(x: &[f32; BLOCK], out: &mut [i8; BLOCK]) -> QuantizedBlock<1> {
    let v = load_block(x);
    let (inverse, first_scale) = scale(v, 127.0);
    let scale = first_scale / RESIDUAL_STEPS;
    let q = v.map(|v| {
        let first = _mm256_round_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(_mm256_mul_ps(
            v,
            _mm256_set1_ps(inverse),
        ));
        let rest = _mm256_sub_ps(v, _mm256_mul_ps(first, _mm256_set1_ps(scale * RESIDUAL_STEPS)));
        _mm256_cvtps_epi32(_mm256_div_ps(rest, _mm256_set1_ps(scale)))
    });
    QuantizedBlock { scale, sums: [store_bytes(q, out)] }
}

#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn load_block(x: &[f32; BLOCK]) -> [__m256; 4] {
    // SAFETY: 4 × 8 floats, within the array.
    std::array::from_fn(|i| unsafe { _mm256_loadu_ps(x.as_ptr().add(8 * i)) })
}

/// As [`super::portable`]'s.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn scale(v: [__m256; 4], limit: f32) -> (f32, f32) {
    let sign = _mm256_set1_ps(-0.0);
    let abs = v.map(|v| _mm256_andnot_ps(sign, v));
    let max8 = _mm256_max_ps(_mm256_max_ps(abs[0], abs[1]), _mm256_max_ps(abs[2], abs[3]));
    let max4 = _mm_max_ps(_mm256_castps256_ps128(max8), _mm256_extractf128_ps::<1>(max8));
    let max2 = _mm_max_ps(max4, _mm_movehl_ps(max4, max4));
    let max = _mm_cvtss_f32(_mm_max_ss(max2, _mm_movehdup_ps(max2)));
    let inverse = if max > 0.0 { limit / max } else { 0.0 };
    let nan = |a, b| _mm256_cmp_ps::<_CMP_UNORD_Q>(a, b);
    let any_nan = _mm256_movemask_ps(_mm256_or_ps(nan(v[0], v[1]), nan(v[2], v[3]))) != 0;
    (inverse, if any_nan { f32::NAN } else { max / limit })
}

/// Stores 32 integers as bytes, and gives their sum.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn store_bytes(q: [__m256i; 4], out: &mut [i8; BLOCK]) -> i32 {
    let words = [_mm256_packs_epi32(q[0], q[1]), _mm256_packs_epi32(q[2], q[3])];
    let order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    let bytes = _mm256_permutevar8x32_epi32(_mm256_packs_epi16(words[0], words[1]), order);
    // SAFETY: 32 bytes, the whole array.
    unsafe { _mm256_storeu_si256(out.as_mut_ptr().cast(), bytes) };
    // The sums of 8 columns each, offset by 128 to be unsigned.
    let sums8 = _mm256_sad_epu8(_mm256_xor_si256(bytes, _mm256_set1_epi8(-128)), _mm256_setzero_si256());
    let sums = _mm_add_epi32(_mm256_castsi256_si128(sums8), _mm256_extracti128_si256::<1>(sums8));
    _mm_cvtsi128_si32(_mm_add_epi32(sums, _mm_srli_si128::<8>(sums))) - 32 * 128
}

fn quant(source: Source, rows: usize) -> QuantKernel {
    match source {
        Source::Packed(Kind::U4) => by_rows::<Nibbles>(rows),
        Source::Packed(Kind::U5) => by_rows::<Bytes<2>>(rows),
        Source::Packed(Kind::U6) => by_rows::<Wide<false, 16>>(rows),
        Source::Packed(Kind::I8) => by_rows::<Wide<true, BLOCK>>(rows),
        Source::UnpackedU4 => by_rows::<Bytes<4>>(rows),
    }
}

/// The kernel for residuals: all tiles in one call.
fn residual(source: Source) -> ResidualKernel {
    match source {
        Source::Packed(Kind::U4) => residual_run::<Nibbles>,
        Source::Packed(Kind::U5) => residual_run::<Bytes<2>>,
        Source::UnpackedU4 => residual_run::<Bytes<4>>,
        Source::Packed(Kind::U6 | Kind::I8) => unreachable!("they meet int16"),
    }
}

fn by_rows<Q: Quants>(rows: usize) -> QuantKernel {
    match rows {
        1 => quant_tile::<Q, 1>,
        2 => quant_tile::<Q, 2>,
        3 => quant_tile::<Q, 3>,
        4 => quant_tile::<Q, 4>,
        _ => unreachable!("at most tile_rows"),
    }
}

/// Quants of a block.
trait Quants {
    const SUB_LEN: usize = BLOCK;
    const BLOCK_BYTES: usize = PANEL * BLOCK;
    /// Bytes of an activation.
    const X_BYTES: usize = 1;
    const HAS_MIN: bool = true;

    /// Integer sums of sub-block `s` of a block for `M` rows; `x` begins at the sub-block.
    ///
    /// # Safety
    /// As [`quant_tile`].
    unsafe fn sums<const M: usize>(block: *const u8, s: usize, x: *const u8) -> [Pair<__m256i>; M];
}

/// Quants that meet int8, two groups of 4 columns at a time.
trait Narrow {
    /// Pairs of groups whose products may be added in i16.
    const PAIRS_IN_I16: usize;

    /// Pair `pair` of the block at `block`: 16 outputs × 4 columns each.
    ///
    /// # Safety
    /// AVX2; the block is readable.
    unsafe fn load(block: *const u8, pair: usize) -> [Pair<__m256i>; 2];
}

struct Nibbles;

impl Narrow for Nibbles {
    const PAIRS_IN_I16: usize = 4;

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

impl Quants for Nibbles {
    const BLOCK_BYTES: usize = Kind::U4.block_bytes();

    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn sums<const M: usize>(block: *const u8, _s: usize, x: *const u8) -> [Pair<__m256i>; M] {
        // SAFETY: by this function's own condition.
        unsafe { narrow_sums::<Self, M>(block, x) }
    }
}

struct Bytes<const PAIRS_IN_I16: usize>;

impl<const P: usize> Narrow for Bytes<P> {
    const PAIRS_IN_I16: usize = P;

    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn load(block: *const u8, pair: usize) -> [Pair<__m256i>; 2] {
        // SAFETY: 128 bytes of the block.
        let load = |i: usize| unsafe { _mm256_loadu_si256(block.add(128 * pair + 32 * i).cast()) };
        [[load(0), load(1)], [load(2), load(3)]]
    }
}

impl<const P: usize> Quants for Bytes<P> {
    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn sums<const M: usize>(block: *const u8, _s: usize, x: *const u8) -> [Pair<__m256i>; M] {
        // SAFETY: by this function's own condition.
        unsafe { narrow_sums::<Self, M>(block, x) }
    }
}

/// Bytes that meet int16.
struct Wide<const SIGNED: bool, const SUB_LEN: usize>;

impl<const SIGNED: bool, const S: usize> Quants for Wide<SIGNED, S> {
    const SUB_LEN: usize = S;
    const X_BYTES: usize = 2;
    const HAS_MIN: bool = !SIGNED;

    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn sums<const M: usize>(block: *const u8, s: usize, x: *const u8) -> [Pair<__m256i>; M] {
        let mut total = [[_mm256_setzero_si256(); 2]; M];
        for group in 0..S / 4 {
            // SAFETY: 64 bytes of this sub-block.
            let load = |h: usize| unsafe { _mm256_loadu_si256(block.add((s * S / 4 + group) * 64 + 32 * h).cast()) };
            let w = [load(0), load(1)];
            let even = w.map(|w| _mm256_slli_epi16::<8>(w));
            let words: [Pair<__m256i>; 2] = if SIGNED {
                [even.map(|w| _mm256_srai_epi16::<8>(w)), w.map(|w| _mm256_srai_epi16::<8>(w))]
            } else {
                [even.map(|w| _mm256_srli_epi16::<8>(w)), w.map(|w| _mm256_srli_epi16::<8>(w))]
            };
            for (r, total) in total.iter_mut().enumerate() {
                for (i, words) in words.iter().enumerate() {
                    // SAFETY: two activations of this group and row.
                    let x = unsafe { broadcast_i32(x.add((group * M + r) * 8 + 4 * i)) };
                    for h in 0..2 {
                        total[h] = _mm256_add_epi32(total[h], _mm256_madd_epi16(words[h], x));
                    }
                }
                keep_order(total);
            }
        }
        total
    }
}

/// See [`kernel`] for what it computes.
///
/// # Safety
/// As [`QuantKernel`], for `M` rows.
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn quant_tile<Q: Quants, const M: usize>(tile: &QuantTile) {
    // SAFETY: by this function's own condition.
    unsafe { tile_at::<Q, M>(tile, |r| r) }
}

/// # Safety
/// As [`ResidualKernel`].
#[target_feature(enable = "avx2,fma,f16c")]
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
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn tile_at<Q: Quants, const M: usize>(tile: &QuantTile, place: impl Fn(usize) -> usize) {
    debug_assert_eq!(tile.rows, M);
    let n_subs = BLOCK / Q::SUB_LEN;
    for b in 0..tile.n_blocks {
        tile.prefetch_share(b);
        for s in 0..n_subs {
            let sub = b * n_subs + s;
            // SAFETY: block and sub-block are within the tile's extents, which the caller vouches for.
            unsafe {
                let x = tile.x.add(sub * Q::SUB_LEN * M * Q::X_BYTES);
                let sums = Q::sums::<M>(tile.quants.add(b * Q::BLOCK_BYTES), s, x);
                let d = load_pair(tile.d.add(sub * PANEL));
                let m = load_pair(tile.m.add(sub * PANEL));
                for r in 0..M {
                    let x_scale = _mm256_broadcast_ss(&*tile.x_scale.add(b * M + r));
                    for h in 0..2 {
                        let acc = tile.acc.add(place(r) * PANEL + 8 * h);
                        let sum = _mm256_cvtepi32_ps(sums[r][h]);
                        let u = if Q::HAS_MIN {
                            let x_sum = _mm256_broadcast_ss(&*tile.x_sum.add(sub * M + r));
                            _mm256_fmadd_ps(d[h], sum, _mm256_mul_ps(m[h], x_sum))
                        } else {
                            _mm256_mul_ps(d[h], sum)
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

/// Four or two activations of a row, in each lane.
///
/// # Safety
/// AVX2; 4 bytes are readable.
#[inline]
#[target_feature(enable = "avx2")]
unsafe fn broadcast_i32(x: *const u8) -> __m256i {
    // SAFETY: by this function's own condition; the read needs no alignment.
    _mm256_set1_epi32(unsafe { x.cast::<i32>().read_unaligned() })
}

/// [`Quants::sums`] against int8.
///
/// # Safety
/// As [`quant_tile`].
#[inline]
#[target_feature(enable = "avx2")]
unsafe fn narrow_sums<Q: Narrow, const M: usize>(block: *const u8, x: *const u8) -> [Pair<__m256i>; M] {
    let ones = _mm256_set1_epi16(1);
    let mut total = [[_mm256_setzero_si256(); 2]; M];
    for flush in 0..BLOCK / 8 / Q::PAIRS_IN_I16 {
        let mut words = [[_mm256_setzero_si256(); 2]; M];
        // A macro, repeated by hand: the compiler finds a loop too large to unroll and a closure too large to inline.
        macro_rules! add_pair {
            ($p:literal) => {
                let pair = flush * Q::PAIRS_IN_I16 + $p;
                // SAFETY: a pair of this block.
                let w = unsafe { Q::load(block, pair) };
                for (g, w) in w.iter().enumerate() {
                    for (r, words) in words.iter_mut().enumerate() {
                        // SAFETY: a group of this block and row.
                        let x = unsafe { broadcast_i32(x.add(((pair * 2 + g) * M + r) * 4)) };
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
