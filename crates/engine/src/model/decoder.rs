//! The one decoder: runs any [`DecoderSpec`] on any [`Backend`].

use kwire_kernels::{Backend, KernelError, KvDtype, StepLimits, StepShape, TensorRole};

use super::spec::DecoderSpec;
use super::weights::Weights;
use crate::cache::groups::KvGroup;
use crate::config::SchedulerConfig;

/// A decoder with its weights and the memory of its activations.
pub struct Decoder<B: Backend> {
    spec: DecoderSpec,
    weights: Weights<B>,
    ropes: Vec<B::Rope>,
    /// `(KV group, layer within the group)` of each layer.
    places: Vec<(usize, usize)>,
    activations: Activations<B>,
}

/// Activation matrices, `max_tokens` rows each but for the last two, which have `max_logits`.
struct Activations<B: Backend> {
    residual: B::Tensor,
    normed: B::Tensor,
    qkv: B::Tensor,
    attended: B::Tensor,
    gate_up: B::Tensor,
    gated: B::Tensor,
    /// Output of a block, to be added to the residual.
    delta: B::Tensor,
    head_input: B::Tensor,
    logits: B::Tensor,
}

impl<B: Backend> Decoder<B> {
    /// A decoder for steps within `limits`.
    pub fn new(
        spec: DecoderSpec,
        weights: Weights<B>,
        groups: &[KvGroup],
        backend: &mut B,
        limits: &SchedulerConfig,
    ) -> Result<Self, KernelError> {
        backend.reserve(&step_limits(&spec, groups, limits))?;
        let ropes = spec.ropes.iter().map(|r| backend.rope(r, limits.max_model_len)).collect::<Result<_, _>>()?;
        let place = |i: usize| {
            let find = |(g, group): (usize, &KvGroup)| Some((g, group.layers.iter().position(|&l| l == i)?));
            groups.iter().enumerate().find_map(find).expect("every layer is in a group")
        };
        let places = (0..spec.layers.len()).map(place).collect();
        let activations = Activations::new(&spec, backend, limits)?;
        Ok(Self { spec, weights, ropes, places, activations })
    }

    /// Bytes of activations for steps within `limits`, and of what the backend reserves beside them.
    pub fn activation_bytes(spec: &DecoderSpec, limits: &SchedulerConfig) -> usize {
        let width = Activations::<B>::widths(spec).iter().fold(0, |sum: usize, w| sum.saturating_add(*w));
        let (max_tokens, max_logits) = (limits.max_num_batched_tokens, limits.max_logits());
        // Blocks of the shortest length have the longest tables.
        let groups = KvGroup::of(spec, 16, KvDtype::F16);
        B::tensor_bytes(TensorRole::Hidden, max_tokens, width)
            .saturating_add(B::tensor_bytes(TensorRole::Hidden, max_logits, spec.hidden))
            .saturating_add(B::tensor_bytes(TensorRole::Logits, max_logits, spec.n_vocab))
            .saturating_add(B::reserve_bytes(&step_limits(spec, &groups, limits)))
    }

    /// Logits of the last forward's wanted positions.
    pub fn logits(&mut self) -> &mut B::Tensor {
        &mut self.activations.logits
    }

