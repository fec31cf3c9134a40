//! Rules 6, 7, 12 to 17, 20 to 22 and 24: connectors and ports.

use crate::engines::file::RouterProgram;
use crate::engines::lint::context::{text, transfer};
use crate::engines::lint::{Context, Sink};
use crate::engines::plan::{EngineInstancePlan, PortKind, PortUse, Process};
use crate::engines::ports::{kv_port, transport_range};
use crate::engines::template::{Flow, version};
use crate::source::steps;
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use twinfer_protocol::Role;

fn extra(process: &Process) -> Option<&Value> {
    transfer(process)?.get("kv_connector_extra_config")
}

/// Processes whose connector settings differ from those before them, one of each kind.
fn distinct<'d>(context: &Context<'d>) -> Vec<(&'d EngineInstancePlan, &'d Process)> {
    let mut list: Vec<(&EngineInstancePlan, &Process)> = Vec::new();
    for (instance, processes) in context.instances() {
        let mut seen: Vec<Option<&Value>> = Vec::new();
        for process in processes {
            let value = process.settings.get("kv-transfer-config");
            if !seen.contains(&value) {
                seen.push(value);
                list.push((instance, *process));
            }
        }
    }
    list
}

pub(super) fn sizes(context: &Context<'_>, sink: &mut Sink<'_>) {
    let Some(((prefill, _), (decode, _))) = context.sides() else {
        return;
    };
    for (instance, process) in distinct(context) {
        for (side, real) in [("prefill", prefill), ("decode", decode)] {
            // Of several prefill instances every one must be what the settings say.
            let real = if instance.role.as_str() == side {
                instance
            } else {
                real
            };
            let Some(said) = extra(process).and_then(|extra| extra.get(side)) else {
                continue;
            };
            for (key, value) in [
                ("dp_size", real.dp),
                ("tp_size", real.tp),
                ("pp_size", real.pp),
            ] {
                let Some(given) = said.get(key).and_then(Value::as_u64) else {
                    continue;
                };
                if given != u64::from(value) {
                    sink.found(
                        &context.at(instance, "kv-transfer-config"),
                        format!(
                            "{}: kv_connector_extra_config says {side}.{key} {given}, instance {} has {value}",
                            process.name, real.name
                        ),
                        Some(format!("{side}.{key} {value}")),
                    );
                }
            }
        }
    }
}

pub(super) fn equal_settings(context: &Context<'_>, sink: &mut Sink<'_>) {
    let list = distinct(context);
    let mut first: Option<(&Process, &Value)> = None;
    for (instance, process) in list.iter().filter(|(one, _)| one.role != Role::Both) {
        let Some(own) = extra(process) else { continue };
        match first {
            None => first = Some((process, own)),
            Some((other, expected)) if expected != own => sink.found(
                &context.at(instance, "kv-transfer-config"),
                format!(
                    "kv_connector_extra_config of {} is {own}, of {} {expected}",
                    process.name, other.name
                ),
                Some(expected.to_string()),
            ),
            Some(_) => {}
        }
    }
}

pub(super) fn engine_ids(context: &Context<'_>, sink: &mut Sink<'_>) {
    let mut owner: BTreeMap<String, &EngineInstancePlan> = BTreeMap::new();
    for (instance, processes) in context
        .instances()
        .filter(|(one, _)| one.role != Role::Both)
    {
        let ids: BTreeSet<String> = processes
            .iter()
            .filter_map(|process| text(transfer(process)?, "engine_id"))
            .collect();
        if ids.len() > 1 {
            let list: Vec<&str> = ids.iter().map(String::as_str).collect();
            sink.found(
                &context.at(instance, "engine-id"),
                format!(
                    "instance {} is one group with engine ids {}",
                    instance.name,
                    list.join(" and ")
                ),
                Some(format!(
                    "engine-id {:?} on all its nodes",
                    list.first().unwrap_or(&"0")
                )),
            );
        }
        for id in ids {
            if let Some(other) = owner.get(&id) {
                let free = (0..).find(|id: &u32| !owner.contains_key(&id.to_string()));
                sink.found(
                    &context.at(instance, "engine-id"),
                    format!(
                        "instances {} and {} both have engine id {id:?}",
                        other.name, instance.name
                    ),
                    free.map(|id| format!("engine-id {:?}", id.to_string())),
                );
            } else {
                owner.insert(id, instance);
            }
        }
    }
}

