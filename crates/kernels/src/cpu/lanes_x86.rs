//! [`Lanes`] on AVX2 (two registers) and AVX-512 (one).
//!
//! Each `unsafe` block that only calls intrinsics rests on the same reason, named at the trait: these types are
//! reached through `dispatch`, which has checked the machine.

use std::arch::x86_64::*;

use super::{Kernel, Lanes};

/// # Safety
/// The machine has AVX2, FMA and F16C.
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) unsafe fn run_avx2<K: Kernel>(kernel: K) -> K::Out {
    kernel.run::<Avx2>()
}

/// # Safety
/// The machine has AVX-512F, AVX2, FMA and F16C.
#[target_feature(enable = "avx512f,avx2,fma,f16c")]
pub(super) unsafe fn run_avx512<K: Kernel>(kernel: K) -> K::Out {
    kernel.run::<Avx512>()
}

/// Calls intrinsics on both halves.
macro_rules! halves {
    ($f:expr; $($v:expr),+) => {{
        // SAFETY: reached through `dispatch` only, which checked the instruction set.
        unsafe { Avx2($f($($v.0),+), $f($($v.1),+)) }
    }};
}

/// Calls intrinsics that the machine has.
macro_rules! checked {
    ($e:expr) => {{
        // SAFETY: reached through `dispatch` only, which checked the instruction set.
        unsafe { $e }
    }};
}

#[derive(Clone, Copy)]
pub(super) struct Avx2(__m256, __m256);

/// bf16 bits of eight f32 in the low halves of eight u32: round to nearest even, NaN made quiet.
#[inline(always)]
fn bf16_bits_avx2(x: __m256) -> __m256i {
    checked!({
        let bits = _mm256_castps_si256(x);
        let odd = _mm256_and_si256(_mm256_srli_epi32::<16>(bits), _mm256_set1_epi32(1));
        let rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
        let nan = _mm256_castps_si256(_mm256_cmp_ps::<_CMP_UNORD_Q>(x, x));
        let quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x0040_0000));
        _mm256_srli_epi32::<16>(_mm256_blendv_epi8(rounded, quiet, nan))
    })
}

impl Lanes for Avx2 {
    const WIDE: bool = false;

