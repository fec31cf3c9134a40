//! Rules 53 to 57, 59, 60 and 63: interfaces, links, pods, rank table, HCCL, versions.

use crate::engines::file::Kind;
use crate::engines::lint::{Context, Sink};
use crate::engines::template::{plain, version};
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use twinfer_protocol::Role;

const INTERFACES: &[&str] = &[
    "GLOO_SOCKET_IFNAME",
    "TP_SOCKET_IFNAME",
    "HCCL_SOCKET_IFNAME",
];

pub(super) fn interfaces(context: &Context<'_>, sink: &mut Sink<'_>) {
    let mut seen = BTreeSet::new();
    let several = context.plan.nodes.len() > 1;
    for process in &context.plan.processes {
        let Some(node) = context.node(&process.node) else {
            continue;
        };
        if !seen.insert(&process.node) {
            continue;
        }
        let at = context.at_node(&node.name, "nic");
        if let Some(ip) = process.variable("HCCL_IF_IP")
            && ip != node.host
        {
            let known = node.facts.interfaces.as_ref();
            let has = known.is_some_and(|map| map.values().any(|list| mentions(list, ip)));
            if !has {
                sink.found(
                    &at,
                    format!(
                        "node {}: HCCL_IF_IP is {ip}, the node is {}",
                        node.name, node.host
                    ),
                    Some(format!("HCCL_IF_IP: {}", node.host)),
                );
            }
        }
        let names: BTreeSet<&str> = INTERFACES
            .iter()
            .filter_map(|name| process.variable(name))
            .collect();
        if names.len() > 1 {
            let list: Vec<&str> = names.iter().copied().collect();
            sink.found(
                &at,
                format!(
                    "node {}: the three interfaces are {}",
                    node.name,
                    list.join(" and ")
                ),
                node.nic.clone(),
            );
        }
        for name in names {
            if several && name == "lo" {
                sink.found(
                    &at,
                    format!(
                        "node {}: interface lo in a deployment of several nodes",
                        node.name
                    ),
                    None,
                );
            }
            let Some(known) = &node.facts.interfaces else {
                continue;
            };
            let carrier = known.iter().find(|(_, list)| mentions(list, &node.host));
            let nearest = carrier.map(|(name, _)| format!("nic: {name}"));
            match known.get(name) {
                None => sink.found(
                    &at,
                    format!("node {} has no interface {name}", node.name),
                    nearest,
                ),
                Some(list) if !mentions(list, &node.host) => sink.found(
                    &at,
                    format!(
                        "node {}: interface {name} has no address {}",
                        node.name, node.host
                    ),
                    nearest,
                ),
                Some(_) => {}
            }
        }
    }
}

fn mentions(list: &Value, address: &str) -> bool {
    match list {
        Value::Array(items) => items.iter().any(|item| plain(item) == address),
        one => plain(one) == address,
    }
}

pub(super) fn tls(context: &Context<'_>, sink: &mut Sink<'_>) {
    let mut first: Option<(String, u32)> = None;
    for node in &context.file().nodes {
        for (device, switch) in node.facts.tls.iter().flatten().enumerate() {
            let here = format!("node {} device {device}", node.name);
            match &first {
                None => first = Some((here, *switch)),
                Some((other, expected)) if expected != switch => {
                    sink.found(
                        &context.at_node(&node.name, "facts"),
                        format!("the TLS switch is {switch} on {here} and {expected} on {other}"),
                        Some(format!("the switch {expected} on every device")),
                    );
                    return;
                }
                Some(_) => {}
            }
        }
    }
}

pub(super) fn links(context: &Context<'_>, sink: &mut Sink<'_>) {
    for node in &context.file().nodes {
        let at = context.at_node(&node.name, "facts");
        for (device, link) in node.facts.links.iter().flatten().enumerate() {
            if link != "UP" {
                sink.found(
                    &at,
                    format!("node {} device {device}: link is {link:?}", node.name),
                    Some("UP".to_owned()),
                );
            }
        }
        for (device, address) in node.facts.device_addresses.iter().flatten().enumerate() {
            if address.is_empty() || address == "0.0.0.0" {
                sink.found(
                    &at,
                    format!("node {} device {device} has no address", node.name),
                    None,
                );
            }
        }
    }
}

pub(super) fn pods(context: &Context<'_>, sink: &mut Sink<'_>) {
    let nodes: Vec<_> = context
        .plan
        .nodes
        .iter()
        .filter_map(|node| context.node(&node.name))
        .filter(|node| node.kind == Some(Kind::A3))
        .collect();
    let mut first: Option<(&str, &str)> = None;
    let mut pod: Option<(&str, &str)> = None;
    let mut ids: BTreeMap<&str, &str> = BTreeMap::new();
    for node in nodes {
        if let Some(own) = &node.pod {
            match pod {
                None => pod = Some((&node.name, own)),
                Some((other, expected)) if expected != own => sink.found(
                    &context.at_node(&node.name, "pod"),
                    format!(
                        "node {} is stated to stand in pod {own}, node {other} in {expected}",
                        node.name
                    ),
                    Some(format!("nodes of pod {expected} only")),
                ),
                Some(_) => {}
            }
        }
        for id in node.facts.super_pod_ids.iter().flatten() {
            match first {
                None => first = Some((&node.name, id)),
                Some((other, expected)) if expected != id => {
                    sink.found(
                        &context.at_node(&node.name, "facts"),
                        format!(
                            "Super Pod ID is {id} on node {} and {expected} on node {other}",
                            node.name
                        ),
                        Some(format!("nodes with Super Pod ID {expected} only")),
                    );
                    break;
                }
                Some(_) => {}
            }
        }
        for id in node.facts.super_device_ids.iter().flatten() {
            if let Some(other) = ids.insert(id, &node.name) {
                sink.found(
                    &context.at_node(&node.name, "facts"),
                    format!("SDID {id} is on node {} and on node {other}", node.name),
                    None,
                );
            }
        }
    }
}

