//! Cosines and sines by position, computed when a position is first used.

use std::sync::OnceLock;

use crate::{Rope, RopePairing};

/// Positions computed together.
const CHUNK: usize = 256;

/// Rotation tables below a largest position. A model's limit may be a million positions of which a start uses none,
/// so chunks are filled on first use.
pub struct RopeTable {
    rope: Rope,
    max_positions: usize,
    chunks: Vec<OnceLock<Box<[f32]>>>,
}

impl RopeTable {
    /// A table for positions below `max_positions`.
    pub fn new(rope: &Rope, max_positions: usize) -> Self {
        let chunks = (0..max_positions.div_ceil(CHUNK)).map(|_| OnceLock::new()).collect();
        Self { rope: rope.clone(), max_positions, chunks }
    }

    /// Leading elements of a head that rotate.
    pub fn rotary_dim(&self) -> usize {
        2 * self.rope.inv_freq.len()
    }

    /// Which elements form a pair.
    pub fn pairing(&self) -> RopePairing {
        self.rope.pairing
    }

    /// Cosines and sines (times the scale) of all pairs at `position`.
    pub fn at(&self, position: usize) -> (&[f32], &[f32]) {
        assert!(position < self.max_positions, "position {position} beyond the rotation table");
        let n = self.rope.inv_freq.len();
        let chunk = self.chunks[position / CHUNK].get_or_init(|| self.chunk(position / CHUNK * CHUNK));
        chunk[position % CHUNK * 2 * n..][..2 * n].split_at(n)
    }

    fn chunk(&self, first: usize) -> Box<[f32]> {
        let mut out = Vec::with_capacity(CHUNK * self.rotary_dim());
        for position in first..first + CHUNK {
            let angle = |freq: &f32| f64::from(position as f32 * freq);
            out.extend(self.rope.inv_freq.iter().map(|f| angle(f).cos() as f32 * self.rope.scale));
            out.extend(self.rope.inv_freq.iter().map(|f| angle(f).sin() as f32 * self.rope.scale));
        }
        out.into()
    }
}
