//! Against the reference, and bit-equality over chunks, batches, workers and instruction sets.

use super::*;
use crate::cpu::step::CpuStep;
use crate::cpu::{Isa, Pool};
use crate::kv_cache::CpuKvCache;
use crate::rope::{RopeWrite, rope_write_kv};
use crate::testing::{Rng, assert_close};
use crate::{AttentionOp, KvDtype, KvLayout, RowSpan, StepBatch};

const DTYPES: [KvDtype; 3] = [KvDtype::F32, KvDtype::F16, KvDtype::Bf16];

/// A sequence with its merged rows and its blocks.
struct Seq {
    qkv: Vec<f32>,
    table: Vec<u32>,
    done: usize,
}

/// Sequences over one cache, advanced by steps of any shape; collects the outputs by sequence.
struct World {
    op: AttentionOp,
    cache: CpuKvCache,
    seqs: Vec<Seq>,
    outputs: Vec<Vec<f32>>,
    pool: Pool,
    isa: Isa,
    scratch: AttentionScratch,
}

impl World {
    fn new(
        op: AttentionOp,
        dtype: KvDtype,
        block_len: usize,
        lens: &[usize],
        seed: u64,
        n_workers: usize,
        isa: Isa,
    ) -> Self {
        let blocks = |len: &usize| len.div_ceil(block_len);
        let n_blocks: usize = lens.iter().map(blocks).sum();
        let layout = KvLayout { n_layers: 1, kv_heads: op.kv_heads, head_dim: op.head_dim, block_len, dtype };
        let cols = (op.heads + 2 * op.kv_heads) * op.head_dim;
        let mut cache = CpuKvCache::new(layout, n_blocks).unwrap();
        // What lies in the blocks before must not matter.
        let all: Vec<u32> = (0..n_blocks as u32).collect();
        let stale: Vec<u8> =
            (0..n_blocks * layout.block_bytes()).map(|i| if i % 3 == 0 { 0xff } else { i as u8 }).collect();
        cache.import_blocks(&all, &stale).unwrap();
        let mut free: Vec<u32> = all;
        let mut shuffle = Rng::new(n_workers as u64 + 5);
        let seqs: Vec<Seq> = lens
            .iter()
            .enumerate()
            .map(|(i, len)| {
                let table = (0..blocks(len)).map(|_| free.swap_remove(shuffle.below(free.len()))).collect();
                Seq { qkv: Rng::new(seed + i as u64).normals(len * cols), table, done: 0 }
            })
            .collect();
        let outputs = vec![Vec::new(); lens.len()];
        Self {
            op,
            cache,
            seqs,
            outputs,
            pool: Pool::new(n_workers),
            isa,
            scratch: AttentionScratch::new(n_workers).unwrap(),
        }
    }

    /// Runs one step: the next `n` tokens of each named sequence.
    fn step(&mut self, rows: &[(usize, usize)]) {
        let cols = (self.op.heads + 2 * self.op.kv_heads) * self.op.head_dim;
        let (mut spans, mut tables, mut qkv) = (Vec::new(), Vec::new(), Vec::new());
        for &(seq, n) in rows {
            let s = &self.seqs[seq];
            spans.push(RowSpan { first_token: qkv.len() / cols, n_tokens: n, first_position: s.done });
            tables.push(s.table.clone());
            qkv.extend_from_slice(&s.qkv[s.done * cols..(s.done + n) * cols]);
        }
        let n_tokens = qkv.len() / cols;
        let ids = vec![0; n_tokens];
        let slots: Vec<u32> = (0..spans.len() as u32).collect();
        let batch = StepBatch { token_ids: &ids, rows: &spans, slots: &slots, logit_tokens: &[] };
        let step = CpuStep::new(&batch, &[tables]);
        let args = RopeWrite { step: &step, op: &self.op, qk_norm: None, rope: None, group: 0, layer: 0 };
        rope_write_kv(&mut self.pool, self.isa, args, &mut qkv, &mut self.cache);
        let width = self.op.heads * self.op.head_dim;
        let mut out = vec![f32::NAN; n_tokens * width];
        let args = Attention { step: &step, op: &self.op, group: 0, layer: 0 };
        paged_attention(&mut self.pool, self.isa, &mut self.scratch, args, &qkv, &self.cache, &mut out);
        for (&(seq, n), span) in rows.iter().zip(&spans) {
            self.outputs[seq].extend_from_slice(&out[span.first_token * width..(span.first_token + n) * width]);
            self.seqs[seq].done += n;
        }
    }

