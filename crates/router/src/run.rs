//! Starting and ending.

use crate::flow::Shared;
use crate::instances::{InstanceSpec, Times};
use crate::metrics::RouterMetrics;
use crate::registry::{Registry, probe_all};
use crate::release::Releaser;
use crate::server::{BODY_LIMIT, LARGE_BODIES, Server, is_control};
use crate::upstream::Upstream;
use http::Request;
use hyper::body::Incoming;
use std::convert::Infallible;
use std::future::Future;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::AtomicU32;
use std::time::Duration;
use tokio_util::task::TaskTracker;
use twinfer_config::{FlagError, RouterConfig};
use twinfer_http::{
    BindError, BodyRoom, Drain, Host, Listener, OWN_DESCRIPTORS, Secret, SecretError, ServeOptions,
};

/// At the end, releases that are under way have this long.
const LAST_RELEASES: Duration = Duration::from_secs(2);

/// Connections to instances that a router may have: one per request in flight, and as many idle ones.
pub const fn upstream_connections(max_inflight: u32) -> u64 {
    2 * max_inflight as u64
}

/// Why the router does not run.
#[derive(Debug, thiserror::Error)]
pub enum RouterError {
    /// The configuration; one sentence per problem.
    #[error("{}", .0.join("\n"))]
    Config(Vec<String>),
    /// A key cannot be used.
    #[error(transparent)]
    Key(#[from] SecretError),
    /// The address cannot be listened on.
    #[error(transparent)]
    Bind(#[from] BindError),
}

/// Runs a router until `shutdown` ends, then drains it as the configuration says. `on_ready` gets the
/// address once requests are taken; whether they can be served is what `/ready` tells.
///
/// # Errors
/// [`RouterError`], before anything is served.
pub async fn run(
    config: RouterConfig,
    shutdown: impl Future<Output = ()>,
    on_ready: impl FnOnce(SocketAddr),
) -> Result<(), RouterError> {
    let times = Times::read(&config)?;
    let drain = Drain::new();
    let draining = async {
        shutdown.await;
        drain.run(times.drain_settle, times.drain_timeout).await;
    };
    let (served, ()) = tokio::join!(serve(config, drain.clone(), on_ready), async {
        // A router that could not start does not wait for its end.
        tokio::select! {
            () = draining => {}
            () = drain.reached(twinfer_http::DrainState::Closed) => {}
        }
    });
    served
}

/// Runs a router until the drain is closed: for callers that watch signals themselves.
///
/// # Errors
/// [`RouterError`], before anything is served; the drain is closed then too.
pub async fn serve(
    config: RouterConfig,
    drain: Drain,
    on_ready: impl FnOnce(SocketAddr),
) -> Result<(), RouterError> {
    let served = start(config, drain.clone(), on_ready).await;
    drain.end_now();
    served
}

async fn start(
    config: RouterConfig,
    drain: Drain,
    on_ready: impl FnOnce(SocketAddr),
) -> Result<(), RouterError> {
    let specs = InstanceSpec::read(&config)?;
    let times = Times::read(&config)?;
    let client_key = Secret::load(
        "api-key-file",
        config.api_key_file.as_deref(),
        config.environment_keys.api.as_ref(),
    )?;
    let peer_key = Secret::load(
        "peer-key-file",
        config.peer_key_file.as_deref(),
        config.environment_keys.peer.as_ref(),
    )?;
    if let Err(error) = Host::parse(&config.host) {
        let value = format!("{:?}", config.host);
        let error = FlagError::new("host", value, format!("it {}", error.problem));
        return Err(RouterError::Config(vec![error.to_string()]));
    }
    let listener = Listener::bind(&config.host, config.port).await?;
    let addr = listener.addr();

    let metrics = Arc::new(RouterMetrics::new());
    let registry = Arc::new(Registry::new(specs, config.policy, &metrics));
    let upstream = Upstream::new(
        times.connect,
        config.max_inflight as usize,
        peer_key.as_ref(),
    );
    let tasks = TaskTracker::new();
    let releaser = Releaser {
        registry: Arc::clone(&registry),
        upstream: upstream.clone(),
        metrics: Arc::clone(&metrics),
        tasks: tasks.clone(),
    };
    let shared = Arc::new(Shared {
        registry: Arc::clone(&registry),
        upstream: upstream.clone(),
        metrics,
        releaser,
        times,
        max_attempts: config.max_attempts,
        without_prefill: config.without_prefill,
        max_inflight: config.max_inflight,
        in_flight: AtomicU32::new(0),
    });
    let server = Arc::new(Server {
        shared,
        drain: drain.clone(),
        client_key,
        bodies: BodyRoom::new(LARGE_BODIES, config.max_body_bytes, BODY_LIMIT),
    });
    let service = tower::service_fn(move |request: Request<Incoming>| {
        let server = Arc::clone(&server);
        async move { Ok::<_, Infallible>(server.serve(request).await) }
    });
    let options = ServeOptions {
        is_control,
        ..ServeOptions::default()
    }
    .with_reserve(upstream_connections(config.max_inflight) + OWN_DESCRIPTORS);
    on_ready(addr);
    tokio::select! {
        () = twinfer_http::serve(listener, service, options, drain) => {}
        () = probe_all(registry, upstream.clone(), times.health_interval) => {}
        () = upstream.sweep() => {}
    }
    tasks.close();
    let _ = tokio::time::timeout(LAST_RELEASES, tasks.wait()).await;
    Ok(())
}
