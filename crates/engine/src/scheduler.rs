//! Continuous batching: which tokens the next step computes, and who owns which blocks.
//!
//! Each step has one budget of tokens. Running decodes come first, then running prompts (in chunks), then waiting requests
//! in order of service. A sequence that cannot get a block takes those of the last in order, who is computed again
//! later; so the first in order always proceeds, and nobody starves.
//!
//! Admission keeps preemption rare: a request enters only if its whole prompt fits beside what running prompts still
//! need and a decode reserve of [`RESERVE_TOKENS`] for each running sequence. A request whose next prefix block is being computed
//! by a running one waits for that block instead of computing it again.

use std::collections::{BTreeSet, HashMap};

use crate::RequestId;
use crate::batch::{Batch, Slot, StepId};
use crate::cache::block_pool::OutOfBlocks;
use crate::cache::prefix::BlockHash;
use crate::cache::{CacheManager, PrefixHit};
use crate::config::{SchedulerConfig, SchedulingPolicy};
use crate::executor::ExecutorInfo;
use crate::sequence::{Residency, Sequence, SequenceId};
use crate::step::{Step, StepRecord};

/// Tokens that admission leaves room for, for each running sequence.
const RESERVE_TOKENS: usize = 32;

/// Order of service.
type Key = (i32, SequenceId);

/// See the module's documentation.
pub(crate) struct Scheduler {
    config: SchedulerConfig,
    depth: usize,
    pub cache: CacheManager,
    pub sequences: HashMap<SequenceId, Sequence>,
    waiting: BTreeSet<Key>,
    running: BTreeSet<Key>,
    free_slots: Vec<Slot>,
    next_step: StepId,
    next_sequence: SequenceId,
    pub n_preemptions: u64,
    pub prefix_queries: u64,
    pub prefix_hits: u64,
    pub prompt_tokens: u64,
    /// Sequences admitted for the first time since the last [`Scheduler::take_started`], with their cached tokens.
    started: Vec<(SequenceId, usize)>,
    /// Forks made since the last [`Scheduler::take_forked`].
    forked: Vec<(RequestId, SequenceId)>,
}

impl Scheduler {
    pub fn new(config: SchedulerConfig, info: &ExecutorInfo) -> Self {
        let n_slots = Slot::try_from(config.max_num_seqs).expect("slots fit 32 bits");
        Self {
            depth: info.depth,
            cache: CacheManager::new(&info.groups, &info.n_blocks),
            sequences: HashMap::new(),
            waiting: BTreeSet::new(),
            running: BTreeSet::new(),
            free_slots: (0..n_slots).rev().collect(),
            next_step: 0,
            next_sequence: 0,
            n_preemptions: 0,
            prefix_queries: 0,
            prefix_hits: 0,
            prompt_tokens: 0,
            started: Vec::new(),
            forked: Vec::new(),
            config,
        }
    }

    pub fn next_sequence_id(&mut self) -> SequenceId {
        self.next_sequence += 1;
        self.next_sequence
    }

    /// Queues a sequence.
    pub fn add(&mut self, mut sequence: Sequence) {
        sequence.update_hashes(self.cache.block_len());
        self.waiting.insert(self.key(&sequence));
        self.sequences.insert(sequence.id, sequence);
    }

    pub fn get(&self, id: SequenceId) -> Option<&Sequence> {
        self.sequences.get(&id)
    }

    pub fn get_mut(&mut self, id: SequenceId) -> Option<&mut Sequence> {
        self.sequences.get_mut(&id)
    }

    /// Takes a sequence out, in any state; its blocks are free when the result is dropped.
    pub fn remove(&mut self, id: SequenceId) -> Option<Sequence> {
        let mut sequence = self.sequences.remove(&id)?;
        let key = self.key(&sequence);
        self.waiting.remove(&key);
        self.running.remove(&key);
        if let Some(residency) = sequence.residency.take() {
            residency.free(&mut self.free_slots);
        }
        Some(sequence)
    }

    pub fn take_started(&mut self) -> Vec<(SequenceId, usize)> {
        std::mem::take(&mut self.started)
    }

    pub fn take_forked(&mut self) -> Vec<(RequestId, SequenceId)> {
        std::mem::take(&mut self.forked)
    }

    /// The first in order, which goes before all others.
    pub fn first(&self) -> Option<&Sequence> {
        let (_, id) = self.running.first().or(self.waiting.first())?;
        self.sequences.get(id)
    }

    pub fn n_running(&self) -> usize {
        self.running.len()
    }

    pub fn n_waiting(&self) -> usize {
        self.waiting.len()
    }

    pub fn waiting_tokens(&self) -> usize {
        self.waiting.iter().map(|(_, id)| self.sequences[id].prompt.len()).sum()
    }

    pub fn is_idle(&self) -> bool {
        self.sequences.is_empty()
    }

