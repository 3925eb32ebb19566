//! The driver: quantizes the activations once, then shares out (rows × panel) units among the workers.

use super::activations::{Activations, Residuals};
use super::buffer::Buffer;
use super::kernel::{FloatTile, Kernels, QuantTile, ResidualRun, Source};
use super::layout::{BLOCK, Format, Kind, PANEL};
use super::{PackedWeight, Part};
use crate::cpu::{Isa, Pool};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

/// Columns handled at a time, so that a panel's unpacked quants and scales stay in the first-level cache.
const RUN_COLS: usize = 1024;
/// The same for float weights.
const RUN_COLS_FLOAT: usize = 256;
/// Bytes of quantized activations that pass by a panel at a time: half of a small second-level cache.
const ROWS_BYTES: usize = 256 << 10;
/// Most rows of a unit.
const UNIT_ROWS: usize = 512;
/// Values from which on quantizing is worth a dispatch of its own.
const PARALLEL_QUANTIZE: usize = 16 << 10;

/// Rows of f32 in memory: row `r` begins at `data[r * stride]`.
#[derive(Debug, Clone, Copy)]
pub struct Rows<'a> {
    /// All rows.
    pub data: &'a [f32],
    /// Distance of two rows, in values.
    pub stride: usize,
}

/// As [`Rows`], to be written.
#[derive(Debug)]
pub struct RowsMut<'a> {
    /// All rows.
    pub data: &'a mut [f32],
    /// Distance of two rows, in values.
    pub stride: usize,
}

/// Memory that [`forward`] works in, reserved at start, and the instruction set it uses.
pub struct Scratch {
    kernels: &'static Kernels,
    activations: Activations,
    residuals: Residuals,
    workers: Vec<Mutex<Worker>>,
}

/// What one worker keeps of a panel.
struct Worker {
    quants: Buffer<u8>,
    d: Buffer<f32>,
    m: Buffer<f32>,
    acc: Buffer<f32>,
}

impl Scratch {
    /// Scratch for calls whose `rows * n_cols` is at most `max_values`, on a pool of `n_workers`.
    ///
    /// # Panics
    /// If the machine lacks `isa`.
    pub fn new(isa: Isa, n_workers: usize, max_values: usize) -> Self {
        assert!(isa.is_available(), "{isa:?} is not available on this machine");
        let worker = || Worker {
            quants: Buffer::zeroed(RUN_COLS * PANEL),
            d: Buffer::zeroed(RUN_COLS),
            m: Buffer::zeroed(RUN_COLS),
            acc: Buffer::zeroed(UNIT_ROWS * PANEL),
        };
        Self {
            kernels: Kernels::of(isa),
            activations: Activations::new(max_values),
            residuals: Residuals::new(max_values),
            workers: (0..n_workers).map(|_| Mutex::new(worker())).collect(),
        }
    }

    /// Bytes that [`Scratch::new`] will reserve.
    pub const fn bytes(n_workers: usize, max_values: usize) -> usize {
        n_workers * (RUN_COLS * (PANEL + 8) + UNIT_ROWS * PANEL * 4)
            + Activations::bytes(max_values)
            + Residuals::bytes(max_values)
    }
}

/// `out[r] = x[r] · wᵀ + bias` for the first `rows` rows; rows of `x` have `w.n_cols()` values, rows of `out` `w.n_rows()`.
///
/// # Panics
/// If `x`, `out` or `scratch` is too small.
pub fn forward(pool: &mut Pool, scratch: &mut Scratch, rows: usize, x: Rows<'_>, w: &PackedWeight, out: RowsMut<'_>) {
    if rows == 0 {
        return;
    }
    let (n_cols, n_rows) = (w.n_cols(), w.n_rows());
    assert!(x.stride >= n_cols && x.data.len() >= (rows - 1) * x.stride + n_cols, "x is too small");
    assert!(out.stride >= n_rows && out.data.len() >= (rows - 1) * out.stride + n_rows, "out is too small");
    assert!(pool.n_workers() <= scratch.workers.len(), "scratch is for a smaller pool");
    let tile = scratch.kernels.tile_rows;
    let most = (ROWS_BYTES / n_cols).clamp(tile, UNIT_ROWS);
    let unit_rows = rows.div_ceil(rows.div_ceil(most)).next_multiple_of(tile).min(UNIT_ROWS);
    scratch.quantize(pool, rows, unit_rows, x, w);
    let job = Linear {
        kernels: scratch.kernels,
        activations: &scratch.activations,
        residuals: &scratch.residuals,
        rows,
        unit_rows,
        x,
        w,
        out: Out { data: out.data.as_mut_ptr(), stride: out.stride },
    };
    let workers = &scratch.workers;
    let units = Units::new(rows.div_ceil(unit_rows) * w.n_panels(), pool.n_workers());
    pool.run(|i| {
        let mut worker = workers[i].lock().unwrap_or_else(PoisonError::into_inner);
        while let Some(range) = units.take() {
            for unit in range {
                job.unit(&mut worker, unit);
            }
        }
    });
}

