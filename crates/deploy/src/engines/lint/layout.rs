//! Rules 1 to 5, 8 to 11 and 18: ranks, devices, shapes.

use crate::engines::lint::context::{additional, flag};
use crate::engines::lint::{Context, Sink};
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use twinfer_config::model::AttentionConfig;
use twinfer_protocol::Role;

pub(super) fn devices(context: &Context<'_>, sink: &mut Sink<'_>) {
    let mut owner: BTreeMap<(&str, u32), &str> = BTreeMap::new();
    for (instance, processes) in context.instances() {
        for process in processes {
            let Some(node) = context.node(&process.node) else {
                continue;
            };
            let here = instance
                .ranks
                .iter()
                .find(|ranks| ranks.node == process.node);
            let per_rank = instance.tp * instance.pp * instance.pcp;
            let needed = here.map_or(0, |ranks| ranks.count) * per_rank;
            let missing = process
                .devices
                .iter()
                .find(|device| **device >= node.devices);
            if missing.is_some() {
                sink.found(
                    &context.at(instance, "ranks"),
                    format!(
                        "instance {} needs {needed} devices on node {}, up to number {}, which has {}",
                        instance.name,
                        node.name,
                        process.devices.last().copied().unwrap_or(0),
                        node.devices
                    ),
                    Some(format!("{} ranks of {per_rank} devices", node.devices / per_rank.max(1))),
                );
                break;
            }
            let twice = process.devices.iter().find_map(|device| {
                let key = (process.node.as_str(), *device);
                let other = owner.insert(key, &process.name)?;
                Some((*device, other))
            });
            if let Some((device, other)) = twice {
                let next = node.devices.saturating_sub(needed);
                sink.found(
                    &context.at(instance, "first-device"),
                    format!(
                        "device {device} of node {} is given to {} and to {other}",
                        node.name, process.name
                    ),
                    Some(format!(
                        "first-device at most {next}, where no other instance is"
                    )),
                );
                break;
            }
        }
    }
}

pub(super) fn tiling(context: &Context<'_>, sink: &mut Sink<'_>) {
    for (instance, _) in context.instances() {
        let mut ranges: Vec<(u32, u32)> = instance
            .ranks
            .iter()
            .map(|ranks| (ranks.first, ranks.first + ranks.count))
            .collect();
        ranges.sort_unstable();
        let mut next = 0;
        let mut wrong = None;
        for (first, end) in &ranges {
            if *first != next && wrong.is_none() {
                let word = if *first > next {
                    "nobody has"
                } else {
                    "two nodes have"
                };
                wrong = Some(format!("{word} rank {}", next.min(*first)));
            }
            next = next.max(*end);
        }
        if wrong.is_none() && next != instance.dp {
            wrong = Some(format!(
                "the nodes have {next} ranks, dp is {}",
                instance.dp
            ));
        }
        if let Some(wrong) = wrong {
            sink.found(
                &context.at(instance, "ranks"),
                format!("instance {}: {wrong}", instance.name),
                Some(format!("dp {next} with consecutive ranges")),
            );
        }
    }
}

pub(super) fn group(context: &Context<'_>, sink: &mut Sink<'_>) {
    for (instance, processes) in context.instances() {
        for key in [
            "data-parallel-address",
            "data-parallel-rpc-port",
            "data-parallel-size",
            "tensor-parallel-size",
        ] {
            let values: BTreeSet<String> = processes
                .iter()
                .map(|process| super::context::setting(process, key))
                .collect();
            if values.len() > 1 {
                let list: Vec<&str> = values.iter().map(String::as_str).collect();
                sink.found(
                    &context.at(instance, "per-node"),
                    format!(
                        "instance {}: {key} is {}",
                        instance.name,
                        list.join(" and ")
                    ),
                    list.first().map(|value| (*value).to_owned()),
                );
            }
        }
        let given = |spec: &crate::engines::file::EngineInstance| spec.rpc_port.is_some();
        let spec = context.file().instances.get(instance.group);
        if instance.dp > 1 && spec.is_some_and(|spec| !given(spec)) {
            sink.found(
                &context.at(instance, "name"),
                format!(
                    "instance {}: rpc-port is not given; launch_online_dp.py fails without it",
                    instance.name
                ),
                Some("rpc-port: 13345".to_owned()),
            );
        }
    }
}

