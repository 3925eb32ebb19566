//! The Hugging Face cache on disk.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, anyhow, bail};

use crate::models::download::cannot_be;
use crate::models::select::select;

/// One repository in the cache.
pub struct Repo {
    cache: PathBuf,
    name: String,
}

impl Repo {
    /// `repo` is `org/name`.
    pub fn new(cache: &Path, repo: &str) -> Self {
        Self { cache: cache.to_owned(), name: format!("models--{}", repo.replace('/', "--")) }
    }

    /// Its folder.
    pub fn folder(&self) -> PathBuf {
        self.cache.join(&self.name)
    }

    /// The folder of a commit's files.
    pub fn snapshot(&self, commit: &str) -> PathBuf {
        self.folder().join("snapshots").join(commit)
    }

    /// Where a file's content goes; its folder is made.
    pub fn blob(&self, blob: &str) -> Result<PathBuf> {
        let blobs = self.folder().join("blobs");
        std::fs::create_dir_all(&blobs).with_context(|| cannot_be("created", &blobs))?;
        Ok(blobs.join(blob))
    }

    /// The lock of a file's content, where the Hugging Face libraries have it.
    pub fn lock(&self, blob: &str) -> PathBuf {
        self.cache.join(".locks").join(&self.name).join(format!("{blob}.lock"))
    }

    /// Makes a file of a snapshot: a relative link to its content.
    pub fn link(&self, commit: &str, name: &str, blob: &str) -> Result<()> {
        let path = self.snapshot(commit).join(name);
        let shown = || cannot_be("created", &path);
        if path.exists() {
            return Ok(());
        }
        std::fs::create_dir_all(path.parent().context("a file has a folder")?).with_context(shown)?;
        let mut target = PathBuf::from("../..");
        target.extend(std::iter::repeat_n("..", name.matches('/').count()));
        target.extend(["blobs", blob]);
        _ = std::fs::remove_file(&path); // a link to content that is gone
        make_link(&target, &path, &self.folder().join("blobs").join(blob)).with_context(shown)
    }

    /// Notes which commit a branch or tag stands for.
    pub fn set_ref(&self, revision: &str, commit: &str) -> Result<()> {
        if revision == commit {
            return Ok(());
        }
        let path = self.folder().join("refs").join(revision);
        let write = || {
            std::fs::create_dir_all(path.parent().unwrap_or(&self.cache))?;
            std::fs::write(&path, commit)
        };
        write().with_context(|| cannot_be("written", &path))
    }

    /// What to open for `wanted` at `revision`, if all of it is here.
    pub fn find(&self, revision: &str, wanted: Option<&str>) -> Result<PathBuf> {
        let commit = if is_commit(revision) {
            revision.to_owned()
        } else {
            let path = self.folder().join("refs").join(revision);
            std::fs::read_to_string(path).with_context(|| format!("revision {revision:?} is not there"))?
        };
        let snapshot = self.snapshot(commit.trim());
        let selection = select(&files_in(&snapshot), wanted).map_err(|e| anyhow!(e))?;
        let index = snapshot.join("model.safetensors.index.json");
        if selection.gguf.is_none() && index.exists() {
            check_shards(&index, &selection.files)?;
        }
        Ok(selection.path_in(&snapshot))
    }
}

#[cfg(unix)]
fn make_link(target: &Path, path: &Path, _blob: &Path) -> std::io::Result<()> {
    match std::os::unix::fs::symlink(target, path) {
        // Another process made it.
        Err(e) if e.kind() == std::io::ErrorKind::AlreadyExists => Ok(()),
        other => other,
    }
}

#[cfg(not(unix))]
fn make_link(_target: &Path, path: &Path, blob: &Path) -> std::io::Result<()> {
    std::fs::hard_link(blob, path)
}

/// An interrupted download leaves fewer shards than the index names.
fn check_shards(index: &Path, files: &[String]) -> Result<()> {
    let text = std::fs::read_to_string(index)?;
    let json: serde_json::Value = serde_json::from_str(&text)?;
    let shards = json["weight_map"].as_object().into_iter().flat_map(|map| map.values());
    match shards.filter_map(|s| s.as_str()).find(|s| !files.iter().any(|f| f == s)) {
        Some(missing) => bail!("{missing} is missing"),
        None => Ok(()),
    }
}

/// Names of the files below a folder whose content is there.
fn files_in(folder: &Path) -> Vec<String> {
    let mut found = Vec::new();
    let mut folders = vec![folder.to_owned()];
    while let Some(next) = folders.pop() {
        for entry in std::fs::read_dir(next).into_iter().flatten().flatten() {
            let path = entry.path();
            if path.is_dir() {
                folders.push(path);
            } else if path.exists()
                && let Ok(name) = path.strip_prefix(folder)
            {
                found.push(name.to_string_lossy().replace('\\', "/"));
            }
        }
    }
    found.sort();
    found
}

/// The models in the cache: `org/name` and folder.
pub fn list(cache: &Path) -> Vec<(String, PathBuf)> {
    let entries = std::fs::read_dir(cache).into_iter().flatten().flatten();
    let mut found: Vec<_> = entries
        .filter_map(|entry| {
            let name = entry.file_name().to_string_lossy().strip_prefix("models--")?.replacen("--", "/", 1);
            Some((name, entry.path()))
        })
        .collect();
    found.sort();
    found
}

/// Whether this is a full commit hash.
pub fn is_commit(text: &str) -> bool {
    text.len() == 40 && is_hex(text)
}

/// Whether this is a SHA-256 in hexadecimal.
pub fn is_sha256(text: &str) -> bool {
    text.len() == 64 && is_hex(text)
}

fn is_hex(text: &str) -> bool {
    text.bytes().all(|b| b.is_ascii_digit() || (b'a'..=b'f').contains(&b))
}
