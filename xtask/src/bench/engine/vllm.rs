//! vLLM on CPU through its server, since it has no other way to measure a running engine.

use super::ours::{cores, prompt};
use super::{CONTEXT, STEPS};
use anyhow::{Context, Result, bail};
use rustix::process::{Pid, Signal, kill_process, kill_process_group};
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};
use twinfer_it::{Client, free_port};

const START: Duration = Duration::from_secs(400);
const NAME: &str = "model";

/// A server. It stands still unless it is measured, so that it takes nothing from the others.
pub(super) struct Vllm {
    child: Child,
    client: Client,
    runtime: tokio::runtime::Runtime,
    /// A measurement repeats its work for at least so long.
    at_least: Duration,
    /// Lengths of prompts that it has met.
    met: BTreeSet<usize>,
    /// Tokens per second of the last prompt.
    rate: Option<f64>,
}

/// Tokens of the prompt that brings a server which stood still back into the caches.
const AWAKENING: usize = 128;

/// A prompt that takes so long is timed when it is first met.
const LONG: Duration = Duration::from_secs(5);

/// When a sequence had how many tokens.
type Course = Vec<(Instant, u64)>;

impl Vllm {
    /// Starts `vllm serve` of the environment `vllm` below the peers' folder and waits for it.
    pub(super) fn start(peers: &Path, model: &Path, at_least: Duration) -> Result<Self> {
        let program = peers.join("vllm/bin/vllm");
        if !program.exists() {
            bail!("{} does not exist", program.display());
        }
        eprintln!("$ {} serve {}", program.display(), model.display());
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()?;
        let port = free_port();
        let path = format!(
            "{}:{}",
            peers.join("vllm/bin").display(),
            std::env::var("PATH").unwrap_or_default()
        );
        let cores: Vec<String> = cores()?.iter().map(usize::to_string).collect();
        let log = tempfile::NamedTempFile::new()?;
        let child = Command::new(&program)
            .arg("serve")
            .arg(model)
            .args(["--served-model-name", NAME, "--host", "127.0.0.1"])
            .args(["--port", &port.to_string(), "--dtype", "bfloat16"])
            .args(["--max-model-len", "4096", "--no-enable-prefix-caching"])
            .args(["--max-num-batched-tokens", "4096"])
            .env("PATH", path)
            .env("VLLM_CPU_KVCACHE_SPACE", "2")
            .env("VLLM_CPU_OMP_THREADS_BIND", cores.join(","))
            .env("HF_HUB_OFFLINE", "1")
            .env("VLLM_NO_USAGE_STATS", "1")
            .env("DO_NOT_TRACK", "1")
            .env("VLLM_HOST_IP", "127.0.0.1")
            .stdin(Stdio::null())
            .stdout(log.reopen()?)
            .stderr(log.reopen()?)
            .process_group(0)
            .spawn()
            .with_context(|| format!("{}", program.display()))?;
        let mut vllm = Self {
            child,
            client: Client::new(format!("127.0.0.1:{port}")),
            runtime,
            at_least,
            met: BTreeSet::new(),
            rate: None,
        };
        let said = || {
            let text = std::fs::read_to_string(log.path()).unwrap_or_default();
            let lines: Vec<&str> = text.lines().collect();
            lines[lines.len().saturating_sub(30)..].join("\n")
        };
        let start = Instant::now();
        while !vllm.healthy() {
            if let Some(status) = vllm.child.try_wait()? {
                bail!("vllm serve ended with {status}: {}", said());
            }
            if start.elapsed() > START {
                bail!("vllm serve was not ready within {START:?}: {}", said());
            }
        }
        vllm.prefill_once(AWAKENING)?;
        vllm.signal(Signal::STOP);
        Ok(vllm)
    }

    fn healthy(&self) -> bool {
        self.runtime.block_on(async {
            tokio::time::sleep(Duration::from_secs(1)).await;
            matches!(self.client.get("/health").await, Ok(answer) if answer.status == 200)
        })
    }

    /// Tokens per second of one prompt, by the time to its only output token. The first of a length is not timed, unless it
    /// takes so long that what is done once does not count.
    pub(super) fn prefill(&mut self, tokens: usize) -> Result<f64> {
        let is_new = self.met.insert(tokens);
        let is_long = self
            .rate
            .is_some_and(|rate| tokens as f64 / rate > LONG.as_secs_f64());
        let rate = self.awake(|| {
            if is_new && !is_long {
                self.prefill_once(tokens)?;
            }
            let start = Instant::now();
            let mut done = 0;
            while done == 0 || start.elapsed() < self.at_least {
                self.prefill_once(tokens)?;
                done += tokens;
            }
            Ok(done as f64 / start.elapsed().as_secs_f64())
        })?;
        self.rate = Some(rate);
        Ok(rate)
    }

