use crate::faults::{Gate, WARM_UP};
use crate::support::{Answer, Options, Server, expected};
use serde_json::{Value, json};
use std::time::Duration;
use twinfer_config::KvLoadFailurePolicy;
use twinfer_protocol::Role;

const PATH: &str = "/v1/completions";
const CHAT: &str = "/v1/chat/completions";
/// Leases last 5 s here; what is released at once is gone long before.
const AT_ONCE: Duration = Duration::from_millis(1500);

struct Pair {
    prefill: Server,
    decode: Server,
}

impl Pair {
    async fn start(change: impl Fn(&mut Options)) -> Self {
        let one = async |role| {
            let mut options = Options::default();
            options.config.role = role;
            change(&mut options);
            Server::start(options).await
        };
        Self {
            prefill: one(Role::Prefill).await,
            decode: one(Role::Decode).await,
        }
    }

    /// The prefill leg as a router sends it.
    async fn handle(&self, path: &str, body: &Value) -> Value {
        let mut body = body.clone();
        let object = body.as_object_mut().unwrap();
        object.remove("stream");
        object.remove("stream_options");
        for (key, value) in [
            ("max_tokens", json!(1)),
            ("min_tokens", json!(1)),
            ("n", json!(1)),
        ] {
            object.insert(key.into(), value);
        }
        body["kv_transfer_params"] = json!({"do_remote_decode": true, "do_remote_prefill": false,
            "remote_engine_id": null, "remote_block_ids": null, "remote_host": null, "remote_port": null,
            "aborted_request": []});
        let answer = self.prefill.client.post(path, &body).await;
        assert_eq!(answer.status, 200, "{}", answer.text());
        answer.json()["kv_transfer_params"].clone()
    }

    /// The decode leg.
    async fn decode(&self, path: &str, body: &Value, handle: &Value) -> Answer {
        let mut body = body.clone();
        body["kv_transfer_params"] = handle.clone();
        self.decode.client.post(path, &body).await
    }

    async fn both(&self, path: &str, body: &Value) -> Value {
        let handle = self.handle(path, body).await;
        let answer = self.decode(path, body, &handle).await;
        assert_eq!(answer.status, 200, "{}", answer.text());
        answer.json()
    }

    async fn idle(&self) {
        self.prefill.kv_idle(AT_ONCE).await;
        self.decode.kv_idle(AT_ONCE).await;
    }
}

async fn by_source(server: &Server, source: &str) -> f64 {
    server
        .metric(&format!(
            "vllm:prompt_tokens_by_source_total{{engine=\"0\",model_name=\"scripted\",source=\"{source}\"}}"
        ))
        .await
}

/// C2.1.
#[tokio::test]
async fn a_pair_says_what_one_instance_says() {
    let pair = Pair::start(|_| {}).await;
    let (mut remote, mut computed) = (0, 0);
    for length in [1usize, 3, 4, 5, 8, 9, 63, 64, 65, 200] {
        for max_tokens in [1usize, 2, 40] {
            let prompt = "abcdefghij".repeat(20)[..length].to_owned();
            let body = json!({"prompt": prompt, "max_tokens": max_tokens});
            let answer = pair.both(PATH, &body).await;
            assert_eq!(
                answer["choices"][0]["text"],
                expected(&prompt, max_tokens),
                "{length} {max_tokens}"
            );
            assert_eq!(answer["usage"]["prompt_tokens"], length);
            assert_eq!(answer["usage"]["completion_tokens"], max_tokens);
            assert_eq!(answer["kv_transfer_params"], Value::Null);
            remote += length - 1;
            computed += 1;
            pair.idle().await;
        }
    }
    // All of them begin alike: what decode has of a prompt is not fetched again.
    let fetched = by_source(&pair.decode, "external_kv_transfer").await;
    let cached = by_source(&pair.decode, "local_cache_hit").await;
    assert_eq!(fetched + cached, f64::from(remote as u32));
    assert!(
        fetched > 199.0 && cached > 2.0 * 196.0,
        "{fetched} {cached}"
    );
    assert_eq!(
        by_source(&pair.decode, "local_compute").await,
        f64::from(computed)
    );
    assert!(
        pair.decode
            .metric("twinfer_kv_handoff_bytes_total{direction=\"received\"}")
            .await
            > 0.0
    );
}

