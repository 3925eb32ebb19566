//! What the engine says after each step.

use kwire_kernels::TokenLogprobs;

use crate::{RequestId, Seconds};

/// Why a sequence ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum FinishReason {
    /// A stop token was drawn (it is the last of the tokens reported), or the caller stopped the sequence.
    Stop {
        /// The stop token, if one was drawn.
        token: Option<u32>,
    },
    /// `max_tokens` or the model's length was reached.
    Length,
    /// Aborted by the caller.
    Abort,
    /// The sequence cannot go on; the message says why. Other requests are not affected.
    Error(String),
}

impl FinishReason {
    /// What answers and metrics call it.
    pub fn label(&self) -> &'static str {
        match self {
            Self::Stop { .. } => "stop",
            Self::Length => "length",
            Self::Abort => "abort",
            Self::Error(_) => "error",
        }
    }
}

/// One thing that happened to one request. Sequences are numbered from 0 to `n - 1`.
#[derive(Debug, Clone, PartialEq)]
pub enum Event {
    /// The request left the queue for the first time.
    Started {
        /// Whose.
        id: RequestId,
        /// Prompt tokens whose keys and values were found in the prefix cache.
        cached_tokens: usize,
    },
    /// Log-probabilities of the prompt's tokens from the second on, complete, before the first token.
    PromptLogprobs {
        /// Whose.
        id: RequestId,
        /// One per prompt token after the first.
        logprobs: Vec<TokenLogprobs>,
    },
    /// A sequence grew.
    Tokens {
        /// Whose.
        id: RequestId,
        /// Which sequence.
        sequence: u32,
        /// At least one token.
        tokens: Vec<u32>,
        /// One per token if the request asked for them, else empty.
        logprobs: Vec<TokenLogprobs>,
    },
    /// A sequence ended. Nothing follows for it.
    Finished {
        /// Whose.
        id: RequestId,
        /// Which sequence.
        sequence: u32,
        /// Why.
        reason: FinishReason,
    },
    /// All sequences ended: the terminal event of the request, exactly one.
    Done {
        /// Whose.
        id: RequestId,
        /// How often it was preempted.
        preemptions: u32,
    },
}

/// Load and counters of the engine. Counters are totals since the start.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct StepStats {
    /// Steps run.
    pub steps: u64,
    /// Sequences that hold cache.
    pub running: usize,
    /// Requests that wait for their first or next admission.
    pub waiting: usize,
    /// Prompt tokens of the waiting requests.
    pub waiting_tokens: usize,
    /// Share of cache blocks in use by running sequences, 0 to 1.
    pub kv_usage: f64,
    /// Tokens computed in the last step.
    pub batch_tokens: usize,
    /// Total preemptions.
    pub preemptions: u64,
    /// Total prompt tokens looked up in the prefix cache.
    pub prefix_queries: u64,
    /// Total prompt tokens found there.
    pub prefix_hits: u64,
    /// Total prompt tokens admitted, cached or not.
    pub prompt_tokens: u64,
    /// Total tokens generated.
    pub generation_tokens: u64,
}

/// One step's events and the load after it.
#[derive(Debug, Clone, PartialEq)]
pub struct StepReport {
    /// When the step was committed.
    pub now: Seconds,
    /// What happened, in order.
    pub events: Vec<Event>,
    /// Load and counters.
    pub stats: StepStats,
    /// Changes of the set of prefixes that the cache holds: who applies all reports in order has the set.
    pub prefixes: Vec<PrefixChange>,
}

/// A prefix became available or was lost; see [`crate::PrefixTag`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PrefixChange {
    /// The first block with this id was stored.
    Stored(u64),
    /// The last block with this id was evicted.
    Evicted(u64),
}
