//! The front's side of ranks that are processes of their own.

use super::messages::{FromRank, KeyText, News, Order, RankStats, RankUp, Start, ToRank};
use super::nodes::{COMING, Ear, Nodes};
use super::receipt::Receipts;
use super::wake::GroupWake;
use crate::engine::{Command, Desk, EngineHandle, Places, Shared, panic_text};
use crate::kv::RankLedger;
use crate::metrics::EngineMetrics;
use crate::room::{ScoreRoom, answer_bytes};
use crate::{LoadProgress, ServeError};
use std::collections::VecDeque;
use std::ffi::OsString;
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::process::{Child, ExitStatus, Stdio};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};
use twinfer_comm::stream::{LinkError, Reader, Writer, ends};
use twinfer_comm::{Placement, Topology};
use twinfer_config::{CoreSet, ServeConfig};
use twinfer_protocol::{ApiError, Epoch, ErrorKind, Fingerprint};
use twinfer_sys::PidFd;

/// A rank that says nothing for so long stands still.
const SILENT: Duration = Duration::from_millis(1500);
/// The same while it starts, when it may wait for disks.
const SILENT_START: Duration = Duration::from_secs(10);
/// Ranks get this long to end by themselves.
const STOP: Duration = Duration::from_secs(2);
/// When one rank reports another's end, that one's own end is looked for so long.
const CULPRIT: Duration = Duration::from_millis(200);
/// Messages of starting ranks on their way; more wait.
const NEWS: usize = 64;

/// How ranks are started: a program that calls [`crate::run_rank`].
#[derive(Clone, Debug)]
pub struct RankProgram {
    /// The program.
    pub program: PathBuf,
    /// Its arguments.
    pub arguments: Vec<OsString>,
    /// Variables that it gets beside this process's own.
    pub environment: Vec<(String, String)>,
    /// Variables that it does not get, such as keys.
    pub without: Vec<&'static str>,
}

/// What ranks are started with.
pub(crate) struct RankStart<'a> {
    pub(crate) config: &'a ServeConfig,
    pub(crate) program: &'a RankProgram,
    /// Name of the instance.
    pub(crate) instance: &'a str,
    pub(crate) epoch: Epoch,
    /// Key of other instances.
    pub(crate) peer_key: Option<&'a [u8]>,
}

/// Ranks that are ready. They end with the thread that started them, and when this is dropped.
pub(crate) struct Fleet {
    seats: Vec<Seat>,
    readers: Vec<Reader>,
    /// Other nodes that have ranks.
    nodes: Nodes,
    /// Of all ranks, which are equal.
    pub(crate) fingerprint: Fingerprint,
    /// Longest sequence that every rank takes, in tokens.
    pub(crate) max_len: u32,
    /// Where the first rank's KV is read, if KV is handed over.
    pub(crate) kv_addr: Option<String>,
    stats: Vec<RankStats>,
    receipts: Receipts,
    /// The rank that was lost.
    culprit: Option<u32>,
}

/// A rank: its process, if that is on this node, and the way to it, once there is one.
pub(super) struct Seat {
    pub(super) child: Option<Child>,
    pub(super) writer: Option<Writer>,
}

/// From the start of a rank.
pub(super) enum Starting {
    /// One of another node has come.
    Here(Box<(Reader, Writer)>),
    Loading(LoadProgress),
    Up(Box<RankUp>, Reader),
    Ended(ServeError),
    Lost(String),
}

