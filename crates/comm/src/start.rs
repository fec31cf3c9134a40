//! From a plan to a group: rendezvous, shared memory, connections.

use crate::board::{Board, Layout};
use crate::channel::{Channel, ChannelError, RANKS};
use crate::exchange;
use crate::group::{Group, Options, Wiring};
use crate::handshake::PeerKey;
use crate::link::Link;
use crate::mesh::{Mesh, Stop};
use crate::rendezvous::acceptor::{Acceptor, Event};
use crate::rendezvous::{Identity, Join, RankInfo, Refusal, host};
use crate::topology::Topology;
use crate::watch::Watch;
use rustix::event::{Timespec, poll};
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::io;
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::sync::Arc;
use std::time::{Duration, Instant};
use twinfer_protocol::Epoch;

/// What a rank must know to find its group.
#[derive(Clone, Debug)]
pub struct JoinPlan {
    /// What all ranks have in common.
    pub identity: Identity,
    /// Where all ranks are.
    pub topology: Topology,
    /// This rank.
    pub rank: u32,
    /// `MASTER_ADDR`: name or address of the first rank's node on the network that ranks use.
    pub master_addr: String,
    /// `MASTER_PORT`: where the first rank listens.
    pub master_port: u16,
    /// This node's address on the network that ranks use; other nodes connect to it.
    pub listen: IpAddr,
    /// Port for these connections; 0 picks a free one.
    pub port: u16,
    /// What other ranks are told to dial in place of that, where something stands in between.
    pub advertise: Option<SocketAddr>,
    /// What peers must prove to hold. Without one all addresses must be on loopback.
    pub key: Option<PeerKey>,
    /// Ranks of a node share memory; else they are connected over TCP as ranks of other nodes are.
    pub share_memory: bool,
    /// How long the start may take.
    pub limit: Duration,
    /// How the group waits and what memory it takes.
    pub options: Options,
}

/// A group that has come about.
#[derive(Debug)]
pub struct Joined {
    /// This rank's end.
    pub group: Group,
    /// Where all ranks are.
    pub ranks: Vec<RankInfo>,
}

/// Why a group did not come about.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// The rank is none of the group.
    #[error("rank is {rank}; allowed are 0 to {}", .world.saturating_sub(1))]
    NoRank {
        /// The rank.
        rank: u32,
        /// Number of ranks.
        world: u32,
    },
    /// A name means no address.
    #[error("MASTER_ADDR is {name:?}, which means no address: {reason}")]
    Resolve {
        /// The name.
        name: String,
        /// What the system says.
        reason: String,
    },
    /// An address that others can reach, and no key.
    #[error(
        "address {address} is not on loopback, and there is no peer key; set one or use loopback"
    )]
    NeedsKey {
        /// The address.
        address: IpAddr,
    },
    /// An address for others to dial that nobody can dial.
    #[error(
        "address {address} is a wildcard, which other nodes can't dial; name the address of the network that ranks use"
    )]
    Wildcard {
        /// The address.
        address: IpAddr,
    },
    /// A port in use, or an address that is not this node's.
    #[error("cannot listen on {address} {purpose}: {source}")]
    Listen {
        /// The address.
        address: SocketAddr,
        /// What for.
        purpose: &'static str,
        /// What the system says.
        source: io::Error,
    },
    /// The first rank was not reached, or is none.
    #[error("rank 0 at {address} (MASTER_ADDR, MASTER_PORT): {why}")]
    Rendezvous {
        /// Where it should be.
        address: SocketAddr,
        /// What happened.
        why: ChannelError,
    },
    /// There is no group, or none with this rank.
    #[error("{0}")]
    Refused(Box<Refusal>),
    /// The first rank's table does not fit the plan.
    #[error("rank 0 sent a table of ranks that does not fit the plan")]
    Table,
    /// A rank of this node did not come to share memory.
    #[error("rank {rank} of this node does not share memory: {why}")]
    Neighbour {
        /// The rank.
        rank: u32,
        /// What happened.
        why: ChannelError,
    },
    /// A rank did not connect.
    #[error("no connection with rank {rank} ({info}): {why}")]
    Connect {
        /// The rank.
        rank: u32,
        /// Where it is.
        info: Box<RankInfo>,
        /// What happened.
        why: ChannelError,
    },
    /// The system refused something.
    #[error("{doing}: {source}")]
    Io {
        /// At what.
        doing: &'static str,
        /// What it says.
        source: io::Error,
    },
}

/// What a rank says to another one it dials.
#[derive(Debug, Serialize, Deserialize)]
struct Call {
    from: u32,
    to: u32,
    epoch: Epoch,
}

