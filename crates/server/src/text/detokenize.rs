//! Tokens to text, one at a time, never half a character.
//!
//! Most tokenizers map each token to bytes ([`super::tokenizer::TokenBytes`]): the text is their concatenation, and a
//! character is emitted when its last byte is there. Invalid bytes become U+FFFD just as a decoding of the whole would
//! make them, except that a run of byte-fallback tokens that begins with valid characters keeps those (the `tokenizers`
//! crate replaces the whole run, which no stream could know in time). Other tokenizers decode a small window of
//! tokens, as Text Generation Inference does.

use std::sync::Arc;

use super::Tokenizer;

/// Tokens of context that a window begins with.
const WINDOW_CONTEXT: usize = 6;
/// A window emits what it has, whole character or not, once it holds this many tokens.
const WINDOW_LIMIT: usize = 24;
/// Tokens at the end of the prompt that may hold the beginning of a character.
const PROMPT_TAIL: usize = 4;
const REPLACEMENT: &str = "\u{FFFD}";

/// The text of one sequence, in the making.
pub struct Detokenizer {
    tokenizer: Arc<Tokenizer>,
    skip_special: bool,
    mode: Mode,
}

enum Mode {
    /// Bytes that do not make a character yet.
    Bytes(Vec<u8>),
    /// Tokens, of which those up to `read` have been emitted; the text of the first `prefix` is context.
    Window { ids: Vec<u32>, prefix: usize, read: usize },
}

impl Detokenizer {
    /// The text that follows `prompt`. With `skip_special`, special tokens are left out.
    pub fn new(tokenizer: Arc<Tokenizer>, skip_special: bool, prompt: &[u32]) -> Self {
        let tail = |n: usize| &prompt[prompt.len().saturating_sub(n)..];
        let mode = if tokenizer.bytes().is_some() {
            Mode::Bytes(Vec::new())
        } else {
            let ids = tail(WINDOW_CONTEXT).to_vec();
            Mode::Window { read: ids.len(), ids, prefix: 0 }
        };
        let mut this = Self { tokenizer, skip_special, mode };
        if matches!(this.mode, Mode::Bytes(_)) {
            let mut ignored = String::new();
            tail(PROMPT_TAIL).iter().for_each(|&id| this.push(id, &mut ignored));
        }
        this
    }

    /// Appends to `out` the characters that `token` completes.
    pub fn push(&mut self, token: u32, out: &mut String) {
        if self.skip_special && self.tokenizer.is_special(token) {
            return;
        }
        match &mut self.mode {
            Mode::Bytes(pending) => {
                let Some(table) = self.tokenizer.bytes() else { unreachable!("the mode was chosen by it") };
                let bytes = table.get(token);
                if pending.is_empty()
                    && let Ok(text) = std::str::from_utf8(bytes)
                {
                    out.push_str(text);
                    return;
                }
                pending.extend_from_slice(bytes);
                drain_characters(pending, table.fallback, false, out);
            }
            Mode::Window { ids, .. } => {
                ids.push(token);
                self.advance_window(false, out);
            }
        }
    }

    /// Appends what is left: the text ended.
    pub fn flush(&mut self, out: &mut String) {
        match &mut self.mode {
            Mode::Bytes(pending) => {
                let fallback = self.tokenizer.bytes().is_some_and(|table| table.fallback);
                drain_characters(pending, fallback, true, out);
            }
            Mode::Window { .. } => self.advance_window(true, out),
        }
    }

    fn advance_window(&mut self, last: bool, out: &mut String) {
        let Mode::Window { ids, prefix, read } = &mut self.mode else { return };
        let decode = |ids: &[u32]| self.tokenizer.decode(ids, self.skip_special).unwrap_or_default();
        let before = decode(&ids[*prefix..*read]);
        let after = decode(&ids[*prefix..]);
        let held = ids.len() - *read;
        if after.ends_with(REPLACEMENT) && !last && held < WINDOW_LIMIT || after.len() <= before.len() {
            return;
        }
        let common = before.bytes().zip(after.bytes()).take_while(|(a, b)| a == b).count();
        let from = (0..=common).rev().find(|&i| after.is_char_boundary(i)).unwrap_or(0);
        out.push_str(&after[from..]);
        ids.drain(..*read);
        (*prefix, *read) = (0, ids.len());
    }
}

/// Moves whole characters from `pending` to `out`. Invalid bytes become U+FFFD, one for each byte with byte fallback,
/// else one for each maximal part of a character (Unicode 15, 3.9); at the end of the text incomplete ones do too.
fn drain_characters(pending: &mut Vec<u8>, per_byte: bool, last: bool, out: &mut String) {
    let mut from = 0;
    loop {
        match std::str::from_utf8(&pending[from..]) {
            Ok(text) => {
                out.push_str(text);
                from = pending.len();
                break;
            }
            Err(error) => {
                let valid = error.valid_up_to();
                out.push_str(std::str::from_utf8(&pending[from..from + valid]).unwrap_or_default());
                from += valid;
                let bad = match error.error_len() {
                    Some(n) => n,
                    None if last => pending.len() - from,
                    None => break,
                };
                (0..if per_byte { bad } else { 1 }).for_each(|_| out.push_str(REPLACEMENT));
                from += bad;
            }
        }
    }
    pending.drain(..from);
}
