//! `POST /v1/chat/completions`.

use serde::Serialize;
use serde_json::{Map, Value};

use super::FieldError;
use super::answer::StopReason;
use super::common::Common;
use super::fields::Endpoint;
use super::logprobs::ChatLogprobs;
use super::reader::{self, Fields};

/// What a template needs to turn messages into a prompt; also the chat form of `/tokenize`.
#[derive(Debug, Clone, Default)]
pub struct ChatPrompt {
    /// The messages: objects with a role, and a content that is absent, a string, or a list of text parts.
    pub messages: Vec<Value>,
    /// The tools the template may describe.
    pub tools: Option<Vec<Value>>,
    /// Documents for templates that know them.
    pub documents: Option<Vec<Value>>,
    /// Whether the prompt ends where the assistant's turn begins.
    pub add_generation_prompt: bool,
    /// Whether the prompt ends inside the last message.
    pub continue_final_message: bool,
    /// The request's own template.
    pub chat_template: Option<String>,
    /// More variables of the template.
    pub template_kwargs: Map<String, Value>,
}

/// A parsed request.
#[derive(Debug, Clone)]
pub struct ChatRequest {
    /// What it shares with completions.
    pub common: Common,
    /// The conversation.
    pub prompt: ChatPrompt,
    /// Absent: the rest of the context.
    pub max_tokens: Option<usize>,
    /// The name of the field that `max_tokens` came from.
    pub max_tokens_field: &'static str,
    /// Log-probabilities with this many alternatives.
    pub logprobs: Option<u32>,
}

impl ChatRequest {
    /// Reads a request body.
    pub fn parse(body: &Value, max_logprobs: u32) -> Result<Self, FieldError> {
        let fields = Fields::root(body)?;
        let common = Common::parse(&fields, Endpoint::Chat, max_logprobs)?;
        let newer = fields.u32_from("max_completion_tokens", 1)?;
        let older = fields.u32_from("max_tokens", 1)?;
        let prompt = ChatPrompt::parse(&fields)?;
        tool_choice(&fields, &prompt)?;
        Ok(Self {
            logprobs: logprobs(&fields, max_logprobs)?,
            max_tokens: newer.or(older).map(|n| n as usize),
            max_tokens_field: if newer.is_some() { "max_completion_tokens" } else { "max_tokens" },
            prompt,
            common,
        })
    }
}

impl ChatPrompt {
    /// Reads the fields that make the prompt. By default it ends where the assistant's turn begins.
    pub fn parse(fields: &Fields<'_>) -> Result<Self, FieldError> {
        let continue_final_message = fields.bool("continue_final_message")?.unwrap_or(false);
        let add = fields.bool("add_generation_prompt")?;
        if continue_final_message && add == Some(true) {
            let message = "`continue_final_message` and `add_generation_prompt` cannot both be true.";
            return Err(FieldError::new("continue_final_message", message));
        }
        let mut template_kwargs = Map::new();
        if let Some(effort) = fields.str("reasoning_effort")? {
            template_kwargs.insert("reasoning_effort".to_owned(), effort.into());
        }
        if let Some(kwargs) = fields.object("chat_template_kwargs")? {
            template_kwargs.extend(kwargs.map().iter().map(|(k, v)| (k.clone(), v.clone())));
        }
        let owned = |list: Option<&[Value]>| list.filter(|list| !list.is_empty()).map(<[Value]>::to_vec);
        Ok(Self {
            messages: messages(fields)?,
            tools: owned(fields.list("tools")?),
            documents: owned(fields.list("documents")?),
            add_generation_prompt: !continue_final_message && add.unwrap_or(true),
            continue_final_message,
            chat_template: fields.str("chat_template")?.map(str::to_owned),
            template_kwargs,
        })
    }
}

fn messages(fields: &Fields<'_>) -> Result<Vec<Value>, FieldError> {
    let list = fields.list("messages")?.ok_or_else(|| FieldError::new("messages", "`messages` is required."))?;
    if list.is_empty() {
        return Err(FieldError::new("messages", "`messages` must not be empty."));
    }
    for (i, value) in list.iter().enumerate() {
        let message = Fields::at(value, format!("messages[{i}]"))?;
        match message.str("role")? {
            None | Some("") => {
                let param = message.path_of("role");
                return Err(FieldError::new(&param, format!("`{param}` is required.")));
            }
            Some(_) => content(&message)?,
        }
    }
    Ok(list.to_vec())
}

