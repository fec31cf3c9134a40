//! Start, readiness, drain and death of real processes.

use rustix::process::Signal;
use serde_json::{Value, json};
use std::fs;
use std::io::{Seek, SeekFrom, Write};
use std::path::Path;
use std::time::{Duration, Instant};
use tokio::net::TcpStream;
use tokio::task::JoinSet;
use twinfer_it::{
    Client, Cluster, ClusterOptions, Instance, Process, completion_body, demo_model, free_port,
};

fn stream_body(max_tokens: u32) -> Value {
    let mut body = completion_body("Once upon a time", max_tokens);
    body["ignore_eos"] = json!(true);
    body["stream"] = json!(true);
    body
}

/// A copy of the demo model with a vocabulary of `rows`, the added rows zero and without disk blocks:
/// big enough to load for a while.
fn slow_to_load(dir: &Path, rows: u64) {
    for name in [
        "tokenizer.json",
        "tokenizer_config.json",
        "generation_config.json",
    ] {
        fs::copy(demo_model().join(name), dir.join(name)).expect("a copy");
    }
    let mut config: Value = serde_json::from_str(
        &fs::read_to_string(demo_model().join("config.json")).expect("a config"),
    )
    .expect("JSON");
    config["vocab_size"] = json!(rows);
    config["num_nextn_predict_layers"] = json!(0);
    fs::write(dir.join("config.json"), config.to_string()).expect("written");

    let bytes = fs::read(demo_model().join("model.safetensors")).expect("the weights");
    let length = u64::from_le_bytes(bytes[..8].try_into().expect("eight bytes")) as usize;
    let header: Value = serde_json::from_slice(&bytes[8..8 + length]).expect("a header");
    let mut entries = serde_json::Map::new();
    let mut copies = Vec::new();
    let mut end = 0u64;
    for (name, entry) in header.as_object().expect("an object") {
        if name == "__metadata__" || name.starts_with("model.layers.4.") {
            continue;
        }
        let at =
            |k: usize| 8 + length + entry["data_offsets"][k].as_u64().expect("an offset") as usize;
        let (start, stop) = (at(0), at(1));
        let mut shape = entry["shape"].clone();
        let mut size = (stop - start) as u64;
        if name == "model.embed_tokens.weight" || name == "lm_head.weight" {
            size = size / shape[0].as_u64().expect("rows") * rows;
            shape[0] = json!(rows);
        }
        entries.insert(
            name.clone(),
            json!({"dtype": entry["dtype"], "shape": shape, "data_offsets": [end, end + size]}),
        );
        copies.push((end, start..stop));
        end += size;
    }
    let text = Value::Object(entries).to_string();
    let mut file = fs::File::create(dir.join("model.safetensors")).expect("a file");
    file.write_all(&(text.len() as u64).to_le_bytes())
        .expect("written");
    file.write_all(text.as_bytes()).expect("written");
    let base = 8 + text.len() as u64;
    file.set_len(base + end).expect("a length");
    for (at, range) in copies {
        file.seek(SeekFrom::Start(base + at)).expect("a place");
        file.write_all(&bytes[range]).expect("written");
    }
}

/// C8.1: alive at once, ready only when a request would be served.
#[tokio::test]
async fn an_instance_is_alive_while_it_loads_and_ready_only_when_it_serves() {
    let dir = tempfile::tempdir().expect("a directory");
    slow_to_load(dir.path(), 1_000_000);
    let mut instance = Instance::serve(dir.path(), &["--kv-cache-memory", "64MiB"], &[]);
    let client = instance.client();
    let (mut alive_not_ready, end) = (0, Instant::now() + Duration::from_secs(120));
    loop {
        assert!(
            instance.process.ended().is_none(),
            "{}",
            instance.process.output()
        );
        assert!(Instant::now() < end, "{}", instance.process.output());
        let (Ok(health), Ok(ready)) = (client.get("/health").await, client.get("/ready").await)
        else {
            tokio::time::sleep(Duration::from_millis(2)).await;
            continue;
        };
        assert_eq!(health.status, 200);
        if ready.status == 200 {
            break;
        }
        assert_eq!(ready.status, 503);
        assert_eq!(ready.error_code(), "not_ready", "{}", ready.text());
        let refused = client
            .post("/v1/completions", &completion_body("Once", 1))
            .await
            .expect("an answer");
        if refused.status != 200 {
            assert_eq!(
                (refused.status, refused.error_code().as_str()),
                (503, "not_ready"),
                "{}",
                refused.text()
            );
        }
        alive_not_ready += 1;
    }
    assert!(alive_not_ready > 0, "never seen alive and not ready");
    let first = client
        .post("/v1/completions", &completion_body("Once", 1))
        .await
        .expect("an answer");
    assert_eq!(
        first.status,
        200,
        "the first request after ready: {}",
        first.text()
    );
}

