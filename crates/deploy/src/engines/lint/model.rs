//! Rules 23, 25 to 28 and 30 to 39: model, types, lengths, budgets, graphs, drafts.

use crate::engines::lint::context::{flag, setting, transfer};
use crate::engines::lint::{Context, Severity, Sink};
use crate::engines::plan::{EngineInstancePlan, Process};
use serde_json::Value;
use twinfer_protocol::Role;

const JSON_FLAGS: &[&str] = &[
    "kv-transfer-config",
    "additional-config",
    "speculative-config",
    "compilation-config",
];

pub(super) fn json(context: &Context<'_>, sink: &mut Sink<'_>) {
    for (instance, process) in context.first() {
        for key in JSON_FLAGS {
            let Some(Value::String(text)) = process.settings.get(*key) else {
                continue;
            };
            if let Err(error) = serde_json::from_str::<Value>(text) {
                let repaired = without_trailing_commas(text);
                let nearest = serde_json::from_str::<Value>(&repaired).ok();
                sink.found(
                    &context.at(instance, key),
                    format!("instance {}: {key} is no JSON: {error}", instance.name),
                    nearest.map(|value| value.to_string()),
                );
            }
        }
    }
}

fn without_trailing_commas(text: &str) -> String {
    let mut out = String::new();
    for (at, c) in text.char_indices() {
        let next = text[at + c.len_utf8()..].trim_start().chars().next();
        if !(c == ',' && matches!(next, Some('}' | ']'))) {
            out.push(c);
        }
    }
    out
}

/// Is the checkpoint quantised, by what the file or config.json says?
fn scheme(context: &Context<'_>) -> Option<String> {
    let model = &context.file().model;
    let said = model
        .weights
        .clone()
        .filter(|weights| weights != "none" && weights != "bf16");
    said.or_else(|| {
        let path = model.path.to_lowercase();
        ["w8a8", "w4a8", "w8a16"]
            .into_iter()
            .find(|name| model.weights.is_none() && path.contains(name))
            .map(str::to_owned)
    })
}

pub(super) fn quantised(context: &Context<'_>, sink: &mut Sink<'_>) {
    const KNOWN: &[&str] = &["ascend", "compressed-tensors", "none"];
    let scheme = scheme(context);
    for (instance, process) in context.first() {
        let given = process.settings.get("quantization").and_then(Value::as_str);
        if let Some(scheme) = &scheme
            && given.is_none_or(|given| given == "none")
        {
            sink.found(
                &context.at(instance, "name"),
                format!(
                    "instance {}: quantization is {} for {scheme} weights",
                    instance.name,
                    given.unwrap_or("absent")
                ),
                Some("quantization: ascend".to_owned()),
            );
        }
        if let Some(given) = given.filter(|given| !KNOWN.contains(given)) {
            sink.found(
                &context.at(instance, "quantization"),
                format!("instance {}: quantization is {given:?}", instance.name),
                Some("quantization: ascend".to_owned()),
            );
        }
    }
}

pub(super) fn float16(context: &Context<'_>, sink: &mut Sink<'_>) {
    if scheme(context).is_none_or(|scheme| !scheme.starts_with("w8a8")) {
        return;
    }
    let config = context.deployment.model_json.as_ref();
    let stored = config.and_then(|json| json.get("torch_dtype").or_else(|| json.get("dtype")));
    if let Some(stored) = stored.and_then(Value::as_str)
        && stored != "bfloat16"
    {
        sink.found(
            crate::source::steps!["model", "config"],
            format!("torch_dtype is {stored} in config.json"),
            Some("bfloat16".to_owned()),
        );
    }
    for (instance, process) in context.first() {
        let given = setting(process, "dtype");
        if matches!(given.as_str(), "float16" | "half") {
            sink.found(
                &context.at(instance, "dtype"),
                format!("instance {}: dtype is {given}", instance.name),
                Some("dtype: bfloat16".to_owned()),
            );
        }
    }
}

