//! [`CpuBackend`]: the operations of [`Backend`] on the processor, done when the call returns.

use std::convert::Infallible;

use super::par::{Disjoint, for_rows};
use super::step::{CpuStep, SlotTables};
use super::{Isa, Pool};
use crate::aligned::AlignedBuf;
use crate::kv_cache::CpuKvCache;
use crate::linear::{self, PackedWeight, Rows, RowsMut};
use crate::paged_attention::{Attention, AttentionScratch, paged_attention};
use crate::rope::{RopeTable, RopeWrite, rope_write_kv};
use crate::sample::{SampleScratch, sample};
use crate::{
    Activation, AttentionOp, Backend, BlockCopy, DType, KernelError, KvLayout, Rope, SampleParams, SampleRequest,
    Sampled, StepBatch, StepLimits, StepShape, TensorRole, WeightPart, activation, norm,
};

/// Runs every operation on a pool of threads, in f32. Results do not depend on the number of workers.
pub struct CpuBackend {
    pool: Pool,
    isa: Isa,
    attention: AttentionScratch,
    sampling: SampleScratch,
    linear: linear::Scratch,
    /// Input values that `linear` has room for.
    linear_values: usize,
    /// By KV group.
    tables: Vec<SlotTables>,
}

/// An activation matrix: `capacity × cols`, row-major f32.
pub struct CpuTensor {
    data: AlignedBuf,
    capacity: usize,
    cols: usize,
}

impl CpuTensor {
    /// Most rows it holds.
    pub fn capacity(&self) -> usize {
        self.capacity
    }

    /// Columns.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// The first `rows` rows.
    pub fn rows(&self, rows: usize) -> &[f32] {
        assert!(rows <= self.capacity, "{rows} rows of a tensor of {}", self.capacity);
        &self.data[..rows * self.cols]
    }

    /// The first `rows` rows, to be written.
    pub fn rows_mut(&mut self, rows: usize) -> &mut [f32] {
        assert!(rows <= self.capacity, "{rows} rows of a tensor of {}", self.capacity);
        &mut self.data[..rows * self.cols]
    }
}

impl CpuBackend {
    /// A backend of `n_workers` threads, the caller's among them, on `isa` or the best that the machine has.
    pub fn new(n_workers: usize, isa: Option<Isa>) -> Result<Self, KernelError> {
        let isa = isa.unwrap_or_else(Isa::detect);
        if !isa.is_available() {
            return Err(KernelError::Unsupported(format!("this machine has no {isa:?}")));
        }
        if n_workers == 0 {
            return Err(KernelError::Unsupported("at least one worker is needed".into()));
        }
        Ok(Self {
            pool: Pool::new(n_workers),
            isa,
            attention: AttentionScratch::new(n_workers)?,
            sampling: SampleScratch::new(n_workers),
            linear: linear::Scratch::new(isa, n_workers, 0),
            linear_values: 0,
            tables: Vec::new(),
        })
    }

    /// Room for linear layers whose rows × input features are at most `max_values`.
    fn reserve_linear(&mut self, max_values: usize) {
        if max_values > self.linear_values {
            self.linear_values = max_values;
            self.linear = linear::Scratch::new(self.isa, self.pool.n_workers(), max_values);
        }
    }

    /// The instruction set in use.
    pub fn isa(&self) -> Isa {
        self.isa
    }

    /// Number of workers.
    pub fn n_workers(&self) -> usize {
        self.pool.n_workers()
    }
}

impl Backend for CpuBackend {
    type Tensor = CpuTensor;
    type Weight = PackedWeight;
    type Vector = Vec<f32>;
    type Rope = RopeTable;
    type KvCache = CpuKvCache;
    type Step = CpuStep;
    type Pending = Vec<Sampled>;
    type Lora = Infallible;

    fn weight_bytes(dtype: DType, n_rows: usize, n_cols: usize) -> usize {
        linear::packed_bytes(dtype, n_rows, n_cols).unwrap_or(usize::MAX)
    }