    #[inline(always)]
    fn splat(x: f32) -> Self {
        checked!(Self(_mm256_set1_ps(x), _mm256_set1_ps(x)))
    }
    #[inline(always)]
    unsafe fn load(p: *const f32) -> Self {
        checked!(Self(_mm256_loadu_ps(p), _mm256_loadu_ps(p.add(8))))
    }
    #[inline(always)]
    unsafe fn load_f16(p: *const u16) -> Self {
        checked!(Self(_mm256_cvtph_ps(_mm_loadu_si128(p.cast())), _mm256_cvtph_ps(_mm_loadu_si128(p.add(8).cast()))))
    }
    #[inline(always)]
    unsafe fn load_bf16(p: *const u16) -> Self {
        checked!({
            let lo = _mm256_cvtepu16_epi32(_mm_loadu_si128(p.cast()));
            let hi = _mm256_cvtepu16_epi32(_mm_loadu_si128(p.add(8).cast()));
            Self(_mm256_castsi256_ps(_mm256_slli_epi32::<16>(lo)), _mm256_castsi256_ps(_mm256_slli_epi32::<16>(hi)))
        })
    }
    #[inline(always)]
    unsafe fn store(self, p: *mut f32) {
        checked!({
            _mm256_storeu_ps(p, self.0);
            _mm256_storeu_ps(p.add(8), self.1);
        })
    }
    #[inline(always)]
    unsafe fn store_f16(self, p: *mut u16) {
        checked!({
            _mm_storeu_si128(p.cast(), _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(self.0));
            _mm_storeu_si128(p.add(8).cast(), _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(self.1));
        })
    }
    #[inline(always)]
    unsafe fn store_bf16(self, p: *mut u16) {
        checked!({
            // packus interleaves 128-bit lanes; the permutation puts them in order.
            let packed = _mm256_packus_epi32(bf16_bits_avx2(self.0), bf16_bits_avx2(self.1));
            _mm256_storeu_si256(p.cast(), _mm256_permute4x64_epi64::<0b11_01_10_00>(packed));
        })
    }
    #[inline(always)]
    fn add(self, o: Self) -> Self {
        halves!(_mm256_add_ps; self, o)
    }
    #[inline(always)]
    fn sub(self, o: Self) -> Self {
        halves!(_mm256_sub_ps; self, o)
    }
    #[inline(always)]
    fn mul(self, o: Self) -> Self {
        halves!(_mm256_mul_ps; self, o)
    }
    #[inline(always)]
    fn div(self, o: Self) -> Self {
        halves!(_mm256_div_ps; self, o)
    }
    #[inline(always)]
    fn max(self, o: Self) -> Self {
        halves!(_mm256_max_ps; self, o)
    }
    #[inline(always)]
    fn min(self, o: Self) -> Self {
        halves!(_mm256_min_ps; self, o)
    }
    #[inline(always)]
    fn fma(self, b: Self, c: Self) -> Self {
        halves!(_mm256_fmadd_ps; self, b, c)
    }
    #[inline(always)]
    fn round(self) -> Self {
        halves!(_mm256_round_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>; self)
    }
    #[inline(always)]
    fn pow2(self) -> Self {
        checked!({
            let bias = _mm256_set1_epi32(127);
            let a = _mm256_slli_epi32::<23>(_mm256_add_epi32(_mm256_cvtps_epi32(self.0), bias));
            let b = _mm256_slli_epi32::<23>(_mm256_add_epi32(_mm256_cvtps_epi32(self.1), bias));
            Self(_mm256_castsi256_ps(a), _mm256_castsi256_ps(b))
        })
    }
    #[inline(always)]
    fn keep_range(self, lo: i32, hi: i32, fill: f32) -> Self {
        checked!({
            let (below, hi) = (_mm256_set1_epi32(lo - 1), _mm256_set1_epi32(hi));
            let index = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
            let index1 = _mm256_add_epi32(index, _mm256_set1_epi32(8));
            let keep0 = _mm256_and_si256(_mm256_cmpgt_epi32(index, below), _mm256_cmpgt_epi32(hi, index));
            let keep1 = _mm256_and_si256(_mm256_cmpgt_epi32(index1, below), _mm256_cmpgt_epi32(hi, index1));
            let fill = _mm256_set1_ps(fill);
            Self(
                _mm256_blendv_ps(fill, self.0, _mm256_castsi256_ps(keep0)),
                _mm256_blendv_ps(fill, self.1, _mm256_castsi256_ps(keep1)),
            )
        })
    }
    #[inline(always)]
    fn bits_gt(self, o: Self) -> u32 {
        checked!({
            let a = _mm256_movemask_ps(_mm256_cmp_ps::<_CMP_GT_OQ>(self.0, o.0)) as u32;
            a | (_mm256_movemask_ps(_mm256_cmp_ps::<_CMP_GT_OQ>(self.1, o.1)) as u32) << 8
        })
    }
    #[inline(always)]
    fn bits_eq(self, o: Self) -> u32 {
        checked!({
            let a = _mm256_movemask_ps(_mm256_cmp_ps::<_CMP_EQ_OQ>(self.0, o.0)) as u32;
            a | (_mm256_movemask_ps(_mm256_cmp_ps::<_CMP_EQ_OQ>(self.1, o.1)) as u32) << 8
        })
    }
}

#[derive(Clone, Copy)]
pub(super) struct Avx512(__m512);

impl Lanes for Avx512 {
    const WIDE: bool = true;