/// Every decode instance against the first prefill instance, and every other prefill one too.
fn compare(context: &Context<'_>, sink: &mut Sink<'_>, keys: &[&str], all: bool) {
    let mut first: Option<(&EngineInstancePlan, &Process)> = None;
    for (instance, process) in context.first() {
        if !all && instance.role == Role::Both {
            continue;
        }
        let Some((other, expected)) = first else {
            first = Some((instance, process));
            continue;
        };
        for key in keys {
            let (own, theirs) = (setting(process, key), setting(expected, key));
            if own != theirs {
                sink.found(
                    &context.at(instance, key),
                    format!(
                        "{key} is {own} on {} and {theirs} on {}",
                        instance.name, other.name
                    ),
                    Some(format!("{key}: {theirs}")),
                );
            }
        }
    }
}

pub(super) fn types(context: &Context<'_>, sink: &mut Sink<'_>) {
    compare(
        context,
        sink,
        &["dtype", "kv-cache-dtype", "quantization"],
        false,
    );
    if !context.connector().starts_with("MooncakeConnector")
        || context.mla()
        || context.model().is_none()
    {
        return;
    }
    for (instance, process) in context.of(Role::Decode) {
        let given = setting(process, "kv-cache-dtype");
        if given.contains("int8") {
            sink.found(
                &context.at(instance, "kv-cache-dtype"),
                format!(
                    "instance {}: kv-cache-dtype is {given} with grouped-query attention and {}",
                    instance.name,
                    context.connector()
                ),
                Some("kv-cache-dtype: auto, or MooncakeLayerwiseConnector".to_owned()),
            );
        }
    }
}

pub(super) fn seeds(context: &Context<'_>, sink: &mut Sink<'_>) {
    compare(context, sink, &["seed"], true);
    for (instance, processes) in context.instances() {
        let Some(first) = processes.first() else {
            continue;
        };
        let expected = setting(first, "seed");
        if let Some(other) = processes
            .iter()
            .find(|process| setting(process, "seed") != expected)
        {
            sink.found(
                &context.at(instance, "seed"),
                format!(
                    "seed is {} on {} and {expected} on {}",
                    setting(other, "seed"),
                    other.name,
                    first.name
                ),
                Some(format!("seed: {expected}")),
            );
        }
    }
}

pub(super) fn text(context: &Context<'_>, sink: &mut Sink<'_>) {
    compare(
        context,
        sink,
        &["trust-remote-code", "tokenizer", "chat-template"],
        false,
    );
}

pub(super) fn lengths(context: &Context<'_>, sink: &mut Sink<'_>) {
    for (decode, d) in context.of(Role::Decode) {
        for (prefill, p) in context.of(Role::Prefill) {
            let (Some(long), Some(short)) = (p.number("max-model-len"), d.number("max-model-len"))
            else {
                continue;
            };
            if long > short {
                sink.found(
                    &context.at(decode, "max-model-len"),
                    format!(
                        "prefill {} takes {long} tokens, decode {} {short}: prompts of more than {} fail after prefill has computed them",
                        prefill.name,
                        decode.name,
                        short - 1
                    ),
                    Some(format!("max-model-len: {short} on prefill")),
                );
            } else if long < short {
                sink.found(
                    &context.at(prefill, "max-model-len"),
                    format!(
                        "prefill {} takes {long} tokens, decode {} {short}",
                        prefill.name, decode.name
                    ),
                    Some(format!("max-model-len: {short} on prefill")),
                );
            }
        }
    }
}

