//! [`Deployment`] and [`Facts`] to [`Plan`]: names, nodes, cores, ports, command lines; every mistake
//! that several values make together is found here.

use crate::cores::{self, Ask};
use crate::diagnostic::{Diagnostic, Diagnostics};
use crate::file::{InstanceSpec, NodeSpec, OneOrList};
use crate::load::Deployment;
use crate::plan::{
    Checks, Facts, Plan, PlannedInstance, PlannedNode, PlannedRanks, PlannedRouter, PlannedVariable,
};
use crate::source::{Step, steps};
use crate::{command, ports};
use serde_json::Value;
use std::collections::BTreeMap;
use std::num::NonZeroU16;
use twinfer_config::ranges::DP;
use twinfer_http::HostPort;
use twinfer_protocol::{API_KEY_ENV, PEER_KEY_ENV, Role};

/// One instance on its way into the plan.
pub(crate) struct Draft<'d> {
    pub(crate) spec: &'d InstanceSpec,
    pub(crate) group: usize,
    /// Number within the group.
    pub(crate) number: usize,
    pub(crate) name: String,
    pub(crate) node: &'d NodeSpec,
    pub(crate) cores: Vec<u32>,
    /// Its ranks, if it has some on several nodes.
    pub(crate) ranks: Option<PlannedRanks>,
    pub(crate) port: u16,
    /// The first of as many as it has ranks.
    pub(crate) kv_port: Option<u16>,
}

impl Draft<'_> {
    /// Ranks whose HTTP is on another node.
    pub(crate) fn is_headless(&self) -> bool {
        self.ranks.as_ref().is_some_and(|ranks| ranks.first > 0)
    }

    /// Ranks of this instance, as far as the file says so rightly: what is wrong is told with the flags.
    pub(crate) fn rank_count(&self) -> u16 {
        let given = self.spec.flags.get("dp").and_then(Value::as_u64);
        let ranks = given.and_then(|ranks| u32::try_from(ranks).ok());
        let ranks = ranks.filter(|ranks| DP.contains(ranks)).unwrap_or(1);
        u16::try_from(ranks).unwrap_or(1)
    }

    /// Ports of its ranks for KV.
    pub(crate) fn kv_ports(&self) -> impl Iterator<Item = u16> {
        let ranks = self.rank_count();
        self.kv_port
            .into_iter()
            .flat_map(move |first| (0..ranks).filter_map(move |rank| first.checked_add(rank)))
    }
}

/// Resolves a deployment. All mistakes are told at once.
pub fn resolve(
    deployment: &Deployment,
    facts: &Facts,
    checks: Checks<'_>,
) -> Result<Plan, Diagnostics> {
    let file = &deployment.file;
    let mut found = Vec::new();
    if let Some(problem) = &facts.model_problem {
        found.push(deployment.wrong(
            steps!["model", "path"],
            format!("model.path: {problem}"),
            None,
        ));
    }
    check_name(deployment, steps!["name"], "name", &file.name, &mut found);
    nodes(deployment, &mut found);
    let mut drafts = draft(deployment, &mut found);
    groups(deployment, &mut found);
    let router_node = node_of(
        deployment,
        file.router.node.as_deref(),
        steps!["router", "node"],
        &mut found,
    );
    let mut warnings = Vec::new();
    allot_cores(deployment, facts, &mut drafts, &mut found, &mut warnings);
    let router_host = file
        .router
        .host
        .clone()
        .or_else(|| router_node.map(|node| node.host.clone()))
        .unwrap_or_default();
    ports::allot(
        deployment,
        &mut drafts,
        router_node.map(|node| node.name.as_str()),
        &mut found,
    );

    let served_model_name = served_name(deployment);
    let pd_peers: Vec<String> = drafts
        .iter()
        .flat_map(|draft| {
            draft
                .kv_ports()
                .map(|port| HostPort::display(&draft.node.host, port))
        })
        .collect();
    let model = deployment.model_path();
    let instances: Vec<PlannedInstance> = drafts
        .iter()
        .map(|draft| PlannedInstance {
            name: draft.name.clone(),
            role: draft.spec.role,
            node: draft.node.name.clone(),
            cores: draft.cores.clone(),
            ranks: draft.ranks.clone(),
            host: draft.node.host.clone(),
            port: draft.port,
            kv_port: draft.kv_port,
            kv_ports: draft.kv_ports().collect(),
            environment: vec![peer_key(draft.spec.flags.contains_key("peer-key-file"))]
                .into_iter()
                .flatten()
                .collect(),
            command: command::serve(
                deployment,
                draft,
                &model,
                &served_model_name,
                &pd_peers,
                checks,
                &mut found,
            ),
        })
        .collect();
    let urls = |role: Role| {
        instances
            .iter()
            .filter(move |instance| instance.role == role && instance.answers())
            .map(PlannedInstance::url)
    };
    let router_flags = &file.router.flags;
    let router = PlannedRouter {
        node: router_node
            .map(|node| node.name.clone())
            .unwrap_or_default(),
        host: router_host.clone(),
        port: file.router.port.get(),
        environment: [
            peer_key(router_flags.contains_key("peer-key-file")),
            (!router_flags.contains_key("api-key-file")).then(|| PlannedVariable {
                name: API_KEY_ENV.to_owned(),
                source: "from the environment, if set there",
            }),
        ]
        .into_iter()
        .flatten()
        .collect(),
        command: command::router(
            deployment,
            &router_host,
            &[
                ("--prefill", urls(Role::Prefill).collect()),
                ("--decode", urls(Role::Decode).collect()),
                ("--worker", urls(Role::Both).collect()),
            ],
            &mut found,
        ),
    };
    if !found.is_empty() {
        return Err(deployment.diagnostics(found));
    }
    let used = |node: &&NodeSpec| {
        let on = |name: &str| name == node.name;
        on(&router.node) || instances.iter().any(|instance| on(&instance.node))
    };
    let nodes = file.nodes.iter().filter(used).map(|node| PlannedNode {
        name: node.name.clone(),
        host: node.host.clone(),
        agent: node.agent.map(NonZeroU16::get),
    });
    Ok(Plan {
        deployment: file.name.clone(),
        model,
        served_model_name,
        nodes: nodes.collect(),
        instances,
        router,
        warnings,
    })
}

