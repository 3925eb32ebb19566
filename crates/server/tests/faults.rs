//! What goes wrong: bad requests, lost clients, a full queue, a failing engine, the end of the server.

mod common;

use std::sync::atomic::Ordering;
use std::sync::{Arc, atomic::AtomicU64};

use common::{Fixture, Script, Seen, ambient, model, read_answer, read_until, request};
use kwire_engine::{Command, EngineHandle};
use kwire_server::config::UnknownFields;
use kwire_server::{Server, ServerConfig, report_channel};
use serde_json::{Value, json};

const CHAT: &str = "/v1/chat/completions";
const COMPLETIONS: &str = "/v1/completions";

#[tokio::test]
async fn bad_requests_name_their_parameter() {
    let fixture = Fixture::answering("x").await;
    let user = json!([{"role": "user", "content": "Hi"}]);
    let with = |name: &str, value: Value| {
        let mut body = json!({"messages": user, "prompt": "Hi"});
        body[name] = value;
        body
    };
    let resumed = |name: &str, value: Value| {
        let mut body = with(name, value);
        body["kwire"] =
            json!({"resume": {"prompt_token_ids": [5], "output_token_ids": [6], "seed": 1, "sent_chars": 0}});
        body
    };
    #[rustfmt::skip]
    let table: Vec<(&str, Value, u16, &str)> = vec![
        (CHAT, json!([]), 400, ""),
        (CHAT, json!({}), 400, "messages"),
        (CHAT, with("messages", json!([])), 400, "messages"),
        (CHAT, with("messages", json!("Hi")), 400, "messages"),
        (CHAT, with("messages", json!(["Hi"])), 400, "messages[0]"),
        (CHAT, with("messages", json!([{"content": "Hi"}])), 400, "messages[0].role"),
        (CHAT, with("messages", json!([{"role": 3}])), 400, "messages[0].role"),
        (CHAT, with("messages", json!([{"role": "user", "content": 3}])), 400, "messages[0].content"),
        (CHAT, with("messages", json!([{"role": "user", "content": "a"}, {"role": "user", "content": [{"type": "image_url"}]}])), 400, "messages[1].content[0].type"),
        (CHAT, with("messages", json!([{"role": "user", "content": [{"type": "text"}]}])), 400, "messages[0].content[0].text"),
        (CHAT, with("model", json!("other")), 404, "model"),
        (CHAT, with("model", json!(3)), 400, "model"),
        (CHAT, with("temperature", json!(1e300)), 400, "temperature"),
        (CHAT, with("temperature", json!(-1)), 400, "temperature"),
        (CHAT, with("temperature", json!("hot")), 400, "temperature"),
        (CHAT, with("top_p", json!(0)), 400, "top_p"),
        (CHAT, with("top_p", json!(1.5)), 400, "top_p"),
        (CHAT, with("top_k", json!(-2)), 400, "top_k"),
        (CHAT, with("top_k", json!(1.5)), 400, "top_k"),
        (CHAT, with("min_p", json!(2)), 400, "min_p"),
        (CHAT, with("n", json!(0)), 400, "n"),
        (CHAT, with("n", json!(1_000_000)), 400, "n"),
        (CHAT, with("n", json!(100)), 400, "n"),
        (COMPLETIONS, with("prompt", json!(vec!["x"; 300])), 400, "prompt"),
        (CHAT, with("max_tokens", json!(0)), 400, "max_tokens"),
        (CHAT, with("max_completion_tokens", json!(5000)), 400, "max_completion_tokens"),
        (CHAT, with("min_tokens", json!(5000)), 400, "min_tokens"),
        (CHAT, with("seed", json!("x")), 400, "seed"),
        (CHAT, with("presence_penalty", json!(3)), 400, "presence_penalty"),
        (CHAT, with("repetition_penalty", json!(0)), 400, "repetition_penalty"),
        (CHAT, with("logit_bias", json!({"x": 1})), 400, "logit_bias.x"),
        (CHAT, with("logit_bias", json!({"99999999": 1})), 400, "logit_bias.99999999"),
        (CHAT, with("stop", json!([""])), 400, "stop"),
        (CHAT, with("stop", json!(["a", 3])), 400, "stop[1]"),
        (CHAT, with("stop_token_ids", json!([1, -1])), 400, "stop_token_ids[1]"),
        (CHAT, with("top_logprobs", json!(5)), 400, "top_logprobs"),
        (CHAT, with("top_logprobs", json!(21)), 400, "top_logprobs"),
        (CHAT, with("stream_options", json!({"include_usage": true})), 400, "stream_options"),
        (CHAT, with("stream", json!("yes")), 400, "stream"),
        (CHAT, with("tools", json!([{"type": "function"}])), 400, "tools"),
        (CHAT, with("tool_choice", json!("required")), 400, "tool_choice"),
        (CHAT, with("response_format", json!({"type": "json_object"})), 400, "response_format"),
        (CHAT, with("audio", json!({"voice": "x"})), 400, "audio"),
        (CHAT, with("chat_template", json!("{{ 1 }}")), 400, "chat_template"),
        (CHAT, with("cache_salt", json!("")), 400, "cache_salt"),
        (CHAT, with("kwire", json!({"resume": 3})), 400, "kwire"),
        (CHAT, with("kwire", json!({"prefixes": vec![json!({"id": 1, "end": 1}); 1025]})), 400, "kwire.prefixes"),
        (CHAT, resumed("prompt_logprobs", json!(1)), 400, "prompt_logprobs"),
        (COMPLETIONS, resumed("prompt_logprobs", json!(0)), 400, "prompt_logprobs"),
        (COMPLETIONS, { let mut body = resumed("echo", json!(true)); body["logprobs"] = json!(1); body }, 400, "echo"),
        (CHAT, with("messages", json!([{"role": "user", "content": "x".repeat(10_000_000)}])), 400, "messages"),
        ("/tokenize", json!({"prompt": "x".repeat(10_000_000)}), 400, "prompt"),
        ("/tokenize", json!({"messages": [{"role": "user", "content": "x".repeat(10_000_000)}]}), 400, "messages"),
        ("/tokenize", json!({"prompt": "Hi", "model": "other"}), 404, "model"),
        ("/tokenize", json!({"prompt": 3}), 400, "prompt"),
        ("/detokenize", json!({"tokens": "x"}), 400, "tokens"),
        (COMPLETIONS, json!({}), 400, "prompt"),
        (COMPLETIONS, with("prompt", json!([])), 400, "prompt"),
        (COMPLETIONS, with("prompt", json!({})), 400, "prompt"),
        (COMPLETIONS, with("prompt", json!(["a", true])), 400, "prompt[1]"),
        (COMPLETIONS, with("prompt", json!([1, 2, "x"])), 400, "prompt[2]"),
        (COMPLETIONS, with("prompt", json!([[1], [2, 1_000_000]])), 400, "prompt[1][1]"),
        (COMPLETIONS, with("prompt", json!(vec![1; 5000])), 400, "prompt"),
        (COMPLETIONS, with("prompt", json!("word ".repeat(5000))), 400, "prompt"),
        (COMPLETIONS, with("prompt", json!("x".repeat(10_000_000))), 400, "prompt"),
        (COMPLETIONS, with("max_tokens", json!(5000)), 400, "max_tokens"),
        (COMPLETIONS, with("max_tokens", json!(0)), 400, "max_tokens"),
        (COMPLETIONS, with("max_tokens", json!(18_446_744_073_709_551_615_u64)), 400, "max_tokens"),
        (COMPLETIONS, with("logprobs", json!(21)), 400, "logprobs"),
        (COMPLETIONS, with("best_of", json!(3)), 400, "best_of"),
        (COMPLETIONS, with("suffix", json!("x")), 400, "suffix"),
        (COMPLETIONS, with("truncate_prompt_tokens", json!(0)), 400, "truncate_prompt_tokens"),
        ("/tokenize", json!({}), 400, "prompt"),
        ("/detokenize", json!({"tokens": [1_000_000]}), 400, "tokens[0]"),
    ];
    for (path, body, status, param) in table {
        let answer = fixture.post(path, &body).await;
        let shown: String = body.to_string().chars().take(200).collect();
        assert_eq!(answer.status, status, "{shown}: {}", answer.body);
        let error = &answer.json()["error"];
        assert_eq!(error["param"].as_str().unwrap_or(""), param, "{shown}: {error}");
        assert_eq!(error["code"], status);
        assert!(error["message"].is_string() && error["type"].is_string());
    }
    assert!(fixture.seen.try_recv().is_err(), "none of them reached the engine");
}

