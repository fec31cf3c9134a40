//! Streams whose instance is killed go on at another one, as if nothing had happened.

use serde_json::{Value, json};
use std::time::Duration;
use twinfer_it::{
    Client, Cluster, ClusterOptions, Instance, chat_body, completion_body, demo_model,
};

const IDLE: Duration = Duration::from_secs(6);
/// Tokens of each answer: enough that some are still to come when an instance is killed.
const TOKENS: u32 = 160;

fn options(further: &[&str]) -> ClusterOptions {
    let mut serve = vec!["--kv-lease", "5", "--max-num-batched-tokens", "64"];
    serve.extend(further);
    ClusterOptions {
        decode: 2,
        serve: serve.into_iter().map(String::from).collect(),
        router: ["--health-interval", "0.1", "--max-resumes", "5"]
            .map(String::from)
            .to_vec(),
        ..ClusterOptions::default()
    }
}

/// Requests whose answers depend on everything that a resume must carry over.
fn requests() -> Vec<(&'static str, Value)> {
    let text = "The river runs through the old town and ";
    let sampled = |mut body: Value| {
        body["temperature"] = json!(0.9);
        body["seed"] = json!(7);
        body["repetition_penalty"] = json!(1.2);
        body["frequency_penalty"] = json!(0.4);
        body
    };
    let mut plain = completion_body(text, TOKENS);
    plain["ignore_eos"] = json!(true);
    plain["logprobs"] = json!(2);
    plain["echo"] = json!(true);
    let mut drawn = sampled(completion_body(text, TOKENS));
    drawn["ignore_eos"] = json!(true);
    drawn["return_token_ids"] = json!(true);
    let mut chat = sampled(chat_body("What is a river?"));
    chat["max_tokens"] = json!(TOKENS);
    chat["ignore_eos"] = json!(true);
    chat["logprobs"] = json!(true);
    chat["top_logprobs"] = json!(1);
    let all = [
        ("/v1/completions", plain),
        ("/v1/completions", drawn),
        ("/v1/chat/completions", chat),
    ];
    all.map(|(path, mut body)| {
        body["stream"] = json!(true);
        body["stream_options"] = json!({"include_usage": true});
        (path, body)
    })
    .into()
}

/// What a client makes of a stream: all that must be the same.
#[derive(Debug, PartialEq)]
struct Seen {
    text: String,
    roles: usize,
    ids: usize,
    token_ids: Vec<Value>,
    logprobs: Vec<Value>,
    finish: Vec<Value>,
    prompt_tokens: Value,
    completion_tokens: Value,
}

fn seen(events: &[Value]) -> Seen {
    let mut all = Seen {
        text: String::new(),
        roles: 0,
        ids: 0,
        token_ids: Vec::new(),
        logprobs: Vec::new(),
        finish: Vec::new(),
        prompt_tokens: Value::Null,
        completion_tokens: Value::Null,
    };
    let mut names: Vec<(&Value, &Value)> = Vec::new();
    for event in events {
        assert!(event["error"].is_null(), "{event}");
        names.push((&event["id"], &event["created"]));
        if let Some(usage) = event["usage"].as_object() {
            all.prompt_tokens = usage["prompt_tokens"].clone();
            all.completion_tokens = usage["completion_tokens"].clone();
        }
        let choice = &event["choices"][0];
        let delta = &choice["delta"];
        all.roles += usize::from(!delta["role"].is_null());
        for text in [&choice["text"], &delta["content"]] {
            all.text.push_str(text.as_str().unwrap_or_default());
        }
        let list = |value: &Value| value.as_array().cloned().unwrap_or_default();
        all.token_ids.extend(list(&choice["token_ids"]));
        let scores = &choice["logprobs"];
        all.logprobs.extend(list(&scores["content"]));
        for part in ["tokens", "token_logprobs", "text_offset"] {
            all.logprobs
                .extend(list(&scores[part]).into_iter().map(|v| json!([part, v])));
        }
        if !choice["finish_reason"].is_null() {
            all.finish.push(choice["finish_reason"].clone());
        }
    }
    // Lists of logprobs come in pieces of any length: order within each kind is what counts.
    all.logprobs
        .sort_by_key(|entry| entry[0].as_str().map(str::to_owned));
    names.dedup();
    all.ids = names.len();
    all
}

