//! What is served, how it is, how busy it is.

use axum::Json;
use axum::extract::rejection::QueryRejection;
use axum::extract::{Query, State as Extract};
use axum::http::{HeaderValue, header};
use axum::response::{IntoResponse, Response};
use kwire_protocol::load::{LoadReport, ServerState};
use kwire_protocol::openai::models::ModelList;

use super::State;
use super::error::ApiError;
use crate::error::ServiceError;
use crate::health::Unhealthy;

/// `GET /v1/models`: an empty list while loading.
pub async fn models(Extract(inner): State) -> Json<ModelList> {
    let (_, service) = inner.phase();
    Json(match service {
        Some(service) => service.model.list(inner.started_unix_s),
        None => ModelList { object: "list".to_owned(), data: Vec::new() },
    })
}

/// `GET /version`
pub async fn version() -> Json<serde_json::Value> {
    Json(serde_json::json!({ "version": env!("CARGO_PKG_VERSION") }))
}

/// `GET /health`: whether the process does what it should; also while draining.
pub async fn health(Extract(inner): State) -> Result<(), ApiError> {
    Ok(inner.health().await?)
}

/// `GET /ready`: whether requests should come here.
pub async fn ready(Extract(inner): State) -> Result<(), ApiError> {
    match inner.phase().0 {
        ServerState::Serving => Ok(inner.health().await?),
        ServerState::Loading => Err(Unhealthy::Loading.into()),
        ServerState::Draining => Err(ServiceError::Draining.into()),
    }
}

/// What a router has seen of the prefixes.
#[derive(Debug, Default, serde::Deserialize)]
pub struct Since {
    epoch: Option<u64>,
    since: Option<u64>,
}

/// `GET /load?epoch=E&since=V`: load, and prefixes: all of them, or the changes since version V of epoch E.
pub async fn load(Extract(inner): State, since: Result<Query<Since>, QueryRejection>) -> Json<LoadReport> {
    let since = since.ok().and_then(|Query(since)| since.epoch.zip(since.since));
    Json(inner.load(since))
}

/// `GET /metrics`
pub async fn metrics(Extract(inner): State) -> Response {
    let mut response = inner.metrics.encode().into_response();
    let text = HeaderValue::from_static("text/plain; version=0.0.4; charset=utf-8");
    response.headers_mut().insert(header::CONTENT_TYPE, text);
    response
}
