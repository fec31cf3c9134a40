//! Rules 40 to 52, 64 and 65: settings of vllm-ascend's schedulers and experts.

use crate::engines::file::{Api, Kind};
use crate::engines::lint::context::{additional, flag, on, transfer};
use crate::engines::lint::{Context, Severity, Sink};
use crate::engines::plan::{EngineInstancePlan, Process};
use serde_json::{Map, Value};
use twinfer_protocol::Role;

type Config = Map<String, Value>;

/// Every instance with its additional settings.
fn each<'d>(context: &Context<'d>) -> Vec<(&'d EngineInstancePlan, &'d Process, Config)> {
    context
        .first()
        .map(|(instance, process)| (instance, process, additional(process)))
        .collect()
}

/// Reports at an instance's additional settings.
fn report(
    context: &Context<'_>,
    sink: &mut Sink<'_>,
    instance: &EngineInstancePlan,
    found: &str,
    nearest: &str,
) {
    sink.found(
        &context.at(instance, "additional-config"),
        format!("instance {}: {found}", instance.name),
        Some(nearest.to_owned()),
    );
}

const RECOMPUTE: &str = "recompute_scheduler_enable";

pub(super) fn recompute(context: &Context<'_>, sink: &mut Sink<'_>) {
    for (instance, _, config) in each(context) {
        if !on(&config, RECOMPUTE) {
            continue;
        }
        // Up to 0.20 prefill took it too; later versions ignore it there.
        let severity = match instance.role {
            Role::Decode => continue,
            Role::Both => Severity::E,
            Role::Prefill if context.since("0.21") => Severity::W,
            Role::Prefill => Severity::I,
        };
        sink.found_as(
            severity,
            &context.at(instance, "additional-config"),
            format!(
                "instance {}: {RECOMPUTE} with role {}",
                instance.name, instance.role
            ),
            Some(format!("{RECOMPUTE} on decode only")),
        );
    }
}

pub(super) fn balance(context: &Context<'_>, sink: &mut Sink<'_>) {
    for (instance, _, config) in each(context) {
        if !on(&config, "enable_balance_scheduling") {
            continue;
        }
        if instance.role != Role::Both {
            let found = format!("enable_balance_scheduling with role {}", instance.role);
            report(context, sink, instance, &found, "leave it out");
        }
        for key in ["profiling_chunk_config", "dyntra_lb_config"] {
            if on(&config, key) {
                let found = format!("enable_balance_scheduling and {key}");
                report(context, sink, instance, &found, "one of them");
            }
        }
    }
}

pub(super) fn dyntra(context: &Context<'_>, sink: &mut Sink<'_>) {
    for (instance, _, config) in each(context) {
        if !on(&config, "dyntra_lb_config") {
            continue;
        }
        let mut wrong = |found: &str, nearest: &str| {
            report(
                context,
                sink,
                instance,
                &format!("dyntra_lb_config {found}"),
                nearest,
            );
        };
        if instance.role != Role::Decode {
            wrong(&format!("with role {}", instance.role), "on decode");
        }
        if !on(&config, RECOMPUTE) {
            wrong(
                &format!("without {RECOMPUTE}"),
                &format!("{RECOMPUTE}: true"),
            );
        }
        if instance.dp < 2 {
            wrong("with dp 1", "dp 2");
        }
        if instance.ranks.len() > 1 {
            wrong(&format!("over {} nodes", instance.ranks.len()), "one node");
        }
        let inner = process_scheduler(context, instance);
        if !inner {
            wrong(
                "outside scheduler_config",
                "additional-config: {scheduler_config: {dyntra_lb_config: ...}}",
            );
        }
    }
}

fn process_scheduler(context: &Context<'_>, instance: &EngineInstancePlan) -> bool {
    let process = context.first().find(|(one, _)| one.name == instance.name);
    process
        .and_then(|(_, process)| process.object("additional-config"))
        .and_then(|config| config.get("scheduler_config"))
        .is_some_and(|inner| inner.get("dyntra_lb_config").is_some())
}

pub(super) fn short_first(context: &Context<'_>, sink: &mut Sink<'_>) {
    for (instance, process, config) in each(context) {
        if on(&config, "short_request_first_config") {
            if instance.role == Role::Decode {
                report(
                    context,
                    sink,
                    instance,
                    "short_request_first_config on decode",
                    "leave it out",
                );
            }
            let policy = process
                .settings
                .get("scheduling-policy")
                .and_then(Value::as_str);
            if let Some(policy) = policy.filter(|policy| *policy != "fcfs") {
                let found = format!("short_request_first_config with scheduling-policy {policy}");
                report(context, sink, instance, &found, "scheduling-policy: fcfs");
            }
        }
        if on(&config, "profiling_chunk_config") && instance.pp < 2 {
            report(
                context,
                sink,
                instance,
                "profiling_chunk_config with pp 1",
                "pp 2, or leave it out",
            );
        }
    }
}

