use super::*;
use proptest::prelude::*;
use std::collections::BTreeSet;
use std::path::Path;
use twinfer_config::{FlagError, ServeConfig};

fn facts(cores: u32) -> Facts {
    Facts {
        cores: BTreeMap::from([("local".to_owned(), (0..cores).collect())]),
        model_problem: None,
    }
}

fn plan(text: &str, cores: u32) -> Result<Plan, String> {
    let deployment = Deployment::parse("deploy.yaml", text, Path::new("/x"))
        .map_err(|wrong| wrong.to_string())?;
    resolve(&deployment, &facts(cores), Checks::default()).map_err(|wrong| wrong.to_string())
}

const PAIR: &str = "model: {path: m, name: demo}\ninstances:\n  - {name: p, role: prefill}\n  - {name: d, role: decode}\n";

/// The file with what is to be said about `p` and `d`.
fn pair(p: &str, d: &str, rest: &str) -> String {
    format!(
        "model: {{path: m, name: demo}}\ninstances:\n  - {{name: p, role: prefill{p}}}\n  - {{name: d, role: decode{d}}}\n{rest}"
    )
}

#[test]
fn each_rank_of_a_prefill_instance_has_a_port_for_kv_that_decode_may_dial() {
    let planned = plan(&pair(", dp: 3, count: 2", ", dp: 2", ""), 6).unwrap();
    let kv: Vec<&[u16]> = planned.instances.iter().map(|i| &i.kv_ports[..]).collect();
    assert_eq!(kv, [&[8500, 8501, 8502][..], &[8503, 8504, 8505], &[]]);
    let command = planned.instances[2].command.join(" ");
    let peers = (8500..8506).map(|port| format!("127.0.0.1:{port}"));
    let peers = peers.collect::<Vec<_>>().join(",");
    assert!(
        command.contains(&format!("--pd-peers {peers}")),
        "{command}"
    );
    for (p, wrong) in [
        (", dp: 2, kv-port: 9000, port: 9001", "port 9001"),
        (", dp: 3, kv-port: 65534", "65535"),
    ] {
        let error = plan(&pair(p, "", ""), 6).unwrap_err();
        assert!(error.contains(wrong), "{error}");
    }
}

#[test]
fn a_plan_is_the_same_every_time_and_can_be_compared_line_by_line() {
    let text = plan(PAIR, 4).unwrap().to_string();
    assert_eq!(plan(PAIR, 4).unwrap().to_string(), text);
    for expected in [
        "instance   p\n  role     prefill\n  node     local\n  cores    0-1\n  http     127.0.0.1:8100\n  kv       127.0.0.1:8500\n",
        "instance   d\n  role     decode\n  node     local\n  cores    2-3\n  http     127.0.0.1:8101\n",
        "twinfer serve /x/m --served-model-name demo --name p --role prefill --host 127.0.0.1 --port 8100 --kv-port 8500",
        "--pd-peers 127.0.0.1:8500 --kv-load-failure-policy fail",
        "twinfer router --host 127.0.0.1 --port 8000 --prefill http://127.0.0.1:8100 --decode http://127.0.0.1:8101",
    ] {
        assert!(text.contains(expected), "no {expected:?} in\n{text}");
    }
    let other = plan(&pair("", "", "router: {port: 8001}"), 4)
        .unwrap()
        .to_string();
    let changed: Vec<&str> = other
        .lines()
        .filter(|line| !text.lines().any(|old| old == *line))
        .collect();
    assert_eq!(changed.len(), 2, "{changed:?}");
}

/// An instance over two nodes; `rest` is said of it, too.
fn spread(rest: &str) -> String {
    format!(
        "model: {{path: m, name: demo}}\nnodes:\n  - {{name: z_1, host: 10.0.0.1, rank-host: 10.1.0.1, cores: 0-7}}\n  - {{name: a, \
         host: 10.0.0.2, rank-host: 10.1.0.2, agent: 8900, cores: 0-7}}\ninstances:\n  - {{name: m, role: both{rest}}}\n"
    )
}

