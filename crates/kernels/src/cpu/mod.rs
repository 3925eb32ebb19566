//! The processor backend: [`Pool`] of worker threads, detected instruction sets, and the operations on them.

pub(crate) mod lanes;
pub(crate) mod par;

pub mod backend;
pub mod isa;
pub mod pool;
pub mod step;

pub use backend::{CpuBackend, CpuTensor};
pub use isa::Isa;
pub use pool::Pool;
