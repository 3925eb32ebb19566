//! OpenAI's API, with vLLM's extensions.

pub mod answer;
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

pub use answer::Answer;
pub use chat::ChatRequest;
pub use common::Common;
pub use completions::{CompletionRequest, Prompt};
pub use error::{ErrorBody, ErrorResponse, FieldError};
pub use fields::{Class, Endpoint, FIELDS};
pub use reader::Fields;
pub use tokenize::{DetokenizeRequest, TokenizeRequest};
pub use usage::Usage;
