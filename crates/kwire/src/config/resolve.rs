//! Raw arguments and environment → [`ServeConfig`], or every fault at once.

use std::fmt::Display;

use super::environment::{Lookup, expand_home};
use super::{
    CONTENT_FORMATS, EngineSettings, GenerationConfig, KV_DTYPES, LOAD_FORMATS, LimitSettings, ListenSettings,
    MaxModelLen, ModelSettings, POLICIES, RequestSettings, ServeConfig, UNKNOWN_FIELDS, Words, number,
};
use crate::cli::serve_args::ServeArgs;
use crate::models::ModelRef;

/// Queued requests allowed by default, for each sequence that may run.
const QUEUE_FACTOR: usize = 4;

/// A resolved configuration and what the user should know about it.
#[derive(Debug, Clone, PartialEq)]
pub struct Resolved {
    /// The settings.
    pub config: ServeConfig,
    /// Lines to print: flags that had no effect.
    pub notices: Vec<String>,
}

/// Checks everything; `Err` has one line for each fault.
pub fn resolve(args: &ServeArgs, env: &impl Lookup) -> Result<Resolved, Vec<String>> {
    let mut faults = Faults::default();
    let mut notices = Vec::new();
    let engine = engine(args, env, &mut faults);
    let model = model(args, env, &mut faults);
    let listen = listen(args, env, &mut faults);
    let requests = requests(args, env, &mut faults);
    let limits = limits(args, engine.max_num_seqs, &mut faults);
    match args.dtype.as_str() {
        "auto" | "float" | "float32" => {}
        "half" | "float16" | "bfloat16" => {
            notices.push(format!("--dtype {} has no effect on a CPU: activations are float32", args.dtype));
        }
        other => faults.add("dtype", format!("{other:?} is not one of auto, bfloat16, float16, float32")),
    }
    if let Some(share) = &args.gpu_memory_utilization {
        match share.parse::<f64>() {
            Ok(v) if v > 0.0 && v <= 1.0 => notices.push(
                "--gpu-memory-utilization has no effect on a CPU: --kv-cache-memory-bytes sets the cache's size".into(),
            ),
            _ => faults.add("gpu-memory-utilization", format!("{share:?} is not a share in (0, 1]")),
        }
    }
    match model {
        Some(model) if faults.lines.is_empty() => {
            let config = ServeConfig { model, listen, engine, requests, limits, dry_run: args.dry_run };
            Ok(Resolved { config, notices })
        }
        _ => Err(faults.lines),
    }
}

/// Collects faults; values that could not be read are replaced so that the reading goes on.
#[derive(Default)]
struct Faults {
    lines: Vec<String>,
}

impl Faults {
    fn add(&mut self, flag: &str, what: impl Display) {
        self.lines.push(format!("--{flag}: {what}"));
    }

    /// A whole number with vLLM's suffixes, within bounds.
    fn number(&mut self, flag: &str, text: &str, min: u64, max: u64) -> u64 {
        match number::parse(text) {
            Ok(n) if (min..=max).contains(&n) => return n,
            Ok(n) if max == u64::MAX => self.add(flag, format!("{n} is too small: at least {min}")),
            Ok(n) => self.add(flag, format!("{n} is not between {min} and {max}")),
            Err(e) => self.add(flag, e),
        }
        min
    }

    fn count(&mut self, flag: &str, text: &str, min: u64) -> usize {
        self.number(flag, text, min, u64::MAX) as usize
    }

    /// The value of one of these words.
    fn word<T: Copy>(&mut self, flag: &str, text: &str, words: Words<T>) -> T {
        words.iter().find(|(w, _)| *w == text).map_or_else(
            || {
                let all: Vec<_> = words.iter().map(|(w, _)| *w).collect();
                self.add(flag, format!("{text:?} is not one of {}", all.join(", ")));
                words[0].1
            },
            |(_, value)| *value,
        )
    }
}

