//! The front's side of other nodes: each has a process that starts and watches its ranks, and calls the front; so do the
//! ranks themselves. Whoever calls proves the peer key first.

use super::front::{RankStart, Starting, Starts};
use super::messages::{Came, FromNode, NodeCard, ToNode};
use crate::engine::{Command, Shared};
use crate::{ExitClass, ServeError};
use parking_lot::{Condvar, Mutex};
use std::collections::{BTreeMap, BTreeSet};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::ops::Range;
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};
use twinfer_comm::handshake::Protocol;
use twinfer_comm::stream::{LinkError, Reader, Writer, remote_ends};
use twinfer_comm::{Acceptor, Channel, ChannelError, Event, PeerKey};
use twinfer_config::ServeConfig;
use twinfer_protocol::{ApiError, Epoch};

/// What a front and other nodes say to each other.
static FRONT: Protocol = Protocol {
    magic: *b"twinfrFR",
    version: 1,
    label: b"twinfer front link ",
};

/// The other nodes are waited for so long, and they for the front.
pub(super) const NODES: Duration = Duration::from_secs(120);
/// When all nodes have come their ranks come within this time.
pub(super) const COMING: Duration = Duration::from_secs(30);
/// How often front and node say that they run.
pub(super) const BEAT: Duration = Duration::from_millis(400);
/// One that says nothing for so long stands still, or the network does.
pub(super) const SILENT: Duration = Duration::from_millis(1500);
/// When one rank is silent because the network is cut, others are noticed within this time.
const SPREAD: Duration = Duration::from_millis(700);
/// Between two attempts to reach the front.
const RETRY: Duration = Duration::from_millis(200);
/// To say something to somebody who has just come.
const ANSWER: Duration = Duration::from_secs(2);

/// Flags that are a node's or the front's own; all others must be equal on all nodes.
const OWN_FLAGS: [&str; 27] = [
    "model",
    "model-revision",
    "served-model-name",
    "name",
    "host",
    "port",
    "kv-host",
    "kv-advertise-host",
    "kv-port",
    "pd-peers",
    "kv-lease",
    "kv-timeout",
    "kv-load-failure-policy",
    "share-weights",
    "data-parallel-size-local",
    "data-parallel-start-rank",
    "headless",
    "rank-host",
    "threads",
    "cpus",
    "isa",
    "max-body-bytes",
    "drain-settle",
    "drain-timeout",
    "log-format",
    "max-waiting",
    "receipts",
];

/// The other nodes of an instance.
#[derive(Default)]
pub(super) struct Nodes {
    /// Ranks of this node.
    here: u32,
    nodes: Vec<Node>,
    acceptor: Option<Acceptor>,
    ear: Arc<Ear>,
    /// Ends the beats when it goes.
    beats: Option<mpsc::SyncSender<()>>,
}

struct Node {
    number: u32,
    ranks: Range<u32>,
    from: SocketAddr,
    writer: Arc<Mutex<Writer>>,
    reader: Option<Reader>,
}

/// What is heard of nodes, and who wants to know.
#[derive(Default)]
pub(super) struct Ear {
    heard: Mutex<Heard>,
    changed: Condvar,
}

#[derive(Default)]
struct Heard {
    to: To,
    /// What nodes say of the first of their ranks that ended, or that of a node that is gone.
    ended: Option<(u32, String)>,
    silent: BTreeSet<u32>,
    /// A rank is silent, and so its node may be.
    rank_silent: bool,
    /// Nodes whose connection is open.
    open: usize,
    /// The instance ends as it was asked to: that nodes go is no failure.
    stopping: bool,
}

/// Who is told that a rank is lost.
#[derive(Default)]
enum To {
    #[default]
    Nobody,
    Start(Starts),
    Serve(Arc<Shared>),
}

/// One that has come and been accepted.
struct Guest {
    card: NodeCard,
    from: SocketAddr,
    channel: Channel<TcpStream>,
}