/// Starts the ranks of `start` and returns when all are ready. To be called in the thread that will [`Fleet::run`] them.
///
/// # Errors
/// [`ServeError`], naming the rank; no rank runs then.
pub(crate) fn start(
    start: &RankStart<'_>,
    progress: &dyn Fn(LoadProgress),
) -> Result<Fleet, ServeError> {
    let ranks = start.config.dp;
    let (sender, inbox) = mpsc::sync_channel(NEWS);
    // Ends the processes on every way out.
    let mut fleet = Fleet {
        seats: Vec::new(),
        readers: Vec::new(),
        nodes: Nodes::default(),
        fingerprint: Fingerprint::default(),
        max_len: u32::MAX,
        kv_addr: None,
        stats: Vec::new(),
        receipts: Receipts {
            folder: start.config.receipts.clone(),
            instance: start.instance.to_owned(),
            epoch: start.epoch,
        },
        culprit: None,
    };
    begin(start, &mut fleet, &sender).inspect_err(|error| fleet.nodes.refuse(error))?;
    let gathered = fleet.gather(ranks, &inbox, &sender, progress);
    gathered.inspect_err(|error| fleet.nodes.refuse(error))?;
    Ok(fleet)
}

type Inbox = mpsc::Receiver<(u32, Starting)>;
/// Where threads tell what starting ranks say.
pub(super) type Starts = mpsc::SyncSender<(u32, Starting)>;

/// Where ranks meet: taken before anybody is told of it.
fn rendezvous(config: &ServeConfig) -> Result<(String, TcpListener), ServeError> {
    let address = match &config.data_parallel_address {
        Some(address) => address.clone(),
        None => Ipv4Addr::LOCALHOST.to_string(),
    };
    let inherited = std::env::var("MASTER_PORT").ok();
    let given = inherited.and_then(|port| port.trim().parse().ok());
    let listener = TcpListener::bind((address.as_str(), given.unwrap_or(0)));
    let listener = listener.map_err(|error| ServeError::Bind {
        what: "rendezvous of the ranks (MASTER_ADDR, MASTER_PORT)",
        reason: format!("{address}:{}: {error}", given.unwrap_or(0)),
    })?;
    Ok((address, listener))
}

/// Waits for the other nodes, starts the processes of this one, and has all heard.
fn begin(start: &RankStart<'_>, fleet: &mut Fleet, sender: &Starts) -> Result<(), ServeError> {
    let config = start.config;
    let (ranks, here) = (config.dp, config.ranks_here());
    let wrong = |error: &dyn std::fmt::Display| ServeError::Config(error.to_string());
    let system = |what| move |source| ServeError::System { what, source };
    let (master_addr, listener) = rendezvous(config)?;
    let address = listener.local_addr();
    let address = address.map_err(system("find a port for the ranks"))?;
    let check = |counts: &[u32]| {
        let topology = Topology::new(counts).map_err(|e| wrong(&e))?;
        Placement::planned(&topology, 0, &master_addr, address.port())
            .check_environment(&topology, |name| std::env::var(name).ok())
            .map_err(|e| wrong(&e))
    };
    let mut counts = vec![here];
    if here < ranks {
        // Before anybody is waited for; how the others are spread is not known yet.
        counts.push(ranks - here);
    }
    check(&counts)?;
    let key = match here < ranks {
        true => {
            let at = SocketAddr::new(
                address.ip(),
                config.data_parallel_rpc_port.unwrap_or_default(),
            );
            fleet.nodes = Nodes::gather(start, at)?;
            counts = fleet.nodes.counts(here);
            check(&counts)?;
            start.peer_key.map(<[u8]>::to_vec)
        }
        false => {
            let mut key = vec![0; 32];
            getrandom::fill(&mut key).map_err(|e| ServeError::System {
                what: "draw a key for the ranks",
                source: std::io::Error::other(e.to_string()),
            })?;
            Some(key)
        }
    };
    let mut first = Some(listener);
    for rank in 0..here {
        let told = Start {
            config: share(config, rank, here)
                .and_then(|own| serde_json::to_string(&own).map_err(std::io::Error::other))
                .map_err(system("start a rank"))?,
            instance: start.instance.to_owned(),
            epoch: start.epoch,
            key: key.clone(),
            peer_key: start.peer_key.map(|key| KeyText(key.to_vec())),
            rank,
            counts: counts.clone(),
            master_addr: master_addr.clone(),
            master_port: address.port(),
            listen: address.ip(),
            front: None,
        };
        let (seat, reader) =
            begin_one(start.program, told, first.take()).map_err(system("start a rank"))?;
        fleet.seats.push(seat);
        listen_start(rank, reader, sender.clone()).map_err(system("start a thread"))?;
    }
    let others = here..ranks;
    fleet.seats.extend(others.map(|_| Seat {
        child: None,
        writer: None,
    }));
    fleet
        .nodes
        .welcome(start, &counts, address.port(), sender)
        .map_err(system("start a thread"))
}