/// What the transport of the engine draws from, also where the connector itself draws nothing.
fn random(context: &Context<'_>, process: &Process) -> Option<(u32, u32)> {
    let connectors = &context.deployment.template.connectors;
    let own = connectors.get(context.connector())?;
    let transport = own
        .transport
        .as_ref()
        .or_else(|| connectors.values().find_map(|one| one.transport.as_ref()))?;
    let (base, per_device) = transport_range(transport, context.deployment, process);
    let devices = context.node(&process.node)?.devices;
    (devices > 0).then(|| (base, base + devices * per_device - 1))
}

pub(super) fn random_range(context: &Context<'_>, sink: &mut Sink<'_>) {
    for (instance, processes) in context
        .instances()
        .filter(|(one, _)| one.role != Role::Both)
    {
        let mut seen = BTreeSet::new();
        for process in processes {
            if !seen.insert(&process.node) {
                continue;
            }
            let (Some(port), Some((first, last))) = (kv_port(process), random(context, process))
            else {
                continue;
            };
            let width = instance.dp * instance.tp * instance.pp * instance.pcp;
            let port = u32::from(port);
            let end = port + width - 1;
            let devices = context.node(&process.node).map_or(0, |node| node.devices);
            if port <= last && end >= first {
                sink.found(
                    &context.at(instance, "kv-port"),
                    format!(
                        "instance {}: kv-port {port} takes {port}-{end} on node {}, in {first}-{last}, which the transport of {devices} \
                         devices draws from at random",
                        instance.name, process.node
                    ),
                    Some(format!("kv-port {}", last + 1)),
                );
                break;
            }
            if end > 65535 {
                sink.found(
                    &context.at(instance, "kv-port"),
                    format!(
                        "instance {}: kv-port {port} takes ports up to {end}",
                        instance.name
                    ),
                    Some(format!("kv-port {}", 65536 - width)),
                );
                break;
            }
        }
    }
}

/// Overlaps of ports on a node, each pair once.
fn overlaps<'p>(
    context: &Context<'p>,
    kinds: &[PortKind],
    mut each: impl FnMut(&'p PortUse, &'p PortUse),
) {
    let mut open: Vec<&PortUse> = Vec::new();
    let mut node = "";
    for port in context
        .plan
        .ports
        .iter()
        .filter(|port| kinds.contains(&port.kind))
    {
        if port.node != node {
            open.clear();
            node = &port.node;
        }
        open.retain(|other| other.last >= port.first);
        for other in &open {
            each(other, port);
        }
        open.push(port);
    }
}

fn at_port(context: &Context<'_>, port: &PortUse) -> Vec<crate::source::Step> {
    let instance = port
        .instance
        .as_ref()
        .and_then(|name| context.plan.instances.iter().find(|one| one.name == *name));
    let key = match port.kind {
        PortKind::Handoff => "kv-port",
        PortKind::Rpc => "rpc-port",
        _ => "port",
    };
    match instance {
        Some(instance) => context.at(instance, key),
        None => steps!["router", "port"].to_vec(),
    }
}

fn range(port: &PortUse) -> String {
    if port.first == port.last {
        port.first.to_string()
    } else {
        format!("{}-{}", port.first, port.last)
    }
}

pub(super) fn spans(context: &Context<'_>, sink: &mut Sink<'_>) {
    let mut said = BTreeSet::new();
    overlaps(context, &[PortKind::Handoff], |a, b| {
        if a.instance != b.instance && said.insert((&a.instance, &b.instance)) {
            sink.found(
                &at_port(context, b),
                format!(
                    "node {}: {} ({}) and {} ({}) overlap",
                    a.node,
                    a.what,
                    range(a),
                    b.what,
                    range(b)
                ),
                Some(format!("kv-port {}", a.last + 1)),
            );
        }
    });
}

pub(super) fn taken(context: &Context<'_>, sink: &mut Sink<'_>) {
    let kinds = [
        PortKind::Http,
        PortKind::Rpc,
        PortKind::Handoff,
        PortKind::Collective,
        PortKind::Router,
        PortKind::Transport,
    ];
    let mut said = BTreeSet::new();
    overlaps(context, &kinds, |a, b| {
        let both = |kind: PortKind| a.kind == kind && b.kind == kind;
        let random = a.kind == PortKind::Transport || b.kind == PortKind::Transport;
        // Rules 13 and 14 are about these.
        if both(PortKind::Handoff)
            || random && (a.kind == PortKind::Handoff || b.kind == PortKind::Handoff)
            || random && (a.kind == PortKind::Collective || b.kind == PortKind::Collective)
        {
            return;
        }
        let ours = if a.process.is_some() || a.kind == PortKind::Router {
            a
        } else {
            b
        };
        if said.insert((&ours.instance, ours.kind, &a.node)) {
            let last = a.last.max(b.last);
            sink.found(
                &at_port(context, ours),
                format!(
                    "node {}: {} ({}) and {} ({}) overlap",
                    a.node,
                    a.what,
                    range(a),
                    b.what,
                    range(b)
                ),
                Some(if last < 65535 {
                    format!("port {}", last + 1)
                } else {
                    format!("a port below {}", a.first.min(b.first))
                }),
            );
        }
    });
}

