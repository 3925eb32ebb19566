//! `kwire run`: one question or a conversation, over the same HTTP API that clients use.
//!
//! The engine runs in this process behind a loopback port, or elsewhere (`--url`). Ctrl-C stops the answer, not the
//! program; at an empty prompt it leaves.

use std::io::{IsTerminal, Read, Write};

use anyhow::{Context, Result, bail};
use serde_json::{Value, json};

use crate::cli::RunArgs;
use crate::config::environment::ProcessEnv;
use crate::http::{self, SseReader};
use crate::{cli, config, serve};

/// Runs the command.
pub async fn run(args: RunArgs) -> Result<()> {
    let client = http::client().build()?;
    let (base, model, _running) = match &args.url {
        Some(url) => {
            let base = http::base_url(url).to_owned();
            let model = match &args.model {
                Some(model) => model.clone(),
                None => http::first_model(&client, &base, args.api_key.as_deref()).await?,
            };
            (base, model, None)
        }
        None => {
            let model = args.model.clone().context("which model? For a first try: kwire run smollm2")?;
            let running = start_engine(&args, &model).await?;
            (running.base_url.clone(), model, Some(running))
        }
    };
    let mut chat = Chat { client, base, model, messages: Vec::new(), args };
    chat.reset();
    match chat.args.prompt.join(" ") {
        prompt if prompt == "-" => {
            let mut text = String::new();
            std::io::stdin().read_to_string(&mut text)?;
            chat.ask_once(text.trim()).await
        }
        prompt if prompt.is_empty() => chat.converse().await,
        prompt => chat.ask_once(&prompt).await,
    }
}

/// An engine for one user, behind a loopback port.
async fn start_engine(args: &RunArgs, model: &str) -> Result<serve::Running> {
    let mut serve_args = cli::parse_serve([model, "--host", "127.0.0.1", "--port", "0", "--max-num-seqs", "4"])?;
    serve_args.threads = args.threads.map(|n| n.to_string());
    let resolved = config::resolve(&serve_args, &ProcessEnv).map_err(|faults| anyhow::anyhow!(faults.join("\n")))?;
    let mut config = resolved.config;
    config.listen.api_keys.clear();
    serve::start(config).await
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

    async fn converse(&mut self) -> Result<()> {
        if std::io::stdin().is_terminal() {
            eprintln!("{}: Ctrl-C stops an answer, Ctrl-D leaves, /clear starts anew", self.model);
        }
        loop {
            eprint!("> ");
            let line = tokio::select! {
                line = tokio::task::spawn_blocking(read_line) => line??,
                _ = tokio::signal::ctrl_c() => None,
            };
            let Some(line) = line else {
                eprintln!();
                // The reader thread may still wait for a line: leave without it.
                std::process::exit(0);
            };
            match line.trim() {
                "" => {}
                "/clear" => self.reset(),
                "/exit" | "/quit" | "/bye" => return Ok(()),
                prompt => {
                    if let Err(e) = self.answer(prompt).await {
                        eprintln!("error: {e:#}");
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
            println!();
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
                print!("{piece}");
                std::io::stdout().flush()?;
                text.push_str(piece);
            }
        }
        bail!("the stream ended early")
    }
}

/// A line of standard input; `None` at its end.
fn read_line() -> std::io::Result<Option<String>> {
    let mut line = String::new();
    Ok((std::io::stdin().read_line(&mut line)? > 0).then_some(line))
}

/// The message of an OpenAI error body, or the body.
fn error_message(body: &str) -> String {
    let json: Value = serde_json::from_str(body).unwrap_or_default();
    json["error"]["message"].as_str().unwrap_or(body).to_owned()
}
