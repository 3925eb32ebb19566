//! The processor backend: [`Pool`] of worker threads, detected instruction sets, and the operations on them.

pub mod isa;
pub mod pool;

pub use isa::Isa;
pub use pool::Pool;
