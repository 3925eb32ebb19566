//! The HTTP client of the binary, and server-sent events as `run` and `bench` read them.

use std::time::Duration;

use anyhow::{Context, Result, bail};
use reqwest::ClientBuilder;

/// How long a connection may take to come about.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

/// A client builder with TLS by rustls over the system's certificates.
pub fn client() -> ClientBuilder {
    // Fails only where a provider is set already, which is as good.
    _ = rustls::crypto::ring::default_provider().install_default();
    reqwest::Client::builder().connect_timeout(CONNECT_TIMEOUT).user_agent(concat!("kwire/", env!("CARGO_PKG_VERSION")))
}

/// `http://host:8000/v1/` → `http://host:8000`.
pub fn base_url(url: &str) -> &str {
    let url = url.trim_end_matches('/');
    url.strip_suffix("/v1").unwrap_or(url)
}

/// The `data:` fields of a stream of server-sent events, across any split of its bytes.
#[derive(Debug, Default)]
pub struct SseReader {
    buffer: Vec<u8>,
}

impl SseReader {
    /// Takes bytes as they come; gives the data of each line that is complete.
    pub fn feed(&mut self, bytes: &[u8]) -> Vec<String> {
        self.buffer.extend_from_slice(bytes);
        let mut found = Vec::new();
        let mut start = 0;
        while let Some(length) = self.buffer[start..].iter().position(|b| *b == b'\n') {
            let line = self.buffer[start..start + length].trim_ascii_end();
            if let Some(data) = line.strip_prefix(b"data:") {
                found.push(String::from_utf8_lossy(data.trim_ascii_start()).into_owned());
            }
            start += length + 1;
        }
        self.buffer.drain(..start);
        found
    }
}

/// The model to ask a server for: the wanted one, if it serves that, or the first that it serves.
pub async fn served_model(
    client: &reqwest::Client,
    base: &str,
    api_key: Option<&str>,
    wanted: Option<&str>,
) -> Result<String> {
    let url = format!("{base}/v1/models");
    let mut request = client.get(&url);
    if let Some(key) = api_key {
        request = request.bearer_auth(key);
    }
    let response = request.send().await.with_context(|| format!("no server answers at {base}"))?;
    let text = response.error_for_status()?.text().await?;
    let list: serde_json::Value = serde_json::from_str(&text).with_context(|| format!("{url} is not JSON"))?;
    let ids: Vec<_> = list["data"].as_array().into_iter().flatten().filter_map(|m| m["id"].as_str()).collect();
    match wanted {
        None => ids.first().map(|&id| id.to_owned()).with_context(|| format!("{url} lists no model")),
        Some(wanted) if ids.contains(&wanted) => Ok(wanted.to_owned()),
        Some(wanted) => {
            bail!("{base} has no model {wanted:?}; it serves {}. A question comes after the model", ids.join(", "))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_survive_any_split() {
        let stream = b"data: {\"a\": \"\xc3\xa9\"}\n\n: comment\r\ndata:two\r\n\r\ndata: [DONE]\n\n";
        for size in 1..stream.len() {
            let mut reader = SseReader::default();
            let found: Vec<_> = stream.chunks(size).flat_map(|c| reader.feed(c)).collect();
            assert_eq!(found, ["{\"a\": \"é\"}", "two", "[DONE]"], "in pieces of {size}");
        }
    }

    #[test]
    fn base_urls_may_have_v1() {
        for url in ["http://h:1", "http://h:1/", "http://h:1/v1", "http://h:1/v1/"] {
            assert_eq!(base_url(url), "http://h:1");
        }
    }
}