/// Reaches the front at `address` within `limit` and says `came`.
///
/// # Errors
/// [`ServeError`], naming the address.
pub(super) fn call_front(
    address: SocketAddr,
    key: Option<&PeerKey>,
    came: &Came,
    limit: Duration,
) -> Result<(Reader, Writer), ServeError> {
    let until = Instant::now() + limit;
    let lost = |why: &dyn std::fmt::Display| {
        ServeError::Config(format!(
            "the front at {address} (data-parallel-address, data-parallel-rpc-port): {why}"
        ))
    };
    loop {
        let left = until.saturating_duration_since(Instant::now());
        let dialled = match left.is_zero() {
            true => Err(ChannelError::Timeout),
            false => TcpStream::connect_timeout(&address, left)
                .map_err(ChannelError::from)
                .and_then(|stream| Channel::dial(&FRONT, stream, key, Instant::now() + left)),
        };
        match dialled {
            Ok(channel) => {
                let ends = remote_ends(channel).map_err(|e| lost(&e));
                let (reader, mut writer) = ends?;
                writer.send(came).map_err(|e| lost(&e))?;
                return Ok((reader, writer));
            }
            // Nobody there yet: again. Somebody else there: for good.
            Err(ChannelError::Closed | ChannelError::Io(_)) if Instant::now() + RETRY < until => {
                // Nothing tells when somebody listens there.
                let (_open, never) = mpsc::sync_channel::<()>(0);
                let _ = never.recv_timeout(RETRY);
            }
            Err(why) => return Err(lost(&why)),
        }
    }
}

/// The flags that all nodes must have alike, with their values as JSON.
pub(super) fn shared_flags(config: &ServeConfig) -> BTreeMap<String, String> {
    let Ok(serde_json::Value::Object(flags)) = serde_json::to_value(config) else {
        return BTreeMap::new();
    };
    let shared = flags.into_iter().filter(|(flag, _)| {
        // Files of keys are a node's own, too.
        !OWN_FLAGS.contains(&flag.as_str()) && !flag.ends_with("-key-file")
    });
    shared
        .map(|(flag, value)| (flag, value.to_string()))
        .collect()
}

/// Whether a node fits to `own`, the front's card, and those that came before.
fn check(card: &NodeCard, own: &NodeCard, world: u32, others: &[Guest]) -> Result<(), String> {
    let NodeCard {
        start,
        ranks,
        version,
        flags,
    } = card;
    if *version != own.version {
        return Err(format!(
            "the first node runs version {}, that of rank {start} runs version {version}",
            own.version
        ));
    }
    for (flag, value) in &own.flags {
        let theirs = flags.get(flag).map_or("absent", String::as_str);
        if theirs != value {
            return Err(format!(
                "{flag} is {value} on the first node and {theirs} on that of rank {start}"
            ));
        }
    }
    let end = start.saturating_add(*ranks);
    if *ranks == 0 || *start < own.ranks || end > world {
        return Err(format!(
            "a node has ranks {start} to {}; allowed are {} to {}",
            end.saturating_sub(1),
            own.ranks,
            world - 1
        ));
    }
    let taken = others
        .iter()
        .find(|other| other.card.start < end && *start < other.card.start + other.card.ranks);
    match taken {
        None => Ok(()),
        Some(other) => Err(format!(
            "ranks {start} to {} overlap with ranks {} to {}, which {} has",
            end - 1,
            other.card.start,
            other.card.start + other.card.ranks - 1,
            other.from
        )),
    }
}

/// Ranks of `all` that nobody has, as text.
fn missing(all: Range<u32>, has: impl Fn(u32) -> bool) -> String {
    let ranks: Vec<String> = all
        .filter(|rank| !has(*rank))
        .map(|r| r.to_string())
        .collect();
    ranks.join(", ")
}

