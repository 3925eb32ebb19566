//! What happens to every request: the key is checked, the answer is counted and carries the client's name for it.

use std::sync::Arc;

use axum::extract::{MatchedPath, Request, State};
use axum::http::{HeaderMap, HeaderName, Method, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};

use super::error::ApiError;
use crate::server::Inner;

/// Paths that are not counted, as in vLLM: probes would drown the rest.
const UNCOUNTED: [&str; 6] = ["/metrics", "/health", "/ready", "/load", "/ping", "/version"];

/// The client's name for a request.
pub const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");

/// Runs around every handler.
pub async fn guard(State(inner): State<Arc<Inner>>, request: Request, next: Next) -> Response {
    let begin = inner.ambient.now();
    let path = request.uri().path();
    let counted = !UNCOUNTED.contains(&path);
    let keys = &inner.config.auth.api_keys;
    let guarded = path == "/v1" || path.starts_with("/v1/");
    let denied =
        guarded && !keys.is_empty() && request.method() != Method::OPTIONS && !authorized(request.headers(), keys);
    let method = known_method(request.method());
    let handler =
        request.extensions().get::<MatchedPath>().map_or_else(|| "none".to_owned(), |p| p.as_str().to_owned());
    let id = request.headers().get(&REQUEST_ID).cloned();
    let mut response = if denied { ApiError::Unauthorized.into_response() } else { next.run(request).await };
    if let Some(id) = id {
        response.headers_mut().insert(REQUEST_ID, id);
    }
    if counted {
        let seconds = inner.ambient.now() - begin;
        inner.metrics.http.observe(method, &handler, response.status().as_u16(), seconds);
    }
    response
}

/// Clients may invent methods; labels must not grow with them.
fn known_method(method: &Method) -> &'static str {
    match *method {
        Method::GET => "GET",
        Method::POST => "POST",
        Method::HEAD => "HEAD",
        Method::OPTIONS => "OPTIONS",
        Method::PUT => "PUT",
        Method::DELETE => "DELETE",
        _ => "other",
    }
}

fn authorized(headers: &HeaderMap, keys: &[String]) -> bool {
    let Some(value) = headers.get(header::AUTHORIZATION) else { return false };
    let value = value.as_bytes();
    let Some((scheme, token)) = value.split_at_checked(7) else { return false };
    // All keys are compared, whichever fits.
    scheme.eq_ignore_ascii_case(b"bearer ") && keys.iter().fold(false, |ok, key| ok | same(key.as_bytes(), token))
}

/// Compares in a time that depends on the lengths only.
fn same(a: &[u8], b: &[u8]) -> bool {
    let differ = a.iter().zip(b).fold(0_u8, |acc, (x, y)| acc | (x ^ y));
    std::hint::black_box(differ) == 0 && a.len() == b.len()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_compared_whole() {
        let keys = ["first".to_owned(), "second".to_owned()];
        let check = |value: &'static str| {
            let mut headers = HeaderMap::new();
            headers.insert(header::AUTHORIZATION, value.parse().unwrap());
            authorized(&headers, &keys)
        };
        assert!(check("Bearer first") && check("bearer second"));
        for wrong in ["Bearer firs", "Bearer firstx", "Bearer ", "first", "Basic first", "Bearer"] {
            assert!(!check(wrong), "{wrong}");
        }
        assert!(!authorized(&HeaderMap::new(), &keys));
    }
}
