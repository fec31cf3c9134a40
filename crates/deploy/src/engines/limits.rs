//! What the settings together permit: limits of each pair, memory of each device.

use crate::engines::load::EngineDeployment;
use crate::engines::memory::{self, DeviceMemory, Spread, Weights};
use crate::engines::plan::{EngineInstancePlan, EnginePlan, Pair, Process};
use twinfer_protocol::Role;

const GIB: f64 = (1u64 << 30) as f64;

/// Limits of every pair of prefill and decode, and of every instance that does both; pairs with equal limits are
/// counted, not repeated.
pub(crate) fn pairs(plan: &EnginePlan) -> Vec<Pair> {
    struct Side<'p> {
        instance: &'p EngineInstancePlan,
        limit: Option<u64>,
        seqs: Option<u64>,
    }
    let of = |role| -> Vec<Side<'_>> {
        plan.instances
            .iter()
            .filter(|one| one.role == role)
            .map(|instance| Side {
                instance,
                limit: plan
                    .processes_of(&instance.name)
                    .filter_map(|process| process.number("max-model-len"))
                    .min(),
                seqs: sequences(plan, instance),
            })
            .collect()
    };
    let (prefill, decode) = (of(Role::Prefill), of(Role::Decode));
    let mut pairs: Vec<Pair> = Vec::new();
    let mut add = |pair: Pair| {
        let same = pairs.iter_mut().find(|other| {
            (other.max_prompt, other.max_len, other.decode_seqs)
                == (pair.max_prompt, pair.max_len, pair.decode_seqs)
        });
        match same {
            Some(other) => other.count += 1,
            None => pairs.push(pair),
        }
    };
    for d in &decode {
        for p in &prefill {
            // Prefill adds one token of its own, which decode computes again.
            let prompt = [p.limit, d.limit];
            let prompt = prompt
                .into_iter()
                .flatten()
                .map(|len| len.saturating_sub(1));
            add(Pair {
                prefill: p.instance.name.clone(),
                decode: d.instance.name.clone(),
                count: 1,
                max_prompt: prompt.min(),
                max_len: d.limit.or(p.limit),
                decode_seqs: d.seqs,
            });
        }
    }
    for both in of(Role::Both) {
        add(Pair {
            prefill: both.instance.name.clone(),
            decode: both.instance.name.clone(),
            count: 1,
            max_prompt: both.limit.map(|len| len.saturating_sub(1)),
            max_len: both.limit,
            decode_seqs: both.seqs,
        });
    }
    pairs
}

/// Sequences of a step over all ranks: what the token budget lets in, no more than `max-num-seqs`.
fn sequences(plan: &EnginePlan, instance: &EngineInstancePlan) -> Option<u64> {
    let process = plan.processes_of(&instance.name).next()?;
    Some(step_sequences(process)? * u64::from(instance.dp))
}

/// Sequences of one rank's decode step.
pub(crate) fn step_sequences(process: &Process) -> Option<u64> {
    let seqs = process.number("max-num-seqs")?;
    let budget = process.number("max-num-batched-tokens");
    Some(budget.map_or(seqs, |budget| seqs.min(budget / (1 + process.drafts()))))
}

/// Memory of a device of every instance, where it can be known.
pub(crate) fn memory(deployment: &EngineDeployment, plan: &EnginePlan) -> Vec<DeviceMemory> {
    let Some(model) = &deployment.model else {
        return Vec::new();
    };
    // Counted once: a model has thousands of tensors, and a plan a thousand instances.
    let weights = [false, true].map(|drafts| Weights::of(model, drafts));
    let mut list = Vec::new();
    for instance in &plan.instances {
        let Some(process) = plan.processes_of(&instance.name).next() else {
            continue;
        };
        let node = deployment
            .file
            .nodes
            .iter()
            .find(|node| node.name == process.node);
        let Some(device) = node.and_then(|node| node.device_memory) else {
            continue;
        };
        let float = |key: &str| {
            let value = process.settings.get(key)?;
            value.as_f64().or_else(|| value.as_str()?.parse().ok())
        };
        let buffer = process
            .variable("HCCL_BUFFSIZE")
            .and_then(|text| text.parse().ok())
            .unwrap_or(200.0);
        let ascend = !deployment.template.port_ranges.is_empty();
        let len = process
            .number("max-model-len")
            .unwrap_or(model.context as u64);
        list.push(memory::of(
            &instance.name,
            model,
            &weights[usize::from(process.drafts() > 0)],
            &Spread {
                dp: instance.dp,
                tp: instance.tp,
                ep: instance.ep,
                weight_bytes: weight_bytes(deployment, process),
                drafts: process.drafts(),
                utilization: float("gpu-memory-utilization").unwrap_or(0.9),
                device: device * GIB,
                buffer_mb: ascend.then_some(buffer),
                max_num_seqs: process.number("max-num-seqs").unwrap_or(128),
                max_num_batched_tokens: process.number("max-num-batched-tokens").unwrap_or(2048),
                max_model_len: len,
                block: process.number("block-size").unwrap_or(128) as usize,
            },
        ));
    }
    list
}

/// Bytes of a linear layer's weight: one when the checkpoint is w8a8 and loaded as such.
fn weight_bytes(deployment: &EngineDeployment, process: &Process) -> f64 {
    let weights = deployment.file.model.weights.as_deref().unwrap_or_default();
    let loaded =
        process.settings.contains_key("quantization") || deployment.template.name == "omniinfer";
    match weights {
        "w8a8" | "w8a8c8" | "fp8" | "int8" if loaded => 1.0,
        "w4a8" | "w4a16" if loaded => 0.5,
        _ => 2.0,
    }
}
