//! Sixteen f32 lanes on any instruction set, with the same bits in every lane on each of them.
//!
//! Operations are written once, generic over [`Lanes`], as the `run` of a [`Kernel`]; [`dispatch`] instantiates them
//! inside functions that have the instruction set enabled. Everything from `run` down to the leaves must be
//! `#[inline(always)]`, otherwise the intrinsics become calls.
//!
//! Only correctly rounded operations are used (add, mul, div, sqrt, fma, conversions), so AVX2, AVX-512 and portable
//! code agree bit for bit; the transcendental functions are built from these.

use super::Isa;

/// A computation that is generic over the instruction set.
pub(crate) trait Kernel {
    /// What it returns.
    type Out;
    /// The computation; mark the implementation `#[inline(always)]`.
    fn run<L: Lanes>(self) -> Self::Out;
}

/// Runs `kernel` on `isa`, which the machine must have.
#[inline]
pub(crate) fn dispatch<K: Kernel>(isa: Isa, kernel: K) -> K::Out {
    assert!(isa.is_available(), "no {isa:?} on this machine");
    match isa {
        // SAFETY: the machine has it.
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512 => unsafe { x86::run_avx512(kernel) },
        // SAFETY: the machine has it.
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2 => unsafe { x86::run_avx2(kernel) },
        _ => kernel.run::<Portable>(),
    }
}

/// Lanes in a vector, on every instruction set.
pub(crate) const LANES: usize = 16;

/// Sixteen f32 values. Only [`dispatch`] names implementations, so their instructions exist where they run.
pub(crate) trait Lanes: Copy {
    /// Whether a vector takes one of 32 registers rather than two of 16: larger register tiles pay.
    const WIDE: bool;
    /// Whether there are vector registers at all: register tiles pay, and unrolling does not explode.
    const TILED: bool = true;

    fn splat(x: f32) -> Self;
    /// # Safety
    /// Sixteen readable elements at `p`, of any alignment.
    unsafe fn load(p: *const f32) -> Self;
    /// # Safety
    /// Sixteen readable elements at `p`, of any alignment.
    unsafe fn load_f16(p: *const u16) -> Self;
    /// # Safety
    /// Sixteen readable elements at `p`, of any alignment.
    unsafe fn load_bf16(p: *const u16) -> Self;
    /// # Safety
    /// Sixteen writable elements at `p`, of any alignment.
    unsafe fn store(self, p: *mut f32);
    /// Rounds to nearest even.
    /// # Safety
    /// Sixteen writable elements at `p`, of any alignment.
    unsafe fn store_f16(self, p: *mut u16);
    /// Rounds to nearest even; NaN stays NaN.
    /// # Safety
    /// Sixteen writable elements at `p`, of any alignment.
    unsafe fn store_bf16(self, p: *mut u16);
    fn add(self, o: Self) -> Self;
    fn sub(self, o: Self) -> Self;
    fn mul(self, o: Self) -> Self;
    fn div(self, o: Self) -> Self;
    /// `self > o ? self : o`; a NaN in either gives `o`.
    fn max(self, o: Self) -> Self;
    /// `self < o ? self : o`; a NaN in either gives `o`.
    fn min(self, o: Self) -> Self;
    /// `self * b + c`, rounded once.
    fn fma(self, b: Self, c: Self) -> Self;
    /// To the nearest integer, ties to even.
    fn round(self) -> Self;
    /// `2^n` for integral lanes in -127..=128; -127 gives 0 and 128 gives infinity.
    fn pow2(self) -> Self;
    /// Lanes `lo..hi` of `self`, `fill` in the others.
    fn keep_range(self, lo: i32, hi: i32, fill: f32) -> Self;
    /// Bit `i`: lane `i` is greater than that of `o` (false with NaN).
    fn bits_gt(self, o: Self) -> u32;
    /// Bit `i`: lane `i` equals that of `o` (false with NaN).
    fn bits_eq(self, o: Self) -> u32;

