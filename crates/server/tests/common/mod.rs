//! A scripted engine behind a real server on a real socket, and a client that sees every byte.
#![allow(dead_code, reason = "each test file uses a part")]

use std::collections::{BTreeMap, VecDeque};
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, mpsc};
use std::time::Duration;

use kwire_engine::model::checkpoint::GenerationDefaults;
use kwire_engine::{
    Command, EngineHandle, Event, FinishReason, Inspection, ReportSink, Request, RequestId, StepReport, StepStats,
    TokenLogprobs,
};
use kwire_server::text::template::ContentFormat;
use kwire_server::text::{ChatTemplate, Tokenizer};
use kwire_server::{Ambient, Capacity, ModelContext, Server, ServerConfig, report_channel};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

/// What the engine does with a request.
#[derive(Clone)]
pub struct Script {
    /// Tokens of each sequence.
    pub tokens: Vec<u32>,
    /// Tokens per step, repeated from the start when used up.
    pub steps: Vec<usize>,
    /// Stops generating after this many tokens until `Command::ResetPrefixCache` comes.
    pub pause_after: Option<usize>,
    /// Fails after this many tokens.
    pub fail_after: Option<usize>,
    /// The thread dies after this many tokens.
    pub die_after: Option<usize>,
}

/// What the engine saw.
#[derive(Debug, Clone, PartialEq)]
pub enum Seen {
    Add { prompt: Vec<u32>, resumed: Vec<u32>, max_tokens: usize, seed: u64, tags: Vec<(u64, usize)> },
    End { sequence: Option<u32>, stopped: bool },
    Done,
}

struct Running {
    request: Box<Request>,
    script: Script,
    started: bool,
    steps: VecDeque<usize>,
    /// Per sequence: tokens so far, and whether it ended.
    sequences: Vec<(usize, bool)>,
    failed: bool,
}

/// Replays scripts until the last handle is dropped.
pub fn scripted_engine(
    mailbox: mpsc::Receiver<Command>,
    mut sink: ReportSink,
    script: impl Fn(&Request) -> Script + Send + 'static,
    seen: mpsc::Sender<Seen>,
    clock: Arc<AtomicU64>,
) -> std::thread::JoinHandle<()> {
    std::thread::spawn(move || {
        let mut running: Vec<Running> = Vec::new();
        let mut stats = StepStats::default();
        loop {
            let idle = running.iter().all(Running::paused);
            let first = if idle { mailbox.recv().ok() } else { mailbox.try_recv().ok() };
            if idle && first.is_none() {
                return;
            }
            let mut events = Vec::new();
            for command in first.into_iter().chain(std::iter::from_fn(|| mailbox.try_recv().ok())) {
                obey(command, &mut running, &mut events, &script, &seen, stats);
            }
            for run in &mut running {
                if run.dies() {
                    return;
                }
                run.step(&mut events, &mut stats);
            }
            for run in running.extract_if(.., |run| run.sequences.iter().all(|&(_, ended)| ended)) {
                events.push(Event::Done { id: run.request.id, preemptions: 0 });
                let _ = seen.send(Seen::Done);
            }
            stats.steps += 1;
            stats.running = running.len();
            let now = f64::from_bits(clock.load(Ordering::SeqCst));
            sink(StepReport { now, events, stats, prefixes: vec![] });
        }
    })
}

fn obey(
    command: Command,
    running: &mut Vec<Running>,
    events: &mut Vec<Event>,
    script: &impl Fn(&Request) -> Script,
    seen: &mpsc::Sender<Seen>,
    stats: StepStats,
) {
    match command {
        Command::Add(request) => {
            let _ = seen.send(Seen::Add {
                prompt: request.prompt.to_vec(),
                resumed: request.resumed.clone(),
                max_tokens: request.stop.max_tokens,
                seed: request.sampling.seed,
                tags: request.prefix_tags.iter().map(|tag| (tag.id, tag.end_token)).collect(),
            });
            let script = script(&request);
            let sequences = vec![(request.resumed.len(), false); request.n as usize];
            let steps = script.steps.iter().copied().collect();
            running.push(Running { request, script, started: false, steps, sequences, failed: false });
        }
        Command::End { id, sequence, stopped } => {
            let Some(run) = running.iter_mut().find(|run| run.request.id == id) else { return };
            let _ = seen.send(Seen::End { sequence, stopped });
            for (i, (_, ended)) in run.sequences.iter_mut().enumerate() {
                if sequence.is_none_or(|s| s as usize == i) && !*ended {
                    *ended = true;
                    let reason = if stopped { FinishReason::Stop { token: None } } else { FinishReason::Abort };
                    events.push(Event::Finished { id, sequence: i as u32, reason });
                }
            }
        }
        Command::ResetPrefixCache => running.iter_mut().for_each(|run| run.script.pause_after = None),
        Command::Ping(pong) => pong(),
        Command::Inspect(look) => look(&Inspection { stats, blocks_in_use: 0, n_blocks: 100, integrity: Ok(()) }),
    }
}

