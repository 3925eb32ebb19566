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
    /// Tokens that fit the cache, in sequences of up to `max_model_len`: what the fullest group has room for.
    pub cache_tokens: usize,
}

impl MemoryPlan {
    /// Plans the use of `available` bytes, or says which length or cache size would work.
    pub fn new<B: Backend>(
        checkpoint: &Checkpoint,
        spec: &DecoderSpec,
        scheduler: &SchedulerConfig,
        cache: CacheConfig,
        available: usize,
    ) -> Result<Self, ConfigError> {
        scheduler.validate()?;
        let (len, most, step) = (scheduler.max_model_len, spec.max_positions, scheduler.max_num_batched_tokens);
        if len > most {
            return Err(ConfigError::ModelLenBeyondModel { len, most });
        }
        let fixed = FixedMemory::new::<B>(checkpoint, spec, scheduler);
        let room = fixed.room(scheduler, available)?;
        let groups = KvGroup::of(spec, cache.block_len, cache.dtype);
        let n_blocks = split_memory(&groups, cache.bytes, len, step);
        if groups.iter().zip(&n_blocks).any(|(g, &n)| n < g.blocks_for(len, step)) {
            return Err(too_long(&groups, scheduler, cache));
        }
        let cache_bytes = groups.iter().zip(&n_blocks).map(|(g, &n)| g.layout.block_bytes() * n).sum();
        let FixedMemory { weights, activations } = fixed;
        if cache_bytes > room {
            return Err(ConfigError::CacheBeyondMemory {
                weights,
                activations,
                cache: cache_bytes,
                available,
                fits: room,
            });
        }
        let capacities = groups.iter().zip(&n_blocks).map(|(g, &n)| g.capacity(n, len, step));
        Ok(Self {
            weight_bytes: weights,
            activation_bytes: activations,
            cache_bytes,
            cache_tokens: capacities.min().unwrap_or(0),
            groups,
            n_blocks,
        })
    }

    /// Bytes of cache that one sequence of `max_model_len` takes.
    pub fn cache_bytes_for(spec: &DecoderSpec, scheduler: &SchedulerConfig, block_len: usize, dtype: KvDtype) -> usize {
        let groups = KvGroup::of(spec, block_len, dtype);
        sequence_bytes(&groups, scheduler.max_model_len, scheduler.max_num_batched_tokens)
    }
}

/// What a model takes before any cache.
#[derive(Debug, Clone, Copy)]
pub struct FixedMemory {
    /// As the backend packs them.
    pub weights: usize,
    /// Of the largest step.
    pub activations: usize,
}

impl FixedMemory {
    /// Computed from the spec.
    pub fn new<B: Backend>(checkpoint: &Checkpoint, spec: &DecoderSpec, scheduler: &SchedulerConfig) -> Self {
        Self { weights: weight_bytes::<B>(checkpoint), activations: Decoder::<B>::activation_bytes(spec, scheduler) }
    }

    /// Bytes that are left for the cache.
    pub fn room(self, scheduler: &SchedulerConfig, available: usize) -> Result<usize, ConfigError> {
        let Self { weights, activations } = self;
        let Some(rest) = available.checked_sub(weights) else {
            return Err(ConfigError::WeightsBeyondMemory { weights, available });
        };
        let (tokens, seqs) = (scheduler.max_num_batched_tokens, scheduler.max_num_seqs);
        let error = ConfigError::StepBeyondMemory { weights, activations, available, tokens, seqs };
        rest.checked_sub(activations).ok_or(error)
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
    if fits < cache.block_len {
        // No length is worth naming: blocks are given out whole, so not one of them fits.
        let len = cache.block_len.min(scheduler.max_model_len);
        return ConfigError::CacheTooSmall { bytes: cache.bytes, len, least: bytes_for(len) };
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
            _ => info.shape.iter().fold(4, |bytes: usize, &n| bytes.saturating_mul(n)),
        })
        .fold(0, usize::saturating_add)
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use expect_test::expect;
    use kwire_kernels::cpu::CpuBackend;