    fn prefill_once(&self, tokens: usize) -> Result<()> {
        self.runtime.block_on(async {
            let body = body(&prompt(tokens, 0), 1);
            let answer = self.client.post("/v1/completions", &body).await;
            let answer = answer.map_err(anyhow::Error::msg)?;
            if answer.status != 200 {
                bail!("vLLM answered {}: {}", answer.status, answer.text());
            }
            Ok(())
        })
    }

    /// Tokens per second of `sequences` sequences together, from where all have their first token until
    /// one has its last; as often as it takes to measure for long enough.
    pub(super) fn decode(&self, sequences: usize) -> Result<f64> {
        self.awake(|| {
            let (mut tokens, mut seconds) = (0, 0.0);
            while tokens == 0 || seconds < self.at_least.as_secs_f64() {
                let (more, time) = self.decode_once(sequences)?;
                tokens += more;
                seconds += time;
            }
            Ok(tokens as f64 / seconds)
        })
    }

    /// Tokens, and the seconds in which they came.
    fn decode_once(&self, sequences: usize) -> Result<(u64, f64)> {
        let courses = self.courses(sequences)?;
        let begin = courses.iter().filter_map(|course| course.first()).max();
        let end = courses.iter().filter_map(|course| course.last()).min();
        let (Some(&(begin, _)), Some(&(end, _))) = (begin, end) else {
            bail!("vLLM sent no tokens");
        };
        let until = |course: &Course, limit: Instant| {
            let before = course.iter().take_while(|(at, _)| *at <= limit);
            before.last().map_or(0, |(_, tokens)| *tokens)
        };
        let tokens: u64 = courses
            .iter()
            .map(|course| until(course, end) - until(course, begin))
            .sum();
        if tokens < (sequences * STEPS / 2) as u64 {
            bail!("of {sequences} sequences only {tokens} tokens came while all were decoding");
        }
        Ok((tokens, (end - begin).as_secs_f64()))
    }

    fn courses(&self, sequences: usize) -> Result<Vec<Course>> {
        self.runtime.block_on(async {
            let mut open = tokio::task::JoinSet::new();
            for sequence in 0..sequences {
                let client = self.client.clone();
                open.spawn(async move { course(&client, sequence).await });
            }
            let mut courses = Vec::new();
            while let Some(course) = open.join_next().await {
                courses.push(course??);
            }
            Ok(courses)
        })
    }

    fn awake<T>(&self, work: impl FnOnce() -> Result<T>) -> Result<T> {
        self.signal(Signal::CONT);
        let result = self.prefill_once(AWAKENING).and_then(|()| work());
        self.signal(Signal::STOP);
        result
    }

    /// To the server and the processes that it started.
    fn signal(&self, signal: Signal) {
        if let Some(group) = self.pid() {
            // An error means that it has ended, which the next request shows.
            let _ = kill_process_group(group, signal);
        }
    }

    fn pid(&self) -> Option<Pid> {
        Pid::from_raw(i32::try_from(self.child.id()).ok()?)
    }
}

fn body(prompt: &[u32], tokens: usize) -> Value {
    json!({
        "model": NAME, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": true,
    })
}

async fn course(client: &Client, sequence: usize) -> Result<Course> {
    let mut body = body(&prompt(CONTEXT, sequence), STEPS + 1);
    body["stream"] = true.into();
    body["stream_options"] = json!({"include_usage": true, "continuous_usage_stats": true});
    let stream = client.stream("/v1/completions", &body).await;
    let mut stream = stream.map_err(anyhow::Error::msg)?;
    if stream.status != 200 {
        bail!("vLLM answered {}", stream.status);
    }
    let (mut course, mut rest) = (Course::new(), String::new());
    while let Some(piece) = stream.piece().await.map_err(anyhow::Error::msg)? {
        let at = Instant::now();
        rest.push_str(&String::from_utf8_lossy(&piece));
        while let Some((event, behind)) = rest.split_once("\n\n") {
            let data = event.strip_prefix("data: ").unwrap_or_default();
            let json: Value = serde_json::from_str(data).unwrap_or_default();
            if let Some(tokens) = json["usage"]["completion_tokens"]
                .as_u64()
                .filter(|n| *n > 0)
            {
                course.push((at, tokens));
            }
            rest = behind.to_owned();
        }
    }
    Ok(course)
}

impl Drop for Vllm {
    fn drop(&mut self) {
        self.signal(Signal::CONT);
        if let Some(pid) = self.pid() {
            // It ends its own processes when it is told to, not when it is killed.
            let _ = kill_process(pid, Signal::TERM);
        }
        let start = Instant::now();
        while start.elapsed() < Duration::from_secs(20) {
            if matches!(self.child.try_wait(), Ok(Some(_)) | Err(_)) {
                break;
            }
            self.runtime
                .block_on(async { tokio::time::sleep(Duration::from_millis(100)).await });
        }
        self.signal(Signal::KILL);
        let _ = self.child.wait();
    }
}
