//! The trait's operations together: a tiny two-layer decoder, whose logits must not depend on how its prompt is cut.

use super::*;
use crate::testing::Rng;
use crate::{DType, KvDtype, RopePairing, RowSpan, SampleParams};

const HIDDEN: usize = 64;
const FFN: usize = 96;
const VOCAB: usize = 100;
const OP: AttentionOp = AttentionOp { heads: 4, kv_heads: 2, head_dim: 16, scale: 0.25, window: None, softcap: None };
const QKV: usize = (4 + 2 * 2) * 16;

struct Layer {
    norms: [Vec<f32>; 2],
    qkv: PackedWeight,
    o: PackedWeight,
    gate_up: PackedWeight,
    down: PackedWeight,
}

struct Model {
    embed: PackedWeight,
    layers: Vec<Layer>,
    rope: RopeTable,
    cache: CpuKvCache,
    /// hidden, normed, qkv, attention, gate_up, product, logits
    tensors: [CpuTensor; 7],
}

fn random_weight(backend: &mut CpuBackend, rng: &mut Rng, n_rows: usize, n_cols: usize) -> PackedWeight {
    let values: Vec<u8> = rng.normals(n_rows * n_cols).iter().flat_map(|x| (x * 0.2).to_le_bytes()).collect();
    backend.weight(&[WeightPart { dtype: DType::F32, n_rows, n_cols, data: &values, bias: None }]).unwrap()
}

fn model(backend: &mut CpuBackend) -> Model {
    let mut rng = Rng::new(77);
    let b = backend;
    let mut layer = || Layer {
        norms: [rng.normals(HIDDEN), rng.normals(HIDDEN)],
        qkv: random_weight(b, &mut rng, QKV, HIDDEN),
        o: random_weight(b, &mut rng, HIDDEN, 64),
        gate_up: random_weight(b, &mut rng, 2 * FFN, HIDDEN),
        down: random_weight(b, &mut rng, HIDDEN, FFN),
    };
    let layers = vec![layer(), layer()];
    let inv_freq = (0..8).map(|i| 100f32.powf(-(i as f32) / 8.0)).collect();
    let rope = b.rope(&Rope { inv_freq, scale: 1.0, pairing: RopePairing::Half }, 1000).unwrap();
    let layout = KvLayout { n_layers: 2, kv_heads: 2, head_dim: 16, block_len: 16, dtype: KvDtype::F16 };
    let tensors =
        [HIDDEN, HIDDEN, QKV, 64, 2 * FFN, FFN, VOCAB].map(|cols| b.tensor(TensorRole::Hidden, 80, cols).unwrap());
    let groups = vec![(layout, OP)];
    b.reserve(&StepLimits {
        max_tokens: 80,
        max_logits: 1,
        max_slots: 1,
        max_positions: 80,
        n_vocab: VOCAB,
        max_linear_values: 80 * 2 * FFN,
        groups,
    })
    .unwrap();
    b.update_table(0, 0, 0, &[5, 2, 7, 0, 1]);
    let embed = random_weight(b, &mut rng, VOCAB, HIDDEN);
    Model { embed, layers, rope, cache: b.kv_cache(layout, 8).unwrap(), tensors }
}

/// One step of the sequence; gives the logits of its last token.
fn forward(b: &mut CpuBackend, m: &mut Model, ids: &[u32], first_position: usize) -> Vec<f32> {
    let n = ids.len();
    let rows = [RowSpan { first_token: 0, n_tokens: n, first_position }];
    let last = [n as u32 - 1];
    let step = b.prepare(&StepBatch { token_ids: ids, rows: &rows, slots: &[0], logit_tokens: &last }).unwrap();
    let [hidden, normed, qkv, attention, gate_up, product, logits] = &mut m.tensors;
    b.embed(&step, &m.embed, 2.0, hidden);
    for (i, layer) in m.layers.iter().enumerate() {
        if i == 0 {
            b.all_reduce_add_norm(n, None, hidden, &layer.norms[0], 1e-5, normed);
        } else {
            b.all_reduce_add_norm(n, Some(attention), hidden, &layer.norms[0], 1e-5, normed);
        }
        b.linear(n, normed, &layer.qkv, None, qkv);
        b.rope_write_kv(&step, &OP, None, Some(&m.rope), qkv, &mut m.cache, 0, i);
        b.paged_attention(&step, &OP, qkv, &m.cache, 0, i, attention);
        b.linear(n, attention, &layer.o, None, normed);
        let mut delta = b.tensor(TensorRole::Hidden, 80, HIDDEN).unwrap();
        delta.rows_mut(n).copy_from_slice(normed.rows(n));
        b.all_reduce_add_norm(n, Some(&mut delta), hidden, &layer.norms[1], 1e-5, normed);
        b.linear(n, normed, &layer.gate_up, None, gate_up);
        b.gated_activation(n, Activation::Silu, gate_up, product);
        b.linear(n, product, &layer.down, None, attention);
    }
    b.all_reduce_add_norm(n, Some(attention), hidden, &m.layers[0].norms[0], 1e-5, normed);
    b.gather_logit_rows(&step, normed, hidden);
    b.linear(1, hidden, &m.embed, None, logits);
    b.read(1, logits).unwrap()
}

#[test]
fn logits_do_not_depend_on_chunks_or_workers() {
    let ids: Vec<u32> = (0..70).map(|i| i * 37 % VOCAB as u32).collect();
    let run = |n_workers: usize, chunk: usize| {
        let mut b = CpuBackend::new(n_workers, None).unwrap();
        let mut m = model(&mut b);
        let mut logits = Vec::new();
        for (i, ids) in ids.chunks(chunk).enumerate() {
            logits = forward(&mut b, &mut m, ids, i * chunk);
        }
        let params = SampleParams { seed: 5, ..SampleParams::default() };
        let request = SampleRequest {
            logit: 0,
            slot: 0,
            params: &params,
            position: 70,
            forced: None,
            prompt: &[],
            output: &[],
            mask: None,
        };
        let pending = b.sample(&mut m.tensors[6], VOCAB, &[request]);
        (logits, b.collect(pending).unwrap())
    };
    let want = run(1, 70);
    assert!(want.0.iter().all(|x| x.is_finite()) && want.0.iter().any(|x| x.abs() > 0.01));
    for n_workers in [1, 2] {
        for chunk in [1, 7, 16, 64] {
            assert!(run(n_workers, chunk) == want, "{n_workers} workers, chunks of {chunk}");
        }
    }
}

#[test]
fn impossible_backends_are_refused() {
    assert!(CpuBackend::new(0, None).is_err());
    for isa in Isa::ALL {
        assert_eq!(CpuBackend::new(1, Some(isa)).is_ok(), isa.is_available());
    }
}
