//! Rules 19, 29, 58, 61, 62 and 66 to 79: router, benchmark, checkpoints, containers, start-up.

use crate::engines::file::{Container, Kind, RouterProgram};
use crate::engines::lint::context::setting;
use crate::engines::lint::{Context, Severity, Sink};
use crate::engines::plan::{EngineInstancePlan, PortKind, Process};
use crate::engines::router::split;
use crate::source::steps;
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::path::Path;
use twinfer_protocol::Role;

fn loopback(host: &str) -> bool {
    host == "localhost" || host.parse::<IpAddr>().is_ok_and(|ip| ip.is_loopback())
}

fn wildcard(host: &str) -> bool {
    host.parse::<IpAddr>().is_ok_and(|ip| ip.is_unspecified())
}

pub(super) fn endpoints(context: &Context<'_>, sink: &mut Sink<'_>) {
    let file = context.file();
    if let Some(router) = &context.plan.router {
        for (role, key, list) in [
            (Role::Prefill, "prefill", &router.prefill),
            (Role::Decode, "decode", &router.decode),
        ] {
            let at = steps!["router", key];
            let real: BTreeSet<&String> = context
                .of(role)
                .flat_map(|(instance, _)| &instance.endpoints)
                .collect();
            let mut seen = BTreeSet::new();
            for endpoint in list {
                if !seen.insert(endpoint) {
                    sink.found(
                        at,
                        format!("endpoint {endpoint} stands twice in router.{key}"),
                        Some("once".to_owned()),
                    );
                } else if !real.contains(endpoint) {
                    let host = split(endpoint).0;
                    let near = real
                        .iter()
                        .find(|one| split(one).0 == host)
                        .or(real.iter().next());
                    sink.found(
                        at,
                        format!("endpoint {endpoint} of router.{key} is started by nobody"),
                        near.map(|one| (*one).clone()),
                    );
                }
            }
            if let Some(missing) = real.iter().find(|one| !seen.contains(*one)) {
                sink.found(
                    at,
                    format!("endpoint {missing} is started, but not in router.{key}"),
                    Some(format!(
                        "leave router.{key} out: the plan knows the endpoints"
                    )),
                );
            }
        }
        let decode_elsewhere = context
            .of(Role::Decode)
            .any(|(instance, _)| instance.ranks.iter().any(|ranks| ranks.node != router.node));
        if router.program == RouterProgram::ProxyLayerwise
            && (wildcard(&router.host) || loopback(&router.host) && decode_elsewhere)
        {
            let nearest = context
                .node(&router.node)
                .map(|node| format!("host: {}", node.host));
            sink.found(
                steps!["router", "host"],
                format!(
                    "the router listens on {}, which decode is told to call",
                    router.host
                ),
                nearest,
            );
        }
        if let Some(load) = &file.benchmark {
            let port = load.port.unwrap_or(router.port);
            let host = load.host.as_ref().unwrap_or(&router.host);
            if port != router.port || *host != router.host && !wildcard(&router.host) {
                sink.found_as(
                    Severity::W,
                    steps!["benchmark", "port"],
                    format!(
                        "the benchmark asks {host}:{port}, the router listens on {}:{}",
                        router.host, router.port
                    ),
                    Some(format!("port {}", router.port)),
                );
            }
        }
    }
}

pub(super) fn names(context: &Context<'_>, sink: &mut Sink<'_>) {
    let expected = &context.plan.served_model_name;
    for (instance, processes) in context.instances() {
        for process in processes {
            let Some(given) = process
                .settings
                .get("served-model-name")
                .and_then(Value::as_str)
            else {
                continue;
            };
            if given != expected {
                sink.found(
                    &context.at(instance, "served-model-name"),
                    format!(
                        "{} serves the model as {given}, the deployment as {expected}",
                        process.name
                    ),
                    Some(expected.clone()),
                );
            }
        }
    }
    let load = context
        .file()
        .benchmark
        .as_ref()
        .and_then(|load| load.model.as_ref());
    if let Some(model) = load.filter(|model| *model != expected) {
        sink.found_as(
            Severity::W,
            steps!["benchmark", "model"],
            format!("the benchmark asks for {model}, the servers know {expected}"),
            Some(expected.clone()),
        );
    }
}

