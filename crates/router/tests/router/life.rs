//! Clients that leave, instances that come and go, the router's own end.

use crate::common::{LIMIT, Router, fake, quick, read_answer, start, wait};
use serde_json::json;
use std::time::Duration;
use tokio::io::AsyncReadExt;
use twinfer_bench::fake::{Dialect, FakeConfig, FakeWorker, Role};
use twinfer_config::{Policy, RouterConfig};
use twinfer_router::RouterError;

/// C3.12: requests cancelled at random moments leave nothing behind.
#[tokio::test]
async fn cancelled_requests_close_both_legs_and_leave_nothing_counted() {
    let slow = |role| FakeConfig {
        ttft: 0.02,
        token_time: 0.002,
        tokens: 20,
        ..fake(role, Dialect::Twinfer)
    };
    let (p1, p2) = (
        start(slow(Role::Prefill)).await,
        start(slow(Role::Prefill)).await,
    );
    let (d1, d2) = (
        start(slow(Role::Decode)).await,
        start(slow(Role::Decode)).await,
    );
    let all = [&p1, &p2, &d1, &d2];
    let router = Router::ready(quick(&[&p1, &p2], &[&d1, &d2])).await;
    wait(|| async { router.metric("twinfer_router_instance_up", &[]).await == 4.0 }).await;
    let one = async |n: u64| {
        let ask = json!({"prompt": "p", "stream": n.is_multiple_of(2)}).to_string();
        let mut stream = router
            .open("POST", "/v1/completions", &[], ask.as_bytes())
            .await;
        // Moments over the whole of a request (some 80 ms), in no order.
        let after = Duration::from_micros((n * 7919) % 100_000);
        let mut sink = Vec::new();
        let read = async { while stream.read_buf(&mut sink).await.unwrap_or(0) > 0 {} };
        let _ = tokio::time::timeout(after, read).await;
    };
    for batch in 0..20 {
        futures_util::future::join_all((0..25).map(|n| one(batch * 25 + n))).await;
    }
    for worker in all {
        assert!(
            worker
                .wait_until(Duration::from_secs(1), |w| w.in_flight() == 0)
                .await,
            "a leg goes on"
        );
    }
    wait(|| router.idle()).await;
    // A handle whose request was cancelled between the legs is released, not left to its lease. One that
    // prefill had written but the router had not read is the lease's business.
    let held = p1.held().len() + p2.held().len();
    assert!(p1.releases() + p2.releases() > 0);
    assert!(held <= 5, "{held} handles of 500 requests are left");

    let before: Vec<u64> = all.iter().map(|w| w.served()).collect();
    for _ in 0..50 {
        let ask = json!({"prompt": "p"});
        let answers =
            futures_util::future::join_all((0..8).map(|_| router.post("/v1/completions", &ask)))
                .await;
        assert!(answers.iter().all(|a| a.status == 200));
    }
    for (worker, before) in all.iter().zip(before) {
        let share = worker.served() - before;
        assert!((180..=220).contains(&share), "{share} of 400");
    }
    wait(|| router.idle()).await;
}

/// C2.2 at the router: the client leaves in each phase.
#[tokio::test]
async fn a_client_that_leaves_closes_the_leg_that_runs() {
    for (ttft_prefill, ttft_decode, stream) in [
        (5.0, 0.0, false),
        (5.0, 0.0, true),
        (0.0, 5.0, false),
        (0.0, 5.0, true),
    ] {
        // The KV channel is elsewhere: nobody fetches, so only a release frees.
        let prefill = start(FakeConfig {
            ttft: ttft_prefill,
            kv_host: "192.0.2.1".to_owned(),
            kv_port: 9,
            ..fake(Role::Prefill, Dialect::Twinfer)
        })
        .await;
        let decode = start(FakeConfig {
            ttft: ttft_decode,
            ..fake(Role::Decode, Dialect::Twinfer)
        })
        .await;
        let router = Router::ready(quick(&[&prefill], &[&decode])).await;
        let ask = json!({"prompt": "p", "stream": stream}).to_string();
        let client = router
            .open("POST", "/v1/completions", &[], ask.as_bytes())
            .await;
        let busy = if ttft_prefill > 0.0 {
            &prefill
        } else {
            &decode
        };
        assert!(busy.wait_until(LIMIT, |w| w.in_flight() == 1).await);
        drop(client);
        assert!(
            busy.wait_until(Duration::from_secs(1), |w| w.in_flight() == 0
                && w.abandoned() == 1)
                .await
        );
        assert!(
            prefill
                .wait_until(Duration::from_secs(1), |p| p.held().is_empty())
                .await,
            "released at once"
        );
        assert_eq!(prefill.releases(), u64::from(ttft_decode > 0.0));
        wait(|| router.idle()).await;
    }
}

