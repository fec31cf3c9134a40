//! How ranks find each other: all dial the first rank, which checks that they belong together and tells each where all
//! are.

pub(crate) mod acceptor;
pub(crate) mod host;
pub(crate) mod table;

use crate::topology::Topology;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::net::SocketAddr;
use twinfer_protocol::{Epoch, Fingerprint};

/// Longest foreign text in a message, in bytes.
const TEXT_CAP: usize = 200;

/// What all ranks of a group have in common.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Identity {
    /// Name of the instance.
    pub instance: String,
    /// Its incarnation: told to all ranks by whoever starts them.
    pub epoch: Epoch,
    /// Version of the program.
    pub version: String,
    /// Of the model, as far as it is known before weights are loaded.
    pub fingerprint: Fingerprint,
}

/// Where a rank is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RankInfo {
    /// The rank.
    pub rank: u32,
    /// Its node, by the plan's order.
    pub node: u32,
    /// Its place on the node.
    pub local_rank: u32,
    /// Its process, by the number it has there.
    pub pid: u32,
    /// Where ranks that share no memory with it connect; none if there are none.
    pub address: Option<SocketAddr>,
    /// Name of the abstract socket where the first rank of a node gives out its shared memory.
    pub(crate) exchange: Option<String>,
}

/// What a rank says to the first one.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Join {
    pub(crate) identity: Identity,
    /// Ranks per node.
    pub(crate) counts: Vec<u32>,
    pub(crate) shares: bool,
    pub(crate) slot_bytes: u64,
    pub(crate) info: RankInfo,
}

/// What the first rank answers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Answer {
    /// All are there.
    Welcome { ranks: Vec<RankInfo> },
    /// There will be no group, or none with this rank.
    Refused(Refusal),
}

/// Why a rank is not taken into a group, or why there is none. Names both values where two differ.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
pub enum Refusal {
    /// Another instance, or another incarnation of it, meets there.
    #[error(
        "instance {host} (epoch {host_epoch}) meets there, and this rank belongs to instance {joiner} (epoch \
         {joiner_epoch}); two instances never share a rendezvous"
    )]
    Foreign {
        /// Instance that meets there.
        host: String,
        /// Its epoch.
        host_epoch: Epoch,
        /// Instance of the rank that came.
        joiner: String,
        /// Its epoch.
        joiner_epoch: Epoch,
    },
    /// The programs differ.
    #[error("rank 0 runs version {host}, rank {rank} runs version {joiner}")]
    Version {
        /// The rank that came.
        rank: u32,
        /// Of rank 0.
        host: String,
        /// Of the rank that came.
        joiner: String,
    },
    /// The numbers of ranks differ.
    #[error(
        "rank 0 expects {} ranks ({host:?} per node), rank {rank} expects {} ({joiner:?} per node)",
        sum(.host),
        sum(.joiner)
    )]
    World {
        /// The rank that came.
        rank: u32,
        /// Ranks per node that rank 0 knows.
        host: Vec<u32>,
        /// Ranks per node that the rank that came knows.
        joiner: Vec<u32>,
    },
    /// The models differ.
    #[error("rank {rank} has another model than rank 0: {difference}")]
    Fingerprint {
        /// The rank that came.
        rank: u32,
        /// Parts that differ, with both values.
        difference: String,
    },
    /// A setting that all must have alike differs.
    #[error("{setting} is {host} for rank 0 and {joiner} for rank {rank}")]
    Setting {
        /// The rank that came.
        rank: u32,
        /// Name of the setting.
        setting: String,
        /// Value of rank 0.
        host: String,
        /// Value of the rank that came.
        joiner: String,
    },
    /// There is no such rank.
    #[error("rank is {rank}; allowed are 0 to {}", .world.saturating_sub(1))]
    NoRank {
        /// The rank that came.
        rank: u32,
        /// Number of ranks.
        world: u32,
    },
    /// The rank has another place by the plan.
    #[error(
        "rank {rank} says it is local rank {local_rank} of node {node}; by the plan it is local rank {planned_local} of \
         node {planned_node}"
    )]
    Place {
        /// The rank that came.
        rank: u32,
        /// Node it says.
        node: u32,
        /// Local rank it says.
        local_rank: u32,
        /// Node by the plan.
        planned_node: u32,
        /// Local rank by the plan.
        planned_local: u32,
    },
    /// Two processes say they are one rank.
    #[error("two processes say they are rank {rank}: {first} and {second}")]
    Double {
        /// The rank.
        rank: u32,
        /// Who came first.
        first: String,
        /// Who came then.
        second: String,
    },
    /// Not all came in time.
    #[error(
        "no group: of {world} ranks these did not come within {seconds} s: {ranks:?}{}",
        turned_away(.notes)
    )]
    Missing {
        /// Number of ranks.
        world: u32,
        /// Ranks that did not come.
        ranks: Vec<u32>,
        /// How long they were waited for.
        seconds: u64,
        /// Who was turned away meanwhile.
        notes: Vec<String>,
    },
}

fn sum(counts: &[u32]) -> u64 {
    counts.iter().map(|&count| u64::from(count)).sum()
}

fn turned_away(notes: &[String]) -> String {
    match notes.is_empty() {
        true => String::new(),
        false => format!("; turned away: {}", notes.join("; ")),
    }
}

impl RankInfo {
    pub(crate) fn of(rank: u32, topology: &Topology) -> Self {
        Self {
            rank,
            node: topology.node_of(rank),
            local_rank: topology.local_rank(rank),
            pid: std::process::id(),
            address: None,
            exchange: None,
        }
    }
}

impl fmt::Display for RankInfo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "process {} of node {}", self.pid, self.node)?;
        match self.address {
            Some(address) => write!(f, " at {address}"),
            None => Ok(()),
        }
    }
}

/// Foreign text for messages: bounded, without control characters.
pub(crate) fn printable(text: &str) -> String {
    let mut out = String::new();
    for c in text.chars() {
        if out.len() + c.len_utf8() > TEXT_CAP {
            out.push('…');
            break;
        }
        out.push(if c.is_control() { '?' } else { c });
    }
    out
}
