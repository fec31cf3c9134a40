//! Connectors of vLLM and vLLM-Ascend where both legs run at the same time.

use crate::common::{LIMIT, Router, fake, free_port, quick, start, wait};
use serde_json::{Value, json};
use std::time::Duration;
use twinfer_bench::fake::{
    Dialect, FakeConfig, FakeFault, FakeWorker, FaultKind, RecordedRequest, Role,
};
use twinfer_config::{KvConnector, RouterConfig};
use twinfer_router::RouterError;

fn inference(worker: &FakeWorker) -> Vec<RecordedRequest> {
    let all = worker.requests().into_iter();
    all.filter(|r| r.nth > 0).collect()
}

fn config(connector: KvConnector, prefill: &[&FakeWorker], decode: &[&FakeWorker]) -> RouterConfig {
    RouterConfig {
        kv_connector: connector,
        // Fakes have their bootstrap server at their own port.
        mooncake_bootstrap_port: 0,
        ..quick(prefill, decode)
    }
}

async fn all_up(router: &Router, count: f64) {
    wait(|| async { router.metric("twinfer_router_instance_up", &[]).await == count }).await;
}

fn id_of(request: &RecordedRequest) -> String {
    request.header("x-request-id").expect("an id").to_owned()
}

/// The exchange of the public decode-first proxy.
#[tokio::test]
async fn layerwise_decode_comes_first_and_asks_for_prefill() {
    let prefill = FakeWorker::prefill(Dialect::MooncakeLayerwise)
        .await
        .expect("start");
    let decode = FakeWorker::decode(Dialect::MooncakeLayerwise)
        .await
        .expect("start");
    let router = Router::ready(config(
        KvConnector::MooncakeLayerwise,
        &[&prefill],
        &[&decode],
    ))
    .await;
    for (path, chat) in [("/v1/completions", false), ("/v1/chat/completions", true)] {
        let mut ask = match chat {
            true => json!({"messages": [{"role": "user", "content": "hi"}]}),
            false => json!({"prompt": "hi"}),
        };
        ask["max_tokens"] = json!(4);
        ask["stream"] = json!(true);
        let answer = router.post(path, &ask).await;
        assert_eq!(answer.status, 200, "{}", answer.text());
        assert!(answer.text().ends_with("data: [DONE]\n\n"));
        let to_decode = inference(&decode).pop().expect("a request to decode");
        let to_prefill = inference(&prefill).pop().expect("a request to prefill");
        let params = to_decode.json()["kv_transfer_params"].clone();
        let url = format!("http://127.0.0.1:{}/v1/metaserver", router.addr.port());
        let expected =
            json!({"do_remote_decode": false, "do_remote_prefill": true, "metaserver": url});
        assert_eq!(params, expected);
        assert_eq!(to_decode.json()["max_tokens"], 4);
        // Prefill gets what decode has posted, as it came, and the same id.
        let posted = to_prefill.json()["kv_transfer_params"].clone();
        let prefix = if chat { "chatcmpl" } else { "cmpl" };
        let id = id_of(&to_decode);
        let engine_id = if chat {
            format!("{prefix}-{id}")
        } else {
            format!("{prefix}-{id}-0")
        };
        assert_eq!(posted["request_id"], engine_id);
        assert_eq!(posted["remote_port"], decode.addr().port());
        assert_eq!(posted["do_remote_decode"], true);
        assert_eq!(id_of(&to_prefill), id);
        for (field, value) in [
            ("max_tokens", json!(1)),
            ("min_tokens", json!(1)),
            ("stream", json!(false)),
        ] {
            assert_eq!(to_prefill.json()[field], value);
        }
    }
    // Nobody else can ask: ids are known to decode alone, for as long as a request runs.
    let question = json!({"request_id": "cmpl-6ba7b810-9dad-11d1-80b4-00c04fd430c8-0"});
    assert_eq!(router.post("/v1/metaserver", &question).await.status, 404);
    wait(|| router.idle()).await;
}

#[tokio::test]
async fn layerwise_another_prefill_takes_over_while_decode_waits() {
    let broken = start(FakeConfig {
        fault: vec![FakeFault::always(FaultKind::Cut(0))],
        ..fake(Role::Prefill, Dialect::MooncakeLayerwise)
    })
    .await;
    let good = FakeWorker::prefill(Dialect::MooncakeLayerwise)
        .await
        .expect("start");
    let decode = FakeWorker::decode(Dialect::MooncakeLayerwise)
        .await
        .expect("start");
    let router = Router::ready(config(
        KvConnector::MooncakeLayerwise,
        &[&broken, &good],
        &[&decode],
    ))
    .await;
    all_up(&router, 3.0).await;
    for _ in 0..3 {
        let answer = router
            .post("/v1/completions", &json!({"prompt": "p"}))
            .await;
        assert_eq!(answer.status, 200, "{}", answer.text());
    }
    assert_eq!(decode.served(), 3, "decode is asked once per request");
    assert_eq!(good.served(), 3);
    wait(|| router.idle()).await;
}

