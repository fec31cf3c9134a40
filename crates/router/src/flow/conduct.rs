//! Executes [`super::together`]: both legs of a request run at the same time.

use super::exchange::{Ask, Exchange};
use super::legs::Started;
use super::metaserver::{Called, Calls};
use super::pull::Failure;
use super::together::{Act, Begin, Event, Together};
use crate::answer::{LegError, Side};
use crate::metrics::Leg;
use crate::policy::Wanted;
use crate::registry::{InstanceId, LoadGuard};
use http::HeaderValue;
use serde::Deserialize;
use serde_json::json;
use std::collections::{BTreeMap, VecDeque};
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use tokio::sync::oneshot;
use twinfer_http::{Endpoint, HostPort};
use twinfer_protocol::ErrorKind;

/// Largest answer of a bootstrap server.
const MAX_QUERY: usize = 1 << 20;

type PrefillLeg<'a> = Pin<Box<dyn Future<Output = Result<(), LegError>> + Send + 'a>>;
type DecodeLeg<'a> = Pin<Box<dyn Future<Output = Result<Started, LegError>> + Send + 'a>>;

/// What one try of both legs has in common.
struct Try {
    /// `X-Request-Id` of both legs. Each try has its own, so that a late question of an earlier one is known as such.
    id: HeaderValue,
    prefill_params: String,
    decode_params: String,
    calls: Option<Calls>,
}

/// How it came out.
struct Outcome {
    started: Option<Started>,
    prefill: Option<LoadGuard>,
    decode: Option<LoadGuard>,
    kept: Option<LegError>,
    sent_anything: bool,
}

/// An entry of a bootstrap server's answer, by rank.
#[derive(Deserialize)]
struct Bootstrap {
    engine_id: String,
}

impl Exchange {
    /// Runs both legs until the answer begins; none if there will be none.
    pub(super) async fn together(&mut self, ask: &Ask, begin: Begin) -> Option<Started> {
        let outcome = self.conduct(ask, begin).await;
        self.prefill_name = outcome
            .prefill
            .as_ref()
            .map(|guard| guard.instance().name());
        (self.prefill, self.decode) = (outcome.prefill, outcome.decode);
        self.kept = outcome.kept;
        self.asked |= outcome.sent_anything;
        outcome.started
    }

    async fn conduct(&self, ask: &Ask, begin: Begin) -> Outcome {
        let (mut flow, first) = Together::start(begin, self.shared.max_attempts);
        let mut acts = VecDeque::from([first]);
        let mut out = Outcome {
            started: None,
            prefill: None,
            decode: None,
            kept: None,
            sent_anything: false,
        };
        let mut current = Try {
            id: self.id.own.clone(),
            prefill_params: String::new(),
            decode_params: String::new(),
            calls: None,
        };
        let mut question: Option<oneshot::Sender<bool>> = None;
        let mut prefill_leg: Option<PrefillLeg<'_>> = None;
        let mut decode_leg: Option<DecodeLeg<'_>> = None;
        loop {
            while let Some(act) = acts.pop_front() {
                match act {
                    Act::PickPair => {
                        (out.prefill, out.decode) = (None, None);
                        let pair = self.wanted(ask, &flow, |registry, pools, wanted| {
                            registry.pick_pair(pools, wanted)
                        });
                        let event = match pair {
                            Some((prefill, decode)) => {
                                let ids = (prefill.id(), decode.id());
                                (out.prefill, out.decode) = (Some(prefill), Some(decode));
                                let (prefill, decode) = ids;
                                Event::PickedPair { prefill, decode }
                            }
                            None => Event::NoneLeft,
                        };
                        acts.extend(flow.on(event));
                    }
                    Act::PickPrefill => {
                        let tried = flow.tried();
                        out.prefill = self.wanted(ask, &flow, |registry, pools, wanted| {
                            let all = pools.groups.iter().flat_map(|group| &group.prefill);
                            let open: Vec<InstanceId> = all
                                .copied()
                                .filter(|id| !tried.prefill.contains(id))
                                .collect();
                            registry.pick_prefill(&open, wanted)
                        });
                        let id = out.prefill.as_ref().map(LoadGuard::id);
                        acts.extend(flow.on(id.map_or(Event::NoneLeft, Event::PickedPrefill)));
                    }
                    Act::PickDecode(prefill) => {
                        out.decode = self.wanted(ask, &flow, |registry, pools, wanted| {
                            registry.pick_decode(pools, prefill, wanted)
                        });
                        let id = out.decode.as_ref().map(LoadGuard::id);
                        acts.extend(flow.on(id.map_or(Event::NoneLeft, Event::PickedDecode)));
                    }
                    Act::Begin => {
                        question = None;
                        let prefill = out.prefill.as_ref().map(LoadGuard::id);
                        match self.new_try(begin, prefill).await {
                            Ok(new) => current = new,
                            Err(error) => {
                                let id = prefill.unwrap_or(InstanceId(u32::MAX));
                                let failure = self.judge(&mut out.kept, id, Leg::Prefill, error);
                                acts.clear();
                                acts.extend(flow.on(Event::PrefillFailed(failure)));
                            }
                        }
                    }
                    Act::Prefill(to) => {
                        let leg = self.prefill_with(
                            ask,
                            to,
                            current.prefill_params.clone(),
                            current.id.clone(),
                        );
                        prefill_leg = Some(Box::pin(leg));
                    }
                    Act::Decode(to) => {
                        let leg = self.decode_with(
                            ask,
                            to,
                            current.decode_params.clone(),
                            current.id.clone(),
                        );
                        decode_leg = Some(Box::pin(leg));
                    }
                    Act::DropPrefill => {
                        prefill_leg = None;
                    }
                    Act::DropDecode => {
                        decode_leg = None;
                        out.decode = None;
                    }
                    Act::Tell(well) => {
                        // One that has gone away is not told.
                        let _ = question.take().map(|question| question.send(well));
                    }
                    Act::Relay | Act::Refuse => {
                        out.sent_anything = flow.sent_anything();
                        return out;
                    }
                }
            }
            let event = tokio::select! {
                ended = leg(&mut prefill_leg) => {
                    prefill_leg = None;
                    match ended {
                        Ok(()) => {
                            if let Some(guard) = &mut out.prefill {
                                guard.prefilled();
                            }
                            Event::PrefillDone
                        }
                        Err(error) => {
                            let id = out.prefill.as_ref().map_or(InstanceId(u32::MAX), LoadGuard::id);
                            Event::PrefillFailed(self.judge(&mut out.kept, id, Leg::Prefill, error))
                        }
                    }
                }
                ended = leg(&mut decode_leg) => {
                    decode_leg = None;
                    match ended {
                        Ok(started) => {
                            out.started = Some(started);
                            Event::DecodeStarted
                        }
                        Err(error) => {
                            let id = out.decode.as_ref().map_or(InstanceId(u32::MAX), LoadGuard::id);
                            Event::DecodeFailed(self.judge(&mut out.kept, id, Leg::Decode, error))
                        }
                    }
                }
                called = called(&mut current.calls) => {
                    let Called { params, reply } = called;
                    current.prefill_params = params;
                    question = Some(reply);
                    Event::Asked
                }
            };
            acts.extend(flow.on(event));
        }
    }

