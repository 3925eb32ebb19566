//! Activations as the integer kernels want them, as precise as the weights that they meet deserve.
//!
//! - Weights of 4 and 5 bits meet int8 with a scale for each 32 columns of each row. A scale for a block, not for a row,
//!   keeps the error of a few large activations to their own blocks; what is left of it is in just these blocks. So an
//!   *outlier block* gets a second int8 term, the rounded residual, in [`Residuals`].
//! - Weights of 6 and 8 bits meet int16 with a scale for each 32 columns. Int8 would add as much noise as the weights have.
//!
//! A block is an outlier if its largest magnitude exceeds [`OUTLIER`] times the root mean square of its row's blocks' largest
//! magnitudes. On SmolLM2-135M in Q4_1 with a Q8_0 head, both rules together halve the error that int8 alone makes in the gap
//! of the best two logits (`crates/engine/tests/smollm2.rs` prints it). Residuals take time as the number of outliers has it.
//!
//! Rows are quantized one by one, and a row's outliers are its own affair: its integers and scales don't depend on its batch.

use super::buffer::Buffer;
use super::layout::BLOCK;

/// See above. Its square bounds the outliers: at most `1 / OUTLIER²` of a row's blocks are, as their squares sum to less
/// than all blocks'.
const OUTLIER: f64 = 1.5;

/// Steps of a residual in one of the first term: the residual is at most half a step, and 127 of its own.
pub(super) const RESIDUAL_STEPS: f32 = 254.0;

/// Quantized rows, tile after tile; within a tile as [`super::kernel::QuantTile`] has it.
pub(super) struct Activations {
    narrow: Buffer<i8>,
    narrow_scale: Buffer<f32>,
    /// Sums of 32 columns.
    narrow_sum: Buffer<f32>,
    /// Whether a block is an outlier, in the order of the scales.
    outlier: Buffer<u8>,
    wide: Buffer<i16>,
    wide_scale: Buffer<f32>,
    /// Sums of 16 columns.
    wide_sum: Buffer<f32>,
}

/// A tile's share of [`Activations`]: integers of either width, their scales and sums.
pub(super) struct ActivationTile<'a, T> {
    pub q: &'a [T],
    pub scale: &'a [f32],
    pub sum: &'a [f32],
}

/// The same, while it is written.
pub(super) struct ActivationTileMut<'a, T> {
    pub q: &'a mut [T],
    pub scale: &'a mut [f32],
    pub sum: &'a mut [f32],
    /// Empty if wide.
    outlier: &'a mut [u8],
}

impl Activations {
    /// Room for `n` values.
    pub(super) fn new(n: usize) -> Self {
        let f32s = |per: usize| Buffer::zeroed(n.div_ceil(per));
        Self {
            narrow: Buffer::zeroed(n),
            narrow_scale: f32s(BLOCK),
            narrow_sum: f32s(BLOCK),
            outlier: Buffer::zeroed(n.div_ceil(BLOCK)),
            wide: Buffer::zeroed(n),
            wide_scale: f32s(BLOCK),
            wide_sum: f32s(BLOCK / 2),
        }
    }

    /// Bytes for `n` values.
    pub(super) const fn bytes(n: usize) -> usize {
        3 * n + n.div_ceil(BLOCK) * (3 * 4 + 1) + n.div_ceil(BLOCK / 2) * 4
    }

    /// Values it has room for.
    pub(super) fn capacity(&self) -> usize {
        self.narrow.len()
    }

