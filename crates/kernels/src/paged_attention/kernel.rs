//! Register-tiled kernels of one split: scores, softmax, weighted values.
//!
//! A *tile* of query rows (query heads of one KV head × some tokens) shares every load of keys and values. Rows are
//! taken [`ROWS`] at a time, which fills the registers: rows × vectors of accumulators, fed by one broadcast a row and
//! one load a vector.

// Indices name the rows and vectors of a register tile, several arrays at a time.
#![allow(clippy::needless_range_loop)]

use std::marker::PhantomData;

use super::SPLIT;
use crate::KvDtype;
use crate::cpu::Isa;
use crate::cpu::lanes::{Kernel, LANES, Lanes, dispatch};
use crate::kv_cache::GROUP;

/// Query rows that one kernel call computes at most.
pub(super) const ROWS: usize = 6;
/// Floats from a row of scores to the next: a cache line more than a split, as rows that are a power of two apart would
/// compete for the same sets of the first-level cache.
pub(super) const SCORE_STRIDE: usize = SPLIT + LANES;
/// Steps that the inner loops take at a time; head sizes and groups are multiples of it.
const UNROLL: usize = 4;
/// Groups of tokens in a split.
pub(super) const GROUPS: usize = SPLIT / GROUP;
/// Groups whose values are converted to f32 together, so that they stay in the first-level cache.
const VALUE_GROUPS: usize = 4;

/// An element format of the cache.
pub(super) trait Element: Copy {
    /// # Safety
    /// Sixteen readable elements at `p`.
    unsafe fn load<L: Lanes>(p: *const Self) -> L;
}

impl Element for f32 {
    #[inline(always)]
    unsafe fn load<L: Lanes>(p: *const Self) -> L {
        // SAFETY: the caller's promise.
        unsafe { L::load(p) }
    }
}

/// f16 bits.
#[derive(Clone, Copy)]
pub(super) struct F16(#[allow(dead_code)] u16);

impl Element for F16 {
    #[inline(always)]
    unsafe fn load<L: Lanes>(p: *const Self) -> L {
        // SAFETY: the caller's promise.
        unsafe { L::load_f16(p.cast()) }
    }
}

/// bf16 bits.
#[derive(Clone, Copy)]
pub(super) struct Bf16(#[allow(dead_code)] u16);

impl Element for Bf16 {
    #[inline(always)]
    unsafe fn load<L: Lanes>(p: *const Self) -> L {
        // SAFETY: the caller's promise.
        unsafe { L::load_bf16(p.cast()) }
    }
}

/// One split of a tile's context.
pub(super) struct Split<'a> {
    /// Element format of the cache.
    pub dtype: KvDtype,
    /// Elements of a head.
    pub head_dim: usize,
    /// Groups of the split that hold visible tokens: `first_group..first_group + keys.len()`.
    pub first_group: usize,
    /// Keys of these groups, `[head_dim][16]` each.
    pub keys: &'a [*const u8],
    /// Values of these groups, `[16][head_dim]` each; readable for a vector beyond.
    pub values: &'a [*const u8],
    /// First and last visible token of the tile, relative to the split: `lo..hi`.
    pub lo: usize,
    pub hi: usize,
    /// Visible tokens of each query row, relative to the split: `lo..hi`, possibly empty.
    pub visible: &'a [(usize, usize)],
    /// `softcap` and its product with log2 e.
    pub softcap: Option<(f32, f32)>,
}

/// Rows that the buffers of a tile of `n` query rows hold: a number that the kernels are made for. What they compute for
/// the rows beyond `n` means nothing.
pub(super) fn stored_rows(n: usize) -> usize {
    if n <= 4 { n } else { n.next_multiple_of(ROWS) }
}

/// Buffers of one tile, of [`stored_rows`] rows each; `m` and `l` have a value for each query row. Rows of `o` take
/// `padded` elements: `head_dim` rounded up to whole vectors.
pub(super) struct Tile<'a> {
    /// Packed queries, scaled: blocks of up to [`ROWS`] rows, `[head_dim][rows]` each; rows beyond the queries are zero.
    pub q: &'a [f32],
    /// Scores, then weights: `rows × SCORE_STRIDE`.
    pub scores: &'a mut [f32],
    /// Converted keys or values: `VALUE_GROUPS * 16 * padded`.
    pub converted: &'a mut [f32],
    /// Greatest score of each row; -inf if it sees nothing of the split.
    pub m: &'a mut [f32],
    /// Sum of each row's weights.
    pub l: &'a mut [f32],
    /// Weighted values: `rows × padded`.
    pub o: &'a mut [f32],
    pub padded: usize,
}

