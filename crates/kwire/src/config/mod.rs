//! The settings of `kwire serve`, resolved and checked.
//!
//! [`resolve`] turns the raw [`ServeArgs`] and the environment into a [`ServeConfig`], or into every fault at once.
//! A `ServeConfig` proves that its values are of the right kind and agree with each other; whether they fit the
//! model and this machine is for the loader. This folder is the only reader of the environment in this crate, but for
//! the `AWS_` variables, which the S3 client reads itself.

pub mod environment;
pub mod memory;
pub mod number;
mod resolve;
mod show;

pub use resolve::resolve;

use std::path::PathBuf;

use kwire_engine::SchedulingPolicy;
use kwire_kernels::KvDtype;
use kwire_server::config::UnknownFields;
use kwire_server::text::template::ContentFormat;

use crate::models::ModelRef;

/// Everything `kwire serve` was asked to do.
#[derive(Debug, Clone, PartialEq)]
pub struct ServeConfig {
    /// What to serve.
    pub model: ModelSettings,
    /// Where to listen, and who may ask.
    pub listen: ListenSettings,
    /// Memory, batching and scheduling.
    pub engine: EngineSettings,
    /// How requests are read and answered.
    pub requests: RequestSettings,
    /// When to say no, and how to leave.
    pub limits: LimitSettings,
    /// Print these settings and leave.
    pub dry_run: bool,
}

/// The model and where its parts come from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ModelSettings {
    /// Its source.
    pub source: ModelRef,
    /// Names that requests may use, at least one; the first is the one in responses.
    pub served_names: Vec<String>,
    /// A tokenizer.json, or a folder that has one, in place of the model's own.
    pub tokenizer: Option<PathBuf>,
    /// Where downloads are kept, in place of the default.
    pub download_dir: Option<PathBuf>,
    /// The format of the weights that is asked for.
    pub load_format: LoadFormat,
}

/// Address, port and keys.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ListenSettings {
    /// Address or host name.
    pub host: String,
    /// 0: any free port.
    pub port: u16,
    /// Keys that open /v1; none: open to all.
    pub api_keys: Vec<String>,
}

/// What the engine is built with. `None`: the engine decides.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EngineSettings {
    /// The longest sequence.
    pub max_model_len: MaxModelLen,
    /// Bytes for the KV cache.
    pub kv_cache_bytes: Option<u64>,
    /// The type of cached keys and values.
    pub kv_cache_dtype: Option<KvDtype>,
    /// Tokens in a cache block.
    pub block_size: usize,
    /// Whether equal prompt beginnings share their cache.
    pub prefix_caching: bool,
    /// Sequences that run at the same time.
    pub max_num_seqs: usize,
    /// Tokens in a step.
    pub max_num_batched_tokens: Option<usize>,
    /// Whether long prompts are split over steps.
    pub chunked_prefill: bool,
    /// Prompt tokens of one request in a step.
    pub long_prefill_token_threshold: Option<usize>,
    /// Who runs first.
    pub policy: SchedulingPolicy,
    /// Base of the seeds of requests that bring none.
    pub seed: u64,
    /// CPU threads.
    pub threads: Option<usize>,
}

/// How requests are read and answered.
#[derive(Debug, Clone, PartialEq)]
pub struct RequestSettings {
    /// A chat template in place of the model's own: its text.
    pub chat_template: Option<String>,
    /// How message content reaches the template.
    pub content_format: ContentFormat,
    /// Whether requests may bring a template.
    pub trust_request_chat_template: bool,
    /// Where sampling defaults come from.
    pub generation_config: GenerationConfig,
    /// Sampling defaults that win over those.
    pub override_generation_config: serde_json::Map<String, serde_json::Value>,
    /// Most alternatives that `logprobs` may ask for; `None`: no limit.
    pub max_logprobs: Option<usize>,
    /// Whether `usage` tells how many prompt tokens were cached.
    pub prompt_tokens_details: bool,
    /// What to do about fields no one knows.
    pub unknown_fields: UnknownFields,
}

/// Bounds of the queue, and the time to drain.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LimitSettings {
    /// Requests waiting and running at most.
    pub max_queued_requests: Option<usize>,
    /// Prompt tokens waiting at most.
    pub max_queued_tokens: Option<usize>,
    /// Seconds that running answers get after SIGTERM.
    pub shutdown_timeout_s: u64,
}

/// The longest sequence: prompt and answer together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MaxModelLen {
    /// The model's own; start fails if memory can't hold it.
    FromModel,
    /// As much as memory allows, up to the model's own.
    Fit,
    /// This many tokens.
    Tokens(usize),
}

/// The format of the weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LoadFormat {
    /// Whatever is there.
    Auto,
    /// A folder of safetensors.
    Safetensors,
    /// One .gguf file.
    Gguf,
}

/// Words of the command line, with the values that they stand for; the first is the default.
pub type Words<T> = &'static [(&'static str, T)];

/// Formats of weights; vLLM's word for a folder of safetensors is `hf` too.
pub const LOAD_FORMATS: Words<LoadFormat> = &[
    ("auto", LoadFormat::Auto),
    ("safetensors", LoadFormat::Safetensors),
    ("gguf", LoadFormat::Gguf),
    ("hf", LoadFormat::Safetensors),
];

/// Types of cached keys and values; `None`: what suits the weights, of 16 bits.
pub const KV_DTYPES: Words<Option<KvDtype>> =
    &[("auto", None), ("bfloat16", Some(KvDtype::Bf16)), ("float16", Some(KvDtype::F16))];

/// Who runs first.
pub const POLICIES: Words<SchedulingPolicy> =
    &[("fcfs", SchedulingPolicy::Fcfs), ("priority", SchedulingPolicy::Priority)];

/// How message content reaches the chat template.
pub const CONTENT_FORMATS: Words<ContentFormat> =
    &[("auto", ContentFormat::Auto), ("string", ContentFormat::String), ("openai", ContentFormat::Parts)];

/// What to do about request fields that no one knows.
pub const UNKNOWN_FIELDS: Words<UnknownFields> = &[("warn", UnknownFields::Warn), ("reject", UnknownFields::Reject)];

/// The word for a value.
pub fn word<T: PartialEq>(words: Words<T>, value: &T) -> &'static str {
    words.iter().find(|(_, v)| v == value).map_or("?", |(word, _)| word)
}

/// Where sampling defaults come from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum GenerationConfig {
    /// The model's generation_config.json, if it has one.
    Auto,
    /// None: OpenAI's own.
    Neutral,
    /// The generation_config.json of this folder.
    Folder(PathBuf),
}
