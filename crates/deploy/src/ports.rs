//! Which ports an instance listens on: those of the file, else the lowest free ones.

use crate::diagnostic::Diagnostic;
use crate::file::OneOrList;
use crate::load::Deployment;
use crate::resolve::Draft;
use crate::source::{Step, steps};
use std::collections::BTreeMap;
use std::num::NonZeroU16;
use twinfer_protocol::Role;

/// First HTTP port that is picked.
const FIRST_PORT: u16 = 8100;
/// First KV port that is picked.
const FIRST_KV_PORT: u16 = 8500;

/// First port that is picked where ranks of other nodes come to.
const FIRST_RPC_PORT: u16 = 8700;

/// Ports taken on each node, with the line that took them.
type Taken = BTreeMap<(String, u16), (String, u32)>;

/// Sets the ports of all drafts.
pub(crate) fn allot(
    deployment: &Deployment,
    drafts: &mut [Draft<'_>],
    router_node: Option<&str>,
    found: &mut Vec<Diagnostic>,
) {
    let mut taken = Taken::new();
    if let Some(node) = router_node {
        let at = steps!["router", "port"];
        take(
            deployment,
            &mut taken,
            node,
            deployment.file.router.port.get(),
            "the router",
            at,
            found,
        );
    }
    // Numbers of the file first, so that a picked one never takes one of them.
    for draft in drafts.iter_mut().filter(|draft| !draft.is_headless()) {
        if let Some(ports) = &draft.spec.port {
            let at = steps!["instances", draft.group, "port"];
            draft.port =
                given(deployment, (ports, 1), draft, at, &mut taken, "HTTP", found).unwrap_or(0);
        }
        if let (Some(ports), Role::Prefill) = (&draft.spec.kv_port, draft.spec.role) {
            let at = steps!["instances", draft.group, "kv-port"];
            let ports = (ports, draft.rank_count());
            draft.kv_port = given(deployment, ports, draft, at, &mut taken, "KV", found);
        }
    }
    for draft in drafts.iter_mut() {
        if draft.spec.port.is_none() && !draft.is_headless() {
            draft.port = pick(deployment, draft, &mut taken, (FIRST_PORT, 1), found);
        }
        if draft.spec.kv_port.is_none() && draft.spec.role == Role::Prefill {
            let from = (FIRST_KV_PORT, draft.rank_count());
            draft.kv_port = Some(pick(deployment, draft, &mut taken, from, found));
        }
    }
    // The first node's, which all nodes of the instance are told.
    let mut rpc_port = 0;
    for draft in drafts.iter_mut() {
        if draft.ranks.is_some() && !draft.is_headless() {
            rpc_port = pick(deployment, draft, &mut taken, (FIRST_RPC_PORT, 1), found);
        }
        if let Some(ranks) = &mut draft.ranks {
            ranks.rpc_port = rpc_port;
        }
    }
}

/// Takes the ports of the file for a draft that needs `span` in a row; returns the first.
fn given(
    deployment: &Deployment,
    (ports, span): (&OneOrList<NonZeroU16>, u16),
    draft: &Draft<'_>,
    at: &[Step],
    taken: &mut Taken,
    what: &str,
    found: &mut Vec<Diagnostic>,
) -> Option<u16> {
    let port = match ports {
        // A list of another length has been reported.
        OneOrList::List(list) => list.get(draft.number)?.get(),
        OneOrList::One(first) => {
            let port = u16::try_from(draft.number)
                .ok()
                .and_then(|number| number.checked_mul(span))
                .and_then(|before| first.get().checked_add(before))
                .filter(|port| *port <= u16::MAX - (span - 1));
            let Some(port) = port else {
                let fit = (usize::from(u16::MAX - first.get()) + 1) / usize::from(span);
                if draft.number == fit {
                    let ports = u32::from(span).saturating_mul(draft.spec.count);
                    found.push(deployment.wrong(
                        at,
                        match span {
                            1 => format!(
                                "{} instances from port {first} on pass 65535",
                                draft.spec.count
                            ),
                            _ => format!(
                                "{} instances of {span} ranks from port {first} on pass 65535",
                                draft.spec.count
                            ),
                        },
                        Some(format!(
                            "highest first port: {}",
                            (1u32 << 16).saturating_sub(ports)
                        )),
                    ));
                }
                return None;
            };
            port
        }
    };
    for port in (0..span).filter_map(|further| port.checked_add(further)) {
        take(
            deployment,
            taken,
            &draft.node.name,
            port,
            &format!("instance {} ({what})", draft.name),
            at,
            found,
        );
    }
    Some(port)
}

fn take(
    deployment: &Deployment,
    taken: &mut Taken,
    node: &str,
    port: u16,
    who: &str,
    at: &[Step],
    found: &mut Vec<Diagnostic>,
) {
    let key = (node.to_owned(), port);
    if let Some((other, line)) = taken.get(&key) {
        let next = (port..=u16::MAX).find(|port| !taken.contains_key(&(node.to_owned(), *port)));
        found.push(deployment.wrong(
            at,
            format!("port {port} on node {node} is given to {who} and to {other} (line {line})"),
            next.map(|next| format!("next free number: {next}")),
        ));
        return;
    }
    taken.insert(key, (who.to_owned(), deployment.line(at)));
}

fn pick(
    deployment: &Deployment,
    draft: &Draft<'_>,
    taken: &mut Taken,
    (from, span): (u16, u16),
    found: &mut Vec<Diagnostic>,
) -> u16 {
    let node = &draft.node.name;
    let at = steps!["instances", draft.group, "name"];
    let is_free = |port: u16| !taken.contains_key(&(node.clone(), port));
    let port = (from..=u16::MAX - (span - 1))
        .find(|first| (0..span).all(|further| is_free(first + further)));
    let Some(port) = port else {
        found.push(deployment.wrong(
            at,
            format!("no port from {from} on is left for instance {}", draft.name),
            None,
        ));
        return 0;
    };
    for further in 0..span {
        taken.insert(
            (node.clone(), port + further),
            (format!("instance {}", draft.name), deployment.line(at)),
        );
    }
    port
}
