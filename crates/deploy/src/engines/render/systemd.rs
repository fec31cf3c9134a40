//! Units: one service per process, one target per node.

use crate::engines::render::{ROUTER, RenderedFile, View};
use std::fmt::Write as _;

pub(super) fn files(view: &View<'_>, files: &mut Vec<RenderedFile>) {
    let deployment = &view.plan.deployment;
    for node in &view.nodes {
        let name = &node.node.name;
        let target = format!("twinfer-{deployment}.target");
        let mut wants = Vec::new();
        let mut units: Vec<(&str, bool)> = node
            .processes
            .iter()
            .map(|process| (process.name.as_str(), !process.secrets.is_empty()))
            .collect();
        if node.router {
            units.push((ROUTER, false));
        }
        for (process, secrets) in units {
            let unit = format!("twinfer-{deployment}-{process}.service");
            let folder = format!("{}/{name}", view.folder);
            let mut text = String::new();
            let _ = write!(
                text,
                "[Unit]\nDescription={process} of {deployment}\nWants=network-online.target\nAfter=network-online.target\nPartOf={target}\n\n\
                 [Service]\nType=exec\nWorkingDirectory={folder}\nExecStart={folder}/{process}.sh\n"
            );
            if secrets {
                // Mode 0600, written by the operator; absent: the script says which variable it lacks.
                let _ = writeln!(text, "EnvironmentFile=-{folder}/secrets.env");
            }
            // A node whose devices somebody else needs is given up, not fought for.
            text.push_str(
                "Restart=no\nKillMode=control-group\nTimeoutStopSec=90\nLimitMEMLOCK=infinity\nLimitNOFILE=1048576\n\n",
            );
            let _ = writeln!(text, "[Install]\nWantedBy={target}");
            wants.push(unit.clone());
            files.push(RenderedFile {
                path: format!("{name}/systemd/{unit}"),
                executable: false,
                text,
            });
        }
        files.push(RenderedFile {
            path: format!("{name}/systemd/{target}"),
            executable: false,
            text: format!(
                "[Unit]\nDescription=Deployment {deployment} on node {name}\nWants={}\n\n[Install]\nWantedBy=multi-user.target\n",
                wants.join(" ")
            ),
        });
    }
}
