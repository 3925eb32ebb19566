//! Chat templates: messages to a prompt, as transformers' `apply_chat_template` does it.
//!
//! Jinja with trimmed blocks, loop controls, Python's string and dictionary methods, `tojson` as `json.dumps`,
//! `strftime_now` and `raise_exception`. `{% generation %}` marks a span for training and renders what it holds.
//! Templates are data of strangers: instructions (fuel) and output are bounded.

use std::collections::BTreeMap;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};

use kwire_protocol::openai::chat::ChatPrompt;
use minijinja::value::{Value, ValueKind};
use minijinja::{Environment, Error, ErrorKind};
use serde_json::{Map, Value as Json, json};

use super::{clock, pyjson, pymethods};

/// Steps of the template machine that a rendering may take.
const FUEL: u64 = 50_000_000;
/// Bytes that a rendering may produce.
const MAX_OUTPUT: usize = 64 << 20;
const NAME: &str = "chat";

/// A template that cannot be used, or that refuses the messages.
#[derive(Debug, thiserror::Error)]
pub enum TemplateError {
    /// It is not valid Jinja.
    #[error("the chat template is not valid: {0}")]
    Syntax(String),
    /// It called `raise_exception`, or failed.
    #[error("the chat template refused the messages: {0}")]
    Render(String),
    /// The last message is not in the prompt as it is.
    #[error("`continue_final_message` is set, but the template does not print the final message as it is")]
    FinalMessage,
}

/// What shape of content a template takes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum ContentFormat {
    /// Found out by rendering a message both ways.
    #[default]
    Auto,
    /// Strings: lists of text parts are joined.
    String,
    /// Lists of parts: strings are wrapped.
    Parts,
    /// As the request has it, arguments of tool calls too, as transformers does.
    AsIs,
}

/// A compiled template.
pub struct ChatTemplate {
    environment: Environment<'static>,
    special_tokens: BTreeMap<String, String>,
    takes: Takes,
    parse_arguments: bool,
}

/// Which content a template prints sensibly.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Takes {
    Strings,
    Parts,
    Both,
}

impl ChatTemplate {
    /// Compiles `source`. `special_tokens` are variables such as `bos_token`.
    pub fn new(
        source: &str,
        special_tokens: BTreeMap<String, String>,
        format: ContentFormat,
    ) -> Result<Self, TemplateError> {
        let mut environment = environment();
        let source = rewrite_generation(source);
        environment.add_template_owned(NAME, source).map_err(|e| TemplateError::Syntax(describe(&e)))?;
        let mut this =
            Self { environment, special_tokens, takes: Takes::Both, parse_arguments: format != ContentFormat::AsIs };
        this.takes = match format {
            ContentFormat::String => Takes::Strings,
            ContentFormat::Parts => Takes::Parts,
            ContentFormat::AsIs => Takes::Both,
            ContentFormat::Auto => this.probe(),
        };
        Ok(this)
    }

    /// The prompt of `chat`; `unix_s` is what `strftime_now` reads.
    pub fn render(&self, chat: &ChatPrompt, unix_s: i64) -> Result<String, TemplateError> {
        let messages: Vec<Json> = chat.messages.iter().map(|message| self.prepare(message)).collect();
        let mut variables: BTreeMap<&str, Value> = BTreeMap::new();
        for (name, token) in &self.special_tokens {
            variables.insert(name, Value::from(token.as_str()));
        }
        variables.insert("messages", Value::from_serialize(&messages));
        variables.insert("tools", Value::from_serialize(&chat.tools));
        variables.insert("documents", Value::from_serialize(&chat.documents));
        variables.insert("add_generation_prompt", Value::from(chat.add_generation_prompt));
        for (name, value) in &chat.template_kwargs {
            variables.insert(name, Value::from_serialize(value));
        }
        let strftime = move |format: &str| clock::strftime(format, unix_s);
        variables.insert("strftime_now", Value::from_function(strftime));
        let text = self.run(&Value::from_serialize(&variables))?;
        if chat.continue_final_message {
            return cut_after_final(text, messages.last());
        }
        Ok(text)
    }

    /// The variables such as `bos_token`.
    pub fn special_tokens(&self) -> &BTreeMap<String, String> {
        &self.special_tokens
    }

    fn run(&self, variables: &Value) -> Result<String, TemplateError> {
        let failed = |e: Error| TemplateError::Render(describe(&e));
        let template = self.environment.get_template(NAME).map_err(failed)?;
        let mut out = Bounded(Vec::new());
        // minijinja has corners that panic, such as `''[::-1]`; a template must not take the server's thread with it.
        let render = AssertUnwindSafe(|| template.render_captured_to(variables, &mut out).map(drop));
        match catch_unwind(render) {
            Ok(rendered) => rendered.map_err(failed)?,
            Err(_) => return Err(TemplateError::Render("an operation of the template has no result".to_owned())),
        }
        String::from_utf8(out.0).map_err(|e| TemplateError::Render(e.to_string()))
    }

    /// Renders one message with its content as a string and as a part, and sees in which of them the text comes out.
    fn probe(&self) -> Takes {
        const MARK: &str = "kwire-content-probe";
        let prints = |content: Json| {
            let chat = ChatPrompt {
                messages: vec![json!({"role": "user", "content": content})],
                add_generation_prompt: true,
                ..ChatPrompt::default()
            };
            // A list that is printed as it is shows its keys.
            self.render(&chat, 0)
                .is_ok_and(|text| text.contains(MARK) && !text.contains("'type'") && !text.contains("\"type\""))
        };
        match (prints(json!(MARK)), prints(json!([{"type": "text", "text": MARK}]))) {
            (true, true) => Takes::Both,
            (false, true) => Takes::Parts,
            (_, false) => Takes::Strings,
        }
    }

