//! [`EngineDeployment`] to [`EnginePlan`]: nodes, ranks, devices, ports, environment, arguments.

use crate::diagnostic::{Diagnostic, Diagnostics};
use crate::engines::file::{Api, EngineInstance, EngineNode};
use crate::engines::load::EngineDeployment;
use crate::engines::plan::{EngineInstancePlan, EnginePlan, NodeRanks, PlannedNode, Process};
use crate::engines::template::{Connector, Variables, holds, plain};
use crate::engines::{argv, head, limits, ports, router};
use crate::source::{canonical, steps};
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;
use twinfer_http::HostPort;
use twinfer_protocol::Role;

/// One instance on its way into the plan.
pub(crate) struct Draft<'d> {
    pub(crate) spec: &'d EngineInstance,
    pub(crate) group: usize,
    pub(crate) name: String,
    pub(crate) dp: u32,
    pub(crate) api: Api,
    /// Node, first rank, count.
    pub(crate) ranks: Vec<(&'d EngineNode, u32, u32)>,
}

/// Resolves a deployment. All mistakes are told at once.
///
/// # Errors
/// What no engine could start: unknown nodes, ranks without devices, a topology that the engine cannot do.
pub fn resolve_engines(
    deployment: &EngineDeployment,
    allowed: &[u16],
) -> Result<EnginePlan, Diagnostics> {
    let mut found = Vec::new();
    check_nodes(deployment, &mut found);
    let drafts = drafts(deployment, &mut found);
    let connector = connector(deployment, &mut found);
    if !found.is_empty() {
        return Err(deployment.diagnostics(found));
    }
    let served_model_name = served_name(deployment);
    let mut shared = shared_variables(deployment, &served_model_name, &drafts);
    let http_ports = http_ports(deployment, &drafts);
    if let Some(url) = prefill_url(deployment, &drafts, &http_ports) {
        shared
            .entry("handoff.prefill-url".to_owned())
            .or_insert(url);
    }
    let mut next_device: BTreeMap<&str, u32> = BTreeMap::new();
    let mut instances = Vec::new();
    let mut processes = Vec::new();
    for (index, draft) in drafts.iter().enumerate() {
        let rpc = instance_port(deployment, draft, "rpc-port", draft.spec.rpc_port);
        let rpc_address = draft.spec.rpc_address.clone().unwrap_or_else(|| {
            draft
                .ranks
                .first()
                .map(|(node, ..)| node.host.clone())
                .unwrap_or_default()
        });
        let mut endpoints = Vec::new();
        let mut made = Vec::new();
        for (place, &(node, first, count)) in draft.ranks.iter().enumerate() {
            let per_rank = draft.spec.tp * draft.spec.pp * draft.spec.pcp;
            let start = draft
                .spec
                .first_device
                .unwrap_or_else(|| next_device.get(node.name.as_str()).copied().unwrap_or(0));
            next_device.insert(&node.name, start + count * per_rank);
            let groups = match draft.api {
                Api::One => vec![(first, count)],
                Api::PerRank => (0..count).map(|local| (first + local, 1)).collect(),
            };
            for (local, (rank, ranks)) in groups.into_iter().enumerate() {
                let local = local as u32;
                let from = start + local * per_rank;
                let devices: Vec<u32> = if node.devices == 0 {
                    Vec::new()
                } else {
                    (from..from + ranks * per_rank).collect()
                };
                let serves = draft.api == Api::PerRank || place == 0;
                let port = serves.then(|| http_ports[index].saturating_add(local as u16));
                if let Some(port) = port {
                    endpoints.push(HostPort::display(&node.host, port));
                }
                let name = match (draft.api, draft.ranks.len()) {
                    (Api::PerRank, _) if draft.dp > 1 => format!("{}.rank{rank}", draft.name),
                    (Api::One, 2..) => format!("{}.{}", draft.name, node.name),
                    _ => draft.name.clone(),
                };
                let mut variables = shared.clone();
                let mut set = |key: &str, value: Value| {
                    variables.insert(key.to_owned(), value);
                };
                let whole = devices.len() == node.devices as usize;
                set("instance.name", json!(draft.name));
                set("role", json!(draft.spec.role.as_str()));
                set("kv-role", json!(kv_role(draft.spec.role)));
                set(
                    "api",
                    json!(if draft.api == Api::One {
                        "one"
                    } else {
                        "per-rank"
                    }),
                );
                set("serves", json!(serves));
                set("first-node", json!(place == 0));
                set("several-nodes", json!(draft.ranks.len() > 1));
                set(
                    "grouped",
                    json!(draft.dp > 1 || draft.spec.rpc_port.is_some()),
                );
                set("dp", json!(draft.dp));
                set("dp-local", json!(count));
                set("rank", json!(rank));
                set("local-rank", json!(local));
                set("tp", json!(draft.spec.tp));
                set("pp", json!(draft.spec.pp));
                set("pcp", json!(draft.spec.pcp));
                set("rpc-address", json!(rpc_address));
                set("rpc-port", rpc.map_or(Value::Null, Value::from));
                set("port", port.map_or(Value::Null, Value::from));
                set("node.name", json!(node.name));
                set("node.host", json!(node.host));
                set(
                    "node.nic",
                    node.nic.clone().map_or(Value::Null, Value::from),
                );
                let list: Vec<String> = devices.iter().map(u32::to_string).collect();
                set("devices", json!(list.join(",")));
                set("whole-node", json!(whole));
                set("listen", listen(deployment, draft));
                let kv = instance_port(deployment, draft, "kv-port", draft.spec.kv_port);
                set("kv-port", kv.map_or(Value::Null, Value::from));
                let engine_id = draft.spec.engine_id.clone();
                set(
                    "engine-id",
                    json!(engine_id.unwrap_or_else(|| index.to_string())),
                );
                if let Some(graph) = draft.spec.graph {
                    set("graph", serde_json::to_value(graph).unwrap_or_default());
                }
                if let Some(speculative) = &draft.spec.speculative {
                    set("speculative.method", json!(speculative.method));
                    set("speculative.tokens", json!(speculative.tokens));
                }
                for (number, (node, ..)) in draft.ranks.iter().enumerate() {
                    set(&format!("node.{}.name", number + 1), json!(node.name));
                    set(&format!("node.{}.host", number + 1), json!(node.host));
                }
                let over = per_node(draft.spec, &node.name);
                let flags = argv::apply_overrides(&mut variables, &over);
                for refuse in &deployment.template.refuse {
                    if holds(&refuse.when, &variables) {
                        let path = steps!["instances", draft.group, refuse.key.as_str()];
                        let message = format!("instance {}: {}", draft.name, refuse.reason);
                        let mistake = deployment.wrong(path, message, Some(refuse.instead.clone()));
                        if !found.contains(&mistake) {
                            found.push(mistake);
                        }
                    }
                }
                made.push(argv::process(
                    deployment,
                    draft,
                    connector,
                    variables,
                    &flags,
                    Process {
                        name,
                        instance: draft.name.clone(),
                        instance_index: index,
                        role: draft.spec.role,
                        node: node.name.clone(),
                        devices,
                        first_rank: rank,
                        ranks,
                        port,
                        environment: Vec::new(),
                        secrets: Vec::new(),
                        argv: Vec::new(),
                        settings: Map::new(),
                    },
                    node,
                ));
            }
        }
        let expert_parallel = made.first().is_some_and(|process: &Process| {
            process.settings.get("enable-expert-parallel") == Some(&json!(true))
        });
        // DeepInfer's engines spread experts over all ranks always.
        let always = deployment.template.model_per_http_worker;
        instances.push(EngineInstancePlan {
            name: draft.name.clone(),
            group: draft.group,
            role: draft.spec.role,
            dp: draft.dp,
            tp: draft.spec.tp,
            pp: draft.spec.pp,
            pcp: draft.spec.pcp,
            ep: (expert_parallel || always).then_some(draft.dp * draft.spec.tp),
            api: draft.api,
            ranks: draft
                .ranks
                .iter()
                .map(|&(node, first, count)| NodeRanks {
                    node: node.name.clone(),
                    first,
                    count,
                })
                .collect(),
            endpoints,
            rendezvous: rpc.map_or_else(
                || rpc_address.clone(),
                |port| HostPort::display(&rpc_address, port),
            ),
        });
        processes.append(&mut made);
    }
    if !found.is_empty() {
        return Err(deployment.diagnostics(found));
    }
    let mut plan = EnginePlan {
        deployment: deployment.file.name.clone(),
        engine: deployment.template.name.clone(),
        engine_version: deployment.version(),
        head: Vec::new(),
        model: deployment.file.model.path.clone(),
        served_model_name,
        connector: handoff_used(deployment).then(|| connector.0.to_owned()),
        flow: handoff_used(deployment).then_some(connector.1.flow),
        nodes: planned_nodes(deployment, &processes),
        instances,
        processes,
        router: None,
        ports: Vec::new(),
        pairs: Vec::new(),
        memory: Vec::new(),
        allowed: allowed.to_vec(),
    };
    plan.router = router::plan(deployment, &plan);
    plan.ports = ports::of(deployment, &plan, connector);
    plan.pairs = limits::pairs(&plan);
    plan.memory = limits::memory(deployment, &plan);
    plan.head = head::lines(deployment, &plan);
    Ok(plan)
}

