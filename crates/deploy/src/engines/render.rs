//! Files that start a plan: scripts, containers, units, manifests, tables and benchmark settings. Pure:
//! equal plans give equal files.

mod bench;
mod compose;
mod kubernetes;
mod ranktable;
mod shell;
mod systemd;

use crate::engines::file::{Container, EngineNode, Kind, Warmup};
use crate::engines::load::EngineDeployment;
use crate::engines::plan::{EnginePlan, Process};
use std::io;
use std::path::Path;

/// A file of a rendered deployment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RenderedFile {
    /// Path below the output folder.
    pub path: String,
    /// Can it be run?
    pub executable: bool,
    /// What it says.
    pub text: String,
}

/// What rendering must know beside the plan.
#[derive(Clone, Debug)]
pub struct RenderOptions {
    /// Folder on the nodes that the files are copied to.
    pub folder: String,
}

/// One node with what it runs.
pub(crate) struct NodeView<'p> {
    pub(crate) node: &'p EngineNode,
    pub(crate) processes: Vec<&'p Process>,
    /// The router runs here.
    pub(crate) router: bool,
}

/// What every kind of file is made from.
pub(crate) struct View<'p> {
    pub(crate) deployment: &'p EngineDeployment,
    pub(crate) plan: &'p EnginePlan,
    pub(crate) folder: &'p str,
    pub(crate) nodes: Vec<NodeView<'p>>,
}

impl View<'_> {
    pub(crate) fn container(&self) -> Option<&Container> {
        self.deployment.file.container.as_ref()
    }

    pub(crate) fn warmup(&self) -> Option<&Warmup> {
        self.deployment.file.warmup.as_ref()
    }

    /// Is a node an Ascend one?
    pub(crate) fn ascend(node: &EngineNode) -> bool {
        matches!(node.kind, Some(Kind::A2 | Kind::A3))
    }

    /// Names of all variables that hold secrets on a node.
    pub(crate) fn secrets(view: &NodeView<'_>) -> Vec<String> {
        let mut names: Vec<String> = view
            .processes
            .iter()
            .flat_map(|process| process.secrets.iter().cloned())
            .collect();
        names.sort();
        names.dedup();
        names
    }

    /// Devices of a node that its processes use.
    pub(crate) fn devices(view: &NodeView<'_>) -> Vec<u32> {
        let mut devices: Vec<u32> = view
            .processes
            .iter()
            .flat_map(|process| process.devices.iter().copied())
            .collect();
        devices.sort_unstable();
        devices.dedup();
        devices
    }
}

/// Name of the router's files.
pub(crate) const ROUTER: &str = "router";

/// All files of a plan, by path.
pub fn render(
    deployment: &EngineDeployment,
    plan: &EnginePlan,
    options: &RenderOptions,
) -> Vec<RenderedFile> {
    let nodes = plan
        .nodes
        .iter()
        .map(|one| &one.name)
        .chain(plan.router.iter().map(|router| &router.node))
        .collect::<std::collections::BTreeSet<_>>();
    let nodes = deployment
        .file
        .nodes
        .iter()
        .filter(|node| nodes.contains(&node.name))
        .map(|node| NodeView {
            node,
            processes: plan
                .processes
                .iter()
                .filter(|process| process.node == node.name)
                .collect(),
            router: plan
                .router
                .as_ref()
                .is_some_and(|router| router.node == node.name),
        })
        .collect();
    let view = View {
        deployment,
        plan,
        folder: options.folder.trim_end_matches('/'),
        nodes,
    };
    let mut files = Vec::new();
    shell::files(&view, &mut files);
    compose::files(&view, &mut files);
    systemd::files(&view, &mut files);
    kubernetes::files(&view, &mut files);
    ranktable::files(&view, &mut files);
    bench::files(&view, &mut files);
    let json = serde_json::to_string_pretty(plan).unwrap_or_default();
    files.push(RenderedFile {
        path: "plan.json".to_owned(),
        executable: false,
        text: json + "\n",
    });
    files.sort_by(|a, b| a.path.cmp(&b.path));
    files
}

/// Writes files below `folder`, which must be absent or empty unless `force`.
///
/// # Errors
/// The folder holds other files, or cannot be written.
pub fn write_files(files: &[RenderedFile], folder: &Path, force: bool) -> io::Result<()> {
    use std::os::unix::fs::PermissionsExt;
    if !force
        && let Ok(mut entries) = std::fs::read_dir(folder)
        && entries.next().is_some()
    {
        return Err(io::Error::new(
            io::ErrorKind::DirectoryNotEmpty,
            "it holds files; name another folder, or say --force to write over them",
        ));
    }
    for file in files {
        let path = folder.join(&file.path);
        if let Some(parent) = path.parent() {
            std::fs::create_dir_all(parent)?;
        }
        std::fs::write(&path, &file.text)?;
        let mode = if file.executable { 0o755 } else { 0o644 };
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode))?;
    }
    Ok(())
}

/// A tree as YAML.
pub(crate) fn yaml(value: &serde_json::Value) -> String {
    serde_saphyr::to_string(value).unwrap_or_default()
}
