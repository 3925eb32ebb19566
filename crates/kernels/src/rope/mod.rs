//! Rotary embedding of queries and keys, and writing keys and values to the paged cache, in one pass over the merged
//! rows `[q | k | v]`.
//!
//! Per head of q and k: RMS norm (where the model has one), then for each pair `(a, b)` at angle `position * inv_freq`:
//! `(a cos - b sin, b cos + a sin)` (Su et al. 2021, <https://arxiv.org/abs/2104.09864>). As in Hugging Face's
//! `LlamaRotaryEmbedding` the angle is an f32 product; its cosine and sine are correctly rounded.

mod cpu;
pub mod reference;
mod table;

pub(crate) use cpu::{RopeWrite, rope_write_kv};
pub use table::RopeTable;

#[cfg(test)]
mod tests;