fn finegrained_of(config: &Config) -> Config {
    match config.get("finegrained_tp_config") {
        Some(Value::Object(inner)) => inner.clone(),
        _ => Config::new(),
    }
}

fn size(config: &Config, part: &str) -> Option<u64> {
    config
        .get(&format!("{part}_tensor_parallel_size"))
        .and_then(Value::as_u64)
}

fn divisor(dp: u32, near: u64) -> u64 {
    let dp = u64::from(dp);
    (1..=near.min(dp))
        .rev()
        .find(|size| dp.is_multiple_of(*size))
        .unwrap_or(1)
}

pub(super) fn lmhead(context: &Context<'_>, sink: &mut Sink<'_>) {
    for (instance, _, config) in each(context) {
        if let Some(flat) = size(&config, "lmhead") {
            let found = format!(
                "lmhead_tensor_parallel_size {flat} outside finegrained_tp_config has no effect"
            );
            report(
                context,
                sink,
                instance,
                &found,
                "finegrained_tp_config: {lmhead_tensor_parallel_size: ...}",
            );
        }
        let Some(given) = size(&finegrained_of(&config), "lmhead") else {
            continue;
        };
        if given == 0 || u64::from(instance.dp) % given != 0 {
            let found = format!(
                "lmhead_tensor_parallel_size {given} does not divide dp {}",
                instance.dp
            );
            let nearest = format!(
                "lmhead_tensor_parallel_size {}",
                divisor(instance.dp, given)
            );
            report(context, sink, instance, &found, &nearest);
        }
        if instance.tp > 1 {
            let found = format!(
                "lmhead_tensor_parallel_size with tp {} has no effect",
                instance.tp
            );
            report(context, sink, instance, &found, "leave it out");
        }
        if on(&config, "enable_reduce_sample") {
            report(
                context,
                sink,
                instance,
                "lmhead_tensor_parallel_size and enable_reduce_sample",
                "one of them",
            );
        }
        if context.model().is_some_and(|model| model.moe.is_none()) {
            report(
                context,
                sink,
                instance,
                "lmhead_tensor_parallel_size on a model without experts",
                "leave it out",
            );
        }
    }
}

pub(super) fn finegrained(context: &Context<'_>, sink: &mut Sink<'_>) {
    for (instance, process, config) in each(context) {
        let inner = finegrained_of(&config);
        for part in ["oproj", "embedding", "mlp", "olora"] {
            let Some(given) = size(&inner, part) else {
                continue;
            };
            if given == 0 || u64::from(instance.dp) % given != 0 {
                let found = format!(
                    "{part}_tensor_parallel_size {given} does not divide dp {}",
                    instance.dp
                );
                let nearest = format!(
                    "{part}_tensor_parallel_size {}",
                    divisor(instance.dp, given)
                );
                report(context, sink, instance, &found, &nearest);
            }
            if matches!(part, "oproj" | "embedding") && !on(&config, RECOMPUTE) {
                let found = format!("{part}_tensor_parallel_size without {RECOMPUTE}");
                report(
                    context,
                    sink,
                    instance,
                    &found,
                    &format!("{RECOMPUTE}: true"),
                );
            }
            if part == "oproj" {
                let found = if instance.tp != 1 {
                    format!("with tp {}", instance.tp)
                } else if instance.role != Role::Decode {
                    format!("with role {}", instance.role)
                } else if flag(process, "enforce-eager") {
                    "without graphs".to_owned()
                } else {
                    continue;
                };
                let found = format!("oproj_tensor_parallel_size {found}");
                report(
                    context,
                    sink,
                    instance,
                    &found,
                    "tp 1 and graph: decode on decode",
                );
            }
        }
    }
}

pub(super) fn decode_only(context: &Context<'_>, sink: &mut Sink<'_>) {
    for (instance, _, config) in each(context) {
        if on(&config, "enable_kv_nz") {
            if instance.role != Role::Decode {
                let found = format!("enable_kv_nz with role {}", instance.role);
                report(context, sink, instance, &found, "on decode only");
            }
            if context.model().is_some() && !context.mla() {
                report(
                    context,
                    sink,
                    instance,
                    "enable_kv_nz on a model without MLA",
                    "leave it out",
                );
            }
        }
        if on(&config, "enable_reduce_sample") && instance.role == Role::Prefill {
            report(
                context,
                sink,
                instance,
                "enable_reduce_sample on prefill",
                "leave it out",
            );
        }
    }
}

