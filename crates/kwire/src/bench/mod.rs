//! `kwire bench`: a closed-loop load generator for any OpenAI-compatible server.
//!
//! Prompts are cut from real text to a wanted number of tokens, which is met by asking the server once how many tokens
//! a known text has. Token counts are the server's `usage`. Each request opens a connection, since some servers close
//! theirs after a stream and the race would show as errors.

mod corpus;
mod load;
mod report;
mod suite;

use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use clap::Args;
use serde_json::{Map, Value};

use crate::{http, output};
use corpus::Corpus;
use load::{Prompts, Shape, Target};
use report::{Context, Report};

/// Arguments of `kwire bench`.
#[derive(Debug, Clone, Args)]
#[command(after_help = "\
Examples:
  kwire bench http://localhost:8000
  kwire bench -c 16 -n 64 --prompt-tokens 200:300 --max-tokens 128 --ignore-eos http://localhost:8000
  kwire bench -c 16 -n 64 --shared-prefix 1000 --prompt-tokens 50 http://localhost:8000
  kwire bench --suite cpu kwire=http://localhost:8000 peer=http://localhost:8081

The same --seed cuts prompts from the same places: give each run against one server its own, or its prefix cache
answers part of the later ones.")]
pub struct BenchArgs {
    /// Servers, with or without /v1; a suite takes several, each with an optional NAME=.
    #[arg(value_name = "[NAME=]URL", default_value = "http://127.0.0.1:8000")]
    urls: Vec<String>,
    /// Run a fixed set of workloads and print Markdown tables: cpu.
    #[arg(long, value_name = "NAME")]
    suite: Option<String>,
    /// Only these workloads of the suite, like AB.
    #[arg(long, value_name = "LETTERS", requires = "suite")]
    only: Option<String>,
    /// Times to run each workload of the suite.
    #[arg(long, value_name = "N", default_value_t = 1, requires = "suite")]
    rounds: usize,
    /// Model to ask [default: the first that the server lists].
    #[arg(long)]
    model: Option<String>,
    /// Requests at the same time.
    #[arg(short, long, default_value_t = 1)]
    concurrency: usize,
    /// Requests to send.
    #[arg(short = 'n', long, default_value_t = 16)]
    requests: usize,
    /// Length of prompts in tokens.
    #[arg(long, value_name = "N|MIN:MAX", default_value = "128")]
    prompt_tokens: String,
    /// Tokens of text before every prompt, the same in all (the system message with --chat).
    #[arg(long, value_name = "N", default_value_t = 0)]
    shared_prefix: usize,
    /// Let the warm-up use that prefix too; else it is cold when the clock starts.
    #[arg(long)]
    warm_prefix: bool,
    /// Longest answer in tokens.
    #[arg(long, value_name = "N", default_value_t = 128)]
    max_tokens: u32,
    /// Always generate the longest answer.
    #[arg(long)]
    ignore_eos: bool,
    /// Sampling temperature.
    #[arg(long, value_name = "T", default_value_t = 0.0)]
    temperature: f64,
    /// Chooses the prompts.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Requests before the clock starts.
    #[arg(long, value_name = "N", default_value_t = 2)]
    warmup: usize,
    /// Send chat completions in place of completions.
    #[arg(long)]
    chat: bool,
    /// Files or folders that prompts are cut from [default: a public-domain book that is built in].
    #[arg(long, value_name = "PATH", num_args = 1..)]
    corpus: Vec<PathBuf>,
    /// Characters in a token [default: measured].
    #[arg(long, value_name = "N")]
    chars_per_token: Option<f64>,
    /// Seconds that one request may take.
    #[arg(long, value_name = "SECONDS", default_value_t = 600)]
    timeout: u64,
    /// Use connections again.
    #[arg(long)]
    keep_alive: bool,
    /// Bearer key [default: $OPENAI_API_KEY].
    #[arg(long, value_name = "KEY", env = "OPENAI_API_KEY", hide_env_values = true)]
    api_key: Option<String>,
    /// JSON object merged into each request.
    #[arg(long, value_name = "JSON", default_value = "{}")]
    extra: String,
    /// Name of the run in its report.
    #[arg(long, default_value = "")]
    label: String,
    /// Also write the report as JSON; - writes only that.
    #[arg(long, value_name = "PATH")]
    json: Option<String>,
}

/// One run against one server.
#[derive(Clone)]
struct Plan {
    target: Arc<Target>,
    corpus: Arc<Corpus>,
    label: String,
    shape: Shape,
    concurrency: usize,
    requests: usize,
    warmup: usize,
    warm_prefix: bool,
}

