//! Checkpoints on disk: a `.gguf` file, or a Hugging Face folder with `config.json` and safetensors.
//!
//! Invariants:
//! - Files are hostile until checked. Opening checks every count, offset, size and overlap, so that [`Checkpoint::read`]
//!   of a name that [`Checkpoint::info`] knows can only fail on I/O.
//! - No allocation is larger than the file justifies, no check takes more than `n log n` time, nothing panics.
//! - Every error names the file, the tensor or key, the value found and the value expected.

mod dummy;
mod gguf;
mod safetensors;
mod text;

use std::{
    borrow::Cow,
    collections::HashMap,
    path::{Path, PathBuf},
};

use kwire_kernels::DType;

use gguf::MetaArray;
pub(crate) use gguf::{Meta, MetaValue};
pub use text::{GenerationDefaults, GgufVocab, TextAssets, TokenizerSource};

use super::{
    config::{HfConfig, ModelError},
    families,
    spec::{DecoderSpec, WeightNames},
};

/// What is wrong with a checkpoint, and where.
#[derive(Debug, thiserror::Error)]
pub enum CheckpointError {
    /// The system could not read a file.
    #[error("cannot read {}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// The system's reason.
        source: std::io::Error,
    },
    /// There is no checkpoint at this path.
    #[error("no checkpoint at {}: {reason}", path.display())]
    NotFound {
        /// What was opened.
        path: PathBuf,
        /// What was looked for.
        reason: String,
    },
    /// A file that is damaged, truncated or forged.
    #[error("{} is not a valid checkpoint file: {at}: {found}; expected {expected}", path.display())]
    Invalid {
        /// The file.
        path: PathBuf,
        /// Tensor, key or part of the header.
        at: String,
        /// The offending value.
        found: String,
        /// What would have been right.
        expected: String,
    },
    /// A sound file of a kind that this engine does not run.
    #[error("{}: {at}: {found} is not supported; {next}", path.display())]
    Unsupported {
        /// The file.
        path: PathBuf,
        /// Tensor, key or part of the header.
        at: String,
        /// The offending value.
        found: String,
        /// What to do instead.
        next: String,
    },
    /// A tensor that the checkpoint does not have.
    #[error("{} has no tensor {name:?}", path.display())]
    NoTensor {
        /// The checkpoint.
        path: PathBuf,
        /// The name asked for.
        name: String,
    },
}

/// Makes errors about one file.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Blame<'a>(pub &'a Path);

impl Blame<'_> {
    pub(crate) fn io(self, source: std::io::Error) -> CheckpointError {
        CheckpointError::Io { path: self.0.to_owned(), source }
    }

    pub(crate) fn invalid(
        self,
        at: impl Into<String>,
        found: impl Into<String>,
        expected: impl Into<String>,
    ) -> CheckpointError {
        CheckpointError::Invalid {
            path: self.0.to_owned(),
            at: clip(&at.into()),
            found: clip(&found.into()),
            expected: expected.into(),
        }
    }

    pub(crate) fn unsupported(
        self,
        at: impl Into<String>,
        found: impl Into<String>,
        next: impl Into<String>,
    ) -> CheckpointError {
        CheckpointError::Unsupported {
            path: self.0.to_owned(),
            at: clip(&at.into()),
            found: clip(&found.into()),
            next: next.into(),
        }
    }
}

/// Shortens text that a file supplied, so that a hostile name cannot flood a log.
pub(crate) fn clip(text: &str) -> String {
    const MAX_CHARS: usize = 200;
    match text.char_indices().nth(MAX_CHARS) {
        None => text.to_owned(),
        Some((end, _)) => format!("{}... ({} bytes)", &text[..end], text.len()),
    }
}

/// Format and size of one tensor.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorInfo {
    /// Element format.
    pub dtype: DType,
    /// Row-major, outermost dimension first, for GGUF too.
    pub shape: Vec<usize>,
    /// Size in the file.
    pub bytes: usize,
}

/// Where a tensor's bytes lie.
#[derive(Debug)]
struct Entry {
    info: TensorInfo,
    /// Index into the safetensors shards; 0 for GGUF.
    file: usize,
    /// Absolute position in that file.
    offset: usize,
}

