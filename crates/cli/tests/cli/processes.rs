use crate::{Running, get, model, post_with_key, run, stderr, twinfer, until};
use rustix::process::Signal;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

const SOON: Duration = Duration::from_secs(30);

/// A deployment of one prefill and one decode instance on four ports from `port` on.
fn deployment(folder: &Path, port: u16) -> PathBuf {
    let file = folder.join("deploy.yaml");
    let text = format!(
        "model: {{path: \"{}\", name: demo}}\nnodes: [{{name: here, share-cores: true}}]\ninstances:\n  - {{name: p, role: prefill, threads: 1, \
         kv-cache-memory: 16MiB, port: {}, kv-port: {}}}\n  - {{name: d, role: decode, threads: 1, kv-cache-memory: 16MiB, port: {}}}\nrouter: {{port: \
         {port}, drain-settle: 0}}\n",
        model().display(),
        port + 1,
        port + 2,
        port + 3
    );
    std::fs::write(&file, text).unwrap();
    file
}

fn ports_are_free(port: u16) {
    for port in port..port + 4 {
        until(SOON, "the port is free", || {
            TcpListener::bind(("127.0.0.1", port)).ok()
        });
    }
}

/// Whoever kills the supervisor kills its children: the kernel does it.
#[test]
fn children_end_with_a_killed_supervisor() {
    let folder = tempfile::tempdir().unwrap();
    let file = deployment(folder.path(), 21872);
    let mut up = Running::start(
        twinfer()
            .arg("up")
            .arg(&file)
            .stdout(Stdio::null())
            .stderr(Stdio::null()),
    );
    until(SOON, "the router is ready", || {
        get(21872, "/ready").filter(|(status, _)| *status == 200)
    });
    up.signal(Signal::KILL);
    up.wait(SOON);
    ports_are_free(21872);
}

/// Log lines carry the instance's name; with `--log-format json` every line is a JSON object.
#[test]
fn log_lines_tell_whose_they_are() {
    let folder = tempfile::tempdir().unwrap();
    let file = deployment(folder.path(), 21876);
    for format in ["text", "json"] {
        let log = folder.path().join(format!("{format}.log"));
        let mut command = twinfer();
        command
            .arg("up")
            .arg(&file)
            .args(["--log-format", format])
            .stdout(Stdio::null());
        let mut up = Running::start(command.stderr(std::fs::File::create(&log).unwrap()));
        until(SOON, "the router is ready", || {
            get(21876, "/ready").filter(|(status, _)| *status == 200)
        });
        up.signal(Signal::TERM);
        assert_eq!(
            up.wait(SOON).code(),
            Some(0),
            "{}",
            std::fs::read_to_string(&log).unwrap()
        );
        let text = std::fs::read_to_string(&log).unwrap();
        for name in ["p", "d", "router"] {
            let of_it = |line: &str| match format {
                "text" => line.starts_with(&format!("{name:6} | ")),
                _ => serde_json::from_str::<serde_json::Value>(line)
                    .is_ok_and(|line| line["instance"] == name),
            };
            assert!(
                text.lines().any(of_it),
                "{format}: no line of {name} in\n{text}"
            );
        }
        if format == "json" {
            for line in text.lines() {
                serde_json::from_str::<serde_json::Value>(line)
                    .unwrap_or_else(|error| panic!("{error}: {line}"));
            }
        }
        ports_are_free(21876);
    }
}

#[test]
fn taken_ports_exit_69_before_anything_starts() {
    let folder = tempfile::tempdir().unwrap();
    let file = deployment(folder.path(), 21880);
    let taken = [21881, 21883].map(|port| TcpListener::bind(("127.0.0.1", port)).unwrap());
    let output = run(twinfer().arg("up").arg(&file));
    assert_eq!(output.status.code(), Some(69), "{output:?}");
    let text = stderr(&output);
    assert!(
        text.contains("port 21881 on 127.0.0.1 (instance p, HTTP) is in use"),
        "{text}"
    );
    assert!(
        text.contains("port 21883 on 127.0.0.1 (instance d, HTTP) is in use"),
        "{text}"
    );
    drop(taken);
    for command in [
        &[
            "router",
            "--worker",
            "http://127.0.0.1:9",
            "--port",
            "21884",
        ][..],
        &["fake", "--port", "21884"],
    ] {
        let taken = TcpListener::bind(("127.0.0.1", 21884)).unwrap();
        let output = run(twinfer().args(command));
        assert_eq!(output.status.code(), Some(69), "{command:?}: {output:?}");
        assert!(stderr(&output).contains("21884"), "{output:?}");
        drop(taken);
    }
    let taken = TcpListener::bind(("127.0.0.1", 21885)).unwrap();
    let output = run(twinfer().arg("serve").arg(model()).args([
        "--port",
        "21886",
        "--role",
        "prefill",
        "--kv-port",
        "21885",
    ]));
    assert_eq!(output.status.code(), Some(69), "{output:?}");
    assert!(stderr(&output).contains("21885"), "{output:?}");
    drop(taken);
}

