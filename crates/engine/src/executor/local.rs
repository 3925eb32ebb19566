//! Runs batches on one backend, in this process.

use std::collections::VecDeque;
use std::sync::Arc;

use kwire_kernels::{Backend, KernelError, RowSpan, SampleParams, SampleRequest, StepBatch};

use super::{Executor, ExecutorInfo};
use crate::batch::{Batch, Masks, RowTokens, Sample, SampleKind, StepId, StepOutput};
use crate::config::SchedulerConfig;
use crate::model::checkpoint::Checkpoint;
use crate::model::decoder::Decoder;
use crate::model::spec::{DecoderSpec, WeightNames};
use crate::model::weights::{self, LoadError, Progress};
use crate::plan::MemoryPlan;

/// A decoder on a backend, with the cache and the state of running sequences.
pub struct LocalExecutor<B: Backend> {
    info: ExecutorInfo,
    backend: B,
    decoder: Decoder<B>,
    caches: Vec<B::KvCache>,
    slots: Vec<SlotState>,
    /// The step that was forwarded last, and what is to be drawn from its logits.
    forwarded: (StepId, Vec<Sample>),
    pending: VecDeque<(StepId, Vec<Sample>, B::Pending)>,
}

/// What a slot remembers from step to step.
struct SlotState {
    params: Arc<SampleParams>,
    prompt: Arc<[u32]>,
    /// Tokens drawn, for penalties; kept at depth 0 only, since later draws are known to the device first.
    output: Vec<u32>,
}

impl<B: Backend> LocalExecutor<B> {
    /// Loads the weights, and reserves the memory that `plan` says.
    pub fn load(
        mut backend: B,
        checkpoint: &Checkpoint,
        model: (DecoderSpec, &WeightNames),
        plan: &MemoryPlan,
        limits: &SchedulerConfig,
        progress: Progress<'_>,
    ) -> Result<Self, LoadError> {
        let (spec, names) = model;
        let groups = plan.groups.clone();
        let info =
            ExecutorInfo { groups, n_blocks: plan.n_blocks.clone(), n_vocab: spec.n_vocab, depth: backend.depth() };
        let weights = weights::load(checkpoint, &spec, names, &mut backend, progress)?;
        let decoder = Decoder::new(spec, weights, &info.groups, &mut backend, limits)?;
        let shapes = info.groups.iter().zip(&info.n_blocks);
        let caches = shapes.map(|(g, &n)| backend.kv_cache(g.layout, n)).collect::<Result<_, _>>()?;
        let slot = || SlotState { params: Arc::default(), prompt: Arc::from([]), output: Vec::new() };
        let slots = (0..limits.max_num_seqs).map(|_| slot()).collect();
        Ok(Self { info, backend, decoder, caches, slots, forwarded: Default::default(), pending: VecDeque::new() })
    }

    /// The first `n` rows of the last forward's logits, `n_vocab` values each.
    pub fn logits(&mut self, n: usize) -> Result<Vec<f32>, KernelError> {
        self.backend.read(n, self.decoder.logits())
    }

    fn update_slots(&mut self, batch: &Batch) {
        for start in &batch.starts {
            let slot = &mut self.slots[start.slot as usize];
            slot.params = start.params.clone();
            slot.prompt = start.prompt.clone();
            slot.output.clone_from(&start.output);
            self.backend.start_slot(start.slot, &start.params, &start.prompt, &start.output);
        }
        for update in &batch.tables {
            self.backend.update_table(update.group, update.slot, update.start, &update.blocks);
        }
    }
}

/// A batch flattened for the device: all tokens, the rows' spans, and which tokens' logits are wanted.
#[derive(Default)]
struct Flat {
    token_ids: Vec<u32>,
    spans: Vec<RowSpan>,
    slots: Vec<u32>,
    logit_tokens: Vec<u32>,
}

impl Flat {
    fn of(batch: &Batch) -> Self {
        let mut flat = Self::default();
        for row in &batch.rows {
            let first_token = flat.token_ids.len();
            match &row.tokens {
                RowTokens::Known(tokens) => flat.token_ids.extend_from_slice(tokens),
                RowTokens::LastDrawn => flat.token_ids.push(StepBatch::DRAWN | row.slot),
            }
            let n_tokens = row.tokens.len();
            flat.slots.push(row.slot);
            flat.spans.push(RowSpan { first_token, n_tokens, first_position: row.first_position });
            let wanted = first_token + row.logits_from..first_token + n_tokens;
            flat.logit_tokens.extend(wanted.map(|t| u32::try_from(t).expect("a step has fewer than 2^32 tokens")));
        }
        flat
    }
}

impl<B: Backend> Executor for LocalExecutor<B> {
    fn info(&self) -> &ExecutorInfo {
        &self.info
    }

    fn forward(&mut self, batch: &Batch) -> Result<(), KernelError> {
        self.update_slots(batch);
        for (cache, copies) in self.caches.iter_mut().zip(&batch.copies) {
            if !copies.is_empty() {
                self.backend.copy_blocks(cache, copies);
            }
        }
        let flat = Flat::of(batch);
        let step = self.backend.prepare(&StepBatch {
            token_ids: &flat.token_ids,
            rows: &flat.spans,
            slots: &flat.slots,
            logit_tokens: &flat.logit_tokens,
        })?;
        let Self { backend, decoder, caches, .. } = self;
        backend.capture(&step, &mut |backend| decoder.forward(backend, &step, caches));
        self.forwarded = (batch.step, batch.samples.clone());
        Ok(())
    }

    fn sample(&mut self, step: StepId, masks: &Masks) -> Result<(), KernelError> {
        let (forwarded, samples) = std::mem::take(&mut self.forwarded);
        assert_eq!(step, forwarded, "samples are queued right after their forward");
        let scoring = |n_top| SampleParams { logprobs: Some(n_top), ..SampleParams::default() };
        // One set of parameters for each score; draws use their slots'.
        let params: Vec<Option<SampleParams>> = samples
            .iter()
            .map(|s| match s.kind {
                SampleKind::Score { n_top, .. } => Some(scoring(n_top)),
                SampleKind::Draw => None,
            })
            .collect();
        let requests: Vec<_> = samples
            .iter()
            .enumerate()
            .map(|(i, sample)| {
                let slot = &self.slots[sample.slot as usize];
                let forced = match sample.kind {
                    SampleKind::Score { token, .. } => Some(token),
                    SampleKind::Draw => None,
                };
                SampleRequest {
                    logit: sample.logit,
                    slot: sample.slot,
                    params: params[i].as_ref().unwrap_or(&slot.params),
                    position: sample.position,
                    forced,
                    prompt: &slot.prompt,
                    output: &slot.output,
                    mask: masks[i].as_ref(),
                }
            })
            .collect();
        let n_vocab = self.info.n_vocab;
        let pending = self.backend.sample(self.decoder.logits(), n_vocab, &requests);
        self.pending.push_back((step, samples, pending));
        Ok(())
    }

    fn collect(&mut self, step: StepId) -> Result<StepOutput, KernelError> {
        let (oldest, samples, pending) = self.pending.pop_front().expect("collect follows sample");
        assert_eq!(oldest, step, "steps are collected in order");
        let sampled = self.backend.collect(pending)?;
        for (sample, drawn) in samples.iter().zip(&sampled) {
            if sample.kind == SampleKind::Draw && self.info.depth == 0 {
                self.slots[sample.slot as usize].output.push(drawn.token);
            }
        }
        Ok(StepOutput { step, sampled })
    }
}
