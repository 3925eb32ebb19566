//! What the text side takes from a checkpoint: tokenizer, chat template, special tokens, generation defaults.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};

use serde_json::Value;

use super::{Blame, CheckpointError, MetaValue, clip, gguf::Gguf, read_json_object, safetensors::read_small};
use crate::model::config::HfConfig;

const MAX_TEMPLATE_BYTES: u64 = 8 << 20;

/// Everything about text that a checkpoint holds.
#[derive(Debug, Clone, PartialEq)]
pub struct TextAssets {
    /// Where the tokenizer comes from.
    pub tokenizer: TokenizerSource,
    /// The chat template, Jinja; of several named ones the one named `default`.
    pub chat_template: Option<String>,
    /// The other templates, by name (`tool_use`, `rag`).
    pub named_templates: BTreeMap<String, String>,
    /// First token of a text.
    pub bos_token_id: Option<u32>,
    /// Tokens that end an answer: those of GGUF metadata, or of `generation_config.json` and then `config.json`.
    pub eos_token_ids: Vec<u32>,
    /// Whether the tokenizer puts the BOS token in front; `None`: the tokenizer file itself says.
    pub add_bos: Option<bool>,
    /// What `generation_config.json` suggests.
    pub generation: GenerationDefaults,
    /// Strings for templates: `bos_token`, `eos_token`, `unk_token`, `pad_token`...
    pub special_tokens: BTreeMap<String, String>,
}

/// A tokenizer to be built.
#[derive(Debug, Clone, PartialEq)]
pub enum TokenizerSource {
    /// A `tokenizer.json`.
    Json(PathBuf),
    /// The vocabulary in a GGUF file.
    Gguf(GgufVocab),
}

/// Sampling defaults of a checkpoint; `None`: not given.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
#[allow(missing_docs)]
pub struct GenerationDefaults {
    pub temperature: Option<f32>,
    pub top_p: Option<f32>,
    pub top_k: Option<u32>,
    pub min_p: Option<f32>,
    pub repetition_penalty: Option<f32>,
    pub max_new_tokens: Option<u32>,
}

impl GenerationDefaults {
    /// Reads what a `generation_config.json` object says; `path` names it in errors.
    pub fn parse(path: &Path, g: &Object) -> Result<Self, CheckpointError> {
        let number = |key: &str, least: f64, most: f64| match g.get(key).filter(|v| !v.is_null()) {
            None => Ok(None),
            Some(v) => match v.as_f64() {
                Some(x) if (least..=most).contains(&x) => Ok(Some(x)),
                _ => Err(Blame(path).invalid(format!("key {key:?}"), v.to_string(), format!("{least} to {most}"))),
            },
        };
        let most_count = f64::from(u32::MAX);
        Ok(Self {
            temperature: number("temperature", 0.0, 100.0)?.map(|x| x as f32),
            top_p: number("top_p", 0.0, 1.0)?.map(|x| x as f32),
            // -1 also means "all" to vLLM; the cast takes it to 0.
            top_k: number("top_k", -1.0, most_count)?.map(|x| x as u32),
            min_p: number("min_p", 0.0, 1.0)?.map(|x| x as f32),
            repetition_penalty: number("repetition_penalty", 0.0, 100.0)?.map(|x| x as f32),
            max_new_tokens: number("max_new_tokens", 1.0, most_count)?.map(|x| x as u32),
        })
    }

    /// Reads a `generation_config.json`.
    pub fn read(path: &Path) -> Result<Self, CheckpointError> {
        Self::parse(path, &read_json_object(path)?)
    }

    /// These values, and `base`'s where they are not given.
    pub fn or(self, base: Self) -> Self {
        Self {
            temperature: self.temperature.or(base.temperature),
            top_p: self.top_p.or(base.top_p),
            top_k: self.top_k.or(base.top_k),
            min_p: self.min_p.or(base.min_p),
            repetition_penalty: self.repetition_penalty.or(base.repetition_penalty),
            max_new_tokens: self.max_new_tokens.or(base.max_new_tokens),
        }
    }
}

