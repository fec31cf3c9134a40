//! The life of an instance: ports, model, engine, ready, drain.

use crate::app::{App, Instance};
use crate::engine::{EngineHandle, EngineParts, Fetch, Places, panic_text, run};
use crate::handoff::{
    BindError, Exporter, ExporterConfig, Importer, ImporterConfig, Judge, KvListener, Peer,
    PeerKey, RENEWALS,
};
use crate::kv::{Fetcher, Handoff, Held, OwnEngine, RankHandoff, RankLedger, give_back};
use crate::load::{LoadProgress, Model, WarmEngine, warm_up};
use crate::model::{load_texts, warn_of_template};
use crate::rank::{RankProgram, RankStart};
use crate::settings::{Settings, cpus};
use crate::{SamplingDefaults, ServeError, load_model, routes};
use std::net::SocketAddr;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Duration;
use tokio::sync::{Notify, mpsc, oneshot};
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;
use twinfer_config::{FlagError, ServeConfig};
use twinfer_engine::KvGeometry;
use twinfer_http::{Drain, DrainState, Host, Listener, OWN_DESCRIPTORS, Secret, ServeOptions};
use twinfer_protocol::{Epoch, Fingerprint, InstanceCard, Limits, Role};
use twinfer_sys::BlockArena;
use twinfer_text::{ChatTemplate, Tokenizer};

/// After a failure clients get this long to take their error.
const FAREWELL: Duration = Duration::from_secs(2);
/// The engine thread gets this long to end its step.
const ENGINE_STOP: Duration = Duration::from_secs(3);
/// After a failure the front of ranks gets this long, beyond what clients get, to write its receipt and end its ranks.
const RECEIPT: Duration = Duration::from_secs(1);
/// Other tasks get this long to end.
const TASKS_STOP: Duration = Duration::from_secs(2);

/// Connections of an instance's KV channel, at most: of peers that have proved their key and of those
/// that have not yet, and its own to others, idle ones included.
pub const PEER_CONNECTIONS: u64 = 512;

/// What a caller hears of an instance that starts.
pub struct Hooks {
    /// The HTTP port answers: `/health` 200, `/ready` 503.
    pub on_listening: Box<dyn FnOnce(SocketAddr) + Send>,
    /// Bytes of weights read; called often, from any thread.
    pub on_progress: Box<dyn Fn(LoadProgress) + Send + Sync>,
    /// Everything is up.
    pub on_ready: Box<dyn FnOnce(&Ready) + Send>,
    /// Drain on SIGTERM and SIGINT.
    pub signals: bool,
    /// What runs ranks; needed with more than one.
    pub ranks: Option<RankProgram>,
}

/// An instance that is ready.
#[derive(Clone, Debug, PartialEq)]
pub struct Ready {
    /// Where HTTP is served.
    pub addr: SocketAddr,
    /// What the instance says of itself.
    pub card: InstanceCard,
}

/// What the engine thread hands out before it serves.
struct Up {
    engine: EngineHandle,
    tokenizer: Arc<Tokenizer>,
    template: ChatTemplate,
    defaults: SamplingDefaults,
    fingerprint: Fingerprint,
    max_len: u32,
    kv: UpKv,
}

/// KV that can be handed over.
enum UpKv {
    /// In this process.
    Here(OwnKv),
    /// In ranks that are processes.
    Ranks {
        addr: Option<String>,
        ledger: Arc<RankLedger>,
    },
}

struct OwnKv {
    fetches: mpsc::Receiver<Fetch>,
    geometry: KvGeometry,
    arena: Arc<BlockArena>,
}

impl Default for Hooks {
    fn default() -> Self {
        Self {
            on_listening: Box::new(|_| {}),
            on_progress: Box::new(|_| {}),
            on_ready: Box::new(|_| {}),
            signals: true,
            ranks: None,
        }
    }
}

/// Serves the model of `config.model` until `drain` is closed, by a signal or by the caller.
///
/// The ports are opened first: while the model loads `/health` answers 200 and `/ready` 503. Ready
/// means that the model is loaded, one request has run through it, and the KV channel is open.
///
/// # Errors
/// [`ServeError`]: nothing started, or the engine failed; then clients have been told and the process
/// should end.
pub async fn serve(config: ServeConfig, drain: Drain, hooks: Hooks) -> Result<(), ServeError> {
    serve_with(config, drain, hooks, load_model).await
}