/// Elements of [`Tile::converted`].
pub(super) fn converted_len(padded: usize) -> usize {
    VALUE_GROUPS * GROUP * padded
}

impl Tile<'_> {
    fn stored_rows(&self) -> usize {
        stored_rows(self.m.len())
    }
}

/// Fills `tile`'s `m`, `l` and `o` with the results of the split.
///
/// # Safety
/// The pointers of `split` are readable as its fields say.
pub(super) unsafe fn run_split(isa: Isa, split: &Split<'_>, tile: Tile<'_>) {
    match split.dtype {
        KvDtype::F32 => dispatch(isa, RunSplit(split, tile, PhantomData::<f32>)),
        KvDtype::F16 => dispatch(isa, RunSplit(split, tile, PhantomData::<F16>)),
        KvDtype::Bf16 => dispatch(isa, RunSplit(split, tile, PhantomData::<Bf16>)),
    }
}

/// Made by [`run_split`] only, whose caller promises what the pointers are.
struct RunSplit<'a, E>(&'a Split<'a>, Tile<'a>, PhantomData<E>);

impl<E: Element> Kernel for RunSplit<'_, E> {
    type Out = ();
    #[inline(always)]
    fn run<L: Lanes>(self) {
        let Self(split, mut tile, _) = self;
        tile.o.fill(0.0);
        // SAFETY: the promise of `run_split`'s caller. Conversion pays where several blocks of rows read the result.
        unsafe {
            if tile.stored_rows() > ROWS {
                scores_converted::<L, E>(split, &mut tile);
                softmax::<L>(split, &mut tile);
                values_converted::<L, E>(split, &mut tile);
            } else {
                let first = split.first_group * GROUP;
                let scores = tile.scores.as_mut_ptr().add(first);
                let groups = Groups { keys: split.keys, values: Some(split.values) };
                score_rows::<L, E>(tile.stored_rows(), groups, split.head_dim, tile.q.as_ptr(), scores);
                softmax::<L>(split, &mut tile);
                let out = Output { o: tile.o.as_mut_ptr(), padded: tile.padded };
                let Split { values, head_dim, lo, hi, .. } = *split;
                let tokens = Tokens { values, stride: head_dim, first, lo, hi };
                value_rows::<L, E>(tile.stored_rows(), &tokens, tile.scores.as_ptr(), out);
            }
        }
    }
}

/// Scores of all rows; a group's keys are converted once.
///
/// # Safety
/// As [`run_split`].
#[inline(always)]
unsafe fn scores_converted<L: Lanes, E: Element>(split: &Split<'_>, tile: &mut Tile<'_>) {
    let d = split.head_dim;
    let step = if L::WIDE { 2 } else { 1 };
    let n_rows = tile.stored_rows();
    for (i, groups) in split.keys.chunks(step).enumerate() {
        let converted = tile.converted.as_mut_ptr();
        let mut keys = [converted.cast_const().cast::<u8>(); 2];
        for (j, &group) in groups.iter().enumerate() {
            // SAFETY: a group has `16 * d` elements, and `converted` has room for four.
            unsafe {
                let to = converted.add(j * GROUP * d);
                (0..d).for_each(|k| E::load::<L>(group.cast::<E>().add(k * GROUP)).store(to.add(k * GROUP)));
                keys[j] = to.cast_const().cast();
            }
        }
        let column = (split.first_group + i * step) * GROUP;
        for row in (0..n_rows).step_by(ROWS) {
            // SAFETY: rows before `row` take `row * d` packed elements and `row * SCORE_STRIDE` scores.
            unsafe {
                let (q, s) = (tile.q.as_ptr().add(row * d), tile.scores.as_mut_ptr().add(row * SCORE_STRIDE + column));
                let groups = Groups { keys: &keys[..groups.len()], values: None };
                score_rows::<L, f32>(ROWS, groups, d, q, s);
            }
        }
    }
}

