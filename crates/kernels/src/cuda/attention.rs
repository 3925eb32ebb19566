//! Paged attention: the plan of a step, and the launches of a layer.

use super::Element;
use super::backend::{CudaKvCache, CudaTensor};
use super::device::{Arg, Device, DeviceBuffer, Launch};
use super::step::StepBuffers;
use super::tensor_map::{Promotion, TensorMap, encode};
use crate::paged_attention::plan::{Heads, Item, Row, Split, plan_decode, plan_prefill};
use crate::{AttentionOp, KernelError, StepBatch, StepLimits};

/// Words of an [`Item`].
const ITEM_WORDS: usize = size_of::<Item>() / 4;
/// CTAs of the decode kernel on a multiprocessor, and of the portable prefill kernel.
const CTAS_PER_SM: usize = 2;

/// Plans and scratch memory of attention.
pub struct Attention {
    element: Element,
    ctas: usize,
    groups: Vec<Group>,
    partial_out: DeviceBuffer,
    partial_stats: DeviceBuffer,
    counters: DeviceBuffer,
    max_partials: u32,
}

/// How a prefill kernel is launched.
#[derive(Debug, Clone, Copy)]
struct Prefill {
    /// The Hopper kernel (`prefill.cu`), not the portable one (`prefill_ampere.cu`).
    hopper: bool,
    ctas: usize,
    threads: usize,
    /// Query rows (tokens times heads of a group) of a tile.
    rows: u32,
    shared_bytes: usize,
}

impl Prefill {
    fn of(device: &Device, op: &AttentionOp) -> Self {
        let hopper = device.capability.0 == 9 && op.softcap.is_none() && matches!(op.head_dim, 64 | 128);
        let ctas = device.n_sms;
        match (hopper, op.head_dim) {
            (true, 128) => Self { hopper, ctas, threads: 384, rows: 128, shared_bytes: 198_144 },
            (true, _) => Self { hopper, ctas, threads: 512, rows: 192, shared_bytes: 181_760 },
            (false, dim) => {
                let keys = if dim == 256 { 32 } else { 64 };
                let shared_bytes = 1024 + 128 * dim + 4 * keys * dim * Element::BYTES;
                Self { hopper, ctas: 2 * ctas, threads: 128, rows: 64, shared_bytes }
            }
        }
    }

    fn kernel(&self, element: Element, head_dim: usize) -> String {
        let kind = if self.hopper { "hopper_" } else { "" };
        format!("paged_prefill_{kind}{}_d{head_dim}", element.suffix())
    }
}

/// One KV group's plan.
struct Group {
    heads: Heads,
    prefill_kernel: Prefill,
    max_items: usize,
    rows: Vec<Row>,
    decode: Vec<Item>,
    prefill: Vec<Item>,
}

impl Attention {
    /// Reserves scratch for steps within `limits`.
    pub fn new(device: &Device, element: Element, limits: &StepLimits) -> Result<Self, KernelError> {
        let ctas = CTAS_PER_SM * device.n_sms;
        let groups: Vec<Group> = limits.groups.iter().map(|(_, op)| Group::new(device, op, limits, ctas)).collect();
        let widest = limits.groups.iter().map(|(_, op)| op.head_dim).max().unwrap_or(0);
        // Each CTA but the last cuts at most one pair, in two.
        let max_partials = 2 * ctas;
        let queries = MAX_QUERIES as usize;
        for (_, op) in &limits.groups {
            let (suffix, dim) = (element.suffix(), op.head_dim);
            for wide in ["", "_q16"] {
                let bytes = decode_shared_bytes(device, dim, wide);
                device.allow_shared(&format!("paged_decode_{suffix}_d{dim}{wide}"), bytes);
            }
            let prefill = Prefill::of(device, op);
            device.allow_shared(&prefill.kernel(element, dim), prefill.shared_bytes);
        }
        device.check()?;
        let counters = device.buffer(4 * max_partials, "attention's counters")?;
        device.zero(&counters);
        Ok(Self {
            element,
            ctas,
            groups,
            partial_out: device.buffer(4 * max_partials * queries * widest, "attention's partial results")?,
            partial_stats: device.buffer(8 * max_partials * queries, "attention's partial results")?,
            counters,
            max_partials: max_partials as u32,
        })
    }

