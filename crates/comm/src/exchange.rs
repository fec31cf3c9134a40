//! How the ranks of a node come to share memory: the first of them makes it and passes it on, with a handle to each
//! rank's process, over a socket that has no file.

use crate::board::{Layout, Shared};
use crate::channel::{Channel, ChannelError, RANKS, nonce};
use crate::handshake::PeerKey;
use crate::start::StartError;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use serde::{Deserialize, Serialize};
use std::io;
use std::ops::Range;
use std::os::fd::AsFd;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::sync::Arc;
use std::time::{Duration, Instant};
use twinfer_protocol::Epoch;
use twinfer_sys::{PidFd, peer_credentials, receive_descriptors, send_descriptors};

/// Time for one member to say who it is.
const HELLO_TIME: Duration = Duration::from_secs(2);
/// The byte that descriptors travel with.
const MARK: u8 = b'D';

/// What a member says first; a handle to its process follows.
#[derive(Debug, Serialize, Deserialize)]
struct Member {
    rank: u32,
    epoch: Epoch,
}

/// The memory, and handles to the processes of the other members by their places.
pub(crate) type Exchanged = (Arc<Shared>, Vec<(usize, PidFd)>);

/// A socket without a file, and its name.
pub(crate) fn listen() -> Result<(UnixListener, String), StartError> {
    let io = |source| StartError::Io {
        doing: "opening a socket for shared memory",
        source,
    };
    let nonce = nonce().map_err(|error| io(io::Error::other(error)))?;
    let digits: String = nonce[..16]
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect();
    let name = format!("twinfer-comm-{digits}");
    let address = SocketAddr::from_abstract_name(&name).map_err(io)?;
    Ok((UnixListener::bind_addr(&address).map_err(io)?, name))
}

/// The first rank's side: makes the memory and waits for the others.
pub(crate) fn lead(
    listener: &UnixListener,
    key: Option<&PeerKey>,
    epoch: Epoch,
    ranks: &Range<u32>,
    layout: Layout,
    until: Instant,
) -> Result<Exchanged, StartError> {
    let io = |source| StartError::Io {
        doing: "sharing memory with the ranks of this node",
        source,
    };
    let shared = Shared::create(layout, 0, ranks.start).map_err(io)?;
    let own = PidFd::own().map_err(io)?;
    let mut members: Vec<Option<(UnixStream, PidFd)>> =
        ranks.clone().skip(1).map(|_| None).collect();
    while let Some(missing) = members.iter().position(Option::is_none) {
        let rank = ranks.start + 1 + missing as u32;
        if !readable(listener, until).map_err(io)? {
            let why = ChannelError::Timeout;
            return Err(StartError::Neighbour { rank, why });
        }
        let (stream, _) = listener.accept().map_err(io)?;
        match meet(stream, key, epoch, ranks, until) {
            Ok((rank, stream, process)) => {
                let place = (rank - ranks.start - 1) as usize;
                if let Some(place) = members.get_mut(place)
                    && place.is_none()
                {
                    *place = Some((stream, process));
                }
            }
            Err(why) => tracing::warn!(%why, "a process of this node was turned away"),
        }
    }
    let members: Vec<(UnixStream, PidFd)> = members.into_iter().flatten().collect();
    let mut descriptors = vec![shared.file(), own.as_fd()];
    descriptors.extend(members.iter().map(|(_, process)| process.as_fd()));
    for (rank, (stream, _)) in ranks.clone().skip(1).zip(&members) {
        send_descriptors(stream, &[MARK], &descriptors).map_err(|error| {
            let why = error.into();
            StartError::Neighbour { rank, why }
        })?;
    }
    let processes = members.into_iter().map(|(_, process)| process);
    Ok((Arc::new(shared), (1..).zip(processes).collect()))
}

fn meet(
    stream: UnixStream,
    key: Option<&PeerKey>,
    epoch: Epoch,
    ranks: &Range<u32>,
    until: Instant,
) -> Result<(u32, UnixStream, PidFd), ChannelError> {
    // Names of such sockets are no secret: who is of another user is not listened to.
    if peer_credentials(&stream)?.uid != rustix::process::getuid().as_raw() {
        return Err(ChannelError::Message);
    }
    let soon = until.min(Instant::now() + HELLO_TIME);
    let mut channel = Channel::listen(&RANKS, stream, key, soon)?;
    let member: Member = channel.receive(soon)?;
    if member.epoch != epoch || !ranks.contains(&member.rank) || member.rank == ranks.start {
        return Err(ChannelError::Message);
    }
    let descriptors = take(&channel.stream, 1, soon)?;
    let process = descriptors.into_iter().next().map(PidFd::received);
    let process = process.ok_or(ChannelError::Message)??;
    Ok((member.rank, channel.stream, process))
}

/// Any other rank's side.
pub(crate) fn follow(
    name: &str,
    key: Option<&PeerKey>,
    epoch: Epoch,
    rank: u32,
    ranks: &Range<u32>,
    layout: Layout,
    until: Instant,
) -> Result<Exchanged, StartError> {
    attach(name, key, epoch, rank, ranks, layout, until).map_err(|why| StartError::Neighbour {
        rank: ranks.start,
        why,
    })
}

fn attach(
    name: &str,
    key: Option<&PeerKey>,
    epoch: Epoch,
    rank: u32,
    ranks: &Range<u32>,
    layout: Layout,
    until: Instant,
) -> Result<Exchanged, ChannelError> {
    let stream = UnixStream::connect_addr(&SocketAddr::from_abstract_name(name)?)?;
    let mut channel = Channel::dial(&RANKS, stream, key, until)?;
    channel.send(&Member { rank, epoch }, until)?;
    let own = PidFd::own()?;
    send_descriptors(&channel.stream, &[MARK], &[own.as_fd()])?;
    let mut descriptors = take(&channel.stream, 1 + ranks.len(), until)?.into_iter();
    let file = descriptors.next().ok_or(ChannelError::Message)?;
    let member = rank - ranks.start;
    let shared = Shared::open(file, layout, member, ranks.start)?;
    let mut others = Vec::new();
    for (place, descriptor) in descriptors.enumerate() {
        if place != member as usize {
            others.push((place, PidFd::received(descriptor)?));
        }
    }
    Ok((Arc::new(shared), others))
}

/// Receives exactly `count` descriptors.
fn take(
    stream: &UnixStream,
    count: usize,
    until: Instant,
) -> Result<Vec<std::os::fd::OwnedFd>, ChannelError> {
    let left = until.saturating_duration_since(Instant::now());
    stream.set_read_timeout(Some(left.max(Duration::from_millis(1))))?;
    let mut mark = [0];
    let (length, descriptors) = receive_descriptors(stream, &mut mark)?;
    match (length, mark[0]) {
        (0, _) => Err(ChannelError::Closed),
        (_, MARK) if descriptors.len() == count => Ok(descriptors),
        _ => Err(ChannelError::Message),
    }
}

/// Waits for somebody to connect.
fn readable(listener: &UnixListener, until: Instant) -> io::Result<bool> {
    loop {
        let left = until.saturating_duration_since(Instant::now());
        let left = Timespec {
            tv_sec: left.as_secs().min(1 << 30) as i64,
            tv_nsec: left.subsec_nanos().into(),
        };
        match poll(&mut [PollFd::new(listener, PollFlags::IN)], Some(&left)) {
            Ok(ready) => return Ok(ready > 0),
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
}
