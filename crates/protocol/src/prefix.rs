//! The canonical text of a request, over which gateways chain their prefix hashes.
//!
//! The gateway does not tokenize and renders no template, so both sides agree on a text that can be read off the JSON:
//! for completions the prompt; for chat, message by message, the role, a newline, the content (text parts one after
//! the other) and a newline. Model, adapter, salt, tools and template arguments belong in the hash's root. Prompts of
//! token ids have no text; their offsets count tokens.

use serde_json::Value;

/// A stretch of the canonical text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Segment<'a> {
    /// Text that the prompt contains verbatim, unless a template changes it.
    Content(&'a str),
    /// Text that stands for what the template writes between contents.
    Frame(&'a str),
}

impl<'a> Segment<'a> {
    /// The text itself.
    pub fn text(self) -> &'a str {
        match self {
            Self::Content(text) | Self::Frame(text) => text,
        }
    }
}

/// The canonical text of a chat's messages.
pub fn chat_segments(messages: &[Value]) -> Vec<Segment<'_>> {
    let mut out = Vec::with_capacity(messages.len() * 4);
    for message in messages {
        out.push(Segment::Frame(message["role"].as_str().unwrap_or("")));
        out.push(Segment::Frame("\n"));
        match &message["content"] {
            Value::String(text) => out.push(Segment::Content(text)),
            Value::Array(parts) => {
                out.extend(parts.iter().filter_map(|part| part["text"].as_str()).map(Segment::Content));
            }
            _ => {}
        }
        out.push(Segment::Frame("\n"));
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chat_text_is_role_newline_content_newline() {
        let messages = serde_json::json!([
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        ]);
        let text: String = chat_segments(messages.as_array().unwrap()).iter().map(|s| s.text()).collect();
        assert_eq!(text, "system\nBe brief.\nuser\nab\n");
    }
}
