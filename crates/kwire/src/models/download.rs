//! Downloads one file: resumed, checked, and moved into place in one step.
//!
//! Invariants: under the final name there is the whole, checked file or nothing; one process downloads at a time, the
//! others wait and find the file; a full disk leaves nothing behind.

use std::fs::{File, OpenOptions};
use std::io::{ErrorKind, Read, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail};
use indicatif::{ProgressBar, ProgressStyle};
use reqwest::{RequestBuilder, StatusCode, header};
use sha2::{Digest, Sha256};

/// Attempts for one file; each goes on where the last one ended.
const ATTEMPTS: u32 = 5;

/// One file to download.
#[derive(Debug, Clone)]
pub struct Job {
    /// What the user is told.
    pub label: String,
    /// Final path.
    pub dest: PathBuf,
    /// Held while downloading.
    pub lock: PathBuf,
    /// Size in bytes, where known.
    pub size: Option<u64>,
    /// Checksum in hexadecimal, where known.
    pub sha256: Option<String>,
}

/// An exclusive lock on a file, waited for; released when dropped.
pub async fn lock(path: &Path, what: &str) -> Result<File> {
    let shown = || cannot_be("locked", path);
    if let Some(parent) = path.parent() {
        std::fs::create_dir_all(parent).with_context(|| cannot_be("created", parent))?;
    }
    let file = File::create(path).with_context(shown)?;
    if file.try_lock().is_err() {
        eprintln!("another process downloads {what}: waiting for it");
        let waiter = file.try_clone()?;
        tokio::task::spawn_blocking(move || waiter.lock()).await?.with_context(shown)?;
    }
    Ok(file)
}

/// Downloads `job`; `request` makes the request, to which a range is added.
pub async fn fetch(job: &Job, request: impl Fn() -> RequestBuilder, bar: &ProgressBar) -> Result<()> {
    if job.dest.exists() {
        return Ok(());
    }
    let _held = lock(&job.lock, &job.label).await?;
    if job.dest.exists() {
        return Ok(());
    }
    let mut part = Part::open(job)?;
    let mut attempt = 0;
    loop {
        attempt += 1;
        bar.set_position(part.len);
        match part.receive(&request, bar).await {
            Ok(()) => break,
            Err(Failure::Final(e)) => return Err(e),
            Err(Failure::Again(e)) if attempt == ATTEMPTS => {
                return Err(e.context(format!("{} could not be downloaded in {ATTEMPTS} attempts", job.label)));
            }
            Err(Failure::Again(_)) => tokio::time::sleep(Duration::from_millis(250 << attempt)).await,
        }
    }
    part.finish()
}

/// Whether another attempt makes sense.
enum Failure {
    Again(anyhow::Error),
    Final(anyhow::Error),
}

/// The part of a file that is here, with the state of its checksum.
struct Part<'a> {
    job: &'a Job,
    path: PathBuf,
    file: File,
    len: u64,
    hash: Sha256,
}

impl<'a> Part<'a> {
    fn open(job: &'a Job) -> Result<Self> {
        let path = incomplete(&job.dest);
        let shown = || cannot_be("written", &path);
        let mut file = OpenOptions::new().read(true).append(true).create(true).open(&path).with_context(shown)?;
        let (mut len, mut hash, mut buffer) = (0, Sha256::new(), vec![0; 1 << 20]);
        loop {
            match file.read(&mut buffer).with_context(shown)? {
                0 => break,
                n => {
                    hash.update(&buffer[..n]);
                    len += n as u64;
                }
            }
        }
        let mut part = Self { job, path, file, len, hash };
        if job.size.is_some_and(|size| part.len > size) {
            part.restart()?;
        }
        Ok(part)
    }

    fn restart(&mut self) -> Result<()> {
        self.file.set_len(0)?;
        (self.len, self.hash) = (0, Sha256::new());
        Ok(())
    }