    /// The first `n` lanes from `p`, `fill` in the others.
    /// # Safety
    /// `n <= 16` readable elements at `p`.
    #[inline(always)]
    unsafe fn load_part(p: *const f32, n: usize, fill: f32) -> Self {
        let mut a = [fill; LANES];
        // SAFETY: the caller promises `n` readable elements; `a` is a local of sixteen.
        unsafe {
            std::ptr::copy_nonoverlapping(p, a.as_mut_ptr(), n);
            Self::load(a.as_ptr())
        }
    }

    /// Stores the first `n` lanes.
    /// # Safety
    /// `n <= 16` writable elements at `p`.
    #[inline(always)]
    unsafe fn store_part(self, p: *mut f32, n: usize) {
        // SAFETY: the caller promises `n` writable elements; the source is a local of sixteen.
        unsafe { std::ptr::copy_nonoverlapping(self.array().as_ptr(), p, n) }
    }

    #[inline(always)]
    fn array(self) -> [f32; LANES] {
        let mut a = [0.0; LANES];
        // SAFETY: `a` has sixteen elements.
        unsafe { self.store(a.as_mut_ptr()) };
        a
    }

    /// Sum of the lanes by halving: always the same order.
    #[inline(always)]
    fn sum(self) -> f32 {
        let mut a = self.array();
        for half in [8, 4, 2, 1] {
            for i in 0..half {
                a[i] += a[i + half];
            }
        }
        a[0]
    }

    /// Greatest lane; lanes must not be NaN.
    #[inline(always)]
    fn max_lane(self) -> f32 {
        let mut a = self.array();
        for half in [8, 4, 2, 1] {
            for i in 0..half {
                a[i] = if a[i] > a[i + half] { a[i] } else { a[i + half] };
            }
        }
        a[0]
    }

    /// `2^x` to about 1 ulp; below -126.5 exactly 0, `exp2(0) == 1`, NaN stays NaN.
    ///
    /// The polynomial is that of Cephes' `exp2f`.
    #[inline(always)]
    fn exp2(self) -> Self {
        let x = Self::splat(-127.0).max(self);
        let x = Self::splat(128.0).min(x);
        let n = x.round();
        exp2_poly(x.sub(n)).mul(n.pow2())
    }

    /// `e^x` to about 1 ulp; below -87.7 exactly 0, `exp(0) == 1`, NaN stays NaN.
    #[inline(always)]
    fn exp(self) -> Self {
        let x = Self::splat(-88.1).max(self);
        let x = Self::splat(88.8).min(x);
        let n = x.mul(Self::splat(std::f32::consts::LOG2_E)).round();
        // Cody-Waite reduction: r = x - n ln 2 in two steps, ln 2 split so that n * hi is exact.
        let r = n.fma(Self::splat(-0.693_359_4), x);
        let r = n.fma(Self::splat(2.121_944_4e-4), r);
        exp2_poly(r.mul(Self::splat(std::f32::consts::LOG2_E))).mul(n.pow2())
    }

    /// `tanh x` to about 2e-7 absolute.
    #[inline(always)]
    fn tanh(self) -> Self {
        let one = Self::splat(1.0);
        let e = self.mul(Self::splat(2.0)).exp();
        one.sub(Self::splat(2.0).div(e.add(one)))
    }
}

/// `2^f` for `f` in [-1/2, 1/2].
#[inline(always)]
fn exp2_poly<L: Lanes>(f: L) -> L {
    let p = L::splat(1.535_336_2e-4);
    let p = p.fma(f, L::splat(1.339_887_4e-3));
    let p = p.fma(f, L::splat(9.618_437e-3));
    let p = p.fma(f, L::splat(5.550_332_5e-2));
    let p = p.fma(f, L::splat(2.402_264_8e-1));
    let p = p.fma(f, L::splat(6.931_472e-1));
    p.fma(f, L::splat(1.0))
}

