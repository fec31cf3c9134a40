//! Manifests: a StatefulSet for an instance's part on a node, services, probes, a secret by reference.

use crate::engines::file::Kind;
use crate::engines::plan::Process;
use crate::engines::render::{NodeView, RenderedFile, View, yaml};
use serde_json::{Value, json};
use std::collections::BTreeMap;

pub(super) fn files(view: &View<'_>, files: &mut Vec<RenderedFile>) {
    let Some(container) = view.container() else {
        return;
    };
    let name = dns(&view.plan.deployment);
    let mut documents = Vec::new();
    for node in &view.nodes {
        let mut parts: BTreeMap<&str, Vec<&Process>> = BTreeMap::new();
        for process in &node.processes {
            parts.entry(&process.instance).or_default().push(process);
        }
        for (instance, processes) in parts {
            let part = dns(&format!("{name}-{instance}-{}", node.node.name));
            documents.push(config_map(&part, &processes, files, &node.node.name));
            documents.push(service(&part, &processes));
            documents.push(stateful_set(
                view,
                node,
                &part,
                &processes,
                &container.image,
            ));
        }
    }
    if let Some(router) = &view.plan.router {
        let node = &router.node;
        documents.push(json!({
            "apiVersion": "v1", "kind": "Service",
            "metadata": {"name": format!("{name}-router")},
            "spec": {
                "selector": {"app.kubernetes.io/name": format!("{name}-router")},
                "ports": [{"name": "http", "port": router.port, "targetPort": router.port}],
            },
        }));
        documents.push(json!({
            "apiVersion": "apps/v1", "kind": "Deployment",
            "metadata": {"name": format!("{name}-router")},
            "spec": {
                "replicas": 1,
                "selector": {"matchLabels": {"app.kubernetes.io/name": format!("{name}-router")}},
                "template": {
                    "metadata": {"labels": {"app.kubernetes.io/name": format!("{name}-router")}},
                    "spec": {
                        "hostNetwork": true,
                        "dnsPolicy": "ClusterFirstWithHostNet",
                        "nodeSelector": {"kubernetes.io/hostname": node},
                        "containers": [{
                            "name": "router",
                            "image": container.image,
                            "command": router.argv,
                            "ports": [{"name": "http", "containerPort": router.port}],
                        }],
                    },
                },
            },
        }));
    }
    let text: Vec<String> = documents.iter().map(yaml).collect();
    files.push(RenderedFile {
        path: "kubernetes.yaml".to_owned(),
        executable: false,
        text: text.join("---\n"),
    });
}

/// A name that Kubernetes takes: lower case, digits and hyphens, at most 63 characters.
fn dns(name: &str) -> String {
    let name: String = name
        .to_lowercase()
        .chars()
        .map(|c| if c.is_ascii_alphanumeric() { c } else { '-' })
        .collect();
    name.trim_matches('-').chars().take(63).collect()
}

/// The scripts of a part, as they stand beside.
fn config_map(part: &str, processes: &[&Process], files: &[RenderedFile], node: &str) -> Value {
    let script = |name: &str| {
        let path = format!("{node}/{name}.sh");
        files
            .iter()
            .find(|file| file.path == path)
            .map(|file| file.text.clone())
            .unwrap_or_default()
    };
    let mut data = serde_json::Map::new();
    let mut start = script("start");
    let own: Vec<String> = processes
        .iter()
        .map(|process| format!("start {}", process.name))
        .collect();
    // Other instances of the node have pods of their own.
    start = start
        .lines()
        .filter(|line| {
            !line.starts_with("start ")
                || line.starts_with("start()")
                || own.iter().any(|one| one == line)
        })
        .map(|line| format!("{line}\n"))
        .collect();
    data.insert("start.sh".to_owned(), start.into());
    for process in processes {
        data.insert(format!("{}.sh", process.name), script(&process.name).into());
    }
    json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": part}, "data": data})
}

fn service(part: &str, processes: &[&Process]) -> Value {
    let ports: Vec<Value> = processes
        .iter()
        .filter_map(|process| process.port)
        .map(|port| json!({"name": format!("http-{port}"), "port": port, "targetPort": port}))
        .collect();
    let mut spec = json!({"clusterIP": "None", "selector": {"app.kubernetes.io/name": part}});
    if let (false, Some(spec)) = (ports.is_empty(), spec.as_object_mut()) {
        spec.insert("ports".to_owned(), ports.into());
    }
    json!({"apiVersion": "v1", "kind": "Service", "metadata": {"name": part}, "spec": spec})
}

