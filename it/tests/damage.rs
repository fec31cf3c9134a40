//! KV that is damaged on its way between two processes.

use serde_json::json;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicUsize, Ordering};
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;
use twinfer_it::{Client, Instance, completion_body, demo_model};

const CLEAN: u8 = 0;
const FLIP: u8 = 1;
const DROP_BYTE: u8 = 2;
const CUT: u8 = 3;

/// Bytes from prefill to decode before the damage: behind handshake and headers, within the payload.
const DAMAGE_AT: usize = 20_000;

/// What happens to the next bytes towards decode, on whatever connection they come.
struct Damage {
    mode: AtomicU8,
    /// Bytes until it happens.
    left: AtomicUsize,
}

impl Damage {
    fn arm(&self, mode: u8) {
        self.left.store(DAMAGE_AT, Ordering::SeqCst);
        self.mode.store(mode, Ordering::SeqCst);
    }

    /// Place of the damage within the next `n` bytes, and which it is.
    fn next(&self, n: usize) -> Option<(usize, u8)> {
        let left = self.left.load(Ordering::SeqCst);
        self.left.store(left.saturating_sub(n), Ordering::SeqCst);
        (left < n && self.mode.load(Ordering::SeqCst) != CLEAN)
            .then(|| (left, self.mode.swap(CLEAN, Ordering::SeqCst)))
    }
}

/// Passes bytes on between decode and a prefill's KV port, and damages those towards decode.
async fn wire(listener: TcpListener, target: u16, damage: Arc<Damage>) {
    let mut connections = JoinSet::new();
    while let Ok((down, _)) = listener.accept().await {
        let damage = Arc::clone(&damage);
        connections.spawn(async move {
            let Ok(up) = TcpStream::connect(("127.0.0.1", target)).await else {
                return;
            };
            let (mut from_decode, mut to_decode) = down.into_split();
            let (mut from_prefill, mut to_prefill) = up.into_split();
            let there = async {
                let _ = tokio::io::copy(&mut from_decode, &mut to_prefill).await;
                let _ = to_prefill.shutdown().await;
            };
            let back = async {
                let mut buffer = vec![0; 8192];
                while let Ok(n) = from_prefill.read(&mut buffer).await {
                    if n == 0 {
                        break;
                    }
                    let mut piece = buffer[..n].to_vec();
                    match damage.next(n) {
                        Some((at, FLIP)) => piece[at] ^= 0x10,
                        Some((at, DROP_BYTE)) => drop(piece.remove(at)),
                        Some((at, CUT)) => {
                            let _ = to_decode.write_all(&piece[..at]).await;
                            break;
                        }
                        _ => {}
                    }
                    if to_decode.write_all(&piece).await.is_err() {
                        break;
                    }
                }
                let _ = to_decode.shutdown().await;
            };
            tokio::join!(there, back);
        });
    }
}

async fn handle(prefill: &Client, prompt: &[u32]) -> serde_json::Value {
    let mut body = completion_body(prompt.to_vec(), 1);
    body["kv_transfer_params"] = json!({"do_remote_decode": true});
    let answer = prefill
        .post("/v1/completions", &body)
        .await
        .expect("an answer");
    assert_eq!(answer.status, 200, "{}", answer.text());
    answer.json()["kv_transfer_params"].clone()
}

/// C2.5: flipped, missing and cut bytes under both policies.
#[tokio::test]
async fn damaged_kv_ends_in_an_error_or_in_the_same_text() {
    let prompt: Vec<u32> = (0..300).map(|i| 6 + (i * 37) % 1500).collect();
    for policy in ["fail", "recompute"] {
        let mut prefill = Instance::serve(
            &demo_model(),
            &["--role", "prefill", "--kv-lease", "5"],
            &[],
        );
        let mut decode = Instance::serve(
            &demo_model(),
            &[
                "--role",
                "decode",
                // All of it travels each time.
                "--no-enable-prefix-caching",
                "--kv-load-failure-policy",
                policy,
                "--kv-timeout",
                "2",
            ],
            &[],
        );
        prefill.ready().await;
        decode.ready().await;
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a listener");
        let port = listener.local_addr().expect("an address").port();
        let wire_damage = Arc::new(Damage {
            mode: AtomicU8::new(CLEAN),
            left: AtomicUsize::new(0),
        });
        let mut tasks = JoinSet::new();
        tasks.spawn(wire(listener, prefill.kv_port, Arc::clone(&wire_damage)));

        let mut expected = None;
        for damage in [CLEAN, FLIP, DROP_BYTE, CUT, CLEAN] {
            wire_damage.arm(damage);
            let mut params = handle(&prefill.client(), &prompt).await;
            params["remote_port"] = json!(port);
            let mut body = completion_body(prompt.clone(), 12);
            body["kv_transfer_params"] = params;
            body["return_token_ids"] = json!(true);
            let before = decode
                .metrics()
                .await
                .sum("twinfer_kv_load_failures_total", &[]);
            let answer = decode
                .client()
                .post("/v1/completions", &body)
                .await
                .expect("an answer");
            let failures = decode
                .metrics()
                .await
                .sum("twinfer_kv_load_failures_total", &[])
                - before;
            assert_eq!(
                failures,
                if damage == CLEAN { 0.0 } else { 1.0 },
                "{policy} {damage}: {}",
                answer.text()
            );
            if damage == CLEAN || policy == "recompute" {
                assert_eq!(answer.status, 200, "{policy} {damage}: {}", answer.text());
                let ids = answer.json()["choices"][0]["token_ids"].clone();
                assert!(ids.is_array());
                assert_eq!(
                    expected.get_or_insert(ids.clone()),
                    &ids,
                    "{policy} {damage}"
                );
            } else {
                assert_eq!(answer.status, 502, "{policy} {damage}: {}", answer.text());
                assert!(answer.error_code().starts_with("kv_"), "{}", answer.text());
            }
            decode.kv_idle(Duration::from_secs(2)).await;
        }
        prefill.kv_idle(Duration::from_secs(6)).await;
        tasks.abort_all();
    }
}
