//! `POST /tokenize` and `POST /detokenize`.

use serde::{Deserialize, Serialize};

/// The answer of `/tokenize`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TokenizeResponse {
    /// Number of tokens.
    pub count: usize,
    /// Tokens in prompt and answer at most.
    pub max_model_len: usize,
    /// The tokens.
    pub tokens: Vec<u32>,
    /// Their names in the vocabulary, if asked for.
    pub token_strs: Option<Vec<String>>,
}

/// The answer of `/detokenize`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DetokenizeResponse {
    /// The text.
    pub prompt: String,
}