#[test]
fn ranks_are_numbered_over_the_nodes_in_their_order() {
    let plan = plan(&spread(", ranks: {a: 8, z_1: 8}"), 8).unwrap();
    let [first, second] = &plan.instances[..] else {
        panic!("{plan}");
    };
    assert_eq!((first.node.as_str(), second.node.as_str()), ("z_1", "a"));
    let line = crate::shell_line(&first.command);
    for expected in [
        "--host 10.0.0.1 --port 8100",
        "--dp 16 --data-parallel-size-local 8 --data-parallel-address 10.1.0.1 --data-parallel-rpc-port 8700",
    ] {
        assert!(line.contains(expected), "{line}");
    }
    assert!(!line.contains("headless"), "{line}");
    let line = crate::shell_line(&second.command);
    let expected = "--dp 16 --data-parallel-size-local 8 --data-parallel-address 10.1.0.1 --data-parallel-rpc-port 8700 \
                    --headless --data-parallel-start-rank 8 --rank-host 10.1.0.2";
    assert!(line.contains(expected), "{line}");
    assert!(!line.contains("--port"), "{line}");
    assert_eq!(second.name, "m@a");
    // The router knows the one that answers HTTP.
    let line = crate::shell_line(&plan.router.command);
    assert!(line.contains("--worker http://10.0.0.1:8100"), "{line}");
    assert_eq!(line.matches("--worker").count(), 1, "{line}");
    let text = plan.to_string();
    for expected in [
        "agent      a at 10.0.0.2:8900",
        "ranks    8 to 15 of 16, first node at 10.1.0.1:8700",
    ] {
        assert!(text.contains(expected), "{text}");
    }
}

#[test]
fn instances_over_the_same_nodes_meet_at_ports_of_their_own() {
    let text = spread(
        ", threads: 1, ranks: {a: 2, z_1: 2}}\n  - {name: n, role: both, threads: 1, ranks: {a: 1, z_1: 1}",
    );
    let plan = plan(&text, 8).unwrap();
    let ports: BTreeSet<u16> = plan
        .instances
        .iter()
        .filter_map(|instance| Some(instance.ranks.as_ref()?.rpc_port))
        .collect();
    assert_eq!(ports.len(), 2, "{plan}");
}

#[test]
fn ranks_that_cannot_be_are_refused_with_what_can() {
    for (rest, expected) in [
        (", ranks: {a: 1, b: 1}", "allowed: z_1, a"),
        (
            ", ranks: {a: 0, z_1: 1}",
            "at least 1 on each node, 64 together",
        ),
        (", ranks: {a: 64, z_1: 1}", "ranks are 65 on 2 nodes"),
        (", ranks: {}", "at least 1 on each node"),
        (", dp: 2, ranks: {a: 1, z_1: 1}", "dp is given beside ranks"),
        (
            ", node: a, ranks: {a: 1, z_1: 1}",
            "node is given beside ranks",
        ),
        (
            ", count: 2, ranks: {a: 1, z_1: 1}",
            "ranks is given with a count of 2",
        ),
        (", ranks: {a: x}", "ranks.a is \"x\""),
        (", headless: true", "it is said by `ranks`"),
    ] {
        let error = plan(&spread(rest), 8).unwrap_err();
        assert!(error.contains(expected), "{rest}: {error}");
    }
}

#[test]
fn flags_are_passed_on_and_read_back() {
    let text = pair(
        ", max_num_seqs: 4, kv-cache-memory: 64MiB",
        "",
        "router: {max-inflight: 9, policy: round-robin}",
    );
    let plan = plan(&text, 2).unwrap();
    let line = crate::shell_line(&plan.instances[0].command);
    assert!(
        line.contains("--kv-cache-memory 64MiB") && line.contains("--max-num-seqs 4"),
        "{line}"
    );
    let line = crate::shell_line(&plan.router.command);
    assert!(
        line.ends_with("--max-inflight 9 --policy round-robin"),
        "{line}"
    );
}

#[test]
fn the_lease_of_the_file_reaches_both_ends_of_the_handoff() {
    let plan = plan(&pair("", "", "handoff: {lease: 3}"), 2).unwrap();
    for instance in &plan.instances {
        let line = crate::shell_line(&instance.command);
        assert!(line.contains("--kv-lease 3"), "{line}");
    }
}

