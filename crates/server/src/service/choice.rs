//! One text in the making: tokens in, text out, until something ends it.

use std::sync::Arc;

use kwire_engine::{FinishReason, TokenLogprobs};
use kwire_protocol::openai::answer::StopReason;

use super::prepare::Plan;
use crate::text::{Detokenizer, StopMatcher, StopSet, Tokenizer};

/// Why a text ended, as clients are told.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Finish {
    /// `stop`, `length`, `abort`.
    pub reason: &'static str,
    /// The stop string, or the stop token of the request.
    pub stop: Option<StopReason>,
}

/// What is new of a choice.
#[derive(Debug, Default)]
pub struct Delta {
    /// Which choice.
    pub index: usize,
    /// Whether the client has nothing of the choice yet.
    pub first: bool,
    /// New text.
    pub text: String,
    /// The tokens read since the last delta. The end of their text may still be held back.
    pub tokens: Vec<u32>,
    /// One per token, if asked for.
    pub logprobs: Vec<TokenLogprobs>,
    /// Tokens of the choice so far.
    pub n_tokens: usize,
    /// In the last delta.
    pub finish: Option<Finish>,
}

impl Delta {
    /// Continues this delta with the next of its choice; log-probabilities stay behind, for they are printed at once.
    pub fn append(&mut self, next: Delta) {
        self.text.push_str(&next.text);
        self.tokens.extend(next.tokens);
        self.n_tokens = next.n_tokens;
        self.finish = next.finish.or(self.finish.take());
    }
}

/// One text in the making.
pub struct Choice {
    detokenizer: Detokenizer,
    matcher: StopMatcher,
    stops: Arc<StopSet>,
    stop_tokens: Arc<[u32]>,
    eos: Arc<[u32]>,
    include_stop: bool,
    min_tokens: usize,
    /// Characters that the client already has.
    skip_chars: usize,
    n_tokens: usize,
    piece: String,
    pending: Delta,
    finished: bool,
    any_taken: bool,
}

impl Choice {
    /// The text that follows `prompt`.
    pub fn new(index: usize, plan: &Plan, tokenizer: &Arc<Tokenizer>, prompt: &[u32]) -> Self {
        Self {
            detokenizer: Detokenizer::new(Arc::clone(tokenizer), plan.skip_special, prompt),
            matcher: StopMatcher::new(Arc::clone(&plan.stops), plan.include_stop),
            stops: Arc::clone(&plan.stops),
            stop_tokens: plan.stop.stop_token_ids.as_slice().into(),
            eos: plan.eos.as_slice().into(),
            include_stop: plan.include_stop,
            min_tokens: plan.stop.min_tokens,
            skip_chars: 0,
            n_tokens: 0,
            piece: String::new(),
            pending: Delta { index, ..Delta::default() },
            finished: false,
            any_taken: false,
        }
    }

    /// Reads tokens that another server generated and sent `sent_chars` characters of; they are not reported again.
    pub fn replay(&mut self, tokens: &[u32], sent_chars: usize) {
        self.skip_chars = sent_chars;
        self.any_taken = sent_chars > 0;
        self.push(tokens, Vec::new());
        self.pending.tokens.clear();
    }

    /// Reads tokens, up to what ends the text; true if one of them does and the engine does not know.
    pub fn push(&mut self, tokens: &[u32], logprobs: Vec<TokenLogprobs>) -> bool {
        let mut logprobs = logprobs.into_iter();
        for &token in tokens {
            if self.finished {
                return false;
            }
            self.n_tokens += 1;
            self.pending.tokens.push(token);
            self.pending.logprobs.extend(logprobs.next());
            if self.stop_tokens.contains(&token) && self.n_tokens > self.min_tokens {
                self.stop_token(token);
                return false;
            }
            self.piece.clear();
            self.detokenizer.push(token, &mut self.piece);
            let armed = self.n_tokens > self.min_tokens;
            if let Some(index) = self.matcher.push(&self.piece, armed, &mut self.pending.text) {
                let text = self.stops.text(index).to_owned();
                self.pending.finish = Some(Finish { reason: "stop", stop: Some(StopReason::Text(text)) });
                self.finished = true;
                return true;
            }
        }
        false
    }

    fn stop_token(&mut self, token: u32) {
        self.finished = true;
        self.piece.clear();
        if self.include_stop {
            self.detokenizer.push(token, &mut self.piece);
        }
        self.flush();
        let stop = (!self.eos.contains(&token)).then_some(StopReason::Token(token));
        self.pending.finish = Some(Finish { reason: "stop", stop });
    }

    fn flush(&mut self) {
        self.detokenizer.flush(&mut self.piece);
        if self.matcher.push(&self.piece, false, &mut self.pending.text).is_none() {
            self.matcher.flush(&mut self.pending.text);
        }
    }

    /// The engine's word that the sequence ended. `Err`: it failed.
    pub fn finish(&mut self, reason: FinishReason) -> Result<(), String> {
        if self.finished {
            return Ok(());
        }
        let label = reason.label();
        if let FinishReason::Error(message) = reason {
            return Err(message);
        }
        self.finished = true;
        self.piece.clear();
        self.flush();
        self.pending.finish = Some(Finish { reason: label, stop: None });
        Ok(())
    }

    /// Whether the text ended.
    pub fn finished(&self) -> bool {
        self.finished
    }

    /// Tokens of the text.
    pub fn n_tokens(&self) -> usize {
        self.n_tokens
    }

    /// What is new, if there is text or the end.
    pub fn take(&mut self) -> Option<Delta> {
        if self.skip_chars > 0 {
            self.skip_sent();
        }
        if self.pending.text.is_empty() && self.pending.finish.is_none() {
            return None;
        }
        let next = Delta { index: self.pending.index, ..Delta::default() };
        let mut delta = std::mem::replace(&mut self.pending, next);
        delta.first = !std::mem::replace(&mut self.any_taken, true);
        delta.n_tokens = self.n_tokens;
        Some(delta)
    }

    fn skip_sent(&mut self) {
        let text = &mut self.pending.text;
        let n_chars = text.chars().count();
        let skip = n_chars.min(self.skip_chars);
        let byte = text.char_indices().nth(skip).map_or(text.len(), |(byte, _)| byte);
        text.drain(..byte);
        self.skip_chars -= skip;
    }
}
