//! Shared by tests: seeded numbers and comparison with a tolerance.

/// A small seeded generator (SplitMix64).
pub struct Rng(u64);

impl Rng {
    /// Starts from `seed`.
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }
    /// 64 random bits.
    pub fn next_u64(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let z = (self.0 ^ self.0 >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let z = (z ^ z >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ z >> 31
    }
    /// An integer below `n`.
    pub fn below(&mut self, n: usize) -> usize {
        (self.next_u64() % n as u64) as usize
    }
    /// Uniform in [0, 1).
    pub fn unit(&mut self) -> f32 {
        (self.next_u64() >> 40) as f32 / (1u64 << 24) as f32
    }
    /// About normal: mean 0, deviation 1.
    pub fn normal(&mut self) -> f32 {
        ((0..6).map(|_| self.unit()).sum::<f32>() - 3.0) * std::f32::consts::SQRT_2
    }
    /// `n` of them.
    pub fn normals(&mut self, n: usize) -> Vec<f32> {
        (0..n).map(|_| self.normal()).collect()
    }
}

/// Asserts `|got - want| <= tolerance * (1 + |want|)` everywhere.
#[track_caller]
pub fn assert_close(got: &[f32], want: &[f32], tolerance: f32) {
    assert_eq!(got.len(), want.len());
    for (i, (g, w)) in got.iter().zip(want).enumerate() {
        assert!((g - w).abs() <= tolerance * (1.0 + w.abs()), "element {i}: {g} where {w} is expected");
    }
}
