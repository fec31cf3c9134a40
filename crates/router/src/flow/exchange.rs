//! One request: executes what the state machine says. Dropping it at any point is the client's leave.

use super::legs::{Answer, Begun, Started};
use super::metaserver::Metaserver;
use super::pull::{self, Do, Event, Failure, PullFlow, Spare, Way};
use super::resume::{KeptBytes, KeptRoom, Resumable};
use super::together::Begin;
use crate::access::{Access, Outcome};
use crate::answer::{LegError, Refusal, RouterBody};
use crate::body::JsonObject;
use crate::gate::{Client, Gate, Inside, Refused};
use crate::headers::{RequestId, mark_instances, strip_hop_by_hop};
use crate::instances::Times;
use crate::metrics::{Decision, Leg, RouterMetrics};
use crate::policy::{Wanted, Work};
use crate::registry::{InstanceId, LoadGuard, Pools, Registry, Signal};
use crate::relay::{Relay, Start};
use crate::release::{Handle, Releaser};
use crate::upstream::Upstream;
use http::{HeaderMap, Response};
use http_body_util::{Either, Full};
use std::sync::Arc;
use tokio::time::Instant;
use tokio_util::sync::WaitForCancellationFutureOwned;
use twinfer_config::{KvConnector, WithoutPrefill};
use twinfer_http::RoomShare;
use twinfer_protocol::{ApiError, ErrorKind, Fingerprint};

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
    pub(crate) gate: Arc<Gate>,
    /// Times that a stream may go on elsewhere.
    pub(crate) max_resumes: u32,
    pub(crate) kept_bytes: KeptBytes,
    /// Of instances that are not ours.
    pub(crate) kv_connector: KvConnector,
    pub(crate) bootstrap_port: u16,
    pub(crate) metaserver: Metaserver,
}

/// One request within the cap, until dropped.
pub(crate) struct Permit {
    shared: Arc<Shared>,
    _inside: Inside,
}

/// What the client asked.
pub(crate) struct Ask {
    /// Path at the instances.
    pub(crate) path: &'static str,
    pub(crate) object: JsonObject,
    /// The body's share of what all bodies may take.
    pub(crate) room: Option<RoomShare>,
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
    pub(super) prefill_name: Option<String>,
    decision: Decision,
    pub(super) work: Work,
    /// Of a stream that has begun and can go on elsewhere.
    resumable: Option<Box<Resumable>>,
    /// `twinfer_resume` of the legs that go on with a stream.
    pub(super) resume_field: Option<String>,
    /// Of the only instances that may go on with it.
    fingerprint: Option<Fingerprint>,
    pub(super) kept: Option<LegError>,
    /// Some instance has been asked.
    pub(super) asked: bool,
    start: Instant,
    broken: bool,
    access: Access,
    /// The client has all of its answer.
    whole: bool,
    _permit: Permit,
}

impl Permit {
    /// Waits for its turn, if it must.
    ///
    /// # Errors
    /// [`ErrorKind::Overloaded`] when the caps are reached, or its turn did not come in time.
    pub(crate) async fn take(shared: &Arc<Shared>, client: Client) -> Result<Self, ApiError> {
        let inside = shared.gate.enter(client).await.map_err(|refused| {
            let most = shared.max_inflight;
            let message = match refused {
                Refused::Full => format!("{most} requests are in flight; no more are taken"),
                Refused::Waited => {
                    format!("{most} requests are in flight, and none ended while this one waited")
                }
            };
            ApiError::new(ErrorKind::Overloaded, message)
        })?;
        shared.metrics.requests_in_flight.inc();
        Ok(Self {
            shared: Arc::clone(shared),
            _inside: inside,
        })
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        self.shared.metrics.requests_in_flight.dec();
    }
}

