//! Sockets: accepts, routes, plays answers, watches for clients that leave.

use super::answer::{self, Context};
use super::plan::{End, Plan, Script, Step};
use super::record::{ConnectionWhat, Log, RecordedRequest};
use super::wire::{Request, RequestReader};
use parking_lot::Mutex;
use serde_json::{Value, json};
use std::collections::{BTreeSet, VecDeque};
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use twinfer_config::{Dialect, FakeConfig, FaultKind};
use twinfer_protocol::Epoch;

const PULL_TIMEOUT: Duration = Duration::from_secs(5);
/// Between two questions for KV that is not there yet.
const ASK_AGAIN: Duration = Duration::from_millis(5);

/// What all connections of a worker share.
pub(super) struct State {
    config: FakeConfig,
    name: String,
    epoch: Epoch,
    own_port: u16,
    headers: Vec<(String, String)>,
    pub(super) log: Log,
    pub(super) scripts: Mutex<VecDeque<Script>>,
    pub(super) ready: AtomicBool,
    pub(super) served: AtomicU64,
    pub(super) open: AtomicUsize,
    pub(super) in_flight: AtomicUsize,
    pub(super) abandoned: AtomicUsize,
    pub(super) pulls: AtomicU64,
    pub(super) releases: AtomicU64,
    next_connection: AtomicU64,
    next_block: AtomicU64,
    held: Mutex<BTreeSet<String>>,
}

/// Counts something while it lives, and tells about both changes.
struct Count<'a> {
    log: &'a Log,
    counter: &'a AtomicUsize,
}

impl<'a> Count<'a> {
    fn new(log: &'a Log, counter: &'a AtomicUsize) -> Self {
        counter.fetch_add(1, Ordering::AcqRel);
        log.changed();
        Self { log, counter }
    }
}

impl Drop for Count<'_> {
    fn drop(&mut self) {
        self.counter.fetch_sub(1, Ordering::AcqRel);
        self.log.changed();
    }
}

impl State {
    pub(super) fn new(config: FakeConfig, addr: SocketAddr) -> Self {
        let name = config
            .name
            .clone()
            .unwrap_or_else(|| format!("fake-{}-{}", config.role, addr.port()));
        let headers = config
            .header
            .iter()
            .filter_map(|line| line.split_once(':'))
            .map(|(name, value)| (name.trim().to_owned(), value.trim().to_owned()))
            .collect();
        Self {
            name,
            epoch: Epoch(uuid::Uuid::new_v4().as_u64_pair().0),
            own_port: addr.port(),
            headers,
            log: Log::new(config.record),
            scripts: Mutex::default(),
            config,
            ready: AtomicBool::new(true),
            served: AtomicU64::new(0),
            open: AtomicUsize::new(0),
            in_flight: AtomicUsize::new(0),
            abandoned: AtomicUsize::new(0),
            pulls: AtomicU64::new(0),
            releases: AtomicU64::new(0),
            next_connection: AtomicU64::new(1),
            next_block: AtomicU64::new(17),
            held: Mutex::default(),
        }
    }

    pub(super) fn held(&self) -> Vec<String> {
        self.held.lock().iter().cloned().collect()
    }

    fn context(&self, blocks: u64) -> Context<'_> {
        Context {
            config: &self.config,
            name: &self.name,
            epoch: self.epoch,
            own_port: self.own_port,
            first_block: self.next_block.fetch_add(blocks, Ordering::AcqRel),
            headers: &self.headers,
        }
    }

    fn drop_held(&self, id: &str, counter: &AtomicU64) -> bool {
        let was = self.held.lock().remove(id);
        if was {
            counter.fetch_add(1, Ordering::AcqRel);
        }
        self.log.changed();
        was
    }
}

/// Accepts until `stop`.
pub(super) async fn accept(
    listener: TcpListener,
    state: Arc<State>,
    stop: CancellationToken,
    tasks: TaskTracker,
) {
    while let Some(accepted) = stop.run_until_cancelled(listener.accept()).await {
        let Ok((stream, _)) = accepted else { continue };
        let state = Arc::clone(&state);
        let stop = stop.clone();
        tasks.spawn(async move {
            let id = state.next_connection.fetch_add(1, Ordering::AcqRel);
            let _open = Count::new(&state.log, &state.open);
            state.log.connection(id, ConnectionWhat::Opened);
            stop.run_until_cancelled(connection(&state, stream, id))
                .await;
            state.log.connection(id, ConnectionWhat::Closed);
        });
    }
}