/// Linux's range where no check recorded the node's.
const EPHEMERAL: [u16; 2] = [32768, 60999];

pub(super) fn ephemeral(context: &Context<'_>, sink: &mut Sink<'_>) {
    let mut said = BTreeSet::new();
    for port in context
        .plan
        .ports
        .iter()
        .filter(|port| port.kind == PortKind::Handoff)
    {
        let Some(node) = context.node(&port.node) else {
            continue;
        };
        let recorded = node.facts.ephemeral_ports;
        let [first, last] = recorded.unwrap_or(EPHEMERAL);
        let reserved = node.facts.reserved_ports.as_deref().unwrap_or_default();
        let inside = port.first <= u32::from(last) && port.last >= u32::from(first);
        if inside && !covers(reserved, port.first, port.last) && said.insert(&port.instance) {
            let whose = if recorded.is_some() {
                "its"
            } else {
                "Linux's usual"
            };
            sink.found(
                &at_port(context, port),
                format!(
                    "node {}: {} ({}) lies in {whose} range of outgoing connections, {first}-{last}",
                    port.node,
                    port.what,
                    range(port)
                ),
                Some(format!(
                    "sysctl net.ipv4.ip_local_reserved_ports={}",
                    range(port)
                )),
            );
        }
    }
}

/// Does a list such as `60000-60015,36000` cover all of a range?
fn covers(list: &str, first: u32, last: u32) -> bool {
    let ranges: Vec<(u32, u32)> = list
        .split(',')
        .filter_map(|part| {
            let (from, to) = part
                .trim()
                .split_once('-')
                .unwrap_or((part.trim(), part.trim()));
            Some((from.parse().ok()?, to.parse().ok()?))
        })
        .collect();
    (first..=last).all(|port| {
        ranges
            .iter()
            .any(|(from, to)| (*from..=*to).contains(&port))
    })
}

pub(super) fn llmdd(context: &Context<'_>, sink: &mut Sink<'_>) {
    if context.connector() != "LLMDataDistCMgrConnector" {
        return;
    }
    let mut on_node: BTreeMap<&str, Vec<(u32, u32, &EngineInstancePlan)>> = BTreeMap::new();
    for (instance, processes) in context
        .instances()
        .filter(|(one, _)| one.role != Role::Both)
    {
        let mut seen = BTreeSet::new();
        for process in processes
            .iter()
            .filter(|process| seen.insert(&process.node))
        {
            let base: u32 = process
                .variable("VLLM_LLMDD_RPC_PORT")
                .and_then(|text| text.parse().ok())
                .unwrap_or(5557);
            let ranks = instance
                .ranks
                .iter()
                .find(|ranks| ranks.node == process.node);
            let width = ranks.map_or(1, |ranks| ranks.count) * instance.tp;
            let list = on_node.entry(&process.node).or_default();
            for (other_base, other_width, other) in list.iter() {
                if base < other_base + other_width && *other_base < base + width {
                    sink.found(
                        &context.at(instance, "environment"),
                        format!(
                            "node {}: VLLM_LLMDD_RPC_PORT is {other_base} for {} ({other_width} ports) and {base} for {}",
                            process.node, other.name, instance.name
                        ),
                        Some(format!("VLLM_LLMDD_RPC_PORT: {}", other_base + other_width)),
                    );
                }
            }
            list.push((base, width, instance));
        }
    }
}

pub(super) fn roles(context: &Context<'_>, sink: &mut Sink<'_>) {
    for (instance, process) in distinct(context) {
        let Some(given) = transfer(process).and_then(|config| text(config, "kv_role")) else {
            continue;
        };
        let pool = given == "kv_both" && context.connector().contains("Store");
        let expected = match instance.role {
            Role::Prefill => "kv_producer",
            Role::Decode => "kv_consumer",
            Role::Both => "kv_both",
        };
        if given != expected && !pool {
            sink.found(
                &context.at(instance, "kv-transfer-config"),
                format!(
                    "{}: kv_role is {given} for role {}",
                    process.name, instance.role
                ),
                Some(format!("kv_role {expected}")),
            );
        }
    }
}