/// [`serve`] with another source of the model. `load` runs on the thread that will run the engine; with several ranks
/// it is not called, since each loads the model of `config` itself.
///
/// # Errors
/// As [`serve`].
pub async fn serve_with<L>(
    config: ServeConfig,
    drain: Drain,
    hooks: Hooks,
    load: L,
) -> Result<(), ServeError>
where
    L: FnOnce(&ServeConfig, &(dyn Fn(LoadProgress) + Sync)) -> Result<Model, ServeError>
        + Send
        + 'static,
{
    let settings = Settings::of(&config)?;
    if config.dp > 1 && hooks.ranks.is_none() {
        let allowed = "1 is allowed where nothing says how ranks are started";
        return Err(FlagError::new("dp", config.dp, allowed).into());
    }
    let api_key = Secret::load(
        "api-key-file",
        config.api_key_file.as_deref(),
        config.environment_keys.api.as_ref(),
    )?;
    let peer_key = Secret::load(
        "peer-key-file",
        config.peer_key_file.as_deref(),
        config.environment_keys.peer.as_ref(),
    )?;
    for peer in &config.pd_peers {
        Peer::parse(peer.trim()).map_err(|error| {
            let allowed = format!(
                "{}; allowed: host:port of a prefill instance's KV channel, such as 10.0.0.1:8101",
                error.problem()
            );
            FlagError::new("pd-peers", format!("{peer:?}"), allowed)
        })?;
    }
    Host::parse(&config.host).map_err(|error| {
        let why = format!("it {}", error.problem);
        FlagError::new("host", format!("{:?}", config.host), why)
    })?;
    let listener = Listener::bind(&config.host, config.port)
        .await
        .map_err(|e| ServeError::Bind {
            what: "HTTP (host, port)",
            reason: e.to_string(),
        })?;
    // Ranks that are processes listen themselves.
    let kv_listener = match config.dp {
        0 | 1 => kv_listener(&config, peer_key.is_some()).await?,
        _ => None,
    };
    let addr = listener.addr();
    let name = config
        .name
        .clone()
        .unwrap_or_else(|| format!("{}-{}", config.role, addr.port()));
    let random = |e: getrandom::Error| ServeError::System {
        what: "draw an epoch",
        source: std::io::Error::other(e.to_string()),
    };
    let epoch = Epoch(getrandom::u64().map_err(random)?);
    let (settle, deadline) = (settings.settle, settings.deadline);
    let app = Arc::new(App::new(
        config,
        settings,
        name,
        epoch,
        (api_key, peer_key),
        drain.clone(),
    ));
    tracing::info!(name = app.name, role = %app.config.role, %addr, epoch = %epoch, "listening");

    let stop = CancellationToken::new();
    let http = twinfer_http::serve(
        listener,
        routes::router(Arc::clone(&app)),
        ServeOptions::default().with_reserve(PEER_CONNECTIONS + OWN_DESCRIPTORS),
        drain.clone(),
    );
    let http = app.tasks.spawn(http);
    (hooks.on_listening)(addr);

    let life = life(
        &app,
        addr,
        kv_listener,
        hooks.on_progress,
        hooks.on_ready,
        (load, hooks.ranks),
        stop.clone(),
    );
    let ended = if hooks.signals {
        let signals = drain.on_signals(settle, deadline);
        tokio::select! {
            ended = life => ended,
            end = signals => {
                let end = end.map_err(|source| ServeError::System { what: "handle signals", source })?;
                tracing::info!(?end, "drained");
                Ok(())
            }
        }
    } else {
        life.await
    };
    if ended.is_err() {
        // Said once, by the caller.
        drain.run(Duration::ZERO, FAREWELL).await;
    }
    let _ = timeout(TASKS_STOP, http).await;
    end(&app, stop, ended.is_err()).await;
    ended
}