    /// A message as the template takes it: keys without a value dropped, arguments of tool calls as objects, content
    /// in the right shape.
    fn prepare(&self, message: &Json) -> Json {
        let Json::Object(fields) = message else { return message.clone() };
        let mut out: Map<String, Json> =
            fields.iter().filter(|(_, v)| !v.is_null()).map(|(k, v)| (k.clone(), v.clone())).collect();
        if self.parse_arguments
            && let Some(Json::Array(calls)) = out.get_mut("tool_calls")
        {
            calls.iter_mut().for_each(parse_arguments);
        }
        if let Some(content) = out.get_mut("content") {
            match (self.takes, &*content) {
                (Takes::Strings, Json::Array(parts)) if parts.iter().all(|part| part["text"].is_string()) => {
                    let texts: Vec<&str> = parts.iter().filter_map(|part| part["text"].as_str()).collect();
                    *content = Json::String(texts.join("\n"));
                }
                (Takes::Parts, Json::String(text)) => *content = json!([{"type": "text", "text": text}]),
                _ => {}
            }
        }
        Json::Object(out)
    }
}

/// Templates print arguments with `tojson`, so the JSON text that clients send has to be parsed.
fn parse_arguments(call: &mut Json) {
    let Some(arguments) = call.pointer_mut("/function/arguments") else { return };
    if let Some(parsed @ Json::Object(_)) = arguments.as_str().and_then(|text| serde_json::from_str(text).ok()) {
        *arguments = parsed;
    }
}

/// The prompt up to the end of the final message (transformers, `render_jinja_template`).
fn cut_after_final(mut text: String, last: Option<&Json>) -> Result<String, TemplateError> {
    let content = last.map_or(&Json::Null, |message| &message["content"]);
    let content = match content {
        Json::Array(parts) => parts.last().map_or(&Json::Null, |part| &part["text"]),
        other => other,
    };
    let content = content.as_str().ok_or(TemplateError::FinalMessage)?;
    let at = text.rfind(content.trim()).ok_or(TemplateError::FinalMessage)?;
    let untrimmed = content.trim_start();
    let end = if text[at..].starts_with(untrimmed) { untrimmed.len() } else { content.trim().len() };
    text.truncate(at + end);
    Ok(text)
}

fn environment() -> Environment<'static> {
    let mut env = Environment::new();
    env.set_trim_blocks(true);
    env.set_lstrip_blocks(true);
    env.set_fuel(Some(FUEL));
    env.set_unknown_method_callback(pymethods::unknown_method);
    env.set_auto_escape_callback(|_| minijinja::AutoEscape::None);
    env.set_formatter(|out, _, value| out.write_str(&pyjson::py_str(value)).map_err(Error::from));
    env.add_filter("tojson", pyjson::tojson);
    env.add_filter("string", |value: &Value| pyjson::py_str(value));
    for name in ["length", "count"] {
        env.add_filter(name, pymethods::length);
    }
    for name in ["escape", "e"] {
        env.add_filter(name, pymethods::escape);
    }
    env.add_filter("list", pymethods::list);
    env.add_filter("int", pymethods::int);
    env.add_filter("indent", pymethods::indent);
    env.add_filter("round", pymethods::round);
    env.add_filter("title", pymethods::title_filter);
    env.add_filter("float", pymethods::float);
    env.add_test("number", |value: &Value| matches!(value.kind(), ValueKind::Number | ValueKind::Bool));
    env.add_function("raise_exception", |message: String| -> Result<Value, Error> {
        Err(Error::new(ErrorKind::InvalidOperation, message))
    });
    env
}

/// `{% generation %}` and `{% endgeneration %}`, which minijinja does not know, as a condition that always holds; the
/// whitespace around is treated the same.
fn rewrite_generation(source: &str) -> String {
    let mut out = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(at) = rest.find("{%") {
        let (before, tag) = rest.split_at(at);
        out.push_str(before);
        let end = tag.find("%}").map_or(tag.len(), |end| end + 2);
        let (tag, after) = tag.split_at(end);
        match tag.trim_start_matches("{%").trim_end_matches("%}").trim_matches(['-', '+']).trim() {
            "generation" => out.push_str(&tag.replace("generation", "if true")),
            "endgeneration" => out.push_str(&tag.replace("endgeneration", "endif")),
            _ => out.push_str(tag),
        }
        rest = after;
    }
    out.push_str(rest);
    out
}

/// The innermost message of an error: what a template said, or what failed.
fn describe(error: &Error) -> String {
    let mut text = error.detail().map_or_else(|| error.kind().to_string(), str::to_owned);
    if let Some(line) = error.line() {
        text.push_str(&format!(" (line {line})"));
    }
    text
}

/// Collects output up to the bound.
struct Bounded(Vec<u8>);

impl io::Write for Bounded {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.0.len() + bytes.len() > MAX_OUTPUT {
            return Err(io::Error::other("the rendered prompt is too long"));
        }
        self.0.extend_from_slice(bytes);
        Ok(bytes.len())
    }
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
