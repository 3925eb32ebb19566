//! What the engine is asked to do, in tokens.

use std::sync::Arc;

use kwire_kernels::SampleParams;

use crate::{Constraint, Seconds};

/// Identifies a request among the live ones; chosen by the caller.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RequestId(pub u64);

/// When a sequence ends.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct StopParams {
    /// Tokens to generate at most, those of [`Request::resumed`] counted in.
    pub max_tokens: usize,
    /// No stop token is drawn before this many.
    pub min_tokens: usize,
    /// Any of these ends the sequence with [`crate::FinishReason::Stop`]; end-of-text ids are in here unless the
    /// request ignores them.
    pub stop_token_ids: Vec<u32>,
}

/// A point of the prompt's text that a gateway named: "the first `end_token` tokens are the text hashed to `id`".
///
/// The gateway does not tokenize; the engine tags the block that holds the last of those tokens and reports in
/// these ids what it holds and what it evicts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PrefixTag {
    /// The gateway's chained hash of the request text up to here.
    pub id: u64,
    /// Tokens that this text covers.
    pub end_token: usize,
}

/// One request: a prompt, and `n` sequences that continue it.
pub struct Request {
    /// Identity; unique among the live requests.
    pub id: RequestId,
    /// Prompt tokens, at least one.
    pub prompt: Arc<[u32]>,
    /// Tokens already generated elsewhere, before the request was moved here (only with `n == 1`).
    pub resumed: Vec<u32>,
    /// Sequences to generate; they share the prompt's blocks.
    pub n: u32,
    /// How tokens are drawn. Sequence `i` draws with the seed of [`Request::sequence_seed`].
    pub sampling: SampleParams,
    /// When sequences end.
    pub stop: StopParams,
    /// Under the priority policy the lowest value runs first.
    pub priority: i32,
    /// When the request reached the server.
    pub arrival: Seconds,
    /// Report log-probabilities of the prompt's tokens with this many best alternatives.
    pub prompt_logprobs: Option<u32>,
    /// Separates prefix caches of tenants that must not see each other's timing.
    pub cache_salt: Option<String>,
    /// The gateway's names for prefixes of this prompt, ascending by `end_token`.
    pub prefix_tags: Vec<PrefixTag>,
    /// Structured output.
    pub constraint: Option<Box<dyn Constraint>>,
}

impl Request {
    /// One sequence with default sampling, and nothing else asked for.
    pub fn new(id: RequestId, prompt: Arc<[u32]>, max_tokens: usize) -> Self {
        Self {
            id,
            prompt,
            resumed: Vec::new(),
            n: 1,
            sampling: SampleParams::default(),
            stop: StopParams { max_tokens, ..StopParams::default() },
            priority: 0,
            arrival: 0.0,
            prompt_logprobs: None,
            cache_salt: None,
            prefix_tags: Vec::new(),
            constraint: None,
        }
    }

    /// Seed of sequence `index`: the request's own for the first, so that `n` does not change it.
    pub fn sequence_seed(seed: u64, index: u32) -> u64 {
        seed.wrapping_add(u64::from(index).wrapping_mul(0x9E37_79B9_7F4A_7C15))
    }
}
