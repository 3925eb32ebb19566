//! `POST /tokenize` and `POST /detokenize`

use axum::Json;
use axum::body::Body;
use axum::extract::State as Extract;
use axum::http::HeaderMap;
use kwire_protocol::openai::tokenize::{DetokenizeResponse, TokenizeResponse};

use super::error::ApiError;
use super::{State, body};

/// Text or messages to tokens.
pub async fn tokenize(
    Extract(inner): State,
    headers: HeaderMap,
    body: Body,
) -> Result<Json<TokenizeResponse>, ApiError> {
    let service = inner.service()?;
    let body = body::read_json(&headers, body, &inner.config.limits, &inner.pool).await?;
    Ok(Json(service.tokenize(&body).await?))
}

/// Tokens to text.
pub async fn detokenize(
    Extract(inner): State,
    headers: HeaderMap,
    body: Body,
) -> Result<Json<DetokenizeResponse>, ApiError> {
    let service = inner.service()?;
    let body = body::read_json(&headers, body, &inner.config.limits, &inner.pool).await?;
    Ok(Json(service.detokenize(&body).await?))
}