pub(super) fn flow(context: &Context<'_>, sink: &mut Sink<'_>) {
    let Some(flow) = context.plan.flow else {
        return;
    };
    let at = steps!["handoff", "connector"];
    let connectors = &context.deployment.template.connectors;
    if let Some(connector) = connectors.get(context.connector()) {
        let since = connector
            .since
            .as_ref()
            .is_some_and(|since| context.version < version(since));
        let until = connector
            .until
            .as_ref()
            .is_some_and(|until| context.version >= version(until));
        if since || until {
            let other = connectors.iter().find(|(_, one)| {
                one.flow == flow
                    && one
                        .since
                        .as_ref()
                        .is_none_or(|since| context.version >= version(since))
                    && one
                        .until
                        .as_ref()
                        .is_none_or(|until| context.version < version(until))
            });
            sink.found(
                at,
                format!(
                    "connector {} is not in version {}",
                    context.connector(),
                    context.plan.engine_version
                ),
                other.map(|(name, _)| name.clone()),
            );
        }
    }
    let Some(router) = &context.plan.router else {
        return;
    };
    let (serves, nearest) = match router.program {
        RouterProgram::Proxy => (Flow::PrefillFirst, "proxy-layerwise"),
        RouterProgram::ProxyLayerwise => (Flow::DecodeFirst, "proxy"),
        // Ours is told the connector.
        RouterProgram::Twinfer | RouterProgram::None => return,
    };
    // A decode instance that asks prefill itself needs no router that knows of it.
    if serves != flow && context.connector() != "checkpoint" {
        let word = |flow| match flow {
            Flow::PrefillFirst => "prefill",
            Flow::DecodeFirst => "decode",
        };
        sink.found(
            steps!["router", "program"],
            format!(
                "the router asks {} first, connector {} wants {} first",
                word(serves),
                context.connector(),
                word(flow)
            ),
            Some(format!("program: {nearest}")),
        );
    }
}

const LLMDATADIST_MODULE: &str = "vllm_ascend.distributed.llmdatadist_c_mgr_connector";

pub(super) fn module_path(context: &Context<'_>, sink: &mut Sink<'_>) {
    for (instance, process) in distinct(context) {
        let Some(config) = transfer(process) else {
            continue;
        };
        let given = text(config, "kv_connector_module_path");
        let needed = context.connector() == "LLMDataDistCMgrConnector" && !context.since("0.13");
        let wrong = match &given {
            None => needed.then(|| "kv_connector_module_path is absent".to_owned()),
            Some(path) if needed => {
                (path != LLMDATADIST_MODULE).then(|| format!("kv_connector_module_path is {path}"))
            }
            Some(path) => context
                .since("0.13")
                .then(|| format!("kv_connector_module_path is {path}")),
        };
        if let Some(wrong) = wrong {
            sink.found(
                &context.at(instance, "kv-transfer-config"),
                format!("{}: {wrong}", process.name),
                Some(if needed {
                    LLMDATADIST_MODULE.to_owned()
                } else {
                    "leave it out".to_owned()
                }),
            );
        }
    }
}

pub(super) fn legacy(context: &Context<'_>, sink: &mut Sink<'_>) {
    for (instance, process) in distinct(context) {
        let Some(config) = transfer(process) else {
            continue;
        };
        let mut wrong = |found: String, nearest: &str| {
            sink.found(
                &context.at(instance, "kv-transfer-config"),
                format!("{}: {found}", process.name),
                Some(nearest.to_owned()),
            );
        };
        if let Some(size) = config.get("kv_buffer_size").and_then(Value::as_f64)
            && size != 1e9
        {
            wrong(
                format!("kv_buffer_size {size} is reset to 1e9"),
                "leave it out",
            );
        }
        if config.get("enable_permute_local_kv") == Some(&Value::Bool(true)) {
            wrong(
                "enable_permute_local_kv is reset to false".to_owned(),
                "leave it out",
            );
        }
        let gone = ["kv_rank", "kv_parallel_size", "kv_ip"];
        for key in gone.into_iter().filter(|key| config.contains_key(*key)) {
            if context.since("0.11") {
                wrong(
                    format!(
                        "{key} is unknown to version {}",
                        context.plan.engine_version
                    ),
                    "leave it out",
                );
            }
        }
    }
}
