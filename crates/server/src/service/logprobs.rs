//! The engine's log-probabilities in the shapes of the API.

use std::collections::BTreeMap;

use kwire_engine::TokenLogprobs;
use kwire_protocol::openai::logprobs::{
    ChatLogprobs, ChatTokenLogprob, CompletionLogprobs, PromptLogprob, PromptLogprobs, TokenLogprob,
};
use serde_json::{Map, Value};

use crate::text::Tokenizer;

/// JSON has no infinity; vLLM writes this for impossible tokens.
const LOWEST: f32 = -9999.0;

/// Prints tokens for log-probabilities.
#[derive(Clone, Copy)]
pub struct Printer<'a> {
    /// For their texts.
    pub tokenizer: &'a Tokenizer,
    /// Print `token_id:N` instead.
    pub as_ids: bool,
}

fn finite(logprob: f32) -> f32 {
    if logprob.is_nan() { LOWEST } else { logprob.max(LOWEST) }
}

impl Printer<'_> {
    /// The text of a token, lossy where it is part of a character.
    pub fn text(&self, token: u32) -> String {
        if self.as_ids {
            return format!("token_id:{token}");
        }
        String::from_utf8_lossy(&self.tokenizer.token_bytes(token)).into_owned()
    }

    fn token(&self, token: u32, logprob: f32) -> TokenLogprob {
        let text = self.text(token);
        let bytes =
            if self.as_ids { text.clone().into_bytes() } else { self.tokenizer.token_bytes(token).into_owned() };
        TokenLogprob { token: text, logprob: finite(logprob), bytes }
    }

    /// Chat's shape, for a delta's tokens.
    pub fn chat(&self, tokens: &[u32], logprobs: &[TokenLogprobs]) -> ChatLogprobs {
        let one = |(&token, of): (&u32, &TokenLogprobs)| ChatTokenLogprob {
            token: self.token(token, of.sampled),
            top_logprobs: of.top.iter().map(|&(id, logprob)| self.token(id, logprob)).collect(),
        };
        ChatLogprobs { content: tokens.iter().zip(logprobs).map(one).collect() }
    }

    /// Completions' shape, appended to `out`; `offset` is where the next token's text begins.
    pub fn completion(
        &self,
        tokens: &[u32],
        logprobs: &[TokenLogprobs],
        offset: &mut usize,
        out: &mut CompletionLogprobs,
    ) {
        for (&token, of) in tokens.iter().zip(logprobs) {
            let mut top = Map::new();
            for &(id, logprob) in of.top.iter().chain(&[(token, of.sampled)]) {
                top.entry(self.text(id)).or_insert_with(|| Value::from(finite(logprob)));
            }
            self.completion_token(token, Some(finite(of.sampled)), Some(top), offset, out);
        }
    }

    /// Completions' shape of a prompt: nothing is known of its first token.
    pub fn completion_prompt(
        &self,
        prompt: &[u32],
        logprobs: &[TokenLogprobs],
        offset: &mut usize,
        out: &mut CompletionLogprobs,
    ) {
        if let Some((&first, rest)) = prompt.split_first() {
            self.completion_token(first, None, None, offset, out);
            self.completion(rest, logprobs, offset, out);
        }
    }

    fn completion_token(
        &self,
        token: u32,
        logprob: Option<f32>,
        top: Option<Map<String, Value>>,
        offset: &mut usize,
        out: &mut CompletionLogprobs,
    ) {
        let text = self.text(token);
        out.text_offset.push(*offset);
        *offset += text.chars().count();
        out.tokens.push(text);
        out.token_logprobs.push(logprob);
        out.top_logprobs.push(top);
    }

    /// vLLM's `prompt_logprobs`.
    pub fn prompt(&self, prompt: &[u32], logprobs: &[TokenLogprobs]) -> PromptLogprobs {
        let one = |(&token, of): (&u32, &TokenLogprobs)| {
            let mut entries = BTreeMap::new();
            let entry =
                |id, logprob, rank| PromptLogprob { logprob: finite(logprob), rank, decoded_token: self.text(id) };
            for (rank, &(id, logprob)) in (1..).zip(&of.top) {
                entries.insert(id, entry(id, logprob, rank));
            }
            entries.insert(token, entry(token, of.sampled, of.rank));
            entries
        };
        let rest = prompt.iter().skip(1).zip(logprobs).map(|pair| Some(one(pair)));
        std::iter::once(None).chain(rest).collect()
    }
}