fn ascend(kind: Option<Kind>) -> bool {
    matches!(kind, Some(Kind::A2 | Kind::A3))
}

fn container<'d>(context: &Context<'d>) -> Option<&'d Container> {
    context.file().container.as_ref()
}

pub(super) fn hccn_conf(context: &Context<'_>, sink: &mut Sink<'_>) {
    let Some(container) = container(context) else {
        return;
    };
    let uses = context.plan.nodes.iter().any(|node| {
        context
            .node(&node.name)
            .is_some_and(|node| ascend(node.kind))
    });
    let target = |mount: &String| mount.split(':').nth(1).unwrap_or(mount).to_owned();
    let mounted = container.mounts.iter().any(|mount| {
        matches!(
            target(mount).trim_end_matches('/'),
            "/etc/hccn.conf" | "/etc"
        )
    });
    if uses && !mounted {
        sink.found(
            steps!["container", "mounts"],
            "/etc/hccn.conf is not mounted".to_owned(),
            Some("/etc/hccn.conf:/etc/hccn.conf".to_owned()),
        );
    }
}

pub(super) fn proxies(context: &Context<'_>, sink: &mut Sink<'_>) {
    const NAMES: &[&str] = &[
        "http_proxy",
        "https_proxy",
        "HTTP_PROXY",
        "HTTPS_PROXY",
        "ALL_PROXY",
        "all_proxy",
    ];
    let hosts: BTreeSet<&str> = context
        .file()
        .nodes
        .iter()
        .map(|node| node.host.as_str())
        .collect();
    let lacking = |no_proxy: &str| -> Vec<&str> {
        let list: BTreeSet<&str> = no_proxy.split(',').map(str::trim).collect();
        if list.contains("*") {
            return Vec::new();
        }
        hosts
            .iter()
            .copied()
            .filter(|host| !list.contains(host))
            .collect()
    };
    let all: Vec<&str> = hosts.iter().copied().collect();
    let nearest = format!("no_proxy: {}", all.join(","));
    for (instance, process) in context.first() {
        let Some(name) = NAMES.iter().find(|name| {
            process
                .variable(name)
                .is_some_and(|value| !value.is_empty())
        }) else {
            continue;
        };
        let no_proxy = process
            .variable("no_proxy")
            .or_else(|| process.variable("NO_PROXY"));
        let missing = lacking(no_proxy.unwrap_or_default());
        if !missing.is_empty() {
            sink.found(
                &context.at(instance, "environment"),
                format!(
                    "instance {}: {name} is set, no_proxy lacks {}",
                    instance.name,
                    missing.join(",")
                ),
                Some(nearest.clone()),
            );
        }
    }
    let router = &context.file().router;
    if router.http_proxy.is_some() {
        let missing = lacking(router.no_proxy.as_deref().unwrap_or_default());
        if !missing.is_empty() {
            sink.found(
                steps!["router", "http-proxy"],
                format!(
                    "the router's http-proxy is set, no-proxy lacks {}",
                    missing.join(",")
                ),
                Some(nearest),
            );
        }
    }
}

pub(super) fn warm_pairs(context: &Context<'_>, sink: &mut Sink<'_>) {
    let file = context.file();
    let warm = file
        .warmup
        .as_ref()
        .is_some_and(|warmup| warmup.requests > 0);
    if context.sides().is_some() && file.benchmark.is_some() && !warm {
        let pairs = context.of(Role::Prefill).count() * context.of(Role::Decode).count();
        sink.found(
            steps!["benchmark"],
            format!("a benchmark without a request to each of {pairs} pairs first"),
            Some("warmup: {requests: 1}".to_owned()),
        );
    }
}

pub(super) fn warmup(context: &Context<'_>, sink: &mut Sink<'_>) {
    let file = context.file();
    let warm = file
        .warmup
        .as_ref()
        .is_some_and(|warmup| warmup.requests > 0 || warmup.workload.is_some());
    if file.benchmark.is_some() && !warm {
        sink.found(
            steps!["benchmark"],
            "a benchmark without a warm-up".to_owned(),
            Some("warmup: {requests: 4}".to_owned()),
        );
    }
}

