//! A node that has ranks of an instance and no front: starts them when the front says so, tells it how they end, and
//! ends all of them when one does or the front is gone.

use super::front::{RankProgram, Seat, begin_one, end_all, share};
use super::messages::{Came, FromNode, KeyText, NodeCard, Start, ToNode};
use super::nodes::{BEAT, NODES, call_front, refused, shared_flags};
use crate::ServeError;
use crate::settings::Settings;
use std::net::{SocketAddr, ToSocketAddrs, UdpSocket};
use std::os::unix::process::ExitStatusExt;
use std::process::ExitStatus;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};
use twinfer_comm::stream::{LinkError, Reader, Writer};
use twinfer_comm::{PeerKey, Placement, Topology};
use twinfer_config::ServeConfig;
use twinfer_http::Secret;
use twinfer_protocol::{ApiError, ErrorKind};
use twinfer_sys::PidFd;

/// A message of the front, when it waits for the other nodes, comes within this time.
const WELCOME: Duration = NODES.saturating_add(Duration::from_secs(10));
/// Ranks that the front has told to end get this long.
const STOP: Duration = Duration::from_secs(3);
/// A front that says nothing for so long is gone. Longer than it waits for a node: when the network is cut, that one
/// names the rank.
const SILENT: Duration = Duration::from_secs(3);
/// How often a request to end is looked for.
const TICK: Duration = Duration::from_millis(100);
/// Messages on their way to the thread that watches.
const INBOX: usize = 64;
/// A rank's end is looked for in steps of this length.
const WATCH: Duration = Duration::from_secs(3600);

/// Counts requests to end: the first lets the front end the ranks within the drain's time, the second does it at once.
#[derive(Clone, Debug, Default)]
pub struct HeadlessStop(Arc<AtomicU32>);

impl HeadlessStop {
    /// Asks for the end.
    pub fn ask(&self) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }

    fn asked(&self) -> u32 {
        self.0.load(Ordering::Relaxed)
    }
}

enum Heard {
    Front(Result<ToNode, LinkError>),
    Ended(u32),
}

/// The ranks of this node, which end with the thread that started them, and when this is dropped.
struct Here(Vec<Seat>);

impl Drop for Here {
    fn drop(&mut self) {
        end_all(&mut self.0, Duration::ZERO);
    }
}