    /// Words of each extra array of the step's metadata: for each group the decode items, then the prefill items.
    pub fn plan_words(&self) -> Vec<usize> {
        self.groups.iter().flat_map(|g| [g.max_items * ITEM_WORDS; 2]).collect()
    }

    /// Cuts a step's attention into work items.
    pub fn plan(&mut self, batch: &StepBatch<'_>) {
        for group in &mut self.groups {
            let queries = if group.heads.group > 8 { MAX_QUERIES } else { 8 };
            let split = Split { ctas: self.ctas as u32, queries, min_tiles: 4, item_cost: 2, fixed_tiles: None };
            let is_decode = |row: &Row| row.n_tokens * group.heads.group <= queries;
            let rows = batch.rows.iter().zip(batch.slots).map(|(span, &slot)| Row {
                q_start: span.first_token as u32,
                n_tokens: span.n_tokens as u32,
                first_position: span.first_position as u32,
                slot,
            });
            let (decode, prefill): (Vec<Row>, Vec<Row>) = rows.partition(is_decode);
            let n_partials = plan_decode(&decode, &group.heads, &split, &mut group.decode);
            assert!(n_partials <= self.max_partials, "more pieces than the grid can cut");
            let Prefill { ctas, rows, .. } = group.prefill_kernel;
            plan_prefill(&prefill, &group.heads, ctas as u32, rows, &mut group.prefill);
            group.rows = prefill;
        }
    }

    /// The plan, array by array.
    pub fn planned(&self) -> Vec<&[u32]> {
        self.groups.iter().flat_map(|g| [words(&g.decode), words(&g.prefill)]).collect()
    }

    /// Enqueues one layer's attention.
    #[allow(clippy::too_many_arguments)]
    pub fn launch(
        &self,
        device: &Device,
        buffers: &StepBuffers,
        op: &AttentionOp,
        qkv: &CudaTensor,
        cache: &CudaKvCache,
        (group, layer): (usize, usize),
        out: &CudaTensor,
    ) {
        assert_eq!(qkv.cols(), (op.heads + 2 * op.kv_heads) * op.head_dim, "width of q, k and v");
        assert_eq!(out.cols(), op.heads * op.head_dim, "width of the attention output");
        let plan = &self.groups[group];
        let args = |items: u64| {
            let (k, v) = cache.layer(layer);
            let (tables, max_blocks) = buffers.tables(group);
            let pair = |a: u32, b: u32| u64::from(a) | u64::from(b) << 32;
            let window = op.window.unwrap_or(0) as u32;
            let softcap = op.softcap.unwrap_or(0.0);
            [
                qkv.address(),
                out.address(),
                k,
                v,
                tables,
                items,
                0,
                self.partial_out.address,
                self.partial_stats.address,
                self.counters.address,
                pair(max_blocks as u32, op.heads as u32),
                pair(op.kv_heads as u32, cache.layout().block_len as u32),
                pair(window, op.scale.to_bits()),
                pair(softcap.to_bits(), 1f32.to_bits()),
                pair(1f32.to_bits(), 0),
            ]
        };
        let (suffix, dim) = (self.element.suffix(), op.head_dim);
        let decode_args = args(buffers.extra(2 * group));
        let (k_map, v_map) = cache.maps(layer);
        let wide = if plan.heads.group > 8 { "_q16" } else { "" };
        let launch = Launch::new([self.ctas, 1, 1], 160, decode_shared_bytes(device, dim, wide));
        let kernel = format!("paged_decode_{suffix}_d{dim}{wide}");
        device.launch(&kernel, launch, &[Arg::Struct(k_map), Arg::Struct(v_map), Arg::Struct(&decode_args)]);
        if plan.rows.is_empty() {
            return;
        }
        let prefill_args = args(buffers.extra(2 * group + 1));
        let prefill = plan.prefill_kernel;
        let launch = Launch::new([prefill.ctas, 1, 1], prefill.threads, prefill.shared_bytes);
        let kernel = prefill.kernel(self.element, dim);
        if !prefill.hopper {
            return device.launch(&kernel, launch, &[Arg::Struct(&prefill_args)]);
        }
        match query_map(qkv, op, prefill.rows, self.element) {
            Ok(q_map) => {
                let args = [&q_map[..], k_map, v_map, &prefill_args].map(Arg::Struct);
                device.launch(&kernel, launch, &args);
            }
            Err(error) => device.note_error(error),
        }
    }
}

