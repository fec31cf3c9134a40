//! Rendered files: what a shell, systemd and a reader of YAML make of them.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use twinfer_deploy::engines::{
    EngineDeployment, EnginePlan, RenderOptions, RenderedFile, render, resolve_engines, write_files,
};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

const SEEDS: &[&str] = &[
    "000-8p8d",
    "000-apart",
    "001-2p1d",
    "001-2p1d-layerwise",
    "003-1p1d",
    "004-hybrid",
];

fn rendered(text: &str, folder: &Path, at: &str) -> (EnginePlan, Vec<RenderedFile>) {
    let deployment = EngineDeployment::parse("deploy.yaml", text, None, folder)
        .unwrap_or_else(|e| panic!("{e}"));
    let plan = resolve_engines(&deployment, &[]).unwrap_or_else(|e| panic!("{e}"));
    let files = render(
        &deployment,
        &plan,
        &RenderOptions {
            folder: at.to_owned(),
        },
    );
    (plan, files)
}

fn seed(name: &str, at: &str) -> (EnginePlan, Vec<RenderedFile>) {
    let folder = root().join(format!("examples/seed-{name}"));
    let text = std::fs::read_to_string(folder.join("deploy.yaml")).expect("a file");
    rendered(&text, &folder, at)
}

fn run(command: &mut Command) -> Output {
    command.output().expect("a program that can be started")
}

fn text(output: &Output) -> String {
    format!(
        "{}{}",
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    )
}

fn file<'f>(files: &'f [RenderedFile], path: &str) -> &'f str {
    let found = files.iter().find(|file| file.path == path);
    let paths: Vec<&String> = files.iter().map(|file| &file.path).collect();
    &found
        .unwrap_or_else(|| panic!("no {path} among {paths:?}"))
        .text
}

#[test]
fn every_script_is_one_to_bash_and_every_unit_to_systemd() {
    for name in SEEDS {
        let folder = tempfile::tempdir().expect("a folder");
        let at = folder.path().to_string_lossy().into_owned();
        let (_, files) = seed(name, &at);
        write_files(&files, folder.path(), false).expect("written");
        for file in &files {
            let path = folder.path().join(&file.path);
            if file.path.ends_with(".sh") {
                let checked = run(Command::new("bash").arg("-n").arg(&path));
                assert!(
                    checked.status.success(),
                    "{name} {}: {}",
                    file.path,
                    text(&checked)
                );
            }
            if file.path.ends_with(".service") {
                let checked = run(Command::new("systemd-analyze")
                    .arg("verify")
                    .arg("--man=no")
                    .arg(&path));
                let said = text(&checked);
                let ours: Vec<&str> = said
                    .lines()
                    .filter(|line| line.contains("twinfer"))
                    .collect();
                assert!(ours.is_empty(), "{name} {}: {said}", file.path);
            }
            if file.path.ends_with(".yaml") {
                for document in file.text.split("---\n") {
                    let tree: serde_json::Value = serde_saphyr::from_str(document)
                        .unwrap_or_else(|e| panic!("{name} {}: {e}", file.path));
                    assert!(tree.is_object(), "{name} {}", file.path);
                }
            }
        }
    }
}

/// A folder with programs that write down how they were called.
fn recorders(folder: &Path, names: &[&str], then: &str) -> String {
    let bin = folder.join("bin");
    std::fs::create_dir_all(&bin).expect("a folder");
    for name in names {
        let path = bin.join(name);
        let script =
            format!("#!/usr/bin/env bash\nprintf '%s\\0' {name} \"$@\"\nenv -0 >&2\n{then}\n");
        std::fs::write(&path, script).expect("written");
        use std::os::unix::fs::PermissionsExt;
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).expect("mode");
    }
    format!(
        "{}:{}",
        bin.display(),
        std::env::var("PATH").unwrap_or_default()
    )
}

