//! Host planning of paged attention on a GPU: cuts a step's attention into work items of equal cost.
//!
//! A kernel runs a fixed grid; CTA `c` begins with item `c` and follows [`Item::next`]. The items are read from device
//! memory, so a recorded graph stays valid for any number of rows and any context. Everything here is a pure function of
//! the rows, hence so is the order in which partial results are summed.

/// Tokens in a tile, the unit in which decode items count the context. Block lengths are multiples of it.
pub const TILE: u32 = 16;
/// Tokens in a tile of the prefill kernels.
pub const PREFILL_TILE: u32 = 128;

/// One sequence's part of a step, as in `RowSpan`, with the row of its block table.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs)]
pub struct Row {
    pub q_start: u32,
    pub n_tokens: u32,
    pub first_position: u32,
    pub slot: u32,
}

/// Work of one CTA: for every pair in `first_pair..end_pair` the tiles `first_tile..end_tile` of one row.
///
/// Decode: pair = `kv_head * query_tiles + query_tile`, where a query tile is up to 8 or 16 of the row's
/// `n_tokens * group` queries (token-major). Prefill: the same, but `q_start`, `n_tokens` and `first_position` are those of
/// a few of the row's tokens; one query tile holds them unless the group is larger than it. The layout is the kernels' (`struct Item` in `attention.cuh`).
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Item {
    /// Row of the step's first query token.
    pub q_start: u32,
    /// Query tokens.
    pub n_tokens: u32,
    /// Position of the first query token.
    pub first_position: u32,
    /// Row of the block table.
    pub slot: u32,
    /// First pair.
    pub first_pair: u32,
    /// End of the pairs; equal to `first_pair` in a CTA without work.
    pub end_pair: u32,
    /// First tile of the context.
    pub first_tile: u32,
    /// End of the tiles.
    pub end_tile: u32,
    /// Where the pair is cut: index of the pair's first partial result, also that of its counter.
    pub partial: u32,
    /// Which of the pair's pieces this is.
    pub piece: u32,
    /// Pieces the pair is cut into; 1: the result is written as it is.
    pub n_pieces: u32,
    /// Index of the CTA's next item; 0: none.
    pub next: u32,
}

/// What the heads look like, for one group of layers.
#[derive(Debug, Clone, Copy)]
pub struct Heads {
    /// Key/value heads of the rank.
    pub kv_heads: u32,
    /// Query heads of one KV head.
    pub group: u32,
    /// Tokens a token sees, itself included; 0: all.
    pub window: u32,
}

/// How decode work is cut.
#[derive(Debug, Clone, Copy)]
pub struct Split {
    /// CTAs of the grid.
    pub ctas: u32,
    /// Queries in a query tile: 8 or 16, as the kernel's.
    pub queries: u32,
    /// Shortest piece, in tiles, that is worth a CTA of its own.
    pub min_tiles: u32,
    /// Fixed cost of an item, in tiles.
    pub item_cost: u32,
    /// Cut at multiples of this many tiles and nowhere else, so that a row's result doesn't depend on other rows.
    pub fixed_tiles: Option<u32>,
}

/// Tiles of `tile` tokens that the queries at `first_position..first_position + n_tokens` see.
fn visible_tiles(first_position: u32, n_tokens: u32, window: u32, tile: u32) -> (u32, u32) {
    let first = if window == 0 { 0 } else { (first_position + 1).saturating_sub(window) / tile };
    (first, (first_position + n_tokens).div_ceil(tile))
}

/// Items appended to the CTAs' lists.
struct Lists<'a> {
    items: &'a mut Vec<Item>,
    /// Last item of each CTA's list so far.
    last: Vec<u32>,
}

impl<'a> Lists<'a> {
    fn new(items: &'a mut Vec<Item>, ctas: u32) -> Self {
        items.clear();
        items.resize(ctas as usize, Item::default());
        Self { items, last: (0..ctas).collect() }
    }

    /// Gives `item` to `cta`.
    fn push(&mut self, cta: u32, item: Item) {
        let last = self.last[cta as usize];
        let tail = &mut self.items[last as usize];
        if tail.first_pair == tail.end_pair {
            *tail = item;
            return;
        }
        let idx = self.items.len() as u32;
        self.items[last as usize].next = idx;
        self.items.push(item);
        self.last[cta as usize] = idx;
    }

    /// The same, as one with the CTA's last item where that is the pair before, whole as this one.
    fn join(&mut self, cta: u32, item: Item) {
        let tail = &mut self.items[self.last[cta as usize] as usize];
        let continues = Item { first_pair: tail.first_pair, end_pair: item.first_pair, ..item } == *tail;
        if continues && item.n_pieces == 1 && tail.first_pair < tail.end_pair {
            tail.end_pair = item.end_pair;
        } else {
            self.push(cta, item);
        }
    }
}

