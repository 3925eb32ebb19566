//! Errors to answers: the only place that knows which error has which status.

use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use kwire_protocol::openai::{ErrorBody, ErrorResponse, FieldError};

use crate::error::ServiceError;
use crate::health::Unhealthy;

/// Everything that can be wrong with a request.
#[derive(Debug, thiserror::Error)]
pub enum ApiError {
    /// The service says no.
    #[error("{0}")]
    Service(#[from] ServiceError),
    /// The body is not JSON.
    #[error("The request body is not valid JSON: {0}.")]
    Json(#[from] serde_json::Error),
    /// The body is longer than the server takes.
    #[error("The request body is longer than {0} bytes.")]
    BodyTooLarge(usize),
    /// The body did not come in time.
    #[error("The request body did not arrive in time.")]
    BodyTimeout,
    /// The connection broke while the body was read.
    #[error("The request body could not be read.")]
    BodyBroken,
    /// The body says it is something else.
    #[error("Unsupported media type: only `application/json` is allowed.")]
    NotJson,
    /// No key, or a wrong one.
    #[error("Invalid or missing API key.")]
    Unauthorized,
    /// There is nothing at this path.
    #[error("There is no `{0}` here.")]
    NoRoute(String),
    /// The path does not know this method.
    #[error("Method not allowed.")]
    MethodNotAllowed,
    /// `/health` and `/ready`.
    #[error("The server is not healthy: {0}.")]
    Unhealthy(#[from] Unhealthy),
}

impl From<FieldError> for ApiError {
    fn from(error: FieldError) -> Self {
        Self::Service(error.into())
    }
}

impl ApiError {
    /// Status, type and parameter, by error.
    fn classify(&self) -> (StatusCode, &'static str, Option<&str>) {
        use StatusCode as S;
        match self {
            Self::Service(error) => match error {
                ServiceError::Field(FieldError { param, .. }) => {
                    (S::BAD_REQUEST, "BadRequestError", Some(param.as_str()).filter(|p| !p.is_empty()))
                }
                ServiceError::Template(_) => (S::BAD_REQUEST, "BadRequestError", Some("messages")),
                ServiceError::Tokenizer(_) => (S::BAD_REQUEST, "BadRequestError", None),
                ServiceError::UnknownModel(_) => (S::NOT_FOUND, "NotFoundError", Some("model")),
                ServiceError::Loading | ServiceError::Draining | ServiceError::Overloaded { .. } => {
                    (S::SERVICE_UNAVAILABLE, "ServiceUnavailableError", None)
                }
                ServiceError::EngineStopped | ServiceError::Engine(_) => {
                    (S::INTERNAL_SERVER_ERROR, "InternalServerError", None)
                }
            },
            Self::Json(_) | Self::BodyBroken => (S::BAD_REQUEST, "BadRequestError", None),
            Self::BodyTooLarge(_) => (S::PAYLOAD_TOO_LARGE, "BadRequestError", None),
            Self::BodyTimeout => (S::REQUEST_TIMEOUT, "BadRequestError", None),
            Self::NotJson => (S::UNSUPPORTED_MEDIA_TYPE, "BadRequestError", None),
            Self::Unauthorized => (S::UNAUTHORIZED, "AuthenticationError", None),
            Self::NoRoute(_) => (S::NOT_FOUND, "NotFoundError", None),
            Self::MethodNotAllowed => (S::METHOD_NOT_ALLOWED, "MethodNotAllowedError", None),
            Self::Unhealthy(_) => (S::SERVICE_UNAVAILABLE, "ServiceUnavailableError", None),
        }
    }

    /// The error object.
    pub fn body(&self) -> ErrorResponse {
        let (status, kind, param) = self.classify();
        ErrorResponse {
            error: ErrorBody {
                message: self.to_string(),
                kind: kind.to_owned(),
                param: param.map(str::to_owned),
                code: status.as_u16(),
            },
        }
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let (status, ..) = self.classify();
        if status == StatusCode::INTERNAL_SERVER_ERROR {
            tracing::error!(error = %self, "a request failed");
        }
        let mut response = (status, axum::Json(self.body())).into_response();
        if status == StatusCode::SERVICE_UNAVAILABLE {
            // One that loads or drains may have a neighbour that does not.
            let seconds = match self {
                Self::Service(ServiceError::Overloaded { retry_after_s, .. }) => retry_after_s,
                _ => 1,
            };
            response.headers_mut().insert(header::RETRY_AFTER, seconds.into());
        }
        if status == StatusCode::UNAUTHORIZED {
            response.headers_mut().insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        response
    }
}
