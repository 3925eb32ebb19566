//! The envelope of every answer: whole or a chunk of a stream, of chat or completions.

use serde::Serialize;

use super::Usage;
use super::logprobs::PromptLogprobs;
use crate::resume::ChunkReport;

/// An answer, or a chunk of one, whose choices are of type `C`.
#[derive(Debug, Serialize)]
pub struct Answer<'a, C> {
    /// `chatcmpl-...` or `cmpl-...`
    pub id: &'a str,
    /// `chat.completion`, `chat.completion.chunk`, or `text_completion` for both a completion and its chunks.
    pub object: &'static str,
    /// Seconds since 1970.
    pub created: u64,
    /// The model's name, as the client wrote it.
    pub model: &'a str,
    /// One per prompt and sequence; in a chunk those that grew, none in the usage chunk.
    pub choices: &'a [C],
    /// Token counts.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub usage: Option<Usage>,
    /// Log-probabilities of the prompt; of chat only, completions have them per choice.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prompt_logprobs: Option<PromptLogprobs>,
    /// The prompt's tokens, if asked for; of chat only, in the whole answer or the first chunk.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prompt_token_ids: Option<&'a [u32]>,
    /// For the gateway.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kwire: Option<&'a ChunkReport>,
}

/// Why a text ended, beyond `finish_reason`: the stop string, or a stop token of the request.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(untagged)]
pub enum StopReason {
    /// A stop string.
    Text(String),
    /// A token of `stop_token_ids`.
    Token(u32),
}