    /// Runs a step and leaves the logits of its wanted positions in [`Self::logits`].
    pub fn forward(&mut self, backend: &mut B, step: &B::Step, caches: &mut [B::KvCache]) {
        let Self { spec, weights, ropes, places, activations: a } = self;
        let StepShape { n_tokens, n_logits } = backend.shape(step);
        backend.embed(step, &weights.embed, spec.embed_scale, &mut a.residual);
        // The output of the layer before, which the next norm adds to the residual.
        let mut has_delta = false;
        for ((layer, w), &(group, index)) in spec.layers.iter().zip(&weights.layers).zip(places.iter()) {
            let attention = &layer.attention;
            let eps = layer.norm_eps;
            let delta = has_delta.then_some(&mut a.delta);
            backend.all_reduce_add_norm(n_tokens, delta, &mut a.residual, &w.attention_norm, eps, &mut a.normed);
            backend.linear(n_tokens, &a.normed, &w.qkv, None, &mut a.qkv);
            let qk_norm = w.qk_norm.as_ref().zip(attention.qk_norm_eps).map(|((q, k), eps)| (q, k, eps));
            let rope = attention.rope.map(|i| &ropes[i]);
            let cache = &mut caches[group];
            backend.rope_write_kv(step, &attention.op, qk_norm, rope, &mut a.qkv, cache, group, index);
            backend.paged_attention(step, &attention.op, &a.qkv, cache, group, index, &mut a.attended);
            backend.linear(n_tokens, &a.attended, &w.out, None, &mut a.delta);
            let delta = Some(&mut a.delta);
            backend.all_reduce_add_norm(n_tokens, delta, &mut a.residual, &w.mlp_norm, eps, &mut a.normed);
            let act = layer.mlp.activation;
            backend.gated_linear(n_tokens, &a.normed, &w.gate_up, act, &mut a.gate_up, &mut a.gated);
            backend.linear(n_tokens, &a.gated, &w.down, None, &mut a.delta);
            has_delta = true;
        }
        let delta = has_delta.then_some(&mut a.delta);
        let eps = spec.final_norm_eps;
        backend.all_reduce_add_norm(n_tokens, delta, &mut a.residual, &weights.final_norm, eps, &mut a.normed);
        if n_logits == 0 {
            return;
        }
        backend.gather_logit_rows(step, &a.normed, &mut a.head_input);
        let head = weights.head.as_ref().unwrap_or(&weights.embed);
        backend.linear(n_logits, &a.head_input, head, None, &mut a.logits);
    }
}

fn step_limits(spec: &DecoderSpec, groups: &[KvGroup], limits: &SchedulerConfig) -> StepLimits {
    let group = |group: &KvGroup| (group.layout, spec.layers[group.layers[0]].attention.op);
    // Inputs of linear layers are as wide as the hidden state, the attention's output or the MLP.
    let widest = spec.layers.iter().map(|l| l.mlp.width.max(l.attention.op.heads * l.attention.op.head_dim)).max();
    let step = limits.max_num_batched_tokens.saturating_mul(widest.unwrap_or(0).max(spec.hidden));
    StepLimits {
        max_tokens: limits.max_num_batched_tokens,
        max_logits: limits.max_logits(),
        max_slots: limits.max_num_seqs,
        max_positions: limits.max_model_len,
        n_vocab: spec.n_vocab,
        max_linear_values: step.max(limits.max_logits().saturating_mul(spec.hidden)),
        groups: groups.iter().map(group).collect(),
    }
}

impl<B: Backend> Activations<B> {
    fn new(spec: &DecoderSpec, backend: &mut B, limits: &SchedulerConfig) -> Result<Self, KernelError> {
        let (max_tokens, max_logits) = (limits.max_num_batched_tokens, limits.max_logits());
        let [residual, normed, qkv, attended, gate_up, gated, delta] = Self::widths(spec);
        Ok(Self {
            residual: backend.tensor(TensorRole::Hidden, max_tokens, residual)?,
            normed: backend.tensor(TensorRole::Hidden, max_tokens, normed)?,
            qkv: backend.tensor(TensorRole::Hidden, max_tokens, qkv)?,
            attended: backend.tensor(TensorRole::Hidden, max_tokens, attended)?,
            gate_up: backend.tensor(TensorRole::Hidden, max_tokens, gate_up)?,
            gated: backend.tensor(TensorRole::Hidden, max_tokens, gated)?,
            delta: backend.tensor(TensorRole::Hidden, max_tokens, delta)?,
            head_input: backend.tensor(TensorRole::Hidden, max_logits, spec.hidden)?,
            logits: backend.tensor(TensorRole::Logits, max_logits, spec.n_vocab)?,
        })
    }

    /// Columns of the matrices, in the order of the fields: the widest layer decides.
    fn widths(spec: &DecoderSpec) -> [usize; 7] {
        let widest = |f: fn(&super::spec::LayerSpec) -> usize| spec.layers.iter().map(f).max().unwrap_or(0);
        let heads = widest(|l| l.attention.op.heads * l.attention.op.head_dim);
        let qkv = widest(|l| (l.attention.op.heads + 2 * l.attention.op.kv_heads) * l.attention.op.head_dim);
        let mlp = widest(|l| l.mlp.width);
        [spec.hidden, spec.hidden, qkv, heads, 2 * mlp, mlp, spec.hidden]
    }
}
