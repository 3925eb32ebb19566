//! `POST /tokenize` and `POST /detokenize`.

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::chat::ChatPrompt;
use super::{FieldError, Fields};

/// What to tokenize.
#[derive(Debug, Clone)]
pub enum Input {
    /// Text.
    Prompt(String),
    /// Messages, through the template.
    Chat(ChatPrompt),
}

/// A parsed request to `/tokenize`.
#[derive(Debug, Clone)]
pub struct TokenizeRequest {
    /// The model's name; absent: whatever is served.
    pub model: Option<String>,
    /// What to tokenize.
    pub input: Input,
    /// Whether the tokenizer adds its special tokens; absent: to a prompt, not to messages.
    pub add_special_tokens: Option<bool>,
    /// Whether to return the tokens' names.
    pub return_token_strs: bool,
}

impl TokenizeRequest {
    /// Reads a request body. Messages win over a prompt.
    pub fn parse(body: &Value) -> Result<Self, FieldError> {
        let fields = Fields::root(body)?;
        let required = || FieldError::new("prompt", "`prompt` is required.");
        let input = match fields.value("messages") {
            Some(_) => Input::Chat(ChatPrompt::parse(&fields)?),
            None => Input::Prompt(fields.str("prompt")?.ok_or_else(required)?.to_owned()),
        };
        Ok(Self {
            model: fields.str("model")?.map(str::to_owned),
            input,
            add_special_tokens: fields.bool("add_special_tokens")?,
            return_token_strs: fields.bool("return_token_strs")?.unwrap_or(false),
        })
    }
}

/// A parsed request to `/detokenize`.
#[derive(Debug, Clone)]
pub struct DetokenizeRequest {
    /// The model's name; absent: whatever is served.
    pub model: Option<String>,
    /// The tokens.
    pub tokens: Vec<u32>,
}

impl DetokenizeRequest {
    /// Reads a request body.
    pub fn parse(body: &Value) -> Result<Self, FieldError> {
        let fields = Fields::root(body)?;
        let required = || FieldError::new("tokens", "`tokens` is required.");
        let tokens = fields.token_ids("tokens")?.ok_or_else(required)?;
        Ok(Self { model: fields.str("model")?.map(str::to_owned), tokens })
    }
}

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