    /// Rows `first_row..first_row + rows`, which are one tile, in int8.
    pub(super) fn narrow(&self, first_row: usize, rows: usize, n_cols: usize) -> ActivationTile<'_, i8> {
        let range = |per: usize| first_row * (n_cols / per)..(first_row + rows) * (n_cols / per);
        ActivationTile {
            q: &self.narrow[range(1)],
            scale: &self.narrow_scale[range(BLOCK)],
            sum: &self.narrow_sum[range(BLOCK)],
        }
    }

    /// The same in int16.
    pub(super) fn wide(&self, first_row: usize, rows: usize, n_cols: usize) -> ActivationTile<'_, i16> {
        let range = |per: usize| first_row * (n_cols / per)..(first_row + rows) * (n_cols / per);
        ActivationTile {
            q: &self.wide[range(1)],
            scale: &self.wide_scale[range(BLOCK)],
            sum: &self.wide_sum[range(BLOCK / 2)],
        }
    }

    /// All int8 tiles of `rows` rows, to be written.
    pub(super) fn narrow_mut(
        &mut self,
        rows: usize,
        tile_rows: usize,
        n_cols: usize,
    ) -> impl Iterator<Item = ActivationTileMut<'_, i8>> {
        let n = |per: usize| (rows * (n_cols / per), tile_rows * (n_cols / per));
        let q = self.narrow[..n(1).0].chunks_mut(n(1).1);
        let scale = self.narrow_scale[..n(BLOCK).0].chunks_mut(n(BLOCK).1);
        let sum = self.narrow_sum[..n(BLOCK).0].chunks_mut(n(BLOCK).1);
        let outlier = self.outlier[..n(BLOCK).0].chunks_mut(n(BLOCK).1);
        let tile = |((q, scale), (sum, outlier))| ActivationTileMut { q, scale, sum, outlier };
        q.zip(scale).zip(sum.zip(outlier)).map(tile)
    }

    /// The same in int16.
    pub(super) fn wide_mut(
        &mut self,
        rows: usize,
        tile_rows: usize,
        n_cols: usize,
    ) -> impl Iterator<Item = ActivationTileMut<'_, i16>> {
        let n = |per: usize| (rows * (n_cols / per), tile_rows * (n_cols / per));
        let q = self.wide[..n(1).0].chunks_mut(n(1).1);
        let scale = self.wide_scale[..n(BLOCK).0].chunks_mut(n(BLOCK).1);
        let sum = self.wide_sum[..n(BLOCK / 2).0].chunks_mut(n(BLOCK / 2).1);
        q.zip(scale).zip(sum).map(|((q, scale), sum)| ActivationTileMut { q, scale, sum, outlier: &mut [] })
    }

    /// Calls `f(block, row)` for the outliers of rows `first_row..first_row + rows`, counted from the first; row by row
    /// within each block. `first_row` begins a tile.
    fn each_outlier(
        &self,
        first_row: usize,
        rows: usize,
        tile_rows: usize,
        n_blocks: usize,
        mut f: impl FnMut(usize, usize),
    ) {
        let tiles = self.outlier[first_row * n_blocks..][..rows * n_blocks].chunks(tile_rows * n_blocks);
        for (t, tile) in tiles.enumerate() {
            let in_tile = tile.len() / n_blocks;
            for (b, flags) in tile.chunks_exact(in_tile).enumerate() {
                for (r, _) in flags.iter().enumerate().filter(|(_, flag)| **flag != 0) {
                    f(b, t * tile_rows + r);
                }
            }
        }
    }
}

/// What is known of a block of columns beside its integers.
pub(super) struct QuantizedBlock<const SUMS: usize> {
    pub scale: f32,
    /// Of the integers of equal parts of the block.
    pub sums: [i32; SUMS],
}

