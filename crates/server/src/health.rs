//! Whether the server is well: `/health` tells the truth.

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
pub enum Illness {
    /// The model is not there yet.
    #[error("the model is still loading")]
    Loading,
    /// The engine thread ended.
    #[error("the engine has stopped")]
    Stopped,
    /// Work is pending and no step was done.
    #[error("the engine has not finished a step for {0:.0} s while requests are pending")]
    Stuck(f64),
    /// Idle, but deaf.
    #[error("the engine does not answer")]
    Deaf,
}

/// Checks the engine: by its last step if work is pending, by a ping if it is idle.
pub async fn check(link: &Link, ambient: &Ambient, config: &HealthConfig) -> Result<(), Illness> {
    if link.stopped() {
        return Err(Illness::Stopped);
    }
    let silent = ambient.now() - link.last_sign();
    if link.busy() {
        return if silent > config.stuck_after_s { Err(Illness::Stuck(silent)) } else { Ok(()) };
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
            link.sign(ambient.now());
            Ok(())
        }
        // The sender was dropped unanswered: the thread is gone.
        Ok(Err(_)) => Err(Illness::Stopped),
        // A request may have come in meanwhile, whose first step takes long.
        Err(_) if link.busy() => Ok(()),
        Err(_) => Err(Illness::Deaf),
    }
}
