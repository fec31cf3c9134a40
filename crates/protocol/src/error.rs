use serde::{Deserialize, Serialize};
use std::fmt;

/// Whose fault an error is: what metrics of errors are labelled with.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Fault {
    /// The request cannot be served as it stands.
    Client,
    /// A prefill instance failed.
    Prefill,
    /// A decode instance failed.
    Decode,
    /// A connection or a transfer failed.
    Transport,
    /// This process failed.
    Us,
}

impl Fault {
    /// Label of metrics.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Client => "client",
            Self::Prefill => "prefill",
            Self::Decode => "decode",
            Self::Transport => "transport",
            Self::Us => "us",
        }
    }
}

/// May the request be sent again? Decides on `Retry-After`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Retry {
    /// It would fail again.
    Never,
    /// At once, on another instance.
    Elsewhere,
    /// On the same or another instance after a wait.
    Later,
}

/// Every class of error, once. Status, type, code, fault, retry and metric label derive from it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum ErrorKind {
    /// Malformed or out-of-range request.
    InvalidRequest,
    /// Prompt, or prompt and requested output, exceed the context.
    ContextLengthExceeded,
    /// The chat template is missing, broken or refused the messages.
    ChatTemplate,
    /// `kv_transfer_params` from somebody who may not send them, or to a peer that is not listed.
    KvParamsForbidden,
    /// Missing or wrong key.
    Unauthorized,
    /// No such model here.
    ModelNotFound,
    /// No such route.
    NotFound,
    /// Route exists, method does not.
    MethodNotAllowed,
    /// Body larger than the limit.
    PayloadTooLarge,
    /// Body is not JSON by its content type.
    UnsupportedMediaType,
    /// The request did not arrive in time.
    RequestTimeout,
    /// Queue full.
    Overloaded,
    /// Draining: no new requests.
    Draining,
    /// Model not loaded, warm-up running, or a rank missing.
    NotReady,
    /// No instance of the needed role is healthy.
    NoInstance,
    /// Connecting to the prefill instance failed: it has not seen the request.
    PrefillUnreachable,
    /// The prefill instance broke off, or answered with an error of its own or with nonsense.
    PrefillFailed,
    /// Connecting to the decode instance failed: it has not seen the request.
    DecodeUnreachable,
    /// The decode instance broke off, or answered with an error of its own or with nonsense.
    DecodeFailed,
    /// The KV handle is unknown, expired, released or of another epoch.
    KvStale,
    /// KV bytes were damaged, short, swapped or did not belong to these tokens.
    KvCorrupt,
    /// The peer's fingerprint differs.
    KvMismatch,
    /// The transfer did not end in time or its connection broke.
    KvTransfer,
    /// A deadline of ours passed.
    Timeout,
    /// Bug or failed rank.
    Internal,
}

/// An error on its way to a client, a log line and a metric.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ApiError {
    /// Class.
    pub kind: ErrorKind,
    /// One sentence: names the field, the value and what is allowed.
    pub message: String,
    /// Request field at fault.
    pub param: Option<String>,
    /// Seconds for `Retry-After`.
    pub retry_after: Option<u32>,
}

/// The one JSON shape of errors: `{"error": {...}}`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ErrorBody {
    /// The error.
    pub error: ErrorDetail,
}

/// Inside of [`ErrorBody`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ErrorDetail {
    /// One sentence.
    pub message: String,
    /// Coarse class as OpenAI names it.
    #[serde(rename = "type")]
    pub kind: String,
    /// Request field at fault.
    pub param: Option<String>,
    /// Exact class.
    pub code: Option<String>,
}

impl ErrorKind {
    /// Every class.
    pub const ALL: [Self; 25] = [
        Self::InvalidRequest,
        Self::ContextLengthExceeded,
        Self::ChatTemplate,
        Self::KvParamsForbidden,
        Self::Unauthorized,
        Self::ModelNotFound,
        Self::NotFound,
        Self::MethodNotAllowed,
        Self::PayloadTooLarge,
        Self::UnsupportedMediaType,
        Self::RequestTimeout,
        Self::Overloaded,
        Self::Draining,
        Self::NotReady,
        Self::NoInstance,
        Self::PrefillUnreachable,
        Self::PrefillFailed,
        Self::DecodeUnreachable,
        Self::DecodeFailed,
        Self::KvStale,
        Self::KvCorrupt,
        Self::KvMismatch,
        Self::KvTransfer,
        Self::Timeout,
        Self::Internal,
    ];