/// Weighted values of all rows; values are converted once, some groups at a time.
///
/// # Safety
/// As [`run_split`].
#[inline(always)]
unsafe fn values_converted<L: Lanes, E: Element>(split: &Split<'_>, tile: &mut Tile<'_>) {
    let (d, padded, n_rows) = (split.head_dim, tile.padded, tile.stored_rows());
    for (i, groups) in split.values.chunks(VALUE_GROUPS).enumerate() {
        let converted = tile.converted.as_mut_ptr();
        let mut values = [converted.cast_const().cast::<u8>(); VALUE_GROUPS];
        for (j, &group) in groups.iter().enumerate() {
            let to = converted.wrapping_add(j * GROUP * padded);
            values[j] = to.cast_const().cast();
            for token in 0..GROUP {
                for k in (0..padded).step_by(LANES) {
                    // SAFETY: the last vector of a row may run past it, which the storage allows for.
                    unsafe { E::load::<L>(group.cast::<E>().add(token * d + k)).store(to.add(token * padded + k)) };
                }
            }
        }
        let first = (split.first_group + i * VALUE_GROUPS) * GROUP;
        let tokens = Tokens { values: &values[..groups.len()], stride: padded, first, lo: split.lo, hi: split.hi };
        for row in (0..n_rows).step_by(ROWS) {
            // SAFETY: rows before `row` take `row * SCORE_STRIDE` weights and `row * padded` outputs.
            unsafe {
                let out = Output { o: tile.o.as_mut_ptr().add(row * padded), padded };
                value_rows::<L, f32>(
                    (n_rows - row).min(ROWS),
                    &tokens,
                    tile.scores.as_ptr().add(row * SCORE_STRIDE),
                    out,
                );
            }
        }
    }
}

/// Calls `$f::<L, E, n, vectors>` with the number of rows as a constant, and as many vectors at once as registers allow.
macro_rules! with_rows {
    ($n:expr, $f:ident($($arg:expr),*)) => {
        match $n {
            1 => $f::<L, E, 1, 4>($($arg),*),
            2 => $f::<L, E, 2, 2>($($arg),*),
            3 => $f::<L, E, 3, 2>($($arg),*),
            4 if L::WIDE => $f::<L, E, 4, 2>($($arg),*),
            4 => $f::<L, E, 4, 1>($($arg),*),
            _ if L::WIDE => $f::<L, E, ROWS, 2>($($arg),*),
            _ => $f::<L, E, ROWS, 1>($($arg),*),
        }
    };
}

/// Groups of tokens to be scored. Where `values` are given, keys come from memory rather than a cache: the next keys and
/// these groups' values are then fetched ahead.
#[derive(Clone, Copy)]
struct Groups<'a> {
    keys: &'a [*const u8],
    values: Option<&'a [*const u8]>,
}

impl Groups<'_> {
    /// The `V` groups from `i` on, and what to fetch ahead meanwhile.
    #[inline(always)]
    fn block<E, const V: usize>(self, i: usize) -> ([*const E; V], Option<[[*const u8; 2]; V]>) {
        let (mut keys, mut ahead) = ([std::ptr::null(); V], [[std::ptr::null(); 2]; V]);
        for v in 0..V {
            keys[v] = self.keys[i + v].cast();
            let next = self.keys[(i + V + v).min(self.keys.len() - 1)];
            ahead[v] = [next, self.values.map_or(next, |values| values[i + v])];
        }
        (keys, self.values.map(|_| ahead))
    }
}

