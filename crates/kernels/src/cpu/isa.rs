//! Which instruction set the processor paths use: detected once at start, or chosen by the caller.

/// Instruction sets with code of their own, slowest first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Isa {
    /// Plain Rust, any processor.
    Portable,
    /// AVX2 with FMA and F16C (x86-64-v3: Haswell, Zen and later).
    Avx2,
    /// AVX-512 F, BW, VL and VNNI (Ice Lake, Zen 4 and later), with all that [`Isa::Avx2`] has.
    Avx512,
}

impl Isa {
    /// All instruction sets, slowest first.
    pub const ALL: [Self; 3] = [Self::Portable, Self::Avx2, Self::Avx512];

    /// The best instruction set of this machine.
    pub fn detect() -> Self {
        Self::ALL.into_iter().rfind(|isa| isa.is_available()).expect("portable code runs everywhere")
    }

    /// Whether this machine (processor and operating system) can run it.
    pub fn is_available(self) -> bool {
        match self {
            Self::Portable => true,
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => has_avx2(),
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => {
                has_avx2()
                    && is_x86_feature_detected!("avx512f")
                    && is_x86_feature_detected!("avx512bw")
                    && is_x86_feature_detected!("avx512vl")
                    && is_x86_feature_detected!("avx512vnni")
            }
            #[cfg(not(target_arch = "x86_64"))]
            Self::Avx2 | Self::Avx512 => false,
        }
    }
}

#[cfg(target_arch = "x86_64")]
fn has_avx2() -> bool {
    is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") && is_x86_feature_detected!("f16c")
}