/// The tensors of a file, in file order.
type Tensors = Vec<(String, Entry)>;

/// How safetensors files are read.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum ReadMode {
    /// Large reads by several threads into memory of our own: fastest on network and fast local disks.
    #[default]
    Parallel,
    /// Bytes borrowed from a map of the file: nothing is copied.
    Mmap,
}

/// An opened checkpoint: its headers are read and checked, its weights stay on disk until [`Checkpoint::read`].
#[derive(Debug)]
pub struct Checkpoint {
    path: PathBuf,
    tensors: HashMap<String, Entry>,
    /// Names in file order.
    order: Vec<String>,
    source: Source,
}

#[derive(Debug)]
enum Source {
    Gguf(gguf::Gguf),
    Hf {
        config: HfConfig,
        shards: Vec<safetensors::Shard>,
    },
    /// Random weights of a real config.
    Dummy {
        config: HfConfig,
        weights: dummy::Weights,
    },
}

impl Checkpoint {
    /// Opens a `.gguf` file, or a folder with `config.json` and `*.safetensors` (one file, or shards with
    /// `model.safetensors.index.json`).
    pub fn open(path: &Path) -> Result<Self, CheckpointError> {
        Self::open_with(path, ReadMode::default())
    }

    /// [`Checkpoint::open`] with a choice of how safetensors are read. GGUF files are always mapped.
    pub fn open_with(path: &Path, mode: ReadMode) -> Result<Self, CheckpointError> {
        let metadata = std::fs::metadata(path).map_err(|e| Blame(path).io(e))?;
        if metadata.is_dir() {
            return Self::open_folder(path, mode);
        }
        // By content, too: a blob of the Hugging Face cache has no extension.
        let is = |extension: &str| path.extension().is_some_and(|e| e.eq_ignore_ascii_case(extension));
        if is("gguf") || gguf::has_magic(path) {
            return Self::open_gguf(path);
        }
        let reason = match is("safetensors") {
            true => "a .safetensors file alone has no config; open the folder that holds it and config.json",
            false => "expected a .gguf file or a folder with config.json and *.safetensors",
        };
        Err(CheckpointError::NotFound { path: path.to_owned(), reason: reason.to_owned() })
    }

    fn open_gguf(path: &Path) -> Result<Self, CheckpointError> {
        let (gguf, list) = gguf::Gguf::open(path)?;
        Ok(Self::assemble(path, list, Source::Gguf(gguf)))
    }

    /// A GGUF file that is in memory; `name` is said in errors.
    pub fn from_gguf_bytes(name: &str, bytes: Vec<u8>) -> Result<Self, CheckpointError> {
        let path = Path::new(name);
        let (gguf, list) = gguf::Gguf::from_bytes(path, bytes)?;
        Ok(Self::assemble(path, list, Source::Gguf(gguf)))
    }

    /// Checks the header of a safetensors file that is in memory, for fuzzing: the tensors' names and formats.
    pub fn check_safetensors_bytes(name: &str, bytes: &[u8]) -> Result<Vec<(String, TensorInfo)>, CheckpointError> {
        let list = safetensors::check_bytes(Path::new(name), bytes)?;
        Ok(list.into_iter().map(|(name, entry)| (name, entry.info)).collect())
    }

    fn open_folder(path: &Path, mode: ReadMode) -> Result<Self, CheckpointError> {
        let config = HfConfig::load(&path.join("config.json"))?;
        let (shards, list) = safetensors::open_folder(path, mode)?;
        Ok(Self::assemble(path, list, Source::Hf { config, shards }))
    }

    /// Random weights for the `config.json` of a folder that needs no other file: to measure speed and memory (vLLM's
    /// `--load-format dummy`).
    pub fn dummy(path: &Path) -> Result<Self, ModelError> {
        let config = HfConfig::load(&path.join("config.json"))?;
        let (spec, names) = families::from_hf(&config)?;
        let dtype = match config.get("torch_dtype").or_else(|| config.get("dtype")).and_then(|d| d.as_str()) {
            Some("float16") => DType::F16,
            _ => DType::Bf16,
        };
        let list = dummy::tensors(&spec, &names, dtype);
        let most = list.iter().map(|(_, entry)| entry.info.bytes).max();
        let weights = dummy::Weights::new(most.unwrap_or(0), dtype);
        Ok(Self::assemble(path, list, Source::Dummy { config, weights }))
    }

