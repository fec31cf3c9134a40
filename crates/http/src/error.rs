use crate::sse;
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use http::header::{CONTENT_LENGTH, CONTENT_TYPE, RETRY_AFTER};
use http::{HeaderValue, Method, StatusCode, Uri};
use twinfer_protocol::{ApiError, ErrorKind};

/// An [`ApiError`] as the answer of an axum handler.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HttpError(pub ApiError);

/// The answer to a client: status, JSON body with its type and length, Retry-After.
pub fn error_response<B: From<Bytes>>(error: &ApiError) -> http::Response<B> {
    let body = serde_json::to_vec(&error.body()).unwrap_or_default();
    let length = HeaderValue::from(body.len());
    let mut response = http::Response::new(B::from(Bytes::from(body)));
    *response.status_mut() =
        StatusCode::from_u16(error.kind.status()).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    let headers = response.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    headers.insert(CONTENT_LENGTH, length);
    if let Some(seconds) = error.retry_after {
        headers.insert(RETRY_AFTER, HeaderValue::from(seconds));
    }
    response
}

/// Gives a router the one error shape for unknown routes (404) and methods (405).
pub fn with_fallbacks<S: Clone + Send + Sync + 'static>(
    router: axum::Router<S>,
) -> axum::Router<S> {
    router
        .fallback(not_found)
        .method_not_allowed_fallback(method_not_allowed)
}

async fn not_found(method: Method, uri: Uri) -> HttpError {
    HttpError(ApiError::new(
        ErrorKind::NotFound,
        format!("no route {method} {}", shorten(uri.path())),
    ))
}

async fn method_not_allowed(method: Method, uri: Uri) -> HttpError {
    let message = format!("{} does not take {method}", shorten(uri.path()));
    HttpError(ApiError::new(ErrorKind::MethodNotAllowed, message))
}

/// Foreign text in a message is cut.
fn shorten(path: &str) -> String {
    const MAX: usize = 100;
    if path.chars().count() <= MAX {
        path.to_owned()
    } else {
        path.chars().take(MAX).chain(['…']).collect()
    }
}

impl From<ApiError> for HttpError {
    fn from(error: ApiError) -> Self {
        Self(error)
    }
}

impl IntoResponse for HttpError {
    fn into_response(self) -> Response {
        error_response(&self.0)
    }
}

/// The end of a stream that failed: an event with the error, then `[DONE]`.
pub(crate) fn error_events(error: &ApiError) -> Bytes {
    let mut out = sse::json_event(&error.body()).to_vec();
    out.extend_from_slice(&sse::DONE);
    out.into()
}
