//! How the crates fit together: sockets first, then the model, then the engine on its thread, then requests.

use std::io::ErrorKind;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Result, anyhow, bail};
use kwire_engine::EngineHandle;
use kwire_server::config::{AdmissionConfig, AuthConfig, RequestPolicy, ServerConfig, ShutdownConfig};
use kwire_server::{Ambient, Server, report_channel};
use tokio::net::TcpListener;
use tokio::sync::Notify;
use tokio::task::JoinHandle;

use crate::config::ServeConfig;
use crate::config::environment::ProcessEnv;
use crate::launch::Opened;
use crate::{models, output};

/// Time for the last answers after a fault of the engine.
const FAULT_LIMIT: Duration = Duration::from_secs(5);

/// A server in this process.
pub struct Running {
    /// Its address, without /v1.
    pub base_url: String,
    server: JoinHandle<std::io::Result<()>>,
    engine: JoinHandle<Result<()>>,
    stop: Arc<Notify>,
}

/// Serves until a signal, then drains.
pub async fn serve(config: ServeConfig) -> Result<()> {
    let name = config.model.served_names[0].clone();
    let started = Instant::now();
    let mut signals = Signals::new()?;
    let mut running = tokio::select! {
        running = start(config) => running?,
        () = signals.next() => return Ok(()),
    };
    tracing::info!("ready after {:.2} s: {}", started.elapsed().as_secs_f64(), running.base_url);
    tracing::info!(
        "try it: curl {}/v1/chat/completions -H 'Content-Type: application/json' -d \
         '{{\"model\": \"{name}\", \"messages\": [{{\"role\": \"user\", \"content\": \"Why is the sky blue?\"}}], \
         \"max_tokens\": 100, \"temperature\": 0}}'",
        running.base_url
    );
    tokio::select! {
        () = signals.next() => {
            tracing::info!("draining: running answers go on, new requests are refused; a second signal ends at once");
            running.stop.notify_one();
            tokio::select! {
                ended = &mut running.server => ended??,
                () = signals.next() => return Err(anyhow!("stopped before all answers were complete")),
            }
            tracing::info!("stopped");
            Ok(())
        }
        ended = &mut running.server => Ok(ended??),
        ended = &mut running.engine => {
            // Open streams get their error events before the process ends.
            running.stop.notify_one();
            let _ = tokio::time::timeout(FAULT_LIMIT, &mut running.server).await;
            ended?.and_then(|()| Err(anyhow!("the engine stopped")))
        }
    }
}

/// Listens, loads the model, and returns when requests can be answered. While it loads, `/health` says 503.
pub async fn start(config: ServeConfig) -> Result<Running> {
    let address = (config.listen.host.as_str(), config.listen.port);
    let listener = TcpListener::bind(address).await.map_err(|e| {
        let next = match e.kind() {
            ErrorKind::AddrInUse => "stop what listens there, or choose another --port",
            ErrorKind::PermissionDenied => "ports below 1024 are the administrator's: choose another --port",
            _ => "--host takes an address of this machine, such as 0.0.0.0 or 127.0.0.1",
        };
        anyhow!("cannot listen on {}:{}: {e}; {next}", address.0, address.1)
    })?;
    let local = listener.local_addr()?;
    let began = Instant::now();
    let clock = move || began.elapsed().as_secs_f64();
    let server = Server::new(server_config(&config), ambient(clock, config.engine.seed));
    let stop = Arc::new(Notify::new());
    let stopped = Arc::clone(&stop);
    let serving = {
        let server = server.clone();
        tokio::spawn(async move { server.serve(listener, async move { stopped.notified().await }).await })
    };
    let path = models::locate(&config.model.source, config.model.download_dir.as_deref(), &ProcessEnv).await?;
    let loaded = tokio::task::spawn_blocking(move || {
        let opened = Opened::new(&config, &path)?;
        tracing::info!("{}", opened.memory());
        opened.load(&config)
    })
    .await??;
    let (handle, mailbox) = EngineHandle::new();
    let (sink, reports) = report_channel();
    let (context, thread) = loaded.run(mailbox, clock, sink)?;
    let engine =
        tokio::task::spawn_blocking(move || thread.join().unwrap_or_else(|_| Err(anyhow!("the engine panicked"))));
    server.set_model(context, handle, reports);
    Ok(Running { base_url: url(local), server: serving, engine, stop })
}

