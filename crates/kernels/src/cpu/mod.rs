//! The processor backend: [`Pool`] of worker threads, detected instruction sets, and the operations on them.

pub mod pool;

pub use pool::Pool;
