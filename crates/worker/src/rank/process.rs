//! A rank as a process of its own. Its standard input is the socket to whoever started it: its front, or the process of
//! its node that a front on another node leads; then it dials that front itself. The standard output of rank 0 is the
//! listener of the rendezvous, which the front has kept from all others since it picked the port.

use super::core::{Patience, RankCore};
use super::handoff::{self, RankKv, Voice};
use super::messages::{Came, FromRank, News, Order, RankUp, Refusal, Start, ToRank};
use super::nodes::call_front;
use crate::load::{WarmRank, warm_up_rank};
use crate::ranks::LOADING;
use crate::settings::{Settings, phase_policy};
use crate::{GroupExchange, LoadProgress, ServeError};
use parking_lot::{Condvar, Mutex};
use std::collections::VecDeque;
use std::net::TcpListener;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, OnceLock, mpsc};
use std::time::{Duration, Instant};
use twinfer_comm::stream::{LinkError, Reader, Writer, ends};
use twinfer_comm::{
    Identity, JoinPlan, MAX_SPIN, Options, PeerKey, Placement, Topology, join_at, start_up_test,
};
use twinfer_config::ServeConfig;
use twinfer_engine::exchange::RankLink;
use twinfer_engine::{ExecError, RequestId};
use twinfer_protocol::{ApiError, ErrorKind, Fingerprint};

/// How often a rank says that it runs.
const BEAT: Duration = Duration::from_millis(400);
/// The front's first message is there, or will never be.
const FIRST: Duration = Duration::from_secs(10);
/// A front on another node is reached in this time.
const CALL: Duration = Duration::from_secs(10);
/// The ranks find each other in this time.
const JOIN: Duration = Duration::from_secs(30);
/// Progress is told no more often.
const TOLD: Duration = Duration::from_millis(100);

/// Orders from the front.
#[derive(Default)]
pub(super) struct Inbox {
    state: Mutex<Orders>,
    arrived: Condvar,
}

#[derive(Default)]
struct Orders {
    orders: VecDeque<Order>,
    /// The front is gone.
    closed: bool,
}

/// Runs a rank to its end, as the front that started this process says over standard input; whether it ended well.
/// `begin` sees the config first, before any thread is made. Whatever goes wrong is said to the front; when that is
/// gone the process ends.
///
/// # Errors
/// [`ServeError::Config`]: standard input is no such socket.
pub fn run_rank(begin: impl FnOnce(&ServeConfig)) -> Result<bool, ServeError> {
    let nobody = |why: String| {
        ServeError::Config(format!(
            "no front on standard input: {why}; ranks are started by `twinfer serve --dp`"
        ))
    };
    let stream = std::io::stdin().as_fd().try_clone_to_owned();
    let stream = UnixStream::from(stream.map_err(|e| nobody(e.to_string()))?);
    stream.local_addr().map_err(|e| nobody(e.to_string()))?;
    let (mut reader, writer) = ends(stream).map_err(|e| nobody(e.to_string()))?;
    let start = match reader.next(Some(FIRST)) {
        Ok(ToRank::Start(start)) => start,
        Ok(ToRank::Order(_)) => return Err(nobody("an order came first".to_owned())),
        Err(error) => return Err(nobody(error.to_string())),
    };
    let config: ServeConfig =
        serde_json::from_str(&start.config).map_err(|e| nobody(e.to_string()))?;
    begin(&config);
    let _span = tracing::info_span!("rank", rank = start.rank).entered();
    // Who started it holds the other end: it is kept open for that one's sake.
    let (starter, reader, writer) = match start.front {
        None => (None, reader, writer),
        Some(front) => {
            let came = Came::Rank {
                rank: start.rank,
                epoch: start.epoch,
            };
            let key = start.key.as_deref().and_then(PeerKey::new);
            let (answers, to_front) = call_front(front, key.as_ref(), &came, CALL)?;
            (Some((reader, writer)), answers, to_front)
        }
    };
    let _starter = starter;
    let writer = Arc::new(Mutex::new(writer));
    let run = || serve(&start, &config, reader, &writer);
    let outcome = catch_unwind(AssertUnwindSafe(run)).unwrap_or_else(|panic| {
        let why = crate::engine::panic_text(panic.as_ref()).to_owned();
        Err(internal(format!("it panicked: {why}")).into())
    });
    let message = match outcome {
        Ok(()) => return Ok(true),
        Err(End::Refused(error)) => FromRank::Refused(Refusal::of(&error)),
        Err(End::Failed(error)) => FromRank::Failed {
            error,
            at_fault: None,
        },
        Err(End::Step(error)) => FromRank::Failed {
            at_fault: match &error {
                ExecError::RankLost { rank, .. } => Some(*rank),
                _ => None,
            },
            error: internal(error.to_string()),
        },
    };
    // Without a front nobody wants to know.
    let _ = writer.lock().send(&message);
    Ok(false)
}