impl Running {
    fn paused(&self) -> bool {
        let most = self.sequences.iter().map(|&(n, _)| n).max().unwrap_or(0);
        self.started && self.script.pause_after.is_some_and(|limit| most >= limit)
    }

    fn dies(&self) -> bool {
        self.script.die_after.is_some_and(|limit| self.sequences[0].0 >= limit)
    }

    fn step(&mut self, events: &mut Vec<Event>, stats: &mut StepStats) {
        let id = self.request.id;
        if !self.started {
            self.started = true;
            stats.prompt_tokens += self.request.prompt.len() as u64;
            stats.prefix_hits += 1;
            events.push(Event::Started { id, cached_tokens: 1 });
            if let Some(k) = self.request.prompt_logprobs {
                let logprobs = self.request.prompt[1..].iter().map(|&t| logprob(t, k)).collect();
                events.push(Event::PromptLogprobs { id, logprobs });
            }
        }
        if self.paused() {
            return;
        }
        let step = self.steps.pop_front().unwrap_or(1);
        self.steps.push_back(step);
        for sequence in 0..self.sequences.len() {
            self.grow(id, sequence, step, events, stats);
        }
    }

    fn grow(&mut self, id: RequestId, sequence: usize, step: usize, events: &mut Vec<Event>, stats: &mut StepStats) {
        let (count, ended) = self.sequences[sequence];
        if ended {
            return;
        }
        let stop = &self.request.stop;
        let mut tokens = Vec::new();
        let mut end = None;
        for i in count..count + step {
            if self.script.fail_after.is_some_and(|limit| i >= limit) {
                end = Some(FinishReason::Error("the logits are not numbers".to_owned()));
                break;
            }
            let token = self.script.tokens.get(i).copied().unwrap_or(EOS);
            tokens.push(token);
            if stop.stop_token_ids.contains(&token) {
                end = Some(FinishReason::Stop { token: Some(token) });
                break;
            }
            if i + 1 == stop.max_tokens {
                end = Some(FinishReason::Length);
                break;
            }
        }
        stats.generation_tokens += tokens.len() as u64;
        self.sequences[sequence] = (count + tokens.len(), end.is_some());
        let sequence = sequence as u32;
        if !tokens.is_empty() {
            let k = self.request.sampling.logprobs;
            let logprobs = k.map(|k| tokens.iter().map(|&t| logprob(t, k)).collect()).unwrap_or_default();
            events.push(Event::Tokens { id, sequence, tokens, logprobs });
        }
        if let Some(reason) = end {
            events.push(Event::Finished { id, sequence, reason });
        }
    }
}

/// The drawn token is the second best, so that it shows.
fn logprob(token: u32, k: u32) -> TokenLogprobs {
    let top = [(token + 1, -0.25), (token, -1.5), (token + 2, f32::NEG_INFINITY)];
    TokenLogprobs { sampled: -1.5, rank: 2, top: top.into_iter().take(k as usize).collect() }
}

/// `<|im_end|>` of the fixture.
pub const EOS: u32 = 2;

pub fn fixtures(path: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../fixtures").join(path)
}

pub fn tokenizer(name: &str) -> Arc<Tokenizer> {
    Arc::new(Tokenizer::from_file(&fixtures(&format!("tokenizers/{name}.tokenizer.json"))).unwrap())
}

/// A server with a scripted engine.
pub struct Fixture {
    pub server: Server,
    pub address: SocketAddr,
    pub tokenizer: Arc<Tokenizer>,
    pub seen: mpsc::Receiver<Seen>,
    pub engine: EngineHandle,
    pub clock: Arc<AtomicU64>,
    pub shutdown: tokio::sync::watch::Sender<bool>,
    pub served: tokio::task::JoinHandle<()>,
}