/// Do prefill and decode stand apart?
pub(crate) fn handoff_used(deployment: &EngineDeployment) -> bool {
    let has = |role| deployment.file.instances.iter().any(|one| one.role == role);
    has(Role::Prefill) || has(Role::Decode)
}

fn kv_role(role: Role) -> &'static str {
    match role {
        Role::Prefill => "kv_producer",
        Role::Decode => "kv_consumer",
        Role::Both => "kv_both",
    }
}

fn per_node(spec: &EngineInstance, node: &str) -> Map<String, Value> {
    let over = spec.per_node.get(node).and_then(Value::as_object);
    over.into_iter()
        .flatten()
        .map(|(key, value)| (canonical(key), value.clone()))
        .collect()
}

fn listen(deployment: &EngineDeployment, draft: &Draft<'_>) -> Value {
    match &draft.spec.listen {
        Some(listen) => json!(listen),
        None => deployment
            .template
            .defaults
            .get("listen")
            .cloned()
            .unwrap_or_default(),
    }
}

/// A port of an instance: its own, else the template's.
fn instance_port(
    deployment: &EngineDeployment,
    _: &Draft<'_>,
    key: &str,
    own: Option<u16>,
) -> Option<u16> {
    own.or_else(|| {
        let default = deployment.template.defaults.get(key)?.as_u64()?;
        u16::try_from(default).ok()
    })
}

