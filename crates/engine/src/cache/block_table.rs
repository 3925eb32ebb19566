//! A sequence's blocks in one KV group. Dropping the table releases them: an abort at any moment leaks nothing.

use std::sync::{Arc, Mutex, MutexGuard};

use kwire_kernels::{BlockCopy, StepBatch};

use super::block_pool::{BlockId, BlockPool, OutOfBlocks};

/// A pool that tables share. The engine thread alone uses it; the lock is there so that the engine can move to its thread.
#[derive(Debug, Clone)]
pub struct SharedPool(Arc<Mutex<BlockPool>>);

impl SharedPool {
    /// A pool of `n_blocks` free blocks.
    pub fn new(n_blocks: usize) -> Self {
        Self(Arc::new(Mutex::new(BlockPool::new(n_blocks))))
    }

    /// The pool. Never held across a call that could lock again.
    pub fn lock(&self) -> MutexGuard<'_, BlockPool> {
        self.0.lock().expect("no panic while the pool is locked")
    }
}

/// Blocks of one sequence, one for every `block_len` positions.
#[derive(Debug)]
pub struct BlockTable {
    pool: SharedPool,
    blocks: Vec<BlockId>,
}

impl BlockTable {
    /// Entry whose block was released because the window has passed it.
    pub const NO_BLOCK: BlockId = StepBatch::NO_BLOCK;

    /// An empty table.
    pub fn new(pool: &SharedPool) -> Self {
        Self { pool: pool.clone(), blocks: Vec::new() }
    }

    /// The blocks, by position divided by the block length.
    pub fn blocks(&self) -> &[BlockId] {
        &self.blocks
    }

    /// Entries that hold a block.
    pub fn n_held(&self) -> usize {
        self.blocks.iter().filter(|&&b| b != Self::NO_BLOCK).count()
    }

    /// Appends blocks of a cached prefix ([`Self::NO_BLOCK`] where the window has passed).
    pub fn share(&mut self, blocks: &[BlockId]) {
        let mut pool = self.pool.lock();
        blocks.iter().filter(|&&b| b != Self::NO_BLOCK).for_each(|&b| pool.acquire(b));
        self.blocks.extend_from_slice(blocks);
    }

    /// Whether [`Self::make_writable`] of the entry `first_written`, if there is one, and then [`Self::grow`] will succeed.
    pub fn can_grow(&self, n_blocks: usize, first_written: usize) -> bool {
        let pool = self.pool.lock();
        let is_shared = self.blocks.get(first_written).is_some_and(|&block| pool.refs(block) > 1);
        n_blocks.saturating_sub(self.blocks.len()) + usize::from(is_shared) <= pool.n_free()
    }

    /// Allocates until the table has `n_blocks` entries; all or nothing.
    pub fn grow(&mut self, n_blocks: usize) -> Result<(), OutOfBlocks> {
        let missing = n_blocks.saturating_sub(self.blocks.len());
        let mut pool = self.pool.lock();
        if pool.n_free() < missing {
            return Err(OutOfBlocks);
        }
        for _ in 0..missing {
            self.blocks.push(pool.allocate()?);
        }
        Ok(())
    }

    /// A second table over the same blocks.
    pub fn fork(&self) -> Self {
        let mut table = Self::new(&self.pool);
        table.share(&self.blocks);
        table
    }

    /// Makes entry `index` this table's own, so that it can be written: copy-on-write.
    pub fn make_writable(&mut self, index: usize) -> Result<Option<BlockCopy>, OutOfBlocks> {
        let src = self.blocks[index];
        let mut pool = self.pool.lock();
        if pool.refs(src) == 1 {
            return Ok(None);
        }
        let dst = pool.allocate()?;
        pool.release(src);
        self.blocks[index] = dst;
        Ok(Some(BlockCopy { src, dst }))
    }

    /// Releases the entries before `index`: the window has passed them.
    pub fn release_before(&mut self, index: usize) {
        // Entries are released in order, so the passed ones form a prefix: look from its end.
        let end = index.min(self.blocks.len());
        let start = self.blocks[..end].iter().rposition(|&b| b == Self::NO_BLOCK).map_or(0, |i| i + 1);
        if start < end {
            let mut pool = self.pool.lock();
            for block in &mut self.blocks[start..end] {
                pool.release(std::mem::replace(block, Self::NO_BLOCK));
            }
        }
    }
}

impl Drop for BlockTable {
    fn drop(&mut self) {
        // The tail first: of a freed prefix, the end is the least likely to be wanted again.
        if let Ok(mut pool) = self.pool.0.lock() {
            self.blocks.iter().rev().filter(|&&b| b != Self::NO_BLOCK).for_each(|&b| pool.release(b));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn forks_share_until_one_writes() {
        let pool = SharedPool::new(4);
        let mut a = BlockTable::new(&pool);
        a.grow(2).unwrap();
        let mut b = a.fork();
        let copy = b.make_writable(1).unwrap().unwrap();
        assert_eq!((copy.src, copy.dst), (a.blocks()[1], b.blocks()[1]));
        assert_eq!(a.make_writable(1).unwrap(), None, "a is the only holder now");
        assert_eq!(a.grow(4), Err(OutOfBlocks), "one block is free, two are wanted");
        assert_eq!(a.blocks().len(), 2);
        drop(a);
        drop(b);
        assert_eq!(pool.lock().n_free(), 4);
    }

    #[test]
    fn the_window_releases_what_it_passed() {
        let pool = SharedPool::new(4);
        let mut table = BlockTable::new(&pool);
        table.grow(4).unwrap();
        table.release_before(1);
        table.release_before(3);
        assert_eq!(pool.lock().n_free(), 3);
        assert_eq!(&table.blocks()[..3], [BlockTable::NO_BLOCK; 3]);
        drop(table);
        assert_eq!(pool.lock().n_free(), 4);
    }
}