fn peer_key(from_file: bool) -> Option<PlannedVariable> {
    (!from_file).then(|| PlannedVariable {
        name: PEER_KEY_ENV.to_owned(),
        source: "from the environment, else a random one for each start",
    })
}

fn served_name(deployment: &Deployment) -> String {
    let from_folder = || {
        let path = deployment.model_path();
        let path = path.canonicalize().unwrap_or(path);
        path.file_name()
            .map(|name| name.to_string_lossy().into_owned())
            .unwrap_or_else(|| "model".to_owned())
    };
    deployment
        .file
        .model
        .name
        .clone()
        .unwrap_or_else(from_folder)
}

/// Names stand in logs, labels and file names.
fn check_name(
    deployment: &Deployment,
    path: &[Step],
    what: &str,
    name: &str,
    found: &mut Vec<Diagnostic>,
) {
    let inside = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
    let good = (1..=64).contains(&name.len())
        && name.chars().all(inside)
        && name
            .chars()
            .next()
            .is_some_and(|c| c.is_ascii_alphanumeric());
    if !good {
        found.push(deployment.wrong(
            path,
            format!("{what} is {name:?}"),
            Some("allowed: 1 to 64 letters, digits, `-`, `_` and `.`, the first a letter or digit".to_owned()),
        ));
    }
}

fn nodes(deployment: &Deployment, found: &mut Vec<Diagnostic>) {
    let mut seen = BTreeMap::new();
    let mut hosts = BTreeMap::new();
    for (i, node) in deployment.file.nodes.iter().enumerate() {
        let path = steps!["nodes", i, "name"];
        check_name(
            deployment,
            path,
            &format!("nodes[{i}].name"),
            &node.name,
            found,
        );
        if let Some(first) = seen.insert(&node.name, i) {
            let line = deployment.line(steps!["nodes", first, "name"]);
            let message = format!("nodes[{i}].name is {:?} again", node.name);
            found.push(deployment.wrong(
                path,
                message,
                Some(format!("line {line} has a node of that name")),
            ));
        }
        let host = &node.host;
        if let Some(first) = hosts.insert(host, i) {
            let line = deployment.line(steps!["nodes", first, "name"]);
            let message = format!("nodes[{i}].host is {host:?} again");
            let help = format!("a node is one host; line {line} has it");
            found.push(deployment.wrong(steps!["nodes", i, "host"], message, Some(help)));
        }
        let allowed = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | ':');
        if host.is_empty() || host.len() > 253 || !host.chars().all(allowed) {
            let help =
                Some("allowed: an IP address or a DNS name, without scheme and port".to_owned());
            found.push(deployment.wrong(
                steps!["nodes", i, "host"],
                format!("nodes[{i}].host is {host:?}"),
                help,
            ));
        } else if host
            .parse::<std::net::IpAddr>()
            .is_ok_and(|ip| ip.is_unspecified())
        {
            let help = Some("give the address that others reach the node at".to_owned());
            let message = format!("nodes[{i}].host is {host:?}, which nobody can dial");
            found.push(deployment.wrong(steps!["nodes", i, "host"], message, help));
        }
    }
}