/// Reads a stream, and does `then` when `n` events with output have come.
async fn interrupted(
    client: &Client,
    path: &str,
    body: &Value,
    n: usize,
    then: impl AsyncFnOnce(&str),
) -> Seen {
    let mut stream = client.stream(path, body).await.expect("a stream");
    assert_eq!(stream.status, 200);
    let decode = stream.headers["x-twinfer-decode"]
        .to_str()
        .expect("a name")
        .to_owned();
    let mut then = Some(then);
    let mut text = String::new();
    loop {
        let so_far = text.matches("\n\n").count();
        if so_far >= n
            && let Some(then) = then.take()
        {
            then(&decode).await;
        }
        match stream.piece().await.expect("no break") {
            Some(piece) => text.push_str(std::str::from_utf8(&piece).expect("UTF-8")),
            None => break,
        }
    }
    let answer = twinfer_it::Answer {
        status: 200,
        headers: stream.headers.clone(),
        bytes: text.into(),
    };
    let (events, done) = answer.events();
    assert!(done, "no [DONE]: {}", answer.text());
    seen(&events)
}

async fn whole(client: &Client, path: &str, body: &Value) -> Seen {
    let answer = client.post(path, body).await.expect("an answer");
    assert_eq!(answer.status, 200, "{}", answer.text());
    let (events, done) = answer.events();
    assert!(done);
    seen(&events)
}

/// Kills a decode instance with SIGKILL after every n-th event of every kind of stream.
async fn kill_after_every_token(mut cluster: Cluster) {
    let client = cluster.client();
    let mut kills = 0.0;
    for (path, body) in requests() {
        let expected = whole(&client, path, &body).await;
        assert_eq!(expected.completion_tokens, TOKENS, "{expected:?}");
        for n in [0, 1, 2, 3, 4, 5, 8, 13] {
            kills += 1.0;
            let decodes = &mut cluster.decode;
            let got = interrupted(&client, path, &body, n, async |name: &str| {
                let port: u16 = name
                    .rsplit('-')
                    .next()
                    .and_then(|p| p.parse().ok())
                    .expect("a port");
                let instance = decodes
                    .iter_mut()
                    .find(|d| d.port == port)
                    .expect("the instance");
                instance.process.kill();
            })
            .await;
            assert_eq!(got, expected, "{path}, killed after {n} events");
            for decode in &mut cluster.decode {
                if decode.process.ended().is_some() {
                    decode.restart();
                    decode.ready().await;
                }
            }
            both_up(&cluster.router, "role=\"decode\"").await;
        }
    }
    let resumed = cluster.router.metrics().await;
    let resumes = |outcome| resumed.sum("twinfer_router_resumes_total", &[outcome]);
    // A kill may come when the last token has left the instance.
    let done = resumes("outcome=\"done\"");
    assert!(
        (kills / 2.0..=kills).contains(&done),
        "{done} of {kills} kills"
    );
    assert_eq!(resumes("outcome=\"failed\""), 0.0);
    cluster.kv_idle(IDLE).await;
}

