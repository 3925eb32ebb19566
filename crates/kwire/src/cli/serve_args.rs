//! The flags of `kwire serve` as the user typed them: vLLM's names and defaults, unchecked strings.
//!
//! This is the one definition of those flags: the parser, `--help` and `docs/flags.md` come from it. What the values
//! mean, and every check, is in [`crate::config`], so that all faults of a command line are reported together.

use clap::Args;

const EXAMPLES: &str = "\
Examples:
  kwire serve smollm2                                   the built-in small model, on port 8000
  kwire serve ./Llama-3.2-1B-Instruct-Q4_K_M.gguf       a local file
  kwire serve Qwen/Qwen2.5-0.5B-Instruct                a repository of the Hugging Face hub
  kwire serve bartowski/Qwen2.5-0.5B-Instruct-GGUF:Q4_K_M@main
  kwire serve s3://models/qwen --served-model-name qwen --port 9000
  kwire serve smollm2 --max-model-len 2k --dry-run      show settings and memory, load nothing

Then:
  curl localhost:8000/v1/chat/completions -H 'Content-Type: application/json' \\
    -d '{\"model\": \"smollm2\", \"messages\": [{\"role\": \"user\", \"content\": \"Why is the sky blue?\"}], \"max_tokens\": 100}'

Flags are those of `vllm serve`, with `-` or `_` between words; `--flag=value` works too. Flags of vLLM that have
nothing to do here are accepted and say so; docs/flags.md lists them, and those that are refused.";

/// Serve a model over the OpenAI-compatible HTTP API.
///
/// MODEL is a .gguf file, a Hugging Face model folder, a hub id (ORG/NAME[:FILE-OR-QUANT][@REVISION]), an
/// s3://BUCKET/PREFIX, or the built-in alias `smollm2`. What is not on this machine is downloaded once and kept.
#[derive(Debug, Clone, Default, Args)]
// As with vLLM, a flag that is given twice has its last value.
#[command(after_help = EXAMPLES, args_override_self = true)]
pub struct ServeArgs {
    /// The model to serve; a local path wins over a hub id of the same spelling.
    #[arg(value_name = "MODEL")]
    pub model_tag: Option<String>,

    /// The model, as older vLLM command lines give it.
    #[arg(long, value_name = "MODEL", help_heading = "Model", hide_short_help = true)]
    pub model: Option<String>,
    /// Names that requests may use; the first is the one in responses [default: MODEL as given].
    #[arg(long, value_name = "NAME", num_args = 1.., help_heading = "Model")]
    pub served_model_name: Vec<String>,
    /// A tokenizer.json, or a folder that has one, in place of the model's own.
    #[arg(long, value_name = "PATH", help_heading = "Model")]
    pub tokenizer: Option<String>,
    /// Branch, tag or commit of a hub model [default: main].
    #[arg(long, value_name = "REV", help_heading = "Model")]
    pub revision: Option<String>,
    /// Where downloads are kept [default: the Hugging Face cache, or $KWIRE_HOME for s3].
    #[arg(long, value_name = "FOLDER", help_heading = "Model")]
    pub download_dir: Option<String>,
    /// Format of the weights: auto, safetensors or gguf.
    #[arg(long, value_name = "FORMAT", default_value = "auto", help_heading = "Model")]
    pub load_format: String,
    /// Type of activations: auto, bfloat16, float16 or float32. Moot on a CPU, which computes in float32.
    #[arg(long, value_name = "TYPE", default_value = "auto", help_heading = "Model")]
    pub dtype: String,

    /// Address to listen on; 0.0.0.0 is every interface, as with vLLM's default.
    #[arg(long, value_name = "ADDR", default_value = "0.0.0.0", help_heading = "Listening")]
    pub host: String,
    /// Port to listen on; 0 lets the system choose, and the chosen one is printed.
    #[arg(long, value_name = "PORT", default_value = "8000", help_heading = "Listening")]
    pub port: String,
    /// Bearer keys that may use /v1; several may be given [default: $VLLM_API_KEY, else none is asked for].
    #[arg(long, value_name = "KEY", num_args = 1.., help_heading = "Listening")]
    pub api_key: Vec<String>,