/// Prints the settings and the memory that they take, and checks the text side, without loading a weight.
///
/// It asks no one for anything: what a model takes is in the headers of its files, so they must be here.
pub fn dry_run(config: &ServeConfig) -> Result<()> {
    output::print(config)?;
    let (source, download_dir) = (&config.model.source, config.model.download_dir.as_deref());
    let Some(path) = models::find(source, download_dir, &ProcessEnv)? else {
        let dir = download_dir.map(|d| format!(" --download-dir {}", d.display())).unwrap_or_default();
        bail!("{source} is not on this machine, and --dry-run downloads nothing: run `kwire pull {source}{dir}` first");
    };
    let opened = Opened::new(config, &path)?;
    output::line(format_args!("{:<24} {}", "memory", opened.memory()))?;
    opened.text(config)?;
    Ok(())
}

impl Running {
    /// Resolves when the engine has ended, with the reason. To be awaited to its end once.
    pub async fn fault(&mut self) -> anyhow::Error {
        match (&mut self.engine).await {
            Ok(Ok(())) => anyhow!("the engine stopped"),
            Ok(Err(e)) => e,
            Err(e) => e.into(),
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.stop.notify_one();
    }
}

fn server_config(config: &ServeConfig) -> ServerConfig {
    let requests = &config.requests;
    ServerConfig {
        auth: AuthConfig { api_keys: config.listen.api_keys.clone() },
        admission: AdmissionConfig {
            max_num_queued_reqs: config.limits.max_queued_requests,
            max_num_queued_tokens: config.limits.max_queued_tokens,
        },
        requests: RequestPolicy {
            unknown_fields: requests.unknown_fields,
            max_logprobs: requests.max_logprobs.map_or(u32::MAX, |n| u32::try_from(n).unwrap_or(u32::MAX)),
            trust_request_chat_template: requests.trust_request_chat_template,
            enable_prompt_tokens_details: requests.prompt_tokens_details,
            content_format: requests.content_format,
            ..RequestPolicy::default()
        },
        shutdown: ShutdownConfig { timeout_s: config.limits.shutdown_timeout_s as f64 },
        ..ServerConfig::default()
    }
}

fn ambient(clock: impl Fn() -> f64 + Send + Sync + 'static, seed: u64) -> Ambient {
    let now = wall_clock();
    let entropy = u64::from(now.subsec_nanos()) ^ now.as_secs() << 30 ^ u64::from(std::process::id()) << 44;
    Ambient::new(clock, || wall_clock().as_secs(), entropy, seed)
}

/// Time since 1970.
#[expect(clippy::disallowed_types, reason = "answers carry the date at which they were made")]
fn wall_clock() -> Duration {
    use std::time::{SystemTime, UNIX_EPOCH};
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default()
}

fn url(address: SocketAddr) -> String {
    match address {
        // Any address of this machine: name one that works here.
        a if a.ip().is_unspecified() => format!("http://127.0.0.1:{}", a.port()),
        a => format!("http://{a}"),
    }
}

/// SIGINT and SIGTERM, from its making on: a second one is not lost while the first is answered.
#[cfg(unix)]
struct Signals {
    interrupt: tokio::signal::unix::Signal,
    terminate: tokio::signal::unix::Signal,
}

#[cfg(unix)]
impl Signals {
    fn new() -> Result<Self> {
        use tokio::signal::unix::{SignalKind, signal};
        Ok(Self { interrupt: signal(SignalKind::interrupt())?, terminate: signal(SignalKind::terminate())? })
    }

    /// The next of either.
    async fn next(&mut self) {
        tokio::select! {
            _ = self.interrupt.recv() => {}
            _ = self.terminate.recv() => {}
        }
    }
}

/// Ctrl-C.
#[cfg(not(unix))]
struct Signals;

#[cfg(not(unix))]
impl Signals {
    fn new() -> Result<Self> {
        Ok(Self)
    }

    async fn next(&mut self) {
        if tokio::signal::ctrl_c().await.is_err() {
            std::future::pending().await
        }
    }
}
