//! ranktable.json of LLMDataDist (version 1.2), from recorded device addresses; without these, the call
//! of the generator.

use crate::engines::file::Kind;
use crate::engines::render::{NodeView, RenderedFile, View, shell};
use serde_json::{Map, Value, json};
use twinfer_protocol::Role;

pub(super) fn files(view: &View<'_>, files: &mut Vec<RenderedFile>) {
    if view.plan.connector.as_deref() != Some("LLMDataDistCMgrConnector") {
        return;
    }
    if let Some(table) = table(view) {
        files.push(RenderedFile {
            path: "ranktable.json".to_owned(),
            executable: false,
            text: serde_json::to_string_pretty(&table).unwrap_or_default() + "\n",
        });
    } else {
        files.push(RenderedFile {
            path: "ranktable.sh".to_owned(),
            executable: true,
            text: generator(view),
        });
    }
}

/// Nodes of a role in the order of the file, with the devices that the role uses there.
fn side<'v>(view: &'v View<'v>, role: Role) -> Vec<(&'v NodeView<'v>, Vec<u32>)> {
    view.nodes
        .iter()
        .map(|node| {
            let mut devices: Vec<u32> = node
                .processes
                .iter()
                .filter(|process| process.role == role)
                .flat_map(|process| process.devices.iter().copied())
                .collect();
            devices.sort_unstable();
            (node, devices)
        })
        .filter(|(_, devices)| !devices.is_empty())
        .collect()
}

/// The table; none where an address is not recorded.
fn table(view: &View<'_>) -> Option<Value> {
    let mut cluster = 0;
    let mut list = |role| -> Option<Vec<Value>> {
        let mut out = Vec::new();
        for (node, devices) in side(view, role) {
            let facts = &node.node.facts;
            for device in devices {
                let at = |list: &Option<Vec<String>>| list.as_ref()?.get(device as usize).cloned();
                cluster += 1;
                let mut entry = Map::new();
                let mut set = |key: &str, value: String| entry.insert(key.to_owned(), value.into());
                set("server_id", node.node.host.clone());
                set("device_id", device.to_string());
                set("device_ip", at(&facts.device_addresses)?);
                if node.node.kind == Some(Kind::A3) {
                    set("super_pod_id", at(&facts.super_pod_ids)?);
                    set("super_device_id", at(&facts.super_device_ids)?);
                }
                set("cluster_id", cluster.to_string());
                out.push(Value::Object(entry));
            }
        }
        Some(out)
    };
    let prefill = list(Role::Prefill)?;
    let decode = list(Role::Decode)?;
    let nodes = view
        .nodes
        .iter()
        .filter(|node| !node.processes.is_empty())
        .count();
    Some(json!({
        "version": "1.2",
        "server_count": nodes.to_string(),
        "prefill_device_list": prefill,
        "decode_device_list": decode,
        "status": "completed",
    }))
}

fn generator(view: &View<'_>) -> String {
    let count = |side: &[(&NodeView<'_>, Vec<u32>)]| -> usize {
        side.iter().map(|(_, devices)| devices.len()).sum()
    };
    let (prefill, decode) = (side(view, Role::Prefill), side(view, Role::Decode));
    let hosts: Vec<String> = prefill
        .iter()
        .chain(&decode)
        .map(|(node, _)| shell::quoted(&node.node.host))
        .collect();
    let first = prefill.first().map(|(node, _)| node.node);
    let folder = view
        .deployment
        .file
        .ranktable
        .as_deref()
        .and_then(|path| path.rsplit_once('/'))
        .map_or(".", |(folder, _)| folder);
    format!(
        "#!/usr/bin/env bash\n# Run on every node at the same time: device addresses are not recorded in the deployment.\nset -euo pipefail\n\
         cd {}\n# A table of before survives a re-cabling.\nrm -f ranktable.json\nexport GEN_RANKTABLE=1\n\
         exec bash gen_ranktable.sh --ips {} \\\n  --npus-per-node {} --network-card-name {} \\\n  --prefill-device-cnt {} --decode-device-cnt {}\n",
        shell::quoted(folder),
        hosts.join(" "),
        first.map_or(8, |node| node.devices),
        shell::quoted(first.and_then(|node| node.nic.as_deref()).unwrap_or("eth0")),
        count(&prefill),
        count(&decode)
    )
}
