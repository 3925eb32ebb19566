//! The processor backend: [`Pool`] of worker threads, detected instruction sets, and the operations on them.

pub(crate) mod lanes;
pub(crate) mod par;

pub mod isa;
pub mod pool;
pub mod step;

pub use isa::Isa;
pub use pool::Pool;