fn http_ports(deployment: &EngineDeployment, drafts: &[Draft<'_>]) -> Vec<u16> {
    let mut next: BTreeMap<&str, u16> = BTreeMap::new();
    let base = deployment.template.defaults.get("port");
    let base = base.and_then(Value::as_u64).unwrap_or(8100) as u16;
    drafts
        .iter()
        .map(|draft| {
            let most = draft
                .ranks
                .iter()
                .map(|(node, ..)| next.get(node.name.as_str()).copied().unwrap_or(base))
                .max();
            let port = draft.spec.port.unwrap_or(most.unwrap_or(base));
            for (node, _, count) in &draft.ranks {
                let used = if draft.api == Api::PerRank { *count } else { 1 };
                next.insert(&node.name, port.saturating_add(used as u16));
            }
            port
        })
        .collect()
}

/// The root URL of the first prefill instance, for connectors that ask it.
fn prefill_url(
    deployment: &EngineDeployment,
    drafts: &[Draft<'_>],
    ports: &[u16],
) -> Option<Value> {
    if let Some(url) = &deployment.file.handoff.prefill_url {
        return Some(json!(url));
    }
    let index = drafts
        .iter()
        .position(|draft| draft.spec.role == Role::Prefill)?;
    let (node, ..) = drafts[index].ranks.first()?;
    Some(json!(format!(
        "http://{}",
        HostPort::display(&node.host, ports[index])
    )))
}

fn served_name(deployment: &EngineDeployment) -> String {
    let model = &deployment.file.model;
    model.name.clone().unwrap_or_else(|| {
        let path = model.path.trim_end_matches('/');
        path.rsplit('/').next().unwrap_or("model").to_owned()
    })
}

fn shared_variables(
    deployment: &EngineDeployment,
    served: &str,
    drafts: &[Draft<'_>],
) -> Variables {
    let file = &deployment.file;
    let mut variables = Variables::new();
    let mut set = |key: &str, value: Option<Value>| {
        if let Some(value) = value {
            variables.insert(key.to_owned(), value);
        }
    };
    set("model.path", Some(json!(file.model.path)));
    set("model.name", Some(json!(served)));
    set(
        "model.revision",
        file.model.revision.clone().map(Value::from),
    );
    set("version", Some(json!(deployment.version())));
    set("ranktable", file.ranktable.clone().map(Value::from));
    let workload = file
        .warmup
        .as_ref()
        .and_then(|warmup| warmup.workload.clone());
    set("warmup.workload", workload.map(Value::from));
    set(
        "handoff.checkpoint-dir",
        file.handoff.checkpoint_dir.clone().map(Value::from),
    );
    for role in [Role::Prefill, Role::Decode] {
        if let Some(draft) = drafts.iter().find(|draft| draft.spec.role == role) {
            set(&format!("{role}.dp"), Some(json!(draft.dp)));
            set(&format!("{role}.tp"), Some(json!(draft.spec.tp)));
            set(&format!("{role}.pp"), Some(json!(draft.spec.pp)));
        }
    }
    for (name, default) in &deployment.template.options {
        let given = file.engine_options.get(name).unwrap_or(default);
        set(&format!("option.{name}"), Some(given.clone()));
    }
    variables
}

fn check_nodes(deployment: &EngineDeployment, found: &mut Vec<Diagnostic>) {
    let mut seen: BTreeMap<&str, usize> = BTreeMap::new();
    for (i, node) in deployment.file.nodes.iter().enumerate() {
        if let Some(first) = seen.insert(&node.name, i) {
            let line = deployment.line(steps!["nodes", first, "name"]);
            found.push(deployment.wrong(
                steps!["nodes", i, "name"],
                format!("nodes[{i}].name is {:?} again", node.name),
                Some(format!("line {line} has a node of that name")),
            ));
        }
        let allowed = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | ':' | '_');
        if node.host.is_empty() || !node.host.chars().all(allowed) {
            found.push(deployment.wrong(
                steps!["nodes", i, "host"],
                format!("nodes[{i}].host is {:?}", node.host),
                Some(
                    "allowed: an IP address or a DNS name, here or in the private file (`--private`)"
                        .to_owned(),
                ),
            ));
        }
        if node.name.is_empty() || !node.name.chars().all(allowed) || node.name.contains(':') {
            found.push(deployment.wrong(
                steps!["nodes", i, "name"],
                format!("nodes[{i}].name is {:?}", node.name),
                Some("allowed: letters, digits, `-`, `_` and `.`".to_owned()),
            ));
        }
    }
    for name in deployment.file.engine_options.keys() {
        if !deployment.template.options.contains_key(name) {
            let known: Vec<&str> = deployment
                .template
                .options
                .keys()
                .map(String::as_str)
                .collect();
            found.push(deployment.wrong(
                steps!["engine-options", name.as_str()],
                format!(
                    "engine-options: {} has no option {name:?}",
                    deployment.template.name
                ),
                Some(if known.is_empty() {
                    "it has none".to_owned()
                } else {
                    format!("allowed: {}", known.join(", "))
                }),
            ));
        }
    }
}

fn drafts<'d>(deployment: &'d EngineDeployment, found: &mut Vec<Diagnostic>) -> Vec<Draft<'d>> {
    let nodes: BTreeMap<&str, &EngineNode> = deployment
        .file
        .nodes
        .iter()
        .map(|node| (node.name.as_str(), node))
        .collect();
    let mut names = std::collections::BTreeSet::new();
    let mut drafts = Vec::new();
    for (group, spec) in deployment.file.instances.iter().enumerate() {
        let mut unknown = |key: &str, name: &str| {
            let known: Vec<&str> = nodes.keys().copied().take(20).collect();
            found.push(deployment.wrong(
                steps!["instances", group, key],
                format!("instances[{group}].{key}: node {name:?} is not listed under `nodes`"),
                Some(format!("allowed: {}", known.join(", "))),
            ));
        };
        let api = spec
            .api
            .or_else(|| deployment.template.api.first().copied())
            .unwrap_or(Api::One);
        let mut mistakes = Vec::new();
        if !deployment.template.api.contains(&api) {
            mistakes.push((
                "api",
                format!("api: {} has no such form", deployment.template.name),
                format!(
                    "allowed: {}",
                    serde_json::to_string(&deployment.template.api).unwrap_or_default()
                ),
            ));
        }
        if spec.ranks.is_some() && (spec.node.is_some() || spec.nodes.is_some()) {
            mistakes.push((
                "ranks",
                "ranks names nodes, and node or nodes does too".to_owned(),
                "give one of them".to_owned(),
            ));
        }
        if spec.ranks.is_some() && spec.count > 1 {
            mistakes.push((
                "count",
                format!(
                    "count is {} for an instance whose ranks are placed",
                    spec.count
                ),
                "write one instance for each, or use `nodes`".to_owned(),
            ));
        }
        if spec
            .nodes
            .as_ref()
            .is_some_and(|list| list.len() != spec.count as usize)
        {
            mistakes.push((
                "nodes",
                format!(
                    "nodes has not one entry for each of {} instances",
                    spec.count
                ),
                format!("give {} names", spec.count),
            ));
        }
        for number in 0..spec.count as usize {
            let name = match spec.count {
                1 => spec.name.clone(),
                _ => format!("{}-{number}", spec.name),
            };
            if !names.insert(name.clone()) {
                mistakes.push((
                    "name",
                    format!("instance name {name:?} is taken"),
                    "choose another".to_owned(),
                ));
            }
            let placed: Vec<(String, u32)> = match (&spec.ranks, &spec.nodes, &spec.node) {
                (Some(ranks), ..) => ranks
                    .iter()
                    .map(|(node, count)| {
                        let count = count.as_u64().filter(|n| (1..=65536).contains(n));
                        if count.is_none() {
                            mistakes.push((
                                "ranks",
                                format!("ranks: {node} is not a number of ranks"),
                                "allowed: an integer from 1 to 65536".to_owned(),
                            ));
                        }
                        (node.clone(), count.unwrap_or(1) as u32)
                    })
                    .collect(),
                (None, Some(list), _) => list
                    .get(number)
                    .map(|node| (node.clone(), spec.dp.unwrap_or(1)))
                    .into_iter()
                    .collect(),
                (None, None, Some(node)) => vec![(node.clone(), spec.dp.unwrap_or(1))],
                (None, None, None) => deployment
                    .file
                    .nodes
                    .first()
                    .map(|node| (node.name.clone(), spec.dp.unwrap_or(1)))
                    .into_iter()
                    .collect(),
            };
            let mut next = 0;
            let mut ranks = Vec::new();
            for (node, count) in placed {
                let Some(known) = nodes.get(node.as_str()) else {
                    let key = if spec.ranks.is_some() {
                        "ranks"
                    } else {
                        "node"
                    };
                    unknown(key, &node);
                    continue;
                };
                let start = spec.rank_start.get(&node).and_then(Value::as_u64);
                let first = start.map_or(next, |start| start as u32);
                next = first + count;
                ranks.push((*known, first, count));
            }
            let sum: u32 = ranks.iter().map(|(_, _, count)| *count).sum();
            drafts.push(Draft {
                spec,
                group,
                name,
                dp: spec.dp.unwrap_or(sum.max(1)),
                api,
                ranks,
            });
        }
        for (key, message, help) in mistakes {
            found.push(deployment.wrong(
                steps!["instances", group, key],
                format!("instances[{group}].{message}"),
                Some(help),
            ));
        }
    }
    drafts
}