/// C8.1: the router is ready only when a pair is.
#[tokio::test]
async fn a_router_is_not_ready_without_a_pair() {
    let mut prefill = Instance::serve(&demo_model(), &["--role", "prefill"], &[]);
    prefill.ready().await;
    let mut decode = Instance::serve(&demo_model(), &["--role", "decode"], &[]);
    decode.ready().await;
    decode.process.kill();
    let (prefill_url, decode_url) = (prefill.url(), decode.url());
    let mut router = Instance::router(
        &[
            "--prefill",
            &prefill_url,
            "--decode",
            &decode_url,
            "--health-interval",
            "0.2",
        ],
        &[],
    );
    let end = Instant::now() + Duration::from_secs(3);
    while Instant::now() < end {
        if let Ok(ready) = router.client().get("/ready").await {
            assert_eq!(ready.status, 503, "{}", ready.text());
            let health = router.client().get("/health").await.expect("an answer");
            assert_eq!(health.status, 200);
            let refused = router
                .client()
                .post("/v1/completions", &completion_body("Once", 1))
                .await
                .expect("an answer");
            assert_eq!(refused.status, 503, "{}", refused.text());
            assert!(refused.headers.contains_key("retry-after"));
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    decode.restart();
    decode.ready().await;
    router.ready().await;
    let answer = router
        .client()
        .post("/v1/completions", &completion_body("Once", 1))
        .await
        .expect("an answer");
    assert_eq!(answer.status, 200, "{}", answer.text());
}

/// C8.4: SIGTERM with streams that end in time, streams that do not, and requests that still arrive.
async fn drains(instance: &mut Instance) {
    let client = instance.client();
    let mut streams = JoinSet::new();
    // So many long ones that no machine is through with them before the deadline.
    for max_tokens in [40, 60, 80].into_iter().chain([3900; 24]) {
        let client = client.clone();
        streams.spawn(async move {
            let stream = client
                .stream("/v1/completions", &stream_body(max_tokens))
                .await
                .expect("a stream");
            assert_eq!(stream.status, 200);
            (max_tokens, stream.whole().await)
        });
    }
    let end = Instant::now() + Duration::from_secs(10);
    loop {
        let metrics = instance.metrics().await;
        let running = metrics.sum("vllm:num_requests_running", &[])
            + metrics.sum("twinfer_router_in_flight", &[]);
        if running >= 2.0 {
            break;
        }
        assert!(Instant::now() < end, "no stream runs");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    let start = Instant::now();
    instance.process.signal(Signal::TERM).expect("it runs");
    let mut settled = 0;
    let mut refused = 0;
    while start.elapsed() < Duration::from_millis(2000) {
        if let Ok(ready) = client.get("/ready").await
            && start.elapsed() > Duration::from_millis(100)
        {
            assert_eq!(ready.status, 503, "readiness is gone at once");
        }
        let late = Instant::now();
        if let Ok(answer) = client
            .post("/v1/completions", &completion_body("Once", 2))
            .await
        {
            match answer.status {
                200 => settled += 1,
                503 => {
                    assert!(
                        late.duration_since(start) > Duration::from_millis(800),
                        "refused within the settle window"
                    );
                    assert!(answer.headers.contains_key("retry-after"));
                    assert_eq!(answer.error_code(), "draining");
                    refused += 1;
                }
                other => panic!("status {other}: {}", answer.text()),
            }
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    assert!(settled > 0, "arrivals in the settle window are served");
    assert!(refused > 0, "arrivals after it are refused with a reason");
    while let Some(stream) = streams.join_next().await {
        let (max_tokens, answer) = stream.expect("a task");
        let answer = answer.unwrap_or_else(|e| panic!("stream of {max_tokens} was cut: {e}"));
        let (events, done) = answer.events();
        assert!(done, "every stream has a terminal event");
        let failed = events.iter().any(|event| !event["error"].is_null());
        assert_eq!(
            failed,
            max_tokens > 1000,
            "stream of {max_tokens}: {:?}",
            events.last()
        );
    }
    let status = instance.process.wait(Duration::from_secs(6)).await;
    assert_eq!(status.code(), Some(0), "{}", instance.process.output());
    assert!(
        start.elapsed() < Duration::from_secs(9),
        "took {:?}",
        start.elapsed()
    );
}

const DRAIN: [&str; 4] = ["--drain-settle", "1", "--drain-timeout", "3"];

/// C8.4, instance.
#[tokio::test]
async fn sigterm_drains_an_instance() {
    let mut instance = Instance::serve(&demo_model(), &DRAIN, &[]);
    instance.ready().await;
    drains(&mut instance).await;
}

/// C8.4, router.
#[tokio::test]
async fn sigterm_drains_a_router() {
    let options = ClusterOptions {
        router: DRAIN.map(String::from).to_vec(),
        ..ClusterOptions::default()
    };
    let mut cluster = Cluster::start(&options).await;
    drains(&mut cluster.router).await;
    cluster.kv_idle(Duration::from_secs(31)).await;
}

/// C8.4: a second SIGTERM ends now; idle and loading processes end too.
#[tokio::test]
async fn sigterm_ends_idle_loading_and_twice_asked_processes() {
    let mut idle = Instance::serve(&demo_model(), &["--drain-settle", "0"], &[]);
    idle.ready().await;
    idle.process.signal(Signal::TERM).expect("it runs");
    assert_eq!(
        idle.process.wait(Duration::from_secs(5)).await.code(),
        Some(0)
    );

    let dir = tempfile::tempdir().expect("a directory");
    slow_to_load(dir.path(), 1_000_000);
    let mut loading = Instance::serve(dir.path(), &["--drain-settle", "0"], &[]);
    let end = Instant::now() + Duration::from_secs(20);
    while loading.client().get("/health").await.is_err() {
        assert!(
            Instant::now() < end && loading.process.ended().is_none(),
            "{}",
            loading.process.output()
        );
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    loading.process.signal(Signal::TERM).expect("it runs");
    loading.process.wait(Duration::from_secs(10)).await;

    let mut busy = Instance::serve(
        &demo_model(),
        &["--drain-settle", "30", "--drain-timeout", "60"],
        &[],
    );
    busy.ready().await;
    let mut stream = busy
        .client()
        .stream("/v1/completions", &stream_body(3900))
        .await
        .expect("a stream");
    stream.piece().await.expect("a piece");
    busy.process.signal(Signal::TERM).expect("it runs");
    tokio::time::sleep(Duration::from_millis(200)).await;
    assert!(busy.process.ended().is_none(), "the first one drains");
    busy.process.signal(Signal::TERM).expect("it runs");
    busy.process.wait(Duration::from_secs(3)).await;
}

/// Clients that only connect take neither the router's descriptors for its instances nor its places.
#[tokio::test]
async fn idle_connections_do_not_take_instances_out() {
    let mut both = Instance::serve(&demo_model(), &[], &[]);
    both.ready().await;
    let port = free_port();
    let arguments = [
        "router".to_owned(),
        "--port".into(),
        port.to_string(),
        "--worker".into(),
        both.url(),
        "--max-inflight".into(),
        "32".into(),
    ];
    let mut router = Process::start_limited(300, &arguments, &[]);
    let client = Client::new(format!("127.0.0.1:{port}"));
    let end = Instant::now() + Duration::from_secs(60);
    while !client.get("/ready").await.is_ok_and(|a| a.status == 200) {
        assert!(
            router.ended().is_none() && Instant::now() < end,
            "{}",
            router.output()
        );
        tokio::time::sleep(Duration::from_millis(30)).await;
    }
    let mut idle = Vec::new();
    for _ in 0..400 {
        idle.push(
            TcpStream::connect(("127.0.0.1", port))
                .await
                .expect("a connection"),
        );
    }
    let mut requests = JoinSet::new();
    for _ in 0..10 {
        let client = client.clone();
        requests.spawn(async move {
            client
                .post("/v1/completions", &completion_body("Once", 4))
                .await
                .map(|answer| (answer.status, answer.text()))
        });
    }
    while let Some(answer) = requests.join_next().await {
        let (status, text) = answer.expect("a task").expect("an answer");
        assert_eq!(status, 200, "{text}\n{}", router.output());
    }
    let log = router.output();
    assert!(
        !log.contains("is not used") && !log.contains("Too many"),
        "{log}"
    );
    drop(idle);
}
