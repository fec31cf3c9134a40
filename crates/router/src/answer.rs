//! Answers of instances judged, and errors for clients.

use crate::flow::Failure;
use crate::headers::strip_hop_by_hop;
use crate::registry::Signal;
use crate::relay::Relay;
use bytes::Bytes;
use http::header::{CONTENT_ENCODING, CONTENT_TYPE, HeaderValue};
use http::{HeaderMap, Response, StatusCode};
use http_body_util::{Either, Full};
use serde::Deserialize;
use serde::de::IgnoredAny;
use twinfer_http::{TransportError, error_response};
use twinfer_protocol::{ApiError, ErrorKind, Fault};

/// Body of an answer to a client.
pub(crate) type RouterBody = Either<Full<Bytes>, Relay>;

/// Characters of an instance's message that one of ours repeats.
const SHOWN: usize = 300;

/// Which leg an instance served.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Side {
    Prefill,
    Decode,
}

/// What the client gets instead of an answer.
#[derive(Clone, Debug)]
pub(crate) enum Refusal {
    /// The instance's own error answer.
    Passed(Box<Passed>),
    /// Ours.
    Own(ApiError),
}

/// An error answer that is passed on.
#[derive(Clone, Debug)]
pub(crate) struct Passed {
    status: StatusCode,
    headers: HeaderMap,
    body: Bytes,
}

/// A leg that failed: what the flow makes of it, and what the client would get.
#[derive(Clone, Debug)]
pub(crate) struct LegError {
    pub(crate) failure: Failure,
    pub(crate) refusal: Refusal,
}

/// The one field of an error body that decides anything, whoever made it.
#[derive(Deserialize)]
pub(crate) struct ForeignError {
    error: ForeignDetail,
}

#[derive(Deserialize)]
struct ForeignDetail {
    #[serde(default)]
    message: serde_json::Value,
    #[serde(default)]
    code: serde_json::Value,
}

impl Side {
    const fn failed(self) -> ErrorKind {
        match self {
            Self::Prefill => ErrorKind::PrefillFailed,
            Self::Decode => ErrorKind::DecodeFailed,
        }
    }

    const fn unreachable(self) -> ErrorKind {
        match self {
            Self::Prefill => ErrorKind::PrefillUnreachable,
            Self::Decode => ErrorKind::DecodeUnreachable,
        }
    }

    pub(crate) const fn as_str(self) -> &'static str {
        match self {
            Self::Prefill => "prefill",
            Self::Decode => "decode",
        }
    }
}

impl Refusal {
    fn passed(status: StatusCode, headers: HeaderMap, body: Bytes) -> Self {
        Self::Passed(Box::new(Passed {
            status,
            headers,
            body,
        }))
    }

    /// Its class, where it is one of ours.
    pub(crate) fn kind(&self) -> Option<ErrorKind> {
        match self {
            Self::Own(error) => Some(error.kind),
            Self::Passed(passed) => read_error(&passed.body).and_then(|e| e.kind()),
        }
    }

    /// One line for logs.
    pub(crate) fn summary(&self) -> String {
        match self {
            Self::Own(error) => error.to_string(),
            Self::Passed(passed) => {
                let message = read_error(&passed.body)
                    .map(|e| e.message())
                    .unwrap_or_default();
                format!("{}: {message}", passed.status.as_u16())
            }
        }
    }

    pub(crate) fn into_response(self) -> Response<RouterBody> {
        match self {
            Self::Own(error) => error_response::<Full<Bytes>>(&error).map(Either::Left),
            Self::Passed(passed) => {
                let mut response = Response::new(Either::Left(Full::new(passed.body)));
                *response.status_mut() = passed.status;
                *response.headers_mut() = passed.headers;
                response
            }
        }
    }
}

impl LegError {
    pub(crate) fn new(failure: Failure, kind: ErrorKind, message: impl Into<String>) -> Self {
        Self {
            failure,
            refusal: Refusal::Own(ApiError::new(kind, message)),
        }
    }