/// Runs the ranks of this node until the front ends them.
///
/// # Errors
/// [`ServeError`], naming what ended them early; none runs then.
pub fn serve_headless(
    config: &ServeConfig,
    program: &RankProgram,
    stop: &HeadlessStop,
) -> Result<(), ServeError> {
    let settings = Settings::of(config)?;
    let key = Secret::load(
        "peer-key-file",
        config.peer_key_file.as_deref(),
        config.environment_keys.peer.as_ref(),
    )?;
    let key = key.map(|key| key.expose().to_vec());
    let front = front_address(config)?;
    let loopback = front.ip().to_canonical().is_loopback();
    if key.is_none() && !loopback {
        return Err(ServeError::Config(format!(
            "data-parallel-address is {}, which is not on loopback, and there is no peer key; set one (peer-key-file)",
            front.ip()
        )));
    }
    let start = config.data_parallel_start_rank.unwrap_or_default();
    let card = NodeCard {
        start,
        ranks: config.ranks_here(),
        version: env!("CARGO_PKG_VERSION").to_owned(),
        flags: shared_flags(config),
    };
    let system = |what| move |source| ServeError::System { what, source };
    tracing::info!(%front, first = start, ranks = card.ranks, "looking for the front");
    let proven = key.as_deref().and_then(PeerKey::new);
    let (mut reader, writer) = call_front(front, proven.as_ref(), &Came::Node(card), NODES)?;
    let gone = |error: LinkError| failed(format!("the front at {front}: {error}"));
    let (instance, epoch, counts, master_port) = match reader.next(Some(WELCOME)).map_err(gone)? {
        ToNode::Welcome {
            instance,
            epoch,
            counts,
            master_port,
        } => (instance, epoch, counts, master_port),
        ToNode::Refused { config, message } => return Err(refused(config, message)),
        ToNode::Failed(message) => return Err(failed(message)),
        ToNode::Stop => return Ok(()),
        ToNode::Beat => return Err(gone(LinkError::Message)),
    };
    let listen = match config.rank_host {
        Some(address) => address,
        None => own_address(front).map_err(system("find this node's address"))?,
    };
    let wrong = |error: &dyn std::fmt::Display| ServeError::Config(error.to_string());
    let topology = Topology::new(&counts).map_err(|e| wrong(&e))?;
    let master_addr = config.data_parallel_address.clone().unwrap_or_default();
    Placement::planned(&topology, start, &master_addr, master_port)
        .check_environment(&topology, |name| std::env::var(name).ok())
        .map_err(|e| wrong(&e))?;
    let mut here = Here(Vec::new());
    let here_ranks = config.ranks_here();
    let (sender, inbox) = mpsc::sync_channel(INBOX);
    for local in 0..here_ranks {
        let own = share(config, local, here_ranks)
            .and_then(|own| serde_json::to_string(&own).map_err(std::io::Error::other))
            .map_err(system("start a rank"))?;
        let told = Start {
            config: own,
            instance: instance.clone(),
            epoch,
            key: key.clone(),
            peer_key: key.clone().map(KeyText),
            rank: start + local,
            counts: counts.clone(),
            master_addr: master_addr.clone(),
            master_port,
            listen,
            front: Some(front),
        };
        let (seat, _) = begin_one(program, told, None).map_err(system("start a rank"))?;
        let process = seat.process().unwrap_or_default();
        here.0.push(seat);
        let ended = sender.clone();
        let handle = PidFd::open(process).map_err(system("watch a rank"))?;
        let rank = start + local;
        std::thread::Builder::new()
            .name(format!("rank-{rank}"))
            .spawn(move || {
                while matches!(handle.wait_ended(WATCH), Ok(false)) {}
                let _ = ended.send(Heard::Ended(rank));
            })
            .map_err(system("start a thread"))?;
    }
    std::thread::Builder::new()
        .name("front".into())
        .spawn(move || listen_front(reader, &sender))
        .map_err(system("start a thread"))?;
    tracing::info!(instance, %epoch, first = start, ranks = here_ranks, "ranks started");
    let ended = watch(
        &inbox,
        writer,
        &mut here,
        stop,
        (start, front),
        settings.settle + settings.deadline,
    );
    if ended.is_err() {
        end_all(&mut here.0, Duration::ZERO);
    }
    ended
}

/// Lasts until the front ends the instance, or something fails.
fn watch(
    inbox: &mpsc::Receiver<Heard>,
    mut writer: Writer,
    here: &mut Here,
    stop: &HeadlessStop,
    (start, front): (u32, SocketAddr),
    drain: Duration,
) -> Result<(), ServeError> {
    let mut told = Instant::now();
    let mut asked: Option<Instant> = None;
    loop {
        if told.elapsed() >= BEAT {
            told = Instant::now();
            // Its reader notices when it is gone.
            let _ = writer.send(&FromNode::Beat);
        }
        let asked_times = stop.asked();
        if asked_times > 0 {
            let since = *asked.get_or_insert_with(Instant::now);
            if asked_times > 1 || since.elapsed() > drain {
                let why = "its process was told to end before the instance was";
                let _ = writer.send(&FromNode::Failed(why.to_owned()));
                return Err(failed("told to end before the instance was".to_owned()));
            }
        }
        match inbox.recv_timeout(TICK) {
            Err(mpsc::RecvTimeoutError::Timeout) => {}
            Err(mpsc::RecvTimeoutError::Disconnected) => {
                return Err(failed("its threads are gone".to_owned()));
            }
            Ok(Heard::Front(Ok(ToNode::Beat | ToNode::Welcome { .. }))) => {}
            Ok(Heard::Front(Ok(ToNode::Stop))) => {
                // The ranks are told by the front themselves.
                end_all(&mut here.0, STOP);
                return Ok(());
            }
            Ok(Heard::Front(Ok(ToNode::Failed(message)))) => return Err(failed(message)),
            Ok(Heard::Front(Ok(ToNode::Refused { config, message }))) => {
                return Err(refused(config, message));
            }
            Ok(Heard::Front(Err(error))) => {
                return Err(failed(format!("the front at {front}: {error}")));
            }
            Ok(Heard::Ended(rank)) => {
                // A rank that says why it ends says so to the front first; what that one makes of it is told here.
                let how = report(&mut writer, here, start, rank);
                let told = verdict(inbox, (rank, &how), |other| {
                    report(&mut writer, here, start, other);
                });
                if told.is_ok() {
                    end_all(&mut here.0, STOP);
                }
                return told;
            }
        }
    }
}