impl Scratch {
    /// Quantizes the activations as the weights need it: in int8, int16 or both.
    fn quantize(&mut self, pool: &mut Pool, rows: usize, unit_rows: usize, x: Rows<'_>, w: &PackedWeight) {
        let (n_cols, n_blocks, tile_rows) = (w.n_cols(), w.n_cols() / BLOCK, self.kernels.tile_rows);
        let mut kinds = w.parts.iter().filter_map(|part| Format::of(part.dtype)).map(|format| format.kind.is_wide());
        let (any_wide, any_narrow) = (kinds.clone().any(|wide| wide), kinds.any(|wide| !wide));
        assert!(!(any_wide || any_narrow) || rows * n_cols <= self.activations.capacity(), "scratch is too small");
        let row = |r: usize| &x.data[r * x.stride..][..n_cols];
        let in_tile = |t: usize| tile_rows.min(rows - t * tile_rows);
        let parallel = rows * n_cols >= PARALLEL_QUANTIZE;
        if any_wide {
            each(pool, parallel, self.activations.wide_mut(rows, tile_rows, n_cols).enumerate(), |(t, mut tile)| {
                for r in 0..in_tile(t) {
                    // SAFETY: `Scratch::new` checked that the instruction set is available, here and below.
                    unsafe { (self.kernels.quantize_row_wide)(row(t * tile_rows + r), &mut tile, r, in_tile(t)) };
                }
            });
        }
        if any_narrow {
            each(pool, parallel, self.activations.narrow_mut(rows, tile_rows, n_cols).enumerate(), |(t, mut tile)| {
                for r in 0..in_tile(t) {
                    // SAFETY: as above.
                    unsafe { (self.kernels.quantize_row)(row(t * tile_rows + r), &mut tile, r, in_tile(t)) };
                }
            });
            let tiles = self.residuals.list(&self.activations, rows, unit_rows, tile_rows, n_blocks);
            each(pool, parallel, tiles, |mut tile| {
                for (r, row_in_unit) in tile.rows.iter().enumerate() {
                    let x = &row(tile.unit * unit_rows + *row_in_unit as usize).as_chunks::<BLOCK>().0[tile.block];
                    // SAFETY: as above.
                    unsafe { (self.kernels.quantize_residual)(x, &mut tile, r) };
                }
            });
        }
    }
}

/// Calls `f` for each item, on all workers if `parallel`.
fn each<T: Send>(pool: &mut Pool, parallel: bool, mut items: impl Iterator<Item = T> + Send, f: impl Fn(T) + Sync) {
    if !parallel {
        return items.for_each(f);
    }
    let items = Mutex::new(&mut items);
    let next = || items.lock().unwrap_or_else(PoisonError::into_inner).next();
    pool.run(|_| {
        while let Some(item) = next() {
            f(item);
        }
    });
}

/// Hands out ranges of units, large ones first: few steps, and a slow core takes less.
struct Units {
    next: AtomicUsize,
    end: usize,
    shares: usize,
}

impl Units {
    fn new(n: usize, n_workers: usize) -> Self {
        let shares = if n_workers == 1 { 1 } else { 3 * n_workers };
        Self { next: AtomicUsize::new(0), end: n, shares }
    }

    fn take(&self) -> Option<std::ops::Range<usize>> {
        let size = |next: usize| ((self.end - next) / self.shares).max(1);
        let take = |next: usize| (next < self.end).then(|| next + size(next));
        let start = self.next.fetch_update(Ordering::Relaxed, Ordering::Relaxed, take).ok()?;
        Some(start..start + size(start))
    }
}

/// The output matrix, to which workers write disjoint columns.
struct Out {
    data: *mut f32,
    stride: usize,
}

// SAFETY: `Linear::store` writes each element from the one worker that took its unit, and nobody reads before the run ends.
unsafe impl Sync for Out {}

