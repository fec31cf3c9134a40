//! Instances that are added, drained and removed while the router runs.

use crate::common::{LIMIT, Router, fake, free_port, quick, read_answer, start, wait};
use serde_json::{Value, json};
use std::net::SocketAddr;
use std::time::Duration;
use twinfer_bench::fake::{Dialect, FakeConfig, FakeWorker, Role};
use twinfer_config::RouterConfig;

const ASK: &[u8] = br#"{"prompt":"p","stream":true}"#;

/// A decode worker whose answers take some time.
async fn slow(name: &str) -> FakeWorker {
    start(FakeConfig {
        name: Some(name.to_owned()),
        token_time: 0.05,
        tokens: 20,
        ..fake(Role::Decode, Dialect::Twinfer)
    })
    .await
}

async fn up(router: &Router, count: f64) {
    wait(|| async { router.metric("twinfer_router_instance_up", &[]).await == count }).await;
}

struct Admin {
    addr: SocketAddr,
}

impl Admin {
    async fn ask(&self, method: &str, path: &str, body: &Value) -> (u16, Value) {
        let headers = [("content-type", "application/json")];
        let body = match body {
            Value::Null => String::new(),
            body => body.to_string(),
        };
        let mut stream =
            crate::common::open(self.addr, method, path, &headers, body.as_bytes()).await;
        let answer = tokio::time::timeout(LIMIT, read_answer(&mut stream))
            .await
            .expect("in time");
        (answer.status, answer.json())
    }

    async fn states(&self) -> Vec<(String, String)> {
        let (status, list) = self.ask("GET", "/instances", &Value::Null).await;
        assert_eq!(status, 200);
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        let all = list["instances"].as_array().expect("a list").iter();
        all.map(|i| (text(&i["name"]), text(&i["state"]))).collect()
    }
}

/// Case 28 of the faults: the file is gone, garbled, and there again.
#[tokio::test]
async fn the_instances_file_is_followed_and_nonsense_in_it_changes_nothing() {
    let prefill = FakeWorker::prefill(Dialect::Twinfer).await.expect("start");
    let (d1, d2) = (slow("d1").await, slow("d2").await);
    let file = tempfile::NamedTempFile::new().expect("a file");
    let write = |decodes: &[&FakeWorker]| {
        let mut text = format!("prefill {}\n", prefill.url());
        for decode in decodes {
            text.push_str(&format!("decode {}\n", decode.url()));
        }
        std::fs::write(file.path(), text).expect("written");
    };
    write(&[&d1]);
    let router = Router::ready(RouterConfig {
        instances_file: Some(file.path().to_owned()),
        drain_timeout: 10.0,
        ..quick(&[], &[])
    })
    .await;
    let good = async || {
        router
            .metric("twinfer_router_instances_file_good", &[])
            .await
    };
    assert_eq!(good().await, 1.0);
    write(&[&d1, &d2]);
    up(&router, 3.0).await;

    for nonsense in ["", "decode http://127.0.0.1", "\u{0}garbage"] {
        std::fs::write(file.path(), nonsense).expect("written");
        wait(|| async { good().await == 0.0 }).await;
        assert_eq!(
            router
                .post("/v1/completions", &json!({"prompt": "p"}))
                .await
                .status,
            200
        );
        write(&[&d1, &d2]);
        wait(|| async { good().await == 1.0 }).await;
    }
    std::fs::remove_file(file.path()).expect("removed");
    wait(|| async { good().await == 0.0 }).await;
    assert_eq!(router.metric("twinfer_router_instance_up", &[]).await, 3.0);

    // An instance whose line goes ends what it has begun, and gets nothing more.
    let mut streams = Vec::new();
    for _ in 0..4 {
        let headers = [("content-type", "application/json")];
        streams.push(router.open("POST", "/v1/completions", &headers, ASK).await);
    }
    assert!(d1.wait_until(LIMIT, |d| d.in_flight() == 2).await);
    write(&[&d2]);
    wait(|| async {
        router
            .metric("twinfer_router_instance_up", &["decode"])
            .await
            == 1.0
    })
    .await;
    let before = d1.served();
    for _ in 0..4 {
        assert_eq!(
            router
                .post("/v1/completions", &json!({"prompt": "p", "max_tokens": 1}))
                .await
                .status,
            200
        );
    }
    assert_eq!(d1.served(), before);
    for mut stream in streams {
        let answer = read_answer(&mut stream).await;
        assert!(
            answer.whole && answer.text().ends_with("data: [DONE]\n\n"),
            "{}",
            answer.text()
        );
        assert!(!answer.text().contains("error"), "{}", answer.text());
    }
    wait(|| async {
        let text = router.get("/metrics").await.text();
        !text.contains(&d1.addr().to_string())
    })
    .await;
    drop(file);
}

