use bytes::{BufMut, Bytes, BytesMut};
use http::header::{CACHE_CONTROL, CONTENT_TYPE};
use http::{HeaderName, HeaderValue, Response};
use serde::Serialize;
use twinfer_protocol::ApiError;

/// The event that ends a stream of the OpenAI API.
pub const DONE: Bytes = Bytes::from_static(b"data: [DONE]\n\n");

/// An event with a JSON value, on one line.
pub fn json_event<T: Serialize + ?Sized>(value: &T) -> Bytes {
    let mut out = BytesMut::with_capacity(256);
    out.put_slice(b"data: ");
    // Writing to memory fails only for a value that has no JSON form; ours all have one.
    if serde_json::to_writer((&mut out).writer(), value).is_err() {
        out.truncate(b"data: ".len());
        out.put_slice(b"null");
    }
    out.put_slice(b"\n\n");
    out.freeze()
}

/// How a stream ends that failed: an event with the error, then [`DONE`].
pub fn error_events(error: &ApiError) -> Bytes {
    crate::error::error_events(error)
}

/// A 200 whose body is an event stream: right content type, no caching, no buffering by proxies.
pub fn event_stream<B>(body: B) -> Response<B> {
    let mut response = Response::new(body);
    let headers = response.headers_mut();
    headers.insert(
        CONTENT_TYPE,
        HeaderValue::from_static("text/event-stream; charset=utf-8"),
    );
    headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    headers.insert(
        HeaderName::from_static("x-accel-buffering"),
        HeaderValue::from_static("no"),
    );
    response
}
