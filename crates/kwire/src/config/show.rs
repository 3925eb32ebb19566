//! The resolved settings as `--dry-run` prints them.

use std::fmt;

use super::{KV_DTYPES, MaxModelLen, POLICIES, ServeConfig, UNKNOWN_FIELDS, word};

impl fmt::Display for ServeConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let auto = |n: Option<usize>| n.map_or_else(|| "auto".to_owned(), |n| n.to_string());
        let unbounded = |n: Option<usize>| n.map_or_else(|| "unbounded".to_owned(), |n| n.to_string());
        let Self { model, listen, engine, requests, limits, .. } = self;
        let mut line = |name: &str, value: &dyn fmt::Display| writeln!(f, "{name:<24} {value}");
        line("model", &model.source)?;
        line("served names", &model.served_names.join(", "))?;
        line("listen", &format_args!("{}:{}", listen.host, listen.port))?;
        line("API keys", &listen.api_keys.len())?;
        match engine.max_model_len {
            MaxModelLen::FromModel => line("max model length", &"the model's own")?,
            MaxModelLen::Fit => line("max model length", &"what memory holds")?,
            MaxModelLen::Tokens(n) => line("max model length", &n)?,
        }
        match engine.kv_cache_bytes {
            None => line("KV cache bytes", &"auto")?,
            Some(n) => line("KV cache bytes", &n)?,
        }
        line("KV cache type", &word(KV_DTYPES, &engine.kv_cache_dtype))?;
        line("block size", &engine.block_size)?;
        line("prefix caching", &engine.prefix_caching)?;
        line("chunked prefill", &engine.chunked_prefill)?;
        line("max sequences", &engine.max_num_seqs)?;
        line("max tokens per step", &auto(engine.max_num_batched_tokens))?;
        line("scheduling policy", &word(POLICIES, &engine.policy))?;
        line("threads", &auto(engine.threads))?;
        line("max queued requests", &unbounded(limits.max_queued_requests))?;
        line("max queued tokens", &unbounded(limits.max_queued_tokens))?;
        line("shutdown timeout", &format_args!("{} s", limits.shutdown_timeout_s))?;
        line("unknown fields", &word(UNKNOWN_FIELDS, &requests.unknown_fields))
    }
}