pub(super) fn shared_experts(context: &Context<'_>, sink: &mut Sink<'_>) {
    for (instance, process, config) in each(context) {
        if !on(&config, "enable_shared_expert_dp") {
            continue;
        }
        let flashcomm = on(&config, "enable_flashcomm1")
            || flag(process, "enable-sequence-parallel")
            || process.variable("VLLM_ASCEND_ENABLE_FLASHCOMM1") == Some("1");
        let exactly = context.since("0.20.2") && !context.since("0.20.3");
        let found = if instance.ep.is_none() {
            "without enable-expert-parallel".to_owned()
        } else if instance.tp < 2 {
            format!("with tp {}", instance.tp)
        } else if exactly && !flashcomm {
            "without flashcomm1 on 0.20.2".to_owned()
        } else {
            continue;
        };
        let found = format!("enable_shared_expert_dp {found}");
        report(
            context,
            sink,
            instance,
            &found,
            "leave it out, or VLLM_ASCEND_ENABLE_FLASHCOMM1: 1 with tp > 1",
        );
    }
}

pub(super) fn exclusive(context: &Context<'_>, sink: &mut Sink<'_>) {
    for (instance, process, config) in each(context) {
        let both = |a: &str, b: &str| on(&config, a) && on(&config, b);
        for other in [
            "enable_shared_expert_dp",
            "multistream_overlap_shared_expert",
        ] {
            if both("mix_placement", other) {
                report(
                    context,
                    sink,
                    instance,
                    &format!("mix_placement and {other}"),
                    "one of them",
                );
            }
        }
        let fused = on(&config, "enable_fused_mc2")
            || process
                .variable("VLLM_ASCEND_ENABLE_FUSED_MC2")
                .is_some_and(|value| value != "0");
        if fused && on(&config, "enable_mc2_hierarchy_comm") {
            report(
                context,
                sink,
                instance,
                "enable_fused_mc2 and enable_mc2_hierarchy_comm",
                "one of them",
            );
        }
        if fused && on(&config, "multistream_overlap_shared_expert") {
            sink.found_as(
                Severity::W,
                &context.at(instance, "additional-config"),
                format!(
                    "instance {}: enable_fused_mc2 switches multistream_overlap_shared_expert off",
                    instance.name
                ),
                Some("one of them".to_owned()),
            );
        }
    }
}

pub(super) fn hierarchy(context: &Context<'_>, sink: &mut Sink<'_>) {
    for (instance, process, config) in each(context) {
        if !on(&config, "enable_mc2_hierarchy_comm") {
            continue;
        }
        let kind = context.node(&process.node).and_then(|node| node.kind);
        if !matches!(kind, None | Some(Kind::A2 | Kind::A3)) {
            report(
                context,
                sink,
                instance,
                "enable_mc2_hierarchy_comm on other devices",
                "A2 or A3",
            );
        }
        let experts = context
            .model()
            .and_then(|model| model.moe.as_ref())
            .map_or(0, |moe| moe.experts);
        if experts > 512 {
            let found = format!("enable_mc2_hierarchy_comm with {experts} experts");
            report(context, sink, instance, &found, "at most 512 experts");
        }
        let is = |name: &str, value: &str| process.variable(name) == Some(value);
        if kind == Some(Kind::A2)
            && !(is("HCCL_INTRA_ROCE_ENABLE", "1") && is("HCCL_INTRA_PCIE_ENABLE", "0"))
        {
            report(
                context,
                sink,
                instance,
                "enable_mc2_hierarchy_comm on A2 without its transport",
                "HCCL_INTRA_ROCE_ENABLE: 1 and HCCL_INTRA_PCIE_ENABLE: 0",
            );
        }
    }
}