#[test]
fn prefill_takes_no_longer_prompts_than_decode() {
    for (p, d, expected) in [
        ("", "", None),
        ("", ", max-model-len: 1000", Some("--max-model-len 1000")),
        (
            ", max-model-len: 2000",
            ", max-model-len: 1000",
            Some("--max-model-len 1000"),
        ),
        (
            ", max-model-len: 500",
            ", max-model-len: 1000",
            Some("--max-model-len 500"),
        ),
        (", max-model-len: 500", "", Some("--max-model-len 500")),
    ] {
        let plan = plan(&pair(p, d, ""), 2).unwrap();
        let line = crate::shell_line(&plan.instances[0].command);
        match expected {
            Some(expected) => assert!(line.contains(expected), "{line}"),
            None => assert!(!line.contains("--max-model-len"), "{line}"),
        }
    }
}

#[test]
fn an_ipv6_node_gets_brackets_in_urls() {
    let text = pair("", "", "nodes: [{name: local, host: \"::1\"}]");
    let plan = plan(&text, 2).unwrap();
    assert_eq!(plan.instances[0].url(), "http://[::1]:8100");
    assert!(plan.instances[1].command.contains(&"[::1]:8500".to_owned()));
}

#[test]
fn no_secret_stands_in_a_plan() {
    let json = serde_json::to_string(&plan(PAIR, 2).unwrap()).unwrap();
    assert!(
        json.contains("TWINFER_PEER_KEY") && !json.contains("\"value\""),
        "{json}"
    );
    let text = pair(", peer-key-file: key", "", "");
    let line = crate::shell_line(&plan(&text, 2).unwrap().instances[0].command);
    assert!(line.contains("--peer-key-file /x/key"), "{line}");
}

