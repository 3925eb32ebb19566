//! The API server in front of one engine: OpenAI's HTTP API as vLLM serves it.
//!
//! - [`service`] turns a request into a stream of chunks and knows no HTTP.
//! - [`text`] is tokens to text and back: tokenizer, detokenizer, stop strings, chat templates.
//! - [`http`] is routes, status codes and the wire.
//! - [`link`] connects requests with the engine thread: commands out, one channel of step reports in.
//!
//! Invariants: every accepted request ends in exactly one terminal event; a request that nobody reads any more is ended
//! in the engine at once; every queue is bounded by open connections or admission; time and randomness are passed in
//! ([`Ambient`]).

pub mod admission;
pub mod ambient;
pub mod config;
pub mod error;
pub mod health;
pub mod http;
pub mod link;
pub mod metrics;
pub mod model;
pub mod server;
pub mod service;
pub mod text;

pub use ambient::Ambient;
pub use config::ServerConfig;
pub use error::ServiceError;
pub use link::{ReportReceiver, report_channel};
pub use model::{Capacity, ModelContext};
pub use server::Server;

/// Locks, also after a panic elsewhere: every critical section of this crate leaves its data whole.
fn lock<T>(mutex: &std::sync::Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}
