//! The head of a plan: what it is, and what it is not.

use crate::engines::load::EngineDeployment;
use crate::engines::plan::{EngineInstancePlan, EnginePlan};
use std::collections::BTreeSet;
use twinfer_protocol::Role;

/// One sentence each.
pub(crate) fn lines(_: &EngineDeployment, plan: &EnginePlan) -> Vec<String> {
    let devices: u32 = plan.nodes.iter().map(|node| node.devices_used).sum();
    let worlds = plan.instances.len();
    let sizes: BTreeSet<u32> = plan.instances.iter().map(world).collect();
    let sizes: Vec<String> = sizes.iter().map(u32::to_string).collect();
    let mut lines = vec![format!(
        "{} on {} ({}): {} of {} each",
        count(worlds, "world"),
        count(plan.nodes.len(), "node"),
        count(devices as usize, "device"),
        if worlds == 1 { "one" } else { "worlds" },
        format_ranks(&sizes),
    )];
    for instance in &plan.instances {
        lines.push(format!("{}: {}", instance.name, engine(plan, instance)));
    }
    lines.extend(not(plan, devices));
    lines
}

fn format_ranks(sizes: &[String]) -> String {
    format!("{} ranks", sizes.join(" and "))
}

fn count(number: usize, noun: &str) -> String {
    let s = if number == 1 { "" } else { "s" };
    format!("{number} {noun}{s}")
}

fn world(instance: &EngineInstancePlan) -> u32 {
    instance.dp * instance.tp * instance.pp * instance.pcp
}

/// `DP8/EP8`, `DP2/TP8/EP16`.
fn shape(instance: &EngineInstancePlan) -> String {
    let mut parts = vec![format!("DP{}", instance.dp)];
    if instance.tp > 1 {
        parts.push(format!("TP{}", instance.tp));
    }
    if instance.pp > 1 {
        parts.push(format!("PP{}", instance.pp));
    }
    if instance.pcp > 1 {
        parts.push(format!("CP{}", instance.pcp));
    }
    if let Some(ep) = instance.ep {
        parts.push(format!("EP{ep}"));
    }
    parts.join("/")
}

fn engine(plan: &EnginePlan, instance: &EngineInstancePlan) -> String {
    let devices: usize = plan
        .processes_of(&instance.name)
        .map(|process| process.devices.len())
        .sum();
    let phase = match instance.role {
        Role::Both => "both phases on each",
        Role::Prefill => "prefill",
        Role::Decode => "decode",
    };
    let ranks: Vec<String> = instance
        .ranks
        .iter()
        .map(|ranks| {
            let last = ranks.first + ranks.count.saturating_sub(1);
            format!("{} ranks {}-{last}", ranks.node, ranks.first)
        })
        .collect();
    format!(
        "one {} engine on {}, {phase} ({}); rendezvous {}",
        shape(instance),
        count(devices, "device"),
        ranks.join(", "),
        instance.rendezvous
    )
}

/// What readers take such a deployment for.
fn not(plan: &EnginePlan, devices: u32) -> Vec<String> {
    let of = |role| {
        plan.instances
            .iter()
            .filter(move |one| one.role == role)
            .count()
    };
    let (prefill, decode, both) = (of(Role::Prefill), of(Role::Decode), of(Role::Both));
    let mut lines = Vec::new();
    if both == 1 && prefill == 0 {
        lines.push(format!(
            "not {}: prefill and decode share the same {}",
            2 * devices,
            count(devices as usize, "device")
        ));
    }
    if both > 1 {
        lines.push(format!(
            "{both} replicas behind a router: no handoff, no shared experts; not one engine of {}",
            count(devices as usize, "device")
        ));
    }
    if prefill > 0 && decode > 0 {
        let ep = plan.instances.iter().filter_map(|one| one.ep).max();
        let ep = ep.map_or(String::new(), |_| format!(", not one EP{devices} engine"));
        lines.push(format!(
            "{prefill} prefill and {decode} decode engines, each with its own rendezvous{ep}; KV goes by {}",
            plan.connector.as_deref().unwrap_or("no connector")
        ));
    }
    lines
}
