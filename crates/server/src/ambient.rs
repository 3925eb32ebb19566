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
}

impl Ambient {
    /// `clock` is the engine's own clock, `unix_s` the wall clock in seconds since 1970, `entropy` any number that other
    /// processes do not have.
    pub fn new(
        clock: impl Fn() -> Seconds + Send + Sync + 'static,
        unix_s: impl Fn() -> u64 + Send + Sync + 'static,
        entropy: u64,
    ) -> Self {
        Self { clock: Arc::new(clock), unix_s: Arc::new(unix_s), random: Arc::new(AtomicU64::new(entropy)) }
    }

    /// Now, on the clock that never goes back.
    pub fn now(&self) -> Seconds {
        (self.clock)()
    }

    /// Now, in seconds since 1970.
    pub fn unix_s(&self) -> u64 {
        (self.unix_s)()
    }

    /// The next number of a SplitMix64 sequence (Steele et al. 2014): for seeds and ids, not for secrets.
    pub fn random(&self) -> u64 {
        const STEP: u64 = 0x9E37_79B9_7F4A_7C15;
        let mut z = self.random.fetch_add(STEP, Ordering::Relaxed).wrapping_add(STEP);
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }
}