fn model(args: &ServeArgs, env: &impl Lookup, faults: &mut Faults) -> Option<ModelSettings> {
    let source = source(args, env, faults);
    let tokenizer = args.tokenizer.as_deref().map(|t| expand_home(env, t));
    if let Some(path) = tokenizer.as_ref().filter(|p| !p.exists()) {
        faults.add("tokenizer", format!("{} does not exist; give tokenizer.json or its folder", path.display()));
    }
    let load_format = faults.word("load-format", &args.load_format, LOAD_FORMATS);
    let download_dir = args.download_dir.as_deref().map(|d| expand_home(env, d));
    let (text, source) = source?;
    let served_names = if args.served_model_name.is_empty() { vec![text] } else { args.served_model_name.clone() };
    Some(ModelSettings { source, served_names, tokenizer, download_dir, load_format })
}

/// The model as typed, and parsed.
fn source(args: &ServeArgs, env: &impl Lookup, faults: &mut Faults) -> Option<(String, ModelRef)> {
    let text = match (&args.model_tag, &args.model) {
        (Some(a), Some(b)) if a != b => {
            faults.add("model", format!("two models are given, {a} and {b}"));
            return None;
        }
        (Some(m), _) | (None, Some(m)) => m,
        (None, None) => {
            let greedy = args.api_key.len() > 1 || args.served_model_name.len() > 1;
            faults.lines.push(match greedy {
                true => {
                    "which model? --api-key and --served-model-name take every word that follows: name the model first"
                        .into()
                }
                false => "which model? For a first try: kwire serve smollm2".into(),
            });
            return None;
        }
    };
    // What can't be looked at is left to its opening, which says why.
    let exists = |p: &std::path::Path| expand_home(env, &p.to_string_lossy()).try_exists().unwrap_or(true);
    let mut source = match ModelRef::parse(text, exists) {
        Ok(ModelRef::Local(path)) => ModelRef::Local(expand_home(env, &path.to_string_lossy())),
        Ok(source) => source,
        Err(e) => {
            faults.lines.push(e);
            return None;
        }
    };
    if let Some(revision) = &args.revision {
        match &mut source {
            ModelRef::Hub(hub) if hub.revision == "main" || hub.revision == *revision => {
                hub.revision.clone_from(revision);
            }
            ModelRef::Hub(hub) => faults.add("revision", format!("{revision:?} and @{} disagree", hub.revision)),
            _ => faults.add("revision", "only models of the hub have revisions"),
        }
    }
    Some((text.clone(), source))
}

fn listen(args: &ServeArgs, env: &impl Lookup, faults: &mut Faults) -> ListenSettings {
    let port = faults.number("port", &args.port, 0, 65535) as u16;
    let mut api_keys = args.api_key.clone();
    if api_keys.is_empty() {
        api_keys.extend(env.get("VLLM_API_KEY"));
    }
    if api_keys.iter().any(|k| k.trim().is_empty()) {
        faults.add("api-key", "a key is empty");
    }
    ListenSettings { host: args.host.clone(), port, api_keys }
}

