//! Metrics of the engine and of requests to it; labels `model_name` and `engine`, as in vLLM.

use std::borrow::Cow;
use std::sync::atomic::AtomicU64;

use kwire_engine::StepStats;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::{ConstGauge, Gauge};
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::{Metric, Registry};

use super::buckets;
use crate::error::Rejection;
use crate::model::Capacity;

type Labels = [(&'static str, &'static str); 1];
type Float = Gauge<f64, AtomicU64>;

/// Handles to the metrics of one engine. Cheap to clone.
#[derive(Clone)]
#[allow(missing_docs, reason = "each is named as the metric it is")]
pub struct EngineMetrics {
    running: Gauge,
    waiting: Gauge,
    waiting_for_capacity: Gauge,
    kv_usage: Float,
    prefix_queries: Counter,
    prefix_hits: Counter,
    preemptions: Counter,
    prompt_tokens: Counter,
    prompt_sources: PromptSources,
    generation_tokens: Counter,
    success: Family<Labels, Counter>,
    rejections: Family<Labels, Counter>,
    iteration_tokens: Histogram,
    pub time_to_first_token: Histogram,
    pub inter_token_latency: Histogram,
    pub time_per_output_token: Histogram,
    pub e2e_latency: Histogram,
    pub queue_time: Histogram,
    pub inference_time: Histogram,
    pub prefill_time: Histogram,
    pub decode_time: Histogram,
    pub request_prompt_tokens: Histogram,
    pub request_generation_tokens: Histogram,
    pub request_prefill_kv_computed_tokens: Histogram,
    pub request_max_generation_tokens: Histogram,
    pub request_params_max_tokens: Histogram,
    pub request_params_n: Histogram,
    pub request_preemptions: Histogram,
}

/// Where prompt tokens came from: computed here, or found in this engine's cache; none come from elsewhere.
#[derive(Clone)]
struct PromptSources {
    cached: Counter,
    local_cache_hit: Counter,
    local_compute: Counter,
}

impl PromptSources {
    fn register(names: &mut Names<'_>) -> Self {
        let family: Family<Labels, Counter> = Family::default();
        let of = |source| family.get_or_create(&[("source", source)]).clone();
        of("external_kv_transfer");
        let (local_cache_hit, local_compute) = (of("local_cache_hit"), of("local_compute"));
        names.add("prompt_tokens_by_source", "Prompt tokens by where they came from", family);
        let cached = names.counter("prompt_tokens_cached", "Prompt tokens that came from a cache");
        Self { cached, local_cache_hit, local_compute }
    }
}

/// Registers under `vllm:`.
struct Names<'a>(&'a mut Registry);

impl Names<'_> {
    fn add<M: Metric + Clone>(&mut self, name: &str, help: &str, metric: M) -> M {
        self.0.register(format!("vllm:{name}"), help, metric.clone());
        metric
    }
    fn counter(&mut self, name: &str, help: &str) -> Counter {
        self.add(name, help, Counter::default())
    }
    fn histogram(&mut self, name: &str, help: &str, buckets: &[f64]) -> Histogram {
        self.add(name, help, Histogram::new(buckets.iter().copied()))
    }
}

impl EngineMetrics {
    /// Registers all of them.
    pub fn register(registry: &mut Registry, model: &str, max_model_len: usize, capacity: &Capacity) -> Self {
        let label = |name: &'static str, value: &str| (Cow::Borrowed(name), Cow::Owned(value.to_owned()));
        let by_model = registry.sub_registry_with_label(label("model_name", model));
        let rejections = Names(by_model).add(
            "admission_rejections",
            "Requests refused because the queue was full",
            Family::<Labels, Counter>::default(),
        );
        let mut names = Names(by_model.sub_registry_with_label(label("engine", "0")));
        info(&mut names, capacity);
        let tokens = buckets::one_two_five(max_model_len);
        let times = &buckets::REQUEST_TIME;
        Self {
            rejections,
            running: names.add("num_requests_running", "Requests in execution batches", Gauge::default()),
            waiting: names.add("num_requests_waiting", "Requests waiting to be processed", Gauge::default()),
            waiting_for_capacity: by_reason(&mut names),
            kv_usage: names.add("kv_cache_usage_perc", "KV-cache usage, 1 is all", Float::default()),
            prefix_queries: names.counter("prefix_cache_queries", "Tokens looked up in the prefix cache"),
            prefix_hits: names.counter("prefix_cache_hits", "Tokens found in the prefix cache"),
            preemptions: names.counter("num_preemptions", "Preemptions"),
            prompt_tokens: names.counter("prompt_tokens", "Prefill tokens processed"),
            prompt_sources: PromptSources::register(&mut names),
            generation_tokens: names.counter("generation_tokens", "Generation tokens processed"),
            success: names.add("request_success", "Requests by the reason they ended", Family::default()),
            iteration_tokens: names.histogram("iteration_tokens_total", "Tokens per step", &buckets::ITERATION_TOKENS),
            time_to_first_token: names.histogram(
                "time_to_first_token_seconds",
                "Time to first token in seconds",
                &buckets::TIME_TO_FIRST_TOKEN,
            ),
            inter_token_latency: names.histogram(
                "inter_token_latency_seconds",
                "Time between tokens in seconds",
                &buckets::PER_TOKEN,
            ),
            time_per_output_token: names.histogram(
                "request_time_per_output_token_seconds",
                "Mean time per output token of a request in seconds",
                &buckets::PER_TOKEN,
            ),
            e2e_latency: names.histogram("e2e_request_latency_seconds", "End-to-end latency in seconds", times),
            queue_time: names.histogram("request_queue_time_seconds", "Time spent waiting in seconds", times),
            inference_time: names.histogram("request_inference_time_seconds", "Time spent running in seconds", times),
            prefill_time: names.histogram("request_prefill_time_seconds", "Time spent in prefill in seconds", times),
            decode_time: names.histogram("request_decode_time_seconds", "Time spent in decode in seconds", times),
            request_prompt_tokens: names.histogram("request_prompt_tokens", "Prefill tokens of a request", &tokens),
            request_generation_tokens: names.histogram("request_generation_tokens", "Tokens generated", &tokens),
            request_prefill_kv_computed_tokens: names.histogram(
                "request_prefill_kv_computed_tokens",
                "Prompt tokens of a request that did not come from a cache",
                &tokens,
            ),
            request_max_generation_tokens: names.histogram(
                "request_max_num_generation_tokens",
                "Most generation tokens of a request's sequences",
                &tokens,
            ),
            request_params_max_tokens: names.histogram("request_params_max_tokens", "The limit asked for", &tokens),
            request_params_n: names.histogram("request_params_n", "The parameter n", &buckets::PARAMS_N),
            request_preemptions: names.histogram(
                "request_num_preemptions",
                "Preemptions of a request",
                &buckets::PREEMPTIONS,
            ),
        }
    }