/// C3.13: load is spread evenly, and every pair occurs.
#[tokio::test]
async fn equal_instances_get_equal_shares_and_all_pairs_occur() {
    for policy in [Policy::LeastLoad, Policy::RoundRobin] {
        for concurrency in [1usize, 2] {
            let named = |name: &str, role| FakeConfig {
                name: Some(name.to_owned()),
                ..fake(role, Dialect::Twinfer)
            };
            let (p1, p2) = (
                start(named("p1", Role::Prefill)).await,
                start(named("p2", Role::Prefill)).await,
            );
            let (d1, d2) = (
                start(named("d1", Role::Decode)).await,
                start(named("d2", Role::Decode)).await,
            );
            let router = Router::ready(RouterConfig {
                policy,
                ..quick(&[&p1, &p2], &[&d1, &d2])
            })
            .await;
            wait(|| async { router.metric("twinfer_router_instance_up", &[]).await == 4.0 }).await;
            let mut pairs = std::collections::BTreeMap::new();
            for _ in 0..100 / concurrency {
                let ask = json!({"prompt": "p"});
                let answers = futures_util::future::join_all(
                    (0..concurrency).map(|_| router.post("/v1/completions", &ask)),
                )
                .await;
                for answer in answers {
                    let name = |header| answer.header(header).expect("a name").to_owned();
                    *pairs
                        .entry((name("x-twinfer-prefill"), name("x-twinfer-decode")))
                        .or_insert(0) += 1;
                }
            }
            for worker in [&p1, &p2, &d1, &d2] {
                assert!(worker.served() >= 40, "{policy:?} {concurrency}: {pairs:?}");
            }
            if concurrency == 1 {
                assert_eq!(pairs.len(), 4, "{policy:?}: {pairs:?}");
            }
        }
    }
}

/// An instance that is not ready gets nothing; it is used again once it is, without a restart.
#[tokio::test]
async fn instances_come_and_go_without_a_restart() {
    let prefill = FakeWorker::prefill(Dialect::Twinfer).await.expect("start");
    let decode = FakeWorker::decode(Dialect::Twinfer).await.expect("start");
    decode.set_ready(false);
    let router = Router::start(quick(&[&prefill], &[&decode])).await;
    wait(|| async {
        router
            .metric("twinfer_router_instance_up", &["prefill"])
            .await
            == 1.0
    })
    .await;
    let ask = json!({"prompt": "p"});
    let answer = router.get("/ready").await;
    assert_eq!((answer.status, answer.code().as_str()), (503, "not_ready"));
    assert!(
        answer.text().contains("/ready answers 503"),
        "{}",
        answer.text()
    );
    let answer = router.post("/v1/completions", &ask).await;
    assert_eq!(
        (answer.status, answer.code().as_str()),
        (503, "no_instance")
    );
    assert!(answer.header("retry-after").is_some());
    assert_eq!((prefill.served(), decode.served()), (0, 0));
    assert_eq!(
        router.get("/health").await.status,
        200,
        "the router itself is live"
    );

    decode.set_ready(true);
    router.wait_ready(true).await;
    assert_eq!(router.post("/v1/completions", &ask).await.status, 200);
    // Gone for good, and back at the same address.
    let port = decode.addr().port();
    decode.stop().await;
    router.wait_ready(false).await;
    let _decode = start(FakeConfig {
        port,
        ..fake(Role::Decode, Dialect::Twinfer)
    })
    .await;
    router.wait_ready(true).await;
    assert_eq!(router.post("/v1/completions", &ask).await.status, 200);
}

/// vLLM has no `/ready` and no card: `/health` and `/v1/models` do.
#[tokio::test]
async fn other_engines_are_probed_by_their_own_routes() {
    let prefill = FakeWorker::prefill(Dialect::Nixl).await.expect("start");
    let decode = FakeWorker::decode(Dialect::Nixl).await.expect("start");
    let native = FakeWorker::decode(Dialect::Twinfer).await.expect("start");
    let router = Router::ready(quick(&[&prefill], &[&decode, &native])).await;
    wait(|| async { router.metric("twinfer_router_instance_up", &[]).await == 3.0 }).await;
    for _ in 0..4 {
        assert_eq!(
            router
                .post("/v1/completions", &json!({"prompt": "p"}))
                .await
                .status,
            200
        );
    }
    assert_eq!(
        (decode.served(), native.served()),
        (4, 0),
        "their KV has another form than ours"
    );
    prefill.set_ready(false);
    router.wait_ready(false).await;
}