pub(super) fn checkpoint_url(context: &Context<'_>, sink: &mut Sink<'_>) {
    if context.connector() != "checkpoint" {
        return;
    }
    let Some(((prefill, p), (decode, _))) = context.sides() else {
        return;
    };
    let elsewhere = decode.ranks.first().map(|ranks| &ranks.node)
        != prefill.ranks.first().map(|ranks| &ranks.node);
    let listen = setting(p, "host");
    let host = context
        .node(&p.node)
        .map(|node| node.host.clone())
        .unwrap_or_default();
    if elsewhere && loopback(&listen) {
        sink.found(
            &context.at(prefill, "listen"),
            format!(
                "prefill {} listens on {listen}, decode {} is on another node",
                prefill.name, decode.name
            ),
            Some(format!("listen: {host}")),
        );
    }
    for (instance, process) in context.of(Role::Decode) {
        let Some(url) = process
            .settings
            .get("pd-prefill-url")
            .and_then(Value::as_str)
        else {
            continue;
        };
        let root = format!("http://{host}:{}", p.port.unwrap_or(0));
        let rest = url
            .strip_prefix("http://")
            .or_else(|| url.strip_prefix("https://"));
        let wrong = match rest {
            None => Some("has no scheme http or https"),
            Some(rest) if rest.contains('@') => Some("has user info"),
            Some(rest) if rest.contains('?') => Some("has a query"),
            Some(rest) if rest.contains('#') => Some("has a fragment"),
            Some(rest) if rest.trim_end_matches('/').contains('/') => Some("has a path"),
            Some(rest) if elsewhere && loopback(split(rest.trim_end_matches('/')).0) => {
                Some("is of the loopback, but prefill is on another node")
            }
            Some(_) => None,
        };
        if let Some(wrong) = wrong {
            // The URL itself may hold a key.
            sink.found(
                steps!["handoff", "prefill-url"],
                format!("instance {}: the URL of prefill {wrong}", instance.name),
                Some(root),
            );
        }
    }
}

pub(super) fn rendezvous(context: &Context<'_>, sink: &mut Sink<'_>) {
    let mut ports: BTreeMap<(&str, &str), &EngineInstancePlan> = BTreeMap::new();
    let mut places: BTreeMap<&str, &EngineInstancePlan> = BTreeMap::new();
    for (instance, processes) in context.instances() {
        let Some(process) = processes.first() else {
            continue;
        };
        let address = process.variable("MASTER_ADDR");
        let flag = setting(process, "data-parallel-address");
        let given = address.unwrap_or(&flag);
        if instance.ranks.len() > 1 && loopback(given) {
            let nearest = context.node(&process.node).map(|node| node.host.clone());
            sink.found(
                &context.at(instance, "rpc-address"),
                format!(
                    "instance {} runs on {} nodes and meets on {given}",
                    instance.name,
                    instance.ranks.len()
                ),
                nearest,
            );
        }
        let Some(port) = process.variable("MASTER_PORT") else {
            // Groups of the flag: two with one address and port would be one.
            if instance.dp > 1
                && let Some(other) = places.insert(&instance.rendezvous, instance)
            {
                sink.found(
                    &context.at(instance, "rpc-port"),
                    format!(
                        "instances {} and {} both meet on {}",
                        other.name, instance.name, instance.rendezvous
                    ),
                    next_port(&instance.rendezvous),
                );
            }
            continue;
        };
        for ranks in &instance.ranks {
            if let Some(other) = ports.insert((&ranks.node, port), instance) {
                sink.found(
                    &context.at(instance, "rpc-port"),
                    format!(
                        "node {}: MASTER_PORT {port} is that of {} and of {}",
                        ranks.node, other.name, instance.name
                    ),
                    port.parse::<u16>()
                        .ok()
                        .map(|port| format!("rpc-port: {}", port.saturating_add(1))),
                );
            }
        }
    }
}

fn next_port(rendezvous: &str) -> Option<String> {
    let port: u16 = split(rendezvous).1.parse().ok()?;
    Some(format!("rpc-port: {}", port.checked_add(1)?))
}

