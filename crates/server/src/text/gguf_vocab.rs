//! A tokenizer from the vocabulary in a GGUF file, equal to the one that the model was published with.
//!
//! GGUF keeps tokens and merges but only the *name* of the pre-tokenizer, so each known name is written out here, as it
//! stands in the models' own `tokenizer.json`. An unknown name is refused: with the wrong split a model still talks, worse.

use std::collections::HashMap;

use kwire_engine::model::checkpoint::GgufVocab;
use tokenizers::{
    AddedToken, DecoderWrapper, PreTokenizerWrapper, Tokenizer,
    decoders::{byte_fallback::ByteFallback, fuse::Fuse, sequence::Sequence as Decoders, strip::Strip},
    models::bpe::{BPE, Merges, Vocab},
    normalizers::{NFC, NormalizerWrapper, Prepend, Replace, Sequence as Normalizers},
    pre_tokenizers::{
        byte_level::ByteLevel,
        digits::Digits,
        sequence::Sequence as PreTokenizers,
        split::{Split, SplitPattern},
    },
    processors::template::{SpecialToken, TemplateProcessing},
    tokenizer::SplitDelimiterBehavior,
};

/// Longest SentencePiece token that is accepted; trained pieces have a few dozen bytes. Keeps the search for merges linear.
const MAX_PIECE_BYTES: usize = 1024;
/// SentencePiece's mark for a space.
const SPACE_MARK: &str = "▁";

// Token types of llama.h (`llama_token_type`).
const TYPE_NORMAL: i32 = 1;
const TYPE_UNKNOWN: i32 = 2;
const TYPE_CONTROL: i32 = 3;
const TYPE_USER_DEFINED: i32 = 4;

/// A vocabulary from which no tokenizer can be built.
#[derive(Debug, thiserror::Error)]
pub enum VocabError {
    /// A kind of tokenizer that is not known here.
    #[error(
        "{file}: tokenizer.ggml.{key} {found:?} is not supported; {known} are. \
         Give the model's own tokenizer with --tokenizer PATH"
    )]
    Unsupported {
        /// The GGUF file.
        file: String,
        /// `model` or `pre`.
        key: &'static str,
        /// Its value.
        found: String,
        /// The values that work.
        known: &'static str,
    },
    /// A vocabulary that contradicts itself.
    #[error("{file}: tokenizer.ggml.{key}: {found}; expected {expected}")]
    Invalid {
        /// The GGUF file.
        file: String,
        /// The key, with an index.
        key: String,
        /// What is wrong.
        found: String,
        /// What would be right.
        expected: &'static str,
    },
}

/// Builds the tokenizer.
pub fn tokenizer(vocab: &GgufVocab) -> Result<Tokenizer, VocabError> {
    let ids = token_ids(vocab)?;
    let mut tokenizer = match vocab.model.as_str() {
        "gpt2" => byte_level(vocab, &ids)?,
        "llama" => sentencepiece(vocab, &ids)?,
        other => return Err(unsupported(vocab, "model", other, "gpt2 and llama")),
    };
    add_special_tokens(vocab, &mut tokenizer);
    if let Some(template) = template(vocab)? {
        tokenizer.with_post_processor(Some(template));
    }
    Ok(tokenizer)
}

fn unsupported(vocab: &GgufVocab, key: &'static str, found: &str, known: &'static str) -> VocabError {
    VocabError::Unsupported { file: vocab.path.display().to_string(), key, found: clip(found), known }
}

fn invalid(vocab: &GgufVocab, key: impl Into<String>, found: impl Into<String>, expected: &'static str) -> VocabError {
    let file = vocab.path.display().to_string();
    VocabError::Invalid { file, key: key.into(), found: clip(&found.into()), expected }
}

fn clip(text: &str) -> String {
    text.chars().take(200).collect()
}

fn token_ids(vocab: &GgufVocab) -> Result<HashMap<&str, u32>, VocabError> {
    let mut ids = HashMap::with_capacity(vocab.tokens.len());
    for (id, token) in vocab.tokens.iter().enumerate() {
        if let Some(first) = ids.insert(token.as_str(), id as u32) {
            let found = format!("{token:?}, as token {first}");
            return Err(invalid(vocab, format!("tokens[{id}]"), found, "each token once"));
        }
    }
    Ok(ids)
}

fn owned(ids: &HashMap<&str, u32>) -> Vocab {
    ids.iter().map(|(token, id)| ((*token).to_owned(), *id)).collect()
}

