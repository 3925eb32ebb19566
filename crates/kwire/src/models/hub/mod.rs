//! Models of the Hugging Face hub, kept in its own cache layout, so that other tools and this one share files.
//!
//! `CACHE/models--ORG--NAME/{refs/REVISION, snapshots/COMMIT/FILE → blobs/ETAG}`. A commit that is here whole is used
//! without a request; a branch or tag is asked for, and where the hub can't be reached the cached one is used.
//! `HF_TOKEN`, `HF_HOME`, `HF_HUB_CACHE`, `HF_ENDPOINT` and `HF_HUB_OFFLINE` are honoured.

mod api;
mod cache;

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail};
use futures::stream::{self, StreamExt, TryStreamExt};
use indicatif::MultiProgress;

use super::download::{self, Job};
use super::home;
use super::reference::HubRef;
use super::select::select;
use crate::config::environment::Lookup;
use api::{Api, ApiError, RemoteFile, RepoInfo};
use cache::Repo;

pub use cache::list;

/// Files downloaded at the same time.
const PARALLEL: usize = 4;

/// Silence on a connection that ends an attempt.
const READ_TIMEOUT: Duration = Duration::from_secs(60);

/// The hub and its cache on this machine.
pub struct Hub {
    api: Option<Api>,
    cache: PathBuf,
}

impl Hub {
    /// Set up from the environment; `download_dir` replaces the cache folder.
    pub fn new(env: &impl Lookup, download_dir: Option<&Path>) -> Result<Self> {
        let cache = download_dir.map_or_else(|| home::hub_cache(env), |d| Ok(d.to_owned()))?;
        let offline = env.is_yes("HF_HUB_OFFLINE") || env.is_yes("TRANSFORMERS_OFFLINE");
        let api = if offline { None } else { Some(Api::new(env, READ_TIMEOUT)?) };
        Ok(Self { api, cache })
    }

    /// The model's .gguf file or folder, if all of it is in the cache.
    pub fn find(&self, model: &HubRef) -> Option<PathBuf> {
        Repo::new(&self.cache, &model.repo).find(&model.revision, model.select.as_deref()).ok()
    }

    /// The model's .gguf file or folder, downloaded as far as it isn't here.
    pub async fn locate(&self, model: &HubRef) -> Result<PathBuf> {
        let repo = Repo::new(&self.cache, &model.repo);
        let cached = repo.find(&model.revision, model.select.as_deref());
        let Some(api) = &self.api else {
            return cached.with_context(|| format!("HF_HUB_OFFLINE is set, and {model} is not in the cache: {NEXT}"));
        };
        if let (true, Ok(path)) = (cache::is_commit(&model.revision), &cached) {
            return Ok(path.clone());
        }
        let info = match api.info(&model.repo, &model.revision).await {
            Ok(info) => info,
            Err(e @ (ApiError::Unreachable { .. } | ApiError::Failing { .. })) => {
                return match cached {
                    Ok(path) => {
                        eprintln!("note: {e}; the cached {model} is used");
                        Ok(path)
                    }
                    Err(_) => Err(anyhow!("{e}, and {model} is not in the cache {}: {NEXT}", self.cache.display())),
                };
            }
            Err(e) => return Err(e.into()),
        };
        self.download(api, &repo, model, &info).await
    }

    async fn download(&self, api: &Api, repo: &Repo, model: &HubRef, info: &RepoInfo) -> Result<PathBuf> {
        let names: Vec<String> = info.files.iter().map(|f| f.name.clone()).collect();
        let selection = select(&names, model.select.as_deref()).map_err(|e| anyhow!("{model}: {e}"))?;
        let wanted = info.files.iter().filter(|f| selection.files.contains(&f.name));
        let missing: Vec<_> = wanted.filter(|f| !repo.snapshot(&info.commit).join(&f.name).exists()).collect();
        if !missing.is_empty() {
            let bars = MultiProgress::new();
            let work = missing.into_iter().map(|file| self.download_file(api, repo, model, info, file, &bars));
            stream::iter(work).buffer_unordered(PARALLEL).try_collect::<Vec<()>>().await?;
        }
        repo.set_ref(&model.revision, &info.commit)?;
        let path = selection.path_in(&repo.snapshot(&info.commit));
        if !path.exists() {
            bail!("{} is missing after its download", path.display());
        }
        Ok(path)
    }

    async fn download_file(
        &self,
        api: &Api,
        repo: &Repo,
        model: &HubRef,
        info: &RepoInfo,
        file: &RemoteFile,
        bars: &MultiProgress,
    ) -> Result<()> {
        let blob = match &file.blob {
            Some(blob) => blob.clone(),
            None => api.etag(&model.repo, &info.commit, &file.name).await?,
        };
        if blob.is_empty() || !blob.chars().all(|c| c.is_ascii_alphanumeric() || c == '-') {
            bail!("the hub names the content of {} {blob:?}, which can't be a file name", file.name);
        }
        let job = Job {
            label: file.name.clone(),
            dest: repo.blob(&blob)?,
            lock: repo.lock(&blob),
            size: file.size,
            sha256: cache::is_sha256(&blob).then(|| blob.clone()),
        };
        let bar = bars.add(download::bar(&file.name, file.size));
        download::fetch(&job, || api.get_file(&model.repo, &info.commit, &file.name), &bar).await?;
        bar.finish();
        repo.link(&info.commit, &file.name, &blob)
    }
}

/// What to do where the hub can't be reached.
const NEXT: &str = "run `kwire pull` where the hub can be reached and copy the cache here (HF_HOME says where it is), set \
                    HF_ENDPOINT to a mirror, or give a local .gguf file, a model folder, s3://BUCKET/PREFIX, or the \
                    built-in `smollm2`";