/// Nobody but the router can tell decode that prefill failed: its request is ended.
#[tokio::test]
async fn layerwise_decode_does_not_wait_for_a_prefill_that_failed() {
    let broken = start(FakeConfig {
        fault: vec![FakeFault::always(FaultKind::Cut(0))],
        ..fake(Role::Prefill, Dialect::MooncakeLayerwise)
    })
    .await;
    let decode = FakeWorker::decode(Dialect::MooncakeLayerwise)
        .await
        .expect("start");
    let router = Router::ready(config(
        KvConnector::MooncakeLayerwise,
        &[&broken],
        &[&decode],
    ))
    .await;
    let answer = router
        .post("/v1/completions", &json!({"prompt": "p"}))
        .await;
    assert_eq!(
        (answer.status, answer.code().as_str()),
        (502, "prefill_failed")
    );
    assert!(
        decode
            .wait_until(Duration::from_secs(1), |d| d.in_flight() == 0)
            .await,
        "decode still waits"
    );
    assert_eq!(decode.abandoned(), 1);
    wait(|| router.idle()).await;
}

#[tokio::test]
async fn layerwise_needs_an_address_that_decode_reaches() {
    let decode = FakeWorker::decode(Dialect::MooncakeLayerwise)
        .await
        .expect("start");
    let mut config = config(KvConnector::MooncakeLayerwise, &[&decode], &[&decode]);
    config.prefill = vec![format!("http://127.0.0.1:{}", free_port())];
    config.host = "0.0.0.0".to_owned();
    let started = twinfer_router::run(config, std::future::pending(), |_| {}).await;
    let Err(RouterError::Config(problems)) = started else {
        panic!("it starts");
    };
    assert!(problems[0].contains("--metaserver-host"), "{problems:?}");
}

#[tokio::test]
async fn mooncake_runs_both_legs_at_once_under_one_transfer_id() {
    let prefill = start(FakeConfig {
        ttft: 0.3,
        ..fake(Role::Prefill, Dialect::Mooncake)
    })
    .await;
    let decode = FakeWorker::decode(Dialect::Mooncake).await.expect("start");
    let router = Router::ready(config(KvConnector::Mooncake, &[&prefill], &[&decode])).await;
    let ask = json!({"prompt": "p", "max_tokens": 3, "stream": true});
    let both_run = prefill.wait_until(LIMIT, |p| p.in_flight() == 1 && decode.in_flight() == 1);
    let (answer, both) = tokio::join!(router.post("/v1/completions", &ask), both_run);
    assert_eq!(answer.status, 200, "{}", answer.text());
    assert!(both, "one waits for the other");
    let [to_prefill] = inference(&prefill).try_into().expect("one request");
    let [to_decode] = inference(&decode).try_into().expect("one request");
    let (p, d) = (
        to_prefill.json()["kv_transfer_params"].clone(),
        to_decode.json()["kv_transfer_params"].clone(),
    );
    let transfer = p["transfer_id"].as_str().expect("an id");
    assert!(transfer.starts_with("xfer-"));
    assert_eq!(
        p,
        json!({"do_remote_decode": true, "do_remote_prefill": false, "transfer_id": transfer})
    );
    assert_eq!(d["transfer_id"], transfer);
    assert_eq!(d["remote_bootstrap_addr"], prefill.url());
    assert!(
        d["remote_engine_id"]
            .as_str()
            .is_some_and(|id| !id.is_empty())
    );
    assert_eq!(
        (
            d["do_remote_prefill"].clone(),
            d["do_remote_decode"].clone()
        ),
        (json!(true), json!(false))
    );
    assert_eq!(prefill.pulls(), 1);
    assert!(prefill.held().is_empty());
    wait(|| router.idle()).await;
}

#[tokio::test]
async fn mooncake_fails_over_on_either_side() {
    let slow = |role| FakeConfig {
        ttft: 0.05,
        ..fake(role, Dialect::Mooncake)
    };
    // Decode: one has no room. What prefill computes is for the other.
    let prefill = start(slow(Role::Prefill)).await;
    let busy = start(FakeConfig {
        fault: vec!["status:503".parse().expect("a fault")],
        ..fake(Role::Decode, Dialect::Mooncake)
    })
    .await;
    let decode = FakeWorker::decode(Dialect::Mooncake).await.expect("start");
    let router = Router::ready(config(
        KvConnector::Mooncake,
        &[&prefill],
        &[&busy, &decode],
    ))
    .await;
    all_up(&router, 3.0).await;
    for _ in 0..4 {
        let answer = router
            .post("/v1/completions", &json!({"prompt": "p"}))
            .await;
        assert_eq!(answer.status, 200, "{}", answer.text());
    }
    assert!(busy.served() >= 1);
    assert_eq!(prefill.served(), 4, "no prompt is computed twice");
    assert_eq!(prefill.pulls(), 4);

    // Prefill: decode was told of the one that failed, and begins anew with the other.
    let broken = start(FakeConfig {
        fault: vec![FakeFault::always(FaultKind::Cut(0))],
        ..fake(Role::Prefill, Dialect::Mooncake)
    })
    .await;
    let router = Router::ready(config(
        KvConnector::Mooncake,
        &[&broken, &prefill],
        &[&decode],
    ))
    .await;
    all_up(&router, 3.0).await;
    for _ in 0..4 {
        let answer = router
            .post("/v1/completions", &json!({"prompt": "p"}))
            .await;
        assert_eq!(answer.status, 200, "{}", answer.text());
    }
    assert!(broken.served() >= 1);
    let ids: Vec<Value> = inference(&decode)
        .iter()
        .map(|r| r.json()["kv_transfer_params"]["transfer_id"].clone())
        .collect();
    let distinct: std::collections::BTreeSet<String> = ids.iter().map(Value::to_string).collect();
    assert_eq!(distinct.len(), ids.len(), "a new try has a new id");
    assert!(decode.wait_until(LIMIT, |d| d.in_flight() == 0).await);
    wait(|| router.idle()).await;
}
