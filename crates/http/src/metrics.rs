use parking_lot::RwLock;
use prometheus_client::encoding::prometheus_text::encode;
use prometheus_client::encoding::{EncodeLabelSet, EncodeMetric};
use prometheus_client::metrics::TypedMetric;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::Registry;
use std::fmt;
use std::hash::Hash;
use std::sync::Arc;

/// Content type of [`Metrics::encode`]: Prometheus' text format 0.0.4.
pub const METRICS_CONTENT_TYPE: &str = "text/plain; version=0.0.4; charset=utf-8";
/// Buckets of a time to first token, in seconds (those of vLLM).
pub const SECONDS_TTFT: [f64; 21] = [
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
    20.0, 40.0, 80.0, 160.0, 640.0,
];
/// Buckets of a time between two tokens, in seconds (those of vLLM).
pub const SECONDS_INTER_TOKEN: [f64; 18] = [
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0,
    40.0,
];
/// Buckets of the time of a whole request, in seconds (those of vLLM).
pub const SECONDS_REQUEST: [f64; 21] = [
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0,
    480.0, 960.0, 1920.0, 7680.0,
];
/// Buckets of a number of tokens.
pub const TOKENS: [f64; 16] = [
    1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5,
];

/// The metrics of a process. Clones are handles of the same registry; a metric registered once is
/// counted up by its own handle, without a lock.
#[derive(Clone, Default)]
pub struct Metrics(Arc<RwLock<Registry>>);

impl Metrics {
    /// An empty registry.
    pub fn new() -> Self {
        Self::default()
    }

    /// A counter; `_total` is added to the name in the output, so it may be left out here.
    pub fn counter(&self, name: &str, help: &str) -> Counter {
        let counter = Counter::default();
        self.register(
            name.strip_suffix("_total").unwrap_or(name),
            help,
            counter.clone(),
        );
        counter
    }

    /// A gauge.
    pub fn gauge(&self, name: &str, help: &str) -> Gauge {
        let gauge = Gauge::default();
        self.register(name, help, gauge.clone());
        gauge
    }

    /// A histogram with these upper bounds.
    pub fn histogram(&self, name: &str, help: &str, buckets: &[f64]) -> Histogram {
        let histogram = Histogram::new(buckets.iter().copied());
        self.register(name, help, histogram.clone());
        histogram
    }

    /// Counters by labels. Labels have few values: never a path, a model name from a request or an id.
    pub fn counters<L>(&self, name: &str, help: &str) -> Family<L, Counter>
    where
        L: Clone + fmt::Debug + Eq + Hash + EncodeLabelSet + Send + Sync + 'static,
    {
        self.family(
            name.strip_suffix("_total").unwrap_or(name),
            help,
            Family::default(),
        )
    }

    /// Gauges by labels.
    pub fn gauges<L>(&self, name: &str, help: &str) -> Family<L, Gauge>
    where
        L: Clone + fmt::Debug + Eq + Hash + EncodeLabelSet + Send + Sync + 'static,
    {
        self.family(name, help, Family::default())
    }

    /// Histograms by labels; `make` makes the one for a new set of labels.
    pub fn histograms<L>(
        &self,
        name: &str,
        help: &str,
        make: fn() -> Histogram,
    ) -> Family<L, Histogram>
    where
        L: Clone + fmt::Debug + Eq + Hash + EncodeLabelSet + Send + Sync + 'static,
    {
        self.family(name, help, Family::new_with_constructor(make))
    }

    /// Any metric of prometheus-client.
    pub fn register(
        &self,
        name: &str,
        help: &str,
        metric: impl EncodeMetric + fmt::Debug + Send + Sync + 'static,
    ) {
        self.0
            .write()
            .register(name, help.trim_end_matches('.'), metric);
    }

    /// The body of `/metrics`, of type [`METRICS_CONTENT_TYPE`].
    pub fn encode(&self) -> String {
        let mut out = String::with_capacity(4096);
        // Writing to a string does not fail.
        let _ = encode(&mut out, &self.0.read());
        out
    }

    fn family<L, M, C>(&self, name: &str, help: &str, family: Family<L, M, C>) -> Family<L, M, C>
    where
        L: Clone + fmt::Debug + Eq + Hash + EncodeLabelSet + Send + Sync + 'static,
        M: EncodeMetric + TypedMetric + fmt::Debug + Send + Sync + 'static,
        C: Clone + prometheus_client::metrics::family::MetricConstructor<M> + Send + Sync + 'static,
        Family<L, M, C>: EncodeMetric + fmt::Debug,
    {
        self.register(name, help, family.clone());
        family
    }
}

impl fmt::Debug for Metrics {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Metrics").finish_non_exhaustive()
    }
}
