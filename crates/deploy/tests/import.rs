//! Scripts to a deployment file and back: the plan of what was imported is what the scripts did.

use std::path::{Path, PathBuf};
use twinfer_deploy::engines::{
    EngineDeployment, EnginePlan, Process, RenderOptions, import, render, resolve_engines,
};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn plan_of(text: &str) -> EnginePlan {
    let deployment = EngineDeployment::parse("imported.yaml", text, None, Path::new("."))
        .unwrap_or_else(|e| panic!("{e}\n{text}"));
    resolve_engines(&deployment, &[]).unwrap_or_else(|e| panic!("{e}\n{text}"))
}

/// Flags with their values, in no order; objects as JSON.
fn sorted(process: &Process) -> Vec<String> {
    let mut list: Vec<String> = process
        .settings
        .iter()
        .map(|(key, value)| match value {
            serde_json::Value::Object(map) => {
                let sorted: std::collections::BTreeMap<_, _> = map.iter().collect();
                format!("{key} {}", serde_json::to_string(&sorted).expect("JSON"))
            }
            serde_json::Value::String(text) => format!("{key} {text}"),
            other => format!("{key} {other}"),
        })
        .collect();
    list.sort();
    list
}

#[test]
fn rendered_scripts_come_back_as_the_same_processes() {
    for name in ["001-2p1d", "001-2p1d-layerwise"] {
        let folder = root().join(format!("examples/seed-{name}"));
        let text = std::fs::read_to_string(folder.join("deploy.yaml")).expect("a file");
        let deployment =
            EngineDeployment::parse("d", &text, None, &folder).unwrap_or_else(|e| panic!("{e}"));
        let plan = resolve_engines(&deployment, &[]).unwrap_or_else(|e| panic!("{e}"));
        let files = render(
            &deployment,
            &plan,
            &RenderOptions {
                folder: "/opt".to_owned(),
            },
        );
        let scripts: Vec<(String, String)> = plan
            .processes
            .iter()
            .map(|process| {
                let path = format!("{}/{}.sh", process.node, process.name);
                let file = files
                    .iter()
                    .find(|file| file.path == path)
                    .expect("a script");
                (path, file.text.clone())
            })
            .collect();
        let imported = import(&scripts).expect("a deployment");
        assert!(
            imported.not_understood.is_empty(),
            "{:#?}",
            imported.not_understood
        );
        let back = plan_of(&imported.text);
        assert_eq!(back.processes.len(), plan.processes.len());
        for (old, new) in plan.processes.iter().zip(&back.processes) {
            assert_eq!(sorted(old), sorted(new), "{name} {}", old.name);
            let environment = |process: &Process| {
                let mut list = process.environment.clone();
                list.sort();
                list
            };
            assert_eq!(environment(old), environment(new), "{name} {}", old.name);
            assert_eq!(
                (old.first_rank, &old.devices, old.port),
                (new.first_rank, &new.devices, new.port)
            );
        }
    }
}

const TEMPLATE: &str = r#"
nic_name="eth0"  # network card name
local_ip="LOCAL"
export HCCL_IF_IP=$local_ip
export GLOO_SOCKET_IFNAME=$nic_name
export OMP_NUM_THREADS=10
export HCCL_OP_EXPANSION_MODE="AIV"
export ASCEND_RT_VISIBLE_DEVICES=$1
vllm serve /path_to_weight/DeepSeek-r1_w8a8_mtp \
  --host 0.0.0.0 \
  --port $2 \
  --data-parallel-size $3 \
  --data-parallel-rank $4 \
  --data-parallel-address $5 \
  --data-parallel-rpc-port $6 \
  --tensor-parallel-size $7 \
  --no-enable-prefix-caching \
  --speculative-config '{"num_speculative_tokens": 1, "method":"deepseek_mtp"}' \
  --kv-transfer-config \
  '{"kv_connector": "MooncakeConnectorV1",
  "kv_role": "ROLE",
  "kv_port": "PORT",
  "engine_id": "ID"
  }'