/// Runs the command; the exit status tells whether every request was answered.
pub async fn run(args: BenchArgs) -> Result<ExitCode> {
    let mut plans = Vec::new();
    for url in &args.urls {
        plans.push(plan(&args, url).await?);
    }
    let reports = match (&args.suite, &plans[..]) {
        (Some(name), _) if !suite::NAMES.contains(&name.as_str()) => {
            bail!("no suite is called {name:?}; there is: {}", suite::NAMES.join(", "))
        }
        (Some(_), plans) => suite::run(plans, args.only.as_deref(), args.rounds, args.seed).await?,
        (None, [plan]) => {
            let report = measure(plan).await;
            if args.json.as_deref() != Some("-") {
                output::print(&report)?;
            }
            vec![report]
        }
        (None, _) => bail!("several servers are for --suite; give one"),
    };
    if let Some(path) = &args.json {
        let json = match &reports[..] {
            [one] => serde_json::to_string_pretty(one)?,
            all => serde_json::to_string_pretty(all)?,
        };
        match path.as_str() {
            "-" => output::line(json)?,
            path => std::fs::write(path, json + "\n").with_context(|| format!("{path} can't be written"))?,
        }
    }
    let all_answered = reports.iter().all(|r| r.errors.is_empty());
    Ok(if all_answered { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

async fn plan(args: &BenchArgs, url: &str) -> Result<Plan> {
    let (label, url) = match url.split_once('=') {
        Some((label, url)) if !label.contains(':') => (label, url),
        _ => (if args.label.is_empty() { url } else { args.label.as_str() }, url),
    };
    let base = http::base_url(url).to_owned();
    if !base.starts_with("http://") && !base.starts_with("https://") {
        bail!("{base:?} is not the address of a server, like http://localhost:8000");
    }
    let (low, high) = args.prompt_tokens.split_once(':').unwrap_or((&args.prompt_tokens, &args.prompt_tokens));
    let (Ok(low), Ok(high)) = (low.parse(), high.parse::<usize>()) else {
        bail!("--prompt-tokens {:?} is neither N nor MIN:MAX", args.prompt_tokens)
    };
    if low > high || high == 0 || args.concurrency == 0 || args.requests == 0 || args.rounds == 0 {
        bail!("--prompt-tokens, --concurrency, --requests and --rounds must be positive, and MIN at most MAX");
    }
    let extra: Map<String, Value> = serde_json::from_str(&args.extra).context("--extra is not a JSON object")?;
    let mut builder = http::client().timeout(Duration::from_secs(args.timeout));
    if !args.keep_alive {
        builder = builder.pool_max_idle_per_host(0);
    }
    let client = builder.build()?;
    let model = match &args.model {
        Some(model) => model.clone(),
        None => http::served_model(&client, &base, args.api_key.as_deref(), None).await?,
    };
    let (api_key, keep_alive) = (args.api_key.clone(), args.keep_alive);
    let target = Arc::new(Target { client, base, model, api_key, chat: args.chat, keep_alive, extra });
    let shape = Shape {
        prompt_tokens: (low, high),
        shared_prefix: args.shared_prefix,
        max_tokens: args.max_tokens,
        ignore_eos: args.ignore_eos,
        temperature: args.temperature,
        seed: args.seed,
    };
    let mut corpus = Corpus::open(&args.corpus)?;
    match args.chars_per_token {
        Some(n) if n > 0.0 => corpus.chars_per_token = n,
        Some(n) => bail!("--chars-per-token {n} is not positive"),
        None => {
            let measured = load::calibrate(&target, &shape, &corpus).await;
            corpus.chars_per_token = measured.unwrap_or(corpus.chars_per_token);
        }
    }
    Ok(Plan {
        target,
        corpus: Arc::new(corpus),
        label: label.to_owned(),
        shape,
        concurrency: args.concurrency,
        requests: args.requests,
        warmup: args.warmup,
        warm_prefix: args.warm_prefix,
    })
}

/// Warms up, then measures.
async fn measure(plan: &Plan) -> Report {
    let Plan { target, corpus, shape, .. } = plan;
    if plan.warmup > 0 {
        let prefix_salt = if plan.warm_prefix { "run" } else { "warm" };
        let warm = Prompts::new(corpus, shape, "warm", prefix_salt);
        load::closed_loop(target, warm, plan.warmup, plan.concurrency).await;
    }
    let prompts = Prompts::new(corpus, shape, "run", "run");
    let (outcomes, seconds) = load::closed_loop(target, prompts, plan.requests, plan.concurrency).await;
    let context = Context {
        label: &plan.label,
        model: &target.model,
        concurrency: plan.concurrency,
        chars_per_token: corpus.chars_per_token,
    };
    Report::new(&context, &outcomes, seconds)
}
