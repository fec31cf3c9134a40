//! One request: executes what the state machine says. Dropping it at any point is the client's leave.

use super::legs::{Answer, Started};
use super::pull::{Do, Event, Failure, PullFlow, Spare, Way};
use crate::answer::{LegError, Refusal, RouterBody};
use crate::body::JsonObject;
use crate::headers::{RequestId, mark_instances, strip_hop_by_hop};
use crate::instances::Times;
use crate::metrics::{Decision, Leg, RouterMetrics};
use crate::policy::Tried;
use crate::registry::{InstanceId, LoadGuard, Pools, Registry, Signal};
use crate::relay::Relay;
use crate::release::{Handle, Releaser};
use crate::upstream::Upstream;
use http::{HeaderMap, Response};
use http_body_util::{Either, Full};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use tokio::time::Instant;
use twinfer_config::WithoutPrefill;
use twinfer_http::RoomShare;
use twinfer_protocol::{ApiError, ErrorKind};

/// What all requests share.
pub(crate) struct Shared {
    pub(crate) registry: Arc<Registry>,
    pub(crate) upstream: Upstream,
    pub(crate) metrics: Arc<RouterMetrics>,
    pub(crate) releaser: Releaser,
    pub(crate) times: Times,
    pub(crate) max_attempts: u32,
    pub(crate) without_prefill: WithoutPrefill,
    pub(crate) max_inflight: u32,
    pub(crate) in_flight: AtomicU32,
}

/// One request within the cap, until dropped.
pub(crate) struct Permit(Arc<Shared>);

/// What the client asked.
pub(crate) struct Ask {
    /// Path at the instances.
    pub(crate) path: &'static str,
    pub(crate) object: JsonObject,
    /// The body's share of what all bodies may take.
    pub(crate) _room: RoomShare,
    pub(crate) model: String,
    /// Headers of the client.
    pub(crate) headers: HeaderMap,
    /// May it go through a pair, or is it for any instance (tokenize)?
    pub(crate) generates: bool,
}

/// One request.
pub(crate) struct Exchange {
    pub(super) shared: Arc<Shared>,
    pub(super) id: RequestId,
    flow: PullFlow,
    pub(super) handle: Option<Handle>,
    pub(super) prefill: Option<LoadGuard>,
    pub(super) decode: Option<LoadGuard>,
    /// Who computed the prompt, for the answer's header.
    prefill_name: Option<String>,
    decision: Decision,
    kept: Option<LegError>,
    start: Instant,
    broken: bool,
    _permit: Permit,
}

impl Permit {
    /// # Errors
    /// [`ErrorKind::Overloaded`] when the cap is reached.
    pub(crate) fn take(shared: &Arc<Shared>) -> Result<Self, ApiError> {
        let before = shared.in_flight.fetch_add(1, Ordering::AcqRel);
        shared.metrics.requests_in_flight.inc();
        let permit = Self(Arc::clone(shared));
        if before >= shared.max_inflight {
            let message = format!(
                "{} requests are in flight; no more are taken",
                shared.max_inflight
            );
            return Err(ApiError::new(ErrorKind::Overloaded, message));
        }
        Ok(permit)
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        self.0.in_flight.fetch_sub(1, Ordering::AcqRel);
        self.0.metrics.requests_in_flight.dec();
    }
}

impl Exchange {
    /// Serves a request.
    pub(crate) async fn run(
        shared: Arc<Shared>,
        id: RequestId,
        ask: Ask,
        permit: Permit,
    ) -> Response<RouterBody> {
        let table = shared.registry.table();
        let Some(pools) = table.models.get(&ask.model) else {
            return Refusal::Own(shared.registry.unknown_model(&ask.model)).into_response();
        };
        let (way, decision) = shared.way(&ask, pools);
        let spare = if way == Way::Whole || shared.whole(&ask, pools).is_empty() {
            Spare::Nobody
        } else if pools.both.is_empty() {
            Spare::Decode
        } else {
            Spare::Both
        };
        let (flow, first) = PullFlow::start(way, shared.max_attempts, spare);
        let exchange = Self {
            shared,
            id,
            flow,
            handle: None,
            prefill: None,
            decode: None,
            prefill_name: None,
            decision,
            kept: None,
            start: Instant::now(),
            broken: false,
            _permit: permit,
        };
        exchange.drive(ask, first.then).await
    }