    /// Compares every output with the reference on the cache's own contents.
    fn check(&self, tolerance: f32) {
        let AttentionOp { heads, kv_heads, head_dim, .. } = self.op;
        let (cols, width) = ((heads + 2 * kv_heads) * head_dim, heads * head_dim);
        let block_len = self.cache.layout().block_len;
        for (seq, out) in self.seqs.iter().zip(&self.outputs) {
            for kv in 0..kv_heads {
                let cached = |p: usize| self.cache.token(0, seq.table[p / block_len], kv, p % block_len);
                let (keys, values): (Vec<_>, Vec<_>) = (0..seq.done).map(cached).unzip();
                for position in (0..seq.done).step_by(if seq.done > 100 { 7 } else { 1 }) {
                    for head in kv * heads / kv_heads..(kv + 1) * heads / kv_heads {
                        let q = &seq.qkv[position * cols + head * head_dim..][..head_dim];
                        let want = reference::attend(&self.op, q, &keys[..=position], &values[..=position]);
                        let at = position * width + head * head_dim;
                        assert_close(&out[at..at + head_dim], &want, tolerance);
                    }
                }
            }
        }
    }
}

#[test]
fn matches_the_reference() {
    let mut rng = Rng::new(1);
    for case in 0..48 {
        let head_dim = [16, 64, 80, 96, 128, 256, 8, 40][case % 8];
        let (heads, kv_heads) = [(9, 3), (4, 4), (7, 1), (8, 2), (16, 1)][case % 5];
        let window = [None, Some(1), Some(13), Some(300)][case % 4];
        let softcap = (case % 3 == 2).then_some(5.0);
        let op = AttentionOp { heads, kv_heads, head_dim, scale: (head_dim as f32).powf(-0.5), window, softcap };
        let block_len = [16, 32, 48][case % 3];
        let lens = [1 + rng.below(40), if case % 2 == 0 { 600 } else { 70 }];
        let isa = if case % 6 == 0 { Isa::Portable } else { Isa::detect() };
        let mut world = World::new(op, DTYPES[case / 2 % 3], block_len, &lens, case as u64, 1 + case % 2, isa);
        while world.seqs.iter().zip(lens).any(|(s, len)| s.done < len) {
            let mut rows = Vec::new();
            for (i, len) in lens.iter().enumerate() {
                let left = len - world.seqs[i].done;
                if left > 0 {
                    rows.push((i, 1 + rng.below(left)));
                }
            }
            world.step(&rows);
        }
        world.check(1e-5);
    }
}

/// The hard invariant: one set of bits, however the work is cut.
#[test]
fn bits_do_not_depend_on_chunks_batches_workers_or_instruction_sets() {
    for (case, dtype) in DTYPES.into_iter().cycle().take(24).enumerate() {
        let window = if case / 3 % 2 == 0 { None } else { Some(37) };
        let (heads, kv_heads, head_dim) = [(9, 3, 64), (8, 1, 40), (2, 2, 128), (12, 2, 80)][case / 6];
        let scale = (head_dim as f32).powf(-0.5);
        let softcap = (case % 5 == 1).then_some(20.0);
        let op = AttentionOp { heads, kv_heads, head_dim, scale, window, softcap };
        // Long enough for two splits, too, where the case is cheap.
        let len = if case % 2 == 0 { 150 } else { 290 };
        let run = |chunk: usize, others: bool, n_workers: usize, isa: Isa| {
            let mut world = World::new(op, dtype, 16, &[len, 200, 30], 99, n_workers, isa);
            while world.seqs[0].done < len {
                let mut rows = vec![(0, chunk.min(len - world.seqs[0].done))];
                if others && world.seqs[1].done < 190 {
                    rows.insert(0, (1, 1 + world.seqs[1].done % 10));
                }
                if others && world.seqs[2].done < 30 {
                    rows.push((2, 1));
                }
                world.step(&rows);
            }
            world.outputs[0].iter().map(|x| x.to_bits()).collect::<Vec<_>>()
        };
        let best = Isa::detect();
        let want = run(len, false, 1, best);
        for chunk in [1, 7, 16, 64, len] {
            for others in [false, true] {
                for n_workers in [1, 2, 3] {
                    assert!(
                        run(chunk, others, n_workers, best) == want,
                        "chunk {chunk} others {others} workers {n_workers}"
                    );
                }
            }
        }
        for isa in Isa::ALL.into_iter().filter(|isa| isa.is_available()) {
            assert!(run(64, true, 2, isa) == want, "{isa:?}");
        }
    }
}

#[test]
fn blocks_before_the_window_are_not_needed() {
    let op = AttentionOp { heads: 2, kv_heads: 1, head_dim: 16, scale: 0.25, window: Some(20), softcap: None };
    let run = |forget: bool| {
        let mut world = World::new(op, KvDtype::F16, 16, &[700], 4, 2, Isa::detect());
        while world.seqs[0].done < 700 {
            let n = (1 + world.seqs[0].done % 9).min(700 - world.seqs[0].done);
            if forget {
                let gone = (world.seqs[0].done + 1).saturating_sub(20) / 16;
                world.seqs[0].table[..gone].fill(StepBatch::NO_BLOCK);
            }
            world.step(&[(0, n)]);
        }
        world.outputs.swap_remove(0)
    };
    assert_eq!(run(true), run(false));
}