pub fn ambient(clock: &Arc<AtomicU64>) -> Ambient {
    let clock = Arc::clone(clock);
    Ambient::new(move || f64::from_bits(clock.load(Ordering::SeqCst)), || 1_700_000_000, 42, 7)
}

pub fn model(tokenizer: &Arc<Tokenizer>) -> ModelContext {
    let special = [("bos_token", "<|im_start|>"), ("eos_token", "<|im_end|>")];
    let special: BTreeMap<String, String> = special.map(|(k, v)| (k.to_owned(), v.to_owned())).into();
    let source = std::fs::read_to_string(fixtures("templates/chatml.jinja")).unwrap();
    ModelContext {
        names: vec!["tiny".to_owned(), "alias".to_owned()],
        root: "/models/tiny".to_owned(),
        tokenizer: Arc::clone(tokenizer),
        template: Some(ChatTemplate::new(&source, special, ContentFormat::Auto).unwrap()),
        max_model_len: 4096,
        n_vocab: tokenizer.n_tokens(),
        eos_token_ids: vec![EOS],
        generation: GenerationDefaults::default(),
        capacity: Capacity { max_num_seqs: 64, block_size: 16, n_blocks: 1000, cache_labels: vec![] },
    }
}

impl Fixture {
    /// A server that answers everything with `text`, a token a step.
    pub async fn answering(text: &str) -> Self {
        let tokens = tokenizer("smollm").encode(text, false).unwrap();
        let mut config = ServerConfig::default();
        config.admission.max_num_queued_reqs = Some(256);
        Self::with(config, move |_| Script::of(tokens.clone())).await
    }

    pub async fn with(config: ServerConfig, script: impl Fn(&Request) -> Script + Send + 'static) -> Self {
        Self::with_model(config, |_| {}, script).await
    }

    pub async fn with_model(
        config: ServerConfig,
        change: impl FnOnce(&mut ModelContext),
        script: impl Fn(&Request) -> Script + Send + 'static,
    ) -> Self {
        let clock = Arc::new(AtomicU64::new(0.0_f64.to_bits()));
        let server = Server::new(config, ambient(&clock));
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let (shutdown, mut stopped) = tokio::sync::watch::channel(false);
        let serving = server.clone();
        let served = tokio::spawn(async move {
            let until = async move {
                let _ = stopped.wait_for(|&stop| stop).await;
            };
            serving.serve(listener, until).await.unwrap();
        });
        let tokenizer = tokenizer("smollm");
        let (engine, mailbox) = EngineHandle::new();
        let (sink, reports) = report_channel();
        let (sees, seen) = mpsc::channel();
        scripted_engine(mailbox, sink, script, sees, Arc::clone(&clock));
        let mut context = model(&tokenizer);
        change(&mut context);
        server.set_model(context, engine.clone(), reports);
        Self { server, address, tokenizer, seen, engine, clock, shutdown, served }
    }

    /// The next thing the engine saw.
    pub async fn next_seen(&self) -> Seen {
        loop {
            match self.seen.try_recv() {
                Ok(seen) => return seen,
                Err(mpsc::TryRecvError::Empty) => tokio::task::yield_now().await,
                Err(mpsc::TryRecvError::Disconnected) => panic!("the engine thread ended"),
            }
        }
    }

    pub async fn get(&self, path: &str) -> Answer {
        request(self.address, "GET", path, &[], None).await
    }

    pub async fn post(&self, path: &str, body: &serde_json::Value) -> Answer {
        let body = body.to_string();
        request(self.address, "POST", path, &[("content-type", "application/json")], Some(body.as_bytes())).await
    }

    /// Sends a request without reading the answer.
    pub async fn open(&self, path: &str, body: &serde_json::Value) -> TcpStream {
        let body = body.to_string();
        send(self.address, "POST", path, &[("content-type", "application/json")], Some(body.as_bytes())).await
    }
}

impl Script {
    pub fn of(tokens: Vec<u32>) -> Self {
        Self { tokens, steps: vec![1], pause_after: None, fail_after: None, die_after: None }
    }
}

