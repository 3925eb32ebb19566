//! [`CudaBackend`]: the operations of [`Backend`] on one GPU. They only enqueue; a fault shows when results are read.

use std::convert::Infallible;
use std::path::PathBuf;

use super::Element;
use super::attention::{Attention, tensor_map};
use super::cublas::{CublasLt, Shape};
use super::device::{Arg, Device, DeviceBuffer, Launch};
use super::graphs::Graphs;
use super::sampling::{Pending, Sampling};
use super::small_m::SmallM;
use super::staging::Staging;
use super::step::{CudaStep, StepBuffers};
use super::tensor_map::TensorMap;
use crate::{
    Activation, AttentionOp, Backend, BlockCopy, DType, KernelError, KvDtype, KvLayout, Rope, RopePairing,
    SampleParams, SampleRequest, Sampled, StepBatch, StepLimits, StepShape, TensorRole, WeightPart,
};

/// Runs every operation on one GPU, in bf16 or f16 with f32 accumulation.
pub struct CudaBackend {
    element: Element,
    use_graphs: bool,
    graphs: Graphs,
    matrices: CublasLt,
    staging: Option<Staging>,
    /// Set by [`Backend::reserve`].
    steps: Option<Steps>,
    // Dropped last: everything above lives on it.
    device: Device,
}

/// What steps need, reserved once.
struct Steps {
    buffers: StepBuffers,
    attention: Attention,
    sampling: Sampling,
}

/// An activation matrix, `capacity × cols`, row-major.
pub struct CudaTensor {
    data: DeviceBuffer,
    role: TensorRole,
    capacity: usize,
    cols: usize,
}

/// What the device needs beside weights, tensors and the cache: workspaces, metadata, attention's partial results, graphs.
const RESERVE_BYTES: usize = 1 << 30;

/// Threads of a block that takes a row of `cols` elements in vectors of eight.
fn vector_threads(cols: usize, most: usize) -> usize {
    cols.div_ceil(8).next_multiple_of(32).min(most)
}

/// Weights of a linear layer, `n_rows × n_cols`, row-major.
pub struct CudaWeight {
    data: DeviceBuffer,
    bias: Option<Bias>,
    n_rows: usize,
    n_cols: usize,
}

/// One value per output feature, as each of the two kinds of kernel wants it.
struct Bias {
    f32: DeviceBuffer,
    element: DeviceBuffer,
}

/// A vector of f32.
pub struct CudaVector {
    data: DeviceBuffer,
    len: usize,
}

/// Rotation tables, `[position][pair]` of (cos, sin).
pub struct CudaRope {
    table: DeviceBuffer,
    n_pairs: usize,
    pairing: RopePairing,
}

/// Block storage of one KV group: `[layer][keys, values][block][kv head][token][dim]`.
pub struct CudaKvCache {
    data: DeviceBuffer,
    layout: KvLayout,
    n_blocks: usize,
    /// Tensor maps of each layer's keys and values.
    maps: Vec<(TensorMap, TensorMap)>,
}

impl CudaKvCache {
    /// Bytes of the keys (or values) of one layer.
    fn half_layer_bytes(&self) -> usize {
        self.layout.block_bytes() / (2 * self.layout.n_layers) * self.n_blocks
    }

    /// Device addresses of a layer's keys and values.
    pub(super) fn layer(&self, layer: usize) -> (u64, u64) {
        let half = self.half_layer_bytes();
        (self.data.at(2 * layer * half), self.data.at((2 * layer + 1) * half))
    }

    /// How block kernels see it: storage, bytes of a plane (the keys or values of a layer), bytes of a block in one; and the
    /// launch for `n` blocks.
    fn planes(&self, n: usize) -> ([Arg<'_>; 3], Launch) {
        let n_planes = 2 * self.layout.n_layers;
        let block_bytes = self.layout.block_bytes() / n_planes;
        let args = [(&self.data).into(), (self.half_layer_bytes() as u64).into(), (block_bytes as u64).into()];
        (args, Launch::new([n_planes, n, 1], 256, 0))
    }

    /// Tensor maps of a layer's keys and values.
    pub(super) fn maps(&self, layer: usize) -> &(TensorMap, TensorMap) {
        &self.maps[layer]
    }

    /// Its shape.
    pub(super) fn layout(&self) -> &KvLayout {
        &self.layout
    }
}

impl CudaTensor {
    /// Device address.
    pub(super) fn address(&self) -> u64 {
        self.data.address
    }

