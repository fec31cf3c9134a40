//! The front's side of ranks that are processes of their own.

use super::link::{LinkError, Reader, Writer, ends};
use super::messages::{FromRank, KeyText, News, Order, RankStats, RankUp, Start, ToRank};
use super::wake::GroupWake;
use crate::engine::{Command, Desk, EngineHandle, Places, Shared, panic_text};
use crate::kv::RankLedger;
use crate::metrics::EngineMetrics;
use crate::room::{ScoreRoom, answer_bytes};
use crate::{LoadProgress, ServeError};
use std::collections::VecDeque;
use std::ffi::OsString;
use std::net::{Ipv4Addr, TcpListener};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::process::{Child, ExitStatus, Stdio};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};
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
    /// Of all ranks, which are equal.
    pub(crate) fingerprint: Fingerprint,
    /// Longest sequence that every rank takes, in tokens.
    pub(crate) max_len: u32,
    /// Where the first rank's KV is read, if KV is handed over.
    pub(crate) kv_addr: Option<String>,
    stats: Vec<RankStats>,
}

struct Seat {
    child: Child,
    writer: Writer,
}

/// From the start of a rank.
enum Starting {
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
    let (inbox, seats) = begin(start)?;
    // Ends the processes on every way out.
    let mut fleet = Fleet {
        seats,
        readers: Vec::new(),
        fingerprint: Fingerprint::default(),
        max_len: u32::MAX,
        kv_addr: None,
        stats: Vec::new(),
    };
    let mut loaded = vec![LoadProgress::default(); ranks as usize];
    let mut up: Vec<Option<(Box<RankUp>, Reader)>> = (0..ranks).map(|_| None).collect();
    while up.iter().any(Option::is_none) {
        // Every rank that is not up sends within its limit, or its reader says that it does not.
        let Ok((rank, message)) = inbox.recv_timeout(2 * SILENT_START) else {
            return Err(ServeError::Model("the ranks do not start".to_owned()));
        };
        let place = rank as usize;
        match message {
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
                return Err(ServeError::Engine(fleet.lost(rank, &why)));
            }
        }
    }
    for (rank, (card, reader)) in up.into_iter().flatten().enumerate() {
        if rank == 0 {
            fleet.fingerprint = card.fingerprint;
            fleet.kv_addr = card.kv_addr;
        } else if fleet.fingerprint != card.fingerprint {
            let message = format!("ranks 0 and {rank} have loaded different models");
            return Err(ServeError::Model(message));
        }
        fleet.max_len = fleet.max_len.min(card.max_len);
        fleet.stats.push(card.stats);
        fleet.readers.push(reader);
    }
    Ok(fleet)
}

type Inbox = mpsc::Receiver<(u32, Starting)>;

/// Starts the processes and reads what they say.
fn begin(start: &RankStart<'_>) -> Result<(Inbox, Vec<Seat>), ServeError> {
    let ranks = start.config.dp;
    let wrong = |error: &dyn std::fmt::Display| ServeError::Config(error.to_string());
    let system = |what| move |source| ServeError::System { what, source };
    let topology = Topology::one_node(ranks).map_err(|e| wrong(&e))?;
    let inherited = |name: &str| std::env::var(name).ok();
    let local = Ipv4Addr::LOCALHOST;
    let given = inherited("MASTER_PORT").and_then(|port| port.trim().parse().ok());
    let master_port = match given {
        Some(port) if port != 0 => port,
        _ => TcpListener::bind((local, 0))
            .and_then(|listener| listener.local_addr())
            .map_err(system("find a port for the ranks"))?
            .port(),
    };
    let place = |rank| Placement::planned(&topology, rank, &local.to_string(), master_port);
    place(0)
        .check_environment(&topology, inherited)
        .map_err(|e| wrong(&e))?;
    let mut key = [0; 32];
    getrandom::fill(&mut key).map_err(|e| ServeError::System {
        what: "draw a key for the ranks",
        source: std::io::Error::other(e.to_string()),
    })?;
    let (sender, inbox) = mpsc::sync_channel(NEWS);
    let mut seats: Vec<Seat> = Vec::new();
    for rank in 0..ranks {
        let begun = begin_one(start, &place(rank), key, &sender);
        match begun {
            Ok(seat) => seats.push(seat),
            Err(source) => {
                end_all(&mut seats, Duration::ZERO);
                let what = "start a rank";
                return Err(ServeError::System { what, source });
            }
        }
    }
    Ok((inbox, seats))
}

