//! One Compose file per node.

use crate::engines::render::{RenderedFile, View, shell, yaml};
use serde_json::{Map, Value, json};

pub(super) fn files(view: &View<'_>, files: &mut Vec<RenderedFile>) {
    let Some(container) = view.container() else {
        return;
    };
    for node in view.nodes.iter().filter(|node| !node.processes.is_empty()) {
        let mut service = Map::new();
        let mut set = |key: &str, value: Value| service.insert(key.to_owned(), value);
        set("image", json!(container.image));
        set("init", json!(true));
        set("restart", json!(container.restart));
        set("stop_grace_period", json!("90s"));
        set("command", json!(["/deployment/start.sh"]));
        if container.network == "host" {
            set("network_mode", json!("host"));
        } else {
            set("ports", json!(container.publish));
        }
        if let Some(shm) = &container.shm {
            set("shm_size", json!(shm));
        }
        if let Some(memory) = &container.memory {
            set("mem_limit", json!(memory));
        }
        if let Some(memlock) = container
            .memlock
            .as_ref()
            .and_then(|text| text.parse::<i64>().ok())
        {
            set(
                "ulimits",
                json!({"memlock": {"soft": memlock, "hard": memlock}}),
            );
        }
        if let Some(pids) = container.pids {
            set("pids_limit", json!(pids));
        }
        if container.privileged {
            set("privileged", json!(true));
        }
        let devices: Vec<String> = shell::devices(view, node)
            .iter()
            .map(|device| format!("{device}:{device}"))
            .collect();
        if !devices.is_empty() {
            set("devices", json!(devices));
        }
        let mut volumes = container.mounts.clone();
        volumes.extend([".:/deployment:ro".to_owned(), "./logs:/logs".to_owned()]);
        set("volumes", json!(volumes));
        // A name without a value is taken from the environment of `docker compose`.
        let mut environment = Map::from_iter([("LOGS".to_owned(), json!("/logs"))]);
        for secret in View::secrets(node) {
            environment.insert(secret, Value::Null);
        }
        set("environment", Value::Object(environment));
        let file = json!({
            "name": format!("{}-{}", view.plan.deployment, node.node.name).to_lowercase(),
            "services": {"engine": service},
        });
        files.push(RenderedFile {
            path: format!("{}/compose.yaml", node.node.name),
            executable: false,
            text: yaml(&file),
        });
    }
}
