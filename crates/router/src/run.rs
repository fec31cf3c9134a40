//! Starting and ending.

use crate::admin::Admin;
use crate::clients::ClientKeys;
use crate::flow::{KeptBytes, Metaserver, Shared};
use crate::gate::Gate;
use crate::instances::{InstanceSpec, Times};
use crate::metrics::RouterMetrics;
use crate::policy::Policies;
use crate::registry::{Registry, Source, probe_all};
use crate::release::Releaser;
use crate::server::{BODY_LIMIT, LARGE_BODIES, Server, is_control};
use crate::upstream::Upstream;
use crate::watch;
use http::Request;
use hyper::body::Incoming;
use std::convert::Infallible;
use std::future::Future;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;
use tokio_util::task::TaskTracker;
use twinfer_config::{FlagError, KvConnector, RouterConfig};
use twinfer_http::{
    BindError, BodyRoom, Drain, Host, HostPort, Listener, OWN_DESCRIPTORS, Secret, SecretError,
    ServeOptions,
};

/// Connections of the admin listener.
const ADMIN_CONNECTIONS: usize = 64;
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
    let clients = ClientKeys::load(&config)?;
    let admin_key = Secret::load(
        "admin-key-file",
        config.admin_key_file.as_deref(),
        config.environment_keys.admin.as_ref(),
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
    let policies = Policies {
        prefill: config.prefill_policy.unwrap_or(config.policy),
        decode: config.decode_policy.unwrap_or(config.policy),
    };
    let registry = Arc::new(Registry::new(policies, &metrics));
    let of_file = match &config.instances_file {
        Some(path) => InstanceSpec::read_file(path)?,
        None => Vec::new(),
    };
    for spec in specs {
        let source = match of_file.contains(&spec) {
            true => Source::File,
            false => Source::Flags,
        };
        // Each address stands once in the list.
        let added = registry.add(spec, source);
        added.map_err(|error| RouterError::Config(vec![error.message]))?;
    }
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
        gate: Arc::new(Gate::new(
            config.max_inflight,
            config.max_queued,
            Duration::from_secs_f64(config.queue_timeout),
        )),
        max_resumes: config.max_resumes,
        kept_bytes: KeptBytes::new(0),
        kv_connector: config.kv_connector,
        bootstrap_port: config.mooncake_bootstrap_port,
        metaserver: Metaserver::new(metaserver_url(&config, addr)?, times.prefill),
    });
    let admin = match config.admin_port {
        Some(port) => Some(admin(&config, port, admin_key, &shared).await?),
        None => None,
    };
    let file = config.instances_file.clone().map(|path| {
        let good = shared.metrics.file_good();
        watch::follow(
            path,
            of_file,
            Arc::clone(&registry),
            times.drain_timeout,
            good,
        )
    });
    let server = Arc::new(Server {
        shared,
        drain: drain.clone(),
        clients,
        access_log: config.access_log,
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
        () = maybe(admin) => {}
        () = maybe(file) => {}
        () = upstream.sweep() => {}
    }
    tasks.close();
    let _ = tokio::time::timeout(LAST_RELEASES, tasks.wait()).await;
    Ok(())
}

/// The admin listener; what is returned serves until dropped.
async fn admin(
    config: &RouterConfig,
    port: u16,
    key: Option<Secret>,
    shared: &Arc<Shared>,
) -> Result<impl Future<Output = ()> + use<>, RouterError> {
    let refuse = |problem: String| {
        let error = FlagError::new("admin-host", format!("{:?}", config.admin_host), problem);
        RouterError::Config(vec![error.to_string()])
    };
    Host::parse(&config.admin_host).map_err(|error| refuse(format!("it {}", error.problem)))?;
    let listener = Listener::bind(&config.admin_host, port).await?;
    let addr = listener.addr();
    if key.is_none() && !addr.ip().is_loopback() {
        let problem =
            "it is no loopback address; give a key by --admin-key-file or TWINFER_ADMIN_KEY";
        return Err(refuse(problem.to_owned()));
    }
    tracing::info!(%addr, keyed = key.is_some(), "admin listener");
    let admin = Arc::new(Admin {
        shared: Arc::clone(shared),
        key,
    });
    let service = tower::service_fn(move |request: Request<Incoming>| {
        let admin = Arc::clone(&admin);
        async move { Ok::<_, Infallible>(admin.serve(request).await) }
    });
    let options = ServeOptions {
        max_connections: ADMIN_CONNECTIONS,
        ..ServeOptions::default()
    };
    Ok(twinfer_http::serve(
        listener,
        service,
        options,
        Drain::new(),
    ))
}

/// Waits for ever where there is nothing to do.
async fn maybe(work: Option<impl Future<Output = ()>>) {
    match work {
        Some(work) => work.await,
        None => std::future::pending().await,
    }
}

/// Where decode instances of the layerwise connector ask for prefill. They must reach it, so it is no wildcard.
fn metaserver_url(config: &RouterConfig, addr: SocketAddr) -> Result<String, RouterError> {
    let (flag, host) = match &config.metaserver_host {
        Some(host) => ("metaserver-host", host),
        None => ("host", &config.host),
    };
    if config.kv_connector != KvConnector::MooncakeLayerwise {
        return Ok(String::new());
    }
    let refuse = |problem: &str| {
        let error = FlagError::new(flag, format!("{host:?}"), problem.to_owned());
        RouterError::Config(vec![error.to_string()])
    };
    let parsed = Host::parse(host).map_err(|error| refuse(&format!("it {}", error.problem)))?;
    if parsed.is_wildcard() {
        return Err(refuse(
            "no other host reaches this router by it; name one by --metaserver-host",
        ));
    }
    let host_port = HostPort::from_parts(host, &addr.port().to_string())
        .map_err(|error| RouterError::Config(vec![format!("--{flag}: {error}")]))?;
    Ok(format!("http://{host_port}/v1/metaserver"))
}