/// An answer, with the chunks of its body put together.
#[derive(Debug)]
pub struct Answer {
    pub status: u16,
    pub headers: String,
    pub body: String,
}

impl Answer {
    pub fn json(&self) -> serde_json::Value {
        serde_json::from_str(&self.body).unwrap_or_else(|e| panic!("{e}: {}", self.body))
    }

    /// The payloads of the events.
    pub fn events(&self) -> Vec<&str> {
        self.body.split("\n\n").filter(|e| !e.is_empty()).map(|e| e.strip_prefix("data: ").unwrap()).collect()
    }

    pub fn chunks(&self) -> Vec<serde_json::Value> {
        self.events().into_iter().filter(|e| *e != "[DONE]").map(|e| serde_json::from_str(e).unwrap()).collect()
    }

    /// The text of choice `index`, from chunks.
    pub fn text(&self, index: u64) -> String {
        let mut text = String::new();
        for chunk in self.chunks() {
            for choice in chunk["choices"].as_array().unwrap() {
                if choice["index"] == index {
                    let piece = choice["delta"]["content"].as_str().or(choice["text"].as_str());
                    text.push_str(piece.unwrap());
                }
            }
        }
        text
    }
}

pub async fn send(
    address: SocketAddr,
    method: &str,
    path: &str,
    headers: &[(&str, &str)],
    body: Option<&[u8]>,
) -> TcpStream {
    let mut stream = TcpStream::connect(address).await.unwrap();
    let mut head = format!("{method} {path} HTTP/1.1\r\nhost: test\r\nconnection: close\r\n");
    for (name, value) in headers {
        head.push_str(&format!("{name}: {value}\r\n"));
    }
    if let Some(body) = body {
        head.push_str(&format!("content-length: {}\r\n", body.len()));
    }
    head.push_str("\r\n");
    stream.write_all(head.as_bytes()).await.unwrap();
    if let Some(body) = body {
        let _ = stream.write_all(body).await; // the server may refuse before it has read everything
    }
    stream
}

pub async fn request(
    address: SocketAddr,
    method: &str,
    path: &str,
    headers: &[(&str, &str)],
    body: Option<&[u8]>,
) -> Answer {
    read_answer(send(address, method, path, headers, body).await).await
}

/// Reads until the server closes.
pub async fn read_answer(mut stream: TcpStream) -> Answer {
    let mut bytes = Vec::new();
    let read = async {
        let mut buffer = [0; 8192];
        while let Ok(n) = stream.read(&mut buffer).await {
            if n == 0 {
                break;
            }
            bytes.extend_from_slice(&buffer[..n]);
        }
    };
    // A guard against hanging, not a measurement.
    tokio::time::timeout(Duration::from_secs(60), read).await.expect("the server did not finish its answer");
    let end = bytes.windows(4).position(|w| w == b"\r\n\r\n").expect("no head in the answer");
    let headers = String::from_utf8(bytes[..end].to_vec()).unwrap().to_lowercase();
    let status = headers[9..12].parse().unwrap();
    let body = &bytes[end + 4..];
    let body = if headers.contains("transfer-encoding: chunked") { unchunk(body) } else { body.to_vec() };
    Answer { status, headers, body: String::from_utf8(body).unwrap() }
}

fn unchunk(mut bytes: &[u8]) -> Vec<u8> {
    let mut out = Vec::new();
    while let Some(line) = bytes.windows(2).position(|w| w == b"\r\n") {
        let n = usize::from_str_radix(std::str::from_utf8(&bytes[..line]).unwrap(), 16).unwrap();
        if n == 0 {
            break;
        }
        out.extend_from_slice(&bytes[line + 2..line + 2 + n]);
        bytes = &bytes[line + 2 + n + 2..];
    }
    out
}

/// Reads until `needle` has come.
pub async fn read_until(stream: &mut TcpStream, needle: &str) -> String {
    let mut text = Vec::new();
    let mut buffer = [0; 1024];
    while !String::from_utf8_lossy(&text).contains(needle) {
        let n = stream.read(&mut buffer).await.unwrap();
        assert!(n > 0, "closed before {needle:?} in {:?}", String::from_utf8_lossy(&text));
        text.extend_from_slice(&buffer[..n]);
    }
    String::from_utf8_lossy(&text).into_owned() // it may end within a character
}