async fn connection(state: &State, stream: TcpStream, id: u64) {
    let _ = stream.set_nodelay(true);
    let (mut read, mut write) = stream.into_split();
    let mut reader = RequestReader::default();
    while let Ok(Some(request)) = reader.next(&mut read, &mut write).await {
        let close = request.wants_close();
        let (nth, plan) = route(state, request, id);
        let holds = plan.steps.iter().find_map(|step| match step {
            Step::Hold(id) => Some(id.clone()),
            _ => None,
        });
        let busy = (nth > 0).then(|| Count::new(&state.log, &state.in_flight));
        let played = tokio::select! {
            biased;
            done = play(state, &mut write, plan) => Some(done),
            () = gone(&mut read) => None,
        };
        drop(busy);
        match played {
            Some(Ok(end)) => {
                state.log.connection(id, ConnectionWhat::Answered { nth });
                match end {
                    End::KeepAlive if !close => {}
                    End::Reset => {
                        if let Ok(stream) = write.reunite(read) {
                            let _ = stream.set_zero_linger();
                        }
                        return;
                    }
                    _ => {
                        let _ = write.shutdown().await;
                        return;
                    }
                }
            }
            Some(Err(_)) | None => {
                // Nobody has got this handle: a request that is aborted frees its KV.
                if let Some(id) = holds {
                    state.held.lock().remove(&id);
                }
                if nth > 0 {
                    state.abandoned.fetch_add(1, Ordering::AcqRel);
                }
                state.log.connection(id, ConnectionWhat::ClientGone { nth });
                return;
            }
        }
    }
}

/// Ends when the client closes its side.
async fn gone(read: &mut OwnedReadHalf) {
    let mut byte = [0];
    match read.peek(&mut byte).await {
        Ok(0) | Err(_) => {}
        // A further request waits behind this one.
        Ok(_) => std::future::pending().await,
    }
}

async fn play(state: &State, write: &mut OwnedWriteHalf, plan: Plan) -> io::Result<End> {
    for step in plan.steps {
        match step {
            Step::Write(bytes) => write.write_all(&bytes).await?,
            Step::Wait(time) => tokio::time::sleep(time).await,
            Step::Hold(id) => {
                state.held.lock().insert(id);
                state.log.changed();
            }
            Step::Pull {
                host,
                port,
                remote_request_id,
            } => {
                let pull = pull(&host, port, &remote_request_id);
                // A handle that cannot be fetched is the business of tests with real workers.
                let _ = tokio::time::timeout(PULL_TIMEOUT, pull).await;
            }
            Step::Await {
                host,
                port,
                transfer_id,
            } => loop {
                // What comes too early finds nothing: ask again until the client leaves, as the engine's connector does.
                if let Ok(200) = pull(&host, port, &transfer_id).await {
                    break;
                }
                tokio::time::sleep(ASK_AGAIN).await;
            },
            Step::Metaserver {
                host,
                port,
                path,
                body,
            } => {
                let told = post(&host, port, &path, &body).await;
                if !matches!(told, Ok(200)) {
                    // The engine does not read the status; no KV comes, and it waits.
                    std::future::pending::<()>().await;
                }
            }
        }
    }
    if plan.end == End::Hang {
        std::future::pending::<()>().await;
    }
    Ok(plan.end)
}

async fn pull(host: &str, port: u16, remote_request_id: &str) -> io::Result<u16> {
    let body = json!({"remote_request_id": remote_request_id}).to_string();
    post(host, port, "/fake/pull", &body).await
}

/// The status of the answer to a POST.
async fn post(host: &str, port: u16, path: &str, body: &str) -> io::Result<u16> {
    let mut stream = TcpStream::connect((host, port)).await?;
    let request = format!(
        "POST {path} HTTP/1.1\r\nhost: {host}:{port}\r\nconnection: close\r\ncontent-type: application/json\r\n\
         content-length: {}\r\n\r\n{body}",
        body.len()
    );
    stream.write_all(request.as_bytes()).await?;
    let mut answer = Vec::new();
    stream.take(1 << 16).read_to_end(&mut answer).await?;
    let status = answer
        .get(9..12)
        .and_then(|s| std::str::from_utf8(s).ok()?.parse().ok());
    status.ok_or_else(|| io::Error::other("no status"))
}

