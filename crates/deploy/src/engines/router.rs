//! The router of a deployment by template: ours, or one of vllm-ascend's example proxies.

use crate::engines::file::RouterProgram;
use crate::engines::load::EngineDeployment;
use crate::engines::plan::{EnginePlan, RouterPlan};
use crate::engines::template::plain;
use serde_json::Value;
use twinfer_protocol::Role;

const PORT: u16 = 8000;

/// The router, unless the file wants none.
pub(crate) fn plan(deployment: &EngineDeployment, plan: &EnginePlan) -> Option<RouterPlan> {
    let spec = &deployment.file.router;
    if spec.program == RouterProgram::None {
        return None;
    }
    let nodes = &deployment.file.nodes;
    let node = match &spec.node {
        Some(name) => nodes.iter().find(|node| node.name == *name)?,
        None => nodes.first()?,
    };
    let endpoints = |role| -> Vec<String> {
        plan.instances
            .iter()
            .filter(|instance| instance.role == role)
            .flat_map(|instance| instance.endpoints.iter().cloned())
            .collect()
    };
    let mut router = RouterPlan {
        program: spec.program,
        node: node.name.clone(),
        host: spec.host.clone().unwrap_or_else(|| node.host.clone()),
        port: spec.port.unwrap_or(PORT),
        prefill: spec
            .prefill
            .clone()
            .unwrap_or_else(|| endpoints(Role::Prefill)),
        decode: spec
            .decode
            .clone()
            .unwrap_or_else(|| endpoints(Role::Decode)),
        both: endpoints(Role::Both),
        argv: Vec::new(),
    };
    router.argv = argv(deployment, plan.connector.as_deref(), &router);
    Some(router)
}

fn argv(
    deployment: &EngineDeployment,
    connector: Option<&str>,
    router: &RouterPlan,
) -> Vec<String> {
    let spec = &deployment.file.router;
    let mut argv: Vec<String> = Vec::new();
    let mut words = |list: &[&str]| argv.extend(list.iter().map(|word| (*word).to_owned()));
    let port = router.port.to_string();
    match router.program {
        RouterProgram::Twinfer | RouterProgram::None => {
            words(&["twinfer", "router", "--host", &router.host, "--port", &port]);
            for (flag, list) in [
                ("--prefill", &router.prefill),
                ("--decode", &router.decode),
                ("--worker", &router.both),
            ] {
                for endpoint in list {
                    words(&[flag, &format!("http://{endpoint}")]);
                }
            }
            let kind = match connector {
                Some("MooncakeLayerwiseConnector") => Some("mooncake-layerwise"),
                Some("MooncakeConnector") => Some("mooncake"),
                _ => None,
            };
            if let Some(kind) = kind.filter(|_| !spec.flags.contains_key("kv-connector")) {
                words(&["--kv-connector", kind]);
            }
        }
        RouterProgram::Proxy | RouterProgram::ProxyLayerwise => {
            let script = match router.program {
                RouterProgram::Proxy => "load_balance_proxy_server_example.py",
                _ => "load_balance_proxy_layerwise_server_example.py",
            };
            let script = match &spec.folder {
                Some(folder) => format!("{}/{script}", folder.trim_end_matches('/')),
                None => script.to_owned(),
            };
            words(&["python", &script, "--host", &router.host, "--port", &port]);
            for (side, list) in [("prefiller", &router.prefill), ("decoder", &router.decode)] {
                if list.is_empty() {
                    continue;
                }
                words(&[&format!("--{side}-hosts")]);
                for endpoint in list {
                    words(&[split(endpoint).0]);
                }
                words(&[&format!("--{side}-ports")]);
                for endpoint in list {
                    words(&[split(endpoint).1]);
                }
            }
        }
    }
    for (key, value) in &spec.flags {
        let flag = format!("--{key}");
        match value {
            Value::Null => {}
            Value::Bool(true) => argv.push(flag),
            Value::Bool(false) => argv.push(format!("--no-{key}")),
            value => argv.extend([flag, plain(value)]),
        }
    }
    argv
}

/// Host and port of `host:port`; brackets of an IPv6 address are dropped.
pub(crate) fn split(endpoint: &str) -> (&str, &str) {
    let (host, port) = endpoint.rsplit_once(':').unwrap_or((endpoint, ""));
    (host.trim_start_matches('[').trim_end_matches(']'), port)
}