/// Most packed queries of a decode tile.
const MAX_QUERIES: u32 = 16;

/// `Decode::SHARED` of `decode.cu`.
fn decode_shared_bytes(device: &Device, head_dim: usize, wide: &str) -> usize {
    let largest = head_dim == 256 && !wide.is_empty();
    match (device.capability.0 >= 9, largest) {
        (true, true) => 232_448,
        (true, false) => 115_712,
        (false, true) => 135_168,
        (false, false) if head_dim == 256 => 101_376,
        (false, false) => 82_944,
    }
}

impl Group {
    fn new(device: &Device, op: &AttentionOp, limits: &StepLimits, ctas: usize) -> Self {
        let prefill_kernel = Prefill::of(device, op);
        let heads = Heads {
            kv_heads: op.kv_heads as u32,
            group: (op.heads / op.kv_heads) as u32,
            window: op.window.unwrap_or(0) as u32,
        };
        let query_tiles = (op.heads / op.kv_heads).div_ceil(8);
        let decode = limits.max_slots * op.kv_heads * query_tiles;
        let tile_tokens = (prefill_kernel.rows as usize * op.kv_heads / op.heads).max(1);
        let prefill = op.kv_heads * (limits.max_tokens / tile_tokens + limits.max_slots);
        let max_items = 2 * ctas + decode.max(prefill);
        Self { heads, prefill_kernel, max_items, rows: Vec::new(), decode: Vec::new(), prefill: Vec::new() }
    }
}

/// A tensor map over a layer's keys (or values), in tiles of 16 tokens; see `decode.cu`.
pub fn tensor_map(address: u64, rows: usize, row_bytes: usize, element: Element) -> Result<TensorMap, KernelError> {
    let chunk = [128, 64, 32].into_iter().find(|n| row_bytes.is_multiple_of(*n)).unwrap_or(16);
    let width = chunk / Element::BYTES;
    encode(address, element, [width, row_bytes / chunk, rows], [chunk, row_bytes], [width, 1, 16], Promotion::L2_256)
}

/// A tensor map over the queries of merged rows, in tiles of the heads of a group; see `prefill.cu`.
fn query_map(qkv: &CudaTensor, op: &AttentionOp, tile: u32, element: Element) -> Result<TensorMap, KernelError> {
    let (head_bytes, group) = (Element::BYTES * op.head_dim, op.heads / op.kv_heads);
    let sizes = [op.head_dim, op.heads + 2 * op.kv_heads, qkv.capacity()];
    let strides = [head_bytes, Element::BYTES * qkv.cols()];
    encode(qkv.address(), element, sizes, strides, [64, group, tile as usize / group], Promotion::L2_256)
}

fn words(items: &[Item]) -> &[u32] {
    // SAFETY: `Item` is `repr(C)` and made of u32 only.
    unsafe { std::slice::from_raw_parts(items.as_ptr().cast(), items.len() * ITEM_WORDS) }
}
