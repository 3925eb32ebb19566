//! The four routes that take a JSON body and make something of it: the steps they share, and what each does.

use axum::Json;
use axum::body::Body;
use axum::extract::State as Extract;
use axum::http::{HeaderMap, HeaderName, HeaderValue};
use axum::response::{IntoResponse, Response};
use kwire_protocol::openai::common::valid_request_id;
use kwire_protocol::openai::fields::{self, Endpoint};
use kwire_protocol::openai::{ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest};
use serde_json::Value;

use super::error::ApiError;
use super::guard::REQUEST_ID;
use super::live::LiveBody;
use super::{State, body, sse};
use crate::service::Service;

const UNKNOWN_FIELDS: HeaderName = HeaderName::from_static("x-kwire-unknown-fields");
/// Bytes of the header that names unknown fields.
const MAX_UNKNOWN: usize = 1024;

/// Answers a post to `endpoint`. The request counts as live until the last byte of the answer is taken.
pub async fn create(
    endpoint: Endpoint,
    Extract(inner): State,
    headers: HeaderMap,
    body: Body,
) -> Result<Response, ApiError> {
    let (service, live) = inner.service()?;
    let body = body::read_json(&headers, body, &inner.config.limits, &inner.pool).await?;
    let unknown = fields::unknown(&body, endpoint);
    let answer = match inner.check_unknown(&unknown) {
        Ok(()) => answer(endpoint, &service, &headers, body, inner.config.requests.max_logprobs).await,
        Err(error) => Err(error.into()),
    };
    let mut response = answer.into_response();
    name_unknown(&mut response, &unknown);
    Ok(response.map(|body| Body::new(LiveBody::new(body, live))))
}

async fn answer(
    endpoint: Endpoint,
    service: &Service,
    headers: &HeaderMap,
    body: Value,
    max_logprobs: u32,
) -> Result<Response, ApiError> {
    match endpoint {
        Endpoint::Chat => {
            let request = ChatRequest::parse(&body, max_logprobs)?;
            drop(body);
            let stream = request.common.stream;
            sse::respond(service.chat(request, id_hint(headers)).await?, stream).await
        }
        Endpoint::Completions => {
            let request = CompletionRequest::parse(&body, max_logprobs)?;
            drop(body);
            let stream = request.common.stream;
            sse::respond(service.completions(request, id_hint(headers)).await?, stream).await
        }
        Endpoint::Tokenize => {
            let request = TokenizeRequest::parse(&body)?;
            drop(body);
            Ok(Json(service.tokenize(request).await?).into_response())
        }
        Endpoint::Detokenize => {
            let request = DetokenizeRequest::parse(&body)?;
            drop(body);
            Ok(Json(service.detokenize(request).await?).into_response())
        }
    }
}

/// The client's name for the request.
fn id_hint(headers: &HeaderMap) -> Option<&str> {
    headers.get(&REQUEST_ID)?.to_str().ok().filter(|id| valid_request_id(id))
}

/// Names the fields no one knows in a header.
fn name_unknown(response: &mut Response, unknown: &[String]) {
    if unknown.is_empty() {
        return;
    }
    let mut names: String = unknown.join(",").chars().map(|c| if c.is_ascii_graphic() { c } else { '?' }).collect();
    names.truncate(MAX_UNKNOWN);
    if let Ok(value) = HeaderValue::try_from(names) {
        response.headers_mut().insert(UNKNOWN_FIELDS, value);
    }
}