#[tokio::test]
async fn a_prefill_leg_answers_with_all_fields_of_a_handle() {
    let pair = Pair::start(|_| {}).await;
    let handle = pair.handle(PATH, &json!({"prompt": "hello"})).await;
    assert_eq!(handle["do_remote_prefill"], true);
    assert_eq!(handle["do_remote_decode"], false);
    assert_eq!(handle["remote_block_size"], 4);
    assert_eq!(handle["remote_num_tokens"], 5);
    assert_eq!(handle["num_prompt_blocks"], 2);
    assert_eq!(
        handle["prompt_token_ids"],
        json!("hello".bytes().collect::<Vec<_>>())
    );
    let card = pair.prefill.client.get("/twinfer/instance").await.json();
    let engine = format!(
        "{}-{}",
        card["name"].as_str().unwrap(),
        card["epoch"].as_str().unwrap()
    );
    assert_eq!(handle["remote_engine_id"], engine);
    let addr = format!(
        "{}:{}",
        handle["remote_host"].as_str().unwrap(),
        handle["remote_port"]
    );
    assert_eq!(card["kv_addr"], addr);
    for field in [
        "remote_request_id",
        "remote_block_ids",
        "last_token_id",
        "remote_pcp_size",
        "remote_dcp_size",
        "remote_ptp_size",
        "remote_multi_nodes_meta_mapping",
    ] {
        assert!(!handle[field].is_null(), "{field}");
    }
}

#[tokio::test]
async fn a_chat_is_rendered_once() {
    let pair = Pair::start(|_| {}).await;
    let body = json!({"messages": [{"role": "user", "content": "say:hello there|"}]});
    let handle = pair.handle(CHAT, &body).await;
    // Other messages on the decode leg: the tokens of the handle count.
    let other = json!({"messages": [{"role": "user", "content": "say:something else entirely|"}]});
    let answer = pair.decode(CHAT, &other, &handle).await.json();
    assert_eq!(answer["choices"][0]["message"]["content"], "hello there");
    pair.idle().await;
}

#[tokio::test]
async fn a_stream_over_a_pair_is_the_same_stream() {
    let pair = Pair::start(|_| {}).await;
    let mut body = json!({"prompt": "say:streamed text|", "max_tokens": 50, "stream": true});
    let handle = pair.handle(PATH, &body).await;
    body["kv_transfer_params"] = handle;
    let events = pair.decode.client.open(PATH, &body).await.events().await;
    let text: String = events
        .iter()
        .map(|e| e["choices"][0]["text"].as_str().unwrap())
        .collect();
    assert_eq!(text, "streamed text");
    pair.idle().await;
}

/// C2.11.
#[tokio::test]
async fn several_choices_share_one_prompt() {
    let pair = Pair::start(|_| {}).await;
    let body = json!({"prompt": "a prompt of some length", "max_tokens": 7, "n": 3});
    for _ in 0..5 {
        let answer = pair.both(PATH, &body).await;
        assert_eq!(answer["choices"].as_array().unwrap().len(), 3);
        for (index, choice) in answer["choices"].as_array().unwrap().iter().enumerate() {
            assert_eq!(choice["index"], index);
            assert_eq!(choice["text"], expected("a prompt of some length", 7));
        }
        assert_eq!(answer["usage"]["prompt_tokens"], 23);
        assert_eq!(answer["usage"]["completion_tokens"], 21);
        pair.idle().await;
    }
    let computed = by_source(&pair.prefill, "local_compute").await;
    let cached = by_source(&pair.prefill, "local_cache_hit").await;
    assert_eq!((computed, cached), (23.0 + 4.0 * 3.0, 4.0 * 20.0));
    // One choice fetches, the others share with it; so do the later requests.
    let fetched = by_source(&pair.decode, "external_kv_transfer").await;
    let shared = by_source(&pair.decode, "local_cache_hit").await;
    assert_eq!(
        (fetched, shared),
        (22.0 + 4.0 * 2.0, 4.0 * 20.0 + 5.0 * 2.0 * 20.0)
    );
}