/// A model that an instance refuses: `up` ends with that instance's reason and exit code.
#[test]
fn an_instance_that_refuses_its_model_is_quoted() {
    let folder = tempfile::tempdir().unwrap();
    let broken = folder.path().join("broken");
    std::fs::create_dir(&broken).unwrap();
    std::fs::copy(model().join("config.json"), broken.join("config.json")).unwrap();
    let file = deployment(folder.path(), 21888);
    let text = std::fs::read_to_string(&file)
        .unwrap()
        .replace(&model().display().to_string(), "broken");
    std::fs::write(&file, text).unwrap();
    let output = run(twinfer().arg("up").arg(&file));
    let text = stderr(&output);
    assert_eq!(output.status.code(), Some(64), "{text}");
    assert!(
        text.contains("ended with exit code 64 before everything was ready"),
        "{text}"
    );
    // The reason stands where the instance said it, and nowhere else.
    assert!(!text.contains("last lines of"), "{text}");
    assert!(
        text.contains("safetensors") || text.contains("tokenizer"),
        "{text}"
    );
    ports_are_free(21888);
}

#[test]
fn a_fake_instance_answers_and_ends_on_a_signal() {
    let mut fake = Running::start(
        twinfer()
            .args(["fake", "--role", "decode", "--port", "21892"])
            .stdout(Stdio::null())
            .stderr(Stdio::null()),
    );
    until(SOON, "it is ready", || {
        get(21892, "/ready").filter(|(status, _)| *status == 200)
    });
    fake.signal(Signal::TERM);
    assert_eq!(fake.wait(SOON).code(), Some(0));
}

/// Instances that cannot be paired are told in the log, by the setting that differs.
#[test]
fn a_router_tells_which_instances_cannot_be_paired() {
    let folder = tempfile::tempdir().unwrap();
    let log = folder.path().join("log");
    let fake = |role: &str, port: &str, block_size: &str| {
        Running::start(
            twinfer()
                .args([
                    "fake",
                    "--dialect",
                    "twinfer",
                    "--role",
                    role,
                    "--port",
                    port,
                ])
                .args(["--block-size", block_size])
                .stdout(Stdio::null())
                .stderr(Stdio::null()),
        )
    };
    let _prefill = fake("prefill", "21893", "16");
    let _decode = fake("decode", "21894", "32");
    let _router = Running::start(
        twinfer()
            .args(["router", "--port", "21895", "--health-interval", "0.1"])
            .args(["--prefill", "http://127.0.0.1:21893"])
            .args(["--decode", "http://127.0.0.1:21894"])
            .stdout(Stdio::null())
            .stderr(std::fs::File::create(&log).unwrap()),
    );
    let told = || {
        let text = std::fs::read_to_string(&log).unwrap();
        let lines = text
            .lines()
            .filter(|line| line.contains("cannot exchange KV"));
        lines.map(str::to_owned).collect::<Vec<_>>()
    };
    until(SOON, "the log names the pair", || told().first().cloned());
    let (status, body) = get(21895, "/ready").unwrap();
    assert_eq!(status, 503, "{body}");
    assert!(body.contains("block_size (16 and 32)"), "{body}");
    let told = told();
    assert!(told[0].contains("block_size (16 and 32)"), "{told:?}");
    assert_eq!(told.len(), 1, "{told:?}");
}

