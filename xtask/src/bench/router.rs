//! The router before scripted instances: processor time of its process, latency it adds.

use super::{Round, Sample, median};
use anyhow::{Context, Result, bail};
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::time::{Duration, Instant};
use twinfer_http::{ClientOptions, Endpoint, PeerClient, collect_body};
use twinfer_it::{Instance, Process, free_port};

const CLIENTS: usize = 16;
const PLAIN: usize = 4000;
const STREAMS: usize = 320;
const TOKENS: usize = 64;
const LIMIT: Duration = Duration::from_secs(30);

struct Bench {
    router: Instance,
    direct: Endpoint,
    _workers: Vec<Process>,
}

pub(super) fn measure(rounds: usize) -> Result<Vec<Round>> {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()?;
    let mut all = Vec::new();
    let plain = runtime.block_on(Bench::start(&["--tokens", "1"]))?;
    let streamed = runtime.block_on(Bench::start(&["--tokens", "64", "--token-time", "0.002"]))?;
    for _ in 0..rounds {
        let mut round = Round::new();
        let cpu = runtime.block_on(plain.router_cpu(PLAIN, &body(false)))?;
        round.insert(
            "CPU time of a plain completion, 200-byte body".to_owned(),
            Sample {
                ours: cpu * 1e6 / PLAIN as f64,
                floor: relay_cpu(&plain.direct, 1000)?,
                peer: None,
            },
        );
        let cpu = runtime.block_on(streamed.router_cpu(STREAMS, &body(true)))?;
        round.insert(
            "CPU time of a streamed token, 64 tokens 2 ms apart".to_owned(),
            Sample {
                ours: cpu * 1e6 / (STREAMS * TOKENS) as f64,
                floor: copy_cpu(4000)?,
                peer: None,
            },
        );
        let through = runtime.block_on(latency(&plain.router_endpoint()?, &body(true)))?;
        let direct = runtime.block_on(latency(&plain.direct, &body(true)))?;
        round.insert(
            "latency at one client, streamed, p50".to_owned(),
            Sample {
                ours: through * 1e3,
                floor: direct * 1e3,
                peer: None,
            },
        );
        all.push(round);
    }
    Ok(all)
}

/// A chat body of about 200 bytes.
fn body(stream: bool) -> String {
    format!(
        r#"{{"model":"fake","messages":[{{"role":"user","content":"{}"}}],"max_tokens":64,"temperature":0,"stream":{stream}}}"#,
        "What does a router do? ".repeat(4)
    )
}

impl Bench {
    async fn start(script: &[&str]) -> Result<Self> {
        let (prefill, decode) = (free_port(), free_port());
        let mut workers = Vec::new();
        for (role, port) in [("prefill", prefill), ("decode", decode)] {
            let port = port.to_string();
            let mut arguments = vec![
                "fake", "--role", role, "--port", &port, "--model", "fake", "--record", "0",
            ];
            if role == "decode" {
                arguments.extend(script);
            }
            workers.push(Process::start(&arguments, &[]));
        }
        let url = |port: u16| format!("http://127.0.0.1:{port}");
        let mut router =
            Instance::router(&["--prefill", &url(prefill), "--decode", &url(decode)], &[]);
        router.ready().await;
        Ok(Self {
            router,
            direct: url(decode).parse()?,
            _workers: workers,
        })
    }

    fn router_endpoint(&self) -> Result<Endpoint> {
        self.router.url().parse().context("the router's address")
    }

    /// Processor seconds of the router for `requests` at 16 clients.
    async fn router_cpu(&self, requests: usize, body: &str) -> Result<f64> {
        let endpoint = self.router_endpoint()?;
        load(&endpoint, requests / 10, body).await?;
        let before = cpu_seconds(self.router.process.id())?;
        load(&endpoint, requests, body).await?;
        Ok(cpu_seconds(self.router.process.id())? - before)
    }
}

fn client() -> PeerClient {
    PeerClient::new(ClientOptions {
        max_idle_per_peer: CLIENTS,
        ..ClientOptions::default()
    })
}

async fn one(client: &PeerClient, endpoint: &Endpoint, body: &str) -> Result<()> {
    let mut headers = http::HeaderMap::new();
    headers.insert(
        http::header::CONTENT_TYPE,
        http::HeaderValue::from_static("application/json"),
    );
    let bytes = bytes::Bytes::copy_from_slice(body.as_bytes());
    let answer = client
        .send(
            http::Method::POST,
            endpoint,
            "/v1/chat/completions",
            headers,
            bytes,
            LIMIT,
        )
        .await?;
    if answer.status() != 200 {
        bail!("status {}", answer.status());
    }
    let stream = answer
        .headers()
        .get("content-type")
        .is_some_and(|kind| kind.as_bytes().starts_with(b"text/event-stream"));
    let bytes = collect_body(
        answer.into_body(),
        &endpoint.host_port().to_string(),
        1 << 20,
        LIMIT,
    )
    .await?;
    if bytes.is_empty() || (stream && !bytes.ends_with(b"data: [DONE]\n\n")) {
        bail!("wrong answer: {}", String::from_utf8_lossy(&bytes));
    }
    Ok(())
}