/// Nothing is fetched of a prompt that decode has already: prefill gets its blocks back when the answer
/// begins, not with its end, and the prompt is no longer under a lease then.
#[tokio::test]
async fn kv_that_decode_has_is_released_at_prefill_when_the_answer_begins() {
    let (gate, mut gated) = Gate::new();
    gated.config.role = Role::Decode;
    let mut open = Options::default();
    open.config.role = Role::Prefill;
    let pair = Pair {
        prefill: Server::start(open).await,
        decode: Server::start(gated).await,
    };
    // Whole blocks but for the last token.
    let prompt = "it is of twenty-one t";
    gate.step();
    pair.both(PATH, &json!({"prompt": prompt, "max_tokens": 1}))
        .await;
    let mut body = json!({"prompt": prompt, "max_tokens": 9, "stream": true});
    body["kv_transfer_params"] = pair.handle(PATH, &body).await;
    gate.step();
    let mut stream = pair.decode.client.open(PATH, &body).await;
    assert!(stream.chunk().await.is_some());
    pair.prefill.kv_idle(AT_ONCE).await;
    assert!(gate.steps() <= WARM_UP + 3, "the answer goes on");
    gate.open();
    assert!(stream.whole().await.text().ends_with("data: [DONE]\n\n"));
    let fetched = by_source(&pair.decode, "external_kv_transfer").await;
    assert_eq!(fetched, 20.0, "the first time only");
    pair.idle().await;
}

#[tokio::test]
async fn of_several_prompts_the_first_comes_by_handoff() {
    let pair = Pair::start(|_| {}).await;
    let body = json!({"prompt": ["first prompt", "second", "third"], "max_tokens": 3});
    let answer = pair.both(PATH, &body).await;
    for (index, prompt) in ["first prompt", "second", "third"].into_iter().enumerate() {
        assert_eq!(answer["choices"][index]["text"], expected(prompt, 3));
    }
    assert_eq!(by_source(&pair.decode, "external_kv_transfer").await, 11.0);
    pair.idle().await;
}

/// C2.4.
#[tokio::test]
async fn whatever_decode_refuses_is_released_at_prefill_at_once() {
    let pair = Pair::start(|options| {
        if options.config.role == Role::Decode {
            options.config.max_model_len = Some(128);
            options.config.max_output_tokens = Some(64);
        }
    })
    .await;
    let refusals = [
        (
            PATH,
            json!({"prompt": "x".repeat(40), "model": "other"}),
            404,
        ),
        (PATH, json!({"prompt": "x".repeat(200)}), 400),
        (
            PATH,
            json!({"prompt": "x".repeat(40), "max_tokens": 100}),
            400,
        ),
        (PATH, json!({"prompt": "x".repeat(40), "best_of": 7}), 400),
        (
            PATH,
            json!({"prompt": "x".repeat(40), "temperature": -1}),
            400,
        ),
        (
            PATH,
            json!({"prompt": "x".repeat(40), "logit_bias": {"9999": 1}}),
            400,
        ),
        (PATH, json!({"prompt": "x".repeat(40), "n": 100}), 400),
        (
            CHAT,
            json!({"messages": [{"role": "user", "content": "x"}], "chat_template": "y"}),
            400,
        ),
        (
            CHAT,
            json!({"messages": [{"role": "king", "content": "x"}]}),
            400,
        ),
    ];
    for round in 0..6 {
        for (path, body, status) in &refusals {
            let prompt = body["prompt"].as_str().unwrap_or("a chat").to_owned();
            let handle = pair.handle(PATH, &json!({ "prompt": prompt })).await;
            let answer = pair.decode(path, body, &handle).await;
            assert_eq!(answer.error().0, *status, "{body}");
        }
        pair.prefill.kv_idle(AT_ONCE).await;
        assert!(round >= 5 || by_source(&pair.decode, "external_kv_transfer").await == 0.0);
    }
    // A prompt of the greatest length still fits.
    let handle = pair.handle(PATH, &json!({"prompt": "x".repeat(500)})).await;
    assert_eq!(
        pair.decode(PATH, &json!({"prompt": "x"}), &handle)
            .await
            .status,
        400
    );
    pair.idle().await;
}

