//! Sends requests in a closed loop: each worker sends its next request when its last one is answered.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use anyhow::Result;
use serde_json::{Map, Value, json};
use tokio::task::JoinSet;

use super::corpus::{Corpus, Rng};
use super::report::Outcome;
use crate::http::SseReader;

/// Longest part of a server's message that a report keeps.
const MESSAGE_LIMIT: usize = 200;

/// Where requests go and what is the same in all of them.
pub struct Target {
    /// HTTP client.
    pub client: reqwest::Client,
    /// Address without /v1.
    pub base: String,
    /// Model to ask.
    pub model: String,
    /// Bearer key.
    pub api_key: Option<String>,
    /// Chat completions in place of completions.
    pub chat: bool,
    /// Whether connections are used again.
    pub keep_alive: bool,
    /// Members merged into each body.
    pub extra: Map<String, Value>,
}

/// What the requests ask for.
#[derive(Debug, Clone)]
pub struct Shape {
    /// Tokens of each prompt: from, to.
    pub prompt_tokens: (usize, usize),
    /// Tokens of text before every prompt.
    pub shared_prefix: usize,
    /// Longest answer.
    pub max_tokens: u32,
    /// Go on past the end of text.
    pub ignore_eos: bool,
    /// Sampling temperature.
    pub temperature: f64,
    /// Makes a run repeatable.
    pub seed: u64,
}

/// The i-th prompt of a run: the same for the same seed, whatever the order it is asked in.
pub struct Prompts {
    corpus: Arc<Corpus>,
    shape: Shape,
    salt: &'static str,
    prefix: Option<String>,
}

impl Prompts {
    /// Prompts of one kind: `run` or `warm`. The prefix has a salt of its own, so that a warm-up can share it with the run.
    pub fn new(corpus: &Arc<Corpus>, shape: &Shape, salt: &'static str, prefix_salt: &str) -> Self {
        let mut rng = Rng::new(&format!("{}/prefix/{prefix_salt}", shape.seed));
        let prefix = (shape.shared_prefix > 0).then(|| corpus.cut(&mut rng, shape.shared_prefix));
        Self { corpus: Arc::clone(corpus), shape: shape.clone(), salt, prefix }
    }

    fn get(&self, i: usize) -> String {
        let mut rng = Rng::new(&format!("{}/{}/{i}", self.shape.seed, self.salt));
        let (low, high) = self.shape.prompt_tokens;
        let tokens = rng.between(low, high);
        self.corpus.cut(&mut rng, tokens)
    }

    fn body(&self, target: &Target, i: usize) -> Value {
        body(target, &self.shape, self.prefix.as_deref(), &self.get(i))
    }
}

fn body(target: &Target, shape: &Shape, prefix: Option<&str>, prompt: &str) -> Value {
    let mut body = json!({
        "model": target.model,
        "stream": true,
        "stream_options": {"include_usage": true},
        "max_tokens": shape.max_tokens,
        "temperature": shape.temperature,
        "seed": shape.seed,
    });
    if shape.ignore_eos {
        body["ignore_eos"] = true.into();
    }
    if target.chat {
        let mut messages: Vec<Value> = prefix.iter().map(|p| json!({"role": "system", "content": p})).collect();
        messages.push(json!({"role": "user", "content": prompt}));
        body["messages"] = messages.into();
    } else {
        body["prompt"] = prefix.map_or_else(|| prompt.to_owned(), |p| format!("{p} {prompt}")).into();
    }
    for (name, value) in &target.extra {
        body[name] = value.clone();
    }
    body
}

/// Measures characters per token with one request of known text.
pub async fn calibrate(target: &Target, shape: &Shape, corpus: &Corpus) -> Option<f64> {
    let mut rng = Rng::new("calibrate");
    let text = (0..20).map(|_| corpus.cut(&mut rng, 40)).collect::<Vec<_>>().join(" ");
    let shape = Shape { max_tokens: 2, ..shape.clone() };
    let outcome = one_request(target, &body(target, &shape, None, &text)).await;
    Some(text.len() as f64 / outcome.prompt_tokens.filter(|n| *n > 0)? as f64)
}

/// `count` requests from `concurrency` workers; the outcomes, and the seconds from start to end.
pub async fn closed_loop(
    target: &Arc<Target>,
    prompts: Prompts,
    count: usize,
    concurrency: usize,
) -> (Vec<Outcome>, f64) {
    let (prompts, next) = (Arc::new(prompts), Arc::new(AtomicUsize::new(0)));
    let start = Instant::now();
    let mut workers = JoinSet::new();
    for _ in 0..concurrency.min(count) {
        let (target, prompts, next) = (Arc::clone(target), Arc::clone(&prompts), Arc::clone(&next));
        workers.spawn(async move {
            let mut outcomes = Vec::new();
            loop {
                let i = next.fetch_add(1, Ordering::Relaxed);
                if i >= count {
                    return outcomes;
                }
                outcomes.push(one_request(&target, &prompts.body(&target, i)).await);
            }
        });
    }
    let outcomes = workers.join_all().await.concat();
    (outcomes, start.elapsed().as_secs_f64())
}

