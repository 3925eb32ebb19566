//! Memory as arithmetic: what weights, activations and the cache take, computed from the spec before a weight is read.

use kwire_kernels::{Backend, KvDtype};

use crate::cache::groups::{KvGroup, split_memory};
use crate::config::{ConfigError, SchedulerConfig};
use crate::model::checkpoint::Checkpoint;
use crate::model::decoder::Decoder;
use crate::model::spec::DecoderSpec;

/// How the cache is laid out and how much memory it may have.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CacheConfig {
    /// Tokens of a block, a multiple of 16.
    pub block_len: usize,
    /// Element format.
    pub dtype: KvDtype,
    /// Bytes for all blocks together.
    pub bytes: usize,
}

/// The memory of one engine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MemoryPlan {
    /// Weights, as the backend packs them.
    pub weight_bytes: usize,
    /// Activations of the largest step.
    pub activation_bytes: usize,
    /// Blocks of all groups.
    pub cache_bytes: usize,
    /// The cache's shape.
    pub groups: Vec<KvGroup>,
    /// Blocks of each group.
    pub n_blocks: Vec<usize>,
    /// Sequences of `max_model_len` that fit the cache side by side.
    pub full_sequences: usize,
    /// Tokens that fit the cache, in sequences of `max_model_len`.
    pub cache_tokens: usize,
}

impl MemoryPlan {
    /// Plans the memory, or says which length or cache size would work.
    pub fn new<B: Backend>(
        checkpoint: &Checkpoint,
        spec: &DecoderSpec,
        scheduler: &SchedulerConfig,
        cache: CacheConfig,
    ) -> Result<Self, ConfigError> {
        scheduler.validate()?;
        let (len, most) = (scheduler.max_model_len, spec.max_positions);
        if len > most {
            return Err(ConfigError::ModelLenBeyondModel { len, most });
        }
        let groups = KvGroup::of(spec, cache.block_len, cache.dtype);
        let step = scheduler.max_num_batched_tokens;
        let n_blocks = split_memory(&groups, cache.bytes, scheduler.max_model_len, step);
        let fits = |len: usize| groups.iter().zip(&n_blocks).all(|(g, &n)| g.blocks_for(len, step) <= n);
        if !fits(scheduler.max_model_len) {
            return Err(too_long(&groups, scheduler, cache));
        }
        let per_sequence = groups.iter().zip(&n_blocks).map(|(g, &n)| n / g.blocks_for(scheduler.max_model_len, step));
        let tokens =
            groups.iter().zip(&n_blocks).filter(|(g, _)| g.window.is_none()).map(|(_, &n)| n * cache.block_len);
        let full_sequences = per_sequence.min().unwrap_or(0);
        let cache_bytes = groups.iter().zip(&n_blocks).map(|(g, &n)| g.layout.block_bytes() * n).sum();
        Ok(Self {
            weight_bytes: weight_bytes::<B>(checkpoint),
            activation_bytes: Decoder::<B>::activation_bytes(spec, scheduler),
            cache_bytes,
            cache_tokens: tokens.min().unwrap_or(full_sequences * scheduler.max_model_len),
            groups,
            n_blocks,
            full_sequences,
        })
    }

    /// Bytes of cache that one sequence of `max_model_len` takes.
    pub fn cache_bytes_for(spec: &DecoderSpec, scheduler: &SchedulerConfig, block_len: usize, dtype: KvDtype) -> usize {
        let groups = KvGroup::of(spec, block_len, dtype);
        sequence_bytes(&groups, scheduler.max_model_len, scheduler.max_num_batched_tokens)
    }
}

/// The largest length that fits, and the bytes that the asked one would take.
fn too_long(groups: &[KvGroup], scheduler: &SchedulerConfig, cache: CacheConfig) -> ConfigError {
    let step = scheduler.max_num_batched_tokens;
    let bytes_for = |len: usize| sequence_bytes(groups, len, step);
    let (mut fits, mut above) = (0, scheduler.max_model_len);
    while above - fits > 1 {
        let middle = fits + (above - fits) / 2;
        if bytes_for(middle) <= cache.bytes { fits = middle } else { above = middle }
    }
    ConfigError::ModelLenBeyondCache { len: scheduler.max_model_len, fits, bytes: bytes_for(scheduler.max_model_len) }
}

fn sequence_bytes(groups: &[KvGroup], len: usize, step: usize) -> usize {
    groups.iter().map(|g| g.layout.block_bytes() * g.blocks_for(len, step)).sum()
}

fn weight_bytes<B: Backend>(checkpoint: &Checkpoint) -> usize {
    let infos = checkpoint.names().filter_map(|name| checkpoint.info(name));
    infos
        .map(|info| match info.shape[..] {
            [n_rows, n_cols] => B::weight_bytes(info.dtype, n_rows, n_cols),
            // Norms and biases are kept in f32.
            _ => 4 * info.shape.iter().product::<usize>(),
        })
        .sum()
}