    /// Checks blocks, slots and queues against each other.
    pub fn check_integrity(&self) -> Result<(), String> {
        let residents: Vec<_> = self.sequences.values().filter_map(|s| s.residency.as_ref()).collect();
        self.cache.check_integrity(residents.iter().map(|r| &r.tables[..]))?;
        let n_held: usize = residents.iter().map(|r| 1 + r.fork_slots.len()).sum();
        if n_held + self.free_slots.len() != self.config.max_num_seqs {
            return Err(format!(
                "{n_held} slots held and {} free of {}",
                self.free_slots.len(),
                self.config.max_num_seqs
            ));
        }
        let (n_running, n_waiting, n_all) = (self.running.len(), self.waiting.len(), self.sequences.len());
        if n_running + n_waiting != n_all || residents.len() != n_running {
            return Err(format!("{n_running} running, {n_waiting} waiting, {} resident of {n_all}", residents.len()));
        }
        Ok(())
    }

    /// The next step, or `None` if nothing can be computed now.
    pub fn schedule(&mut self) -> Option<(Batch, StepRecord)> {
        let mut step = Step::new(&self.config, self.cache.n_groups());
        self.schedule_running(&mut step);
        if !step.preempted {
            self.admit_waiting(&mut step);
        }
        if step.batch.rows.is_empty() {
            return None;
        }
        self.next_step += 1;
        Some(step.finish(self.next_step - 1, &self.config))
    }

    fn schedule_running(&mut self, step: &mut Step) {
        let keys: Vec<Key> = self.running.iter().copied().collect();
        for decodes in [true, false] {
            for &key in &keys {
                let ready =
                    |s: &Sequence| s.todo() > 0 && s.decodes() == decodes && !s.is_full() && !self.awaits_host(s);
                if step.budget == 0 || !self.running.contains(&key) || !ready(&self.sequences[&key.1]) {
                    continue;
                }
                self.add_chunk(key, step);
            }
        }
    }

    /// Whether the sequence cannot be scheduled before a result reaches the host.
    fn awaits_host(&self, sequence: &Sequence) -> bool {
        // The mask of its next draw needs the last token; at depth 1 that token is collected between forward and sample.
        sequence.constraint.is_some() && sequence.n_in_flight > usize::from(self.depth == 1)
    }

    /// Makes blocks for the next chunk, preempting from the end of the order, and adds the chunk to the step. False: the
    /// sequence must wait.
    fn add_chunk(&mut self, key: Key, step: &mut Step) -> bool {
        let block_len = self.cache.block_len();
        let (start, chunk) = {
            let sequence = &self.sequences[&key.1];
            (sequence.n_scheduled, step.chunk_len(&self.config, sequence))
        };
        if chunk == 0 {
            return false;
        }
        while self.grow(key.1, (start + chunk).div_ceil(block_len), step).is_err() {
            let mut later = self.running.iter().rev().copied().take_while(|&k| k > key);
            let Some(victim) = later.find(|k| !step.includes(k.1)) else { return false };
            self.preempt(victim, step);
        }
        let mut sequence = self.sequences.remove(&key.1).expect("running sequences exist");
        if step.add_row(chunk, &mut sequence) {
            self.fork_all(&mut sequence, step);
        }
        self.sequences.insert(key.1, sequence);
        true
    }

    fn grow(&mut self, id: SequenceId, n_blocks: usize, step: &mut Step) -> Result<(), OutOfBlocks> {
        let sequence = self.sequences.get_mut(&id).expect("running sequences exist");
        let residency = sequence.residency.as_mut().expect("running sequences are resident");
        self.cache.release_passed(&mut residency.tables, sequence.n_scheduled);
        residency.grow(n_blocks, sequence.n_scheduled / self.cache.block_len(), &mut step.batch.copies)
    }

    fn preempt(&mut self, key: Key, step: &mut Step) {
        let sequence = self.evict(key);
        sequence.preemptions += 1;
        tracing::warn!(
            request = sequence.request.0,
            tokens = sequence.tokens.len(),
            times = sequence.preemptions,
            "preempted: the KV cache is full, the sequence will be computed again"
        );
        self.n_preemptions += 1;
        step.preempted = true;
    }

    /// Takes slots and blocks from a running sequence and puts it back in the queue.
    fn evict(&mut self, key: Key) -> &mut Sequence {
        self.running.remove(&key);
        self.waiting.insert(key);
        let sequence = self.sequences.get_mut(&key.1).expect("running sequences exist");
        let residency = sequence.evict().expect("running sequences are resident");
        residency.free(&mut self.free_slots);
        sequence
    }

    fn admit_waiting(&mut self, step: &mut Step) {
        let keys: Vec<Key> = self.waiting.iter().copied().take(2 * self.config.max_num_seqs).collect();
        for key in keys {
            let sequence = &self.sequences[&key.1];
            if step.budget == 0 || self.free_slots.len() <= sequence.n_forks as usize {
                break;
            }
            // A preempted sequence whose last draw is on its way.
            if sequence.n_in_flight > 0 {
                continue;
            }
            match self.try_admit(key, step) {
                Admission::Admitted => {}
                Admission::AwaitsPrefix => continue,
                Admission::NoRoom => break,
            }
        }
    }