fn node_of<'d>(
    deployment: &'d Deployment,
    name: Option<&str>,
    path: &[Step],
    found: &mut Vec<Diagnostic>,
) -> Option<&'d NodeSpec> {
    let nodes = &deployment.file.nodes;
    let Some(name) = name else {
        return nodes.first();
    };
    let node = nodes.iter().find(|node| node.name == name);
    if node.is_none() {
        let names: Vec<&str> = nodes.iter().map(|node| node.name.as_str()).collect();
        found.push(deployment.wrong(
            path,
            format!("node {name:?} is not listed under `nodes`"),
            Some(format!("allowed: {}", names.join(", "))),
        ));
    }
    node
}

fn draft<'d>(deployment: &'d Deployment, found: &mut Vec<Diagnostic>) -> Vec<Draft<'d>> {
    let mut drafts: Vec<Draft<'d>> = Vec::new();
    for (group, spec) in deployment.file.instances.iter().enumerate() {
        let path = steps!["instances", group, "name"];
        check_name(
            deployment,
            path,
            &format!("instances[{group}].name"),
            &spec.name,
            found,
        );
        let places = match &spec.ranks {
            Some(ranks) => places(deployment, group, ranks, found),
            None => {
                let at = steps!["instances", group, "node"];
                let node = node_of(deployment, spec.node.as_deref(), at, found);
                node.map(|node| (node, None)).into_iter().collect()
            }
        };
        for number in 0..spec.count as usize {
            let name = if spec.count == 1 {
                spec.name.clone()
            } else {
                format!("{}-{number}", spec.name)
            };
            let help = if name == "router" {
                Some("the router has that name".to_owned())
            } else {
                drafts.iter().find(|other| other.name == name).map(|other| {
                    let line = deployment.line(steps!["instances", other.group, "name"]);
                    format!("the instances of line {line} have that name")
                })
            };
            if help.is_some() {
                found.push(deployment.wrong(
                    path,
                    format!("instance name {name:?} is taken"),
                    help,
                ));
                break;
            }
            for (node, ranks) in &places {
                let other = ranks.as_ref().is_some_and(|ranks| ranks.first > 0);
                drafts.push(Draft {
                    spec,
                    group,
                    number,
                    name: match other {
                        // No name of the file has this character.
                        true => format!("{name}@{}", node.name),
                        false => name.clone(),
                    },
                    node,
                    cores: Vec::new(),
                    ranks: ranks.clone(),
                    port: 0,
                    kv_port: None,
                });
            }
        }
    }
    drafts
}

/// The nodes of an instance that has ranks on them, in order, with what is said of each one's ranks; the ports come later.
fn places<'d>(
    deployment: &'d Deployment,
    group: usize,
    ranks: &BTreeMap<String, u32>,
    found: &mut Vec<Diagnostic>,
) -> Vec<(&'d NodeSpec, Option<PlannedRanks>)> {
    let spec = &deployment.file.instances[group];
    let at = steps!["instances", group, "ranks"];
    let mut wrong = |message: String, help: &str| {
        let message = format!("instances[{group}].{message}");
        found.push(deployment.wrong(at, message, Some(help.to_owned())));
    };
    if spec.role != Role::Both {
        wrong(
            format!("ranks is given for role {}", spec.role),
            "allowed for role both: ranks on several nodes hand no KV over",
        );
    }
    if spec.count != 1 {
        wrong(
            format!("ranks is given with a count of {}", spec.count),
            "give each instance an entry of its own",
        );
    }
    for (key, given) in [
        ("node", spec.node.is_some()),
        ("cpus", spec.cpus.is_some()),
        ("dp", spec.flags.contains_key("dp")),
    ] {
        if given {
            wrong(
                format!("{key} is given beside ranks"),
                "leave it out: `ranks` names the nodes and how many ranks each has, a node's `cores` its cores",
            );
        }
    }
    let all: u64 = ranks.values().map(|&count| u64::from(count)).sum();
    let most = u64::from(*DP.end());
    if ranks.is_empty() || ranks.values().any(|&count| count == 0) || all > most {
        wrong(
            format!("ranks are {all} on {} nodes", ranks.len()),
            &format!("allowed: at least 1 on each node, {most} together"),
        );
        return Vec::new();
    }
    for name in ranks.keys() {
        node_of(deployment, Some(name), at, found);
    }
    let nodes = deployment.file.nodes.iter();
    let nodes: Vec<(&NodeSpec, u32)> = nodes
        .filter_map(|node| ranks.get(&node.name).map(|&count| (node, count)))
        .collect();
    let master_addr = nodes.first().map(|(node, _)| match node.rank_host {
        Some(address) => address.to_string(),
        None => node.host.clone(),
    });
    let mut first = 0;
    let place = |(node, count): &(&'d NodeSpec, u32)| {
        let planned = PlannedRanks {
            first,
            count: *count,
            all: u32::try_from(all).unwrap_or(u32::MAX),
            master_addr: master_addr.clone().unwrap_or_default(),
            rpc_port: 0,
        };
        first += count;
        (*node, Some(planned))
    };
    nodes.iter().map(place).collect()
}