fn listen_start(rank: u32, reader: Reader, sender: Starts) -> std::io::Result<()> {
    std::thread::Builder::new()
        .name(format!("rank-{rank}-start"))
        .spawn(move || await_start(rank, reader, &sender))
        .map(drop)
}

/// Starts the process of a rank and tells it `start`; its rendezvous is `listener`, if it is rank 0.
pub(super) fn begin_one(
    program: &RankProgram,
    start: Start,
    listener: Option<TcpListener>,
) -> std::io::Result<(Seat, Reader)> {
    let topology = Topology::new(&start.counts).map_err(std::io::Error::other)?;
    let place = Placement::planned(&topology, start.rank, &start.master_addr, start.master_port);
    let (ours, theirs) = UnixStream::pair()?;
    let (reader, mut writer) = ends(ours)?;
    let RankProgram {
        program,
        arguments,
        environment,
        without,
    } = program;
    let mut command = std::process::Command::new(program);
    for name in without {
        command.env_remove(name);
    }
    let child = command
        .args(arguments)
        .envs(environment.iter().map(|(name, value)| (name, value)))
        .envs(place.variables())
        .stdin(Stdio::from(OwnedFd::from(theirs)))
        .stdout(listener.map_or_else(Stdio::null, |listener| OwnedFd::from(listener).into()))
        // A terminal's Ctrl-C is for the front, which drains.
        .process_group(0)
        .spawn()?;
    // When it is gone already its reader says so.
    let _ = writer.send(&ToRank::Start(Box::new(start)));
    let seat = Seat {
        child: Some(child),
        writer: Some(writer),
    };
    Ok((seat, reader))
}

/// The config of one rank: its share of the threads and cores, and its port for KV. With fewer cores than ranks none has one of its own.
pub(super) fn share(
    config: &ServeConfig,
    local_rank: u32,
    here: u32,
) -> std::io::Result<ServeConfig> {
    let mut own = config.clone();
    let (rank, ranks) = (local_rank as usize, here as usize);
    let cores = config.cpus.as_deref().map(CoreSet::parse);
    let cores = cores.and_then(Result::ok).map(|set| set.0);
    let all = match (config.threads, &cores) {
        (Some(threads), _) => threads as usize,
        (None, Some(cores)) => cores.len(),
        (None, None) => twinfer_sys::available_cpus()?.len(),
    };
    let mut threads = (all / ranks).max(1);
    own.cpus = None;
    if let Some(cores) = cores.filter(|cores| cores.len() >= ranks) {
        let cores = &cores[cores.len() * rank / ranks..cores.len() * (rank + 1) / ranks];
        threads = match config.threads {
            Some(_) => threads.min(cores.len()),
            None => cores.len(),
        };
        own.cpus = Some(CoreSet::text(cores));
    }
    own.threads = u32::try_from(threads).ok();
    if own.kv_port > 0 {
        // Checked with the flags.
        let port = usize::from(own.kv_port) + rank;
        own.kv_port = u16::try_from(port).map_err(std::io::Error::other)?;
    }
    Ok(own)
}

fn await_start(rank: u32, mut reader: Reader, sender: &Starts) {
    loop {
        let message = match reader.next(Some(SILENT_START)) {
            Ok(FromRank::Beat | FromRank::News(_)) => continue,
            Ok(FromRank::Loading { done, total }) => {
                Starting::Loading(LoadProgress { done, total })
            }
            Ok(FromRank::Up(card)) => {
                let _ = sender.send((rank, Starting::Up(card, reader)));
                return;
            }
            Ok(FromRank::Refused(refusal)) => Starting::Ended(refusal.into_error(rank)),
            Ok(FromRank::Failed { error, .. }) => Starting::Lost(error.message),
            Err(error) => Starting::Lost(error.to_string()),
        };
        let over = !matches!(message, Starting::Loading(_));
        if sender.send((rank, message)).is_err() || over {
            return;
        }
    }
}

