//! The paged KV cache's policy: pools of blocks, block tables, prefix reuse. The bytes belong to the backend.

pub mod block_pool;
pub mod block_table;
pub mod groups;
pub mod prefix;

use block_pool::BlockId;
use block_table::{BlockTable, SharedPool};
use groups::KvGroup;
use prefix::BlockHash;

use crate::PrefixChange;

/// One group's policy data.
#[derive(Debug)]
struct Group {
    pool: SharedPool,
    shape: KvGroup,
}

/// Blocks of all groups.
#[derive(Debug)]
pub struct CacheManager {
    groups: Vec<Group>,
    block_len: usize,
}

/// A prefix found in the cache.
#[derive(Debug, PartialEq, Eq)]
pub struct PrefixHit {
    /// Tokens covered, a multiple of the block length.
    pub n_tokens: usize,
    /// Blocks per group.
    pub blocks: Vec<Vec<BlockId>>,
}

impl CacheManager {
    /// The group whose blocks carry the prefix tags: with several, what one holds says enough.
    const TAGGED: usize = 0;

    /// Pools of `n_blocks[group]` blocks.
    pub fn new(groups: &[KvGroup], n_blocks: &[usize]) -> Self {
        assert_eq!(groups.len(), n_blocks.len());
        let block_len = groups[0].layout.block_len;
        let pool = |(g, &n): (&KvGroup, &usize)| Group { pool: SharedPool::new(n), shape: g.clone() };
        Self { groups: groups.iter().zip(n_blocks).map(pool).collect(), block_len }
    }

    /// Tokens in a block.
    pub fn block_len(&self) -> usize {
        self.block_len
    }

    /// Empty tables, one per group.
    pub fn new_tables(&self) -> Vec<BlockTable> {
        self.groups.iter().map(|g| BlockTable::new(&g.pool)).collect()
    }

    /// Number of KV groups.
    pub fn n_groups(&self) -> usize {
        self.groups.len()
    }

    /// Blocks that a sequence of `n_tokens`, computed in steps of at most `max_step`, still lacks in a group where it holds
    /// `n_held`.
    pub fn blocks_missing(&self, group: usize, n_tokens: usize, max_step: usize, n_held: usize) -> usize {
        self.groups[group].shape.blocks_for(n_tokens, max_step).saturating_sub(n_held)
    }

    /// Whether a sequence of `n_tokens` that takes over `hit` fits beside `reserved` blocks per group.
    pub fn fits(&self, n_tokens: usize, max_step: usize, hit: &PrefixHit, reserved: &[usize]) -> bool {
        (0..self.groups.len()).all(|g| {
            let pool = self.groups[g].pool.lock();
            let held = hit.blocks[g].iter().filter(|&&b| b != BlockTable::NO_BLOCK);
            // Blocks of the prefix that nobody holds count as free until they are taken.
            let n_revived = held.clone().filter(|&&b| pool.refs(b) == 0).count();
            let missing = self.blocks_missing(g, n_tokens, max_step, held.count());
            missing + n_revived + reserved[g] <= pool.n_free()
        })
    }

    /// Blocks held by sequences, and blocks in all, over all groups.
    pub fn usage(&self) -> (usize, usize) {
        self.groups.iter().fold((0, 0), |(used, all), g| {
            let pool = g.pool.lock();
            (used + pool.n_blocks() - pool.n_free(), all + pool.n_blocks())
        })
    }

