//! Loads checkpoints for the tests and runs them a step at a time.

use std::path::{Path, PathBuf};

use kwire_engine::batch::{Batch, Row, RowTokens, TableUpdate};
use kwire_engine::cache::groups::KvGroup;
use kwire_engine::executor::local::LocalExecutor;
use kwire_engine::executor::{Executor, ExecutorInfo};
use kwire_engine::model::checkpoint::Checkpoint;
use kwire_engine::model::decoder::Decoder;
use kwire_engine::model::spec::{DecoderSpec, WeightNames};
use kwire_engine::model::weights;
use kwire_kernels::KvDtype;
use kwire_kernels::cpu::CpuBackend;

/// Longest sequence of these tests.
pub const MAX_LEN: usize = 64;

/// A file of the repository's `fixtures/`.
pub fn fixture(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures").join(path)
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
        tokens: chunks(tokens.data()).into_iter().map(|b| u32::from_le_bytes(b)).collect(),
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

/// A checkpoint on the CPU with an f32 cache.
pub struct Model {
    executor: LocalExecutor<CpuBackend>,
    step: u64,
}

impl Model {
    /// Loads what is at `path`.
    pub fn open(path: &Path) -> Self {
        let checkpoint = Checkpoint::open(path).unwrap();
        let (spec, names) = checkpoint.family().unwrap();
        Self::load(&checkpoint, spec, &names).unwrap()
    }

    /// Loads with a spec that may not be the checkpoint's own.
    pub fn load(checkpoint: &Checkpoint, spec: DecoderSpec, names: &WeightNames) -> Result<Self, weights::LoadError> {
        let mut backend = CpuBackend::new(1, None);
        let groups = KvGroup::of(&spec, 16, KvDtype::F32);
        let n_blocks = vec![MAX_LEN / 16; groups.len()];
        let loaded = weights::load(checkpoint, &spec, names, &mut backend, &mut |_| {})?;
        let info = ExecutorInfo { groups, n_blocks, n_vocab: spec.n_vocab, depth: 0 };
        let decoder = Decoder::new(spec, loaded, &info.groups, &mut backend, MAX_LEN, MAX_LEN, MAX_LEN).unwrap();
        Ok(Self { executor: LocalExecutor::new(info, 1, backend, decoder).unwrap(), step: 0 })
    }

    /// Logits of every token of a sequence, computed in chunks of at most `chunk` tokens.
    pub fn logits(&mut self, tokens: &[u32], chunk: usize) -> Vec<f32> {
        let mut logits = Vec::new();
        for (i, tokens) in tokens.chunks(chunk).enumerate() {
            let blocks: Vec<u32> = (0..u32::try_from(MAX_LEN / 16).unwrap()).collect();
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
            logits.extend(self.executor.logits(tokens.len()).unwrap());
        }
        logits
    }
}
