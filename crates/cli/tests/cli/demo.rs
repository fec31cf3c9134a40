use crate::{get, model, run, stderr, stdout, twinfer};
use std::io::Read;
use std::net::TcpListener;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Proxies in the environment are for other traffic (C1.9): nothing of ours goes there.
#[test]
fn the_demo_is_right_by_handoff_also_with_proxies_set() {
    let proxy = TcpListener::bind(("127.0.0.1", 0)).unwrap();
    let url = format!("http://{}", proxy.local_addr().unwrap());
    let connections = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&connections);
    std::thread::spawn(move || {
        for mut socket in proxy.incoming().flatten() {
            counted.fetch_add(1, Ordering::SeqCst);
            let _ = socket.read(&mut [0; 64]);
        }
    });
    let mut command = twinfer();
    for name in [
        "http_proxy",
        "https_proxy",
        "HTTP_PROXY",
        "HTTPS_PROXY",
        "ALL_PROXY",
        "all_proxy",
    ] {
        command.env(name, &url);
    }
    let output = run(command.args(["demo", "--once", "--port", "21860"]));
    let text = stdout(&output);
    assert_eq!(output.status.code(), Some(0), "{text}{}", stderr(&output));
    assert!(
        text.contains("A  The capital of France is Paris."),
        "{text}"
    );
    let answers: Vec<&str> = text
        .lines()
        .filter(|line| line.trim_start().starts_with("prefill -> decode: "))
        .collect();
    assert!(answers.len() >= 5, "{text}");
    for answer in answers {
        assert!(
            answer.contains(" 1 computed)") && answer.ends_with(" bytes of KV handed over"),
            "{answer}"
        );
        assert!(!answer.contains(" 0 bytes"), "{answer}");
    }
    assert_eq!(connections.load(Ordering::SeqCst), 0, "a proxy was used");
    assert_eq!(get(21860, "/health"), None, "the router still serves");
}

#[test]
fn a_taken_kv_port_is_named_and_ends_the_demo_with_1() {
    let taken = TcpListener::bind(("127.0.0.1", 21866)).unwrap();
    let output = run(twinfer().args(["demo", "--once", "--port", "21864"]));
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    assert!(
        stderr(&output)
            .contains("port 21866 on 127.0.0.1 (instance prefill, KV handoff) is in use"),
        "{output:?}"
    );
    drop(taken);
}

/// A model that answers otherwise must not pass.
#[test]
fn a_wrong_answer_is_named_and_ends_the_demo_with_1() {
    let folder = tempfile::tempdir().unwrap();
    copy(&model(), folder.path());
    let weights = folder.path().join("model.safetensors");
    let mut bytes = std::fs::read(&weights).unwrap();
    let header: usize =
        8 + usize::try_from(u64::from_le_bytes(bytes[..8].try_into().unwrap())).unwrap();
    // Half of all weights are zero now; the file is as long and as well-formed as before.
    for pair in bytes[header..].chunks_exact_mut(4) {
        pair[..2].fill(0);
    }
    std::fs::write(&weights, bytes).unwrap();
    let output = run(twinfer()
        .args(["demo", "--once", "--port", "21868", "--model"])
        .arg(folder.path()));
    let text = stderr(&output);
    assert_eq!(output.status.code(), Some(1), "{text}");
    assert!(
        text.contains("\"What is the capital of France?\": the answer is ")
            && text.contains("expected"),
        "{text}"
    );
}

fn copy(from: &Path, to: &Path) {
    for name in [
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ] {
        std::fs::copy(from.join(name), to.join(name)).unwrap();
    }
}
