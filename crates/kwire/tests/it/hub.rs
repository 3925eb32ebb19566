//! `kwire pull` against a stand-in for the Hugging Face hub.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use serde_json::json;
use sha2::{Digest, Sha256};

use crate::support::{FakeServer, Request, Response, kwire, stderr, stdout};

const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";

fn weights() -> Vec<u8> {
    (0..300_000u32).flat_map(u32::to_le_bytes).collect()
}

fn sha256(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().map(|b| format!("{b:02x}")).collect()
}

fn info() -> Response {
    let siblings = json!([
        {"rfilename": "README.md", "size": 3, "blobId": "aa"},
        {"rfilename": "config.json", "size": 2, "blobId": "bb"},
        {"rfilename": "model.safetensors", "size": 1_200_000, "blobId": "cc",
         "lfs": {"sha256": sha256(&weights()), "size": 1_200_000, "pointerSize": 100}},
        {"rfilename": "q/m-Q8_0.gguf", "size": 4, "blobId": "dd"},
        {"rfilename": "../evil.json", "size": 4, "blobId": "ee"},
    ]);
    Response::ok(json!({"id": "org/name", "sha": COMMIT, "siblings": siblings}).to_string())
}

/// The hub with one repository; `weights` answers for its large file.
fn hub_with(weights: impl Fn(&Request) -> Response + Send + Sync + 'static) -> FakeServer {
    FakeServer::start(move |r| {
        let file = |name: &str| format!("/org/name/resolve/{COMMIT}/{name}");
        match r.target.as_str() {
            "/api/models/org/name/revision/main?blobs=true" => info(),
            t if t == file("config.json") => Response::ok("{}"),
            t if t == file("model.safetensors") => weights(r),
            t if t == file("q/m-Q8_0.gguf") => Response::ok("GGUF"),
            _ => Response::status(404),
        }
    })
}

fn hub() -> FakeServer {
    hub_with(|r| Response::ranged(r, &weights()))
}

fn pull(home: &Path, endpoint: &str, model: &str, env: &[(&str, &str)]) -> std::process::Output {
    let mut command = kwire(home, &["pull", model]);
    command.env("HF_ENDPOINT", endpoint).envs(env.iter().copied()).output().unwrap()
}

fn repo(home: &Path) -> PathBuf {
    home.join(".cache/huggingface/hub/models--org--name")
}

#[test]
fn a_model_is_downloaded_once_and_then_works_offline() {
    let (hub, home) = (hub(), tempfile::tempdir().unwrap());
    let path = stdout(&pull(home.path(), &hub.url, "org/name", &[]));
    assert_eq!(Path::new(&path), repo(home.path()).join("snapshots").join(COMMIT));
    assert_eq!(std::fs::read(Path::new(&path).join("model.safetensors")).unwrap(), weights());
    let link = std::fs::read_link(Path::new(&path).join("config.json")).unwrap();
    assert_eq!(link, Path::new("../../blobs/bb"), "as the Hugging Face libraries lay it out");
    assert!(!Path::new(&path).join("README.md").exists(), "only what is needed");
    assert_eq!(hub.count("resolve"), 2);

    assert_eq!(stdout(&pull(home.path(), &hub.url, "org/name", &[])), path);
    assert_eq!(hub.count("resolve"), 2, "nothing is downloaded twice");
    let asked = hub.requests().len();
    assert_eq!(stdout(&pull(home.path(), &hub.url, "org/name", &[("HF_HUB_OFFLINE", "1")])), path);
    assert_eq!(stdout(&pull(home.path(), &hub.url, &format!("org/name@{COMMIT}"), &[])), path);
    assert_eq!(hub.requests().len(), asked, "neither offline nor for a commit that is here");

    let gone = pull(home.path(), "http://127.0.0.1:1", "org/name", &[]);
    assert_eq!(stdout(&gone), path);
    assert!(stderr(&gone).contains("can't be reached"), "{}", stderr(&gone));
}

#[test]
fn one_gguf_file_is_chosen_by_quantization() {
    let (hub, home) = (hub(), tempfile::tempdir().unwrap());
    let path = stdout(&pull(home.path(), &hub.url, "org/name:q8_0", &[]));
    assert!(path.ends_with("q/m-Q8_0.gguf"));
    assert_eq!(std::fs::read(path).unwrap(), b"GGUF");
    let none = pull(home.path(), &hub.url, "org/name:Q2_K", &[]);
    assert!(stderr(&none).contains("no .gguf file is called \"Q2_K\"; there are: q/m-Q8_0.gguf"), "{}", stderr(&none));
}