    /// Takes the statistics of a step, and of the step before.
    pub fn step(&self, before: &StepStats, now: &StepStats) {
        self.running.set(now.running as i64);
        self.waiting.set(now.waiting as i64);
        self.waiting_for_capacity.set(now.waiting as i64);
        self.kv_usage.set(now.kv_usage);
        for (counter, before, now) in [
            (&self.prefix_queries, before.prefix_queries, now.prefix_queries),
            (&self.prefix_hits, before.prefix_hits, now.prefix_hits),
            (&self.preemptions, before.preemptions, now.preemptions),
            (&self.prompt_tokens, before.prompt_tokens, now.prompt_tokens),
            (&self.generation_tokens, before.generation_tokens, now.generation_tokens),
        ] {
            counter.inc_by(now.saturating_sub(before));
        }
        let cached = now.prefix_hits.saturating_sub(before.prefix_hits);
        let admitted = now.prompt_tokens.saturating_sub(before.prompt_tokens);
        self.prompt_sources.cached.inc_by(cached);
        self.prompt_sources.local_cache_hit.inc_by(cached);
        self.prompt_sources.local_compute.inc_by(admitted.saturating_sub(cached));
        if now.steps > before.steps && now.batch_tokens > 0 {
            self.iteration_tokens.observe(now.batch_tokens as f64);
        }
    }

    /// Counts a sequence that ended.
    pub fn finished(&self, reason: &'static str) {
        self.success.get_or_create(&[("finished_reason", reason)]).inc();
    }

    /// Counts a request that was refused.
    pub fn rejected(&self, rejection: Rejection) {
        self.rejections.get_or_create(&[("reason", rejection.label())]).inc();
    }
}

/// `cache_config_info` and `lora_requests_info`, which routers read.
fn info(names: &mut Names<'_>, capacity: &Capacity) {
    let cache: Family<Vec<(String, String)>, Gauge> = Family::default();
    cache.get_or_create(&super::cache_labels(capacity)).set(1);
    names.add("cache_config_info", "Information of the LLMEngine CacheConfig", cache);
    let lora: Family<Vec<(&'static str, &'static str)>, Gauge> = Family::default();
    let labels = vec![("max_lora", "0"), ("waiting_lora_adapters", ""), ("running_lora_adapters", "")];
    lora.get_or_create(&labels).set(0);
    names.add("lora_requests_info", "Running stats on lora requests", lora);
    // One engine that never sleeps.
    let sleep: Family<Labels, Gauge> = Family::default();
    for (state, value) in [("awake", 1), ("weights_offloaded", 0), ("discard_all", 0)] {
        sleep.get_or_create(&[("sleep_state", state)]).set(value);
    }
    names.add("engine_sleep_state", "Engine sleep state", sleep);
    let kv_tokens = i64::try_from(capacity.kv_tokens()).unwrap_or(i64::MAX);
    names.0.register("kwire:kv_capacity_tokens", "Tokens that the KV cache holds", ConstGauge::new(kv_tokens));
}

/// Requests wait for capacity; nothing defers them.
fn by_reason(names: &mut Names<'_>) -> Gauge {
    let family: Family<Labels, Gauge> = Family::default();
    family.get_or_create(&[("reason", "deferred")]).set(0);
    let capacity = family.get_or_create(&[("reason", "capacity")]).clone();
    names.add("num_requests_waiting_by_reason", "Waiting requests by reason", family);
    capacity
}
