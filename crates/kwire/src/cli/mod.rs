//! The command line: what can be said, as typed. Nothing is read, checked or done here.

pub mod compat;
#[cfg(test)]
mod doc_test;
pub mod docs;
pub mod serve_args;
pub mod spelling;

use std::path::PathBuf;

use clap::{Args, CommandFactory, FromArgMatches, Parser, Subcommand};

use serve_args::ServeArgs;

const EXAMPLES: &str = "\
A first try, on any machine:
  kwire run smollm2 --temperature 0 --max-tokens 100 \"Why is the sky blue?\"
  kwire serve smollm2

`kwire COMMAND --help` explains each command. Models are kept in the Hugging Face cache, or under $KWIRE_HOME.";

/// Serve large language models: a drop-in for vLLM in one binary.
#[derive(Debug, Parser)]
#[command(name = "kwire", version, after_help = EXAMPLES, arg_required_else_help = true)]
pub struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// The commands.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Serve a model over the OpenAI-compatible HTTP API
    Serve(Box<ServeArgs>),
    /// Ask a model one thing, or chat with it
    Run(RunArgs),
    /// Download a model, so that `serve` and `run` need no network
    Pull(PullArgs),
    /// Show the models on this machine
    List,
    /// Remove a downloaded model
    Rm(RmArgs),
    /// Measure a server: throughput and latency under load
    Bench(Box<crate::bench::BenchArgs>),
    /// Print generated documentation
    #[command(hide = true)]
    Docs {
        /// Which page.
        page: String,
    },
}

/// Arguments of `kwire run`.
#[derive(Debug, Clone, Args)]
#[command(after_help = "\
Examples:
  kwire run smollm2 \"Write a haiku about paper\"
  kwire run smollm2                                 a conversation; Ctrl-C stops an answer, Ctrl-D leaves
  echo \"Summarize: ...\" | kwire run smollm2 -       the prompt from standard input
  kwire run --url http://localhost:8000 qwen        chat with a server that runs elsewhere")]
pub struct RunArgs {
    /// A .gguf file, model folder, hub id, s3:// prefix or alias; with --url, a name that the server knows.
    pub model: Option<String>,
    /// What to ask; without it, a conversation begins. `-` reads standard input.
    pub prompt: Vec<String>,
    /// System message.
    #[arg(long, value_name = "TEXT")]
    pub system: Option<String>,
    /// Longest answer in tokens.
    #[arg(long, value_name = "N")]
    pub max_tokens: Option<u32>,
    /// 0 always takes the likeliest token.
    #[arg(long, value_name = "T")]
    pub temperature: Option<f32>,
    /// Makes answers repeatable.
    #[arg(long, value_name = "N")]
    pub seed: Option<u64>,
    /// Ask this OpenAI-compatible server in place of an engine in this process.
    #[arg(long, value_name = "URL")]
    pub url: Option<String>,
    /// Key for --url.
    #[arg(long, value_name = "KEY")]
    pub api_key: Option<String>,
    /// CPU threads of the engine.
    #[arg(long, value_name = "N")]
    pub threads: Option<usize>,
}

/// Arguments of `kwire pull`.
#[derive(Debug, Clone, Args)]
#[command(after_help = "\
Examples:
  kwire pull smollm2
  kwire pull Qwen/Qwen2.5-0.5B-Instruct
  kwire pull bartowski/Qwen2.5-0.5B-Instruct-GGUF:Q4_K_M
  AWS_ENDPOINT_URL=http://minio:9000 kwire pull s3://models/qwen

HF_TOKEN, HF_HOME, HF_ENDPOINT and HF_HUB_OFFLINE are honoured, as are the AWS_ variables.")]
pub struct PullArgs {
    /// Hub id, s3:// prefix or alias.
    pub model: String,
    /// Where to keep it [default: the Hugging Face cache, or $KWIRE_HOME for s3].
    #[arg(long, value_name = "FOLDER")]
    pub download_dir: Option<PathBuf>,
}

/// Arguments of `kwire rm`.
#[derive(Debug, Clone, Args)]
pub struct RmArgs {
    /// As `kwire list` shows it.
    pub model: String,
    /// Don't ask.
    #[arg(short, long)]
    pub yes: bool,
}

/// A command line, and what the user should read before anything happens.
#[derive(Debug)]
pub struct Parsed {
    /// The command.
    pub command: Command,
    /// One line for each flag that had no effect.
    pub notices: Vec<String>,
    /// One line for each flag that is refused or unknown.
    pub faults: Vec<String>,
}

/// Parses the process's arguments. `--help`, `--version` and what clap can't read come back as its error, with the
/// faults that were found before.
pub fn parse(argv: &[String]) -> Result<Parsed, (Vec<String>, clap::Error)> {
    let (mut notices, mut faults) = (Vec::new(), Vec::new());
    let mut words = argv.to_vec();
    if argv.get(1).is_some_and(|w| w == "serve") {
        let spelled = spelling::spell(&serve_command(), &argv[2..]);
        words.truncate(2);
        words.extend(spelled.rest);
        (notices, faults) = (spelled.notices, spelled.faults);
    }
    match Cli::try_parse_from(words) {
        Ok(Cli { command }) => Ok(Parsed { command, notices, faults }),
        Err(e) => Err((faults, e)),
    }
}

/// The clap definition of `kwire serve`.
pub fn serve_command() -> clap::Command {
    let cli = Cli::command();
    cli.find_subcommand("serve").expect("the command exists").clone()
}

/// Parses the arguments of `serve` alone, without the pass for vLLM's spellings.
pub fn parse_serve<'a>(words: impl IntoIterator<Item = &'a str>) -> Result<ServeArgs, clap::Error> {
    let words = std::iter::once("serve").chain(words.into_iter().filter(|w| !w.is_empty()));
    ServeArgs::from_arg_matches(&serve_command().try_get_matches_from(words)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_definition_is_sound() {
        Cli::command().debug_assert();
    }

    #[test]
    fn no_compat_flag_shadows_a_real_one() {
        let serve = serve_command();
        let real: Vec<_> = serve.get_arguments().filter_map(clap::Arg::get_long).collect();
        let shadowed: Vec<_> = compat::FLAGS.iter().filter(|f| real.contains(&f.name)).map(|f| f.name).collect();
        assert!(shadowed.is_empty(), "{shadowed:?}");
    }
}
