//! Validated requests to engine requests: sampling, limits, seeds.

use std::sync::Arc;

use kwire_engine::{PrefixTag, Request, RequestId, SampleParams, Seconds, StopParams};
use kwire_protocol::openai::{Common, FieldError};
use kwire_protocol::resume::Resume;

use super::{Envelope, Service};
use crate::error::ServiceError;
use crate::model::ModelContext;
use crate::text::StopSet;

/// vLLM draws no colder than this (`_MAX_TEMP`), unless greedily: below, softmax overflows.
const MIN_TEMPERATURE: f32 = 0.01;

/// They went to the client before the stream moved; only whole prompts are scored.
pub(crate) const NO_RESUMED_LOGPROBS: &str = "A resumed request has no log-probabilities of its prompt.";

/// A prompt in tokens.
#[derive(Clone, Default)]
pub struct PreparedPrompt {
    /// The tokens.
    pub tokens: Arc<[u32]>,
    /// The gateway's names for its prefixes.
    pub tags: Vec<PrefixTag>,
    /// Its text, if it was given as text.
    pub text: Option<String>,
}

/// Everything about the request but its prompts.
pub struct Plan {
    pub(crate) n: u32,
    pub(crate) sampling: SampleParams,
    pub(crate) stop: StopParams,
    pub(crate) stops: Arc<StopSet>,
    /// Which of the stop tokens are the model's own, whose drawing is not reported as a stop reason.
    pub(crate) eos: Vec<u32>,
    pub(crate) include_stop: bool,
    pub(crate) skip_special: bool,
    pub(crate) prompt_logprobs: Option<u32>,
    /// Only the prompt's log-probabilities are wanted (`echo` with `max_tokens: 0`).
    pub(crate) score_only: bool,
    pub(crate) priority: i32,
    pub(crate) cache_salt: Option<String>,
    pub(crate) resume: Option<Resume>,
}

/// How many tokens the request wants to generate at most.
#[derive(Debug, Clone, Copy)]
pub struct Wanted {
    /// Tokens; `None`: the rest of the context.
    pub max_tokens: Option<usize>,
    /// The field that says so.
    pub field: &'static str,
}

impl Service {
    /// Sampling, stopping and limits of a request. [`StopParams::max_tokens`] is set per prompt by [`Self::fit`].
    pub(crate) fn plan(
        &self,
        common: &Common,
        envelope: &Envelope,
        logprobs: Option<u32>,
    ) -> Result<Plan, ServiceError> {
        let defaults = self.model.generation;
        let eos = if common.ignore_eos { Vec::new() } else { self.model.eos_token_ids.clone() };
        let mut stop_token_ids = eos.clone();
        stop_token_ids.extend(common.stop_token_ids.iter().filter(|id| !eos.contains(id)));
        let asked = &common.sampling;
        let n_ids = self.model.n_vocab;
        if let Some((id, _)) = asked.logit_bias.iter().find(|(id, _)| *id as usize >= n_ids) {
            let message = format!("`logit_bias` names token {id}, but the vocabulary has {n_ids} tokens.");
            return Err(FieldError::new(format!("logit_bias.{id}"), message).into());
        }
        let temperature = asked.temperature.or(defaults.temperature).unwrap_or(1.0);
        let sampling = SampleParams {
            temperature: if temperature > 0.0 { temperature.max(MIN_TEMPERATURE) } else { 0.0 },
            top_p: asked.top_p.or(defaults.top_p).unwrap_or(1.0),
            top_k: asked.top_k.or(defaults.top_k).unwrap_or(0),
            min_p: asked.min_p.or(defaults.min_p).unwrap_or(0.0),
            repetition_penalty: asked.repetition_penalty.or(defaults.repetition_penalty).unwrap_or(1.0),
            presence_penalty: asked.presence_penalty.unwrap_or(0.0),
            frequency_penalty: asked.frequency_penalty.unwrap_or(0.0),
            bias: asked.logit_bias.clone(),
            logprobs,
            seed: envelope.seed,
        };
        let resume = common.internal.resume.clone();
        if resume.is_some() && common.n != 1 {
            return Err(FieldError::new("kwire.resume", "Only requests with `n: 1` can be resumed.").into());
        }
        if resume.is_some() && common.prompt_logprobs.is_some() {
            return Err(FieldError::new("prompt_logprobs", NO_RESUMED_LOGPROBS).into());
        }
        Ok(Plan {
            n: common.n,
            sampling,
            stop: StopParams { max_tokens: 0, min_tokens: common.min_tokens as usize, stop_token_ids },
            stops: Arc::new(StopSet::new(&common.stop)),
            eos,
            include_stop: common.include_stop_str_in_output,
            skip_special: common.skip_special_tokens,
            prompt_logprobs: common.prompt_logprobs,
            score_only: false,
            priority: common.priority,
            cache_salt: common.cache_salt.clone(),
            resume,
        })
    }