    fn assemble(path: &Path, list: Tensors, source: Source) -> Self {
        let order = list.iter().map(|(name, _)| name.clone()).collect();
        Self { path: path.to_owned(), tensors: list.into_iter().collect(), order, source }
    }

    /// What was opened.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Names of all tensors, in file order.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.order.iter().map(String::as_str)
    }

    /// Format and shape of a tensor.
    pub fn info(&self, name: &str) -> Option<&TensorInfo> {
        self.tensors.get(name).map(|e| &e.info)
    }

    /// A tensor's bytes. Borrowed where the file is mapped; the start is aligned only as the file aligns it.
    pub fn read<'a>(&'a self, name: &str) -> Result<Cow<'a, [u8]>, CheckpointError> {
        let entry = self
            .tensors
            .get(name)
            .ok_or_else(|| CheckpointError::NoTensor { path: self.path.clone(), name: clip(name) })?;
        match &self.source {
            Source::Gguf(gguf) => Ok(Cow::Borrowed(gguf.bytes(entry.offset, entry.info.bytes))),
            Source::Hf { shards, .. } => shards[entry.file].read(entry.offset, entry.info.bytes),
            Source::Dummy { weights, .. } => Ok(Cow::Borrowed(weights.bytes(entry.info.bytes))),
        }
    }

    /// Bytes of all tensors together.
    pub fn total_bytes(&self) -> usize {
        self.tensors.values().map(|e| e.info.bytes).sum()
    }

    /// The format that most bytes are in, for the log.
    pub fn majority_dtype(&self) -> Option<DType> {
        let mut bytes: Vec<(DType, usize)> = Vec::new();
        for Entry { info, .. } in self.tensors.values() {
            match bytes.iter_mut().find(|(dtype, _)| *dtype == info.dtype) {
                Some((_, sum)) => *sum += info.bytes,
                None => bytes.push((info.dtype, info.bytes)),
            }
        }
        bytes.into_iter().max_by_key(|(_, sum)| *sum).map(|(dtype, _)| dtype)
    }

    /// The decoder that the checkpoint describes, and the names of its weights.
    pub fn family(&self) -> Result<(DecoderSpec, WeightNames), ModelError> {
        match &self.source {
            Source::Hf { config, .. } | Source::Dummy { config, .. } => families::from_hf(config),
            Source::Gguf(gguf) => {
                let rope_factors = match self.info(families::ROPE_FACTORS) {
                    None => None,
                    Some(info) => {
                        Some(gguf.floats(families::ROPE_FACTORS, info, &self.read(families::ROPE_FACTORS)?)?)
                    }
                };
                families::from_gguf(&self.path, gguf.meta(), &|name| self.info(name), rope_factors.as_deref())
            }
        }
    }

    /// What the text side needs: tokenizer, chat template, special tokens, generation defaults.
    pub fn text(&self) -> Result<TextAssets, CheckpointError> {
        self.text_with(None)
    }

    /// [`Checkpoint::text`] with a `tokenizer.json` in place of the checkpoint's own, which may then be missing.
    pub fn text_with(&self, tokenizer: Option<PathBuf>) -> Result<TextAssets, CheckpointError> {
        match &self.source {
            Source::Gguf(gguf) => text::from_gguf(gguf).map(|own| match tokenizer {
                Some(file) => TextAssets { tokenizer: TokenizerSource::Json(file), ..own },
                None => own,
            }),
            Source::Hf { config, .. } | Source::Dummy { config, .. } => {
                text::from_folder(&self.path, config, tokenizer)
            }
        }
    }
}

/// Reads a small JSON file that must hold an object.
pub(crate) fn read_json_object(path: &Path) -> Result<serde_json::Map<String, serde_json::Value>, CheckpointError> {
    const MAX_BYTES: u64 = 64 << 20;
    let text = safetensors::read_small(path, MAX_BYTES)?;
    serde_json::from_slice(&text).map_err(|e| Blame(path).invalid("JSON", e.to_string(), "a JSON object"))
}

#[cfg(test)]
mod tests;
