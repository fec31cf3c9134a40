//! The router's metrics. Labels have a fixed set of values: instances as configured, routes of the
//! table, statuses, classes and reasons.

use crate::instances::InstanceSpec;
use prometheus_client::encoding::EncodeLabelSet;
use twinfer_http::{Counter, Family, Gauge, Histogram, Metrics, SECONDS_TTFT};
use twinfer_protocol::ErrorKind;

/// Why a request took its way.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Decision {
    /// A prefill and a decode instance, KV handed over.
    Pair,
    /// Prefill gave no handle: decode computed the prompt again.
    NoHandle,
    /// Several prompts in one request: a handle covers one.
    SeveralPrompts,
    /// A colocated instance: there is no pair.
    Both,
    /// A decode instance alone: no prefill instance is up.
    WithoutPrefill,
    /// Nothing could serve it.
    None,
}

/// Parts of the time to the first byte.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Leg {
    Prefill,
    Decode,
    Total,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct InstanceLabels {
    instance: String,
    role: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct RequestLabels {
    route: &'static str,
    status: u16,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ErrorLabels {
    code: &'static str,
    fault: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct DecisionLabels {
    reason: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct LegLabels {
    leg: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct OutcomeLabels {
    outcome: &'static str,
}

/// Handles of all metrics.
pub(crate) struct RouterMetrics {
    metrics: Metrics,
    pub(crate) requests_in_flight: Gauge,
    /// Set when the metrics are read.
    pub(crate) requests_waiting: Gauge,
    in_flight: Family<InstanceLabels, Gauge>,
    up: Family<InstanceLabels, Gauge>,
    requests: Family<RequestLabels, Counter>,
    errors: Family<ErrorLabels, Counter>,
    decisions: Family<DecisionLabels, Counter>,
    retries: Family<LegLabels, Counter>,
    releases: Family<OutcomeLabels, Counter>,
    resumes: Family<OutcomeLabels, Counter>,
    first_byte: Family<LegLabels, Histogram>,
}

impl Decision {
    pub(crate) const fn as_str(self) -> &'static str {
        match self {
            Self::Pair => "pair",
            Self::NoHandle => "no_handle",
            Self::SeveralPrompts => "several_prompts",
            Self::Both => "both",
            Self::WithoutPrefill => "without_prefill",
            Self::None => "none",
        }
    }
}

impl Leg {
    const fn as_str(self) -> &'static str {
        match self {
            Self::Prefill => "prefill",
            Self::Decode => "decode",
            Self::Total => "total",
        }
    }
}

impl RouterMetrics {
    pub(crate) fn new() -> Self {
        let metrics = Metrics::new();
        Self {
            requests_in_flight: metrics
                .gauge("twinfer_router_requests_in_flight", "Requests whose answer has not ended"),
            requests_waiting: metrics
                .gauge("twinfer_router_requests_waiting", "Requests that wait for one in flight to end"),
            in_flight: metrics
                .gauges("twinfer_router_in_flight", "Requests in flight at an instance, by its role"),
            up: metrics.gauges("twinfer_router_instance_up", "1 while an instance is used"),
            requests: metrics.counters("twinfer_router_requests_total", "Answers by route and status"),
            errors: metrics.counters(
                "twinfer_router_errors_total",
                "Errors that the router made or passed on as its own, in answers and in streams, by code and whose fault it was",
            ),
            decisions: metrics
                .counters("twinfer_router_pd_decision_total", "Ways that requests took, by reason"),
            retries: metrics
                .counters("twinfer_router_retries_total", "Legs sent to a further instance, by leg"),
            releases: metrics.counters(
                "twinfer_router_kv_releases_total",
                "Handles given back because decode did not fetch, by outcome",
            ),
            resumes: metrics.counters(
                "twinfer_router_resumes_total",
                "Streams that broke off and went on at another instance, by outcome; no_room: streams that could not",
            ),
            first_byte: metrics.histograms(
                "twinfer_router_time_to_first_byte_seconds",
                "Time to the first byte of a stream, whole and decode's part; prefill's part of every request",
                || Histogram::new(SECONDS_TTFT),
            ),
            metrics,
        }
    }

    pub(crate) fn encode(&self) -> String {
        self.metrics.encode()
    }

    /// The gauges of an instance: in flight, and up.
    pub(crate) fn of_instance(&self, spec: &InstanceSpec) -> (Gauge, Gauge) {
        // By address: it does not change when the instance tells its name.
        let labels = InstanceLabels {
            instance: spec.endpoint.host_port().to_string(),
            role: spec.role.as_str(),
        };
        (
            self.in_flight.get_or_create_owned(&labels),
            self.up.get_or_create_owned(&labels),
        )
    }

    /// Its series end.
    pub(crate) fn forget_instance(&self, spec: &InstanceSpec) {
        let labels = InstanceLabels {
            instance: spec.endpoint.host_port().to_string(),
            role: spec.role.as_str(),
        };
        self.in_flight.remove(&labels);
        self.up.remove(&labels);
    }

    pub(crate) fn answered(&self, route: &'static str, status: u16) {
        self.requests
            .get_or_create(&RequestLabels { route, status })
            .inc();
    }

    pub(crate) fn error(&self, kind: ErrorKind) {
        self.errors
            .get_or_create(&ErrorLabels {
                code: kind.code(),
                fault: kind.fault().as_str(),
            })
            .inc();
    }

    pub(crate) fn decided(&self, reason: Decision) {
        self.decisions
            .get_or_create(&DecisionLabels {
                reason: reason.as_str(),
            })
            .inc();
    }

    pub(crate) fn retried(&self, leg: Leg) {
        self.retries
            .get_or_create(&LegLabels { leg: leg.as_str() })
            .inc();
    }

    pub(crate) fn released(&self, outcome: &'static str) {
        self.releases
            .get_or_create(&OutcomeLabels { outcome })
            .inc();
    }

    /// 1 while the instances file makes sense.
    pub(crate) fn file_good(&self) -> Gauge {
        self.metrics.gauge(
            "twinfer_router_instances_file_good",
            "1 while the instances file can be read and makes sense; else what it said before holds",
        )
    }

    pub(crate) fn resumed(&self, outcome: &'static str) {
        self.resumes.get_or_create(&OutcomeLabels { outcome }).inc();
    }

    pub(crate) fn first_byte(&self, leg: Leg, seconds: f64) {
        self.first_byte
            .get_or_create(&LegLabels { leg: leg.as_str() })
            .observe(seconds);
    }
}