    async fn drive(mut self, ask: Ask, first: Do) -> Response<RouterBody> {
        let mut next = first;
        loop {
            next = match next {
                Do::PickPair => {
                    // The pair before is given back first: its load must not count against it.
                    (self.prefill, self.decode) = (None, None);
                    let picked = self.pools(&ask, |registry, pools, tried| {
                        registry.pick_pair(pools, tried)
                    });
                    match picked {
                        Some((prefill, decode)) => {
                            let event = Event::PickedPair {
                                prefill: prefill.id(),
                                decode: decode.id(),
                            };
                            (self.prefill, self.decode) = (Some(prefill), Some(decode));
                            self.feed(event)
                        }
                        None => self.feed(Event::NoneLeft),
                    }
                }
                Do::PickDecode { prefill } => {
                    self.decode = None;
                    let picked = self.pools(&ask, |registry, pools, tried| {
                        registry.pick_decode(pools, prefill, tried)
                    });
                    self.picked_one(picked)
                }
                Do::PickWhole => {
                    (self.prefill, self.decode) = (None, None);
                    if matches!(self.decision, Decision::Pair | Decision::NoHandle) {
                        // The pairs have failed.
                        self.prefill_name = None;
                        let both = self.pools(&ask, |_, pools, _| Some(!pools.both.is_empty()));
                        self.decision = match both {
                            Some(true) => Decision::Both,
                            _ => Decision::WithoutPrefill,
                        };
                    }
                    let shared = Arc::clone(&self.shared);
                    let picked = self.pools(&ask, |registry, pools, tried| {
                        registry.pick_one(&shared.whole(&ask, pools), &tried.decode)
                    });
                    self.picked_one(picked)
                }
                Do::Prefill(to) => {
                    let event = match self.prefill_leg(&ask, to).await {
                        Ok(handle) => {
                            self.prefill_name = self.shared.registry.get(to).map(|i| i.name());
                            self.handle = handle;
                            if self.handle.is_none() {
                                self.decision = Decision::NoHandle;
                            }
                            Event::PrefillDone {
                                handle: self.handle.is_some(),
                            }
                        }
                        Err(error) => Event::PrefillFailed(self.keep(to, Leg::Prefill, error)),
                    };
                    self.feed(event)
                }
                Do::Decode { to, with_handle } => {
                    match self.decode_leg(&ask, to, with_handle).await {
                        Ok(started) => {
                            self.feed(Event::DecodeStarted);
                            return self.answer(started, ask.generates);
                        }
                        Err(error) => {
                            let failure = self.keep(to, Leg::Decode, error);
                            self.feed(Event::DecodeFailed(failure))
                        }
                    }
                }
                Do::Refuse | Do::Relay | Do::BreakOff | Do::Over => return self.refuse(&ask),
            };
        }
    }

    /// Tells the state machine what happened, and releases what it says.
    fn feed(&mut self, event: Event) -> Do {
        let step = self.flow.on(event);
        if step.release
            && let Some(handle) = self.handle.take()
        {
            self.shared.releaser.release(&handle);
        }
        step.then
    }

    fn pools<T>(
        &self,
        ask: &Ask,
        pick: impl FnOnce(&Arc<Registry>, &Pools, &Tried) -> Option<T>,
    ) -> Option<T> {
        let table = self.shared.registry.table();
        let pools = table.models.get(&ask.model)?;
        pick(&self.shared.registry, pools, self.flow.tried())
    }

    fn picked_one(&mut self, picked: Option<LoadGuard>) -> Do {
        match picked {
            Some(guard) => {
                let id = guard.id();
                self.decode = Some(guard);
                self.feed(Event::PickedOne(id))
            }
            None => self.feed(Event::NoneLeft),
        }
    }

    /// Keeps the error for the client: the latest, but "no room" rather than "broken", because it tells
    /// the client what to do.
    fn keep(&mut self, instance: InstanceId, leg: Leg, error: LegError) -> Failure {
        let failure = error.failure;
        if failure != Failure::Final {
            self.shared.metrics.retried(leg);
            let name = self
                .shared
                .registry
                .get(instance)
                .map(|i| i.name())
                .unwrap_or_default();
            tracing::warn!(
                request = self.id.as_str(),
                client_request = self.id.client(),
                instance = name,
                error = error.refusal.summary(),
                "leg failed"
            );
        }
        let busy = self
            .kept
            .as_ref()
            .is_some_and(|kept| kept.failure == Failure::Busy);
        if !busy || !matches!(failure, Failure::Broke | Failure::Unreachable) {
            self.kept = Some(error);
        }
        failure
    }

