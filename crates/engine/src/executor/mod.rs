//! Runs batches. One trait, so that the local, the parallel and the simulated executor take the same [`Batch`].

pub mod local;
pub mod sim;

use kwire_kernels::KernelError;

use crate::batch::{Batch, Masks, StepId, StepOutput};
use crate::cache::groups::KvGroup;

/// The memory and depth of an executor, which the scheduler plans by.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExecutorInfo {
    /// Shape of the cache.
    pub groups: Vec<KvGroup>,
    /// Blocks of each group.
    pub n_blocks: Vec<usize>,
    /// Tokens in the vocabulary.
    pub n_vocab: usize,
    /// Steps that may be queued before the results of an earlier one are collected: 0 on a CPU, 1 on a GPU.
    pub depth: usize,
}

/// Runs steps in order. For each step: `forward`, `sample`, and up to [`ExecutorInfo::depth`] steps later `collect`.
pub trait Executor: Send {
    /// Memory and depth.
    fn info(&self) -> &ExecutorInfo;
    /// Queues the forward of a batch; may return before it has run.
    fn forward(&mut self, batch: &Batch) -> Result<(), KernelError>;
    /// Queues the draws of the batch that was forwarded last.
    fn sample(&mut self, step: StepId, masks: &Masks) -> Result<(), KernelError>;
    /// Waits for the results of the oldest step not collected.
    fn collect(&mut self, step: StepId) -> Result<StepOutput, KernelError>;
}

impl<E: Executor + ?Sized> Executor for Box<E> {
    fn info(&self) -> &ExecutorInfo {
        (**self).info()
    }
    fn forward(&mut self, batch: &Batch) -> Result<(), KernelError> {
        (**self).forward(batch)
    }
    fn sample(&mut self, step: StepId, masks: &Masks) -> Result<(), KernelError> {
        (**self).sample(step, masks)
    }
    fn collect(&mut self, step: StepId) -> Result<StepOutput, KernelError> {
        (**self).collect(step)
    }
}
