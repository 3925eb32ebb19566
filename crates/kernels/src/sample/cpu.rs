//! The operation on the processor: one request at a time, requests spread over the workers.

use super::select::{Candidate, at_least, better, nucleus_end, top_k};
use super::{GREEDY_BELOW, random, scan};
use crate::cpu::par::{Disjoint, PerWorker, for_each};
use crate::cpu::{Isa, Pool};
use crate::{SampleParams, SampleRequest, Sampled, TokenLogprobs, TokenMask};

/// Memory that calls reuse, for each worker.
pub(crate) struct SampleScratch(PerWorker<Worker>);

#[derive(Default)]
struct Worker {
    adjusted: Vec<f32>,
    /// Occurrences by token; all zero between requests.
    counts: Vec<u32>,
    sums: Vec<f64>,
    candidates: Vec<Candidate>,
    work: Vec<Candidate>,
    weights: Vec<f32>,
}

impl SampleScratch {
    pub(crate) fn new(n_workers: usize) -> Self {
        Self(PerWorker::new(n_workers))
    }
}

/// Answers the requests in order. Row `i` of the logits is `logits[i * stride..][..n_vocab]`.
pub(crate) fn sample(
    pool: &mut Pool,
    isa: Isa,
    scratch: &mut SampleScratch,
    logits: &[f32],
    stride: usize,
    n_vocab: usize,
    requests: &[SampleRequest<'_>],
) -> Vec<Sampled> {
    assert!(n_vocab > 0 && n_vocab <= stride);
    let mut answers = vec![Sampled { token: 0, logprobs: None, corrupt: true }; requests.len()];
    let shared = Disjoint::new(&mut answers);
    for_each(pool, requests.len(), requests.len() * n_vocab / 6, |worker, i| {
        let row = &logits[requests[i].logit * stride..][..n_vocab];
        // SAFETY: `worker` is the index that `for_each` gave, and each request has an answer of its own.
        let (worker, answer) = unsafe { (scratch.0.get(worker), shared.slice(i, 1)) };
        answer[0] = worker.answer(isa, row, &requests[i]);
    });
    answers
}

impl Worker {
    fn answer(&mut self, isa: Isa, row: &[f32], request: &SampleRequest<'_>) -> Sampled {
        let corrupt = Sampled { token: request.forced.unwrap_or(0), logprobs: None, corrupt: true };
        let Some(raw_max) = scan::max(isa, row) else { return corrupt };
        let token = match request.forced {
            Some(token) => token,
            None if is_adjusted(request) => {
                let mut adjusted = std::mem::take(&mut self.adjusted);
                adjusted.clear();
                adjusted.extend_from_slice(row);
                self.adjust(&mut adjusted, request);
                let token = scan::max(isa, &adjusted).map(|max| self.choose(isa, &adjusted, max, request));
                self.adjusted = adjusted;
                match token {
                    Some(token) => token,
                    None => return corrupt,
                }
            }
            None => self.choose(isa, row, raw_max, request),
        };
        let logprobs = request.params.logprobs.map(|n| self.logprobs(isa, row, raw_max, token, n as usize));
        Sampled { token, logprobs, corrupt: false }
    }

    /// Log-probabilities of the raw logits.
    fn logprobs(&mut self, isa: Isa, row: &[f32], max: f32, token: u32, n: usize) -> TokenLogprobs {
        scan::block_sums(isa, row, max, 1.0, &mut self.sums);
        let log_sum = self.sums.iter().sum::<f64>().ln();
        let logprob = |logit: f32| (f64::from(logit) - f64::from(max) - log_sum) as f32;
        self.candidates.clear();
        if n > 0 {
            top_k(isa, row, n.min(row.len()), f32::NEG_INFINITY, &mut self.candidates);
            self.candidates.sort_unstable_by(better);
        }
        // A forced token may lie outside the vocabulary of the logits.
        let logit = row.get(token as usize).copied().unwrap_or(f32::NEG_INFINITY);
        TokenLogprobs {
            sampled: logprob(logit),
            rank: scan::count_above(isa, row, logit) as u32 + 1,
            top: self.candidates.iter().map(|c| (c.id, logprob(c.logit))).collect(),
        }
    }

    /// Mask, bias and penalties, in this order.
    fn adjust(&mut self, logits: &mut [f32], request: &SampleRequest<'_>) {
        if let Some(mask) = request.mask {
            apply_mask(logits, mask);
        }
        for &(token, bias) in &request.params.bias {
            if let Some(logit) = logits.get_mut(token as usize) {
                *logit += bias;
            }
        }
        if has_penalties(request) {
            self.penalize(logits, request);
        }
    }

    fn penalize(&mut self, logits: &mut [f32], request: &SampleRequest<'_>) {
        const DONE: u32 = 1 << 31;
        let SampleParams { repetition_penalty: repetition, presence_penalty, frequency_penalty, .. } = *request.params;
        let prompt = if repetition == 1.0 { &[] } else { request.prompt };
        let n_vocab = logits.len();
        let known = |tokens: &&u32| (**tokens as usize) < n_vocab;
        if self.counts.len() < n_vocab {
            self.counts.resize(n_vocab, 0);
        }
        for &token in request.output.iter().filter(known) {
            self.counts[token as usize] += 1;
        }
        for &token in prompt.iter().chain(request.output).filter(known) {
            let (count, logit) = (&mut self.counts[token as usize], &mut logits[token as usize]);
            if *count & DONE != 0 {
                continue;
            }
            if repetition != 1.0 {
                *logit = if *logit > 0.0 { *logit / repetition } else { *logit * repetition };
            }
            if *count > 0 {
                *logit -= frequency_penalty * *count as f32;
                *logit -= presence_penalty;
            }
            *count |= DONE;
        }
        for &token in prompt.iter().chain(request.output).filter(known) {
            self.counts[token as usize] = 0;
        }
    }

    /// The token that the temperature and the filters lead to.
    fn choose(&mut self, isa: Isa, logits: &[f32], max: f32, request: &SampleRequest<'_>) -> u32 {
        let params = request.params;
        if params.temperature < GREEDY_BELOW {
            return scan::position(isa, logits, max).expect("the maximum is in the row") as u32;
        }
        let inv_t = 1.0 / params.temperature;
        let u = random::unit(params.seed, request.position as u64);
        if params.top_p >= 1.0 && (params.top_k == 0 || params.top_k as usize >= logits.len()) && params.min_p <= 0.0 {
            return self.draw_all(isa, logits, max, inv_t, u);
        }
        let end = self.keep(isa, logits, max, params);
        let kept = self.candidates.iter().filter(|c| better(c, &end).is_le());
        let total: f64 = kept.clone().map(|c| f64::from(c.weight)).sum();
        inverse_cdf(kept.map(|c| (c.id, c.weight)), u * total)
    }

    /// Draws from all tokens: sums of blocks find the block, a second look at the block finds the token.
    fn draw_all(&mut self, isa: Isa, logits: &[f32], max: f32, inv_t: f32, u: f64) -> u32 {
        scan::block_sums(isa, logits, max, inv_t, &mut self.sums);
        let total: f64 = self.sums.iter().sum();
        let (mut target, mut block) = (u * total, None);
        for (i, &sum) in self.sums.iter().enumerate().filter(|(_, sum)| **sum > 0.0) {
            if let Some((_, previous)) = block {
                target -= previous;
            }
            block = Some((i, sum));
            if target < sum {
                break;
            }
        }
        let first = block.expect("the best token has weight 1").0 * scan::BLOCK;
        self.weights.clear();
        self.weights.extend_from_slice(&logits[first..logits.len().min(first + scan::BLOCK)]);
        scan::weigh(isa, &mut self.weights, max, inv_t);
        inverse_cdf((first as u32..).zip(self.weights.iter().copied()), target)
    }

    /// Fills `candidates`, in the order of ids and weighed, with tokens among which are all that min-p, top-k and
    /// top-p keep; gives the last kept one.
    fn keep(&mut self, isa: Isa, logits: &[f32], max: f32, params: &SampleParams) -> Candidate {
        let (t, inv_t) = (params.temperature, 1.0 / params.temperature);
        let floor = if params.min_p > 0.0 { max + t * params.min_p.min(1.0).ln() } else { f32::NEG_INFINITY };
        let mass = if params.top_k > 0 && (params.top_k as usize) < logits.len() {
            top_k(isa, logits, params.top_k as usize, floor, &mut self.candidates);
            self.candidates.sort_unstable_by_key(|c| c.id);
            self.weigh(isa, max, inv_t)
        } else if params.min_p > 0.0 {
            at_least(isa, logits, floor, &mut self.candidates);
            self.weigh(isa, max, inv_t)
        } else {
            self.gather_mass(isa, logits, max, params)
        };
        self.work.clear();
        self.work.extend_from_slice(&self.candidates);
        if params.top_p >= 1.0 {
            return *self.work.iter().max_by(|a, b| better(a, b)).expect("the best token is kept");
        }
        nucleus_end(&mut self.work, f64::from(params.top_p.max(0.0)) * mass)
    }

    /// Fills `candidates` with the best tokens, enough to reach top-p of the whole mass, which is returned. A trained
    /// model's mass lies in few tokens, so a band below the maximum is tried first and then widened.
    fn gather_mass(&mut self, isa: Isa, logits: &[f32], max: f32, params: &SampleParams) -> f64 {
        let (t, inv_t) = (params.temperature, 1.0 / params.temperature);
        scan::block_sums(isa, logits, max, inv_t, &mut self.sums);
        let total: f64 = self.sums.iter().sum();
        for band in [4.0, 8.0, 16.0] {
            at_least(isa, logits, max - band * t, &mut self.candidates);
            if self.weigh(isa, max, inv_t) >= f64::from(params.top_p) * total {
                return total;
            }
        }
        at_least(isa, logits, f32::NEG_INFINITY, &mut self.candidates);
        self.weigh(isa, max, inv_t)
    }

    /// Fills in the candidates' weights; gives their sum.
    fn weigh(&mut self, isa: Isa, max: f32, inv_t: f32) -> f64 {
        self.weights.clear();
        self.weights.extend(self.candidates.iter().map(|c| c.logit));
        scan::weigh(isa, &mut self.weights, max, inv_t);
        let mut sum = 0.0;
        for (candidate, &weight) in self.candidates.iter_mut().zip(&self.weights) {
            candidate.weight = weight;
            sum += f64::from(weight);
        }
        sum
    }
}

/// The first token at which the running sum exceeds `target`; rounding may leave the last possible one.
fn inverse_cdf(tokens: impl Iterator<Item = (u32, f32)>, target: f64) -> u32 {
    let (mut sum, mut last) = (0.0, 0);
    for (id, weight) in tokens.filter(|(_, weight)| *weight > 0.0) {
        sum += f64::from(weight);
        last = id;
        if target < sum {
            break;
        }
    }
    last
}

fn has_penalties(request: &SampleRequest<'_>) -> bool {
    let SampleParams { repetition_penalty, presence_penalty, frequency_penalty, .. } = *request.params;
    repetition_penalty != 1.0 || presence_penalty != 0.0 || frequency_penalty != 0.0
}

fn is_adjusted(request: &SampleRequest<'_>) -> bool {
    request.mask.is_some() || !request.params.bias.is_empty() || has_penalties(request)
}

/// Puts disallowed tokens to -inf; tokens beyond the mask are disallowed.
fn apply_mask(logits: &mut [f32], mask: &TokenMask) {
    for (i, chunk) in logits.chunks_mut(32).enumerate() {
        match mask.0.get(i).copied().unwrap_or(0) {
            u32::MAX => {}
            0 => chunk.fill(f32::NEG_INFINITY),
            word => {
                for (bit, logit) in chunk.iter_mut().enumerate() {
                    if word >> bit & 1 == 0 {
                        *logit = f32::NEG_INFINITY;
                    }
                }
            }
        }
    }
}
