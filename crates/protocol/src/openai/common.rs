//! The fields that chat and completions share, parsed and range-checked.

use std::collections::BTreeMap;

use serde_json::Value;

use super::FieldError;
use super::fields::{self, Endpoint};
use super::reader::Fields;
use crate::resume::{Internal, MAX_PREFIXES};

/// Sequences per prompt at most.
const MAX_N: i64 = 128;
/// Stop strings at most.
const MAX_STOP_STRINGS: usize = 64;
/// Bytes of one stop string at most.
const MAX_STOP_BYTES: usize = 4096;
/// Stop token ids at most.
const MAX_STOP_TOKENS: usize = 1024;

/// How tokens are drawn. What the request leaves open comes from the model's generation config.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Sampling {
    /// 0: greedy.
    pub temperature: Option<f32>,
    /// In (0, 1].
    pub top_p: Option<f32>,
    /// 0: all.
    pub top_k: Option<u32>,
    /// In [0, 1].
    pub min_p: Option<f32>,
    /// Any 64 bits.
    pub seed: Option<u64>,
    /// In [-2, 2].
    pub presence_penalty: Option<f32>,
    /// In [-2, 2].
    pub frequency_penalty: Option<f32>,
    /// Above 0.
    pub repetition_penalty: Option<f32>,
    /// By token id, each in [-100, 100].
    pub logit_bias: Vec<(u32, f32)>,
}

/// The fields that both kinds of request have.
#[derive(Debug, Clone, Default)]
pub struct Common {
    /// The model's name; absent: whatever is served.
    pub model: Option<String>,
    /// Whether to stream.
    pub stream: bool,
    /// A last chunk with the usage.
    pub include_usage: bool,
    /// The usage so far in every chunk.
    pub continuous_usage: bool,
    /// Sequences per prompt.
    pub n: u32,
    /// How tokens are drawn.
    pub sampling: Sampling,
    /// Strings that end the text.
    pub stop: Vec<String>,
    /// Tokens that end the text.
    pub stop_token_ids: Vec<u32>,
    /// Whether the stop string or token is part of the text.
    pub include_stop_str_in_output: bool,
    /// Whether the model's own end of text is ignored.
    pub ignore_eos: bool,
    /// Tokens to generate before anything ends the text.
    pub min_tokens: u32,
    /// Whether special tokens are left out of the text.
    pub skip_special_tokens: bool,
    /// Keep this many of the prompt's last tokens; -1: as many as the model takes.
    pub truncate_prompt_tokens: Option<i64>,
    /// Whether the tokenizer adds its special tokens to the prompt.
    pub add_special_tokens: Option<bool>,
    /// Log-probabilities of the prompt with this many alternatives.
    pub prompt_logprobs: Option<u32>,
    /// Whether to return token ids.
    pub return_token_ids: bool,
    /// Whether tokens in log-probabilities read `token_id:N`.
    pub return_tokens_as_token_ids: bool,
    /// The lowest runs first, under the priority policy.
    pub priority: i32,
    /// Separates prefix caches.
    pub cache_salt: Option<String>,
    /// The client's name for the request.
    pub request_id: Option<String>,
    /// The gateway's field.
    pub internal: Internal,
}

