//! Why a request is not served. What status each becomes is [`crate::http::error`]'s business.

use kwire_protocol::openai::FieldError;

use crate::link::Lost;
use crate::text::template::TemplateError;
use crate::text::tokenizer::TokenizerError;

/// Which bound of admission was reached; the metric's label.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Rejection {
    /// `max_num_queued_reqs`
    Requests,
    /// `max_num_queued_tokens`
    Tokens,
}

impl Rejection {
    /// vLLM's name for it.
    pub fn label(self) -> &'static str {
        match self {
            Self::Requests => "max_num_queued_reqs",
            Self::Tokens => "max_num_queued_tokens",
        }
    }
}

/// Why a request is not served, or not to its end.
#[derive(Debug, thiserror::Error)]
pub enum ServiceError {
    /// A parameter is wrong.
    #[error("{0}")]
    Field(#[from] FieldError),
    /// Another model is served here.
    #[error("The model `{0}` does not exist.")]
    UnknownModel(String),
    /// The template refused the messages.
    #[error("{0}")]
    Template(#[from] TemplateError),
    /// The text cannot be tokenized.
    #[error("{0}")]
    Tokenizer(#[from] TokenizerError),
    /// The model is not there yet.
    #[error("The model is still loading.")]
    Loading,
    /// The server is about to end.
    #[error("The server is shutting down.")]
    Draining,
    /// Too much is accepted already.
    #[error("The server is at capacity ({}); try again in {retry_after_s} s.", .rejection.label())]
    Overloaded {
        /// The bound that was reached.
        rejection: Rejection,
        /// When there may be room.
        retry_after_s: u64,
    },
    /// The engine failed this request.
    #[error("{0}")]
    Engine(String),
    /// The engine thread is gone.
    #[error("The engine has stopped.")]
    EngineStopped,
}

impl From<Lost> for ServiceError {
    fn from(lost: Lost) -> Self {
        match lost {
            Lost::EngineStopped => Self::EngineStopped,
            Lost::ShuttingDown => Self::Draining,
        }
    }
}