/// Sends one request and reads its stream; failures are part of the outcome.
async fn one_request(target: &Target, body: &Value) -> Outcome {
    let mut outcome = Outcome::default();
    if let Err(e) = stream(target, body, &mut outcome).await {
        let text: String = e.to_string().chars().take(MESSAGE_LIMIT).collect();
        outcome.error = Some(text);
    } else if outcome.first.is_none() {
        outcome.error = Some("no text in the stream".to_owned());
    }
    outcome
}

async fn stream(target: &Target, body: &Value, outcome: &mut Outcome) -> Result<()> {
    let path = if target.chat { "chat/completions" } else { "completions" };
    let url = format!("{}/v1/{path}", target.base);
    let start = Instant::now();
    let mut request = target.client.post(url).header("content-type", "application/json").body(body.to_string());
    if let Some(key) = &target.api_key {
        request = request.bearer_auth(key);
    }
    if !target.keep_alive {
        request = request.header("connection", "close");
    }
    let mut response = request.send().await?;
    let status = response.status();
    if !status.is_success() {
        anyhow::bail!("HTTP {}: {}", status.as_u16(), response.text().await.unwrap_or_default());
    }
    let mut events = SseReader::default();
    while let Some(bytes) = response.chunk().await? {
        let now = start.elapsed();
        for data in events.feed(&bytes) {
            if data == "[DONE]" {
                return Ok(());
            }
            note(&serde_json::from_str(&data)?, now, outcome)?;
        }
    }
    anyhow::bail!("the stream ended without [DONE]")
}

/// Takes one event of a stream into account.
fn note(event: &Value, now: Duration, outcome: &mut Outcome) -> Result<()> {
    if !event["error"].is_null() {
        anyhow::bail!("{}", event["error"]);
    }
    let count = |v: &Value| v.as_u64().map(|n| n as usize);
    let usage = &event["usage"];
    if usage.is_object() {
        outcome.prompt_tokens = count(&usage["prompt_tokens"]);
        outcome.output_tokens = count(&usage["completion_tokens"]);
        outcome.cached_tokens = count(&usage["prompt_tokens_details"]["cached_tokens"]).unwrap_or(0);
    }
    for choice in event["choices"].as_array().into_iter().flatten() {
        if let Some(finish) = choice["finish_reason"].as_str() {
            outcome.finish = Some(finish.to_owned());
        }
        if piece(choice).is_none_or(str::is_empty) {
            continue;
        }
        outcome.pieces += 1;
        if outcome.first.is_none() {
            outcome.first = Some(now);
        } else {
            outcome.gaps.push(now - outcome.last);
        }
        outcome.last = now;
    }
    Ok(())
}

fn piece(choice: &Value) -> Option<&str> {
    let delta = &choice["delta"];
    [&choice["text"], &delta["content"], &delta["reasoning_content"], &delta["reasoning"]]
        .into_iter()
        .find_map(Value::as_str)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stream_is_measured_by_its_pieces() {
        let mut outcome = Outcome::default();
        let ms = Duration::from_millis;
        let events = [
            (5, json!({"choices": [{"delta": {"role": "assistant", "content": ""}}]})),
            (10, json!({"choices": [{"delta": {"content": "a"}}]})),
            (30, json!({"choices": [{"text": "b", "finish_reason": "stop"}]})),
            (31, json!({"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 2}})),
        ];
        for (at, event) in events {
            note(&event, ms(at), &mut outcome).unwrap();
        }
        assert_eq!((outcome.first, outcome.last, outcome.gaps), (Some(ms(10)), ms(30), vec![ms(20)]));
        assert_eq!((outcome.pieces, outcome.prompt_tokens, outcome.output_tokens), (2, Some(7), Some(2)));
        assert_eq!(outcome.finish.as_deref(), Some("stop"));
        assert!(note(&json!({"error": {"message": "x"}}), ms(0), &mut Outcome::default()).is_err());
    }

    #[test]
    fn prompts_depend_on_seed_and_index_only() {
        let corpus = Arc::new(Corpus::open(&[]).unwrap());
        let shape = Shape {
            prompt_tokens: (20, 30),
            shared_prefix: 10,
            max_tokens: 4,
            ignore_eos: true,
            temperature: 0.0,
            seed: 7,
        };
        let run = Prompts::new(&corpus, &shape, "run", "run");
        let again = Prompts::new(&corpus, &shape, "run", "run");
        let warm = Prompts::new(&corpus, &shape, "warm", "warm");
        assert_eq!((run.get(3), &run.prefix), (again.get(3), &again.prefix));
        assert_ne!(run.get(3), run.get(4));
        assert_ne!((run.get(3), &run.prefix), (warm.get(3), &warm.prefix));
    }
}
