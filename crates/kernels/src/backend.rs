//! The [`Backend`] contract: what a decoder may ask of a device, and the plain data those requests are made of.

use crate::DType;

/// A failed kernel operation: a shape the device cannot hold, or a device fault. Never a bad request.
#[derive(Debug, thiserror::Error)]
pub enum KernelError {
    /// Not enough memory for a buffer that is reserved at start.
    #[error("cannot reserve {bytes} bytes for {what}")]
    OutOfMemory {
        /// What the memory was for.
        what: &'static str,
        /// How much was asked for.
        bytes: usize,
    },
    /// A weight or buffer whose shape or format this backend cannot use; the message names it.
    #[error("{0}")]
    Unsupported(String),
    /// The device reported a fault; the step's results are lost.
    #[error("device fault: {0}")]
    Device(String),
}

/// One checkpoint matrix, `n_rows × n_cols`, row-major in `dtype`; row = output feature.
#[derive(Debug, Clone, Copy)]
pub struct WeightPart<'a> {
    /// Element format of `data`.
    pub dtype: DType,
    /// Output features.
    pub n_rows: usize,
    /// Input features.
    pub n_cols: usize,
    /// Exactly `n_rows * dtype.row_bytes(n_cols)` bytes.
    pub data: &'a [u8],
    /// One value per output feature.
    pub bias: Option<&'a [f32]>,
}

/// Element format of the paged KV cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum KvDtype {
    F32,
    F16,
    Bf16,
}

impl KvDtype {
    /// Bytes of one element.
    pub const fn bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::Bf16 => 2,
        }
    }
}

/// Cache shape shared by the layers of one KV group.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KvLayout {
    /// Layers in the group; each has its own storage for every block.
    pub n_layers: usize,
    /// Key/value heads of a layer.
    pub kv_heads: usize,
    /// Elements of one head.
    pub head_dim: usize,
    /// Tokens in a block, a multiple of 16.
    pub block_len: usize,
    /// Element format.
    pub dtype: KvDtype,
}

impl KvLayout {
    /// Bytes one block takes over all layers of the group, keys and values.
    pub const fn block_bytes(&self) -> usize {
        2 * self.n_layers * self.kv_heads * self.head_dim * self.block_len * self.dtype.bytes()
    }
}

/// Which elements of a head rotate together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RopePairing {
    /// Element `i` with `i + rotary_dim / 2` (Hugging Face's layout).
    Half,
    /// Element `2i` with `2i + 1` (the layout of GGUF files of the `llama` architecture).
    Interleaved,
}

/// Rotary position embedding as data: angle of pair `i` at position `p` is `p * inv_freq[i]`, computed in f32.
#[derive(Debug, Clone, PartialEq)]
pub struct Rope {
    /// One frequency per pair; `2 * inv_freq.len()` leading elements of each head rotate.
    pub inv_freq: Vec<f32>,
    /// Factor on cos and sin (1 unless the scaling method has one, as YaRN does).
    pub scale: f32,
    /// Pairing of elements.
    pub pairing: RopePairing,
}

/// Mathematics of one attention layer, beside its weights.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AttentionOp {
    /// Query heads; a multiple of `kv_heads`.
    pub heads: usize,
    /// Key/value heads.
    pub kv_heads: usize,
    /// Elements of one head.
    pub head_dim: usize,
    /// Factor on the scores, usually `head_dim^-0.5`.
    pub scale: f32,
    /// A token sees itself and the `window - 1` tokens before it; `None`: all.
    pub window: Option<usize>,
    /// `softcap * tanh(score / softcap)`, where given.
    pub softcap: Option<f32>,
}

/// Function between the gate and the product of a gated MLP.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Activation {
    /// `x * sigmoid(x)`.
    Silu,
    /// GELU with the tanh approximation.
    GeluTanh,
    /// Exact GELU.
    Gelu,
}

/// One sequence's part of a step: `n_tokens` consecutive tokens that begin at `first_position`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RowSpan {
    /// Index of the row's first token among the step's tokens.
    pub first_token: usize,
    /// Tokens of this row in the step, at least 1.
    pub n_tokens: usize,
    /// Position of the first of them in its sequence; earlier positions are in the cache already.
    pub first_position: usize,
}

impl RowSpan {
    /// Tokens of the sequence that are in the cache once the step has run.
    pub const fn context_len(&self) -> usize {
        self.first_position + self.n_tokens
    }
}

