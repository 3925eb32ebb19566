//! Between requests and the engine thread.
//!
//! Commands go out through the engine's mailbox. Step reports come in through one channel, and one task ([`demux`])
//! hands their events to the inboxes of the requests: the engine thread sends once a step, however many requests run.
//! An inbox merges what its reader has not fetched yet, so a slow client costs the tokens it has not read and no more.

mod inbox;
mod prefixes;
mod timing;

use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::task::Waker;

use kwire_engine::{Command, EngineHandle, Event, ReportSink, Request, RequestId, Seconds, StepReport, StepStats};
use tokio::sync::mpsc;

pub use inbox::{Inbox, Lost, Update, UpdateKind};
pub use prefixes::PrefixLog;

use crate::admission::{Permit, retry_after_s};
use crate::lock;
use crate::metrics::EngineMetrics;
use timing::Timing;

/// Completed requests that tell how fast requests are answered: at most this many, the last ones.
const COMPLETED_KEPT: usize = 64;
/// Seconds after which a completed request tells nothing any more.
const COMPLETED_S: f64 = 60.0;

/// Receives what a [`report_channel`]'s sink is given.
pub struct ReportReceiver(mpsc::UnboundedReceiver<StepReport>);

/// The sink that the engine thread calls, and the end that [`crate::Server::set_model`] takes. What waits in between is
/// bounded by the steps that accepted requests still take, and one more for each command.
#[expect(
    clippy::disallowed_methods,
    reason = "accepted requests bound what can be in it, and the engine thread must not block"
)]
pub fn report_channel() -> (ReportSink, ReportReceiver) {
    let (sender, receiver) = mpsc::unbounded_channel();
    let sink = move |report| {
        let _ = sender.send(report); // the server is gone: nobody wants to know
    };
    (Box::new(sink), ReportReceiver(receiver))
}

/// The connection with one engine.
pub struct Link {
    engine: EngineHandle,
    entries: Mutex<HashMap<RequestId, Entry>>,
    next_id: AtomicU64,
    last_alive: AtomicU64,
    stopped: AtomicBool,
    ending: AtomicBool,
    stats: Mutex<StepStats>,
    /// When requests were completed lately.
    completed: Mutex<VecDeque<Seconds>>,
    /// Prefixes that the engine holds.
    pub prefixes: Mutex<PrefixLog>,
    metrics: EngineMetrics,
}

/// A request that the engine has not ended yet.
struct Entry {
    inbox: Arc<Inbox>,
    prompt: u32,
    timing: Timing,
    permit: Permit,
}

/// A request on its way to the engine.
pub struct Outgoing {
    /// The request; its id is set by [`Link::submit`].
    pub request: Request,
    /// Its place in the queue.
    pub permit: Permit,
}

/// The requests of one API call. Dropped before their end, it ends them in the engine at once.
pub struct Submission {
    link: Arc<Link>,
    ids: Vec<RequestId>,
    /// Where their events arrive.
    pub inbox: Arc<Inbox>,
    /// Set when all sequences have ended, so that there is nothing to end.
    pub complete: bool,
}

impl Link {
    /// A connection through `engine`; `epoch` names this process to gateways.
    pub fn new(engine: EngineHandle, metrics: EngineMetrics, epoch: u64, now: Seconds) -> Arc<Self> {
        Arc::new(Self {
            engine,
            entries: Mutex::default(),
            next_id: AtomicU64::new(1),
            last_alive: AtomicU64::new(now.to_bits()),
            stopped: AtomicBool::new(false),
            ending: AtomicBool::new(false),
            stats: Mutex::default(),
            completed: Mutex::default(),
            prefixes: Mutex::new(PrefixLog::new(epoch)),
            metrics,
        })
    }

    /// Sends requests to the engine; their events arrive in one inbox, marked with their index.
    pub fn submit(self: &Arc<Self>, outgoing: Vec<Outgoing>, now: Seconds) -> Result<Submission, Lost> {
        let inbox = Arc::new(Inbox::default());
        let mut submission =
            Submission { link: Arc::clone(self), ids: Vec::new(), inbox: Arc::clone(&inbox), complete: false };
        for (prompt, Outgoing { mut request, permit }) in (0..).zip(outgoing) {
            let id = RequestId(self.next_id.fetch_add(1, Ordering::Relaxed));
            request.id = id;
            let timing = Timing::new(&request);
            let mut entries = lock(&self.entries);
            if self.ending.load(Ordering::Acquire) {
                return Err(Lost::ShuttingDown); // it would miss `end_all`
            }
            if entries.is_empty() {
                self.note_alive(now); // an idle engine is not late
            }
            entries.insert(id, Entry { inbox: Arc::clone(&inbox), prompt, timing, permit });
            drop(entries);
            submission.ids.push(id);
            if self.stopped() || self.engine.send(Command::Add(Box::new(request))).is_err() {
                self.stop();
                return Err(Lost::EngineStopped);
            }
        }
        Ok(submission)
    }

