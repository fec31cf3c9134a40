//! Names of requests: what clients see, what logs show, what nobody can guess.

use http::HeaderMap;
use twinfer_protocol::REQUEST_ID_HEADER;
use uuid::Uuid;

/// Longest id of a client that is taken over; a longer one is replaced.
const MAX_GIVEN: usize = 256;
/// Characters of a client's id in logs.
const LOGGED: usize = 64;

/// The names of one HTTP request.
#[derive(Clone, Debug)]
pub(crate) struct RequestName {
    /// `id` of the answer: `cmpl-<given or random>`. Two requests may have the same.
    pub(crate) public: String,
    /// For logs: harmless characters, bounded, with a random suffix, so always distinct.
    pub(crate) log: String,
}

impl RequestName {
    /// From header `X-Request-Id`, else `request_id` of the body, else a random one.
    pub(crate) fn new(prefix: &str, headers: &HeaderMap, body: Option<&str>) -> Self {
        let header = headers
            .get(REQUEST_ID_HEADER)
            .and_then(|value| value.to_str().ok());
        let usable = |id: &&str| !id.is_empty() && id.len() <= MAX_GIVEN;
        let given = header.filter(usable).or(body.filter(usable));
        let random = Uuid::new_v4().simple().to_string();
        let public = format!("{prefix}-{}", given.unwrap_or(&random));
        let log = format!("{}-{}", harmless(&public), &random[..8]);
        Self { public, log }
    }
}

/// Letters, digits and `-_.:`, others as `_`; at most [`LOGGED`] characters.
pub(crate) fn harmless(text: &str) -> String {
    let safe = |c: char| {
        if c.is_ascii_alphanumeric() || "-_.:".contains(c) {
            c
        } else {
            '_'
        }
    };
    text.chars().take(LOGGED).map(safe).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use http::HeaderValue;

    fn headers(id: &[u8]) -> HeaderMap {
        let mut headers = HeaderMap::new();
        headers.insert(REQUEST_ID_HEADER, HeaderValue::from_bytes(id).unwrap());
        headers
    }

    /// C2.10.
    #[test]
    fn the_header_names_the_request_before_the_body() {
        let name = RequestName::new("cmpl", &headers(b"abc"), Some("xyz"));
        assert_eq!(name.public, "cmpl-abc");
        assert_eq!(
            RequestName::new("cmpl", &HeaderMap::new(), Some("xyz")).public,
            "cmpl-xyz"
        );
        let random = RequestName::new("cmpl", &HeaderMap::new(), None).public;
        assert_eq!(random.len(), "cmpl-".len() + 32);
    }

    /// C2.10.
    #[test]
    fn equal_ids_are_distinct_in_logs() {
        let (a, b) = (
            RequestName::new("c", &headers(b"same"), None),
            RequestName::new("c", &headers(b"same"), None),
        );
        assert_eq!(a.public, b.public);
        assert_ne!(a.log, b.log);
    }

    /// C9.6.
    #[test]
    fn odd_and_endless_ids_are_harmless() {
        let long = "x".repeat(200);
        assert_eq!(
            RequestName::new("c", &headers(long.as_bytes()), None).public,
            format!("c-{long}")
        );
        let endless = "x".repeat(10_000);
        let name = RequestName::new("c", &HeaderMap::new(), Some(&endless));
        assert!(name.public.len() < 50 && name.log.len() < 80);
        let odd = RequestName::new("c", &HeaderMap::new(), Some("../../x\n\u{0}\u{202e}"));
        assert!(
            odd.log
                .chars()
                .all(|c| c.is_ascii_alphanumeric() || "-_.:".contains(c))
        );
        let bytes = RequestName::new("c", &headers(b"\xff\xfe"), None);
        assert_eq!(bytes.public.len(), "c-".len() + 32);
    }
}