#[tokio::test]
async fn the_release_route_frees_once() {
    let pair = Pair::start(|_| {}).await;
    let handle = pair.handle(PATH, &json!({"prompt": "hello"})).await;
    let epoch = handle["remote_engine_id"]
        .as_str()
        .unwrap()
        .rsplit('-')
        .next()
        .unwrap();
    let body = json!({"remote_request_id": handle["remote_request_id"], "epoch": epoch});
    let release = async || {
        pair.prefill
            .client
            .post("/twinfer/kv/release", &body)
            .await
            .json()["outcome"]
            .clone()
    };
    assert_eq!(release().await, "Freed");
    assert_eq!(release().await, "AlreadyGone");
    pair.idle().await;
    let stale = pair
        .decode(PATH, &json!({"prompt": "hello"}), &handle)
        .await;
    assert_eq!(
        (stale.error().0, stale.error().1.as_str()),
        (502, "kv_stale")
    );
    pair.idle().await;
}

/// C2.5.
#[tokio::test]
async fn a_failed_handoff_ends_in_an_error_or_is_recomputed() {
    for policy in [KvLoadFailurePolicy::Fail, KvLoadFailurePolicy::Recompute] {
        let pair = Pair::start(|options| options.config.kv_load_failure_policy = policy).await;
        let body = json!({"prompt": "some prompt", "max_tokens": 5});
        for stream in [false, true] {
            let mut handle = pair.handle(PATH, &body).await;
            handle["prompt_token_ids"] = json!("other prompt".bytes().take(11).collect::<Vec<_>>());
            let mut body = body.clone();
            body["stream"] = json!(stream);
            let answer = pair.decode(PATH, &body, &handle).await;
            match policy {
                KvLoadFailurePolicy::Fail => {
                    assert_eq!(answer.error().0, 502, "{}", answer.text());
                    assert!(answer.error().1.starts_with("kv_"), "{}", answer.text());
                }
                KvLoadFailurePolicy::Recompute => {
                    assert_eq!(answer.status, 200, "{}", answer.text());
                    if !stream {
                        assert_eq!(
                            answer.json()["choices"][0]["text"],
                            expected("other promp", 5)
                        );
                    }
                }
            }
            pair.idle().await;
        }
        let failures = pair.decode.client.get("/metrics").await.text();
        let failures: f64 = failures
            .lines()
            .filter(|line| line.starts_with("twinfer_kv_load_failures_total{"))
            .map(|line| line.rsplit(' ').next().unwrap().parse::<f64>().unwrap())
            .sum();
        assert_eq!(failures, 2.0);
    }
}

#[tokio::test]
async fn instances_of_other_weights_do_not_exchange_kv() {
    let pair = Pair::start(|options| {
        options.weights = if options.config.role == Role::Decode {
            "b"
        } else {
            "a"
        };
    })
    .await;
    let body = json!({"prompt": "some prompt"});
    let handle = pair.handle(PATH, &body).await;
    let answer = pair.decode(PATH, &body, &handle).await;
    assert_eq!(
        (answer.error().0, answer.error().1.as_str()),
        (502, "kv_mismatch")
    );
    assert!(answer.error().3.contains("weights"), "{}", answer.text());
    pair.decode.kv_idle(AT_ONCE).await;
}

#[tokio::test]
async fn roles_do_what_they_are_for() {
    let pair = Pair::start(|_| {}).await;
    let plain = json!({"prompt": "say:x|"});
    let (status, _, param, message) = pair.prefill.client.post(PATH, &plain).await.error();
    assert_eq!(
        (status, param.as_deref()),
        (400, Some("kv_transfer_params"))
    );
    assert!(message.contains("prefill"), "{message}");
    assert_eq!(
        pair.decode
            .client
            .text("say:decode serves plain requests too|", 99)
            .await,
        "decode serves plain requests too"
    );
    let prefill = json!({"prompt": "x", "kv_transfer_params": {"do_remote_decode": true}});
    assert_eq!(pair.decode.client.post(PATH, &prefill).await.error().0, 400);
    let handle = pair.handle(PATH, &plain).await;
    let mut wrong = plain.clone();
    wrong["kv_transfer_params"] = handle.clone();
    assert_eq!(pair.prefill.client.post(PATH, &wrong).await.error().0, 400);
    let mut streamed = prefill;
    streamed["stream"] = json!(true);
    assert_eq!(
        pair.prefill
            .client
            .post(PATH, &streamed)
            .await
            .error()
            .2
            .as_deref(),
        Some("stream")
    );
    assert_eq!(
        pair.decode(PATH, &plain, &handle).await.json()["choices"][0]["text"],
        "x"
    );
    pair.idle().await;
}

