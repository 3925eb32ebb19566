//! Finds a model: on this machine, in a cache, or over the network.
//!
//! [`locate`] turns what the user wrote ([`ModelRef`]) into a path that a checkpoint loader can open. Whatever is
//! downloaded is checked, moved into place in one step, and downloaded by one process at a time.

mod alias;
pub mod commands;
mod download;
pub mod home;
mod hub;
mod reference;
#[cfg(feature = "s3")]
mod s3;
mod select;

pub use reference::{ALIAS, ModelRef};

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

use crate::config::environment::Lookup;

/// Finds the model, downloading it first where that is needed: a .gguf file, or a folder with config.json and
/// safetensors.
pub async fn locate(source: &ModelRef, download_dir: Option<&Path>, env: &impl Lookup) -> Result<PathBuf> {
    match source {
        ModelRef::Local(path) => local(path),
        ModelRef::Alias => alias::locate(&home::home(env)?),
        ModelRef::Hub(hub) => hub::Hub::new(env, download_dir)?.locate(hub).await,
        #[cfg(feature = "s3")]
        ModelRef::S3 { bucket, prefix } => {
            let home = download_dir.map_or_else(|| home::home(env), |d| Ok(d.to_owned()))?;
            s3::locate(bucket, prefix, &home, env).await
        }
        #[cfg(not(feature = "s3"))]
        ModelRef::S3 { .. } => bail!("this kwire was built without the feature `s3`"),
    }
}

/// The model as far as it is on this machine, without a request to anyone; `None`: it isn't, or not all of it.
pub fn find(source: &ModelRef, download_dir: Option<&Path>, env: &impl Lookup) -> Result<Option<PathBuf>> {
    match source {
        ModelRef::Local(path) => local(path).map(Some),
        ModelRef::Alias => Ok(alias::find(&home::home(env)?)),
        ModelRef::Hub(hub) => Ok(hub::Hub::new(env, download_dir)?.find(hub)),
        #[cfg(feature = "s3")]
        ModelRef::S3 { bucket, prefix } => {
            let home = download_dir.map_or_else(|| home::home(env), |d| Ok(d.to_owned()))?;
            Ok(s3::find(bucket, prefix, &home))
        }
        #[cfg(not(feature = "s3"))]
        ModelRef::S3 { .. } => Ok(None),
    }
}

/// A path that the user gave. A folder without config.json is no model, though it may hold some.
fn local(path: &Path) -> Result<PathBuf> {
    if !path.is_dir() || path.join("config.json").exists() {
        return Ok(path.to_owned());
    }
    let shown = path.display();
    let files = std::fs::read_dir(path).with_context(|| format!("{shown} cannot be read"))?.flatten();
    let names = files.map(|f| f.file_name().to_string_lossy().into_owned());
    let mut ggufs: Vec<_> = names.filter(|n| n.to_lowercase().ends_with(".gguf")).collect();
    ggufs.sort();
    match ggufs.first() {
        Some(first) => {
            bail!("{shown} has no config.json; name one of its .gguf files, like {}", path.join(first).display())
        }
        None => bail!("{shown} is not a model: its folder must have config.json, *.safetensors and tokenizer.json"),
    }
}