/// `tokenizer.ggml.*` of a GGUF file. `scores` and `types` are empty or as long as `tokens`; ids lie below its length.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct GgufVocab {
    /// Where it was read, for messages.
    pub path: PathBuf,
    /// `gpt2` (byte-level BPE) or `llama` (SentencePiece).
    pub model: String,
    /// Name of the pre-tokenizer; empty if the file has none.
    pub pre: String,
    /// The tokens, by id.
    pub tokens: Vec<String>,
    /// SentencePiece scores, by id.
    pub scores: Vec<f32>,
    /// Kinds, by id: 1 normal, 2 unknown, 3 control, 4 user-defined, 5 unused, 6 byte.
    pub types: Vec<i32>,
    /// BPE merges, best first, two parts with a space between.
    pub merges: Vec<String>,
    /// Begins a text.
    pub bos: Option<u32>,
    /// Ends a text.
    pub eos: Option<u32>,
    /// Stands for what the vocabulary lacks.
    pub unk: Option<u32>,
    /// Fills batches.
    pub pad: Option<u32>,
    /// Put `bos` in front; `None`: the file leaves it to the kind of tokenizer.
    pub add_bos: Option<bool>,
    /// Put `eos` at the end.
    pub add_eos: Option<bool>,
    /// SentencePiece's dummy prefix.
    pub add_space_prefix: Option<bool>,
}

/// Reads `tokenizer.*` of a GGUF file.
pub(super) fn from_gguf(gguf: &Gguf) -> Result<TextAssets, CheckpointError> {
    let m = GgufKeys(gguf);
    let tokens = m.array("tokens")?.ok_or_else(|| m.wrong("tokens", "missing", "an array of strings"))?;
    let tokens = gguf.strings("tokenizer.ggml.tokens", tokens)?;
    let n = tokens.len();
    let scores = m.array("scores")?.map_or(Ok(Vec::new()), |a| gguf.f32s("tokenizer.ggml.scores", a))?;
    let types = m.array("token_type")?.map_or(Ok(Vec::new()), |a| gguf.i32s("tokenizer.ggml.token_type", a))?;
    for (key, len) in [("scores", scores.len()), ("token_type", types.len())] {
        if len != 0 && len != n {
            return Err(m.wrong(key, &format!("{len} elements"), &format!("{n}, one per token")));
        }
    }
    let vocab = GgufVocab {
        path: gguf.path().to_owned(),
        model: m.string("model")?.ok_or_else(|| m.wrong("model", "missing", "\"gpt2\" or \"llama\""))?,
        pre: m.string("pre")?.unwrap_or_default(),
        scores,
        types,
        merges: m.array("merges")?.map_or(Ok(Vec::new()), |a| gguf.strings("tokenizer.ggml.merges", a))?,
        bos: m.token("bos_token_id", n)?,
        eos: m.token("eos_token_id", n)?,
        unk: m.token("unknown_token_id", n)?,
        pad: m.token("padding_token_id", n)?,
        add_bos: m.flag("add_bos_token")?,
        add_eos: m.flag("add_eos_token")?,
        add_space_prefix: m.flag("add_space_prefix")?,
        tokens,
    };
    let mut eos_token_ids = Vec::new();
    for id in [vocab.eos, m.token("eot_token_id", n)?, m.token("eom_token_id", n)?].into_iter().flatten() {
        push_new(&mut eos_token_ids, id);
    }
    let mut special_tokens = BTreeMap::new();
    for (name, id) in
        [("bos_token", vocab.bos), ("eos_token", vocab.eos), ("unk_token", vocab.unk), ("pad_token", vocab.pad)]
    {
        special_tokens.extend(id.map(|id| (name.to_owned(), vocab.tokens[id as usize].clone())));
    }
    let (chat_template, named_templates) = gguf_templates(gguf)?;
    Ok(TextAssets {
        chat_template,
        named_templates,
        bos_token_id: vocab.bos,
        eos_token_ids,
        add_bos: vocab.add_bos,
        generation: GenerationDefaults::default(),
        special_tokens,
        tokenizer: TokenizerSource::Gguf(vocab),
    })
}

type Templates = (Option<String>, BTreeMap<String, String>);

