//! Scripts: one per process, one per node that starts and watches them, the router's, the container's,
//! and the checks of device networks.

use crate::engines::file::{Kind, RouterProgram};
use crate::engines::render::{NodeView, ROUTER, RenderedFile, View};
use crate::plan::shell_line;
use std::fmt::Write as _;

const HEAD: &str = "#!/usr/bin/env bash\n";

/// Devices that every container on Ascend needs beside the accelerators.
const MANAGERS: &[&str] = &["/dev/davinci_manager", "/dev/devmm_svm", "/dev/hisi_hdc"];

pub(super) fn files(view: &View<'_>, files: &mut Vec<RenderedFile>) {
    for node in &view.nodes {
        let name = &node.node.name;
        for process in &node.processes {
            let mut text = script(&format!("{} on node {name}", process.name));
            source(view, &mut text);
            for (variable, value) in &process.environment {
                let _ = writeln!(text, "export {variable}={}", quoted(value));
            }
            for variable in &process.secrets {
                let _ = writeln!(
                    text,
                    ": \"${{{variable}:?is not set; it holds a secret that stands in no file}}\"\nexport {variable}"
                );
            }
            let _ = writeln!(text, "exec {}", broken(&process.argv));
            push(files, format!("{name}/{}.sh", process.name), text);
        }
        if !node.processes.is_empty() {
            push(files, format!("{name}/start.sh"), start(view, node));
            if view.container().is_some() {
                push(files, format!("{name}/docker.sh"), docker(view, node));
            }
            if View::ascend(node.node) {
                push(
                    files,
                    format!("{name}/network-check.sh"),
                    network(view, node),
                );
            }
        }
        if node.router
            && let Some(router) = &view.plan.router
        {
            let mut text = script("the router");
            source(view, &mut text);
            // Its calls go to the deployment's own nodes.
            if router.program != RouterProgram::Twinfer {
                text.push_str(
                    "unset http_proxy https_proxy HTTP_PROXY HTTPS_PROXY ALL_PROXY all_proxy\n",
                );
            }
            let _ = writeln!(text, "exec {}", broken(&router.argv));
            push(files, format!("{name}/{ROUTER}.sh"), text);
        }
    }
    if let Some(text) = warm(view) {
        push(files, "warmup.sh".to_owned(), text);
    }
}

fn push(files: &mut Vec<RenderedFile>, path: String, text: String) {
    files.push(RenderedFile {
        path,
        executable: true,
        text,
    });
}

fn script(what: &str) -> String {
    format!("{HEAD}# {what}\nset -euo pipefail\n")
}

/// The engine's own environment. Such scripts read variables that may be unset.
fn source(view: &View<'_>, text: &mut String) {
    let scripts = &view.deployment.file.source;
    if scripts.is_empty() {
        return;
    }
    text.push_str("set +u\n");
    for script in scripts {
        let _ = writeln!(
            text,
            "# shellcheck disable=SC1091\nsource {}",
            quoted(script)
        );
    }
    text.push_str("set -u\n");
}

pub(super) fn quoted(word: &str) -> String {
    shell_line(&[word.to_owned()])
}

/// A command line with a flag and its values on each line.
fn broken(argv: &[String]) -> String {
    let mut out = String::new();
    for (index, word) in argv.iter().enumerate() {
        if index > 0 {
            out.push_str(if word.starts_with("--") {
                " \\\n  "
            } else {
                " "
            });
        }
        out.push_str(&quoted(word));
    }
    out
}