/// GPT-2's scheme: bytes spelled as letters, merges in order.
fn byte_level(vocab: &GgufVocab, ids: &HashMap<&str, u32>) -> Result<Tokenizer, VocabError> {
    let (split, nfc, ignore_merges) = pre_tokenizer(vocab)?;
    let mut merges: Merges = Vec::with_capacity(vocab.merges.len());
    for (i, merge) in vocab.merges.iter().enumerate() {
        match merge.split_once(' ') {
            Some((left, right)) if !left.is_empty() && !right.is_empty() && !right.contains(' ') => {
                merges.push((left.to_owned(), right.to_owned()));
            }
            _ => return Err(invalid(vocab, format!("merges[{i}]"), format!("{merge:?}"), "two parts, one space")),
        }
    }
    let model = BPE::builder()
        .vocab_and_merges(owned(ids), merges)
        .ignore_merges(ignore_merges)
        .build()
        .map_err(|e| invalid(vocab, "merges", e.to_string(), "merges of tokens into tokens"))?;
    let mut tokenizer = Tokenizer::new(model);
    tokenizer.with_pre_tokenizer(Some(split));
    tokenizer.with_normalizer(nfc.then_some(NFC));
    tokenizer.with_decoder(Some(ByteLevel::default()));
    Ok(tokenizer)
}

/// How text is cut into words, whether it is normalized to NFC first, and whether whole words skip the merges.
fn pre_tokenizer(vocab: &GgufVocab) -> Result<(PreTokenizers, bool, bool), VocabError> {
    // Aliases are llama.cpp's (src/llama-vocab.cpp).
    Ok(match vocab.pre.as_str() {
        "smollm" => {
            let bytes = ByteLevel::new(false, true, true);
            (PreTokenizers::new(vec![Digits::new(true).into(), bytes.into()]), false, false)
        }
        "llama-bpe" | "llama3" | "llama-v3" => (split(r"\p{N}{1,3}"), false, true),
        "qwen2" | "deepseek-r1-qwen" => (split(r"\p{N}"), true, false),
        other => return Err(unsupported(vocab, "pre", other, "smollm, llama-bpe and qwen2")),
    })
}

/// Contractions, words, numbers, punctuation, line ends, spaces; then bytes.
fn split(number: &str) -> PreTokenizers {
    let pattern = [
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|",
        number,
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ];
    let split = Split::new(SplitPattern::Regex(pattern.concat()), SplitDelimiterBehavior::Isolated, false)
        .expect("the pattern is constant and tested");
    PreTokenizers::new(vec![PreTokenizerWrapper::Split(split), ByteLevel::new(false, true, false).into()])
}

/// SentencePiece BPE as transformers runs it: byte fallback, merges rebuilt from the scores.
fn sentencepiece(vocab: &GgufVocab, ids: &HashMap<&str, u32>) -> Result<Tokenizer, VocabError> {
    let by_type = || vocab.types.iter().position(|t| *t == TYPE_UNKNOWN);
    let unk = vocab.unk.map(|id| id as usize).or_else(by_type).and_then(|id| vocab.tokens.get(id));
    let unk = unk.ok_or_else(|| invalid(vocab, "unknown_token_id", "missing", "the id of the unknown token"))?;
    let model = BPE::builder()
        .vocab_and_merges(owned(ids), merges_from_scores(vocab, ids)?)
        .unk_token(unk.clone())
        .fuse_unk(true)
        .byte_fallback(true)
        .build()
        .map_err(|e| invalid(vocab, "tokens", e.to_string(), "a SentencePiece vocabulary"))?;
    let mut tokenizer = Tokenizer::new(model);
    let mark = Replace::new(" ", SPACE_MARK).expect("a plain pattern");
    let unmark = Replace::new(SPACE_MARK, " ").expect("a plain pattern");
    let mut normalizers: Vec<NormalizerWrapper> = Vec::new();
    let mut decoders: Vec<DecoderWrapper> = vec![unmark.into(), ByteFallback::new().into(), Fuse::new().into()];
    if vocab.add_space_prefix.unwrap_or(true) {
        normalizers.push(Prepend::new(SPACE_MARK.to_owned()).into());
        decoders.push(Strip::new(' ', 1, 0).into());
    }
    normalizers.push(mark.into());
    tokenizer.with_normalizer(Some(Normalizers::new(normalizers)));
    tokenizer.with_decoder(Some(Decoders::new(decoders)));
    Ok(tokenizer)
}

