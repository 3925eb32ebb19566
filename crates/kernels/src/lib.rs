//! The operations a decoder is made of, and the memory they work on.
//!
//! [`Backend`] is the contract: fused operations over opaque tensors that only *enqueue* work. [`cpu::CpuBackend`]
//! implements it on the processor. One folder per operation holds its contract (`mod.rs`), a slow readable
//! `reference.rs`, and the fast paths, each tested against the reference; small operations are one file.
//!
//! Invariants:
//! - This crate knows no request, no model family and no text. It is the only one that may use `unsafe`.
//! - A row's result does not depend on the other rows of its batch: one reduction order for every batch size.
//! - Accumulation is in f32 (or exact integers), whatever the storage format.

pub mod activation;
pub mod aligned;
pub mod backend;
pub mod cpu;
#[cfg(feature = "cuda")]
pub mod cuda;
pub mod dequantize;
pub mod dtype;
pub mod file_map;
pub mod kv_cache;
pub mod linear;
pub mod norm;
pub mod paged_attention;
pub mod rope;
pub mod sample;
#[cfg(test)]
mod testing;

pub use aligned::AlignedBuf;
pub use backend::{
    Activation, AttentionOp, Backend, BlockCopy, KernelError, KvDtype, KvLayout, Rope, RopePairing, RowSpan,
    SampleParams, SampleRequest, Sampled, StepBatch, StepLimits, StepShape, TensorRole, TokenLogprobs, TokenMask,
    WeightPart,
};
pub use dtype::DType;
pub use file_map::FileMap;
