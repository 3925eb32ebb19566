//! Causal attention over the paged KV cache, for ragged rows: decodes and prefill chunks in one call.
//!
//! For each token and query head: `out = softmax(f(q · kᵀ * scale)) · v` over the visible tokens, where `f` is the
//! softcap or nothing. It is computed as FlashDecoding does (Dao et al. 2023): the context is cut into splits of
//! [`SPLIT`] tokens at *fixed absolute positions*; each split gives `(m, l, o)`, its greatest score, the sum of
//! `2^(s - m)` and the weighted sum of values; splits are merged in ascending order.
//!
//! Invariant: a token's output has the same bits in decode, in any chunk of prefill, in any batch, on any number of
//! workers and any instruction set. It holds because every number has one order of operations:
//! - a score is one chain of fma over the dimensions in ascending order;
//! - the greatest score does not depend on order; `l` is summed in lanes `token % 16`, ascending, then by halving;
//! - an element of `o` is one chain of fma over the split's tokens in ascending order, in which a masked token has the
//!   weight 0 and changes nothing;
//! - how splits are spread over workers decides only where they are computed.

mod cpu;
mod kernel;
#[cfg(feature = "cuda")]
pub(crate) mod plan;
pub mod reference;

pub(crate) use cpu::{Attention, AttentionScratch, paged_attention};

/// Tokens of a split. Small enough that a decode of a few hundred tokens of context keeps several workers busy and that
/// its keys fit the second-level cache, large enough that merging costs little.
pub const SPLIT: usize = 256;

#[cfg(test)]
mod tests;
