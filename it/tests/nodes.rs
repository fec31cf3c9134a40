//! Ranks of one instance on several nodes, which are processes on loopback here; `cargo xtask topo` does it with
//! namespaces.

use rustix::process::Signal;
use serde_json::{Value, json};
use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::time::{Duration, Instant};
use twinfer_it::{Client, Instance, Process, completion_body, demo_model, free_port};

const LIMIT: Duration = Duration::from_secs(20);

/// Two ranks with the front, two on another node.
struct Two {
    front: Instance,
    node: Process,
}

impl Two {
    fn start(front: &[&str], node: &[&str], environment: &[(&str, &str)]) -> Self {
        let rpc = free_port().to_string();
        let common = [
            "--dp",
            "4",
            "--data-parallel-size-local",
            "2",
            "--data-parallel-address",
            "127.0.0.1",
            "--data-parallel-rpc-port",
            &rpc,
        ];
        let model = demo_model();
        let path = model.display().to_string();
        let mut arguments = vec!["serve", &path, "--threads", "1", "--headless"];
        arguments.extend(["--data-parallel-start-rank", "2"]);
        arguments.extend(common);
        arguments.extend(node);
        Self {
            node: Process::start(&arguments, environment),
            front: Instance::serve(&model, &[&common[..], front].concat(), environment),
        }
    }

    async fn ends(&mut self) -> (Option<i32>, Option<i32>) {
        let front = self.front.process.wait(LIMIT).await;
        let node = self.node.wait(LIMIT).await;
        (front.code(), node.code())
    }

    fn rank(&self, rank: u32) -> u32 {
        let wanted = format!("RANK={rank}");
        let parents = [self.front.process.id(), self.node.id()];
        let found = std::fs::read_dir("/proc")
            .expect("processes")
            .flatten()
            .find_map(|entry| {
                let process: u32 = entry.file_name().to_string_lossy().parse().ok()?;
                let stat = std::fs::read_to_string(entry.path().join("stat")).ok()?;
                let parent = stat.rsplit(')').next()?.split(' ').nth(2)?.parse().ok()?;
                let environment = std::fs::read(entry.path().join("environ")).ok()?;
                let mut variables = environment.split(|byte| *byte == 0);
                let is = variables.any(|variable| variable == wanted.as_bytes());
                (parents.contains(&parent) && is).then_some(process)
            });
        found.expect("the rank runs")
    }
}

fn signal(process: u32, signal: Signal) {
    let pid = rustix::process::Pid::from_raw(process.try_into().expect("a process id"));
    rustix::process::kill_process(pid.expect("a process id"), signal).expect("it runs");
}

async fn ask(client: &Client, rank: u32) -> Value {
    let mut body = completion_body("Once upon a time", 24);
    body["return_token_ids"] = json!(true);
    body["logprobs"] = json!(1);
    let client = client
        .clone()
        .with_header("x-data-parallel-rank", &rank.to_string());
    let answer = client
        .post("/v1/completions", &body)
        .await
        .expect("an answer");
    assert_eq!(answer.status, 200, "{}", answer.text());
    answer.json()["choices"].clone()
}