/// What the values of one group say together, and the groups among each other.
fn groups(deployment: &Deployment, found: &mut Vec<Diagnostic>) {
    let specs = &deployment.file.instances;
    for (i, spec) in specs.iter().enumerate() {
        let wrong = |key: &str, message: String, help: &str| {
            deployment.wrong(
                steps!["instances", i, key],
                format!("instances[{i}].{message}"),
                Some(help.to_owned()),
            )
        };
        if spec.tp != 1 {
            let help = "allowed: 1; the native engine has no tensor parallelism, its threads share the work: raise `threads`";
            found.push(wrong("tp", format!("tp is {}", spec.tp), help));
        }
        if let Some(cpus) = &spec.cpus {
            check_length(spec, cpus, "cpus", &wrong, found);
            for set in cpus.to_vec() {
                if let Some(threads) = spec
                    .threads
                    .filter(|threads| *threads as usize != set.0.len())
                {
                    let cores = set.0.len();
                    found.push(wrong(
                        "threads",
                        format!("threads is {threads}, but cpus names {cores} cores"),
                        "give one of the two, or as many threads as cores",
                    ));
                    break;
                }
            }
            if spec.count > 1 && matches!(cpus, OneOrList::One(_)) {
                let help = "give a list with one entry per instance, or leave it to the plan";
                found.push(wrong(
                    "cpus",
                    format!("cpus is one set of cores for {} instances", spec.count),
                    help,
                ));
            }
        }
        if let Some(ports) = &spec.port {
            check_length(spec, ports, "port", &wrong, found);
        }
        if let Some(ports) = &spec.kv_port {
            check_length::<NonZeroU16>(spec, ports, "kv-port", &wrong, found);
            if spec.role != Role::Prefill {
                let help =
                    "leave it out; only prefill instances hand KV over with connector `pull`";
                found.push(wrong(
                    "kv-port",
                    format!("kv-port is given for role {}", spec.role),
                    help,
                ));
            }
        }
    }
    let has = |role: Role| specs.iter().position(|spec| spec.role == role);
    for (role, other) in [(Role::Prefill, Role::Decode), (Role::Decode, Role::Prefill)] {
        if let (Some(i), None) = (has(role), has(other)) {
            found.push(deployment.wrong(
                steps!["instances", i, "role"],
                format!("instances[{i}].role is {role}, but no instance has role {other}"),
                Some(format!("add an instance of role {other}, or use role both")),
            ));
        }
    }
    same_on_both_sides(deployment, found);
}

const DRAFTS: &str = "num-speculative-tokens";

