//! A step's metadata on the device, at fixed addresses, so that a recorded graph finds it.
//!
//! The host writes it packed into pinned memory, one of a ring of buffers, and one kernel takes it apart: no copy is
//! waited for, and the host may prepare the next step while the device still runs this one.

use super::device::{Arg, Device, DeviceBuffer, Event, Launch, PinnedBuffer};
use crate::{KernelError, StepBatch, StepLimits, StepShape};

/// Steps whose packed metadata may be on its way at once: the one that runs, the one queued, the one being written.
const RING: usize = 3;

/// A step of up to this many tokens, one a row, is padded to a size of [`bucket`] and replayed from a graph.
const MAX_GRAPH_TOKENS: usize = 512;

/// One step, prepared.
#[derive(Debug, Clone, Copy)]
pub struct CudaStep {
    /// Rows that operations run over.
    pub shape: StepShape,
    /// Whether a graph of its shape may stand for it: one token a row, and a logit for each.
    pub is_decode: bool,
}

/// An array of the metadata: its first word in the device's buffer, and how many words it may have.
#[derive(Debug, Clone, Copy)]
pub struct Array {
    start: usize,
    capacity: usize,
}

/// The metadata of the step that runs, and what is on its way there.
pub struct StepBuffers {
    meta: DeviceBuffer,
    /// Block tables of all groups, `[group][slot][max_blocks]`.
    tables: DeviceBuffer,
    /// `(first entry, entries of a slot)` of each group's tables.
    groups: Vec<(usize, usize)>,
    token_ids: Array,
    positions: Array,
    token_slots: Array,
    logit_tokens: Array,
    /// Further arrays, whose contents their owner defines (attention's plan).
    extra: Vec<Array>,
    ring: Vec<(PinnedBuffer, Event)>,
    next: usize,
    /// `(entry, block)` pairs that the next step brings.
    deltas: Vec<u32>,
    padded: Padded,
}

/// Arrays of a step while it is prepared.
#[derive(Default)]
struct Padded {
    token_ids: Vec<u32>,
    positions: Vec<u32>,
    token_slots: Vec<u32>,
    logit_tokens: Vec<u32>,
}

impl StepBuffers {
    /// Reserves the arrays for steps within `limits`, and `extra` more of the given numbers of words.
    pub fn new(device: &Device, limits: &StepLimits, extra: &[usize]) -> Result<Self, KernelError> {
        let mut words = 0;
        let mut array = |capacity: usize| {
            let start = words;
            words += capacity.next_multiple_of(32);
            Array { start, capacity }
        };
        let max_tokens = limits.max_tokens.max(bucket(limits.max_slots));
        let [token_ids, positions, token_slots] = [(); 3].map(|()| array(max_tokens));
        let logit_tokens = array(limits.max_logits.max(max_tokens.min(MAX_GRAPH_TOKENS)));
        let extra = extra.iter().map(|&n| array(n)).collect();
        let mut entries = 0;
        let mut groups = Vec::new();
        for (layout, _) in &limits.groups {
            let per_slot = limits.max_positions.div_ceil(layout.block_len);
            groups.push((entries, per_slot));
            entries += per_slot * limits.max_slots;
        }
        let ring = (0..RING).map(|_| Ok((PinnedBuffer::new(4 * words)?, Event::new(false)?)));
        let tables = device.buffer(4 * entries, "block tables")?;
        device.zero(&tables);
        Ok(Self {
            meta: device.buffer(4 * words, "step metadata")?,
            tables,
            groups,
            token_ids,
            positions,
            token_slots,
            logit_tokens,
            extra,
            ring: ring.collect::<Result<_, KernelError>>()?,
            next: 0,
            deltas: Vec::new(),
            padded: Padded::default(),
        })
    }

    /// Entries of a slot's table, which the next step brings along.
    pub fn update_table(&mut self, group: usize, slot: u32, start: usize, blocks: &[u32]) {
        let (first, per_slot) = self.groups[group];
        assert!(start + blocks.len() <= per_slot, "a table beyond the longest sequence");
        for (i, &block) in blocks.iter().enumerate() {
            let entry = first + slot as usize * per_slot + start + i;
            self.deltas.extend([u32::try_from(entry).expect("tables have fewer than 2^32 entries"), block]);
        }
    }

