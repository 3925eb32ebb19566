//! The server over the real engine with a simulated executor, whose tokens are a pure function of context and seed.

mod common;

use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use common::{ambient, model, read_answer, read_until, request, send, tokenizer};
use kwire_engine::cache::groups::KvGroup;
use kwire_engine::executor::{ExecutorInfo, sim::SimExecutor};
use kwire_engine::{Command, Engine, EngineHandle, Inspection, SchedulerConfig, SchedulingPolicy};
use kwire_kernels::{KvDtype, KvLayout};
use kwire_server::{Server, ServerConfig, report_channel};
use serde_json::{Value, json};

const MAX_MODEL_LEN: usize = 256;
const N_BLOCKS: usize = 120;

struct Whole {
    address: std::net::SocketAddr,
    engine: EngineHandle,
}

async fn start() -> Whole {
    let tokenizer = tokenizer("smollm");
    let layout = KvLayout { n_layers: 1, kv_heads: 1, head_dim: 1, block_len: 4, dtype: KvDtype::F32 };
    let groups = vec![KvGroup { layout, window: None, layers: vec![0] }];
    let info = ExecutorInfo { groups, n_blocks: vec![N_BLOCKS], n_vocab: tokenizer.n_tokens(), depth: 1 };
    let config = SchedulerConfig {
        max_num_seqs: 8,
        max_num_batched_tokens: 64,
        max_model_len: MAX_MODEL_LEN,
        chunked_prefill: true,
        long_prefill_token_threshold: 0,
        prefix_caching: true,
        policy: SchedulingPolicy::Fcfs,
    };
    let engine = Engine::new(config, SimExecutor::new(info, 8)).unwrap();
    let (handle, mailbox) = EngineHandle::new();
    let (sink, reports) = report_channel();
    std::thread::spawn(move || engine.run(&mailbox, || 0.0, sink).unwrap());
    let mut context = model(&tokenizer);
    context.max_model_len = MAX_MODEL_LEN;
    context.capacity.max_num_seqs = 8;
    let mut config = ServerConfig::default();
    config.admission.max_num_queued_reqs = Some(1000);
    let server = Server::new(config, ambient(&Arc::new(AtomicU64::new(0))));
    server.set_model(context, handle.clone(), reports);
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move { server.serve(listener, std::future::pending()).await });
    Whole { address, engine: handle }
}

impl Whole {
    async fn post(&self, body: &Value) -> common::Answer {
        let json = [("content-type", "application/json")];
        request(self.address, "POST", "/v1/completions", &json, Some(body.to_string().as_bytes())).await
    }

    async fn inspect(&self) -> Inspection {
        let (sender, receiver) = tokio::sync::oneshot::channel();
        let look = move |inspection: &Inspection| {
            let _ = sender.send(inspection.clone());
        };
        self.engine.send(Command::Inspect(Box::new(look))).unwrap();
        receiver.await.unwrap()
    }

    /// Waits until no request is left, and checks that none left anything behind.
    async fn check_idle(&self) {
        loop {
            let inspection = self.inspect().await;
            assert_eq!(inspection.integrity, Ok(()));
            if inspection.stats.running == 0 && inspection.stats.waiting == 0 {
                assert_eq!(inspection.blocks_in_use, 0);
                return;
            }
        }
    }
}

fn body(i: usize, extra: &Value) -> Value {
    let mut body = json!({"prompt": (0..1 + i * 7 % 90).map(|t| 3 + (t * (1 + i % 3)) % 500).collect::<Vec<_>>(),
        "max_tokens": 1 + i * 5 % 60, "seed": i, "n": 1 + i % 3, "ignore_eos": true});
    for (name, value) in extra.as_object().unwrap() {
        body[name] = value.clone();
    }
    body
}

#[tokio::test]
async fn answers_do_not_depend_on_company_or_on_streaming() {
    let server = Arc::new(start().await);
    let mut alone = Vec::new();
    for i in 0..24 {
        alone.push(server.post(&body(i, &json!({}))).await.json());
    }
    let mut together = Vec::new();
    for i in 0..24 {
        let server = Arc::clone(&server);
        together.push(tokio::spawn(async move { server.post(&body(i, &json!({"stream": true}))).await }));
    }
    for (i, task) in together.into_iter().enumerate() {
        let answer = task.await.unwrap();
        for choice in alone[i]["choices"].as_array().unwrap() {
            let index = choice["index"].as_u64().unwrap();
            assert_eq!(answer.text(index), choice["text"].as_str().unwrap(), "request {i}, choice {index}");
        }
    }
    server.check_idle().await;
}

#[tokio::test]
async fn clients_that_leave_at_any_moment_leave_nothing_behind() {
    let server = start().await;
    let mut kept = Vec::new();
    for i in 0..60_usize {
        let text = body(i, &json!({"stream": i % 2 == 0, "max_tokens": 100})).to_string();
        let json = [("content-type", "application/json")];
        let mut stream = send(server.address, "POST", "/v1/completions", &json, Some(text.as_bytes())).await;
        match i % 4 {
            0 => drop(read_until(&mut stream, "data: ").await), // and the stream is dropped
            1 => {}
            _ => kept.push(stream),
        }
    }
    for stream in kept {
        assert_eq!(read_answer(stream).await.status, 200);
    }
    server.check_idle().await;
}

#[tokio::test]
async fn a_stream_resumed_at_any_chunk_is_the_stream() {
    let server = start().await;
    let options = json!({"stream": true, "n": 1, "max_tokens": 60, "temperature": 1.0, "kwire": {"report": true},
        "stop": ["never in the text"], "seed": null});
    let whole = server.post(&body(5, &options)).await;
    let chunks = whole.chunks();
    let first = &chunks[0]["kwire"];
    let (mut tokens, mut sent) = (Vec::new(), String::new());
    for chunk in &chunks {
        tokens.extend(chunk["kwire"]["token_ids"].as_array().unwrap().iter().cloned());
        sent.push_str(chunk["choices"][0]["text"].as_str().unwrap());
        let resume = json!({"prompt_token_ids": first["prompt_token_ids"], "output_token_ids": tokens,
            "seed": first["seed"], "sent_chars": sent.chars().count()});
        let mut again = body(5, &options);
        again["kwire"]["resume"] = resume;
        let rest = server.post(&again).await;
        assert_eq!(format!("{sent}{}", rest.text(0)), whole.text(0));
        assert_eq!(rest.chunks().last().unwrap()["choices"][0]["finish_reason"], "length");
    }
    assert_eq!(tokens.len(), 60);
    server.check_idle().await;
}