/// Keys come from the environment; they stand in no argument and no log line (C9.12).
#[test]
fn keys_stand_in_no_argument_and_no_log() {
    let folder = tempfile::tempdir().unwrap();
    let file = deployment(folder.path(), 21896);
    let log = folder.path().join("log");
    let keys = ["peer-key-of-this-test", "client-key-of-this-test"];
    let mut command = twinfer();
    command
        .arg("up")
        .arg(&file)
        .env("TWINFER_PEER_KEY", keys[0])
        .env("TWINFER_API_KEY", keys[1])
        .env("RUST_LOG", "debug");
    let mut up = Running::start(
        command
            .stdout(Stdio::null())
            .stderr(std::fs::File::create(&log).unwrap()),
    );
    until(SOON, "the router is ready", || {
        get(21896, "/ready").filter(|(status, _)| *status == 200)
    });
    let (status, body) = get(21896, "/v1/models").unwrap();
    assert_eq!(status, 401, "{body}");
    // The router shows its own key to the instances, not the client's.
    let question = r#"{"model":"demo","messages":[{"role":"user","content":"What is the opposite of hot?"}],"temperature":0}"#;
    let (status, body) = post_with_key(21896, "/v1/chat/completions", question, keys[1]).unwrap();
    assert!(status == 200 && body.contains("cold"), "{status} {body}");
    let pids = children(up.0.id());
    assert_eq!(pids.len(), 3);
    for pid in pids {
        let line = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap();
        let line = String::from_utf8_lossy(&line).into_owned();
        assert!(keys.iter().all(|key| !line.contains(key)), "{line}");
    }
    up.signal(Signal::TERM);
    up.wait(SOON);
    let text = std::fs::read_to_string(&log).unwrap();
    assert!(
        !text.is_empty() && keys.iter().all(|key| !text.contains(key)),
        "{text}"
    );
}

/// A key that is meant for the public proxies may be one for another service: processes do not send it to each other.
#[test]
fn a_foreign_key_in_the_environment_is_not_passed_on() {
    let folder = tempfile::tempdir().unwrap();
    let file = deployment(folder.path(), 21900);
    let mut command = twinfer();
    command
        .arg("up")
        .arg(&file)
        .env("OPENAI_API_KEY", "key-of-another-service");
    let mut up = Running::start(command.stdout(Stdio::null()).stderr(Stdio::null()));
    until(SOON, "the router is ready", || {
        get(21900, "/ready").filter(|(status, _)| *status == 200)
    });
    let mut seen = 0;
    for pid in children(up.0.id()) {
        let environment = std::fs::read(format!("/proc/{pid}/environ")).unwrap();
        let has = |name: &str| {
            environment
                .split(|byte| *byte == 0)
                .any(|entry| entry.starts_with(name.as_bytes()))
        };
        assert!(has("TWINFER_PEER_KEY=") && !has("OPENAI_API_KEY="));
        seen += 1;
    }
    assert_eq!(seen, 3);
    up.signal(Signal::TERM);
    assert_eq!(up.wait(SOON).code(), Some(0));
}

/// Process ids of the children of a process.
fn children(parent: u32) -> Vec<u32> {
    let parent = parent.to_string();
    let of_parent = |pid: &u32| {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        stat.rsplit_once(')')
            .and_then(|(_, rest)| rest.split_whitespace().nth(1))
            == Some(parent.as_str())
    };
    std::fs::read_dir("/proc")
        .unwrap()
        .flatten()
        .filter_map(|entry| entry.file_name().to_str()?.parse().ok())
        .filter(of_parent)
        .collect()
}

#[test]
fn too_few_files_are_told_with_the_number_that_is_needed() {
    let binary = env!("CARGO_BIN_EXE_twinfer");
    for command in [
        format!("{binary} router --worker http://127.0.0.1:9 --port 21887 --max-inflight 10"),
        format!("{binary} serve {} --port 21887", model().display()),
    ] {
        let mut shell = Command::new("sh");
        shell
            .args(["-c", &format!("ulimit -n 60; exec {command}")])
            .stdin(Stdio::null());
        let output = run(&mut shell);
        assert_eq!(output.status.code(), Some(69), "{output:?}");
        let text = stderr(&output);
        assert!(
            text.contains("60 files may be open (ulimit -n); at least 128 are needed"),
            "{text}"
        );
    }
}