    /// Longest prompt plus answer in tokens, like 4096, 4k (4,000) or 4K (4,096); auto (or -1): as much as memory
    /// allows, up to the model's own [default: the model's own].
    #[arg(long, value_name = "TOKENS", allow_hyphen_values = true, help_heading = "Context and memory")]
    pub max_model_len: Option<String>,
    /// Memory for the KV cache, like 4G or 512M [default: $VLLM_CPU_KVCACHE_SPACE GiB, else a share of free memory].
    #[arg(long, value_name = "BYTES", help_heading = "Context and memory")]
    pub kv_cache_memory_bytes: Option<String>,
    /// Type of cached keys and values: auto, bfloat16 or float16.
    #[arg(long, value_name = "TYPE", default_value = "auto", help_heading = "Context and memory")]
    pub kv_cache_dtype: String,
    /// Tokens in a KV cache block: a multiple of 16.
    #[arg(long, value_name = "TOKENS", default_value = "16", help_heading = "Context and memory")]
    pub block_size: String,
    /// Share of GPU memory to use, in (0, 1]. Moot on a CPU, where it prints a line.
    #[arg(long, value_name = "SHARE", help_heading = "Context and memory")]
    pub gpu_memory_utilization: Option<String>,
    /// Reuse the cache of equal prompt beginnings (on by default).
    #[arg(long, overrides_with = "no_enable_prefix_caching", help_heading = "Context and memory")]
    pub enable_prefix_caching: bool,
    /// Compute every prompt anew.
    #[arg(long, help_heading = "Context and memory")]
    pub no_enable_prefix_caching: bool,

    /// Sequences that run at the same time.
    #[arg(long, value_name = "N", default_value = "128", help_heading = "Scheduling")]
    pub max_num_seqs: String,
    /// Tokens computed in one step, prompts and answers together [default: 512].
    #[arg(long, value_name = "TOKENS", help_heading = "Scheduling")]
    pub max_num_batched_tokens: Option<String>,
    /// Split long prompts over steps, so that running answers go on (on by default).
    #[arg(long, overrides_with = "no_enable_chunked_prefill", help_heading = "Scheduling")]
    pub enable_chunked_prefill: bool,
    /// Compute each prompt in one step; --max-num-batched-tokens must then hold the longest prompt.
    #[arg(long, help_heading = "Scheduling")]
    pub no_enable_chunked_prefill: bool,
    /// Prompt tokens of one request in one step at most; 0: no limit of its own.
    #[arg(long, value_name = "TOKENS", default_value = "0", help_heading = "Scheduling")]
    pub long_prefill_token_threshold: String,
    /// Who runs first: fcfs (first come, first served) or priority (the request's `priority`, lowest first).
    #[arg(long, value_name = "POLICY", default_value = "fcfs", help_heading = "Scheduling")]
    pub scheduling_policy: String,
    /// Base of the seeds of requests that bring none.
    #[arg(long, value_name = "SEED", default_value = "0", help_heading = "Scheduling")]
    pub seed: String,

    /// Requests waiting and running at most, then 503 with Retry-After; 0: no limit [default: 4 x max-num-seqs].
    #[arg(long, value_name = "N", help_heading = "Overload and shutdown")]
    pub max_num_queued_reqs: Option<String>,
    /// Prompt tokens waiting at most, then 503 with Retry-After [default: no limit].
    #[arg(long, value_name = "TOKENS", help_heading = "Overload and shutdown")]
    pub max_num_queued_tokens: Option<String>,
    /// Seconds that running answers get after SIGTERM; 0 ends them at once, which is vLLM's default.
    #[arg(long, value_name = "SECONDS", default_value = "30", help_heading = "Overload and shutdown")]
    pub shutdown_timeout: String,

    /// Jinja chat template: a file, or the template itself [default: the model's own].
    #[arg(long, value_name = "FILE", help_heading = "Requests")]
    pub chat_template: Option<String>,
    /// How message content reaches the template: auto, string or openai (a list of parts).
    #[arg(long, value_name = "FORMAT", default_value = "auto", help_heading = "Requests")]
    pub chat_template_content_format: String,
    /// Let requests bring a chat template of their own.
    #[arg(long, help_heading = "Requests")]
    pub trust_request_chat_template: bool,
    /// Sampling defaults: auto (the model's generation_config.json), vllm (none), or a folder that has one.
    #[arg(long, value_name = "WHERE", default_value = "auto", help_heading = "Requests")]
    pub generation_config: String,
    /// Sampling defaults that win over those, as JSON: '{\"temperature\": 0.5}'.
    #[arg(long, value_name = "JSON", help_heading = "Requests")]
    pub override_generation_config: Option<String>,
    /// Most alternatives that `logprobs` may ask for.
    #[arg(long, value_name = "N", default_value = "20", allow_hyphen_values = true, help_heading = "Requests")]
    pub max_logprobs: String,
    /// Tell in `usage` how many prompt tokens were found in the prefix cache.
    #[arg(long, help_heading = "Requests")]
    pub enable_prompt_tokens_details: bool,
    /// Request fields that no one knows: warn (log, count and name in a header) or reject (400).
    #[arg(long, value_name = "WHAT", default_value = "warn", help_heading = "Requests")]
    pub unknown_fields: String,

    /// CPU threads of the engine [default: the cores this process may use].
    #[arg(long, value_name = "N", help_heading = "Kwire's own")]
    pub threads: Option<String>,
    /// Print the resolved settings and the memory that they take, check the text side, and leave; nothing is downloaded.
    #[arg(long, help_heading = "Kwire's own")]
    pub dry_run: bool,
}
