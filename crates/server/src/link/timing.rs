//! When things happened to one request: the source of the latency metrics.

use kwire_engine::{Event, FinishReason, Request, Seconds};

use crate::metrics::EngineMetrics;

/// The times of one request. Intervals as vLLM defines them (`v1/metrics/stats.py`).
pub struct Timing {
    arrival: Seconds,
    prompt_tokens: usize,
    cached_tokens: usize,
    max_tokens: usize,
    n: u32,
    started: Option<Seconds>,
    first_token: Option<Seconds>,
    /// Per sequence: time of the last token and number of tokens.
    sequences: Vec<(Option<Seconds>, usize)>,
}

impl Timing {
    /// The times of a request that is about to be sent.
    pub fn new(request: &Request) -> Self {
        Self {
            arrival: request.arrival,
            prompt_tokens: request.prompt.len(),
            cached_tokens: 0,
            max_tokens: request.stop.max_tokens,
            n: request.n,
            started: None,
            first_token: None,
            sequences: vec![(None, 0); request.n as usize],
        }
    }

    /// Notes an event and observes what it completes.
    pub fn event(&mut self, event: &Event, now: Seconds, metrics: &EngineMetrics) {
        match event {
            Event::Started { cached_tokens, .. } => {
                self.cached_tokens = *cached_tokens;
                self.started = Some(now);
                metrics.queue_time.observe(now - self.arrival);
            }
            Event::PromptLogprobs { .. } => {}
            Event::Tokens { sequence, tokens, .. } => {
                if self.first_token.is_none() {
                    self.first_token = Some(now);
                    metrics.time_to_first_token.observe(now - self.arrival);
                    metrics.prefill_time.observe(now - self.started.unwrap_or(self.arrival));
                }
                if let Some((last, count)) = self.sequences.get_mut(*sequence as usize) {
                    if let Some(last) = last.replace(now) {
                        metrics.inter_token_latency.observe(now - last);
                    }
                    *count += tokens.len();
                }
            }
            Event::Finished { sequence, reason, .. } => self.finished(*sequence, reason, now, metrics),
            Event::Done { preemptions, .. } => {
                metrics.request_preemptions.observe(f64::from(*preemptions));
                metrics.request_params_n.observe(f64::from(self.n));
                metrics.request_prompt_tokens.observe(self.prompt_tokens as f64);
                let computed = self.prompt_tokens.saturating_sub(self.cached_tokens);
                metrics.request_prefill_kv_computed_tokens.observe(computed as f64);
                metrics.request_params_max_tokens.observe(self.max_tokens as f64);
                let most = self.sequences.iter().map(|&(_, count)| count).max().unwrap_or(0);
                metrics.request_max_generation_tokens.observe(most as f64);
            }
        }
    }

    fn finished(&self, sequence: u32, reason: &FinishReason, now: Seconds, metrics: &EngineMetrics) {
        metrics.finished(reason.label());
        let (last, count) = self.sequences.get(sequence as usize).copied().unwrap_or_default();
        metrics.e2e_latency.observe(now - self.arrival);
        metrics.request_generation_tokens.observe(count as f64);
        if let (Some(first), Some(last)) = (self.first_token, last) {
            metrics.decode_time.observe(last - first);
            metrics.inference_time.observe(last - self.started.unwrap_or(self.arrival));
            if count > 1 {
                metrics.time_per_output_token.observe((last - first) / (count - 1) as f64);
            }
        }
    }
}