/// Quantizes row `r` of the tile's `rows`, block by block; inlined into each instruction set's function.
#[inline(always)]
pub(super) fn quantize_row(
    x: &[f32],
    to: &mut ActivationTileMut<'_, i8>,
    r: usize,
    rows: usize,
    quantize_block: impl Fn(&[f32; BLOCK], &mut [i8; BLOCK]) -> QuantizedBlock<1>,
) {
    let mut squares = 0.0;
    for (b, x) in x.as_chunks::<BLOCK>().0.iter().enumerate() {
        let mut q = [0i8; BLOCK];
        let QuantizedBlock { scale, sums: [sum] } = quantize_block(x, &mut q);
        interleave(&q, &mut to.q[b * BLOCK * rows..], r, rows, |group| *group);
        to.scale[b * rows + r] = scale;
        to.sum[b * rows + r] = sum as f32;
        squares += f64::from(scale) * f64::from(scale);
    }
    // Squares of f32 neither overflow nor vanish in f64. A row that is not finite has no outliers: no comparison holds.
    let limit = squares / (x.len() / BLOCK) as f64 * (OUTLIER * OUTLIER);
    for (scale, outlier) in to.scale[r..].iter().step_by(rows).zip(to.outlier[r..].iter_mut().step_by(rows)) {
        *outlier = u8::from(f64::from(*scale) * f64::from(*scale) > limit);
    }
}

/// As [`quantize_row`], to int16. The second and third column of a group change places: the pairs that one instruction
/// multiplies are then the even and the odd bytes of a group of weights, which a shift separates.
#[inline(always)]
pub(super) fn quantize_row_wide(
    x: &[f32],
    to: &mut ActivationTileMut<'_, i16>,
    r: usize,
    rows: usize,
    quantize_block: impl Fn(&[f32; BLOCK], &mut [i16; BLOCK]) -> QuantizedBlock<2>,
) {
    for (b, x) in x.as_chunks::<BLOCK>().0.iter().enumerate() {
        let mut q = [0i16; BLOCK];
        let QuantizedBlock { scale, sums } = quantize_block(x, &mut q);
        interleave(&q, &mut to.q[b * BLOCK * rows..], r, rows, |&[a, b, c, d]| [a, c, b, d]);
        to.scale[b * rows + r] = scale;
        for (half, sum) in sums.into_iter().enumerate() {
            to.sum[(2 * b + half) * rows + r] = sum as f32;
        }
    }
}

/// Writes a row's block to its places among those of a tile.
#[inline(always)]
fn interleave<T: Copy>(q: &[T; BLOCK], to: &mut [T], r: usize, rows: usize, order: impl Fn(&[T; 4]) -> [T; 4]) {
    let groups = &mut to.as_chunks_mut::<4>().0[r..];
    for (group, to) in q.as_chunks::<4>().0.iter().zip(groups.iter_mut().step_by(rows)) {
        *to = order(group);
    }
}

/// The residuals of outlier blocks: for each unit of rows and block of columns, of the rows in which it is an outlier.
///
/// Rows that have none in a block are not in its list, so they pay nothing and nothing is added to them. Lists are cut in tiles
/// like [`Activations`], of rows that need not be neighbours.
pub(super) struct Residuals {
    /// By unit, then block: its first tile; then the end.
    first_tile: Buffer<u32>,
    tiles: Buffer<ResidualTile>,
    /// Rows of the lists, counted within the unit.
    pub rows: Buffer<u32>,
    pub q: Buffer<i8>,
    pub scale: Buffer<f32>,
    pub sum: Buffer<f32>,
}

/// One block of columns of up to a tile's number of rows.
#[derive(Debug, Clone, Copy)]
pub(super) struct ResidualTile {
    pub unit: u32,
    pub block: u32,
    /// Index of the first row in the lists.
    pub first: u32,
    pub n_rows: u32,
}

/// What a tile holds, while it is written.
pub(super) struct ResidualTileMut<'a> {
    pub unit: usize,
    pub block: usize,
    pub rows: &'a [u32],
    pub q: &'a mut [i8],
    pub scale: &'a mut [f32],
    pub sum: &'a mut [f32],
}

impl Residuals {
    /// Room for the residuals of `n` values.
    pub(super) fn new(n: usize) -> Self {
        let most = Self::most(n);
        Self {
            first_tile: Buffer::zeroed(n.div_ceil(BLOCK) + 1),
            tiles: Buffer::zeroed(most),
            rows: Buffer::zeroed(most),
            q: Buffer::zeroed(most * BLOCK),
            scale: Buffer::zeroed(most),
            sum: Buffer::zeroed(most),
        }
    }

