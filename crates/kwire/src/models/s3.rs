//! Models in object storage: any S3-compatible endpoint.
//!
//! Credentials and endpoint come from the `AWS_` variables, a web identity (IRSA) or the instance's role; for storage
//! of your own set `AWS_ENDPOINT_URL`, for public buckets `AWS_SKIP_SIGNATURE=true`. A model is kept at
//! `models/s3/BUCKET/PREFIX/VERSION`, where VERSION names the content of its objects: a changed object makes a new
//! folder, and servers that run on the old one are not disturbed. A folder appears whole, in one step.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail};
use futures::{StreamExt, TryStreamExt};
use indicatif::MultiProgress;
use object_store::aws::AmazonS3Builder;
use object_store::{ObjectMeta, ObjectStore, ObjectStoreExt, RetryConfig};
use sha2::{Digest, Sha256};

use super::download::{self, hex};
use super::select::select;
use crate::config::environment::Lookup;

/// Objects downloaded at the same time.
const PARALLEL: usize = 4;

/// The model's .gguf file or folder, downloaded as far as it isn't here.
pub async fn locate(bucket: &str, prefix: &str, home: &Path, env: &impl Lookup) -> Result<PathBuf> {
    let shown = format!("s3://{bucket}/{prefix}");
    let folder = folder(home, bucket, prefix);
    let store = open(bucket, env)?;
    let objects = match list(&store, prefix).await {
        Ok(objects) if objects.is_empty() => bail!("{shown}: there are no objects"),
        Ok(objects) => objects,
        Err(e) => {
            return cached(&folder).ok_or_else(|| unreachable(&shown, &e)).inspect(|_| {
                eprintln!("note: {shown} can't be listed ({e}); the copy that is here is used");
            });
        }
    };
    let names: Vec<String> = objects.iter().map(|o| name_of(o, prefix)).collect();
    let selection = select(&names, None).map_err(|e| anyhow!("{shown}: {e}"))?;
    let wanted: Vec<_> = objects.iter().zip(&names).filter(|(_, name)| selection.files.contains(name)).collect();
    let version = folder.join(version(&wanted));
    if !version.is_dir() {
        let _held = download::lock(&folder.join(".lock"), &shown).await?;
        if !version.is_dir() {
            download_all(&store, &wanted, &version).await?;
        }
    }
    Ok(selection.path_in(&version))
}

/// The newest version that is on this machine.
pub fn find(bucket: &str, prefix: &str, home: &Path) -> Option<PathBuf> {
    cached(&folder(home, bucket, prefix))
}

/// Where the versions of a model are kept.
fn folder(home: &Path, bucket: &str, prefix: &str) -> PathBuf {
    let prefix = if prefix.is_empty() { "-".to_owned() } else { prefix.replace('/', "--") };
    home.join("models").join("s3").join(bucket).join(prefix)
}

fn open(bucket: &str, env: &impl Lookup) -> Result<Arc<dyn ObjectStore>> {
    _ = rustls::crypto::ring::default_provider().install_default();
    let retry = RetryConfig { max_retries: 4, retry_timeout: Duration::from_secs(30), ..RetryConfig::default() };
    let mut builder = AmazonS3Builder::from_env().with_bucket_name(bucket).with_retry(retry);
    let endpoint = env.get("AWS_ENDPOINT_URL_S3").or_else(|| env.get("AWS_ENDPOINT_URL"));
    if let Some(endpoint) = endpoint {
        builder = builder.with_allow_http(endpoint.starts_with("http://")).with_endpoint(endpoint);
    }
    Ok(Arc::new(builder.build().context("the S3 client can't be set up")?))
}

async fn list(store: &Arc<dyn ObjectStore>, prefix: &str) -> object_store::Result<Vec<ObjectMeta>> {
    let path = object_store::path::Path::from(prefix);
    if prefix.ends_with(".gguf") {
        return Ok(vec![store.head(&path).await?]);
    }
    store.list(Some(&path)).try_collect().await
}

