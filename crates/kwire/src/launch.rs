//! From settings to an engine on its thread: opens the checkpoint, plans the memory, loads the weights.
//!
//! Each phase logs one line with its time. The plan comes before the first weight is read, so that a model that does not
//! fit fails at once.

use std::path::Path;
use std::sync::mpsc::Receiver;
use std::thread::JoinHandle;
use std::time::Instant;

use anyhow::{Context, Result, bail};
use indicatif::{ProgressBar, ProgressStyle};
use kwire_engine::executor::local::LocalExecutor;
use kwire_engine::handle::Command;
use kwire_engine::model::checkpoint::{Checkpoint, GenerationDefaults, TokenizerSource};
use kwire_engine::model::spec::{DecoderSpec, WeightNames};
use kwire_engine::plan::{CacheConfig, FixedMemory, MemoryPlan};
use kwire_engine::{Bytes, ConfigError, Engine, ReportSink, SchedulerConfig};
use kwire_kernels::cpu::CpuBackend;
use kwire_kernels::{DType, KvDtype};
use kwire_server::model::{Capacity, ModelContext};
use kwire_server::text::assets;

use crate::config::memory::available_memory;
use crate::config::{self, GenerationConfig, LoadFormat, MaxModelLen, ServeConfig};

/// Tokens of a step if the user says nothing: large enough for the matrix kernels, small enough that a running answer waits
/// well under a second for a long prompt.
const DEFAULT_STEP_TOKENS: usize = 512;
/// Share of the free memory that the cache may have if the user says nothing. It is reserved, and taken as it fills.
const DEFAULT_CACHE_SHARE: f64 = 0.25;

/// A checkpoint that was opened and checked, and the memory it will take.
pub struct Opened {
    checkpoint: Checkpoint,
    spec: DecoderSpec,
    names: WeightNames,
    limits: SchedulerConfig,
    plan: MemoryPlan,
    cache: CacheConfig,
}

/// An engine that is ready to run.
pub struct Loaded {
    engine: Engine<LocalExecutor<CpuBackend>>,
    /// What the server needs to know of the model.
    pub model: ModelContext,
}

/// Logs how long a phase took.
struct Phase(Instant);

impl Phase {
    fn begin() -> Self {
        Self(Instant::now())
    }

    fn end(self, what: impl std::fmt::Display) {
        tracing::info!("{what} ({:.2} s)", self.0.elapsed().as_secs_f64());
    }
}

impl Opened {
    /// Opens the checkpoint and plans its memory.
    pub fn new(config: &ServeConfig, path: &Path) -> Result<Self> {
        check_format(config.model.load_format, path)?;
        let phase = Phase::begin();
        let checkpoint = Checkpoint::open(path)?;
        let (spec, names) = checkpoint.family()?;
        let available = usize::try_from(available_memory()).unwrap_or(usize::MAX);
        // All that follows from the length: limits, the cache's size, the plan.
        let with_len = |len: usize| {
            let limits = limits(config, len);
            let cache = cache_config(config, &checkpoint, &spec, &limits, available);
            let plan = MemoryPlan::new::<CpuBackend>(&checkpoint, &spec, &limits, cache, available)?;
            Ok((limits, cache, plan))
        };
        let (limits, cache, plan) = match (config.engine.max_model_len, with_len(max_model_len(config, &spec))) {
            (MaxModelLen::Fit, Err(ConfigError::ModelLenBeyondCache { fits, .. })) => with_len(fits),
            (_, planned) => planned,
        }?;
        let opened = Self { plan, checkpoint, spec, names, limits, cache };
        let path = opened.checkpoint.path().display();
        phase.end(format_args!("opened {path}; {} of memory are available", Bytes(available)));
        Ok(opened)
    }

    /// What the memory is for, in a few lines.
    pub fn memory(&self) -> String {
        let plan = &self.plan;
        format!(
            "weights {}, activations {}, KV cache {} = {} tokens: {:.1} sequences of {} tokens",
            Bytes(plan.weight_bytes),
            Bytes(plan.activation_bytes),
            Bytes(plan.cache_bytes),
            plan.cache_tokens,
            plan.cache_tokens as f64 / self.limits.max_model_len as f64,
            self.limits.max_model_len,
        )
    }

    /// Loads the tokenizer, then the weights: whatever is wrong with the text side stops the start before the long part.
    pub fn load(self, config: &ServeConfig) -> Result<Loaded> {
        let model = self.text(config)?;
        let executor = self.executor(config)?;
        Ok(Loaded { engine: Engine::new(self.limits, executor)?, model })
    }

    fn executor(&self, config: &ServeConfig) -> Result<LocalExecutor<CpuBackend>> {
        let phase = Phase::begin();
        let threads = config.engine.threads.unwrap_or_else(config::memory::cores);
        let backend = CpuBackend::new(threads, None)?;
        let isa = backend.isa();
        let total = self.checkpoint.total_bytes();
        let style = ProgressStyle::with_template("{msg} {bar:40} {bytes}/{total_bytes} {bytes_per_sec}")?;
        let bar = ProgressBar::new(total as u64).with_style(style).with_message("loading weights");
        let model = (self.spec.clone(), &self.names);
        let mut progress = |n: usize| bar.set_position(n as u64);
        let executor = LocalExecutor::load(backend, &self.checkpoint, model, &self.plan, &self.limits, &mut progress)?;
        bar.finish_and_clear();
        phase.end(format_args!("loaded {} of weights for {threads} threads of {isa:?}", Bytes(total)));
        Ok(executor)
    }