    /// Bytes for `n` values.
    pub(super) const fn bytes(n: usize) -> usize {
        (n.div_ceil(BLOCK) + 1) * 4 + Self::most(n) * (BLOCK + 3 * 4 + size_of::<ResidualTile>())
    }

    /// Most blocks that can be outliers.
    const fn most(n: usize) -> usize {
        (n.div_ceil(BLOCK) as f64 / (OUTLIER * OUTLIER)) as usize
    }

    /// Lists the outliers of `rows` rows in units of `unit_rows`, and gives the tiles to be filled.
    pub(super) fn list(
        &mut self,
        from: &Activations,
        rows: usize,
        unit_rows: usize,
        tile_rows: usize,
        n_blocks: usize,
    ) -> impl Iterator<Item = ResidualTileMut<'_>> {
        let n_lists = rows.div_ceil(unit_rows) * n_blocks;
        // First the length of each list; then where its next row goes; at last, its first tile.
        let next = &mut self.first_tile[..=n_lists];
        next.fill(0);
        let each = |f: &mut dyn FnMut(usize, usize)| {
            for (unit, first) in (0..rows).step_by(unit_rows).enumerate() {
                from.each_outlier(first, unit_rows.min(rows - first), tile_rows, n_blocks, |b, r| {
                    f(unit * n_blocks + b, r);
                });
            }
        };
        each(&mut |list, _| next[list] += 1);
        let mut end = 0;
        for next in &mut next[..] {
            end += std::mem::replace(next, end);
        }
        each(&mut |list, row| {
            self.rows[next[list] as usize] = row as u32;
            next[list] += 1;
        });
        let (mut first, mut n_tiles) = (0, 0);
        for (list, next) in next.iter_mut().enumerate() {
            let end = std::mem::replace(next, n_tiles);
            while first < end {
                let n_rows = (end - first).min(tile_rows as u32);
                let (unit, block) = ((list / n_blocks) as u32, (list % n_blocks) as u32);
                self.tiles[n_tiles as usize] = ResidualTile { unit, block, first, n_rows };
                (first, n_tiles) = (first + n_rows, n_tiles + 1);
            }
        }
        let (mut q, mut scale, mut sum) = (&mut self.q[..], &mut self.scale[..], &mut self.sum[..]);
        let all_rows = &self.rows[..];
        self.tiles[..n_tiles as usize].iter().map(move |tile| {
            let n = tile.n_rows as usize;
            ResidualTileMut {
                unit: tile.unit as usize,
                block: tile.block as usize,
                rows: &all_rows[tile.first as usize..][..n],
                q: q.split_off_mut(..n * BLOCK).expect("as many as rows"),
                scale: scale.split_off_mut(..n).expect("as many as rows"),
                sum: sum.split_off_mut(..n).expect("as many as rows"),
            }
        })
    }

    /// The tiles of some blocks of a unit, block by block.
    pub(super) fn tiles(&self, unit: usize, blocks: std::ops::Range<usize>, n_blocks: usize) -> &[ResidualTile] {
        let at = |block: usize| self.first_tile[unit * n_blocks + block] as usize;
        &self.tiles[at(blocks.start)..at(blocks.end)]
    }
}

/// Writes the residual of block `x` of the tile's row `r`; inlined into each instruction set's function.
#[inline(always)]
pub(super) fn quantize_residual(
    x: &[f32; BLOCK],
    to: &mut ResidualTileMut<'_>,
    r: usize,
    residual_block: impl Fn(&[f32; BLOCK], &mut [i8; BLOCK]) -> QuantizedBlock<1>,
) {
    let mut q = [0i8; BLOCK];
    let QuantizedBlock { scale, sums: [sum] } = residual_block(x, &mut q);
    interleave(&q, to.q, r, to.rows.len(), |group| *group);
    to.scale[r] = scale;
    to.sum[r] = sum as f32;
}
