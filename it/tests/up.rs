//! `twinfer up`: one file, all processes, one end.

use rustix::process::{Pid, Signal, kill_process, test_kill_process};
use serde_json::json;
use std::collections::BTreeMap;
use std::net::TcpListener;
use std::time::{Duration, Instant};
use twinfer_it::{Client, Process, chat_body, completion_body, demo_model, free_port};

/// Ports of a deployment of one prefill and one decode instance.
struct Deployment {
    file: tempfile::NamedTempFile,
    ports: BTreeMap<&'static str, u16>,
}

impl Deployment {
    fn new() -> Self {
        let file = tempfile::NamedTempFile::new().expect("a file");
        let ports: BTreeMap<&'static str, u16> = ["router", "prefill", "decode", "kv"]
            .into_iter()
            .map(|name| (name, free_port()))
            .collect();
        let text = format!(
            "name: test\nmodel: {{path: \"{}\", name: demo}}\nnodes: [{{name: here, share-cores: true}}]\ninstances:\n\
             \x20 - {{name: p, role: prefill, threads: 1, port: {}, kv-port: {}}}\n\
             \x20 - {{name: d, role: decode, threads: 1, port: {}}}\nrouter: {{port: {}}}\n",
            demo_model().display(),
            ports["prefill"],
            ports["kv"],
            ports["decode"],
            ports["router"],
        );
        std::fs::write(file.path(), text).expect("written");
        Self { file, ports }
    }

    fn up(&self) -> Process {
        twinfer_it::binary();
        Process::start(&["up", &self.file.path().display().to_string()], &[])
    }

    fn client(&self) -> Client {
        Client::new(format!("127.0.0.1:{}", self.ports["router"]))
    }