/// Name of the connector and what the template says of it. One that no template knows passes through.
fn connector<'d>(
    deployment: &'d EngineDeployment,
    found: &mut Vec<Diagnostic>,
) -> (&'d str, &'d Connector) {
    static UNKNOWN: std::sync::LazyLock<Connector> = std::sync::LazyLock::new(Connector::default);
    let template = &deployment.template;
    let name = deployment
        .file
        .handoff
        .connector
        .as_deref()
        // What the native engine calls a pull is every template's own connector.
        .filter(|name| *name != "pull")
        .or(template.default_connector.as_deref())
        .unwrap_or_default();
    match template.connectors.get(name) {
        Some(connector) => (name, connector),
        None => {
            if handoff_used(deployment) {
                let known: Vec<&str> = template.connectors.keys().map(String::as_str).collect();
                found.push(deployment.wrong(
                    steps!["handoff", "connector"],
                    format!(
                        "handoff.connector is {name:?}, which template {} does not know",
                        template.name
                    ),
                    Some(format!(
                        "allowed: {}; a template of your own may add others",
                        known.join(", ")
                    )),
                ));
            }
            (name, &UNKNOWN)
        }
    }
}

fn planned_nodes(deployment: &EngineDeployment, processes: &[Process]) -> Vec<PlannedNode> {
    let mut used: BTreeMap<&str, std::collections::BTreeSet<u32>> = BTreeMap::new();
    for process in processes {
        used.entry(&process.node)
            .or_default()
            .extend(&process.devices);
    }
    deployment
        .file
        .nodes
        .iter()
        .filter_map(|node| {
            let devices = used.get(node.name.as_str())?;
            Some(PlannedNode {
                name: node.name.clone(),
                host: node.host.clone(),
                devices_used: devices.len() as u32,
                devices: node.devices,
            })
        })
        .collect()
}

/// Scalars of an environment as text.
pub(crate) fn text(value: &Value) -> String {
    plain(value)
}
