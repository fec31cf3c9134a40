use crate::{BodyRoom, BoxError, RoomShare};
use bytes::{Bytes, BytesMut};
use http::HeaderMap;
use http::header::{CONTENT_ENCODING, CONTENT_LENGTH, CONTENT_TYPE, EXPECT};
use http_body::Body;
use http_body_util::BodyExt;
use serde::de::DeserializeOwned;
use std::pin::{Pin, pin};
use std::time::Duration;
use tokio::time::{Instant, timeout, timeout_at};
use twinfer_protocol::{ApiError, ErrorKind};

/// Bytes of a body that is too large which are read and thrown away.
const DISCARD_BYTES: u64 = 256 << 20;
/// Time for that.
const DISCARD_TIME: Duration = Duration::from_secs(1);

/// Reads a body whole: at most `limit` bytes, within `timeout`.
///
/// # Errors
/// [`ErrorKind::PayloadTooLarge`] before anything is read if Content-Length says so,
/// [`ErrorKind::RequestTimeout`], or [`ErrorKind::InvalidRequest`] if the body breaks off.
pub async fn read_body<B>(
    headers: &HeaderMap,
    body: B,
    limit: u64,
    timeout: Duration,
) -> Result<Bytes, ApiError>
where
    B: Body<Data = Bytes>,
    B::Error: Into<BoxError>,
{
    read_growing(headers, body, limit, timeout, None).await
}

/// [`read_body`] that takes room for what has come, if it needs any.
pub(crate) async fn read_growing<B>(
    headers: &HeaderMap,
    body: B,
    limit: u64,
    timeout: Duration,
    mut room: Option<(&BodyRoom, &mut RoomShare)>,
) -> Result<Bytes, ApiError>
where
    B: Body<Data = Bytes>,
    B::Error: Into<BoxError>,
{
    let too_large = |size: &str| {
        let message = format!("the body has {size} bytes; allowed are {limit}");
        ApiError::new(ErrorKind::PayloadTooLarge, message)
    };
    let declared = headers
        .get(CONTENT_LENGTH)
        .and_then(|v| v.to_str().ok())
        .and_then(|v| v.parse::<u64>().ok());
    let deadline = Instant::now() + timeout;
    let mut body = pin!(body);
    if let Some(length) = declared.filter(|&n| n > limit) {
        // A client that asks before it sends gets the answer instead of "continue".
        if !headers.contains_key(EXPECT) {
            discard(body).await;
        }
        return Err(too_large(&length.to_string()));
    }
    let mut first: Option<Bytes> = None;
    let mut rest = BytesMut::new();
    loop {
        let frame = match timeout_at(deadline, body.frame()).await {
            Ok(Some(Ok(frame))) => frame,
            Ok(Some(Err(_))) => {
                return Err(ApiError::new(
                    ErrorKind::InvalidRequest,
                    "the request body broke off",
                ));
            }
            Ok(None) => break,
            Err(_) => {
                let message = format!(
                    "the request body did not arrive within {} s",
                    timeout.as_secs_f64()
                );
                return Err(ApiError::new(ErrorKind::RequestTimeout, message));
            }
        };
        let Ok(data) = frame.into_data() else {
            continue;
        };
        let have = first.as_ref().map_or(rest.len(), Bytes::len) as u64;
        if have + data.len() as u64 > limit {
            drop(first);
            drop(rest);
            discard(body).await;
            return Err(too_large(&format!("more than {limit}")));
        }
        if let Some((room, share)) = &mut room
            && !room.grow(share, have + data.len() as u64, deadline).await
        {
            let message = "too many large requests are being served";
            return Err(ApiError::new(ErrorKind::Overloaded, message));
        }
        match first.take() {
            None if rest.is_empty() => first = Some(data),
            None => rest.extend_from_slice(&data),
            Some(start) => {
                // Not for the declared length: that is only a promise.
                rest.reserve(start.len() + data.len());
                rest.extend_from_slice(&start);
                rest.extend_from_slice(&data);
            }
        }
    }
    Ok(first.unwrap_or_else(|| rest.freeze()))
}

/// Parses a JSON object.
///
/// # Errors
/// [`ErrorKind::InvalidRequest`]: empty, not UTF-8, not JSON (with line and column), not an object, or
/// a field of the wrong type.
pub fn parse_json<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, ApiError> {
    let invalid = |message: String| ApiError::new(ErrorKind::InvalidRequest, message);
    let text = std::str::from_utf8(bytes).map_err(|e| {
        invalid(format!(
            "the body is not UTF-8: byte {} is wrong",
            e.valid_up_to()
        ))
    })?;
    let kind = match text.trim_start().bytes().next() {
        None => {
            return Err(invalid(
                "the body is empty; it must be a JSON object".to_owned(),
            ));
        }
        Some(b'{') => None,
        Some(b'[') => Some("a list"),
        Some(b'"') => Some("a string"),
        Some(b't' | b'f') => Some("a boolean"),
        Some(b'n') => Some("null"),
        Some(b'-' | b'0'..=b'9') => Some("a number"),
        Some(_) => None,
    };
    if let Some(kind) = kind {
        return Err(invalid(format!(
            "the body is {kind}; it must be a JSON object"
        )));
    }
    serde_json::from_str(text).map_err(|e| {
        if e.is_data() {
            invalid(format!("the body has a wrong field: {e}"))
        } else {
            invalid(format!("the body is not JSON: {e}"))
        }
    })
}

/// Reads on for a while without keeping anything. A client that is still sending when the connection
/// closes sees a reset instead of the answer.
async fn discard<B: Body<Data = Bytes>>(mut body: Pin<&mut B>) {
    let mut left = DISCARD_BYTES;
    let read = async {
        while let Some(Ok(frame)) = body.frame().await {
            left = left.saturating_sub(frame.data_ref().map_or(0, |d| d.len() as u64));
            if left == 0 {
                break;
            }
        }
    };
    let _ = timeout(DISCARD_TIME, read).await;
}

/// Is the body JSON by its content type, none at all being taken for JSON, and not compressed?
///
/// # Errors
/// [`ErrorKind::UnsupportedMediaType`] names the header and what is allowed.
pub fn check_content_type(headers: &HeaderMap) -> Result<(), ApiError> {
    let refused = |message| Err(ApiError::new(ErrorKind::UnsupportedMediaType, message));
    for value in headers.get_all(CONTENT_ENCODING) {
        let text = value.to_str().unwrap_or("?").trim();
        if !text.is_empty() && !text.eq_ignore_ascii_case("identity") {
            let shown: String = text.chars().take(100).collect();
            return refused(format!(
                "content-encoding is {shown:?}; request bodies must not be compressed"
            ));
        }
    }
    let Some(value) = headers.get(CONTENT_TYPE) else {
        return Ok(());
    };
    let text = value.to_str().unwrap_or("");
    let essence = text
        .split(';')
        .next()
        .unwrap_or("")
        .trim()
        .to_ascii_lowercase();
    if essence == "application/json"
        || (essence.starts_with("application/") && essence.ends_with("+json"))
    {
        return Ok(());
    }
    let shown: String = essence.chars().take(100).collect();
    refused(format!(
        "content-type is {shown:?}; allowed is application/json"
    ))
}
