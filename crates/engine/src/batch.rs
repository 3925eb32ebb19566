//! What one step computes and what came of it: plain data, the same for every executor.
//!
//! A *slot* is a place in the executor's memory of running sequences: it keeps a sequence's block tables and sampling
//! state from step to step, so that a batch carries only what changed.

use std::sync::Arc;

use kwire_kernels::{BlockCopy, SampleParams, Sampled, TokenMask};

/// Number of a step; steps are consecutive.
pub type StepId = u64;
/// Index of a slot, below `max_num_seqs`.
pub type Slot = u32;

/// One step.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Batch {
    /// Which step.
    pub step: StepId,
    /// Slots that a sequence takes with this step, before anything else.
    pub starts: Vec<SlotStart>,
    /// Changes of block tables.
    pub tables: Vec<TableUpdate>,
    /// Block copies per KV group, made before the forward.
    pub copies: Vec<Vec<BlockCopy>>,
    /// What to compute.
    pub rows: Vec<Row>,
    /// What to do with the logits.
    pub samples: Vec<Sample>,
}

impl Batch {
    /// Tokens computed.
    pub fn n_tokens(&self) -> usize {
        self.rows.iter().map(|r| r.tokens.len()).sum()
    }
}

/// A sequence begins, or begins again after a preemption, in a slot.
#[derive(Debug, Clone, PartialEq)]
pub struct SlotStart {
    /// Which slot.
    pub slot: Slot,
    /// How its tokens are drawn, with the sequence's own seed.
    pub params: Arc<SampleParams>,
    /// Prompt, for penalties.
    pub prompt: Arc<[u32]>,
    /// Tokens generated before, for penalties.
    pub output: Vec<u32>,
}

/// Entries of a slot's block table in one group, from `start` on; what was there from `start` on is gone.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TableUpdate {
    /// Which slot.
    pub slot: Slot,
    /// Which KV group.
    pub group: usize,
    /// First entry that changed.
    pub start: usize,
    /// The entries from there.
    pub blocks: Vec<u32>,
}

/// Input of a row.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RowTokens {
    /// Tokens the host knows.
    Known(Vec<u32>),
    /// One token: the last one drawn for the slot, which may still be on its way to the host.
    LastDrawn,
}

impl RowTokens {
    /// Number of tokens, at least 1.
    #[allow(clippy::len_without_is_empty)]
    pub fn len(&self) -> usize {
        match self {
            Self::Known(tokens) => tokens.len(),
            Self::LastDrawn => 1,
        }
    }
}

/// Consecutive tokens of one sequence.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Row {
    /// Whose.
    pub slot: Slot,
    /// Position of the first token.
    pub first_position: usize,
    /// The tokens.
    pub tokens: RowTokens,
    /// Offsets into the row whose logits are wanted: `logits_from..len`.
    pub logits_from: usize,
}

/// A use of one wanted row of logits. Logits are numbered over the batch, rows in order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Sample {
    /// Which of the wanted logits.
    pub logit: usize,
    /// Whose; forked sequences share logits.
    pub slot: Slot,
    /// Position of the token in question.
    pub position: usize,
    /// What to do.
    pub kind: SampleKind,
}

/// What is done with a row of logits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SampleKind {
    /// Draw the next token.
    Draw,
    /// Report the log-probability of a known token and of the `n_top` best.
    Score {
        /// The known token.
        token: u32,
        /// Best tokens to report.
        n_top: u32,
    },
}

/// Masks of a batch's samples, in their order; `None`: all tokens allowed.
pub type Masks = Vec<Option<TokenMask>>;

/// Results of a step's samples, in their order.
#[derive(Debug, Clone, PartialEq)]
pub struct StepOutput {
    /// Which step.
    pub step: StepId,
    /// One for each sample.
    pub sampled: Vec<Sampled>,
}