/// Flags that are part of the fingerprint: a pair that differs refuses every handoff.
fn same_on_both_sides(deployment: &Deployment, found: &mut Vec<Diagnostic>) {
    let specs = &deployment.file.instances;
    let Some((first, reference)) = specs
        .iter()
        .enumerate()
        .find(|(_, spec)| spec.role == Role::Prefill)
    else {
        return;
    };
    for (flag, default) in [
        ("dtype", "bf16"),
        ("block-size", "16"),
        ("quantization", "none"),
        (DRAFTS, "0"),
    ] {
        // Whether there is a layer that proposes tokens decides what a block holds, not how many it proposes.
        let kind = |value: &str| {
            if flag == DRAFTS {
                (value != "0").to_string()
            } else {
                value.to_owned()
            }
        };
        let value = |spec: &InstanceSpec| match spec.flags.get(flag) {
            None | Some(Value::Null) => default.to_owned(),
            Some(Value::String(text)) => text.clone(),
            Some(other) => other.to_string(),
        };
        let expected = value(reference);
        for (i, spec) in specs
            .iter()
            .enumerate()
            .filter(|(_, spec)| spec.role != Role::Both)
        {
            if kind(&value(spec)) != kind(&expected) {
                let line = deployment.line(steps!["instances", first, "name"]);
                found.push(deployment.wrong(
                    steps!["instances", i, flag],
                    format!("instances[{i}].{flag} is {}, but {expected} for the prefill instance of line {line}", value(spec)),
                    Some("prefill and decode instances exchange KV only when this is equal".to_owned()),
                ));
            }
        }
    }
}

fn check_length<T: Clone>(
    spec: &InstanceSpec,
    values: &OneOrList<T>,
    key: &str,
    wrong: &dyn Fn(&str, String, &str) -> Diagnostic,
    found: &mut Vec<Diagnostic>,
) {
    if let OneOrList::List(list) = values
        && list.len() != spec.count as usize
    {
        let message = format!(
            "{key} has {} entries for {} instances",
            list.len(),
            spec.count
        );
        found.push(wrong(key, message, "give one entry per instance"));
    }
}

fn allot_cores(
    deployment: &Deployment,
    facts: &Facts,
    drafts: &mut [Draft<'_>],
    found: &mut Vec<Diagnostic>,
    warnings: &mut Vec<String>,
) {
    for (i, node) in deployment.file.nodes.iter().enumerate() {
        let mine: Vec<usize> = (0..drafts.len())
            .filter(|&d| std::ptr::eq(drafts[d].node, node))
            .collect();
        if mine.is_empty() {
            continue;
        }
        let permitted = facts.cores.get(&node.name);
        let cores = match (&node.cores, permitted) {
            (Some(listed), Some(permitted)) => {
                let missing: Vec<u32> = listed
                    .0
                    .iter()
                    .filter(|core| !permitted.contains(core))
                    .copied()
                    .collect();
                if !missing.is_empty() {
                    let (missing, permitted) = (
                        crate::CoreSet::text(&missing),
                        crate::CoreSet::text(permitted),
                    );
                    found.push(deployment.wrong(
                        steps!["nodes", i, "cores"],
                        format!("nodes[{i}].cores names {missing}, which this process may not use"),
                        Some(format!("allowed: {permitted}")),
                    ));
                    continue;
                }
                listed.0.clone()
            }
            (Some(listed), None) => listed.0.clone(),
            (None, Some(permitted)) => permitted.clone(),
            (None, None) => {
                found.push(deployment.wrong(
                    steps!["nodes", i, "name"],
                    format!("the cores of node {:?} are not known here", node.name),
                    Some("list them: `cores: 0-3`".to_owned()),
                ));
                continue;
            }
        };
        let asks: Vec<Ask> = mine
            .iter()
            .map(|&d| {
                let draft = &drafts[d];
                let named = draft
                    .spec
                    .cpus
                    .as_ref()
                    .and_then(|cpus| cpus.to_vec().get(draft.number).cloned());
                match named {
                    Some(set) => Ask::Named(set.0),
                    None => draft.spec.threads.map_or(Ask::Share, Ask::Count),
                }
            })
            .collect();
        match cores::allot(&cores, &asks, node.share_cores) {
            Ok(allotted) => {
                if allotted.shared {
                    warnings.push(format!(
                        "instances of node {} share cores: they slow each other down",
                        node.name
                    ));
                }
                for (&d, cores) in mine.iter().zip(allotted.cores) {
                    drafts[d].cores = cores;
                }
            }
            Err(wrong) => {
                let draft = &drafts[mine[wrong.ask]];
                let key = match asks[wrong.ask] {
                    Ask::Named(_) => "cpus",
                    Ask::Count(_) => "threads",
                    Ask::Share => "name",
                };
                found.push(deployment.wrong(
                    steps!["instances", draft.group, key],
                    format!(
                        "instance {} on node {}: {}",
                        draft.name, node.name, wrong.message
                    ),
                    Some(wrong.help),
                ));
            }
        }
    }
}

#[cfg(test)]
mod tests;
