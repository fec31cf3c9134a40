//! A cluster of four A3 nodes from recorded outputs, with one fault at a time: exactly that fault is named.

use super::*;
use std::path::Path;

const FILE: &str = "
engine: vllm-ascend
model: {path: /m, name: m}
nodes:
  - {name: a, host: 10.0.0.1, nic: eth0, kind: A3, devices: 4, pod: pod-1}
  - {name: b, host: 10.0.0.2, nic: eth0, kind: A3, devices: 4, pod: pod-1}
  - {name: c, host: 10.0.0.3, nic: eth0, kind: A3, devices: 4, pod: pod-1}
  - {name: d, host: 10.0.0.4, nic: eth0, kind: A3, devices: 4, pod: pod-1}
instances:
  - {name: e, role: both, ranks: {a: 4, b: 4, c: 4, d: 4}, tp: 1, port: 7100, rpc-port: 12321}
router: {program: none}
";

/// Good outputs, and those of the fault: node, words of the command, outcome.
struct Cluster {
    faults: Vec<(&'static str, &'static str, Outcome)>,
}

fn said(code: i32, text: &str) -> Outcome {
    Outcome {
        code: Some(code),
        timed_out: false,
        text: text.to_owned(),
    }
}

impl Runner for Cluster {
    fn run(&self, node: &str, host: &str, command: &[String]) -> Outcome {
        let line = command.join(" ");
        if let Some((.., outcome)) = self
            .faults
            .iter()
            .find(|(at, part, _)| *at == node && line.contains(part))
        {
            return outcome.clone();
        }
        let number = host.rsplit('.').next().unwrap_or("0").to_owned();
        let device = command
            .iter()
            .position(|word| word == "-i")
            .and_then(|at| command.get(at + 1))
            .cloned()
            .unwrap_or_default();
        let text = if line == "ip -o addr" {
            format!(
                "1: lo    inet 127.0.0.1/8 scope host lo\n2: eth0    inet {host}/24 scope global eth0\n"
            )
        } else if line.starts_with("ss ") {
            "LISTEN 0 128 0.0.0.0:22 0.0.0.0:*\n".to_owned()
        } else if line == "ls /dev" {
            "davinci0\ndavinci1\ndavinci2\ndavinci3\ndavinci_manager\ndevmm_svm\nhisi_hdc\nnull\n"
                .to_owned()
        } else if line.contains("hccn.conf") {
            "address_0=192.168.1.1\nnetmask_0=255.255.255.0\n".to_owned()
        } else if line == "npu-smi info" {
            "| No running processes found in NPU 0 |\n".to_owned()
        } else if line.contains("spod-info") {
            let chip = command.last().cloned().unwrap_or_default();
            format!(
                "\tSDID                           : {number}{device}{chip}\n\tSuper Pod Size                 : 384\n\tSuper Pod ID                   : 0\n\tServer Index                   : 4\n"
            )
        } else if line.contains("-link") {
            "link status: UP\n".to_owned()
        } else if line.contains("-net_health") {
            "net health status: Success\n".to_owned()
        } else if line.contains("-vnic") {
            format!(
                "vnic link status: UP\nvnic ipaddr: 192.168.{number}.{device}\nvnic netmask: 255.255.0.0\n"
            )
        } else if line.contains("-tls") {
            format!(
                "dev_id:{device}, tls switch[0](0:disable, 1:enable), tls preconfigured[1](0:non-preset, 1:preset)\n"
            )
        } else if line.contains("-hccs_ping") {
            "This pkt ping success!\n3 packets transmitted, 3 received, 0.00% packets loss\nCmd executed successfully!\n".to_owned()
        } else {
            panic!("no output of {line}");
        };
        said(0, &text)
    }
}

fn failures(text: &str, faults: Vec<(&'static str, &'static str, Outcome)>) -> Vec<String> {
    let deployment =
        EngineDeployment::parse("d", text, None, Path::new(".")).unwrap_or_else(|e| panic!("{e}"));
    let plan = crate::engines::resolve_engines(&deployment, &[]).unwrap_or_else(|e| panic!("{e}"));
    let checks = check(&deployment, &plan, &Cluster { faults });
    checks
        .failures()
        .map(|check| {
            let device = check
                .device
                .map_or(String::new(), |device| format!(" {device}"));
            format!(
                "{}{device} {} {}: {}",
                check.node, check.check, check.verdict, check.detail
            )
        })
        .collect()
}

#[test]
fn a_cluster_without_fault_is_ok() {
    assert_eq!(failures(FILE, Vec::new()), [] as [&str; 0]);
}