impl Nodes {
    /// Waits at `address` until every rank has a node.
    ///
    /// # Errors
    /// [`ServeError`]; nodes that came have been told.
    pub(super) fn gather(start: &RankStart<'_>, address: SocketAddr) -> Result<Self, ServeError> {
        let config = start.config;
        let (here, world) = (config.ranks_here(), config.dp);
        let key = start.peer_key.and_then(PeerKey::new);
        if key.is_none() && !address.ip().to_canonical().is_loopback() {
            return Err(ServeError::Config(format!(
                "data-parallel-address is {}, which is not on loopback, and there is no peer key; set one (peer-key-file)",
                address.ip()
            )));
        }
        let listener = TcpListener::bind(address).map_err(|error| ServeError::Bind {
            what: "ranks of other nodes (data-parallel-address, data-parallel-rpc-port)",
            reason: format!("{address}: {error}"),
        })?;
        let system = |source| ServeError::System {
            what: "wait for other nodes",
            source,
        };
        let mut acceptor = Acceptor::new(&FRONT, listener, key, world).map_err(system)?;
        let own = NodeCard {
            start: 0,
            ranks: here,
            version: env!("CARGO_PKG_VERSION").to_owned(),
            flags: shared_flags(config),
        };
        let mut guests: Vec<Guest> = Vec::new();
        let until = Instant::now() + NODES;
        tracing::info!(%address, ranks = world - here, "waiting for ranks of other nodes");
        while guests.iter().map(|guest| guest.card.ranks).sum::<u32>() < world - here {
            let watched: Vec<(u32, &TcpStream)> = guests
                .iter()
                .map(|guest| (guest.card.start, guest.channel.stream()))
                .collect();
            match acceptor.next::<Came>(&watched, until).map_err(system)? {
                Event::Arrived {
                    mut channel,
                    from,
                    message: Came::Node(card),
                } => match check(&card, &own, world, &guests) {
                    Ok(()) => {
                        tracing::info!(%from, first = card.start, ranks = card.ranks, "a node has come");
                        guests.push(Guest {
                            card,
                            from,
                            channel,
                        });
                    }
                    Err(message) => {
                        tracing::warn!(%from, message, "a node was turned away");
                        let refused = ToNode::Refused {
                            config: true,
                            message,
                        };
                        // Who is gone already need not be told.
                        let _ = channel.send(&refused, Instant::now() + ANSWER);
                    }
                },
                Event::Arrived { from, .. } => {
                    tracing::warn!(%from, "a rank came before its node");
                }
                Event::Turned { from, why } => {
                    tracing::warn!(%from, %why, "a connection of another node was turned away");
                }
                Event::Gone(first) => guests.retain(|guest| guest.card.start != first),
                Event::Time => {
                    let has = |rank: u32| {
                        let mut cards = guests.iter().map(|guest| &guest.card);
                        cards.any(|card| (card.start..card.start + card.ranks).contains(&rank))
                    };
                    let message = format!(
                        "no node has come with ranks {} within {} s",
                        missing(here..world, has),
                        NODES.as_secs()
                    );
                    for guest in &mut guests {
                        let failed = ToNode::Failed(message.clone());
                        let _ = guest.channel.send(&failed, Instant::now() + ANSWER);
                    }
                    return Err(ServeError::System {
                        what: "start ranks on all nodes",
                        source: std::io::Error::other(message),
                    });
                }
            }
        }
        guests.sort_by_key(|guest| guest.card.start);
        let mut nodes = Vec::new();
        for (guest, number) in guests.into_iter().zip(1..) {
            let (reader, writer) = remote_ends(guest.channel).map_err(system)?;
            nodes.push(Node {
                number,
                ranks: guest.card.start..guest.card.start + guest.card.ranks,
                from: guest.from,
                writer: Arc::new(Mutex::new(writer)),
                reader: Some(reader),
            });
        }
        Ok(Self {
            here,
            nodes,
            acceptor: Some(acceptor),
            ear: Arc::default(),
            beats: None,
        })
    }

    /// Ranks of each node, `here` on the first.
    pub(super) fn counts(&self, here: u32) -> Vec<u32> {
        let others = self.nodes.iter().map(|node| node.ranks.len() as u32);
        std::iter::once(here).chain(others).collect()
    }

    /// Tells all to start their ranks, and takes these in as they come.
    pub(super) fn welcome(
        &mut self,
        start: &RankStart<'_>,
        counts: &[u32],
        master_port: u16,
        sender: &Starts,
    ) -> std::io::Result<()> {
        let Some(acceptor) = self.acceptor.take() else {
            return Ok(());
        };
        {
            let mut heard = self.ear.heard.lock();
            heard.to = To::Start(sender.clone());
            heard.open = self.nodes.len();
        }
        let welcome = ToNode::Welcome {
            instance: start.instance.to_owned(),
            epoch: start.epoch,
            counts: counts.to_vec(),
            master_port,
        };
        self.tell(&welcome);
        for node in &mut self.nodes {
            let Some(reader) = node.reader.take() else {
                continue;
            };
            let ear = Arc::clone(&self.ear);
            let about = (node.number, node.ranks.clone(), node.from);
            std::thread::Builder::new()
                .name(format!("node-{}", node.number))
                .spawn(move || hear(about, reader, &ear))?;
        }
        let (beats, ended) = mpsc::sync_channel::<()>(0);
        self.beats = Some(beats);
        let writers: Vec<_> = self
            .nodes
            .iter()
            .map(|node| Arc::clone(&node.writer))
            .collect();
        std::thread::Builder::new()
            .name("node-beats".into())
            .spawn(move || {
                while ended.recv_timeout(BEAT) == Err(mpsc::RecvTimeoutError::Timeout) {
                    for writer in &writers {
                        // Its reader notices when it is gone.
                        let _ = writer.lock().send(&ToNode::Beat);
                    }
                }
            })?;
        let (epoch, sender) = (start.epoch, sender.clone());
        let ranks = start.config.ranks_here()..start.config.dp;
        std::thread::Builder::new()
            .name("rank-door".into())
            .spawn(move || admit(acceptor, epoch, ranks, &sender))
            .map(drop)
    }

