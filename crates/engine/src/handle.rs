//! The engine thread's mailbox.

use std::sync::mpsc;

use crate::{Request, RequestId, StepReport, StepStats};

/// What the engine thread can be told.
pub enum Command {
    /// Queue a request.
    Add(Box<Request>),
    /// End a request, or one sequence of it, now. `stopped`: the caller found a stop string, so the reason is
    /// `Stop`, not `Abort`. Unknown ids are ignored: the request may just have ended.
    End {
        /// Which request.
        id: RequestId,
        /// Which sequence, of which tokens were reported; `None`: all.
        sequence: Option<u32>,
        /// Whether this is a regular end.
        stopped: bool,
    },
    /// Forget all cached prefixes that no sequence uses.
    ResetPrefixCache,
    /// Answer between two steps: the thread lives.
    Ping(Box<dyn FnOnce() + Send>),
    /// Look at the whole state between two steps, invariants included: for tests, it takes time in a large cache.
    Inspect(Box<dyn FnOnce(&Inspection) + Send>),
}

/// The engine's state between two steps.
#[derive(Debug, Clone)]
pub struct Inspection {
    /// Load and counters.
    pub stats: StepStats,
    /// Cache blocks that sequences hold.
    pub blocks_in_use: usize,
    /// Cache blocks in all.
    pub n_blocks: usize,
    /// The first broken invariant, if any.
    pub integrity: Result<(), String>,
}

/// Sends commands to the engine thread. The thread ends when the last handle is dropped and all work is done.
///
/// The mailbox has no bound of its own: whoever holds a handle bounds the requests that it accepts, and so the commands
/// about them.
#[derive(Clone)]
pub struct EngineHandle {
    commands: mpsc::Sender<Command>,
}

/// The engine thread is gone: it failed, and said so in the log.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the engine has stopped")]
pub struct EngineStopped;

impl EngineHandle {
    /// A handle and the mailbox it writes to.
    pub fn new() -> (Self, mpsc::Receiver<Command>) {
        let (commands, mailbox) = mpsc::channel();
        (Self { commands }, mailbox)
    }

    /// Sends a command; returns at once.
    pub fn send(&self, command: Command) -> Result<(), EngineStopped> {
        self.commands.send(command).map_err(|_| EngineStopped)
    }
}

/// Receives each step's report on the engine thread; must not block.
pub type ReportSink = Box<dyn FnMut(StepReport) + Send>;
