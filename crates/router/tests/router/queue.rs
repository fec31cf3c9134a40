//! Requests that wait for their turn.

use crate::common::{LIMIT, Router, fake, quick, read_answer, start, wait};
use std::os::unix::fs::PermissionsExt as _;
use twinfer_bench::fake::{Dialect, FakeConfig, Role};
use twinfer_config::RouterConfig;

const ASK: &[u8] = br#"{"prompt":"p","max_tokens":1}"#;

#[tokio::test]
async fn a_client_with_many_requests_does_not_keep_others_from_theirs() {
    let keys = tempfile::NamedTempFile::new().expect("a file");
    std::fs::write(keys.path(), "many key-of-many\nfew key-of-few\n").expect("written");
    let mode = std::fs::Permissions::from_mode(0o600);
    std::fs::set_permissions(keys.path(), mode).expect("a mode");
    let both = start(FakeConfig {
        ttft: 0.4,
        ..fake(Role::Both, Dialect::Twinfer)
    })
    .await;
    let router = Router::ready(RouterConfig {
        worker: vec![both.url()],
        max_inflight: 1,
        max_queued: 6,
        api_keys_file: Some(keys.path().to_owned()),
        ..quick(&[], &[])
    })
    .await;
    let open = async |key: &str, name: &str| {
        let bearer = format!("Bearer {key}");
        let headers = [
            ("content-type", "application/json"),
            ("authorization", bearer.as_str()),
            ("x-request-id", name),
        ];
        router.open("POST", "/v1/completions", &headers, ASK).await
    };
    let mut many = Vec::new();
    for n in 0..7 {
        many.push(open("key-of-many", &format!("many-{n}")).await);
        // One after the other: their order is theirs.
        wait(|| async {
            router.metric("twinfer_router_requests_waiting", &[]).await == f64::from(n)
        })
        .await;
    }
    // The queue is full of one client's requests: another's has a place all the same, and its turn is next.
    let mut few = open("key-of-few", "few").await;
    let answer = tokio::time::timeout(LIMIT, read_answer(&mut few))
        .await
        .expect("in time");
    assert_eq!(answer.status, 200, "{}", answer.text());
    let served_then = both.served();
    assert!(served_then <= 3, "served after {served_then}");
    let mut statuses = Vec::new();
    for mut stream in many {
        let answer = tokio::time::timeout(LIMIT, read_answer(&mut stream))
            .await
            .expect("in time");
        if answer.status == 429 {
            assert!(answer.header("retry-after").is_some());
            assert_eq!(answer.code(), "overloaded");
        }
        statuses.push(answer.status);
    }
    // The last one that came has given its place up.
    assert_eq!(statuses, [200, 200, 200, 200, 200, 200, 429]);
    wait(|| router.idle()).await;
}

#[tokio::test]
async fn who_waits_too_long_is_told_to_come_again() {
    let both = start(FakeConfig {
        ttft: 2.0,
        ..fake(Role::Both, Dialect::Twinfer)
    })
    .await;
    let router = Router::ready(RouterConfig {
        worker: vec![both.url()],
        max_inflight: 1,
        max_queued: 1,
        queue_timeout: 0.05,
        ..quick(&[], &[])
    })
    .await;
    let headers = [("content-type", "application/json")];
    let first = router.open("POST", "/v1/completions", &headers, ASK).await;
    assert!(both.wait_until(LIMIT, |b| b.in_flight() == 1).await);
    let second = router.post_raw("/v1/completions", ASK).await;
    assert_eq!((second.status, second.code().as_str()), (429, "overloaded"));
    assert!(second.text().contains("waited"), "{}", second.text());
    assert_eq!(both.served(), 1);
    drop(first);
    wait(|| router.idle()).await;
}
