use super::runtime;
use crate::args::RouterArgs;
use crate::exit::{Code, Failure, Outcome};
use crate::{logging, output};
use std::time::Duration;
use twinfer_http::Drain;
use twinfer_router::RouterError;

pub(crate) fn run(args: RouterArgs) -> Outcome {
    let mut config = args.config;
    config.environment_keys = super::environment_keys();
    logging::start(config.log_format);
    let picked = config.port == 0;
    // The router refuses values that are no durations before it serves.
    let seconds = |value| Duration::try_from_secs_f64(value).unwrap_or_default();
    let (settle, deadline) = (seconds(config.drain_settle), seconds(config.drain_timeout));
    runtime::make_room(
        u64::from(config.max_inflight),
        twinfer_router::upstream_connections(config.max_inflight),
    )?;
    let runtime = runtime::several()?;
    let served = runtime.block_on(async {
        let drain = Drain::new();
        let on_ready = |addr| {
            tracing::info!(%addr, "listening");
            if picked {
                // Without a reader it serves all the same.
                let _ = output::write(&format_args!("http://{addr}\n"));
            }
        };
        let mut serving = std::pin::pin!(twinfer_router::serve(config, drain.clone(), on_ready));
        tokio::select! {
            served = &mut serving => served.map_err(|error| failure(&error)),
            end = drain.on_signals(settle, deadline) => {
                let end = end.map_err(|error| Failure::new(Code::Internal, format!("signals: {error}")))?;
                tracing::info!(?end, "drained");
                serving.await.map_err(|error| failure(&error))
            }
        }
    });
    runtime::end(runtime);
    served
}

fn failure(error: &RouterError) -> Failure {
    let code = match error {
        RouterError::Config(_) | RouterError::Key(_) => Code::Config,
        RouterError::Bind(_) => Code::Unavailable,
    };
    Failure::new(code, error)
}
