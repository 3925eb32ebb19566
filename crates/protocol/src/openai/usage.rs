//! Token counts.

use serde::{Deserialize, Serialize};

/// Tokens that a request used.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Usage {
    /// Tokens of the prompts.
    pub prompt_tokens: usize,
    /// Both.
    pub total_tokens: usize,
    /// Tokens generated, over all choices.
    pub completion_tokens: usize,
    /// Details, where the server is configured to tell.
    pub prompt_tokens_details: Option<PromptTokensDetails>,
}

/// How many tokens of the prompt came from the prefix cache.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PromptTokensDetails {
    /// Tokens found in the cache.
    pub cached_tokens: usize,
}

impl Usage {
    /// Usage of `prompt` and `completion` tokens.
    pub fn new(prompt: usize, completion: usize) -> Self {
        Self {
            prompt_tokens: prompt,
            total_tokens: prompt + completion,
            completion_tokens: completion,
            prompt_tokens_details: None,
        }
    }
}
