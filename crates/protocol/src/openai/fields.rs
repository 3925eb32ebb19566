//! The table of request fields: honoured, accepted without effect, or refused.
//!
//! A field is *refused* if it would change the answer and is not supported, unless its value is the default. A field
//! has *no effect* if the answer is right without it. Names that are not in the table are unknown: the server warns or
//! refuses, by `--unknown-fields`.

use serde_json::{Map, Value};

use super::FieldError;

/// Which route a request came to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Endpoint {
    /// `/v1/chat/completions`
    Chat,
    /// `/v1/completions`
    Completions,
    /// `/tokenize`
    Tokenize,
    /// `/detokenize`
    Detokenize,
}

/// Which of the two routes that generate know a field.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum On {
    /// Both routes.
    Both,
    /// Chat only.
    Chat,
    /// Completions only.
    Completions,
}

/// What becomes of a field.
#[derive(Clone, Copy)]
pub enum Class {
    /// It does what the documentation of OpenAI or vLLM says.
    Honoured,
    /// It is accepted and ignored, since the answer does not depend on it; the text says why.
    NoEffect(&'static str),
    /// It is refused, unless the value asks for nothing; the text says what to do.
    Refused(fn(&Value) -> bool, &'static str),
}

/// One row of the table.
#[derive(Clone, Copy)]
pub struct Field {
    /// The name in JSON.
    pub name: &'static str,
    /// The routes that know it.
    pub on: On,
    /// What becomes of it.
    pub class: Class,
}

impl On {
    /// Whether `endpoint` is among these routes.
    pub fn includes(self, endpoint: Endpoint) -> bool {
        match self {
            Self::Both => matches!(endpoint, Endpoint::Chat | Endpoint::Completions),
            Self::Chat => endpoint == Endpoint::Chat,
            Self::Completions => endpoint == Endpoint::Completions,
        }
    }
}

const fn honoured(name: &'static str, on: On) -> Field {
    Field { name, on, class: Class::Honoured }
}
const fn no_effect(name: &'static str, on: On, why: &'static str) -> Field {
    Field { name, on, class: Class::NoEffect(why) }
}
const fn refused(name: &'static str, on: On, harmless: fn(&Value) -> bool, hint: &'static str) -> Field {
    Field { name, on, class: Class::Refused(harmless, hint) }
}

/// `false`, `""`, `[]` and `{}` ask for nothing.
fn empty(value: &Value) -> bool {
    match value {
        Value::Bool(on) => !on,
        Value::String(text) => text.is_empty(),
        Value::Array(list) => list.is_empty(),
        Value::Object(map) => map.is_empty(),
        _ => false,
    }
}
fn never(_: &Value) -> bool {
    false
}
fn one(value: &Value) -> bool {
    value.as_f64() == Some(1.0)
}
fn zero_or_empty(value: &Value) -> bool {
    value.as_f64() == Some(0.0) || empty(value)
}
fn text_format(value: &Value) -> bool {
    value["type"] == "text" || empty(value)
}
fn text_modality(value: &Value) -> bool {
    value.as_array().is_some_and(|list| list.iter().all(|m| m == "text"))
}
fn none_or_empty(value: &Value) -> bool {
    value == "none" || empty(value)
}
fn medium(value: &Value) -> bool {
    value == "medium"
}
fn empty_or_all_null(value: &Value) -> bool {
    all_null(value) || empty(value)
}
fn all_null(value: &Value) -> bool {
    value.as_object().is_some_and(|map| map.values().all(Value::is_null))
}

const NO_STRUCTURED_OUTPUT: &str = "Structured output is not supported yet.";
const PLATFORM_ONLY: &str = "It only tells OpenAI's platform who or what is asking.";
const NO_BEAM_SEARCH: &str = "Beam search is not supported; use sampling with `n`.";

/// Every field that a request may have. `tools` and `tool_choice` are honoured as far as `tool_choice: "none"` goes:
/// the template sees the tools, and the answer is text ([`super::ChatRequest`] refuses the rest).
pub const FIELDS: &[Field] = &[
    honoured("model", On::Both),
    honoured("messages", On::Chat),
    honoured("prompt", On::Completions),
    honoured("stream", On::Both),
    honoured("stream_options", On::Both),
    honoured("n", On::Both),
    honoured("max_tokens", On::Both),
    honoured("max_completion_tokens", On::Chat),
    honoured("min_tokens", On::Both),
    honoured("temperature", On::Both),
    honoured("top_p", On::Both),
    honoured("top_k", On::Both),
    honoured("min_p", On::Both),
    honoured("seed", On::Both),
    honoured("presence_penalty", On::Both),
    honoured("frequency_penalty", On::Both),
    honoured("repetition_penalty", On::Both),
    honoured("logit_bias", On::Both),
    honoured("logprobs", On::Both),
    honoured("top_logprobs", On::Chat),
    honoured("prompt_logprobs", On::Both),
    honoured("return_tokens_as_token_ids", On::Both),
    honoured("return_token_ids", On::Both),
    honoured("stop", On::Both),
    honoured("stop_token_ids", On::Both),
    honoured("include_stop_str_in_output", On::Both),
    honoured("ignore_eos", On::Both),
    honoured("skip_special_tokens", On::Both),
    honoured("add_special_tokens", On::Both),
    honoured("truncate_prompt_tokens", On::Both),
    honoured("echo", On::Completions),
    honoured("add_generation_prompt", On::Chat),
    honoured("continue_final_message", On::Chat),
    honoured("chat_template", On::Chat),
    honoured("chat_template_kwargs", On::Chat),
    honoured("documents", On::Chat),
    honoured("reasoning_effort", On::Chat),
    honoured("tools", On::Chat),
    honoured("tool_choice", On::Chat),
    honoured("priority", On::Both),
    honoured("cache_salt", On::Both),
    honoured("request_id", On::Both),
    honoured("kwire", On::Both),
    no_effect("user", On::Both, PLATFORM_ONLY),
    no_effect("safety_identifier", On::Both, PLATFORM_ONLY),
    no_effect("metadata", On::Both, PLATFORM_ONLY),
    no_effect("service_tier", On::Both, PLATFORM_ONLY),
    no_effect("prompt_cache_key", On::Both, "Prefixes are cached by their content."),
    no_effect("prompt_cache_retention", On::Both, "Prefixes are cached while there is room."),
    no_effect("prediction", On::Chat, "It only makes OpenAI's answer faster."),
    no_effect("parallel_tool_calls", On::Chat, "There are no tool calls to limit."),
    no_effect("include_reasoning", On::Chat, "Reasoning is not split from the text."),
    no_effect("spaces_between_special_tokens", On::Both, "It concerns slow tokenizers only."),
    no_effect("stream_interval", On::Both, "Text is sent as soon as it is there."),
    no_effect("session_id", On::Both, "It only helps a router; prefixes are cached by their content."),
    no_effect("return_prompt_text", On::Both, "It only asks for more output."),
    refused("store", On::Both, empty, "Nothing is stored; leave it out."),
    refused("best_of", On::Both, one, "Use `n`."),
    refused("use_beam_search", On::Both, empty, NO_BEAM_SEARCH),
    refused("length_penalty", On::Both, one, NO_BEAM_SEARCH),
    refused("early_stopping", On::Both, empty, NO_BEAM_SEARCH),
    refused("suffix", On::Completions, empty, "Put the text around the gap into the prompt, as the model expects it."),
    refused("prompt_embeds", On::Both, empty, "Send text or token ids."),
    refused("echo", On::Chat, empty, "Use `continue_final_message`, and put the message before the answer yourself."),
    refused("response_format", On::Both, text_format, NO_STRUCTURED_OUTPUT),
    refused("structured_outputs", On::Both, empty_or_all_null, NO_STRUCTURED_OUTPUT),
    refused("structural_tag", On::Both, empty, NO_STRUCTURED_OUTPUT),
    refused("guided_json", On::Both, empty, NO_STRUCTURED_OUTPUT),
    refused("guided_regex", On::Both, empty, NO_STRUCTURED_OUTPUT),
    refused("guided_choice", On::Both, empty, NO_STRUCTURED_OUTPUT),
    refused("guided_grammar", On::Both, empty, NO_STRUCTURED_OUTPUT),
    refused("guided_decoding_backend", On::Both, empty, NO_STRUCTURED_OUTPUT),
    refused("guided_whitespace_pattern", On::Both, empty, NO_STRUCTURED_OUTPUT),
    refused("functions", On::Chat, empty, "Use `tools`."),
    refused("function_call", On::Chat, none_or_empty, "Use `tool_choice`."),
    refused("logits_processors", On::Both, empty, "Code from requests never runs."),
    refused("allowed_token_ids", On::Both, empty, "Use `logit_bias`."),
    refused("bad_words", On::Both, empty, "Use `logit_bias`."),
    refused("logprob_token_ids", On::Both, empty, "Use `logprobs`."),
    refused("thinking_token_budget", On::Both, never, "Limit the answer with `max_tokens`."),
    refused("repetition_detection", On::Both, all_null, "Use the penalties."),
    refused("verbosity", On::Chat, medium, "Say it in the prompt."),
    refused("modalities", On::Chat, text_modality, "Only text is supported."),
    refused("audio", On::Chat, empty, "Only text is supported."),
    refused("mm_processor_kwargs", On::Both, empty, "Only text is supported."),
    refused("media_io_kwargs", On::Both, empty, "Only text is supported."),
    refused("web_search_options", On::Chat, never, "The server does not search."),
    refused("kv_transfer_params", On::Both, empty, "Caches are not moved between servers."),
    refused("vllm_xargs", On::Both, empty, "There are no plugins to read it."),
    refused("return_routed_experts", On::Both, empty, "It is not supported."),
    refused("truncation_side", On::Both, |v| v == "left", "Prompts are truncated on the left."),
    refused("data_parallel_rank", On::Both, zero_or_empty, "The gateway chooses the replica."),
];

/// What `/tokenize` honours: a prompt, or what makes the prompt of a chat.
const TOKENIZE: &[&str] = &[
    "model",
    "prompt",
    "add_special_tokens",
    "return_token_strs",
    "messages",
    "add_generation_prompt",
    "continue_final_message",
    "chat_template",
    "chat_template_kwargs",
    "documents",
    "reasoning_effort",
    "tools",
];
/// What `/detokenize` honours.
const DETOKENIZE: &[&str] = &["model", "tokens"];

/// The names in `body` that `endpoint` does not know; none if it is no object.
pub fn unknown(body: &Value, endpoint: Endpoint) -> Vec<String> {
    let known = |name: &str| match endpoint {
        Endpoint::Tokenize => TOKENIZE.contains(&name),
        Endpoint::Detokenize => DETOKENIZE.contains(&name),
        Endpoint::Chat | Endpoint::Completions => field(name, endpoint).is_some(),
    };
    let names = body.as_object().into_iter().flat_map(Map::keys);
    names.filter(|name| !known(name)).cloned().collect()
}

/// The table's row for `name` on `endpoint`.
pub fn field(name: &str, endpoint: Endpoint) -> Option<&'static Field> {
    FIELDS.iter().find(|field| field.name == name && field.on.includes(endpoint))
}

/// Refuses unsupported fields.
pub fn check(body: &Map<String, Value>, endpoint: Endpoint) -> Result<(), FieldError> {
    for (name, value) in body {
        match field(name, endpoint).map(|field| field.class) {
            Some(Class::Refused(harmless, hint)) if !value.is_null() && !harmless(value) => {
                return Err(FieldError::new(name, format!("`{name}` is not supported. {hint}")));
            }
            _ => {}
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn each_name_is_in_the_table_once_per_route() {
        for (i, a) in FIELDS.iter().enumerate() {
            for b in &FIELDS[i + 1..] {
                let both =
                    [Endpoint::Chat, Endpoint::Completions].iter().any(|&e| a.on.includes(e) && b.on.includes(e));
                assert!(a.name != b.name || !both, "{} is there twice", a.name);
            }
        }
    }

    #[test]
    fn values_that_ask_for_nothing_are_fine() {
        let body = json!({
            "best_of": 1, "suffix": null, "tools": [], "response_format": {"type": "text"}, "guided_json": null,
            "structured_outputs": {}, "store": false, "modalities": ["text"], "use_beam_search": false,
        });
        assert_eq!(check(body.as_object().unwrap(), Endpoint::Chat), Ok(()));
        assert_eq!(unknown(&body, Endpoint::Chat), ["suffix"]);
    }

    #[test]
    fn each_route_knows_its_own_names() {
        let body = json!({"model": "m", "prompt": "x", "tokens": [1], "temperature": 0});
        assert_eq!(unknown(&body, Endpoint::Completions), ["tokens"]);
        assert_eq!(unknown(&body, Endpoint::Tokenize), ["tokens", "temperature"]);
        assert_eq!(unknown(&body, Endpoint::Detokenize), ["prompt", "temperature"]);
        assert_eq!(unknown(&json!([1]), Endpoint::Chat), [""; 0]);
    }

    #[test]
    fn unsupported_fields_are_refused_by_name() {
        for (name, value) in [
            ("best_of", json!(3)),
            ("response_format", json!({"type": "json_object"})),
            ("logits_processors", json!(["x"])),
            ("modalities", json!(["text", "audio"])),
            ("store", json!(true)),
            ("thinking_token_budget", json!(10)),
        ] {
            let body = json!({ name: value });
            let error = check(body.as_object().unwrap(), Endpoint::Chat).unwrap_err();
            assert_eq!(error.param, name);
        }
    }
}
