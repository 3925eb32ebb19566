//! Text to tokens, and what each token looks like.

use std::borrow::Cow;
use std::path::Path;

use serde_json::Value;

/// A tokenizer that cannot be used, or a text it cannot encode.
#[derive(Debug, thiserror::Error)]
pub enum TokenizerError {
    /// The file is not a tokenizer.
    #[error("cannot read the tokenizer: {0}")]
    Load(String),
    /// The library refused the text.
    #[error("cannot tokenize the text: {0}")]
    Encode(String),
    /// The library refused the tokens.
    #[error("cannot decode the tokens: {0}")]
    Decode(String),
}

/// The bytes of every token: text is their concatenation.
pub struct TokenBytes {
    bytes: Vec<u8>,
    ends: Vec<u32>,
    /// Whether single bytes have tokens of their own (`<0xE2>`), as in SentencePiece.
    pub fallback: bool,
}

/// A tokenizer, with tables for the work per token. Its cache of words is bounded (10,000 words of at most 256 bytes).
pub struct Tokenizer {
    inner: tokenizers::Tokenizer,
    bytes: Option<TokenBytes>,
    special: Vec<bool>,
    longest_token: usize,
    /// The first token of a text, and whether it is there; `None`: as the tokenizer itself does it.
    bos: Option<(u32, bool)>,
}

impl TokenBytes {
    /// The bytes of `token`; none for ids that stand for nothing.
    pub fn get(&self, token: u32) -> &[u8] {
        let i = token as usize;
        match self.ends.get(i) {
            Some(&end) => &self.bytes[i.checked_sub(1).map_or(0, |i| self.ends[i] as usize)..end as usize],
            None => &[],
        }
    }
}

impl Tokenizer {
    /// Reads a `tokenizer.json`.
    pub fn from_file(path: &Path) -> Result<Self, TokenizerError> {
        let json = std::fs::read(path).map_err(|e| TokenizerError::Load(format!("{}: {e}", path.display())))?;
        Self::from_json(&json)
    }

    /// Reads the contents of a `tokenizer.json`.
    pub fn from_json(json: &[u8]) -> Result<Self, TokenizerError> {
        let inner = tokenizers::Tokenizer::from_bytes(json).map_err(|e| TokenizerError::Load(e.to_string()))?;
        Ok(Self::new(inner))
    }

    /// Wraps a tokenizer. Truncation and padding that its file asks for are turned off: prompts are used whole.
    pub fn new(mut inner: tokenizers::Tokenizer) -> Self {
        let _ = inner.with_truncation(None); // fails only if given parameters
        inner.with_padding(None);
        let n_tokens = inner.get_vocab(true).values().max().map_or(0, |&id| id as usize + 1);
        let mut special = vec![false; n_tokens];
        for (id, token) in inner.get_added_tokens_decoder() {
            special[id as usize] = token.special;
        }
        let bytes = token_bytes(&inner, n_tokens);
        let name_len = |id| inner.id_to_token(id).map_or(0, |name| name.len());
        let longest_token = (0..n_tokens as u32).map(name_len).max().unwrap_or(1).max(1);
        Self { inner, bytes, special, longest_token, bos: None }
    }

    /// The same tokenizer, which puts `bos` before a text, or does not.
    pub fn with_bos(self, bos: u32, add: bool) -> Self {
        Self { bos: Some((bos, add)), ..self }
    }

    /// What [`Self::with_bos`] asks for, done to the tokens of a text and, if wanted, to where they end.
    fn fix_bos(&self, ids: &mut Vec<u32>, ends: Option<&mut Vec<usize>>) {
        let Some((bos, add)) = self.bos else { return };
        match (add, ids.first() == Some(&bos)) {
            (true, false) => {
                ids.insert(0, bos);
                if let Some(ends) = ends {
                    ends.insert(0, 0);
                }
            }
            (false, true) => {
                ids.remove(0);
                if let Some(ends) = ends {
                    ends.remove(0);
                }
            }
            _ => {}
        }
    }

    /// The tokens of `text`; with `special`, those that the tokenizer puts around a text, too.
    pub fn encode(&self, text: &str, special: bool) -> Result<Vec<u32>, TokenizerError> {
        let encoding = self.inner.encode_fast(text, special).map_err(|e| TokenizerError::Encode(e.to_string()))?;
        let mut ids = encoding.get_ids().to_vec();
        if special {
            self.fix_bos(&mut ids, None);
        }
        Ok(ids)
    }

    /// The tokens of `text`, and for each the byte of `text` where it ends (0 for tokens that were added).
    pub fn encode_with_ends(&self, text: &str, special: bool) -> Result<(Vec<u32>, Vec<usize>), TokenizerError> {
        let encoding = self.inner.encode(text, special).map_err(|e| TokenizerError::Encode(e.to_string()))?;
        let mut ends: Vec<usize> = encoding.get_offsets().iter().map(|&(_, end)| end).collect();
        let mut ids = encoding.get_ids().to_vec();
        if special {
            self.fix_bos(&mut ids, Some(&mut ends));
        }
        Ok((ids, ends))
    }

