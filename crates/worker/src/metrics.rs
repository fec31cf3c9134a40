//! What an instance counts: vLLM's names where the thing is the same, else `twinfer_*`. Every label has
//! a fixed, small set of values.

use crate::handoff::{ExporterStats, ImporterStats};
use crate::rank::RankStats;
use parking_lot::Mutex;
use prometheus_client::encoding::EncodeLabelSet;
use std::sync::Arc;
use std::time::Duration;
use twinfer_engine::{EngineStats, FinishReason, MAX_DRAFTS, PromptSources, SpeculationStats};
use twinfer_http::{
    Counter, Family, Gauge, Histogram, Metrics, SECONDS_INTER_TOKEN, SECONDS_REQUEST, SECONDS_TTFT,
    TOKENS,
};
use twinfer_protocol::{ApiError, KvBlockCounts};

/// Labels that vLLM puts on every series of an engine.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct EngineLabels {
    engine: &'static str,
    model_name: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct SourceLabels {
    engine: &'static str,
    model_name: String,
    source: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct FinishLabels {
    engine: &'static str,
    model_name: String,
    finished_reason: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct StateLabels {
    state: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct CodeLabels {
    code: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ErrorLabels {
    code: &'static str,
    fault: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct DirectionLabels {
    direction: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ReasonLabels {
    reason: &'static str,
}

/// What the engine thread counts.
#[derive(Clone, Debug)]
pub(crate) struct EngineMetrics {
    running: Gauge,
    waiting: Gauge,
    waiting_prefill_tokens: Gauge,
    blocks: [Gauge; 4],
    prompt_tokens: Counter,
    by_source: [Counter; 3],
    generation_tokens: Counter,
    steps: Counter,
    preemptions: Counter,
    first_token: Histogram,
    inter_token: Histogram,
    per_output_token: Histogram,
    request: Histogram,
    request_prompt: Histogram,
    request_output: Histogram,
    finished: [Counter; 4],
    cache_queries: Counter,
    cache_hits: Counter,
    drafts: Drafts,
    ranks: RankMetrics,
}

/// What ranks count of themselves, each under its own label.
#[derive(Clone, Debug)]
struct RankMetrics {
    steps: Family<RankLabels, Counter>,
    sent: Family<SentLabels, Counter>,
    moves: Family<RankLabel, Counter>,
    plans: Counter,
    layers: Counter,
    balance: Family<BalanceLabels, Gauge>,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct RankLabels {
    rank: u32,
    phase: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct RankLabel {
    rank: u32,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct SentLabels {
    rank: u32,
    what: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct BalanceLabels {
    placement: &'static str,
}

/// Speculation, by place in a round where that is told.
#[derive(Clone, Debug)]
struct Drafts {
    rounds: Counter,
    drafted: Counter,
    accepted: Counter,
    drafted_per_place: [Counter; MAX_DRAFTS],
    accepted_per_place: [Counter; MAX_DRAFTS],
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct PlaceLabels {
    engine: &'static str,
    model_name: String,
    position: u32,
}

/// What the handoff counts: the connector's own numbers, taken over when somebody asks.
#[derive(Clone, Debug)]
pub(crate) struct KvMetrics {
    /// Seconds of a transfer.
    pub(crate) seconds: Histogram,
    sent: Direction,
    received: Direction,
    failures: Family<CodeLabels, Counter>,
    rejected: Family<ReasonLabels, Counter>,
    leases: Gauge,
    expired: Counter,
    redials: Counter,
    seen: Arc<Mutex<(ExporterStats, ImporterStats)>>,
}

#[derive(Clone, Debug)]
struct Direction {
    bytes: Counter,
    handoffs: Counter,
    connections: Gauge,
}

/// All metrics of an instance.
#[derive(Clone, Debug)]
pub(crate) struct InstanceMetrics {
    pub(crate) registry: Metrics,
    pub(crate) engine: EngineMetrics,
    pub(crate) kv: KvMetrics,
    errors: Family<ErrorLabels, Counter>,
    ready: Gauge,
}

const BLOCK_STATES: [&str; 4] = ["total", "used", "cached", "held"];
const SOURCES: [&str; 3] = ["local_compute", "external_kv_transfer", "local_cache_hit"];
const REASONS: [&str; 4] = ["stop", "length", "abort", "error"];

impl InstanceMetrics {
    pub(crate) fn new(model: &str) -> Self {
        let registry = Metrics::new();
        let kv = KvMetrics::new(&registry);
        Self {
            engine: EngineMetrics::new(&registry, model),
            kv,
            errors: registry.counters(
                "twinfer_request_errors",
                "Requests that ended with an error, by code and whose fault it was",
            ),
            ready: registry.gauge(
                "twinfer_ready",
                "1 while the instance answers /ready with 200",
            ),
            registry,
        }
    }

    /// An error that a client was told of.
    pub(crate) fn error(&self, error: &ApiError) {
        self.errors
            .get_or_create(&ErrorLabels {
                code: error.kind.code(),
                fault: error.kind.fault().as_str(),
            })
            .inc();
    }

    /// The body of `/metrics`.
    pub(crate) fn encode(&self, ready: bool) -> String {
        self.ready.set(ready.into());
        self.registry.encode()
    }
}

impl KvMetrics {
    fn new(registry: &Metrics) -> Self {
        let bytes = registry.counters(
            "twinfer_kv_handoff_bytes",
            "Bytes of KV handed over and verified",
        );
        let handoffs = registry.counters("twinfer_kv_handoffs", "KV handoffs that ended well");
        let connections = registry.gauges(
            "twinfer_kv_connections",
            "Open connections of the KV channel",
        );
        let direction = |direction| {
            let labels = DirectionLabels { direction };
            Direction {
                bytes: bytes.get_or_create(&labels).clone(),
                handoffs: handoffs.get_or_create(&labels).clone(),
                connections: connections.get_or_create(&labels).clone(),
            }
        };
        Self {
            seconds: registry.histogram(
                "twinfer_kv_handoff_seconds",
                "Time of a KV handoff at the decode instance",
                &SECONDS_TTFT,
            ),
            sent: direction("sent"),
            received: direction("received"),
            failures: registry.counters(
                "twinfer_kv_load_failures",
                "KV handoffs that failed at the decode instance, by error code",
            ),
            rejected: registry.counters(
                "twinfer_kv_connections_rejected",
                "Connections that the KV channel closed instead of serving them, by reason",
            ),
            leases: registry.gauge(
                "twinfer_kv_leases",
                "Prompts whose KV is kept for a decode instance",
            ),
            expired: registry.counter("twinfer_kv_leases_expired", "Leases that ended by time"),
            redials: registry.counter(
                "twinfer_kv_redials",
                "Idle connections that turned out dead and were replaced",
            ),
            seen: Arc::default(),
        }
    }

    /// Counts a fetch that did not end well.
    pub(crate) fn failure(&self, error: &ApiError) {
        self.failures
            .get_or_create(&CodeLabels {
                code: error.kind.code(),
            })
            .inc();
    }

    /// Takes over the connector's numbers.
    pub(crate) fn publish(&self, exporter: Option<ExporterStats>, importer: Option<ImporterStats>) {
        let mut seen = self.seen.lock();
        let since = |now: u64, before: u64| now.saturating_sub(before);
        let gauge = |gauge: &Gauge, now: u64| gauge.set(i64::try_from(now).unwrap_or(i64::MAX));
        if let Some(now) = exporter {
            let before = std::mem::replace(&mut seen.0, now);
            self.sent.bytes.inc_by(since(now.bytes, before.bytes));
            self.sent.handoffs.inc_by(since(now.pulls, before.pulls));
            gauge(&self.sent.connections, now.connections);
            gauge(&self.leases, now.leases);
            self.expired.inc_by(since(now.expired, before.expired));
            let (now, before) = (now.rejections, before.rejections);
            for (reason, now, before) in [
                ("protocol", now.protocol, before.protocol),
                ("version", now.version, before.version),
                ("key", now.key, before.key),
                ("silent", now.silent, before.silent),
                ("evicted", now.evicted, before.evicted),
                ("busy", now.busy, before.busy),
                ("mismatch", now.mismatch, before.mismatch),
            ] {
                self.rejected
                    .get_or_create(&ReasonLabels { reason })
                    .inc_by(since(now, before));
            }
        }
        if let Some(now) = importer {
            let before = std::mem::replace(&mut seen.1, now);
            self.received.bytes.inc_by(since(now.bytes, before.bytes));
            self.received
                .handoffs
                .inc_by(since(now.pulls, before.pulls));
            gauge(&self.received.connections, now.connections);
            self.redials.inc_by(since(now.redials, before.redials));
        }
    }
}

impl EngineMetrics {
    fn new(registry: &Metrics, model: &str) -> Self {
        let labels = EngineLabels {
            engine: "0",
            model_name: model.to_owned(),
        };
        let gauge = |name, help| registry.gauges(name, help).get_or_create(&labels).clone();
        let counter = |name, help| registry.counters(name, help).get_or_create(&labels).clone();
        let histogram = |name, help, make| {
            registry
                .histograms(name, help, make)
                .get_or_create(&labels)
                .clone()
        };
        let blocks = registry.gauges("twinfer_kv_blocks", "KV blocks by state");
        let by_source = registry.counters(
            "vllm:prompt_tokens_by_source",
            "Prompt tokens by where their KV came from",
        );
        let finished = registry.counters("vllm:request_success", "Requests that ended, by reason");
        let seconds_ttft = || Histogram::new(SECONDS_TTFT);
        let seconds_token = || Histogram::new(SECONDS_INTER_TOKEN);
        let seconds_request = || Histogram::new(SECONDS_REQUEST);
        let tokens = || Histogram::new(TOKENS);
        Self {
            running: gauge("vllm:num_requests_running", "Sequences that have KV blocks"),
            waiting: gauge(
                "vllm:num_requests_waiting",
                "Sequences that have no KV blocks yet",
            ),
            waiting_prefill_tokens: gauge(
                "twinfer_waiting_prefill_tokens",
                "Prompt tokens not computed yet, of waiting and running sequences",
            ),
            blocks: BLOCK_STATES.map(|state| blocks.get_or_create(&StateLabels { state }).clone()),
            prompt_tokens: counter("vllm:prompt_tokens", "Prompt tokens, from any source"),
            by_source: SOURCES.map(|source| {
                let model_name = model.to_owned();
                by_source
                    .get_or_create(&SourceLabels {
                        engine: "0",
                        model_name,
                        source,
                    })
                    .clone()
            }),
            generation_tokens: counter("vllm:generation_tokens", "Output tokens"),
            steps: counter("twinfer_steps", "Steps of the engine"),
            preemptions: counter(
                "vllm:num_preemptions",
                "Sequences that lost their KV blocks and start again",
            ),
            first_token: histogram(
                "vllm:time_to_first_token_seconds",
                "Time from a request's arrival to its first token",
                seconds_ttft,
            ),
            inter_token: histogram(
                "vllm:inter_token_latency_seconds",
                "Time between two tokens of a sequence",
                seconds_token,
            ),
            per_output_token: histogram(
                "vllm:request_time_per_output_token_seconds",
                "Mean time between two tokens of a finished sequence",
                seconds_token,
            ),
            request: histogram(
                "vllm:e2e_request_latency_seconds",
                "Time from a request's arrival to the end of a sequence",
                seconds_request,
            ),
            request_prompt: histogram(
                "vllm:request_prompt_tokens",
                "Prompt tokens of a sequence",
                tokens,
            ),
            request_output: histogram(
                "vllm:request_generation_tokens",
                "Output tokens of a sequence",
                tokens,
            ),
            finished: REASONS.map(|finished_reason| {
                let model_name = model.to_owned();
                finished
                    .get_or_create(&FinishLabels {
                        engine: "0",
                        model_name,
                        finished_reason,
                    })
                    .clone()
            }),
            cache_queries: counter(
                "vllm:prefix_cache_queries",
                "Prompt tokens that were looked for in the prefix cache",
            ),
            cache_hits: counter(
                "vllm:prefix_cache_hits",
                "Prompt tokens that were found in the prefix cache",
            ),
            drafts: Drafts::new(registry, &labels),
            ranks: RankMetrics::new(registry),
        }
    }

    pub(crate) fn first_token(&self, after: Duration) {
        self.first_token.observe(after.as_secs_f64());
    }

    /// `count` tokens that came together, `after` the ones before.
    pub(crate) fn next_tokens(&self, after: Duration, count: usize) {
        let each = after.as_secs_f64() / count.max(1) as f64;
        for _ in 0..count {
            self.inter_token.observe(each);
        }
    }

    /// A sequence ended; `decode` is the time since its first token.
    pub(crate) fn finished(
        &self,
        reason: &FinishReason,
        after: Duration,
        decode: Option<Duration>,
        tokens: u32,
        sources: PromptSources,
    ) {
        let index = match reason {
            FinishReason::Eos | FinishReason::StopToken(_) | FinishReason::StopText(_) => 0,
            FinishReason::Length => 1,
            FinishReason::Abort => 2,
            FinishReason::Error(_) => 3,
        };
        self.finished[index].inc();
        if index > 1 {
            return;
        }
        self.request.observe(after.as_secs_f64());
        self.request_output.observe(tokens.into());
        self.request_prompt
            .observe((sources.computed + sources.remote + sources.cached).into());
        if let Some(decode) = decode.filter(|_| tokens > 1) {
            self.per_output_token
                .observe(decode.as_secs_f64() / f64::from(tokens - 1));
        }
    }

    /// What a rank among others did since `old`.
    pub(crate) fn publish_rank(&self, rank: u32, old: &RankStats, new: &RankStats) {
        self.ranks.publish(rank, old, new);
    }

    /// Gauges of `new`, and what was counted since `old`.
    pub(crate) fn publish(&self, old: &EngineStats, new: &EngineStats) {
        self.running.set(new.load.running.into());
        self.waiting.set(new.load.waiting.into());
        self.waiting_prefill_tokens
            .set(i64::try_from(new.load.waiting_prefill_tokens).unwrap_or(i64::MAX));
        let KvBlockCounts {
            total,
            used,
            cached,
            held,
        } = new.load.kv_blocks;
        for (gauge, value) in self.blocks.iter().zip([total, used, cached, held]) {
            gauge.set(value.into());
        }
        let (before, after) = (&old.prompt_tokens, &new.prompt_tokens);
        let since = [
            after.computed.saturating_sub(before.computed),
            after.remote.saturating_sub(before.remote),
            after.cached.saturating_sub(before.cached),
        ];
        for (counter, tokens) in self.by_source.iter().zip(since) {
            counter.inc_by(tokens);
        }
        self.prompt_tokens.inc_by(since.iter().sum());
        self.generation_tokens
            .inc_by(new.output_tokens.saturating_sub(old.output_tokens));
        self.steps.inc_by(new.steps.saturating_sub(old.steps));
        self.preemptions
            .inc_by(new.preemptions.saturating_sub(old.preemptions));
        self.cache_queries
            .inc_by(new.cache_queries.saturating_sub(old.cache_queries));
        self.cache_hits
            .inc_by(new.cache_hits.saturating_sub(old.cache_hits));
        self.drafts.publish(&old.speculation, &new.speculation);
    }
}

impl RankMetrics {
    fn new(registry: &Metrics) -> Self {
        Self {
            steps: registry.counters(
                "twinfer_rank_steps",
                "Steps of a rank among others, by what it did in them; dummy: nothing but to take part",
            ),
            sent: registry.counters(
                "twinfer_rank_sent_bytes",
                "Bytes that a rank sent to others: rows for their experts, outputs of its own, weights of experts that moved",
            ),
            moves: registry.counters(
                "twinfer_expert_moves",
                "Seats of a rank that got another expert",
            ),
            plans: registry.counter(
                "twinfer_expert_plans",
                "Times that all ranks derived the experts' seats from their loads",
            ),
            layers: registry.counter(
                "twinfer_expert_layer_moves",
                "Layers whose experts changed their seats",
            ),
            balance: registry.gauges(
                "twinfer_expert_balance_permille",
                "Rows of the fullest rank over those of a mean one, in thousandths, in the worst layer, by the loads of the last plan",
            ),
        }
    }

    fn publish(&self, rank: u32, old: &RankStats, new: &RankStats) {
        for ((phase, new), (_, old)) in new.turns.named().into_iter().zip(old.turns.named()) {
            self.steps
                .get_or_create(&RankLabels { rank, phase })
                .inc_by(new.saturating_sub(old));
        }
        for (what, new, old) in [
            ("rows", new.sent.rows, old.sent.rows),
            ("outputs", new.sent.outputs, old.sent.outputs),
            ("weights", new.sent.weights, old.sent.weights),
        ] {
            self.sent
                .get_or_create(&SentLabels { rank, what })
                .inc_by(new.saturating_sub(old));
        }
        let (new, old) = (new.moves, old.moves);
        self.moves
            .get_or_create(&RankLabel { rank })
            .inc_by(new.seats.saturating_sub(old.seats));
        if rank > 0 {
            return;
        }
        // The rest is the same on all ranks.
        self.plans.inc_by(new.plans.saturating_sub(old.plans));
        self.layers.inc_by(new.layers.saturating_sub(old.layers));
        for (placement, balance) in [("before", new.balance_before), ("after", new.balance_after)] {
            self.balance
                .get_or_create(&BalanceLabels { placement })
                .set((balance * 1000.0).round() as i64);
        }
    }
}

impl Drafts {
    fn new(registry: &Metrics, labels: &EngineLabels) -> Self {
        let counter = |name, help| registry.counters(name, help).get_or_create(labels).clone();
        let per_place = |name, help| {
            let family = registry.counters(name, help);
            std::array::from_fn(|place| {
                let EngineLabels { engine, model_name } = labels.clone();
                let position = u32::try_from(place).unwrap_or(u32::MAX);
                family
                    .get_or_create(&PlaceLabels {
                        engine,
                        model_name,
                        position,
                    })
                    .clone()
            })
        };
        Self {
            rounds: counter(
                "vllm:spec_decode_num_drafts",
                "Verifications of proposed tokens",
            ),
            drafted: counter("vllm:spec_decode_num_draft_tokens", "Tokens proposed"),
            accepted: counter(
                "vllm:spec_decode_num_accepted_tokens",
                "Proposed tokens that were delivered",
            ),
            drafted_per_place: per_place(
                "twinfer_spec_decode_num_draft_tokens_per_pos",
                "Tokens proposed, by place",
            ),
            accepted_per_place: per_place(
                "vllm:spec_decode_num_accepted_tokens_per_pos",
                "Proposed tokens that were delivered, by place",
            ),
        }
    }

    fn publish(&self, old: &SpeculationStats, new: &SpeculationStats) {
        self.rounds.inc_by(new.rounds.saturating_sub(old.rounds));
        for (all, per_place, old, new) in [
            (
                &self.drafted,
                &self.drafted_per_place,
                old.drafted,
                new.drafted,
            ),
            (
                &self.accepted,
                &self.accepted_per_place,
                old.accepted,
                new.accepted,
            ),
        ] {
            for ((counter, old), new) in per_place.iter().zip(old).zip(new) {
                let since = new.saturating_sub(old);
                counter.inc_by(since);
                all.inc_by(since);
            }
        }
    }
}
