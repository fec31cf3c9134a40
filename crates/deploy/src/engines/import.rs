//! Scripts that people have to a deployment file: `export` lines with `vllm serve`, run_dp_template.sh with its
//! launch_online_dp.py lines, `docker run`. A line that is not understood is told, never dropped.

mod shell;

use crate::engines::render::yaml;
use serde_json::{Map, Value, json};
use shell::{Statement, Words};
use std::collections::BTreeMap;

/// A line that was not understood.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NotUnderstood {
    /// File.
    pub file: String,
    /// Line, from 1.
    pub line: usize,
    /// What stands there.
    pub text: String,
}

/// What was read out of scripts.
#[derive(Clone, Debug)]
pub struct Imported {
    /// A deployment file.
    pub text: String,
    /// Lines that are not in it.
    pub not_understood: Vec<NotUnderstood>,
}

/// Why scripts give no deployment.
#[derive(Debug, thiserror::Error)]
pub enum ImportError {
    /// Nothing serves.
    #[error("no `vllm serve` line in {files}")]
    NothingServes {
        /// Files.
        files: String,
    },
}

/// One `vllm serve`, with what its script exports before it.
#[derive(Clone, Debug)]
struct Server {
    host: String,
    nic: Option<String>,
    environment: Map<String, Value>,
    source: Vec<String>,
    model: String,
    flags: Map<String, Value>,
    devices: Option<Vec<u32>>,
}

/// `launch_online_dp.py` with its flags.
#[derive(Clone, Debug, Default)]
struct Launch {
    host: Option<String>,
    flags: BTreeMap<String, String>,
}

/// Variables that the templates set themselves.
const OURS: &[&str] = &[
    "HCCL_IF_IP",
    "GLOO_SOCKET_IFNAME",
    "TP_SOCKET_IFNAME",
    "HCCL_SOCKET_IFNAME",
    "NCCL_SOCKET_IFNAME",
    "ASCEND_RT_VISIBLE_DEVICES",
    "CUDA_VISIBLE_DEVICES",
    "DISAGGREGATED_PREFILL_RANK_TABLE_PATH",
];

/// Reads scripts: name and text of each.
///
/// # Errors
/// No line of them starts an engine.
pub fn import(scripts: &[(String, String)]) -> Result<Imported, ImportError> {
    let mut servers = Vec::new();
    let mut launches: Vec<Launch> = Vec::new();
    let mut container = None;
    let mut templates: Vec<(Server, bool)> = Vec::new();
    let mut not_understood = Vec::new();
    for (file, text) in scripts {
        let mut here = Server {
            host: String::new(),
            nic: None,
            environment: Map::new(),
            source: Vec::new(),
            model: String::new(),
            flags: Map::new(),
            devices: None,
        };
        let mut on_host = None;
        for (line, statement) in shell::statements(text) {
            match statement {
                Statement::Nothing => {}
                Statement::Host(host) => on_host = Some(host),
                Statement::Export(name, value) => export(&mut here, &name, &value),
                Statement::Source(script) => here.source.push(script),
                Statement::Serve(words) => {
                    let (server, template) = serve(&here, &words);
                    templates.push((server, template));
                }
                Statement::Launch(words) => launches.push(Launch {
                    host: on_host.take(),
                    flags: pairs(&words),
                }),
                Statement::Docker(words) => {
                    container = Some(docker(&words, |text| {
                        not_understood.push(NotUnderstood {
                            file: file.clone(),
                            line,
                            text,
                        });
                    }));
                }
                Statement::Other(text) => not_understood.push(NotUnderstood {
                    file: file.clone(),
                    line,
                    text,
                }),
            }
        }
    }
    let mut unused = launches;
    for (server, template) in templates {
        if !template {
            servers.push((server, None));
            continue;
        }
        // The launch line of the script's own host, else the next one.
        let at = unused
            .iter()
            .position(|launch| launch.host.as_ref() == Some(&server.host));
        match at.or((!unused.is_empty()).then_some(0)) {
            Some(at) => {
                let launch = unused.remove(at);
                servers.push((server, Some(launch)));
            }
            None => not_understood.push(NotUnderstood {
                file: scripts
                    .first()
                    .map(|(file, _)| file.clone())
                    .unwrap_or_default(),
                line: 0,
                text: format!(
                    "the template of {} has no launch_online_dp.py line",
                    server.host
                ),
            }),
        }
    }
    if servers.is_empty() {
        let files: Vec<&str> = scripts.iter().map(|(file, _)| file.as_str()).collect();
        return Err(ImportError::NothingServes {
            files: files.join(", "),
        });
    }
    let file = deployment(&servers, container);
    Ok(Imported {
        text: yaml(&file),
        not_understood,
    })
}

