//! Prometheus metrics under vLLM's names (`vllm/v1/metrics/loggers.py`), so that its dashboards and routers work.
//!
//! `prometheus-client` writes OpenMetrics, in which `# TYPE` names a counter without its `_total`; [`Metrics::encode`]
//! turns that into the classic text format, which is what vLLM serves and what routers parse.

mod buckets;
mod engine;
mod http;

use std::sync::{PoisonError, RwLock};

use prometheus_client::metrics::counter::Counter;
use prometheus_client::registry::Registry;

pub use engine::EngineMetrics;
pub use http::HttpMetrics;

use crate::model::{Capacity, ModelContext};

/// All metrics of the process.
pub struct Metrics {
    registry: RwLock<Registry>,
    /// Of the HTTP side.
    pub http: HttpMetrics,
    /// Request fields that no one knows.
    pub unknown_fields: Counter,
}

impl Default for Metrics {
    fn default() -> Self {
        let mut registry = Registry::default();
        let http = HttpMetrics::register(&mut registry);
        let unknown_fields = Counter::default();
        registry.register("kwire:unknown_request_fields", "Unknown names in requests", unknown_fields.clone());
        Self { registry: RwLock::new(registry), http, unknown_fields }
    }
}

impl Metrics {
    /// Adds the metrics of `model`.
    pub fn add_model(&self, model: &ModelContext) -> EngineMetrics {
        let mut registry = self.registry.write().unwrap_or_else(PoisonError::into_inner);
        EngineMetrics::register(&mut registry, &model.names[0], model.max_model_len, &model.capacity)
    }

    /// The exposition, in Prometheus's text format 0.0.4.
    pub fn encode(&self) -> String {
        let registry = self.registry.read().unwrap_or_else(PoisonError::into_inner);
        let mut text = String::new();
        if prometheus_client::encoding::text::encode(&mut text, &registry).is_err() {
            unreachable!("writing to a string does not fail");
        }
        classic(&text)
    }
}

/// OpenMetrics to the classic format: counters are declared under the name that their samples have.
fn classic(open: &str) -> String {
    let mut out = String::with_capacity(open.len() + 1024);
    let mut lines = open.lines().peekable();
    while let Some(line) = lines.next() {
        if line == "# EOF" || line.starts_with("# UNIT ") {
            continue;
        }
        let declares_counter = |line: &str| line.starts_with("# TYPE ") && line.ends_with(" counter");
        let is_help = line.starts_with("# HELP ") && lines.peek().is_some_and(|next| declares_counter(next));
        if is_help || declares_counter(line) {
            let mut words = line.splitn(4, ' ');
            let (hash, keyword) = (words.next().unwrap_or(""), words.next().unwrap_or(""));
            let (name, rest) = (words.next().unwrap_or(""), words.next().unwrap_or(""));
            out.push_str(&format!("{hash} {keyword} {name}_total {rest}\n"));
        } else {
            out.push_str(line);
            out.push('\n');
        }
    }
    out
}

/// The labels of `vllm:cache_config_info`.
fn cache_labels(capacity: &Capacity) -> Vec<(String, String)> {
    let mut labels = vec![
        ("block_size".to_owned(), capacity.block_size.to_string()),
        ("num_gpu_blocks".to_owned(), capacity.n_blocks.to_string()),
    ];
    labels.extend(capacity.cache_labels.iter().cloned());
    labels
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counters_are_declared_as_they_are_sampled() {
        let open = "# HELP a Help.\n# TYPE a counter\na_total 1\n# HELP b B.\n# TYPE b gauge\nb 2\n# EOF\n";
        let expected = "# HELP a_total Help.\n# TYPE a_total counter\na_total 1\n# HELP b B.\n# TYPE b gauge\nb 2\n";
        assert_eq!(classic(open), expected);
    }
}