pub(super) fn prefill_budget(context: &Context<'_>, sink: &mut Sink<'_>) {
    for (instance, process) in context.of(Role::Prefill).chain(context.of(Role::Both)) {
        let Some(budget) = process.number("max-num-batched-tokens") else {
            continue;
        };
        let whole = process.settings.get("enable-chunked-prefill") == Some(&Value::Bool(false));
        let least = if whole {
            process.number("max-model-len").unwrap_or(2048)
        } else {
            2048
        };
        if budget < least {
            let why = if whole {
                " without chunked prefill"
            } else {
                ""
            };
            sink.found(
                &context.at(instance, "max-num-batched-tokens"),
                format!(
                    "instance {}: max-num-batched-tokens is {budget}{why}",
                    instance.name
                ),
                Some(format!("max-num-batched-tokens: {least}")),
            );
        }
    }
}

pub(super) fn decode_budget(context: &Context<'_>, sink: &mut Sink<'_>) {
    for (instance, process) in context.of(Role::Decode) {
        let (Some(budget), Some(seqs)) = (
            process.number("max-num-batched-tokens"),
            process.number("max-num-seqs"),
        ) else {
            continue;
        };
        let needed = seqs * (1 + process.drafts());
        if budget < needed {
            sink.found(
                &context.at(instance, "max-num-batched-tokens"),
                format!(
                    "instance {}: max-num-batched-tokens {budget} holds {} sequences of 1 + {} tokens, max-num-seqs is {seqs}",
                    instance.name,
                    budget / (1 + process.drafts()),
                    process.drafts()
                ),
                Some(format!("max-num-batched-tokens: {needed}")),
            );
        }
    }
}

/// Most tokens of a rank's step that the operator takes.
const MC2_TOKENS: u64 = 512;

pub(super) fn mc2(context: &Context<'_>, sink: &mut Sink<'_>) {
    for (instance, process) in context.of(Role::Decode) {
        let Some(seqs) = process.number("max-num-seqs") else {
            continue;
        };
        let width = 1 + process.drafts();
        if seqs * width > MC2_TOKENS {
            sink.found(
                &context.at(instance, "max-num-seqs"),
                format!(
                    "instance {}: {seqs} sequences of {width} tokens are {} tokens a step",
                    instance.name,
                    seqs * width
                ),
                Some(format!("max-num-seqs: {}", MC2_TOKENS / width)),
            );
        }
    }
}

pub(super) fn blocks(context: &Context<'_>, sink: &mut Sink<'_>) {
    const DEFAULT: u64 = 128;
    for (decode, d) in context.of(Role::Decode) {
        for (prefill, p) in context.of(Role::Prefill) {
            let own = d.number("block-size").unwrap_or(DEFAULT);
            let theirs = p.number("block-size").unwrap_or(DEFAULT);
            let layerwise = context.connector() == "MooncakeLayerwiseConnector";
            let fits =
                own == theirs || layerwise && decode.pcp == 1 && theirs > 0 && own % theirs == 0;
            if !fits {
                sink.found(
                    &context.at(decode, "block-size"),
                    format!(
                        "block-size is {theirs} on {} and {own} on {}",
                        prefill.name, decode.name
                    ),
                    Some(format!("block-size: {theirs}")),
                );
            }
        }
    }
    for (instance, process) in context
        .first()
        .filter(|(one, _)| one.pcp > 1 && one.role != Role::Both)
    {
        let block = process.number("block-size").unwrap_or(DEFAULT);
        let interleave = process.number("cp-kv-cache-interleave-size").unwrap_or(1);
        if interleave != block {
            sink.found(
                &context.at(instance, "cp-kv-cache-interleave-size"),
                format!(
                    "instance {}: cp-kv-cache-interleave-size is {interleave}, block-size {block}",
                    instance.name
                ),
                Some(format!("cp-kv-cache-interleave-size: {block}")),
            );
        }
    }
}

