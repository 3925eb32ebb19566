//! A checkpoint's text assets to a tokenizer and a template.

use kwire_engine::model::checkpoint::{TextAssets, TokenizerSource};

use super::gguf_vocab::{self, VocabError};
use super::template::{ChatTemplate, ContentFormat, TemplateError};
use super::tokenizer::{Tokenizer, TokenizerError};

/// Why a checkpoint's text side cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum AssetError {
    /// Its `tokenizer.json`.
    #[error(transparent)]
    Tokenizer(#[from] TokenizerError),
    /// The vocabulary in its GGUF file.
    #[error(transparent)]
    Vocab(#[from] VocabError),
    /// Its chat template, or the one given instead.
    #[error(transparent)]
    Template(#[from] TemplateError),
}

/// The tokenizer of a checkpoint.
pub fn tokenizer(assets: &TextAssets) -> Result<Tokenizer, AssetError> {
    match &assets.tokenizer {
        TokenizerSource::Json(path) => {
            let tokenizer = Tokenizer::from_file(path)?;
            // `add_bos_token` of the configuration wins over the file.
            Ok(match (assets.bos_token_id, assets.add_bos) {
                (Some(bos), Some(add)) => tokenizer.with_bos(bos, add),
                _ => tokenizer,
            })
        }
        TokenizerSource::Gguf(vocab) => Ok(Tokenizer::new(gguf_vocab::tokenizer(vocab)?)),
    }
}

/// The chat template of a checkpoint, or `instead` (`--chat-template`, its text).
pub fn template(
    assets: &TextAssets,
    instead: Option<&str>,
    format: ContentFormat,
) -> Result<Option<ChatTemplate>, AssetError> {
    let Some(source) = instead.or(assets.chat_template.as_deref()) else { return Ok(None) };
    Ok(Some(ChatTemplate::new(source, assets.special_tokens.clone(), format)?))
}
