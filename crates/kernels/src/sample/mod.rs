//! Drawing tokens from logits.
//!
//! Order of operations, that of vLLM (`v1/sample/sampler.py`, `v1/sample/ops/{penalties,topk_topp_sampler}.py`):
//!
//! 1. log-probabilities of the raw logits, where wanted;
//! 2. mask (others to -inf), bias (added), repetition penalty (over prompt and output; positive logits divided, others
//!    multiplied), then for tokens of the output `- frequency * count - presence`;
//! 3. temperature below 1e-5: the best token. Otherwise logits / temperature, and of the tokens those are kept that
//!    min-p (probability at least `min_p` times the best's), then top-k, then top-p (over the rest, renormalized: the
//!    smallest set of best tokens that reaches `top_p`) leave; one is drawn in proportion to its probability.
//!
//! Tokens of equal logits are ordered by id everywhere (vLLM keeps all ties at the edge of top-k; here top-k keeps
//! exactly k, so that top-k 1 is greedy).
//!
//! The draw is the inverse of the cumulative distribution in the order of ids at a number that is a pure function of
//! (seed, position); see [`random`]. It does not depend on the batch or the instruction set.

mod cpu;
pub mod random;
pub mod reference;
mod scan;
mod select;

pub(crate) use cpu::{SampleScratch, sample};

/// Temperatures below this are greedy (vLLM's `_SAMPLING_EPS`).
pub const GREEDY_BELOW: f32 = 1e-5;

#[cfg(test)]
mod tests;