pub(super) fn inherited(context: &Context<'_>, sink: &mut Sink<'_>) {
    for (instance, processes) in context.instances() {
        let nodes = instance.ranks.len() as u32;
        for process in processes {
            let world = process
                .variable("WORLD_SIZE")
                .and_then(|text| text.parse::<u32>().ok());
            let real = instance.dp * instance.tp * instance.pp * instance.pcp;
            if let Some(world) = world.filter(|world| *world != real) {
                let meaning = if world == nodes {
                    ", the number of nodes"
                } else {
                    ""
                };
                sink.found(
                    &context.at(instance, "environment"),
                    format!(
                        "{}: WORLD_SIZE is {world}{meaning}; the instance has {real} ranks",
                        process.name
                    ),
                    Some(format!("leave it out, or WORLD_SIZE: {real}")),
                );
                break;
            }
            if let Some(rank) = process.variable("RANK")
                && rank.parse() != Ok(process.first_rank * instance.tp)
            {
                sink.found(
                    &context.at(instance, "environment"),
                    format!(
                        "{}: RANK is {rank}; its first rank is {}",
                        process.name,
                        process.first_rank * instance.tp
                    ),
                    Some("leave it out".to_owned()),
                );
                break;
            }
        }
    }
}

pub(super) fn graph_interval(context: &Context<'_>, sink: &mut Sink<'_>) {
    const INTERVAL: &str = "DEEPINFER_CUDAGRAPH_BATCH_SIZE_INTERVAL";
    for (instance, process) in context.first() {
        let drafts = process
            .variable("DEEPINFER_USE_NEXTN_DECODE")
            .map_or(Some(0), |text| text.parse::<u64>().ok());
        let (Some(text), Some(drafts)) = (process.variable(INTERVAL), drafts) else {
            continue;
        };
        if text.parse() != Ok(1 + drafts) {
            sink.found(
                &context.at(instance, "environment"),
                format!(
                    "instance {}: {INTERVAL} is {text} with {drafts} drafts",
                    instance.name
                ),
                Some(format!("{INTERVAL}: {}", 1 + drafts)),
            );
        }
    }
}

pub(super) fn checkpoint_folder(context: &Context<'_>, sink: &mut Sink<'_>) {
    let file = context.file();
    let checkpoint = context.connector() == "checkpoint";
    let artifacts = file
        .engine_options
        .get("artifacts")
        .or_else(|| context.deployment.template.options.get("artifacts"))
        .and_then(Value::as_str);
    if let Some(folder) = file
        .handoff
        .checkpoint_dir
        .as_deref()
        .filter(|_| checkpoint)
    {
        for (what, other) in [
            ("the model", Some(file.model.path.as_str())),
            ("artifacts", artifacts),
        ] {
            let Some(other) = other else { continue };
            let inside =
                Path::new(folder).starts_with(other) || Path::new(other).starts_with(folder);
            if inside {
                sink.found(
                    steps!["handoff", "checkpoint-dir"],
                    format!("the checkpoint folder {folder} and {what} {other} lie in one another"),
                    Some("/shared/checkpoints".to_owned()),
                );
            }
        }
        let mode = file.handoff.checkpoint_mode.as_deref();
        if let Some(mode) = mode.filter(|mode| mode.trim_start_matches('0') != "700") {
            sink.found(
                steps!["handoff", "checkpoint-mode"],
                format!("the checkpoint folder's mode is {mode}"),
                Some("0700".to_owned()),
            );
        }
    } else if checkpoint && context.sides().is_some() {
        sink.found(
            steps!["handoff"],
            "no checkpoint-dir for connector checkpoint".to_owned(),
            Some("checkpoint-dir: /shared/checkpoints".to_owned()),
        );
    }
    let Some(container) = container(context) else {
        return;
    };
    for mount in &container.mounts {
        let parts: Vec<&str> = mount.split(':').collect();
        let target = parts.get(1).or(parts.first()).copied().unwrap_or_default();
        let writable = parts
            .get(2)
            .is_none_or(|mode| !mode.split(',').any(|one| one == "ro"));
        if writable && Path::new(&file.model.path).starts_with(target) {
            let severity = if checkpoint { Severity::E } else { Severity::W };
            sink.found_as(
                severity,
                steps!["container", "mounts"],
                format!("mount {mount} holds the model and can be written"),
                Some(format!(
                    "{}:{target}:ro",
                    parts.first().copied().unwrap_or_default()
                )),
            );
        }
    }
}

