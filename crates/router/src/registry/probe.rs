//! Active probes: is an instance ready, and what is it?

use super::{Facts, Instance, Registry, Signal};
use crate::upstream::Upstream;
use bytes::Bytes;
use http::StatusCode;
use std::sync::Arc;
use std::time::Duration;
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};
use twinfer_http::TransportError;
use twinfer_protocol::{InstanceCard, Role};

/// For one request of a probe.
const PROBE_LIMIT: Duration = Duration::from_secs(5);
/// Pause between probes of an instance that has never been up.
const FIRST_PAUSE: Duration = Duration::from_millis(200);
/// Pause between two probes in any case.
const LEAST_PAUSE: Duration = Duration::from_millis(20);
/// Largest answer to a probe.
const MAX_ANSWER: usize = 1 << 20;
/// An instance that is up is asked again what it is with every so many probes.
const ASK_AGAIN: u32 = 16;

/// Probes every instance, those too that are added later, until dropped.
pub(crate) async fn probe_all(registry: Arc<Registry>, upstream: Upstream, interval: Duration) {
    let mut probes = JoinSet::new();
    let mut newest = None;
    loop {
        for instance in registry.instances().iter() {
            if newest >= Some(instance.id) {
                continue;
            }
            newest = Some(instance.id);
            let (registry, upstream) = (Arc::clone(&registry), upstream.clone());
            let instance = Arc::clone(instance);
            probes.spawn(async move {
                let probing = probe_one(&registry, &upstream, &instance, interval);
                tokio::select! {
                    () = probing => {}
                    () = instance.gone.cancelled() => {}
                }
            });
        }
        tokio::select! {
            () = registry.added.notified() => {}
            Some(_) = probes.join_next() => {}
        }
    }
}

async fn probe_one(
    registry: &Registry,
    upstream: &Upstream,
    instance: &Instance,
    interval: Duration,
) {
    let id = instance.id;
    let mut round = 0u32;
    loop {
        let (was_up, ever_up) = {
            let health = instance.health.lock();
            (health.is_up(), health.ever_up())
        };
        let ask = !was_up || round.is_multiple_of(ASK_AGAIN);
        let signal = match probe(instance, upstream, ask).await {
            Ok(facts) => {
                if let Some(facts) = facts {
                    registry.learn(id, facts);
                }
                Some(Signal::Ready)
            }
            Err(signal) => signal,
        };
        if let Some(signal) = signal {
            registry.signal(id, signal);
        }
        round = round.wrapping_add(1);
        let pause = if ever_up {
            interval
        } else {
            interval.min(FIRST_PAUSE)
        };
        // However many requests ask for a probe, there is some time between two.
        sleep(LEAST_PAUSE.min(pause)).await;
        let _ = timeout(pause.saturating_sub(LEAST_PAUSE), instance.poke.notified()).await;
    }
}

/// What the instance is, if it was asked; else the signal, none where nothing is known of it.
async fn probe(
    instance: &Instance,
    upstream: &Upstream,
    ask: bool,
) -> Result<Option<Facts>, Option<Signal>> {
    let not_ready = |why: String| Some(Signal::NotReady(why));
    let get = async |path: &'static str| {
        let answer = upstream
            .get(&instance.spec.endpoint, path, MAX_ANSWER, PROBE_LIMIT)
            .await;
        answer.map_err(|error| match error {
            TransportError::Exhausted { .. } => {
                tracing::warn!(%error, "not probed");
                None
            }
            TransportError::Refused { .. } | TransportError::Unresolved { .. } => {
                Some(Signal::ProbeRefused(error.to_string()))
            }
            _ => Some(Signal::ProbeSilent(error.to_string())),
        })
    };
    let (mut status, mut body) = get("/ready").await?;
    let mut path = "/ready";
    if status == StatusCode::NOT_FOUND {
        path = "/health";
        (status, body) = get(path).await?;
    }
    if !status.is_success() {
        return Err(not_ready(format!(
            "{path} answers {}{}",
            status.as_u16(),
            reason(&body)
        )));
    }
    if !ask {
        return Ok(None);
    }
    let (status, body) = get("/twinfer/instance").await?;
    let card = match status {
        StatusCode::OK => Some(
            serde_json::from_slice::<InstanceCard>(&body)
                .map_err(|e| not_ready(format!("/twinfer/instance makes no sense: {e}")))?,
        ),
        StatusCode::NOT_FOUND => None,
        StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => {
            return Err(not_ready("it refuses the router's peer key".to_owned()));
        }
        other => {
            return Err(not_ready(format!(
                "/twinfer/instance answers {}",
                other.as_u16()
            )));
        }
    };
    if let Some(card) = &card {
        let fits = match instance.spec.role {
            Role::Both => card.role == Role::Both,
            Role::Prefill => card.role.can_prefill(),
            Role::Decode => card.role.can_decode(),
        };
        if !fits {
            let message = format!(
                "its role is {}, the router has it as {}",
                card.role, instance.spec.role
            );
            return Err(not_ready(message));
        }
    }
    let (status, models) = get("/v1/models").await?;
    if !status.is_success() {
        return Err(not_ready(format!("/v1/models answers {}", status.as_u16())));
    }
    let address = instance.spec.endpoint.host_port().to_string();
    Facts::read(&models, card.as_ref(), &address)
        .map(Some)
        .map_err(not_ready)
}

/// The message of an error answer, shortened.
fn reason(body: &Bytes) -> String {
    let body: twinfer_protocol::ErrorBody = match serde_json::from_slice(body) {
        Ok(body) => body,
        Err(_) => return String::new(),
    };
    let message: String = body.error.message.chars().take(200).collect();
    format!(": {message}")
}
