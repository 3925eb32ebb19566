//! The hub's HTTP API: what a repository holds, and its files.

use std::time::Duration;

use anyhow::Result;
use reqwest::{Client, RequestBuilder, StatusCode};
use serde::Deserialize;

use crate::config::environment::Lookup;
use crate::models::home;

/// A client for one endpoint.
pub struct Api {
    client: Client,
    endpoint: String,
    token: Option<String>,
}

/// What a repository holds at a revision.
#[derive(Debug)]
pub struct RepoInfo {
    /// The commit that the revision stands for.
    pub commit: String,
    /// Its files.
    pub files: Vec<RemoteFile>,
}

/// A file of a repository.
#[derive(Debug)]
pub struct RemoteFile {
    /// Path in the repository.
    pub name: String,
    /// Bytes.
    pub size: Option<u64>,
    /// Name of its content: the SHA-256 of large files, git's hash of small ones.
    pub blob: Option<String>,
}

/// Why the hub did not answer the question.
#[derive(Debug, thiserror::Error)]
pub enum ApiError {
    /// No connection.
    #[error("{endpoint} can't be reached ({reason})")]
    Unreachable {
        /// The hub's address.
        endpoint: String,
        /// What the network said.
        reason: String,
    },
    /// The hub is there and does not work.
    #[error("{endpoint} answered {status}")]
    Failing {
        /// The hub's address.
        endpoint: String,
        /// HTTP status.
        status: StatusCode,
    },
    /// No permission.
    #[error(
        "{repo} is private or asks for consent: accept its terms at {endpoint}/{repo}, then set HF_TOKEN to a token of \
         that account{}",
        if *.has_token { " (the token that is set was not enough)" } else { "" }
    )]
    Denied {
        /// `org/name`.
        repo: String,
        /// The hub's address.
        endpoint: String,
        /// Whether a token was sent.
        has_token: bool,
    },
    /// Nothing there.
    #[error("{endpoint} has no model {repo} with revision {revision:?} (or it is private, and HF_TOKEN is missing)")]
    NotFound {
        /// `org/name`.
        repo: String,
        /// Branch, tag or commit.
        revision: String,
        /// The hub's address.
        endpoint: String,
    },
    /// An answer that can't be read.
    #[error("{endpoint} sent an answer that can't be read: {reason}")]
    Garbled {
        /// The hub's address.
        endpoint: String,
        /// Why.
        reason: String,
    },
}

#[derive(Deserialize)]
struct InfoBody {
    sha: String,
    #[serde(default)]
    siblings: Vec<Sibling>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Sibling {
    rfilename: String,
    size: Option<u64>,
    blob_id: Option<String>,
    lfs: Option<Lfs>,
}

#[derive(Deserialize)]
struct Lfs {
    sha256: String,
    size: u64,
}

impl Api {
    /// Set up from the environment.
    pub fn new(env: &impl Lookup, read_timeout: Duration) -> Result<Self> {
        let endpoint = env.get("HF_ENDPOINT").unwrap_or_else(|| "https://huggingface.co".to_owned());
        let token_file = env.path("HF_TOKEN_PATH").or_else(|| Some(home::hf_home(env).ok()?.join("token")));
        let token = env.get("HF_TOKEN").or_else(|| env.get("HUGGING_FACE_HUB_TOKEN"));
        let token = token.or_else(|| std::fs::read_to_string(token_file?).ok());
        Ok(Self {
            client: crate::http::client().read_timeout(read_timeout).build()?,
            endpoint: endpoint.trim_end_matches('/').to_owned(),
            token: token.map(|t| t.trim().to_owned()).filter(|t| !t.is_empty()),
        })
    }

    /// Adds the token. reqwest drops it where a redirect leads to another host.
    fn authorized(&self, request: RequestBuilder) -> RequestBuilder {
        self.token.iter().fold(request, RequestBuilder::bearer_auth)
    }

    fn get(&self, url: &str) -> RequestBuilder {
        self.authorized(self.client.get(url))
    }

    /// What `repo` holds at `revision`.
    pub async fn info(&self, repo: &str, revision: &str) -> Result<RepoInfo, ApiError> {
        let url = format!("{}/api/models/{repo}/revision/{}?blobs=true", self.endpoint, escaped(revision));
        let endpoint = self.endpoint.clone();
        let response = match self.get(&url).send().await {
            Ok(response) => response,
            Err(e) => return Err(ApiError::Unreachable { endpoint, reason: root_cause(&e) }),
        };
        match response.status() {
            StatusCode::OK => {}
            StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => {
                return Err(ApiError::Denied { repo: repo.to_owned(), endpoint, has_token: self.token.is_some() });
            }
            StatusCode::NOT_FOUND => {
                return Err(ApiError::NotFound { repo: repo.to_owned(), revision: revision.to_owned(), endpoint });
            }
            status => return Err(ApiError::Failing { endpoint, status }),
        }
        let garbled = |reason: String| ApiError::Garbled { endpoint: endpoint.clone(), reason };
        let text = response.text().await.map_err(|e| garbled(root_cause(&e)))?;
        let body: InfoBody = serde_json::from_str(&text).map_err(|e| garbled(e.to_string()))?;
        if !super::cache::is_commit(&body.sha) {
            return Err(garbled(format!("{:?} is not a commit", body.sha)));
        }
        // A name that leaves the folder is no file of a model.
        let inside = |name: &str| name.split('/').all(|part| !part.is_empty() && part != "." && part != "..");
        let files = body.siblings.into_iter().filter(|s| inside(&s.rfilename)).map(RemoteFile::from).collect();
        Ok(RepoInfo { commit: body.sha, files })
    }

    /// A request for a file; ranges may be added.
    pub fn get_file(&self, repo: &str, commit: &str, name: &str) -> RequestBuilder {
        self.get(&self.file_url(repo, commit, name))
    }

    /// The name of a file's content, for endpoints that leave it out of [`Self::info`].
    pub async fn etag(&self, repo: &str, commit: &str, name: &str) -> Result<String> {
        let request = self.client.head(self.file_url(repo, commit, name));
        let response = self.authorized(request).send().await?.error_for_status()?;
        let header = |name: &str| response.headers().get(name)?.to_str().ok().map(str::to_owned);
        let etag = header("x-linked-etag").or_else(|| header("etag")).unwrap_or_default();
        Ok(etag.trim_start_matches("W/").trim_matches('"').to_owned())
    }

    fn file_url(&self, repo: &str, commit: &str, name: &str) -> String {
        format!(
            "{}/{repo}/resolve/{commit}/{}",
            self.endpoint,
            name.split('/').map(escaped).collect::<Vec<_>>().join("/")
        )
    }
}

impl From<Sibling> for RemoteFile {
    fn from(s: Sibling) -> Self {
        match s.lfs {
            Some(lfs) => Self { name: s.rfilename, size: Some(lfs.size), blob: Some(lfs.sha256) },
            None => Self { name: s.rfilename, size: s.size, blob: s.blob_id },
        }
    }
}

/// Percent-encodes one part of a path.
fn escaped(part: &str) -> String {
    let plain = |b: u8| b.is_ascii_alphanumeric() || b"-_.~".contains(&b);
    part.bytes().map(|b| if plain(b) { char::from(b).to_string() } else { format!("%{b:02X}") }).collect()
}

/// The innermost reason of an error; the outer ones repeat the address.
fn root_cause(e: &dyn std::error::Error) -> String {
    let mut cause = e;
    while let Some(inner) = cause.source() {
        cause = inner;
    }
    cause.to_string()
}
