//! Wire and domain types that every part of twinfer shares: identifiers, roles, error classes,
//! `kv_transfer_params`, instance cards and load reports. No I/O.
#![forbid(unsafe_code)]

mod error;
mod ids;
mod instance;
mod kv;
pub mod limits;
pub mod openai;
pub mod resume;

pub use error::{ApiError, ErrorBody, ErrorDetail, ErrorKind, Fault, Retry};
pub use ids::{BlockId, Epoch, Role, TokenId};
pub use instance::{Fingerprint, InstanceCard, KvBlockCounts, Limits, LoadReport, RankLoad};
pub use kv::{KvRelease, KvTransferParams};
pub use resume::{IdsLine, RESUME_FIELD, Resume};

/// Header that names a request on both legs of a prefill/decode pair.
pub const REQUEST_ID_HEADER: &str = "x-request-id";
/// Request header of a peer: `1` asks for lines of [`resume::IdsLine`] in a stream.
pub const IDS_HEADER: &str = "x-twinfer-ids";
/// Response header of the router: name of the instance that computed the prompt.
pub const PREFILL_HEADER: &str = "x-twinfer-prefill";
/// Response header of the router: name of the instance that generated.
pub const DECODE_HEADER: &str = "x-twinfer-decode";
/// Response header of the router: its own id of the request, sent to both legs.
pub const ROUTER_ID_HEADER: &str = "x-twinfer-request-id";
/// Response header of the router: why the request took its way.
pub const DECISION_HEADER: &str = "x-twinfer-decision";
/// Environment variable (and vLLM's, for its public proxies) that may hold the peer key.
pub const PEER_KEY_ENV: &str = "TWINFER_PEER_KEY";
/// Fallback for [`PEER_KEY_ENV`]: the public proxies send this key as bearer token.
pub const PEER_KEY_ENV_COMPAT: &str = "OPENAI_API_KEY";
/// Environment variable that holds the key of the router's admin listener.
pub const ADMIN_KEY_ENV: &str = "TWINFER_ADMIN_KEY";
/// Environment variable that holds the key clients must present; none means no client key.
pub const API_KEY_ENV: &str = "TWINFER_API_KEY";
