//! What goes wrong for a user: each message names the thing, its value and the next step, and nothing panics.

use std::path::{Path, PathBuf};
use std::process::Output;

use serde_json::json;

use crate::support::{FakeServer, Response, kwire, stderr, stdout};

fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures")
}

/// A model folder, complete but for what a test takes from it.
fn model_folder(home: &Path) -> PathBuf {
    let folder = home.join("model");
    std::fs::create_dir(&folder).unwrap();
    for file in ["config.json", "model.safetensors"] {
        std::fs::copy(fixtures().join("families/llama2").join(file), folder.join(file)).unwrap();
    }
    std::fs::copy(fixtures().join("tokenizers/llama-spm.tokenizer.json"), folder.join("tokenizer.json")).unwrap();
    folder
}

fn serve(home: &Path, model: &str, flags: &str) -> Output {
    let mut args = vec!["serve", model, "--host", "127.0.0.1", "--port", "0"];
    args.extend(flags.split_whitespace());
    kwire(home, &args).output().unwrap()
}

/// Fails with this status, and says all of these.
#[track_caller]
fn fails(output: &Output, status: i32, parts: &[&str]) {
    let said = stderr(output);
    assert_eq!(output.status.code(), Some(status), "{said}");
    for part in parts {
        assert!(said.contains(part), "{part:?} is not in: {said}");
    }
    assert!(!said.contains("panicked") && !said.contains("RUST_BACKTRACE"), "{said}");
}

#[test]
fn command_lines() {
    let home = tempfile::tempdir().unwrap();
    let usage = |flags: &str, parts: &[&str]| fails(&serve(home.path(), "smollm2", flags), 2, parts);
    usage("--max-num-seqs 0", &["--max-num-seqs: 0 is too small: at least 1"]);
    usage("--max-num-seqs -3", &["--max-num-seqs: \"-3\" is not a whole number"]);
    usage("--max-num-seqs many", &["--max-num-seqs: \"many\" is not a whole number"]);
    usage("--max-modle-len 5", &["--max-modle-len is not a flag", "did you mean --max-model-len?"]);
    usage("--model other", &["two models are given, smollm2 and other"]);
    usage("--max-num-batched-tokens 64", &["64 is less than --max-num-seqs 128"]);
    usage("--tokenizer /nope", &["--tokenizer: /nope does not exist; give tokenizer.json"]);
    usage("--chat-template /nope", &["--chat-template: /nope cannot be read"]);
    usage("--load-format pt", &["--load-format: \"pt\" is not one of auto, safetensors, gguf"]);
    fails(&serve(home.path(), "/nope/m.gguf", ""), 2, &["/nope/m.gguf does not exist"]);
}

#[test]
fn a_model_that_flags_swallowed_is_missed_with_the_reason() {
    let home = tempfile::tempdir().unwrap();
    for flags in [["--api-key", "key", "smollm2"], ["--served-model-name", "name", "smollm2"]] {
        let output = kwire(home.path(), &[&["serve"], &flags[..]].concat()).output().unwrap();
        fails(&output, 2, &["which model?", "take every word that follows: name the model first"]);
    }
}

#[test]
fn a_reader_that_leaves_ends_the_program_quietly() {
    let home = tempfile::tempdir().unwrap();
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    let output = kwire(home.path(), &["docs", "flags"]).stdout(writer).output().unwrap();
    assert_eq!((output.status.code(), stderr(&output).as_str()), (Some(0), ""));
}

#[test]
fn a_model_that_the_server_lacks_is_named() {
    let home = tempfile::tempdir().unwrap();
    let models = json!({"data": [{"id": "one"}, {"id": "two"}]}).to_string();
    let server = FakeServer::start(move |_| Response::ok(models.clone()));
    let output = kwire(home.path(), &["run", "--url", &server.url, "hi there"]).output().unwrap();
    fails(&output, 1, &["has no model \"hi there\"; it serves one, two", "A question comes after the model"]);
}

#[test]
fn a_flag_given_twice_has_its_last_value() {
    let home = tempfile::tempdir().unwrap();
    let model = fixtures().join("gguf/llama-q8_0.gguf");
    let output = serve(home.path(), model.to_str().unwrap(), "--max-num-seqs 3 --max-num-seqs 5 --dry-run");
    assert!(stdout(&output).contains("max sequences            5"), "{}", stdout(&output));
}

