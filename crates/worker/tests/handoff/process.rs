//! Two processes, one of which is killed.

use crate::proxy::Proxy;
use crate::support::{Decode, Fetch as _, Options, Prefill, eventually, prompt, redirect, seed};
use std::process::Stdio;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::process::{Child, Command};
use tokio::time::{Instant, timeout};
use twinfer_engine::KvGeometry;
use twinfer_protocol::{ErrorKind, KvTransferParams};

/// Says to a process of this test that it is the prefill side, and on which port.
const PORT_VARIABLE: &str = "HANDOFF_TEST_PREFILL_PORT";
const TOKENS: usize = 512 * 64;

/// 512 MiB: long enough to be killed in the middle.
fn options() -> Options {
    let geometry = KvGeometry {
        layers: 8,
        width: 1024,
        value_bytes: 2,
        block_size: 64,
    };
    Options {
        geometry,
        blocks: 512,
        timeout: Duration::from_secs(5),
        ..Options::default()
    }
}

fn blocks() -> Vec<u32> {
    (0..512).collect()
}

/// The prefill side of the test below, in a process of its own: prints its parameters, then serves
/// until it is killed.
async fn prefill(port: u16) {
    let epoch = u64::from(std::process::id());
    let prefill = Prefill::start(&Options {
        port,
        epoch,
        ..options()
    })
    .await;
    let prompt = prompt(1, TOKENS);
    // Both start with the same blocks, and those hold the same.
    prefill.memory.fill(&[0, 1], 65, seed(&prompt[..65]));
    let small = prefill.hold_filled(&prompt[..65], &[0, 1]).await;
    let large = prefill.hold_filled(&prompt, &blocks()).await;
    for params in [small, large] {
        println!("\nparams {}", serde_json::to_string(&params).unwrap());
    }
    std::future::pending().await
}

async fn start(port: u16) -> (Child, Vec<KvTransferParams>) {
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args([
            "--exact",
            "process::a_prefill_process_is_killed_in_the_middle_and_restarted",
            "--nocapture",
        ])
        .env(PORT_VARIABLE, port.to_string())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .kill_on_drop(true)
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let mut params = Vec::new();
    while params.len() < 2 {
        let line = timeout(Duration::from_secs(20), lines.next_line())
            .await
            .expect("it starts in time");
        let line = line.unwrap().expect("it starts");
        if let Some(json) = line.strip_prefix("params ") {
            params.push(serde_json::from_str(json).unwrap());
        }
    }
    (child, params)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_prefill_process_is_killed_in_the_middle_and_restarted() {
    if let Ok(port) = std::env::var(PORT_VARIABLE) {
        return prefill(port.parse().unwrap()).await;
    }
    let decode = Decode::start(&options());
    let prompt = prompt(1, TOKENS);
    let (mut child, params) = start(0).await;
    let port = params[1].remote_port.unwrap();

    let targets = blocks();
    // Counts what has come.
    let proxy = Proxy::start(([127, 0, 0, 1], port).into(), Vec::new(), Vec::new()).await;
    let large = redirect(&params[1], proxy.addr);
    let fetch = decode
        .importer
        .fetch(&large, &prompt, &targets, TOKENS as u32);
    let kill = async {
        eventually("some of it has come", || {
            proxy.carried.load(Relaxed) > 10_000_000
        })
        .await;
        child.start_kill().unwrap();
        child.wait().await.unwrap();
        Instant::now()
    };
    let (fetched, killed) = tokio::join!(fetch, kill);
    let error = fetched.expect_err("it was killed before the end");
    assert_eq!(error.kind, ErrorKind::KvTransfer, "{error}");
    assert!(
        killed.elapsed() < Duration::from_secs(5),
        "seen at once, not by the timeout"
    );
    decode.is_idle().await;

    let (mut child, again) = start(port).await;
    assert_eq!(again[0].remote_port, Some(port));
    let error = decode
        .importer
        .fetch(&params[0], &prompt, &targets, 64)
        .await
        .unwrap_err();
    assert_eq!(
        error.kind,
        ErrorKind::KvStale,
        "a handle of the killed incarnation: {error}"
    );
    decode
        .importer
        .fetch(&again[0], &prompt[..65], &targets, 64)
        .await
        .unwrap();
    assert!(decode.memory.holds(&targets, 64, seed(&prompt[..65])));
    decode.is_idle().await;
    child.kill().await.unwrap();
}