fn stateful_set(
    view: &View<'_>,
    node: &NodeView<'_>,
    part: &str,
    processes: &[&Process],
    image: &str,
) -> Value {
    let devices: usize = processes.iter().map(|process| process.devices.len()).sum();
    let mut limits = serde_json::Map::new();
    let resource = match node.node.kind {
        Some(Kind::A2 | Kind::A3) => Some("huawei.com/Ascend910"),
        Some(Kind::GPU) => Some("nvidia.com/gpu"),
        _ => None,
    };
    if let Some(resource) = resource {
        limits.insert(resource.to_owned(), devices.to_string().into());
    }
    let container = view.container();
    if let Some(memory) = container.and_then(|container| container.memory.as_ref()) {
        limits.insert("memory".to_owned(), quantity(memory).into());
    }
    let mut volumes = vec![
        json!({"name": "scripts", "configMap": {"name": part, "defaultMode": 0o555}}),
        json!({"name": "logs", "emptyDir": {}}),
    ];
    let mut mounts = vec![
        json!({"name": "scripts", "mountPath": "/deployment", "readOnly": true}),
        json!({"name": "logs", "mountPath": "/logs"}),
    ];
    if let Some(shm) = container.and_then(|container| container.shm.as_ref()) {
        volumes.push(
            json!({"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": quantity(shm)}}),
        );
        mounts.push(json!({"name": "shm", "mountPath": "/dev/shm"}));
    }
    for (number, mount) in container
        .into_iter()
        .flat_map(|container| &container.mounts)
        .enumerate()
    {
        let fields: Vec<&str> = mount.split(':').collect();
        let target = fields.get(1).unwrap_or(&fields[0]);
        volumes.push(json!({"name": format!("host-{number}"), "hostPath": {"path": fields[0]}}));
        mounts.push(json!({
            "name": format!("host-{number}"), "mountPath": target, "readOnly": fields.get(2) == Some(&"ro"),
        }));
    }
    let secrets: Vec<Value> = View::secrets(node)
        .iter()
        .map(|name| {
            json!({"name": name, "valueFrom": {"secretKeyRef": {"name": dns(&view.plan.deployment), "key": name}}})
        })
        .collect();
    let mut env = vec![json!({"name": "LOGS", "value": "/logs"})];
    env.extend(secrets);
    let mut one = json!({
        "name": "engine",
        "image": image,
        "command": ["/deployment/start.sh"],
        "env": env,
        "resources": {"limits": limits},
        "volumeMounts": mounts,
        "securityContext": {"privileged": container.is_some_and(|container| container.privileged)},
    });
    if let (Some(port), Some(map)) = (
        processes.iter().find_map(|process| process.port),
        one.as_object_mut(),
    ) {
        let probe = |period: u32, failures: u32| json!({"httpGet": {"path": "/health", "port": port}, "periodSeconds": period, "timeoutSeconds": 5, "failureThreshold": failures});
        // Weights load for long; liveness counts only after the start-up probe.
        map.insert("startupProbe".to_owned(), probe(10, 360));
        map.insert("readinessProbe".to_owned(), probe(5, 3));
        map.insert("livenessProbe".to_owned(), probe(10, 6));
    }
    json!({
        "apiVersion": "apps/v1", "kind": "StatefulSet",
        "metadata": {"name": part},
        "spec": {
            "serviceName": part,
            "replicas": 1,
            "selector": {"matchLabels": {"app.kubernetes.io/name": part}},
            "template": {
                "metadata": {"labels": {"app.kubernetes.io/name": part}},
                "spec": {
                    "hostNetwork": container.is_none_or(|container| container.network == "host"),
                    "dnsPolicy": "ClusterFirstWithHostNet",
                    "nodeSelector": {"kubernetes.io/hostname": node.node.name},
                    "terminationGracePeriodSeconds": 90,
                    "containers": [one],
                    "volumes": volumes,
                },
            },
        },
    })
}

/// Docker's `500g` as Kubernetes' `500Gi`.
fn quantity(text: &str) -> String {
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    match text[digits.len()..].to_lowercase().chars().next() {
        Some('k') => format!("{digits}Ki"),
        Some('m') => format!("{digits}Mi"),
        Some('g') => format!("{digits}Gi"),
        Some('t') => format!("{digits}Ti"),
        _ => digits.to_owned(),
    }
}