/// Plain Rust lanes.
#[derive(Clone, Copy)]
pub(crate) struct Portable([f32; LANES]);

impl Portable {
    #[inline(always)]
    fn zip(self, o: Self, f: impl Fn(f32, f32) -> f32) -> Self {
        Self(std::array::from_fn(|i| f(self.0[i], o.0[i])))
    }
}

impl Lanes for Portable {
    const WIDE: bool = false;
    const TILED: bool = false;

    #[inline(always)]
    fn splat(x: f32) -> Self {
        Self([x; LANES])
    }
    #[inline(always)]
    unsafe fn load(p: *const f32) -> Self {
        // SAFETY: the caller promises sixteen readable elements.
        Self(unsafe { p.cast::<[f32; LANES]>().read_unaligned() })
    }
    #[inline(always)]
    unsafe fn load_f16(p: *const u16) -> Self {
        // SAFETY: the caller promises sixteen readable elements.
        let h = unsafe { p.cast::<[u16; LANES]>().read_unaligned() };
        Self(h.map(|h| half::f16::from_bits(h).to_f32()))
    }
    #[inline(always)]
    unsafe fn load_bf16(p: *const u16) -> Self {
        // SAFETY: the caller promises sixteen readable elements.
        let h = unsafe { p.cast::<[u16; LANES]>().read_unaligned() };
        Self(h.map(|h| f32::from_bits(u32::from(h) << 16)))
    }
    #[inline(always)]
    unsafe fn store(self, p: *mut f32) {
        // SAFETY: the caller promises sixteen writable elements.
        unsafe { p.cast::<[f32; LANES]>().write_unaligned(self.0) }
    }
    #[inline(always)]
    unsafe fn store_f16(self, p: *mut u16) {
        let h = self.0.map(|x| half::f16::from_f32(x).to_bits());
        // SAFETY: the caller promises sixteen writable elements.
        unsafe { p.cast::<[u16; LANES]>().write_unaligned(h) }
    }
    #[inline(always)]
    unsafe fn store_bf16(self, p: *mut u16) {
        let h = self.0.map(|x| half::bf16::from_f32(x).to_bits());
        // SAFETY: the caller promises sixteen writable elements.
        unsafe { p.cast::<[u16; LANES]>().write_unaligned(h) }
    }
    #[inline(always)]
    fn add(self, o: Self) -> Self {
        self.zip(o, |a, b| a + b)
    }
    #[inline(always)]
    fn sub(self, o: Self) -> Self {
        self.zip(o, |a, b| a - b)
    }
    #[inline(always)]
    fn mul(self, o: Self) -> Self {
        self.zip(o, |a, b| a * b)
    }
    #[inline(always)]
    fn div(self, o: Self) -> Self {
        self.zip(o, |a, b| a / b)
    }
    #[inline(always)]
    fn max(self, o: Self) -> Self {
        self.zip(o, |a, b| if a > b { a } else { b })
    }
    #[inline(always)]
    fn min(self, o: Self) -> Self {
        self.zip(o, |a, b| if a < b { a } else { b })
    }
    #[inline(always)]
    fn fma(self, b: Self, c: Self) -> Self {
        Self(std::array::from_fn(|i| self.0[i].mul_add(b.0[i], c.0[i])))
    }
    #[inline(always)]
    fn round(self) -> Self {
        Self(self.0.map(f32::round_ties_even))
    }
    #[inline(always)]
    fn pow2(self) -> Self {
        Self(self.0.map(|n| f32::from_bits(((n as i32 + 127) as u32) << 23)))
    }
    #[inline(always)]
    fn keep_range(self, lo: i32, hi: i32, fill: f32) -> Self {
        Self(std::array::from_fn(|i| if (lo..hi).contains(&(i as i32)) { self.0[i] } else { fill }))
    }
    #[inline(always)]
    fn bits_gt(self, o: Self) -> u32 {
        (0..LANES).map(|i| u32::from(self.0[i] > o.0[i]) << i).sum()
    }
    #[inline(always)]
    fn bits_eq(self, o: Self) -> u32 {
        (0..LANES).map(|i| u32::from(self.0[i] == o.0[i]) << i).sum()
    }
}