/// Starts a node's processes one after another; when one ends, all end.
fn start(view: &View<'_>, node: &NodeView<'_>) -> String {
    let mut text = script(&format!(
        "Starts what node {} runs of {}. When one process ends, all are ended.",
        node.node.name, view.plan.deployment
    ));
    let one = node.processes.len() == 1;
    text.push_str(
        r#"# LOGS: folder of the logs; STAGGER: seconds between starts; GRACE: seconds that processes have to end.
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
logs=${LOGS:-$here/logs}
STAGGER_LINEgrace=${GRACE:-60}
mkdir -p "$logs"
pids=()

# Each process has a session of its own, so that its children end with it.
start() {
  setsid "$here/$1.sh" >>"$logs/$1.log" 2>&1 &
  pids+=("$!")
}

stop() {
  trap '' TERM INT
  local pid deadline=$((SECONDS + grace))
  for pid in "${pids[@]}"; do kill -TERM -- "-$pid" 2>/dev/null || true; done
  for pid in "${pids[@]}"; do
    while kill -0 -- "-$pid" 2>/dev/null; do
      if ((SECONDS >= deadline)); then
        kill -KILL -- "-$pid" 2>/dev/null || true
        break
      fi
      sleep 0.2
    done
  done
}

trap 'stop; exit 143' TERM INT
"#
        .replace("STAGGER_LINE", if one { "" } else { "stagger=${STAGGER:-2}\n" })
        .as_str(),
    );
    for (index, process) in node.processes.iter().enumerate() {
        if index > 0 {
            text.push_str("sleep \"$stagger\"\n");
        }
        let _ = writeln!(text, "start {}", quoted(&process.name));
    }
    text.push_str(
        r#"status=0
wait -n || status=$?
echo "a process ended with $status; see $logs" >&2
stop
exit $((status == 0 ? 1 : status))
"#,
    );
    text
}

/// `docker run` of a node.
fn docker(view: &View<'_>, node: &NodeView<'_>) -> String {
    let mut text = script(&format!("Node {} in a container.", node.node.name));
    text.push_str(
        "here=$(cd \"$(dirname \"${BASH_SOURCE[0]}\")\" && pwd)\nmkdir -p \"$here/logs\"\n",
    );
    let Some(container) = view.container() else {
        return text;
    };
    let mut words: Vec<String> = ["docker", "run", "--rm", "--init", "--detach"]
        .map(str::to_owned)
        .to_vec();
    let mut flag = |flag: &str, value: &str| words.push(format!("{flag}={value}"));
    flag(
        "--name",
        &format!("{}-{}", view.plan.deployment, node.node.name),
    );
    flag("--network", &container.network);
    for (name, value) in [
        ("--shm-size", &container.shm),
        ("--memory", &container.memory),
    ] {
        if let Some(value) = value {
            flag(name, value);
        }
    }
    if let Some(value) = &container.memlock {
        flag("--ulimit", &format!("memlock={value}:{value}"));
    }
    if let Some(pids) = container.pids {
        flag("--pids-limit", &pids.to_string());
    }
    for entry in &container.publish {
        flag("--publish", entry);
    }
    for device in devices(view, node) {
        flag("--device", &device);
    }
    for mount in &container.mounts {
        flag("--volume", mount);
    }
    for secret in View::secrets(node) {
        flag("--env", &secret);
    }
    if container.privileged {
        words.push("--privileged".to_owned());
    }
    if container.restart != "no" {
        // Docker refuses both together.
        words.retain(|word| word != "--rm");
        words.push(format!("--restart={}", container.restart));
    }
    if node.node.kind == Some(Kind::GPU) {
        let list: Vec<String> = View::devices(node).iter().map(u32::to_string).collect();
        words.push(format!("--gpus=\"device={}\"", list.join(",")));
    }
    let mut line = String::new();
    for word in &words {
        if word.starts_with("--") && word != "--rm" && word != "--init" && word != "--detach" {
            line.push_str(" \\\n  ");
        } else if !line.is_empty() {
            line.push(' ');
        }
        line.push_str(&quoted(word));
    }
    let _ = writeln!(
        text,
        "exec {line} \\\n  --volume=\"$here:/deployment:ro\" --volume=\"$here/logs:/logs\" --env=LOGS=/logs \\\n  {} /deployment/start.sh",
        quoted(&container.image)
    );
    text
}

