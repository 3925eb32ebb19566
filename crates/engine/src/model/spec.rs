//! The mathematics of a decoder, as data. Says nothing about vendors; `families.rs` maps checkpoints to it.
//!
//! Layers are a resolved list, so that anything that differs from layer to layer (windows, layers without rotation) is
//! data. The weights are named by role: [`WeightNames`] maps each role to the checkpoint's tensor.

use kwire_kernels::{Activation, AttentionOp, Rope};

/// A whole decoder: embedding, layers, final norm, head.
#[derive(Debug, Clone, PartialEq)]
pub struct DecoderSpec {
    /// Tokens in the vocabulary: rows of the embedding and of the head.
    pub n_vocab: usize,
    /// Width of the residual stream.
    pub hidden: usize,
    /// Factor on the embedded tokens.
    pub embed_scale: f32,
    /// The head uses the embedding's weights.
    pub tied: bool,
    /// The layers, in order.
    pub layers: Vec<LayerSpec>,
    /// Rotations that layers refer to by index; most decoders have one.
    pub ropes: Vec<Rope>,
    /// Epsilon of the final RMS norm.
    pub final_norm_eps: f32,
    /// Positions that the checkpoint was made for: the longest `max_model_len`.
    pub max_positions: usize,
}

/// One layer: `x += attention(norm(x))`, then `x += mlp(norm(x))`.
#[derive(Debug, Clone, PartialEq)]
pub struct LayerSpec {
    /// Epsilon of the layer's RMS norms.
    pub norm_eps: f32,
    /// Token mixing.
    pub attention: AttentionSpec,
    /// Channel mixing.
    pub mlp: MlpSpec,
}

/// Grouped-query attention with its projections.
#[derive(Debug, Clone, PartialEq)]
pub struct AttentionSpec {
    /// Heads, sizes, scale, window, soft cap.
    pub op: AttentionOp,
    /// The q, k and v projections have biases.
    pub qkv_bias: bool,
    /// The output projection has a bias.
    pub out_bias: bool,
    /// Epsilon of the RMS norm on each head of q and k, where there is one.
    pub qk_norm_eps: Option<f32>,
    /// Index into [`DecoderSpec::ropes`]; `None`: no rotation.
    pub rope: Option<usize>,
}

/// `down(act(gate(x)) * up(x))`.
#[derive(Debug, Clone, PartialEq)]
pub struct MlpSpec {
    /// Width between the projections.
    pub width: usize,
    /// Function on the gate.
    pub activation: Activation,
    /// The projections have biases.
    pub bias: bool,
}

/// What a tensor is for. Linear roles may have a bias beside their weight.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Role {
    /// `[n_vocab, hidden]`.
    Embed,
    /// `[hidden]`.
    FinalNorm,
    /// `[n_vocab, hidden]`; absent where tied.
    Head,
    /// A tensor of layer `.0`.
    Layer(usize, LayerRole),
}

/// What a tensor of a layer is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[allow(missing_docs)]
pub enum LayerRole {
    AttentionNorm,
    Q,
    K,
    V,
    O,
    QNorm,
    KNorm,
    MlpNorm,
    Gate,
    Up,
    Down,
}

impl LayerRole {
    /// All of them.
    pub const ALL: [Self; 11] = [
        Self::AttentionNorm,
        Self::Q,
        Self::K,
        Self::V,
        Self::O,
        Self::QNorm,
        Self::KNorm,
        Self::MlpNorm,
        Self::Gate,
        Self::Up,
        Self::Down,
    ];
}

/// Names of a checkpoint's tensors. A pattern has `{i}` for the layer and no `.weight` or `.bias` at its end.
#[derive(Debug, Clone)]
pub struct WeightNames {
    /// The embedding.
    pub embed: &'static str,
    /// The final norm.
    pub final_norm: &'static str,
    /// The head.
    pub head: &'static str,
    /// Pattern of each layer role.
    pub layer: fn(LayerRole) -> &'static str,
    /// Tensors that carry no weights of their own and may be skipped (precomputed frequencies, a tied head saved again):
    /// full names, `{i}` for the layer. See [`WeightNames::is_ignored`].
    pub ignored: &'static [&'static str],
}

impl WeightNames {
    /// Name of the role's tensor, without `.weight` or `.bias`.
    pub fn name(&self, role: Role) -> String {
        match role {
            Role::Embed => self.embed.to_owned(),
            Role::FinalNorm => self.final_norm.to_owned(),
            Role::Head => self.head.to_owned(),
            Role::Layer(i, role) => (self.layer)(role).replace("{i}", &i.to_string()),
        }
    }
    /// Whether a checkpoint's tensor (full name) may be skipped. In `ignored`, `{i}` stands for any number.
    pub fn is_ignored(&self, tensor: &str) -> bool {
        self.ignored.iter().any(|pattern| match pattern.split_once("{i}") {
            None => tensor == *pattern,
            Some((head, tail)) => tensor
                .strip_prefix(head)
                .and_then(|rest| rest.strip_suffix(tail))
                .is_some_and(|i| !i.is_empty() && i.bytes().all(|b| b.is_ascii_digit())),
        })
    }
}