/// Every way to make a piece of two pieces, best score first (transformers `convert_slow_tokenizer.py`,
/// `generate_merges`). Only normal pieces arise from merges: sentencepiece never merges into a control token.
fn merges_from_scores(vocab: &GgufVocab, ids: &HashMap<&str, u32>) -> Result<Merges, VocabError> {
    if vocab.scores.len() != vocab.tokens.len() {
        return Err(invalid(vocab, "scores", format!("{} scores", vocab.scores.len()), "a score for each token"));
    }
    let mut found: Vec<(f32, u32, u32)> = Vec::with_capacity(2 * vocab.tokens.len());
    for (id, (piece, score)) in vocab.tokens.iter().zip(&vocab.scores).enumerate() {
        if token_type(vocab, id) != TYPE_NORMAL {
            continue;
        }
        if piece.len() > MAX_PIECE_BYTES || !score.is_finite() {
            let found = format!("a token of {} bytes with score {score}", piece.len());
            return Err(invalid(vocab, format!("tokens[{id}]"), found, "at most 1024 bytes and a finite score"));
        }
        for (at, _) in piece.char_indices().skip(1) {
            if let (Some(left), Some(right)) = (ids.get(&piece[..at]), ids.get(&piece[at..])) {
                found.push((*score, *left, *right));
            }
        }
    }
    found.sort_by(|a, b| b.0.total_cmp(&a.0).then((a.1, a.2).cmp(&(b.1, b.2))));
    let text = |id: u32| vocab.tokens[id as usize].clone();
    Ok(found.into_iter().map(|(_, left, right)| (text(left), text(right))).collect())
}

fn token_type(vocab: &GgufVocab, id: usize) -> i32 {
    vocab.types.get(id).copied().unwrap_or(TYPE_NORMAL)
}

/// Control tokens are special (decoding can leave them out); user-defined ones are only never split.
fn add_special_tokens(vocab: &GgufVocab, tokenizer: &mut Tokenizer) {
    let of_type = |wanted: &[i32], special: bool| -> Vec<AddedToken> {
        let tokens = vocab.tokens.iter().enumerate().filter(|(id, _)| wanted.contains(&token_type(vocab, *id)));
        tokens.map(|(_, token)| AddedToken::from(token.as_str(), special).normalized(false)).collect()
    };
    tokenizer.add_special_tokens(&of_type(&[TYPE_CONTROL, TYPE_UNKNOWN], true));
    tokenizer.add_tokens(&of_type(&[TYPE_USER_DEFINED], false));
}

/// Tokens put around a text. Where the file does not say, SentencePiece and Llama 3 begin with BOS (llama.cpp does so).
fn template(vocab: &GgufVocab) -> Result<Option<TemplateProcessing>, VocabError> {
    let bos_by_kind = vocab.model == "llama" || matches!(vocab.pre.as_str(), "llama-bpe" | "llama3" | "llama-v3");
    let token = |id: Option<u32>| id.and_then(|id| Some((id, vocab.tokens.get(id as usize)?)));
    let missing = |key: &str| invalid(vocab, key, "missing", "a token, as the file asks to add it");
    let mut special = Vec::new();
    let (mut first, mut second) = (vec!["$A"], vec!["$B:1"]);
    match token(vocab.bos) {
        Some((id, text)) if vocab.add_bos.unwrap_or(bos_by_kind) => {
            special.push(("BOS", id, text));
            first.insert(0, "BOS");
            second.insert(0, "BOS:1");
        }
        None if vocab.add_bos == Some(true) => return Err(missing("bos_token_id")),
        _ => {}
    }
    match token(vocab.eos) {
        Some((id, text)) if vocab.add_eos == Some(true) => {
            special.push(("EOS", id, text));
            first.push("EOS");
            second.push("EOS:1");
        }
        None if vocab.add_eos == Some(true) => return Err(missing("eos_token_id")),
        _ => {}
    }
    if special.is_empty() {
        return Ok(None);
    }
    let tokens: Vec<SpecialToken> = special
        .into_iter()
        .map(|(name, id, text)| {
            SpecialToken::new(name.to_owned(), vec![id], vec![text.clone()]).expect("one id, one text")
        })
        .collect();
    let template = TemplateProcessing::builder()
        .try_single(first.join(" "))
        .and_then(|b| b.try_pair([first, second].concat().join(" ")))
        .expect("the template is made of known words")
        .special_tokens(tokens)
        .build()
        .expect("every special token of the template is given");
    Ok(Some(template))
}