fn export(here: &mut Server, name: &str, value: &str) {
    match name {
        "HCCL_IF_IP" => here.host = value.to_owned(),
        "GLOO_SOCKET_IFNAME" => here.nic = Some(value.to_owned()),
        "ASCEND_RT_VISIBLE_DEVICES" | "CUDA_VISIBLE_DEVICES" => {
            here.devices = value
                .split(',')
                .map(|device| device.trim().parse().ok())
                .collect();
        }
        _ => {}
    }
    if name == "DISAGGREGATED_PREFILL_RANK_TABLE_PATH" || !OURS.contains(&name) {
        here.environment
            .insert(name.to_owned(), shell::scalar(value));
    }
}

/// A server, and whether its arguments are those of a template.
fn serve(here: &Server, words: &Words) -> (Server, bool) {
    let mut server = here.clone();
    let mut at = 0;
    while at < words.len() {
        let word = &words[at];
        let Some(flag) = word.strip_prefix("--") else {
            if server.model.is_empty() {
                server.model.clone_from(word);
            }
            at += 1;
            continue;
        };
        let (key, value) = match flag.split_once('=') {
            Some((key, value)) => (key, Some(value.to_owned())),
            None => {
                let next = words.get(at + 1).filter(|word| !word.starts_with("--"));
                at += usize::from(next.is_some());
                (flag, next.cloned())
            }
        };
        let key = key.replace('_', "-");
        let (key, value) = match value {
            None => match key.strip_prefix("no-") {
                Some(positive) => (positive.to_owned(), Value::Bool(false)),
                None => (key, Value::Bool(true)),
            },
            Some(text) => (key, shell::value(&text)),
        };
        server.flags.insert(key, value);
        at += 1;
    }
    let template = server
        .flags
        .values()
        .any(|value| value.as_str().is_some_and(|text| text.starts_with('$')));
    (server, template)
}

fn pairs(words: &Words) -> BTreeMap<String, String> {
    let mut map = BTreeMap::new();
    let mut at = 0;
    while at < words.len() {
        if let (Some(flag), Some(value)) = (words[at].strip_prefix("--"), words.get(at + 1)) {
            map.insert(flag.to_owned(), value.clone());
            at += 1;
        }
        at += 1;
    }
    map
}

/// `docker run` as the section `container`.
fn docker(words: &Words, mut other: impl FnMut(String)) -> Value {
    let mut map = Map::new();
    let mut mounts = Vec::new();
    let mut devices = Vec::new();
    let mut publish = Vec::new();
    let mut at = 0;
    while at < words.len() {
        let word = words[at].clone();
        if !word.starts_with('-') {
            // What follows the image is the command, which a deployment writes itself.
            map.insert("image".to_owned(), word.into());
            break;
        }
        let (flag, inline) = match word.split_once('=') {
            Some((flag, value)) => (flag.to_owned(), Some(value.to_owned())),
            None => (word.clone(), None),
        };
        let alone = matches!(
            flag.as_str(),
            "--rm"
                | "-it"
                | "-i"
                | "-t"
                | "-d"
                | "-itd"
                | "--detach"
                | "--init"
                | "--privileged"
                | "-ti"
        );
        let value = match (inline, alone) {
            (Some(value), _) => value,
            (None, true) => String::new(),
            (None, false) => {
                at += 1;
                words.get(at).cloned().unwrap_or_default()
            }
        };
        let mut set = |key: &str, value: Value| map.insert(key.to_owned(), value);
        match flag.as_str() {
            "--privileged" => drop(set("privileged", true.into())),
            "--net" | "--network" => drop(set("network", value.into())),
            "--shm-size" => drop(set("shm", value.into())),
            "-m" | "--memory" => drop(set("memory", value.into())),
            "--pids-limit" => drop(set("pids", shell::scalar(&value))),
            "--restart" => drop(set("restart", value.into())),
            "--ulimit" if value.starts_with("memlock=") => {
                let limit = value.trim_start_matches("memlock=");
                let limit = limit.split(':').next().unwrap_or(limit);
                set("memlock", limit.into());
            }
            "-p" | "--publish" => publish.push(value),
            "-v" | "--volume" => mounts.push(value),
            "--device" => {
                // Devices of nodes are passed by the plan.
                let davinci = value
                    .strip_prefix("/dev/davinci")
                    .is_some_and(|rest| rest.parse::<u32>().is_ok());
                let manager = matches!(
                    value.as_str(),
                    "/dev/davinci_manager" | "/dev/devmm_svm" | "/dev/hisi_hdc"
                );
                if !davinci && !manager {
                    devices.push(value);
                }
            }
            "--name" | "-w" | "--workdir" | "--entrypoint" | "--rm" | "-it" | "-i" | "-t"
            | "-d" | "-itd" | "-ti" | "--detach" | "--init" => {}
            _ => other(format!("docker run {word} {value}").trim_end().to_owned()),
        }
        at += 1;
    }
    for (key, list) in [
        ("mounts", mounts),
        ("devices", devices),
        ("publish", publish),
    ] {
        if !list.is_empty() {
            map.insert(key.to_owned(), json!(list));
        }
    }
    Value::Object(map)
}