    #[inline(always)]
    fn splat(x: f32) -> Self {
        checked!(Self(_mm512_set1_ps(x)))
    }
    #[inline(always)]
    unsafe fn load(p: *const f32) -> Self {
        checked!(Self(_mm512_loadu_ps(p)))
    }
    #[inline(always)]
    unsafe fn load_f16(p: *const u16) -> Self {
        checked!(Self(_mm512_cvtph_ps(_mm256_loadu_si256(p.cast()))))
    }
    #[inline(always)]
    unsafe fn load_bf16(p: *const u16) -> Self {
        checked!({
            let wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(p.cast()));
            Self(_mm512_castsi512_ps(_mm512_slli_epi32::<16>(wide)))
        })
    }
    #[inline(always)]
    unsafe fn store(self, p: *mut f32) {
        checked!(_mm512_storeu_ps(p, self.0))
    }
    #[inline(always)]
    unsafe fn store_f16(self, p: *mut u16) {
        checked!(_mm256_storeu_si256(p.cast(), _mm512_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(self.0)))
    }
    #[inline(always)]
    unsafe fn store_bf16(self, p: *mut u16) {
        checked!({
            let bits = _mm512_castps_si512(self.0);
            let odd = _mm512_and_si512(_mm512_srli_epi32::<16>(bits), _mm512_set1_epi32(1));
            let rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
            let nan = _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(self.0, self.0);
            let quiet = _mm512_or_si512(bits, _mm512_set1_epi32(0x0040_0000));
            let halves = _mm512_srli_epi32::<16>(_mm512_mask_blend_epi32(nan, rounded, quiet));
            _mm256_storeu_si256(p.cast(), _mm512_cvtepi32_epi16(halves));
        })
    }
    #[inline(always)]
    fn add(self, o: Self) -> Self {
        checked!(Self(_mm512_add_ps(self.0, o.0)))
    }
    #[inline(always)]
    fn sub(self, o: Self) -> Self {
        checked!(Self(_mm512_sub_ps(self.0, o.0)))
    }
    #[inline(always)]
    fn mul(self, o: Self) -> Self {
        checked!(Self(_mm512_mul_ps(self.0, o.0)))
    }
    #[inline(always)]
    fn div(self, o: Self) -> Self {
        checked!(Self(_mm512_div_ps(self.0, o.0)))
    }
    #[inline(always)]
    fn max(self, o: Self) -> Self {
        checked!(Self(_mm512_max_ps(self.0, o.0)))
    }
    #[inline(always)]
    fn min(self, o: Self) -> Self {
        checked!(Self(_mm512_min_ps(self.0, o.0)))
    }
    #[inline(always)]
    fn fma(self, b: Self, c: Self) -> Self {
        checked!(Self(_mm512_fmadd_ps(self.0, b.0, c.0)))
    }
    #[inline(always)]
    fn round(self) -> Self {
        checked!(Self(_mm512_roundscale_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(self.0)))
    }
    #[inline(always)]
    fn pow2(self) -> Self {
        checked!({
            let n = _mm512_add_epi32(_mm512_cvtps_epi32(self.0), _mm512_set1_epi32(127));
            Self(_mm512_castsi512_ps(_mm512_slli_epi32::<23>(n)))
        })
    }
    #[inline(always)]
    fn keep_range(self, lo: i32, hi: i32, fill: f32) -> Self {
        let below = |n: i32| (1u32 << n.clamp(0, 16)) - 1;
        let keep = (below(hi) & !below(lo)) as u16;
        checked!(Self(_mm512_mask_blend_ps(keep, _mm512_set1_ps(fill), self.0)))
    }
    #[inline(always)]
    fn bits_gt(self, o: Self) -> u32 {
        checked!(u32::from(_mm512_cmp_ps_mask::<_CMP_GT_OQ>(self.0, o.0)))
    }
    #[inline(always)]
    fn bits_eq(self, o: Self) -> u32 {
        checked!(u32::from(_mm512_cmp_ps_mask::<_CMP_EQ_OQ>(self.0, o.0)))
    }
}