/// Finds the other ranks and connects to them. Returns when all are there; [`crate::start_up_test()`] comes next.
///
/// # Errors
/// [`StartError`]; within the plan's limit and a few seconds.
pub fn join(plan: &JoinPlan) -> Result<Joined, StartError> {
    join_at(plan, None)
}

/// As [`join`], for a first rank that was given its listener: whoever bound it has kept the port from all others since.
///
/// # Errors
/// As [`join`].
pub fn join_at(plan: &JoinPlan, rendezvous: Option<TcpListener>) -> Result<Joined, StartError> {
    let until = Instant::now() + plan.limit;
    let JoinPlan { topology, rank, .. } = plan;
    let (rank, world) = (*rank, topology.world());
    if rank >= world {
        return Err(StartError::NoRank { rank, world });
    }
    let node = topology.ranks_of(topology.node_of(rank));
    let domain = match plan.share_memory {
        true => node.clone(),
        false => rank..rank + 1,
    };
    let mut info = RankInfo::of(rank, topology);
    let listener = match domain.len() < world as usize {
        true => Some(listen_for_ranks(plan, &mut info)?),
        false => None,
    };
    let exchange = match domain.len() > 1 && rank == domain.start {
        true => {
            let (listener, name) = exchange::listen()?;
            info.exchange = Some(name);
            Some(listener)
        }
        false => None,
    };
    let ranks = meet(plan, info, rendezvous)?;
    let layout = Layout::new(
        domain.len() as u32,
        topology.nodes(),
        plan.options.slot_bytes,
    );
    let (key, epoch) = (plan.key.as_ref(), plan.identity.epoch);
    let exchanged = match (domain.len() > 1, &exchange) {
        (false, _) => None,
        (true, Some(listener)) => {
            let shared = exchange::lead(listener, key, epoch, &domain, layout, until)?;
            Some(shared)
        }
        (true, None) => {
            let first = ranks.get(domain.start as usize);
            let name = first.and_then(|info| info.exchange.as_deref());
            let name = name.ok_or(StartError::Table)?;
            let shared = exchange::follow(name, key, epoch, rank, &domain, layout, until)?;
            Some(shared)
        }
    };
    let links = match listener {
        Some(listener) => connect(plan, listener, &ranks, &domain, until)?,
        None => Vec::new(),
    };
    let io = |doing| move |source| StartError::Io { doing, source };
    let stop = Arc::new(Stop::new().map_err(io("making an event"))?);
    let mut watch = None;
    let board = match exchanged {
        Some((shared, processes)) => {
            let board = Board::new(Arc::clone(&shared), plan.options.spin);
            watch = Some(Watch::start(shared, processes).map_err(io("watching processes"))?);
            Some(board)
        }
        None => None,
    };
    let shared = board.as_ref().map(|board| Arc::clone(board.shared()));
    let mesh = match links.is_empty() {
        true => None,
        false => {
            let mesh = Mesh::new(rank, world, links, Arc::clone(&stop), shared);
            Some(mesh.map_err(io("watching connections"))?)
        }
    };
    let group = Group::new(Wiring {
        rank,
        topology: Arc::new(topology.clone()),
        epoch,
        options: plan.options,
        shares: plan.share_memory,
        board,
        watch,
        mesh,
        stop,
    });
    Ok(Joined { group, ranks })
}

fn listen_for_ranks(plan: &JoinPlan, info: &mut RankInfo) -> Result<TcpListener, StartError> {
    check_address(plan, plan.listen)?;
    let address = SocketAddr::new(plan.listen, plan.port);
    let failed = |source| StartError::Listen {
        address,
        purpose: "for the other ranks",
        source,
    };
    let listener = TcpListener::bind(address).map_err(failed)?;
    let bound = listener.local_addr().map_err(failed)?;
    info.address = Some(plan.advertise.unwrap_or(bound));
    Ok(listener)
}

fn check_address(plan: &JoinPlan, address: IpAddr) -> Result<(), StartError> {
    if address.is_unspecified() {
        return Err(StartError::Wildcard { address });
    }
    if plan.key.is_none() && !address.to_canonical().is_loopback() {
        return Err(StartError::NeedsKey { address });
    }
    Ok(())
}