#[test]
fn a_script_runs_exactly_the_planned_command_in_the_planned_environment() {
    for name in ["001-2p1d", "001-2p1d-layerwise", "004-hybrid"] {
        let folder = tempfile::tempdir().expect("a folder");
        let (plan, files) = seed(name, "/opt");
        write_files(&files, folder.path(), false).expect("written");
        let path = recorders(folder.path(), &["vllm"], "");
        for process in &plan.processes {
            let script = folder
                .path()
                .join(format!("{}/{}.sh", process.node, process.name));
            let output = run(Command::new(&script).env("PATH", &path));
            let words = |bytes: &[u8]| -> Vec<String> {
                let text = String::from_utf8_lossy(bytes);
                text.split_terminator('\0').map(str::to_owned).collect()
            };
            assert_eq!(
                words(&output.stdout),
                process.argv,
                "{name} {}",
                process.name
            );
            let environment: BTreeMap<String, String> = words(&output.stderr)
                .iter()
                .filter_map(|line| {
                    line.split_once('=')
                        .map(|(name, value)| (name.to_owned(), value.to_owned()))
                })
                .collect();
            for (variable, value) in &process.environment {
                assert_eq!(
                    environment.get(variable),
                    Some(value),
                    "{name} {} {variable}",
                    process.name
                );
            }
        }
    }
}

const PAIR: &str = "
engine: vllm
model: {path: /models/m, name: m}
nodes: [{name: n, host: 127.0.0.1}]
instances:
  - {name: a, role: both, port: 7100}
  - {name: b, role: both, port: 7200}
router: {program: none}
";

#[test]
fn when_one_process_of_a_node_ends_all_are_ended() {
    let folder = tempfile::tempdir().expect("a folder");
    let (_, files) = rendered(PAIR, folder.path(), "/opt");
    write_files(&files, folder.path(), false).expect("written");
    // The one with port 7200 fails; the other waits with a child of its own.
    let then = format!(
        "for word in \"$@\"; do [[ $word == 7200 ]] && exit 3; done\nsleep 600 &\necho $! >{0}/child\nwait",
        folder.path().display()
    );
    let path = recorders(folder.path(), &["vllm"], &then);
    let output = run(Command::new(folder.path().join("n/start.sh"))
        .env("PATH", &path)
        .env("STAGGER", "1"));
    assert_eq!(output.status.code(), Some(3), "{}", text(&output));
    let child = std::fs::read_to_string(folder.path().join("child")).expect("the child's id");
    let alive = Path::new("/proc").join(child.trim()).join("stat");
    let state = std::fs::read_to_string(&alive).unwrap_or_default();
    let gone = state.is_empty()
        || state
            .rsplit(')')
            .next()
            .is_some_and(|rest| rest.trim_start().starts_with('Z'));
    assert!(gone, "the child lives: {state}");
}

#[test]
fn a_secret_is_taken_from_the_environment_and_stands_in_no_file() {
    let folder = tempfile::tempdir().expect("a folder");
    let (_, files) = seed("000-apart", "/opt");
    write_files(&files, folder.path(), false).expect("written");
    let script = folder.path().join("node-p/prefill.sh");
    let output = run(Command::new(&script).env_remove("DEEPINFER_PD_API_KEY"));
    assert!(!output.status.success());
    assert!(
        text(&output).contains("DEEPINFER_PD_API_KEY: is not set"),
        "{}",
        text(&output)
    );
    let compose = file(&files, "node-p/compose.yaml");
    assert!(compose.contains("DEEPINFER_PD_API_KEY: null"), "{compose}");
    assert!(file(&files, "kubernetes.yaml").contains("secretKeyRef"));
}

