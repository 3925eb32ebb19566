//! Who owns which cache block: reference counts, free blocks in least-recently-used order, and the prefix index.
//!
//! Policy only: the bytes live in the backend. Invariants: a block is free exactly if its count is 0; a free block may keep
//! its hash, so that a later prompt can take it back; a hash names at most one block; the prefix changes taken so far, applied
//! in order, give the tags of all named blocks.

use std::collections::HashMap;
use std::collections::hash_map::Entry;

use super::prefix::BlockHash;
use crate::PrefixChange;

/// Index of a block in its group's storage.
pub type BlockId = u32;

/// No block is free.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OutOfBlocks;

#[derive(Debug, Clone, Default)]
struct Block {
    refs: u32,
    hash: Option<BlockHash>,
    /// Gateway's ids of prefixes that end in this block; empty without a hash.
    tags: Vec<u64>,
}

/// The blocks of one KV group.
#[derive(Debug)]
pub struct BlockPool {
    blocks: Vec<Block>,
    free: FreeList,
    by_hash: HashMap<BlockHash, BlockId>,
    /// Blocks that carry each tag: texts that differ may have equal ids in several blocks.
    tags: HashMap<u64, u32>,
    prefix_changes: Vec<PrefixChange>,
}

impl BlockPool {
    /// A pool of `n_blocks` free blocks.
    pub fn new(n_blocks: usize) -> Self {
        let n = u32::try_from(n_blocks).expect("block ids fit 32 bits");
        let mut free = FreeList::new(n_blocks);
        (0..n).for_each(|b| free.push_back(b));
        Self {
            blocks: vec![Block::default(); n_blocks],
            free,
            by_hash: HashMap::new(),
            tags: HashMap::new(),
            prefix_changes: Vec::new(),
        }
    }

    /// Blocks in all.
    pub fn n_blocks(&self) -> usize {
        self.blocks.len()
    }

    /// Blocks that nobody holds, cached prefixes included.
    pub fn n_free(&self) -> usize {
        self.free.len
    }

    /// Takes the least recently used free block; its old content is forgotten.
    pub fn allocate(&mut self) -> Result<BlockId, OutOfBlocks> {
        let id = self.free.pop_front().ok_or(OutOfBlocks)?;
        self.forget(id);
        let block = &mut self.blocks[id as usize];
        assert_eq!(block.refs, 0, "a free block has no holder");
        block.refs = 1;
        Ok(id)
    }

    /// One more holder of a block, free (a cached prefix) or held.
    pub fn acquire(&mut self, id: BlockId) {
        let block = &mut self.blocks[id as usize];
        if block.refs == 0 {
            self.free.remove(id);
        }
        block.refs += 1;
    }

    /// One holder less. The last one makes the block free: last in line for reuse if it holds a prefix, else first, since
    /// nothing is lost by it and its memory is already touched.
    pub fn release(&mut self, id: BlockId) {
        let block = &mut self.blocks[id as usize];
        assert!(block.refs > 0, "block {id} released more often than acquired");
        block.refs -= 1;
        if block.refs == 0 {
            if block.hash.is_some() { self.free.push_back(id) } else { self.free.push_front(id) }
        }
    }

    /// Number of holders.
    pub fn refs(&self, id: BlockId) -> u32 {
        self.blocks[id as usize].refs
    }

    /// The block that holds the end of this prefix.
    pub fn find(&self, hash: BlockHash) -> Option<BlockId> {
        self.by_hash.get(&hash).copied()
    }

    /// Names a full, computed block by its prefix. The first block with a hash keeps it.
    pub fn store(&mut self, id: BlockId, hash: BlockHash, tags: &[u64]) {
        if self.by_hash.contains_key(&hash) || self.blocks[id as usize].hash.is_some() {
            return;
        }
        self.by_hash.insert(hash, id);
        let block = &mut self.blocks[id as usize];
        block.hash = Some(hash);
        block.tags.extend_from_slice(tags);
        for &tag in tags {
            let n_blocks = self.tags.entry(tag).or_default();
            *n_blocks += 1;
            if *n_blocks == 1 {
                self.prefix_changes.push(PrefixChange::Stored(tag));
            }
        }
    }

    /// Forgets all prefixes that nobody holds.
    pub fn forget_free(&mut self) {
        for id in 0..self.blocks.len() {
            if self.blocks[id].refs == 0 {
                self.forget(u32::try_from(id).expect("block ids fit 32 bits"));
            }
        }
    }

    /// How the set of tags changed since the last call, in order.
    pub fn take_prefix_changes(&mut self) -> Vec<PrefixChange> {
        std::mem::take(&mut self.prefix_changes)
    }

    /// Checks the invariants against `held`, the number of table entries that name each block.
    pub fn check_integrity(&self, held: &[u32]) -> Result<(), String> {
        for (id, block) in self.blocks.iter().enumerate() {
            if block.refs != held[id] {
                return Err(format!("block {id} has {} holders but a count of {}", held[id], block.refs));
            }
            if (block.refs == 0) != self.free.contains(id) {
                return Err(format!("block {id} with a count of {} is on the wrong side of the free list", block.refs));
            }
            if block.hash.is_some_and(|h| self.by_hash.get(&h).map(|&b| b as usize) != Some(id)) {
                return Err(format!("block {id} is not the one its hash names"));
            }
        }
        let hashed = self.blocks.iter().filter(|b| b.hash.is_some()).count();
        if hashed != self.by_hash.len() {
            return Err(format!("{} hashes for {hashed} hashed blocks", self.by_hash.len()));
        }
        Ok(())
    }

