//! `GET /v1/models`.

use serde::{Deserialize, Serialize};

/// The list of models.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ModelList {
    /// Always `list`.
    pub object: String,
    /// The models.
    pub data: Vec<ModelCard>,
}

/// One name under which the model is served.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ModelCard {
    /// The name.
    pub id: String,
    /// Always `model`.
    pub object: String,
    /// When the server started, in seconds since 1970.
    pub created: u64,
    /// Who serves it.
    pub owned_by: String,
    /// The checkpoint.
    pub root: String,
    /// The base model, for adapters.
    pub parent: Option<String>,
    /// Tokens in prompt and answer at most.
    pub max_model_len: usize,
}
