use crate::handoff::{ExporterStats, ImporterStats, ReleaseOutcome};
use crate::{ExitClass, ServeError};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fmt;
use std::net::{IpAddr, SocketAddr};
use twinfer_engine::exchange::{ExpertMoves, SentBytes};
use twinfer_engine::phase::Phase;
use twinfer_engine::{
    EngineStats, Event, HeldKv, KvOutcome, PromptTokenTotals, Request, RequestId,
};
use twinfer_protocol::{ApiError, Epoch, Fingerprint, KvRelease, RankLoad, TokenId};

/// What a rank is to do.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Order {
    /// Take these requests, all or none; the answer is [`News::Taken`] with the same ticket. `claims` are the handles of
    /// KV, as JSON, of those whose KV comes from elsewhere: the rank is to read or release them, whatever happens.
    Submit {
        ticket: u64,
        requests: Vec<Request>,
        claims: Vec<(RequestId, String)>,
    },
    /// End a request at its next step; unknown ones are ignored.
    Abort(RequestId),
    /// How a fetch or its cancellation ended.
    KvLoaded(RequestId, KvOutcome),
    /// Free blocks that were held.
    ReleaseHeld(RequestId),
    /// Seal and lease the KV that a request left; the answer is [`News::Leased`].
    Lease(Box<Lease>),
    /// End a lease early; the answer is [`News::LeaseEnded`] with the same ticket.
    EndLease { ticket: u64, release: KvRelease },
    /// Release the KV of this handle, as JSON: no request will read it.
    Disclaim(String),
    /// Take turns until the group has agreed to sleep for the time of this number ([`super::wake`]).
    Wake(u64),
    /// End once nothing is to be done any more.
    Stop,
}

/// What a rank has done.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum News {
    /// The requests of this ticket run, or were refused.
    Taken {
        ticket: u64,
        outcome: Result<(), ApiError>,
    },
    /// Of the engine.
    Event(Event),
    /// Counters and gauges after a step.
    Stats(Box<RankStats>),
    /// The ranks agreed to sleep, for the time of this number.
    Slept(u64),
    /// This rank sleeps and has work: the ranks are to be woken for the time of this number.
    Asks(u64),
    /// The KV of a request is leased: what ends the lease, and the handle as JSON. Else it is free.
    Leased(RequestId, Result<(KvRelease, String), ApiError>),
    /// What became of an [`Order::EndLease`].
    LeaseEnded(u64, ReleaseOutcome),
    /// The lease of a request's KV is over.
    Freed(RequestId),
    /// A fetch ended, after so many seconds if it went well.
    Fetched(Result<f64, ApiError>),
    /// Counters and gauges of the handoff.
    Handoff(Box<HandoffStats>),
}

/// KV to be leased.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Lease {
    pub(crate) id: RequestId,
    pub(crate) kv: HeldKv,
    /// Of the request.
    pub(crate) prompt: Vec<TokenId>,
    /// The token that it sampled.
    pub(crate) last_token: Option<TokenId>,
}

/// Counters and gauges of both directions of the handoff, as far as there are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct HandoffStats {
    pub(crate) exporter: Option<ExporterStats>,
    pub(crate) importer: Option<ImporterStats>,
}

impl HandoffStats {
    /// Sums over ranks.
    pub(crate) fn total(ranks: &[Self]) -> Self {
        let mut all = Self::default();
        for Self { exporter, importer } in ranks {
            if let Some(one) = exporter {
                all.exporter.get_or_insert_default().add(one);
            }
            if let Some(one) = importer {
                all.importer.get_or_insert_default().add(one);
            }
        }
        all
    }
}

/// A key in a message; never shown.
#[derive(Clone, Serialize, Deserialize)]
pub(crate) struct KeyText(pub(crate) Vec<u8>);

impl fmt::Debug for KeyText {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("KeyText(..)")
    }
}

/// Counters and gauges of a rank.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct RankStats {
    pub(crate) engine: EngineStats,
    pub(crate) turns: TurnCounts,
    pub(crate) moves: ExpertMoves,
    pub(crate) sent: SentBytes,
}

/// Steps of a rank among others, by what it did in them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct TurnCounts {
    /// Rows of prompts.
    pub(crate) prefill: u64,
    /// Rows of generation.
    pub(crate) decode: u64,
    /// A step that may have both.
    pub(crate) mixed: u64,
    /// No rows.
    pub(crate) dummy: u64,
    /// What the last one did.
    pub(crate) last: LastTurn,
}

/// What a step of a rank did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum LastTurn {
    /// There was none.
    #[default]
    None,
    Prefill,
    Decode,
    Mixed,
    Dummy,
}

impl LastTurn {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Prefill => "prefill",
            Self::Decode => "decode",
            Self::Mixed => "mixed",
            Self::Dummy => "dummy",
        }
    }
}

/// What the front tells a rank's process.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum ToRank {
    /// The first message.
    Start(Box<Start>),
    /// Every other one.
    Order(Order),
}

/// All that a rank's process must know.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Start {
    /// [`twinfer_config::ServeConfig`] as JSON, with the cores and threads of this rank.
    pub(crate) config: String,
    /// Name of the instance.
    pub(crate) instance: String,
    pub(crate) epoch: Epoch,
    /// What ranks prove to each other: on one node a key drawn anew by every start, else the peer key; none if there
    /// is none, and all are on loopback.
    pub(crate) key: Option<Vec<u8>>,
    /// Key of other instances.
    pub(crate) peer_key: Option<KeyText>,
    pub(crate) rank: u32,
    /// Ranks of each node.
    pub(crate) counts: Vec<u32>,
    pub(crate) master_addr: String,
    pub(crate) master_port: u16,
    /// This node's address on the network that ranks use.
    pub(crate) listen: IpAddr,
    /// Where the front is, if it is on another node.
    pub(crate) front: Option<SocketAddr>,
}

