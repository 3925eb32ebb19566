//! `POST /v1/completions`.

use serde::Serialize;
use serde_json::Value;

use super::FieldError;
use super::answer::StopReason;
use super::common::Common;
use super::fields::Endpoint;
use super::logprobs::{CompletionLogprobs, PromptLogprobs};
use super::reader::{self, Fields};

/// One prompt.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Prompt {
    /// Text.
    Text(String),
    /// Tokens.
    Tokens(Vec<u32>),
}

/// A parsed request.
#[derive(Debug, Clone)]
pub struct CompletionRequest {
    /// What it shares with chat.
    pub common: Common,
    /// At least one prompt.
    pub prompts: Vec<Prompt>,
    /// Absent: 16. `Some(None)`: the client wrote `null`, the rest of the context. 0 only with `echo`.
    pub max_tokens: Option<Option<usize>>,
    /// Whether the text begins with the prompt.
    pub echo: bool,
    /// Log-probabilities with this many alternatives.
    pub logprobs: Option<u32>,
}

impl CompletionRequest {
    /// Reads a request body.
    pub fn parse(body: &Value, max_logprobs: u32) -> Result<Self, FieldError> {
        let fields = Fields::root(body)?;
        let common = Common::parse(&fields, Endpoint::Completions, max_logprobs)?;
        let echo = fields.bool("echo")?.unwrap_or(false);
        let max_tokens = match fields.map().get("max_tokens") {
            None => None,
            Some(_) => Some(fields.u32_from("max_tokens", u32::from(!echo))?.map(|n| n as usize)),
        };
        let logprobs = fields.integer("logprobs", 0..=i64::from(max_logprobs))?.map(|k| k as u32);
        Ok(Self { prompts: prompts(&fields)?, common, max_tokens, echo, logprobs })
    }
}

fn prompts(fields: &Fields<'_>) -> Result<Vec<Prompt>, FieldError> {
    let wrong = |param: &str| {
        let message = format!("`{param}` must be a string, a list of token ids, or a list of either.");
        FieldError::new(param, message)
    };
    let list = match fields.value("prompt") {
        None => return Err(FieldError::new("prompt", "`prompt` is required.")),
        Some(Value::String(text)) => return Ok(vec![Prompt::Text(text.clone())]),
        Some(Value::Array(list)) => list,
        Some(_) => return Err(wrong("prompt")),
    };
    match list.first() {
        None => Err(FieldError::new("prompt", "`prompt` must not be empty.")),
        Some(Value::Number(_)) => Ok(vec![Prompt::Tokens(reader::token_ids(list, "prompt")?)]),
        Some(_) => {
            let one = |(i, value): (usize, &Value)| match value {
                Value::String(text) => Ok(Prompt::Text(text.clone())),
                Value::Array(ids) => Ok(Prompt::Tokens(reader::token_ids(ids, &format!("prompt[{i}]"))?)),
                _ => Err(wrong(&format!("prompt[{i}]"))),
            };
            list.iter().enumerate().map(one).collect()
        }
    }
}

/// One text.
#[derive(Debug, Serialize)]
pub struct CompletionChoice<'a> {
    /// `prompt · n + sequence`.
    pub index: usize,
    /// The text, or what is new of it.
    pub text: &'a str,
    /// Log-probabilities.
    pub logprobs: Option<CompletionLogprobs>,
    /// `stop`, `length`, `abort`.
    pub finish_reason: Option<&'static str>,
    /// The stop string or token, unless it was the model's own.
    pub stop_reason: Option<&'a StopReason>,
    /// Log-probabilities of the prompt.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prompt_logprobs: Option<PromptLogprobs>,
    /// The tokens, if asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub token_ids: Option<&'a [u32]>,
    /// The prompt's tokens, if asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prompt_token_ids: Option<&'a [u32]>,
}