/// Passes on what a rank says, until it says nothing more.
fn hear((rank, ranks): (u32, u32), mut reader: Reader, shared: &Shared, ear: &Ear) {
    let mut lost = rank;
    let why = loop {
        match reader.next(Some(SILENT)) {
            Ok(FromRank::News(news)) => shared.push(Command::Heard { rank, news }),
            Ok(FromRank::Failed { error, at_fault }) => {
                lost = at_fault.filter(|other| *other < ranks).unwrap_or(rank);
                break error.message;
            }
            Ok(FromRank::Beat | FromRank::Loading { .. }) => {}
            Ok(FromRank::Up(_) | FromRank::Refused(_)) => break LinkError::Message.to_string(),
            Err(error) => {
                if matches!(error, LinkError::Silent(_)) {
                    ear.rank_is_silent();
                }
                break error.to_string();
            }
        }
    };
    shared.push(Command::Lost { rank: lost, why });
}

impl Fleet {
    /// Waits until all ranks are ready.
    fn gather(
        &mut self,
        ranks: u32,
        inbox: &Inbox,
        sender: &Starts,
        progress: &dyn Fn(LoadProgress),
    ) -> Result<(), ServeError> {
        let mut loaded = vec![LoadProgress::default(); ranks as usize];
        let mut up: Vec<Option<(Box<RankUp>, Reader)>> = (0..ranks).map(|_| None).collect();
        while up.iter().any(Option::is_none) {
            // Every rank that is not up sends within its limit, or its reader says that it does not.
            let Ok((rank, message)) = inbox.recv_timeout(2 * SILENT_START + COMING) else {
                let late = up.iter().zip(0_u32..).filter(|(up, _)| up.is_none());
                let late: Vec<String> = late.map(|(_, rank)| rank.to_string()).collect();
                let message = format!("nothing is heard of ranks {}", late.join(", "));
                return Err(ServeError::Engine(internal(message)));
            };
            let place = rank as usize;
            match message {
                Starting::Here(ends) => {
                    let (reader, writer) = *ends;
                    let seat = self.seats.get_mut(place);
                    if let Some(seat) = seat.filter(|seat| seat.writer.is_none()) {
                        seat.writer = Some(writer);
                        listen_start(rank, reader, sender.clone()).map_err(|source| {
                            let what = "start a thread";
                            ServeError::System { what, source }
                        })?;
                    }
                }
                Starting::Loading(now) => {
                    if let Some(slot) = loaded.get_mut(place) {
                        *slot = now;
                    }
                    progress(LoadProgress {
                        done: loaded.iter().map(|one| one.done).sum(),
                        total: loaded.iter().map(|one| one.total).sum(),
                    });
                }
                Starting::Up(card, reader) => {
                    if let Some(slot) = up.get_mut(place) {
                        *slot = Some((card, reader));
                    }
                }
                Starting::Ended(error) => return Err(error),
                Starting::Lost(why) => {
                    return Err(ServeError::Engine(self.lost(rank, &why)));
                }
            }
        }
        for (rank, (card, reader)) in up.into_iter().flatten().enumerate() {
            if rank == 0 {
                self.fingerprint = card.fingerprint;
                self.kv_addr = card.kv_addr;
            } else if self.fingerprint != card.fingerprint {
                let message = format!("ranks 0 and {rank} have loaded different models");
                return Err(ServeError::Model(message));
            }
            self.max_len = self.max_len.min(card.max_len);
            self.stats.push(card.stats);
            self.readers.push(reader);
        }
        Ok(())
    }

