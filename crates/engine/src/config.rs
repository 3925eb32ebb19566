//! The engine's configuration, already resolved: what the command line says with defaults filled in.

/// Order in which waiting requests are admitted, and who is preempted (the last in that order).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum SchedulingPolicy {
    /// First come, first served.
    #[default]
    Fcfs,
    /// Lowest `priority` first, then first come.
    Priority,
}

/// Limits and policies of the scheduler. Names follow vLLM's flags.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SchedulerConfig {
    /// Sequences that run side by side at most.
    pub max_num_seqs: usize,
    /// Tokens of one step at most.
    pub max_num_batched_tokens: usize,
    /// Tokens of one sequence at most, prompt and output.
    pub max_model_len: usize,
    /// A prompt may be computed in several steps.
    pub chunked_prefill: bool,
    /// Tokens of one prompt in one step at most; 0: no limit of its own.
    pub long_prefill_token_threshold: usize,
    /// Reuse the cache of equal prefixes.
    pub prefix_caching: bool,
    /// Who comes first.
    pub policy: SchedulingPolicy,
}

/// A configuration that cannot work, and what would.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs)]
pub enum ConfigError {
    #[error("--max-num-seqs must be at least 1")]
    NoSequences,
    #[error("--max-num-batched-tokens ({tokens}) must be at least --max-num-seqs ({seqs})")]
    BudgetBelowSequences { tokens: usize, seqs: usize },
    #[error(
        "without chunked prefill --max-num-batched-tokens ({tokens}) must be at least --max-model-len ({len}); raise it or \
         drop --no-enable-chunked-prefill"
    )]
    BudgetBelowModelLen { tokens: usize, len: usize },
    #[error(
        "--long-prefill-token-threshold splits prompts, which --no-enable-chunked-prefill forbids: drop one of them"
    )]
    ThresholdWithoutChunks,
    #[error("--max-model-len must be at least 2")]
    NoLength,
    #[error("the model was made for {most} positions: --max-model-len can be at most that, not {len}")]
    ModelLenBeyondModel { len: usize, most: usize },
    #[error(
        "the KV cache holds {fits} tokens, fewer than --max-model-len ({len}): start with --max-model-len {fits} or give the \
         cache more memory with --kv-cache-memory-bytes {bytes}"
    )]
    ModelLenBeyondCache { len: usize, fits: usize, bytes: usize },
    #[error(
        "a KV cache of {} cannot hold {len} tokens: give it at least --kv-cache-memory-bytes {least} ({})",
        Bytes(*bytes), Bytes(*least)
    )]
    CacheTooSmall { bytes: usize, len: usize, least: usize },
    #[error(
        "the weights take {} and {} of memory are available: use a smaller or more quantized model, or a larger machine",
        Bytes(*weights), Bytes(*available)
    )]
    WeightsBeyondMemory { weights: usize, available: usize },
    #[error(
        "the weights take {} and the activations of a step {}, and {} of memory are available: lower \
         --max-num-batched-tokens ({tokens}) or --max-num-seqs ({seqs})",
        Bytes(*weights), Bytes(*activations), Bytes(*available)
    )]
    StepBeyondMemory { weights: usize, activations: usize, available: usize, tokens: usize, seqs: usize },
    #[error(
        "the weights take {}, the activations of a step {} and the KV cache {}, and {} of memory are available: start with \
         --kv-cache-memory-bytes {fits} ({}) or less",
        Bytes(*weights), Bytes(*activations), Bytes(*cache), Bytes(*available), Bytes(*fits)
    )]
    CacheBeyondMemory { weights: usize, activations: usize, cache: usize, available: usize, fits: usize },
}

/// A size for people.
#[derive(Debug, Clone, Copy)]
pub struct Bytes(pub usize);

impl std::fmt::Display for Bytes {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.0 as f64 {
            n if n >= 1e9 => write!(f, "{:.2} GB", n / 1e9),
            n => write!(f, "{:.1} MB", n / 1e6),
        }
    }
}

impl SchedulerConfig {
    /// Checks the limits against each other.
    pub fn validate(&self) -> Result<(), ConfigError> {
        if self.max_num_seqs == 0 {
            return Err(ConfigError::NoSequences);
        }
        if self.max_model_len < 2 {
            return Err(ConfigError::NoLength);
        }
        let (tokens, seqs, len) = (self.max_num_batched_tokens, self.max_num_seqs, self.max_model_len);
        if tokens < seqs {
            return Err(ConfigError::BudgetBelowSequences { tokens, seqs });
        }
        if !self.chunked_prefill && self.long_prefill_token_threshold > 0 {
            return Err(ConfigError::ThresholdWithoutChunks);
        }
        if !self.chunked_prefill && tokens < len {
            return Err(ConfigError::BudgetBelowModelLen { tokens, len });
        }
        Ok(())
    }

    /// Logits that one step can want: one for each sequence, and [`Self::MAX_SCORED_TOKENS`] prompt positions.
    pub fn max_logits(&self) -> usize {
        self.max_num_seqs + Self::MAX_SCORED_TOKENS
    }

    /// Prompt positions that one step scores at most (for log-probabilities of the prompt).
    pub const MAX_SCORED_TOKENS: usize = 64;

    /// Tokens of a sequence's next chunk when `todo` are left to compute and `budget` are left in the step.
    pub(crate) fn chunk_len(&self, todo: usize, budget: usize) -> usize {
        let threshold = self.long_prefill_token_threshold;
        let limit = if threshold > 0 && todo > 1 { threshold } else { usize::MAX };
        let chunk = todo.min(budget).min(limit);
        if chunk < todo && !self.chunked_prefill { 0 } else { chunk }
    }
}