    /// The text of `ids` as a text of its own.
    pub fn decode(&self, ids: &[u32], skip_special: bool) -> Result<String, TokenizerError> {
        self.inner.decode(ids, skip_special).map_err(|e| TokenizerError::Decode(e.to_string()))
    }

    /// The table of bytes, if the tokenizer has one.
    pub fn bytes(&self) -> Option<&TokenBytes> {
        self.bytes.as_ref()
    }

    /// The bytes of one token, special or not.
    pub fn token_bytes(&self, token: u32) -> Cow<'_, [u8]> {
        match &self.bytes {
            Some(table) => Cow::Borrowed(table.get(token)),
            None => Cow::Owned(self.decode(&[token], false).unwrap_or_default().into_bytes()),
        }
    }

    /// The name of a token in the vocabulary.
    pub fn token_name(&self, token: u32) -> Option<String> {
        self.inner.id_to_token(token)
    }

    /// Whether `skip_special_tokens` leaves this token out.
    pub fn is_special(&self, token: u32) -> bool {
        self.special.get(token as usize).copied().unwrap_or(false)
    }

    /// One more than the highest token id.
    pub fn n_tokens(&self) -> usize {
        self.special.len()
    }

    /// A text has at least `text.len() / longest_token()` tokens, normalization aside.
    pub fn longest_token(&self) -> usize {
        self.longest_token
    }
}

/// How a decoder turns the name of one token into bytes.
#[derive(Debug, Default, PartialEq)]
struct ByteRules {
    byte_level: bool,
    fallback: bool,
    replace: Vec<(String, String)>,
}

/// The table, if the decoder works token by token: byte level, or replacements with byte fallback (SentencePiece).
fn token_bytes(tokenizer: &tokenizers::Tokenizer, n_tokens: usize) -> Option<TokenBytes> {
    let decoder = serde_json::to_value(tokenizer.get_decoder()?).ok()?;
    let mut rules = ByteRules::default();
    read_decoder(&decoder, &mut rules)?;
    let mut table = TokenBytes { bytes: Vec::new(), ends: Vec::with_capacity(n_tokens), fallback: rules.fallback };
    for id in 0..n_tokens as u32 {
        if let Some(name) = tokenizer.id_to_token(id) {
            rules.append(&name, &mut table.bytes);
        }
        table.ends.push(u32::try_from(table.bytes.len()).ok()?);
    }
    Some(table)
}

fn read_decoder(decoder: &Value, rules: &mut ByteRules) -> Option<()> {
    match decoder["type"].as_str()? {
        "ByteLevel" => rules.byte_level = true,
        "ByteFallback" => rules.fallback = true,
        "Fuse" => {}
        // Only strips the first token's space, which is not the first of the text here: it follows a prompt.
        "Strip" if decoder["stop"] == 0 => {}
        "Metaspace" => {
            rules.replace.push((decoder["replacement"].as_str()?.to_owned(), " ".to_owned()));
        }
        "Replace" => {
            let from = decoder["pattern"]["String"].as_str()?.to_owned();
            rules.replace.push((from, decoder["content"].as_str()?.to_owned()));
        }
        "Sequence" => decoder["decoders"].as_array()?.iter().try_for_each(|part| read_decoder(part, rules))?,
        _ => return None,
    }
    Some(())
}

impl ByteRules {
    fn append(&self, name: &str, out: &mut Vec<u8>) {
        if self.fallback
            && let Some(byte) = fallback_byte(name)
        {
            out.push(byte);
            return;
        }
        let mut text = Cow::Borrowed(name);
        for (from, to) in &self.replace {
            if text.contains(from.as_str()) {
                text = Cow::Owned(text.replace(from.as_str(), to));
            }
        }
        if self.byte_level {
            let begin = out.len();
            for c in text.chars() {
                match byte_level(c) {
                    Some(byte) => out.push(byte),
                    None => {
                        // A token with other characters, such as an added one, stands for itself.
                        out.truncate(begin);
                        out.extend_from_slice(text.as_bytes());
                        return;
                    }
                }
            }
        } else {
            out.extend_from_slice(text.as_bytes());
        }
    }
}

/// `<0xE2>` → 0xE2
fn fallback_byte(name: &str) -> Option<u8> {
    let hex = name.strip_prefix("<0x")?.strip_suffix('>')?;
    (hex.len() == 2).then(|| u8::from_str_radix(hex, 16).ok())?
}

/// The byte that GPT-2's alphabet writes as `c` (`bytes_to_unicode` of the GPT-2 repository): printable Latin-1 for
/// itself, the other 68 bytes in order from U+0100.
fn byte_level(c: char) -> Option<u8> {
    let printable = |b: u8| matches!(b, 0x21..=0x7E | 0xA1..=0xAC | 0xAE..=0xFF);
    match u32::from(c) {
        code @ 0..=0xFF => Some(code as u8).filter(|&b| printable(b)),
        code @ 0x100..=0x143 => (0..=255_u8).filter(|&b| !printable(b)).nth(code as usize - 0x100),
        _ => None,
    }
}
