//! The fused operation on the processor, parallel over tokens.

use std::ops::Range;

use super::RopeTable;
use crate::cpu::lanes::{Kernel, LANES, Lanes, dispatch};
use crate::cpu::par::{Disjoint, for_rows};
use crate::cpu::step::CpuStep;
use crate::cpu::{Isa, Pool};
use crate::kv_cache::{CpuKvCache, GROUP, KvWriter};
use crate::norm::rms_scale;
use crate::{AttentionOp, KvDtype, RopePairing};

/// What [`rope_write_kv`] does, beside the data.
#[derive(Clone, Copy)]
pub(crate) struct RopeWrite<'a> {
    pub step: &'a CpuStep,
    pub op: &'a AttentionOp,
    /// Weights of q's and k's norm (`head_dim` each) and epsilon.
    pub qk_norm: Option<(&'a [f32], &'a [f32], f32)>,
    pub rope: Option<&'a RopeTable>,
    pub group: usize,
    pub layer: usize,
}

/// Normalizes and rotates q and k in place in the merged rows `qkv` (`tokens × (heads + 2 kv_heads) head_dim`), and
/// writes k and v to the cache.
pub(crate) fn rope_write_kv(pool: &mut Pool, isa: Isa, args: RopeWrite<'_>, qkv: &mut [f32], cache: &mut CpuKvCache) {
    let AttentionOp { heads, kv_heads, head_dim, .. } = *args.op;
    let layout = cache.layout();
    assert_eq!((layout.kv_heads, layout.head_dim), (kv_heads, head_dim), "cache shape");
    assert!(args.rope.is_none_or(|r| r.rotary_dim() <= head_dim), "rotary size");
    assert!(args.qk_norm.is_none_or(|(q, k, _)| q.len() == head_dim && k.len() == head_dim), "norm size");
    let n_cols = (heads + 2 * kv_heads) * head_dim;
    let n_tokens = args.step.n_tokens();
    assert_eq!(qkv.len(), n_tokens * n_cols);
    let (qkv, writer) = (Disjoint::new(qkv), cache.writer());
    for_rows(pool, n_tokens, n_cols, |tokens| {
        // SAFETY: chunks of tokens do not overlap, neither in the rows nor, having different slots, in the cache.
        let qkv = unsafe { qkv.slice(tokens.start * n_cols, tokens.len() * n_cols) };
        dispatch(isa, Tokens { args, tokens, qkv, writer: &writer });
    });
}

struct Tokens<'a> {
    args: RopeWrite<'a>,
    tokens: Range<usize>,
    qkv: &'a mut [f32],
    writer: &'a KvWriter<'a>,
}

impl Kernel for Tokens<'_> {
    type Out = ();
    #[inline(always)]
    fn run<L: Lanes>(self) {
        let RopeWrite { step, op, qk_norm, rope, group, layer } = self.args;
        let (d, layout) = (op.head_dim, self.writer.layout());
        let n_cols = (op.heads + 2 * op.kv_heads) * d;
        for (token, row) in self.tokens.zip(self.qkv.chunks_exact_mut(n_cols)) {
            let position = step.positions[token] as usize;
            let tables = rope.map(|r| (r.at(position), r.pairing()));
            let (qk, values) = row.split_at_mut((op.heads + op.kv_heads) * d);
            for (i, head) in qk.chunks_exact_mut(d).enumerate() {
                if let Some((q_weight, k_weight, eps)) = qk_norm {
                    let weight = if i < op.heads { q_weight } else { k_weight };
                    let scale = rms_scale::<L>(head, eps);
                    head.iter_mut().zip(weight).for_each(|(x, w)| *x = *x * scale * w);
                }
                if let Some(((cos, sin), pairing)) = tables {
                    rotate(head, cos, sin, pairing);
                }
            }
            let block = step.block(group, step.token_rows[token] as usize, position, layout.block_len);
            let keys = &qk[op.heads * d..];
            for (i, (key, value)) in keys.chunks_exact(d).zip(values.chunks_exact(d)).enumerate() {
                let ptr = self.writer.head_ptr(layer, block, i);
                // SAFETY: `ptr` has room for a block's keys and values of this head; this token's slot is written
                // by this worker only.
                unsafe {
                    write_token::<L>(
                        layout.dtype,
                        ptr,
                        self.writer.value_offset(),
                        position % layout.block_len,
                        key,
                        value,
                    )
                };
            }
        }
    }
}

/// Plain loops: the compiler vectorizes them inside the functions that enable the instruction set.
#[inline(always)]
fn rotate(head: &mut [f32], cos: &[f32], sin: &[f32], pairing: RopePairing) {
    let n = cos.len();
    match pairing {
        RopePairing::Half => {
            let (a, b) = head[..2 * n].split_at_mut(n);
            for ((a, b), (c, s)) in a.iter_mut().zip(b).zip(cos.iter().zip(sin)) {
                (*a, *b) = (*a * c - *b * s, *b * c + *a * s);
            }
        }
        RopePairing::Interleaved => {
            for (pair, (c, s)) in head[..2 * n].chunks_exact_mut(2).zip(cos.iter().zip(sin)) {
                (pair[0], pair[1]) = (pair[0] * c - pair[1] * s, pair[1] * c + pair[0] * s);
            }
        }
    }
}

/// Writes one token's key (a column of its group) and value (a row).
///
/// # Safety
/// `head` is the start of a block's keys of one head, its values `value_offset` bytes later, and nobody else reads
/// or writes this slot meanwhile.
#[inline(always)]
unsafe fn write_token<L: Lanes>(
    dtype: KvDtype,
    head: *mut u8,
    value_offset: usize,
    slot: usize,
    key: &[f32],
    value: &[f32],
) {
    let d = key.len();
    let key_at = slot / GROUP * GROUP * d + slot % GROUP;
    // SAFETY: indices stay below `block_len * head_dim` elements of the keys and of the values.
    unsafe {
        match dtype {
            KvDtype::F32 => {
                let keys = head.cast::<f32>().add(key_at);
                (0..d).for_each(|i| keys.add(i * GROUP).write(key[i]));
                std::ptr::copy_nonoverlapping(value.as_ptr(), head.add(value_offset).cast::<f32>().add(slot * d), d);
            }
            KvDtype::F16 | KvDtype::Bf16 => {
                let keys = head.cast::<u16>().add(key_at);
                let values = head.add(value_offset).cast::<u16>().add(slot * d);
                for i in (0..d).step_by(LANES) {
                    let n = LANES.min(d - i);
                    let k = narrow::<L>(dtype, &key[i..i + n]);
                    (0..n).for_each(|j| keys.add((i + j) * GROUP).write(k[j]));
                    let v = narrow::<L>(dtype, &value[i..i + n]);
                    std::ptr::copy_nonoverlapping(v.as_ptr(), values.add(i), n);
                }
            }
        }
    }
}

/// Up to sixteen elements in 16 bits. f16 saturates: an infinity in the cache would make NaN of a masked token's zero
/// weight. NaN stays NaN, so that a broken model is noticed.
#[inline(always)]
fn narrow<L: Lanes>(dtype: KvDtype, x: &[f32]) -> [u16; LANES] {
    let mut out = [0; LANES];
    // SAFETY: at most sixteen elements are read, and `out` has sixteen.
    unsafe {
        let v = L::load_part(x.as_ptr(), x.len().min(LANES), 0.0);
        match dtype {
            KvDtype::Bf16 => v.store_bf16(out.as_mut_ptr()),
            _ => L::splat(65504.0).min(L::splat(-65504.0).max(v)).store_f16(out.as_mut_ptr()),
        }
    }
    out
}