#[test]
fn one_fault_is_named_and_nothing_else() {
    let timeout = Outcome {
        code: None,
        timed_out: true,
        text: String::new(),
    };
    for (node, command, outcome, expected) in [
        (
            "b",
            "-i 2 -link",
            said(0, "link status: DOWN\n"),
            "b 2 link FAILED: link is DOWN",
        ),
        (
            "b",
            "-i 2 -link",
            timeout.clone(),
            "b 2 link TIMEOUT: no end in time",
        ),
        (
            "c",
            "-i 1 -net_health",
            said(0, ""),
            "c 1 health EMPTY: no output",
        ),
        (
            "c",
            "-i 1 -net_health",
            said(0, "net health status: Fault\n"),
            "c 1 health FAILED: net health is Fault",
        ),
        (
            "a",
            "-i 3 -tls",
            said(0, "dev_id:3, tls switch[1](0:disable, 1:enable)\n"),
            "a 3 TLS FAILED: the switch of a is not 0, as elsewhere",
        ),
        (
            "a",
            "-i 3 -tls",
            said(0, "gibberish\n"),
            "a 3 TLS UNKNOWN: gibberish",
        ),
        (
            "a",
            "-i 0 -link",
            said(13, "link status: UP\n"),
            "a 0 link FAILED: exit code 13",
        ),
        (
            "a",
            "-i 0 -link",
            said(0, "hccn_tool is busy, please try again.\n"),
            "a 0 link FAILED: hccn_tool is busy, please try again.",
        ),
        (
            "d",
            "ls /dev",
            said(
                0,
                "davinci0\ndavinci1\ndavinci3\ndavinci_manager\ndevmm_svm\nhisi_hdc\n",
            ),
            "d device files FAILED: /dev lacks davinci2",
        ),
        (
            "d",
            "hccn.conf",
            said(1, "cat: /etc/hccn.conf: No such file or directory\n"),
            "d hccn.conf FAILED: cat: /etc/hccn.conf: No such file or directory",
        ),
        (
            "d",
            "ip -o addr",
            said(0, "2: bond0    inet 10.0.0.4/24 scope global bond0\n"),
            "d interface FAILED: 10.0.0.4 is on bond0, not on eth0",
        ),
        (
            "a",
            "ss -Htln",
            said(0, "LISTEN 0 128 0.0.0.0:7100 0.0.0.0:*\n"),
            "a ports FAILED: port 7100 of the plan is taken",
        ),
        (
            "b",
            "npu-smi info",
            said(
                0,
                "|NPU Chip|Process id|Process name|Process memory(MB)|\n|0 0|4711|python3|3127|\n",
            ),
            "",
        ),
    ] {
        // `npu-smi info` is also the beginning of the pod's command: that one is named by both.
        if expected.is_empty() {
            let found = failures(FILE, vec![(node, command, outcome)]);
            assert!(
                found
                    .iter()
                    .any(|one| one == "b processes FAILED: process 4711 (python3) uses NPU 0"),
                "{found:#?}"
            );
            continue;
        }
        assert_eq!(failures(FILE, vec![(node, command, outcome)]), [expected]);
    }
}

#[test]
fn a_lossy_ping_is_named_and_the_pod_is_not_known_then() {
    let lossy = said(
        0,
        "This pkt send fail!\n3 packets transmitted, 1 received, 66.67% packets loss\nCmd executed successfully!\n",
    );
    let found = failures(
        FILE,
        vec![("b", "-i 1 -hccs_ping -g address 192.168.4.0", lossy)],
    );
    assert!(
        found.contains(
            &"b 1 ping FAILED: to d device 0 (192.168.4.0): 1 of 3 received, 66.67% lost"
                .to_owned()
        ),
        "{found:#?}"
    );
    assert!(
        found
            .iter()
            .all(|one| one.contains(" ping FAILED") || one.contains("pod UNKNOWN")),
        "{found:#?}"
    );
}

#[test]
fn an_equal_super_pod_id_alone_is_unknown_and_an_unequal_one_a_fault() {
    let unstated = FILE.replace(", pod: pod-1", "");
    let found = failures(&unstated, Vec::new());
    assert_eq!(found.len(), 16, "{found:#?}");
    assert!(
        found
            .iter()
            .all(|one| one.contains("pod UNKNOWN: Super Pod ID 0 everywhere")),
        "{found:#?}"
    );
    let other = said(
        0,
        "\tSDID                           : 999\n\tSuper Pod ID                   : 7\n",
    );
    assert_eq!(
        failures(FILE, vec![("c", "spod-info -i 1 -c 0", other)]),
        ["c 2 pod FAILED: Super Pod ID 7, elsewhere 0"]
    );
}
