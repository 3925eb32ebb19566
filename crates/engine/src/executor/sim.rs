//! A simulated executor: no weights, but every rule of the paged cache is checked.
//!
//! Each block remembers which token was written at which position. A row reads its whole context back through its block
//! table and draws a token that is a pure function of that context and the seed, so that any scheduling, aliasing or
//! copy-on-write fault changes the output or fails an assertion.

use std::collections::VecDeque;
use std::sync::Arc;

use kwire_kernels::{BlockCopy, KernelError, SampleParams, Sampled, TokenLogprobs};

use super::{Executor, ExecutorInfo};
use crate::batch::{Batch, Masks, RowTokens, SampleKind, StepId, StepOutput};
use crate::cache::groups::KvGroup;

/// What a slot remembers.
#[derive(Debug, Clone, Default)]
struct SlotState {
    params: Option<Arc<SampleParams>>,
    /// Per group.
    tables: Vec<Vec<u32>>,
    last_drawn: Option<u32>,
}

/// Content of one cache entry: the token and its position.
type Entry = Option<(u32, usize)>;

/// An executor that computes no logits, and checks what it is told to read and write.
pub struct SimExecutor {
    info: ExecutorInfo,
    slots: Vec<SlotState>,
    /// `cache[group][block][offset]`.
    cache: Vec<Vec<Vec<Entry>>>,
    /// Hash of the context at each wanted logit of the last forward.
    logits: Vec<u64>,
    batch: Batch,
    pending: VecDeque<StepOutput>,
}

impl SimExecutor {
    /// An executor for `n_slots` sequences.
    pub fn new(info: ExecutorInfo, n_slots: usize) -> Self {
        let entries = |(g, &n): (&KvGroup, &usize)| vec![vec![None; g.layout.block_len]; n];
        let cache = info.groups.iter().zip(&info.n_blocks).map(entries).collect();
        let slot = SlotState { tables: vec![Vec::new(); info.groups.len()], ..SlotState::default() };
        Self {
            slots: vec![slot; n_slots],
            cache,
            info,
            logits: Vec::new(),
            batch: Batch::default(),
            pending: VecDeque::new(),
        }
    }

    /// The token a sequence with these tokens draws next: what [`SimExecutor`] gives if the engine makes no mistake.
    pub fn expected_token(info: &ExecutorInfo, tokens: &[u32], params: &SampleParams) -> u32 {
        draw(Self::context(info, tokens), params, tokens.len(), info.n_vocab)
    }

    /// The log-probability of `token` after `tokens`, by the same rule.
    pub fn expected_logprob(info: &ExecutorInfo, tokens: &[u32], token: u32) -> f32 {
        logprob(Self::context(info, tokens), token)
    }

    fn context(info: &ExecutorInfo, tokens: &[u32]) -> u64 {
        let visible = tokens.iter().enumerate().skip(visible_from(info, tokens.len() - 1));
        visible.fold(0, |h, (i, &t)| mix(h, t, i))
    }

    fn apply_tables(&mut self, batch: &Batch) {
        for start in &batch.starts {
            let slot = &mut self.slots[start.slot as usize];
            slot.params = Some(start.params.clone());
            slot.tables.iter_mut().for_each(Vec::clear);
            slot.last_drawn = start.output.last().copied();
        }
        for update in &batch.tables {
            let table = &mut self.slots[update.slot as usize].tables[update.group];
            assert!(update.start <= table.len(), "a table update leaves a gap");
            table.truncate(update.start);
            table.extend_from_slice(&update.blocks);
        }
        for (cache, copies) in self.cache.iter_mut().zip(&batch.copies) {
            for &BlockCopy { src, dst } in copies {
                cache[dst as usize] = cache[src as usize].clone();
            }
        }
    }

    /// Hash of the positions up to `last` that some group sees, as the cache of `slot` has them; groups must agree.
    fn context_hash(&self, slot: usize, last: usize) -> u64 {
        let mut hash = 0;
        let first = visible_from(&self.info, last);
        for position in first..=last {
            let mut token = None;
            for (g, group) in self.info.groups.iter().enumerate() {
                if group.window.is_some_and(|w| position + w <= last) {
                    continue;
                }
                let block_len = group.layout.block_len;
                let block = self.slots[slot].tables[g][position / block_len];
                let entry = self.cache[g][block as usize][position % block_len];
                let (t, p) = entry.expect("a row reads cache that was written");
                assert_eq!(p, position, "slot {slot} reads another position's cache");
                assert!(token.is_none_or(|other| other == t), "groups disagree on position {position}");
                token = Some(t);
            }
            hash = mix(hash, token.expect("some group sees the position"), position);
        }
        hash
    }