/// First words of a connection from another node to the front.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Came {
    /// One that has ranks.
    Node(NodeCard),
    /// A rank, of this incarnation of the instance.
    Rank { rank: u32, epoch: Epoch },
}

/// What a node says of itself.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct NodeCard {
    /// Its first rank.
    pub(crate) start: u32,
    pub(crate) ranks: u32,
    pub(crate) version: String,
    /// Flags that must be equal on all nodes, with their values as JSON.
    pub(crate) flags: BTreeMap<String, String>,
}

/// What the front tells another node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum ToNode {
    /// All nodes have come: its ranks are to be started.
    Welcome {
        instance: String,
        epoch: Epoch,
        counts: Vec<u32>,
        master_port: u16,
    },
    /// It does not belong here; `config` if the user has to change something.
    Refused { config: bool, message: String },
    /// The front runs.
    Beat,
    /// The instance ends, as it was asked to.
    Stop,
    /// The instance cannot go on.
    Failed(String),
}

/// What another node tells the front.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum FromNode {
    /// It runs.
    Beat,
    /// A rank's process has ended, and how.
    Ended {
        rank: u32,
        process: u32,
        /// By a signal; else by itself.
        signalled: bool,
        how: String,
    },
    /// It could not start its ranks, or was told to end.
    Failed(String),
}

/// What a rank's process tells the front.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum FromRank {
    /// Bytes of weights read, and in all.
    Loading { done: u64, total: u64 },
    /// It has run a request together with the others and waits for orders.
    Up(Box<RankUp>),
    /// It cannot start.
    Refused(Refusal),
    /// What happened, in order.
    News(Vec<News>),
    /// It runs.
    Beat,
    /// It cannot go on, because of another rank if one is named.
    Failed {
        error: ApiError,
        at_fault: Option<u32>,
    },
}

/// What is known of a rank that is ready.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct RankUp {
    pub(crate) fingerprint: Fingerprint,
    /// Longest sequence, in tokens.
    pub(crate) max_len: u32,
    pub(crate) stats: RankStats,
    /// Where its KV is read, if it hands any over.
    pub(crate) kv_addr: Option<String>,
}

/// Why a rank cannot start.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Refusal {
    class: ExitClass,
    message: String,
}

impl Refusal {
    pub(crate) fn of(error: &ServeError) -> Self {
        Self {
            class: error.exit_class(),
            message: error.to_string(),
        }
    }

    pub(crate) fn into_error(self, rank: u32) -> ServeError {
        let message = format!("rank {rank}: {}", self.message);
        match self.class {
            ExitClass::Config => ServeError::Config(message),
            ExitClass::Unavailable => ServeError::Bind {
                what: "a port of a rank",
                reason: message,
            },
            ExitClass::Internal => ServeError::Engine(ApiError::new(
                twinfer_protocol::ErrorKind::Internal,
                message,
            )),
        }
    }
}

impl TurnCounts {
    pub(crate) fn count(&mut self, phase: Phase, rows: usize) {
        let (counter, last) = match (rows, phase) {
            (0, _) => (&mut self.dummy, LastTurn::Dummy),
            (_, Phase::Prefill) => (&mut self.prefill, LastTurn::Prefill),
            (_, Phase::Decode) => (&mut self.decode, LastTurn::Decode),
            (_, Phase::Mixed) => (&mut self.mixed, LastTurn::Mixed),
        };
        *counter += 1;
        self.last = last;
    }

    /// By name.
    pub(crate) fn named(&self) -> [(&'static str, u64); 4] {
        [
            ("prefill", self.prefill),
            ("decode", self.decode),
            ("mixed", self.mixed),
            ("dummy", self.dummy),
        ]
    }
}

impl RankStats {
    /// Sums over ranks.
    pub(crate) fn total(ranks: &[Self]) -> EngineStats {
        let mut all = EngineStats::default();
        for EngineStats {
            load,
            steps,
            prompt_tokens,
            output_tokens,
            preemptions,
            cache_queries,
            cache_hits,
            speculation,
        } in ranks.iter().map(|rank| rank.engine)
        {
            add_load(&mut all.load, &load);
            let PromptTokenTotals {
                computed,
                remote,
                cached,
            } = prompt_tokens;
            all.prompt_tokens.computed += computed;
            all.prompt_tokens.remote += remote;
            all.prompt_tokens.cached += cached;
            all.steps += steps;
            all.output_tokens += output_tokens;
            all.preemptions += preemptions;
            all.cache_queries += cache_queries;
            all.cache_hits += cache_hits;
            all.speculation.rounds += speculation.rounds;
            for (sum, one) in [
                (&mut all.speculation.drafted, speculation.drafted),
                (&mut all.speculation.accepted, speculation.accepted),
            ] {
                for (sum, one) in sum.iter_mut().zip(one) {
                    *sum += one;
                }
            }
        }
        all
    }
}

fn add_load(sum: &mut RankLoad, one: &RankLoad) {
    sum.waiting_prefill_tokens += one.waiting_prefill_tokens;
    sum.running += one.running;
    sum.waiting += one.waiting;
    sum.kv_blocks.total += one.kv_blocks.total;
    sum.kv_blocks.used += one.kv_blocks.used;
    sum.kv_blocks.cached += one.kv_blocks.cached;
    sum.kv_blocks.held += one.kv_blocks.held;
}