#[tokio::test]
async fn junk_on_the_wire() {
    let fixture = Fixture::answering("x").await;
    let json = [("content-type", "application/json")];
    let junk = vec![b'['; 10 << 20];
    assert_eq!(request(fixture.address, "POST", CHAT, &json, Some(&junk)).await.status, 400);
    assert_eq!(request(fixture.address, "POST", CHAT, &json, Some(b"\xff\xfe")).await.status, 400);
    assert_eq!(request(fixture.address, "POST", CHAT, &json, None).await.status, 400);
    assert_eq!(
        request(fixture.address, "POST", CHAT, &[("content-type", "text/plain")], Some(b"{}")).await.status,
        415
    );
    let length = [("content-type", "application/json"), ("content-length", "99999999999")];
    assert_eq!(request(fixture.address, "POST", CHAT, &length, None).await.status, 413);
    let mut small = ServerConfig::default();
    small.limits.body_bytes = 100;
    let narrow = Fixture::with(small, |_| Script::of(vec![])).await;
    let chunked = [("content-type", "application/json"), ("transfer-encoding", "chunked")];
    let mut connection = common::send(narrow.address, "POST", CHAT, &chunked, None).await;
    let piece = format!("65\r\n{}\r\n", "x".repeat(101));
    tokio::io::AsyncWriteExt::write_all(&mut connection, piece.as_bytes()).await.unwrap();
    assert_eq!(read_answer(connection).await.status, 413, "the bound holds without a declared length");
    assert_eq!(fixture.get(CHAT).await.status, 405);
    let missing = fixture.get("/v1/nothing").await;
    assert_eq!((missing.status, missing.json()["error"]["type"].as_str().unwrap()), (404, "NotFoundError"));
    let long = "x".repeat(200 << 10);
    assert_eq!(request(fixture.address, "GET", "/health", &[("x-long", &long)], None).await.status, 431);
    assert_eq!(fixture.get("/health").await.status, 200, "and it still works");
}

