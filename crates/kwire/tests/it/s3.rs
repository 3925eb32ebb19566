//! `kwire pull s3://…` against a stand-in for object storage.

use std::path::Path;
use std::sync::Mutex;

use crate::support::{FakeServer, Request, Response, kwire, stderr, stdout};

type Objects = &'static Mutex<Vec<(&'static str, &'static str)>>;

/// A bucket of text objects; an object's tag is its text.
fn storage(objects: Objects) -> FakeServer {
    FakeServer::start(move |r| {
        let objects = objects.lock().unwrap().clone();
        if r.target.starts_with("/bucket?") {
            return list(r, &objects);
        }
        let found = objects.iter().find(|(key, _)| r.target == format!("/bucket/{key}"));
        let Some((_, text)) = found else { return Response::status(404) };
        let headers = vec![("ETag", format!("\"{text}\"")), ("Last-Modified", "Tue, 01 Sep 2026 00:00:00 GMT".into())];
        Response { headers, ..Response::ok(*text) }
    })
}

fn list(request: &Request, objects: &[(&str, &str)]) -> Response {
    assert!(request.target.contains("list-type=2"), "{}", request.target);
    let prefix = request.target.split(['?', '&']).find_map(|p| p.strip_prefix("prefix=")).unwrap_or_default();
    let prefix = prefix.replace("%2F", "/");
    let entry = |(key, text): &(&str, &str)| {
        format!(
            "<Contents><Key>{key}</Key><Size>{}</Size><ETag>\"{text}\"</ETag>\
             <LastModified>2026-09-01T00:00:00.000Z</LastModified></Contents>",
            text.len()
        )
    };
    let entries: String = objects.iter().filter(|(key, _)| key.starts_with(&prefix)).map(entry).collect();
    Response::ok(format!("<ListBucketResult><IsTruncated>false</IsTruncated>{entries}</ListBucketResult>"))
}

fn pull(home: &Path, endpoint: &str, model: &str) -> std::process::Output {
    let mut command = kwire(home, &["pull", model]);
    command.env("AWS_ENDPOINT_URL", endpoint).env("AWS_ACCESS_KEY_ID", "id").env("AWS_SECRET_ACCESS_KEY", "key");
    command.output().unwrap()
}

#[test]
fn a_prefix_is_downloaded_once_and_again_when_it_changes() {
    static OBJECTS: Mutex<Vec<(&str, &str)>> = Mutex::new(Vec::new());
    *OBJECTS.lock().unwrap() =
        vec![("m/q/config.json", "{}"), ("m/q/model.safetensors", "w1"), ("m/q/notes.txt", "no"), ("m/other", "no")];
    let (storage, home) = (storage(&OBJECTS), tempfile::tempdir().unwrap());
    let first = stdout(&pull(home.path(), &storage.url, "s3://bucket/m/q"));
    assert_eq!(std::fs::read_to_string(Path::new(&first).join("model.safetensors")).unwrap(), "w1");
    assert_eq!(std::fs::read_dir(&first).unwrap().count(), 2, "only what is needed");
    let signed = storage.requests().iter().all(|r| r.headers["authorization"].starts_with("AWS4-HMAC-SHA256"));
    assert!(signed);

    let asked = storage.count("model.safetensors");
    assert_eq!(stdout(&pull(home.path(), &storage.url, "s3://bucket/m/q/")), first);
    assert_eq!(storage.count("model.safetensors"), asked, "nothing is downloaded twice");

    OBJECTS.lock().unwrap()[1].1 = "w2";
    let second = stdout(&pull(home.path(), &storage.url, "s3://bucket/m/q"));
    assert_ne!(second, first);
    assert_eq!(std::fs::read_to_string(Path::new(&second).join("model.safetensors")).unwrap(), "w2");
    assert!(Path::new(&first).is_dir(), "a server may run on it");

    let list = stdout(&kwire(home.path(), &["list"]).output().unwrap());
    assert!(list.starts_with("s3://bucket/m/q"), "{list}");
}

#[test]
fn a_single_file_is_a_model_too() {
    static OBJECTS: Mutex<Vec<(&str, &str)>> = Mutex::new(Vec::new());
    *OBJECTS.lock().unwrap() = vec![("m/a-Q4_0.gguf", "GGUF")];
    let (storage, home) = (storage(&OBJECTS), tempfile::tempdir().unwrap());
    let path = stdout(&pull(home.path(), &storage.url, "s3://bucket/m/a-Q4_0.gguf"));
    assert_eq!(std::fs::read(path).unwrap(), b"GGUF");
}

#[test]
fn empty_and_denied_buckets_say_so() {
    static OBJECTS: Mutex<Vec<(&str, &str)>> = Mutex::new(Vec::new());
    let (storage, home) = (storage(&OBJECTS), tempfile::tempdir().unwrap());
    let empty = stderr(&pull(home.path(), &storage.url, "s3://bucket/m"));
    assert!(empty.contains("s3://bucket/m: there are no objects"), "{empty}");
    let closed = FakeServer::start(|_| Response::status(403));
    let denied = stderr(&pull(home.path(), &closed.url, "s3://bucket/m"));
    assert!(denied.contains("Set AWS_ACCESS_KEY_ID"), "{denied}");
}