/// Restricts the calling thread, and so all threads it starts, to `config.cpus`, if given. To be called
/// before the runtime is made.
///
/// # Errors
/// [`ServeError::Config`] names what is wrong with the list.
pub fn pin_process(config: &ServeConfig) -> Result<(), ServeError> {
    match cpus(config)? {
        Some(cpus) => twinfer_sys::pin_thread(&cpus).map_err(|source| ServeError::System {
            what: "pin threads to cpus",
            source,
        }),
        None => Ok(()),
    }
}

/// Loads, gets ready, and lasts until the drain is closed or the engine fails.
async fn life<L>(
    app: &Arc<App>,
    addr: SocketAddr,
    kv_listener: Option<KvListener>,
    on_progress: Box<dyn Fn(LoadProgress) + Send + Sync>,
    on_ready: Box<dyn FnOnce(&Ready) + Send>,
    (load, ranks): (L, Option<RankProgram>),
    stop: CancellationToken,
) -> Result<(), ServeError>
where
    L: FnOnce(&ServeConfig, &(dyn Fn(LoadProgress) + Sync)) -> Result<Model, ServeError>
        + Send
        + 'static,
{
    let closed = app.drain.reached(DrainState::Closed);
    let (sender, receiver) = oneshot::channel();
    let thread_app = Arc::clone(app);
    // Not a blocking task: loading cannot be interrupted, and must not keep the runtime from ending.
    std::thread::Builder::new()
        .name("engine".into())
        .spawn(move || match ranks {
            Some(program) if thread_app.config.dp > 1 => {
                ranks_thread(&thread_app, &*on_progress, &program, sender)
            }
            _ => engine_thread(&thread_app, &*on_progress, load, sender),
        })
        .map_err(|source| ServeError::System {
            what: "start the engine thread",
            source,
        })?;
    let up = tokio::select! {
        up = receiver => up.unwrap_or_else(|_| Err(ServeError::Model("the engine thread ended".into())))?,
        () = closed => return Ok(()),
    };
    let engine = up.engine.clone();
    let instance = connect(app, up, kv_listener, &stop)?;
    let ready = Ready {
        addr,
        card: instance.card.clone(),
    };
    app.set_ready(instance);
    tracing::info!(name = app.name, %addr, kv_addr = ready.card.kv_addr, "ready");
    on_ready(&ready);
    tokio::select! {
        () = app.drain.reached(DrainState::Closed) => Ok(()),
        () = engine.failed() => Err(ServeError::Engine(engine.failure())),
    }
}

fn engine_thread<L>(
    app: &App,
    on_progress: &(dyn Fn(LoadProgress) + Send + Sync),
    load: L,
    sender: oneshot::Sender<Result<Up, ServeError>>,
) where
    L: FnOnce(&ServeConfig, &(dyn Fn(LoadProgress) + Sync)) -> Result<Model, ServeError>,
{
    let progress = |progress| {
        app.set_progress(progress);
        on_progress(progress);
    };
    let loaded = catch_unwind(AssertUnwindSafe(|| {
        let model = load(&app.config, &progress)?;
        let tokenizer = Arc::clone(&model.tokenizer);
        Ok((tokenizer, warm_up(model, Settings::engine(&app.config))?))
    }));
    let loaded = loaded.unwrap_or_else(|panic| {
        Err(ServeError::Model(format!(
            "loading panicked: {}",
            panic_text(panic.as_ref())
        )))
    });
    let (tokenizer, warm) = match loaded {
        Ok(loaded) => loaded,
        Err(error) => {
            let _ = sender.send(Err(error));
            return;
        }
    };
    let WarmEngine {
        engine,
        progress,
        fingerprint,
        template,
        defaults,
    } = warm;
    let capacity = app
        .config
        .max_num_seqs
        .saturating_add(app.config.max_waiting);
    // A request sends a fetch and its cancellation at most.
    let (fetches, receiver) = mpsc::channel(2 * capacity as usize);
    let (geometry, arena, max_len) = (
        engine.geometry(),
        Arc::clone(engine.arena()),
        engine.max_len(),
    );
    let parts = EngineParts {
        engine,
        progress,
        fetches,
        metrics: app.metrics.engine.clone(),
        capacity,
    };
    run(parts, |engine| {
        let _ = sender.send(Ok(Up {
            engine,
            tokenizer,
            template,
            defaults,
            fingerprint,
            max_len,
            kv: UpKv::Here(OwnKv {
                fetches: receiver,
                geometry,
                arena,
            }),
        }));
    });
}

