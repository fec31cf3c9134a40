//! The seeds' own environment and arguments, compared with what is planned for the same deployment.

use serde_json::Value;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use twinfer_deploy::engines::{
    EngineDeployment, EnginePlan, Severity, lint, refuse, resolve_engines,
};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn load(name: &str) -> EngineDeployment {
    let path = root().join(format!("examples/seed-{name}/deploy.yaml"));
    EngineDeployment::load(&path, None).unwrap_or_else(|error| panic!("{error}"))
}

fn plan(name: &str) -> EnginePlan {
    resolve_engines(&load(name), &[]).unwrap_or_else(|error| panic!("{error}"))
}

/// Seed example, its files in testdata/seeds, and what we add to a seed's command line and environment.
const SEEDS: &[(&str, &str, &[&str], &[&str])] = &[
    ("000-8p8d", "000", &[], &[]),
    // The key is taken from the environment and stands in no file.
    ("000-apart", "000-apart", &[], &[]),
    ("001-2p1d", "001", &[], &[]),
    ("001-2p1d-layerwise", "001-layerwise", &[], &[]),
    ("003-1p1d", "003", &[], &[]),
    // The script leaves address, port and name to the engine's defaults, and reads its model configuration from a
    // path of the repository, which the text does not give in full.
    (
        "004-hybrid",
        "004",
        &["--host", "--port", "--served-model-name"],
        &["MODEL_EXTRA_CFG_PATH"],
    ),
];

/// Process to its lines: what stands there, and where.
fn recorded(file: &str) -> BTreeMap<String, BTreeMap<String, String>> {
    let text = std::fs::read_to_string(root().join("testdata/seeds").join(file)).expect("a file");
    let mut map: BTreeMap<String, BTreeMap<String, String>> = BTreeMap::new();
    for line in text.lines().filter(|line| !line.starts_with('#')) {
        let parts: Vec<&str> = line.splitn(3, '\t').collect();
        let [process, place, words] = parts[..] else {
            panic!("{file}: {line}")
        };
        map.entry(process.to_owned())
            .or_default()
            .insert(words.to_owned(), place.to_owned());
    }
    map
}

/// A word as its JSON value where it is an object: blanks and order mean nothing.
fn same(a: &str, b: &str) -> bool {
    let object = |text: &str| {
        serde_json::from_str::<Value>(text)
            .ok()
            .filter(Value::is_object)
    };
    match (object(a), object(b)) {
        (Some(a), Some(b)) => a == b,
        _ => a == b,
    }
}

/// `--flag value` pairs of a command line; the words before the first flag are one entry.
fn arguments(argv: &[String]) -> Vec<(String, String)> {
    let first = argv
        .iter()
        .position(|word| word.starts_with("--"))
        .unwrap_or(argv.len());
    let mut list = vec![(argv[..first].join(" "), String::new())];
    let mut at = first;
    while at < argv.len() {
        let value = argv.get(at + 1).filter(|word| !word.starts_with("--"));
        list.push((argv[at].clone(), value.cloned().unwrap_or_default()));
        at += if value.is_some() { 2 } else { 1 };
    }
    list
}