/// What one step computes, in the terms of the device: ragged rows over paged tables.
#[derive(Debug, Clone, Copy)]
pub struct StepBatch<'a> {
    /// Input token of every position, rows one after another; [`StepBatch::DRAWN`] plus a slot stands for the token
    /// that was drawn last for the slot.
    pub token_ids: &'a [u32],
    /// The rows, in order, without gaps.
    pub rows: &'a [RowSpan],
    /// Slot of each row, whose block tables it reads.
    pub slots: &'a [u32],
    /// Indices into `token_ids` whose logits are wanted, ascending.
    pub logit_tokens: &'a [u32],
}

impl StepBatch<'_> {
    /// A table entry with no block behind it.
    pub const NO_BLOCK: u32 = u32::MAX;
    /// Bit of a token id that is not known to the host yet.
    pub const DRAWN: u32 = 1 << 31;
}

/// What a backend reserves memory for, once, before the first step.
#[derive(Debug, Clone)]
pub struct StepLimits {
    /// Tokens of a step.
    pub max_tokens: usize,
    /// Wanted logits of a step.
    pub max_logits: usize,
    /// Slots of running sequences.
    pub max_slots: usize,
    /// Positions of a sequence.
    pub max_positions: usize,
    /// Tokens in the vocabulary.
    pub n_vocab: usize,
    /// Largest product of a linear layer's input features and its rows in a step.
    pub max_linear_values: usize,
    /// Cache shape of each KV group, with the attention that reads it.
    pub groups: Vec<(KvLayout, AttentionOp)>,
}

/// Rows that a step's operations run over: the step's own counts, or more where a recorded graph of that size is used.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StepShape {
    /// Tokens.
    pub n_tokens: usize,
    /// Wanted logits.
    pub n_logits: usize,
}

/// What a matrix of activations is for, which decides its element type.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TensorRole {
    /// Between the layers, in the backend's own element type.
    Hidden,
    /// Logits, in f32.
    Logits,
}

/// Copy of a whole block (all layers of a group), for copy-on-write.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs)]
pub struct BlockCopy {
    pub src: u32,
    pub dst: u32,
}

/// Bit set over the vocabulary: token `t` is allowed if bit `t % 32` of word `t / 32` is set.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TokenMask(pub Vec<u32>);

impl TokenMask {
    /// A mask that allows nothing.
    pub fn none(n_vocab: usize) -> Self {
        Self(vec![0; n_vocab.div_ceil(32)])
    }
    /// A mask that allows everything.
    pub fn all(n_vocab: usize) -> Self {
        Self(vec![u32::MAX; n_vocab.div_ceil(32)])
    }
    /// Forbids `token`; one outside the vocabulary is forbidden already.
    pub fn forbid(&mut self, token: u32) {
        if let Some(word) = self.0.get_mut(token as usize / 32) {
            *word &= !(1 << (token % 32));
        }
    }
    /// Allows `token`.
    pub fn allow(&mut self, token: u32) {
        self.0[token as usize / 32] |= 1 << (token % 32);
    }
    /// Whether `token` is allowed.
    pub fn allows(&self, token: u32) -> bool {
        self.0.get(token as usize / 32).is_some_and(|w| w >> (token % 32) & 1 == 1)
    }
}

/// How one token is drawn. Defaults leave the distribution as it is.
///
/// Order of operations (vLLM `v1/sample/sampler.py`): raw log-probabilities are taken first; then the mask, `bias`, the
/// repetition, frequency and presence penalties; temperature 0 takes the best token (lowest id at a tie); otherwise
/// temperature, min-p, top-k, top-p, and one draw.
#[derive(Debug, Clone, PartialEq)]
pub struct SampleParams {
    /// 0: greedy.
    pub temperature: f32,
    /// Keep the smallest set of best tokens whose probability reaches this; 1: all.
    pub top_p: f32,
    /// Keep the best `top_k`; 0: all.
    pub top_k: u32,
    /// Keep tokens of at least this fraction of the best token's probability; 0: all.
    pub min_p: f32,
    /// Divides positive and multiplies negative logits of tokens seen in prompt or output; 1: off.
    pub repetition_penalty: f32,
    /// Subtracted once for a token that the output has.
    pub presence_penalty: f32,
    /// Subtracted per occurrence in the output.
    pub frequency_penalty: f32,
    /// Added to the logits of these tokens.
    pub bias: Vec<(u32, f32)>,
    /// Number of best tokens whose log-probabilities are reported beside the sampled one's; `None`: no report.
    pub logprobs: Option<u32>,
    /// Randomness is a pure function of (seed, position).
    pub seed: u64,
}

impl Default for SampleParams {
    fn default() -> Self {
        Self {
            temperature: 1.0,
            top_p: 1.0,
            top_k: 0,
            min_p: 0.0,
            repetition_penalty: 1.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            bias: Vec::new(),
            logprobs: None,
            seed: 0,
        }
    }
}