#[tokio::test]
async fn odd_handles_are_refused_and_never_panic() {
    let pair = Pair::start(|_| {}).await;
    let body = json!({"prompt": "hello"});
    let good = pair.handle(PATH, &body).await;
    for (field, value) in [
        ("remote_block_ids", json!([4_294_967_296u64])),
        ("remote_block_ids", json!(vec![0; 100_000])),
        ("remote_num_tokens", json!(4_294_967_295u64)),
        ("remote_port", json!(70_000)),
        ("remote_port", Value::Null),
        ("remote_engine_id", json!("x")),
        ("remote_block_size", json!(0)),
        ("prompt_token_ids", json!([])),
        ("prompt_token_ids", json!([999])),
        ("prompt_token_ids", json!([-1])),
        ("do_remote_decode", json!(true)),
        ("remote_request_id", json!("../../x")),
    ] {
        let mut handle = good.clone();
        handle[field] = value.clone();
        let status = pair.decode(PATH, &body, &handle).await.error().0;
        assert!(
            (400..600).contains(&status) && status != 500,
            "{field} {value}: {status}"
        );
    }
    assert_eq!(pair.decode.client.text("say:alive|", 9).await, "alive");
    pair.decode.kv_idle(AT_ONCE).await;
}

/// C2.4.
#[tokio::test]
async fn a_full_queue_at_decode_frees_prefill_at_once() {
    let (go, wait) = std::sync::mpsc::sync_channel::<()>(1000);
    let mut steps = 0;
    let before_step = move |_| {
        steps += 1;
        if steps > 2 {
            let _ = wait.recv_timeout(Duration::from_secs(9));
        }
        Ok(())
    };
    let mut options = Options {
        before_step: Some(Box::new(before_step)),
        ..Options::default()
    };
    options.config.role = Role::Decode;
    options.config.max_num_seqs = 1;
    options.config.max_waiting = 0;
    let decode = Server::start(options).await;
    let mut options = Options::default();
    options.config.role = Role::Prefill;
    let pair = Pair {
        prefill: Server::start(options).await,
        decode,
    };
    let mut busy = tokio::task::JoinSet::new();
    let client = pair.decode.client.clone();
    busy.spawn(async move { client.text("ab", 1).await });
    while pair.decode.drain.in_flight() == 0 {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    let body = json!({"prompt": "hello"});
    let handle = pair.handle(PATH, &body).await;
    let answer = loop {
        // Until the other one has its place.
        let answer = pair.decode(PATH, &body, &handle).await;
        if answer.status != 200 {
            break answer;
        }
    };
    assert_eq!(
        (answer.error().0, answer.error().1.as_str()),
        (429, "overloaded")
    );
    assert!(answer.headers.contains_key("retry-after"));
    pair.prefill.kv_idle(AT_ONCE).await;
    for _ in 0..100 {
        let _ = go.try_send(());
    }
    assert_eq!(busy.join_next().await.unwrap().unwrap(), expected("ab", 1));
    pair.idle().await;
}

/// A prefill instance that accepts and never says a word.
#[tokio::test]
async fn a_silent_prefill_holds_up_nobody_and_a_client_that_leaves_frees_its_blocks() {
    let pair = Pair::start(|_| {}).await;
    let silent = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let body = json!({"prompt": "some prompt", "max_tokens": 3});
    let mut handle = pair.handle(PATH, &body).await;
    handle["remote_port"] = json!(silent.local_addr().unwrap().port());
    let mut waiting = tokio::task::JoinSet::new();
    for _ in 0..3 {
        let client = pair.decode.client.clone();
        let mut body = body.clone();
        body["kv_transfer_params"] = handle.clone();
        waiting.spawn(async move { client.post(PATH, &body).await });
    }
    let (connection, _) = silent.accept().await.unwrap();
    assert_eq!(
        pair.decode.client.text("say:others go on|", 20).await,
        "others go on"
    );
    assert_ne!(
        pair.decode.client.get("/twinfer/load").await.json()["kv_blocks"]["used"],
        0
    );
    waiting.shutdown().await;
    pair.decode.kv_idle(AT_ONCE).await;
    drop(connection);
}
