//! Routes and the wire.

mod body;
mod create;
pub mod error;
mod guard;
mod live;
mod meta;
mod sse;

use std::sync::Arc;

use axum::Router;
use axum::middleware::from_fn_with_state;
use axum::routing::{get, post};
use kwire_protocol::openai::Endpoint;

use crate::server::Inner;
use create::create;
use error::ApiError;

/// The state that handlers see.
type State = axum::extract::State<Arc<Inner>>;

/// All routes.
pub(crate) fn router(inner: Arc<Inner>) -> Router {
    Router::new()
        .route("/v1/models", get(meta::models))
        .route("/v1/completions", post(|s: State, h, b| create(Endpoint::Completions, s, h, b)))
        .route("/v1/chat/completions", post(|s: State, h, b| create(Endpoint::Chat, s, h, b)))
        .route("/tokenize", post(|s: State, h, b| create(Endpoint::Tokenize, s, h, b)))
        .route("/detokenize", post(|s: State, h, b| create(Endpoint::Detokenize, s, h, b)))
        .route("/version", get(meta::version))
        .route("/health", get(meta::health))
        .route("/ready", get(meta::ready))
        .route("/ping", get(meta::health).post(meta::health))
        .route("/load", get(meta::load))
        .route("/metrics", get(meta::metrics))
        .method_not_allowed_fallback(|| async { ApiError::MethodNotAllowed })
        .fallback(|uri: axum::http::Uri| async move { ApiError::NoRoute(uri.path().to_owned()) })
        .layer(from_fn_with_state(Arc::clone(&inner), guard::guard))
        .with_state(inner)
}
