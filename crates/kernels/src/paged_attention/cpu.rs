//! The operation on the processor: a plan of tiles, spread over the workers, and the merge of their splits.

use std::sync::atomic::{AtomicU32, Ordering};

use super::SPLIT;
use super::kernel::{self, GROUPS, ROWS, Split, Tile, stored_rows};
use crate::aligned::AlignedBuf;
use crate::cpu::lanes::{Kernel, LANES, Lanes, dispatch};
use crate::cpu::par::{Disjoint, PerWorker, for_each};
use crate::cpu::step::CpuStep;
use crate::cpu::{Isa, Pool};
use crate::kv_cache::{CpuKvCache, GROUP};
use crate::{AttentionOp, KernelError};

/// Query rows that a tile aims at: enough to share the conversion of keys and values, few enough for the caches.
const TILE_ROWS: usize = 48;
/// Cautious speed of one core, to decide whether a dispatch pays.
const FLOP_PER_NS: usize = 40;

/// What [`paged_attention`] computes, beside the data.
#[derive(Clone, Copy)]
pub(crate) struct Attention<'a> {
    pub step: &'a CpuStep,
    pub op: &'a AttentionOp,
    pub group: usize,
    pub layer: usize,
}

/// Memory that calls reuse.
pub(crate) struct AttentionScratch {
    workers: PerWorker<WorkerScratch>,
    /// Results of splits whose tile is shared by several workers.
    partials: AlignedBuf,
}

/// Buffers of one worker; see [`Tile`].
#[derive(Default)]
struct WorkerScratch {
    floats: Option<AlignedBuf>,
    visible: Vec<(usize, usize)>,
}

impl AttentionScratch {
    pub(crate) fn new(n_workers: usize) -> Result<Self, KernelError> {
        Ok(Self { workers: PerWorker::new(n_workers), partials: AlignedBuf::zeroed(0, "scratch")? })
    }
}

/// Consecutive tokens of a row, for all query heads of one KV head.
#[derive(Clone, Copy)]
struct TileSpec {
    row: usize,
    kv_head: usize,
    /// First of the tokens among the step's, their number, and the position of the first.
    first_token: usize,
    n_tokens: usize,
    position: usize,
    /// Splits that hold visible tokens: `first_split..end_split`.
    first_split: usize,
    end_split: usize,
    /// Pairs of tokens, for scheduling.
    work: usize,
}

/// What one worker takes at a time: some splits of a tile.
#[derive(Clone, Copy)]
struct Item {
    tile: usize,
    first_split: usize,
    end_split: usize,
    /// Where in the partials the first split's results go; `None`: the item is the whole tile.
    partials: Option<usize>,
}

/// Attention of every token of the step over its sequence's cached tokens, its own among them. `qkv` is
/// `tokens × (heads + 2 kv_heads) head_dim`, of which q is read; `out` is `tokens × heads head_dim`.
pub(crate) fn paged_attention(
    pool: &mut Pool,
    isa: Isa,
    scratch: &mut AttentionScratch,
    args: Attention<'_>,
    qkv: &[f32],
    cache: &CpuKvCache,
    out: &mut [f32],
) {
    let AttentionOp { heads, kv_heads, head_dim, window, .. } = *args.op;
    assert_eq!((cache.layout().kv_heads, cache.layout().head_dim), (kv_heads, head_dim), "cache shape");
    assert!(heads % kv_heads == 0 && window != Some(0));
    let n_tokens = args.step.n_tokens();
    assert_eq!(qkv.len(), n_tokens * (heads + 2 * kv_heads) * head_dim);
    assert_eq!(out.len(), n_tokens * heads * head_dim);
    let job = Job { args, qkv, cache, per_kv: heads / kv_heads, padded: head_dim.next_multiple_of(LANES) };
    let (tiles, work_ns) = job.plan();
    let (items, n_partials) = job.split_items(&tiles, pool.n_workers());
    scratch.partials.grow(n_partials).expect("scratch for attention");
    let partials = Disjoint::new(&mut scratch.partials);
    let out = Disjoint::new(out);
    let unfinished: Vec<AtomicU32> =
        tiles.iter().map(|t| AtomicU32::new((t.end_split - t.first_split) as u32)).collect();
    for_each(pool, items.len(), work_ns, |worker, i| {
        // SAFETY: `worker` is the index that `for_each` gave, and the borrow ends with the item.
        let scratch = unsafe { scratch.workers.get(worker) };
        let (item, tile) = (items[i], tiles[items[i].tile]);
        let run = RunItem {
            job: &job,
            item,
            tile,
            scratch,
            partials: &partials,
            out: &out,
            unfinished: &unfinished[item.tile],
        };
        run.run(isa);
    });
}

