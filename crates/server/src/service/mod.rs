//! OpenAI requests to streams of chunks, without HTTP.
//!
//! A request is parsed and validated ([`kwire_protocol`], [`prepare`]), becomes one engine request per prompt, and
//! comes back as a [`Generation`]: a stream of text deltas per choice. [`chat`] and [`completions`] print deltas as
//! chunks, or gather them into one answer: streaming or not, the text comes from the same path.

pub mod chat;
pub mod choice;
pub mod completions;
pub mod generation;
mod logprobs;
pub mod prefixes;
pub mod prepare;
pub mod tokenize;

use std::sync::Arc;

use kwire_protocol::openai::{Answer, Common, FieldError};
use kwire_protocol::resume::ChunkReport;
use serde::Serialize;
use serde_json::Value;
use tokio::sync::watch;

pub use chat::ChatRun;
pub use completions::CompletionRun;
pub use generation::Generation;

use crate::admission::{Admission, Permit};
use crate::ambient::Ambient;
use crate::config::{RequestPolicy, ServerConfig};
use crate::error::{Rejection, ServiceError};
use crate::link::Link;
use crate::metrics::EngineMetrics;
use crate::model::ModelContext;
use crate::text::TextPool;

/// Takes the chunks of an answer, in order.
pub trait ChunkSink {
    /// One chunk.
    fn chunk(&mut self, chunk: &impl Serialize);
}

/// A stream of chunks.
pub trait Run: Send + 'static {
    /// Waits for news and prints them, one or more chunks. `false`: that was all. After an error nothing follows.
    fn next(&mut self, sink: &mut (impl ChunkSink + Send)) -> impl Future<Output = Result<bool, ServiceError>> + Send;
    /// Waits for the end and prints the whole answer as one chunk.
    fn collect(self, sink: &mut (impl ChunkSink + Send)) -> impl Future<Output = Result<(), ServiceError>> + Send;
    /// The seed that the request ran with, its own or the server's pick.
    fn seed(&self) -> u64;
}

/// Serves one model.
pub struct Service {
    /// The model.
    pub model: Arc<ModelContext>,
    /// The engine.
    pub link: Arc<Link>,
    /// The queue.
    pub admission: Arc<Admission>,
    pub(crate) policy: RequestPolicy,
    pub(crate) ambient: Ambient,
    pub(crate) pool: TextPool,
    metrics: EngineMetrics,
    /// Requests accepted whose answers are not complete.
    live: watch::Sender<usize>,
}

/// Counts a request as live, until its answer is complete or its client gone.
pub(crate) struct Live(watch::Sender<usize>);

impl Drop for Live {
    fn drop(&mut self) {
        self.0.send_modify(|n| *n -= 1);
    }
}

/// What answers to one API call have in common.
pub(crate) struct Envelope {
    pub id: String,
    pub created: u64,
    pub model: String,
    pub seed: u64,
    pub include_usage: bool,
    pub continuous_usage: bool,
    pub cached_details: bool,
    pub return_token_ids: bool,
    pub tokens_as_ids: bool,
    pub report: bool,
}

impl Service {
    /// A service for `model` over `link`.
    pub fn new(
        model: ModelContext,
        link: Arc<Link>,
        metrics: EngineMetrics,
        config: &ServerConfig,
        ambient: Ambient,
        pool: TextPool,
    ) -> Self {
        let max_requests = config.admission.max_num_queued_reqs.unwrap_or(usize::MAX);
        Self {
            model: Arc::new(model),
            link,
            admission: Admission::new(max_requests, config.admission.max_num_queued_tokens),
            pool,
            policy: config.requests.clone(),
            ambient,
            metrics,
            live: watch::Sender::new(0),
        }
    }

    /// Waits until every accepted request is answered.
    pub async fn idle(&self) {
        let mut live = self.live.subscribe();
        let _ = live.wait_for(|&n| n == 0).await; // the sender lives as long as we do
    }

    pub(crate) fn live(&self) -> Live {
        self.live.send_modify(|n| *n += 1);
        Live(self.live.clone())
    }

    /// Refuses requests for another model.
    fn check_model(&self, name: Option<&String>) -> Result<(), ServiceError> {
        match name {
            Some(name) if !self.model.names.contains(name) => Err(ServiceError::UnknownModel(name.clone())),
            _ => Ok(()),
        }
    }

    /// A place in the queue for `n` sequences for each of the prompts.
    fn admit(&self, n_prompts: usize, n: usize) -> Result<Permit, ServiceError> {
        if self.link.stopped() {
            return Err(ServiceError::EngineStopped);
        }
        let max_n = self.model.capacity.max_num_seqs;
        if n > max_n {
            return Err(FieldError::new("n", format!("`n` must be at most {max_n} (--max-num-seqs), got {n}.")).into());
        }
        let (total, max) = (n_prompts * n, self.admission.max_requests());
        if total > max {
            let message =
                format!("The request asks for {total} sequences; this server accepts at most {max} at a time.");
            return Err(FieldError::new(if n_prompts > 1 { "prompt" } else { "n" }, message).into());
        }
        self.admission.admit(total).map_err(|rejection| self.rejected(rejection))
    }

    pub(crate) fn rejected(&self, rejection: Rejection) -> ServiceError {
        self.metrics.rejected(rejection);
        ServiceError::Overloaded { rejection, retry_after_s: self.link.retry_after_s(self.ambient.now()) }
    }

    fn envelope(&self, common: &Common, prefix: &str, id_hint: Option<&str>) -> Envelope {
        let resume = common.internal.resume.as_ref();
        let ours = || match id_hint.or(common.request_id.as_deref()) {
            Some(hint) => format!("{prefix}-{hint}"),
            None => format!("{prefix}-{:016x}{:016x}", self.ambient.random(), self.ambient.random()),
        };
        let seed = resume.map(|r| r.seed).or(common.sampling.seed);
        Envelope {
            id: resume.and_then(|r| r.id.clone()).unwrap_or_else(ours),
            created: resume.and_then(|r| r.created).unwrap_or_else(|| self.ambient.unix_s()),
            model: common.model.clone().unwrap_or_else(|| self.model.names[0].clone()),
            seed: seed.unwrap_or_else(|| self.ambient.seed()),
            include_usage: common.include_usage,
            continuous_usage: common.continuous_usage,
            cached_details: self.policy.enable_prompt_tokens_details,
            return_token_ids: common.return_token_ids,
            tokens_as_ids: common.return_tokens_as_token_ids,
            report: common.internal.report,
        }
    }
}

impl Envelope {
    fn answer<'a, C>(&'a self, object: &'static str, choices: &'a [C]) -> Answer<'a, C> {
        Answer {
            id: &self.id,
            object,
            created: self.created,
            model: &self.model,
            choices,
            usage: None,
            prompt_logprobs: None,
            prompt_token_ids: None,
            kwire: None,
        }
    }
}

/// Parses a body off the async threads if it is long.
pub(crate) async fn parse_json(pool: &TextPool, body: bytes::Bytes) -> Result<Value, serde_json::Error> {
    const INLINE_BYTES: usize = 64 << 10;
    if body.len() <= INLINE_BYTES {
        return serde_json::from_slice(&body);
    }
    pool.run(move || serde_json::from_slice(&body)).await
}

/// What the gateway wants to know of a delta; `first`: the first of its choice.
fn chunk_report(envelope: &Envelope, tokens: &[u32], prompt: &[u32], first: bool) -> ChunkReport {
    ChunkReport {
        token_ids: tokens.to_vec(),
        seed: first.then_some(envelope.seed),
        prompt_token_ids: first.then(|| prompt.to_vec()),
    }
}