    /// Builds tokenizer and chat template, and gathers what else the server must know of the model.
    pub fn text(&self, config: &ServeConfig) -> Result<ModelContext> {
        let phase = Phase::begin();
        let given = config.model.tokenizer.as_ref();
        let given = given.map(|path| if path.is_dir() { path.join("tokenizer.json") } else { path.clone() });
        let text = self.checkpoint.text_with(given)?;
        let file = match &text.tokenizer {
            TokenizerSource::Json(path) => path.as_path(),
            TokenizerSource::Gguf(_) => self.checkpoint.path(),
        };
        let tokenizer = assets::tokenizer(&text)
            .with_context(|| format!("{} can't be used; --tokenizer PATH gives another", file.display()))?;
        let requests = &config.requests;
        let template = assets::template(&text, requests.chat_template.as_deref(), requests.content_format)
            .with_context(|| match &requests.chat_template {
                Some(_) => "--chat-template can't be used".to_owned(),
                None => format!("{}: --chat-template FILE gives another template", self.checkpoint.path().display()),
            })?;
        let plan = &self.plan;
        let capacity = Capacity {
            max_num_seqs: self.limits.max_num_seqs,
            block_size: self.cache.block_len,
            n_blocks: plan.cache_tokens / self.cache.block_len,
            cache_labels: vec![
                ("cache_dtype".into(), format!("{:?}", self.cache.dtype).to_lowercase()),
                ("enable_prefix_caching".into(), self.limits.prefix_caching.to_string()),
            ],
        };
        let model = ModelContext {
            names: config.model.served_names.clone(),
            root: self.checkpoint.path().display().to_string(),
            tokenizer: tokenizer.into(),
            template,
            max_model_len: self.limits.max_model_len,
            n_vocab: self.spec.n_vocab,
            eos_token_ids: text.eos_token_ids,
            generation: generation(config, text.generation)?,
            capacity,
        };
        phase.end("built the tokenizer and the chat template");
        Ok(model)
    }
}

impl Loaded {
    /// Starts the engine thread. Its result is the fault that ended it, if any.
    pub fn run(
        self,
        mailbox: Receiver<Command>,
        clock: impl Fn() -> f64 + Send + 'static,
        sink: ReportSink,
    ) -> Result<(ModelContext, JoinHandle<Result<()>>)> {
        let engine = self.engine;
        let thread = std::thread::Builder::new()
            .name("engine".into())
            .spawn(move || engine.run(&mailbox, clock, sink).context("the engine failed"))?;
        Ok((self.model, thread))
    }
}

/// Whether what was found is of the format that was asked for.
fn check_format(wanted: LoadFormat, path: &Path) -> Result<()> {
    match (wanted, path.is_dir()) {
        (LoadFormat::Gguf, true) => {
            bail!("--load-format gguf: {} is a folder; name the .gguf file, or leave the flag out", path.display())
        }
        (LoadFormat::Safetensors, false) => {
            bail!("--load-format safetensors: {} is a file; name a model folder, or leave the flag out", path.display())
        }
        _ => Ok(()),
    }
}

fn max_model_len(config: &ServeConfig, spec: &DecoderSpec) -> usize {
    match config.engine.max_model_len {
        MaxModelLen::Tokens(n) => n,
        MaxModelLen::FromModel | MaxModelLen::Fit => spec.max_positions,
    }
}

fn limits(config: &ServeConfig, max_model_len: usize) -> SchedulerConfig {
    let engine = &config.engine;
    let step = if engine.chunked_prefill { DEFAULT_STEP_TOKENS } else { max_model_len };
    SchedulerConfig {
        max_num_seqs: engine.max_num_seqs,
        max_num_batched_tokens: engine.max_num_batched_tokens.unwrap_or(step.max(engine.max_num_seqs)),
        max_model_len,
        chunked_prefill: engine.chunked_prefill,
        long_prefill_token_threshold: engine.long_prefill_token_threshold.unwrap_or(0),
        prefix_caching: engine.prefix_caching,
        policy: engine.policy,
    }
}

fn cache_config(
    config: &ServeConfig,
    checkpoint: &Checkpoint,
    spec: &DecoderSpec,
    limits: &SchedulerConfig,
    available: usize,
) -> CacheConfig {
    let dtype = config.engine.kv_cache_dtype.unwrap_or(match checkpoint.majority_dtype() {
        Some(DType::Bf16) => KvDtype::Bf16,
        _ => KvDtype::F16,
    });
    let block_len = config.engine.block_size;
    let bytes = config.engine.kv_cache_bytes.map_or_else(
        || {
            // No more than all sequences at full length could use.
            let most = MemoryPlan::cache_bytes_for(spec, limits, block_len, dtype).saturating_mul(limits.max_num_seqs);
            // If weights and activations do not fit, the plan says so.
            let room = FixedMemory::new::<CpuBackend>(checkpoint, spec, limits).room(limits, available).unwrap_or(0);
            most.min((available as f64 * DEFAULT_CACHE_SHARE) as usize).min(room)
        },
        |n| usize::try_from(n).unwrap_or(usize::MAX),
    );
    CacheConfig { block_len, dtype, bytes }
}

/// Sampling defaults: the checkpoint's or a folder's, with the user's own on top.
fn generation(config: &ServeConfig, own: GenerationDefaults) -> Result<GenerationDefaults> {
    let base = match &config.requests.generation_config {
        GenerationConfig::Auto => own,
        GenerationConfig::Neutral => GenerationDefaults::default(),
        GenerationConfig::Folder(folder) => GenerationDefaults::read(&folder.join("generation_config.json"))?,
    };
    let over = GenerationDefaults::parse(
        Path::new("--override-generation-config"),
        &config.requests.override_generation_config,
    )?;
    Ok(over.or(base))
}
