//! The server as the binary sees it: listen, load, serve, drain.

use std::collections::HashSet;
use std::io;
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::http::{Request, Response};
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::graceful::GracefulShutdown;
use hyper_util::service::TowerToHyperService;
use kwire_engine::EngineHandle;
use kwire_protocol::load::{LoadReport, ServerState};
use kwire_protocol::openai::FieldError;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;

use crate::ambient::Ambient;
use crate::config::{ServerConfig, UnknownFields};
use crate::error::ServiceError;
use crate::health::{self, Unhealthy};
use crate::link::{Link, ReportReceiver, demux};
use crate::lock;
use crate::metrics::Metrics;
use crate::model::ModelContext;
use crate::service::{Live, Service};
use crate::text::TextPool;

/// Names of unknown fields that are logged before the log stays silent.
const MAX_LOGGED_NAMES: usize = 1000;
/// Seconds that connections get to write their last bytes after the drain.
const CLOSE_S: f64 = 2.0;

/// The API server. Cheap to clone. It listens before there is a model: [`Server::serve`] and [`Server::set_model`] may
/// come in either order.
#[derive(Clone)]
pub struct Server {
    inner: Arc<Inner>,
    router: Router,
}

/// What handlers share.
pub(crate) struct Inner {
    pub config: ServerConfig,
    pub ambient: Ambient,
    pub metrics: Metrics,
    pub pool: TextPool,
    pub started_unix_s: u64,
    phase: RwLock<Phase>,
    logged: Mutex<HashSet<String>>,
}

struct Phase {
    draining: bool,
    service: Option<Arc<Service>>,
}

impl Server {
    /// A server without a model.
    pub fn new(config: ServerConfig, ambient: Ambient) -> Self {
        let inner = Arc::new(Inner {
            pool: TextPool::new(config.requests.n_text_threads),
            metrics: Metrics::default(),
            started_unix_s: ambient.unix_s(),
            phase: RwLock::new(Phase { draining: false, service: None }),
            logged: Mutex::default(),
            config,
            ambient,
        });
        Self { router: crate::http::router(Arc::clone(&inner)), inner }
    }

    /// Begins to serve `model` through `engine`. `reports` is the other end of the sink that the engine thread was given.
    /// Must be called within a Tokio runtime, once.
    pub fn set_model(&self, model: ModelContext, engine: EngineHandle, reports: ReportReceiver) {
        let inner = &self.inner;
        let metrics = inner.metrics.add_model(&model);
        let epoch = inner.ambient.random() >> 11;
        let link = Link::new(engine, metrics.clone(), epoch, inner.ambient.now());
        tokio::spawn(demux(Arc::clone(&link), reports));
        let (ambient, pool) = (inner.ambient.clone(), inner.pool.clone());
        let service = Arc::new(Service::new(model, link, metrics, &inner.config, ambient, pool));
        let mut phase = inner.phase.write().unwrap_or_else(PoisonError::into_inner);
        assert!(phase.service.is_none(), "the model is set once");
        phase.service = Some(service);
    }

    /// Answers one request without a socket.
    pub async fn handle(&self, request: Request<Body>) -> Response<Body> {
        let service = TowerToHyperService::new(self.router.clone());
        match hyper::service::Service::call(&service, request).await {
            Ok(response) => response,
            Err(infallible) => match infallible {},
        }
    }

    /// Serves connections until `shutdown` resolves, then drains: new requests are refused with 503, running ones get
    /// [`crate::config::ShutdownConfig::timeout_s`] to finish, the rest ends with an error event.
    pub async fn serve(&self, listener: TcpListener, shutdown: impl Future<Output = ()> + Send) -> io::Result<()> {
        let graceful = GracefulShutdown::new();
        let permits = Arc::new(Semaphore::new(self.inner.config.limits.n_connections));
        let drained = async {
            shutdown.await;
            self.drain().await;
        };
        tokio::pin!(drained);
        loop {
            let accepted = async {
                let permit = Arc::clone(&permits).acquire_owned().await;
                (listener.accept().await, permit)
            };
            tokio::select! {
                () = &mut drained => break,
                (accepted, permit) = accepted => match accepted {
                    Ok((stream, _)) => {
                        let connection = graceful.watch(self.connection(stream));
                        tokio::spawn(async move {
                            // Errors of a connection are its client's business.
                            let _ = connection.await;
                            drop(permit);
                        });
                    }
                    // Out of file descriptors, or a client that gave up: neither ends the server.
                    Err(error) => {
                        tracing::warn!(%error, "cannot accept a connection");
                        tokio::time::sleep(Duration::from_millis(50)).await;
                    }
                },
            }
        }
        drop(listener);
        let _ = tokio::time::timeout(Duration::from_secs_f64(CLOSE_S), graceful.shutdown()).await;
        Ok(())
    }

