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

use anyhow::Result;

use crate::config::environment::Lookup;

/// Where a model was found: a .gguf file, or a folder with config.json and safetensors.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LocalModel {
    /// What a checkpoint loader opens.
    pub path: PathBuf,
}

/// Finds the model, downloading it first where that is needed.
pub async fn locate(source: &ModelRef, download_dir: Option<&Path>, env: &impl Lookup) -> Result<LocalModel> {
    let path = match source {
        ModelRef::Local(path) => path.clone(),
        ModelRef::Alias => alias::locate(&home::home(env)?)?,
        ModelRef::Hub(hub) => hub::Hub::new(env, download_dir)?.locate(hub).await?,
        #[cfg(feature = "s3")]
        ModelRef::S3 { bucket, prefix } => {
            let home = download_dir.map_or_else(|| home::home(env), |d| Ok(d.to_owned()))?;
            s3::locate(bucket, prefix, &home, env).await?
        }
        #[cfg(not(feature = "s3"))]
        ModelRef::S3 { .. } => anyhow::bail!("this kwire was built without the feature `s3`"),
    };
    Ok(LocalModel { path })
}