/// An object's name below the prefix.
fn name_of(object: &ObjectMeta, prefix: &str) -> String {
    let key = object.location.as_ref();
    let below = key.strip_prefix(prefix).map(|rest| rest.trim_start_matches('/'));
    match below {
        Some(below) if !below.is_empty() => below.to_owned(),
        _ => object.location.filename().unwrap_or(key).to_owned(),
    }
}

/// A name for the content of these objects.
fn version(objects: &[(&ObjectMeta, &String)]) -> String {
    let mut hash = Sha256::new();
    for (object, name) in objects {
        let tag = object.e_tag.as_deref().unwrap_or_default();
        hash.update(format!("{name}\0{}\0{tag}\0{}\n", object.size, object.last_modified));
    }
    hex(&hash.finalize())[..12].to_owned()
}

async fn download_all(store: &Arc<dyn ObjectStore>, objects: &[(&ObjectMeta, &String)], version: &Path) -> Result<()> {
    let partial = download::incomplete(version);
    let bars = MultiProgress::new();
    let work = objects.iter().map(|(object, name)| download_one(store, object, name, &partial, &bars));
    let done = futures::stream::iter(work).buffer_unordered(PARALLEL).try_collect::<Vec<()>>().await;
    if let Err(e) = done {
        // Whole files stay for the next attempt, unless the disk is full.
        if e.is::<download::DiskFull>() {
            _ = std::fs::remove_dir_all(&partial);
        }
        return Err(e);
    }
    std::fs::rename(&partial, version).with_context(|| format!("{} cannot be written", version.display()))
}

async fn download_one(
    store: &Arc<dyn ObjectStore>,
    object: &ObjectMeta,
    name: &str,
    folder: &Path,
    bars: &MultiProgress,
) -> Result<()> {
    let path = folder.join(name);
    if path.metadata().is_ok_and(|m| m.len() == object.size) {
        return Ok(()); // left by an interrupted download of the same version
    }
    let parent = path.parent().context("a file has a folder")?;
    std::fs::create_dir_all(parent).with_context(|| download::cannot_be("created", parent))?;
    let part = download::incomplete(&path);
    let bar = bars.add(download::bar(name, Some(object.size)));
    let mut file = std::fs::File::create(&part).map_err(|e| download::write_failed(e, &part))?;
    let mut chunks = store.get(&object.location).await?.into_stream();
    let mut received = 0;
    while let Some(chunk) = chunks.next().await {
        let chunk = chunk.with_context(|| format!("{name} could not be downloaded"))?;
        std::io::Write::write_all(&mut file, &chunk).map_err(|e| download::write_failed(e, &part))?;
        received += chunk.len() as u64;
        bar.set_position(received);
    }
    if received != object.size {
        _ = std::fs::remove_file(&part);
        bail!("{name} has {received} bytes in place of {}; it was not kept", object.size);
    }
    file.sync_all().map_err(|e| download::write_failed(e, &part))?;
    bar.finish();
    std::fs::rename(&part, &path).with_context(|| format!("{} cannot be written", path.display()))
}

/// The newest whole version that is here.
fn cached(folder: &Path) -> Option<PathBuf> {
    let versions = std::fs::read_dir(folder).ok()?.flatten().map(|e| e.path());
    let whole = versions.filter(|p| p.is_dir() && p.extension().is_none());
    let newest = whole.max_by_key(|p| p.metadata().and_then(|m| m.modified()).ok())?;
    let names: Vec<String> =
        std::fs::read_dir(&newest).ok()?.flatten().map(|e| e.file_name().to_string_lossy().into_owned()).collect();
    Some(select(&names, None).ok()?.path_in(&newest))
}

fn unreachable(shown: &str, e: &object_store::Error) -> anyhow::Error {
    anyhow!(
        "{shown} can't be read: {e}\nSet AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (or AWS_SKIP_SIGNATURE=true for a \
         public bucket), AWS_REGION, and AWS_ENDPOINT_URL for storage that is not Amazon's"
    )
}
