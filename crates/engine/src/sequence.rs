//! One sequence: its tokens, how far they are computed, and the blocks they occupy.
//!
//! Three lengths tell where a sequence stands: `n_scheduled ≤ len()`, and `len()` counts `n_in_flight` tokens that are drawn but
//! not yet known to the host. A sequence decodes if just its newest token, a drawn one, is left to compute; else it prefills.

use std::ops::Range;
use std::sync::Arc;

use kwire_kernels::{BlockCopy, SampleParams, TokenLogprobs};

use crate::batch::Slot;
use crate::cache::block_pool::OutOfBlocks;
use crate::cache::block_table::BlockTable;
use crate::cache::prefix::BlockHash;
use crate::{Constraint, PrefixTag, Request, RequestId, StopParams};

/// Identifies a sequence for the life of the engine; later sequences have higher ids.
pub type SequenceId = u64;

/// A slot and everything that lives only while the sequence runs.
#[derive(Debug)]
pub(crate) struct Residency {
    pub slot: Slot,
    /// Slots kept for the sequences that fork off when the prompt is computed.
    pub fork_slots: Vec<Slot>,
    /// One per KV group.
    pub tables: Vec<BlockTable>,
    /// Table entries from here on are not yet known to the executor.
    pub dirty_from: usize,
    /// The executor does not know the slot yet.
    pub fresh: bool,
}

/// Log-probabilities of a prompt's tokens. Each position is scored once, in order, even if a preemption has it computed again.
pub(crate) struct PromptScores {
    /// Best tokens to report for each.
    pub n_top: u32,
    /// Positions scored by steps queued so far.
    pub n_queued: usize,
    /// Of the positions whose results are known.
    pub known: Vec<TokenLogprobs>,
}

impl Residency {
    /// Gives the slots back; the blocks are released with the tables.
    pub fn free(self, free_slots: &mut Vec<Slot>) {
        free_slots.push(self.slot);
        free_slots.extend(self.fork_slots);
    }

    /// Blocks for the first `n_blocks` entries of all tables, the one at `first_written` and those after it writable. All or
    /// nothing: a sequence that has to wait holds nothing new, and no copies are left of it in the step.
    pub fn grow(
        &mut self,
        n_blocks: usize,
        first_written: usize,
        copies: &mut [Vec<BlockCopy>],
    ) -> Result<(), OutOfBlocks> {
        // Each group has a pool of its own: what fits each, fits all.
        if !self.tables.iter().all(|table| table.can_grow(n_blocks, first_written)) {
            return Err(OutOfBlocks);
        }
        for (table, copies) in self.tables.iter_mut().zip(copies) {
            let old_len = table.blocks().len();
            // Only the block that the last chunk left partly filled can be shared and about to be written.
            if first_written < old_len
                && let Some(copy) = table.make_writable(first_written)?
            {
                copies.push(copy);
                self.dirty_from = self.dirty_from.min(first_written);
            }
            table.grow(n_blocks)?;
            self.dirty_from = self.dirty_from.min(old_len);
        }
        Ok(())
    }
}

/// A sequence that has not ended.
pub(crate) struct Sequence {
    pub id: SequenceId,
    pub request: RequestId,
    /// Number within the request.
    pub index: u32,
    pub prompt: Arc<[u32]>,
    /// Prompt and output.
    pub tokens: Vec<u32>,
    pub params: Arc<SampleParams>,
    pub stop: StopParams,
    /// Length at which the sequence ends at the latest.
    pub max_len: usize,
    pub priority: i32,
    pub constraint: Option<Box<dyn Constraint>>,
    /// Sequences that fork off when the prompt is computed.
    pub n_forks: u32,
    /// Until the prompt's log-probabilities are complete.
    pub prompt_scores: Option<PromptScores>,
    pub prefix_tags: Vec<PrefixTag>,
    /// Hash of every full block of known tokens.
    pub hashes: Vec<BlockHash>,
    root: BlockHash,
    /// Blocks named in the prefix index.
    pub n_stored: usize,
    /// Tokens whose computation is queued or done.
    pub n_scheduled: usize,
    /// Tokens drawn by queued steps, not known yet.
    pub n_in_flight: usize,
    pub residency: Option<Residency>,
    pub started: bool,
    pub preemptions: u32,
}

impl Sequence {
    /// The first sequence of a request.
    pub fn new(id: SequenceId, request: Request, max_model_len: usize) -> Self {
        let mut tokens = request.prompt.to_vec();
        tokens.extend_from_slice(&request.resumed);
        let max_len = request.prompt.len().saturating_add(request.stop.max_tokens).min(max_model_len);
        let seed = Request::sequence_seed(request.sampling.seed, 0);
        let n_top = request.prompt_logprobs.filter(|_| request.prompt.len() > 1);
        let prompt_scores = n_top.map(|n_top| PromptScores { n_top, n_queued: 0, known: Vec::new() });
        Self {
            id,
            request: request.id,
            index: 0,
            tokens,
            prompt: request.prompt,
            params: Arc::new(SampleParams { seed, ..request.sampling }),
            stop: request.stop,
            max_len,
            priority: request.priority,
            constraint: request.constraint,
            n_forks: request.n - 1,
            prompt_scores,
            prefix_tags: request.prefix_tags,
            hashes: Vec::new(),
            root: BlockHash::root(request.cache_salt.as_deref()),
            n_stored: 0,
            n_scheduled: 0,
            n_in_flight: 0,
            residency: None,
            started: false,
            preemptions: 0,
        }
    }