    fn answer(mut self, started: Started, generates: bool) -> Response<RouterBody> {
        // The prompt's KV is fetched: prefill has no more to do with this request.
        self.prefill = None;
        let metrics = &self.shared.metrics;
        if generates {
            metrics.decided(self.decision);
        }
        if generates && matches!(started.body, Answer::Stream(_)) {
            metrics.first_byte(Leg::Decode, started.seconds);
            metrics.first_byte(Leg::Total, self.start.elapsed().as_secs_f64());
        }
        let decode = self.decode_name();
        tracing::debug!(
            request = self.id.as_str(),
            client_request = self.id.client(),
            prefill = self.prefill_name,
            decode,
            reason = self.decision.as_str(),
            "answering"
        );
        let mut headers = started.headers;
        strip_hop_by_hop(&mut headers);
        self.id.mark(&mut headers);
        mark_instances(
            &mut headers,
            self.prefill_name.as_deref(),
            Some(&decode),
            self.decision.as_str(),
        );
        let status = started.status;
        let body = match started.body {
            Answer::Whole(bytes) => {
                self.finished();
                Either::Left(Full::new(bytes))
            }
            Answer::Stream(begun) => {
                let idle = self.shared.times.idle;
                Either::Right(Relay::new(begun.start, begun.rest, idle, self))
            }
        };
        let mut response = Response::new(body);
        *response.status_mut() = status;
        *response.headers_mut() = headers;
        response
    }

    fn refuse(mut self, ask: &Ask) -> Response<RouterBody> {
        let refusal = match self.kept.take() {
            Some(error) => error.refusal,
            None => Refusal::Own(self.shared.registry.nothing_up(&ask.model)),
        };
        if ask.generates {
            self.shared.metrics.decided(if self.flow.sent_anything() {
                self.decision
            } else {
                Decision::None
            });
        }
        if let Some(kind) = refusal.kind() {
            self.shared.metrics.error(kind);
        }
        let mut response = refusal.into_response();
        self.id.mark(response.headers_mut());
        response
    }

    /// The decode instance's name.
    pub(crate) fn decode_name(&self) -> String {
        let id = self.decode.as_ref().map(LoadGuard::id);
        id.and_then(|id| self.shared.registry.get(id))
            .map(|i| i.name())
            .unwrap_or_default()
    }

    /// The client's answer is whole.
    pub(crate) fn finished(&mut self) {
        self.feed(Event::StreamEnded);
        self.decode = None;
    }

    /// Decode broke off after its first byte.
    pub(crate) fn broke(&mut self, error: &ApiError) {
        self.feed(Event::StreamBroke);
        self.broken = true;
        self.note_error(error.kind);
        if let Some(decode) = &self.decode {
            self.shared
                .registry
                .signal(decode.id(), Signal::Broke(error.message.clone()));
        }
        tracing::warn!(request = self.id.as_str(), client_request = self.id.client(), %error, "stream broke off");
        self.decode = None;
    }

    /// Counts an error that a stream carries.
    pub(crate) fn note_error(&self, kind: ErrorKind) {
        self.shared.metrics.error(kind);
    }

    pub(crate) fn is_broken(&self) -> bool {
        self.broken
    }
}

impl Drop for Exchange {
    fn drop(&mut self) {
        self.feed(Event::ClientGone);
    }
}

impl Shared {
    /// How a request is served by what is up now, and why.
    fn way(&self, ask: &Ask, pools: &Pools) -> (Way, Decision) {
        if !ask.generates {
            return (Way::Whole, Decision::Both);
        }
        if pools.has_pair() {
            return if ask.object.has_several_prompts() {
                (Way::Whole, Decision::SeveralPrompts)
            } else {
                (Way::Pair, Decision::Pair)
            };
        }
        if pools.both.is_empty() {
            (Way::Whole, Decision::WithoutPrefill)
        } else {
            (Way::Whole, Decision::Both)
        }
    }

    /// Instances that may serve this request alone.
    fn whole(&self, ask: &Ask, pools: &Pools) -> Vec<InstanceId> {
        if !ask.generates {
            return pools.any.clone();
        }
        if !pools.both.is_empty() {
            return pools.both.clone();
        }
        let alone = self.without_prefill == WithoutPrefill::Decode
            || (pools.has_pair() && ask.object.has_several_prompts());
        if alone {
            pools.decode.clone()
        } else {
            Vec::new()
        }
    }
}