#[test]
fn a_rank_table_is_made_of_recorded_addresses_else_its_generator_is_called() {
    let (_, files) = seed("003-1p1d", "/opt");
    let call = file(&files, "ranktable.sh");
    assert!(call.contains("--ips 141.61.41.163 141.61.41.164"), "{call}");
    assert!(
        call.contains("--npus-per-node 16 --network-card-name ens3f0"),
        "{call}"
    );
    assert!(
        call.contains("--prefill-device-cnt 16 --decode-device-cnt 16"),
        "{call}"
    );
    let folder = root().join("examples/seed-003-1p1d");
    let deployment = std::fs::read_to_string(folder.join("deploy.yaml")).expect("a file");
    let facts = |third: u32| {
        let list = |make: &dyn Fn(u32) -> String| {
            (0..16)
                .map(|i| format!("\"{}\"", make(i)))
                .collect::<Vec<_>>()
                .join(", ")
        };
        format!(
            "kind: A3, facts: {{device-addresses: [{}], super-pod-ids: [{}], super-device-ids: [{}]}}, devices",
            list(&|i| format!("192.168.{third}.{}", 199 - i)),
            list(&|_| "0".to_owned()),
            list(&|i| (third * 1_000_000 + i).to_string())
        )
    };
    let text = deployment
        .replacen("kind: A2, devices", &facts(2), 1)
        .replacen("kind: A2, devices", &facts(3), 1);
    let (_, files) = rendered(&text, &folder, "/opt");
    let table: serde_json::Value =
        serde_json::from_str(file(&files, "ranktable.json")).expect("JSON");
    assert_eq!(table["version"], "1.2");
    assert_eq!(table["server_count"], "2");
    assert_eq!(
        table["prefill_device_list"][0],
        serde_json::json!({"server_id": "141.61.41.163", "device_id": "0", "device_ip": "192.168.2.199", "super_pod_id": "0", "super_device_id": "2000000", "cluster_id": "1"})
    );
    let decode = table["decode_device_list"].as_array().expect("a list");
    assert_eq!(
        (
            decode.len(),
            &decode[0]["cluster_id"],
            &decode[0]["device_ip"]
        ),
        (16, &"17".into(), &"192.168.3.199".into())
    );
    // Every leaf is text.
    assert!(
        decode
            .iter()
            .flat_map(|one| one.as_object().expect("an object").values())
            .all(serde_json::Value::is_string)
    );
}

#[test]
fn the_router_and_the_benchmark_name_what_was_planned() {
    let (plan, files) = seed("001-2p1d-layerwise", "/opt");
    let router = file(&files, "p1/router.sh");
    let flat = router.replace(" \\\n  ", " ");
    let hosts = format!(
        "--prefiller-hosts 192.0.0.1 192.0.0.1 192.0.0.2 192.0.0.2 --prefiller-ports 7100 7101 7100 7101 --decoder-hosts {}{}",
        "192.0.0.3 ".repeat(16),
        "192.0.0.4 ".repeat(16).trim_end()
    );
    assert!(flat.contains(&hosts), "{flat}");
    assert!(
        flat.contains(
            "load_balance_proxy_layerwise_server_example.py --host 192.0.0.1 --port 1999"
        ),
        "{flat}"
    );
    let bench = file(&files, "aisbench.py");
    // The seed's own configuration asks another port and another name; ours are the router's and the servers'.
    assert!(
        bench.contains("host_port=1999") && bench.contains("model=\"ds_r1\""),
        "{bench}"
    );
    assert_eq!(plan.processes.len(), 36);
}

#[test]
fn a_folder_with_other_files_is_not_written_over() {
    let folder = tempfile::tempdir().expect("a folder");
    std::fs::write(folder.path().join("mine"), "x").expect("written");
    let (_, files) = rendered(PAIR, folder.path(), "/opt");
    assert!(write_files(&files, folder.path(), false).is_err());
    assert!(write_files(&files, folder.path(), true).is_ok());
}

#[test]
fn the_file_that_init_writes_drives_another_engine_too() {
    let text = twinfer_deploy::example().replace("engine: native", "engine: vllm-ascend");
    assert!(text.contains("engine: vllm-ascend"), "{text}");
    let deployment = EngineDeployment::parse("deploy.yaml", &text, None, Path::new("."))
        .unwrap_or_else(|e| panic!("{e}"));
    let plan = resolve_engines(&deployment, &[]).unwrap_or_else(|e| panic!("{e}"));
    twinfer_deploy::engines::refuse(&deployment, &plan, &[]).unwrap_or_else(|e| panic!("{e}"));
    let files = render(
        &deployment,
        &plan,
        &RenderOptions {
            folder: "/opt".to_owned(),
        },
    );
    let decode = file(&files, "local/decode.sh");
    assert!(
        decode.contains("vllm serve models/demo") && decode.contains("--max-num-seqs 32"),
        "{decode}"
    );
    assert!(
        decode.contains("MooncakeConnectorV1") && decode.contains("kv_consumer"),
        "{decode}"
    );
}
