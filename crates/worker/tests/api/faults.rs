use crate::support::{LIMIT, Options, Server, expected};
use http::Method;
use serde_json::json;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::time::{Duration, Instant};
use tokio::task::JoinSet;
use twinfer_engine::ExecError;
use twinfer_http::DrainState;
use twinfer_worker::{ExitClass, ServeError};

const PATH: &str = "/v1/completions";
/// Steps of the warm-up request, which are not held up.
pub(crate) const WARM_UP: u64 = 2;

/// Holds each step until it is let go, and counts.
pub(crate) struct Gate {
    steps: Arc<AtomicU64>,
    open: Arc<AtomicBool>,
    go: SyncSender<()>,
}

impl Gate {
    pub(crate) fn new() -> (Self, Options) {
        let (go, wait): (SyncSender<()>, Receiver<()>) = sync_channel(10_000);
        let (steps, open) = (
            Arc::new(AtomicU64::new(0)),
            Arc::new(AtomicBool::new(false)),
        );
        let (counted, opened) = (Arc::clone(&steps), Arc::clone(&open));
        let before_step = move |_| {
            if counted.fetch_add(1, Ordering::SeqCst) >= WARM_UP && !opened.load(Ordering::SeqCst) {
                let _ = wait.recv_timeout(LIMIT);
            }
            Ok(())
        };
        let options = Options {
            before_step: Some(Box::new(before_step)),
            ..Options::default()
        };
        (Self { steps, open, go }, options)
    }

    /// Lets one step go.
    pub(crate) fn step(&self) {
        let _ = self.go.try_send(());
    }

    /// Lets all steps go from now on.
    pub(crate) fn open(&self) {
        self.open.store(true, Ordering::SeqCst);
        self.step();
    }

    pub(crate) fn steps(&self) -> u64 {
        self.steps.load(Ordering::SeqCst)
    }