    fn connection(
        &self,
        stream: TcpStream,
    ) -> hyper::server::conn::http1::Connection<TokioIo<TcpStream>, TowerToHyperService<Router>> {
        let _ = stream.set_nodelay(true); // an optimization only
        let limits = &self.inner.config.limits;
        hyper::server::conn::http1::Builder::new()
            .timer(TokioTimer::new())
            .header_read_timeout(Duration::from_secs_f64(limits.header_timeout_s))
            .max_headers(limits.n_headers)
            .max_buf_size(limits.header_bytes.max(8192))
            .serve_connection(TokioIo::new(stream), TowerToHyperService::new(self.router.clone()))
    }

    /// Refuses new requests and waits until running ones have finished, or until their time is over.
    pub async fn drain(&self) {
        let service = {
            let mut phase = self.inner.phase.write().unwrap_or_else(PoisonError::into_inner);
            phase.draining = true;
            phase.service.clone()
        };
        let Some(service) = service else { return };
        let limit = Duration::from_secs_f64(self.inner.config.shutdown.timeout_s);
        if tokio::time::timeout(limit, service.idle()).await.is_ok() {
            return;
        }
        tracing::warn!("ending the requests that did not finish within {} s", limit.as_secs_f64());
        service.link.end_all();
        // Clients that do not read hold their streams: give the others time for the last event.
        let _ = tokio::time::timeout(Duration::from_secs_f64(CLOSE_S), service.idle()).await;
    }
}

impl Inner {
    /// Where the server stands.
    pub fn phase(&self) -> (ServerState, Option<Arc<Service>>) {
        let phase = self.phase.read().unwrap_or_else(PoisonError::into_inner);
        let state = match (phase.draining, &phase.service) {
            (true, _) => ServerState::Draining,
            (false, None) => ServerState::Loading,
            (false, Some(_)) => ServerState::Serving,
        };
        (state, phase.service.clone())
    }

    /// The service, if it takes requests. The request counts as live from here on: [`Server::drain`] takes the write
    /// lock first, so it either refuses a request or waits for it.
    pub fn service(&self) -> Result<(Arc<Service>, Live), ServiceError> {
        let phase = self.phase.read().unwrap_or_else(PoisonError::into_inner);
        match (phase.draining, &phase.service) {
            (true, _) => Err(ServiceError::Draining),
            (false, None) => Err(ServiceError::Loading),
            (false, Some(service)) => Ok((Arc::clone(service), service.live())),
        }
    }

    /// Whether the process does what it should.
    pub async fn health(&self) -> Result<(), Unhealthy> {
        let (_, service) = self.phase();
        let service = service.ok_or(Unhealthy::Loading)?;
        health::check(&service.link, &self.ambient, &self.config.health).await
    }

    /// Counts names no one knows, and logs each once; or refuses them, by policy.
    pub fn check_unknown(&self, names: &[String]) -> Result<(), FieldError> {
        let Some(first) = names.first() else { return Ok(()) };
        if self.config.requests.unknown_fields == UnknownFields::Reject {
            return Err(FieldError::new(first, format!("Unrecognized request field `{first}`.")));
        }
        self.metrics.unknown_fields.inc_by(names.len() as u64);
        let mut logged = lock(&self.logged);
        for name in names {
            if logged.len() < MAX_LOGGED_NAMES && name.len() <= 256 && logged.insert(name.clone()) {
                tracing::warn!(field = %name, "unknown request field; it is ignored");
            }
        }
        Ok(())
    }

    /// Load and capacity, and prefixes since a version of an epoch.
    pub fn load(&self, since: Option<(u64, u64)>) -> LoadReport {
        let (state, service) = self.phase();
        let Some(service) = service else { return LoadReport { state, ..LoadReport::default() } };
        let stats = service.link.stats();
        let capacity = &service.model.capacity;
        let in_flight = service.admission.requests() as u64;
        LoadReport {
            server_load: in_flight,
            state,
            running: stats.running as u64,
            waiting: stats.waiting as u64,
            waiting_tokens: stats.waiting_tokens as u64,
            in_flight,
            max_in_flight: service.admission.max_requests() as u64,
            kv_usage: stats.kv_usage,
            kv_capacity_tokens: capacity.kv_tokens() as u64,
            block_size: capacity.block_size as u64,
            max_num_seqs: capacity.max_num_seqs as u64,
            prompt_tokens: stats.prompt_tokens,
            generation_tokens: stats.generation_tokens,
            preemptions: stats.preemptions,
            prefixes: lock(&service.link.prefixes).report(since),
        }
    }
}
