//! Hostile and broken input at every port of real processes.

use serde_json::{Value, json};
use std::path::Path;
use std::time::{Duration, Instant};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use twinfer_it::{
    Checkpoint, Client, Cluster, ClusterOptions, Instance, Process, chat_body, completion_body,
    demo_model,
};

const KEY: &str = "Bearer key-of-this-test";

async fn answers(client: &Client) {
    let answer = client
        .post(
            "/v1/chat/completions",
            &chat_body("What is the capital of France?"),
        )
        .await
        .expect("an answer");
    assert!(
        answer.status == 200 && answer.text().contains("Paris"),
        "{}",
        answer.text()
    );
}

/// An instance of each kind behind its own port.
struct Legs {
    cluster: Cluster,
    both: Instance,
}

impl Legs {
    async fn of(model: &Path) -> Self {
        let options = ClusterOptions {
            model: model.to_owned(),
            ..ClusterOptions::default()
        };
        let mut both = Instance::serve(model, &[], &[]);
        both.ready().await;
        Self {
            cluster: Cluster::start(&options).await,
            both,
        }
    }

    fn clients(&self) -> [(&'static str, Client); 4] {
        let with_key = |instance: &Instance| instance.client().with_header("authorization", KEY);
        [
            ("both", self.both.client()),
            ("router", self.cluster.client()),
            ("prefill", with_key(&self.cluster.prefill[0])),
            ("decode", with_key(&self.cluster.decode[0])),
        ]
    }

    /// Wherever an id may stand, on every route and leg: 400 with a message.
    async fn refuse(&self, bad: &[Value]) {
        for (leg, client) in &self.clients() {
            for id in bad {
                let mut requests: Vec<(&str, Value)> = vec![
                    ("/v1/completions", json!({"prompt": [10, id, 11]})),
                    ("/v1/completions", json!({"prompt": [[10, id], [11]]})),
                    (
                        "/v1/completions",
                        json!({"prompt": [10], "stop_token_ids": [id]}),
                    ),
                    (
                        "/v1/completions",
                        json!({"prompt": [10], "allowed_token_ids": [id]}),
                    ),
                    ("/v1/completions", json!({"prompt": [10, id], "echo": true})),
                    (
                        "/v1/completions",
                        json!({"prompt": [10, id], "prompt_logprobs": 1}),
                    ),
                    ("/detokenize", json!({"tokens": [10, id]})),
                ];
                for field in ["stop_token_ids", "allowed_token_ids"] {
                    let mut chat = chat_body("Hello!");
                    chat[field] = json!([10, id]);
                    requests.push(("/v1/chat/completions", chat));
                }
                if !id.is_string() {
                    let bias = json!({ id.to_string(): 1 });
                    let mut chat = chat_body("Hello!");
                    chat["logit_bias"] = bias.clone();
                    requests.push(("/v1/chat/completions", chat));
                    let body = json!({"prompt": [10], "logit_bias": bias});
                    requests.push(("/v1/completions", body));
                }
                for (path, mut body) in requests {
                    body["model"] = json!("demo");
                    if path != "/detokenize" {
                        body["max_tokens"] = json!(1);
                    }
                    if *leg == "prefill" && path != "/detokenize" {
                        body["kv_transfer_params"] = json!({"do_remote_decode": true});
                    }
                    let answer = client
                        .post(path, &body)
                        .await
                        .unwrap_or_else(|e| panic!("{leg} {path} {body}: {e}"));
                    assert_eq!(answer.status, 400, "{leg} {path} {body}: {}", answer.text());
                    let message = answer.json()["error"]["message"].clone();
                    assert!(!message.as_str().expect("a message").is_empty());
                }
            }
        }
    }
}

/// C9.9: token ids that the model does not have.
#[tokio::test]
async fn token_ids_out_of_range_are_refused_on_every_route_and_leg() {
    let legs = Legs::of(&demo_model()).await;
    let numbers = [1536, 1u64 << 31, (1 << 32) + 10, 1 << 63, u64::MAX];
    let mut bad: Vec<Value> = numbers.iter().map(|id| json!(id)).collect();
    bad.extend([json!(-1), json!(i64::MIN), json!(2.5), json!("7")]);
    legs.refuse(&bad).await;
    answers(&legs.both.client()).await;
    answers(&legs.cluster.client()).await;
    legs.cluster.kv_idle(Duration::from_secs(31)).await;
}

/// C9.9: token ids that the tokenizer has, but the embedding no row for.
#[tokio::test]
async fn token_ids_without_an_embedding_row_are_refused_on_every_route_and_leg() {
    let model = Checkpoint::golden("qwen3_moe");
    model.change("tokenizer.json", |tokenizer| {
        let list = tokenizer["added_tokens"].as_array_mut().expect("a list");
        list.extend((512..530).map(|id| {
            json!({"id": id, "content": format!("<extra_{id}>"), "single_word": false, "lstrip": false,
                "rstrip": false, "normalized": false, "special": id % 2 == 0})
        }));
    });
    let legs = Legs::of(model.path()).await;
    legs.refuse(&[json!(512), json!(529), json!(530)]).await;
    for (leg, client) in legs.clients() {
        // The tokenizer makes them of texts that name one.
        let mut text = completion_body("a <extra_513> b", 1);
        let mut ids = completion_body(vec![1, 2, 511], 1);
        if leg == "prefill" {
            for body in [&mut text, &mut ids] {
                body["kv_transfer_params"] = json!({"do_remote_decode": true});
            }
        }
        let text = client.post("/v1/completions", &text).await;
        let text = text.expect("an answer");
        assert_eq!(text.status, 400, "{leg}: {}", text.text());
        let ids = client.post("/v1/completions", &ids).await;
        let ids = ids.expect("an answer");
        assert_eq!(ids.status, 200, "{leg}: {}", ids.text());
    }
}

/// What a stranger may send first.
fn openings() -> Vec<(&'static str, Vec<u8>)> {
    let noise: Vec<u8> = (0..4096u32)
        .map(|i| (i.wrapping_mul(2_654_435_761) >> 13) as u8)
        .collect();
    // A pickle that would run a command when loaded.
    let pickle = b"cos\nsystem\n(S'touch pickle-was-run'\ntR.".to_vec();
    let mut huge = (1u64 << 63).to_le_bytes().to_vec();
    huge.extend_from_slice(&[0; 64]);
    vec![
        ("noise", noise),
        ("pickle", pickle),
        ("http", b"GET / HTTP/1.1\r\nhost: x\r\n\r\n".to_vec()),
        ("length 2^63", huge),
        (
            "length 2^63, big endian",
            (1u64 << 63).to_be_bytes().to_vec(),
        ),
        ("all ones", vec![0xff; 1024]),
        ("one byte", vec![b't']),
        ("nothing", Vec::new()),
    ]
}

/// C9.11: strangers at the KV ports of prefill and decode.
#[tokio::test]
async fn strangers_at_the_kv_port_are_cut_off_and_hurt_nobody() {
    let options = ClusterOptions {
        serve: vec!["--kv-timeout".into(), "3".into()],
        ..ClusterOptions::default()
    };
    let cluster = Cluster::start(&options).await;
    let port = cluster.prefill[0].kv_port;
    answers(&cluster.client()).await;
    let resident = resident_mib(cluster.prefill[0].process.id());
    for (name, bytes) in openings() {
        let mut socket = TcpStream::connect(("127.0.0.1", port))
            .await
            .expect("the KV port");
        // A peer that is cut off early makes the write fail: fine.
        let _ = socket.write_all(&bytes).await;
        let mut rest = Vec::new();
        let closed =
            tokio::time::timeout(Duration::from_secs(8), socket.read_to_end(&mut rest)).await;
        assert!(closed.is_ok(), "{name}: the connection stays open");
        assert!(
            rest.len() < 1024,
            "{name}: {} bytes told to a stranger",
            rest.len()
        );
    }
    let mut crowd = Vec::new();
    for _ in 0..1000 {
        if let Ok(Ok(socket)) = tokio::time::timeout(
            Duration::from_secs(1),
            TcpStream::connect(("127.0.0.1", port)),
        )
        .await
        {
            crowd.push(socket);
        }
    }
    assert!(crowd.len() > 100, "only {} connections", crowd.len());
    let start = Instant::now();
    loop {
        let answer = cluster
            .client()
            .post(
                "/v1/chat/completions",
                &chat_body("What is the capital of France?"),
            )
            .await;
        let answer = answer.expect("an answer");
        if answer.status == 200 {
            assert!(answer.text().contains("Paris"));
            break;
        }
        assert!(
            answer.status >= 500 && !answer.error_code().is_empty(),
            "{}",
            answer.text()
        );
        assert!(
            start.elapsed() < Duration::from_secs(10),
            "strangers keep peers out: {}",
            answer.text()
        );
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
    drop(crowd);
    answers(&cluster.client()).await;
    let grown = resident_mib(cluster.prefill[0].process.id()) - resident;
    assert!(grown < 50.0, "grew by {grown} MiB");
    assert!(
        !cluster.prefill[0].process.output().contains("panicked"),
        "{}",
        cluster.prefill[0].process.output()
    );
    cluster.kv_idle(Duration::from_secs(31)).await;
}

/// C9.11: a peer with another key is no peer, and the instance that asked says so.
#[tokio::test]
async fn a_pair_with_different_keys_ends_in_an_error_not_in_text() {
    let mut prefill = Instance::serve(
        &demo_model(),
        &["--role", "prefill"],
        &[("TWINFER_PEER_KEY", "one-key")],
    );
    let mut decode = Instance::serve(
        &demo_model(),
        &["--role", "decode"],
        &[("TWINFER_PEER_KEY", "other-key")],
    );
    prefill.ready().await;
    decode.ready().await;
    let mut body = completion_body("Once upon a time there was a fox", 1);
    body["kv_transfer_params"] = json!({"do_remote_decode": true});
    let first = prefill
        .client()
        .with_header("authorization", "Bearer one-key")
        .post("/v1/completions", &body)
        .await;
    let handle = first.expect("an answer").json()["kv_transfer_params"].clone();
    assert_eq!(handle["do_remote_prefill"], json!(true));
    let mut body = completion_body("Once upon a time there was a fox", 8);
    body["kv_transfer_params"] = handle.clone();
    let second = decode
        .client()
        .with_header("authorization", "Bearer other-key")
        .post("/v1/completions", &body)
        .await;
    let second = second.expect("an answer");
    assert_eq!(second.status, 502, "{}", second.text());
    assert_eq!(second.error_code(), "kv_mismatch");
    assert!(
        second.text().contains("different keys"),
        "{}",
        second.text()
    );
    decode.kv_idle(Duration::from_secs(2)).await;
    // Decode cannot give the blocks back either; who asked prefill, such as the router, can at once.
    let release = json!({
        "remote_request_id": handle["remote_request_id"],
        "epoch": handle["remote_engine_id"].as_str().and_then(|id| id.rsplit('-').next()),
    });
    let released = prefill
        .client()
        .with_header("authorization", "Bearer one-key")
        .post("/twinfer/kv/release", &release)
        .await;
    assert_eq!(released.expect("an answer").status, 200);
    prefill.kv_idle(Duration::from_secs(2)).await;
}

/// C9.11: what may be reached from outside needs a key.
#[tokio::test]
async fn a_bind_beyond_loopback_without_a_key_is_refused() {
    twinfer_it::binary();
    let model = demo_model().display().to_string();
    for (flag, address) in [("--kv-host", "0.0.0.0"), ("--kv-host", "::")] {
        let port = twinfer_it::free_port().to_string();
        let arguments = [
            "serve", &model, "--role", "prefill", "--port", &port, flag, address,
        ];
        let mut process = Process::start(&arguments, &[]);
        let status = process.wait(Duration::from_secs(5)).await;
        assert!(!status.success());
        let output = process.output();
        assert!(
            output.contains("kv-host") && output.contains("TWINFER_PEER_KEY"),
            "{output}"
        );
    }
}

/// C3.17: bodies that are none, at router and instance.
#[tokio::test]
async fn malformed_bodies_get_a_json_error_and_reach_no_instance() {
    let cluster = Cluster::start(&ClusterOptions::default()).await;
    let mut both = Instance::serve(&demo_model(), &[], &[]);
    both.ready().await;
    for client in [cluster.client(), both.client()] {
        for path in ["/v1/chat/completions", "/v1/completions"] {
            let bodies: [&[u8]; 8] = [
                b"",
                b"[]",
                b"\"a\"",
                b"{\"model\": \"demo\"",
                b"\xff\xfe{}",
                b"{}",
                b"null",
                b"{\"model\": \"demo\"}",
            ];
            for body in bodies {
                let answer = client
                    .post_bytes(path, body.to_vec(), "application/json")
                    .await
                    .expect("an answer");
                assert_eq!(answer.status, 400, "{path} {body:?}: {}", answer.text());
                assert_eq!(answer.headers["content-type"], "application/json");
                let error = &answer.json()["error"];
                assert!(
                    error["message"].is_string()
                        && error["type"].is_string()
                        && error.get("param").is_some(),
                    "{error}"
                );
            }
            let valid = completion_body("Once", 1).to_string();
            let answer = client
                .post_bytes(path, valid, "text/plain")
                .await
                .expect("an answer");
            assert_eq!(answer.status, 415, "{}", answer.text());
            assert_eq!(answer.error_code(), "unsupported_media_type");
            let answer = client.get(path).await.expect("an answer");
            assert_eq!(answer.status, 405, "{}", answer.text());
            assert_eq!(answer.error_code(), "method_not_allowed");
        }
        let answer = client.get("/no/such/route").await.expect("an answer");
        assert_eq!(
            (answer.status, answer.error_code().as_str()),
            (404, "not_found")
        );
    }
    for instance in cluster.prefill.iter().chain(&cluster.decode) {
        assert_eq!(
            instance
                .metrics()
                .await
                .sum("vllm:prompt_tokens_total", &[]),
            0.0,
            "an instance was asked"
        );
    }
}

/// C1.3: lists of instances that cannot be meant.
#[tokio::test]
async fn a_router_refuses_bad_instance_lists_and_names_the_element() {
    twinfer_it::binary();
    let bad: [(&[&str], &str); 8] = [
        (
            &[
                "--prefill",
                "http://127.0.0.1:7100",
                "--decode",
                "http://192.0.2.3192.0.2.4:7100",
            ],
            "192.0.2.3192.0.2.4",
        ),
        (
            &[
                "--prefill",
                "http://127.0.0.1:7100,,http://127.0.0.1:7101",
                "--decode",
                "http://127.0.0.1:7200",
            ],
            "empty",
        ),
        (
            &[
                "--prefiller-hosts",
                "a",
                "b",
                "c",
                "d",
                "--prefiller-ports",
                "1",
                "2",
                "3",
                "--decode",
                "http://127.0.0.1:7200",
            ],
            "prefiller-ports",
        ),
        (
            &[
                "--prefill",
                "127.0.0.1:7100",
                "--decode",
                "http://127.0.0.1:7200",
            ],
            "127.0.0.1:7100",
        ),
        (
            &[
                "--prefill",
                "http://127.0.0.1:7100",
                "--decode",
                "http://127.0.0.1:7100",
            ],
            "127.0.0.1:7100",
        ),
        (
            &[
                "--prefill",
                "http://127.0.0.1:0",
                "--decode",
                "http://127.0.0.1:7200",
            ],
            "127.0.0.1:0",
        ),
        (
            &[
                "--prefill",
                "http://127.0.0.1:70000",
                "--decode",
                "http://127.0.0.1:7200",
            ],
            "70000",
        ),
        (&[], "instance"),
    ];
    for (list, named) in bad {
        let port = twinfer_it::free_port().to_string();
        let mut arguments = vec!["router", "--port", &port];
        arguments.extend(list);
        let mut process = Process::start(&arguments, &[]);
        let status = process.wait(Duration::from_secs(5)).await;
        let output = process.output();
        assert!(!status.success(), "{list:?}: {output}");
        assert!(
            output.contains(named),
            "{list:?} does not name {named:?}:\n{output}"
        );
    }
}

/// C1.3: the forms in which instances may be given mean the same, with DNS names and IPv6.
#[tokio::test]
async fn every_form_of_the_instance_list_routes() {
    let mut prefill = Instance::serve(&demo_model(), &["--role", "prefill", "--host", "::1"], &[]);
    let mut decode = Instance::serve(&demo_model(), &["--role", "decode"], &[]);
    let v6 = Client::new(format!("[::1]:{}", prefill.port));
    let end = Instant::now() + Duration::from_secs(30);
    while !v6
        .get("/ready")
        .await
        .is_ok_and(|answer| answer.status == 200)
    {
        assert!(
            prefill.process.ended().is_none() && Instant::now() < end,
            "{}",
            prefill.process.output()
        );
        tokio::time::sleep(Duration::from_millis(30)).await;
    }
    decode.ready().await;
    let (p, d) = (
        format!("http://[::1]:{}", prefill.port),
        format!("http://localhost:{}", decode.port),
    );
    let file = tempfile::NamedTempFile::new().expect("a file");
    std::fs::write(
        file.path(),
        format!("# instances\nprefill {p}\n\ndecode {d}\n"),
    )
    .expect("written");
    let (pp, dp) = (prefill.port.to_string(), decode.port.to_string());
    let path = file.path().display().to_string();
    let forms: [Vec<&str>; 3] = [
        vec!["--prefill", &p, "--decode", &d],
        vec!["--instances-file", &path],
        vec![
            "--prefiller-hosts",
            "::1",
            "--prefiller-ports",
            &pp,
            "--decoder-hosts",
            "localhost",
            "--decoder-ports",
            &dp,
        ],
    ];
    for form in forms {
        let mut router = Instance::router(&form, &[]);
        router.ready().await;
        answers(&router.client()).await;
    }
}

fn resident_mib(pid: u32) -> f64 {
    let statm = std::fs::read_to_string(format!("/proc/{pid}/statm")).expect("statm");
    let pages: f64 = statm
        .split_whitespace()
        .nth(1)
        .and_then(|p| p.parse().ok())
        .expect("pages");
    pages * 4096.0 / f64::from(1 << 20)
}

/// A text far beyond the context is refused before tokenising it takes memory in proportion.
#[tokio::test]
async fn a_prompt_far_beyond_the_context_takes_little_memory() {
    let mut both = Instance::serve(&demo_model(), &[], &[]);
    both.ready().await;
    let client = both.client();
    answers(&client).await;
    let before = both.process.peak_memory();
    let text = "Once upon a time there was a town. ".repeat(120_000);
    let chat = chat_body(&text);
    for (path, body) in [
        ("/v1/completions", completion_body(text.as_str(), 4)),
        ("/v1/chat/completions", chat),
        ("/tokenize", json!({"model": "demo", "prompt": text})),
    ] {
        let answer = client.post(path, &body).await.expect("an answer");
        let code = answer.error_code();
        assert_eq!(
            (answer.status, code.as_str()),
            (400, "context_length_exceeded"),
            "{path}"
        );
    }
    let ids = json!({"model": "demo", "tokens": vec![10; 1 << 20]});
    let answer = client.post("/detokenize", &ids).await.expect("an answer");
    assert_eq!(answer.status, 400, "{}", answer.text());
    let taken = both.process.peak_memory() - before;
    assert!(taken < 100 << 20, "{} MiB", taken >> 20);
    answers(&client).await;
}

/// Room for large bodies belongs to those who send them.
#[tokio::test]
async fn bodies_that_are_only_announced_keep_nobody_waiting() {
    let mut both = Instance::serve(&demo_model(), &[], &[]);
    both.ready().await;
    let mut announced = Vec::new();
    for _ in 0..8 {
        let mut stream = TcpStream::connect(("127.0.0.1", both.port))
            .await
            .expect("a connection");
        let head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n\
                    content-length: 33554432\r\n\r\n{";
        stream.write_all(head.as_bytes()).await.expect("written");
        announced.push(stream);
    }
    let mut body = completion_body("Once", 1);
    body["user"] = json!("x".repeat(1 << 20));
    let began = Instant::now();
    let answer = both
        .client()
        .post("/v1/completions", &body)
        .await
        .expect("an answer");
    assert_eq!(answer.status, 200, "{}", answer.text());
    assert!(began.elapsed() < Duration::from_secs(20), "waited for them");
    drop(announced);
}
