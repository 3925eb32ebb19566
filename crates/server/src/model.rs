//! What the server knows about the model it serves.

use std::sync::Arc;

use kwire_engine::model::checkpoint::GenerationDefaults;
use kwire_protocol::openai::models::{ModelCard, ModelList};

use crate::text::{ChatTemplate, Tokenizer};

/// The model, as far as text and limits go.
pub struct ModelContext {
    /// The names it is served under, at least one; the first is what answers call it if the client named none.
    pub names: Vec<String>,
    /// The checkpoint.
    pub root: String,
    /// Text to tokens and back.
    pub tokenizer: Arc<Tokenizer>,
    /// Messages to text; `None`: requests to chat are refused.
    pub template: Option<ChatTemplate>,
    /// Tokens in prompt and answer at most.
    pub max_model_len: usize,
    /// Rows of the output matrix: token ids lie below.
    pub n_vocab: usize,
    /// Tokens that end an answer.
    pub eos_token_ids: Vec<u32>,
    /// Sampling defaults, resolved: the checkpoint's, those given instead, or none.
    pub generation: GenerationDefaults,
    /// What the engine can hold.
    pub capacity: Capacity,
}

/// What the engine can hold.
#[derive(Debug, Clone, Default)]
pub struct Capacity {
    /// Sequences in a batch.
    pub max_num_seqs: usize,
    /// Tokens per cache block.
    pub block_size: usize,
    /// Cache blocks.
    pub n_blocks: usize,
    /// More labels of `vllm:cache_config_info`.
    pub cache_labels: Vec<(String, String)>,
}

impl Capacity {
    /// Tokens that the cache holds.
    pub fn kv_tokens(&self) -> usize {
        self.n_blocks * self.block_size
    }
}

impl ModelContext {
    /// `GET /v1/models`; `created` is when the server started.
    pub fn list(&self, created: u64) -> ModelList {
        let card = |name: &String| ModelCard {
            id: name.clone(),
            object: "model".to_owned(),
            created,
            owned_by: "kwire".to_owned(),
            root: self.root.clone(),
            parent: None,
            max_model_len: self.max_model_len,
        };
        ModelList { object: "list".to_owned(), data: self.names.iter().map(card).collect() }
    }
}
