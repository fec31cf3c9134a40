//! Giving handles back: prefill frees at once what no decode instance has fetched.

use crate::metrics::RouterMetrics;
use crate::registry::{InstanceId, Registry};
use crate::upstream::Upstream;
use bytes::Bytes;
use http::{HeaderMap, HeaderValue};
use serde::Deserialize;
use std::sync::Arc;
use std::time::Duration;
use tokio_util::task::TaskTracker;
use twinfer_http::TransportError;
use twinfer_protocol::{Epoch, KvRelease};

const PATH: &str = "/twinfer/kv/release";
/// For one try; the lease ends what cannot be released.
const LIMIT: Duration = Duration::from_secs(2);
const TRIES: u32 = 2;

/// What prefill gave: passed to decode as it is.
#[derive(Clone, Debug)]
pub(crate) struct Handle {
    /// The JSON object.
    pub(crate) params: Bytes,
    /// Who gave it.
    pub(crate) from: InstanceId,
}

/// Sends releases in tasks of its own: the request that needs one has ended or goes on.
#[derive(Clone)]
pub(crate) struct Releaser {
    pub(crate) registry: Arc<Registry>,
    pub(crate) upstream: Upstream,
    pub(crate) metrics: Arc<RouterMetrics>,
    pub(crate) tasks: TaskTracker,
}

/// The part of a handle that names what is held.
#[derive(Deserialize)]
struct Held {
    remote_request_id: String,
    remote_engine_id: String,
}

impl Releaser {
    /// Gives a handle back. Engines other than ours have no route for it; their own timeout ends it.
    pub(crate) fn release(&self, handle: &Handle) {
        let native = self
            .registry
            .get(handle.from)
            .and_then(|i| i.facts.load_full())
            .is_some_and(|f| f.native);
        if !native {
            self.metrics.released("no_route");
            return;
        }
        let Some(body) = body(&handle.params) else {
            self.metrics.released("no_name");
            return;
        };
        let this = self.clone();
        let from = handle.from;
        self.tasks.spawn(async move {
            let mut outcome = "failed";
            for _ in 0..TRIES {
                match this.send(from, body.clone()).await {
                    Ok(true) => {
                        outcome = "done";
                        break;
                    }
                    Ok(false) => {}
                    Err(error) => tracing::debug!(%error, "release"),
                }
            }
            this.metrics.released(outcome);
        });
    }

    async fn send(&self, to: InstanceId, body: Bytes) -> Result<bool, TransportError> {
        let Some(instance) = self.registry.get(to) else {
            return Ok(false);
        };
        let headers = self
            .upstream
            .headers(&HeaderValue::from_static("release"), &HeaderMap::new());
        let answer = self
            .upstream
            .post(&instance.spec.endpoint, PATH, headers, body, LIMIT)
            .await?;
        let good = answer.status().is_success();
        // Read to the end, so that the connection can be used again.
        twinfer_http::collect_body(answer.into_body(), "release", 1 << 16, LIMIT).await?;
        Ok(good)
    }
}

/// The body of the release: id, and the epoch behind the engine's name.
fn body(params: &[u8]) -> Option<Bytes> {
    let held: Held = serde_json::from_slice(params).ok()?;
    let (_, epoch) = held.remote_engine_id.rsplit_once('-')?;
    let epoch: Epoch = epoch.parse().ok()?;
    let release = KvRelease {
        remote_request_id: held.remote_request_id,
        epoch,
    };
    serde_json::to_vec(&release).ok().map(Bytes::from)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_epoch_stands_behind_the_last_hyphen() {
        let params = br#"{"remote_engine_id":"prefill-7100-00000000000000ff","remote_request_id":"cmpl-1","x":1e400}"#;
        let body = body(params).expect("a body");
        assert_eq!(
            body,
            r#"{"remote_request_id":"cmpl-1","epoch":"00000000000000ff"}"#
        );
        assert!(super::body(br#"{"remote_engine_id":"e0","remote_request_id":"x"}"#).is_none());
        assert!(super::body(b"{}").is_none());
    }
}