#[test]
fn an_interrupted_download_goes_on_where_it_ended() {
    let home = tempfile::tempdir().unwrap();
    let calls = AtomicUsize::new(0);
    let hub = hub_with(move |r| {
        let cut = (calls.fetch_add(1, Ordering::SeqCst) == 0).then_some(500_000);
        Response { cut, ..Response::ranged(r, &weights()) }
    });
    let path = stdout(&pull(home.path(), &hub.url, "org/name", &[]));
    assert_eq!(std::fs::read(Path::new(&path).join("model.safetensors")).unwrap(), weights());
    let starts: Vec<_> =
        hub.requests().iter().filter(|r| r.target.contains("safetensors")).map(Request::range_start).collect();
    assert_eq!(starts.len(), 2);
    assert!(starts[1].is_some_and(|s| s > 0), "{starts:?}");
}

#[test]
fn a_file_that_is_not_what_was_announced_is_not_kept() {
    let home = tempfile::tempdir().unwrap();
    let hub = hub_with(|_| Response::ok(vec![1; 1_200_000]));
    let output = pull(home.path(), &hub.url, "org/name", &[]);
    assert!(!output.status.success());
    assert!(stderr(&output).contains("it was not kept"), "{}", stderr(&output));
    let blobs: Vec<_> = std::fs::read_dir(repo(home.path()).join("blobs")).unwrap().flatten().collect();
    // Another file may have been on its way when this one failed: its part stays, to go on from.
    let whole = |name: &std::ffi::OsStr| Path::new(name).extension().is_none_or(|e| e != "incomplete");
    assert!(blobs.iter().all(|b| b.file_name() == "bb" || !whole(&b.file_name())), "{blobs:?}");
}

#[test]
fn two_processes_download_once() {
    let (hub, home) = (hub(), tempfile::tempdir().unwrap());
    let start = || {
        let mut command = kwire(home.path(), &["pull", "org/name"]);
        command.env("HF_ENDPOINT", &hub.url).stdout(std::process::Stdio::piped()).spawn().unwrap()
    };
    let both = [start(), start()].map(|child| child.wait_with_output().unwrap());
    assert_eq!(stdout(&both[0]), stdout(&both[1]));
    assert_eq!(hub.count("model.safetensors"), 1);
}

#[test]
fn what_to_do_is_said_where_the_hub_does_not_help() {
    let home = tempfile::tempdir().unwrap();
    let gone = stderr(&pull(home.path(), "http://127.0.0.1:1", "org/name", &[]));
    assert!(gone.contains("http://127.0.0.1:1 can't be reached") && gone.contains("HF_ENDPOINT"), "{gone}");
    let offline = stderr(&pull(home.path(), "http://127.0.0.1:1", "org/name", &[("HF_HUB_OFFLINE", "1")]));
    assert!(offline.contains("HF_HUB_OFFLINE is set, and org/name is not in the cache"), "{offline}");
    let gated = FakeServer::start(|_| Response::status(401));
    let denied = stderr(&pull(home.path(), &gated.url, "org/name", &[("HF_TOKEN", "t")]));
    assert!(denied.contains("accept its terms") && denied.contains("was not enough"), "{denied}");
    let missing = stderr(&pull(home.path(), &hub().url, "org/none", &[]));
    assert!(missing.contains("has no model org/none with revision \"main\""), "{missing}");
}

#[test]
fn a_cache_that_cannot_be_written_is_named() {
    let (hub, home) = (hub(), tempfile::tempdir().unwrap());
    let file = home.path().join("file");
    std::fs::write(&file, "").unwrap();
    let cache = file.join("below").to_str().unwrap().to_owned();
    let output = pull(home.path(), &hub.url, "org/name", &[("HF_HUB_CACHE", &cache)]);
    assert_eq!(output.status.code(), Some(1));
    assert!(
        stderr(&output).contains(&format!(
            "{cache}/models--org--name/blobs cannot be created; --download-dir, HF_HOME or KWIRE_HOME"
        )),
        "{}",
        stderr(&output)
    );
}

#[test]
fn the_token_goes_to_the_hub_only() {
    let home = tempfile::tempdir().unwrap();
    let storage = Arc::new(FakeServer::start(|r| Response::ranged(r, &weights())));
    let location = format!("{}/blob", storage.url);
    let hub = hub_with(move |_| Response { headers: vec![("Location", location.clone())], ..Response::status(302) });
    let token_file = home.path().join(".cache/huggingface/token");
    std::fs::create_dir_all(token_file.parent().unwrap()).unwrap();
    std::fs::write(token_file, "secret\n").unwrap();
    stdout(&pull(home.path(), &hub.url, "org/name", &[]));
    assert!(hub.requests().iter().all(|r| r.headers.get("authorization").is_some_and(|v| v == "Bearer secret")));
    assert_eq!(storage.requests().len(), 1);
    assert!(!storage.requests()[0].headers.contains_key("authorization"));
}