impl Exchange {
    /// Serves a request.
    pub(crate) async fn run(
        shared: Arc<Shared>,
        id: RequestId,
        ask: Ask,
        permit: Permit,
        mut access: Access,
    ) -> Response<RouterBody> {
        let table = shared.registry.table();
        let Some(pools) = table.models.get(&ask.model) else {
            let error = shared.registry.unknown_model(&ask.model);
            let response = Refusal::Own(error).into_response();
            access.answered(response.status());
            access.over(&id, None, "", Decision::None.as_str(), Outcome::Error);
            return response;
        };
        let (way, decision) = shared.way(&ask, pools);
        let spare = shared.spare(&ask, pools, way);
        let resumes = match ask.is_resumable() {
            true => shared.max_resumes,
            false => 0,
        };
        let work = ask.object.work(shared.registry.wants_prefixes());
        let (flow, first) = PullFlow::start(way, shared.max_attempts, spare, resumes);
        let exchange = Self {
            shared,
            id,
            flow,
            handle: None,
            prefill: None,
            decode: None,
            prefill_name: None,
            decision,
            work,
            resumable: None,
            resume_field: None,
            fingerprint: None,
            kept: None,
            asked: false,
            start: Instant::now(),
            broken: false,
            access,
            whole: false,
            _permit: permit,
        };
        exchange.drive(ask, first.then).await
    }

    async fn drive(mut self, ask: Ask, first: Do) -> Response<RouterBody> {
        let started = match self.shared.together(&ask, self.decision) {
            Some(begin) => self.together(&ask, begin).await,
            None => self.advance(&ask, first).await,
        };
        match started {
            Some(started) => self.answer(started, ask),
            None => self.refuse(&ask),
        }
    }

    /// May the stream be kept for another instance?
    pub(super) fn keeps(&self, ask: &Ask) -> bool {
        self.flow.may_resume() && ask.is_resumable()
    }

    /// Can it go on if it breaks off now?
    pub(crate) fn can_resume(&self) -> bool {
        let whole = self.resumable.as_ref().is_some_and(|kept| kept.is_whole());
        whole && self.flow.may_resume()
    }

    /// What is kept of the stream.
    pub(crate) fn resumable(&mut self) -> Option<&mut Resumable> {
        self.resumable.as_deref_mut()
    }

    /// The stream has broken off: goes on with it at another instance. Comes back with what has begun there,
    /// or with nothing: then the client gets `error`.
    pub(crate) async fn resume(mut self, error: ApiError) -> (Self, Option<Box<Begun>>) {
        self.note_broken(&error);
        let Some(kept) = self.resumable.take() else {
            self.feed(Event::StreamBroke(None));
            return (self, None);
        };
        let way = self.pools(&kept.ask, &kept.fingerprint);
        let resume = way.map(|pools| {
            let (way, _) = self.shared.way(&kept.ask, &pools);
            let spare = self.shared.spare(&kept.ask, &pools, way);
            pull::Resume { way, spare }
        });
        let next = self.feed(Event::StreamBroke(resume));
        self.handle = None;
        self.resume_field = Some(kept.field());
        self.fingerprint = Some(kept.fingerprint.clone());
        let started = self.advance(&kept.ask, next).await;
        self.resumable = Some(kept);
        self.prefill = None;
        let begun = match started.map(|started| started.body) {
            Some(Answer::Stream(begun)) => Some(begun),
            _ => None,
        };
        let outcome = if begun.is_some() { "done" } else { "failed" };
        self.shared.metrics.resumed(outcome);
        if begun.is_some() {
            tracing::info!(
                request = self.id.as_str(),
                client_request = self.id.client(),
                prefill = self.prefill_name,
                decode = self.decode_name(),
                "stream goes on"
            );
        } else {
            self.decode = None;
            self.broken = true;
        }
        (self, begun)
    }