/// Everything that the items of one call share.
struct Job<'a> {
    args: Attention<'a>,
    qkv: &'a [f32],
    cache: &'a CpuKvCache,
    /// Query heads of a KV head.
    per_kv: usize,
    /// `head_dim` in whole vectors.
    padded: usize,
}

impl Job<'_> {
    /// Tokens that `position` sees start here.
    fn first_visible(&self, position: usize) -> usize {
        self.args.op.window.map_or(0, |w| (position + 1).saturating_sub(w))
    }

    /// All tiles, the most work first, and an estimate of the time on one core.
    fn plan(&self) -> (Vec<TileSpec>, usize) {
        let op = self.args.op;
        let tokens_per_tile = (TILE_ROWS / self.per_kv).max(1);
        let mut tiles = Vec::new();
        for (row, span) in self.args.step.rows.iter().enumerate() {
            for first in (0..span.n_tokens).step_by(tokens_per_tile) {
                let n_tokens = tokens_per_tile.min(span.n_tokens - first);
                let position = span.first_position + first;
                let (lo, hi) = (self.first_visible(position), position + n_tokens);
                let spec = TileSpec {
                    row,
                    kv_head: 0,
                    first_token: span.first_token + first,
                    n_tokens,
                    position,
                    first_split: lo / SPLIT,
                    end_split: hi.div_ceil(SPLIT),
                    work: n_tokens * (hi - lo),
                };
                tiles.extend((0..op.kv_heads).map(|kv_head| TileSpec { kv_head, ..spec }));
            }
        }
        tiles.sort_by_key(|t| std::cmp::Reverse(t.work));
        let work: usize = tiles.iter().map(|t| t.work).sum();
        (tiles, work * 4 * self.per_kv * op.head_dim / FLOP_PER_NS)
    }

    /// Cuts tiles that are a large part of all the work into single splits, so that several workers share them. This
    /// changes who computes what, not the result.
    fn split_items(&self, tiles: &[TileSpec], n_workers: usize) -> (Vec<Item>, usize) {
        let total: usize = tiles.iter().map(|t| t.work).sum();
        let (mut items, mut n_partials) = (Vec::with_capacity(tiles.len()), 0);
        for (tile, spec) in tiles.iter().enumerate() {
            let TileSpec { first_split, end_split, .. } = *spec;
            let large = spec.work * 4 * n_workers > total;
            if n_workers == 1 || !large || end_split - first_split == 1 {
                items.push(Item { tile, first_split, end_split, partials: None });
                continue;
            }
            for split in first_split..end_split {
                items.push(Item { tile, first_split: split, end_split: split + 1, partials: Some(n_partials) });
                n_partials += self.partial_len(spec);
            }
        }
        (items, n_partials)
    }

    fn n_rows(&self, tile: &TileSpec) -> usize {
        tile.n_tokens * self.per_kv
    }

    /// Floats of one split's results: `o`, `m` and `l` of each row.
    fn partial_len(&self, tile: &TileSpec) -> usize {
        stored_rows(self.n_rows(tile)) * self.padded + 2 * self.n_rows(tile)
    }
}

struct RunItem<'a> {
    job: &'a Job<'a>,
    item: Item,
    tile: TileSpec,
    scratch: &'a mut WorkerScratch,
    partials: &'a Disjoint<'a, f32>,
    out: &'a Disjoint<'a, f32>,
    unfinished: &'a AtomicU32,
}

