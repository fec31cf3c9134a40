//! Headers: which pass from an instance to the client, and ids of requests.

use http::header::{
    CONNECTION, CONTENT_LENGTH, PROXY_AUTHENTICATE, PROXY_AUTHORIZATION, TE, TRAILER,
    TRANSFER_ENCODING, UPGRADE,
};
use http::{HeaderMap, HeaderName, HeaderValue};
use twinfer_protocol::{
    DECISION_HEADER, DECODE_HEADER, PREFILL_HEADER, REQUEST_ID_HEADER, ROUTER_ID_HEADER,
};

/// Longest id of a client that is logged and sent back, in bytes.
const MAX_CLIENT_ID: usize = 128;

/// The router's own id of a request, and what the client called it.
#[derive(Clone, Debug)]
pub(crate) struct RequestId {
    /// A fresh UUID: both legs get it, so that ids of clients link nothing.
    pub(crate) own: HeaderValue,
    client: Option<HeaderValue>,
    random: u64,
}

impl RequestId {
    pub(crate) fn new(client: &HeaderMap) -> Self {
        let mut buffer = uuid::Uuid::encode_buffer();
        let uuid = uuid::Uuid::new_v4();
        let text = uuid.hyphenated().encode_lower(&mut buffer);
        // A UUID is a valid header value.
        let own = HeaderValue::from_str(text).unwrap_or_else(|_| HeaderValue::from_static("none"));
        Self {
            own,
            client: client.get(REQUEST_ID_HEADER).and_then(clean),
            random: uuid.as_u64_pair().0.rotate_left(32) ^ uuid.as_u64_pair().1,
        }
    }

    /// The router's id, for logs.
    pub(crate) fn as_str(&self) -> &str {
        self.own.to_str().unwrap_or_default()
    }

    /// A random number that goes with it.
    pub(crate) fn random(&self) -> u64 {
        self.random
    }

    /// What the client called it, cut and cleaned, for logs.
    pub(crate) fn client(&self) -> Option<&str> {
        self.client.as_ref().and_then(|id| id.to_str().ok())
    }

    /// Puts the ids into an answer.
    pub(crate) fn mark(&self, headers: &mut HeaderMap) {
        headers.insert(HeaderName::from_static(ROUTER_ID_HEADER), self.own.clone());
        let shown = self.client.as_ref().unwrap_or(&self.own);
        headers.insert(HeaderName::from_static(REQUEST_ID_HEADER), shown.clone());
    }
}

/// Says in an answer which instances served the request.
pub(crate) fn mark_instances(
    headers: &mut HeaderMap,
    prefill: Option<&str>,
    decode: Option<&str>,
    reason: &'static str,
) {
    let named = [(PREFILL_HEADER, prefill), (DECODE_HEADER, decode)];
    for (header, name) in named {
        headers.remove(header);
        if let Some(value) = name.and_then(|name| HeaderValue::from_str(name).ok()) {
            headers.insert(HeaderName::from_static(header), value);
        }
    }
    headers.insert(
        HeaderName::from_static(DECISION_HEADER),
        HeaderValue::from_static(reason),
    );
}

/// Removes what concerns one connection only (RFC 9110, 7.6.1), and the length, which is set anew.
pub(crate) fn strip_hop_by_hop(headers: &mut HeaderMap) {
    let named: Vec<HeaderName> = headers
        .get_all(CONNECTION)
        .iter()
        .filter_map(|value| value.to_str().ok())
        .flat_map(|value| value.split(','))
        .filter_map(|name| HeaderName::from_bytes(name.trim().as_bytes()).ok())
        .collect();
    for name in named {
        headers.remove(name);
    }
    let fixed = [
        CONNECTION,
        CONTENT_LENGTH,
        PROXY_AUTHENTICATE,
        PROXY_AUTHORIZATION,
        TE,
        TRAILER,
        TRANSFER_ENCODING,
        UPGRADE,
        HeaderName::from_static("keep-alive"),
        HeaderName::from_static("proxy-connection"),
    ];
    for name in fixed {
        headers.remove(name);
    }
}

/// A client's id: cut, and anything but visible ASCII replaced.
fn clean(value: &HeaderValue) -> Option<HeaderValue> {
    let bytes = value.as_bytes();
    if bytes.is_empty() {
        return None;
    }
    let cut = bytes.get(..MAX_CLIENT_ID).unwrap_or(bytes);
    if cut.len() == bytes.len() && cut.iter().all(u8::is_ascii_graphic) {
        return Some(value.clone());
    }
    let text: String = cut
        .iter()
        .map(|&b| {
            if b.is_ascii_graphic() {
                char::from(b)
            } else {
                '_'
            }
        })
        .collect();
    HeaderValue::try_from(text).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn map(pairs: &[(&'static str, &'static str)]) -> HeaderMap {
        pairs
            .iter()
            .map(|&(name, value)| {
                (
                    HeaderName::from_static(name),
                    HeaderValue::from_static(value),
                )
            })
            .collect()
    }

    #[test]
    fn hop_by_hop_headers_end_here() {
        let mut headers = map(&[
            ("connection", "keep-alive, x-private"),
            ("keep-alive", "timeout=5"),
            ("transfer-encoding", "chunked"),
            ("content-length", "7"),
            ("x-private", "1"),
            ("content-type", "application/json"),
            ("content-encoding", "gzip"),
            ("server", "uvicorn"),
            ("retry-after", "3"),
        ]);
        strip_hop_by_hop(&mut headers);
        let mut left: Vec<&str> = headers.keys().map(HeaderName::as_str).collect();
        left.sort_unstable();
        assert_eq!(
            left,
            ["content-encoding", "content-type", "retry-after", "server"]
        );
    }

    #[test]
    fn ids_of_clients_are_cut_and_cleaned() {
        let mut headers = HeaderMap::new();
        let id = RequestId::new(&headers);
        assert_eq!((id.client(), id.as_str().len()), (None, 36));
        headers.insert(
            REQUEST_ID_HEADER,
            HeaderValue::from_bytes(b"a b\xff../\"c").expect("a value"),
        );
        assert_eq!(RequestId::new(&headers).client(), Some("a_b_../\"c"));
        headers.insert(
            REQUEST_ID_HEADER,
            HeaderValue::from_str(&"x".repeat(200)).expect("a value"),
        );
        assert_eq!(
            RequestId::new(&headers).client().map(str::len),
            Some(MAX_CLIENT_ID)
        );
    }
}
