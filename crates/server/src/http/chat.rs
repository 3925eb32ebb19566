//! `POST /v1/chat/completions`

use axum::body::Body;
use axum::extract::State as Extract;
use axum::http::HeaderMap;
use axum::response::Response;
use kwire_protocol::openai::ChatRequest;

use super::completions::{id_hint, with_headers};
use super::error::ApiError;
use super::{State, body, sse};

/// Answers a chat.
pub async fn create(Extract(inner): State, headers: HeaderMap, body: Body) -> Result<Response, ApiError> {
    let service = inner.service()?;
    let body = body::read_json(&headers, body, &inner.config.limits, &inner.pool).await?;
    let request = ChatRequest::parse(&body, inner.config.requests.max_logprobs)?;
    drop(body);
    let (stream, unknown) = (request.common.stream, request.common.unknown_fields.clone());
    inner.note_unknown(&unknown);
    let run = service.chat(request, id_hint(&headers)).await?;
    Ok(with_headers(sse::respond(run, stream).await?, &headers, &unknown))
}