impl RunItem<'_> {
    fn run(self, isa: Isa) {
        let (job, tile) = (self.job, &self.tile);
        let (d, padded, n) = (job.args.op.head_dim, job.padded, job.n_rows(tile));
        let lens = [
            stored_rows(n) * d,
            stored_rows(n) * kernel::SCORE_STRIDE,
            kernel::converted_len(padded),
            job.partial_len(tile),
            job.partial_len(tile),
        ];
        let WorkerScratch { floats, visible } = self.scratch;
        let [q, scores, converted, split_result, total] = carve(floats, lens);
        pack_queries(job, tile, q);
        for split in self.item.first_split..self.item.end_split {
            let first = split == self.item.first_split;
            let result = match self.item.partials {
                // SAFETY: this item alone owns the results of its splits until it counts them as finished.
                Some(at) => unsafe { self.partials.slice(at, job.partial_len(tile)) },
                None if first => &mut *total,
                None => &mut *split_result,
            };
            run_split(isa, job, tile, split, Buffers { q, scores, converted, visible }, result);
            if self.item.partials.is_none() && !first {
                dispatch(isa, Merge { n, padded, total, part: split_result });
            }
        }
        if let Some(at) = self.item.partials {
            let n_splits = tile.end_split - tile.first_split;
            // The last to finish sees what the others wrote.
            if self.unfinished.fetch_sub(1, Ordering::AcqRel) != 1 {
                return;
            }
            let first = at - (self.item.first_split - tile.first_split) * job.partial_len(tile);
            for i in 0..n_splits {
                // SAFETY: all items of the tile have finished, so this worker alone uses its results.
                let part = unsafe { self.partials.slice(first + i * job.partial_len(tile), job.partial_len(tile)) };
                if i == 0 { total.copy_from_slice(part) } else { dispatch(isa, Merge { n, padded, total, part }) }
            }
        }
        write_out(job, tile, total, self.out);
    }
}

/// Buffers of a worker that a split uses.
struct Buffers<'a> {
    q: &'a [f32],
    scores: &'a mut [f32],
    converted: &'a mut [f32],
    visible: &'a mut Vec<(usize, usize)>,
}

/// Cuts a worker's memory into slices of these lengths, each starting on a cache line.
fn carve<const N: usize>(floats: &mut Option<AlignedBuf>, lens: [usize; N]) -> [&mut [f32]; N] {
    let aligned = lens.map(|len| len.next_multiple_of(LANES));
    let total = aligned.iter().sum();
    if floats.as_ref().is_none_or(|b| b.len() < total) {
        *floats = Some(AlignedBuf::zeroed(total, "scratch").expect("scratch for attention"));
    }
    let mut rest: &mut [f32] = floats.as_mut().expect("filled above");
    std::array::from_fn(|i| {
        let (head, tail) = std::mem::take(&mut rest).split_at_mut(aligned[i]);
        rest = tail;
        &mut head[..lens[i]]
    })
}

/// Packs the tile's queries as [`Tile::q`] says. Row `t * per_kv + h` is query head `h` of token `t`. The scale goes in
/// here, and log2 e with it (softmax then is in powers of two), unless a softcap comes between.
fn pack_queries(job: &Job<'_>, tile: &TileSpec, q: &mut [f32]) {
    let op = job.args.op;
    let (d, n) = (op.head_dim, job.n_rows(tile));
    let n_cols = (op.heads + 2 * op.kv_heads) * d;
    let factor = if op.softcap.is_some() { op.scale } else { op.scale * std::f32::consts::LOG2_E };
    let width = stored_rows(n).min(ROWS);
    q.fill(0.0);
    for row in 0..n {
        let (token, head) = (tile.first_token + row / job.per_kv, tile.kv_head * job.per_kv + row % job.per_kv);
        let from = &job.qkv[token * n_cols + head * d..][..d];
        let first = row / ROWS * ROWS;
        let to = &mut q[first * d..(first + width) * d];
        for (to, &x) in to.chunks_exact_mut(width).zip(from) {
            to[row - first] = x * factor;
        }
    }
}