#[cfg(target_arch = "x86_64")]
#[path = "lanes_x86.rs"]
mod x86;

#[cfg(test)]
mod tests {
    use super::*;

    struct Eval<'a>(&'a [f32; LANES]);
    impl Kernel for Eval<'_> {
        type Out = Vec<[u32; LANES]>;
        #[inline(always)]
        fn run<L: Lanes>(self) -> Self::Out {
            // SAFETY: all arrays have sixteen elements.
            unsafe {
                let x = L::load(self.0.as_ptr());
                let (mut h, mut b) = ([0u16; LANES], [0u16; LANES]);
                x.store_f16(h.as_mut_ptr());
                x.store_bf16(b.as_mut_ptr());
                let y = x.mul(L::splat(0.37)).sub(L::splat(1.5));
                let flags = [x.bits_gt(y), x.bits_eq(L::splat(1.0)), x.sum().to_bits(), x.max_lane().to_bits()];
                let bits = |v: L| v.array().map(|x| if x.is_nan() { f32::NAN.to_bits() } else { x.to_bits() });
                vec![
                    bits(x.exp()),
                    bits(x.exp2()),
                    bits(x.tanh()),
                    bits(x.fma(y, x)),
                    bits(x.div(y)),
                    bits(x.max(y)),
                    bits(y.min(x)),
                    bits(x.keep_range(3, 11, -1.0)),
                    bits(L::load_f16(h.as_ptr())),
                    bits(L::load_bf16(b.as_ptr())),
                    std::array::from_fn(|i| flags[i % 4]),
                ]
            }
        }
    }

    #[test]
    fn instruction_sets_agree_bit_for_bit() {
        let mut state = 1u64;
        for round in 0..2000 {
            let x: [f32; LANES] = std::array::from_fn(|_| {
                state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                ((state >> 40) as f32 / (1 << 24) as f32 - 0.5) * if round % 2 == 0 { 20.0 } else { 250.0 }
            });
            let portable = dispatch(Isa::Portable, Eval(&x));
            for isa in Isa::ALL.into_iter().filter(|isa| isa.is_available()) {
                assert_eq!(portable, dispatch(isa, Eval(&x)), "{isa:?}");
            }
        }
    }

    #[test]
    fn transcendental_functions_are_accurate() {
        let check = |got: u32, want: f64, rel: f64, abs: f64| {
            let got = f64::from(f32::from_bits(got));
            assert!((got - want).abs() <= rel * want.abs() + abs, "{got} {want}");
        };
        for i in 0..20_000 {
            let x = (i as f32 - 10_000.0) * 0.0087;
            let r = dispatch(Isa::detect(), Eval(&[x; LANES]));
            if x.abs() < 87.0 {
                check(r[0][0], f64::from(x).exp(), 3e-7, 0.0);
                check(r[1][3], f64::from(x).exp2(), 3e-7, 0.0);
            }
            check(r[2][5], f64::from(x).tanh(), 0.0, 2.5e-7);
        }
        let special = |x: f32| dispatch(Isa::detect(), Eval(&[x; LANES]));
        assert_eq!(special(0.0)[0][0], 1f32.to_bits());
        assert_eq!(special(0.0)[1][0], 1f32.to_bits());
        assert_eq!(special(f32::NEG_INFINITY)[0][0], 0);
        assert_eq!(special(f32::NEG_INFINITY)[1][0], 0);
        assert_eq!(special(f32::INFINITY)[0][0], f32::INFINITY.to_bits());
        assert_eq!(special(f32::NAN)[0][0], f32::NAN.to_bits());
        assert_eq!(special(f32::NAN)[1][0], f32::NAN.to_bits());
    }
}