    fn forget(&mut self, id: BlockId) {
        let block = &mut self.blocks[id as usize];
        if let Some(hash) = block.hash.take() {
            self.by_hash.remove(&hash);
            for tag in block.tags.drain(..) {
                let Entry::Occupied(mut n_blocks) = self.tags.entry(tag) else {
                    unreachable!("a stored tag is counted")
                };
                *n_blocks.get_mut() -= 1;
                if *n_blocks.get() == 0 {
                    n_blocks.remove();
                    self.prefix_changes.push(PrefixChange::Evicted(tag));
                }
            }
        }
    }
}

/// A queue over block ids with removal from the middle, in constant time and fixed memory.
#[derive(Debug)]
struct FreeList {
    /// `(previous, next)` of each id; the last entry is the sentinel before the first and after the last.
    links: Vec<(u32, u32)>,
    len: usize,
}

impl FreeList {
    const ABSENT: (u32, u32) = (u32::MAX, u32::MAX);

    fn new(n: usize) -> Self {
        let sentinel = u32::try_from(n).expect("block ids fit 32 bits");
        let mut links = vec![Self::ABSENT; n + 1];
        links[n] = (sentinel, sentinel);
        Self { links, len: 0 }
    }

    fn sentinel(&self) -> u32 {
        u32::try_from(self.links.len() - 1).expect("block ids fit 32 bits")
    }

    fn contains(&self, id: usize) -> bool {
        self.links[id] != Self::ABSENT
    }

    fn push_back(&mut self, id: u32) {
        let end = self.sentinel();
        self.insert_between(id, self.links[end as usize].0, end);
    }

    fn push_front(&mut self, id: u32) {
        let end = self.sentinel();
        self.insert_between(id, end, self.links[end as usize].1);
    }

    fn insert_between(&mut self, id: u32, previous: u32, next: u32) {
        debug_assert!(!self.contains(id as usize));
        self.links[id as usize] = (previous, next);
        self.links[previous as usize].1 = id;
        self.links[next as usize].0 = id;
        self.len += 1;
    }

    fn pop_front(&mut self) -> Option<u32> {
        let end = self.sentinel();
        let first = self.links[end as usize].1;
        (first != end).then(|| {
            self.remove(first);
            first
        })
    }

    fn remove(&mut self, id: u32) {
        debug_assert!(self.contains(id as usize));
        let (previous, next) = std::mem::replace(&mut self.links[id as usize], Self::ABSENT);
        self.links[previous as usize].1 = next;
        self.links[next as usize].0 = previous;
        self.len -= 1;
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    fn hash(i: u32) -> BlockHash {
        BlockHash::root(None).next(&[i])
    }

    #[test]
    fn reuse_is_least_recently_used_first_and_evicts_the_prefix() {
        let mut pool = BlockPool::new(3);
        let ids: Vec<_> = (0..3).map(|_| pool.allocate().unwrap()).collect();
        assert_eq!(pool.allocate(), Err(OutOfBlocks));
        for (i, &id) in ids.iter().enumerate() {
            let i = u32::try_from(i).unwrap();
            pool.store(id, hash(i), &[u64::from(i)]);
        }
        for &i in &[1usize, 0, 2] {
            pool.release(ids[i]);
        }
        assert_eq!(pool.find(hash(0)), Some(ids[0]));
        pool.acquire(ids[1]);
        assert_eq!(pool.allocate(), Ok(ids[0]), "block 0 was freed before block 2");
        assert_eq!(pool.find(hash(0)), None);
        let stored = (0..3).map(PrefixChange::Stored);
        assert_eq!(pool.take_prefix_changes(), stored.chain([PrefixChange::Evicted(0)]).collect::<Vec<_>>());
        pool.release(ids[0]);
        assert_eq!(pool.allocate(), Ok(ids[0]), "a block without a prefix goes first");
        pool.check_integrity(&[1, 1, 0]).unwrap();
        assert!(pool.check_integrity(&[1, 0, 0]).is_err());
    }

    /// Few tags on many blocks, stored, evicted and stored again between two reports.
    #[test]
    fn a_reader_of_the_changes_knows_the_tags() {
        let mut state = 1u32;
        let mut below = |n: u32| {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 16) % n
        };
        let mut pool = BlockPool::new(6);
        let (mut held, mut reader) = (Vec::new(), BTreeSet::new());
        let mut n_changes = 0;
        for _ in 0..20_000 {
            match below(8) {
                0..3 => held.extend(pool.allocate()),
                3..6 if !held.is_empty() => {
                    let id = held[below(held.len() as u32) as usize];
                    let tags: Vec<u64> = (0..below(3)).map(|_| u64::from(below(4))).collect();
                    pool.store(id, hash(below(12)), &tags);
                }
                6 if !held.is_empty() => pool.release(held.swap_remove(below(held.len() as u32) as usize)),
                7 if below(20) == 0 => pool.forget_free(),
                _ => {}
            }
            if below(4) == 0 {
                for change in pool.take_prefix_changes() {
                    let is_news = match change {
                        PrefixChange::Stored(id) => reader.insert(id),
                        PrefixChange::Evicted(id) => reader.remove(&id),
                    };
                    assert!(is_news, "{change:?} says nothing new");
                    n_changes += 1;
                }
                let truth = pool.blocks.iter().filter(|b| b.hash.is_some()).flat_map(|b| &b.tags).copied();
                assert_eq!(reader, truth.collect());
            }
        }
        assert!(n_changes > 1000, "{n_changes}");
    }
}
