//! Counter-based randomness: Philox4x32-10 (Salmon, Moraes, Dror & Shaw 2011, "Parallel random numbers: as easy as
//! 1, 2, 3"; constants and test vectors of the Random123 library).

/// The cipher: four words from a counter and a key.
pub fn philox4x32(mut counter: [u32; 4], mut key: [u32; 2]) -> [u32; 4] {
    for _ in 0..10 {
        let a = u64::from(counter[0]) * 0xD251_1F53;
        let b = u64::from(counter[2]) * 0xCD9E_8D57;
        let (a_hi, b_hi) = ((a >> 32) as u32, (b >> 32) as u32);
        counter = [b_hi ^ counter[1] ^ key[0], b as u32, a_hi ^ counter[3] ^ key[1], a as u32];
        key = [key[0].wrapping_add(0x9E37_79B9), key[1].wrapping_add(0xBB67_AE85)];
    }
    counter
}

/// The number in [0, 1), with 53 random bits, that the draw at `position` of a sequence with `seed` uses.
pub fn unit(seed: u64, position: u64) -> f64 {
    let words = philox4x32([position as u32, (position >> 32) as u32, 0, 0], [seed as u32, (seed >> 32) as u32]);
    let bits = u64::from(words[0]) << 32 | u64::from(words[1]);
    (bits >> 11) as f64 / (1u64 << 53) as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_answers() {
        let zero = philox4x32([0; 4], [0; 2]);
        assert_eq!(zero, [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]);
        let ones = philox4x32([u32::MAX; 4], [u32::MAX; 2]);
        assert_eq!(ones, [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]);
        let pi = philox4x32([0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344], [0xa409_3822, 0x299f_31d0]);
        assert_eq!(pi, [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1]);
    }

    #[test]
    fn units_are_uniform_over_positions_and_over_seeds() {
        for by_seed in [false, true] {
            let mut bins = [0u32; 16];
            for i in 0..16_000 {
                let u = if by_seed { unit(i, 3) } else { unit(42, i) };
                bins[(u * 16.0) as usize] += 1;
            }
            let chi2: f64 = bins.iter().map(|&n| (f64::from(n) - 1000.0).powi(2) / 1000.0).sum();
            assert!(chi2 < 37.7, "chi-square {chi2} at 15 degrees of freedom"); // p = 0.001
        }
    }
}