    fn tensor_bytes(_: TensorRole, capacity: usize, cols: usize) -> usize {
        capacity.saturating_mul(cols).saturating_mul(4)
    }

    fn reserve_bytes(limits: &StepLimits) -> usize {
        linear::Scratch::bytes(0, limits.max_linear_values)
    }

    fn reserve(&mut self, limits: &StepLimits) -> Result<(), KernelError> {
        self.reserve_linear(limits.max_linear_values);
        self.tables = vec![vec![Vec::new(); limits.max_slots]; limits.groups.len()];
        Ok(())
    }

    fn tensor(&mut self, _: TensorRole, capacity: usize, cols: usize) -> Result<CpuTensor, KernelError> {
        let len = capacity.saturating_mul(cols);
        Ok(CpuTensor { data: AlignedBuf::zeroed(len, "an activation matrix")?, capacity, cols })
    }

    fn weight(&mut self, parts: &[WeightPart<'_>]) -> Result<PackedWeight, KernelError> {
        PackedWeight::new(&mut self.pool, parts)
    }

    fn vector(&mut self, values: &[f32]) -> Result<Vec<f32>, KernelError> {
        Ok(values.to_vec())
    }

    fn rope(&mut self, rope: &Rope, max_positions: usize) -> Result<RopeTable, KernelError> {
        Ok(RopeTable::new(rope, max_positions))
    }

    fn kv_cache(&mut self, layout: KvLayout, n_blocks: usize) -> Result<CpuKvCache, KernelError> {
        CpuKvCache::new(layout, n_blocks)
    }

    fn start_slot(&mut self, slot: u32, _: &SampleParams, _: &[u32], _: &[u32]) {
        self.tables.iter_mut().for_each(|tables| tables[slot as usize].clear());
    }

    fn update_table(&mut self, group: usize, slot: u32, start: usize, blocks: &[u32]) {
        let table = &mut self.tables[group][slot as usize];
        table.truncate(start);
        table.extend_from_slice(blocks);
    }

    fn prepare(&mut self, batch: &StepBatch<'_>) -> Result<CpuStep, KernelError> {
        Ok(CpuStep::new(batch, &self.tables))
    }

    fn shape(&self, step: &CpuStep) -> StepShape {
        StepShape { n_tokens: step.n_tokens(), n_logits: step.logit_tokens.len() }
    }

    fn embed(&mut self, step: &CpuStep, table: &PackedWeight, scale: f32, out: &mut CpuTensor) {
        assert_eq!(out.cols, table.n_cols(), "embedding width");
        let n = out.cols;
        let out = Disjoint::new(out.rows_mut(step.n_tokens()));
        for_rows(&mut self.pool, step.n_tokens(), n, |tokens| {
            for token in tokens {
                // SAFETY: each token has a row of its own.
                let row = unsafe { out.slice(token * n, n) };
                table.row_f32(step.token_ids[token] as usize, row);
                if scale != 1.0 {
                    row.iter_mut().for_each(|x| *x *= scale);
                }
            }
        });
    }

    fn linear(&mut self, rows: usize, x: &CpuTensor, w: &PackedWeight, lora: Option<&Infallible>, out: &mut CpuTensor) {
        assert!(lora.is_none());
        assert_eq!(x.cols, w.n_cols(), "input features");
        assert!(out.cols >= w.n_rows(), "output features");
        if rows * x.cols > self.linear_values {
            // Only for callers that reserved nothing. Once per width at most: room for all rows that the tensor can have.
            self.reserve_linear(x.capacity * x.cols);
        }
        let input = Rows { data: x.rows(rows), stride: x.cols };
        let stride = out.cols;
        let output = RowsMut { data: out.rows_mut(rows), stride };
        linear::forward(&mut self.pool, &mut self.linear, rows, input, w, output);
    }

    fn all_reduce_add_norm(
        &mut self,
        rows: usize,
        delta: Option<&mut CpuTensor>,
        residual: &mut CpuTensor,
        weight: &Vec<f32>,
        eps: f32,
        out: &mut CpuTensor,
    ) {
        assert!(residual.cols == weight.len() && out.cols == weight.len(), "norm width");
        let delta = delta.map(|delta| {
            assert_eq!(delta.cols, weight.len(), "norm width");
            delta.rows(rows)
        });
        norm::add_norm(&mut self.pool, self.isa, delta, residual.rows_mut(rows), weight, eps, out.rows_mut(rows));
    }

    fn rope_write_kv(
        &mut self,
        step: &CpuStep,
        op: &AttentionOp,
        qk_norm: Option<(&Vec<f32>, &Vec<f32>, f32)>,
        rope: Option<&RopeTable>,
        qkv: &mut CpuTensor,
        cache: &mut CpuKvCache,
        group: usize,
        layer: usize,
    ) {
        assert_eq!(qkv.cols, (op.heads + 2 * op.kv_heads) * op.head_dim, "width of q, k and v");
        let qk_norm = qk_norm.map(|(q, k, eps)| (&q[..], &k[..], eps));
        let args = RopeWrite { step, op, qk_norm, rope, group, layer };
        rope_write_kv(&mut self.pool, self.isa, args, qkv.rows_mut(step.n_tokens()), cache);
    }

    fn paged_attention(
        &mut self,
        step: &CpuStep,
        op: &AttentionOp,
        qkv: &CpuTensor,
        cache: &CpuKvCache,
        group: usize,
        layer: usize,
        out: &mut CpuTensor,
    ) {
        assert_eq!(qkv.cols, (op.heads + 2 * op.kv_heads) * op.head_dim, "width of q, k and v");
        assert_eq!(out.cols, op.heads * op.head_dim, "width of the attention output");
        let args = Attention { step, op, group, layer };
        let n = step.n_tokens();
        paged_attention(&mut self.pool, self.isa, &mut self.attention, args, qkv.rows(n), cache, out.rows_mut(n));
    }

    fn gated_activation(&mut self, rows: usize, act: Activation, gate_up: &CpuTensor, out: &mut CpuTensor) {
        assert_eq!(gate_up.cols, 2 * out.cols, "width of gate and up");
        let cols = out.cols;
        activation::gated(&mut self.pool, self.isa, act, gate_up.rows(rows), cols, out.rows_mut(rows));
    }

    fn gather_logit_rows(&mut self, step: &CpuStep, x: &CpuTensor, out: &mut CpuTensor) {
        assert_eq!(x.cols, out.cols);
        let n = x.cols;
        let from = x.rows(step.n_tokens());
        let rows = out.rows_mut(step.logit_tokens.len()).chunks_exact_mut(n);
        for (to, &token) in rows.zip(&step.logit_tokens) {
            to.copy_from_slice(&from[token as usize * n..][..n]);
        }
    }

    fn sample(&mut self, logits: &mut CpuTensor, n_vocab: usize, requests: &[SampleRequest<'_>]) -> Vec<Sampled> {
        let (stride, rows) = (logits.cols, logits.capacity);
        sample(&mut self.pool, self.isa, &mut self.sampling, logits.rows(rows), stride, n_vocab, requests)
    }

    fn collect(&mut self, pending: Vec<Sampled>) -> Result<Vec<Sampled>, KernelError> {
        Ok(pending)
    }

    fn read(&mut self, rows: usize, x: &CpuTensor) -> Result<Vec<f32>, KernelError> {
        Ok(x.rows(rows).to_vec())
    }

    fn copy_blocks(&mut self, cache: &mut CpuKvCache, copies: &[BlockCopy]) {
        cache.copy_blocks(copies);
    }

    fn export_blocks(&mut self, cache: &CpuKvCache, blocks: &[u32]) -> Result<Vec<u8>, KernelError> {
        Ok(cache.export_blocks(blocks))
    }

    fn import_blocks(&mut self, cache: &mut CpuKvCache, blocks: &[u32], bytes: &[u8]) -> Result<(), KernelError> {
        cache.import_blocks(blocks, bytes)
    }
}

#[cfg(test)]
#[path = "backend_tests.rs"]
mod tests;