pub(super) fn eplb(context: &Context<'_>, sink: &mut Sink<'_>) {
    for (instance, process, config) in each(context) {
        let nested = match config.get("eplb_config") {
            Some(Value::Object(inner)) => inner.clone(),
            _ => config.clone(),
        };
        let yes = |name: &str| {
            process
                .variable(name)
                .is_some_and(|value| value == "true" || value == "1")
        };
        if on(&nested, "dynamic_eplb") && !yes("DYNAMIC_EPLB") && !yes("EXPERT_MAP_RECORD") {
            report(
                context,
                sink,
                instance,
                "dynamic_eplb without DYNAMIC_EPLB",
                "DYNAMIC_EPLB: \"true\" in environment",
            );
        }
        let number = |key: &str| nested.get(key).and_then(Value::as_i64);
        for key in [
            "expert_heat_collection_interval",
            "algorithm_execution_interval",
            "num_iterations_eplb_update",
        ] {
            if let Some(value) = number(key).filter(|value| *value <= 0) {
                report(
                    context,
                    sink,
                    instance,
                    &format!("{key} is {value}"),
                    &format!("{key} 1"),
                );
            }
        }
        if let Some(policy) = number("eplb_policy_type").filter(|policy| !(0..=3).contains(policy))
        {
            let nearest = policy.clamp(0, 3);
            report(
                context,
                sink,
                instance,
                &format!("eplb_policy_type is {policy}"),
                &format!("eplb_policy_type {nearest}"),
            );
        }
        let stage = nested
            .get("eplb_heat_collection_stage")
            .and_then(Value::as_str);
        if let Some(stage) = stage.filter(|stage| !["all", "prefill", "decode"].contains(stage)) {
            report(
                context,
                sink,
                instance,
                &format!("eplb_heat_collection_stage is {stage:?}"),
                "all",
            );
        }
    }
}

pub(super) fn recompute_policy(context: &Context<'_>, sink: &mut Sink<'_>) {
    let json = context.deployment.model_json.as_ref();
    let hybrid = json.is_some_and(|json| {
        let kinds = json.get("layer_types").and_then(Value::as_array);
        let several =
            kinds.is_some_and(|kinds| kinds.iter().any(|kind| Some(kind) != kinds.first()));
        several
            || json.get("linear_num_value_heads").is_some()
            || json.get("mamba_d_state").is_some()
    });
    for (instance, process) in context.first() {
        let policy = transfer(process).and_then(|config| config.get("kv_load_failure_policy"));
        if hybrid && policy.and_then(Value::as_str) == Some("recompute") {
            sink.found(
                &context.at(instance, "name"),
                format!("instance {}: kv_load_failure_policy is recompute on a model with several kinds of attention", instance.name),
                Some("handoff: {policy: fail}".to_owned()),
            );
        }
    }
}

pub(super) fn local_prefill(context: &Context<'_>, sink: &mut Sink<'_>) {
    let skips = context
        .of(Role::Decode)
        .any(|(instance, process)| instance.dp > 1 && on(&additional(process), RECOMPUTE));
    let without = context
        .file()
        .router
        .flags
        .get("without-prefill")
        .and_then(Value::as_str);
    if skips && without == Some("decode") {
        sink.found(
            crate::source::steps!["router", "without-prefill"],
            format!(
                "without-prefill is {} and decode's ranks skip their agreement on the phase",
                without.unwrap_or_default()
            ),
            Some("without-prefill: refuse".to_owned()),
        );
    }
}

pub(super) fn eplb_pays(context: &Context<'_>, sink: &mut Sink<'_>) {
    for (instance, process, config) in each(context) {
        let nested = match config.get("eplb_config") {
            Some(Value::Object(inner)) => inner.clone(),
            _ => config.clone(),
        };
        if !on(&nested, "dynamic_eplb") {
            continue;
        }
        let input = context.file().benchmark.as_ref().map(|load| load.input);
        if instance.role == Role::Prefill
            && let Some(input) = input.filter(|input| *input < 1024)
        {
            report(
                context,
                sink,
                instance,
                &format!("expert balancing for prompts of {input} tokens"),
                "dynamic_eplb: false",
            );
        }
        let experts = context
            .model()
            .and_then(|model| model.moe.as_ref())
            .map(|moe| moe.experts as u32);
        let per_device = experts.zip(instance.ep).map(|(experts, ep)| experts / ep);
        let tokens = process
            .number("max-num-seqs")
            .map(|seqs| seqs * (1 + process.drafts()));
        if instance.role == Role::Decode
            && (per_device.is_some_and(|per| per <= 8) || tokens.is_some_and(|tokens| tokens < 128))
        {
            let found = format!(
                "expert balancing with {} experts and {} tokens per device",
                per_device.map_or("unknown".to_owned(), |per| per.to_string()),
                tokens.map_or("unknown".to_owned(), |tokens| tokens.to_string())
            );
            report(context, sink, instance, &found, "dynamic_eplb: false");
        }
    }
}

pub(super) fn external_balancer(context: &Context<'_>, sink: &mut Sink<'_>) {
    let wide = context
        .of(Role::Prefill)
        .any(|(prefill, _)| prefill.tp == 8);
    for (instance, _) in context.of(Role::Decode) {
        if wide && instance.tp == 1 && instance.dp > 1 && instance.api == Api::PerRank {
            sink.found(
                &context.at(instance, "api"),
                format!(
                    "instance {}: tp 1 with an endpoint per rank beside prefill of tp 8",
                    instance.name
                ),
                Some("api: one".to_owned()),
            );
        }
    }
}
