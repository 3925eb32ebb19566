//! Flags of `vllm serve` that have no field of their own here: those that are moot, and those that are refused.
//!
//! A flag is *moot* if ignoring it changes no answer and no limit that the user asked for; it prints one line. A
//! flag that would change behaviour and is not supported is *refused* by name with what to do instead. Flags in
//! neither table nor [`super::serve_args`] are unknown. Names follow vLLM 0.33.

/// How many values a flag takes on the command line.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Takes {
    /// A switch; the `--no-` form is accepted too.
    Nothing,
    /// One value.
    One,
    /// Values up to the next flag.
    Many,
}

/// What becomes of a flag.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// Accepted; why nothing needs doing.
    Moot(&'static str),
    /// Accepted with this value only, which is how Kwire works anyway.
    Only(&'static str, &'static str),
    /// Refused; what to do instead.
    Refused(&'static str),
}

/// One flag of vLLM.
#[derive(Debug, Clone, Copy)]
pub struct Flag {
    /// Without the leading dashes.
    pub name: &'static str,
    /// Its values.
    pub takes: Takes,
    /// What becomes of it.
    pub verdict: Verdict,
}

const fn moot(name: &'static str, takes: Takes, why: &'static str) -> Flag {
    Flag { name, takes, verdict: Verdict::Moot(why) }
}

const fn only(name: &'static str, value: &'static str, instead: &'static str) -> Flag {
    Flag { name, takes: One, verdict: Verdict::Only(value, instead) }
}

const fn refused(name: &'static str, takes: Takes, instead: &'static str) -> Flag {
    Flag { name, takes, verdict: Verdict::Refused(instead) }
}

use Takes::{Many, Nothing, One};

const GPU_ONLY: &str = "it tunes GPU kernels that are not used here";
const ONE_PROCESS: &str = "the engine is one process; nothing is spread by Ray or multiprocessing";
const NO_TORCH: &str = "there is no PyTorch here: nothing is compiled or captured at start";
const ALWAYS_TEXT: &str = "only text models are served";
const NO_LORA: &str = "LoRA adapters are not supported yet: serve a merged model";
const NO_SPEC: &str = "speculative decoding is not supported yet: leave it out; answers are the same without it";
const NO_TOOLS: &str = "tool calls are not parsed yet: read them from the text of the answer";
const NO_REASONING: &str = "reasoning is not split off yet: it is part of the answer's text";
const NO_QUANT: &str = "weights are served in the format of the file: give a .gguf of the wanted quantization";
const NO_TRANSFER: &str = "moving KV cache between servers is out of scope";
const NO_OFFLOAD: &str = "the cache and the weights stay in memory: give a smaller --max-model-len or model";
const NO_TLS: &str = "put a TLS proxy or an ingress in front";
const NO_EMBED: &str = "only text generation is served";
const NO_CODE: &str = "code from outside never runs inside the server";
const NO_MEDIA: &str = "images, video and audio are out of scope";
const ONE_REPLICA: &str = "one server is one replica: start several, each with its port, behind a load balancer";

/// Every compatibility flag, by group.
pub const FLAGS: &[Flag] = &[
    // How vLLM starts its processes.
    moot("distributed-executor-backend", One, ONE_PROCESS),
    moot("max-parallel-loading-workers", One, ONE_PROCESS),
    moot("worker-cls", One, ONE_PROCESS),
    moot("disable-frontend-multiprocessing", Nothing, ONE_PROCESS),
    moot("api-server-count", One, "the HTTP server already uses every core"),
    moot("renderer-num-workers", One, "rendering and tokenizing have threads of their own"),
    moot("distributed-timeout-seconds", One, ONE_PROCESS),
    moot("ray-workers-use-nsight", Nothing, ONE_PROCESS),
    moot("async-scheduling", Nothing, "the loop overlaps steps wherever the device allows it"),
    moot("trust-remote-code", Nothing, "code from checkpoints never runs, here or with this flag"),
    moot("use-tqdm-on-load", Nothing, "a terminal always shows how far loading is"),
    moot("config-format", One, "the format is seen from the files"),
    moot("model-impl", One, "there is one implementation"),
    moot("tokenizer-mode", One, "there is one tokenizer implementation"),
    moot("safetensors-load-strategy", One, "weights are read once, by several threads"),
    // GPU and compiler tuning.
    moot("enforce-eager", Nothing, NO_TORCH),
    moot("compilation-config", One, NO_TORCH),
    moot("optimization-level", One, NO_TORCH),
    moot("performance-mode", One, "set --max-num-seqs and --max-num-batched-tokens instead"),
    moot("max-seq-len-to-capture", One, NO_TORCH),
    moot("cudagraph-capture-sizes", Many, NO_TORCH),
    moot("max-cudagraph-capture-size", One, NO_TORCH),
    moot("attention-backend", One, GPU_ONLY),
    moot("attention-config", One, GPU_ONLY),
    moot("kernel-config", One, GPU_ONLY),
    moot("moe-backend", One, GPU_ONLY),
    moot("linear-backend", One, GPU_ONLY),
    moot("enable-flashinfer-autotune", Nothing, GPU_ONLY),
    moot("disable-custom-all-reduce", Nothing, GPU_ONLY),
    moot("disable-cascade-attn", Nothing, GPU_ONLY),
    moot("numa-bind", Nothing, "start the server under numactl to bind it"),
    // Caches and queues.
    moot("swap-space", One, "preempted requests are computed again, never swapped"),
    moot("prefix-caching-hash-algo", One, "one collision-resistant hash is always used"),
    moot("scheduler-reserve-full-isl", Nothing, "a request is admitted only with room for its whole prompt"),
    moot("disable-hybrid-kv-cache-manager", Nothing, "KV groups are always used where layers differ"),
    // Logs and metrics.
    moot("disable-log-requests", Nothing, "requests are not logged"),
    moot("enable-log-requests", Nothing, "requests are not logged; /metrics counts them"),
    moot("disable-log-stats", Nothing, "metrics cost nothing measurable and stay on"),
    moot("max-log-len", One, "prompts are never logged"),
    moot("enable-log-outputs", Nothing, "answers are never logged"),
    moot("uvicorn-log-level", One, "RUST_LOG sets the log level"),
    moot("log-level", One, "RUST_LOG sets the log level"),
    moot("disable-uvicorn-access-log", Nothing, "there is no access log"),
    moot("disable-access-log-for-endpoints", One, "there is no access log"),
    moot("disable-fastapi-docs", Nothing, "there are no generated API pages"),
    moot("show-hidden-metrics-for-version", One, "metrics have the names of vLLM 0.33"),
    moot("h11-max-incomplete-event-size", One, "request heads are bounded already"),
    moot("h11-max-header-count", One, "request heads are bounded already"),
    moot("limit-mm-per-prompt", Many, ALWAYS_TEXT),
    moot("language-model-only", Nothing, ALWAYS_TEXT),
    moot("enable-request-id-headers", Nothing, "a client's X-Request-Id is always sent back"),
    moot("stream-interval", One, "tokens are sent as each step ends"),
    // Accepted with the value that is true here.
    only("tensor-parallel-size", "1", "models are not yet split over devices: use a smaller or quantized model"),
    only("pipeline-parallel-size", "1", "models are not yet split over devices: use a smaller or quantized model"),
    only("data-parallel-size", "1", ONE_REPLICA),
    only("decode-context-parallel-size", "1", "context parallelism is not supported"),
    only("prefill-context-parallel-size", "1", "context parallelism is not supported"),
    only("nnodes", "1", "models are not yet split over hosts"),
    only("node-rank", "0", "models are not yet split over hosts"),
    only("runner", "auto generate", NO_EMBED),
    only("convert", "auto none", NO_EMBED),
    only("task", "auto generate", NO_EMBED),
    only("logprobs-mode", "raw_logprobs", "log-probabilities are those before temperature and penalties"),
    only("response-role", "assistant", "the role in answers is `assistant`"),
    only("device", "auto cpu", "only the CPU is used"),
    only("cpu-offload-gb", "0", NO_OFFLOAD),
    only("sse-keep-alive-interval", "0", "streams send no keep-alive comments"),
    // Not supported, and it would matter.
    refused("quantization", One, NO_QUANT),
    refused("quantization-config", One, NO_QUANT),
    refused("enable-lora", Nothing, NO_LORA),
    refused("lora-modules", Many, NO_LORA),
    refused("max-loras", One, NO_LORA),
    refused("max-lora-rank", One, NO_LORA),
    refused("speculative-config", One, NO_SPEC),
    refused("spec-model", One, NO_SPEC),
    refused("spec-method", One, NO_SPEC),
    refused("spec-tokens", One, NO_SPEC),
    refused("enable-auto-tool-choice", Nothing, NO_TOOLS),
    refused("tool-call-parser", One, NO_TOOLS),
    refused("tool-parser-plugin", One, NO_CODE),
    refused("tool-server", One, NO_TOOLS),
    refused("reasoning-parser", One, NO_REASONING),
    refused("reasoning-parser-plugin", One, NO_CODE),
    refused("structured-outputs-config", One, "structured output is not supported yet"),
    refused("logits-processors", Many, NO_CODE),
    refused("middleware", One, NO_CODE),
    refused("worker-extension-cls", One, NO_CODE),
    refused("scheduler-cls", One, NO_CODE),
    refused("io-processor-plugin", One, NO_CODE),
    refused("hf-overrides", One, "edit config.json in a copy of the model folder"),
    refused("hf-config-path", One, "put config.json into the model folder"),
    refused("hf-token", One, "set the environment variable HF_TOKEN"),
    refused("tokenizer-revision", One, "give --tokenizer a folder with the wanted files"),
    refused("code-revision", One, NO_CODE),
    refused("skip-tokenizer-init", Nothing, "the server needs the tokenizer; prompts may still be token ids"),
    refused("default-chat-template-kwargs", One, "send chat_template_kwargs in the requests"),
    refused("num-gpu-blocks-override", One, "use --kv-cache-memory-bytes"),
    refused("max-num-scheduled-tokens", One, "use --max-num-batched-tokens"),
    refused("kv-transfer-config", One, NO_TRANSFER),
    refused("kv-events-config", One, NO_TRANSFER),
    refused("ec-transfer-config", One, NO_TRANSFER),
    refused("kv-offloading-size", One, NO_OFFLOAD),
    refused("kv-offloading-backend", One, NO_OFFLOAD),
    refused("enable-expert-parallel", Nothing, "experts are not spread over devices"),
    refused("enable-sleep-mode", Nothing, "stop the server instead: it starts in seconds"),
    refused("data-parallel-rank", One, ONE_REPLICA),
    refused("data-parallel-size-local", One, ONE_REPLICA),
    refused("data-parallel-address", One, ONE_REPLICA),
    refused("headless", Nothing, ONE_REPLICA),
    refused("ssl-keyfile", One, NO_TLS),
    refused("ssl-certfile", One, NO_TLS),
    refused("ssl-ca-certs", One, NO_TLS),
    refused("ssl-cert-reqs", One, NO_TLS),
    refused("uds", One, "listen on --host 127.0.0.1 instead"),
    refused("grpc-port", One, "only HTTP is spoken"),
    refused("root-path", One, "let the proxy strip the path"),
    refused("allowed-origins", One, "set CORS headers in the proxy"),
    refused("allowed-methods", One, "set CORS headers in the proxy"),
    refused("allowed-headers", One, "set CORS headers in the proxy"),
    refused("allow-credentials", Nothing, "set CORS headers in the proxy"),
    refused("enable-prompt-embeds", Nothing, "prompts are text or token ids"),
    refused("enable-mm-embeds", Nothing, NO_MEDIA),
    refused("mm-processor-kwargs", One, NO_MEDIA),
    refused("media-io-kwargs", One, NO_MEDIA),
    refused("allowed-local-media-path", One, NO_MEDIA),
    refused("pooler-config", One, NO_EMBED),
    refused("return-tokens-as-token-ids", Nothing, "ask for return_tokens_as_token_ids in the requests"),
    refused("otlp-traces-endpoint", One, "traces are not exported"),
    refused("config", One, "give the flags themselves; a shell script or a manifest can hold them"),
];

/// vLLM's short flags and the long ones they stand for.
pub const SHORT: &[(&str, &str)] = &[
    ("-tp", "tensor-parallel-size"),
    ("-pp", "pipeline-parallel-size"),
    ("-dp", "data-parallel-size"),
    ("-dcp", "decode-context-parallel-size"),
    ("-pcp", "prefill-context-parallel-size"),
    ("-ep", "enable-expert-parallel"),
    ("-q", "quantization"),
    ("-n", "nnodes"),
    ("-r", "node-rank"),
    ("-sc", "speculative-config"),
    ("-cc", "compilation-config"),
    ("-ac", "attention-config"),
    ("-asc", "api-server-count"),
];

/// The compatibility flag of this name; `no-` is dropped for switches.
pub fn find(name: &str) -> Option<&'static Flag> {
    let exact = FLAGS.iter().find(|f| f.name == name);
    exact.or_else(|| {
        let positive = name.strip_prefix("no-")?;
        FLAGS.iter().find(|f| f.name == positive && f.takes == Nothing)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_unique_and_spelled_with_dashes() {
        let mut names: Vec<_> = FLAGS.iter().map(|f| f.name).collect();
        assert!(names.iter().all(|n| !n.contains('_') && !n.starts_with('-')));
        names.sort_unstable();
        let n = names.len();
        names.dedup();
        assert_eq!(n, names.len());
    }

    #[test]
    fn short_flags_name_real_ones() {
        for (short, long) in SHORT {
            assert!(find(long).is_some(), "{short} stands for --{long}, which no table has");
        }
    }

    #[test]
    fn negated_switches_are_found() {
        assert_eq!(find("no-async-scheduling").unwrap().name, "async-scheduling");
        assert!(find("no-swap-space").is_none());
    }
}
