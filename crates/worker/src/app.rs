use crate::defaults::SamplingDefaults;
use crate::engine::EngineHandle;
use crate::kv::Handoff;
use crate::load::LoadProgress;
use crate::metrics::InstanceMetrics;
use crate::room::BodyPlan;
use crate::settings::Settings;
use http::HeaderMap;
use http::header::AUTHORIZATION;
use parking_lot::Mutex;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use tokio::sync::Semaphore;
use tokio_util::task::TaskTracker;
use twinfer_config::ServeConfig;
use twinfer_engine::RequestId;
use twinfer_http::{BodyRoom, Drain, Secret, check_bearer};
use twinfer_protocol::{ApiError, Epoch, ErrorKind, InstanceCard};
use twinfer_text::{ChatTemplate, Tokenizer};

/// Requests whose text is being parsed, rendered or tokenised at the same time.
pub(crate) const PREPARED_AT_ONCE: u32 = 4;
/// Longest time a request's body may take to arrive.
pub(crate) const BODY_TIME: Duration = Duration::from_secs(60);

/// The process's side of an instance: there before the model is.
pub(crate) struct App {
    pub(crate) config: ServeConfig,
    pub(crate) settings: Settings,
    pub(crate) name: String,
    pub(crate) epoch: Epoch,
    /// Unix seconds of the start.
    pub(crate) created: u64,
    pub(crate) api_key: Option<Secret>,
    pub(crate) peer_key: Option<Secret>,
    pub(crate) drain: Drain,
    pub(crate) metrics: InstanceMetrics,
    /// Bounds the CPU work of preparing requests beside the engine's.
    pub(crate) preparing: Arc<Semaphore>,
    pub(crate) bodies: BodyRoom,
    pub(crate) tasks: TaskTracker,
    progress: Mutex<LoadProgress>,
    instance: OnceLock<Arc<Instance>>,
}

/// The model's side: there when everything is up.
pub(crate) struct Instance {
    pub(crate) card: InstanceCard,
    pub(crate) engine: EngineHandle,
    pub(crate) tokenizer: Arc<Tokenizer>,
    pub(crate) template: ChatTemplate,
    pub(crate) defaults: SamplingDefaults,
    pub(crate) handoff: Handoff,
    /// Seed of requests that bring none.
    pub(crate) seed: u64,
    pub(crate) next_id: AtomicU64,
}

/// Who sent a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Caller {
    /// Holds the peer key, or is on loopback where there is none.
    pub(crate) peer: bool,
}

impl App {
    pub(crate) fn new(
        config: ServeConfig,
        settings: Settings,
        name: String,
        epoch: Epoch,
        keys: (Option<Secret>, Option<Secret>),
        drain: Drain,
    ) -> Self {
        let metrics = InstanceMetrics::new(&settings.model_name);
        let bodies = BodyPlan::new(config.max_body_bytes);
        if bodies.limit < config.max_body_bytes {
            tracing::warn!(
                max_body_bytes = config.max_body_bytes,
                allowed = bodies.limit,
                "request bodies are shorter than max-body-bytes: more would not fit in memory"
            );
        }
        Self {
            bodies: BodyRoom::new(bodies.together, bodies.limit, BODY_TIME),
            config,
            settings,
            name,
            epoch,
            created: unix_seconds(),
            api_key: keys.0,
            peer_key: keys.1,
            drain,
            metrics,
            preparing: Arc::new(Semaphore::new(PREPARED_AT_ONCE as usize)),
            tasks: TaskTracker::new(),
            progress: Mutex::default(),
            instance: OnceLock::new(),
        }
    }

    /// Everything is up.
    pub(crate) fn set_ready(&self, instance: Arc<Instance>) {
        let _ = self.instance.set(instance);
    }

    pub(crate) fn set_progress(&self, progress: LoadProgress) {
        *self.progress.lock() = progress;
    }

    /// The instance, if it can serve; draining does not matter.
    ///
    /// Errors: `NotReady` with what is missing.
    pub(crate) fn instance(&self) -> Result<&Arc<Instance>, ApiError> {
        let not_ready = |message: String| ApiError::new(ErrorKind::NotReady, message);
        let Some(instance) = self.instance.get() else {
            let LoadProgress { done, total } = *self.progress.lock();
            return Err(not_ready(match total {
                0 => "the model is being loaded".into(),
                _ if done >= total => "the model is loaded, the warm-up request is running".into(),
                _ => format!("the model is being loaded: {done} of {total} bytes"),
            }));
        };
        if instance.engine.has_failed() {
            return Err(not_ready(format!(
                "the engine has failed: {}",
                instance.engine.failure().message
            )));
        }
        Ok(instance)
    }

    /// The instance, as soon as it is loaded.
    pub(crate) fn loaded(&self) -> Option<&Arc<Instance>> {
        self.instance.get()
    }

    /// What `/ready` says: all of it up, and not draining.
    pub(crate) fn readiness(&self) -> Result<(), ApiError> {
        if !self.drain.is_serving() {
            return Err(self.drain.refusal());
        }
        self.instance().map(drop)
    }

    /// Checks the client key, if there is one, and whether the caller is a peer.
    ///
    /// Errors: `Unauthorized`.
    pub(crate) fn caller(
        &self,
        headers: &HeaderMap,
        client: SocketAddr,
    ) -> Result<Caller, ApiError> {
        let peer = self.is_peer(headers, client);
        // Where a peer key is set, holding it is more than holding the client key.
        if !(peer && self.peer_key.is_some()) {
            check_bearer(headers, self.api_key.as_ref())?;
        }
        Ok(Caller { peer })
    }

    /// Refuses who is no peer.
    ///
    /// Errors: `Unauthorized`.
    pub(crate) fn peer(&self, headers: &HeaderMap, client: SocketAddr) -> Result<(), ApiError> {
        if self.is_peer(headers, client) {
            return Ok(());
        }
        check_bearer(headers, self.peer_key.as_ref())?;
        let message = "without a peer key this route is served on loopback only";
        Err(ApiError::new(ErrorKind::Unauthorized, message))
    }

    fn is_peer(&self, headers: &HeaderMap, client: SocketAddr) -> bool {
        match &self.peer_key {
            Some(key) => {
                headers.contains_key(AUTHORIZATION) && check_bearer(headers, Some(key)).is_ok()
            }
            None => client.ip().to_canonical().is_loopback(),
        }
    }
}

impl Instance {
    /// An id that no other request of this engine has.
    pub(crate) fn new_id(&self) -> RequestId {
        RequestId(self.next_id.fetch_add(1, Ordering::Relaxed))
    }
}

pub(crate) fn unix_seconds() -> u64 {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0, |t| t.as_secs())
}