pub(super) fn ranktable(context: &Context<'_>, sink: &mut Sink<'_>) {
    if context.connector() != "LLMDataDistCMgrConnector" {
        return;
    }
    let mut seen = BTreeSet::new();
    for (instance, processes) in context.instances() {
        let missing = |process: &&&crate::engines::plan::Process| {
            process
                .variable("DISAGGREGATED_PREFILL_RANK_TABLE_PATH")
                .is_none()
        };
        if let Some(process) = processes.iter().find(missing) {
            sink.found(
                &context.at(instance, "name"),
                format!(
                    "{}: DISAGGREGATED_PREFILL_RANK_TABLE_PATH is not set",
                    process.name
                ),
                Some("ranktable: /path/ranktable.json".to_owned()),
            );
        }
        for ranks in &instance.ranks {
            let Some(node) = context.node(&ranks.node) else {
                continue;
            };
            for address in node.facts.device_addresses.iter().flatten() {
                if seen.contains(address) && !address.is_empty() {
                    sink.found(
                        &context.at_node(&node.name, "facts"),
                        format!("device address {address} is on two devices"),
                        None,
                    );
                }
            }
        }
        for ranks in &instance.ranks {
            let addresses = context
                .node(&ranks.node)
                .and_then(|node| node.facts.device_addresses.as_ref());
            seen.extend(addresses.into_iter().flatten().cloned());
        }
    }
}

pub(super) fn buffers(context: &Context<'_>, sink: &mut Sink<'_>) {
    for (instance, processes) in context.instances() {
        let Some(process) = processes.first() else {
            continue;
        };
        let size = |process: &crate::engines::plan::Process| -> Option<u64> {
            process
                .variable("HCCL_BUFFSIZE")
                .map_or(Some(200), |text| text.parse().ok())
        };
        let wide = instance.ep.is_some_and(|ep| ep >= 32);
        let least = match instance.role {
            Role::Prefill => 200,
            Role::Decode if wide => 600,
            _ => 0,
        };
        let at = context.at(instance, "environment");
        match size(process) {
            None => sink.found(
                &at,
                format!(
                    "instance {}: HCCL_BUFFSIZE is {:?}",
                    instance.name,
                    process.variable("HCCL_BUFFSIZE").unwrap_or_default()
                ),
                Some(format!("HCCL_BUFFSIZE: {}", least.max(200))),
            ),
            Some(given) if given < least => sink.found(
                &at,
                format!(
                    "instance {}: HCCL_BUFFSIZE is {given} MB on {}",
                    instance.name, instance.role
                ),
                Some(format!("HCCL_BUFFSIZE: {least}")),
            ),
            Some(given) => {
                if let Some(other) = processes.iter().find(|other| size(other) != Some(given)) {
                    sink.found(
                        &at,
                        format!(
                            "HCCL_BUFFSIZE is {given} on {} and {} on {}",
                            process.name,
                            other.variable("HCCL_BUFFSIZE").unwrap_or("absent"),
                            other.name
                        ),
                        Some(format!(
                            "HCCL_BUFFSIZE: {given} on all nodes of {}",
                            instance.name
                        )),
                    );
                }
            }
        }
    }
}

/// Longest time with AIV, in seconds.
const AIV_SECONDS: u64 = 1091;

pub(super) fn exec_timeout(context: &Context<'_>, sink: &mut Sink<'_>) {
    for (instance, process) in context.first() {
        let Some(text) = process.variable("HCCL_EXEC_TIMEOUT") else {
            continue;
        };
        let aiv = process.variable("HCCL_OP_EXPANSION_MODE") == Some("AIV");
        let good = text
            .parse()
            .is_ok_and(|seconds: u64| (1..=AIV_SECONDS).contains(&seconds));
        if aiv && !good {
            sink.found(
                &context.at(instance, "environment"),
                format!(
                    "instance {}: HCCL_EXEC_TIMEOUT is {text} with AIV",
                    instance.name
                ),
                Some(format!("HCCL_EXEC_TIMEOUT: {AIV_SECONDS}")),
            );
        }
    }
}

pub(super) fn versions(context: &Context<'_>, sink: &mut Sink<'_>) {
    let mut first: BTreeMap<&str, (&str, String)> = BTreeMap::new();
    for node in &context.file().nodes {
        let Some(versions) = &node.facts.versions else {
            continue;
        };
        for (package, value) in versions {
            let own = plain(value);
            match first.get(package.as_str()) {
                None => {
                    first.insert(package, (&node.name, own));
                }
                Some((other, expected)) if *expected != own => sink.found(
                    &context.at_node(&node.name, "facts"),
                    format!(
                        "{package} is {own} on node {} and {expected} on node {other}",
                        node.name
                    ),
                    Some(format!("{package} {expected}")),
                ),
                Some(_) => {}
            }
        }
    }
    if let (Some((_, vllm)), Some((node, ascend))) = (first.get("vllm"), first.get("vllm-ascend")) {
        let pair = |text: &str| version(text).into_iter().take(3).collect::<Vec<_>>();
        if pair(vllm) != pair(ascend) {
            sink.found(
                &context.at_node(node, "facts"),
                format!("vllm is {vllm}, vllm-ascend {ascend}"),
                Some(format!("vllm {ascend}")),
            );
        }
    }
}
