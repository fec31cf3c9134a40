//! Ranks as processes of this program: started with their five variables, heard to their end, ended with their starter.

use anyhow::{Context, Result, bail};
use std::collections::BTreeSet;
use std::io::Read;
use std::net::Ipv4Addr;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, sync_channel};
use std::time::{Duration, Instant};
use twinfer_comm::{Group, Identity, JoinPlan, Options, Placement, Topology, join, start_up_test};
use twinfer_it::free_port;
use twinfer_protocol::{Epoch, Fingerprint};

/// Of every group.
pub(crate) const EPOCH: Epoch = Epoch(1);
/// For the start of a group, and for a rank in a collective.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

/// Rank processes, which end when this goes.
pub(crate) struct Ranks {
    children: Vec<Child>,
    /// What each printed, by rank, when it closed its output.
    outputs: Receiver<(usize, std::io::Result<String>)>,
}

impl Ranks {
    /// Starts all ranks of `topology` with `arguments` and, in front of them, the id of this process.
    pub(crate) fn start(topology: &Topology, chore: &str, arguments: &[String]) -> Result<Self> {
        let port = free_port();
        let (sender, outputs) = sync_channel(topology.world() as usize);
        let mut ranks = Self {
            children: Vec::new(),
            outputs,
        };
        for rank in 0..topology.world() {
            let placement = Placement::planned(topology, rank, "127.0.0.1", port);
            let mut child = Command::new(std::env::current_exe()?)
                .args([chore, &std::process::id().to_string()])
                .args(arguments)
                .envs(placement.variables())
                .stdin(Stdio::null())
                .stdout(Stdio::piped())
                .spawn()?;
            let stdout = child.stdout.take();
            ranks.children.push(child);
            let mut stdout = stdout.context("a rank without output")?;
            let sender = sender.clone();
            std::thread::spawn(move || {
                let mut text = String::new();
                let read = stdout.read_to_string(&mut text).map(|_| text);
                // Nobody listens any more when another rank has failed.
                let _ = sender.send((rank as usize, read));
            });
        }
        Ok(ranks)
    }

    /// Ids of the processes, by rank.
    pub(crate) fn ids(&self) -> Vec<u32> {
        self.children.iter().map(Child::id).collect()
    }

    /// What each rank printed, if all end well within `limit`.
    pub(crate) fn finish(mut self, limit: Duration) -> Result<Vec<String>> {
        let until = Instant::now() + limit;
        let mut texts: Vec<Option<String>> = vec![None; self.children.len()];
        let mut failed = BTreeSet::new();
        let is_open = |texts: &[Option<String>]| texts.iter().any(Option::is_none);
        while is_open(&texts) {
            let left = until.saturating_duration_since(Instant::now());
            match self.outputs.recv_timeout(left) {
                Ok((rank, text)) => {
                    texts[rank] = Some(text?);
                    if !self.children[rank].wait()?.success() {
                        failed.insert(rank);
                    }
                }
                Err(RecvTimeoutError::Timeout) => {
                    let open = texts.iter().enumerate().filter(|(_, text)| text.is_none());
                    let open: Vec<usize> = open.map(|(rank, _)| rank).collect();
                    bail!("ranks {open:?} did not end within {} s", limit.as_secs());
                }
                Err(RecvTimeoutError::Disconnected) => bail!("a thread that listens is gone"),
            }
        }
        if !failed.is_empty() {
            bail!("ranks {failed:?} failed; what they say is above");
        }
        Ok(texts.into_iter().flatten().collect())
    }
}

impl Drop for Ranks {
    fn drop(&mut self) {
        for child in &mut self.children {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// In a rank's process: ends it with the process `parent`.
pub(crate) fn end_with(parent: u32) -> Result<()> {
    Ok(twinfer_sys::set_parent_death_signal(parent)?)
}

/// In a rank's process: its place.
pub(crate) fn placement() -> Result<Placement> {
    let placement = Placement::from_environment(|name| std::env::var(name).ok())?;
    placement.context("RANK is not set")
}

/// In a rank's process: its end of the group, whose start-up test has passed.
pub(crate) fn meet(topology: &Topology, share_memory: bool) -> Result<Group> {
    let placement = placement()?;
    let plan = JoinPlan {
        identity: Identity {
            instance: "xtask".to_owned(),
            epoch: EPOCH,
            version: env!("CARGO_PKG_VERSION").to_owned(),
            fingerprint: Fingerprint::default(),
        },
        topology: topology.clone(),
        rank: placement.rank,
        master_addr: placement.master_addr,
        master_port: placement.master_port,
        listen: Ipv4Addr::LOCALHOST.into(),
        port: 0,
        advertise: None,
        key: None,
        share_memory,
        limit: PATIENCE,
        options: Options::default(),
    };
    let mut group = join(&plan)?.group;
    start_up_test(&mut group, EPOCH)?;
    Ok(group)
}