/// `tokenizer.chat_template`, and `tokenizer.chat_template.NAME` for further ones.
fn gguf_templates(gguf: &Gguf) -> Result<Templates, CheckpointError> {
    const KEY: &str = "tokenizer.chat_template";
    let (mut default, mut named) = (None, BTreeMap::new());
    for (key, value) in gguf.meta().iter().filter(|(key, _)| key.starts_with(KEY)) {
        match (key[KEY.len()..].strip_prefix('.'), value) {
            (None, MetaValue::Str(text)) if key == KEY => default = Some(text.clone()),
            (Some(name), MetaValue::Str(text)) => drop(named.insert(name.to_owned(), text.clone())),
            (None, _) if key == KEY => {
                return Err(Blame(gguf.path()).invalid(format!("key {key:?}"), format!("{value:?}"), "a string"));
            }
            // `tokenizer.chat_templates` lists the names.
            _ => {}
        }
    }
    Ok((default, named))
}

/// Typed access to `tokenizer.ggml.*`.
struct GgufKeys<'a>(&'a Gguf);

impl GgufKeys<'_> {
    fn get(&self, key: &str) -> Option<&MetaValue> {
        self.0.meta().get(&format!("tokenizer.ggml.{key}"))
    }

    fn wrong(&self, key: &str, found: &str, expected: &str) -> CheckpointError {
        Blame(self.0.path()).invalid(format!("key \"tokenizer.ggml.{key}\""), found, expected)
    }

    fn array(&self, key: &str) -> Result<Option<super::MetaArray>, CheckpointError> {
        match self.get(key) {
            None => Ok(None),
            Some(MetaValue::Array(a)) => Ok(Some(*a)),
            Some(other) => Err(self.wrong(key, &format!("{other:?}"), "an array")),
        }
    }

    fn string(&self, key: &str) -> Result<Option<String>, CheckpointError> {
        match self.get(key) {
            None => Ok(None),
            Some(MetaValue::Str(s)) => Ok(Some(s.clone())),
            Some(other) => Err(self.wrong(key, &format!("{other:?}"), "a string")),
        }
    }

    fn flag(&self, key: &str) -> Result<Option<bool>, CheckpointError> {
        match self.get(key) {
            None => Ok(None),
            Some(MetaValue::Bool(b)) => Ok(Some(*b)),
            Some(other) => Err(self.wrong(key, &format!("{other:?}"), "true or false")),
        }
    }

    fn token(&self, key: &str, n_tokens: usize) -> Result<Option<u32>, CheckpointError> {
        match self.get(key) {
            None => Ok(None),
            Some(MetaValue::U64(id)) if *id < n_tokens as u64 && *id < u64::from(u32::MAX) => Ok(Some(*id as u32)),
            Some(other) => Err(self.wrong(key, &format!("{other:?}"), &format!("a token id below {n_tokens}"))),
        }
    }
}

/// Reads the text files of a Hugging Face folder; `instead` is a `tokenizer.json` from elsewhere.
pub(super) fn from_folder(
    folder: &Path,
    config: &HfConfig,
    instead: Option<PathBuf>,
) -> Result<TextAssets, CheckpointError> {
    let tokenizer = instead.unwrap_or_else(|| folder.join("tokenizer.json"));
    if !tokenizer.is_file() {
        return Err(CheckpointError::NotFound {
            path: tokenizer,
            reason: "tokenizer.json is needed; make it with transformers' AutoTokenizer(...).save_pretrained".into(),
        });
    }
    let tokenizer_config = optional_json(&folder.join("tokenizer_config.json"))?;
    let generation_path = folder.join("generation_config.json");
    let generation = optional_json(&generation_path)?;
    let mut eos_token_ids = Vec::new();
    for (path, value) in
        [(&generation_path, generation.get("eos_token_id")), (&folder.join("config.json"), config.get("eos_token_id"))]
    {
        for id in token_ids(path, "eos_token_id", value)? {
            push_new(&mut eos_token_ids, id);
        }
    }
    let mut bos_token_ids = token_ids(&generation_path, "bos_token_id", generation.get("bos_token_id"))?;
    if bos_token_ids.is_empty() {
        bos_token_ids = token_ids(&folder.join("config.json"), "bos_token_id", config.get("bos_token_id"))?;
    }
    let (chat_template, named_templates) = folder_templates(folder, &tokenizer_config)?;
    Ok(TextAssets {
        tokenizer: TokenizerSource::Json(tokenizer),
        chat_template,
        named_templates,
        bos_token_id: bos_token_ids.first().copied(),
        eos_token_ids,
        add_bos: tokenizer_config.get("add_bos_token").and_then(Value::as_bool),
        generation: GenerationDefaults::parse(&generation_path, &generation)?,
        special_tokens: special_tokens(folder, &tokenizer_config)?,
    })
}