    fn draw_sample(&self, i: usize, masks: &Masks) -> Sampled {
        let sample = &self.batch.samples[i];
        let params = self.slots[sample.slot as usize].params.as_ref().expect("a slot draws after its start");
        let context = self.logits[sample.logit];
        let logprobs = |token| TokenLogprobs { sampled: logprob(context, token), rank: 1, top: Vec::new() };
        match sample.kind {
            SampleKind::Score { token, .. } => Sampled { token, logprobs: Some(logprobs(token)), corrupt: false },
            SampleKind::Draw => {
                let mut token = draw(context, params, sample.position, self.info.n_vocab);
                if let Some(mask) = &masks[i] {
                    let n_vocab = u32::try_from(self.info.n_vocab).expect("token ids fit 32 bits");
                    token = (0..n_vocab).map(|d| (token + d) % n_vocab).find(|&t| mask.allows(t)).unwrap_or(token);
                }
                Sampled { token, logprobs: params.logprobs.map(|_| logprobs(token)), corrupt: false }
            }
        }
    }
}

impl Executor for SimExecutor {
    fn info(&self) -> &ExecutorInfo {
        &self.info
    }

    fn forward(&mut self, batch: &Batch) -> Result<(), KernelError> {
        self.apply_tables(batch);
        for row in &batch.rows {
            let slot = row.slot as usize;
            let tokens = match &row.tokens {
                RowTokens::Known(tokens) => tokens.clone(),
                RowTokens::LastDrawn => vec![self.slots[slot].last_drawn.expect("the slot drew a token")],
            };
            for (i, &token) in tokens.iter().enumerate() {
                let position = row.first_position + i;
                for (g, group) in self.info.groups.iter().enumerate() {
                    let block = self.slots[slot].tables[g][position / group.layout.block_len];
                    self.cache[g][block as usize][position % group.layout.block_len] = Some((token, position));
                }
            }
        }
        self.logits.clear();
        for row in &batch.rows {
            for i in row.logits_from..row.tokens.len() {
                let hash = self.context_hash(row.slot as usize, row.first_position + i);
                self.logits.push(hash);
            }
        }
        self.batch = batch.clone();
        Ok(())
    }

    fn sample(&mut self, step: StepId, masks: &Masks) -> Result<(), KernelError> {
        assert_eq!(step, self.batch.step, "samples are queued right after their forward");
        let sampled: Vec<_> = (0..self.batch.samples.len()).map(|i| self.draw_sample(i, masks)).collect();
        for (sample, drawn) in self.batch.samples.iter().zip(&sampled) {
            if sample.kind == SampleKind::Draw {
                self.slots[sample.slot as usize].last_drawn = Some(drawn.token);
            }
        }
        self.pending.push_back(StepOutput { step, sampled });
        assert!(self.pending.len() <= self.info.depth + 1, "more steps in flight than the depth allows");
        Ok(())
    }

    fn collect(&mut self, step: StepId) -> Result<StepOutput, KernelError> {
        let output = self.pending.pop_front().expect("collect follows sample");
        assert_eq!(output.step, step, "steps are collected in order");
        Ok(output)
    }
}

/// First position that the token at `last` sees in the group that sees most.
fn visible_from(info: &ExecutorInfo, last: usize) -> usize {
    info.groups.iter().map(|g| g.window.map_or(0, |w| (last + 1).saturating_sub(w))).min().unwrap_or(0)
}

/// One round of a splitmix64-like hash over a token and its position.
fn mix(hash: u64, token: u32, position: usize) -> u64 {
    let mut z = hash ^ (u64::from(token) << 32 | position as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

fn logprob(context: u64, token: u32) -> f32 {
    -((mix(context, token, 0) % 1000) as f32)
}

fn draw(context: u64, params: &SampleParams, position: usize, n_vocab: usize) -> u32 {
    let seed = if params.temperature == 0.0 { 0 } else { params.seed };
    u32::try_from(mix(context ^ seed, 0, position) % n_vocab as u64).expect("token ids fit 32 bits")
}