async fn both_up(router: &Instance, role: &str) {
    let end = std::time::Instant::now() + Duration::from_secs(30);
    while router
        .metrics()
        .await
        .sum("twinfer_router_instance_up", &[role])
        < 2.0
    {
        assert!(
            std::time::Instant::now() < end,
            "{}",
            router.process.output()
        );
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

#[tokio::test]
async fn a_stream_goes_on_at_the_other_decode_instance_after_a_kill_at_any_token() {
    kill_after_every_token(Cluster::start(&options(&[])).await).await;
}

#[tokio::test]
async fn a_whole_answer_survives_its_decode_instance() {
    let mut cluster = Cluster::start(&options(&[])).await;
    let client = cluster.client();
    let mut body = completion_body("Once upon a time", 400);
    body["ignore_eos"] = json!(true);
    let expected = client
        .post("/v1/completions", &body)
        .await
        .expect("an answer")
        .json();
    let asked = tokio::time::timeout(Duration::from_secs(30), async {
        let killed = async {
            // Whichever instance generates: it is the one that is busy.
            loop {
                for (index, decode) in cluster.decode.iter().enumerate() {
                    if decode.metrics().await.sum("vllm:num_requests_running", &[]) > 0.0 {
                        return index;
                    }
                }
            }
        };
        let post = client.post("/v1/completions", &body);
        tokio::pin!(post);
        tokio::select! {
            answer = &mut post => answer,
            busy = killed => {
                cluster.decode[busy].process.kill();
                post.await
            }
        }
    });
    let answer = asked.await.expect("in time").expect("an answer");
    assert_eq!(answer.status, 200, "{}", answer.text());
    assert_eq!(answer.json()["choices"], expected["choices"]);
}

#[tokio::test]
async fn colocated_instances_take_over_each_others_streams() {
    let key = [("TWINFER_PEER_KEY", "key-of-this-test")];
    let serve = || Instance::serve(&demo_model(), &[], &key);
    let mut both = [serve(), serve()];
    for instance in &mut both {
        instance.ready().await;
    }
    let urls = format!("{},{}", both[0].url(), both[1].url());
    let flags = ["--worker", &urls, "--health-interval", "0.1"];
    let mut router = Instance::router(&flags, &key);
    router.ready().await;
    both_up(&router, "role=\"both\"").await;
    let client = router.client();
    for (path, body) in requests() {
        let expected = whole(&client, path, &body).await;
        for n in [0, 1, 5, 9] {
            let got = interrupted(&client, path, &body, n, async |name: &str| {
                let port: u16 = name
                    .rsplit('-')
                    .next()
                    .and_then(|p| p.parse().ok())
                    .expect("a port");
                let instance = both
                    .iter_mut()
                    .find(|i| i.port == port)
                    .expect("the instance");
                instance.process.kill();
            })
            .await;
            assert_eq!(got, expected, "{path}, killed after {n} events");
            for instance in &mut both {
                if instance.process.ended().is_some() {
                    instance.restart();
                    instance.ready().await;
                }
            }
            both_up(&router, "role=\"both\"").await;
        }
    }
}

/// A stopped process keeps its connections: probes tell that nobody is there.
#[tokio::test]
async fn a_stream_leaves_an_instance_that_is_stopped() {
    let cluster = Cluster::start(&options(&[])).await;
    let client = cluster.client();
    let (path, mut body) = requests().remove(1);
    body["max_tokens"] = json!(400);
    let expected = whole(&client, path, &body).await;
    let got = interrupted(&client, path, &body, 3, async |name: &str| {
        let port: u16 = name
            .rsplit('-')
            .next()
            .and_then(|p| p.parse().ok())
            .expect("a port");
        let instance = cluster
            .decode
            .iter()
            .find(|d| d.port == port)
            .expect("the instance");
        let signal = rustix::process::Signal::STOP;
        instance.process.signal(signal).expect("it runs");
    })
    .await;
    assert_eq!(got, expected);
}

/// An operator need not wait for long streams: they go on elsewhere.
#[tokio::test]
async fn streams_leave_an_instance_whose_time_to_drain_is_over() {
    let mut options = options(&[]);
    let port = twinfer_it::free_port();
    options
        .router
        .extend(["--admin-port".to_owned(), port.to_string()]);
    let cluster = Cluster::start(&options).await;
    both_up(&cluster.router, "role=\"decode\"").await;
    let client = cluster.client();
    let admin = Client::new(format!("127.0.0.1:{port}"));
    let (path, mut body) = requests().remove(0);
    body["max_tokens"] = json!(1900);
    let expected = whole(&client, path, &body).await;
    let got = interrupted(&client, path, &body, 3, async |name: &str| {
        let answer = admin.delete(&format!("/instances/{name}?timeout=0")).await;
        let answer = answer.expect("an answer");
        assert_eq!(answer.status, 202, "{}", answer.text());
    })
    .await;
    assert_eq!(got, expected);
    let left = admin.get("/instances").await.expect("the list").json();
    assert_eq!(
        left["instances"].as_array().map(Vec::len),
        Some(2),
        "{left}"
    );
    let metrics = cluster.router.metrics().await;
    assert_eq!(
        metrics.sum("twinfer_router_resumes_total", &["outcome=\"done\""]),
        1.0
    );
    cluster.kv_idle(IDLE).await;
}
