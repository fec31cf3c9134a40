use crate::support::{Client, LIMIT, Options, Server, config, model};
use serde_json::json;
use std::sync::mpsc::sync_channel;
use std::time::{Duration, Instant};
use tokio::net::TcpListener;
use tokio::sync::oneshot;
use tokio::task::JoinSet;
use twinfer_config::ServeConfig;
use twinfer_engine::testing::write_byte_tokenizer;
use twinfer_http::Drain;
use twinfer_protocol::Role;
use twinfer_worker::{ExitClass, Hooks, LoadProgress, Model, ServeError, serve, serve_with};

fn quiet() -> Hooks {
    Hooks {
        signals: false,
        ..Hooks::default()
    }
}

/// C8.1.
#[tokio::test]
async fn while_the_model_loads_it_is_alive_and_not_ready() {
    let dir = tempfile::tempdir().unwrap();
    write_byte_tokenizer(dir.path()).unwrap();
    let path = dir.path().to_owned();
    let (go, wait) = sync_channel::<()>(0);
    let load = move |config: &ServeConfig, progress: &(dyn Fn(LoadProgress) + Sync)| {
        progress(LoadProgress {
            done: 30,
            total: 100,
        });
        let _ = wait.recv_timeout(LIMIT);
        Ok(model(&path, config, 64, None, "w"))
    };
    let (listening, addr) = oneshot::channel();
    let (ready, is_ready) = oneshot::channel();
    let hooks = Hooks {
        on_listening: Box::new(move |addr| listening.send(addr).unwrap()),
        on_ready: Box::new(move |_| ready.send(()).unwrap()),
        ..quiet()
    };
    let drain = Drain::new();
    let mut task = JoinSet::new();
    task.spawn(serve_with(config(), drain.clone(), hooks, load));
    let client = Client::new(addr.await.unwrap());
    let answer = tokio::time::timeout(LIMIT, async {
        loop {
            let answer = client.get("/ready").await;
            if answer.text().contains("30 of 100 bytes") {
                return answer;
            }
        }
    });
    let (status, code, ..) = answer.await.unwrap().error();
    assert_eq!((status, code.as_str()), (503, "not_ready"));
    assert_eq!(client.get("/health").await.status, 200);
    assert_eq!(client.get("/metrics").await.status, 200);
    let early = client
        .post("/v1/completions", &json!({"prompt": "x"}))
        .await;
    assert_eq!(
        (early.status, early.headers.contains_key("retry-after")),
        (503, true)
    );
    assert_eq!(client.get("/twinfer/instance").await.status, 503);
    go.send(()).unwrap();
    is_ready.await.unwrap();
    assert_eq!(client.get("/ready").await.status, 200);
    assert_eq!(
        client.text("say:the first request|", 30).await,
        "the first request"
    );
    drain.end_now();
    task.join_next().await.unwrap().unwrap().unwrap();
}

/// C8.4.
#[tokio::test]
async fn a_drain_while_the_model_loads_ends_the_instance() {
    let (_go, wait) = sync_channel::<()>(0);
    let load =
        move |_: &ServeConfig, _: &(dyn Fn(LoadProgress) + Sync)| -> Result<Model, ServeError> {
            let _ = wait.recv_timeout(LIMIT);
            Err(ServeError::Model("never".into()))
        };
    let drain = Drain::new();
    let start = Instant::now();
    let (served, _) = tokio::join!(
        serve_with(config(), drain.clone(), quiet(), load),
        drain.run(Duration::from_millis(50), Duration::from_secs(5))
    );
    served.unwrap();
    assert!(start.elapsed() < Duration::from_secs(4));
}