#[tokio::test]
async fn messages_name_the_numbers() {
    let fixture = Fixture::answering("x").await;
    let message = |answer: common::Answer| answer.json()["error"]["message"].as_str().unwrap().to_owned();
    let long = fixture.post(COMPLETIONS, &json!({"prompt": vec![1; 5000]})).await;
    expect_test::expect!["This model's maximum context length is 4096 tokens. However, your request has 5000 input tokens. Please reduce the length of the input."]
        .assert_eq(&message(long));
    let wide = fixture.post(COMPLETIONS, &json!({"prompt": vec![1; 4000], "max_tokens": 97})).await;
    expect_test::expect!["`max_tokens` is too large: 97. This model's maximum context length is 4096 tokens and your request has 4000 input tokens (97 > 4096 - 4000)."]
        .assert_eq(&message(wide));
    let cut = json!({"prompt": (0..500).collect::<Vec<u32>>(), "truncate_prompt_tokens": 3});
    assert_eq!(fixture.post(COMPLETIONS, &cut).await.status, 200);
    assert!(matches!(fixture.next_seen().await, Seen::Add { prompt, .. } if prompt == [497, 498, 499]));
}

#[tokio::test]
async fn unknown_fields_warn_or_are_refused() {
    let fixture = Fixture::answering("x").await;
    let body = json!({"prompt": "Hi", "temprature": 1, "wörld": 2, "user": "me", "metadata": {}, "store": false});
    let answer = fixture.post(COMPLETIONS, &body).await;
    assert_eq!(answer.status, 200);
    assert!(answer.headers.contains("x-kwire-unknown-fields: temprature,w?rld"), "{}", answer.headers);
    assert!(fixture.get("/metrics").await.body.contains("kwire:unknown_request_fields_total 2"));
    let mut config = ServerConfig::default();
    config.requests.unknown_fields = UnknownFields::Reject;
    let fixture = Fixture::with(config, |_| Script::of(vec![])).await;
    let answer = fixture.post(COMPLETIONS, &body).await;
    assert_eq!((answer.status, &answer.json()["error"]["param"]), (400, &json!("temprature")));
    assert!(answer.headers.contains("x-kwire-unknown-fields: temprature,w?rld"), "{}", answer.headers);
    let answer = fixture.post("/tokenize", &json!({"prompt": "Hi", "tokens": [1]})).await;
    assert_eq!((answer.status, &answer.json()["error"]["param"]), (400, &json!("tokens")));
}