    /// Serves in the calling thread until the handle's `stop` or a failure; `running` gets the handle first.
    pub(crate) fn run(
        mut self,
        places: Places,
        metrics: &EngineMetrics,
        ledger: &Arc<RankLedger>,
        running: impl FnOnce(EngineHandle),
    ) {
        // What warm-up counted is no client's.
        let total = RankStats::total(&self.stats);
        metrics.publish(&total, &total);
        let stats = std::mem::take(&mut self.stats);
        let scores = ScoreRoom::new(answer_bytes());
        let shared = Arc::new(Shared::new(places, stats, Arc::default(), scores));
        running(EngineHandle::of(&shared));
        let mut desks: Vec<Desk> = (0..rank_count(&self))
            .map(|rank| {
                let desk = Desk::new(rank, Arc::clone(&shared), None, metrics.clone());
                desk.with_ledger(Arc::clone(ledger))
            })
            .collect();
        let outcome = catch_unwind(AssertUnwindSafe(|| self.serve(&shared, &mut desks)));
        let outcome = outcome.unwrap_or_else(|panic| {
            let why = panic_text(panic.as_ref());
            Err(internal(format!("the front of the ranks panicked: {why}")))
        });
        if let Err(error) = outcome {
            self.nodes.fail(&error.message);
            let message = error.message.clone();
            // Clients first: a disk may be slow.
            shared.fail(error);
            if let Some(rank) = self.culprit {
                let stats = EngineHandle::of(&shared).stats();
                let place = (rank, self.nodes.number(rank));
                let own = stats.get(rank as usize);
                self.receipts.write(place, own, &self.fingerprint, &message);
            }
        }
        // The sinks close with the desks; readers see the failure that was set before.
        drop((desks, self));
        shared.stopped();
    }

    fn serve(&mut self, shared: &Arc<Shared>, desks: &mut [Desk]) -> Result<(), ApiError> {
        self.nodes.serve(shared);
        let ranks = rank_count(self);
        for (rank, reader) in (0..ranks).zip(std::mem::take(&mut self.readers)) {
            let shared = Arc::clone(shared);
            let ear = Arc::clone(self.nodes.ear());
            std::thread::Builder::new()
                .name(format!("rank-{rank}"))
                .spawn(move || hear((rank, ranks), reader, &shared, &ear))
                .map_err(|error| internal(format!("cannot start a thread: {error}")))?;
        }
        let mut wake = GroupWake::default();
        let mut inbox = VecDeque::new();
        loop {
            if !shared.take(true, &mut inbox) {
                return Ok(());
            }
            for command in inbox.drain(..) {
                let rank = match &command {
                    Command::Submit { rank, .. }
                    | Command::Abort { rank, .. }
                    | Command::ReleaseHeld { rank, .. }
                    | Command::Lease { rank, .. }
                    | Command::EndLease { rank, .. } => *rank,
                    // Any rank can dial any peer.
                    Command::Disclaim { .. } => 0,
                    // Only said where the engine is in this process.
                    Command::KvLoaded(..) => continue,
                    Command::Lost { rank, why } => return Err(self.lost(*rank, why)),
                    Command::Heard { rank, .. } => *rank,
                    Command::Stop => {
                        self.stop();
                        return Ok(());
                    }
                };
                if let Command::Heard { news, .. } = command {
                    let number = take_in(desks, rank, news, &mut wake);
                    self.wake(number)?;
                    continue;
                }
                let desk = desks.get_mut(rank as usize);
                let Some(order) = desk.and_then(|desk| desk.order(command)) else {
                    continue;
                };
                let number = match order {
                    Order::Submit { .. } => wake.work(),
                    _ => None,
                };
                self.send(rank, &ToRank::Order(order))?;
                self.wake(number)?;
            }
        }
    }

    fn wake(&mut self, number: Option<u64>) -> Result<(), ApiError> {
        let Some(number) = number else { return Ok(()) };
        for rank in 0..rank_count(self) {
            self.send(rank, &ToRank::Order(Order::Wake(number)))?;
        }
        Ok(())
    }