#[test]
fn arguments_and_environment_are_the_seeds() {
    let mut wrong = Vec::new();
    for (name, file, extra_flags, extra_variables) in SEEDS {
        let plan = plan(name);
        for (process, lines) in recorded(&format!("{file}.argv")) {
            let ours = plan.processes.iter().find(|one| one.name == process);
            let Some(ours) = ours else {
                let names: Vec<&String> = plan.processes.iter().map(|one| &one.name).collect();
                wrong.push(format!("{name}: no process {process} among {names:?}"));
                continue;
            };
            let own = arguments(&ours.argv);
            let mut matched = vec![false; own.len()];
            for (words, place) in &lines {
                let (flag, value) = match words.strip_prefix("--") {
                    Some(_) => words.split_once(' ').unwrap_or((words, "")),
                    None => (words.as_str(), ""),
                };
                match own.iter().position(|(f, v)| f == flag && same(v, value)) {
                    Some(at) => matched[at] = true,
                    None => wrong.push(format!(
                        "{name} {process}: {place} has {words:?}, we {:?}",
                        own.iter().find(|(f, _)| f == flag)
                    )),
                }
            }
            for (at, (flag, value)) in own.iter().enumerate() {
                if !matched[at] && !extra_flags.contains(&flag.as_str()) {
                    wrong.push(format!("{name} {process}: we add {flag} {value}"));
                }
            }
        }
        for (process, lines) in recorded(&format!("{file}.env")) {
            let Some(ours) = plan.processes.iter().find(|one| one.name == process) else {
                continue;
            };
            for (words, place) in &lines {
                let (variable, value) = words.split_once('=').expect("NAME=value");
                let own = ours.environment.iter().find(|(known, _)| known == variable);
                if own.is_none_or(|(_, own)| own != value) {
                    wrong.push(format!("{name} {process}: {place} has {words}, we {own:?}"));
                }
            }
            for (variable, value) in &ours.environment {
                if !extra_variables.contains(&variable.as_str())
                    && !lines.keys().any(|line| {
                        line.split_once('=')
                            .is_some_and(|(known, _)| known == variable)
                    })
                {
                    wrong.push(format!("{name} {process}: we add {variable}={value}"));
                }
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn findings_of_the_seeds_are_the_golden_ones_and_none_stops_a_plan() {
    let bless = std::env::var_os("BLESS").is_some();
    for (name, ..) in SEEDS {
        let deployment = load(name);
        let plan = plan(name);
        let found = lint(&deployment, &plan, &[]);
        assert!(
            found.findings.iter().all(|one| one.severity != Severity::E),
            "{name}: {found}"
        );
        refuse(&deployment, &plan, &[]).unwrap_or_else(|error| panic!("{error}"));
        let text: String = found
            .findings
            .iter()
            .map(|one| {
                format!(
                    "{} {} line {}: {}\n",
                    one.severity, one.rule, one.line, one.found
                )
            })
            .collect();
        let path = root().join(format!("examples/seed-{name}/findings.txt"));
        if bless {
            std::fs::write(&path, &text).expect("written");
        }
        let golden = std::fs::read_to_string(&path).expect("golden findings");
        assert_eq!(text, golden, "{name}");
    }
}

#[test]
fn one_engine_over_two_nodes_is_refused_for_deepinfer_and_native_offered() {
    let error = resolve_engines(&load("000-ep16"), &[])
        .expect_err("refused")
        .to_string();
    assert!(
        error.contains("serve_recipe.py starts all ranks of an engine on its own node"),
        "{error}"
    );
    assert!(
        error.contains("engine: native serves one engine over several nodes"),
        "{error}"
    );
    assert!(
        error.contains("deploy.yaml:") && error.contains("ranks: {node-0: 8, node-1: 8}"),
        "{error}"
    );
}

#[test]
fn the_head_says_what_a_deployment_is_and_is_not() {
    let head = |name: &str| plan(name).head.join("\n");
    let one = head("000-8p8d");
    assert!(one.contains("1 world on 1 node (8 devices)"), "{one}");
    assert!(
        one.contains("one DP8/EP8 engine on 8 devices, both phases on each"),
        "{one}"
    );
    assert!(one.contains("not 16"), "{one}");
    let apart = head("000-apart");
    assert!(
        apart.contains("2 worlds on 2 nodes (16 devices)") && apart.contains("not one EP16 engine"),
        "{apart}"
    );
    let wide = head("001-2p1d");
    assert!(wide.contains("3 worlds on 4 nodes (64 devices)"), "{wide}");
    assert!(
        wide.contains("decode: one DP32/EP32 engine on 32 devices"),
        "{wide}"
    );
    assert!(wide.contains("d2 ranks 16-31"), "{wide}");
    let hybrid = head("004-hybrid");
    assert!(
        hybrid.contains("one DP32/EP32 engine on 32 devices"),
        "{hybrid}"
    );
}

#[test]
fn ports_of_a_node_follow_the_connector() {
    let spans = |name: &str| -> Vec<(String, u32, u32)> {
        plan(name)
            .ports
            .iter()
            .filter(|port| port.kind == twinfer_deploy::engines::PortKind::Handoff)
            .map(|port| (port.node.clone(), port.first, port.last))
            .collect()
    };
    let mooncake = spans("001-2p1d");
    // dp_rank is the global one: the second node of decode goes on where the first ends.
    assert!(
        mooncake.contains(&("p1".to_owned(), 36000, 36007)),
        "{mooncake:?}"
    );
    assert!(
        mooncake.contains(&("p1".to_owned(), 36008, 36015)),
        "{mooncake:?}"
    );
    assert!(
        mooncake.contains(&("d1".to_owned(), 36215, 36215)),
        "{mooncake:?}"
    );
    assert!(
        mooncake.contains(&("d2".to_owned(), 36216, 36216))
            && mooncake.contains(&("d2".to_owned(), 36231, 36231)),
        "{mooncake:?}"
    );
    let llmdd = spans("003-1p1d");
    assert_eq!(
        llmdd,
        [("p".to_owned(), 5559, 5574), ("d".to_owned(), 5659, 5674)]
    );
}

#[test]
fn limits_of_a_pair_are_the_smaller_ones() {
    let plan = plan("003-1p1d");
    assert_eq!(plan.pairs[0].max_prompt, Some(8191));
    assert_eq!(plan.pairs[0].max_len, Some(8192));
    assert_eq!(plan.pairs[0].decode_seqs, Some(64));
}

#[test]
fn values_of_seed_003_with_mooncake_are_refused_until_the_port_is_valid() {
    let path = root().join("examples/seed-003-1p1d/deploy.yaml");
    let text = std::fs::read_to_string(&path).expect("a file");
    let with = |port: &str, connector: &str| {
        let text = text
            .replace("LLMDataDistCMgrConnector", connector)
            .replace("engine-version: 0.9.1", "engine-version: 0.20.2")
            .replacen("kv-port: 20001", &format!("kv-port: {port}"), 2);
        let deployment =
            EngineDeployment::parse("d", &text, None, path.parent().expect("a folder"))
                .unwrap_or_else(|e| panic!("{e}"));
        let plan = resolve_engines(&deployment, &[]).unwrap_or_else(|e| panic!("{e}"));
        refuse(&deployment, &plan, &[]).map_err(|error| error.to_string())
    };
    for port in ["20001", "30000"] {
        let error = with(port, "MooncakeConnectorV1").expect_err(port);
        assert!(
            error.contains(&format!("kv-port {port} takes {port}-")),
            "{error}"
        );
        assert!(error.contains("in 20000-35999"), "{error}");
        assert!(error.contains("nearest: kv-port 36000"), "{error}");
    }
    let left = with("36000", "MooncakeConnectorV1")
        .err()
        .unwrap_or_default();
    assert!(!left.contains("rule 13"), "{left}");
}
