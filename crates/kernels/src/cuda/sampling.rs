//! Drawing tokens: requests to the device, answers back. See `sample.cu`.
//!
//! Requests, masks and answers lie in pinned memory, which the kernel reads and writes: nothing is copied and nothing is
//! waited for but the event behind it.

use super::device::{Arg, Device, DeviceBuffer, Event, Launch, PinnedBuffer};
use crate::sample::GREEDY_BELOW;
use crate::{KernelError, SampleParams, SampleRequest, Sampled, StepLimits, TokenLogprobs};

/// Steps whose draws may be enqueued and not collected.
const RING: usize = 3;
/// Blocks that share a request: many where there are few requests, since each block reads a part of the logits.
const CLUSTERS: [usize; 3] = [16, 8, 4];
/// Smallest cluster of requests that are not plainly greedy: a block keeps its part of the logits in shared memory.
const SMALLEST_CLUSTER: usize = 8;
/// Words of a request, and of a bias.
const REQUEST_WORDS: usize = 20;
/// Words of an answer before its best tokens.
const ANSWER_WORDS: usize = 4;
/// No token, no mask.
const NONE: u32 = u32::MAX;
const SET_LAST_TOKEN: u32 = 1;
const APPEND: u32 = 2;
const LOGPROBS: u32 = 4;

/// What sampling keeps on the device, and the buffers to and from it.
pub struct Sampling {
    last_tokens: DeviceBuffer,
    /// Tokens of slots with penalties: prompt, then output.
    history: DeviceBuffer,
    history_len: usize,
    /// `[slot]` prompt lengths, then output lengths.
    lengths: DeviceBuffer,
    max_slots: usize,
    n_vocab: usize,
    ring: Vec<Draws>,
    next: usize,
    /// Slots that begin with the next step.
    starts: Vec<(u32, Vec<u32>, usize)>,
}

/// One step's draws.
struct Draws {
    /// Requests, then biases.
    requests: PinnedBuffer,
    masks: PinnedBuffer,
    answers: PinnedBuffer,
    done: Event,
}

/// Draws that were enqueued: the buffers they use, and how to read the answers.
#[derive(Default)]
pub struct Pending {
    draws: usize,
    /// Words of an answer.
    stride: usize,
    /// Best tokens to report for each request, if any report is wanted.
    n_top: Vec<Option<usize>>,
}

impl Sampling {
    /// Reserves memory for steps within `limits`.
    pub fn new(device: &Device, limits: &StepLimits) -> Result<Self, KernelError> {
        let history_len = limits.max_positions;
        let draws = || -> Result<Draws, KernelError> {
            Ok(Draws {
                requests: PinnedBuffer::new(4 * REQUEST_WORDS * limits.max_logits.max(1))?,
                masks: PinnedBuffer::new(0)?,
                answers: PinnedBuffer::new(4 * ANSWER_WORDS * limits.max_logits.max(1))?,
                done: Event::new(false)?,
            })
        };
        device.allow_shared("sample", 6 * slice(limits.n_vocab, SMALLEST_CLUSTER));
        ["sample", "sample_greedy"].iter().for_each(|kernel| device.allow_wide_cluster(kernel));
        device.check()?;
        Ok(Self {
            last_tokens: device.buffer(4 * limits.max_slots, "last tokens")?,
            history: device.buffer(4 * limits.max_slots * history_len, "tokens that penalties count")?,
            history_len,
            lengths: device.buffer(8 * limits.max_slots, "lengths of slots")?,
            max_slots: limits.max_slots,
            n_vocab: limits.n_vocab,
            ring: (0..RING).map(|_| draws()).collect::<Result<_, _>>()?,
            next: 0,
            starts: Vec::new(),
        })
    }

    /// Device address of the tokens drawn last, by slot.
    pub fn last_tokens(&self) -> u64 {
        self.last_tokens.address
    }

    /// Remembers the tokens that a slot's penalties count; they go to the device with its first draw.
    pub fn start_slot(&mut self, slot: u32, params: &SampleParams, prompt: &[u32], output: &[u32]) {
        self.starts.retain(|(other, ..)| *other != slot);
        if has_penalties(params) {
            self.starts.push((slot, [prompt, output].concat(), prompt.len()));
        }
    }

    fn write_starts(&mut self, device: &Device) {
        for (slot, tokens, n_prompt) in self.starts.drain(..) {
            let slot = slot as usize;
            let bytes: Vec<u8> = tokens.iter().flat_map(|t| t.to_le_bytes()).collect();
            device.write(&self.history, 4 * slot * self.history_len, &bytes);
            let lengths = [n_prompt, tokens.len() - n_prompt].map(|n| (n as u32).to_le_bytes());
            device.write(&self.lengths, 4 * slot, &lengths[0]);
            device.write(&self.lengths, 4 * (self.max_slots + slot), &lengths[1]);
        }
    }