/// Scores of `n` rows (1 to 4, or [`ROWS`]) against `groups`, stored from `s` on in rows of [`SCORE_STRIDE`].
///
/// # Safety
/// Each group has `16 * d` elements, `q` is packed `[d][n]`, and `s` has room.
#[inline(always)]
unsafe fn score_rows<L: Lanes, E: Element>(n: usize, groups: Groups<'_>, d: usize, q: *const f32, s: *mut f32) {
    // SAFETY: the caller's promise; `i` counts groups.
    unsafe {
        if L::TILED {
            with_rows!(n, score_groups(groups, d, q, s))
        } else {
            for (i, group) in groups.keys.iter().enumerate() {
                score_plain::<L, E>(n, group.cast(), d, q, s.add(i * GROUP));
            }
        }
    }
}

/// # Safety
/// As [`score_rows`].
#[inline(always)]
unsafe fn score_groups<L: Lanes, E: Element, const R: usize, const V: usize>(
    groups: Groups<'_>,
    d: usize,
    q: *const f32,
    s: *mut f32,
) {
    let mut i = 0;
    // SAFETY: the caller's promise; `i` counts groups.
    unsafe {
        while V > 1 && i + V <= groups.keys.len() {
            score_block::<L, E, R, V>(groups.block(i), d, q, s.add(i * GROUP));
            i += V;
        }
        while i < groups.keys.len() {
            score_block::<L, E, R, 1>(groups.block(i), d, q, s.add(i * GROUP));
            i += 1;
        }
    }
}

/// # Safety
/// As [`score_rows`], for `V` groups.
#[inline(always)]
unsafe fn score_block<L: Lanes, E: Element, const R: usize, const V: usize>(
    (keys, ahead): ([*const E; V], Option<[[*const u8; 2]; V]>),
    d: usize,
    q: *const f32,
    s: *mut f32,
) {
    let mut acc = [[L::splat(0.0); V]; R];
    let q = aliases::<L, V>(q);
    // SAFETY: `i < d` bounds every access as the caller promises; head sizes are multiples of 8.
    unsafe {
        for i in (0..d).step_by(UNROLL) {
            if let Some(ahead) = ahead {
                let (from, to) = (i * GROUP * size_of::<E>(), (i + UNROLL) * GROUP * size_of::<E>());
                for stream in ahead.as_flattened() {
                    (from..to).step_by(64).for_each(|byte| prefetch(stream.wrapping_add(byte)));
                }
            }
            for i in i..i + UNROLL {
                for v in 0..V {
                    let k: L = E::load(keys[v].add(i * GROUP));
                    for r in 0..R {
                        acc[r][v] = L::splat(*q[v].add(i * R + r)).fma(k, acc[r][v]);
                    }
                }
            }
        }
        for r in 0..R {
            for v in 0..V {
                acc[r][v].store(s.add(r * SCORE_STRIDE + v * GROUP));
            }
        }
    }
}

/// As [`score_block`] for one group and `n` rows, without register tiles.
///
/// # Safety
/// As [`score_rows`].
#[inline(always)]
unsafe fn score_plain<L: Lanes, E: Element>(n: usize, keys: *const E, d: usize, q: *const f32, s: *mut f32) {
    for r in 0..n {
        let mut acc = L::splat(0.0);
        // SAFETY: `i < d` and `r < n` bound every access as the caller promises.
        unsafe {
            for i in 0..d {
                acc = L::splat(*q.add(i * n + r)).fma(E::load(keys.add(i * GROUP)), acc);
            }
            acc.store(s.add(r * SCORE_STRIDE));
        }
    }
}