#[test]
fn each_mistake_points_at_its_line_and_says_what_is_allowed() {
    let cases: &[(&str, String, &[&str])] = &[
        (
            "port clash",
            pair(", port: 9000", ", port: 9000", ""),
            &[
                "deploy.yaml:4:35: port 9000 on node local is given to instance d (HTTP) and to instance p (HTTP) (line 3)",
                "next free number: 9001",
            ],
        ),
        (
            "router's port",
            pair(", port: 8000", "", ""),
            &["port 8000", "the router"],
        ),
        (
            "overlapping KV ports",
            pair(", kv-port: 9000, count: 3", ", port: 9002", ""),
            &[
                "deploy.yaml:4",
                "port 9002 on node local is given to instance d (HTTP) and to instance p-2 (KV)",
            ],
        ),
        (
            "KV port and HTTP port of one instance",
            pair(", port: 9000, kv-port: 9000", "", ""),
            &["instance p (KV)", "instance p (HTTP)"],
        ),
        (
            "more threads than cores",
            pair(", threads: 3", ", threads: 2", ""),
            &[
                "deploy.yaml:4:38: instance d on node local: it needs 2 cores, 1 of 4 are left",
                "the instances need 5 cores together",
            ],
        ),
        (
            "cores twice",
            pair(", cpus: 0-1", ", cpus: 1", ""),
            &["cpus names 1, which another instance has", "free: 2-3"],
        ),
        (
            "core that is not there",
            pair(", cpus: 7", "", ""),
            &["cpus names 7, which the node has not", "allowed: 0-3"],
        ),
        (
            "cpus and threads",
            pair(", cpus: 0-1, threads: 1", "", ""),
            &["threads is 1, but cpus names 2 cores"],
        ),
        (
            "unknown node",
            pair(", node: mars", "", ""),
            &["node \"mars\" is not listed", "allowed: local"],
        ),
        (
            "unknown node of the router",
            pair("", "", "router: {node: mars}"),
            &["deploy.yaml:5:16: node \"mars\""],
        ),
        (
            "node without facts",
            pair(
                ", node: b",
                "",
                "nodes: [{name: local}, {name: b, host: 10.0.0.2}]",
            ),
            &["the cores of node \"b\" are not known here", "`cores: 0-3`"],
        ),
        (
            "node's cores not permitted",
            pair("", "", "nodes: [{name: local, cores: 2-9}]"),
            &["names 4-9", "allowed: 0-3"],
        ),
        (
            "same node twice",
            pair(
                "",
                "",
                "nodes: [{name: local}, {name: local, host: 10.0.0.2}]",
            ),
            &["\"local\" again"],
        ),
        (
            "same host twice",
            pair("", "", "nodes: [{name: local}, {name: b}]"),
            &["nodes[1].host is \"127.0.0.1\" again"],
        ),
        (
            "wildcard host",
            pair("", "", "nodes: [{name: local, host: 0.0.0.0}]"),
            &["which nobody can dial"],
        ),
        (
            "URL as host",
            pair("", "", "nodes: [{name: local, host: \"http://a\"}]"),
            &["without scheme and port"],
        ),
        (
            "duplicate name",
            pair("", "", "").replace("name: d,", "name: p,"),
            &["deploy.yaml:4:12: instance name \"p\" is taken", "line 3"],
        ),
        (
            "duplicate name by count",
            pair(", count: 2", "", "").replace("name: d,", "name: p-1,"),
            &["instance name \"p-1\" is taken"],
        ),
        (
            "router's name",
            pair("", "", "").replace("name: d,", "name: router,"),
            &["the router has that name"],
        ),
        (
            "bad name",
            pair("", "", "").replace("name: d,", "name: \"a b\","),
            &["instances[1].name is \"a b\"", "letters, digits"],
        ),
        (
            "tp",
            pair(", tp: 2", "", ""),
            &[
                "instances[0].tp is 2",
                "allowed: 1; the native engine has no tensor parallelism",
            ],
        ),
        (
            "list length",
            pair(", count: 2, port: [1, 2, 3]", "", ""),
            &["port has 3 entries for 2 instances"],
        ),
        (
            "one core set for two",
            pair(", count: 2, cpus: 0", "", ""),
            &["cpus is one set of cores for 2 instances"],
        ),
        (
            "ports beyond the last",
            pair(", count: 3, port: 65534", "", ""),
            &["3 instances from port 65534 on pass 65535", "65533"],
        ),
        (
            "KV port of a decode instance",
            pair("", ", kv-port: 9", ""),
            &["kv-port is given for role decode"],
        ),
        (
            "prefill alone",
            "model: {path: m}\ninstances: [{name: p, role: prefill}]".to_owned(),
            &["no instance has role decode"],
        ),
        (
            "decode alone",
            "model: {path: m}\ninstances: [{name: d, role: decode}]".to_owned(),
            &["no instance has role prefill"],
        ),
        (
            "block sizes differ",
            pair(", block-size: 32", "", ""),
            &["instances[1].block-size is 16, but 32 for the prefill instance of line 3"],
        ),
        (
            "dtypes differ",
            pair("", ", dtype: f32", ""),
            &["instances[1].dtype is f32, but bf16"],
        ),
        (
            "only decode is quantised",
            pair("", ", quantization: w8a8", ""),
            &["instances[1].quantization is w8a8, but none"],
        ),
        (
            "only decode drafts",
            pair("", ", num-speculative-tokens: 2", ""),
            &["instances[1].num-speculative-tokens is 2, but 0"],
        ),
    ];
    let mut missing = Vec::new();
    for (what, text, expected) in cases {
        let wrong = plan(text, 4).expect_err(what);
        for expected in expected
            .iter()
            .filter(|expected| !wrong.contains(**expected))
        {
            missing.push(format!("{what}: no {expected:?} in\n{wrong}"));
        }
    }
    assert!(missing.is_empty(), "{}", missing.join("\n\n"));
}

#[test]
fn several_mistakes_are_told_at_once() {
    let text = pair(
        ", tp: 2, port: 9000",
        ", port: 9000, node: mars",
        "router: {node: venus}",
    );
    let wrong = plan(&text, 4).unwrap_err();
    for expected in ["tp is 2", "\"mars\"", "\"venus\""] {
        assert!(wrong.contains(expected), "{wrong}");
    }
}

#[test]
fn a_missing_model_is_told_at_its_line() {
    let deployment = Deployment::parse("deploy.yaml", PAIR, Path::new("/x")).unwrap();
    let facts = Facts {
        model_problem: Some("/x/m: not there".to_owned()),
        ..facts(2)
    };
    let wrong = resolve(&deployment, &facts, Checks::default())
        .unwrap_err()
        .to_string();
    assert!(
        wrong.starts_with("deploy.yaml:1:15: model.path: /x/m: not there\n1 | model: {path: m,"),
        "{wrong}"
    );
}