    async fn ready(&self, process: &mut Process) {
        let end = Instant::now() + Duration::from_secs(60);
        while !self
            .client()
            .get("/ready")
            .await
            .is_ok_and(|answer| answer.status == 200)
        {
            assert!(
                process.ended().is_none() && Instant::now() < end,
                "{}",
                process.output()
            );
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }

    fn ports_are_free(&self) {
        for (name, port) in &self.ports {
            TcpListener::bind(("127.0.0.1", *port))
                .unwrap_or_else(|e| panic!("port {port} of {name}: {e}"));
        }
    }
}

/// Process ids of the children by the word of the command line that tells what each is.
fn children(parent: u32) -> BTreeMap<String, i32> {
    let mut found = BTreeMap::new();
    for entry in std::fs::read_dir("/proc").expect("proc").flatten() {
        let Ok(pid) = entry.file_name().to_string_lossy().parse::<i32>() else {
            continue;
        };
        let Ok(stat) = std::fs::read_to_string(format!("/proc/{pid}/stat")) else {
            continue;
        };
        let after_name = stat.rsplit_once(')').map_or("", |(_, rest)| rest);
        if after_name.split_whitespace().nth(1) != Some(&parent.to_string()) {
            continue;
        }
        let command = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        let arguments: Vec<String> = command
            .split(|&b| b == 0)
            .map(|part| String::from_utf8_lossy(part).into_owned())
            .collect();
        let name = if arguments.iter().any(|a| a == "router") {
            "router".to_owned()
        } else {
            arguments
                .iter()
                .find(|a| *a == "prefill" || *a == "decode")
                .cloned()
                .unwrap_or_default()
        };
        found.insert(name, pid);
    }
    found
}

fn alive(pid: i32) -> bool {
    Pid::from_raw(pid).is_some_and(|pid| test_kill_process(pid).is_ok())
}

async fn all_gone(pids: &BTreeMap<String, i32>) {
    let end = Instant::now() + Duration::from_secs(5);
    while let Some((name, pid)) = pids.iter().find(|(_, pid)| alive(**pid)) {
        assert!(Instant::now() < end, "{name} ({pid}) is an orphan");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// Ctrl-C drains and stops everything.
#[tokio::test]
async fn up_serves_and_stops_everything_on_interrupt() {
    let deployment = Deployment::new();
    let mut up = deployment.up();
    deployment.ready(&mut up).await;
    let answer = deployment
        .client()
        .post(
            "/v1/chat/completions",
            &chat_body("What is the capital of France?"),
        )
        .await;
    assert!(answer.expect("an answer").text().contains("Paris"));
    let pids = children(up.id());
    assert_eq!(
        pids.keys().map(String::as_str).collect::<Vec<_>>(),
        ["decode", "prefill", "router"]
    );
    for pid in pids.values() {
        let environment = std::fs::read(format!("/proc/{pid}/environ")).expect("environ");
        let command = std::fs::read(format!("/proc/{pid}/cmdline")).expect("cmdline");
        let key = environment
            .split(|&b| b == 0)
            .find_map(|entry| entry.strip_prefix(b"TWINFER_PEER_KEY="));
        let key = key.expect("a peer key in the environment");
        assert!(
            key.len() >= 16 && !command.windows(key.len()).any(|part| part == key),
            "the key is an argument"
        );
        let key = String::from_utf8_lossy(key).into_owned();
        assert!(!up.output().contains(&key), "the key is in the log");
    }
    up.signal(Signal::INT).expect("it runs");
    let status = up.wait(Duration::from_secs(20)).await;
    assert_eq!(status.code(), Some(0), "{}", up.output());
    all_gone(&pids).await;
    deployment.ports_are_free();
}

/// C8.3: whichever process is killed, streams end with an error and everything stops.
#[tokio::test]
async fn any_killed_process_ends_its_streams_and_the_whole_deployment() {
    for victim in ["prefill", "decode", "router"] {
        let deployment = Deployment::new();
        let mut up = deployment.up();
        deployment.ready(&mut up).await;
        let pids = children(up.id());
        let mut body = completion_body("Once upon a time", 3900);
        body["stream"] = json!(true);
        body["ignore_eos"] = json!(true);
        let mut streams = tokio::task::JoinSet::new();
        for _ in 0..4 {
            let mut stream = deployment
                .client()
                .stream("/v1/completions", &body)
                .await
                .expect("a stream");
            stream.piece().await.expect("a piece");
            streams.spawn(async move { stream.whole().await });
        }
        let start = Instant::now();
        kill_process(Pid::from_raw(pids[victim]).expect("a pid"), Signal::KILL).expect("killed");
        let status = up.wait(Duration::from_secs(10)).await;
        assert!(!status.success(), "{victim} was killed:\n{}", up.output());
        assert!(start.elapsed() < Duration::from_secs(10));
        let log = up.output();
        let name = match victim {
            "prefill" => "p",
            "decode" => "d",
            other => other,
        };
        assert!(
            log.contains(&format!("{name} ended with signal 9")),
            "{victim} is not named:\n{log}"
        );
        while let Some(stream) = streams.join_next().await {
            match stream.expect("a task") {
                // Without a router nobody can say more than a closed connection does.
                Err(_) => assert_eq!(victim, "router"),
                Ok(answer) => {
                    let (events, done) = answer.events();
                    assert!(
                        done && events.iter().any(|event| !event["error"].is_null()),
                        "{victim}: {events:?}"
                    );
                }
            }
        }
        all_gone(&pids).await;
        deployment.ports_are_free();
    }
}

/// C8.3: a process that dies while another still starts.
#[tokio::test]
async fn a_death_during_start_ends_the_start() {
    let deployment = Deployment::new();
    let mut up = deployment.up();
    let end = Instant::now() + Duration::from_secs(30);
    let pids = loop {
        let pids = children(up.id());
        if pids.contains_key("decode") {
            break pids;
        }
        assert!(
            Instant::now() < end && up.ended().is_none(),
            "{}",
            up.output()
        );
        tokio::time::sleep(Duration::from_millis(1)).await;
    };
    kill_process(Pid::from_raw(pids["decode"]).expect("a pid"), Signal::KILL).expect("killed");
    let status = up.wait(Duration::from_secs(10)).await;
    assert!(!status.success(), "{}", up.output());
    let log = up.output();
    assert!(log.contains("d ended with signal 9"), "{log}");
    all_gone(&pids).await;
    deployment.ports_are_free();
}

/// A port that somebody else has is named before anything starts.
#[tokio::test]
async fn a_taken_port_is_named_before_anything_starts() {
    let deployment = Deployment::new();
    let taken = TcpListener::bind(("127.0.0.1", deployment.ports["kv"])).expect("the port");
    let mut up = deployment.up();
    let status = up.wait(Duration::from_secs(10)).await;
    assert!(!status.success());
    assert!(
        up.output().contains(&deployment.ports["kv"].to_string()),
        "{}",
        up.output()
    );
    drop(taken);
    deployment.ports_are_free();
}
