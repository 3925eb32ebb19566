//! Activations as the integer kernels want them: int8 with a scale for each 32 columns of each row, in tiles of rows.
//!
//! A scale for a block, not for a row, keeps the error of a few large activations to their own blocks. Rows are quantized one by one,
//! so a row's integers and scales don't depend on its batch.

use super::buffer::Buffer;
use super::kernel::Kernels;
use super::layout::BLOCK;

/// Quantized rows, tile after tile; within a tile as [`super::kernel::QuantTile`] has it.
pub(super) struct Activations {
    q: Buffer<i8>,
    scale: Buffer<f32>,
    /// Sums of 32 columns.
    sum32: Buffer<f32>,
    /// Sums of 16 columns.
    sum16: Buffer<f32>,
}

/// A tile's share of [`Activations`].
pub(super) struct ActivationTile<'a> {
    pub q: &'a [i8],
    pub scale: &'a [f32],
    pub sum32: &'a [f32],
    pub sum16: &'a [f32],
}

/// The same, while it is written.
pub(super) struct ActivationTileMut<'a> {
    pub q: &'a mut [i8],
    pub scale: &'a mut [f32],
    pub sum32: &'a mut [f32],
    pub sum16: &'a mut [f32],
}

impl Activations {
    /// Room for `n` values.
    pub(super) fn new(n: usize) -> Self {
        let f32s = |per: usize| Buffer::zeroed(n.div_ceil(per));
        Self { q: Buffer::zeroed(n), scale: f32s(BLOCK), sum32: f32s(BLOCK), sum16: f32s(16) }
    }

    /// Bytes for `n` values.
    pub(super) const fn bytes(n: usize) -> usize {
        n + n.div_ceil(BLOCK) * 8 + n.div_ceil(16) * 4
    }

    /// Values it has room for.
    pub(super) fn capacity(&self) -> usize {
        self.q.len()
    }

    /// Rows `first_row..first_row + rows`, which are one tile.
    pub(super) fn tile(&self, first_row: usize, rows: usize, n_cols: usize) -> ActivationTile<'_> {
        let range = |per: usize| first_row * (n_cols / per)..(first_row + rows) * (n_cols / per);
        ActivationTile {
            q: &self.q[range(1)],
            scale: &self.scale[range(BLOCK)],
            sum32: &self.sum32[range(BLOCK)],
            sum16: &self.sum16[range(16)],
        }
    }

    /// All tiles of `rows` rows, to be written.
    pub(super) fn tiles_mut(
        &mut self,
        rows: usize,
        tile_rows: usize,
        n_cols: usize,
    ) -> impl Iterator<Item = ActivationTileMut<'_>> {
        let n = |per: usize| (rows * (n_cols / per), tile_rows * (n_cols / per));
        let q = self.q[..n(1).0].chunks_mut(n(1).1);
        let scale = self.scale[..n(BLOCK).0].chunks_mut(n(BLOCK).1);
        let sum32 = self.sum32[..n(BLOCK).0].chunks_mut(n(BLOCK).1);
        let sum16 = self.sum16[..n(16).0].chunks_mut(n(16).1);
        q.zip(scale).zip(sum32.zip(sum16)).map(|((q, scale), (sum32, sum16))| ActivationTileMut {
            q,
            scale,
            sum32,
            sum16,
        })
    }
}

impl ActivationTileMut<'_> {
    /// Quantizes row `r` of the tile's `rows`.
    pub(super) fn quantize_row(&mut self, kernels: &Kernels, r: usize, rows: usize, x: &[f32]) {
        for (b, x) in x.as_chunks::<BLOCK>().0.iter().enumerate() {
            let mut q = [0i8; BLOCK];
            // SAFETY: `kernels` are of an available instruction set: `Scratch::new` checked it.
            self.scale[b * rows + r] = unsafe { (kernels.quantize_block)(x, &mut q) };
            for (g, group) in q.as_chunks::<4>().0.iter().enumerate() {
                self.q[((b * BLOCK / 4 + g) * rows + r) * 4..][..4].copy_from_slice(group);
            }
            let sum = |q: &[i8]| q.iter().map(|&q| i32::from(q)).sum::<i32>();
            let (low, high) = (sum(&q[..16]), sum(&q[16..]));
            self.sum16[2 * b * rows + r] = low as f32;
            self.sum16[(2 * b + 1) * rows + r] = high as f32;
            self.sum32[b * rows + r] = (low + high) as f32;
        }
    }
}
