//! How much CPU time a token costs between the engine thread and the socket: many streams against an engine that only
//! counts. `cargo run --release -p kwire-server --example flood -- STREAMS TOKENS FIXTURE.tokenizer.json`

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use kwire_engine::model::checkpoint::GenerationDefaults;
use kwire_engine::{Command, EngineHandle, Event, FinishReason, StepReport, StepStats};
use kwire_server::text::template::ContentFormat;
use kwire_server::text::{ChatTemplate, Tokenizer};
use kwire_server::{Ambient, Capacity, ModelContext, Server, ServerConfig, report_channel};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

#[allow(clippy::disallowed_methods, reason = "an example may read the clock")]
fn main() {
    let args: Vec<String> = std::env::args().collect();
    let (n_streams, n_tokens): (usize, usize) = (args[1].parse().unwrap(), args[2].parse().unwrap());
    let tokenizer = Arc::new(Tokenizer::from_file(Path::new(&args[3])).unwrap());
    let begin = Instant::now();
    let ambient = Ambient::new(move || begin.elapsed().as_secs_f64(), || 0, 1);
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let mut config = ServerConfig::default();
    config.admission.max_num_queued_reqs = Some(n_streams);
    let server = Server::new(config, ambient);
    let (engine, mailbox) = EngineHandle::new();
    let (mut sink, reports) = report_channel();
    let thread = std::thread::spawn(move || {
        let mut requests = Vec::new();
        while requests.len() < n_streams {
            match mailbox.recv().unwrap() {
                Command::Add(request) => requests.push(request),
                _ => return 0.0,
            }
        }
        let cpu = cpu_s();
        for i in 0..n_tokens {
            let last = i + 1 == n_tokens;
            let mut events = Vec::new();
            for request in &requests {
                let id = request.id;
                events.push(Event::Tokens { id, sequence: 0, tokens: vec![300 + (i % 200) as u32], logprobs: vec![] });
                if last {
                    events.push(Event::Finished { id, sequence: 0, reason: FinishReason::Length });
                    events.push(Event::Done { id, preemptions: 0 });
                }
            }
            let now = begin.elapsed().as_secs_f64();
            let (prefixes_stored, prefixes_evicted) = (vec![], vec![]);
            sink(StepReport { now, events, stats: StepStats::default(), prefixes_stored, prefixes_evicted });
            // A step's time, so that tokens are not merged.
            std::thread::sleep(std::time::Duration::from_millis(20));
        }
        cpu
    });
    let source = "{% for m in messages %}{{ m.content }}{% endfor %}";
    let template = ChatTemplate::new(source, BTreeMap::new(), ContentFormat::Auto).unwrap();
    let before = runtime.block_on(async {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let model = ModelContext {
            names: vec!["m".to_owned()],
            root: String::new(),
            n_vocab: tokenizer.n_tokens(),
            tokenizer,
            template: Some(template),
            max_model_len: 1 << 20,
            eos_token_ids: vec![],
            generation: GenerationDefaults::default(),
            capacity: Capacity { max_num_seqs: n_streams, ..Capacity::default() },
        };
        server.set_model(model, engine, reports);
        let serving = server.clone();
        tokio::spawn(async move { serving.serve(listener, std::future::pending()).await });
        let body =
            format!(r#"{{"messages":[{{"role":"user","content":"hi"}}],"stream":true,"max_tokens":{n_tokens}}}"#);
        let mut clients = Vec::new();
        for _ in 0..n_streams {
            let body = body.clone();
            clients.push(tokio::spawn(async move {
                let mut stream = tokio::net::TcpStream::connect(address).await.unwrap();
                let head = "POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\n";
                let request = format!("{head}content-length: {}\r\n\r\n{body}", body.len());
                stream.write_all(request.as_bytes()).await.unwrap();
                let mut buffer = vec![0; 16384];
                let (mut n_bytes, mut n_reads) = (0, 0);
                while let Ok(n @ 1..) = stream.read(&mut buffer).await {
                    n_bytes += n;
                    n_reads += 1;
                }
                (n_bytes, n_reads)
            }));
        }
        let (mut n_bytes, mut n_reads) = (0, 0);
        for client in clients {
            let (bytes, reads) = client.await.unwrap();
            n_bytes += bytes;
            n_reads += reads;
        }
        println!("{n_bytes} bytes in {n_reads} pieces");
        thread.join().unwrap()
    });
    let cpu = cpu_s() - before;
    let n = (n_streams * n_tokens) as f64;
    println!(
        "{:.2} µs of CPU a token, the client's side counted in; {:.0} tokens/s offered",
        cpu / n * 1e6,
        n_streams as f64 / 0.02
    );
}

/// User and system time of this process, from `/proc/self/stat` in ticks of 10 ms.
fn cpu_s() -> f64 {
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap();
    let fields: Vec<&str> = stat.rsplit(") ").next().unwrap().split(' ').collect();
    (fields[11].parse::<f64>().unwrap() + fields[12].parse::<f64>().unwrap()) / 100.0
}
