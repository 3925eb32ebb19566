//! The `kwire` binary: reads the command line, resolves settings and models, and wires the crates together.
//!
//! It holds no logic of serving: the engine, the server and the kernels are crates of their own, and only
//! [`launch`] and [`serve`] know how they fit. Errors end here, as one message on standard error and a non-zero exit status.

mod bench;
mod chat;
mod cli;
mod config;
mod http;
mod launch;
mod models;
mod output;
mod serve;

use std::process::ExitCode;

use cli::{Command, Parsed};
use config::environment::{Lookup, ProcessEnv};

/// Exit status for a command line that cannot be read, as clap has it.
const USAGE: u8 = 2;

fn main() -> ExitCode {
    let argv: Vec<String> = std::env::args_os().map(|a| a.to_string_lossy().into_owned()).collect();
    let parsed = match cli::parse(&argv) {
        Ok(parsed) => parsed,
        Err((faults, e)) => {
            if e.use_stderr() {
                faults.iter().for_each(|fault| eprintln!("error: {fault}"));
            }
            _ = e.print();
            return ExitCode::from(u8::try_from(e.exit_code()).unwrap_or(USAGE));
        }
    };
    match dispatch(parsed) {
        Ok(code) => code,
        Err(e) => {
            eprintln!("error: {}", explain(&e));
            ExitCode::FAILURE
        }
    }
}

fn dispatch(Parsed { command, notices, faults }: Parsed) -> anyhow::Result<ExitCode> {
    match command {
        Command::Serve(args) => return serve_command(&args, &notices, faults),
        Command::Run(args) => {
            log_to_stderr("warn");
            block_on(chat::run(args))?;
        }
        Command::Pull(args) => block_on(models::commands::pull(&args))?,
        Command::List => models::commands::list()?,
        Command::Rm(args) => models::commands::rm(&args)?,
        Command::Bench(args) => return block_on(bench::run(*args)),
        Command::Docs { page } if page == "flags" => output::print(cli::docs::flags_page())?,
        Command::Docs { page } => anyhow::bail!("no generated page is called {page:?}; there is: flags"),
    }
    Ok(ExitCode::SUCCESS)
}

fn serve_command(
    args: &cli::serve_args::ServeArgs,
    notices: &[String],
    mut faults: Vec<String>,
) -> anyhow::Result<ExitCode> {
    let resolved = match config::resolve(args, &ProcessEnv) {
        Ok(resolved) if faults.is_empty() => resolved,
        other => {
            faults.extend(other.err().unwrap_or_default());
            for fault in &faults {
                eprintln!("error: {fault}");
            }
            return Ok(ExitCode::from(USAGE));
        }
    };
    for notice in notices.iter().chain(&resolved.notices) {
        eprintln!("note: {notice}");
    }
    log_to_stderr("info");
    if resolved.config.dry_run {
        serve::dry_run(&resolved.config)?;
    } else {
        block_on(serve::serve(resolved.config))?;
    }
    Ok(ExitCode::SUCCESS)
}

/// An error and its causes; a cause that the message above it ends with is left out.
fn explain(e: &anyhow::Error) -> String {
    let mut text = String::new();
    for cause in e.chain().map(ToString::to_string).filter(|c| !c.is_empty()) {
        if !text.ends_with(&cause) {
            text += if text.is_empty() { "" } else { ": " };
            text += &cause;
        }
    }
    text
}

/// Sends log lines to standard error; `RUST_LOG` says which.
fn log_to_stderr(default: &str) {
    let filter = ProcessEnv.get("RUST_LOG").unwrap_or_else(|| default.to_owned());
    let filter = tracing_subscriber::EnvFilter::new(filter);
    let ansi = std::io::IsTerminal::is_terminal(&std::io::stderr());
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(ansi)
        .with_target(false)
        .init();
}

/// Runs `work` on a runtime of its own, and waits for nothing else: blocking work, such as the engine's, ends with the
/// process.
fn block_on<T>(work: impl Future<Output = anyhow::Result<T>>) -> anyhow::Result<T> {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let result = runtime.block_on(work);
    runtime.shutdown_background();
    result
}