    /// Tokens that may follow a prompt of `n_prompt` tokens; an error if it does not fit.
    pub(crate) fn fit(
        &self,
        n_prompt: usize,
        wanted: Wanted,
        min_tokens: usize,
        param: &str,
    ) -> Result<usize, ServiceError> {
        let limit = self.model.max_model_len;
        if n_prompt == 0 {
            return Err(FieldError::new(param, "The prompt is empty: it has no tokens.").into());
        }
        if n_prompt >= limit {
            return Err(too_long(limit, n_prompt, "", param).into());
        }
        let rest = limit - n_prompt;
        let max_tokens = match wanted.max_tokens {
            Some(asked) if asked > rest => {
                let field = wanted.field;
                let message = format!(
                    "`{field}` is too large: {asked}. This model's maximum context length is {limit} tokens and your \
                     request has {n_prompt} input tokens ({asked} > {limit} - {n_prompt})."
                );
                return Err(FieldError::new(field, message).into());
            }
            Some(asked) => asked,
            None => self.model.generation.max_new_tokens.map_or(rest, |most| rest.min(most as usize)),
        };
        if min_tokens > max_tokens {
            let message = format!("`min_tokens` must be at most `max_tokens` ({max_tokens}), got {min_tokens}.");
            return Err(FieldError::new("min_tokens", message).into());
        }
        Ok(max_tokens)
    }

    /// Checks token ids of the client, and cuts the prompt as `truncate_prompt_tokens` says.
    pub(crate) fn finish_prompt(
        &self,
        mut tokens: Vec<u32>,
        mut tags: Vec<PrefixTag>,
        truncate: Option<i64>,
        param: &str,
    ) -> Result<PreparedPrompt, ServiceError> {
        let n_ids = self.model.n_vocab;
        if let Some(i) = tokens.iter().position(|&id| id as usize >= n_ids) {
            let message = format!("Token id {} is out of the vocabulary of {n_ids} tokens.", tokens[i]);
            return Err(FieldError::new(format!("{param}[{i}]"), message).into());
        }
        if let Some(keep) = truncate {
            let limit = self.model.max_model_len;
            let keep = if keep < 0 { limit - 1 } else { keep as usize };
            if keep >= limit {
                let message = format!(
                    "`truncate_prompt_tokens` ({keep}) must be below the model's maximum context length ({limit})."
                );
                return Err(FieldError::new("truncate_prompt_tokens", message).into());
            }
            if tokens.len() > keep {
                tokens.drain(..tokens.len() - keep);
                return Ok(PreparedPrompt { tokens: tokens.into(), ..PreparedPrompt::default() });
            }
        }
        tags.sort_by_key(|tag| tag.end_token); // a promise of the engine's interface, not the gateway's to break
        Ok(PreparedPrompt { tokens: tokens.into(), tags, text: None })
    }

    /// The prompt of a stream that began elsewhere.
    pub(crate) fn resumed_prompt(&self, resume: &Resume) -> Result<PreparedPrompt, ServiceError> {
        let n_ids = self.model.n_vocab;
        if let Some(id) = resume.output_token_ids.iter().find(|&&id| id as usize >= n_ids) {
            let message = format!("Token id {id} is out of the vocabulary of {n_ids} tokens.");
            return Err(FieldError::new("kwire.resume.output_token_ids", message).into());
        }
        let tokens = resume.prompt_token_ids.clone();
        self.finish_prompt(tokens, Vec::new(), None, "kwire.resume.prompt_token_ids")
    }
}

impl Plan {
    /// The engine's request for one prompt.
    pub(crate) fn request(&self, prompt: &PreparedPrompt, max_tokens: usize, arrival: Seconds) -> Request {
        Request {
            id: RequestId(0), // set when it is sent
            prompt: Arc::clone(&prompt.tokens),
            resumed: self.resume.as_ref().map(|r| r.output_token_ids.clone()).unwrap_or_default(),
            n: self.n,
            sampling: self.sampling.clone(),
            stop: StopParams { max_tokens, ..self.stop.clone() },
            priority: self.priority,
            arrival,
            prompt_logprobs: self.prompt_logprobs,
            cache_salt: self.cache_salt.clone(),
            prefix_tags: prompt.tags.clone(),
            constraint: None,
        }
    }
}

/// Refuses a text that cannot fit, before it is tokenized.
pub(crate) fn check_text_len(
    model: &ModelContext,
    text: &str,
    truncate: Option<i64>,
    param: &str,
) -> Result<(), FieldError> {
    let limit = model.max_model_len;
    let at_least = text.len() / model.tokenizer.longest_token();
    // Normalization may shorten a text, hardly ever by half.
    if truncate.is_none() && at_least / 2 >= limit {
        return Err(too_long(limit, at_least, "at least ", param));
    }
    Ok(())
}

fn too_long(limit: usize, n_prompt: usize, qualifier: &str, param: &str) -> FieldError {
    let message = format!(
        "This model's maximum context length is {limit} tokens. However, your request has {qualifier}{n_prompt} input \
         tokens. Please reduce the length of the input."
    );
    FieldError::new(param, message)
}