type Object = serde_json::Map<String, Value>;

fn optional_json(path: &Path) -> Result<Object, CheckpointError> {
    if path.is_file() { read_json_object(path) } else { Ok(Object::new()) }
}

fn push_new(ids: &mut Vec<u32>, id: u32) {
    if !ids.contains(&id) {
        ids.push(id);
    }
}

/// One id or a list of them.
fn token_ids(path: &Path, key: &str, value: Option<&Value>) -> Result<Vec<u32>, CheckpointError> {
    const MAX_IDS: usize = 256;
    let id = |v: &Value| v.as_u64().and_then(|id| u32::try_from(id).ok());
    let ids = match value {
        None | Some(Value::Null) => Some(Vec::new()),
        Some(Value::Array(list)) if list.len() <= MAX_IDS => list.iter().map(id).collect(),
        Some(v) => id(v).map(|id| vec![id]),
    };
    ids.ok_or_else(|| {
        let found = value.map(Value::to_string).unwrap_or_default();
        Blame(path).invalid(format!("key {key:?}"), found, "a token id or a list of at most 256")
    })
}

/// `chat_template.jinja` (and `additional_chat_templates/*.jinja`), else `chat_template.json`, else
/// `tokenizer_config.json`: the order of transformers.
fn folder_templates(folder: &Path, tokenizer_config: &Object) -> Result<Templates, CheckpointError> {
    let (jinja, json) = (folder.join("chat_template.jinja"), folder.join("chat_template.json"));
    let mut templates = if jinja.is_file() {
        (Some(template_file(&jinja)?), BTreeMap::new())
    } else if json.is_file() {
        templates_in(&json, read_json_object(&json)?.get("chat_template"))?
    } else {
        templates_in(&folder.join("tokenizer_config.json"), tokenizer_config.get("chat_template"))?
    };
    if let Ok(files) = std::fs::read_dir(folder.join("additional_chat_templates")) {
        for path in files.flatten().map(|f| f.path()).filter(|p| p.extension().is_some_and(|e| e == "jinja")) {
            let name = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
            templates.1.insert(name, template_file(&path)?);
        }
    }
    Ok(templates)
}

fn template_file(path: &Path) -> Result<String, CheckpointError> {
    String::from_utf8(read_small(path, MAX_TEMPLATE_BYTES)?)
        .map_err(|_| Blame(path).invalid("file", "bytes that are not UTF-8", "UTF-8"))
}

/// A template, or a list of `{name, template}`.
fn templates_in(path: &Path, value: Option<&Value>) -> Result<Templates, CheckpointError> {
    let wrong = |v: &Value| {
        Blame(path).invalid("key \"chat_template\"", v.to_string(), "a string or a list of {name, template}")
    };
    match value {
        None | Some(Value::Null) => Ok((None, BTreeMap::new())),
        Some(Value::String(text)) => Ok((Some(text.clone()), BTreeMap::new())),
        Some(Value::Array(list)) => {
            let mut named = BTreeMap::new();
            for entry in list {
                match (entry.get("name").and_then(Value::as_str), entry.get("template").and_then(Value::as_str)) {
                    (Some(name), Some(text)) => named.insert(name.to_owned(), text.to_owned()),
                    _ => return Err(wrong(entry)),
                };
            }
            Ok((named.remove("default"), named))
        }
        Some(other) => Err(wrong(other)),
    }
}

/// `*_token` strings of `special_tokens_map.json` and, over them, of `tokenizer_config.json`.
fn special_tokens(folder: &Path, tokenizer_config: &Object) -> Result<BTreeMap<String, String>, CheckpointError> {
    let map = optional_json(&folder.join("special_tokens_map.json"))?;
    let mut out = BTreeMap::new();
    for (key, value) in map.iter().chain(tokenizer_config).filter(|(key, _)| key.ends_with("_token")) {
        // Either a plain string or an AddedToken object; `add_bos_token` and its like are booleans.
        let text = value.as_str().or_else(|| value.get("content").and_then(Value::as_str));
        out.extend(text.map(|text| (clip(key), text.to_owned())));
    }
    Ok(out)
}