#[tokio::test]
async fn instances_are_added_listed_and_drained_by_their_exact_identity() {
    let prefill = FakeWorker::prefill(Dialect::Twinfer).await.expect("start");
    let (d1, d2) = (slow("d1").await, slow("d2").await);
    let port = free_port();
    let router = Router::start(RouterConfig {
        admin_port: Some(port),
        ..quick(&[], &[])
    })
    .await;
    let admin = Admin {
        addr: SocketAddr::from(([127, 0, 0, 1], port)),
    };
    assert!(admin.states().await.is_empty());
    assert_eq!(router.get("/ready").await.status, 503);
    for (role, worker) in [("prefill", &prefill), ("decode", &d1)] {
        let (status, entry) = admin
            .ask(
                "POST",
                "/instances",
                &json!({"role": role, "url": worker.url()}),
            )
            .await;
        assert_eq!(status, 201, "{entry}");
    }
    // As callers of the public proxies do it.
    let address = d2.addr().to_string();
    let (status, answer) = admin
        .ask(
            "POST",
            "/instances/add",
            &json!({"type": "decode", "instances": [address]}),
        )
        .await;
    assert_eq!(status, 200);
    assert_eq!(
        answer["current_decode_instances"],
        json!([d1.addr().to_string(), address])
    );
    up(&router, 3.0).await;
    let (status, error) = admin
        .ask(
            "POST",
            "/instances",
            &json!({"role": "decode", "url": d1.url()}),
        )
        .await;
    assert_eq!(
        (status, error["error"]["param"].as_str()),
        (400, Some("url")),
        "{error}"
    );
    for (method, path, body, expected) in [
        (
            "POST",
            "/instances",
            json!({"role": "decoder", "url": d1.url()}),
            400,
        ),
        (
            "POST",
            "/instances",
            json!({"role": "decode", "url": "127.0.0.1:1"}),
            400,
        ),
        ("DELETE", "/instances/d9", Value::Null, 404),
        (
            "DELETE",
            "/instances/d1?epoch=0000000000000000",
            Value::Null,
            400,
        ),
        ("DELETE", "/instances/d1?timeout=-1", Value::Null, 400),
        ("DELETE", "/instances/d1?force=1", Value::Null, 400),
        ("PUT", "/instances", Value::Null, 405),
        ("GET", "/v1/models", Value::Null, 404),
    ] {
        let (status, answer) = admin.ask(method, path, &body).await;
        assert_eq!(status, expected, "{method} {path}: {answer}");
    }
    assert!(admin.states().await.iter().all(|(_, state)| state == "up"));

    // What still runs when the time is over is broken off: this kind of instance cannot go on elsewhere.
    let headers = [("content-type", "application/json")];
    let mut streams = Vec::new();
    for _ in 0..2 {
        streams.push(router.open("POST", "/v1/completions", &headers, ASK).await);
    }
    assert!(d1.wait_until(LIMIT, |d| d.in_flight() == 1).await);
    let (_, list) = admin.ask("GET", "/instances", &Value::Null).await;
    let all = list["instances"].as_array().expect("a list").clone();
    let entry = all.iter().find(|i| i["name"] == "d1").expect("d1");
    assert_eq!(entry["in_flight"], 1);
    let path = format!(
        "/instances/d1?timeout=0.1&epoch={}",
        entry["epoch"].as_str().expect("an epoch")
    );
    let (status, entry) = admin.ask("DELETE", &path, &Value::Null).await;
    assert_eq!((status, entry["state"].as_str()), (202, Some("draining")));
    let mut broken = 0;
    for mut stream in streams {
        let answer = tokio::time::timeout(LIMIT, read_answer(&mut stream))
            .await
            .expect("in time");
        assert!(answer.text().ends_with("data: [DONE]\n\n"));
        broken += usize::from(answer.text().contains("decode_failed"));
    }
    assert_eq!(broken, 1);
    wait(|| async { admin.states().await.len() == 2 }).await;
    assert!(
        d1.wait_until(Duration::from_secs(2), |d| d.in_flight() == 0)
            .await
    );

    // The same address can come back.
    let (status, _) = admin
        .ask(
            "POST",
            "/instances",
            &json!({"role": "decode", "url": d1.url()}),
        )
        .await;
    assert_eq!(status, 201);
    up(&router, 3.0).await;
    let body = json!({"type": "decode", "instances": d1.addr().to_string()});
    let (status, answer) = admin.ask("POST", "/instances/remove", &body).await;
    assert_eq!(status, 200);
    assert_eq!(
        answer["current_decode_instances"],
        json!([d2.addr().to_string()])
    );
    wait(|| router.idle()).await;
}

/// The key of the admin listener is neither that of clients nor that of instances.
#[tokio::test]
async fn the_admin_listener_has_a_key_of_its_own() {
    use std::os::unix::fs::PermissionsExt as _;
    let key = |text: &str| {
        let file = tempfile::NamedTempFile::new().expect("a file");
        std::fs::write(file.path(), text).expect("written");
        let mode = std::fs::Permissions::from_mode(0o600);
        std::fs::set_permissions(file.path(), mode).expect("a mode");
        file
    };
    let (client, admin) = (key("of-clients"), key("of-admins"));
    let port = free_port();
    let router = Router::start(RouterConfig {
        admin_port: Some(port),
        api_key_file: Some(client.path().to_owned()),
        admin_key_file: Some(admin.path().to_owned()),
        ..quick(&[], &[])
    })
    .await;
    let addr = SocketAddr::from(([127, 0, 0, 1], port));
    let status = async |authorization: &str| {
        let headers = [("authorization", authorization)];
        let mut stream = crate::common::open(addr, "GET", "/instances", &headers, b"").await;
        read_answer(&mut stream).await.status
    };
    assert_eq!(status("Bearer of-admins").await, 200);
    assert_eq!(status("Bearer of-clients").await, 401);
    assert_eq!(status("").await, 401);
    assert_eq!(
        router.get("/instances").await.status,
        404,
        "not on the clients' listener"
    );
}
