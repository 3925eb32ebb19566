//! OpenAI's API, with vLLM's extensions.

pub mod chat;
pub mod common;
pub mod completions;
pub mod error;
pub mod fields;
pub mod logprobs;
pub mod models;
pub mod reader;
pub mod tokenize;
pub mod usage;

pub use chat::ChatRequest;
pub use common::Common;
pub use completions::{CompletionRequest, Prompt};
pub use error::{ErrorBody, ErrorResponse, FieldError};
pub use fields::{Class, Endpoint, FIELDS};
pub use reader::Fields;
pub use usage::Usage;