#[tokio::test]
async fn refusals_carry_the_headers_of_answers() {
    let mut config = ServerConfig::default();
    config.auth.api_keys = vec!["key".to_owned()];
    let fixture = Fixture::with(config, |_| Script::of(vec![])).await;
    let bad = json!({"prompt": "Hi", "temperature": -1, "temprature": 1}).to_string();
    for (path, body, key, status, unknown) in [
        (COMPLETIONS, bad.as_str(), "Bearer key", 400, true),
        (COMPLETIONS, r#"{"prompt": "Hi", "model": "x", "temprature": 1}"#, "Bearer key", 404, true),
        (COMPLETIONS, "{", "Bearer key", 400, false),
        (COMPLETIONS, "{}", "Bearer none", 401, false),
        ("/v1/nothing", "{}", "Bearer key", 404, false),
        ("/tokenize", r#"{"temprature": 1}"#, "", 400, true),
        ("/tokenize", r#"{"prompt": "Hi", "temprature": 1}"#, "", 200, true),
        ("/detokenize", r#"{"tokens": [5], "temprature": 1}"#, "", 200, true),
    ] {
        let headers = [("content-type", "application/json"), ("x-request-id", "r1"), ("authorization", key)];
        let answer = request(fixture.address, "POST", path, &headers, Some(body.as_bytes())).await;
        assert_eq!(answer.status, status, "{path} {body}: {}", answer.body);
        assert!(answer.headers.contains("x-request-id: r1"), "{path} {body}: {}", answer.headers);
        let named = answer.headers.contains("x-kwire-unknown-fields: temprature");
        assert_eq!(named, unknown, "{path} {body}: {}", answer.headers);
    }
}

#[tokio::test]
async fn tokenizing_takes_a_place_in_the_queue() {
    let mut config = ServerConfig::default();
    config.admission.max_num_queued_reqs = Some(1);
    let script = Script { pause_after: Some(0), ..Script::of(vec![50]) };
    let fixture = Fixture::with(config, move |_| script.clone()).await;
    let ask = [("/tokenize", json!({"prompt": "Hi"})), ("/detokenize", json!({"tokens": [5]}))];
    let running = fixture.open(COMPLETIONS, &json!({"prompt": "Hi"})).await;
    assert!(matches!(fixture.next_seen().await, Seen::Add { .. }));
    for (path, body) in &ask {
        assert_eq!(fixture.post(path, body).await.status, 503, "{path}");
    }
    fixture.engine.send(Command::ResetPrefixCache).unwrap();
    assert_eq!(read_answer(running).await.status, 200);
    for (path, body) in ask.iter().chain(&ask) {
        assert_eq!(fixture.post(path, body).await.status, 200, "{path}");
    }
}

#[tokio::test]
async fn retry_after_follows_the_pace_of_answers() {
    let mut config = ServerConfig::default();
    config.admission.max_num_queued_reqs = Some(1);
    let pause = |request: &kwire_engine::Request| (request.prompt.len() > 1).then_some(0);
    let script = move |request: &kwire_engine::Request| Script { pause_after: pause(request), ..Script::of(vec![50]) };
    let fixture = Fixture::with(config, script).await;
    for second in [100.0_f64, 110.0] {
        fixture.clock.store(second.to_bits(), Ordering::SeqCst);
        assert_eq!(fixture.post(COMPLETIONS, &json!({"prompt": [1]})).await.status, 200);
    }
    let _running = fixture.open(COMPLETIONS, &json!({"prompt": [1, 2]})).await;
    while !matches!(fixture.next_seen().await, Seen::Add { prompt, .. } if prompt.len() == 2) {}
    let refused = fixture.post(COMPLETIONS, &json!({"prompt": [1]})).await;
    assert_eq!(refused.status, 503);
    assert!(refused.headers.lines().any(|l| l == "retry-after: 5"), "two answers in 10 s: {}", refused.headers);
}

#[tokio::test]
async fn a_client_that_leaves_ends_its_request() {
    let script = Script { pause_after: Some(1), ..Script::of(vec![50, 51, 52]) };
    let fixture = Fixture::with(ServerConfig::default(), move |_| script.clone()).await;
    for stream in [true, false] {
        let body = json!({"prompt": "Hi", "stream": stream, "n": 2});
        let mut connection = fixture.open(COMPLETIONS, &body).await;
        assert!(matches!(fixture.next_seen().await, Seen::Add { .. }));
        if stream {
            read_until(&mut connection, "\"index\":1").await;
        }
        drop(connection);
        assert_eq!(fixture.next_seen().await, Seen::End { sequence: None, stopped: false });
        assert_eq!(fixture.next_seen().await, Seen::Done);
    }
    let metrics = fixture.get("/metrics").await.body;
    assert!(metrics.contains(r#"engine="0",finished_reason="abort"} 4"#), "{metrics}");
}

#[tokio::test]
async fn a_slow_client_gets_everything() {
    let text = "lorem ipsum dolor ".repeat(400);
    let fixture = Fixture::answering(&text).await;
    let connection = fixture.open(COMPLETIONS, &json!({"prompt": "Hi", "stream": true, "max_tokens": 4000})).await;
    // The engine is through before the client has read a byte.
    while fixture.next_seen().await != Seen::Done {}
    let answer = read_answer(connection).await;
    let tokens = fixture.tokenizer.encode(&text, false).unwrap();
    let n = tokens.len().min(4000);
    assert_eq!(answer.text(0), fixture.tokenizer.decode(&tokens[..n], true).unwrap());
}

#[tokio::test]
async fn a_full_queue_refuses() {
    let mut config = ServerConfig::default();
    config.admission.max_num_queued_reqs = Some(2);
    config.admission.max_num_queued_tokens = Some(50);
    let paused = AtomicU64::new(2);
    let script = move |_: &kwire_engine::Request| {
        let pause = paused.load(Ordering::SeqCst) > 0;
        paused.fetch_sub(u64::from(pause), Ordering::SeqCst);
        Script { pause_after: pause.then_some(0), ..Script::of(vec![50]) }
    };
    let fixture = Fixture::with(config, script).await;
    let first = fixture.open(COMPLETIONS, &json!({"prompt": vec![1; 40]})).await;
    assert!(matches!(fixture.next_seen().await, Seen::Add { .. }));
    let tokens = fixture.post(COMPLETIONS, &json!({"prompt": vec![1; 11]})).await;
    assert_eq!(tokens.status, 503);
    assert!(tokens.headers.contains("retry-after: 1"));
    let second = fixture.open(COMPLETIONS, &json!({"prompt": [1]})).await;
    assert!(matches!(fixture.next_seen().await, Seen::Add { .. }));
    assert_eq!(fixture.post(COMPLETIONS, &json!({"prompt": [1]})).await.status, 503);
    assert_eq!(fixture.post(COMPLETIONS, &json!({"prompt": [1], "n": 3})).await.status, 400, "it never fits");
    let metrics = fixture.get("/metrics").await.body;
    for reason in ["max_num_queued_reqs", "max_num_queued_tokens"] {
        let line = format!("vllm:admission_rejections_total{{model_name=\"tiny\",reason=\"{reason}\"}} 1");
        assert!(metrics.contains(&line), "{metrics}");
    }
    let load = fixture.get("/load").await.json();
    assert_eq!((&load["in_flight"], &load["max_in_flight"], &load["state"]), (&json!(2), &json!(2), &json!("serving")));
    fixture.engine.send(Command::ResetPrefixCache).unwrap();
    assert_eq!(read_answer(first).await.status, 200);
    assert_eq!(read_answer(second).await.status, 200);
    assert_eq!(fixture.post(COMPLETIONS, &json!({"prompt": [1]})).await.status, 200, "places are given back");
}

#[tokio::test]
async fn failures_of_the_engine() {
    let script = Script { fail_after: Some(2), ..Script::of(vec![50, 51, 52]) };
    let fixture = Fixture::with(ServerConfig::default(), move |_| script.clone()).await;
    let answer = fixture.post(COMPLETIONS, &json!({"prompt": "Hi"})).await;
    assert_eq!((answer.status, &answer.json()["error"]["message"]), (500, &json!("the logits are not numbers")));
    let answer = fixture.post(COMPLETIONS, &json!({"prompt": "Hi", "stream": true})).await;
    let last: Value = serde_json::from_str(answer.events().last().unwrap()).unwrap();
    assert_eq!((answer.status, &last["error"]["code"]), (200, &json!(500)));

    let script = Script { die_after: Some(1), ..Script::of(vec![50, 51, 52]) };
    let fixture = Fixture::with(ServerConfig::default(), move |_| script.clone()).await;
    let answer = fixture.post(COMPLETIONS, &json!({"prompt": "Hi", "stream": true})).await;
    let last: Value = serde_json::from_str(answer.events().last().unwrap()).unwrap();
    assert_eq!(last["error"]["message"], "The engine has stopped.");
    assert_eq!(fixture.post(COMPLETIONS, &json!({"prompt": "Hi"})).await.status, 500);
    assert_eq!(fixture.get("/health").await.status, 503);
}

#[tokio::test]
async fn keys_guard_v1_and_nothing_else() {
    let mut config = ServerConfig::default();
    config.auth.api_keys = vec!["key-1".to_owned(), "key-2".to_owned()];
    assert!(!format!("{config:?}").contains("key-1"));
    let fixture = Fixture::with(config, |_| Script::of(vec![])).await;
    for (path, header, status) in [
        ("/v1/models", None, 401),
        ("/v1/models", Some("Bearer three"), 401),
        ("/v1/models", Some("Bearer key-1"), 200),
        ("/v1/models", Some("Bearer key-2"), 200),
        ("/v1/nothing", None, 401),
        ("/health", None, 200),
        ("/metrics", None, 200),
        ("/v1x", None, 404),
    ] {
        let headers: Vec<(&str, &str)> = header.into_iter().map(|value| ("authorization", value)).collect();
        let answer = request(fixture.address, "GET", path, &headers, None).await;
        assert_eq!(answer.status, status, "{path} {header:?}");
    }
}

#[tokio::test]
async fn it_listens_before_the_model_is_there() {
    let clock = Arc::new(AtomicU64::new(0));
    let server = Server::new(ServerConfig::default(), ambient(&clock));
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let serving = server.clone();
    tokio::spawn(async move { serving.serve(listener, std::future::pending()).await });
    let get = async |path| request(address, "GET", path, &[], None).await;
    assert_eq!(get("/health").await.status, 503);
    assert_eq!(get("/ready").await.status, 503);
    assert_eq!(get("/v1/models").await.json()["data"], json!([]));
    assert_eq!(get("/load").await.json()["state"], "loading");
    assert!(get("/metrics").await.status == 200);
    let json = [("content-type", "application/json")];
    let answer = request(address, "POST", COMPLETIONS, &json, Some(b"{\"prompt\":\"Hi\"}")).await;
    assert_eq!((answer.status, answer.headers.contains("retry-after")), (503, true));
    let (engine, mailbox) = EngineHandle::new();
    let (sink, reports) = report_channel();
    let (sees, _seen) = std::sync::mpsc::channel();
    common::scripted_engine(mailbox, sink, |_| Script::of(vec![]), sees, Arc::clone(&clock));
    server.set_model(model(&common::tokenizer("smollm")), engine, reports);
    assert_eq!((get("/health").await.status, get("/ready").await.status), (200, 200));
}

#[tokio::test]
async fn health_tells_the_truth() {
    let script = Script { pause_after: Some(1), ..Script::of(vec![50]) };
    let fixture = Fixture::with(ServerConfig::default(), move |_| script.clone()).await;
    let set = |seconds: f64| fixture.clock.store(seconds.to_bits(), Ordering::SeqCst);
    set(1000.0);
    assert_eq!(fixture.get("/health").await.status, 200, "an idle engine answers pings");
    let mut connection = fixture.open(COMPLETIONS, &json!({"prompt": "Hi", "stream": true})).await;
    read_until(&mut connection, "data: ").await;
    set(1059.0);
    assert_eq!(fixture.get("/health").await.status, 200);
    set(1100.0);
    let stuck = fixture.get("/health").await;
    assert_eq!(stuck.status, 503);
    assert!(stuck.body.contains("has not finished a step for 100 s"), "{}", stuck.body);
    fixture.engine.send(Command::ResetPrefixCache).unwrap();
    read_until(&mut connection, "[DONE]").await;
    assert_eq!(fixture.get("/health").await.status, 200);
}

#[tokio::test]
async fn running_streams_outlive_the_shutdown() {
    let script = Script { pause_after: Some(1), ..Script::of(vec![50, 51, 52]) };
    let mut fixture = Fixture::with(ServerConfig::default(), move |_| script.clone()).await;
    let mut running = fixture.open(COMPLETIONS, &json!({"prompt": "Hi", "stream": true})).await;
    read_until(&mut running, "data: ").await;
    fixture.shutdown.send(true).unwrap();
    while fixture.get("/ready").await.status == 200 {}
    assert_eq!(fixture.get("/health").await.status, 200);
    let refused = fixture.post(COMPLETIONS, &json!({"prompt": "Hi"})).await;
    assert_eq!((refused.status, refused.headers.contains("retry-after")), (503, true));
    fixture.engine.send(Command::ResetPrefixCache).unwrap();
    read_until(&mut running, "[DONE]").await;
    (&mut fixture.served).await.unwrap();
}

#[tokio::test]
async fn a_request_still_being_read_outlives_the_shutdown() {
    let fixture = Fixture::answering("x").await;
    let body = json!({"prompt": "Hi"}).to_string();
    let length = body.len().to_string();
    let headers =
        [("content-type", "application/json"), ("content-length", length.as_str()), ("expect", "100-continue")];
    let mut slow = common::send(fixture.address, "POST", COMPLETIONS, &headers, None).await;
    read_until(&mut slow, "100 Continue\r\n\r\n").await; // it was accepted, and its body is waited for
    let drain = tokio::spawn({
        let server = fixture.server.clone();
        async move { server.drain().await }
    });
    while fixture.get("/ready").await.status == 200 {}
    assert!(!drain.is_finished(), "it counts");
    assert_eq!(fixture.post(COMPLETIONS, &json!({"prompt": "Hi"})).await.status, 503);
    tokio::io::AsyncWriteExt::write_all(&mut slow, body.as_bytes()).await.unwrap();
    let answer = read_answer(slow).await;
    assert_eq!((answer.status, &answer.json()["choices"][0]["text"]), (200, &json!("x")));
    drain.await.unwrap();
}

#[tokio::test]
async fn a_request_read_after_the_time_is_over_is_refused() {
    let mut config = ServerConfig::default();
    config.shutdown.timeout_s = 0.0;
    let script = Script { pause_after: Some(1), ..Script::of(vec![50, 51]) };
    let fixture = Fixture::with(config, move |_| script.clone()).await;
    let mut running = fixture.open(COMPLETIONS, &json!({"prompt": "Hi", "stream": true})).await;
    read_until(&mut running, "data: ").await;
    let headers = [("content-type", "application/json"), ("content-length", "17"), ("expect", "100-continue")];
    let mut slow = common::send(fixture.address, "POST", COMPLETIONS, &headers, None).await;
    read_until(&mut slow, "100 Continue\r\n\r\n").await;
    let drain = tokio::spawn({
        let server = fixture.server.clone();
        async move { server.drain().await }
    });
    read_until(&mut running, "The server is shutting down.").await;
    tokio::io::AsyncWriteExt::write_all(&mut slow, b"{\"prompt\":  \"Hi\"}").await.unwrap();
    assert_eq!(read_answer(slow).await.status, 503);
    drain.await.unwrap();
    assert!(matches!(fixture.next_seen().await, Seen::Add { .. }));
    let rest: Vec<Seen> = fixture.seen.try_iter().collect();
    assert!(!rest.iter().any(|seen| matches!(seen, Seen::Add { .. })), "it did not reach the engine");
}

#[tokio::test]
async fn a_dead_engine_ends_every_request_before_the_server_ends() {
    let script = |request: &kwire_engine::Request| match request.prompt.len() {
        3 => Script { die_after: Some(0), ..Script::of(vec![50]) },
        _ => Script { pause_after: Some(1), ..Script::of(vec![50, 51, 52]) },
    };
    let mut fixture = Fixture::with(ServerConfig::default(), script).await;
    let mut stream = fixture.open(COMPLETIONS, &json!({"prompt": [1], "stream": true})).await;
    read_until(&mut stream, "data: ").await;
    let whole = fixture.open(COMPLETIONS, &json!({"prompt": [1, 2]})).await;
    for _ in 0..2 {
        assert!(matches!(fixture.next_seen().await, Seen::Add { .. }));
    }
    let fatal = fixture.open(COMPLETIONS, &json!({"prompt": [1, 2, 3]})).await;
    let error = read_until(&mut stream, "error").await;
    fixture.shutdown.send(true).unwrap();
    let fatal = read_answer(fatal).await;
    assert!(error.contains("The engine has stopped."), "{error}");
    for answer in [read_answer(whole).await, fatal] {
        let error = &answer.json()["error"];
        assert_eq!((answer.status, &error["message"]), (500, &json!("The engine has stopped.")));
    }
    (&mut fixture.served).await.unwrap();
}

#[tokio::test]
async fn streams_that_take_too_long_end_with_an_error() {
    let script = Script { pause_after: Some(1), ..Script::of(vec![50, 51, 52]) };
    let mut config = ServerConfig::default();
    config.shutdown.timeout_s = 0.0;
    let mut fixture = Fixture::with(config, move |_| script.clone()).await;
    let mut running = fixture.open(COMPLETIONS, &json!({"prompt": "Hi", "stream": true})).await;
    read_until(&mut running, "data: ").await;
    fixture.shutdown.send(true).unwrap();
    let rest = read_until(&mut running, "error").await;
    assert!(rest.contains("The server is shutting down."));
    (&mut fixture.served).await.unwrap();
    assert!(matches!(fixture.next_seen().await, Seen::Add { .. }));
    assert_eq!(fixture.next_seen().await, Seen::End { sequence: None, stopped: false });
}

#[tokio::test]
async fn metrics_have_the_names_of_vllm() {
    let fixture = Fixture::answering("abc def").await;
    fixture.post(COMPLETIONS, &json!({"prompt": "Hi"})).await;
    let metrics = fixture.get("/metrics").await;
    assert!(metrics.headers.contains("text/plain; version=0.0.4"));
    let types: Vec<&str> = metrics.body.lines().filter_map(|l| l.strip_prefix("# TYPE ")).collect();
    for expected in [
        "vllm:num_requests_running gauge",
        "vllm:num_requests_waiting gauge",
        "vllm:kv_cache_usage_perc gauge",
        "vllm:cache_config_info gauge",
        "vllm:lora_requests_info gauge",
        "vllm:prefix_cache_queries_total counter",
        "vllm:prefix_cache_hits_total counter",
        "vllm:num_preemptions_total counter",
        "vllm:prompt_tokens_total counter",
        "vllm:prompt_tokens_by_source_total counter",
        "vllm:prompt_tokens_cached_total counter",
        "vllm:generation_tokens_total counter",
        "vllm:request_success_total counter",
        "vllm:iteration_tokens_total histogram",
        "vllm:time_to_first_token_seconds histogram",
        "vllm:inter_token_latency_seconds histogram",
        "vllm:e2e_request_latency_seconds histogram",
        "vllm:request_queue_time_seconds histogram",
        "vllm:request_inference_time_seconds histogram",
        "vllm:request_prefill_time_seconds histogram",
        "vllm:request_decode_time_seconds histogram",
        "vllm:request_prompt_tokens histogram",
        "vllm:request_generation_tokens histogram",
        "vllm:request_prefill_kv_computed_tokens histogram",
        "vllm:request_params_max_tokens histogram",
        "vllm:request_params_n histogram",
        "http_requests_total counter",
    ] {
        assert!(types.contains(&expected), "{expected} is not in {types:#?}");
    }
    let samples = |name: &str| metrics.body.lines().find(|l| l.starts_with(name)).unwrap_or_else(|| panic!("{name}"));
    assert!(samples("vllm:request_success_total{").ends_with(" 1"));
    assert!(samples("vllm:request_success_total{").contains(r#"model_name="tiny""#));
    assert!(samples("vllm:time_to_first_token_seconds_count{").ends_with(" 1"));
    let computed = fixture.tokenizer.encode("Hi", true).unwrap().len() - 1;
    for (source, n) in [("local_compute", computed), ("local_cache_hit", 1), ("external_kv_transfer", 0)] {
        let line =
            format!(r#"vllm:prompt_tokens_by_source_total{{model_name="tiny",engine="0",source="{source}"}} {n}"#);
        assert!(metrics.body.contains(&line), "{line}");
    }
    assert!(samples("vllm:prompt_tokens_cached_total{").ends_with(" 1"));
    assert!(samples("vllm:request_prefill_kv_computed_tokens_count{").ends_with(" 1"));
    assert!(samples("vllm:cache_config_info{").contains(r#"block_size="16",num_gpu_blocks="1000""#));
    assert!(samples("http_requests_total{").contains(r#"method="POST",status="2xx",handler="/v1/completions""#));
}
