//! The inference engine: one thread that schedules, runs and commits steps over a paged KV cache.
//!
//! The loop in [`engine`] is the architecture. The engine sees token ids, never text; it knows no HTTP, no async runtime,
//! no environment variable and no clock (`now` is passed in, in seconds).

pub mod batch;
pub mod cache;
pub mod config;
pub mod constraint;
pub mod engine;
pub mod events;
pub mod executor;
pub mod handle;
pub mod model;
pub mod plan;
pub mod request;
mod scheduler;
mod sequence;
mod step;

pub use config::{Bytes, ConfigError, SchedulerConfig, SchedulingPolicy};
pub use constraint::Constraint;
pub use engine::Engine;
pub use events::{Event, FinishReason, PrefixChange, StepReport, StepStats};
pub use handle::{Command, EngineHandle, EngineStopped, Inspection, ReportSink};
pub use kwire_kernels::{SampleParams, TokenLogprobs, TokenMask};
pub use request::{PrefixTag, Request, RequestId, StopParams};

/// Seconds on a clock that never goes back; only differences mean anything.
pub type Seconds = f64;
