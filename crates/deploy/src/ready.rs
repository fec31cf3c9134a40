//! Waiting for `/ready`.

use http::{HeaderMap, StatusCode};
use std::time::Duration;
use tokio::time::sleep;
use twinfer_http::{ClientOptions, Endpoint, PeerClient};

/// Between two questions.
const PAUSE: Duration = Duration::from_millis(50);
/// For one answer.
const LIMIT: Duration = Duration::from_secs(2);
/// Longest answer that is read.
const MAX_BYTES: usize = 64 << 10;

/// Asks until the answer is 200; true then. `waiting` hears each reason against it.
pub(crate) async fn wait(url: &str, mut waiting: impl FnMut(String)) -> bool {
    let Ok(endpoint) = url.parse::<Endpoint>() else {
        return false;
    };
    let client = PeerClient::new(ClientOptions {
        connect_timeout: LIMIT,
        ..ClientOptions::default()
    });
    loop {
        match client
            .get(&endpoint, "/ready", HeaderMap::new(), MAX_BYTES, LIMIT)
            .await
        {
            Ok((StatusCode::OK, _)) => return true,
            Ok((status, body)) => waiting(reason(status, &body)),
            Err(error) => waiting(error.to_string()),
        }
        sleep(PAUSE).await;
    }
}

fn reason(status: StatusCode, body: &[u8]) -> String {
    let parsed = serde_json::from_slice::<twinfer_protocol::ErrorBody>(body);
    parsed.map_or_else(
        |_| format!("/ready answers {status}"),
        |body| body.error.message,
    )
}
