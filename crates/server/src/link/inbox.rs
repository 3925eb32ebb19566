//! Events of one API call between the demux task and the stream that reads them.

use std::sync::Mutex;
use std::task::{Context, Poll, Waker};

use kwire_engine::{FinishReason, TokenLogprobs};

use crate::lock;

/// An event of the request for prompt number `prompt` of an API call.
#[derive(Debug, PartialEq)]
pub struct Update {
    /// Which prompt.
    pub prompt: u32,
    /// What happened.
    pub kind: UpdateKind,
}

/// What happened.
#[derive(Debug, PartialEq)]
pub enum UpdateKind {
    /// It left the queue.
    Started {
        /// Prompt tokens found in the cache.
        cached_tokens: usize,
    },
    /// Log-probabilities of the prompt.
    PromptLogprobs(Vec<TokenLogprobs>),
    /// A sequence grew, in one or more steps.
    Tokens {
        /// Which.
        sequence: u32,
        /// New tokens.
        tokens: Vec<u32>,
        /// One per token, if asked for.
        logprobs: Vec<TokenLogprobs>,
    },
    /// A sequence ended.
    Finished {
        /// Which.
        sequence: u32,
        /// Why.
        reason: FinishReason,
    },
    /// All sequences ended.
    Done,
    /// No more events come, and none of the above says why.
    Lost(Lost),
}

/// Why a request ends without the engine's word.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Lost {
    /// The engine thread is gone.
    EngineStopped,
    /// The server ends.
    ShuttingDown,
}

/// A mailbox with one reader. Bounded by the tokens the request may generate; neighbouring tokens of one sequence
/// merge.
#[derive(Default)]
pub struct Inbox {
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    updates: Vec<Update>,
    waker: Option<Waker>,
    closed: bool,
}

impl Inbox {
    /// Adds an update; returns the reader to wake, if it sleeps.
    pub fn push(&self, update: Update) -> Option<Waker> {
        let mut state = lock(&self.state);
        if state.closed {
            return None;
        }
        let rest = match state.updates.last_mut() {
            Some(last) => merge(last, update),
            None => Some(update),
        };
        state.updates.extend(rest);
        state.waker.take()
    }

    /// Takes all updates, at least one.
    pub fn poll_take(&self, cx: &mut Context<'_>, into: &mut Vec<Update>) -> Poll<()> {
        let mut state = lock(&self.state);
        if state.updates.is_empty() {
            if !state.waker.as_ref().is_some_and(|waker| waker.will_wake(cx.waker())) {
                state.waker = Some(cx.waker().clone());
            }
            return Poll::Pending;
        }
        into.append(&mut state.updates);
        Poll::Ready(())
    }

    /// The reader is gone: drops what is there and what comes.
    pub fn close(&self) {
        let mut state = lock(&self.state);
        *state = State { closed: true, ..State::default() };
    }
}

/// Appends the tokens of `next` to `last` if both are of one sequence; else gives `next` back.
fn merge(last: &mut Update, next: Update) -> Option<Update> {
    if last.prompt == next.prompt
        && let UpdateKind::Tokens { sequence, tokens, logprobs } = &mut last.kind
        && let UpdateKind::Tokens { sequence: of, .. } = &next.kind
        && sequence == of
        && let UpdateKind::Tokens { tokens: more, logprobs: more_logprobs, .. } = next.kind
    {
        tokens.extend(more);
        logprobs.extend(more_logprobs);
        return None;
    }
    Some(next)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tokens(sequence: u32, tokens: Vec<u32>) -> Update {
        Update { prompt: 0, kind: UpdateKind::Tokens { sequence, tokens, logprobs: Vec::new() } }
    }

    #[test]
    fn a_slow_reader_costs_its_tokens_and_no_more() {
        let inbox = Inbox::default();
        for token in 0..1000 {
            inbox.push(tokens(0, vec![token]));
        }
        let mut got = Vec::new();
        let mut cx = Context::from_waker(Waker::noop());
        assert!(inbox.poll_take(&mut cx, &mut got).is_ready());
        assert_eq!(got, [tokens(0, (0..1000).collect())]);
        assert!(inbox.poll_take(&mut cx, &mut got).is_pending());
    }

    #[test]
    fn a_closed_inbox_keeps_nothing() {
        let inbox = Inbox::default();
        inbox.push(tokens(0, vec![1]));
        inbox.close();
        inbox.push(tokens(0, vec![2]));
        let mut cx = Context::from_waker(Waker::noop());
        assert!(inbox.poll_take(&mut cx, &mut Vec::new()).is_pending());
    }
}