    /// Brings a step to the device; `extra` are the contents of the extra arrays.
    pub fn prepare(
        &mut self,
        device: &Device,
        batch: &StepBatch<'_>,
        use_graphs: bool,
        extra: &[&[u32]],
    ) -> Result<CudaStep, KernelError> {
        let step = self.padded.fill(batch, use_graphs);
        let (pinned, passed) = &mut self.ring[self.next];
        passed.wait(device)?;
        let n_words = self.padded.n_words() + extra.iter().map(|words| words.len()).sum::<usize>() + self.deltas.len();
        // Rarely needed: many slots that start with long cached prefixes bring more table entries than a step has metadata.
        pinned.grow(4 * n_words)?;
        let to = pinned.words_mut();
        let mut sections = [0u32; 36];
        let (mut from, mut n_sections) = (0, 0);
        let own = [
            (self.token_ids, &self.padded.token_ids),
            (self.positions, &self.padded.positions),
            (self.token_slots, &self.padded.token_slots),
            (self.logit_tokens, &self.padded.logit_tokens),
        ];
        let own = own.into_iter().map(|(array, words)| (array, &words[..]));
        for (array, words) in own.chain(self.extra.iter().copied().zip(extra.iter().copied())) {
            assert!(words.len() <= array.capacity, "a step beyond its limits");
            to[from..from + words.len()].copy_from_slice(words);
            sections[3 * n_sections..][..3].copy_from_slice(&[from, array.start, words.len()].map(|n| n as u32));
            from += words.len();
            n_sections += 1;
        }
        to[from..from + self.deltas.len()].copy_from_slice(&self.deltas);
        let packed: Vec<u64> = sections.chunks_exact(2).map(|w| u64::from(w[0]) | u64::from(w[1]) << 32).collect();
        let args = [
            Arg::Word(pinned.address()),
            (&self.meta).into(),
            Arg::Struct(&packed),
            n_sections.into(),
            (&self.tables).into(),
            from.into(),
            (self.deltas.len() / 2).into(),
        ];
        device.launch("unpack_step", Launch::linear(n_words.div_ceil(1024).clamp(1, 16), 256), &args);
        passed.record(device);
        self.next = (self.next + 1) % RING;
        self.deltas.clear();
        Ok(step)
    }

    /// Device address of the input tokens.
    pub fn token_ids(&self) -> u64 {
        self.address(self.token_ids)
    }

    /// Device address of the tokens' positions; -1: padding.
    pub fn positions(&self) -> u64 {
        self.address(self.positions)
    }

    /// Device address of the tokens' slots.
    pub fn token_slots(&self) -> u64 {
        self.address(self.token_slots)
    }

    /// Device address of the tokens whose logits are wanted.
    pub fn logit_tokens(&self) -> u64 {
        self.address(self.logit_tokens)
    }

    /// Device address of an extra array.
    pub fn extra(&self, index: usize) -> u64 {
        self.address(self.extra[index])
    }

    /// Device address of a group's tables, and the entries of each slot's.
    pub fn tables(&self, group: usize) -> (u64, usize) {
        let (first, per_slot) = self.groups[group];
        (self.tables.at(4 * first), per_slot)
    }

    fn address(&self, array: Array) -> u64 {
        self.meta.at(4 * array.start)
    }
}

impl Padded {
    fn n_words(&self) -> usize {
        self.token_ids.len() + self.positions.len() + self.token_slots.len() + self.logit_tokens.len()
    }

    fn fill(&mut self, batch: &StepBatch<'_>, use_graphs: bool) -> CudaStep {
        let Self { token_ids, positions, token_slots, logit_tokens } = self;
        let n_tokens = batch.token_ids.len();
        let is_decode = use_graphs
            && batch.rows.len() == n_tokens
            && batch.logit_tokens.len() == n_tokens
            && n_tokens <= MAX_GRAPH_TOKENS;
        token_ids.clear();
        token_ids.extend_from_slice(batch.token_ids);
        positions.clear();
        token_slots.clear();
        for (row, &slot) in batch.rows.iter().zip(batch.slots) {
            positions.extend((row.first_position..row.context_len()).map(|p| p as u32));
            token_slots.extend(std::iter::repeat_n(slot, row.n_tokens));
        }
        assert_eq!(positions.len(), n_tokens, "rows must tile the step's tokens");
        logit_tokens.clear();
        logit_tokens.extend_from_slice(batch.logit_tokens);
        let mut shape = StepShape { n_tokens, n_logits: logit_tokens.len() };
        if is_decode {
            let n = bucket(n_tokens);
            token_ids.resize(n, 0);
            positions.resize(n, u32::MAX);
            token_slots.resize(n, 0);
            logit_tokens.resize(n, 0);
            shape = StepShape { n_tokens: n, n_logits: n };
        }
        CudaStep { shape, is_decode }
    }
}

/// The size that a decode step of `n` rows is padded to, so that few graphs serve all (vLLM's capture sizes).
pub fn bucket(n: usize) -> usize {
    match n {
        0..=2 => n.max(1),
        3..=4 => 4,
        5..=256 => n.next_multiple_of(8),
        _ => n.next_multiple_of(16),
    }
}