#[tokio::test]
async fn an_instance_of_another_role_than_configured_is_not_used() {
    let prefill = FakeWorker::prefill(Dialect::Twinfer).await.expect("start");
    let wrong = FakeWorker::prefill(Dialect::Twinfer).await.expect("start");
    let router = Router::start(quick(&[&prefill], &[&wrong])).await;
    wait(|| async {
        router
            .get("/ready")
            .await
            .text()
            .contains("its role is prefill, the router has it as decode")
    })
    .await;
}

/// C8.4 at the router: readiness goes at once, running streams end well or with an error at the deadline.
#[tokio::test]
async fn a_drain_lets_short_streams_end_and_tells_long_ones() {
    let prefill = FakeWorker::prefill(Dialect::Twinfer).await.expect("start");
    let decode = start(FakeConfig {
        token_time: 0.05,
        tokens: 1000,
        ..fake(Role::Decode, Dialect::Twinfer)
    })
    .await;
    let config = RouterConfig {
        drain_settle: 0.3,
        drain_timeout: 1.5,
        ..quick(&[&prefill], &[&decode])
    };
    let router = Router::ready(config).await;
    let ask =
        |tokens: u32| json!({"prompt": "p", "stream": true, "max_tokens": tokens}).to_string();
    let mut short = router
        .open("POST", "/v1/completions", &[], ask(10).as_bytes())
        .await;
    let mut long = router
        .open("POST", "/v1/completions", &[], ask(1000).as_bytes())
        .await;
    assert!(decode.wait_until(LIMIT, |d| d.in_flight() == 2).await);
    router.drain();
    router.wait_ready(false).await;
    let late = router
        .post("/v1/completions", &json!({"prompt": "p", "max_tokens": 1}))
        .await;
    assert_eq!(late.status, 200, "arrived while load balancers still send");
    wait(|| async {
        router
            .post("/v1/completions", &json!({"prompt": "p", "max_tokens": 1}))
            .await
            .code()
            == "draining"
    })
    .await;
    let (short, long) = tokio::join!(read_answer(&mut short), read_answer(&mut long));
    assert!(
        short.whole && short.text().contains("tok9") && !short.text().contains("error"),
        "{}",
        short.text()
    );
    let events = long.events();
    assert!(
        long.whole && events[events.len() - 2].contains("draining"),
        "{events:?}"
    );
    assert_eq!(events.last().map(String::as_str), Some("[DONE]"));
    assert!(
        decode.wait_until(LIMIT, |d| d.in_flight() == 0).await,
        "the leg is closed"
    );
    router.stop().await;
}

/// C1.3 and C9.12: what can be checked is checked before anything is served.
#[tokio::test]
async fn a_bad_configuration_ends_at_once_and_names_everything() {
    let bad = RouterConfig {
        prefill: vec!["http://192.0.2.3192.0.2.4:1".to_owned()],
        decode: vec!["10.0.0.1:2".to_owned()],
        ..RouterConfig::default()
    };
    let run = twinfer_router::run(bad, std::future::pending(), |_| panic!("it serves"));
    let error = tokio::time::timeout(LIMIT, run)
        .await
        .expect("at once")
        .expect_err("refused");
    let RouterError::Config(problems) = &error else {
        panic!("{error}")
    };
    assert_eq!(problems.len(), 2, "{problems:?}");

    let taken = FakeWorker::prefill(Dialect::Twinfer).await.expect("start");
    let config = RouterConfig {
        port: taken.addr().port(),
        worker: vec![taken.url()],
        ..quick(&[], &[])
    };
    let run = twinfer_router::run(config, std::future::pending(), |_| panic!("it serves"));
    let error = tokio::time::timeout(LIMIT, run)
        .await
        .expect("at once")
        .expect_err("refused");
    assert!(
        error.to_string().contains(&taken.addr().to_string()),
        "{error}"
    );
}

/// C1.3: IPv6 and names work end to end.
#[tokio::test]
async fn addresses_of_every_form_work() {
    let prefill = start(FakeConfig {
        host: "::1".to_owned(),
        ..fake(Role::Prefill, Dialect::VllmAscend)
    })
    .await;
    let decode = start(fake(Role::Decode, Dialect::VllmAscend)).await;
    let config = RouterConfig {
        prefill: vec![format!("http://[::1]:{}", prefill.addr().port())],
        decode: vec![format!("http://localhost:{}", decode.addr().port())],
        ..quick(&[], &[])
    };
    let router = Router::ready(config).await;
    assert_eq!(
        router
            .post("/v1/completions", &json!({"prompt": "p"}))
            .await
            .status,
        200
    );
}