/// One use of a row of logits.
#[derive(Debug, Clone, Copy)]
pub struct SampleRequest<'a> {
    /// Index among the step's wanted logits.
    pub logit: usize,
    /// Slot of the sequence.
    pub slot: u32,
    /// How to draw.
    pub params: &'a SampleParams,
    /// Position in the sequence of the token that is drawn.
    pub position: usize,
    /// `Some`: take this token instead of drawing one (scores a known token, for prompt log-probabilities).
    pub forced: Option<u32>,
    /// Tokens of the prompt; read only if the repetition penalty is on.
    pub prompt: &'a [u32],
    /// Tokens generated so far, as far as the host knows them; read only if a penalty is on. A backend with a depth
    /// keeps its own record, from [`Backend::start_slot`] and its draws.
    pub output: &'a [u32],
    /// Tokens that may be drawn; `None`: all.
    pub mask: Option<&'a TokenMask>,
}

/// Log-probabilities (natural, of the raw logits) at one position.
#[derive(Debug, Clone, PartialEq)]
pub struct TokenLogprobs {
    /// Of the drawn token.
    pub sampled: f32,
    /// Rank of the drawn token among all, the best has 1.
    pub rank: u32,
    /// The best tokens, best first.
    pub top: Vec<(u32, f32)>,
}

/// The answer to one [`SampleRequest`].
#[derive(Debug, Clone, PartialEq)]
pub struct Sampled {
    /// The token drawn.
    pub token: u32,
    /// Where the request asked for them.
    pub logprobs: Option<TokenLogprobs>,
    /// The logits held a NaN or nothing but -inf: the token means nothing and the request must fail.
    pub corrupt: bool,
}