pub(super) fn tp_ratio(context: &Context<'_>, sink: &mut Sink<'_>) {
    for (decode, _) in context.of(Role::Decode) {
        for (prefill, _) in context.of(Role::Prefill) {
            if prefill.tp < decode.tp || prefill.tp % decode.tp != 0 {
                let nearest = (1..=prefill.tp)
                    .rev()
                    .find(|tp| prefill.tp % tp == 0 && *tp <= decode.tp);
                sink.found(
                    &context.at(decode, "tp"),
                    format!(
                        "tp is {} on {} and {} on {}",
                        prefill.tp, prefill.name, decode.tp, decode.name
                    ),
                    nearest.map(|tp| format!("tp {tp} on decode")),
                );
            }
        }
    }
}

pub(super) fn decode_shape(context: &Context<'_>, sink: &mut Sink<'_>) {
    for (instance, _) in context.instances() {
        let mut wrong = |key: &str, message: String| {
            sink.found(
                &context.at(instance, key),
                format!("instance {}: {message}", instance.name),
                Some(format!("{key} 1")),
            );
        };
        if instance.role == Role::Decode && instance.pp != 1 {
            wrong("pp", format!("pp is {} on decode", instance.pp));
        }
        if instance.role == Role::Decode
            && instance.pcp != 1
            && context.connector() == "MooncakeLayerwiseConnector"
        {
            wrong("pcp", format!("pcp is {} on decode", instance.pcp));
        }
        if instance.pp > 1 && instance.pcp > 1 {
            wrong(
                "pcp",
                format!("pp is {} and pcp {}", instance.pp, instance.pcp),
            );
        }
    }
}

pub(super) fn partition(context: &Context<'_>, sink: &mut Sink<'_>) {
    for (instance, process) in context.first().filter(|(one, _)| one.pp > 1) {
        let extra = process
            .object("kv-transfer-config")
            .and_then(|config| config.get("kv_connector_extra_config"));
        let of_role = extra.and_then(|extra| extra.get(instance.role.as_str()));
        let given = of_role
            .and_then(|one| one.get("pp_layer_partition"))
            .and_then(Value::as_str);
        let Some(given) = given else { continue };
        let parts: Vec<u64> = given
            .split(',')
            .filter_map(|part| part.trim().parse().ok())
            .collect();
        let layers = context.model().map(|model| model.layers as u64);
        let sum: u64 = parts.iter().sum();
        let own = process.variable("VLLM_PP_LAYER_PARTITION");
        if parts.len() != instance.pp as usize
            || layers.is_some_and(|layers| sum != layers)
            || own.is_some_and(|own| own != given)
        {
            let pp = u64::from(instance.pp);
            let nearest = layers.map(|layers| {
                let parts: Vec<String> = (0..pp)
                    .map(|part| (layers / pp + u64::from(part < layers % pp)).to_string())
                    .collect();
                parts.join(",")
            });
            sink.found(
                &context.at(instance, "kv-transfer-config"),
                format!(
                    "instance {}: pp_layer_partition is {given} for pp {} and {} layers, VLLM_PP_LAYER_PARTITION {}",
                    instance.name,
                    instance.pp,
                    layers.map_or("unknown".to_owned(), |layers| layers.to_string()),
                    own.unwrap_or("absent")
                ),
                nearest,
            );
        }
    }
}