taskset -c 0-15 something
"#;

#[test]
fn templates_and_their_launch_lines_become_instances_over_nodes() {
    let script = |local: &str, role: &str, port: &str, id: &str| {
        let text = TEMPLATE
            .replace("LOCAL", local)
            .replace("ROLE", role)
            .replace("PORT", port)
            .replace("\"ID\"", &format!("\"{id}\""));
        (format!("{local}.sh"), text)
    };
    let launch = "\
# on 192.0.0.1
python launch_online_dp.py --dp-size 2 --tp-size 8 --dp-size-local 2 --dp-rank-start 0 --dp-address 192.0.0.1 --dp-rpc-port 12321 --vllm-start-port 7100
# on 192.0.0.3
python launch_online_dp.py --dp-size 32 --tp-size 1 --dp-size-local 16 --dp-rank-start 0 --dp-address 192.0.0.3 --dp-rpc-port 12321 --vllm-start-port 7100
# on 192.0.0.4
python launch_online_dp.py --dp-size 32 --tp-size 1 --dp-size-local 16 --dp-rank-start 16 --dp-address 192.0.0.3 --dp-rpc-port 12321 --vllm-start-port 7100
";
    let scripts = vec![
        script("192.0.0.1", "kv_producer", "36000", "0"),
        script("192.0.0.3", "kv_consumer", "36200", "2"),
        script("192.0.0.4", "kv_consumer", "36200", "2"),
        ("launch.sh".to_owned(), launch.to_owned()),
    ];
    let imported = import(&scripts).expect("a deployment");
    let lost: Vec<(&str, usize)> = imported
        .not_understood
        .iter()
        .map(|one| (one.file.as_str(), one.line))
        .collect();
    assert_eq!(
        lost,
        [
            ("192.0.0.1.sh", 25),
            ("192.0.0.3.sh", 25),
            ("192.0.0.4.sh", 25)
        ]
    );
    let plan = plan_of(&imported.text);
    assert_eq!(plan.instances.len(), 2, "{}", imported.text);
    let decode = &plan.instances[1];
    assert_eq!(
        (
            decode.dp,
            decode.tp,
            decode.ranks.len(),
            decode.ranks[1].first
        ),
        (32, 1, 2, 16)
    );
    let last = plan.processes.last().expect("processes");
    assert_eq!(
        (last.port, last.first_rank, last.devices.as_slice()),
        (Some(7115), 31, &[15][..])
    );
    assert!(
        last.argv
            .iter()
            .any(|word| word == "--no-enable-prefix-caching"),
        "{:?}",
        last.argv
    );
    assert_eq!(last.variable("HCCL_OP_EXPANSION_MODE"), Some("AIV"));
}

#[test]
fn a_docker_run_becomes_the_container() {
    let text = "\
export IMAGE=registry.example/ascend/vllm-ascend:v0.20.2rc1
docker run --rm \\
--name vllm-ascend \\
--net=host --shm-size=1g --device /dev/davinci0 --device /dev/davinci_manager \\
-v /etc/hccn.conf:/etc/hccn.conf --cpuset-cpus 0-7 \\
-it $IMAGE bash
vllm serve /models/m --port 8000
";
    let imported = import(&[("run.sh".to_owned(), text.to_owned())]).expect("a deployment");
    assert_eq!(imported.not_understood.len(), 1);
    assert_eq!(
        imported.not_understood[0].text,
        "docker run --cpuset-cpus 0-7"
    );
    for part in [
        "registry.example/ascend/vllm-ascend:v0.20.2rc1",
        "network: host",
        "shm: 1g",
        "/etc/hccn.conf:/etc/hccn.conf",
    ] {
        assert!(imported.text.contains(part), "{part} in\n{}", imported.text);
    }
    assert!(!imported.text.contains("davinci"), "{}", imported.text);
}

#[test]
fn what_serves_nothing_is_refused() {
    assert!(import(&[("x.sh".to_owned(), "echo hello\n".to_owned())]).is_err());
}