async fn load(endpoint: &Endpoint, requests: usize, body: &str) -> Result<()> {
    let client = client();
    let mut tasks = tokio::task::JoinSet::new();
    for _ in 0..CLIENTS {
        let (client, endpoint, body) = (client.clone(), endpoint.clone(), body.to_owned());
        tasks.spawn(async move {
            for _ in 0..requests.div_ceil(CLIENTS) {
                one(&client, &endpoint, &body).await?;
            }
            Ok::<(), anyhow::Error>(())
        });
    }
    while let Some(task) = tasks.join_next().await {
        task??;
    }
    Ok(())
}

/// Median seconds of a streamed request of one client.
async fn latency(endpoint: &Endpoint, body: &str) -> Result<f64> {
    let client = client();
    let mut seconds = Vec::new();
    for _ in 0..500 {
        let start = Instant::now();
        one(&client, endpoint, body).await?;
        seconds.push(start.elapsed().as_secs_f64());
    }
    Ok(median(seconds.into_iter()))
}

/// User and system seconds of a process.
fn cpu_seconds(pid: u32) -> Result<f64> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat"))?;
    let fields: Vec<&str> = stat
        .rsplit_once(')')
        .context("stat")?
        .1
        .split_whitespace()
        .collect();
    let ticks = |i: usize| {
        fields
            .get(i)
            .and_then(|field| field.parse::<f64>().ok())
            .context("stat")
    };
    Ok((ticks(11)? + ticks(12)?) / rustix::param::clock_ticks_per_second() as f64)
}

fn thread_cpu() -> f64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    time.tv_sec as f64 + time.tv_nsec as f64 * 1e-9
}

/// Microseconds of a thread that relays a request to the instance and its answer back, blocking, knowing nothing.
fn relay_cpu(instance: &Endpoint, requests: usize) -> Result<f64> {
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let relay: Endpoint = format!("http://{}", listener.local_addr()?).parse()?;
    let target = instance.host_port().to_string();
    let relaying = std::thread::spawn(move || -> std::io::Result<f64> {
        let (mut down, _) = listener.accept()?;
        let mut up = TcpStream::connect(target)?;
        down.set_nodelay(true)?;
        up.set_nodelay(true)?;
        let mut buffer = vec![0; 1 << 16];
        let start = thread_cpu();
        for _ in 0..requests {
            let n = down.read(&mut buffer)?;
            up.write_all(&buffer[..n])?;
            let n = up.read(&mut buffer)?;
            down.write_all(&buffer[..n])?;
        }
        Ok((thread_cpu() - start) * 1e6 / requests as f64)
    });
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    let body = body(false);
    runtime.block_on(async {
        let client = client();
        for _ in 0..requests {
            one(&client, &relay, &body).await?;
        }
        Ok::<(), anyhow::Error>(())
    })?;
    let cost = relaying
        .join()
        .map_err(|_| anyhow::anyhow!("the relay panicked"))?;
    Ok(cost?)
}

/// Microseconds of a thread that copies a piece of a stream (250 bytes) from one socket to another.
fn copy_cpu(pieces: usize) -> Result<f64> {
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let mut source = TcpStream::connect(listener.local_addr()?)?;
    let (mut from, _) = listener.accept()?;
    let mut to = TcpStream::connect(listener.local_addr()?)?;
    let (mut sink, _) = listener.accept()?;
    for socket in [&source, &from, &to, &sink] {
        socket.set_nodelay(true)?;
        socket.set_read_timeout(Some(LIMIT))?;
    }
    let copying = std::thread::spawn(move || -> std::io::Result<f64> {
        let mut buffer = [0; 4096];
        let start = thread_cpu();
        for _ in 0..pieces {
            let n = from.read(&mut buffer)?;
            to.write_all(&buffer[..n])?;
        }
        Ok((thread_cpu() - start) * 1e6 / pieces as f64)
    });
    let mut buffer = [0; 250];
    for _ in 0..pieces {
        source.write_all(&buffer)?;
        sink.read_exact(&mut buffer)?;
    }
    let cost = copying
        .join()
        .map_err(|_| anyhow::anyhow!("the copy panicked"))?;
    Ok(cost?)
}