impl Common {
    /// Reads the shared fields. `max_logprobs` bounds `prompt_logprobs`.
    pub fn parse(fields: &Fields<'_>, endpoint: Endpoint, max_logprobs: u32) -> Result<Self, FieldError> {
        fields::check(fields.map(), endpoint)?;
        let stream = fields.bool("stream")?.unwrap_or(false);
        let (include_usage, continuous_usage) = stream_options(fields, stream)?;
        Ok(Self {
            model: fields.str("model")?.map(str::to_owned),
            stream,
            include_usage,
            continuous_usage,
            n: fields.integer("n", 1..=MAX_N)?.unwrap_or(1) as u32,
            sampling: sampling(fields)?,
            stop: stop_strings(fields)?,
            stop_token_ids: stop_tokens(fields)?,
            include_stop_str_in_output: fields.bool("include_stop_str_in_output")?.unwrap_or(false),
            ignore_eos: fields.bool("ignore_eos")?.unwrap_or(false),
            min_tokens: fields.u32_from("min_tokens", 0)?.unwrap_or(0),
            skip_special_tokens: fields.bool("skip_special_tokens")?.unwrap_or(true),
            truncate_prompt_tokens: truncation(fields)?,
            add_special_tokens: fields.bool("add_special_tokens")?,
            prompt_logprobs: prompt_logprobs(fields, stream, max_logprobs)?,
            return_token_ids: fields.bool("return_token_ids")?.unwrap_or(false),
            return_tokens_as_token_ids: fields.bool("return_tokens_as_token_ids")?.unwrap_or(false),
            priority: fields.integer("priority", i64::from(i32::MIN)..=i64::from(i32::MAX))?.unwrap_or(0) as i32,
            cache_salt: cache_salt(fields)?,
            request_id: request_id(fields)?,
            internal: internal(fields)?,
        })
    }
}

fn stream_options(fields: &Fields<'_>, stream: bool) -> Result<(bool, bool), FieldError> {
    let Some(options) = fields.object("stream_options")? else { return Ok((false, false)) };
    if !stream {
        return Err(FieldError::new("stream_options", "`stream_options` needs `stream: true`."));
    }
    let include = options.bool("include_usage")?.unwrap_or(false);
    // vLLM tells the usage of every chunk only if it tells the usage at all.
    let continuous = include && options.bool("continuous_usage_stats")?.unwrap_or(false);
    Ok((include, continuous))
}

fn sampling(fields: &Fields<'_>) -> Result<Sampling, FieldError> {
    let top_p = fields.float("top_p", 0.0..=1.0)?;
    if top_p == Some(0.0) {
        return Err(FieldError::new("top_p", "`top_p` must be above 0."));
    }
    let repetition_penalty = fields.float("repetition_penalty", 0.0..=f64::MAX)?;
    if repetition_penalty == Some(0.0) {
        return Err(FieldError::new("repetition_penalty", "`repetition_penalty` must be above 0."));
    }
    Ok(Sampling {
        temperature: fields.float("temperature", 0.0..=f64::MAX)?,
        top_p,
        top_k: fields.integer("top_k", -1..=i64::from(i32::MAX))?.map(|k| k.max(0) as u32),
        min_p: fields.float("min_p", 0.0..=1.0)?,
        seed: seed(fields)?,
        presence_penalty: fields.float("presence_penalty", -2.0..=2.0)?,
        frequency_penalty: fields.float("frequency_penalty", -2.0..=2.0)?,
        repetition_penalty,
        logit_bias: logit_bias(fields)?,
    })
}

/// Any 64 bits, signed or not; -1 means "no seed", as in vLLM.
fn seed(fields: &Fields<'_>) -> Result<Option<u64>, FieldError> {
    if let Some(seed) = fields.value("seed").and_then(Value::as_u64) {
        return Ok(Some(seed));
    }
    Ok(fields.integer("seed", i64::MIN..=i64::MAX)?.filter(|&seed| seed != -1).map(|seed| seed as u64))
}

fn logit_bias(fields: &Fields<'_>) -> Result<Vec<(u32, f32)>, FieldError> {
    let Some(bias) = fields.object("logit_bias")? else { return Ok(Vec::new()) };
    let mut out = BTreeMap::new();
    for token in bias.map().keys() {
        let path = bias.path_of(token);
        let id: u32 = token.trim().parse().map_err(|_| {
            FieldError::new(&path, format!("`logit_bias` maps token ids to numbers; {token:?} is not a token id."))
        })?;
        if let Some(value) = bias.float(token, f64::MIN..=f64::MAX)? {
            out.insert(id, value.clamp(-100.0, 100.0));
        }
    }
    Ok(out.into_iter().collect())
}