/// Tells the front that a rank has ended, and returns how.
fn report(writer: &mut Writer, here: &mut Here, start: u32, rank: u32) -> String {
    let seat = here.0.get_mut(rank.saturating_sub(start) as usize);
    let process = seat.as_ref().and_then(|seat| seat.process());
    let how = seat.and_then(|seat| seat.ended(TICK));
    let signalled = how.is_some_and(|status| status.signal().is_some());
    let how = how.map_or_else(|| "has ended".to_owned(), describe);
    let told = FromNode::Ended {
        rank,
        process: process.unwrap_or_default(),
        signalled,
        how: how.clone(),
    };
    // Its reader notices when it is gone.
    let _ = writer.send(&told);
    how
}

/// What the front says of the end of a rank, if it says so soon; else how it ended. The ends of others are passed on: the
/// first one that is seen need not be the one at fault.
fn verdict(
    inbox: &mpsc::Receiver<Heard>,
    (rank, how): (u32, &str),
    mut pass_on: impl FnMut(u32),
) -> Result<(), ServeError> {
    let until = Instant::now() + Duration::from_secs(1);
    while let Ok(heard) = inbox.recv_timeout(until.saturating_duration_since(Instant::now())) {
        match heard {
            Heard::Front(Ok(ToNode::Stop)) => return Ok(()),
            Heard::Front(Ok(ToNode::Failed(message))) => return Err(failed(message)),
            Heard::Front(Ok(ToNode::Refused { config, message })) => {
                return Err(refused(config, message));
            }
            Heard::Front(Err(_)) => break,
            Heard::Ended(other) => pass_on(other),
            Heard::Front(Ok(_)) => {}
        }
    }
    Err(failed(format!("rank {rank} {how}")))
}

fn describe(status: ExitStatus) -> String {
    match (status.code(), status.signal()) {
        (_, Some(signal)) => format!("was ended by signal {signal}"),
        (Some(code), None) => format!("ended with exit code {code}"),
        (None, None) => "has ended".to_owned(),
    }
}

fn listen_front(mut reader: Reader, sender: &mpsc::SyncSender<Heard>) {
    loop {
        let heard = reader.next(Some(SILENT));
        let over = heard.is_err();
        if sender.send(Heard::Front(heard)).is_err() || over {
            return;
        }
    }
}

fn front_address(config: &ServeConfig) -> Result<SocketAddr, ServeError> {
    let (host, port) = (
        config.data_parallel_address.as_deref().unwrap_or_default(),
        config.data_parallel_rpc_port.unwrap_or_default(),
    );
    let wrong = |why: &dyn std::fmt::Display| {
        ServeError::Config(format!("data-parallel-address is {host:?}: {why}"))
    };
    let mut addresses = (host, port).to_socket_addrs().map_err(|e| wrong(&e))?;
    addresses.next().ok_or_else(|| wrong(&"no address"))
}

/// The address from which `front` is reached.
fn own_address(front: SocketAddr) -> std::io::Result<std::net::IpAddr> {
    // Nothing is sent: the system picks the way, and with it the address.
    let any = match front {
        SocketAddr::V4(_) => "0.0.0.0:0",
        SocketAddr::V6(_) => "[::]:0",
    };
    let socket = UdpSocket::bind(any)?;
    socket.connect(front)?;
    Ok(socket.local_addr()?.ip())
}

fn failed(message: String) -> ServeError {
    ServeError::Engine(ApiError::new(ErrorKind::Internal, message))
}