    /// Enqueues draws from rows of `logits`, `stride` values each.
    pub fn enqueue(
        &mut self,
        device: &Device,
        logits: u64,
        stride: usize,
        requests: &[SampleRequest<'_>],
    ) -> Result<Pending, KernelError> {
        self.write_starts(device);
        let n_top: Vec<_> = requests.iter().map(|r| r.params.logprobs.map(|n| n as usize)).collect();
        let most_top = n_top.iter().flatten().copied().max().unwrap_or(0);
        let answer_words = ANSWER_WORDS + 2 * most_top;
        let draws = &mut self.ring[self.next];
        // Collected before it comes round again, since no more steps are queued than the ring has buffers.
        draws.write(requests, self.n_vocab, answer_words)?;
        let biases = draws.requests.address() + (4 * REQUEST_WORDS * requests.len()) as u64;
        let batch = [
            logits,
            stride as u64,
            draws.requests.address(),
            draws.masks.address(),
            biases,
            self.history.address,
            self.lengths.address,
            self.lengths.at(4 * self.max_slots),
            self.last_tokens.address,
            draws.answers.address(),
            0,
            self.history_len as u64,
            answer_words as u64 | (self.n_vocab as u64) << 32,
        ];
        let penalized = requests.iter().any(|r| has_penalties(r.params));
        let greedy = requests.iter().all(is_plain_greedy);
        let cluster = match requests.len() {
            0..=4 => CLUSTERS[0],
            65.. if greedy => CLUSTERS[2],
            _ => CLUSTERS[1],
        };
        let (kernel, shared_bytes) = match greedy {
            true => ("sample_greedy", 0),
            false => ("sample", slice(self.n_vocab, cluster) * if penalized { 6 } else { 4 }),
        };
        let grid = [cluster * requests.len(), 1, 1];
        let launch = Launch { cluster, ..Launch::new(grid, 512, shared_bytes) };
        device.launch(kernel, launch, &[Arg::Struct(&batch)]);
        draws.done.record(device);
        let pending = Pending { draws: self.next, stride: answer_words, n_top };
        self.next = (self.next + 1) % RING;
        Ok(pending)
    }

    /// Waits for draws; answers in the order of the requests.
    pub fn collect(&mut self, device: &Device, pending: &Pending) -> Result<Vec<Sampled>, KernelError> {
        let draws = &self.ring[pending.draws];
        draws.done.wait(device)?;
        let words = draws.answers.words();
        let answers = words.chunks_exact(pending.stride).zip(&pending.n_top);
        Ok(answers.map(|(answer, n_top)| read(answer, *n_top)).collect())
    }
}

impl Draws {
    /// Writes requests, biases and masks, in larger buffers where these are too small.
    fn write(
        &mut self,
        requests: &[SampleRequest<'_>],
        n_vocab: usize,
        answer_words: usize,
    ) -> Result<(), KernelError> {
        let n_biases: usize = requests.iter().map(|r| r.params.bias.len()).sum();
        let n_masks = requests.iter().filter(|r| r.mask.is_some()).count();
        let mask_words = n_vocab.div_ceil(32);
        self.requests.grow(4 * (REQUEST_WORDS * requests.len() + 2 * n_biases))?;
        self.masks.grow(4 * mask_words * n_masks)?;
        self.answers.grow(4 * answer_words * requests.len())?;
        let (to, biases) = self.requests.words_mut().split_at_mut(REQUEST_WORDS * requests.len());
        let masks = self.masks.words_mut();
        let (mut bias_idx, mut mask_idx) = (0, 0);
        for (request, to) in requests.iter().zip(to.chunks_exact_mut(REQUEST_WORDS)) {
            let mask = request.mask.map_or(NONE, |mask| {
                masks[mask_idx * mask_words..][..mask_words].copy_from_slice(&mask.0);
                mask_idx += 1;
                mask_idx as u32 - 1
            });
            to.copy_from_slice(&words_of(request, mask, bias_idx as u32));
            for &(token, bias) in &request.params.bias {
                biases[2 * bias_idx..][..2].copy_from_slice(&[token, bias.to_bits()]);
                bias_idx += 1;
            }
        }
        Ok(())
    }
}

/// `struct Request` of `sample.cu`.
fn words_of(request: &SampleRequest<'_>, mask: u32, first_bias: u32) -> [u32; REQUEST_WORDS] {
    let p = request.params;
    let (position, is_draw) = (request.position as u64, request.forced.is_none());
    let append = if is_draw && has_penalties(p) { APPEND } else { 0 };
    let flags = if is_draw { SET_LAST_TOKEN } else { 0 } | append | if p.logprobs.is_some() { LOGPROBS } else { 0 };
    [
        p.seed as u32,
        (p.seed >> 32) as u32,
        position as u32,
        (position >> 32) as u32,
        request.logit as u32,
        request.slot,
        request.forced.unwrap_or(NONE),
        flags,
        p.temperature.to_bits(),
        p.top_p.to_bits(),
        p.min_p.to_bits(),
        p.repetition_penalty.to_bits(),
        p.presence_penalty.to_bits(),
        p.frequency_penalty.to_bits(),
        p.top_k,
        p.logprobs.unwrap_or(0),
        mask,
        first_bias,
        p.bias.len() as u32,
        0,
    ]
}

fn read(answer: &[u32], n_top: Option<usize>) -> Sampled {
    let (head, top) = answer.split_at(ANSWER_WORDS);
    let (ids, logprobs) = top.split_at(top.len() / 2);
    let best = |n| ids.iter().zip(logprobs).take(n).filter(|(id, _)| **id != NONE);
    let corrupt = head[1] != 0;
    let logprobs = n_top.filter(|_| !corrupt).map(|n| TokenLogprobs {
        sampled: f32::from_bits(head[2]),
        rank: head[3],
        top: best(n).map(|(&id, &bits)| (id, f32::from_bits(bits))).collect(),
    });
    Sampled { token: head[0], logprobs, corrupt }
}

/// Logits that each block of a cluster takes.
fn slice(n_vocab: usize, cluster: usize) -> usize {
    n_vocab.div_ceil(cluster).next_multiple_of(32)
}

fn has_penalties(p: &SampleParams) -> bool {
    p.repetition_penalty != 1.0 || p.presence_penalty != 0.0 || p.frequency_penalty != 0.0
}

fn is_plain_greedy(request: &SampleRequest<'_>) -> bool {
    let p = request.params;
    p.temperature < GREEDY_BELOW
        && p.bias.is_empty()
        && p.logprobs.is_none()
        && !has_penalties(p)
        && request.mask.is_none()
        && request.forced.is_none()
}
