//! Continuous batching: which tokens the next step computes, and who owns which blocks.
//!
//! Each step has one budget of tokens. Running decodes come first, then running prompts (in chunks), then waiting requests
//! in order of service. A sequence that cannot get a block takes those of the last in order, who is computed again
//! later; so the first in order always proceeds, and nobody starves.
//!
//! Admission keeps preemption rare: a request enters only if its whole prompt fits beside what running prompts still
//! need and a decode reserve of [`RESERVE_TOKENS`] for each running sequence. A request whose next prefix block is being computed by a running one waits for that
//! block instead of computing it again.

use std::collections::{BTreeSet, HashMap};

use crate::RequestId;
use crate::batch::{Batch, Row, RowTokens, Sample, SampleKind, Slot, SlotStart, StepId, TableUpdate};
use crate::cache::CacheManager;
use crate::config::{SchedulerConfig, SchedulingPolicy};
use crate::executor::ExecutorInfo;
use crate::sequence::{Residency, Sequence, SequenceId};

/// Tokens that admission leaves room for, for each running sequence.
pub const RESERVE_TOKENS: usize = 32;

/// Order of service.
type Key = (i32, SequenceId);

/// What a batch promises: who gets which result, and how far each sequence is computed once the step is done.
#[derive(Debug, Default)]
pub(crate) struct StepRecord {
    pub step: StepId,
    pub n_tokens: usize,
    /// Sequence of each sample, in order.
    pub samples: Vec<(SequenceId, SampleKind)>,
    /// `(sequence, its number of preemptions, tokens computed)` for each row.
    pub computed: Vec<(SequenceId, u32, usize)>,
}