#[test]
fn what_an_instance_would_refuse_is_told_at_its_flag() {
    let text = pair(", max-num-seqs: 7", "", "");
    let deployment = Deployment::parse("deploy.yaml", &text, Path::new("/x")).unwrap();
    let check = |config: &ServeConfig| match config.max_num_seqs {
        7 => Err(FlagError::new("max-num-seqs", 7, "1 to 6 are allowed")),
        _ => Ok(()),
    };
    let wrong = resolve(
        &deployment,
        &facts(2),
        Checks {
            serve: Some(&check),
        },
    )
    .unwrap_err()
    .to_string();
    assert!(
        wrong.starts_with("deploy.yaml:3:44: instances[0].max-num-seqs is 7\n"),
        "{wrong}"
    );
    assert!(wrong.ends_with("\n  1 to 6 are allowed"), "{wrong}");
}

/// Ctrl-C ends everything: a router that still served those who come late would only take time.
#[test]
fn the_router_does_not_settle_unless_the_file_says_so() {
    for (more, expected) in [("", "0"), (", drain-settle: 3", "3")] {
        let text = pair("", "", &format!("router: {{port: 8000{more}}}\n"));
        let deployment = Deployment::parse("deploy.yaml", &text, Path::new("/x")).unwrap();
        let plan = resolve(&deployment, &facts(2), Checks::default()).unwrap();
        let command = &plan.router.command;
        let at = command.iter().position(|word| word == "--drain-settle");
        assert_eq!(command[at.unwrap() + 1], expected);
    }
}

fn group() -> impl Strategy<Value = (u32, u8, Option<u32>, Option<u16>, Option<u16>)> {
    (
        1u32..4,
        0u8..3,
        proptest::option::of(1u32..3),
        proptest::option::weighted(0.3, 8095u16..8110),
        proptest::option::weighted(0.3, 8495u16..8510),
    )
}

proptest! {
    #[test]
    fn cores_are_disjoint_and_ports_unique(
        groups in proptest::collection::vec(group(), 1..6), cores in 1u32..40, share in any::<bool>()
    ) {
        let mut text = format!("model: {{path: m}}\nnodes: [{{name: local, share-cores: {share}}}]\ninstances:\n");
        for (i, (count, role, threads, port, kv_port)) in groups.iter().enumerate() {
            let role = ["both", "prefill", "decode"][*role as usize];
            text.push_str(&format!("  - name: g{i}\n    role: {role}\n    count: {count}\n"));
            if let Some(threads) = threads { text.push_str(&format!("    threads: {threads}\n")); }
            if let Some(port) = port { text.push_str(&format!("    port: {port}\n")); }
            if let (Some(port), "prefill") = (kv_port, role) { text.push_str(&format!("    kv-port: {port}\n")); }
        }
        match plan(&text, cores) {
            Err(wrong) => prop_assert!(wrong.contains("deploy.yaml:"), "{}", wrong),
            Ok(plan) => {
                let mut ports = BTreeSet::new();
                for port in plan.ports() {
                    prop_assert!(port.number != 0 && ports.insert(port.number), "{:?} twice in\n{}", port, plan);
                }
                let mut seen = BTreeSet::new();
                let mut names = BTreeSet::new();
                for instance in &plan.instances {
                    prop_assert!(names.insert(&instance.name));
                    prop_assert!(!instance.cores.is_empty());
                    prop_assert_eq!(instance.kv_port.is_some(), instance.role == Role::Prefill);
                    for core in &instance.cores {
                        prop_assert!(*core < cores);
                        prop_assert!(seen.insert(*core) || share, "core {} twice in\n{}", core, plan);
                    }
                }
                prop_assert_eq!(plan.instances.len(), groups.iter().map(|group| group.0 as usize).sum::<usize>());
            }
        }
    }

    #[test]
    fn no_text_makes_it_panic(text in "\\PC{0,200}") {
        let _ = plan(&text, 2);
    }

    #[test]
    fn no_damaged_file_makes_it_panic(at in 0usize..600, with in "\\PC{0,3}", cut in 0usize..4) {
        let text = crate::example();
        let from = text.char_indices().map(|(i, _)| i).nth(at).unwrap_or(0);
        let to = text[from..].char_indices().map(|(i, _)| from + i).nth(cut).unwrap_or(text.len());
        let _ = plan(&format!("{}{with}{}", &text[..from], &text[to..]), 2);
    }
}
