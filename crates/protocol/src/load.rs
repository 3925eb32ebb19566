//! The answer of `GET /load`: what a router or autoscaler needs to know about one replica.

use serde::{Deserialize, Serialize};

/// Load and capacity of one replica.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct LoadReport {
    /// The same as `in_flight`; the one field vLLM's `/load` has.
    pub server_load: u64,
    /// `loading`, `serving` or `draining`.
    pub state: ServerState,
    /// Sequences that hold cache.
    pub running: u64,
    /// Requests that wait for admission to a batch.
    pub waiting: u64,
    /// Prompt tokens of the waiting requests.
    pub waiting_tokens: u64,
    /// Sequences accepted and not ended, in the count that admission limits.
    pub in_flight: u64,
    /// Sequences accepted at most; more get 503.
    pub max_in_flight: u64,
    /// Share of the cache in use, 0 to 1.
    pub kv_usage: f64,
    /// Tokens the cache holds.
    pub kv_capacity_tokens: u64,
    /// Tokens per cache block.
    pub block_size: u64,
    /// Sequences in a batch at most.
    pub max_num_seqs: u64,
    /// Prompt tokens admitted since the start.
    pub prompt_tokens: u64,
    /// Tokens generated since the start.
    pub generation_tokens: u64,
    /// Preemptions since the start.
    pub preemptions: u64,
    /// Prefixes held, by the gateway's ids.
    #[serde(default)]
    pub prefixes: PrefixReport,
}

/// Whether a replica takes requests.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ServerState {
    /// The model is not there yet.
    #[default]
    Loading,
    /// Requests are served.
    Serving,
    /// Running requests finish, new ones are refused.
    Draining,
}

/// Prefix ids that a replica holds: all of them, or the changes since the version the caller named
/// (`GET /load?epoch=EPOCH&since=VERSION`).
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PrefixReport {
    /// Changes with each process; a version of another epoch means nothing.
    pub epoch: u64,
    /// Number of changes so far.
    pub version: u64,
    /// Whether `stored` is the whole set rather than changes.
    pub full: bool,
    /// Ids that became available, in no order.
    pub stored: Vec<u64>,
    /// Ids that were evicted, in no order.
    pub evicted: Vec<u64>,
}
