//! Ranks as processes of their own, each this program again, which has its own `main` for that.
#![expect(clippy::unwrap_used, reason = "a failed test ends here")]

#[expect(dead_code, reason = "tests of threads look at more of an outcome")]
#[path = "../ranks/answers.rs"]
mod answers;

use answers::{Answer, Case, FORCED, Outcome, assert_equal};
use libtest_mimic::{Arguments, Trial};
use std::io::Read;
use std::net::Ipv4Addr;
use std::process::{Child, Command, Stdio};
use std::time::Duration;
use twinfer_comm::{
    Identity, JoinPlan, Options, PeerKey, Placement, Topology, join, start_up_test,
};
use twinfer_config::MoeComm;
use twinfer_engine::exchange::SentBytes;
use twinfer_protocol::{Epoch, Fingerprint};
use twinfer_sys::set_parent_death_signal;

const VARIABLE: &str = "TWINFER_WORKER_TEST_RANK";
const EPOCH: Epoch = Epoch(9);

const CASES: [Case; 3] = [
    Case::QWEN,
    Case {
        model: "deepseek_v3",
        quantize: true,
        drafts: 2,
        ..Case::QWEN
    },
    Case {
        quantize: true,
        comm: MoeComm::AllGather,
        eplb: FORCED,
        ..Case::QWEN
    },
];

/// Two nodes of one rank each over TCP, or one node of two ranks with shared memory.
fn topology(nodes: u32) -> Topology {
    Topology::new(if nodes == 2 { &[1, 1] } else { &[2] }).unwrap()
}

fn main() {
    if let Ok(orders) = std::env::var(VARIABLE) {
        return be_rank(&orders);
    }
    let test = Trial::test("two_processes_give_the_answers_of_one_rank", || {
        two_processes_give_the_answers_of_one_rank();
        Ok(())
    });
    libtest_mimic::run(&Arguments::from_args(), vec![test]).exit();
}

/// What this program does as a rank.
fn be_rank(orders: &str) {
    let numbers: Vec<u32> = orders.split(' ').map(|n| n.parse().unwrap()).collect();
    let [case, nodes, parent] = numbers[..] else {
        panic!("{orders}");
    };
    set_parent_death_signal(parent).unwrap();
    let placement = Placement::from_environment(|name| std::env::var(name).ok());
    let placement = placement.unwrap().unwrap();
    let plan = JoinPlan {
        identity: Identity {
            instance: "test".to_owned(),
            epoch: EPOCH,
            version: env!("CARGO_PKG_VERSION").to_owned(),
            fingerprint: Fingerprint::default(),
        },
        topology: topology(nodes),
        rank: placement.rank,
        master_addr: placement.master_addr,
        master_port: placement.master_port,
        listen: Ipv4Addr::LOCALHOST.into(),
        port: 0,
        advertise: None,
        key: PeerKey::new(b"peer key of the test"),
        share_memory: true,
        limit: Duration::from_secs(20),
        options: Options::default(),
    };
    let mut group = join(&plan).unwrap().group;
    start_up_test(&mut group, EPOCH).unwrap();
    let outcome = CASES[case as usize].as_rank(group).unwrap();
    let fingerprint = serde_json::to_string(&outcome.fingerprint).unwrap();
    println!("fingerprint {fingerprint}");
    println!("steps {}", outcome.steps);
    for (id, tokens) in outcome.answers {
        let tokens: Vec<String> = tokens
            .iter()
            .map(|(id, bits)| format!("{id}:{bits}"))
            .collect();
        println!("answer {id} {}", tokens.join(" "));
    }
}

fn start(case: usize, nodes: u32, rank: u32, port: u16) -> Child {
    let placement = Placement::planned(&topology(nodes), rank, "127.0.0.1", port);
    Command::new(std::env::current_exe().unwrap())
        .env(VARIABLE, format!("{case} {nodes} {}", std::process::id()))
        .envs(placement.variables())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap()
}

/// What a rank's process told before it ended well.
fn outcome(mut child: Child) -> Outcome {
    let mut text = String::new();
    child
        .stdout
        .take()
        .unwrap()
        .read_to_string(&mut text)
        .unwrap();
    assert!(child.wait().unwrap().success(), "{text}");
    let line = |name: &str| {
        text.lines()
            .find_map(|line| line.strip_prefix(name))
            .unwrap()
    };
    let answer = |line: &str| -> Answer {
        let (id, tokens) = line.split_once(' ').unwrap();
        let pair = |pair: &str| {
            let (id, bits) = pair.split_once(':').unwrap();
            (id.parse().unwrap(), bits.parse().unwrap())
        };
        (id.parse().unwrap(), tokens.split(' ').map(pair).collect())
    };
    Outcome {
        answers: text
            .lines()
            .filter_map(|line| line.strip_prefix("answer "))
            .map(answer)
            .collect(),
        fingerprint: serde_json::from_str(line("fingerprint ")).unwrap(),
        file_bytes: 0,
        weight_bytes: 0,
        workspace_bytes: 0,
        steps: line("steps ").parse().unwrap(),
        sent: SentBytes::default(),
    }
}

fn two_processes_give_the_answers_of_one_rank() {
    for (index, case) in CASES.iter().enumerate() {
        let alone = case.alone();
        for nodes in [1, 2] {
            let port = 21_360 + 2 * index as u16 + nodes as u16;
            let ranks: Vec<Child> = (0..2).map(|rank| start(index, nodes, rank, port)).collect();
            let outcomes: Vec<Outcome> = ranks.into_iter().map(outcome).collect();
            for rank in &outcomes {
                assert!(!rank.answers.is_empty());
            }
            assert_equal(&alone, &outcomes, &format!("{case:?} on {nodes} nodes"));
        }
    }
}