#[test]
fn model_files() {
    let home = tempfile::tempdir().unwrap();
    let whole = std::fs::read(fixtures().join("gguf/llama-q8_0.gguf")).unwrap();
    let gguf = home.path().join("m.gguf");
    for (content, part) in [(&whole[..60_000], "is the download complete?"), (b"hello", "expected the bytes GGUF")] {
        std::fs::write(&gguf, content).unwrap();
        fails(&serve(home.path(), gguf.to_str().unwrap(), ""), 1, &["m.gguf is not a valid checkpoint", part]);
    }
    let folder = home.path().to_str().unwrap();
    fails(&serve(home.path(), folder, ""), 1, &["has no config.json; name one of its .gguf files", "m.gguf"]);
    std::fs::remove_file(&gguf).unwrap();
    fails(&serve(home.path(), folder, ""), 1, &[folder, "must have config.json, *.safetensors and tokenizer.json"]);
    let file = fixtures().join("gguf/llama-q8_0.gguf");
    let flags = "--load-format safetensors";
    fails(&serve(home.path(), file.to_str().unwrap(), flags), 1, &["is a file; name a model folder"]);
    let flags = "--max-model-len 100000";
    fails(&serve(home.path(), file.to_str().unwrap(), flags), 1, &["--max-model-len", "100000", "256"]);
}

#[test]
fn model_folders() {
    let home = tempfile::tempdir().unwrap();
    let folder = model_folder(home.path());
    let model = folder.to_str().unwrap();
    stdout(&serve(home.path(), model, "--dry-run"));
    std::fs::rename(folder.join("model.safetensors"), folder.join("pytorch_model.bin")).unwrap();
    fails(&serve(home.path(), model, ""), 1, &[model, "expected model.safetensors", "never loaded"]);
}

/// The text side comes first: no weight is read for a tokenizer that does not work.
#[test]
fn tokenizers() {
    let home = tempfile::tempdir().unwrap();
    let folder = model_folder(home.path());
    let model = folder.to_str().unwrap();
    let tokenizer = folder.join("tokenizer.json");
    let elsewhere = home.path().join("other.json");
    std::fs::rename(&tokenizer, &elsewhere).unwrap();
    let missing = serve(home.path(), model, "");
    fails(&missing, 1, &["tokenizer.json is needed"]);
    std::fs::write(&tokenizer, "{\"a\":").unwrap();
    for broken in [serve(home.path(), model, ""), serve(home.path(), model, "--dry-run")] {
        fails(&broken, 1, &[tokenizer.to_str().unwrap(), "can't be used; --tokenizer PATH gives another"]);
        assert!(!stderr(&broken).contains("of weights"), "{}", stderr(&broken));
    }
    std::fs::remove_file(&tokenizer).unwrap();
    stdout(&serve(home.path(), model, &format!("--dry-run --tokenizer {}", elsewhere.display())));
    let template = format!("--dry-run --tokenizer {} --chat-template {{%if", elsewhere.display());
    fails(&serve(home.path(), model, &template), 1, &["--chat-template can't be used"]);
}

#[test]
fn a_dry_run_downloads_nothing() {
    let home = tempfile::tempdir().unwrap();
    for model in ["org/name:Q8_0@v1", "smollm2", "s3://bucket/prefix"] {
        let output = serve(home.path(), model, "--dry-run");
        let next = format!("--dry-run downloads nothing: run `kwire pull {model}` first");
        fails(&output, 1, &[model, "is not on this machine", &next]);
        assert!(
            String::from_utf8_lossy(&output.stdout).contains("max sequences"),
            "the settings are shown all the same"
        );
    }
    assert_eq!(std::fs::read_dir(home.path()).unwrap().count(), 0, "nothing is written");
}

#[test]
fn sockets() {
    let home = tempfile::tempdir().unwrap();
    let model = fixtures().join("gguf/llama-q8_0.gguf");
    let held = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = held.local_addr().unwrap().port().to_string();
    let args = ["serve", model.to_str().unwrap(), "--host", "127.0.0.1", "--port", &port];
    let parts = [&port, "in use", "choose another --port"];
    fails(&kwire(home.path(), &args).output().unwrap(), 1, &parts);
    let args = ["serve", model.to_str().unwrap(), "--host", "192.0.2.1", "--port", "0"];
    fails(&kwire(home.path(), &args).output().unwrap(), 1, &["192.0.2.1:0", "an address of this machine"]);
}
