//! What this machine is.

use crate::load::Deployment;
use crate::plan::Facts;
use rustix::thread::{CpuSet, sched_getaffinity};
use std::collections::BTreeMap;
use std::net::TcpListener;
use std::path::Path;

/// Facts of this machine, for the nodes that it is.
pub fn local_facts(deployment: &Deployment) -> Facts {
    let mut cores = BTreeMap::new();
    // Of several nodes that are this machine only the first gets its cores: they must not be used twice.
    if let Some(node) = deployment
        .file
        .nodes
        .iter()
        .find(|node| is_local(&node.host))
    {
        cores.insert(node.name.clone(), permitted_cores());
    }
    Facts {
        cores,
        model_problem: model_problem(&deployment.model_path()),
    }
}

/// Is `host` an address of this machine?
pub(crate) fn is_local(host: &str) -> bool {
    // An address can be bound only where it exists.
    TcpListener::bind((host, 0)).is_ok()
}

fn permitted_cores() -> Vec<u32> {
    let set = sched_getaffinity(None).unwrap_or_else(|_| CpuSet::new());
    let cores: Vec<u32> = (0..CpuSet::MAX_CPU)
        .filter(|&core| set.is_set(core))
        .filter_map(|core| core.try_into().ok())
        .collect();
    if cores.is_empty() { vec![0] } else { cores }
}

/// What is wrong with a model directory or GGUF file at first sight; `twinfer serve` looks closer.
fn model_problem(folder: &Path) -> Option<String> {
    let shown = folder.display();
    let gguf = folder
        .extension()
        .is_some_and(|extension| extension == "gguf");
    match std::fs::metadata(folder) {
        Err(error) => return Some(format!("{shown}: {error}")),
        Ok(meta) if gguf && meta.is_file() => return None,
        Ok(meta) if !meta.is_dir() => {
            return Some(format!("{shown} is neither a directory nor a .gguf file"));
        }
        Ok(_) => {}
    }
    let config = folder.join("config.json");
    match std::fs::metadata(&config) {
        Err(error) => Some(format!("{}: {error}", config.display())),
        Ok(meta) if !meta.is_file() => Some(format!("{} is no file", config.display())),
        Ok(_) => None,
    }
}