/// Number of an inference request (0 for others) and the answer.
fn route(state: &State, request: Request, connection: u64) -> (u64, Plan) {
    let route = request.route().to_owned();
    let plain = |status: u16, body: &Value| Plan::json(status, body, &state.headers);
    let twinfer = state.config.dialect == Dialect::Twinfer;
    match (request.method.as_str(), route.as_str()) {
        ("POST", "/v1/completions" | "/v1/chat/completions") => {
            let nth = state.served.fetch_add(1, Ordering::AcqRel) + 1;
            let plan = infer(state, nth, route.ends_with("/chat/completions"), &request);
            record(state, request, connection, nth);
            (nth, plan)
        }
        ("GET", "/query") if state.config.dialect == Dialect::Mooncake => {
            let engine = format!("{}-{}", state.name, state.epoch);
            (
                0,
                plain(
                    200,
                    &json!({"0": {"engine_id": engine, "worker_addr": {"0": {"0": "tcp://127.0.0.1:1"}}}}),
                ),
            )
        }
        ("GET", "/v1/models") => (0, plain(200, &answer::models(&state.config))),
        ("GET", "/health") => (0, readiness(state)),
        ("GET", "/ready") if twinfer => (0, readiness(state)),
        ("GET", "/metrics") => {
            let text = format!(
                "# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running {}\n\
                 # TYPE twinfer_kv_blocks gauge\ntwinfer_kv_blocks{{state=\"held\"}} {}\n",
                state.in_flight.load(Ordering::Acquire),
                state.held.lock().len()
            );
            (
                0,
                Plan::whole(
                    200,
                    "text/plain; version=0.0.4; charset=utf-8",
                    text.as_bytes(),
                    &state.headers,
                ),
            )
        }
        ("POST", "/tokenize") => {
            let tokens: Vec<usize> = (0..request.body.len().div_ceil(3)).collect();
            record(state, request, connection, 0);
            let body = json!({"count": tokens.len(), "max_model_len": state.config.max_model_len, "tokens": tokens,
                "token_strs": null});
            (0, plain(200, &body))
        }
        ("POST", "/detokenize") => {
            record(state, request, connection, 0);
            (0, plain(200, &json!({"prompt": "fake"})))
        }
        ("GET", "/twinfer/instance") if twinfer => {
            (0, plain(200, &answer::card(&state.context(0))))
        }
        ("GET", "/twinfer/load") if twinfer => {
            let running = state.in_flight.load(Ordering::Acquire);
            let rank = json!({"waiting_prefill_tokens": 0, "running": running, "waiting": 0,
                "kv_blocks": {"total": 1024, "used": running, "cached": 0, "held": state.held.lock().len()}});
            let mut report = rank.clone();
            report["ranks"] = json!([rank]);
            (0, plain(200, &report))
        }
        ("POST", "/twinfer/kv/release") if twinfer => {
            let released = state.drop_held(&handle_id(&request), &state.releases);
            record(state, request, connection, 0);
            (0, plain(200, &json!({"released": released})))
        }
        ("POST", "/fake/pull") => {
            let pulled = state.drop_held(&handle_id(&request), &state.pulls);
            (
                0,
                plain(if pulled { 200 } else { 410 }, &json!({"pulled": pulled})),
            )
        }
        ("GET", "/fake/requests") => {
            let all: Vec<Value> = state
                .log
                .requests()
                .iter()
                .map(RecordedRequest::to_json)
                .collect();
            (0, plain(200, &Value::from(all)))
        }
        ("GET", "/fake/connections") => {
            let events = serde_json::to_value(state.log.connections()).unwrap_or_default();
            (
                0,
                plain(
                    200,
                    &json!({"open": state.open.load(Ordering::Acquire), "events": events}),
                ),
            )
        }
        ("GET", "/v1/completions" | "/v1/chat/completions") => {
            (0, plain(405, &json!({"detail": "Method Not Allowed"})))
        }
        _ => (0, plain(404, &json!({"detail": "Not Found"}))),
    }
}

fn infer(state: &State, nth: u64, chat: bool, request: &Request) -> Plan {
    let script = state.scripts.lock().pop_front();
    let fault = match script {
        Some(Script::Raw { pieces, gap, close }) => return Plan::raw(pieces, gap, close),
        Some(Script::Fault(kind)) => Some(kind),
        Some(Script::Plain) => None,
        None => state
            .config
            .fault
            .iter()
            .find(|f| f.hits(nth))
            .map(|f| f.kind.clone()),
    };
    match &fault {
        Some(FaultKind::Status {
            code,
            retry_after,
            body,
        }) => {
            let mut headers = state.headers.clone();
            headers.extend(retry_after.map(|s| ("retry-after".to_owned(), s.to_string())));
            return match body {
                Some(body) => Plan::whole(*code, "application/json", body.as_bytes(), &headers),
                None => answer::error(
                    *code,
                    "FakeError",
                    None,
                    &format!("fake error {code}"),
                    &headers,
                ),
            };
        }
        Some(FaultKind::Empty) => return Plan::whole(200, "application/json", b"", &state.headers),
        _ => {}
    }
    let suffix: String = uuid::Uuid::new_v4()
        .simple()
        .to_string()
        .chars()
        .take(8)
        .collect();
    let blocks = 1 + (request.body.len() / state.config.block_size.max(1) as usize) as u64;
    let context = state.context(blocks);
    let plan = answer::infer(
        &context,
        chat,
        request.header("x-request-id"),
        &suffix,
        &request.body,
        fault.as_ref(),
    );
    match fault {
        Some(FaultKind::Cut(n)) => plan.stopped(n, End::Close),
        Some(FaultKind::Reset(n)) => plan.stopped(n, End::Reset),
        Some(FaultKind::Hang(n)) => plan.stopped(n, End::Hang),
        _ => plan,
    }
}

fn readiness(state: &State) -> Plan {
    if state.ready.load(Ordering::Acquire) {
        Plan::whole(200, "", b"", &state.headers)
    } else {
        answer::error(503, "NotReady", None, "not ready", &state.headers)
    }
}

fn handle_id(request: &Request) -> String {
    let body: Value = serde_json::from_slice(&request.body).unwrap_or_default();
    body.get("remote_request_id")
        .and_then(Value::as_str)
        .unwrap_or_default()
        .to_owned()
}

fn record(state: &State, request: Request, connection: u64, nth: u64) {
    state.log.request(|at| RecordedRequest {
        nth,
        connection,
        at,
        method: request.method,
        path: request.path,
        headers: request.headers,
        body: request.body,
    });
}