const CACHES: &[&str] = &[
    "DJ_JIT_CACHE_DIR",
    "TILELANG_CACHE_DIR",
    "VLLM_CACHE_ROOT",
    "TORCHINDUCTOR_CACHE_DIR",
    "TRITON_CACHE_DIR",
    "ASCEND_CACHE_PATH",
];

/// An instance with one of its processes.
type Owner<'d> = (&'d EngineInstancePlan, &'d Process);

pub(super) fn caches(context: &Context<'_>, sink: &mut Sink<'_>) {
    let mut owners: BTreeMap<(&str, &str), Owner<'_>> = BTreeMap::new();
    for (instance, processes) in context.instances() {
        for process in processes {
            for name in CACHES {
                let Some(folder) = process.variable(name) else {
                    continue;
                };
                let Some((other, _)) = owners.insert((&process.node, folder), (instance, *process))
                else {
                    continue;
                };
                if other.name != instance.name {
                    sink.found(
                        &context.at(instance, "environment"),
                        format!(
                            "node {}: {name} {folder} is that of {} and of {}",
                            process.node, other.name, instance.name
                        ),
                        Some(format!("{folder}/{}", instance.name)),
                    );
                }
            }
        }
    }
}

pub(super) fn container_limits(context: &Context<'_>, sink: &mut Sink<'_>) {
    let Some(container) = container(context) else {
        return;
    };
    let mut missing = Vec::new();
    for (name, value) in [
        ("memory", &container.memory),
        ("shm", &container.shm),
        ("memlock", &container.memlock),
    ] {
        if value.is_none() {
            missing.push(name);
        }
    }
    if !missing.is_empty() {
        sink.found(
            steps!["container", "image"],
            format!("the container has no limit for {}", missing.join(", ")),
            Some(
                missing
                    .iter()
                    .map(|name| format!("{name}: ..."))
                    .collect::<Vec<_>>()
                    .join(", "),
            ),
        );
    }
    if container.privileged {
        sink.found(
            steps!["container", "privileged"],
            "the container is privileged".to_owned(),
            Some("privileged: false; the devices of each node are passed one by one".to_owned()),
        );
    }
    let devices = context.plan.nodes.iter().any(|node| node.devices > 0);
    if devices && container.restart != "no" {
        sink.found(
            steps!["container", "restart"],
            format!(
                "the container restarts ({}) on nodes with devices",
                container.restart
            ),
            Some("restart: no".to_owned()),
        );
    }
}

pub(super) fn http_workers(context: &Context<'_>, sink: &mut Sink<'_>) {
    if !context.deployment.template.model_per_http_worker {
        return;
    }
    for (instance, process) in context.first() {
        for key in [
            "workers",
            "http-workers",
            "api-server-count",
            "uvicorn-workers",
        ] {
            if let Some(count) = process.number(key).filter(|count| *count > 1) {
                sink.found(
                    &context.at(instance, key),
                    format!(
                        "instance {}: {key} is {count}; each loads the model on the same devices",
                        instance.name
                    ),
                    Some(format!("{key}: 1")),
                );
            }
        }
        if let Some(count) = process
            .variable("WEB_CONCURRENCY")
            .filter(|count| *count != "1")
        {
            sink.found(
                &context.at(instance, "environment"),
                format!("instance {}: WEB_CONCURRENCY is {count}", instance.name),
                Some("WEB_CONCURRENCY: 1".to_owned()),
            );
        }
    }
}

pub(super) fn capacity(context: &Context<'_>, sink: &mut Sink<'_>) {
    for (instance, process) in context.first() {
        let memory = context
            .plan
            .memory
            .iter()
            .find(|memory| memory.instance == instance.name);
        let given = (
            process.number("max-num-seqs"),
            process.number("max-model-len"),
        );
        let (Some(memory), (Some(seqs), Some(len))) = (memory, given) else {
            continue;
        };
        if seqs * len > memory.kv_tokens {
            let whole = (memory.kv_tokens / len.max(1)).max(1);
            sink.found(
                &context.at(instance, "max-num-seqs"),
                format!(
                    "instance {}: {seqs} sequences of {len} tokens are {} tokens, a device's KV holds {}",
                    instance.name,
                    seqs * len,
                    memory.kv_tokens
                ),
                Some(format!("max-num-seqs: {whole}, if all may be that long")),
            );
        }
    }
}

