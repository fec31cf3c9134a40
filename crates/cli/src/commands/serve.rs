use super::runtime::{self, StopSignals};
use crate::args::ServeArgs;
use crate::exit::{Code, Failure, Outcome};
use crate::{logging, output, progress};
use std::net::SocketAddr;
use twinfer_config::ServeConfig;
use twinfer_http::Drain;
use twinfer_worker::{
    ExitClass, HeadlessStop, Hooks, LoadProgress, PEER_CONNECTIONS, RankProgram, ServeError,
    pin_process,
};

pub(crate) fn run(args: ServeArgs) -> Outcome {
    let mut config = args.config;
    config.environment_keys = super::environment_keys();
    logging::start(config.log_format);
    super::check_threads(config.threads, config.cpus.as_deref())?;
    // Before any thread is made: they inherit it.
    pin_process(&config).map_err(|error| failure(&error))?;
    if config.headless {
        return headless(&config);
    }
    let bar = progress::Bar::bytes("loading");
    let (told, ended) = (bar.clone(), bar.clone());
    let picked = config.port == 0;
    let hooks = Hooks {
        on_listening: Box::new(move |addr: SocketAddr| {
            if picked {
                // Without a reader it serves all the same.
                let _ = output::write(&format_args!("http://{addr}\n"));
            }
        }),
        on_progress: Box::new(move |progress: LoadProgress| {
            told.set(progress.done, progress.total)
        }),
        on_ready: Box::new(move |_| bar.finish()),
        signals: true,
        ranks: ranks(&config)?,
    };
    let clients = (u64::from(config.max_num_seqs) + u64::from(config.max_waiting))
        .saturating_mul(config.dp.into());
    runtime::make_room(clients, PEER_CONNECTIONS)?;
    let runtime = runtime::several()?;
    let served = runtime.block_on(twinfer_worker::serve(config, Drain::new(), hooks));
    // A failure's message must not stand beside a bar.
    ended.finish();
    runtime::end(runtime);
    served.map_err(|error| failure(&error))
}

/// Ranks of an instance whose front is on another node.
fn headless(config: &ServeConfig) -> Outcome {
    let stop = HeadlessStop::default();
    let asked = stop.clone();
    // Not this thread: the ranks end with the one that starts them, and it waits for them.
    let signals = std::thread::Builder::new()
        .name("signals".into())
        .spawn(move || {
            let runtime = runtime::single()?;
            runtime.block_on(async {
                let mut signals = StopSignals::new()?;
                loop {
                    signals.next().await;
                    asked.ask();
                }
            })
        });
    let _signals: std::thread::JoinHandle<Outcome> = signals
        .map_err(|error| Failure::new(Code::Internal, format!("cannot start a thread: {error}")))?;
    let program = super::rank::program()?;
    twinfer_worker::serve_headless(config, &program, &stop).map_err(|error| failure(&error))
}

fn ranks(config: &ServeConfig) -> Result<Option<RankProgram>, Failure> {
    match config.dp {
        0 | 1 => Ok(None),
        _ => super::rank::program().map(Some),
    }
}

fn failure(error: &ServeError) -> Failure {
    let code = match error.exit_class() {
        ExitClass::Config => Code::Config,
        ExitClass::Unavailable => Code::Unavailable,
        ExitClass::Internal => Code::Failed,
    };
    Failure::new(code, error)
}