    /// Sequence `index` of the same request, in a slot of its own over the same blocks. Called when the last prompt token is
    /// scheduled, before anything is drawn.
    pub fn fork(&self, id: SequenceId, index: u32, slot: Slot) -> Self {
        let residency = self.residency.as_ref().expect("forks are made of running sequences");
        let tables: Vec<_> = residency.tables.iter().map(BlockTable::fork).collect();
        // Forks differ from the first sequence by `index` steps of the seed.
        let seed = Request::sequence_seed(self.params.seed, index);
        Self {
            id,
            request: self.request,
            index,
            prompt: self.prompt.clone(),
            tokens: self.tokens.clone(),
            params: Arc::new(SampleParams { seed, ..(*self.params).clone() }),
            stop: self.stop.clone(),
            max_len: self.max_len,
            priority: self.priority,
            constraint: self.constraint.as_ref().map(|c| c.fork()),
            n_forks: 0,
            prompt_scores: None,
            prefix_tags: Vec::new(),
            hashes: self.hashes.clone(),
            root: self.root,
            n_stored: self.n_stored,
            n_scheduled: self.n_scheduled,
            n_in_flight: 0,
            residency: Some(Residency { slot, fork_slots: Vec::new(), tables, dirty_from: 0, fresh: true }),
            started: true,
            preemptions: 0,
        }
    }

    /// Tokens known or drawn.
    pub fn len(&self) -> usize {
        self.tokens.len() + self.n_in_flight
    }

    /// Tokens to compute before the next draw.
    pub fn todo(&self) -> usize {
        self.len() - self.n_scheduled
    }

    /// Whether the next step computes just the newest token.
    pub fn decodes(&self) -> bool {
        self.todo() == 1 && self.len() > self.prompt.len()
    }

    /// Tokens generated so far and known.
    pub fn output(&self) -> &[u32] {
        &self.tokens[self.prompt.len()..]
    }

    /// Whether another draw would go past the end, even if no token drawn so far ends it.
    pub fn is_full(&self) -> bool {
        self.len() >= self.max_len
    }

    /// Brings `hashes` up to the known tokens.
    pub fn update_hashes(&mut self, block_len: usize) {
        let n_full = self.tokens.len() / block_len;
        while self.hashes.len() < n_full {
            let i = self.hashes.len();
            let parent = self.hashes.last().copied().unwrap_or(self.root);
            self.hashes.push(parent.next(&self.tokens[i * block_len..(i + 1) * block_len]));
        }
    }

    /// Gateway ids of the prefixes that end in block `index`.
    pub fn tags_of_block(&self, index: usize, block_len: usize) -> Vec<u64> {
        let tokens = index * block_len + 1..=(index + 1) * block_len;
        self.prefix_tags.iter().filter(|t| tokens.contains(&t.end_token)).map(|t| t.id).collect()
    }

    /// Of the `computed` positions those whose logits are still to be scored; they count as queued from now on.
    pub fn take_unscored(&mut self, computed: Range<usize>) -> Range<usize> {
        let Some(scores) = &mut self.prompt_scores else { return computed.end..computed.end };
        let start = computed.start.max(scores.n_queued);
        let end = computed.end.min(self.prompt.len() - 1).max(start);
        scores.n_queued = scores.n_queued.max(end);
        start..end
    }

    /// Gives up slot and blocks; everything is computed again later. What queued steps draw and score of it stays true: it is
    /// a function of the tokens alone.
    pub fn evict(&mut self) -> Option<Residency> {
        self.n_scheduled = 0;
        self.n_stored = 0;
        self.residency.take()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cache::block_table::SharedPool;

    #[test]
    fn growth_is_all_or_nothing_over_the_groups() {
        let pools = [4, 3].map(SharedPool::new);
        let residency = |tables| Residency { slot: 0, fork_slots: vec![], tables, dirty_from: 0, fresh: true };
        let free = || pools.each_ref().map(|pool| pool.lock().n_free());
        let mut copies = vec![vec![]; 2];
        let mut parent = residency(pools.iter().map(BlockTable::new).collect());
        parent.grow(2, 0, &mut copies).unwrap();
        let mut fork = residency(parent.tables.iter().map(BlockTable::fork).collect());
        fork.dirty_from = 2;
        // A copy and a new block: two blocks are free in the first group, one in the second.
        assert_eq!((free(), fork.grow(3, 1, &mut copies)), ([2, 1], Err(OutOfBlocks)));
        assert_eq!((free(), fork.dirty_from, &copies), ([2, 1], 2, &vec![vec![]; 2]));
        assert!((0..2).all(|g| fork.tables[g].blocks() == parent.tables[g].blocks()));
        drop(parent);
        fork.grow(3, 1, &mut copies).unwrap();
        assert_eq!((free(), fork.dirty_from, &copies), ([1, 0], 2, &vec![vec![]; 2]));
        drop(fork);
        assert_eq!(free(), [4, 3]);
    }
}