pub(super) fn hybrid(context: &Context<'_>, sink: &mut Sink<'_>) {
    for (instance, process) in context.first() {
        if process.variable("OMNI_PD_HYBRID") != Some("1") {
            continue;
        }
        let servers = process.number("api-server-count").unwrap_or(1);
        if servers > 1 || instance.endpoints.len() > 1 {
            sink.found(
                &context.at(instance, "api"),
                format!(
                    "instance {}: OMNI_PD_HYBRID=1 with {} API servers",
                    instance.name,
                    servers.max(instance.endpoints.len() as u64)
                ),
                Some("one API server".to_owned()),
            );
        }
        let chunked = process.variable("FORCE_ENABLE_CHUNK_PREFILL");
        if chunked.is_some_and(|value| !matches!(value, "" | "0" | "false")) {
            sink.found(
                &context.at(instance, "environment"),
                format!(
                    "instance {}: OMNI_PD_HYBRID=1 with FORCE_ENABLE_CHUNK_PREFILL",
                    instance.name
                ),
                Some("leave FORCE_ENABLE_CHUNK_PREFILL out".to_owned()),
            );
        }
    }
}

pub(super) fn compile_level(context: &Context<'_>, sink: &mut Sink<'_>) {
    use twinfer_config::model::Architecture;
    let architecture = context.model().map(|model| model.architecture);
    let (name, level) = match architecture {
        Some(Architecture::DeepseekV3 | Architecture::DeepseekV2) => ("DeepSeek-R1", 1),
        Some(Architecture::Qwen3Moe) => ("Qwen3-MoE", 0),
        _ => return,
    };
    for (instance, process) in context.first() {
        let given = process
            .object("additional-config")
            .and_then(|config| config.get("graph_model_compile_config"))
            .and_then(|config| config.get("level"))
            .and_then(Value::as_i64);
        if let Some(given) = given.filter(|given| *given != level) {
            sink.found(
                &context.at(instance, "additional-config"),
                format!(
                    "instance {}: graph_model_compile_config.level is {given} for {name}",
                    instance.name
                ),
                Some(format!("compile-level: {level}")),
            );
        }
    }
}

pub(super) fn bridge(context: &Context<'_>, sink: &mut Sink<'_>) {
    let Some(container) = container(context).filter(|one| one.network != "host") else {
        return;
    };
    let published: Vec<(u32, u32)> = container
        .publish
        .iter()
        .filter_map(|entry| {
            let host = entry.split(':').next()?;
            let (first, last) = host.split_once('-').unwrap_or((host, host));
            Some((first.trim().parse().ok()?, last.trim().parse().ok()?))
        })
        .collect();
    let open = |first: u32, last: u32| {
        (first..=last).all(|port| {
            published
                .iter()
                .any(|(from, to)| (*from..=*to).contains(&port))
        })
    };
    let mut said = BTreeSet::new();
    for port in &context.plan.ports {
        if matches!(port.kind, PortKind::Ephemeral | PortKind::Router)
            || open(port.first, port.last)
        {
            continue;
        }
        if said.insert((port.first, port.last)) && said.len() <= 8 {
            sink.found(
                steps!["container", "publish"],
                format!(
                    "network {} does not publish {}-{} ({})",
                    container.network, port.first, port.last, port.what
                ),
                Some("network: host".to_owned()),
            );
        }
    }
}

pub(super) fn set_env(context: &Context<'_>, sink: &mut Sink<'_>) {
    let file = context.file();
    if file.source.is_empty() && file.container.is_some() {
        return;
    }
    for (what, part) in [("ascend-toolkit", "toolkit"), ("nnal", "nnal")] {
        let sourced = file
            .source
            .iter()
            .any(|script| script.contains(part) && script.ends_with("set_env.sh"));
        if !sourced {
            sink.found(
                steps!["source"],
                format!("set_env.sh of {what} is not sourced"),
                Some(match part {
                    "nnal" => "/usr/local/Ascend/nnal/atb/set_env.sh".to_owned(),
                    _ => "/usr/local/Ascend/ascend-toolkit/set_env.sh".to_owned(),
                }),
            );
        }
    }
}
