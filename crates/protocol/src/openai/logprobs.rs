//! Log-probabilities, in the shapes of chat, of completions, and of vLLM's `prompt_logprobs`.

use std::collections::BTreeMap;

use serde::Serialize;

/// Chat: `choices[].logprobs`.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct ChatLogprobs {
    /// One per token.
    pub content: Vec<ChatTokenLogprob>,
}

/// Chat: one generated token.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ChatTokenLogprob {
    /// The token itself.
    #[serde(flatten)]
    pub token: TokenLogprob,
    /// The best tokens at this position, best first.
    pub top_logprobs: Vec<TokenLogprob>,
}

/// A token and its log-probability.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct TokenLogprob {
    /// Its text, lossy where it is part of a character.
    pub token: String,
    /// Natural logarithm.
    pub logprob: f32,
    /// Its exact bytes.
    pub bytes: Vec<u8>,
}

/// Completions: `choices[].logprobs`, four lists of equal length.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct CompletionLogprobs {
    /// Characters from the start of the choice's text to the token.
    pub text_offset: Vec<usize>,
    /// One per token; none for the prompt's first.
    pub token_logprobs: Vec<Option<f32>>,
    /// The tokens' texts.
    pub tokens: Vec<String>,
    /// The best tokens and the one taken.
    pub top_logprobs: Vec<Option<serde_json::Map<String, serde_json::Value>>>,
}

/// vLLM's `prompt_logprobs`: per prompt token, by token id; none for the first.
pub type PromptLogprobs = Vec<Option<BTreeMap<u32, PromptLogprob>>>;

/// One entry of [`PromptLogprobs`].
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct PromptLogprob {
    /// Natural logarithm.
    pub logprob: f32,
    /// 1 is the best.
    pub rank: u32,
    /// The token's text.
    pub decoded_token: String,
}