/// Turns scores to weights `2^(s - m)`, masked tokens to exact zeros, and fills `m` and `l`.
///
/// # Safety
/// `tile.scores` has a row of [`SCORE_STRIDE`] for each row.
#[inline(always)]
unsafe fn softmax<L: Lanes>(split: &Split<'_>, tile: &mut Tile<'_>) {
    let groups = split.first_group..split.first_group + split.keys.len();
    for (row, &(lo, hi)) in split.visible.iter().enumerate() {
        let s = tile.scores.as_mut_ptr().wrapping_add(row * SCORE_STRIDE);
        let (mut max, mut sum) = (L::splat(f32::NEG_INFINITY), L::splat(0.0));
        for g in lo / GROUP..hi.div_ceil(GROUP) {
            // SAFETY: the group lies within the row.
            unsafe {
                let at = s.add(g * GROUP);
                let mut v = L::load(at);
                if let Some((cap, cap_log2)) = split.softcap {
                    v = v.div(L::splat(cap)).tanh().mul(L::splat(cap_log2));
                    v.store(at);
                }
                if g * GROUP < lo || (g + 1) * GROUP > hi {
                    v = mask(v, g, lo, hi, f32::NEG_INFINITY);
                }
                max = v.max(max);
            }
        }
        let m = max.max_lane();
        let base = L::splat(m);
        for g in groups.clone() {
            // SAFETY: the group lies within the row.
            unsafe {
                let at = s.add(g * GROUP);
                let mut v = L::load(at).sub(base).exp2();
                if g * GROUP < lo || (g + 1) * GROUP > hi {
                    v = mask(v, g, lo, hi, 0.0);
                }
                v.store(at);
                sum = sum.add(v);
            }
        }
        (tile.m[row], tile.l[row]) = (m, sum.sum());
    }
}

/// Replaces the tokens of group `g` outside `lo..hi`.
#[inline(always)]
fn mask<L: Lanes>(v: L, g: usize, lo: usize, hi: usize, fill: f32) -> L {
    let start = (g * GROUP) as i32;
    v.keep_range(lo as i32 - start, hi as i32 - start, fill)
}

/// Values of consecutive groups, and which of their tokens count.
struct Tokens<'a> {
    values: &'a [*const u8],
    /// Elements from a token to the next.
    stride: usize,
    /// Index in the split of the first group's first token.
    first: usize,
    /// Visible tokens, relative to the split.
    lo: usize,
    hi: usize,
}

/// Where weighted values are added.
#[derive(Clone, Copy)]
struct Output {
    o: *mut f32,
    padded: usize,
}

/// Adds the weighted values of `tokens` to `n` rows (1 to 4, or [`ROWS`]) of `out`; `w` has the weights in rows of [`SCORE_STRIDE`].
///
/// # Safety
/// Values are readable in whole vectors up to `padded`, and `w` and `out` have `n` rows.
#[inline(always)]
unsafe fn value_rows<L: Lanes, E: Element>(n: usize, tokens: &Tokens<'_>, w: *const f32, out: Output) {
    // SAFETY: the caller's promise.
    unsafe {
        if L::TILED { with_rows!(n, value_columns(tokens, w, out)) } else { value_plain::<L, E>(n, tokens, w, out) }
    }
}

/// # Safety
/// As [`value_rows`].
#[inline(always)]
unsafe fn value_columns<L: Lanes, E: Element, const R: usize, const V: usize>(
    tokens: &Tokens<'_>,
    w: *const f32,
    out: Output,
) {
    let mut column = 0;
    // SAFETY: the caller's promise; `column` stays below `padded`.
    unsafe {
        while V > 1 && column + V * LANES <= out.padded {
            value_block::<L, E, R, V>(tokens, column, w, out);
            column += V * LANES;
        }
        while column < out.padded {
            value_block::<L, E, R, 1>(tokens, column, w, out);
            column += LANES;
        }
    }
}