fn engine(args: &ServeArgs, env: &impl Lookup, faults: &mut Faults) -> EngineSettings {
    let max_model_len = match args.max_model_len.as_deref().map(str::trim) {
        None => MaxModelLen::FromModel,
        Some(auto) if auto == "-1" || auto.eq_ignore_ascii_case("auto") => MaxModelLen::Fit,
        Some(text) => MaxModelLen::Tokens(faults.count("max-model-len", text, 1)),
    };
    let kv_cache_bytes = match (&args.kv_cache_memory_bytes, env.get("VLLM_CPU_KVCACHE_SPACE")) {
        (Some(text), _) => Some(faults.number("kv-cache-memory-bytes", text, 1, u64::MAX)),
        (None, Some(gib)) => match gib.parse::<u64>() {
            Ok(0) => None, // vLLM: 0 means its own choice.
            Ok(gib) => Some(gib.saturating_mul(1 << 30)),
            Err(_) => {
                faults.lines.push(format!("VLLM_CPU_KVCACHE_SPACE: {gib:?} is not a whole number of GiB"));
                None
            }
        },
        (None, None) => None,
    };
    let kv_cache_dtype = if args.kv_cache_dtype.starts_with("fp8") {
        faults.add("kv-cache-dtype", format!("{} is not supported yet; auto keeps 16 bits", args.kv_cache_dtype));
        None
    } else {
        faults.word("kv-cache-dtype", &args.kv_cache_dtype, KV_DTYPES)
    };
    let block_size = faults.count("block-size", &args.block_size, 16);
    if !block_size.is_multiple_of(16) {
        faults.add("block-size", format!("{block_size} is not a multiple of 16"));
    }
    let max_num_seqs = faults.count("max-num-seqs", &args.max_num_seqs, 1);
    let max_num_batched_tokens =
        args.max_num_batched_tokens.as_deref().map(|t| faults.count("max-num-batched-tokens", t, 1));
    if let Some(budget) = max_num_batched_tokens.filter(|b| *b < max_num_seqs) {
        let what = format!("{budget} is less than --max-num-seqs {max_num_seqs}: each running sequence needs a token");
        faults.add("max-num-batched-tokens", what);
    }
    let threshold = faults.count("long-prefill-token-threshold", &args.long_prefill_token_threshold, 0);
    EngineSettings {
        max_model_len,
        kv_cache_bytes,
        kv_cache_dtype,
        block_size,
        prefix_caching: !args.no_enable_prefix_caching,
        max_num_seqs,
        max_num_batched_tokens,
        chunked_prefill: !args.no_enable_chunked_prefill,
        long_prefill_token_threshold: (threshold > 0).then_some(threshold),
        policy: faults.word("scheduling-policy", &args.scheduling_policy, POLICIES),
        seed: faults.number("seed", &args.seed, 0, u64::MAX),
        threads: args.threads.as_deref().map(|t| faults.number("threads", t, 1, 1024) as usize),
    }
}

fn requests(args: &ServeArgs, env: &impl Lookup, faults: &mut Faults) -> RequestSettings {
    let chat_template = args.chat_template.as_deref().and_then(|text| {
        // As vLLM: what can't be a file name is the template itself.
        if text.contains(['{', '\n']) {
            return Some(text.to_owned());
        }
        let path = expand_home(env, text);
        std::fs::read_to_string(&path)
            .map_err(|e| faults.add("chat-template", format!("{} cannot be read: {e}", path.display())))
            .ok()
    });
    let generation_config = match args.generation_config.as_str() {
        "auto" => GenerationConfig::Auto,
        "vllm" => GenerationConfig::Neutral,
        folder => {
            let folder = expand_home(env, folder);
            if !folder.join("generation_config.json").is_file() {
                let what = format!("{} has no generation_config.json; auto and vllm are words", folder.display());
                faults.add("generation-config", what);
            }
            GenerationConfig::Folder(folder)
        }
    };
    let override_generation_config = match args.override_generation_config.as_deref().map(serde_json::from_str) {
        None => serde_json::Map::new(),
        Some(Ok(map)) => map,
        Some(Err(e)) => {
            faults.add("override-generation-config", format!("not a JSON object: {e}"));
            serde_json::Map::new()
        }
    };
    let max_logprobs = match args.max_logprobs.as_str() {
        "-1" => None,
        text => Some(faults.count("max-logprobs", text, 0)),
    };
    RequestSettings {
        chat_template,
        content_format: faults.word(
            "chat-template-content-format",
            &args.chat_template_content_format,
            CONTENT_FORMATS,
        ),
        trust_request_chat_template: args.trust_request_chat_template,
        generation_config,
        override_generation_config,
        max_logprobs,
        prompt_tokens_details: args.enable_prompt_tokens_details,
        unknown_fields: faults.word("unknown-fields", &args.unknown_fields, UNKNOWN_FIELDS),
    }
}

fn limits(args: &ServeArgs, max_num_seqs: usize, faults: &mut Faults) -> LimitSettings {
    let max_queued_requests = match args.max_num_queued_reqs.as_deref() {
        None => Some(QUEUE_FACTOR * max_num_seqs),
        Some(text) => Some(faults.count("max-num-queued-reqs", text, 0)).filter(|n| *n > 0),
    };
    LimitSettings {
        max_queued_requests,
        max_queued_tokens: args.max_num_queued_tokens.as_deref().map(|t| faults.count("max-num-queued-tokens", t, 1)),
        shutdown_timeout_s: faults.number("shutdown-timeout", &args.shutdown_timeout, 0, 86_400),
    }
}

