//! vLLM on CPU through its server, since it has no other way to measure a running engine.

use super::ours::prompt;
use anyhow::{Context, Result, bail};
use serde_json::json;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};
use twinfer_it::{Client, free_port};

const START: Duration = Duration::from_secs(400);
const NAME: &str = "model";

pub(super) struct Vllm {
    child: Child,
    client: Client,
    runtime: tokio::runtime::Runtime,
}

impl Vllm {
    /// Starts `vllm serve` of the environment `vllm` below the peers' folder and waits for it.
    pub(super) fn start(peers: &Path, model: &Path) -> Result<Self> {
        let program = peers.join("vllm/bin/vllm");
        if !program.exists() {
            bail!("{} does not exist", program.display());
        }
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
        let child = Command::new(&program)
            .arg("serve")
            .arg(model)
            .args(["--served-model-name", NAME, "--host", "127.0.0.1"])
            .args(["--port", &port.to_string(), "--dtype", "bfloat16"])
            .args(["--max-model-len", "4096", "--no-enable-prefix-caching"])
            .args(["--max-num-batched-tokens", "4096"])
            .env("PATH", path)
            .env("VLLM_CPU_KVCACHE_SPACE", "2")
            .env("VLLM_CPU_OMP_THREADS_BIND", "0-1")
            .env("HF_HUB_OFFLINE", "1")
            .env("VLLM_NO_USAGE_STATS", "1")
            .env("DO_NOT_TRACK", "1")
            .env("VLLM_HOST_IP", "127.0.0.1")
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .with_context(|| format!("{}", program.display()))?;
        let mut vllm = Self {
            child,
            client: Client::new(format!("127.0.0.1:{port}")),
            runtime,
        };
        let start = Instant::now();
        while !vllm.healthy() {
            if let Some(status) = vllm.child.try_wait()? {
                bail!("vllm serve ended with {status} before it was ready");
            }
            if start.elapsed() > START {
                bail!("vllm serve was not ready within {} s", START.as_secs());
            }
        }
        Ok(vllm)
    }

    fn healthy(&self) -> bool {
        self.runtime.block_on(async {
            tokio::time::sleep(Duration::from_secs(1)).await;
            matches!(self.client.get("/health").await, Ok(answer) if answer.status == 200)
        })
    }

    /// Tokens per second of one prompt, by the time to its only output token.
    pub(super) fn prefill(&self, tokens: usize) -> Result<f64> {
        let seconds = self.seconds(1, tokens, 1)?;
        Ok(tokens as f64 / seconds)
    }

    /// Tokens per second of `sequences` sequences together, 32 tokens each after 128: the time of 33
    /// tokens less that of one.
    pub(super) fn decode(&self, sequences: usize) -> Result<f64> {
        let first = self.seconds(sequences, 128, 1)?;
        let all = self.seconds(sequences, 128, 33)?;
        Ok((sequences * 32) as f64 / (all - first).max(1e-9))
    }

    fn seconds(&self, sequences: usize, tokens: usize, output: usize) -> Result<f64> {
        self.runtime.block_on(async {
            let start = Instant::now();
            let mut open = tokio::task::JoinSet::new();
            for sequence in 0..sequences {
                let client = self.client.clone();
                open.spawn(async move {
                    let body = json!({
                        "model": NAME, "prompt": prompt(tokens, sequence), "max_tokens": output,
                        "temperature": 0, "ignore_eos": true,
                    });
                    client.post("/v1/completions", &body).await
                });
            }
            while let Some(answer) = open.join_next().await {
                let answer = answer?.map_err(|error| anyhow::anyhow!("{error}"))?;
                if answer.status != 200 {
                    bail!("vLLM answered {}: {}", answer.status, answer.text());
                }
            }
            Ok(start.elapsed().as_secs_f64())
        })
    }
}

impl Drop for Vllm {
    fn drop(&mut self) {
        let pid = i32::try_from(self.child.id()).ok();
        if let Some(pid) = pid.and_then(rustix::process::Pid::from_raw) {
            // It ends its own processes when it is told to, not when it is killed.
            let _ = rustix::process::kill_process(pid, rustix::process::Signal::TERM);
        }
        let start = Instant::now();
        while start.elapsed() < Duration::from_secs(20) {
            if matches!(self.child.try_wait(), Ok(Some(_)) | Err(_)) {
                return;
            }
            self.runtime
                .block_on(tokio::time::sleep(Duration::from_millis(100)));
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