/// # Safety
/// As [`value_rows`], for `V` vectors from `column` on.
#[inline(always)]
unsafe fn value_block<L: Lanes, E: Element, const R: usize, const V: usize>(
    tokens: &Tokens<'_>,
    column: usize,
    w: *const f32,
    out: Output,
) {
    let mut acc = [[L::splat(0.0); V]; R];
    let w = aliases::<L, V>(w);
    // SAFETY: columns, rows and tokens stay within what the caller promises.
    unsafe {
        for r in 0..R {
            for v in 0..V {
                acc[r][v] = L::load(out.o.add(r * out.padded + column + v * LANES));
            }
        }
        for (g, values) in tokens.values.iter().enumerate() {
            let base = tokens.first + g * GROUP;
            let (from, to) = (tokens.lo.max(base), tokens.hi.min(base + GROUP));
            let mut p = values.cast::<E>().add(from.saturating_sub(base) * tokens.stride + column);
            let mut t = from;
            while t + UNROLL <= to {
                for _ in 0..UNROLL {
                    value_token::<L, E, R, V>(&mut acc, p, w.map(|w| w.add(t)));
                    (t, p) = (t + 1, p.add(tokens.stride));
                }
            }
            while t < to {
                value_token::<L, E, R, V>(&mut acc, p, w.map(|w| w.add(t)));
                (t, p) = (t + 1, p.add(tokens.stride));
            }
        }
        for r in 0..R {
            for v in 0..V {
                acc[r][v].store(out.o.add(r * out.padded + column + v * LANES));
            }
        }
    }
}

/// Adds one token's weighted values, at `p`, to `acc`; its weights are at `w` in rows of [`SCORE_STRIDE`].
///
/// # Safety
/// `V` vectors of values and `R` weights are readable.
#[inline(always)]
unsafe fn value_token<L: Lanes, E: Element, const R: usize, const V: usize>(
    acc: &mut [[L; V]; R],
    p: *const E,
    w: [*const f32; V],
) {
    for v in 0..V {
        // SAFETY: the caller's promise.
        unsafe {
            let x: L = E::load(p.add(v * LANES));
            for r in 0..R {
                acc[r][v] = L::splat(*w[v].add(r * SCORE_STRIDE)).fma(x, acc[r][v]);
            }
        }
    }
}

/// Asks for a cache line; any address is allowed.
#[inline(always)]
fn prefetch(p: *const u8) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a prefetch never faults, and SSE is part of x86-64.
    unsafe {
        std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T0 }>(p.cast());
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = p;
}

/// The same pointer `V` times; with 16 registers, in a way that the compiler can't see. Factors are then broadcast anew
/// for each vector, which costs a load; kept between vectors they would push accumulators out to the stack.
#[inline(always)]
fn aliases<L: Lanes, const V: usize>(p: *const f32) -> [*const f32; V] {
    let mut out = [p; V];
    if !L::WIDE {
        for alias in &mut out[1..] {
            *alias = std::hint::black_box(p);
        }
    }
    out
}

/// As [`value_columns`], without register tiles.
///
/// # Safety
/// As [`value_rows`].
#[inline(always)]
unsafe fn value_plain<L: Lanes, E: Element>(n: usize, tokens: &Tokens<'_>, w: *const f32, out: Output) {
    for t in tokens.lo.max(tokens.first)..tokens.hi.min(tokens.first + tokens.values.len() * GROUP) {
        let (group, token) = ((t - tokens.first) / GROUP, (t - tokens.first) % GROUP);
        for r in 0..n {
            for column in (0..out.padded).step_by(LANES) {
                // SAFETY: columns, rows and tokens stay within what the caller promises.
                unsafe {
                    let x: L = E::load(tokens.values[group].cast::<E>().add(token * tokens.stride + column));
                    let o = out.o.add(r * out.padded + column);
                    L::splat(*w.add(r * SCORE_STRIDE + t)).fma(x, L::load(o)).store(o);
                }
            }
        }
    }
}