    /// The class that a peer's `error.code` names; none for a code of another engine.
    pub fn from_code(code: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| kind.code() == code)
    }

    /// HTTP status.
    pub const fn status(self) -> u16 {
        match self {
            Self::InvalidRequest | Self::ContextLengthExceeded | Self::ChatTemplate => 400,
            Self::Unauthorized => 401,
            Self::KvParamsForbidden => 403,
            Self::ModelNotFound | Self::NotFound => 404,
            Self::MethodNotAllowed => 405,
            Self::RequestTimeout => 408,
            Self::PayloadTooLarge => 413,
            Self::UnsupportedMediaType => 415,
            Self::Overloaded => 429,
            Self::Internal => 500,
            Self::PrefillUnreachable
            | Self::PrefillFailed
            | Self::DecodeUnreachable
            | Self::DecodeFailed
            | Self::KvStale
            | Self::KvCorrupt
            | Self::KvMismatch
            | Self::KvTransfer => 502,
            Self::Draining | Self::NotReady | Self::NoInstance => 503,
            Self::Timeout => 504,
        }
    }

    /// Exact class in `error.code` and in metric labels.
    pub const fn code(self) -> &'static str {
        match self {
            Self::InvalidRequest => "invalid_request",
            Self::ContextLengthExceeded => "context_length_exceeded",
            Self::ChatTemplate => "chat_template",
            Self::KvParamsForbidden => "kv_transfer_params_forbidden",
            Self::Unauthorized => "invalid_api_key",
            Self::ModelNotFound => "model_not_found",
            Self::NotFound => "not_found",
            Self::MethodNotAllowed => "method_not_allowed",
            Self::PayloadTooLarge => "payload_too_large",
            Self::UnsupportedMediaType => "unsupported_media_type",
            Self::RequestTimeout => "request_timeout",
            Self::Overloaded => "overloaded",
            Self::Draining => "draining",
            Self::NotReady => "not_ready",
            Self::NoInstance => "no_instance",
            Self::PrefillUnreachable => "prefill_unreachable",
            Self::PrefillFailed => "prefill_failed",
            Self::DecodeUnreachable => "decode_unreachable",
            Self::DecodeFailed => "decode_failed",
            Self::KvStale => "kv_stale",
            Self::KvCorrupt => "kv_corrupt",
            Self::KvMismatch => "kv_mismatch",
            Self::KvTransfer => "kv_transfer_failed",
            Self::Timeout => "timeout",
            Self::Internal => "internal_error",
        }
    }

    /// Coarse class in `error.type`.
    pub const fn type_name(self) -> &'static str {
        match self.status() {
            401 | 403 => "authentication_error",
            404 => "not_found_error",
            429 => "rate_limit_error",
            400..=499 => "invalid_request_error",
            503 => "service_unavailable_error",
            _ => "server_error",
        }
    }

    /// Whose fault.
    pub const fn fault(self) -> Fault {
        match self {
            Self::PrefillUnreachable | Self::PrefillFailed => Fault::Prefill,
            Self::DecodeUnreachable | Self::DecodeFailed => Fault::Decode,
            Self::KvStale | Self::KvCorrupt | Self::KvMismatch | Self::KvTransfer => {
                Fault::Transport
            }
            Self::Overloaded
            | Self::Draining
            | Self::NotReady
            | Self::NoInstance
            | Self::Timeout
            | Self::Internal => Fault::Us,
            _ => Fault::Client,
        }
    }

    /// May the request be sent again?
    pub const fn retry(self) -> Retry {
        match self.fault() {
            Fault::Client => Retry::Never,
            Fault::Prefill | Fault::Decode | Fault::Transport => Retry::Elsewhere,
            Fault::Us => match self {
                Self::Internal | Self::Timeout => Retry::Elsewhere,
                _ => Retry::Later,
            },
        }
    }
}

impl ApiError {
    /// An error of a class with its sentence.
    pub fn new(kind: ErrorKind, message: impl Into<String>) -> Self {
        let retry_after = (kind.retry() == Retry::Later).then_some(1);
        Self {
            kind,
            message: message.into(),
            param: None,
            retry_after,
        }
    }

    /// A bad value of request field `param`.
    pub fn invalid(param: impl Into<String>, message: impl Into<String>) -> Self {
        Self {
            param: Some(param.into()),
            ..Self::new(ErrorKind::InvalidRequest, message)
        }
    }

    /// Names the request field at fault.
    #[must_use]
    pub fn with_param(mut self, param: impl Into<String>) -> Self {
        self.param = Some(param.into());
        self
    }

    /// The JSON body, the same in HTTP answers and SSE events.
    pub fn body(&self) -> ErrorBody {
        ErrorBody {
            error: ErrorDetail {
                message: self.message.clone(),
                kind: self.kind.type_name().to_owned(),
                param: self.param.clone(),
                code: Some(self.kind.code().to_owned()),
            },
        }
    }
}

impl fmt::Display for ApiError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.kind.code(), self.message)
    }
}

impl std::error::Error for ApiError {}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn each_class_is_found_by_its_own_code() {
        let codes: BTreeSet<_> = ErrorKind::ALL.iter().map(|kind| kind.code()).collect();
        assert_eq!(codes.len(), ErrorKind::ALL.len());
        for kind in ErrorKind::ALL {
            assert_eq!(ErrorKind::from_code(kind.code()), Some(kind));
        }
        assert_eq!(ErrorKind::from_code("InternalServerError"), None);
    }
}