#[tokio::test(flavor = "multi_thread")]
async fn ranks_of_two_nodes_answer_as_one_rank_and_end_with_their_front() {
    let mut alone = Instance::serve(&demo_model(), &[], &[]);
    alone.ready().await;
    let expected = ask(&alone.client(), 0).await;
    let key = [("TWINFER_PEER_KEY", "a key of this test")];
    // A key has no spaces: both are refused before anything else.
    let mut refused = Two::start(&[], &[], &key);
    assert_eq!(refused.ends().await, (Some(64), Some(64)));
    let key = [("TWINFER_PEER_KEY", "a-key-of-this-test")];
    let mut two = Two::start(&["--drain-settle", "0"], &[], &key);
    two.front.ready().await;
    for rank in 0..4 {
        assert_eq!(
            ask(&two.front.client(), rank).await,
            expected,
            "rank {rank}"
        );
    }
    // Told alone, the node waits for its front.
    two.node.signal(Signal::TERM).expect("it runs");
    assert_eq!(ask(&two.front.client(), 3).await, expected);
    two.front.process.signal(Signal::TERM).expect("it runs");
    let ends = two.ends().await;
    let output = format!("{}{}", two.front.process.output(), two.node.output());
    assert_eq!(ends, (Some(0), Some(0)), "{output}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_rank_of_another_node_that_is_lost_is_named_everywhere_and_in_the_receipt() {
    for what in [Signal::KILL, Signal::STOP] {
        let receipts = tempfile::tempdir().expect("a folder");
        let folder = receipts.path().display().to_string();
        let mut two = Two::start(&["--receipts", &folder], &[], &[]);
        two.front.ready().await;
        let lost = two.rank(3);
        let mut body: Value = completion_body("Once upon a time", 3000);
        body["ignore_eos"] = json!(true);
        body["stream"] = json!(true);
        let client = two.front.client();
        let mut stream = client
            .stream("/v1/completions", &body)
            .await
            .expect("a stream");
        stream.piece().await.expect("a first piece");
        let begin = Instant::now();
        signal(lost, what);
        let mut text = String::new();
        while let Ok(Some(piece)) = stream.piece().await {
            text.push_str(&String::from_utf8_lossy(&piece));
        }
        assert!(
            text.contains("\"error\"") && text.contains("rank 3") && text.contains("node 1"),
            "{text}"
        );
        assert_eq!(two.ends().await, (Some(1), Some(1)));
        assert!(begin.elapsed() < Duration::from_secs(10));
        assert!(
            two.node.output().contains("rank 3"),
            "{}",
            two.node.output()
        );
        assert!(!std::path::Path::new(&format!("/proc/{lost}")).exists());
        let files: Vec<_> = receipts.path().read_dir().expect("it").flatten().collect();
        assert_eq!(files.len(), 1, "{files:?}");
        let metadata = files[0].metadata().expect("it is there");
        assert_eq!(metadata.permissions().mode() & 0o777, 0o600);
        let receipt = std::fs::read(files[0].path()).expect("a receipt");
        let receipt: Value = serde_json::from_slice(&receipt).expect("JSON");
        assert_eq!((&receipt["rank"], &receipt["node"]), (&json!(3), &json!(1)));
        assert!(receipt["step"].as_u64() > Some(0), "{receipt}");
        let phases = ["prefill", "decode", "mixed", "dummy"];
        assert!(
            phases.map(Value::from).contains(&receipt["phase"]),
            "{receipt}"
        );
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn nodes_that_do_not_belong_together_are_told_what_differs() {
    // The front goes on waiting for one that fits; the other one ends.
    let mut two = Two::start(&["--max-num-seqs", "8"], &["--max-num-seqs", "4"], &[]);
    let status = two.node.wait(LIMIT).await;
    assert_eq!(status.code(), Some(64));
    let output = two.node.output();
    let expected = "max-num-seqs is 8 on the first node and 4 on that of rank 2";
    assert!(output.contains(expected), "{output}");
    // Another key.
    let mut file = tempfile::NamedTempFile::new().expect("a file");
    file.write_all(b"other").expect("written");
    let mode = std::fs::Permissions::from_mode(0o600);
    file.as_file().set_permissions(mode).expect("a mode");
    let path = file.path().display().to_string();
    let key = [("TWINFER_PEER_KEY", "one")];
    let mut two = Two::start(&[], &["--peer-key-file", &path], &key);
    let status = two.node.wait(LIMIT).await;
    assert_eq!(status.code(), Some(64), "{}", two.node.output());
    assert!(two.node.output().contains("key"), "{}", two.node.output());
    // What a node inherits and does not fit.
    let mut two = Two::start(&[], &[], &[("WORLD_SIZE", "2")]);
    assert_eq!(two.front.process.wait(LIMIT).await.code(), Some(64));
    let output = two.front.process.output();
    let expected = "WORLD_SIZE is inherited with the value 2 (the number of nodes)";
    assert!(output.contains(expected), "{output}");
    two.node.kill();
}
