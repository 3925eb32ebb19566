//! `POST /v1/completions`

use axum::body::Body;
use axum::extract::State as Extract;
use axum::http::{HeaderMap, HeaderName, HeaderValue};
use axum::response::Response;
use kwire_protocol::openai::CompletionRequest;
use kwire_protocol::openai::common::valid_request_id;

use super::error::ApiError;
use super::{State, body, sse};

const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");
const UNKNOWN_FIELDS: HeaderName = HeaderName::from_static("x-kwire-unknown-fields");
/// Bytes of the header that names unknown fields.
const MAX_UNKNOWN: usize = 1024;

/// Completes prompts.
pub async fn create(Extract(inner): State, headers: HeaderMap, body: Body) -> Result<Response, ApiError> {
    let service = inner.service()?;
    let body = body::read_json(&headers, body, &inner.config.limits, &inner.pool).await?;
    let request = CompletionRequest::parse(&body, inner.config.requests.max_logprobs)?;
    drop(body);
    let (stream, unknown) = (request.common.stream, request.common.unknown_fields.clone());
    inner.note_unknown(&unknown);
    let run = service.completions(request, id_hint(&headers)).await?;
    Ok(with_headers(sse::respond(run, stream).await?, &headers, &unknown))
}

/// The client's name for the request.
pub fn id_hint(headers: &HeaderMap) -> Option<&str> {
    headers.get(&REQUEST_ID)?.to_str().ok().filter(|id| valid_request_id(id))
}

/// Repeats the client's name for the request, and names the fields no one knows.
pub fn with_headers(mut response: Response, request: &HeaderMap, unknown: &[String]) -> Response {
    if let Some(id) = request.get(&REQUEST_ID) {
        response.headers_mut().insert(REQUEST_ID, id.clone());
    }
    if !unknown.is_empty() {
        let mut names: String = unknown.join(",").chars().map(|c| if c.is_ascii_graphic() { c } else { '?' }).collect();
        names.truncate(MAX_UNKNOWN);
        if let Ok(value) = HeaderValue::try_from(names) {
            response.headers_mut().insert(UNKNOWN_FIELDS, value);
        }
    }
    response
}
