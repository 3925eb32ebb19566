//! What a run measured.
//!
//! TTFT is the time to the first piece of text, ITL the gap between two pieces of one request, TPOT
//! (last - first) / (tokens - 1) of a request, E2E the time to the last piece. Percentiles interpolate between the two
//! nearest values. A server that sends several tokens in a piece shows fewer, longer gaps: TPOT tells the truth then.

use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

use serde::Serialize;

/// One request as the client saw it. Times count from its start.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Outcome {
    /// To the first piece of text.
    pub first: Option<Duration>,
    /// To the last piece of text.
    pub last: Duration,
    /// Between pieces.
    pub gaps: Vec<Duration>,
    /// Pieces of text.
    pub pieces: usize,
    /// Tokens of the prompt, by the server's count.
    pub prompt_tokens: Option<usize>,
    /// Tokens of the answer, by the server's count.
    pub output_tokens: Option<usize>,
    /// Tokens of the prompt that the server had cached.
    pub cached_tokens: usize,
    /// The server's reason for the end.
    pub finish: Option<String>,
    /// What went wrong.
    pub error: Option<String>,
}

/// Percentiles in milliseconds.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Percentiles {
    /// Median.
    pub p50: f64,
    /// 95th.
    pub p95: f64,
    /// 99th.
    pub p99: f64,
    /// Mean.
    pub mean: f64,
    /// Largest.
    pub max: f64,
}

/// A run's summary, as `--json` writes it.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Report {
    /// The user's name for the run.
    pub label: String,
    /// The model that was asked.
    pub model: String,
    /// Requests at the same time.
    pub concurrency: usize,
    /// Requests sent.
    pub requests: usize,
    /// Requests answered whole.
    pub ok: usize,
    /// What went wrong, and how often.
    pub errors: BTreeMap<String, usize>,
    /// From the first request to the last answer.
    pub seconds: f64,
    /// Answer tokens per second.
    pub output_tok_s: f64,
    /// Prompt and answer tokens per second.
    pub total_tok_s: f64,
    /// Answers per second.
    pub requests_s: f64,
    /// Answer tokens.
    pub output_tokens: usize,
    /// Prompt tokens.
    pub prompt_tokens: usize,
    /// Prompt tokens that the server had cached.
    pub cached_tokens: usize,
    /// Answers without `usage`: their tokens are counted by piece.
    pub usage_missing: usize,
    /// Reasons of ends, and how often.
    pub finish: BTreeMap<String, usize>,
    /// Time to first token.
    pub ttft_ms: Option<Percentiles>,
    /// Inter-token latency.
    pub itl_ms: Option<Percentiles>,
    /// Time per output token.
    pub tpot_ms: Option<Percentiles>,
    /// End to end.
    pub e2e_ms: Option<Percentiles>,
    /// Measured characters per token of this model.
    pub chars_per_token: f64,
}

/// What a report needs to know beside the outcomes.
pub struct Context<'a> {
    /// The user's name for the run.
    pub label: &'a str,
    /// The model that was asked.
    pub model: &'a str,
    /// Requests at the same time.
    pub concurrency: usize,
    /// Measured characters per token.
    pub chars_per_token: f64,
}

impl Report {
    /// Summarizes a run that took `seconds`.
    pub fn new(context: &Context<'_>, outcomes: &[Outcome], seconds: f64) -> Self {
        let ok: Vec<&Outcome> = outcomes.iter().filter(|o| o.error.is_none()).collect();
        let tokens = |o: &Outcome| o.output_tokens.unwrap_or(o.pieces);
        let output_tokens: usize = ok.iter().map(|o| tokens(o)).sum();
        let prompt_tokens: usize = ok.iter().filter_map(|o| o.prompt_tokens).sum();
        let tpot = |o: &&&Outcome| tokens(o) > 1;
        Self {
            label: context.label.to_owned(),
            model: context.model.to_owned(),
            concurrency: context.concurrency,
            requests: outcomes.len(),
            ok: ok.len(),
            errors: count(outcomes.iter().filter_map(|o| o.error.clone())),
            seconds: rounded(seconds, 3),
            output_tok_s: rounded(output_tokens as f64 / seconds, 2),
            total_tok_s: rounded((output_tokens + prompt_tokens) as f64 / seconds, 2),
            requests_s: rounded(ok.len() as f64 / seconds, 3),
            output_tokens,
            prompt_tokens,
            cached_tokens: ok.iter().map(|o| o.cached_tokens).sum(),
            usage_missing: ok.iter().filter(|o| o.output_tokens.is_none()).count(),
            finish: count(ok.iter().map(|o| o.finish.clone().unwrap_or_else(|| "none".to_owned()))),
            ttft_ms: percentiles(ok.iter().filter_map(|o| o.first.map(|f| f.as_secs_f64())).collect()),
            itl_ms: percentiles(ok.iter().flat_map(|o| &o.gaps).map(Duration::as_secs_f64).collect()),
            tpot_ms: percentiles(ok.iter().filter(tpot).map(|o| time_per_token(o, tokens(o))).collect()),
            e2e_ms: percentiles(ok.iter().map(|o| o.last.as_secs_f64()).collect()),
            chars_per_token: rounded(context.chars_per_token, 3),
        }
    }
}

