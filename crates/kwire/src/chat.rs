//! `kwire run`: one question or a conversation, over the same HTTP API that clients use.
//!
//! The engine runs in this process behind a loopback port, or elsewhere (`--url`). Ctrl-C stops the answer, not the
//! program; at an empty prompt it leaves. A fault of the engine ends the program.

use std::future::pending;
use std::io::{IsTerminal, Read};

use anyhow::{Context, Result, bail};
use serde_json::{Value, json};
use tokio::sync::mpsc;

use crate::cli::RunArgs;
use crate::config::ServeConfig;
use crate::config::environment::{Lookup, ProcessEnv};
use crate::http::{self, SseReader};
use crate::{cli, config, output, serve};

/// Runs the command.
pub async fn run(args: RunArgs) -> Result<()> {
    let client = http::client().build()?;
    let (base, model, mut running) = match &args.url {
        Some(url) => {
            let base = http::base_url(url).to_owned();
            let model = match &args.model {
                // The server itself tells who asks a model that it lacks; a conversation would only find out later.
                Some(model) if !args.prompt.is_empty() => model.clone(),
                wanted => http::served_model(&client, &base, args.api_key.as_deref(), wanted.as_deref()).await?,
            };
            (base, model, None)
        }
        None => {
            let model = args.model.clone().context("which model? For a first try: kwire run smollm2")?;
            let running = serve::start(engine_config(&args, &model, &ProcessEnv)?).await?;
            (running.base_url.clone(), model, Some(running))
        }
    };
    let fault = async {
        match &mut running {
            Some(running) => running.fault().await,
            None => pending().await,
        }
    };
    let mut chat = Chat { client, base, model, messages: Vec::new(), args };
    chat.reset();
    let talk = async {
        match chat.args.prompt.join(" ") {
            prompt if prompt == "-" => {
                let mut text = String::new();
                std::io::stdin().read_to_string(&mut text)?;
                chat.ask_once(text.trim()).await
            }
            prompt if prompt.is_empty() => chat.converse(lines_of_stdin()).await,
            prompt => chat.ask_once(&prompt).await,
        }
    };
    unless(fault, talk).await
}

/// The result of `talk`, or the fault that ends the engine before.
async fn unless(fault: impl Future<Output = anyhow::Error>, talk: impl Future<Output = Result<()>>) -> Result<()> {
    tokio::select! {
        biased;
        done = talk => done,
        fault = fault => Err(fault),
    }
}

/// An engine for one user, behind a loopback port, with as long a context as memory allows.
fn engine_config(args: &RunArgs, model: &str, env: &impl Lookup) -> Result<ServeConfig> {
    let mut serve_args =
        cli::parse_serve([model, "--host=127.0.0.1", "--port=0", "--max-num-seqs=4", "--max-model-len=auto"])?;
    serve_args.threads = args.threads.map(|n| n.to_string());
    let resolved = config::resolve(&serve_args, env).map_err(|faults| anyhow::anyhow!(faults.join("\n")))?;
    let mut config = resolved.config;
    config.listen.api_keys.clear();
    Ok(config)
}

/// How an answer ended.
#[derive(Debug, PartialEq, Eq)]
enum Ended {
    Whole,
    Stopped,
}

struct Chat {
    client: reqwest::Client,
    base: String,
    model: String,
    messages: Vec<Value>,
    args: RunArgs,
}

impl Chat {
    fn reset(&mut self) {
        let system = self.args.system.iter().map(|s| json!({"role": "system", "content": s}));
        self.messages = system.collect();
    }

    async fn ask_once(&mut self, prompt: &str) -> Result<()> {
        match self.answer(prompt).await? {
            Ended::Whole => Ok(()),
            Ended::Stopped => bail!("stopped"),
        }
    }

    async fn converse(&mut self, mut lines: mpsc::Receiver<String>) -> Result<()> {
        if std::io::stdin().is_terminal() {
            eprintln!("{}: Ctrl-C stops an answer, Ctrl-D leaves, /clear starts anew", self.model);
        }
        loop {
            eprint!("> ");
            let line = tokio::select! {
                line = lines.recv() => line,
                _ = tokio::signal::ctrl_c() => None,
            };
            let Some(line) = line else {
                eprintln!();
                return Ok(());
            };
            match line.trim() {
                "" => {}
                "/clear" => self.reset(),
                "/exit" | "/quit" | "/bye" => return Ok(()),
                prompt => {
                    if let Err(e) = self.answer(prompt).await {
                        eprintln!("error: {}", crate::explain(&e));
                    }
                }
            }
        }
    }

