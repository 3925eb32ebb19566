//! The error object, and the error of one request parameter.

use std::fmt;

use serde::{Deserialize, Serialize};

/// `{"error": {...}}`, the body of every answer that is not a success.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ErrorResponse {
    /// The error.
    pub error: ErrorBody,
}

/// What went wrong, in vLLM's shape: `code` is the HTTP status.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ErrorBody {
    /// For people.
    pub message: String,
    /// The class of error, such as `BadRequestError`.
    #[serde(rename = "type")]
    pub kind: String,
    /// Path of the parameter at fault, such as `messages[2].content`.
    pub param: Option<String>,
    /// The HTTP status.
    pub code: u16,
}

/// A request parameter that cannot be served. Always the client's fault, always 400.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FieldError {
    /// Path of the parameter; empty if the request as a whole is at fault.
    pub param: String,
    /// What is wrong with it, a full sentence.
    pub message: String,
}

impl FieldError {
    /// An error of the parameter at `param`.
    pub fn new(param: impl Into<String>, message: impl Into<String>) -> Self {
        Self { param: param.into(), message: message.into() }
    }
}

impl fmt::Display for FieldError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for FieldError {}
