//! `/tokenize` and `/detokenize`. They take a place in the queue like any other request: tokenizing costs time, too.

use std::sync::Arc;

use kwire_protocol::openai::tokenize::{DetokenizeResponse, Input, TokenizeResponse};
use kwire_protocol::openai::{DetokenizeRequest, TokenizeRequest};

use super::Service;
use super::prepare::check_text_len;
use crate::error::ServiceError;

impl Service {
    /// Tokens of a prompt, or of messages.
    pub async fn tokenize(&self, request: TokenizeRequest) -> Result<TokenizeResponse, ServiceError> {
        let TokenizeRequest { model, input, add_special_tokens, return_token_strs } = request;
        self.check_model(model.as_ref())?;
        let _permit = self.admit(1, 1)?;
        let tokens = match input {
            Input::Chat(chat) => {
                let add_special = add_special_tokens.unwrap_or(false);
                self.chat_prompt(chat, add_special, None, Vec::new()).await?.tokens.to_vec()
            }
            Input::Prompt(text) => {
                check_text_len(&self.model, &text, None, "prompt")?;
                let (model, add_special) = (Arc::clone(&self.model), add_special_tokens.unwrap_or(true));
                self.pool.run(move || model.tokenizer.encode(&text, add_special)).await?
            }
        };
        let name = |&id: &u32| self.model.tokenizer.token_name(id).unwrap_or_default();
        Ok(TokenizeResponse {
            count: tokens.len(),
            max_model_len: self.model.max_model_len,
            token_strs: return_token_strs.then(|| tokens.iter().map(name).collect()),
            tokens,
        })
    }

    /// The text of tokens.
    pub async fn detokenize(&self, request: DetokenizeRequest) -> Result<DetokenizeResponse, ServiceError> {
        self.check_model(request.model.as_ref())?;
        let _permit = self.admit(1, 1)?;
        let prompt = self.finish_prompt(request.tokens, Vec::new(), None, "tokens")?;
        let model = Arc::clone(&self.model);
        let text = self.pool.run(move || model.tokenizer.decode(&prompt.tokens, false)).await?;
        Ok(DetokenizeResponse { prompt: text })
    }
}