fn stop_strings(fields: &Fields<'_>) -> Result<Vec<String>, FieldError> {
    let list = match fields.value("stop") {
        None => return Ok(Vec::new()),
        Some(Value::String(one)) => vec![one.clone()],
        Some(Value::Array(list)) => {
            let string = |(i, value): (usize, &Value)| {
                let wrong = || FieldError::new(format!("stop[{i}]"), format!("`stop[{i}]` must be a string."));
                value.as_str().map(str::to_owned).ok_or_else(wrong)
            };
            list.iter().enumerate().map(string).collect::<Result<_, _>>()?
        }
        Some(_) => return Err(FieldError::new("stop", "`stop` must be a string or a list of strings.")),
    };
    if list.len() > MAX_STOP_STRINGS {
        let message = format!("`stop` has {} strings; at most {MAX_STOP_STRINGS} are allowed.", list.len());
        return Err(FieldError::new("stop", message));
    }
    if list.iter().any(String::is_empty) {
        return Err(FieldError::new("stop", "`stop` must not contain an empty string."));
    }
    if list.iter().any(|stop| stop.len() > MAX_STOP_BYTES) {
        return Err(FieldError::new("stop", format!("A stop string may have at most {MAX_STOP_BYTES} bytes.")));
    }
    Ok(list)
}

fn stop_tokens(fields: &Fields<'_>) -> Result<Vec<u32>, FieldError> {
    let ids = fields.token_ids("stop_token_ids")?.unwrap_or_default();
    if ids.len() > MAX_STOP_TOKENS {
        let message = format!("`stop_token_ids` has {} ids; at most {MAX_STOP_TOKENS} are allowed.", ids.len());
        return Err(FieldError::new("stop_token_ids", message));
    }
    Ok(ids)
}

fn truncation(fields: &Fields<'_>) -> Result<Option<i64>, FieldError> {
    let keep = fields.integer("truncate_prompt_tokens", -1..=i64::from(u32::MAX))?;
    if keep == Some(0) {
        return Err(FieldError::new("truncate_prompt_tokens", "`truncate_prompt_tokens` must be -1 or at least 1."));
    }
    Ok(keep)
}

fn prompt_logprobs(fields: &Fields<'_>, stream: bool, max_logprobs: u32) -> Result<Option<u32>, FieldError> {
    let asked = fields.integer("prompt_logprobs", 0..=i64::from(max_logprobs))?.map(|k| k as u32);
    if asked.is_some() && stream {
        return Err(FieldError::new("prompt_logprobs", "`prompt_logprobs` are not available when `stream` is true."));
    }
    Ok(asked)
}

fn cache_salt(fields: &Fields<'_>) -> Result<Option<String>, FieldError> {
    let salt = fields.str("cache_salt")?;
    if salt == Some("") {
        return Err(FieldError::new("cache_salt", "`cache_salt` must be a non-empty string."));
    }
    Ok(salt.map(str::to_owned))
}

fn request_id(fields: &Fields<'_>) -> Result<Option<String>, FieldError> {
    let Some(id) = fields.str("request_id")? else { return Ok(None) };
    if valid_request_id(id) {
        return Ok(Some(id.to_owned()));
    }
    Err(FieldError::new("request_id", "`request_id` must be 1 to 128 printable ASCII characters without spaces."))
}

/// Whether a client's name for a request can be part of ours: 1 to 128 printable ASCII characters without spaces.
pub fn valid_request_id(id: &str) -> bool {
    (1..=128).contains(&id.len()) && id.bytes().all(|b| b.is_ascii_graphic())
}

fn internal(fields: &Fields<'_>) -> Result<Internal, FieldError> {
    let Some(value) = fields.value("kwire") else { return Ok(Internal::default()) };
    let internal: Internal =
        serde::Deserialize::deserialize(value).map_err(|e| FieldError::new("kwire", format!("`kwire`: {e}.")))?;
    if internal.prefixes.len() > MAX_PREFIXES {
        let n = internal.prefixes.len();
        let message = format!("`kwire.prefixes` has {n} names; at most {MAX_PREFIXES} are allowed.");
        return Err(FieldError::new("kwire.prefixes", message));
    }
    Ok(internal)
}