    use super::*;
    use crate::config::SchedulingPolicy;

    fn scheduler(max_model_len: usize) -> SchedulerConfig {
        SchedulerConfig {
            max_num_seqs: 4,
            max_num_batched_tokens: 8,
            max_model_len,
            chunked_prefill: true,
            long_prefill_token_threshold: 0,
            prefix_caching: true,
            policy: SchedulingPolicy::Fcfs,
        }
    }

    /// One layer of full attention, two with a window of 16 tokens.
    fn plan(max_model_len: usize, bytes: usize, available: usize) -> Result<MemoryPlan, ConfigError> {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/families/qwen2-window");
        let checkpoint = Checkpoint::open(&path).unwrap();
        let (spec, _) = checkpoint.family().unwrap();
        let cache = CacheConfig { block_len: 16, dtype: KvDtype::F16, bytes };
        MemoryPlan::new::<CpuBackend>(&checkpoint, &spec, &scheduler(max_model_len), cache, available)
    }

    #[test]
    fn the_fullest_group_says_what_the_cache_holds() {
        let plan = plan(256, 100_000, usize::MAX).unwrap();
        // A sequence takes 16 blocks of the first group, and of the second (16 + 8) / 16 + 1.
        let blocks_for: Vec<_> = plan.groups.iter().map(|g| g.blocks_for(256, 8)).collect();
        assert_eq!(blocks_for, [16, 3]);
        let [full, windowed] = plan.n_blocks[..] else { panic!("two groups") };
        assert_eq!(plan.cache_tokens, (full * 16).min(windowed * 256 / 3));
        assert!(
            windowed < full && plan.cache_tokens > windowed * 16,
            "a windowed block counts for more than its tokens"
        );
    }

    /// What an error suggests works, and nothing less does.
    #[test]
    fn suggestions_work() {
        let Err(ConfigError::ModelLenBeyondCache { fits, bytes, .. }) = plan(256, 20_000, usize::MAX) else { panic!() };
        assert!(plan(256, bytes, usize::MAX).is_ok() && plan(256, bytes - 1, usize::MAX).is_err());
        assert!(plan(fits, 20_000, usize::MAX).is_ok() && plan(fits + 1, 20_000, usize::MAX).is_err());
        for len in [2, 16, 256] {
            for bytes in [0, 1000] {
                let error = plan(len, bytes, usize::MAX).unwrap_err();
                let ConfigError::CacheTooSmall { len: shortest, least, .. } = error else { panic!("{error}") };
                assert!(plan(shortest, least, usize::MAX).is_ok() && plan(shortest, least - 1, usize::MAX).is_err());
            }
        }
    }

    #[test]
    fn what_exceeds_the_memory_is_named() {
        let MemoryPlan { weight_bytes, activation_bytes, cache_bytes, .. } = plan(256, 100_000, usize::MAX).unwrap();
        let error = |available| plan(256, 100_000, available).unwrap_err().to_string();
        expect!["the weights take 0.1 MB and 0.1 MB of memory are available: use a smaller or more quantized model, or a larger machine"].assert_eq(&error(weight_bytes - 1));
        expect!["the weights take 0.1 MB and the activations of a step 0.1 MB, and 0.2 MB of memory are available: lower --max-num-batched-tokens (8) or --max-num-seqs (4)"].assert_eq(&error(weight_bytes + activation_bytes - 1));
        expect!["the weights take 0.1 MB, the activations of a step 0.1 MB and the KV cache 0.1 MB, and 0.3 MB of memory are available: start with --kv-cache-memory-bytes 99327 (0.1 MB) or less"].assert_eq(&error(weight_bytes + activation_bytes + cache_bytes - 1));
        assert!(plan(256, 100_000, weight_bytes + activation_bytes + cache_bytes).is_ok());
        assert!(plan(256, cache_bytes - 1, weight_bytes + activation_bytes + cache_bytes - 1).is_ok());
    }
}