/// One node's part of an instance.
struct Part<'s> {
    server: &'s Server,
    first: u64,
    count: u64,
}

/// Servers that are one instance.
struct Group<'s> {
    /// Where its ranks meet.
    key: String,
    parts: Vec<Part<'s>>,
    per_rank: bool,
    /// Keys of the instance, and its flags under `flags`.
    keys: Map<String, Value>,
}

fn deployment(servers: &[(Server, Option<Launch>)], container: Option<Value>) -> Value {
    // Parts of one group share the rendezvous; a server without one is an instance of its own.
    let mut groups: Vec<Group<'_>> = Vec::new();
    for (index, (server, launch)) in servers.iter().enumerate() {
        let mut flags = server.flags.clone();
        let mut number = |key: &str, flag: &str| -> Option<u64> {
            let given = launch
                .as_ref()
                .and_then(|launch| launch.flags.get(flag)?.parse().ok());
            let own = flags.shift_remove(key);
            given.or_else(|| own.and_then(|value| value.as_u64()))
        };
        let dp = number("data-parallel-size", "dp-size").unwrap_or(1);
        let local = number("data-parallel-size-local", "dp-size-local");
        let start = number("data-parallel-start-rank", "dp-rank-start");
        let rank = number("data-parallel-rank", "dp-rank-start");
        let rpc = number("data-parallel-rpc-port", "dp-rpc-port");
        let tp = number("tensor-parallel-size", "tp-size").unwrap_or(1);
        let port = number("port", "vllm-start-port");
        let own = flags.shift_remove("data-parallel-address");
        let given = launch
            .as_ref()
            .and_then(|launch| launch.flags.get("dp-address").cloned());
        let address = given.or_else(|| own.and_then(|value| value.as_str().map(str::to_owned)));
        let headless = flags.shift_remove("headless").is_some();
        let per_rank = launch.is_some() || rank.is_some() && local.is_none();
        let count = match (launch, per_rank) {
            (None, true) => 1,
            (Some(_), _) => local.unwrap_or(dp),
            (None, false) => local.unwrap_or(dp),
        };
        let key = match (&address, rpc) {
            (Some(address), Some(rpc)) if dp > 1 => format!("{address} {rpc} {dp}"),
            _ => format!("alone {index}"),
        };
        let part = Part {
            server,
            first: rank.or(start).unwrap_or(0),
            count,
        };
        match groups.iter_mut().find(|group| group.key == key) {
            Some(Group { parts, .. }) => {
                match parts.iter_mut().find(|one| one.server.host == server.host) {
                    Some(one) => {
                        one.first = one.first.min(part.first);
                        one.count += part.count;
                    }
                    None => parts.push(part),
                }
            }
            None => {
                let mut keys = Map::new();
                let mut set = |key: &str, value: Value| drop(keys.insert(key.to_owned(), value));
                set("dp", dp.into());
                set("tp", tp.into());
                if let Some(port) = port.filter(|_| !headless) {
                    set("port", port.into());
                }
                if let Some(rpc) = rpc {
                    set("rpc-port", rpc.into());
                }
                keys.insert("flags".to_owned(), Value::Object(flags));
                groups.push(Group {
                    key,
                    parts: vec![part],
                    per_rank,
                    keys,
                });
            }
        }
    }
    let mut nodes: Vec<(String, Option<String>, u64)> = Vec::new();
    let mut count: BTreeMap<&str, u32> = BTreeMap::new();
    let mut instances = Vec::new();
    let mut connector = None;
    let mut ranktable = None;
    let mut model = Map::new();
    for group in groups {
        let Group {
            mut parts,
            per_rank,
            keys,
            ..
        } = group;
        parts.sort_by_key(|part| part.first);
        let Some(first) = parts.first() else { continue };
        let server = first.server;
        let mut flags = keys
            .get("flags")
            .and_then(Value::as_object)
            .cloned()
            .unwrap_or_default();
        let tp = keys.get("tp").and_then(Value::as_u64).unwrap_or(1);
        let transfer = flags.shift_remove("kv-transfer-config");
        let transfer = transfer
            .and_then(|value| value.as_object().cloned())
            .unwrap_or_default();
        let role = match transfer.get("kv_role").and_then(Value::as_str) {
            Some("kv_producer") => "prefill",
            Some("kv_consumer") => "decode",
            _ => "both",
        };
        let number = count.entry(role).or_default();
        *number += 1;
        let mut instance = Map::new();
        let mut set = |key: &str, value: Value| drop(instance.insert(key.to_owned(), value));
        set("name", format!("{role}-{number}").into());
        set("role", role.into());
        let mut ranks = Map::new();
        for part in &parts {
            let devices = part
                .server
                .devices
                .as_ref()
                .and_then(|list| list.iter().max())
                .map_or(0, |most| u64::from(*most) + 1)
                .max(part.count * tp);
            let known = nodes
                .iter_mut()
                .find(|(host, ..)| *host == part.server.host);
            let index = match known {
                Some(node) => {
                    node.2 = node.2.max(devices);
                    nodes
                        .iter()
                        .position(|(host, ..)| *host == part.server.host)
                        .unwrap_or(0)
                }
                None => {
                    nodes.push((part.server.host.clone(), part.server.nic.clone(), devices));
                    nodes.len() - 1
                }
            };
            ranks.insert(format!("node-{}", index + 1), part.count.into());
        }
        set("ranks", Value::Object(ranks));
        set("tp", tp.into());
        set("api", if per_rank { "per-rank" } else { "one" }.into());
        for key in ["port", "rpc-port"] {
            if let Some(value) = keys.get(key) {
                set(key, value.clone());
            }
        }
        let port = transfer.get("kv_port");
        let port = port.and_then(|port| port.as_u64().or_else(|| port.as_str()?.parse().ok()));
        if let Some(port) = port {
            set("kv-port", port.into());
        }
        if let Some(id) = transfer.get("engine_id") {
            let id = id.as_str().map_or_else(|| id.to_string(), str::to_owned);
            set("engine-id", id.into());
        }
        if let Some(host) = flags
            .shift_remove("host")
            .filter(|host| *host != json!("0.0.0.0"))
        {
            set("listen", host);
        }
        let mut environment = server.environment.clone();
        if let Some(path) = environment.shift_remove("DISAGGREGATED_PREFILL_RANK_TABLE_PATH") {
            ranktable = Some(path);
        }
        if !environment.is_empty() {
            set("environment", Value::Object(environment));
        }
        connector = connector.or_else(|| transfer.get("kv_connector").cloned());
        // What the template does not write itself stays an override.
        const WRITTEN: &[&str] = &["kv_connector", "kv_role", "kv_port", "engine_id"];
        let rest: Map<String, Value> = transfer
            .into_iter()
            .filter(|(key, _)| !WRITTEN.contains(&key.as_str()))
            .collect();
        if !rest.is_empty() {
            set("kv-transfer-config", Value::Object(rest));
        }
        model
            .entry("path")
            .or_insert_with(|| server.model.clone().into());
        if let Some(name) = flags.shift_remove("served-model-name") {
            model.insert("name".to_owned(), name);
        }
        for (key, value) in flags {
            instance.insert(key, value);
        }
        instances.push(Value::Object(instance));
    }
    let ascend = servers.iter().any(|(server, _)| {
        !server.host.is_empty()
            || server
                .environment
                .keys()
                .any(|name| name.contains("HCCL") || name.contains("ASCEND"))
    });
    let nodes: Vec<Value> = nodes
        .into_iter()
        .enumerate()
        .map(|(index, (host, nic, devices))| {
            let mut node = Map::new();
            node.insert("name".to_owned(), format!("node-{}", index + 1).into());
            let host = if host.is_empty() {
                "127.0.0.1".to_owned()
            } else {
                host
            };
            node.insert("host".to_owned(), host.into());
            if let Some(nic) = nic {
                node.insert("nic".to_owned(), nic.into());
            }
            node.insert("devices".to_owned(), devices.into());
            Value::Object(node)
        })
        .collect();
    let mut file = Map::new();
    let mut set = |key: &str, value: Value| drop(file.insert(key.to_owned(), value));
    set("name", "imported".into());
    set("engine", if ascend { "vllm-ascend" } else { "vllm" }.into());
    set("model", Value::Object(model));
    set("nodes", nodes.into());
    set("instances", instances.into());
    if let Some(connector) = connector {
        set("handoff", json!({ "connector": connector }));
    }
    if let Some(ranktable) = ranktable {
        set("ranktable", ranktable);
    }
    let source = servers.iter().find(|(server, _)| !server.source.is_empty());
    if let Some((server, _)) = source {
        set("source", json!(server.source));
    }
    if let Some(container) = container {
        set("container", container);
    }
    Value::Object(file)
}