    fn wanted<T>(
        &self,
        ask: &Ask,
        flow: &Together,
        pick: impl FnOnce(
            &Arc<crate::registry::Registry>,
            &crate::registry::Pools,
            Wanted<'_>,
        ) -> Option<T>,
    ) -> Option<T> {
        let registry = &self.shared.registry;
        let wanted = Wanted {
            tried: flow.tried(),
            work: &self.work,
            random: self.id.random(),
        };
        let table = registry.table();
        pick(registry, table.models.get(&ask.model)?, wanted)
    }

    /// The parameters of both legs for a new try.
    async fn new_try(&self, begin: Begin, prefill: Option<InstanceId>) -> Result<Try, LegError> {
        let uuid = uuid::Uuid::new_v4().to_string();
        let id = HeaderValue::try_from(&uuid).unwrap_or_else(|_| self.id.own.clone());
        match begin {
            Begin::WhenAsked => {
                let params = json!({
                    "do_remote_decode": false, "do_remote_prefill": true,
                    "metaserver": &*self.shared.metaserver.url,
                });
                Ok(Try {
                    id,
                    // Decode says it when it asks.
                    prefill_params: String::new(),
                    decode_params: params.to_string(),
                    calls: Some(self.shared.metaserver.expect(uuid)),
                })
            }
            Begin::AtOnce => {
                let (address, engine) = self.bootstrap(prefill).await?;
                let transfer = format!("xfer-{uuid}");
                let for_prefill = json!({
                    "do_remote_decode": true, "do_remote_prefill": false, "transfer_id": transfer,
                });
                let for_decode = json!({
                    "do_remote_prefill": true, "do_remote_decode": false, "transfer_id": transfer,
                    "remote_engine_id": engine, "remote_bootstrap_addr": address,
                });
                Ok(Try {
                    id,
                    prefill_params: for_prefill.to_string(),
                    decode_params: for_decode.to_string(),
                    calls: None,
                })
            }
        }
    }

    /// Address of a prefill instance's bootstrap server, and the engine's id that it tells.
    async fn bootstrap(&self, prefill: Option<InstanceId>) -> Result<(String, String), LegError> {
        let instance = prefill.and_then(|id| self.shared.registry.get(id));
        let Some(instance) = instance else {
            let what = "the instance that was picked has been removed";
            return Err(LegError::new(
                Failure::Unreachable,
                ErrorKind::NoInstance,
                what,
            ));
        };
        let own = instance.spec.endpoint.host_port();
        let port = match self.shared.bootstrap_port {
            0 => own.port,
            port => port,
        };
        let place = HostPort {
            host: own.host.clone(),
            port,
        };
        let address = format!("http://{place}");
        let endpoint = Endpoint::from(place);
        let limit = self.shared.times.connect;
        let answer = self
            .shared
            .upstream
            .get(&endpoint, "/query", MAX_QUERY, limit)
            .await;
        let (status, body) = answer.map_err(|error| {
            let (mut error, _) = LegError::transport(Side::Prefill, &instance.name(), &error);
            // The request has not gone to anybody.
            error.failure = Failure::Unreachable;
            error
        })?;
        let ranks: Option<BTreeMap<String, Bootstrap>> = serde_json::from_slice(&body)
            .ok()
            .filter(|_| status.is_success());
        let engine = ranks.and_then(|ranks| ranks.into_values().next());
        match engine {
            Some(engine) => Ok((address, engine.engine_id)),
            None => {
                let what = "has a bootstrap server that names no engine";
                let mut error = LegError::nonsense(Side::Prefill, &instance.name(), what);
                error.failure = Failure::Unreachable;
                Err(error)
            }
        }
    }
}

/// The end of a leg that runs; waits for ever for one that does not.
async fn leg<T>(running: &mut Option<Pin<Box<dyn Future<Output = T> + Send + '_>>>) -> T {
    match running {
        Some(running) => running.await,
        None => std::future::pending().await,
    }
}

async fn called(calls: &mut Option<Calls>) -> Called {
    if let Some(calls) = calls
        && let Some(called) = calls.next().await
    {
        return called;
    }
    std::future::pending().await
}