/// Why a rank ends early.
enum End {
    Refused(ServeError),
    Failed(ApiError),
    Step(ExecError),
}

impl From<ApiError> for End {
    fn from(error: ApiError) -> Self {
        Self::Failed(error)
    }
}

impl From<ServeError> for End {
    fn from(error: ServeError) -> Self {
        Self::Refused(error)
    }
}

impl From<LinkError> for End {
    fn from(error: LinkError) -> Self {
        Self::Failed(internal(format!("its front cannot be reached: {error}")))
    }
}

fn internal(message: String) -> ApiError {
    ApiError::new(ErrorKind::Internal, message)
}

fn serve(
    start: &Start,
    config: &ServeConfig,
    reader: Reader,
    writer: &Arc<Mutex<Writer>>,
) -> Result<(), End> {
    let system = |what| move |source| ServeError::System { what, source };
    crate::pin_process(config)?;
    let inbox = Arc::new(Inbox::default());
    // Ends the beats when this returns.
    let (_serving, served) = mpsc::sync_channel::<()>(0);
    let kv: Arc<OnceLock<RankKv>> = Arc::default();
    let (beats, heard, handoff) = (Arc::clone(writer), Arc::clone(&inbox), Arc::clone(&kv));
    std::thread::Builder::new()
        .name("beat".into())
        .spawn(move || beat(&served, &beats, &heard, &handoff))
        .map_err(system("start a thread"))?;
    let orders = Arc::clone(&inbox);
    let handoff = Arc::clone(&kv);
    std::thread::Builder::new()
        .name("orders".into())
        .spawn(move || listen(reader, &orders, &handoff))
        .map_err(system("start a thread"))?;
    // Before anything is loaded: a port may be taken.
    let opened = handoff::open(config, start.peer_key.is_some())?;
    let link = meet(start, config)?;
    let WarmRank {
        mut rank,
        fingerprint,
    } = load(config, &link, writer)?;
    let max_len = rank.engine().max_len();
    let mut core = RankCore::among(rank);
    let voice = Voice {
        inbox: Arc::clone(&inbox),
        writer: Arc::clone(writer),
    };
    let (own, runtime) = RankKv::start(opened, start, config, core.engine(), &fingerprint, voice)?;
    let up = RankUp {
        fingerprint,
        max_len,
        stats: core.stats(),
        kv_addr: own.addr(),
    };
    let own = kv.get_or_init(|| own);
    writer.lock().send(&FromRank::Up(Box::new(up)))?;
    let mut news = Vec::new();
    loop {
        let Some(orders) = inbox.take(core.patience() == Patience::Wait) else {
            return Err(End::Failed(internal("its front is gone".to_owned())));
        };
        for mut order in orders {
            own.take_claims(&mut order);
            let asked = ids_of(&order);
            core.apply(order, &mut news);
            if let Some(News::Taken {
                outcome: Err(_), ..
            }) = news.last()
            {
                own.refused(&asked);
            }
        }
        core.ask(&mut news);
        match core.patience() {
            Patience::End => {
                own.end(&runtime);
                return Ok(());
            }
            Patience::Wait => {}
            Patience::Step => core.step(&mut news).map_err(End::Step)?,
        }
        core.publish(&mut news);
        news.retain(|news| own.hear(news));
        tell(&mut news, writer)?;
    }
}

fn tell(news: &mut Vec<News>, writer: &Mutex<Writer>) -> Result<(), LinkError> {
    if news.is_empty() {
        return Ok(());
    }
    let message = FromRank::News(std::mem::take(news));
    writer.lock().send(&message)?;
    if let FromRank::News(mut sent) = message {
        // Keeps the memory.
        sent.clear();
        *news = sent;
    }
    Ok(())
}