    /// An instance answered with something that makes no sense.
    pub(crate) fn nonsense(side: Side, name: &str, what: &str) -> Self {
        Self::new(
            Failure::Broke,
            side.failed(),
            format!("{} instance {name} {what}", side.as_str()),
        )
    }

    /// No (whole) answer. The signal is what it says of the instance, if anything.
    pub(crate) fn transport(
        side: Side,
        name: &str,
        error: &TransportError,
    ) -> (Self, Option<Signal>) {
        let message = format!("{} instance {name}: {error}", side.as_str());
        let kind = match error {
            TransportError::Exhausted { .. } => ErrorKind::Overloaded,
            TransportError::Timeout { .. } => ErrorKind::Timeout,
            _ if error.nothing_sent() => side.unreachable(),
            _ => side.failed(),
        };
        let failure = match error.nothing_sent() {
            true => Failure::Unreachable,
            false => Failure::Broke,
        };
        let signal = match error {
            TransportError::Exhausted { .. } => None,
            TransportError::Refused { .. }
            | TransportError::Unresolved { .. }
            | TransportError::ConnectTimeout { .. } => Some(Signal::Refused(error.to_string())),
            _ => Some(Signal::Broke(error.to_string())),
        };
        (Self::new(failure, kind, message), signal)
    }

    /// An answer whose status is no success.
    pub(crate) fn status(
        side: Side,
        name: &str,
        status: StatusCode,
        mut headers: HeaderMap,
        body: Bytes,
    ) -> Self {
        let foreign = read_error(&body);
        let kind = foreign.as_ref().and_then(ForeignError::kind);
        let failure = match status.as_u16() {
            429 | 503 => Failure::Busy,
            401 | 403 | 408 => Failure::Broke,
            400..=499 => Failure::Final,
            _ if kind.is_some_and(|kind| kind.fault() == Fault::Transport) => Failure::HandoffLost,
            _ => Failure::Broke,
        };
        if matches!(status.as_u16(), 401 | 403) {
            // The client's key was right: this is between the router and its instance.
            let message = foreign.map(|e| e.message()).unwrap_or_default();
            let who = side.as_str();
            let text = format!(
                "{who} instance {name} refuses the router ({}): {message}",
                status.as_u16()
            );
            return Self::new(failure, side.failed(), text);
        }
        strip_hop_by_hop(&mut headers);
        let encoded = headers.contains_key(CONTENT_ENCODING);
        if (encoded || is_json(&body)) && (status.is_client_error() || status.is_server_error()) {
            if !encoded {
                headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
            }
            return Self {
                failure,
                refusal: Refusal::passed(status, headers, body),
            };
        }
        let text: String = String::from_utf8_lossy(&body).chars().take(SHOWN).collect();
        let said = if text.is_empty() {
            String::new()
        } else {
            format!(": {text}")
        };
        let error = ApiError::new(
            side.failed(),
            format!(
                "{} instance {name} answered {}{said}",
                side.as_str(),
                status.as_u16()
            ),
        );
        if status.is_client_error() || status.as_u16() == 503 {
            // The status says what to do; only the body had no form.
            let body = serde_json::to_vec(&error.body()).unwrap_or_default();
            headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
            return Self {
                failure,
                refusal: Refusal::passed(status, headers, body.into()),
            };
        }
        Self {
            failure,
            refusal: Refusal::Own(error),
        }
    }

    /// A stream whose first event is an error: as good as an answer with its status.
    pub(crate) fn first_event(side: Side, name: &str, data: &[u8]) -> Option<Self> {
        if !is_error_event(data) {
            return None;
        }
        let foreign = read_error(data)?;
        let status = foreign
            .kind()
            .map(ErrorKind::status)
            .or_else(|| {
                foreign
                    .error
                    .code
                    .as_u64()
                    .and_then(|code| u16::try_from(code).ok())
            })
            .and_then(|code| StatusCode::from_u16(code).ok())
            .filter(|status| status.is_client_error() || status.is_server_error())
            .unwrap_or(StatusCode::BAD_GATEWAY);
        Some(Self::status(
            side,
            name,
            status,
            HeaderMap::new(),
            Bytes::copy_from_slice(data),
        ))
    }
}

