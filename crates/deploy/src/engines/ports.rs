//! Which ports every node listens on, by each connector's arithmetic.

use crate::engines::file::Api;
use crate::engines::load::EngineDeployment;
use crate::engines::plan::{EngineInstancePlan, EnginePlan, PortKind, PortUse, Process};
use crate::engines::template::{Connector, RankKind, Span, Transport, version};
use std::collections::BTreeMap;
use twinfer_protocol::Role;

/// All ports, by node and number.
pub(crate) fn of(
    deployment: &EngineDeployment,
    plan: &EnginePlan,
    (name, connector): (&str, &Connector),
) -> Vec<PortUse> {
    let mut ports = Vec::new();
    for process in &plan.processes {
        let Some(instance) = plan.instance(process) else {
            continue;
        };
        let mut add = |first: u32, last: u32, what: String, kind| {
            ports.push(PortUse {
                node: process.node.clone(),
                first,
                last,
                what: format!("{}: {what}", process.name),
                kind,
                process: Some(process.name.clone()),
                instance: Some(process.instance.clone()),
            });
        };
        if let Some(port) = process.port {
            add(port.into(), port.into(), "HTTP".to_owned(), PortKind::Http);
        }
        // Rank 0 listens for its mates.
        if process.first_rank == 0
            && let Some(port) = rpc_port(process, instance)
        {
            add(
                port.into(),
                port.into(),
                "rendezvous".to_owned(),
                PortKind::Rpc,
            );
        }
        if plan.connector.is_none() || instance.role == Role::Both {
            continue;
        }
        if let Some(span) = &connector.span
            && (!connector.prefill_listens_alone || instance.role == Role::Prefill)
            && let Some((first, last)) = handoff_span(span, process, instance)
        {
            add(first, last, format!("handoff, {name}"), PortKind::Handoff);
        }
    }
    let mut first_of: BTreeMap<&str, &Process> = BTreeMap::new();
    for process in &plan.processes {
        first_of.entry(&process.node).or_insert(process);
    }
    let order: BTreeMap<&str, usize> = deployment
        .file
        .nodes
        .iter()
        .enumerate()
        .map(|(index, node)| (node.name.as_str(), index))
        .collect();
    for node in &plan.nodes {
        let mut add = |first: u32, count: u32, what: String, kind| {
            if count > 0 {
                ports.push(PortUse {
                    node: node.name.clone(),
                    first,
                    last: first + count - 1,
                    what,
                    kind,
                    process: None,
                    instance: None,
                });
            }
        };
        let one = first_of.get(node.name.as_str()).copied();
        let transport = connector
            .transport
            .as_ref()
            .filter(|_| plan.connector.is_some());
        if let (Some(transport), Some(process)) = (transport, one) {
            let (first, per_device) = transport_range(transport, deployment, process);
            let what = format!("{name}'s transport, drawn at random");
            add(first, node.devices * per_device, what, PortKind::Transport);
        }
        for range in &deployment.template.port_ranges {
            let given = range
                .variable
                .as_ref()
                .and_then(|variable| one?.variable(variable)?.parse::<u16>().ok());
            let first = given.unwrap_or(range.base);
            add(
                first.into(),
                range.count.into(),
                range.what.clone(),
                PortKind::Collective,
            );
        }
        let facts = order.get(node.name.as_str());
        let facts = facts.and_then(|index| deployment.file.nodes.get(*index));
        if let Some([first, last]) = facts.and_then(|node| node.facts.ephemeral_ports) {
            let count = u32::from(last).saturating_sub(first.into()) + 1;
            add(
                first.into(),
                count,
                "outgoing connections".to_owned(),
                PortKind::Ephemeral,
            );
        }
    }
    if let Some(router) = &plan.router {
        ports.push(PortUse {
            node: router.node.clone(),
            first: router.port.into(),
            last: router.port.into(),
            what: "router: HTTP".to_owned(),
            kind: PortKind::Router,
            process: None,
            instance: None,
        });
    }
    ports.sort_by_key(|port| {
        (
            order.get(port.node.as_str()).copied(),
            port.first,
            port.last,
        )
    });
    ports
}

/// Port of the rendezvous that a process was given.
pub(crate) fn rpc_port(process: &Process, instance: &EngineInstancePlan) -> Option<u16> {
    let flag = process.number("data-parallel-rpc-port");
    let variable = process
        .variable("MASTER_PORT")
        .and_then(|text| text.parse().ok());
    let port = flag.or(variable)?;
    // A group of one rank meets nobody, except where the engine's workers use the variable.
    (instance.dp > 1 || instance.ranks.len() > 1 || flag.is_some())
        .then(|| u16::try_from(port).ok())
        .flatten()
}

/// First and last port of a process's handshakes.
pub(crate) fn handoff_span(
    span: &Span,
    process: &Process,
    instance: &EngineInstancePlan,
) -> Option<(u32, u32)> {
    let base = span
        .variable
        .as_ref()
        .and_then(|name| process.variable(name)?.parse().ok())
        .or_else(|| match span.base.as_str() {
            "kv-port" => kv_port(process),
            _ => None,
        })
        .or(span.default)?;
    let base = u32::from(base);
    let width: u32 = span
        .width
        .iter()
        .map(|factor| match factor.as_str() {
            "tp" => instance.tp,
            "pp" => instance.pp,
            "pcp" => instance.pcp,
            _ => 1,
        })
        .product();
    let (rank, ranks) = match span.rank {
        RankKind::None => return Some((base, base)),
        RankKind::Global => (process.first_rank, process.ranks),
        RankKind::Local => {
            let start = instance
                .ranks
                .iter()
                .find(|ranks| ranks.node == process.node)
                .map_or(0, |ranks| ranks.first);
            let local = if instance.api == Api::One {
                0
            } else {
                process.first_rank - start
            };
            (local, process.ranks)
        }
    };
    let first = base + rank * width;
    Some((first, first + ranks * width - 1))
}

/// The kv-port in a process's connector settings.
pub(crate) fn kv_port(process: &Process) -> Option<u16> {
    let value = process.object("kv-transfer-config")?.get("kv_port")?;
    match value.as_str() {
        Some(text) => text.parse().ok(),
        None => u16::try_from(value.as_u64()?).ok(),
    }
}

/// First port and ports per device of a transport's random range.
pub(crate) fn transport_range(
    transport: &Transport,
    deployment: &EngineDeployment,
    process: &Process,
) -> (u32, u32) {
    let base = process
        .variable(&transport.variable)
        .and_then(|text| text.parse().ok())
        .unwrap_or(transport.base);
    let per_device = match (&transport.newer, &deployment.file.handoff.mooncake_version) {
        (Some((from, count)), Some(given)) if version(given) >= version(from) => *count,
        _ => transport.per_device,
    };
    (base.into(), per_device)
}