fn content(message: &Fields<'_>) -> Result<(), FieldError> {
    let path = message.path_of("content");
    let parts = match message.value("content") {
        None | Some(Value::String(_)) => return Ok(()),
        Some(Value::Array(parts)) => parts,
        Some(other) => {
            let message = format!("`{path}` must be a string or a list of parts, not {}.", reader::kind(other));
            return Err(FieldError::new(path, message));
        }
    };
    for (j, part) in parts.iter().enumerate() {
        let part = Fields::at(part, format!("{path}[{j}]"))?;
        let kind = part.path_of("type");
        match part.str("type")? {
            Some("text") if part.str("text")?.is_some() => {}
            Some("text") => {
                let param = part.path_of("text");
                return Err(FieldError::new(&param, format!("`{param}` is required.")));
            }
            Some(other) => {
                return Err(FieldError::new(
                    kind,
                    format!("Content of type `{other}` is not supported; only `text` is."),
                ));
            }
            None => return Err(FieldError::new(&kind, format!("`{kind}` is required."))),
        }
    }
    Ok(())
}

/// Tools are shown to the template if the model is told not to call them; calls are not parsed yet.
fn tool_choice(fields: &Fields<'_>, prompt: &ChatPrompt) -> Result<(), FieldError> {
    let choice = fields.value("tool_choice");
    let none = choice.is_some_and(|c| c == "none");
    if prompt.tools.is_some() && !none {
        return Err(FieldError::new("tools", "`tools` are not supported yet, unless `tool_choice` is \"none\"."));
    }
    if choice.is_some_and(|c| c != "none" && c != "auto") {
        return Err(FieldError::new("tool_choice", "`tool_choice` is not supported yet, unless it is \"none\"."));
    }
    Ok(())
}

fn logprobs(fields: &Fields<'_>, max_logprobs: u32) -> Result<Option<u32>, FieldError> {
    let on = fields.bool("logprobs")?.unwrap_or(false);
    let top = fields.integer("top_logprobs", 0..=i64::from(max_logprobs))?.map(|k| k as u32);
    if !on && top.is_some_and(|k| k > 0) {
        return Err(FieldError::new("top_logprobs", "`top_logprobs` needs `logprobs: true`."));
    }
    Ok(on.then(|| top.unwrap_or(0)))
}

/// One answer.
#[derive(Debug, Serialize)]
pub struct ChatChoice<'a> {
    /// The sequence.
    pub index: usize,
    /// The message.
    pub message: ChatMessage<'a>,
    /// Log-probabilities.
    pub logprobs: Option<ChatLogprobs>,
    /// `stop`, `length`, `abort`.
    pub finish_reason: Option<&'static str>,
    /// The stop string or token, unless it was the model's own.
    pub stop_reason: Option<&'a StopReason>,
    /// The tokens, if asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub token_ids: Option<&'a [u32]>,
}

/// The assistant's message.
#[derive(Debug, Serialize)]
pub struct ChatMessage<'a> {
    /// `assistant`
    pub role: &'static str,
    /// The text.
    pub content: &'a str,
    /// Always `null`.
    pub refusal: Option<&'static str>,
}

/// How one answer grew.
#[derive(Debug, Serialize)]
pub struct ChatChunkChoice<'a> {
    /// The sequence.
    pub index: usize,
    /// What is new.
    pub delta: ChatDelta<'a>,
    /// Log-probabilities of the new tokens.
    pub logprobs: Option<ChatLogprobs>,
    /// In the last chunk of the answer.
    pub finish_reason: Option<&'static str>,
    /// In the last chunk of the answer.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub stop_reason: Option<&'a StopReason>,
    /// The tokens, if asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub token_ids: Option<&'a [u32]>,
}

/// New parts of a message.
#[derive(Debug, Default, Serialize)]
pub struct ChatDelta<'a> {
    /// In the first chunk.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub role: Option<&'static str>,
    /// New text.
    pub content: &'a str,
}