#[cfg(test)]
mod tests {
    use kwire_engine::SchedulingPolicy;

    use super::*;
    use crate::cli::parse_serve;

    fn with(line: &str, env: &[(&str, &str)]) -> Result<Resolved, Vec<String>> {
        let args = parse_serve(line.split(' ')).expect("clap takes it");
        resolve(&args, &env)
    }

    #[test]
    fn defaults_are_vllms_but_for_the_documented_ones() {
        let r = with("smollm2", &[]).unwrap();
        let c = &r.config;
        assert!(r.notices.is_empty());
        assert_eq!((c.listen.host.as_str(), c.listen.port), ("0.0.0.0", 8000));
        assert_eq!(c.model.served_names, ["smollm2"]);
        assert_eq!((c.engine.block_size, c.engine.max_num_seqs, c.engine.seed), (16, 128, 0));
        assert!(c.engine.prefix_caching && c.engine.chunked_prefill);
        assert_eq!(c.engine.max_model_len, MaxModelLen::FromModel);
        assert_eq!(c.requests.max_logprobs, Some(20));
        assert_eq!((c.limits.max_queued_requests, c.limits.shutdown_timeout_s), (Some(512), 30));
    }

    #[test]
    fn values_are_read_as_vllm_reads_them() {
        let line = "org/name --max-model-len 2K --kv-cache-memory-bytes 1.5g --no-enable-prefix-caching --revision v2 \
                    --dtype half --max-num-queued-reqs 0 --max-logprobs=-1 --scheduling-policy priority";
        let r = with(line, &[("VLLM_API_KEY", "k"), ("VLLM_CPU_KVCACHE_SPACE", "4")]).unwrap();
        assert_eq!(r.notices, ["--dtype half has no effect on a CPU: activations are float32"]);
        let c = r.config;
        assert_eq!(c.engine.max_model_len, MaxModelLen::Tokens(2048));
        assert_eq!(c.engine.kv_cache_bytes, Some(1_500_000_000));
        assert!(!c.engine.prefix_caching);
        assert_eq!(c.engine.policy, SchedulingPolicy::Priority);
        assert_eq!((c.limits.max_queued_requests, c.requests.max_logprobs), (None, None));
        assert_eq!(c.listen.api_keys, ["k"]);
        assert_eq!(c.model.source.to_string(), "org/name@v2");
        let c = with("org/name --max-model-len -1", &[("VLLM_CPU_KVCACHE_SPACE", "4")]).unwrap().config;
        assert_eq!(c.engine.kv_cache_bytes, Some(4 << 30));
        assert_eq!(c.engine.max_model_len, MaxModelLen::Fit);
    }

    #[test]
    fn all_faults_are_reported_together() {
        let line = "nope --port 70000 --block-size 24 --dtype int8 --kv-cache-dtype fp8 --max-num-seqs 0 --max-model-len \
                    1.5K --gpu-memory-utilization 1.5 --generation-config /nope --override-generation-config [1]";
        let faults = with(line, &[]).unwrap_err();
        expect_test::expect![[r#"
            --max-model-len: "1.5K": decimals don't go with K; did you mean 1.5k?
            --kv-cache-dtype: fp8 is not supported yet; auto keeps 16 bits
            --block-size: 24 is not a multiple of 16
            --max-num-seqs: 0 is too small: at least 1
            "nope" is not a model: give a path, ORG/NAME of the hub, s3://BUCKET/PREFIX, or the alias smollm2
            --port: 70000 is not between 0 and 65535
            --generation-config: /nope has no generation_config.json; auto and vllm are words
            --override-generation-config: not a JSON object: invalid type: sequence, expected a map at line 1 column 0
            --dtype: "int8" is not one of auto, bfloat16, float16, float32
            --gpu-memory-utilization: "1.5" is not a share in (0, 1]"#]]
        .assert_eq(&faults.join("\n"));
    }

    #[test]
    fn moot_on_a_cpu_is_said_once() {
        assert_eq!(with("smollm2 --gpu-memory-utilization 0.9", &[]).unwrap().notices.len(), 1);
    }
}