#[tokio::test]
async fn what_keeps_an_instance_from_starting_is_named() {
    let taken = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = taken.local_addr().unwrap().port();
    type Change = Box<dyn Fn(&mut ServeConfig)>;
    let faults: [(Change, ExitClass, String); 14] = [
        (
            Box::new(move |c| c.port = port),
            ExitClass::Unavailable,
            port.to_string(),
        ),
        (
            Box::new(move |c| c.kv_port = port),
            ExitClass::Unavailable,
            port.to_string(),
        ),
        (
            Box::new(|c| c.host = "203.0.113.7".into()),
            ExitClass::Unavailable,
            "203.0.113.7".into(),
        ),
        (
            Box::new(|c| c.kv_host = Some("0.0.0.0".into())),
            ExitClass::Config,
            "peer key".into(),
        ),
        (
            Box::new(|c| c.kv_host = Some("not a host".into())),
            ExitClass::Config,
            "kv-host".into(),
        ),
        (
            Box::new(|c| c.kv_advertise_host = Some("::".into())),
            ExitClass::Config,
            "kv-advertise-host".into(),
        ),
        (
            Box::new(|c| c.max_num_seqs = 0),
            ExitClass::Config,
            "max-num-seqs".into(),
        ),
        (
            Box::new(|c| c.block_size = 0),
            ExitClass::Config,
            "block-size".into(),
        ),
        (
            Box::new(|c| c.max_model_len = Some(1)),
            ExitClass::Config,
            "max-model-len".into(),
        ),
        (
            Box::new(|c| c.drain_timeout = f64::NAN),
            ExitClass::Config,
            "drain-timeout".into(),
        ),
        (
            Box::new(|c| c.pd_peers = vec!["nowhere".into()]),
            ExitClass::Config,
            "pd-peers is \"nowhere\"; ".into(),
        ),
        (
            Box::new(|c| c.cpus = Some("0,x".into())),
            ExitClass::Config,
            "\"x\"".into(),
        ),
        (
            Box::new(|c| c.served_model_name = Some("a\nb".into())),
            ExitClass::Config,
            "served-model-name".into(),
        ),
        (
            Box::new(|c| c.model = "/no/such/model".into()),
            ExitClass::Config,
            "/no/such/model".into(),
        ),
    ];
    for (change, class, named) in faults {
        let mut config = config();
        change(&mut config);
        let start = Instant::now();
        let error = serve(config, Drain::new(), quiet()).await.unwrap_err();
        assert_eq!(error.exit_class(), class, "{error}");
        assert!(error.to_string().contains(&named), "{error}");
        assert!(start.elapsed() < Duration::from_secs(5));
    }
}

#[tokio::test]
async fn a_loader_that_panics_is_an_error() {
    let load = |_: &ServeConfig, _: &(dyn Fn(LoadProgress) + Sync)| -> Result<Model, ServeError> {
        panic!("a bug while loading")
    };
    let error = serve_with(config(), Drain::new(), quiet(), load)
        .await
        .unwrap_err();
    assert!(error.to_string().contains("a bug while loading"), "{error}");
}

#[tokio::test]
async fn a_drain_waits_for_kv_that_is_still_to_be_read() {
    let one = async |role| {
        let mut options = Options::default();
        options.config.role = role;
        options.config.kv_lease = 30;
        Server::start(options).await
    };
    let (mut prefill, decode) = (one(Role::Prefill).await, one(Role::Decode).await);
    let mut body = json!({"prompt": "say:read in time|", "max_tokens": 1,
        "kv_transfer_params": {"do_remote_decode": true}});
    let handle =
        prefill.client.post("/v1/completions", &body).await.json()["kv_transfer_params"].clone();
    let drain = prefill.drain.clone();
    let mut draining = JoinSet::new();
    draining.spawn(async move { drain.run(Duration::ZERO, Duration::from_secs(20)).await });
    prefill
        .drain
        .reached(twinfer_http::DrainState::Draining)
        .await;
    body["kv_transfer_params"] = handle;
    body["max_tokens"] = json!(50);
    let answer = decode.client.complete(&body).await;
    assert_eq!(answer["choices"][0]["text"], "read in time");
    let start = Instant::now();
    prefill.ended().await.unwrap();
    assert!(
        start.elapsed() < Duration::from_secs(4),
        "it does not wait for the lease"
    );
}

/// C3.16.
#[tokio::test]
async fn a_rank_that_is_not_there_is_never_replaced() {
    let server = Server::start(Options::default()).await;
    let body = json!({"prompt": "say:x|"});
    let ask = async |rank: &str| {
        let client = server.client.clone().header("x-data-parallel-rank", rank);
        client.post("/v1/completions", &body).await.status
    };
    assert_eq!(ask("0").await, 200);
    for rank in ["1", "-1", "x", ""] {
        assert_eq!(ask(rank).await, 400, "{rank:?}");
    }
}

#[tokio::test]
async fn the_model_is_found_by_its_name() {
    let server = Server::start(Options::default()).await;
    assert_eq!(
        server.client.get("/v1/models/scripted").await.json()["id"],
        "scripted"
    );
    for name in ["other", "a/b", "%ff", "..%2f"] {
        let (status, code, ..) = server
            .client
            .get(&format!("/v1/models/{name}"))
            .await
            .error();
        assert_eq!((status, code.as_str()), (404, "model_not_found"));
    }
}
