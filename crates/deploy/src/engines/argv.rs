//! Environment and arguments of one process: the template's items, then what passes through.

use crate::engines::file::EngineNode;
use crate::engines::load::EngineDeployment;
use crate::engines::plan::Process;
use crate::engines::resolve::{Draft, handoff_used, text};
use crate::engines::template::{Connector, Variables, deep_merge, fill, fill_tree, holds, plain};
use crate::source::canonical;
use serde_json::{Map, Value};

/// Sets variables that a node's own values override; the rest are its flags.
pub(crate) fn apply_overrides(
    variables: &mut Variables,
    over: &Map<String, Value>,
) -> Map<String, Value> {
    let mut flags = Map::new();
    for (key, value) in over {
        if variables.contains_key(key) {
            variables.insert(key.clone(), value.clone());
        } else {
            flags.insert(key.clone(), value.clone());
        }
    }
    flags
}

/// Fills in a process's environment, secrets, settings and arguments.
pub(crate) fn process(
    deployment: &EngineDeployment,
    draft: &Draft<'_>,
    (connector_name, connector): (&str, &Connector),
    mut variables: Variables,
    node_flags: &Map<String, Value>,
    mut process: Process,
    node: &EngineNode,
) -> Process {
    let template = &deployment.template;
    let file = &deployment.file;
    let handoff = handoff_used(deployment);
    if handoff {
        variables.insert("connector".to_owned(), connector_name.into());
        let config = connector.config.as_ref();
        if let Some(mut config) = config.and_then(|tree| fill_tree(tree, &variables)) {
            deep_merge(&mut config, &Value::Object(file.handoff.config.clone()));
            if let (Some(policy), Some(map)) = (&file.handoff.policy, config.as_object_mut()) {
                map.insert("kv_load_failure_policy".to_owned(), policy.clone().into());
            }
            variables.insert("connector.config".to_owned(), config);
        }
    }
    let node_environment = node_flags.get("environment").and_then(Value::as_object);
    let mut environment: Vec<(String, String)> = Vec::new();
    let mut set =
        |name: &str, value: String| match environment.iter_mut().find(|(known, _)| known == name) {
            Some((_, old)) => *old = value,
            None => environment.push((name.to_owned(), value)),
        };
    let connector_environment = handoff.then_some(&connector.environment);
    for (name, value) in template
        .environment
        .iter()
        .chain(connector_environment.into_iter().flatten())
    {
        let (value, when) = conditional(value);
        if holds(&when, &variables)
            && let Some(value) = value.and_then(|value| fill(&text(value), &variables))
        {
            set(name, value);
        }
    }
    for map in [
        Some(&file.environment),
        Some(&draft.spec.environment),
        Some(&node.environment),
        node_environment,
    ]
    .into_iter()
    .flatten()
    {
        for (name, value) in map {
            // The same variables as in templates, so that one line serves all nodes.
            set(
                name,
                fill(&text(value), &variables).unwrap_or_else(|| text(value)),
            );
        }
    }
    process.environment = environment;
    process.secrets = template
        .secrets
        .iter()
        .filter(|secret| holds(&secret.when, &variables))
        .map(|secret| secret.name.clone())
        .chain(file.secrets.iter().chain(&draft.spec.secrets).cloned())
        .collect();
    process.secrets.dedup();
    let flags = flags(deployment, draft, node_flags, &variables);
    arguments(deployment, &variables, flags, &mut process);
    process
}

/// Flags of the file, of the instance and of the node.
fn flags(
    deployment: &EngineDeployment,
    draft: &Draft<'_>,
    node_flags: &Map<String, Value>,
    variables: &Variables,
) -> Map<String, Value> {
    let mut flags = Map::new();
    for (key, value) in deployment
        .file
        .flags
        .iter()
        .chain(&draft.spec.flags)
        .chain(node_flags)
    {
        let key = canonical(key);
        if key == "environment" {
            continue;
        }
        let value = fill_tree(value, variables).unwrap_or_else(|| value.clone());
        match flags.get_mut(&key) {
            Some(old) => deep_merge(old, &value),
            None => {
                flags.insert(key, value);
            }
        }
    }
    flags
}

/// Value and conditions of an entry of a template's environment.
fn conditional(entry: &Value) -> (Option<&Value>, Vec<String>) {
    match entry {
        Value::Null => (None, Vec::new()),
        Value::Object(map) => {
            let when = map.get("when").and_then(Value::as_array);
            let when = when.into_iter().flatten().map(plain).collect();
            (map.get("value"), when)
        }
        value => (Some(value), Vec::new()),
    }
}

fn arguments(
    deployment: &EngineDeployment,
    variables: &Variables,
    mut flags: Map<String, Value>,
    process: &mut Process,
) {
    for item in &deployment.template.argv {
        if !holds(&item.when, variables) {
            continue;
        }
        if let Some(word) = &item.word {
            process.argv.extend(fill(word, variables));
        }
        let Some(flag) = &item.flag else { continue };
        let key = flag.trim_start_matches('-').to_owned();
        let own = match &item.value {
            None => Some(Value::Bool(true)),
            Some(value) => fill_tree(value, variables),
        };
        // What the file says wins; settings that are objects are merged.
        let value = match (own, flags.remove(&key)) {
            (Some(mut own), Some(given)) => {
                deep_merge(&mut own, &given);
                Some(own)
            }
            (own, given) => given.or(own),
        };
        if let Some(value) = value {
            push(process, &key, value);
        }
    }
    for (key, value) in flags {
        push(process, &key, value);
    }
}

fn push(process: &mut Process, key: &str, value: Value) {
    let flag = format!("--{key}");
    match &value {
        Value::Null => return,
        Value::Bool(true) => process.argv.push(flag),
        Value::Bool(false) => process.argv.push(format!("--no-{key}")),
        Value::Array(items) => {
            process.argv.push(flag);
            process.argv.extend(items.iter().map(plain));
        }
        value => {
            let word = plain(value);
            if word.starts_with('-') {
                process.argv.push(format!("{flag}={word}"));
            } else {
                process.argv.extend([flag, word]);
            }
        }
    }
    process.settings.insert(key.to_owned(), value);
}
