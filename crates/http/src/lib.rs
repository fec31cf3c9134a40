//! What worker and router share of HTTP/1.1: listeners and limits, graceful drain, keys, errors as
//! responses and as events, server-sent events in both directions, a client for peers, metrics.
#![forbid(unsafe_code)]

mod client;
mod connect;
mod crowd;
mod drain;
mod endpoint;
mod error;
mod framing;
mod json;
mod listen;
mod metrics;
mod progress;
mod room;
mod secret;
mod serve;
pub mod sse;

pub use client::{ClientOptions, PeerClient, TransportError, collect_body, innermost, next_chunk};
pub use connect::connect;
pub use drain::{Drain, DrainEnd, DrainState, InFlight};
pub use endpoint::{AddressError, Endpoint, Host, HostPort};
pub use error::{HttpError, error_response, with_fallbacks};
pub use json::{check_content_type, parse_json, read_body};
pub use listen::{BindError, Listener};
pub use metrics::{
    METRICS_CONTENT_TYPE, Metrics, SECONDS_INTER_TOKEN, SECONDS_REQUEST, SECONDS_TTFT, TOKENS,
};
pub use prometheus_client::metrics::{
    counter::Counter, family::Family, gauge::Gauge, histogram::Histogram,
};
pub use room::{BodyRoom, RoomShare};
pub use secret::{Secret, SecretError, check_bearer};
pub use serve::{ClientAddr, MAX_CONNECTIONS, OWN_DESCRIPTORS, ServeOptions, serve};

/// Any error of a body or a service.
pub type BoxError = Box<dyn std::error::Error + Send + Sync>;