    async fn receive(&mut self, request: &impl Fn() -> RequestBuilder, bar: &ProgressBar) -> Result<(), Failure> {
        if self.job.size == Some(self.len) {
            return Ok(());
        }
        let mut request = request();
        if self.len > 0 {
            request = request.header(header::RANGE, format!("bytes={}-", self.len));
        }
        let mut response = request.send().await.map_err(|e| Failure::Again(e.into()))?;
        let status = response.status();
        if status == StatusCode::OK || status == StatusCode::RANGE_NOT_SATISFIABLE {
            self.restart().map_err(Failure::Final)?;
            bar.set_position(0);
        }
        if !status.is_success() {
            let e = anyhow!("{} answered {status} for {}", response.url(), self.job.label);
            let passing = status.is_server_error()
                || [StatusCode::RANGE_NOT_SATISFIABLE, StatusCode::TOO_MANY_REQUESTS].contains(&status);
            return Err(if passing { Failure::Again(e) } else { Failure::Final(e) });
        }
        while let Some(chunk) = response.chunk().await.map_err(|e| Failure::Again(e.into()))? {
            self.write(&chunk).map_err(Failure::Final)?;
            bar.inc(chunk.len() as u64);
        }
        match self.job.size {
            Some(size) if self.len < size => {
                Err(Failure::Again(anyhow!("the connection ended after {} of {size} bytes", self.len)))
            }
            _ => Ok(()),
        }
    }

    fn write(&mut self, chunk: &[u8]) -> Result<()> {
        self.file.write_all(chunk).map_err(|e| write_failed(e, &self.path))?;
        self.hash.update(chunk);
        self.len += chunk.len() as u64;
        Ok(())
    }

    fn finish(self) -> Result<()> {
        let Self { job, path, file, len, hash } = self;
        let found = hex(&hash.finalize());
        let wrong_size = job.size.filter(|size| *size != len);
        let wrong_hash = job.sha256.as_ref().filter(|sha| **sha != found);
        if wrong_size.is_some() || wrong_hash.is_some() {
            _ = std::fs::remove_file(&path);
            if let Some(size) = wrong_size {
                bail!("{} has {len} bytes in place of {size}; it was not kept", job.label);
            }
            bail!("{} has SHA-256 {found}, not the announced one; it was not kept: try again", job.label);
        }
        file.sync_all().map_err(|e| write_failed(e, &path))?;
        std::fs::rename(&path, &job.dest).with_context(|| format!("{} cannot be written", job.dest.display()))
    }
}

/// The name of a file while it is not whole; the Hugging Face libraries use the same.
pub fn incomplete(dest: &Path) -> PathBuf {
    let mut name = dest.as_os_str().to_owned();
    name.push(".incomplete");
    PathBuf::from(name)
}

/// What to say of a place that models can't be kept at.
pub fn cannot_be(done: &str, path: &Path) -> String {
    format!("{} cannot be {done}; --download-dir, HF_HOME or KWIRE_HOME keep models elsewhere", path.display())
}

/// Explains a failed write; on a full disk the partial file is removed, so that the disk is as before.
pub fn write_failed(e: std::io::Error, path: &Path) -> anyhow::Error {
    if e.kind() != ErrorKind::StorageFull {
        return anyhow::Error::new(e).context(cannot_be("written", path));
    }
    _ = std::fs::remove_file(path);
    DiskFull(path.to_owned()).into()
}

/// A download that did not fit.
#[derive(Debug, thiserror::Error)]
#[error(
    "the disk of {} is full. The partial download was removed; free some space, or keep models elsewhere with \
     --download-dir, HF_HOME or KWIRE_HOME",
    .0.display()
)]
pub struct DiskFull(PathBuf);

/// Lower-case hexadecimal.
pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}

/// A progress bar for one download; silent where standard error is not a terminal.
pub fn bar(label: &str, size: Option<u64>) -> ProgressBar {
    let bar = size.map_or_else(ProgressBar::new_spinner, ProgressBar::new);
    let style = "{msg:40!} {bar:24} {bytes:>10} / {total_bytes:10} {binary_bytes_per_sec:>12} {eta:>4}";
    if let Ok(style) = ProgressStyle::with_template(style) {
        bar.set_style(style);
    }
    bar.set_message(label.to_owned());
    bar
}