    /// What is heard of nodes.
    pub(super) fn ear(&self) -> &Arc<Ear> {
        &self.ear
    }

    /// From now on `shared` is told of ranks that are lost.
    pub(super) fn serve(&self, shared: &Arc<Shared>) {
        self.ear.heard.lock().to = To::Serve(Arc::clone(shared));
    }

    /// The instance does not start.
    pub(super) fn refuse(&self, error: &ServeError) {
        self.tell(&ToNode::Refused {
            config: error.exit_class() == ExitClass::Config,
            message: error.to_string(),
        });
    }

    /// The instance cannot go on.
    pub(super) fn fail(&self, message: &str) {
        self.tell(&ToNode::Failed(message.to_owned()));
    }

    /// The instance ends as it was asked to.
    pub(super) fn stop(&self) {
        self.ear.heard.lock().stopping = true;
        self.tell(&ToNode::Stop);
    }

    fn tell(&self, message: &ToNode) {
        for node in &self.nodes {
            // Its reader notices when it is gone.
            let _ = node.writer.lock().send(message);
        }
    }

    /// Waits until all nodes are gone, at most `limit`.
    pub(super) fn wait_gone(&self, limit: Duration) {
        let until = Instant::now() + limit;
        let mut heard = self.ear.heard.lock();
        while heard.open > 0 {
            if self.ear.changed.wait_until(&mut heard, until).timed_out() {
                return;
            }
        }
    }

    /// The rank that other nodes say has ended, and how, or the first one of those that are silent; waits at most `limit`
    /// for it.
    pub(super) fn ended(&self, limit: Duration) -> Option<(u32, String)> {
        if self.nodes.is_empty() {
            return None;
        }
        let mut until = Instant::now() + limit;
        let mut heard = self.ear.heard.lock();
        let mut spread = false;
        loop {
            let all_silent = heard.silent.len() == self.nodes.len();
            if heard.ended.is_some() || all_silent {
                break;
            }
            if self.ear.changed.wait_until(&mut heard, until).timed_out() {
                let some_silent = heard.rank_silent || !heard.silent.is_empty();
                if spread || !some_silent {
                    break;
                }
                spread = true;
                until = Instant::now() + SPREAD;
            }
        }
        let seconds = SILENT.as_secs_f64();
        let silent = |node: &&Node| heard.silent.contains(&node.number);
        let told: Vec<&Node> = self.nodes.iter().filter(silent).collect();
        let names: Vec<String> = told.iter().map(|node| node.describe()).collect();
        let names = names.join(", ");
        heard.ended.clone().or_else(|| match told.first() {
            None => None,
            // Every other one of several: the one at fault is this.
            Some(_) if told.len() > 1 && told.len() == self.nodes.len() => {
                let own = ranks_text(&(0..self.here));
                let why = format!("cut off: nothing was heard for {seconds:.1} s from {names}");
                Some((0, format!("{own} (node 0, this one): {why}")))
            }
            Some(first) => {
                let why = format!("nothing was heard for {seconds:.1} s");
                Some((first.ranks.start, format!("{names}: {why}")))
            }
        })
    }

    /// Number of a rank's node.
    pub(super) fn number(&self, rank: u32) -> u32 {
        let node = self.nodes.iter().find(|node| node.ranks.contains(&rank));
        node.map_or(0, |node| node.number)
    }

    /// Where a rank is, for messages; empty if on this node.
    pub(super) fn place(&self, rank: u32) -> String {
        let node = self.nodes.iter().find(|node| node.ranks.contains(&rank));
        node.map_or_else(String::new, |node| {
            format!(" (node {}, {})", node.number, node.from.ip())
        })
    }
}

