//! `/v1/metaserver`: where decode instances of MooncakeLayerwiseConnector ask for prefill.

use bytes::Bytes;
use parking_lot::Mutex;
use serde::Deserialize;
use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{mpsc, oneshot};
use twinfer_protocol::{ApiError, ErrorKind};

/// Length of the ids that [`Metaserver::expect`] takes.
const ID: usize = 36;

/// Requests whose decode instance may ask.
#[derive(Debug)]
pub(crate) struct Metaserver {
    /// As decode instances are told it.
    pub(crate) url: String,
    /// For prefill.
    limit: Duration,
    expected: Arc<Mutex<HashMap<String, mpsc::Sender<Called>>>>,
}

/// A question: where decode wants the KV, and whom to tell how it went.
#[derive(Debug)]
pub(crate) struct Called {
    /// The JSON object, as it came.
    pub(super) params: String,
    pub(super) reply: oneshot::Sender<bool>,
}

/// Questions of one request, until dropped.
#[derive(Debug)]
pub(crate) struct Calls {
    id: String,
    calls: mpsc::Receiver<Called>,
    expected: Arc<Mutex<HashMap<String, mpsc::Sender<Called>>>>,
}

#[derive(Deserialize)]
struct Question {
    request_id: String,
}

impl Metaserver {
    pub(crate) fn new(url: String, limit: Duration) -> Self {
        Self {
            url,
            limit,
            expected: Arc::default(),
        }
    }

    /// A decode leg with this id (a UUID) begins.
    pub(super) fn expect(&self, id: String) -> Calls {
        // A request of one prompt asks once.
        let (tell, calls) = mpsc::channel(1);
        self.expected.lock().insert(id.clone(), tell);
        Calls {
            id,
            calls,
            expected: Arc::clone(&self.expected),
        }
    }

    /// Serves a question; resolves when prefill has answered.
    ///
    /// # Errors
    /// `NotFound` for a request that does not wait for this, `PrefillFailed`, `Timeout`.
    pub(crate) async fn ask(&self, body: &Bytes) -> Result<(), ApiError> {
        let question: Question = serde_json::from_slice(body).map_err(|error| {
            ApiError::invalid(
                "request_id",
                format!("the body is no question of a connector: {error}"),
            )
        })?;
        let params = std::str::from_utf8(body).unwrap_or_default().to_owned();
        let waiting =
            own_id(&question.request_id).and_then(|id| self.expected.lock().get(id).cloned());
        let (reply, told) = oneshot::channel();
        let asked =
            waiting.is_some_and(|waiting| waiting.try_send(Called { params, reply }).is_ok());
        if !asked {
            let shown: String = question.request_id.chars().take(100).collect();
            let message = format!("Unknown metaserver request_id: {shown}");
            return Err(ApiError::new(ErrorKind::NotFound, message));
        }
        match tokio::time::timeout(self.limit, told).await {
            Ok(Ok(true)) => Ok(()),
            Ok(_) => {
                let message = "no prefill instance has computed the prompt";
                Err(ApiError::new(ErrorKind::PrefillFailed, message))
            }
            Err(_) => Err(ApiError::new(ErrorKind::Timeout, "prefill took too long")),
        }
    }
}

impl Calls {
    pub(super) async fn next(&mut self) -> Option<Called> {
        self.calls.recv().await
    }
}

impl Drop for Calls {
    fn drop(&mut self) {
        self.expected.lock().remove(&self.id);
    }
}

/// The router's id within the engine's: `cmpl-<id>-<prompt>` or `chatcmpl-<id>`, newer ones with a suffix.
fn own_id(request_id: &str) -> Option<&str> {
    let rest = request_id
        .strip_prefix("chatcmpl-")
        .or_else(|| request_id.strip_prefix("cmpl-"))?;
    rest.get(..ID)
}

#[cfg(test)]
mod tests {
    use super::*;

    const UUID: &str = "6ba7b810-9dad-11d1-80b4-00c04fd430c8";

    #[test]
    fn ids_of_engines_contain_ours() {
        for id in [
            format!("cmpl-{UUID}-0"),
            format!("chatcmpl-{UUID}"),
            format!("chatcmpl-{UUID}-1a2b3c4d"),
        ] {
            assert_eq!(own_id(&id), Some(UUID));
        }
        for id in [
            "",
            "cmpl-",
            UUID,
            "cmpl-6ba7b810",
            "cmpl-\u{e9}\u{e9}\u{e9}\u{e9}\u{e9}\u{e9}\u{e9}\u{e9}\u{e9}\u{e9}\u{e9}\u{e9}\u{e9}\u{e9}\u{e9}\u{e9}\u{e9}\u{e9}\u{e9}",
        ] {
            assert_ne!(own_id(id), Some(UUID));
        }
    }

    #[tokio::test]
    async fn a_question_is_answered_once_and_an_unknown_one_is_not_found() {
        let server = Metaserver::new(
            "http://h:1/v1/metaserver".to_owned(),
            Duration::from_secs(5),
        );
        let mut calls = server.expect(UUID.to_owned());
        let body = Bytes::from(format!(
            r#"{{"request_id":"cmpl-{UUID}-0","remote_port":1}}"#
        ));
        let serve = async {
            let called = calls.next().await.expect("a question");
            assert!(called.params.contains("remote_port"));
            called.reply.send(true).expect("it waits");
        };
        let (asked, ()) = tokio::join!(server.ask(&body), serve);
        asked.expect("served");
        drop(calls);
        let error = server.ask(&body).await.expect_err("it is over");
        assert_eq!(error.kind, ErrorKind::NotFound);
        assert!(server.ask(&Bytes::from_static(b"{}")).await.is_err());
        assert!(server.expected.lock().is_empty());
    }
}
