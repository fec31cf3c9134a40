use crate::{Running, get, model, post, run, stderr, stdout, twinfer, until};
use rustix::process::Signal;
use std::io::{BufRead, BufReader, Read};
use std::net::TcpListener;
use std::path::Path;
use std::process::Stdio;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

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

/// Without `--once` it keeps serving, prints a command that works, and ends well on Ctrl-C.
#[test]
fn the_demo_keeps_serving_until_interrupted() {
    let mut command = twinfer();
    let mut demo = Running::start(
        command
            .args(["demo", "--port", "21912"])
            .stdout(Stdio::piped())
            .stderr(Stdio::null()),
    );
    let mut output = BufReader::new(demo.0.stdout.take().unwrap());
    let mut printed = String::new();
    let curl = loop {
        let mut line = String::new();
        assert!(
            output.read_line(&mut line).unwrap() > 0,
            "it ended:\n{printed}"
        );
        printed.push_str(&line);
        if line.trim_start().starts_with("curl ") {
            break line;
        }
    };
    assert!(printed.contains("All 6 answers are right"), "{printed}");
    assert!(
        curl.contains(" http://127.0.0.1:21912/v1/chat/completions "),
        "{curl}"
    );
    let body = curl
        .split(" -d '")
        .nth(1)
        .and_then(|rest| rest.trim_end().strip_suffix('\''))
        .unwrap();
    serde_json::from_str::<serde_json::Value>(body).unwrap();
    let (status, answer) = post(21912, "/v1/chat/completions", body).unwrap();
    assert!(
        status == 200 && answer.contains("cold") && answer.contains("[DONE]"),
        "{answer}"
    );
    demo.signal(Signal::INT);
    assert_eq!(demo.wait(Duration::from_secs(20)).code(), Some(0));
    assert_eq!(get(21912, "/health"), None);
}

/// Ctrl-C while it still starts or asks.
#[test]
fn an_interrupted_demo_leaves_nothing() {
    let mut demo = Running::start(
        twinfer()
            .args(["demo", "--once", "--port", "21916"])
            .stdout(Stdio::null())
            .stderr(Stdio::null()),
    );
    until(Duration::from_secs(20), "an instance listens", || {
        get(21917, "/health")
    });
    demo.signal(Signal::INT);
    let code = demo.wait(Duration::from_secs(20)).code();
    // It may have come to its end just before.
    assert!(matches!(code, Some(0 | 1)), "{code:?}");
    for port in 21916..21920 {
        TcpListener::bind(("127.0.0.1", port)).unwrap();
    }
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
