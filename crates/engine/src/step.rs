//! A step under construction: the next chunks of sequences become rows and samples, within the step's budgets.

use crate::batch::{Batch, Row, RowTokens, Sample, SampleKind, Slot, SlotStart, StepId, TableUpdate};
use crate::config::SchedulerConfig;
use crate::sequence::{Sequence, SequenceId};

/// What a batch promises: who gets which result, and how far each sequence is computed once the step is done.
#[derive(Debug, Default)]
pub(crate) struct StepRecord {
    pub step: StepId,
    pub n_tokens: usize,
    /// Sequence of each sample, in order.
    pub samples: Vec<(SequenceId, SampleKind)>,
    /// `(sequence, its number of preemptions, tokens computed)` for each row, and for each fork made of one.
    pub computed: Vec<(SequenceId, u32, usize)>,
}

/// See the module's documentation.
pub(crate) struct Step {
    pub batch: Batch,
    record: StepRecord,
    /// Tokens left.
    pub budget: usize,
    /// Prompt positions that may still be scored.
    score_budget: usize,
    n_logits: usize,
    pub preempted: bool,
}

impl Step {
    /// An empty step with all its budgets.
    pub fn new(config: &SchedulerConfig, n_groups: usize) -> Self {
        Self {
            batch: Batch { copies: vec![Vec::new(); n_groups], ..Batch::default() },
            record: StepRecord::default(),
            budget: config.max_num_batched_tokens,
            score_budget: SchedulerConfig::MAX_SCORED_TOKENS,
            n_logits: 0,
            preempted: false,
        }
    }

    /// The batch and what it promises.
    pub fn finish(self, step: StepId, config: &SchedulerConfig) -> (Batch, StepRecord) {
        let n_tokens = self.batch.n_tokens();
        assert!(n_tokens <= config.max_num_batched_tokens, "the budget holds");
        assert!(self.n_logits <= config.max_logits(), "the logits fit");
        (Batch { step, ..self.batch }, StepRecord { step, n_tokens, ..self.record })
    }

    /// Whether the sequence takes part.
    pub fn includes(&self, id: SequenceId) -> bool {
        self.record.computed.iter().any(|c| c.0 == id)
    }

    /// Tokens of the sequence's next chunk; 0: it has to wait.
    pub fn chunk_len(&self, config: &SchedulerConfig, sequence: &Sequence) -> usize {
        // Scored prompts are computed in pieces even without chunked prefill: their logits take memory.
        if sequence.prompt_scores.is_some() && sequence.todo() > 1 {
            return sequence.todo().min(self.budget).min(self.score_budget);
        }
        config.chunk_len(sequence.todo(), self.budget)
    }

    /// Adds the sequence's next chunk, whose blocks are secured. True: it ends with a draw.
    pub fn add_row(&mut self, chunk: usize, sequence: &mut Sequence) -> bool {
        let (start, end) = (sequence.n_scheduled, sequence.n_scheduled + chunk);
        let draws = end == sequence.len();
        let tokens = if sequence.n_in_flight > 0 {
            debug_assert_eq!((chunk, end), (1, sequence.len()), "only the newest token may be unknown");
            RowTokens::LastDrawn
        } else {
            RowTokens::Known(sequence.tokens[start..end].to_vec())
        };
        let slot = self.start_and_update(sequence);
        sequence.n_scheduled = end;
        let scored = sequence.take_unscored(start..end);
        // Scored positions are the row's last, but for the one that is drawn from.
        let n_wanted = if scored.is_empty() { usize::from(draws) } else { end - scored.start };
        self.batch.rows.push(Row { slot, first_position: start, tokens, logits_from: chunk - n_wanted });
        self.budget -= chunk;
        self.score_budget -= scored.len();
        for (i, position) in scored.enumerate() {
            let n_top = sequence.prompt_scores.as_ref().expect("what is scored wants it").n_top;
            let kind = SampleKind::Score { token: sequence.tokens[position + 1], n_top };
            self.add_sample(sequence, self.n_logits + i, position + 1, kind);
        }
        self.n_logits += n_wanted;
        if draws {
            self.add_draw(sequence);
        }
        self.record.computed.push((sequence.id, sequence.preemptions, end));
        draws
    }

    /// Adds a sequence that has just forked: it draws from the logits that its parent, added last, draws from.
    pub fn add_fork(&mut self, fork: &mut Sequence) {
        self.start_and_update(fork);
        self.add_draw(fork);
        self.record.computed.push((fork.id, fork.preemptions, fork.n_scheduled));
    }

    fn add_draw(&mut self, sequence: &mut Sequence) {
        self.add_sample(sequence, self.n_logits - 1, sequence.len(), SampleKind::Draw);
        sequence.n_in_flight += 1;
    }

    fn add_sample(&mut self, sequence: &Sequence, logit: usize, position: usize, kind: SampleKind) {
        let slot = sequence.residency.as_ref().expect("running sequences are resident").slot;
        self.batch.samples.push(Sample { logit, slot, position, kind });
        self.record.samples.push((sequence.id, kind));
    }

    /// Tells the executor what it does not know of a sequence's slot and tables.
    fn start_and_update(&mut self, sequence: &mut Sequence) -> Slot {
        let output = sequence.tokens[sequence.prompt.len()..].to_vec();
        let residency = sequence.residency.as_mut().expect("running sequences are resident");
        let slot = residency.slot;
        if std::mem::take(&mut residency.fresh) {
            residency.dirty_from = 0;
            let (params, prompt) = (sequence.params.clone(), sequence.prompt.clone());
            self.batch.starts.push(SlotStart { slot, params, prompt, output });
        }
        for (group, table) in residency.tables.iter().enumerate() {
            if let Some(blocks @ [_, ..]) = table.blocks().get(residency.dirty_from..) {
                self.batch.tables.push(TableUpdate {
                    slot,
                    group,
                    start: residency.dirty_from,
                    blocks: blocks.to_vec(),
                });
            }
        }
        residency.dirty_from = residency.tables.iter().map(|t| t.blocks().len()).min().unwrap_or(0);
        slot
    }
}