    fn try_admit(&mut self, key: Key, step: &mut Step) -> Admission {
        let sequence = &self.sequences[&key.1];
        let reusable = self.reusable(sequence);
        let hit = self.cache.find_prefix(reusable);
        let n_hit = hit.n_tokens / self.cache.block_len();
        if self.is_being_computed(n_hit, reusable) {
            return Admission::AwaitsPrefix;
        }
        if !self.has_room(sequence.len(), &hit) {
            return Admission::NoRoom;
        }
        self.make_resident(key.1, &hit);
        self.waiting.remove(&key);
        self.running.insert(key);
        if !self.add_chunk(key, step) {
            // Without chunked prefill the rest of the budget may be too small: the next step has all of it.
            self.evict(key);
            return Admission::NoRoom;
        }
        let caching = self.config.prefix_caching;
        let sequence = self.sequences.get_mut(&key.1).expect("running sequences exist");
        let looked_up = caching && sequence.prompt_scores.is_none();
        if !std::mem::replace(&mut sequence.started, true) {
            let n_prompt = sequence.prompt.len() as u64;
            self.started.push((key.1, hit.n_tokens));
            self.prompt_tokens += n_prompt;
            if looked_up {
                self.prefix_queries += n_prompt;
                self.prefix_hits += hit.n_tokens as u64;
            }
        }
        Admission::Admitted
    }

    /// Blocks that the sequence may take from the prefix cache. The last token is always computed: its logits are wanted.
    fn reusable<'a>(&self, sequence: &'a Sequence) -> &'a [BlockHash] {
        if !self.config.prefix_caching || sequence.prompt_scores.is_some() {
            return &[];
        }
        let n_most = (sequence.len() - 1) / self.cache.block_len();
        &sequence.hashes[..n_most.min(sequence.hashes.len())]
    }

    /// Whether a running sequence is computing the block that comes after the first `n_hit` of `hashes`.
    fn is_being_computed(&self, n_hit: usize, hashes: &[BlockHash]) -> bool {
        let computes = |s: &Sequence| s.hashes.get(n_hit) == hashes.get(n_hit) && s.n_stored <= n_hit;
        n_hit < hashes.len() && self.running.iter().any(|(_, id)| computes(&self.sequences[id]))
    }

    /// Gives a waiting sequence slots, for its forks too, and the blocks of its cached prefix.
    fn make_resident(&mut self, id: SequenceId, hit: &PrefixHit) {
        let sequence = self.sequences.get_mut(&id).expect("waiting sequences exist");
        let mut tables = self.cache.new_tables();
        tables.iter_mut().zip(&hit.blocks).for_each(|(table, blocks)| table.share(blocks));
        let first_slot = self.free_slots.len() - 1 - sequence.n_forks as usize;
        let mut fork_slots = self.free_slots.split_off(first_slot);
        let slot = fork_slots.pop().expect("at least one slot was taken");
        sequence.residency = Some(Residency { slot, fork_slots, tables, dirty_from: 0, fresh: true });
        sequence.n_scheduled = hit.n_tokens;
        sequence.n_stored = hit.n_tokens / self.cache.block_len();
    }

    /// Whether a sequence of `len` tokens fits beside what the running ones will need.
    fn has_room(&self, len: usize, hit: &PrefixHit) -> bool {
        let max_step = self.config.max_num_batched_tokens;
        let mut reserved = vec![0; self.cache.n_groups()];
        for (_, id) in &self.running {
            let s = &self.sequences[id];
            let copies = 1 + s.n_forks as usize;
            let goal = s.max_len.min(s.len().max(s.prompt.len()) + RESERVE_TOKENS);
            let tables = &s.residency.as_ref().expect("running sequences are resident").tables;
            for (g, table) in tables.iter().enumerate() {
                reserved[g] += self.cache.blocks_missing(g, goal, max_step, table.n_held()) * copies;
            }
        }
        self.cache.fits(len + 1, max_step, hit, &reserved)
    }

    /// Makes the forks that a sequence waits for, which draw from the logits of its last prompt token like itself.
    fn fork_all(&mut self, parent: &mut Sequence, step: &mut Step) {
        parent.n_forks = 0;
        let residency = parent.residency.as_mut().expect("forks are made of running sequences");
        let slots = std::mem::take(&mut residency.fork_slots);
        for (slot, index) in slots.into_iter().zip(1..) {
            let mut fork = parent.fork(self.next_sequence_id(), index, slot);
            step.add_fork(&mut fork);
            self.forked.push((fork.request, fork.id));
            self.running.insert(self.key(&fork));
            self.sequences.insert(fork.id, fork);
        }
    }

    fn key(&self, sequence: &Sequence) -> Key {
        match self.config.policy {
            SchedulingPolicy::Fcfs => (0, sequence.id),
            SchedulingPolicy::Priority => (sequence.priority, sequence.id),
        }
    }
}

enum Admission {
    Admitted,
    /// A running sequence is computing the next block of this one's prefix.
    AwaitsPrefix,
    NoRoom,
}