/// The rendezvous: where all ranks are.
fn meet(
    plan: &JoinPlan,
    info: RankInfo,
    given: Option<TcpListener>,
) -> Result<Vec<RankInfo>, StartError> {
    let unresolved = |reason: String| StartError::Resolve {
        name: plan.master_addr.clone(),
        reason,
    };
    let addresses: Vec<SocketAddr> = (plan.master_addr.as_str(), plan.master_port)
        .to_socket_addrs()
        .map_err(|error| unresolved(error.to_string()))?
        .collect();
    let first = *addresses
        .first()
        .ok_or_else(|| unresolved("no address".to_owned()))?;
    for address in &addresses {
        check_address(plan, address.ip())?;
    }
    let own = Join {
        identity: plan.identity.clone(),
        counts: plan.topology.counts(),
        shares: plan.share_memory,
        slot_bytes: plan.options.slot_bytes as u64,
        info,
    };
    let key = plan.key.as_ref();
    if plan.rank > 0 {
        return host::join(&addresses, key, &own, plan.limit);
    }
    if plan.topology.world() == 1 {
        return Ok(vec![own.info]);
    }
    let bound = match given {
        Some(listener) => Ok(listener),
        None => TcpListener::bind(first),
    };
    let listener = bound.map_err(|source| StartError::Listen {
        address: first,
        purpose: "for the rendezvous (MASTER_ADDR, MASTER_PORT)",
        source,
    })?;
    host::host(listener, key, own, &plan.topology, plan.limit)
}

/// Connects to every rank outside `domain`: dials those before this one, then takes those behind it. Nobody waits in
/// a circle, since the first rank dials nobody.
fn connect(
    plan: &JoinPlan,
    listener: TcpListener,
    ranks: &[RankInfo],
    domain: &std::ops::Range<u32>,
    until: Instant,
) -> Result<Vec<Link>, StartError> {
    let key = plan.key.as_ref();
    let epoch = plan.identity.epoch;
    let failed = |info: &RankInfo, why: ChannelError| StartError::Connect {
        rank: info.rank,
        info: Box::new(info.clone()),
        why,
    };
    let outside = |info: &&RankInfo| !domain.contains(&info.rank);
    let mut links = Vec::new();
    for info in ranks.iter().filter(outside) {
        if info.rank > plan.rank {
            continue;
        }
        let address = info.address.ok_or(StartError::Table)?;
        check_address(plan, address.ip())?;
        let call = Call {
            from: plan.rank,
            to: info.rank,
            epoch,
        };
        let channel = dial(address, key, &call, until).map_err(|why| failed(info, why))?;
        let link = Link::new(info.rank, channel).map_err(|error| failed(info, error.into()))?;
        links.push(link);
    }
    let io = |source| StartError::Io {
        doing: "waiting for connections of ranks",
        source,
    };
    let behind = ranks.iter().filter(outside).map(|info| info.rank);
    let mut missing: BTreeSet<u32> = behind.filter(|&rank| rank > plan.rank).collect();
    let world = plan.topology.world();
    let mut acceptor = Acceptor::new(&RANKS, listener, plan.key.clone(), world).map_err(io)?;
    while let Some(&first) = missing.first() {
        match acceptor.next::<Call>(&[], until).map_err(io)? {
            Event::Arrived {
                mut channel,
                from,
                message,
            } => {
                let ours = message.to == plan.rank && message.epoch == epoch;
                if !ours || !missing.contains(&message.from) {
                    tracing::warn!(%from, rank = message.from, "a connection of no rank that is missing");
                    continue;
                }
                let answered = channel.send(&message.from, until);
                let info = &ranks[message.from as usize];
                answered.map_err(|why| failed(info, why))?;
                let link = Link::new(message.from, channel);
                links.push(link.map_err(|error| failed(info, error.into()))?);
                missing.remove(&message.from);
            }
            Event::Turned { from, why } => {
                tracing::warn!(%from, %why, "a connection to this rank was turned away");
            }
            Event::Gone(_) => {}
            Event::Time => return Err(failed(&ranks[first as usize], ChannelError::Timeout)),
        }
    }
    Ok(links)
}

fn dial(
    address: SocketAddr,
    key: Option<&PeerKey>,
    call: &Call,
    until: Instant,
) -> Result<Channel<TcpStream>, ChannelError> {
    let left = until.saturating_duration_since(Instant::now());
    if left.is_zero() {
        return Err(ChannelError::Timeout);
    }
    let stream = TcpStream::connect_timeout(&address, left)?;
    stream.set_nodelay(true)?;
    let mut channel = Channel::dial(&RANKS, stream, key, until)?;
    channel.send(call, until)?;
    match channel.receive::<u32>(until)? == call.from {
        true => Ok(channel),
        false => Err(ChannelError::Message),
    }
}

/// Lets time pass where there is no event to wait for.
pub(crate) fn pause(time: Duration) {
    let time = Timespec {
        tv_sec: time.as_secs().min(1 << 30) as i64,
        tv_nsec: time.subsec_nanos().into(),
    };
    let _ = poll(&mut [], Some(&time));
}
