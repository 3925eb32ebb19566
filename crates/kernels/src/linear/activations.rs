//! Activations as the integer kernels want them: int8 with a scale for each 32 columns of each row, in tiles of rows.
//!
//! A scale for a block, not for a row, keeps the error of a few large activations to their own blocks. Rows are quantized one by one,
//! so a row's integers and scales don't depend on its batch.

use super::buffer::Buffer;
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

/// What is known of 32 columns beside their integers.
pub(super) struct QuantizedBlock {
    pub scale: f32,
    /// Of the integers of the first and the last 16 columns.
    pub sums: [i32; 2],
}

/// Quantizes row `r` of the tile's `rows`, block by block; inlined into each instruction set's function.
#[inline(always)]
pub(super) fn quantize_row(
    x: &[f32],
    to: &mut ActivationTileMut<'_>,
    r: usize,
    rows: usize,
    quantize_block: impl Fn(&[f32; BLOCK], &mut [i8; BLOCK]) -> QuantizedBlock,
) {
    for (b, x) in x.as_chunks::<BLOCK>().0.iter().enumerate() {
        let mut q = [0i8; BLOCK];
        let QuantizedBlock { scale, sums: [low, high] } = quantize_block(x, &mut q);
        let groups = &mut to.q.as_chunks_mut::<4>().0[b * (BLOCK / 4) * rows + r..];
        for (group, to) in q.as_chunks::<4>().0.iter().zip(groups.iter_mut().step_by(rows)) {
            *to = *group;
        }
        to.scale[b * rows + r] = scale;
        to.sum16[2 * b * rows + r] = low as f32;
        to.sum16[(2 * b + 1) * rows + r] = high as f32;
        to.sum32[b * rows + r] = (low + high) as f32;
    }
}