/// As [`engine_thread`], with ranks that are processes. They end with this thread.
fn ranks_thread(
    app: &App,
    on_progress: &(dyn Fn(LoadProgress) + Send + Sync),
    program: &RankProgram,
    sender: oneshot::Sender<Result<Up, ServeError>>,
) {
    let progress = |progress| {
        app.set_progress(progress);
        on_progress(progress);
    };
    let config = &app.config;
    let checked = crate::check_model_config(config);
    let started = checked.and_then(|()| load_texts(config)).and_then(|texts| {
        let start = RankStart {
            config,
            program,
            instance: &app.name,
            epoch: app.epoch,
            peer_key: app.peer_key.as_ref().map(Secret::expose),
        };
        Ok((texts, crate::rank::start(&start, &progress)?))
    });
    let (texts, fleet) = match started {
        Ok(started) => started,
        Err(error) => {
            let _ = sender.send(Err(error));
            return;
        }
    };
    warn_of_template(&texts.template);
    let places = Places {
        capacity: config.max_num_seqs.saturating_add(config.max_waiting),
        slots: config.max_num_seqs,
        block_size: config.block_size,
    };
    let (fingerprint, max_len) = (fleet.fingerprint.clone(), fleet.max_len);
    let addr = fleet.kv_addr.clone();
    let ledger = Arc::new(RankLedger::new(config.dp, app.metrics.kv.clone()));
    let known = Arc::clone(&ledger);
    fleet.run(places, &app.metrics.engine, &known, |engine| {
        let _ = sender.send(Ok(Up {
            engine,
            tokenizer: Arc::new(texts.tokenizer),
            template: texts.template,
            defaults: texts.defaults,
            fingerprint,
            max_len,
            kv: UpKv::Ranks { addr, ledger },
        }));
    });
}

/// Starts both directions of the handoff and puts the instance together.
fn connect(
    app: &Arc<App>,
    up: Up,
    kv_listener: Option<KvListener>,
    stop: &CancellationToken,
) -> Result<Arc<Instance>, ServeError> {
    let config = &app.config;
    let handoff = match up.kv {
        UpKv::Here(kv) => handoff(app, kv, &up.engine, &up.fingerprint, kv_listener, stop)?,
        UpKv::Ranks { addr, ledger } => {
            let judge = Judge::new(&config.pd_peers, app.peer_key.is_some(), config.block_size)
                .map_err(|e| ServeError::Config(e.to_string()))?;
            Handoff::of_ranks(RankHandoff {
                engine: up.engine.clone(),
                addr,
                epoch: app.epoch,
                ranks: config.dp,
                judge: config.role.can_decode().then_some(judge),
                ledger,
            })
        }
    };
    let kv_addr = handoff.addr();
    let limits = Limits {
        max_model_len: up.max_len,
        max_output_tokens: config
            .max_output_tokens
            .unwrap_or(up.max_len)
            .min(up.max_len),
        max_num_seqs: config.max_num_seqs,
        max_num_batched_tokens: config.max_num_batched_tokens,
    };
    Ok(Arc::new(Instance {
        card: InstanceCard {
            name: app.name.clone(),
            role: config.role,
            model: app.settings.model_name.clone(),
            fingerprint: up.fingerprint,
            epoch: app.epoch,
            limits,
            block_size: config.block_size,
            kv_addr,
            ranks: config.dp,
        },
        engine: up.engine,
        tokenizer: up.tokenizer,
        template: up.template,
        defaults: up.defaults,
        handoff,
        seed: config.seed,
        next_id: AtomicU64::new(1),
    }))
}