    /// Longest cached prefix of a sequence whose full blocks hash to `hashes`. A group with a window needs only the blocks
    /// that the next token sees.
    pub fn find_prefix(&self, hashes: &[BlockHash]) -> PrefixHit {
        let mut n = hashes.len();
        'shorter: while n > 0 {
            let mut blocks = Vec::with_capacity(self.groups.len());
            for group in &self.groups {
                let pool = group.pool.lock();
                let first = group.first_visible_block(n * self.block_len, self.block_len);
                let mut found = vec![BlockTable::NO_BLOCK; first];
                for (i, &hash) in hashes[first..n].iter().enumerate() {
                    let Some(block) = pool.find(hash) else {
                        // With no window nothing longer than this can hit; with one, retry just below the gap.
                        n = if group.shape.window.is_none() { first + i } else { n - 1 };
                        continue 'shorter;
                    };
                    found.push(block);
                }
                blocks.push(found);
            }
            return PrefixHit { n_tokens: n * self.block_len, blocks };
        }
        PrefixHit { n_tokens: 0, blocks: vec![Vec::new(); self.groups.len()] }
    }

    /// Names block `index` of a sequence in every group where it is still held.
    pub fn store(&self, tables: &[BlockTable], index: usize, hash: BlockHash, tags: &[u64]) {
        for (g, (group, table)) in self.groups.iter().zip(tables).enumerate() {
            let block = table.blocks()[index];
            if block != BlockTable::NO_BLOCK {
                group.pool.lock().store(block, hash, if g == Self::TAGGED { tags } else { &[] });
            }
        }
    }

    /// Releases what the windows have passed when `next_position` is the next to be computed.
    pub fn release_passed(&self, tables: &mut [BlockTable], next_position: usize) {
        for (group, table) in self.groups.iter().zip(tables) {
            if group.shape.window.is_some() {
                table.release_before(group.first_visible_block(next_position, self.block_len));
            }
        }
    }

    /// Forgets all prefixes that no sequence holds.
    pub fn forget_free(&self) {
        self.groups.iter().for_each(|g| g.pool.lock().forget_free());
    }

    /// See [`block_pool::BlockPool::take_prefix_changes`].
    pub fn take_prefix_changes(&self) -> Vec<PrefixChange> {
        self.groups[Self::TAGGED].pool.lock().take_prefix_changes()
    }

    /// Checks every pool against the tables of all live sequences.
    pub fn check_integrity<'a>(&self, live: impl Iterator<Item = &'a [BlockTable]>) -> Result<(), String> {
        let mut held: Vec<Vec<u32>> = self.groups.iter().map(|g| vec![0; g.pool.lock().n_blocks()]).collect();
        for tables in live {
            for (held, table) in held.iter_mut().zip(tables) {
                table.blocks().iter().filter(|&&b| b != BlockTable::NO_BLOCK).for_each(|&b| held[b as usize] += 1);
            }
        }
        for (i, (group, held)) in self.groups.iter().zip(&held).enumerate() {
            group.pool.lock().check_integrity(held).map_err(|e| format!("KV group {i}: {e}"))?;
        }
        Ok(())
    }
}

impl Group {
    /// First block that a query at `position` sees.
    fn first_visible_block(&self, position: usize, block_len: usize) -> usize {
        self.shape.window.map_or(0, |window| (position + 1).saturating_sub(window) / block_len)
    }
}

#[cfg(test)]
mod tests {
    use kwire_kernels::{KvDtype, KvLayout};

    use super::*;

    fn manager(windows: &[Option<usize>]) -> CacheManager {
        let layout = KvLayout { n_layers: 1, kv_heads: 1, head_dim: 16, block_len: 4, dtype: KvDtype::F32 };
        let groups: Vec<_> = windows.iter().map(|&window| KvGroup { layout, window, layers: vec![0] }).collect();
        CacheManager::new(&groups, &vec![8; windows.len()])
    }

    fn chain(n: u32) -> Vec<BlockHash> {
        (0..n)
            .scan(BlockHash::root(None), |h, i| {
                *h = h.next(&[i]);
                Some(*h)
            })
            .collect()
    }

    #[test]
    fn a_windowed_group_hits_with_its_last_blocks_only() {
        let cache = manager(&[None, Some(5)]);
        let hashes = chain(4);
        let mut tables = cache.new_tables();
        tables.iter_mut().for_each(|t| t.grow(4).unwrap());
        (0..4).for_each(|i| cache.store(&tables, i, hashes[i], &[]));
        assert_eq!(cache.find_prefix(&hashes).n_tokens, 16);
        // The windowed group lets go of its first two blocks, and another sequence overwrites them.
        tables[1].release_before(2);
        let mut other = cache.new_tables();
        other[1].grow(6).unwrap();
        let hit = cache.find_prefix(&hashes);
        assert_eq!(hit.n_tokens, 16);
        assert_eq!(hit.blocks[1][..3], [BlockTable::NO_BLOCK; 3]);
        // A prefix of 12 tokens would need position 8's block in the window, which is still there; one of 8 would not.
        assert_eq!(cache.find_prefix(&hashes[..3]).n_tokens, 12);
        assert_eq!(cache.find_prefix(&hashes[..2]).n_tokens, 0);
        cache.check_integrity([&tables[..], &other[..]].into_iter()).unwrap();
    }
}