impl Node {
    fn describe(&self) -> String {
        describe(self.number, &self.ranks, self.from)
    }
}

fn describe(number: u32, ranks: &Range<u32>, from: SocketAddr) -> String {
    format!("{} (node {number}, {})", ranks_text(ranks), from.ip())
}

fn ranks_text(ranks: &Range<u32>) -> String {
    match ranks.len() {
        1 => format!("rank {}", ranks.start),
        _ => format!("ranks {} to {}", ranks.start, ranks.end.saturating_sub(1)),
    }
}

impl Ear {
    /// A rank of another node is silent.
    pub(super) fn rank_is_silent(&self) {
        self.heard.lock().rank_silent = true;
    }

    fn lost(&self, rank: u32, why: String) {
        let heard = self.heard.lock();
        if heard.stopping {
            return;
        }
        match &heard.to {
            To::Nobody => {}
            To::Start(sender) => {
                // Nobody wants to know any more when another has failed.
                let _ = sender.try_send((rank, Starting::Lost(why)));
            }
            To::Serve(shared) => shared.push(Command::Lost { rank, why }),
        }
    }
}

/// Hears a node until it says nothing more.
fn hear(about: (u32, Range<u32>, SocketAddr), mut reader: Reader, ear: &Ear) {
    let (number, ranks, from) = about;
    let first = ranks.start;
    let why = loop {
        match reader.next(Some(SILENT)) {
            Ok(FromNode::Beat) => {}
            Ok(FromNode::Ended {
                rank,
                process,
                signalled,
                how,
            }) => {
                // One that ended by itself has said why, or goes because another one did.
                if signalled {
                    let at = from.ip();
                    let message =
                        format!("rank {rank} (process {process} on node {number}, {at}) {how}");
                    ear.heard.lock().ended.get_or_insert((rank, message));
                    ear.changed.notify_all();
                }
                ear.lost(rank, how);
            }
            Ok(FromNode::Failed(why)) => break why,
            Err(error) => {
                if matches!(error, LinkError::Silent(_)) {
                    ear.heard.lock().silent.insert(number);
                    ear.changed.notify_all();
                }
                break error.to_string();
            }
        }
    };
    let told = format!("{}: {why}", describe(number, &ranks, from));
    {
        let mut heard = ear.heard.lock();
        heard.open -= 1;
        if !heard.silent.contains(&number) {
            heard.ended.get_or_insert((first, told));
        }
    }
    ear.lost(first, why);
    ear.changed.notify_all();
}

/// Takes in the ranks of other nodes as they come.
fn admit(mut acceptor: Acceptor, epoch: Epoch, ranks: Range<u32>, sender: &Starts) {
    let mut come = BTreeSet::new();
    let until = Instant::now() + COMING;
    while come.len() < ranks.len() {
        let (rank, message) = match acceptor.next::<Came>(&[], until) {
            Ok(Event::Arrived {
                channel,
                from,
                message,
            }) => match message {
                Came::Rank {
                    rank,
                    epoch: theirs,
                } if theirs == epoch && ranks.contains(&rank) && !come.contains(&rank) => {
                    let Ok((reader, writer)) = remote_ends(channel) else {
                        continue;
                    };
                    come.insert(rank);
                    (rank, Starting::Here(Box::new((reader, writer))))
                }
                _ => {
                    tracing::warn!(%from, "a connection of no rank that is missing");
                    continue;
                }
            },
            Ok(Event::Turned { from, why }) => {
                tracing::warn!(%from, %why, "a connection of a rank was turned away");
                continue;
            }
            Ok(Event::Gone(_)) => continue,
            Ok(Event::Time) => {
                let late = missing(ranks.clone(), |rank| come.contains(&rank));
                let first = ranks.clone().find(|rank| !come.contains(rank));
                let why = format!("ranks {late} did not come within {} s", COMING.as_secs());
                (first.unwrap_or_default(), Starting::Lost(why))
            }
            Err(error) => (ranks.start, Starting::Lost(error.to_string())),
        };
        let over = matches!(message, Starting::Lost(_));
        if sender.send((rank, message)).is_err() || over {
            return;
        }
    }
}

/// The error of a front that has refused a node.
pub(super) fn refused(config: bool, message: String) -> ServeError {
    match config {
        true => ServeError::Config(message),
        false => ServeError::Engine(ApiError::new(
            twinfer_protocol::ErrorKind::Internal,
            message,
        )),
    }
}
