//! `kwire bench` and `kwire run --url` against a stand-in for a server.

use serde_json::{Value, json};

use crate::support::{FakeServer, Response, kwire, stderr, stdout};

/// Answers "Hello you" in two pieces; one token is four characters of the prompt.
fn server() -> FakeServer {
    FakeServer::start(|r| {
        if r.target == "/v1/models" {
            return Response::ok(json!({"data": [{"id": "m"}]}).to_string());
        }
        let body: Value = serde_json::from_str(&r.body).unwrap();
        let prompt = body["prompt"].as_str().or_else(|| body["messages"][0]["content"].as_str()).unwrap_or_default();
        let piece = |text: &str| json!({"choices": [{"text": text, "delta": {"content": text}}]});
        let usage = json!({"choices": [], "usage": {"prompt_tokens": prompt.len() / 4, "completion_tokens": 2}});
        let events = [piece("Hello"), piece(" you"), usage];
        let stream: String = events.iter().map(|e| format!("data: {e}\n\n")).collect();
        Response::ok(stream + "data: [DONE]\n\n")
    })
}

#[test]
fn a_run_is_measured() {
    let (server, home) = (server(), tempfile::tempdir().unwrap());
    let line = "bench -c 3 -n 7 --prompt-tokens 40:60 --warmup 1 --json -";
    let mut args: Vec<_> = line.split(' ').collect();
    args.push(&server.url);
    let report: Value = serde_json::from_str(&stdout(&kwire(home.path(), &args).output().unwrap())).unwrap();
    assert_eq!((&report["ok"], &report["output_tokens"], &report["model"]), (&json!(7), &json!(14), &json!("m")));
    let mean = report["prompt_tokens"].as_f64().unwrap() / 7.0;
    assert!((40.0..63.0).contains(&mean), "{report}");
    assert!(report["ttft_ms"]["p95"].as_f64().unwrap() > 0.0);
    assert_eq!(server.count("completions"), 9, "one to calibrate, one to warm up, seven");
}

#[test]
fn servers_are_compared_in_turn() {
    let (server, home) = (server(), tempfile::tempdir().unwrap());
    let (a, b) = (format!("kwire={}", server.url), format!("peer={}/v1", server.url));
    let output = kwire(home.path(), &["bench", "--suite", "cpu", "--only", "A", &a, &b]).output().unwrap();
    let table = stdout(&output);
    assert!(table.starts_with("### A: one user"), "{table}");
    assert!(table.contains("| kwire | **") && table.contains("\nkwire against peer: "), "{table}");
}

#[test]
fn errors_are_counted_and_fail_the_command() {
    let broken = FakeServer::start(|_| Response::status(500));
    let home = tempfile::tempdir().unwrap();
    let output = kwire(home.path(), &["bench", "--model", "m", "-n", "2", &broken.url]).output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&output.stdout).contains("error x2: HTTP 500"));
}

#[test]
fn one_question_to_a_server() {
    let (server, home) = (server(), tempfile::tempdir().unwrap());
    let ask = |args: &[&str]| kwire(home.path(), args).output().unwrap();
    let answer =
        ask(&["run", "--url", &server.url, "--system", "Be kind", "--max-tokens", "5", "m", "Who", "am", "I?"]);
    assert_eq!(stdout(&answer), "Hello you");
    let body: Value = serde_json::from_str(&server.requests()[0].body).unwrap();
    let messages = json!([{"role": "system", "content": "Be kind"}, {"role": "user", "content": "Who am I?"}]);
    assert_eq!((&body["messages"], &body["max_tokens"]), (&messages, &json!(5)));
    let gone = ask(&["run", "--url", "http://127.0.0.1:1", "m", "Hi"]);
    assert!(stderr(&gone).contains("no server answers at http://127.0.0.1:1"), "{}", stderr(&gone));
}