/// A step under construction.
#[derive(Default)]
struct Plan {
    batch: Batch,
    record: StepRecord,
    /// Tokens left.
    budget: usize,
    /// Prompt positions that may still be scored.
    score_budget: usize,
    n_logits: usize,
    preempted: bool,
}

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
            self.free_residency(residency);
        }
        Some(sequence)
    }

    pub fn take_started(&mut self) -> Vec<(SequenceId, usize)> {
        std::mem::take(&mut self.started)
    }

    pub fn take_forked(&mut self) -> Vec<(RequestId, SequenceId)> {
        std::mem::take(&mut self.forked)
    }

    /// A waiting sequence that cannot be admitted though nothing runs: it never will be.
    pub fn stuck(&self) -> Option<&Sequence> {
        let (_, id) = self.waiting.first().filter(|_| self.running.is_empty())?;
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
        let mut plan = Plan {
            budget: self.config.max_num_batched_tokens,
            score_budget: SchedulerConfig::MAX_SCORED_TOKENS,
            ..Plan::default()
        };
        plan.batch.step = self.next_step;
        plan.batch.copies = vec![Vec::new(); self.cache.n_groups()];
        self.schedule_running(&mut plan);
        if !plan.preempted {
            self.admit_waiting(&mut plan);
        }
        if plan.batch.rows.is_empty() {
            return None;
        }
        assert!(plan.batch.n_tokens() <= self.config.max_num_batched_tokens, "the budget holds");
        assert!(plan.n_logits <= self.config.max_logits(), "the logits fit");
        self.next_step += 1;
        plan.record.step = plan.batch.step;
        plan.record.n_tokens = plan.batch.n_tokens();
        Some((plan.batch, plan.record))
    }

    fn schedule_running(&mut self, plan: &mut Plan) {
        let keys: Vec<Key> = self.running.iter().copied().collect();
        for decodes in [true, false] {
            for &key in &keys {
                let ready =
                    |s: &Sequence| s.todo() > 0 && s.decodes() == decodes && !s.is_full() && !self.awaits_host(s);
                if plan.budget == 0 || !self.running.contains(&key) || !ready(&self.sequences[&key.1]) {
                    continue;
                }
                if self.secure_blocks(key, plan) {
                    self.emit_row(key.1, plan);
                }
            }
        }
    }

    /// Whether the sequence cannot be scheduled before a result reaches the host.
    fn awaits_host(&self, sequence: &Sequence) -> bool {
        // The mask of its next draw needs the last token; at depth 1 that token is collected between forward and sample.
        sequence.constraint.is_some() && sequence.n_in_flight > usize::from(self.depth == 1)
    }

    /// Makes blocks for the next chunk, preempting from the end of the order. False: the sequence must wait.
    fn secure_blocks(&mut self, key: Key, plan: &mut Plan) -> bool {
        let block_len = self.cache.block_len();
        loop {
            let sequence = self.sequences.get_mut(&key.1).expect("running sequences exist");
            let start = sequence.n_scheduled;
            let chunk = plan.chunk_len(&self.config, sequence);
            if chunk == 0 {
                return false;
            }
            let residency = sequence.residency.as_mut().expect("running sequences are resident");
            self.cache.release_passed(&mut residency.tables, start);
            let n_blocks = (start + chunk).div_ceil(block_len);
            if residency.grow(n_blocks, start / block_len, &mut plan.batch.copies).is_ok() {
                return true;
            }
            let scheduled = |id: SequenceId| plan.record.computed.iter().any(|c| c.0 == id);
            let victim = self.running.iter().rev().copied().find(|&k| k > key && !scheduled(k.1));
            match victim {
                Some(victim) => self.preempt(victim.1, plan),
                None => return false,
            }
        }
    }

    fn preempt(&mut self, id: SequenceId, plan: &mut Plan) {
        let sequence = self.sequences.get_mut(&id).expect("running sequences exist");
        sequence.preemptions += 1;
        let residency = sequence.evict().expect("running sequences are resident");
        let key = self.key(&self.sequences[&id]);
        self.free_residency(residency);
        self.running.remove(&key);
        self.waiting.insert(key);
        self.n_preemptions += 1;
        plan.preempted = true;
        let sequence = &self.sequences[&id];
        tracing::warn!(
            request = sequence.request.0,
            tokens = sequence.tokens.len(),
            times = sequence.preemptions,
            "preempted: the KV cache is full, the sequence will be computed again"
        );
    }

    /// Takes the slots back. The blocks go with the tables, which are dropped here.
    #[expect(clippy::needless_pass_by_value, reason = "dropping it is the point")]
    fn free_residency(&mut self, residency: Residency) {
        self.free_slots.push(residency.slot);
        self.free_slots.extend_from_slice(&residency.fork_slots);
    }

    fn admit_waiting(&mut self, plan: &mut Plan) {
        let keys: Vec<Key> = self.waiting.iter().copied().take(2 * self.config.max_num_seqs).collect();
        for key in keys {
            let sequence = &self.sequences[&key.1];
            if plan.budget == 0 || self.free_slots.len() <= sequence.n_forks as usize {
                break;
            }
            // A preempted sequence whose last draw is on its way.
            if sequence.n_in_flight > 0 {
                continue;
            }
            match self.try_admit(key, plan) {
                Admission::Admitted => {}
                Admission::SharesWork => continue,
                Admission::NoRoom => break,
            }
        }
    }

    fn try_admit(&mut self, key: Key, plan: &mut Plan) -> Admission {
        let sequence = &self.sequences[&key.1];
        let block_len = self.cache.block_len();
        let len = sequence.len();
        // The last token is always computed: its logits are wanted.
        let reusable =
            if self.config.prefix_caching && sequence.prompt_logprobs.is_none() { (len - 1) / block_len } else { 0 };
        let hashes = &sequence.hashes[..reusable.min(sequence.hashes.len())];
        let hit = self.cache.find_prefix(hashes);
        let n_hit = hit.n_tokens / block_len;
        let in_work =
            |s: &Sequence| n_hit < hashes.len() && s.hashes.get(n_hit) == Some(&hashes[n_hit]) && s.n_stored <= n_hit;
        if self.config.prefix_caching && self.running.iter().any(|(_, id)| in_work(&self.sequences[id])) {
            return Admission::SharesWork;
        }
        if !self.has_room(len, &hit) {
            return Admission::NoRoom;
        }
        let first_time = !sequence.started;
        let n_slots = 1 + sequence.n_forks as usize;
        let mut slots = self.free_slots.split_off(self.free_slots.len() - n_slots);
        let mut tables = self.cache.new_tables();
        tables.iter_mut().zip(&hit.blocks).for_each(|(table, blocks)| table.share(blocks));
        let slot = slots.pop().expect("at least one slot was taken");
        let sequence = self.sequences.get_mut(&key.1).expect("waiting sequences exist");
        sequence.residency = Some(Residency { slot, fork_slots: slots, tables, dirty_from: 0, fresh: true });
        sequence.n_scheduled = hit.n_tokens;
        sequence.n_stored = n_hit;
        sequence.started = true;
        let n_prompt = sequence.prompt.len();
        if !self.secure_blocks(key, plan) {
            // Without chunked prefill the rest of the budget may be too small: the next step has all of it.
            let residency = self.sequences.get_mut(&key.1).and_then(Sequence::evict).expect("just made resident");
            self.sequences.get_mut(&key.1).expect("waiting sequences exist").started = !first_time;
            self.free_residency(residency);
            return Admission::NoRoom;
        }
        self.waiting.remove(&key);
        self.running.insert(key);
        if first_time {
            self.started.push((key.1, hit.n_tokens));
            self.prompt_tokens += n_prompt as u64;
            self.prefix_queries += n_prompt as u64;
            self.prefix_hits += hit.n_tokens as u64;
        }
        self.emit_row(key.1, plan);
        Admission::Admitted
    }

    /// Whether a sequence of `len` tokens fits beside what the running ones will need.
    fn has_room(&self, len: usize, hit: &crate::cache::PrefixHit) -> bool {
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

    /// Adds the sequence's next chunk, whose blocks are secured, to the step.
    fn emit_row(&mut self, id: SequenceId, plan: &mut Plan) {
        let mut sequence = self.sequences.remove(&id).expect("running sequences exist");
        let chunk = plan.chunk_len(&self.config, &sequence);
        let start = sequence.n_scheduled;
        let end = start + chunk;
        let draws = end == sequence.len();
        let tokens = if sequence.n_in_flight > 0 {
            debug_assert_eq!((chunk, end), (1, sequence.len()), "only the newest token may be unknown");
            RowTokens::LastDrawn
        } else {
            RowTokens::Known(sequence.tokens[start..end].to_vec())
        };
        let scored =
            if sequence.prompt_logprobs.is_some() { start..end.min(sequence.prompt.len() - 1) } else { end..end };
        let logits_from = if scored.is_empty() { chunk - usize::from(draws) } else { 0 };
        plan.start_and_update(&mut sequence);
        let slot = sequence.residency.as_ref().expect("running sequences are resident").slot;
        plan.score_budget -= scored.len();
        for position in scored {
            let (n_top, _) = sequence.prompt_logprobs.as_ref().expect("scored positions want it");
            let kind = SampleKind::Score { token: sequence.tokens[position + 1], n_top: *n_top };
            plan.add_sample(id, slot, plan.n_logits + position - start, position + 1, kind);
        }
        sequence.n_scheduled = end;
        plan.n_logits += chunk - logits_from;
        if draws {
            plan.add_sample(id, slot, plan.n_logits - 1, end, SampleKind::Draw);
            for fork in self.fork_all(&mut sequence) {
                self.start_fork(fork, plan, end);
            }
            sequence.n_in_flight += 1;
        }
        plan.batch.rows.push(Row { slot, first_position: start, tokens, logits_from });
        plan.record.computed.push((id, sequence.preemptions, end));
        plan.budget -= chunk;
        self.sequences.insert(id, sequence);
    }

    fn fork_all(&mut self, parent: &mut Sequence) -> Vec<Sequence> {
        let slots =
            std::mem::take(&mut parent.residency.as_mut().expect("forks are made of running sequences").fork_slots);
        let forks = slots.into_iter().zip(1..).map(|(slot, index)| parent.fork(self.next_sequence_id(), index, slot));
        let forks = forks.collect();
        parent.n_forks = 0;
        forks
    }

    /// A fork draws its first token from its parent's logits.
    fn start_fork(&mut self, mut fork: Sequence, plan: &mut Plan, position: usize) {
        plan.start_and_update(&mut fork);
        let slot = fork.residency.as_ref().expect("forks are resident").slot;
        plan.add_sample(fork.id, slot, plan.n_logits - 1, position, SampleKind::Draw);
        fork.n_in_flight += 1;
        self.forked.push((fork.request, fork.id));
        self.running.insert(self.key(&fork));
        self.sequences.insert(fork.id, fork);
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
    SharesWork,
    NoRoom,
}

impl Residency {
    /// Blocks for the first `n_blocks` entries, the one at `first_written` and those after it writable.
    fn grow(
        &mut self,
        n_blocks: usize,
        first_written: usize,
        copies: &mut [Vec<kwire_kernels::BlockCopy>],
    ) -> Result<(), crate::cache::block_pool::OutOfBlocks> {
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

impl Plan {
    /// Tokens of the sequence's next chunk; 0: it has to wait.
    fn chunk_len(&self, config: &SchedulerConfig, sequence: &Sequence) -> usize {
        // Scored prompts are computed in pieces even without chunked prefill: their logits take memory.
        if sequence.prompt_logprobs.is_some() && sequence.todo() > 1 {
            return sequence.todo().min(self.budget).min(self.score_budget);
        }
        config.chunk_len(sequence.todo(), self.budget)
    }

    /// Tells the executor what it does not know of a sequence's slot and tables.
    fn start_and_update(&mut self, sequence: &mut Sequence) {
        let output = sequence.output().to_vec();
        let residency = sequence.residency.as_mut().expect("running sequences are resident");
        let slot = residency.slot;
        if std::mem::take(&mut residency.fresh) {
            residency.dirty_from = 0;
            self.batch.starts.push(SlotStart {
                slot,
                params: sequence.params.clone(),
                prompt: sequence.prompt.clone(),
                output,
            });
        }
        for (group, table) in residency.tables.iter().enumerate() {
            if residency.dirty_from < table.blocks().len() {
                let blocks = table.blocks()[residency.dirty_from..].to_vec();
                self.batch.tables.push(TableUpdate { slot, group, start: residency.dirty_from, blocks });
            }
        }
        residency.dirty_from = residency.tables.iter().map(|t| t.blocks().len()).min().unwrap_or(0);
    }

    fn add_sample(&mut self, id: SequenceId, slot: Slot, logit: usize, position: usize, kind: SampleKind) {
        self.batch.samples.push(Sample { logit, slot, position, kind });
        self.record.samples.push((id, kind));
    }
}