pub(super) fn prefix_caching(context: &Context<'_>, sink: &mut Sink<'_>) {
    for (instance, process) in context.first().filter(|(one, _)| one.role != Role::Both) {
        if !process.settings.contains_key("enable-prefix-caching") {
            sink.found(
                &context.at(instance, "name"),
                format!(
                    "instance {}: enable-prefix-caching is not given; the engine's default is on",
                    instance.name
                ),
                Some("enable-prefix-caching: false".to_owned()),
            );
        } else if flag(process, "enable-prefix-caching")
            && instance.role == Role::Decode
            && context.connector() != "MooncakeLayerwiseConnector"
        {
            sink.found(
                &context.at(instance, "enable-prefix-caching"),
                format!(
                    "instance {}: prefix caching on decode helps only layer by layer",
                    instance.name
                ),
                Some("enable-prefix-caching: false".to_owned()),
            );
        }
    }
}

pub(super) fn utilization(context: &Context<'_>, sink: &mut Sink<'_>) {
    for (instance, process) in context.first() {
        let most = if instance.role == Role::Decode {
            0.94
        } else {
            0.9
        };
        let given = process
            .settings
            .get("gpu-memory-utilization")
            .and_then(Value::as_f64);
        if let Some(given) = given.filter(|given| *given > most) {
            sink.found(
                &context.at(instance, "gpu-memory-utilization"),
                format!(
                    "instance {}: gpu-memory-utilization is {given}",
                    instance.name
                ),
                Some(format!("gpu-memory-utilization: {most}")),
            );
        }
    }
}

pub(super) fn graphs(context: &Context<'_>, sink: &mut Sink<'_>) {
    for (instance, process) in context.of(Role::Prefill) {
        if !flag(process, "enforce-eager") {
            sink.found(
                &context.at(instance, "graph"),
                format!("instance {}: prefill captures graphs", instance.name),
                Some("graph: none".to_owned()),
            );
        }
    }
    for (instance, process) in context.of(Role::Decode) {
        let mode = process
            .object("compilation-config")
            .and_then(|config| config.get("cudagraph_mode"));
        let torchair = process
            .object("additional-config")
            .and_then(|config| config.get("torchair_graph_config"))
            .and_then(|config| config.get("enabled"));
        let good = mode.and_then(Value::as_str) == Some("FULL_DECODE_ONLY")
            || !context.since("0.10") && torchair == Some(&Value::Bool(true));
        if !good {
            let found = mode.map_or("no graphs".to_owned(), |mode| {
                format!("cudagraph_mode {mode}")
            });
            sink.found(
                &context.at(instance, "graph"),
                format!("instance {}: decode has {found}", instance.name),
                Some("graph: decode".to_owned()),
            );
        }
    }
}

pub(super) fn drafts(context: &Context<'_>, sink: &mut Sink<'_>) {
    let method = |process: &Process| {
        let config = process.object("speculative-config")?;
        config
            .get("method")
            .and_then(Value::as_str)
            .map(str::to_owned)
    };
    for (decode, d) in context.of(Role::Decode) {
        for (prefill, p) in context.of(Role::Prefill) {
            match (method(p), method(d)) {
                (Some(own), Some(theirs)) if own != theirs => sink.found_as(
                    Severity::E,
                    &context.at(decode, "speculative"),
                    format!("drafts by {own} on {} and by {theirs} on {}", prefill.name, decode.name),
                    Some(own),
                ),
                (None, Some(theirs)) => sink.found(
                    &context.at(prefill, "speculative"),
                    format!("decode {} drafts by {theirs}, prefill {} does not: that layer's KV is missing", decode.name, prefill.name),
                    Some(format!("speculative: {{method: {theirs}, tokens: 1}} on prefill")),
                ),
                _ => {}
            }
        }
    }
    for (instance, process) in context.of(Role::Prefill) {
        if process.drafts() > 1 && transfer(process).is_some() {
            sink.found(
                &context.at(instance, "speculative"),
                format!(
                    "instance {}: {} drafts on prefill",
                    instance.name,
                    process.drafts()
                ),
                Some("tokens: 1".to_owned()),
            );
        }
    }
}