    /// Rows it holds at most.
    pub(super) fn capacity(&self) -> usize {
        self.capacity
    }

    /// Columns.
    pub(super) fn cols(&self) -> usize {
        self.cols
    }
}

impl CudaBackend {
    /// A backend on GPU `ordinal` that computes in `element`s; without `use_graphs` every step is launched anew. `choices` is a
    /// file in which measurements of matrix products are kept.
    pub fn new(
        ordinal: usize,
        element: Element,
        use_graphs: bool,
        choices: Option<PathBuf>,
    ) -> Result<Self, KernelError> {
        let device = Device::new(ordinal)?;
        let matrices = CublasLt::new(&device, element, choices)?;
        SmallM::allow_shared(&device, element);
        device.check()?;
        let staging = None;
        Ok(Self { element, use_graphs, graphs: Graphs::default(), matrices, staging, steps: None, device })
    }

    /// The GPU.
    pub fn device(&self) -> &Device {
        &self.device
    }

    fn launch(&self, name: &str, launch: Launch, args: &[Arg<'_>]) {
        self.device.launch(&format!("{name}_{}", self.element.suffix()), launch, args);
    }

    /// Copies blocks to or from a buffer, and waits for it.
    fn move_blocks(
        &self,
        kernel: &str,
        cache: &CudaKvCache,
        blocks: &[u32],
        buffer: &DeviceBuffer,
    ) -> Result<(), KernelError> {
        let ids: Vec<u8> = blocks.iter().flat_map(|b| b.to_le_bytes()).collect();
        let ids = self.device.upload(&ids, "block ids")?;
        let (storage, launch) = cache.planes(blocks.len());
        self.device.launch(kernel, launch, &[storage[0], storage[1], storage[2], (&ids).into(), buffer.into()]);
        self.device.synchronize()
    }

    fn bias(&self, parts: &[WeightPart<'_>]) -> Result<Bias, KernelError> {
        let of_part = |p: &WeightPart<'_>| p.bias.map_or_else(|| vec![0.0; p.n_rows], <[f32]>::to_vec);
        let values: Vec<f32> = parts.iter().flat_map(of_part).collect();
        let f32: Vec<u8> = values.iter().flat_map(|x| x.to_le_bytes()).collect();
        let element: Vec<u8> = values.iter().flat_map(|&x| self.element.bytes_of(x)).collect();
        Ok(Bias { f32: self.device.upload(&f32, "a bias")?, element: self.device.upload(&element, "a bias")? })
    }

    fn few_tokens(&self, shape: SmallM, x: &CudaTensor, w: &CudaWeight, out: &CudaTensor) {
        let bias = w.bias.as_ref().map_or(0, |b| b.f32.address);
        let buffers = [x.address(), w.data.address, bias, out.address()];
        if let Err(error) = shape.launch(&self.device, self.element, buffers) {
            self.device.note_error(error);
        }
    }

    fn steps(&self) -> &Steps {
        self.steps.as_ref().expect("reserved before the first step")
    }

    fn steps_mut(&mut self) -> &mut Steps {
        self.steps.as_mut().expect("reserved before the first step")
    }
}

impl Backend for CudaBackend {
    type Tensor = CudaTensor;
    type Weight = CudaWeight;
    type Vector = CudaVector;
    type Rope = CudaRope;
    type KvCache = CudaKvCache;
    type Step = CudaStep;
    type Pending = Pending;
    type Lora = Infallible;

    fn weight_bytes(_: DType, n_rows: usize, n_cols: usize) -> usize {
        Element::BYTES * n_rows * n_cols
    }

    fn tensor_bytes(role: TensorRole, capacity: usize, cols: usize) -> usize {
        let bytes = if role == TensorRole::Logits { 4 } else { Element::BYTES };
        capacity.saturating_mul(cols).saturating_mul(bytes)
    }

    fn reserve_bytes(limits: &StepLimits) -> usize {
        // Block tables and the tokens that penalties count; the rest is small.
        let tables = |layout: &KvLayout| limits.max_positions.div_ceil(layout.block_len);
        let per_slot = limits.max_positions + limits.groups.iter().map(|(layout, _)| tables(layout)).sum::<usize>();
        limits.max_slots.saturating_mul(per_slot).saturating_mul(4).saturating_add(RESERVE_BYTES)
    }

    fn depth(&self) -> usize {
        1
    }

    fn reserve(&mut self, limits: &StepLimits) -> Result<(), KernelError> {
        let attention = Attention::new(&self.device, self.element, limits)?;
        let buffers = StepBuffers::new(&self.device, limits, &attention.plan_words())?;
        let sampling = Sampling::new(&self.device, limits)?;
        self.steps = Some(Steps { buffers, attention, sampling });
        self.staging = None;
        Ok(())
    }

    fn tensor(&mut self, role: TensorRole, capacity: usize, cols: usize) -> Result<CudaTensor, KernelError> {
        let bytes = Self::tensor_bytes(role, capacity, cols);
        Ok(CudaTensor { data: self.device.buffer(bytes, "an activation matrix")?, role, capacity, cols })
    }

    fn weight(&mut self, parts: &[WeightPart<'_>]) -> Result<CudaWeight, KernelError> {
        self.device.bind();
        let n_rows: usize = parts.iter().map(|p| p.n_rows).sum();
        let n_cols = parts[0].n_cols;
        if !n_rows.is_multiple_of(8) || !n_cols.is_multiple_of(8) {
            return Err(KernelError::Unsupported(format!("{n_rows} × {n_cols}: a GPU needs multiples of 8")));
        }
        let data = self.device.buffer(Element::BYTES * n_rows * n_cols, "weights")?;
        if self.staging.is_none() {
            self.staging = Some(Staging::new()?);
        }
        let staging = self.staging.as_mut().expect("just made");
        let mut offset = 0;
        for part in parts {
            staging.send(&self.device, (part.dtype, n_cols, part.data), self.element, &data, offset)?;
            offset += Element::BYTES * part.n_rows * n_cols;
        }
        let bias = parts.iter().any(|p| p.bias.is_some()).then(|| self.bias(parts)).transpose()?;
        Ok(CudaWeight { data, bias, n_rows, n_cols })
    }

    fn vector(&mut self, values: &[f32]) -> Result<CudaVector, KernelError> {
        self.device.bind();
        let bytes: Vec<u8> = values.iter().flat_map(|x| x.to_le_bytes()).collect();
        Ok(CudaVector { data: self.device.upload(&bytes, "a norm's weights")?, len: values.len() })
    }

    fn rope(&mut self, rope: &Rope, max_positions: usize) -> Result<CudaRope, KernelError> {
        let n_pairs = rope.inv_freq.len();
        let inv_freq: Vec<u8> = rope.inv_freq.iter().flat_map(|x| x.to_le_bytes()).collect();
        let inv_freq = self.device.upload(&inv_freq, "rotation tables")?;
        let table = self.device.buffer(8 * n_pairs * max_positions, "rotation tables")?;
        let args = [(&inv_freq).into(), n_pairs.into(), rope.scale.into(), (&table).into()];
        self.device.launch("rope_table", Launch::linear(max_positions, 64), &args);
        self.device.synchronize()?;
        Ok(CudaRope { table, n_pairs, pairing: rope.pairing })
    }

    fn kv_cache(&mut self, layout: KvLayout, n_blocks: usize) -> Result<CudaKvCache, KernelError> {
        if layout.dtype == KvDtype::F32 || layout.dtype.bytes() != Element::BYTES {
            return Err(KernelError::Unsupported(format!("a KV cache of {:?} on a GPU", layout.dtype)));
        }
        let data = self.device.buffer(layout.block_bytes() * n_blocks, "the KV cache")?;
        // Attention may load whole tiles; what lies past a sequence's end must not be NaN.
        self.device.zero(&data);
        let mut cache = CudaKvCache { data, layout, n_blocks, maps: Vec::new() };
        let (rows, row_bytes) = (n_blocks * layout.kv_heads * layout.block_len, layout.head_dim * layout.dtype.bytes());
        let map = |address| tensor_map(address, rows, row_bytes, self.element);
        let maps = (0..layout.n_layers).map(|layer| {
            let (k, v) = cache.layer(layer);
            Ok((map(k)?, map(v)?))
        });
        cache.maps = maps.collect::<Result<_, KernelError>>()?;
        Ok(cache)
    }

    fn start_slot(&mut self, slot: u32, params: &SampleParams, prompt: &[u32], output: &[u32]) {
        self.steps_mut().sampling.start_slot(slot, params, prompt, output);
    }

    fn update_table(&mut self, group: usize, slot: u32, start: usize, blocks: &[u32]) {
        self.steps_mut().buffers.update_table(group, slot, start, blocks);
    }

    fn prepare(&mut self, batch: &StepBatch<'_>) -> Result<CudaStep, KernelError> {
        self.device.bind();
        self.device.check()?;
        let Steps { buffers, attention, .. } = self.steps.as_mut().expect("reserved before the first step");
        attention.plan(batch);
        buffers.prepare(&self.device, batch, self.use_graphs, &attention.planned())
    }

    fn shape(&self, step: &CudaStep) -> StepShape {
        step.shape
    }

    fn embed(&mut self, step: &CudaStep, table: &CudaWeight, scale: f32, out: &mut CudaTensor) {
        let steps = self.steps();
        let ids = steps.buffers.token_ids();
        let args = [
            ids.into(),
            steps.sampling.last_tokens().into(),
            ids.into(),
            (&table.data).into(),
            (&out.data).into(),
            scale.into(),
            table.n_rows.into(),
            out.cols.into(),
        ];
        self.launch("embed", Launch::linear(step.shape.n_tokens, vector_threads(out.cols, 512)), &args);
    }

    fn linear(&mut self, rows: usize, x: &CudaTensor, w: &CudaWeight, lora: Option<&Infallible>, out: &mut CudaTensor) {
        assert!(lora.is_none());
        assert_eq!(x.cols, w.n_cols, "input features");
        assert_eq!(out.cols, w.n_rows, "output features");
        assert!(rows <= x.capacity && rows <= out.capacity);
        let f32_out = out.role == TensorRole::Logits;
        let few = SmallM { m: rows, n: w.n_rows, k: w.n_cols, f32_out, act: None };
        if few.takes(&self.device) {
            return self.few_tokens(few, x, w, out);
        }
        let shape = Shape { m: rows, n: w.n_rows, k: w.n_cols, f32_out, bias: w.bias.is_some() };
        let bias = w.bias.as_ref().map_or(0, |b| b.element.address);
        self.matrices.product(&self.device, shape, x.address(), w.data.address, bias, out.address());
    }

    fn all_reduce_add_norm(
        &mut self,
        rows: usize,
        delta: Option<&mut CudaTensor>,
        residual: &mut CudaTensor,
        weight: &CudaVector,
        eps: f32,
        out: &mut CudaTensor,
    ) {
        assert_eq!(residual.cols, weight.len, "norm width");
        let args = [
            delta.map_or(0, |d| d.address()).into(),
            residual.address().into(),
            (&weight.data).into(),
            out.address().into(),
            eps.into(),
            rows.into(),
            residual.cols.into(),
        ];
        let (name, vectors) = if residual.cols > 8192 { ("_wide", 2) } else { ("", 1) };
        let threads = vector_threads(residual.cols.div_ceil(vectors), 1024);
        let kernel = format!("add_rms_norm_{}{name}", self.element.suffix());
        self.device.launch(&kernel, Launch::linear(rows, threads), &args);
    }

    fn rope_write_kv(
        &mut self,
        step: &CudaStep,
        op: &AttentionOp,
        qk_norm: Option<(&CudaVector, &CudaVector, f32)>,
        rope: Option<&CudaRope>,
        qkv: &mut CudaTensor,
        cache: &mut CudaKvCache,
        group: usize,
        layer: usize,
    ) {
        assert_eq!(qkv.cols, (op.heads + 2 * op.kv_heads) * op.head_dim, "width of q, k and v");
        let buffers = &self.steps().buffers;
        let (tables, max_blocks) = buffers.tables(group);
        let (k, v) = cache.layer(layer);
        let pair = |a: u32, b: usize| u64::from(a) | (b as u64) << 32;
        let (n_pairs, pairing) = rope.map_or((0, RopePairing::Half), |r| (r.n_pairs, r.pairing));
        let args = [
            qkv.address(),
            rope.map_or(0, |r| r.table.address),
            qk_norm.map_or(0, |(q, _, _)| q.data.address),
            qk_norm.map_or(0, |(_, k, _)| k.data.address),
            buffers.positions(),
            buffers.token_slots(),
            tables,
            k,
            v,
            pair(qk_norm.map_or(0.0, |(_, _, eps)| eps).to_bits(), 1f32.to_bits() as usize),
            pair(1f32.to_bits(), op.heads),
            pair(op.kv_heads as u32, op.head_dim),
            pair(2 * n_pairs as u32, usize::from(pairing == RopePairing::Interleaved)),
            pair(cache.layout.block_len as u32, max_blocks),
        ];
        let (width, lanes) = match op.head_dim {
            0..=64 => (64, 8),
            65..=128 => (128, 16),
            _ => (256, 32),
        };
        // Each group of lanes takes two heads, blocks of 128 threads.
        let n_heads = op.heads + 2 * op.kv_heads;
        let norm = if qk_norm.is_some() { "_norm" } else { "" };
        let kernel = format!("rope_write_kv_{}{norm}_{width}", self.element.suffix());
        let launch = Launch::new([step.shape.n_tokens, (n_heads * lanes).div_ceil(256), 1], 128, 0);
        self.device.launch(&kernel, launch, &[Arg::Struct(&args)]);
    }

    fn paged_attention(
        &mut self,
        _step: &CudaStep,
        op: &AttentionOp,
        qkv: &CudaTensor,
        cache: &CudaKvCache,
        group: usize,
        layer: usize,
        out: &mut CudaTensor,
    ) {
        let Steps { buffers, attention, .. } = self.steps.as_ref().expect("reserved before the first step");
        attention.launch(&self.device, buffers, op, qkv, cache, (group, layer), out);
    }

    fn gated_linear(
        &mut self,
        rows: usize,
        x: &CudaTensor,
        w: &CudaWeight,
        act: Activation,
        gate_up: &mut CudaTensor,
        out: &mut CudaTensor,
    ) {
        let few = SmallM { m: rows, n: out.cols, k: w.n_cols, f32_out: false, act: Some(act) };
        if few.takes(&self.device) {
            return self.few_tokens(few, x, w, out);
        }
        self.linear(rows, x, w, None, gate_up);
        self.gated_activation(rows, act, gate_up, out);
    }

    fn gated_activation(&mut self, rows: usize, act: Activation, gate_up: &CudaTensor, out: &mut CudaTensor) {
        assert_eq!(gate_up.cols, 2 * out.cols, "width of gate and up");
        let name = match act {
            Activation::Silu => "silu",
            Activation::GeluTanh => "gelu_tanh",
            Activation::Gelu => "gelu",
        };
        let args = [gate_up.address().into(), out.address().into(), out.cols.into()];
        let threads = vector_threads(out.cols, 256);
        let launch = Launch::new([rows, out.cols.div_ceil(8 * threads), 1], threads, 0);
        self.launch(name, launch, &args);
    }

    fn gather_logit_rows(&mut self, step: &CudaStep, x: &CudaTensor, out: &mut CudaTensor) {
        let tokens = self.steps().buffers.logit_tokens();
        let row_bytes = Element::BYTES * x.cols;
        let args = [x.address().into(), tokens.into(), out.address().into(), row_bytes.into(), x.capacity.into()];
        let launch = Launch::linear(step.shape.n_logits, vector_threads(x.cols, 256));
        self.device.launch("gather_rows", launch, &args);
    }

    fn sample(&mut self, logits: &mut CudaTensor, n_vocab: usize, requests: &[SampleRequest<'_>]) -> Self::Pending {
        assert_eq!(logits.cols, n_vocab, "a logit for each token");
        let steps = self.steps.as_mut().expect("reserved before the first step");
        let pending = steps.sampling.enqueue(&self.device, logits.address(), logits.cols, requests);
        pending.unwrap_or_else(|error| {
            self.device.note_error(error);
            Pending::default()
        })
    }

    fn collect(&mut self, pending: Self::Pending) -> Result<Vec<Sampled>, KernelError> {
        let steps = self.steps.as_mut().expect("reserved before the first step");
        steps.sampling.collect(&self.device, &pending)
    }

    fn read(&mut self, rows: usize, x: &CudaTensor) -> Result<Vec<f32>, KernelError> {
        self.device.bind();
        let n = rows * x.cols;
        let mut bytes = vec![0; Self::tensor_bytes(x.role, rows, x.cols)];
        self.device.read(&x.data, 0, &mut bytes)?;
        Ok(match (x.role, self.element) {
            (TensorRole::Logits, _) => bytes.as_chunks().0.iter().map(|&b| f32::from_le_bytes(b)).collect(),
            (_, Element::Bf16) => bytes.as_chunks().0.iter().map(|&b| half::bf16::from_le_bytes(b).to_f32()).collect(),
            (_, Element::F16) => bytes.as_chunks().0.iter().map(|&b| half::f16::from_le_bytes(b).to_f32()).collect(),
        })
        .inspect(|v: &Vec<f32>| assert_eq!(v.len(), n))
    }

    fn copy_blocks(&mut self, cache: &mut CudaKvCache, copies: &[BlockCopy]) {
        // Copies of one launch are independent of each other; one that reads or overwrites what another wrote comes later.
        let mut rest = copies;
        while !rest.is_empty() {
            let depends = |i: usize| {
                rest[..i].iter().any(|c| c.dst == rest[i].src || c.dst == rest[i].dst || c.src == rest[i].dst)
            };
            let n = (1..rest.len()).find(|&i| depends(i)).unwrap_or(rest.len());
            let pairs: Vec<u8> = rest[..n].iter().flat_map(|c| [c.src, c.dst]).flat_map(u32::to_le_bytes).collect();
            match self.device.upload(&pairs, "block copies") {
                Ok(pairs) => {
                    let (storage, launch) = cache.planes(n);
                    self.device.launch("copy_blocks", launch, &[storage[0], storage[1], storage[2], (&pairs).into()]);
                    self.device.synchronize().ok();
                }
                Err(error) => self.device.note_error(error),
            }
            rest = &rest[n..];
        }
    }

    fn export_blocks(&mut self, cache: &CudaKvCache, blocks: &[u32]) -> Result<Vec<u8>, KernelError> {
        self.device.bind();
        let buffer = self.device.buffer(cache.layout.block_bytes() * blocks.len(), "exported blocks")?;
        self.move_blocks("export_blocks", cache, blocks, &buffer)?;
        let mut bytes = vec![0; buffer.bytes];
        self.device.read(&buffer, 0, &mut bytes)?;
        Ok(bytes)
    }

    fn import_blocks(&mut self, cache: &mut CudaKvCache, blocks: &[u32], bytes: &[u8]) -> Result<(), KernelError> {
        self.device.bind();
        assert_eq!(bytes.len(), cache.layout.block_bytes() * blocks.len(), "exported blocks of the same layout");
        let buffer = self.device.upload(bytes, "imported blocks")?;
        self.move_blocks("import_blocks", cache, blocks, &buffer)
    }

    fn capture(&mut self, step: &CudaStep, f: &mut dyn FnMut(&mut Self)) {
        let key = step.shape.n_tokens;
        if !step.is_decode {
            return f(self);
        }
        if self.graphs.replay(&self.device, key) {
            return;
        }
        // The first step of a size runs as it is, so that plans and lazily loaded kernels exist when the next is recorded.
        if self.graphs.first_use(key) {
            return f(self);
        }
        Graphs::begin(&self.device);
        f(self);
        self.graphs.end(&self.device, key);
        self.graphs.replay(&self.device, key);
    }
}
