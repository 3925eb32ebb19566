//! Reading a JSON body, within bounds of size and time.

use std::time::Duration;

use axum::body::Body;
use axum::http::{HeaderMap, header};
use bytes::{Bytes, BytesMut};
use futures::StreamExt;
use serde_json::Value;

use super::error::ApiError;
use crate::config::WireLimits;
use crate::service::parse_json;
use crate::text::TextPool;

/// Reads and parses the body.
pub async fn read_json(
    headers: &HeaderMap,
    body: Body,
    limits: &WireLimits,
    pool: &TextPool,
) -> Result<Value, ApiError> {
    if !is_json(headers) {
        return Err(ApiError::NotJson);
    }
    let length = headers.get(header::CONTENT_LENGTH).and_then(|v| v.to_str().ok()?.parse::<usize>().ok());
    if length.is_some_and(|length| length > limits.body_bytes) {
        return Err(ApiError::BodyTooLarge(limits.body_bytes));
    }
    let read = tokio::time::timeout(Duration::from_secs_f64(limits.body_timeout_s), collect(body, limits.body_bytes));
    let bytes = read.await.unwrap_or(Err(ApiError::BodyTimeout))?;
    Ok(parse_json(pool, bytes).await?)
}

/// All of a body, up to `limit` bytes.
async fn collect(body: Body, limit: usize) -> Result<Bytes, ApiError> {
    let mut stream = body.into_data_stream();
    let mut whole = BytesMut::new();
    while let Some(piece) = stream.next().await {
        let piece = piece.map_err(|_| ApiError::BodyBroken)?;
        if whole.len() + piece.len() > limit {
            return Err(ApiError::BodyTooLarge(limit));
        }
        whole.extend_from_slice(&piece);
    }
    Ok(whole.freeze())
}

/// JSON by its type, or without any type. Forms are refused, so that no web page can post here unseen.
fn is_json(headers: &HeaderMap) -> bool {
    let Some(value) = headers.get(header::CONTENT_TYPE) else { return true };
    let essence = value.to_str().unwrap_or("").split(';').next().unwrap_or("").trim().to_ascii_lowercase();
    essence == "application/json" || essence.starts_with("application/") && essence.ends_with("+json")
}
