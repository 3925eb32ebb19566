//! Against the reference, on all instruction sets, pairings, element formats and partial rotation.

use super::*;
use crate::cpu::step::CpuStep;
use crate::cpu::{Isa, Pool};
use crate::kv_cache::CpuKvCache;
use crate::testing::{Rng, assert_close};
use crate::{AttentionOp, KvDtype, KvLayout, Rope, RopePairing, RowSpan, StepBatch};

fn round(x: f32, dtype: KvDtype) -> f32 {
    match dtype {
        KvDtype::F32 => x,
        KvDtype::F16 => half::f16::from_f32(x).to_f32(),
        KvDtype::Bf16 => half::bf16::from_f32(x).to_f32(),
    }
}

#[test]
fn matches_the_reference() {
    let mut rng = Rng::new(3);
    for case in 0..60 {
        let (heads, kv_heads) = [(9, 3), (4, 4), (8, 1)][case % 3];
        let head_dim = [16, 64, 80, 40][case % 4];
        let dtype = [KvDtype::F32, KvDtype::F16, KvDtype::Bf16][case / 2 % 3];
        let pairing = if case % 2 == 0 { RopePairing::Half } else { RopePairing::Interleaved };
        let n_pairs = if case % 5 == 0 { head_dim / 4 } else { head_dim / 2 };
        let inv_freq = (0..n_pairs).map(|i| 10_000f32.powf(-(i as f32) / n_pairs as f32)).collect();
        let rope = Rope { inv_freq, scale: if case % 7 == 0 { 1.3 } else { 1.0 }, pairing };
        let with_rope = case % 11 != 0;
        let op = AttentionOp { heads, kv_heads, head_dim, scale: 1.0, window: None, softcap: None };
        let layout = KvLayout { n_layers: 2, kv_heads, head_dim, block_len: 32, dtype };
        let rows = [
            RowSpan { first_token: 0, n_tokens: 1, first_position: 70 },
            RowSpan { first_token: 1, n_tokens: 50, first_position: 20 },
        ];
        let tables = [vec![vec![StepBatch::NO_BLOCK, 4, 1], vec![0, 3, 2]]];
        let ids = vec![0; 51];
        let batch = StepBatch { token_ids: &ids, rows: &rows, slots: &[0, 1], logit_tokens: &[] };
        let step = CpuStep::new(&batch, &tables);
        let cols = (heads + 2 * kv_heads) * head_dim;
        let input = rng.normals(51 * cols);
        let (qw, kw) = (rng.normals(head_dim), rng.normals(head_dim));
        let qk_norm = (case % 4 == 1).then_some((&qw[..], &kw[..], 1e-6));
        let table = RopeTable::new(&rope, 100);
        let args = RopeWrite { step: &step, op: &op, qk_norm, rope: with_rope.then_some(&table), group: 0, layer: 1 };
        let mut outputs = Vec::new();
        for isa in Isa::ALL.into_iter().filter(|isa| isa.is_available()) {
            for n_workers in [1, 2] {
                let (mut qkv, mut cache) = (input.clone(), CpuKvCache::new(layout, 5).unwrap());
                rope_write_kv(&mut Pool::new(n_workers), isa, args, &mut qkv, &mut cache);
                outputs.push((qkv, cache.export_blocks(&[0, 1, 2, 3, 4]), cache));
            }
        }
        let (qkv, _, cache) = &outputs[0];
        assert!(outputs.iter().all(|o| o.0 == *qkv && o.1 == outputs[0].1));
        for token in 0..51 {
            let (row, position) = (step.token_rows[token] as usize, step.positions[token] as usize);
            for head in 0..heads + kv_heads {
                let at = token * cols + head * head_dim;
                let norm = qk_norm.map(|(q, k, eps)| (if head < heads { q } else { k }, eps));
                let want = reference::head(&input[at..at + head_dim], norm, with_rope.then_some(&rope), position);
                assert_close(&qkv[at..at + head_dim], &want, 2e-6);
            }
            for kv in 0..kv_heads {
                let (key, value) = cache.token(1, tables[0][row][position / 32], kv, position % 32);
                let at = token * cols + (heads + kv) * head_dim;
                let rounded = |at: usize| qkv[at..at + head_dim].iter().map(|&x| round(x, dtype)).collect::<Vec<_>>();
                assert_eq!(key, rounded(at));
                assert_eq!(value, rounded(at + kv_heads * head_dim));
            }
        }
        assert!(cache.export_blocks(&[0])[..layout.block_bytes() / 2].iter().all(|&b| b == 0), "layer 0 is untouched");
    }
}

#[test]
fn f16_saturates() {
    let op = AttentionOp { heads: 1, kv_heads: 1, head_dim: 8, scale: 1.0, window: None, softcap: None };
    let layout = KvLayout { n_layers: 1, kv_heads: 1, head_dim: 8, block_len: 16, dtype: KvDtype::F16 };
    let rows = [RowSpan { first_token: 0, n_tokens: 1, first_position: 0 }];
    let tables = [vec![vec![0]]];
    let batch = StepBatch { token_ids: &[0], rows: &rows, slots: &[0], logit_tokens: &[] };
    let step = CpuStep::new(&batch, &tables);
    let mut qkv = [vec![0.0; 8], vec![1e9; 8], vec![-1e9; 8]].concat();
    let mut cache = CpuKvCache::new(layout, 1).unwrap();
    let args = RopeWrite { step: &step, op: &op, qk_norm: None, rope: None, group: 0, layer: 0 };
    rope_write_kv(&mut Pool::new(1), Isa::detect(), args, &mut qkv, &mut cache);
    assert_eq!(cache.token(0, 0, 0, 0), (vec![65504.0; 8], vec![-65504.0; 8]));
}
