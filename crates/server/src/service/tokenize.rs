//! `/tokenize` and `/detokenize`.

use std::sync::Arc;

use kwire_protocol::openai::chat::ChatPrompt;
use kwire_protocol::openai::tokenize::{DetokenizeResponse, TokenizeResponse};
use kwire_protocol::openai::{FieldError, Fields};
use serde_json::Value;

use super::Service;
use crate::error::ServiceError;

impl Service {
    /// Tokens of a prompt, or of messages.
    pub async fn tokenize(&self, body: &Value) -> Result<TokenizeResponse, ServiceError> {
        let fields = Fields::root(body)?;
        self.check_name(&fields)?;
        let add_special = fields.bool("add_special_tokens")?;
        let names = fields.bool("return_token_strs")?.unwrap_or(false);
        let tokens: Vec<u32> = if fields.value("messages").is_some() {
            let chat = ChatPrompt::parse(&fields, true)?;
            let prompt = self.chat_prompt(chat, add_special.unwrap_or(false), None, Vec::new()).await?;
            prompt.tokens.to_vec()
        } else {
            let text = fields.str("prompt")?.ok_or_else(|| FieldError::new("prompt", "`prompt` is required."))?;
            let (model, text) = (Arc::clone(&self.model), text.to_owned());
            self.pool.run(move || model.tokenizer.encode(&text, add_special.unwrap_or(true))).await?
        };
        let name = |&id: &u32| self.model.tokenizer.token_name(id).unwrap_or_default();
        Ok(TokenizeResponse {
            count: tokens.len(),
            max_model_len: self.model.max_model_len,
            token_strs: names.then(|| tokens.iter().map(name).collect()),
            tokens,
        })
    }

    /// The text of tokens.
    pub async fn detokenize(&self, body: &Value) -> Result<DetokenizeResponse, ServiceError> {
        let fields = Fields::root(body)?;
        self.check_name(&fields)?;
        let missing = || FieldError::new("tokens", "`tokens` is required.");
        let tokens = fields.token_ids("tokens")?.ok_or_else(missing)?;
        let prompt = self.finish_prompt(tokens, Vec::new(), None, "tokens")?;
        let model = Arc::clone(&self.model);
        let text = self.pool.run(move || model.tokenizer.decode(&prompt.tokens, false)).await?;
        Ok(DetokenizeResponse { prompt: text })
    }

    fn check_name(&self, fields: &Fields<'_>) -> Result<(), ServiceError> {
        match fields.str("model")? {
            Some(name) if !self.model.names.iter().any(|known| known == name) => {
                Err(ServiceError::UnknownModel(name.to_owned()))
            }
            _ => Ok(()),
        }
    }
}