fn begin_one(
    start: &RankStart<'_>,
    place: &Placement,
    key: [u8; 32],
    sender: &mpsc::SyncSender<(u32, Starting)>,
) -> std::io::Result<Seat> {
    let config = share(start.config, place.rank)?;
    let (ours, theirs) = UnixStream::pair()?;
    let (reader, mut writer) = ends(ours)?;
    let RankProgram {
        program,
        arguments,
        environment,
        without,
    } = start.program;
    let mut command = std::process::Command::new(program);
    for name in without {
        command.env_remove(name);
    }
    let child = command
        .args(arguments)
        .envs(environment.iter().map(|(name, value)| (name, value)))
        .envs(place.variables())
        .stdin(Stdio::from(OwnedFd::from(theirs)))
        .stdout(Stdio::null())
        // A terminal's Ctrl-C is for the front, which drains.
        .process_group(0)
        .spawn()?;
    let mut tell = |config| {
        let message = ToRank::Start(Box::new(Start {
            config,
            instance: start.instance.to_owned(),
            epoch: start.epoch,
            key,
            peer_key: start.peer_key.map(|key| KeyText(key.to_vec())),
            rank: place.rank,
            ranks: place.world_size,
            master_port: place.master_port,
        }));
        // When it is gone already its reader says so.
        let _ = writer.send(&message);
    };
    tell(serde_json::to_string(&config).map_err(std::io::Error::other)?);
    let (rank, sender) = (place.rank, sender.clone());
    let thread = std::thread::Builder::new()
        .name(format!("rank-{rank}-start"))
        .spawn(move || await_start(rank, reader, &sender));
    let mut seat = Seat { child, writer };
    if let Err(error) = thread {
        seat.end();
        return Err(error);
    }
    Ok(seat)
}

/// The config of one rank: its share of the threads and cores, and its port for KV. With fewer cores than ranks none has one of its own.
fn share(config: &ServeConfig, rank: u32) -> std::io::Result<ServeConfig> {
    let mut own = config.clone();
    let (rank, ranks) = (rank as usize, config.dp as usize);
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

fn await_start(rank: u32, mut reader: Reader, sender: &mpsc::SyncSender<(u32, Starting)>) {
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
            Ok(FromRank::Failed(error)) => Starting::Lost(error.message),
            Err(error) => Starting::Lost(error.to_string()),
        };
        let over = !matches!(message, Starting::Loading(_));
        if sender.send((rank, message)).is_err() || over {
            return;
        }
    }
}

/// Passes on what a rank says, until it says nothing more.
fn hear(rank: u32, mut reader: Reader, shared: &Shared) {
    let why = loop {
        match reader.next(Some(SILENT)) {
            Ok(FromRank::News(news)) => shared.push(Command::Heard { rank, news }),
            Ok(FromRank::Failed(error)) => break error.message,
            Ok(FromRank::Beat | FromRank::Loading { .. }) => {}
            Ok(FromRank::Up(_) | FromRank::Refused(_)) => break LinkError::Message.to_string(),
            Err(error) => break error.to_string(),
        }
    };
    shared.push(Command::Lost { rank, why });
}

impl Fleet {
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
            shared.fail(error);
        }
        // The sinks close with the desks; readers see the failure that was set before.
        drop((desks, self));
        shared.stopped();
    }

    fn serve(&mut self, shared: &Arc<Shared>, desks: &mut [Desk]) -> Result<(), ApiError> {
        for (rank, reader) in (0_u32..).zip(std::mem::take(&mut self.readers)) {
            let shared = Arc::clone(shared);
            std::thread::Builder::new()
                .name(format!("rank-{rank}"))
                .spawn(move || hear(rank, reader, &shared))
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
        let sent = seat.map_or(Ok(()), |seat| seat.writer.send(message));
        sent.map_err(|error| self.lost(rank, &error.to_string()))
    }

    /// What a rank's end means to clients. A rank that was told of another's end is not the one at fault.
    fn lost(&mut self, rank: u32, why: &str) -> ApiError {
        let each = CULPRIT / rank_count(self).max(1);
        let (own, others): (Vec<_>, Vec<_>) = (0_u32..)
            .zip(&mut self.seats)
            .partition(|(seat, _)| *seat == rank);
        for (rank, seat) in own.into_iter().chain(others) {
            let process = seat.child.id();
            if let Some(signal) = seat.ended(each).and_then(|status| status.signal()) {
                return internal(format!(
                    "rank {rank} (process {process}) was ended by signal {signal}"
                ));
            }
        }
        internal(format!("rank {rank}: {why}"))
    }

    /// Lets the ranks end by themselves.
    fn stop(&mut self) {
        for seat in &mut self.seats {
            let _ = seat.writer.send(&ToRank::Order(Order::Stop));
        }
        end_all(&mut self.seats, STOP);
    }
}

impl Drop for Fleet {
    fn drop(&mut self) {
        end_all(&mut self.seats, Duration::ZERO);
    }
}

impl Seat {
    /// How it ended; none if it still runs after `limit`.
    fn ended(&mut self, limit: Duration) -> Option<ExitStatus> {
        let handle = PidFd::open(self.child.id()).ok()?;
        match handle.wait_ended(limit) {
            Ok(true) => self.child.try_wait().ok().flatten(),
            _ => None,
        }
    }

    /// Ends it if it still runs, and collects it.
    fn end(&mut self) {
        // Both fail only for a process that was collected.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Waits for all to end, at most `limit`, then ends them.
fn end_all(seats: &mut Vec<Seat>, limit: Duration) {
    let until = Instant::now() + limit;
    for mut seat in seats.drain(..) {
        if seat
            .ended(until.saturating_duration_since(Instant::now()))
            .is_none()
        {
            seat.end();
        }
    }
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
