//! How the crates fit together: the only file that knows the engine, the server and the model sources at once.

use anyhow::{Result, bail};

use crate::config::ServeConfig;
use crate::config::environment::ProcessEnv;
use crate::models;

/// A server in this process.
pub struct Running {
    /// Its address, without /v1.
    pub base_url: String,
}

/// Serves until a signal, then drains.
pub async fn serve(config: ServeConfig) -> Result<()> {
    let running = start(config).await?;
    bail!("{} can't be waited for yet", running.base_url)
}

/// Loads the model and starts to listen; returns when requests can be answered.
pub async fn start(config: ServeConfig) -> Result<Running> {
    let model = models::locate(&config.model.source, config.model.download_dir.as_deref(), &ProcessEnv).await?;
    bail!("{} was found, but the engine is not wired into this binary yet", model.path.display())
}