    /// Runs the state machine until an answer has begun, or there will be none.
    async fn advance(&mut self, ask: &Ask, first: Do) -> Option<Started> {
        let mut next = first;
        loop {
            next = match next {
                Do::PickPair => {
                    // The pair before is given back first: its load must not count against it.
                    (self.prefill, self.decode) = (None, None);
                    let picked = self.pick(ask, |registry, pools, wanted| {
                        registry.pick_pair(pools, wanted)
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
                    let picked = self.pick(ask, |registry, pools, wanted| {
                        registry.pick_decode(pools, prefill, wanted)
                    });
                    self.picked_one(picked)
                }
                Do::PickWhole => {
                    (self.prefill, self.decode) = (None, None);
                    if matches!(self.decision, Decision::Pair | Decision::NoHandle) {
                        // The pairs have failed.
                        self.prefill_name = None;
                        let both = self.pick(ask, |_, pools, _| Some(!pools.both.is_empty()));
                        self.decision = match both {
                            Some(true) => Decision::Both,
                            _ => Decision::WithoutPrefill,
                        };
                    }
                    let shared = Arc::clone(&self.shared);
                    let picked = self.pick(ask, |registry, pools, wanted| {
                        registry.pick_one(&shared.whole(ask, pools), wanted)
                    });
                    self.picked_one(picked)
                }
                Do::Prefill(to) => {
                    let event = match self.prefill_leg(ask, to).await {
                        Ok(handle) => {
                            self.prefill_name = self.shared.registry.get(to).map(|i| i.name());
                            self.handle = handle;
                            if let Some(guard) = &mut self.prefill {
                                guard.prefilled();
                            }
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
                    match self.decode_leg(ask, to, with_handle).await {
                        Ok(started) => {
                            self.feed(Event::DecodeStarted);
                            return Some(started);
                        }
                        Err(error) => {
                            let failure = self.keep(to, Leg::Decode, error);
                            self.feed(Event::DecodeFailed(failure))
                        }
                    }
                }
                Do::Refuse | Do::Relay | Do::BreakOff | Do::Over => return None,
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

    fn pick<T>(
        &self,
        ask: &Ask,
        pick: impl FnOnce(&Arc<Registry>, &Pools, Wanted<'_>) -> Option<T>,
    ) -> Option<T> {
        let registry = &self.shared.registry;
        let wanted = Wanted {
            tried: self.flow.tried(),
            work: &self.work,
            random: self.id.random(),
        };
        if let Some(fingerprint) = &self.fingerprint {
            let pools = self.pools(ask, fingerprint)?;
            return pick(registry, &pools, wanted);
        }
        let table = registry.table();
        pick(registry, table.models.get(&ask.model)?, wanted)
    }

    /// What can be used now of instances with this fingerprint.
    fn pools(&self, ask: &Ask, fingerprint: &Fingerprint) -> Option<Pools> {
        let registry = &self.shared.registry;
        let table = registry.table();
        let pools = table.models.get(&ask.model)?;
        Some(pools.only(|id| registry.fingerprint(id).as_ref() == Some(fingerprint)))
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

    fn keep(&mut self, instance: InstanceId, leg: Leg, error: LegError) -> Failure {
        let mut kept = self.kept.take();
        let failure = self.judge(&mut kept, instance, leg, error);
        self.kept = kept;
        failure
    }

    /// Keeps the error for the client: the latest, but "no room" rather than "broken", because it tells
    /// the client what to do.
    pub(super) fn judge(
        &self,
        kept: &mut Option<LegError>,
        instance: InstanceId,
        leg: Leg,
        error: LegError,
    ) -> Failure {
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
        let busy = kept
            .as_ref()
            .is_some_and(|kept| kept.failure == Failure::Busy);
        if !busy || !matches!(failure, Failure::Broke | Failure::Unreachable) {
            *kept = Some(error);
        }
        failure
    }

    /// Keeps of a stream that has begun what another instance would need.
    fn keep_stream(&mut self, ask: Ask) {
        let id = self.decode.as_ref().map(LoadGuard::id);
        let fingerprint = id.and_then(|id| self.shared.registry.fingerprint(id));
        let (true, Some(fingerprint)) = (self.keeps(&ask), fingerprint) else {
            return;
        };
        let handle = self.handle.as_ref().map(|handle| &handle.params);
        let bytes = ask.object.len() + handle.map_or(0, |params| params.len());
        match KeptRoom::take(&self.shared, bytes) {
            Some(room) => {
                let handle = handle.map(|params| &params[..]);
                let kept = Resumable::new(ask, fingerprint, handle, room);
                self.resumable = Some(Box::new(kept));
            }
            None => self.shared.metrics.resumed("no_room"),
        }
    }

    fn answer(mut self, started: Started, ask: Ask) -> Response<RouterBody> {
        let generates = ask.generates;
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
        self.access.answered(status);
        let body = match started.body {
            Answer::Whole(bytes) => {
                self.finished();
                Either::Left(Full::new(bytes))
            }
            Answer::Stream(begun) => {
                if matches!(begun.start, Start::Events(..)) {
                    self.keep_stream(ask);
                }
                // Only what is kept of it is needed from here on.
                self.handle = None;
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
            self.shared
                .metrics
                .decided(if self.asked || self.flow.sent_anything() {
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
        self.access.answered(response.status());
        self.broken = true;
        response
    }

    /// The decode instance's name.
    pub(crate) fn decode_name(&self) -> String {
        let decode = self.decode.as_ref();
        decode
            .map(|guard| guard.instance().name())
            .unwrap_or_default()
    }

    /// The client's answer is whole.
    pub(crate) fn finished(&mut self) {
        self.whole = true;
        self.tell(Outcome::Whole);
        self.feed(Event::StreamEnded);
        self.decode = None;
    }

    /// Decode broke off after its first byte, for good.
    pub(crate) fn broke(&mut self, error: &ApiError) {
        self.feed(Event::StreamBroke(None));
        self.broken = true;
        self.note_error(error.kind);
        self.note_broken(error);
        self.decode = None;
    }

    fn note_broken(&self, error: &ApiError) {
        if let Some(decode) = &self.decode {
            self.shared
                .registry
                .signal(decode.id(), Signal::Broke(error.message.clone()));
        }
        tracing::warn!(request = self.id.as_str(), client_request = self.id.client(), %error, "stream broke off");
    }

    /// Does the instance answer no probes any more?
    pub(crate) fn decode_is_lost(&self) -> bool {
        let decode = self.decode.as_ref();
        decode.is_some_and(|guard| guard.instance().is_lost())
    }

    /// Ends when the instance is taken out of the registry.
    pub(crate) fn decode_gone(&self) -> Option<WaitForCancellationFutureOwned> {
        let decode = self.decode.as_ref();
        decode.map(|guard| guard.instance().gone())
    }

    /// Counts an error that a stream carries.
    pub(crate) fn note_error(&self, kind: ErrorKind) {
        self.shared.metrics.error(kind);
    }

    pub(crate) fn is_broken(&self) -> bool {
        self.broken
    }
}

impl Exchange {
    fn tell(&mut self, outcome: Outcome) {
        let decode = self.decode_name();
        let prefill = self.prefill_name.as_deref();
        let reason = self.decision.as_str();
        self.access
            .over(&self.id, prefill, &decode, reason, outcome);
    }
}

impl Drop for Exchange {
    fn drop(&mut self) {
        self.tell(match (self.whole, self.broken) {
            (true, _) => Outcome::Whole,
            (false, true) => Outcome::Error,
            (false, false) => Outcome::ClientGone,
        });
        self.feed(Event::ClientGone);
    }
}

impl Shared {
    /// The body of `/metrics`.
    pub(crate) fn metrics_text(&self) -> String {
        let (_, waiting) = self.gate.counts();
        let waiting = i64::try_from(waiting).unwrap_or(i64::MAX);
        self.metrics.requests_waiting.set(waiting);
        self.metrics.encode()
    }

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

    /// Do both legs of a pair run together, and how? Our own instances hand over by `pull`.
    fn together(&self, ask: &Ask, decision: Decision) -> Option<Begin> {
        let begin = match self.kv_connector {
            KvConnector::Pull => return None,
            KvConnector::Mooncake => Begin::AtOnce,
            KvConnector::MooncakeLayerwise => Begin::WhenAsked,
        };
        let table = self.registry.table();
        let mut groups = table.models.get(&ask.model)?.groups.iter();
        let native = groups.any(|group| {
            let any = group.prefill.first().or(group.decode.first());
            any.is_some_and(|&id| self.registry.fingerprint(id).is_some())
        });
        (decision == Decision::Pair && !native).then_some(begin)
    }

    /// Who may serve a request alone that goes this way first.
    fn spare(&self, ask: &Ask, pools: &Pools, way: Way) -> Spare {
        if way == Way::Whole || self.whole(ask, pools).is_empty() {
            Spare::Nobody
        } else if pools.both.is_empty() {
            Spare::Decode
        } else {
            Spare::Both
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
