//! A small HTTP server that answers from a closure and remembers what it was asked, and a way to run the binary.

use std::collections::HashMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::process::{Command, Output};
use std::sync::{Arc, Mutex};

/// A request as it came; header names in lower case.
#[derive(Debug, Clone)]
pub struct Request {
    pub method: String,
    pub target: String,
    pub headers: HashMap<String, String>,
    pub body: String,
}

impl Request {
    /// The first byte that a Range header asks for.
    pub fn range_start(&self) -> Option<usize> {
        self.headers.get("range")?.strip_prefix("bytes=")?.split('-').next()?.parse().ok()
    }
}

/// An answer.
#[derive(Default)]
pub struct Response {
    pub status: u16,
    pub headers: Vec<(&'static str, String)>,
    pub body: Vec<u8>,
    /// Close the connection after so many bytes of the body.
    pub cut: Option<usize>,
}

impl Response {
    pub fn ok(body: impl Into<Vec<u8>>) -> Self {
        Self { status: 200, body: body.into(), ..Self::default() }
    }

    pub fn status(status: u16) -> Self {
        Self { status, ..Self::default() }
    }

    /// `body`, or the rest of it that the request's range asks for.
    pub fn ranged(request: &Request, body: &[u8]) -> Self {
        match request.range_start() {
            Some(start) if start < body.len() => {
                let range = format!("bytes {start}-{}/{}", body.len() - 1, body.len());
                let headers = vec![("Content-Range", range)];
                Self { status: 206, headers, body: body[start..].to_vec(), cut: None }
            }
            _ => Self::ok(body),
        }
    }
}

type Handler = dyn Fn(&Request) -> Response + Send + Sync;

/// Serves until the test ends.
pub struct FakeServer {
    pub url: String,
    asked: Arc<Mutex<Vec<Request>>>,
}

impl FakeServer {
    pub fn start(handler: impl Fn(&Request) -> Response + Send + Sync + 'static) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let asked = Arc::new(Mutex::new(Vec::new()));
        let (handler, log): (Arc<Handler>, _) = (Arc::new(handler), Arc::clone(&asked));
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let (handler, log) = (Arc::clone(&handler), Arc::clone(&log));
                // A client that goes away is not the test's concern.
                std::thread::spawn(move || _ = answer(stream, &*handler, &log));
            }
        });
        Self { url, asked }
    }

    pub fn requests(&self) -> Vec<Request> {
        self.asked.lock().unwrap().clone()
    }

    /// How many requests had this in their target.
    pub fn count(&self, part: &str) -> usize {
        self.requests().iter().filter(|r| r.target.contains(part)).count()
    }
}

fn answer(stream: TcpStream, handler: &Handler, log: &Mutex<Vec<Request>>) -> std::io::Result<()> {
    let mut reader = BufReader::new(stream.try_clone()?);
    let mut line = String::new();
    reader.read_line(&mut line)?;
    let mut words = line.split_whitespace().map(str::to_owned);
    let (method, target) = (words.next().unwrap_or_default(), words.next().unwrap_or_default());
    let mut headers = HashMap::new();
    loop {
        let mut line = String::new();
        reader.read_line(&mut line)?;
        match line.trim_end().split_once(": ") {
            Some((name, value)) => headers.insert(name.to_lowercase(), value.to_owned()),
            None => break,
        };
    }
    let length = headers.get("content-length").and_then(|n| n.parse().ok()).unwrap_or(0);
    let mut body = vec![0; length];
    reader.read_exact(&mut body)?;
    let request = Request { method, target, headers, body: String::from_utf8_lossy(&body).into_owned() };
    log.lock().unwrap().push(request.clone());
    let response = handler(&request);
    let mut stream = stream;
    write!(
        stream,
        "HTTP/1.1 {} X\r\nConnection: close\r\nContent-Length: {}\r\n",
        response.status,
        response.body.len()
    )?;
    for (name, value) in &response.headers {
        write!(stream, "{name}: {value}\r\n")?;
    }
    stream.write_all(b"\r\n")?;
    if request.method != "HEAD" {
        stream.write_all(&response.body[..response.cut.unwrap_or(response.body.len())])?;
    }
    stream.flush()
}

/// The binary with an environment of its own, its folders below `home`.
pub fn kwire(home: &Path, args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_kwire"));
    command.args(args).env_clear().env("HOME", home).env("PATH", "");
    command
}

/// Standard output, trimmed; the test fails if the command did.
pub fn stdout(output: &Output) -> String {
    assert!(output.status.success(), "{}: {}", output.status, stderr(output));
    String::from_utf8_lossy(&output.stdout).trim_end().to_owned()
}

pub fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).trim_end().to_owned()
}