    fn send(&mut self, rank: u32, message: &ToRank) -> Result<(), ApiError> {
        let seat = self.seats.get_mut(rank as usize);
        let writer = seat.and_then(|seat| seat.writer.as_mut());
        let sent = writer.map_or(Ok(()), |writer| writer.send(message));
        sent.map_err(|error| self.lost(rank, &error.to_string()))
    }

    /// What a rank's end means to clients. A rank that was told of another's end is not the one at fault.
    fn lost(&mut self, rank: u32, why: &str) -> ApiError {
        let here = self.seats.iter().filter(|seat| seat.child.is_some());
        let each = CULPRIT / u32::try_from(here.count()).unwrap_or(u32::MAX).max(1);
        let (own, others): (Vec<_>, Vec<_>) = (0_u32..)
            .zip(&mut self.seats)
            .partition(|(seat, _)| *seat == rank);
        for (rank, seat) in own.into_iter().chain(others) {
            let ended = seat.ended(each);
            if let (Some(process), Some(signal)) =
                (seat.process(), ended.and_then(|status| status.signal()))
            {
                self.culprit = Some(rank);
                return internal(format!(
                    "rank {rank} (process {process}) was ended by signal {signal}"
                ));
            }
        }
        // Of other nodes their own processes tell.
        self.culprit = Some(rank);
        match self.nodes.ended(CULPRIT) {
            Some((rank, message)) => {
                self.culprit = Some(rank);
                internal(message)
            }
            None => internal(format!("rank {rank}{}: {why}", self.nodes.place(rank))),
        }
    }

    /// Lets the ranks end by themselves.
    fn stop(&mut self) {
        // First: what ends from then on has ended well.
        self.nodes.stop();
        for writer in self.seats.iter_mut().flat_map(|seat| &mut seat.writer) {
            let _ = writer.send(&ToRank::Order(Order::Stop));
        }
        end_all(&mut self.seats, STOP);
        self.nodes.wait_gone(STOP);
    }
}

impl Drop for Fleet {
    fn drop(&mut self) {
        end_all(&mut self.seats, Duration::ZERO);
    }
}

impl Seat {
    /// Number of its process, if that is on this node.
    pub(super) fn process(&self) -> Option<u32> {
        self.child.as_ref().map(Child::id)
    }

    /// How it ended; none if it still runs after `limit`, or is on another node.
    pub(super) fn ended(&mut self, limit: Duration) -> Option<ExitStatus> {
        let child = self.child.as_mut()?;
        let handle = PidFd::open(child.id()).ok()?;
        match handle.wait_ended(limit) {
            Ok(true) => child.try_wait().ok().flatten(),
            _ => None,
        }
    }

    /// Ends it if it still runs, and collects it.
    fn end(&mut self) {
        if let Some(child) = &mut self.child {
            // Both fail only for a process that was collected.
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// Waits for all to end, at most `limit`, then ends them.
pub(super) fn end_all(seats: &mut Vec<Seat>, limit: Duration) {
    let until = Instant::now() + limit;
    for seat in seats.iter_mut() {
        if seat
            .ended(until.saturating_duration_since(Instant::now()))
            .is_none()
        {
            seat.end();
        }
    }
    // Their connections close now.
    seats.clear();
}

fn take_in(desks: &mut [Desk], rank: u32, news: Vec<News>, wake: &mut GroupWake) -> Option<u64> {
    let now = Instant::now();
    let mut number = None;
    for news in news {
        match news {
            News::Slept(slept) => wake.slept(slept),
            News::Asks(asked) => number = wake.asked(asked).or(number),
            news => {
                if let Some(desk) = desks.get_mut(rank as usize) {
                    desk.hear(news, now);
                }
            }
        }
    }
    number
}

fn rank_count(fleet: &Fleet) -> u32 {
    u32::try_from(fleet.seats.len()).unwrap_or(u32::MAX)
}

fn internal(message: String) -> ApiError {
    ApiError::new(ErrorKind::Internal, message)
}