/// A device: fused operations that only enqueue, over tensors that are planned at start.
///
/// Activations are `rows × cols` matrices whose storage the backend owns; an operation reads and writes the first
/// `rows` rows. Shapes are checked by assertion: the decoder proves them at load.
pub trait Backend: Send + 'static {
    /// An activation matrix with a fixed capacity of rows.
    type Tensor: Send;
    /// The weights of a linear layer, in a layout of the backend's own, with its bias.
    type Weight: Send;
    /// A vector of f32 parameters: norm weights.
    type Vector: Send;
    /// Precomputed rotation tables.
    type Rope: Send;
    /// Block storage of one KV group.
    type KvCache: Send;
    /// Metadata of one step on the device.
    type Step: Send;
    /// Samples that were enqueued and not yet read.
    type Pending: Send;
    /// Low-rank adapters of a step's rows; uninhabited where the backend has none.
    type Lora: Send;

    /// Bytes that the weights of one checkpoint matrix will take.
    fn weight_bytes(dtype: DType, n_rows: usize, n_cols: usize) -> usize;

    /// Bytes of an activation matrix; saturates.
    fn tensor_bytes(role: TensorRole, capacity: usize, cols: usize) -> usize;
    /// Bytes that [`Backend::reserve`] will take.
    fn reserve_bytes(limits: &StepLimits) -> usize;

    /// Steps that may be queued before the results of an earlier one are collected.
    fn depth(&self) -> usize {
        0
    }

    /// Reserves what steps within `limits` need beside tensors.
    fn reserve(&mut self, limits: &StepLimits) -> Result<(), KernelError>;
    /// Reserves an activation matrix.
    fn tensor(&mut self, role: TensorRole, capacity: usize, cols: usize) -> Result<Self::Tensor, KernelError>;
    /// Makes one linear layer of parts stacked along the output (merged QKV, merged gate and up).
    fn weight(&mut self, parts: &[WeightPart<'_>]) -> Result<Self::Weight, KernelError>;
    /// Makes a parameter vector.
    fn vector(&mut self, values: &[f32]) -> Result<Self::Vector, KernelError>;
    /// Makes rotation tables for positions below `max_positions`.
    fn rope(&mut self, rope: &Rope, max_positions: usize) -> Result<Self::Rope, KernelError>;
    /// Reserves `n_blocks` blocks.
    fn kv_cache(&mut self, layout: KvLayout, n_blocks: usize) -> Result<Self::KvCache, KernelError>;

    /// A sequence takes a slot: its tables are empty, and penalties count these tokens.
    fn start_slot(&mut self, slot: u32, params: &SampleParams, prompt: &[u32], output: &[u32]);
    /// Sets entries of a slot's block table from `start` on, the block of every `block_len` positions. Those wholly outside
    /// the group's window may be [`StepBatch::NO_BLOCK`].
    fn update_table(&mut self, group: usize, slot: u32, start: usize, blocks: &[u32]);

    /// Takes a step's metadata to the device.
    fn prepare(&mut self, batch: &StepBatch<'_>) -> Result<Self::Step, KernelError>;
    /// Rows that the step's operations run over.
    fn shape(&self, step: &Self::Step) -> StepShape;
    /// `out[t] = scale * table[token_ids[t]]`, for all tokens of the step.
    fn embed(&mut self, step: &Self::Step, table: &Self::Weight, scale: f32, out: &mut Self::Tensor);
    /// `out = x · wᵀ + bias` over the first `rows` rows, plus the rows' adapters.
    fn linear(
        &mut self,
        rows: usize,
        x: &Self::Tensor,
        w: &Self::Weight,
        lora: Option<&Self::Lora>,
        out: &mut Self::Tensor,
    );
    /// Sums `delta` over the ranks (one rank: as it is), adds it to `residual`, and writes
    /// `out = rms_norm(residual) * weight`. With no `delta` only the norm.
    fn all_reduce_add_norm(
        &mut self,
        rows: usize,
        delta: Option<&mut Self::Tensor>,
        residual: &mut Self::Tensor,
        weight: &Self::Vector,
        eps: f32,
        out: &mut Self::Tensor,
    );
    /// In place over merged rows `[q | k | v]`: RMS norm per head of q and k (where given), rotation (where given);
    /// then k and v go to the cache blocks of `layer` in `group`.
    #[allow(clippy::too_many_arguments)]
    fn rope_write_kv(
        &mut self,
        step: &Self::Step,
        op: &AttentionOp,
        qk_norm: Option<(&Self::Vector, &Self::Vector, f32)>,
        rope: Option<&Self::Rope>,
        qkv: &mut Self::Tensor,
        cache: &mut Self::KvCache,
        group: usize,
        layer: usize,
    );
    /// Causal attention of each token over its sequence's cached tokens: `out[t] = softmax(q·kᵀ * scale)·v`.
    /// Reads q from the merged rows that [`Backend::rope_write_kv`] left.
    #[allow(clippy::too_many_arguments)]
    fn paged_attention(
        &mut self,
        step: &Self::Step,
        op: &AttentionOp,
        qkv: &Self::Tensor,
        cache: &Self::KvCache,
        group: usize,
        layer: usize,
        out: &mut Self::Tensor,
    );
    /// The first half of a gated MLP: `out = act(gate) * up` for `[gate | up] = x · wᵀ + bias`, which may pass through `gate_up`.
    fn gated_linear(
        &mut self,
        rows: usize,
        x: &Self::Tensor,
        w: &Self::Weight,
        act: Activation,
        gate_up: &mut Self::Tensor,
        out: &mut Self::Tensor,
    ) {
        self.linear(rows, x, w, None, gate_up);
        self.gated_activation(rows, act, gate_up, out);
    }
    /// `out = act(gate) * up` over merged rows `[gate | up]`.
    fn gated_activation(&mut self, rows: usize, act: Activation, gate_up: &Self::Tensor, out: &mut Self::Tensor);
    /// Gathers the rows whose logits are wanted: `out[i] = x[logit_tokens[i]]`.
    fn gather_logit_rows(&mut self, step: &Self::Step, x: &Self::Tensor, out: &mut Self::Tensor);
    /// Enqueues the draws from `logits`, whose rows are the step's wanted logits, `n_vocab` valid columns each.
    fn sample(&mut self, logits: &mut Self::Tensor, n_vocab: usize, requests: &[SampleRequest<'_>]) -> Self::Pending;
    /// Waits for enqueued draws; answers in the order of the requests.
    fn collect(&mut self, pending: Self::Pending) -> Result<Vec<Sampled>, KernelError>;

    /// Copies the first `rows` rows to the host (tests, embeddings).
    fn read(&mut self, rows: usize, x: &Self::Tensor) -> Result<Vec<f32>, KernelError>;

    /// Copies blocks within a group's storage, in order.
    fn copy_blocks(&mut self, cache: &mut Self::KvCache, copies: &[BlockCopy]);
    /// Bytes of the named blocks, block after block, in the backend's own layout.
    fn export_blocks(&mut self, cache: &Self::KvCache, blocks: &[u32]) -> Result<Vec<u8>, KernelError>;
    /// Writes what [`Backend::export_blocks`] of the same layout gave.
    fn import_blocks(&mut self, cache: &mut Self::KvCache, blocks: &[u32], bytes: &[u8]) -> Result<(), KernelError>;

    /// Enqueues a step's forward by `f`; a backend that records work (CUDA graphs) may replay what it recorded of an earlier
    /// step of the same shape instead.
    fn capture(&mut self, _step: &Self::Step, f: &mut dyn FnMut(&mut Self))
    where
        Self: Sized,
    {
        f(self);
    }
}