impl ForeignError {
    pub(crate) fn kind(&self) -> Option<ErrorKind> {
        self.error.code.as_str().and_then(ErrorKind::from_code)
    }

    pub(crate) fn message(&self) -> String {
        self.error
            .message
            .as_str()
            .unwrap_or_default()
            .chars()
            .take(SHOWN)
            .collect()
    }
}

/// Does the data of an event hold an error instead of a piece of an answer?
pub(crate) fn is_error_event(data: &[u8]) -> bool {
    let data = data.trim_ascii_start();
    let rest = data.strip_prefix(b"{").map(<[u8]>::trim_ascii_start);
    rest.is_some_and(|rest| rest.starts_with(b"\"error\""))
}

pub(crate) fn read_error(body: &[u8]) -> Option<ForeignError> {
    serde_json::from_slice(body).ok()
}

fn is_json(body: &[u8]) -> bool {
    body.trim_ascii_start().starts_with(b"{") && serde_json::from_slice::<IgnoredAny>(body).is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn judge(status: u16, body: &'static str) -> LegError {
        let status = StatusCode::from_u16(status).expect("a status");
        LegError::status(
            Side::Decode,
            "d",
            status,
            HeaderMap::new(),
            Bytes::from_static(body.as_bytes()),
        )
    }

    #[test]
    fn c3_15_only_the_client_is_at_fault_for_its_own_errors() {
        let json = r#"{"error":{"message":"m","type":"t","param":null,"code":400}}"#;
        for (status, failure) in [
            (400, Failure::Final),
            (404, Failure::Final),
            (422, Failure::Final),
            (429, Failure::Busy),
            (503, Failure::Busy),
            (500, Failure::Broke),
            (502, Failure::Broke),
            (401, Failure::Broke),
            (408, Failure::Broke),
        ] {
            assert_eq!(judge(status, json).failure, failure, "{status}");
        }
        let lost = judge(
            502,
            r#"{"error":{"message":"m","type":"t","param":null,"code":"kv_stale"}}"#,
        );
        assert_eq!(lost.failure, Failure::HandoffLost);
        assert_eq!(lost.refusal.kind(), Some(ErrorKind::KvStale));
    }

    #[test]
    fn the_routers_own_shortage_says_nothing_of_an_instance() {
        let (peer, reason) = (String::new(), String::new());
        let own = TransportError::Exhausted { peer, reason };
        let (error, signal) = LegError::transport(Side::Prefill, "p", &own);
        assert_eq!(signal, None);
        assert_eq!(error.failure, Failure::Unreachable);
        assert_eq!(error.refusal.kind(), Some(ErrorKind::Overloaded));
    }

    #[test]
    fn c3_4_text_never_reaches_the_client_as_an_error_body() {
        for status in [404, 500, 503] {
            let response = judge(status, "Internal Server Error")
                .refusal
                .into_response();
            assert_eq!(response.headers()[CONTENT_TYPE], "application/json");
            let expected = if status == 500 { 502 } else { status };
            assert_eq!(response.status().as_u16(), expected);
        }
    }

    #[test]
    fn an_error_as_first_event_is_an_error_answer() {
        let event = br#"{"error": {"message":"no blocks","type":"InternalServerError","param":null,"code":500}}"#;
        let error = LegError::first_event(Side::Decode, "d", event).expect("an error");
        assert_eq!(error.refusal.into_response().status().as_u16(), 500);
        assert!(LegError::first_event(Side::Decode, "d", br#"{"id":"x","error":null}"#).is_none());
        assert!(LegError::first_event(Side::Decode, "d", b"[DONE]").is_none());
    }
}