/// Device files of a node's container.
pub(super) fn devices(view: &View<'_>, node: &NodeView<'_>) -> Vec<String> {
    let mut list = Vec::new();
    if View::ascend(node.node) {
        list.extend(
            View::devices(node)
                .iter()
                .map(|device| format!("/dev/davinci{device}")),
        );
        list.extend(MANAGERS.iter().map(|device| (*device).to_owned()));
    }
    let own = view.container().map(|container| &container.devices);
    list.extend(own.into_iter().flatten().cloned());
    list
}

/// The seeds' checks of device networks. What fails or prints nothing is a failure.
fn network(view: &View<'_>, node: &NodeView<'_>) -> String {
    let mut text = script(&format!(
        "Device networks of node {}; exits 1 if a device fails.",
        node.node.name
    ));
    let a3 = node.node.kind == Some(Kind::A3);
    let devices: Vec<String> = View::devices(node).iter().map(u32::to_string).collect();
    let address = if a3 { "-vnic -g" } else { "-ip -g" };
    let ping = if a3 { "-hccs_ping" } else { "-ping" };
    let _ = write!(
        text,
        r#"tool=${{HCCN_TOOL_PATH:-hccn_tool}}
failed=0
# device, what, pattern that must be found, arguments
check() {{
  local out
  if ! out=$(timeout 10 "$tool" -i "$1" "${{@:4}}" 2>&1); then
    echo "device $1: $2: FAILED: $out" >&2
    failed=1
  elif ! grep -q -- "$3" <<<"$out"; then
    echo "device $1: $2: ${{out:-EMPTY}}" >&2
    failed=1
  fi
}}
for device in {}; do
  check "$device" link 'UP' -link -g
  check "$device" health 'Success\|Init' -net_health -g
  check "$device" address 'ipaddr' {address}
  check "$device" TLS 'switch\[0\]' -tls -g
"#,
        devices.join(" ")
    );
    let others: Vec<&String> = view
        .nodes
        .iter()
        .filter(|other| other.node.name != node.node.name)
        .flat_map(|other| other.node.facts.device_addresses.iter().flatten())
        .collect();
    if others.is_empty() {
        text.push_str("  # Devices of other nodes: give their addresses as arguments.\n  for address in \"$@\"; do\n");
    } else {
        let list: Vec<String> = others.iter().map(|address| quoted(address)).collect();
        let _ = writeln!(text, "  for address in {} \"$@\"; do", list.join(" "));
    }
    let _ = write!(
        text,
        "    check \"$device\" \"ping $address\" ' 0.00% packet' {ping} -g address \"$address\"\n  done\ndone\nexit \"$failed\"\n"
    );
    text
}

/// Requests to every endpoint that prefills, before anything is measured.
fn warm(view: &View<'_>) -> Option<String> {
    let requests = view.warmup()?.requests;
    let router = view.plan.router.as_ref();
    let endpoint = router
        .map(|router| format!("{}:{}", router.host, router.port))
        .or_else(|| {
            view.plan
                .instances
                .iter()
                .flat_map(|one| one.endpoints.iter().cloned())
                .next()
        })?;
    let pairs = view
        .plan
        .pairs
        .iter()
        .map(|pair| pair.count)
        .sum::<u32>()
        .max(1);
    let mut text = script("Warms every pair of prefill and decode; exits 1 if a request fails.");
    let body = serde_json::json!({
        "model": view.plan.served_model_name, "prompt": "Who are you?", "max_tokens": 16, "temperature": 0
    });
    let _ = write!(
        text,
        "for ((n = 0; n < {}; n++)); do\n  curl --fail --silent --show-error --max-time 600 --noproxy '*' --output /dev/null \\\n    -H 'content-type: application/json' -d {} {}\ndone\n",
        requests * pairs,
        quoted(&body.to_string()),
        quoted(&format!("http://{endpoint}/v1/completions"))
    );
    Some(text)
}