/// Both directions of the handoff of a rank in this process.
fn handoff(
    app: &Arc<App>,
    kv: OwnKv,
    engine: &EngineHandle,
    fingerprint: &Fingerprint,
    kv_listener: Option<KvListener>,
    stop: &CancellationToken,
) -> Result<Handoff, ServeError> {
    let config = &app.config;
    let key = || {
        app.peer_key
            .as_ref()
            .and_then(|key| PeerKey::new(key.expose()))
    };
    let lease = Duration::from_secs(config.kv_lease.into());
    let patience = Duration::from_secs(config.kv_timeout.into());
    let freed = Arc::new(Notify::new());
    let mut exporter = None;
    if let Some(listener) = kv_listener {
        let wake = Arc::clone(&freed);
        let (started, server) = Exporter::on(
            listener,
            ExporterConfig {
                name: app.name.clone(),
                epoch: app.epoch,
                fingerprint: fingerprint.clone(),
                key: key(),
                lease,
                timeout: patience,
                geometry: kv.geometry,
                arena: Arc::clone(&kv.arena),
                wake: Box::new(move || wake.notify_one()),
            },
        )
        .map_err(|e| ServeError::Config(e.to_string()))?;
        app.tasks.spawn(server.run(stop.clone()));
        exporter = Some(started);
    }
    let mut importer = None;
    if config.role.can_decode() {
        let (started, keeper) = Importer::new(ImporterConfig {
            fingerprint: fingerprint.clone(),
            key: key(),
            peers: config.pd_peers.clone(),
            timeout: patience,
            renew_every: lease / RENEWALS,
            geometry: kv.geometry,
            arena: Arc::clone(&kv.arena),
        })
        .map_err(|e| ServeError::Config(e.to_string()))?;
        app.tasks.spawn(keeper.run(stop.clone()));
        importer = Some(started);
    }
    let held = Held::default();
    let listener = OwnEngine {
        engine: engine.clone(),
        metrics: app.metrics.kv.clone(),
        held: Arc::clone(&held),
    };
    let fetcher = Fetcher {
        listener: listener.clone(),
        policy: config.kv_load_failure_policy,
    };
    app.tasks.spawn(fetcher.run(kv.fetches, stop.clone()));
    if let Some(exporter) = &exporter {
        let exporter = exporter.clone();
        app.tasks
            .spawn(give_back(exporter, listener, freed, stop.clone()));
    }
    Ok(Handoff::new(exporter, importer, held))
}

/// The KV channel of an engine in this process, on the port that `config` says; none for a role that hands nothing out.
///
/// # Errors
/// The address cannot be listened on, or nobody could dial it.
pub(crate) async fn kv_listener(
    config: &ServeConfig,
    keyed: bool,
) -> Result<Option<KvListener>, ServeError> {
    if !config.role.can_prefill() {
        return Ok(None);
    }
    // An instance that does both hands nothing over unless asked to: its HTTP address may be open to
    // all without a peer key, or be a wildcard, its KV channel may not.
    let everywhere = Host::parse(&config.host).is_ok_and(|host| host.is_wildcard());
    let asked = keyed && (config.kv_advertise_host.is_some() || !everywhere);
    let fallback = match config.role {
        Role::Both if !asked => "127.0.0.1",
        _ => config.host.as_str(),
    };
    let host = config.kv_host.as_deref().unwrap_or(fallback);
    KvListener::bind(
        host,
        config.kv_port,
        config.kv_advertise_host.as_deref(),
        keyed,
    )
    .await
    .map(Some)
    .map_err(|e| match e {
        BindError::Resolve { .. } | BindError::Listen { .. } => ServeError::Bind {
            what: "KV handoff (kv-host, kv-port)",
            reason: e.to_string(),
        },
        _ => ServeError::Config(e.to_string()),
    })
}

/// Ends engine thread and tasks, each within its time.
async fn end(app: &Arc<App>, stop: CancellationToken, failed: bool) {
    stop.cancel();
    app.tasks.close();
    let limit = match failed {
        false => Some(ENGINE_STOP),
        // The thread of an engine may be stuck in its step; that of ranks is not.
        true => (app.config.dp > 1).then_some(RECEIPT),
    };
    if let (Some(instance), Some(limit)) = (app.loaded().cloned(), limit) {
        let stopped = tokio::task::spawn_blocking(move || instance.engine.stop(limit)).await;
        if !matches!(stopped, Ok(true)) {
            tracing::warn!("the engine thread did not end in time");
        }
    }
    if timeout(TASKS_STOP, app.tasks.wait()).await.is_err() {
        tracing::warn!("some tasks did not end in time");
    }
}