    /// Sends a command; a stopped engine ignores it.
    pub fn send(&self, command: Command) {
        let _ = self.engine.send(command);
    }

    /// Whether requests are with the engine.
    pub fn busy(&self) -> bool {
        !lock(&self.entries).is_empty()
    }

    /// Whether the engine thread is gone.
    pub fn stopped(&self) -> bool {
        self.stopped.load(Ordering::Acquire)
    }

    /// When the engine last gave a sign of life.
    pub fn last_alive(&self) -> Seconds {
        Seconds::from_bits(self.last_alive.load(Ordering::Acquire))
    }

    /// Notes a sign of life.
    pub fn note_alive(&self, now: Seconds) {
        self.last_alive.store(now.to_bits(), Ordering::Release);
    }

    /// The load after the last step.
    pub fn stats(&self) -> StepStats {
        *lock(&self.stats)
    }

    /// Seconds until a refused request may find room, by how fast others were completed of late.
    pub fn retry_after_s(&self, now: Seconds) -> u64 {
        let completed = lock(&self.completed);
        let n_old = completed.partition_point(|at| now - at > COMPLETED_S);
        let over_s = completed.get(n_old).map_or(0.0, |first| now - first);
        retry_after_s(self.stats().waiting, completed.len() - n_old, over_s)
    }

    fn note_completed(&self, now: Seconds) {
        let mut completed = lock(&self.completed);
        if completed.len() == COMPLETED_KEPT {
            completed.pop_front();
        }
        completed.push_back(now);
    }

    /// Ends all requests; their streams get [`Lost::ShuttingDown`], and no more are sent to the engine.
    pub fn end_all(&self) {
        let entries = lock(&self.entries);
        self.ending.store(true, Ordering::Release);
        for (&id, entry) in entries.iter() {
            self.send(Command::End { id, sequence: None, stopped: false });
            entry.lose(Lost::ShuttingDown);
        }
    }

    fn stop(&self) {
        self.stopped.store(true, Ordering::Release);
        let entries = std::mem::take(&mut *lock(&self.entries));
        entries.values().for_each(|entry| entry.lose(Lost::EngineStopped));
    }

    /// Hands out one report.
    fn apply(&self, report: StepReport) {
        let StepReport { now, events, stats, prefixes } = report;
        self.note_alive(now);
        let before = std::mem::replace(&mut *lock(&self.stats), stats);
        self.metrics.step(&before, &stats);
        lock(&self.prefixes).apply(&prefixes);
        let mut wakers = Vec::new();
        let mut entries = lock(&self.entries);
        for event in events {
            let id = event_id(&event);
            let Some(entry) = entries.get_mut(&id) else { continue };
            entry.timing.event(&event, now, &self.metrics);
            let kind = match event {
                Event::Started { cached_tokens, .. } => UpdateKind::Started { cached_tokens },
                Event::PromptLogprobs { logprobs, .. } => UpdateKind::PromptLogprobs(logprobs),
                Event::Tokens { sequence, tokens, logprobs, .. } => {
                    entry.permit.release_tokens();
                    UpdateKind::Tokens { sequence, tokens, logprobs }
                }
                Event::Finished { sequence, reason, .. } => UpdateKind::Finished { sequence, reason },
                Event::Done { .. } => UpdateKind::Done,
            };
            let done = matches!(kind, UpdateKind::Done);
            wakers.extend(entry.inbox.push(Update { prompt: entry.prompt, kind }));
            if done {
                self.note_completed(now);
                entries.remove(&id);
            }
        }
        drop(entries);
        wakers.into_iter().for_each(Waker::wake);
    }
}

impl Entry {
    /// Tells the reader that no more events come.
    fn lose(&self, lost: Lost) {
        let update = Update { prompt: self.prompt, kind: UpdateKind::Lost(lost) };
        self.inbox.push(update).into_iter().for_each(Waker::wake);
    }
}

fn event_id(event: &Event) -> RequestId {
    match event {
        Event::Started { id, .. }
        | Event::PromptLogprobs { id, .. }
        | Event::Tokens { id, .. }
        | Event::Finished { id, .. }
        | Event::Done { id, .. } => *id,
    }
}

/// Hands events to inboxes until the engine thread ends.
pub async fn demux(link: Arc<Link>, mut reports: ReportReceiver) {
    let mut batch = Vec::new();
    while reports.0.recv_many(&mut batch, 64).await > 0 {
        batch.drain(..).for_each(|report| link.apply(report));
    }
    link.stop();
}

impl Submission {
    /// Ends one sequence regularly: a stop string was found.
    pub fn stop_sequence(&self, prompt: usize, sequence: u32) {
        self.link.send(Command::End { id: self.ids[prompt], sequence: Some(sequence), stopped: true });
    }
}

impl Drop for Submission {
    fn drop(&mut self) {
        self.inbox.close();
        if !self.complete {
            for &id in &self.ids {
                self.link.send(Command::End { id, sequence: None, stopped: false });
            }
        }
    }
}