/// Computes one split of a tile into `result` (`o`, then `m`, then `l`).
fn run_split(isa: Isa, job: &Job<'_>, tile: &TileSpec, split: usize, buffers: Buffers<'_>, result: &mut [f32]) {
    let op = job.args.op;
    let (n, layout) = (job.n_rows(tile), job.cache.layout());
    let (start, end) = (split * SPLIT, (split + 1) * SPLIT);
    let relative = |from: usize, to: usize| (from.clamp(start, end) - start, to.clamp(start, end) - start);
    let (lo, hi) = relative(job.first_visible(tile.position), tile.position + tile.n_tokens);
    buffers.visible.clear();
    for t in 0..tile.n_tokens {
        let position = tile.position + t;
        let (lo, hi) = relative(job.first_visible(position), position + 1);
        buffers.visible.extend(std::iter::repeat_n((lo, hi.max(lo)), job.per_kv));
    }
    let first_group = lo / GROUP;
    let n_groups = hi.div_ceil(GROUP) - first_group;
    let (mut keys, mut values) = ([std::ptr::null::<u8>(); GROUPS], [std::ptr::null::<u8>(); GROUPS]);
    let group_bytes = GROUP * op.head_dim * layout.dtype.bytes();
    for i in 0..n_groups {
        let position = start + (first_group + i) * GROUP;
        let block = job.args.step.block(job.args.group, tile.row, position, layout.block_len);
        let head = job.cache.head_ptr(job.args.layer, block, tile.kv_head);
        keys[i] = head.wrapping_add(position % layout.block_len / GROUP * group_bytes);
        values[i] = keys[i].wrapping_add(job.cache.value_offset());
    }
    let (o, ml) = result.split_at_mut(stored_rows(n) * job.padded);
    let (m, l) = ml.split_at_mut(n);
    let split = Split {
        dtype: layout.dtype,
        head_dim: op.head_dim,
        first_group,
        keys: &keys[..n_groups],
        values: &values[..n_groups],
        lo,
        hi,
        visible: buffers.visible,
        softcap: op.softcap.map(|cap| (cap, cap * std::f32::consts::LOG2_E)),
    };
    let tile = Tile { q: buffers.q, scores: buffers.scores, converted: buffers.converted, m, l, o, padded: job.padded };
    // SAFETY: `head_ptr` points to a whole block of keys and values of the head, whose groups these are; the cache is
    // borrowed, and its storage ends a vector after the last value.
    unsafe { kernel::run_split(isa, &split, tile) };
}

/// Merges the next split's results into `total`: both to the greater maximum, then sums.
struct Merge<'a> {
    n: usize,
    padded: usize,
    total: &'a mut [f32],
    part: &'a [f32],
}

impl Kernel for Merge<'_> {
    type Out = ();
    #[inline(always)]
    fn run<L: Lanes>(self) {
        let Self { n, padded, total, part } = self;
        let (part_o, part_ml) = part.split_at(stored_rows(n) * padded);
        let (o, ml) = total.split_at_mut(stored_rows(n) * padded);
        for row in 0..n {
            let (m, part_m) = (ml[row], part_ml[row]);
            // A split in which the row sees nothing changes nothing, and is absent when the row is alone. (With NaN in all
            // its scores `l` is NaN, and that must not get lost.)
            if part_m == f32::NEG_INFINITY && part_ml[n + row] == 0.0 {
                continue;
            }
            let max = if m > part_m { m } else { part_m };
            let exponents = L::splat(m).keep_range(0, 1, part_m).sub(L::splat(max)).exp2().array();
            let (a, b) = (exponents[0], exponents[1]);
            ml[row] = max;
            ml[n + row] = ml[n + row] * a + part_ml[n + row] * b;
            let range = row * padded..(row + 1) * padded;
            for (o, p) in o[range.clone()].iter_mut().zip(&part_o[range]) {
                *o = *o * a + *p * b;
            }
        }
    }
}

/// Divides by the sums and writes the tile's part of the output.
fn write_out(job: &Job<'_>, tile: &TileSpec, total: &[f32], out: &Disjoint<'_, f32>) {
    let op = job.args.op;
    let (d, n) = (op.head_dim, job.n_rows(tile));
    let (o, ml) = total.split_at(stored_rows(n) * job.padded);
    for row in 0..n {
        let (token, head) = (tile.first_token + row / job.per_kv, tile.kv_head * job.per_kv + row % job.per_kv);
        // SAFETY: each token and head belongs to one tile, written by the one worker that finishes it.
        let to = unsafe { out.slice((token * op.heads + head) * d, d) };
        let factor = 1.0 / ml[n + row];
        for (to, o) in to.iter_mut().zip(&o[row * job.padded..]) {
            *to = o * factor;
        }
    }
}
