//! Groups within one process: every rank a thread. For tests, models and instances whose ranks share a process.

use crate::board::{Board, Layout, Shared};
use crate::channel::{Channel, ChannelError, RANKS, hello};
use crate::group::{Group, Options, Wiring};
use crate::handshake::{Side, Transcript};
use crate::link::Link;
use crate::mesh::{Mesh, Stop};
use crate::topology::Topology;
use std::io;
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::sync::Arc;
use twinfer_protocol::Epoch;

/// A group whose ranks are threads of this process and meet in memory: one end for each rank, in their order.
///
/// # Errors
/// `InvalidInput` for a number of ranks that is no group; what the system reports otherwise.
pub fn in_process(ranks: u32, epoch: Epoch, options: Options) -> io::Result<Vec<Group>> {
    let topology = Topology::one_node(ranks)
        .map_err(|error| io::Error::new(io::ErrorKind::InvalidInput, error))?;
    loopback(&topology, true, epoch, options)
}

/// As [`in_process`], for ranks that are on several nodes by `topology`: those of a node meet in memory if `shares`,
/// all others are connected over TCP on loopback, as they would be between nodes.
///
/// # Errors
/// What the system reports.
pub fn loopback(
    topology: &Topology,
    shares: bool,
    epoch: Epoch,
    options: Options,
) -> io::Result<Vec<Group>> {
    let world = topology.world();
    let mut links: Vec<Vec<Link>> = (0..world).map(|_| Vec::new()).collect();
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
    for upper in 0..world {
        for lower in 0..upper {
            if shares && topology.node_of(lower) == topology.node_of(upper) {
                continue;
            }
            let (left, right) = connect(&listener)?;
            links[upper as usize].push(Link::new(lower, left)?);
            links[lower as usize].push(Link::new(upper, right)?);
        }
    }
    let topology = Arc::new(topology.clone());
    let mut boards = boards(&topology, shares, options)?.into_iter();
    (0..world)
        .zip(links)
        .map(|(rank, links)| {
            let stop = Arc::new(Stop::new()?);
            let board = boards.next().flatten();
            let shared = board.as_ref().map(|board| Arc::clone(board.shared()));
            let mesh = match links.is_empty() {
                true => None,
                false => Some(Mesh::new(rank, world, links, Arc::clone(&stop), shared)?),
            };
            Ok(Group::new(Wiring {
                rank,
                topology: Arc::clone(&topology),
                epoch,
                options,
                shares,
                board,
                watch: None,
                mesh,
                stop,
            }))
        })
        .collect()
}

/// A board for each rank that shares one.
fn boards(topology: &Topology, shares: bool, options: Options) -> io::Result<Vec<Option<Board>>> {
    let mut boards = Vec::new();
    for node in 0..topology.nodes() {
        let ranks = topology.ranks_of(node);
        let members = ranks.len() as u32;
        if !shares || members == 1 {
            boards.extend(ranks.map(|_| None));
            continue;
        }
        let layout = Layout::new(members, topology.nodes(), options.slot_bytes);
        let first = Shared::create(layout, 0, ranks.start)?;
        for member in 1..members {
            let file = first.file().try_clone_to_owned()?;
            let other = Shared::open(file, layout, member, ranks.start)?;
            boards.push(Some(Board::new(Arc::new(other), options.spin)));
        }
        let place = boards.len() + 1 - members as usize;
        boards.insert(place, Some(Board::new(Arc::new(first), options.spin)));
    }
    Ok(boards)
}

/// A connection that needs no handshake, since both ends are here.
fn connect(listener: &TcpListener) -> io::Result<(Channel<TcpStream>, Channel<TcpStream>)> {
    let hello = |side| {
        let hello = hello(&RANKS, side, false).map(|hello| hello.encode());
        hello.map_err(|error| match error {
            ChannelError::Io(error) => error,
            other => io::Error::other(other),
        })
    };
    let transcript = Transcript {
        protocol: &RANKS,
        dialer: hello(Side::Dialer)?,
        listener: hello(Side::Listener)?,
    };
    let address = listener.local_addr()?;
    let dialing = TcpStream::connect(address)?;
    let ours = dialing.local_addr()?;
    // Somebody else may have dialled the port in between.
    let listening = loop {
        let (stream, peer) = listener.accept()?;
        if peer == ours {
            break stream;
        }
    };
    Ok((
        Channel::past(dialing, &transcript, None, Side::Dialer),
        Channel::past(listening, &transcript, None, Side::Listener),
    ))
}