/// Plans decode; returns the number of partial results (and counters) used.
///
/// The pairs of all rows are laid end to end, and every CTA takes an equal stretch of what is left; a pair that a boundary
/// falls into is cut there, or, with `fixed_tiles`, goes whole to one side. (Taking the last pieces from a pool that the
/// CTAs share makes them end together but no sooner: the memory is what they wait for.)
pub fn plan_decode(rows: &[Row], heads: &Heads, split: &Split, items: &mut Vec<Item>) -> u32 {
    let spans: Vec<_> = rows
        .iter()
        .map(|r| {
            let pairs = heads.kv_heads * (r.n_tokens * heads.group).div_ceil(split.queries);
            let (first, end) = visible_tiles(r.first_position, r.n_tokens, heads.window, TILE);
            (pairs, first, end)
        })
        .collect();
    let cost = |&(pairs, first, end): &(u32, u32, u32)| {
        let pieces = split.fixed_tiles.map_or(1, |len| end.div_ceil(len) - first / len);
        u64::from(pairs) * u64::from(end - first + split.item_cost * pieces)
    };
    let mut filler = Filler::new(split, spans.iter().map(cost).sum());
    let mut lists = Lists::new(items, split.ctas);
    let mut n_partials = 0;
    let mut pieces = Vec::new();
    for (row, &(pairs, first, end)) in rows.iter().zip(&spans) {
        // A pair is worth at most 8 pieces, unless those would be long.
        let min_tiles = (end - first).div_ceil(8).min(32).max(split.min_tiles);
        for pair in 0..pairs {
            pieces.clear();
            let mut at = first;
            while at < end {
                let next = filler.place(at, end, min_tiles);
                pieces.push((filler.cta, at, next));
                at = next;
            }
            for (piece, &(cta, first_tile, end_tile)) in pieces.iter().enumerate() {
                let item = Item {
                    q_start: row.q_start,
                    n_tokens: row.n_tokens,
                    first_position: row.first_position,
                    slot: row.slot,
                    first_pair: pair,
                    end_pair: pair + 1,
                    first_tile,
                    end_tile,
                    partial: if pieces.len() > 1 { n_partials } else { 0 },
                    piece: piece as u32,
                    n_pieces: pieces.len() as u32,
                    next: 0,
                };
                lists.join(cta, item);
            }
            if pieces.len() > 1 {
                n_partials += pieces.len() as u32;
            }
        }
    }
    n_partials
}

/// Fills one CTA after the other.
struct Filler<'a> {
    split: &'a Split,
    /// Cost of what isn't placed yet.
    left: u64,
    cta: u32,
    /// Cost that a CTA takes.
    share: i64,
    /// Cost that this one may still take.
    room: i64,
}

impl<'a> Filler<'a> {
    fn new(split: &'a Split, cost: u64) -> Self {
        let mut filler = Self { split, left: cost, cta: 0, share: 0, room: 0 };
        filler.open(0);
        filler
    }

    /// Goes on with `cta`. Its share is an equal one of what is left, but none is smaller than those before it: a CTA that
    /// stays idle costs less than pairs that are cut to feed it.
    fn open(&mut self, cta: u32) {
        let equal = self.left.div_ceil(u64::from(self.split.ctas - cta)) as i64;
        self.share = self.share.max(equal).max(i64::from(self.split.min_tiles + self.split.item_cost));
        (self.cta, self.room) = (cta, self.share);
    }

    /// Gives the tiles from `at` to `self.cta`; returns where the piece ends, at most at `end`.
    fn place(&mut self, at: u32, end: u32, min_tiles: u32) -> u32 {
        let cost = i64::from(self.split.item_cost);
        let min = i64::from(min_tiles.max(1));
        let tiles = i64::from(end - at);
        let whole = self.split.fixed_tiles.map(|len| (at / len + 1).saturating_mul(len).min(end));
        let least = whole.map_or(min.min(tiles) + cost, |next| (i64::from(next - at) + cost) / 2);
        if self.room < least && self.cta + 1 < self.split.ctas {
            self.open(self.cta + 1);
        }
        let last = self.cta + 1 == self.split.ctas;
        let next = match whole {
            Some(next) => next,
            // A rest of less than half a shortest piece isn't worth a merge.
            None if last || tiles + cost <= self.room + min / 2 => end,
            None => at + (self.room - cost).max(1) as u32,
        };
        let placed = i64::from(next - at) + cost;
        self.room -= placed;
        // A cut adds a piece.
        let cut = if whole.is_none() && next < end { cost } else { 0 };
        self.left = self.left.saturating_add_signed(cut - placed);
        next
    }
}