pub(super) fn kinds(context: &Context<'_>, sink: &mut Sink<'_>) {
    let kinds = |role| -> BTreeSet<String> {
        context
            .of(role)
            .flat_map(|(instance, _)| &instance.ranks)
            .filter_map(|ranks| Some(format!("{:?}", context.node(&ranks.node)?.kind?)))
            .collect()
    };
    let (prefill, decode) = (kinds(Role::Prefill), kinds(Role::Decode));
    if !prefill.is_empty() && !decode.is_empty() && prefill != decode {
        let list = |set: BTreeSet<String>| set.into_iter().collect::<Vec<_>>().join(" and ");
        let nearest = prefill.iter().next().cloned();
        let found = format!(
            "prefill runs on {}, decode on {}",
            list(prefill),
            list(decode)
        );
        if let Some((_, (decode, _))) = context.sides() {
            sink.found(&context.at(decode, "role"), found, nearest);
        }
    }
}

pub(super) fn experts(context: &Context<'_>, sink: &mut Sink<'_>) {
    let Some(moe) = context.model().and_then(|model| model.moe.as_ref()) else {
        return;
    };
    for (instance, process) in context.first() {
        let Some(ep) = instance.ep else {
            if instance.dp > 1 && !flag(process, "enable-expert-parallel") {
                sink.found(
                    &context.at(instance, "dp"),
                    format!(
                        "instance {}: dp is {} without enable-expert-parallel; every rank holds all {} experts",
                        instance.name, instance.dp, moe.experts
                    ),
                    Some("enable-expert-parallel: true".to_owned()),
                );
            }
            continue;
        };
        let config = additional(process);
        let eplb = config.get("eplb_config").and_then(Value::as_object);
        let redundant = eplb
            .and_then(|eplb| eplb.get("num_redundant_experts"))
            .or_else(|| config.get("init_redundancy_expert"))
            .and_then(Value::as_u64)
            .or_else(|| process.number("num-redundant-experts"))
            .unwrap_or(0);
        let total = moe.experts as u64 + redundant;
        if !total.is_multiple_of(u64::from(ep)) {
            let below = (1..=ep)
                .rev()
                .find(|ep| total.is_multiple_of(u64::from(*ep)));
            let more = u64::from(ep) - total % u64::from(ep);
            sink.found(
                &context.at(instance, "ranks"),
                format!(
                    "instance {}: {} experts and {redundant} redundant ones over EP {ep}",
                    instance.name, moe.experts
                ),
                Some(format!(
                    "{} redundant experts, or EP {}",
                    redundant + more,
                    below.unwrap_or(1)
                )),
            );
        }
    }
}

pub(super) fn heads(context: &Context<'_>, sink: &mut Sink<'_>) {
    let Some(model) = context.model() else { return };
    for (instance, _) in context.instances() {
        let tp = instance.tp as usize;
        let heads = model.attention.heads();
        let kv = match &model.attention {
            AttentionConfig::Gqa(gqa) => Some(gqa.kv_heads),
            AttentionConfig::Mla(_) => None,
        };
        let fits = |tp: usize| {
            heads.is_multiple_of(tp)
                && kv.is_none_or(|kv| kv.is_multiple_of(tp) || tp.is_multiple_of(kv))
        };
        if tp > 0 && !fits(tp) {
            let nearest = (1..=tp).rev().find(|tp| fits(*tp));
            sink.found(
                &context.at(instance, "tp"),
                format!(
                    "instance {}: tp is {tp} for {heads} heads and {} KV heads",
                    instance.name,
                    kv.unwrap_or(heads)
                ),
                nearest.map(|tp| format!("tp {tp}")),
            );
        }
    }
}

pub(super) fn stagger(context: &Context<'_>, sink: &mut Sink<'_>) {
    let mut count: BTreeMap<&str, u32> = BTreeMap::new();
    for process in &context.plan.processes {
        *count.entry(&process.node).or_default() += 1;
    }
    for (instance, processes) in context.instances() {
        let Some(process) = processes.first() else {
            continue;
        };
        let engines = count.get(process.node.as_str()).copied().unwrap_or(0);
        if engines > 1 && process.variable("VLLM_PORT").is_none() {
            sink.found(
                &context.at(instance, "api"),
                format!("{engines} engine processes start on node {}", process.node),
                Some("start them one after another, as rendered scripts do".to_owned()),
            );
        }
    }
}
