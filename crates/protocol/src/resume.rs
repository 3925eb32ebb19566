//! The internal request field `kwire`, between gateway and server: resume, prefix names, reporting.
//!
//! A gateway that asks for `report` finds an object `kwire` in each chunk that carries tokens ([`ChunkReport`]),
//! records it, and strips it before the client sees it. When the replica goes, it sends the same request with
//! [`Resume`] to another one, which continues the stream with exactly the text that is missing.

use serde::{Deserialize, Serialize};

/// Prefix names in a request at most: one for every 128 tokens of a context of 131,072.
pub const MAX_PREFIXES: usize = 1024;

/// The value of the request field `kwire`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Internal {
    /// Whether chunks that carry tokens also carry a [`ChunkReport`].
    pub report: bool,
    /// Continue a stream begun elsewhere.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub resume: Option<Resume>,
    /// The gateway's names for prefixes of the canonical text ([`crate::prefix`]), ascending by `end`, at most
    /// [`MAX_PREFIXES`].
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub prefixes: Vec<PrefixName>,
}

/// What one server must know to continue another's stream. Only for one prompt and `n = 1`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Resume {
    /// The prompt as the first server tokenized it.
    pub prompt_token_ids: Vec<u32>,
    /// All tokens generated so far that the gateway knows of.
    pub output_token_ids: Vec<u32>,
    /// The seed the first server used.
    pub seed: u64,
    /// Characters (Unicode scalar values) of generated text that the client already has.
    pub sent_chars: usize,
    /// The id of the stream, so that its chunks go on to carry it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub id: Option<String>,
    /// The `created` of the stream.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub created: Option<u64>,
}

/// "The first `end` characters of the canonical text are the text I call `id`."
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PrefixName {
    /// The gateway's chained hash.
    pub id: u64,
    /// Characters of the canonical text (tokens, if the prompt is given as token ids).
    pub end: usize,
}

/// What a chunk tells the gateway.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ChunkReport {
    /// The tokens read since the last chunk of the choice. The end of their text may still be held back.
    pub token_ids: Vec<u32>,
    /// On the first such chunk of a choice: the seed in use.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub seed: Option<u64>,
    /// On the first such chunk of a choice: the prompt.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub prompt_token_ids: Option<Vec<u32>>,
}