/// Finds the other ranks and tries the ways to them.
fn meet(start: &Start, config: &ServeConfig) -> Result<Arc<RankLink>, ServeError> {
    let wrong = |error: &dyn std::fmt::Display| ServeError::Config(error.to_string());
    let topology = Topology::new(&start.counts).map_err(|e| wrong(&e))?;
    let placement =
        Placement::planned(&topology, start.rank, &start.master_addr, start.master_port);
    placement
        .check_environment(&topology, |name| std::env::var(name).ok())
        .map_err(|e| wrong(&e))?;
    let spin = match config.cpus {
        Some(_) => MAX_SPIN,
        None => Duration::ZERO,
    };
    let options = Options {
        spin,
        ..Options::default()
    };
    let plan = JoinPlan {
        identity: Identity {
            instance: start.instance.clone(),
            epoch: start.epoch,
            version: env!("CARGO_PKG_VERSION").to_owned(),
            fingerprint: Fingerprint::default(),
        },
        topology,
        rank: start.rank,
        master_addr: placement.master_addr,
        master_port: placement.master_port,
        listen: start.listen,
        port: 0,
        advertise: None,
        key: start.key.as_deref().and_then(PeerKey::new),
        share_memory: true,
        limit: JOIN,
        options,
    };
    let lost = |message: String| ServeError::System {
        what: "meet the other ranks",
        source: std::io::Error::other(message),
    };
    let rendezvous = match start.rank {
        0 => {
            let listener = std::io::stdout().as_fd().try_clone_to_owned();
            Some(TcpListener::from(
                listener.map_err(|e| lost(e.to_string()))?,
            ))
        }
        _ => None,
    };
    let joined = join_at(&plan, rendezvous).map_err(|e| lost(e.to_string()))?;
    let mut group = joined.group;
    start_up_test(&mut group, start.epoch).map_err(|e| lost(e.to_string()))?;
    let exchange = GroupExchange::new(group, options.patience, LOADING);
    Ok(Arc::new(RankLink::new(Box::new(exchange))))
}

fn load(
    config: &ServeConfig,
    link: &Arc<RankLink>,
    writer: &Mutex<Writer>,
) -> Result<WarmRank, ServeError> {
    let told = Mutex::new(Instant::now());
    let progress = |LoadProgress { done, total }: LoadProgress| {
        let mut told = told.lock();
        if told.elapsed() >= TOLD || done >= total {
            *told = Instant::now();
            let _ = writer.lock().send(&FromRank::Loading { done, total });
        }
    };
    let model = crate::model::load(config, Some(link), &progress)?;
    let limits = Settings::engine(config);
    warm_up_rank(model, limits, phase_policy(config), Arc::clone(link))
}

/// Says that the process runs, until `served` ends or nobody hears it: then there is no front.
fn beat(served: &mpsc::Receiver<()>, writer: &Mutex<Writer>, inbox: &Inbox, kv: &OnceLock<RankKv>) {
    while served.recv_timeout(BEAT) == Err(mpsc::RecvTimeoutError::Timeout) {
        let told = kv.get().map_or(Ok(()), RankKv::publish);
        if told.is_err() || writer.lock().send(&FromRank::Beat).is_err() {
            inbox.close();
            return;
        }
    }
}

/// Takes orders until the front is gone; a rank without a front has nobody to work for.
fn listen(mut reader: Reader, inbox: &Inbox, kv: &OnceLock<RankKv>) {
    while let Ok(ToRank::Order(order)) = reader.next(None) {
        let order = match kv.get() {
            Some(kv) => kv.order(order),
            None => Some(order),
        };
        if let Some(order) = order {
            inbox.push(order);
        }
    }
    inbox.close();
}

/// The requests that an order brings.
fn ids_of(order: &Order) -> Vec<RequestId> {
    match order {
        Order::Submit { requests, .. } => requests.iter().map(|request| request.id).collect(),
        _ => Vec::new(),
    }
}

impl Inbox {
    /// All orders; waits for one if `wait`, as long as there is a front. None without one.
    fn take(&self, wait: bool) -> Option<VecDeque<Order>> {
        let mut state = self.state.lock();
        while wait && state.orders.is_empty() && !state.closed {
            self.arrived.wait(&mut state);
        }
        (!state.closed).then(|| std::mem::take(&mut state.orders))
    }

    pub(super) fn push(&self, order: Order) {
        self.state.lock().orders.push_back(order);
        self.arrived.notify_one();
    }

    fn close(&self) {
        self.state.lock().closed = true;
        self.arrived.notify_one();
    }
}
