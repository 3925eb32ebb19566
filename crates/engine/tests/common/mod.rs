//! Loads checkpoints for the tests and runs them a step at a time.

// Each test program uses a part of this.
#![allow(dead_code)]

use std::path::{Path, PathBuf};

use kwire_engine::batch::{Batch, Row, RowTokens, TableUpdate};
use kwire_engine::cache::groups::KvGroup;
use kwire_engine::executor::Executor;
use kwire_engine::executor::local::LocalExecutor;
use kwire_engine::model::checkpoint::Checkpoint;
use kwire_engine::model::spec::{DecoderSpec, WeightNames};
use kwire_engine::model::weights::LoadError;
use kwire_engine::plan::{CacheConfig, MemoryPlan};
use kwire_engine::{SchedulerConfig, SchedulingPolicy};
use kwire_kernels::KvDtype;
use kwire_kernels::cpu::CpuBackend;

/// How a test runs a model. The engine's memory plan is made from it.
#[derive(Debug, Clone, Copy)]
pub struct Options {
    /// Element format of the cache.
    pub kv_dtype: KvDtype,
    /// Longest sequence.
    pub max_len: usize,
    /// Tokens of a step at most.
    pub max_step: usize,
    /// Threads.
    pub n_workers: usize,
}

/// For the tiny checkpoints: no rounding but that of f32.
pub const EXACT: Options = Options { kv_dtype: KvDtype::F32, max_len: 64, max_step: 64, n_workers: 1 };

/// A file of the repository's `fixtures/`.
pub fn fixture(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures").join(path)
}

/// The shipped model, as `scripts/fetch_smollm2.py` stores it.
pub fn smollm2() -> PathBuf {
    let folder = |name: &str| std::env::var_os(name).map(PathBuf::from);
    let cache = || folder("XDG_CACHE_HOME").or_else(|| Some(folder("HOME")?.join(".cache"))).map(|c| c.join("kwire"));
    let home = folder("KWIRE_HOME").or_else(cache).expect("HOME is set");
    let path = home.join("models/smollm2/SmolLM2-135M-Instruct.Q4_1.gguf");
    assert!(path.exists(), "{} is missing: run scripts/fetch_smollm2.py", path.display());
    path
}

/// Tokens and the reference's logits for each of them.
pub struct Golden {
    pub tokens: Vec<u32>,
    pub logits: Vec<f32>,
}

/// Reads a golden file: `tokens` (i32) and `logits` (f32).
pub fn golden(path: &Path) -> Golden {
    let bytes = std::fs::read(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let tokens = file.tensor("tokens").unwrap();
    let logits = file.tensor("logits").unwrap();
    let chunks = |data: &[u8]| data.as_chunks::<4>().0.to_vec();
    assert_eq!(tokens.dtype(), safetensors::Dtype::I32);
    Golden {
        tokens: chunks(tokens.data()).into_iter().map(u32::from_le_bytes).collect(),
        logits: chunks(logits.data()).into_iter().map(f32::from_le_bytes).collect(),
    }
}

impl Golden {
    /// Greatest absolute difference.
    pub fn max_error(&self, logits: &[f32]) -> f32 {
        assert_eq!(self.logits.len(), logits.len());
        let differences =
            self.logits.iter().zip(logits).map(|(a, b)| if b.is_nan() { f32::INFINITY } else { (a - b).abs() });
        differences.fold(0.0, f32::max)
    }
}

/// A checkpoint on the CPU.
pub struct Model {
    executor: LocalExecutor<CpuBackend>,
    n_blocks: u32,
    step: u64,
}

impl Model {
    /// Loads what is at `path`.
    pub fn open(path: &Path, options: Options) -> Self {
        let checkpoint = Checkpoint::open(path).unwrap();
        let (spec, names) = checkpoint.family().unwrap();
        Self::load(&checkpoint, spec, &names, options).unwrap()
    }

    /// An executor within `limits`, with room for `cache_tokens`.
    pub fn executor(
        checkpoint: &Checkpoint,
        spec: DecoderSpec,
        names: &WeightNames,
        options: Options,
        limits: &SchedulerConfig,
        cache_tokens: usize,
    ) -> Result<LocalExecutor<CpuBackend>, LoadError> {
        let groups = KvGroup::of(&spec, 16, options.kv_dtype);
        let bytes = groups.iter().map(|g| g.layout.block_bytes()).sum::<usize>() * cache_tokens / 16;
        let cache = CacheConfig { block_len: 16, dtype: options.kv_dtype, bytes };
        let mut plan = MemoryPlan::new::<CpuBackend>(checkpoint, &spec, limits, cache, usize::MAX).unwrap();
        plan.n_blocks.fill(cache_tokens / 16);
        let backend = CpuBackend::new(options.n_workers, None).unwrap();
        LocalExecutor::load(backend, checkpoint, (spec, names), &plan, limits, &mut |_| {})
    }

    /// Loads with a spec that may not be the checkpoint's own.
    pub fn load(
        checkpoint: &Checkpoint,
        spec: DecoderSpec,
        names: &WeightNames,
        options: Options,
    ) -> Result<Self, LoadError> {
        let limits = SchedulerConfig {
            // Logits of every token are wanted.
            max_num_seqs: options.max_step,
            max_num_batched_tokens: options.max_step,
            max_model_len: options.max_len,
            chunked_prefill: true,
            long_prefill_token_threshold: 0,
            prefix_caching: false,
            policy: SchedulingPolicy::Fcfs,
        };
        let executor = Self::executor(checkpoint, spec, names, options, &limits, options.max_len)?;
        Ok(Self { executor, n_blocks: u32::try_from(options.max_len / 16).unwrap(), step: 0 })
    }

    /// Logits of every token of a sequence, computed in chunks of at most `chunk` tokens.
    pub fn logits(&mut self, tokens: &[u32], chunk: usize) -> Vec<f32> {
        let mut all = Vec::new();
        self.each_logits(tokens, chunk, |logits| all.extend_from_slice(logits));
        all
    }

    /// Calls `f` with the logits of each token in turn.
    pub fn each_logits(&mut self, tokens: &[u32], chunk: usize, mut f: impl FnMut(&[f32])) {
        let n_vocab = self.executor.info().n_vocab;
        for (i, tokens) in tokens.chunks(chunk).enumerate() {
            let blocks: Vec<u32> = (0..self.n_blocks).collect();
            let update = |group| TableUpdate { slot: 0, group, start: 0, blocks: blocks.clone() };
            let row =
                Row { slot: 0, first_position: i * chunk, tokens: RowTokens::Known(tokens.to_vec()), logits_from: 0 };
            let batch = Batch {
                step: self.step,
                tables: (0..self.executor.info().groups.len()).map(update).collect(),
                rows: vec![row],
                ..Batch::default()
            };
            self.step += 1;
            self.executor.forward(&batch).unwrap();
            self.executor.logits(tokens.len()).unwrap().chunks_exact(n_vocab).for_each(&mut f);
        }
    }
}