    async fn reached(&self, steps: u64) {
        let start = Instant::now();
        while self.steps() < steps {
            assert!(start.elapsed() < LIMIT, "{} steps", self.steps());
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    }
}

async fn until(what: &str, mut met: impl AsyncFnMut() -> bool) {
    let start = Instant::now();
    while !met().await {
        assert!(start.elapsed() < LIMIT, "{what}");
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}

/// C2.2.
#[tokio::test]
async fn a_client_that_leaves_a_stream_ends_its_request_at_the_next_step() {
    let (gate, options) = Gate::new();
    let server = Server::start(options).await;
    gate.step();
    gate.step();
    let mut stream = server
        .client
        .open(
            PATH,
            &json!({"prompt": "ab", "max_tokens": 400, "stream": true}),
        )
        .await;
    assert!(stream.chunk().await.is_some());
    gate.reached(WARM_UP + 3).await;
    drop(stream);
    // The abort is there before the step that runs now ends.
    until("the request is still counted", async || {
        let aborted = "vllm:request_success_total{engine=\"0\",model_name=\"scripted\",finished_reason=\"abort\"}";
        gate.step();
        server.metric(aborted).await == 1.0
    })
    .await;
    let steps = gate.steps();
    gate.open();
    server.kv_idle(LIMIT).await;
    assert!(gate.steps() <= steps + 1, "work for nobody");
}

/// C2.2.
#[tokio::test]
async fn a_client_that_leaves_a_whole_answer_ends_its_request() {
    let (gate, options) = Gate::new();
    let server = Server::start(options).await;
    let mut request = JoinSet::new();
    let client = server.client.clone();
    request.spawn(async move {
        client
            .post(PATH, &json!({"prompt": "ab", "max_tokens": 400}))
            .await
    });
    gate.reached(WARM_UP + 1).await;
    request.shutdown().await;
    let aborted = "vllm:request_success_total{engine=\"0\",model_name=\"scripted\",finished_reason=\"abort\"}";
    until("not aborted", async || {
        gate.step();
        server.metric(aborted).await == 1.0
    })
    .await;
    gate.open();
    server.kv_idle(LIMIT).await;
    assert_eq!(server.client.text("say:next|", 9).await, "next");
}

/// C2.2.
#[tokio::test]
async fn a_hundred_clients_that_leave_leave_nothing_behind() {
    let server = Server::start(Options::default()).await;
    for round in 0..100u64 {
        let stream = round % 2 == 0;
        let body =
            json!({"prompt": vec![97 + round % 26; 200], "max_tokens": 300, "stream": stream});
        let mut request = JoinSet::new();
        let client = server.client.clone();
        request.spawn(async move {
            let mut answer = client.open(PATH, &body).await;
            while answer.chunk().await.is_some() {}
        });
        tokio::time::sleep(Duration::from_micros(500 * (round % 10))).await;
        request.shutdown().await;
    }
    server.kv_idle(LIMIT).await;
    assert_eq!(
        server.client.text("say:still here|", 30).await,
        "still here"
    );
}

#[tokio::test]
async fn a_client_that_does_not_read_holds_up_nobody() {
    let server = Server::with(|config| config.max_num_batched_tokens = 512).await;
    let body = json!({"prompt": "ab", "max_tokens": 500, "stream": true, "n": 4, "logprobs": 20});
    let slow = server.client.open(PATH, &body).await;
    until("the slow client's request still runs", async || {
        let load = server.client.get("/twinfer/load").await.json();
        load["running"] == 0 && load["waiting"] == 0
    })
    .await;
    assert_eq!(server.client.text("say:quick|", 9).await, "quick");
    let tokens: usize = slow
        .events()
        .await
        .iter()
        .map(|event| {
            event["choices"][0]["logprobs"]["tokens"]
                .as_array()
                .unwrap()
                .len()
        })
        .sum();
    assert_eq!(tokens, 4 * 500, "nothing is lost");
}

/// C8.6.
#[tokio::test]
async fn a_full_queue_refuses_at_once_and_counts_choices() {
    let (gate, mut options) = Gate::new();
    options.config.max_num_seqs = 4;
    options.config.max_waiting = 16;
    let server = Server::start(options).await;
    let mut requests = JoinSet::new();
    for i in 0..100u64 {
        let client = server.client.clone();
        let n = if i % 10 == 0 { 4 } else { 1 };
        requests.spawn(async move {
            let start = Instant::now();
            let answer = client
                .post(PATH, &json!({"prompt": "ab", "max_tokens": 3, "n": n}))
                .await;
            (n, answer, start.elapsed())
        });
    }
    let (mut accepted, mut refused) = (0, 0);
    let mut opened = false;
    while let Some(done) = requests.join_next().await {
        let (n, answer, _) = done.unwrap();
        match answer.status {
            200 => {
                assert!(opened, "answered before a step ran");
                accepted += n;
                assert_eq!(answer.json()["choices"][0]["text"], expected("ab", 3));
            }
            429 => {
                assert!(answer.headers.contains_key("retry-after"));
                assert_eq!(answer.error().1, "overloaded");
                refused += n;
            }
            other => panic!("{other}: {}", answer.text()),
        }
        // All that can be refused have been refused while the engine stood still in a step.
        if refused >= 130 - 20 && !opened {
            opened = true;
            gate.open();
        }
    }
    assert!(
        accepted <= 20 && accepted + refused == 130,
        "{accepted} accepted, {refused} refused"
    );
    server.kv_idle(LIMIT).await;
    assert_eq!(server.client.text("say:normal|", 9).await, "normal");
    assert_eq!(
        server
            .client
            .post(PATH, &json!({"prompt": "a", "n": 21}))
            .await
            .error()
            .0,
        400
    );
}

/// Lets a stream begin, then makes the engine fail in the middle of it.
async fn ends(mut fault: impl FnMut() -> Result<(), ExecError> + Send + 'static, reason: &str) {
    let (arm, armed) = sync_channel::<()>(1);
    let mut steps = 0;
    let before_step = move |_| {
        steps += 1;
        if steps <= WARM_UP + 5 {
            return Ok(());
        }
        let _ = armed.recv_timeout(LIMIT);
        fault()
    };
    let mut server = Server::start(Options {
        before_step: Some(Box::new(before_step)),
        ..Options::default()
    })
    .await;
    let mut stream = server
        .client
        .open(
            PATH,
            &json!({"prompt": "ab", "max_tokens": 400, "stream": true}),
        )
        .await;
    assert!(stream.chunk().await.is_some());
    let mut whole = JoinSet::new();
    let client = server.client.clone();
    whole.spawn(async move {
        client
            .post(PATH, &json!({"prompt": "cd", "max_tokens": 400}))
            .await
    });
    until("both are in flight", async || server.drain.in_flight() == 2).await;
    let start = Instant::now();
    arm.send(()).unwrap();
    let rest = stream.whole().await.text();
    let (before, last) = rest.trim_end().rsplit_once("\n\n").unwrap();
    assert_eq!(last, "data: [DONE]");
    let error = before.rsplit("\n\n").next().unwrap();
    assert!(error.contains("internal_error"), "{error}");
    let answer = whole.join_next().await.unwrap().unwrap();
    assert!(matches!(answer.error().0, 500 | 503), "{}", answer.text());
    let ended = server.ended().await.unwrap_err();
    assert_eq!(ended.exit_class(), ExitClass::Internal);
    assert!(
        matches!(&ended, ServeError::Engine(e) if e.message.contains(reason)),
        "{ended}"
    );
    assert!(start.elapsed() < Duration::from_secs(10));
    assert!(
        tokio::net::TcpStream::connect(server.ready.addr)
            .await
            .is_err(),
        "the port is free"
    );
}

/// C8.3.
#[tokio::test]
async fn an_engine_that_fails_ends_everything_with_an_error() {
    ends(|| Err(ExecError::Thread("it is gone".into())), "it is gone").await;
}

/// C8.3.
#[tokio::test]
async fn an_engine_that_panics_ends_everything_with_an_error() {
    ends(|| panic!("a bug in a kernel"), "a bug in a kernel").await;
}

/// A step that neither ends nor makes progress is found by the watch; the thread itself is stuck.
#[tokio::test]
async fn an_engine_that_stands_still_ends_everything_with_an_error() {
    let (gate, options) = Gate::new();
    let mut server = Server::start(options).await;
    let start = Instant::now();
    let answer = server.client.post(PATH, &json!({"prompt": "ab"})).await;
    assert_eq!(answer.error().0, 500);
    assert!(
        answer.error().3.contains("no progress"),
        "{}",
        answer.text()
    );
    assert!(
        start.elapsed() >= Duration::from_secs(10),
        "a long step is no stall"
    );
    // It may have closed its port already.
    if let Some(ready) = server.client.try_send(Method::GET, "/ready", "").await {
        assert_eq!(ready.status, 503);
    }
    assert!(server.ended().await.is_err());
    assert!(start.elapsed() < Duration::from_secs(20));
    gate.open();
}

/// A slow machine, or a large model: one step takes longer than a stall may, but layers end.
#[tokio::test]
async fn a_step_of_slow_layers_is_no_stall() {
    let (gate, options) = Gate::new();
    let server = Server::start(options).await;
    let start = Instant::now();
    let layers = async {
        while start.elapsed() < Duration::from_secs(12) {
            tokio::time::sleep(Duration::from_millis(100)).await;
            server.layers.fetch_add(1, Ordering::Relaxed);
        }
        assert_eq!(gate.steps(), WARM_UP + 1, "it is still the first step");
        gate.open();
    };
    let (text, ()) = tokio::join!(server.client.text("say:slow|", 9), layers);
    assert_eq!(text, "slow");
    assert_eq!(server.client.get("/ready").await.status, 200);
}

/// C8.4.
#[tokio::test]
async fn a_drain_lets_short_answers_end_and_breaks_off_long_ones() {
    let (gate, options) = Gate::new();
    let gate = Arc::new(gate);
    let mut server = Server::start(options).await;
    let mut steps = JoinSet::new();
    let going = Arc::clone(&gate);
    steps.spawn(async move {
        loop {
            going.step();
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    });
    let body = |max_tokens: u32| json!({"prompt": "ab", "max_tokens": max_tokens, "stream": true});
    let mut short = server.client.open(PATH, &body(6)).await;
    let mut long = server.client.open(PATH, &body(400)).await;
    assert!(short.chunk().await.is_some() && long.chunk().await.is_some());
    let drain = server.drain.clone();
    let mut draining = JoinSet::new();
    draining.spawn(async move {
        drain
            .run(Duration::from_millis(300), Duration::from_secs(2))
            .await
    });
    server.drain.reached(DrainState::Settling).await;
    let ready = server.client.get("/ready").await;
    assert_eq!(
        (ready.error().0, ready.error().1.as_str()),
        (503, "draining")
    );
    assert_eq!(server.client.get("/health").await.status, 200);
    let late = server.client.text("say:late|", 9).await;
    assert_eq!(late, "late", "arrivals in the settle time are served");
    assert!(short.whole().await.text().ends_with("data: [DONE]\n\n"));
    server.drain.reached(DrainState::Draining).await;
    let refused = server.client.post(PATH, &body(1)).await;
    assert_eq!(
        (refused.status, refused.headers.contains_key("retry-after")),
        (503, true)
    );
    let rest = long.whole().await.text();
    assert!(
        rest.contains("\"code\":\"draining\"") && rest.ends_with("data: [DONE]\n\n"),
        "{rest}"
    );
    gate.open();
    server.ended().await.unwrap();
    draining.join_next().await;
}

#[tokio::test]
async fn an_idle_instance_ends_at_once() {
    let server = Server::start(Options::default()).await;
    let start = Instant::now();
    server.stop().await.unwrap();
    assert!(start.elapsed() < Duration::from_secs(2));
}

/// C8.9.
#[tokio::test]
async fn metrics_do_not_grow_with_what_clients_send() {
    let server = Server::start(Options::default()).await;
    let series = async || server.client.get("/metrics").await.text().lines().count();
    let each = async |i: u32| {
        server.client.get(&format!("/nothing/{i}")).await;
        server
            .client
            .post(PATH, &json!({"prompt": "x", "model": format!("m{i}")}))
            .await;
        let named =
            json!({"prompt": "say:x|", "user": format!("u{i}"), "request_id": format!("r{i}")});
        assert_eq!(server.client.post(PATH, &named).await.status, 200);
    };
    each(0).await;
    let before = series().await;
    for i in 1..300 {
        each(i).await;
    }
    assert_eq!(series().await, before);
}