/// Plans prefill: one item per KV head and tile of `tile_rows / group` query tokens, each given to the CTA with the least
/// work so far, longest first. Where one KV head keeps all CTAs busy, heads go one after the other, so that what the CTAs
/// read at one time stays in the L2 cache.
pub fn plan_prefill(rows: &[Row], heads: &Heads, ctas: u32, tile_rows: u32, items: &mut Vec<Item>) {
    let tokens = (tile_rows / heads.group).max(1);
    let mut tiles = Vec::new();
    for row in rows {
        for at in (0..row.n_tokens).step_by(tokens as usize) {
            let (n_tokens, first_position) = (tokens.min(row.n_tokens - at), row.first_position + at);
            let (first_tile, end_tile) = visible_tiles(first_position, n_tokens, heads.window, PREFILL_TILE);
            let q_start = row.q_start + at;
            let slot = row.slot;
            tiles.push(Item {
                q_start,
                n_tokens,
                first_position,
                slot,
                first_tile,
                end_tile,
                n_pieces: 1,
                ..Item::default()
            });
        }
    }
    tiles.sort_by_key(|t| std::cmp::Reverse(t.end_tile - t.first_tile));
    let heads_at_once = if tiles.len() >= 3 * ctas as usize { 1 } else { heads.kv_heads.max(1) };
    let mut lists = Lists::new(items, ctas);
    let mut loads: std::collections::BinaryHeap<_> = (0..ctas).map(|cta| std::cmp::Reverse((0u32, cta))).collect();
    for first_head in (0..heads.kv_heads).step_by(heads_at_once as usize) {
        for tile in &tiles {
            for head in first_head..(first_head + heads_at_once).min(heads.kv_heads) {
                let Some(std::cmp::Reverse((load, cta))) = loads.pop() else { return };
                let pairs = (tile.n_tokens * heads.group).div_ceil(tile_rows);
                lists.push(cta, Item { first_pair: head * pairs, end_pair: (head + 1) * pairs, ..*tile });
                // Loading the queries and writing the result cost about as much as one tile.
                loads.push(std::cmp::Reverse((load + tile.end_tile - tile.first_tile + 1, cta)));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A small deterministic generator; quality doesn't matter.
    struct Random(u64);
    impl Random {
        fn below(&mut self, n: u32) -> u32 {
            self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            ((self.0 >> 33) % u64::from(n)) as u32
        }
    }

    fn random_rows(r: &mut Random, max_tokens: u32) -> Vec<Row> {
        let mut q_start = 0;
        let n = r.below(40);
        (0..n)
            .map(|i| {
                let n_tokens = 1 + r.below(max_tokens);
                let most = 1 << r.below(13);
                let row = Row { q_start, n_tokens, first_position: r.below(most), slot: n - 1 - i };
                q_start += n_tokens;
                row
            })
            .collect()
    }

    /// The items of every CTA, checked to be reached once each.
    fn lists(items: &[Item], ctas: u32) -> Vec<Vec<Item>> {
        let mut reached = vec![false; items.len()];
        let lists = (0..ctas)
            .map(|cta| {
                let mut list = Vec::new();
                let mut idx = cta as usize;
                loop {
                    assert!(!std::mem::replace(&mut reached[idx], true));
                    list.push(items[idx]);
                    match items[idx].next {
                        0 => return list,
                        next => idx = next as usize,
                    }
                }
            })
            .collect();
        assert!(reached.iter().all(|&r| r));
        lists
    }

    /// Every tile of every pair is computed once, and the pieces of a pair are numbered in order of the context.
    fn check_decode(rows: &[Row], heads: &Heads, split: &Split) -> Vec<u64> {
        let mut items = Vec::new();
        let n_partials = plan_decode(rows, heads, split, &mut items);
        let lists = lists(&items, split.ctas);
        let mut pieces = std::collections::BTreeMap::new();
        for item in lists.iter().flatten() {
            assert!(item.end_pair - item.first_pair <= 1 || item.n_pieces == 1);
            for pair in item.first_pair..item.end_pair {
                assert!(pieces.insert((item.slot, pair, item.first_tile), *item).is_none());
            }
        }
        let mut used = vec![false; n_partials as usize];
        for row in rows {
            let (first, end) = visible_tiles(row.first_position, row.n_tokens, heads.window, TILE);
            for pair in 0..heads.kv_heads * (row.n_tokens * heads.group).div_ceil(split.queries) {
                let (mut at, mut piece) = (first, 0);
                while at < end {
                    let item = pieces.remove(&(row.slot, pair, at)).expect("a piece begins where the last ended");
                    assert_eq!((item.q_start, item.n_tokens, item.piece), (row.q_start, row.n_tokens, piece));
                    if item.n_pieces > 1 {
                        assert!(!std::mem::replace(&mut used[(item.partial + item.piece) as usize], true));
                    }
                    if let Some(len) = split.fixed_tiles {
                        assert!(item.end_tile == end || item.end_tile % len == 0);
                    }
                    (at, piece) = (item.end_tile, piece + 1);
                    assert!(at < end || piece == item.n_pieces);
                }
            }
        }
        assert!(pieces.is_empty() && used.iter().all(|&u| u));
        let cost =
            |i: &Item| u64::from(i.end_pair - i.first_pair) * u64::from(i.end_tile - i.first_tile + split.item_cost);
        // A boundary leaves two pieces.
        assert!(split.fixed_tiles.is_some() || n_partials <= 2 * split.ctas);
        lists.iter().map(|list| list.iter().map(cost).sum()).collect()
    }

    #[test]
    fn decode_covers_everything_once_and_in_balance() {
        let mut r = Random(1);
        for _ in 0..300 {
            let rows = random_rows(&mut r, 5);
            let window = if r.below(3) == 0 { 1 + r.below(300) } else { 0 };
            let heads = Heads { kv_heads: 1 + r.below(8), group: 1 + r.below(9), window };
            let (ctas, queries) = (1 + r.below(264), 8 << r.below(2));
            let fixed_tiles = if r.below(3) == 0 { Some(1 + r.below(32)) } else { None };
            let (min_tiles, item_cost) = (1 + r.below(8), r.below(8));
            let split = Split { ctas, queries, min_tiles, item_cost, fixed_tiles };
            let loads = check_decode(&rows, &heads, &split);
            let (mean, max) = (loads.iter().sum::<u64>() / u64::from(ctas), loads.iter().max().copied().unwrap_or(0));
            let slack = u64::from(2 * (split.min_tiles + split.item_cost));
            if fixed_tiles.is_none() && mean > 20 * slack {
                assert!(max <= mean + mean / 10 + slack, "{max} against {mean}");
            }
        }
    }

    #[test]
    fn equal_rows_are_cut_evenly() {
        let rows: Vec<_> = (0..64).map(|i| Row { q_start: i, n_tokens: 1, first_position: 4095, slot: i }).collect();
        let heads = Heads { kv_heads: 8, group: 4, window: 0 };
        let split = Split { ctas: 264, queries: 8, min_tiles: 4, item_cost: 2, fixed_tiles: None };
        let loads = check_decode(&rows, &heads, &split);
        assert!(loads.iter().all(|&l| l <= 520), "{loads:?}");
    }

    #[test]
    fn fixed_cuts_do_not_depend_on_other_rows() {
        let heads = Heads { kv_heads: 2, group: 4, window: 0 };
        let split = Split { ctas: 33, queries: 8, min_tiles: 4, item_cost: 2, fixed_tiles: Some(16) };
        let row = Row { q_start: 0, n_tokens: 1, first_position: 1000, slot: 7 };
        let cuts = |rows: &[Row]| {
            let mut items = Vec::new();
            plan_decode(rows, &heads, &split, &mut items);
            let mut cuts: Vec<_> = items
                .iter()
                .filter(|i| i.slot == 7 && i.end_pair > 0)
                .map(|i| (i.first_pair, i.first_tile, i.end_tile))
                .collect();
            cuts.sort_unstable();
            cuts
        };
        let other = Row { q_start: 1, n_tokens: 3, first_position: 5000, slot: 1 };
        assert_eq!(cuts(&[row]), cuts(&[row, other]));
    }

    #[test]
    fn prefill_covers_every_token_once() {
        let mut r = Random(2);
        for _ in 0..100 {
            let rows = random_rows(&mut r, 700);
            let heads = Heads { kv_heads: 1 + r.below(8), group: 1 + r.below(9), window: 0 };
            let (ctas, tile_rows) = (1 + r.below(132), 64 << r.below(2));
            let mut items = Vec::new();
            plan_prefill(&rows, &heads, ctas, tile_rows, &mut items);
            let mut tokens: Vec<_> = lists(&items, ctas)
                .into_iter()
                .flatten()
                .flat_map(|i| {
                    (i.first_pair..i.end_pair)
                        .flat_map(move |p| (0..i.n_tokens).map(move |t| (i.q_start + t, p, i.first_position + t)))
                })
                .collect();
            tokens.sort_unstable();
            let expected: Vec<_> = rows
                .iter()
                .flat_map(|row| (0..row.n_tokens).map(|t| (row.q_start + t, row.first_position + t)))
                .flat_map(|(q, position)| (0..heads.kv_heads).map(move |head| (q, head, position)))
                .collect();
            assert_eq!(tokens, expected);
        }
    }
}
