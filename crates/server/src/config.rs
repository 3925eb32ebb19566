//! What the server can be told. Parsed and proven elsewhere; `Default` is what `kwire serve` does without flags, but for
//! bounds that follow from the engine's.

use crate::text::template::ContentFormat;

/// The server's configuration.
#[derive(Debug, Clone, Default)]
pub struct ServerConfig {
    /// Who may ask.
    pub auth: AuthConfig,
    /// Bounds of what comes over the wire.
    pub limits: WireLimits,
    /// How many requests may be accepted at a time.
    pub admission: AdmissionConfig,
    /// What requests may ask for.
    pub requests: RequestPolicy,
    /// When the server counts as unhealthy.
    pub health: HealthConfig,
    /// How it ends.
    pub shutdown: ShutdownConfig,
}

/// Who may ask.
#[derive(Clone, Default)]
pub struct AuthConfig {
    /// Any of these as a bearer token opens the paths under `/v1`; empty: everybody (`--api-key`).
    pub api_keys: Vec<String>,
}

impl std::fmt::Debug for AuthConfig {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "AuthConfig {{ {} keys }}", self.api_keys.len())
    }
}

/// Bounds of what comes over the wire.
#[derive(Debug, Clone)]
pub struct WireLimits {
    /// Bytes of a request body. 32 MiB hold a prompt of about four million token ids; parsed JSON takes up to 16 times
    /// that, so no more long bodies than [`RequestPolicy::n_text_threads`] are parsed at a time.
    pub body_bytes: usize,
    /// Seconds a client may take to send a body.
    pub body_timeout_s: f64,
    /// Bytes of a request's head.
    pub header_bytes: usize,
    /// Headers of a request.
    pub n_headers: usize,
    /// Seconds a client may take to send a head, and an open connection may be idle.
    pub header_timeout_s: f64,
    /// Open connections; more wait in the kernel.
    pub n_connections: usize,
}

impl Default for WireLimits {
    fn default() -> Self {
        Self {
            body_bytes: 32 << 20,
            body_timeout_s: 60.0,
            header_bytes: 64 << 10,
            n_headers: 256,
            header_timeout_s: 75.0,
            n_connections: 8192,
        }
    }
}

/// How much may be accepted at a time.
#[derive(Debug, Clone, Default)]
pub struct AdmissionConfig {
    /// Sequences accepted and not ended, running or waiting (`--max-num-queued-reqs`). `None`: no bound.
    pub max_num_queued_reqs: Option<usize>,
    /// Prompt tokens of requests that have no token yet (`--max-num-queued-tokens`). `None`: no bound.
    pub max_num_queued_tokens: Option<usize>,
}

/// What happens to names that no one knows in a request.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum UnknownFields {
    /// Counted, logged once, named in the header `x-kwire-unknown-fields`.
    #[default]
    Warn,
    /// Refused with 400.
    Reject,
}

/// What requests may ask for.
#[derive(Debug, Clone)]
pub struct RequestPolicy {
    /// `--unknown-fields`
    pub unknown_fields: UnknownFields,
    /// `--max-logprobs`
    pub max_logprobs: u32,
    /// Whether requests may bring a template (`--trust-request-chat-template`).
    pub trust_request_chat_template: bool,
    /// Whether usage tells cached tokens (`--enable-prompt-tokens-details`).
    pub enable_prompt_tokens_details: bool,
    /// `--chat-template-content-format`; the model's template is compiled with it by the binary, too.
    pub content_format: ContentFormat,
    /// Threads for parsing, rendering and tokenizing.
    pub n_text_threads: usize,
}

impl Default for RequestPolicy {
    fn default() -> Self {
        Self {
            unknown_fields: UnknownFields::Warn,
            max_logprobs: 20,
            trust_request_chat_template: false,
            enable_prompt_tokens_details: false,
            content_format: ContentFormat::Auto,
            n_text_threads: 2,
        }
    }
}

/// When the server counts as unhealthy.
#[derive(Debug, Clone)]
pub struct HealthConfig {
    /// Seconds without a step while work is pending.
    pub stuck_after_s: f64,
    /// Seconds within which an idle engine must answer.
    pub ping_timeout_s: f64,
}

impl Default for HealthConfig {
    fn default() -> Self {
        Self { stuck_after_s: 60.0, ping_timeout_s: 2.0 }
    }
}

/// How the server ends.
#[derive(Debug, Clone)]
pub struct ShutdownConfig {
    /// Seconds that running requests get to finish (`--shutdown-timeout`).
    pub timeout_s: f64,
}

impl Default for ShutdownConfig {
    fn default() -> Self {
        Self { timeout_s: 30.0 }
    }
}
