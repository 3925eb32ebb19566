//! Whether the engine does its work: what `/health` says.

use std::time::Duration;

use kwire_engine::Command;
use tokio::sync::oneshot;

use crate::ambient::Ambient;
use crate::config::HealthConfig;
use crate::link::Link;

/// Seconds for which an answer to a ping is good, so that probes do not add up.
const PONG_VALID_S: f64 = 1.0;

/// What is wrong.
#[derive(Debug, Clone, Copy, PartialEq, thiserror::Error)]
pub enum Unhealthy {
    /// The model is not there yet.
    #[error("the model is still loading")]
    Loading,
    /// The engine thread ended.
    #[error("the engine has stopped")]
    Stopped,
    /// Work is pending and no step was done.
    #[error("the engine has not finished a step for {0:.0} s while requests are pending")]
    Stuck(f64),
    /// Idle, and a ping is not answered.
    #[error("the engine does not answer")]
    Unresponsive,
}

/// Checks the engine: by its last step if work is pending, by a ping if it is idle.
pub async fn check(link: &Link, ambient: &Ambient, config: &HealthConfig) -> Result<(), Unhealthy> {
    if link.stopped() {
        return Err(Unhealthy::Stopped);
    }
    let silent = ambient.now() - link.last_alive();
    if link.busy() {
        return if silent > config.stuck_after_s { Err(Unhealthy::Stuck(silent)) } else { Ok(()) };
    }
    if (0.0..PONG_VALID_S).contains(&silent) {
        return Ok(());
    }
    let (pong, answer) = oneshot::channel();
    link.send(Command::Ping(Box::new(move || {
        let _ = pong.send(()); // the prober may be gone
    })));
    match tokio::time::timeout(Duration::from_secs_f64(config.ping_timeout_s), answer).await {
        Ok(Ok(())) => {
            link.note_alive(ambient.now());
            Ok(())
        }
        // The sender was dropped unanswered: the thread is gone.
        Ok(Err(_)) => Err(Unhealthy::Stopped),
        // A request may have come in meanwhile, whose first step takes long.
        Err(_) if link.busy() => Ok(()),
        Err(_) => Err(Unhealthy::Unresponsive),
    }
}
