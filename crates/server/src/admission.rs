//! The bounded queue: how many sequences and prompt tokens the server accepts at a time.

use std::sync::{Arc, Mutex};

use crate::error::Rejection;
use crate::lock;

/// Seconds after which a refused client may try again: the time in which the `waiting` requests before it and one more
/// are answered, if `completed` were in the last `over_s` seconds; at least 1, at most 60.
///
/// ```
/// use kwire_server::admission::retry_after_s;
/// assert_eq!(retry_after_s(9, 20, 10.0), 5); // two a second, ten to go
/// assert_eq!(retry_after_s(1000, 1, 10.0), 60);
/// assert_eq!(retry_after_s(9, 0, 0.0), 1); // nothing is known yet
/// ```
pub fn retry_after_s(waiting: usize, completed: usize, over_s: f64) -> u64 {
    let wait_s = (waiting + 1) as f64 * over_s / completed.max(1) as f64;
    wait_s.ceil().clamp(1.0, 60.0) as u64
}

/// Counts what is accepted and refuses the rest.
pub struct Admission {
    max_requests: usize,
    max_tokens: Option<usize>,
    in_use: Mutex<InUse>,
}

#[derive(Default)]
struct InUse {
    requests: usize,
    tokens: usize,
}

/// A place in the queue; given back when dropped.
pub struct Permit {
    admission: Arc<Admission>,
    requests: usize,
    tokens: usize,
}

impl Admission {
    /// A queue of `max_requests` sequences and `max_tokens` prompt tokens that wait for their first token.
    pub fn new(max_requests: usize, max_tokens: Option<usize>) -> Arc<Self> {
        Arc::new(Self { max_requests, max_tokens, in_use: Mutex::default() })
    }

    /// Sequences accepted at most.
    pub fn max_requests(&self) -> usize {
        self.max_requests
    }

    /// Sequences accepted now.
    pub fn requests(&self) -> usize {
        lock(&self.in_use).requests
    }

    /// A place for `n` sequences.
    pub fn admit(self: &Arc<Self>, n: usize) -> Result<Permit, Rejection> {
        let mut in_use = lock(&self.in_use);
        if in_use.requests + n > self.max_requests {
            return Err(Rejection::Requests);
        }
        in_use.requests += n;
        Ok(Permit { admission: Arc::clone(self), requests: n, tokens: 0 })
    }
}

impl Permit {
    /// Also counts `n` prompt tokens. A single prompt is accepted on an empty queue, however long.
    pub fn add_tokens(&mut self, n: usize) -> Result<(), Rejection> {
        let mut in_use = lock(&self.admission.in_use);
        if self.admission.max_tokens.is_some_and(|max| in_use.tokens > 0 && in_use.tokens + n > max) {
            return Err(Rejection::Tokens);
        }
        in_use.tokens += n;
        self.tokens += n;
        Ok(())
    }

    /// Splits off a part.
    pub fn split(&mut self, requests: usize, tokens: usize) -> Permit {
        assert!(requests <= self.requests && tokens <= self.tokens, "a part is not more than the whole");
        self.requests -= requests;
        self.tokens -= tokens;
        Permit { admission: Arc::clone(&self.admission), requests, tokens }
    }

    /// The prompt is computed: its tokens no longer wait.
    pub fn release_tokens(&mut self) {
        lock(&self.admission.in_use).tokens -= self.tokens;
        self.tokens = 0;
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        let mut in_use = lock(&self.admission.in_use);
        in_use.requests -= self.requests;
        in_use.tokens -= self.tokens;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_are_given_back() {
        let admission = Admission::new(3, Some(100));
        let mut first = admission.admit(2).ok().unwrap();
        assert_eq!(admission.admit(2).err(), Some(Rejection::Requests));
        first.add_tokens(150).unwrap();
        let part = first.split(1, 100);
        let mut second = admission.admit(1).ok().unwrap();
        assert_eq!(second.add_tokens(1), Err(Rejection::Tokens));
        drop(part);
        first.release_tokens();
        second.add_tokens(100).unwrap();
        drop((first, second));
        assert_eq!(admission.requests(), 0);
        assert_eq!(lock(&admission.in_use).tokens, 0);
    }
}