/// One call of [`forward`], as the workers see it.
struct Linear<'a> {
    kernels: &'static Kernels,
    activations: &'a Activations,
    residuals: &'a Residuals,
    rows: usize,
    /// Rows of a unit, a multiple of the tile's.
    unit_rows: usize,
    x: Rows<'a>,
    w: &'a PackedWeight,
    out: Out,
}

/// A run of columns of a panel, ready for the kernels.
struct Run<'a> {
    source: Source,
    quants: &'a [u8],
    /// Scales and minima, `[sub-block][16]`.
    d: &'a [f32],
    m: &'a [f32],
    /// First column and number of columns.
    start: usize,
    cols: usize,
}

impl Linear<'_> {
    /// Computes one panel's outputs of `unit_rows` rows. Panels are innermost: consecutive units read consecutive memory.
    fn unit(&self, worker: &mut Worker, unit: usize) {
        let n_panels = self.w.n_panels();
        let first_row = unit / n_panels * self.unit_rows;
        let rows = self.unit_rows.min(self.rows - first_row);
        let panel = unit % n_panels;
        let part = self.w.parts.iter().rfind(|part| part.first_panel <= panel).expect("the first part begins at 0");
        let panel = panel - part.first_panel;
        let data = &self.w.data[part.offset + panel * part.panel_bytes..][..part.panel_bytes];
        // The panel that this worker most likely takes next.
        let next = &self.w.data[part.offset + (panel + 1).min(part.n_rows.div_ceil(PANEL) - 1) * part.panel_bytes..];
        worker.acc[..rows * PANEL].fill(0.0);
        match Format::of(part.dtype) {
            Some(format) => self.quant_panel(worker, format, data, next, first_row, rows),
            None => self.float_panel(worker, part, data, first_row, rows),
        }
        self.store(worker, part.first_row + panel * PANEL, PANEL.min(part.n_rows - panel * PANEL), first_row, rows);
    }

    fn quant_panel(
        &self,
        worker: &mut Worker,
        format: Format,
        panel: &[u8],
        next: &[u8],
        first_row: usize,
        rows: usize,
    ) {
        let (n_cols, tile_rows) = (self.w.n_cols(), self.kernels.tile_rows);
        let kind = format.kind;
        let (scales, quants) = panel.split_at(format.scale_bytes(n_cols));
        let prefetch_bytes = panel.len() / (n_cols / BLOCK);
        let unpack = kind == Kind::U4 && rows > tile_rows;
        for start in (0..n_cols).step_by(RUN_COLS) {
            let cols = RUN_COLS.min(n_cols - start);
            let at = |cols: usize| cols / format.scales.record_cols() * format.scales.record_bytes();
            // SAFETY: `Scratch::new` checked that the instruction set is available, here and below.
            unsafe {
                (self.kernels.expand_scales)(format, &scales[at(start)..][..at(cols)], &mut worker.d, &mut worker.m)
            };
            let quants = &quants[start / BLOCK * kind.block_bytes()..][..cols / BLOCK * kind.block_bytes()];
            let (source, quants) = if unpack {
                // SAFETY: as above.
                unsafe { (self.kernels.unpack_nibbles)(quants, &mut worker.quants) };
                (Source::UnpackedU4, &worker.quants[..cols * PANEL])
            } else {
                (Source::Packed(kind), quants)
            };
            let run = Run { source, quants, d: &worker.d, m: &worker.m, start, cols };
            let acc = worker.acc.as_chunks_mut::<PANEL>().0;
            for row in (0..rows).step_by(tile_rows) {
                let prefetch = if row == 0 { &next[start / BLOCK * prefetch_bytes..] } else { &[] };
                let acc = &mut acc[row..row + tile_rows.min(rows - row)];
                self.quant_run(kind, &run, first_row + row, acc, prefetch, prefetch_bytes);
            }
            if !kind.is_wide() {
                self.residual_run(&run, first_row / self.unit_rows, acc);
            }
        }
    }

    /// One tile, from row `first_row` on, one row for each of `acc`.
    fn quant_run(
        &self,
        kind: Kind,
        run: &Run<'_>,
        first_row: usize,
        acc: &mut [[f32; PANEL]],
        prefetch: &[u8],
        prefetch_bytes: usize,
    ) {
        let (rows, n_cols) = (acc.len(), self.w.n_cols());
        let (at, block) = (run.start * rows, run.start / BLOCK * rows);
        let (x, x_scale, x_sum) = if kind.is_wide() {
            let x = self.activations.wide(first_row, rows, n_cols);
            let sum = if kind.sub_len() == BLOCK { std::ptr::null() } else { x.sum[2 * block..].as_ptr() };
            (x.q[at..].as_ptr().cast(), &x.scale[block..], sum)
        } else {
            let x = self.activations.narrow(first_row, rows, n_cols);
            (x.q[at..].as_ptr().cast(), &x.scale[block..], x.sum[block..].as_ptr())
        };
        let tile = QuantTile {
            rows,
            quants: run.quants.as_ptr(),
            d: run.d.as_ptr(),
            m: run.m.as_ptr(),
            x,
            x_scale: x_scale.as_ptr(),
            x_sum,
            n_blocks: run.cols / BLOCK,
            prefetch: if prefetch.is_empty() { std::ptr::null() } else { prefetch.as_ptr() },
            prefetch_bytes,
            acc: acc.as_mut_ptr().cast(),
        };
        // SAFETY: the slices above hold `cols` columns from `start` on of all that the tile points to, and `Scratch::new`
        // checked that the instruction set is available.
        unsafe { (self.kernels.quant)(run.source, rows)(&tile) };
    }

    /// Adds the residuals of the run's outlier blocks, block by block. For a row it is the same order in any batch.
    fn residual_run(&self, run: &Run<'_>, unit: usize, acc: &mut [[f32; PANEL]]) {
        let blocks = run.start / BLOCK..(run.start + run.cols) / BLOCK;
        let first_block = blocks.start;
        let tiles = self.residuals.tiles(unit, blocks, self.w.n_cols() / BLOCK);
        if tiles.is_empty() {
            return;
        }
        let run_of_tiles = ResidualRun {
            tiles,
            residuals: self.residuals,
            first_block,
            quants: run.quants.as_ptr(),
            d: run.d.as_ptr(),
            m: run.m.as_ptr(),
            acc: acc.as_mut_ptr().cast(),
        };
        // SAFETY: the run has all blocks of the tiles, `acc` all rows of the unit, the rows of a tile differ, and
        // `Scratch::new` checked that the instruction set is available.
        unsafe { (self.kernels.residual)(run.source)(&run_of_tiles) };
    }

    fn float_panel(&self, worker: &mut Worker, part: &Part, panel: &[u8], first_row: usize, rows: usize) {
        let (n_cols, tile_rows) = (self.w.n_cols(), self.kernels.tile_rows);
        let column_bytes = PANEL * part.dtype.block_bytes();
        for start in (0..n_cols).step_by(RUN_COLS_FLOAT) {
            let cols = RUN_COLS_FLOAT.min(n_cols - start);
            for row in (0..rows).step_by(tile_rows) {
                let in_tile = tile_rows.min(rows - row);
                let from = (first_row + row) * self.x.stride + start;
                let x = &self.x.data[from..][..(in_tile - 1) * self.x.stride + cols];
                let tile = FloatTile {
                    rows: in_tile,
                    weights: panel[start * column_bytes..][..cols * column_bytes].as_ptr(),
                    x: x.as_ptr(),
                    x_stride: self.x.stride,
                    n_cols: cols,
                    acc: worker.acc[row * PANEL..(row + in_tile) * PANEL].as_mut_ptr(),
                };
                // SAFETY: the slices above have what the tile's fields imply; `Scratch::new` checked the instruction set.
                unsafe { (self.kernels.float)(part.dtype, in_tile)(&tile) };
            }
        }
    }

    /// Writes accumulators plus bias to columns `column..column + n` of the rows.
    fn store(&self, worker: &Worker, column: usize, n: usize, first_row: usize, rows: usize) {
        let bias = self.w.bias.as_ref().map(|bias| &bias[column..column + n]);
        for (r, acc) in worker.acc.as_chunks::<PANEL>().0.iter().take(rows).enumerate() {
            // SAFETY: `forward` checked that rows have `n_rows` values; no other unit has these (row, column) pairs.
            let out = unsafe {
                std::slice::from_raw_parts_mut(self.out.data.add((first_row + r) * self.out.stride + column), n)
            };
            match bias {
                None if n == PANEL => out.copy_from_slice(acc), // Of a known length: no call.
                None => out.copy_from_slice(&acc[..n]),
                Some(bias) => {
                    for ((out, acc), bias) in out.iter_mut().zip(acc).zip(bias) {
                        *out = acc + bias;
                    }
                }
            }
        }
    }
}