fn time_per_token(o: &Outcome, tokens: usize) -> f64 {
    (o.last - o.first.unwrap_or_default()).as_secs_f64() / (tokens - 1) as f64
}

fn count(names: impl Iterator<Item = String>) -> BTreeMap<String, usize> {
    names.fold(BTreeMap::new(), |mut counts, name| {
        *counts.entry(name).or_default() += 1;
        counts
    })
}

fn rounded(value: f64, digits: i32) -> f64 {
    let scale = 10f64.powi(digits);
    (value * scale).round() / scale
}

/// Percentiles of seconds, in milliseconds; `None` without values.
fn percentiles(mut values: Vec<f64>) -> Option<Percentiles> {
    values.sort_by(f64::total_cmp);
    let last = values.len().checked_sub(1)?;
    let at = |q: f64| {
        let x = last as f64 * q;
        let (low, high) = (x.floor() as usize, last.min(x.floor() as usize + 1));
        rounded(1000.0 * (values[low] + (values[high] - values[low]) * (x - low as f64)), 2)
    };
    let mean = rounded(1000.0 * values.iter().sum::<f64>() / values.len() as f64, 2);
    Some(Percentiles { p50: at(0.5), p95: at(0.95), p99: at(0.99), mean, max: at(1.0) })
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let label = if self.label.is_empty() { &self.model } else { &self.label };
        let (ok, n, c, seconds) = (self.ok, self.requests, self.concurrency, self.seconds);
        writeln!(f, "{label}: {ok}/{n} answered, concurrency {c}, {seconds:.1} s")?;
        let mean = |tokens: usize| tokens as f64 / self.ok.max(1) as f64;
        writeln!(
            f,
            "  output {:.1} tok/s   total {:.1} tok/s   {:.2} req/s   prompt {:.0} / output {:.0} tokens a request, {} \
             cached",
            self.output_tok_s,
            self.total_tok_s,
            self.requests_s,
            mean(self.prompt_tokens),
            mean(self.output_tokens),
            self.cached_tokens
        )?;
        let rows = [("TTFT", &self.ttft_ms), ("ITL", &self.itl_ms), ("TPOT", &self.tpot_ms), ("E2E", &self.e2e_ms)];
        for (name, p) in rows {
            if let Some(p) = p {
                let Percentiles { p50, p95, p99, max, .. } = p;
                writeln!(f, "  {name:5} ms  p50 {p50:9.1}  p95 {p95:9.1}  p99 {p99:9.1}  max {max:9.1}")?;
            }
        }
        if self.usage_missing > 0 {
            writeln!(f, "  usage missing in {} answers: their tokens are counted by piece", self.usage_missing)?;
        }
        self.errors.iter().try_for_each(|(what, times)| writeln!(f, "  error x{times}: {what}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_interpolate() {
        let p = percentiles(vec![0.004, 0.001, 0.002, 0.003]).unwrap();
        assert_eq!((p.p50, p.p95, p.mean, p.max), (2.5, 3.85, 2.5, 4.0));
        assert_eq!(percentiles(vec![]), None);
    }

    #[test]
    fn tokens_are_the_servers_or_counted_by_piece() {
        let ms = Duration::from_millis;
        let outcome = |tokens| Outcome {
            first: Some(ms(100)),
            last: ms(500),
            gaps: vec![ms(200), ms(200)],
            pieces: 3,
            prompt_tokens: Some(10),
            output_tokens: tokens,
            finish: Some("length".into()),
            ..Outcome::default()
        };
        let failed = Outcome { error: Some("HTTP 503".into()), ..Outcome::default() };
        let context = Context { label: "x", model: "m", concurrency: 2, chars_per_token: 4.0 };
        let r = Report::new(&context, &[outcome(Some(5)), outcome(None), failed], 2.0);
        assert_eq!((r.ok, r.requests, r.output_tokens, r.prompt_tokens, r.usage_missing), (2, 3, 8, 20, 1));
        assert_eq!((r.output_tok_s, r.total_tok_s, r.requests_s), (4.0, 14.0, 1.0));
        let tpot = r.tpot_ms.unwrap();
        assert_eq!((tpot.p50, tpot.max), (150.0, 200.0));
        assert_eq!(r.errors["HTTP 503"], 1);
    }
}