    /// Asks, and prints the answer as it comes. A stopped answer stays in the conversation as far as it went.
    async fn answer(&mut self, prompt: &str) -> Result<Ended> {
        self.messages.push(json!({"role": "user", "content": prompt}));
        let mut text = String::new();
        let ended = tokio::select! {
            ended = self.stream(&mut text) => ended,
            _ = tokio::signal::ctrl_c() => Ok(Ended::Stopped),
        };
        if !text.is_empty() {
            output::line("")?;
        }
        match ended {
            Ok(ended) => {
                self.messages.push(json!({"role": "assistant", "content": text}));
                Ok(ended)
            }
            Err(e) => {
                self.messages.pop();
                Err(e)
            }
        }
    }

    async fn stream(&self, text: &mut String) -> Result<Ended> {
        let mut body = json!({"model": self.model, "stream": true, "messages": self.messages});
        let options = [
            ("max_tokens", self.args.max_tokens.map(Value::from)),
            ("temperature", self.args.temperature.map(Value::from)),
            ("seed", self.args.seed.map(Value::from)),
        ];
        for (name, value) in options {
            if let Some(value) = value {
                body[name] = value;
            }
        }
        let url = format!("{}/v1/chat/completions", self.base);
        let mut request = self.client.post(&url).header("content-type", "application/json").body(body.to_string());
        if let Some(key) = &self.args.api_key {
            request = request.bearer_auth(key);
        }
        let mut response = request.send().await.with_context(|| format!("no server answers at {}", self.base))?;
        if !response.status().is_success() {
            bail!("{}: {}", response.status(), error_message(&response.text().await?));
        }
        let mut events = SseReader::default();
        while let Some(bytes) = response.chunk().await? {
            for data in events.feed(&bytes) {
                if data == "[DONE]" {
                    return Ok(Ended::Whole);
                }
                let event: Value = serde_json::from_str(&data).context("the stream is not JSON")?;
                if !event["error"].is_null() {
                    bail!("{}", error_message(&data));
                }
                let piece = event["choices"][0]["delta"]["content"].as_str().unwrap_or_default();
                output::print(piece)?;
                text.push_str(piece);
            }
        }
        bail!("the stream ended early")
    }
}

/// The lines of standard input. The thread that waits for the next one ends with the process.
fn lines_of_stdin() -> mpsc::Receiver<String> {
    let (sender, lines) = mpsc::channel(1);
    std::thread::spawn(move || {
        let read = std::io::stdin().lines().map_while(Result::ok);
        read.map_while(|line| sender.blocking_send(line).ok()).for_each(drop);
    });
    lines
}

/// The message of an OpenAI error body, or the body.
fn error_message(body: &str) -> String {
    let json: Value = serde_json::from_str(body).unwrap_or_default();
    json["error"]["message"].as_str().unwrap_or(body).to_owned()
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    fn args(line: &str) -> RunArgs {
        match cli::Cli::parse_from(line.split(' ')).command {
            cli::Command::Run(args) => args,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_context_beyond_the_memory_is_cut() {
        let env: &[(&str, &str)] = &[("VLLM_API_KEY", "k")];
        let config = engine_config(&args("kwire run smollm2 --threads 1"), "smollm2", &env).unwrap();
        assert_eq!(config.engine.max_model_len, config::MaxModelLen::Fit);
        assert_eq!((config.engine.threads, config.listen.port), (Some(1), 0));
        assert!(config.listen.api_keys.is_empty(), "it talks to itself");
    }

    #[tokio::test]
    async fn a_fault_of_the_engine_ends_a_conversation_that_waits() {
        let client = http::client().build().unwrap();
        let args = args("kwire run m");
        let mut chat = Chat { client, base: String::new(), model: "m".into(), messages: Vec::new(), args };
        let (_open, lines) = mpsc::channel(1);
        let fault = async { anyhow::anyhow!("the engine failed") };
        let ended = unless(fault, chat.converse(lines)).await;
        assert_eq!(ended.unwrap_err().to_string(), "the engine failed");
    }
}
