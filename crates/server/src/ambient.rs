//! Time and randomness, passed in by the binary.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use kwire_engine::Seconds;

/// Where the server gets time and randomness from. Cheap to clone.
#[derive(Clone)]
pub struct Ambient {
    clock: Arc<dyn Fn() -> Seconds + Send + Sync>,
    unix_s: Arc<dyn Fn() -> u64 + Send + Sync>,
    random: Arc<AtomicU64>,
    seeds: Arc<AtomicU64>,
}

impl Ambient {
    /// `clock` is the engine's own clock, `unix_s` the wall clock in seconds since 1970, `entropy` any number that
    /// other processes do not have, `seed` what the seeds of requests that bring none follow from.
    pub fn new(
        clock: impl Fn() -> Seconds + Send + Sync + 'static,
        unix_s: impl Fn() -> u64 + Send + Sync + 'static,
        entropy: u64,
        seed: u64,
    ) -> Self {
        Self {
            clock: Arc::new(clock),
            unix_s: Arc::new(unix_s),
            random: Arc::new(AtomicU64::new(entropy)),
            // Mixed, so that neighbouring seeds give sequences that have nothing in common.
            seeds: Arc::new(AtomicU64::new(mix(seed))),
        }
    }

    /// Now, on the clock that never goes back.
    pub fn now(&self) -> Seconds {
        (self.clock)()
    }

    /// Now, in seconds since 1970.
    pub fn unix_s(&self) -> u64 {
        (self.unix_s)()
    }

    /// A number that no other process has: for ids, not for secrets.
    pub fn random(&self) -> u64 {
        next(&self.random)
    }

    /// The seed of the next request that brings none: a function of the engine's seed and of how many came before. 53
    /// bits, so that every JSON reader gets it right.
    pub fn seed(&self) -> u64 {
        next(&self.seeds) >> 11
    }
}

/// The next number of a SplitMix64 sequence (Steele et al. 2014).
fn next(state: &AtomicU64) -> u64 {
    const STEP: u64 = 0x9E37_79B9_7F4A_7C15;
    mix(state.fetch_add(STEP, Ordering::Relaxed).wrapping_add(STEP))
}

/// SplitMix64's output function: a bijection whose bits depend on all of `z`.
fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}
