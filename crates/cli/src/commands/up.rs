use super::{plan, runtime};
use crate::args::UpArgs;
use crate::exit::{Code, Failure, Outcome};
use crate::{logging, output};
use std::path::PathBuf;
use std::time::Duration;
use tokio::sync::{oneshot, watch};
use twinfer_config::LogFormat;
use twinfer_deploy::{
    LogStyle, Plan, PortProblem, UpError, UpOptions, random_key, reachable_router_url, up,
};

pub(crate) fn run(args: &UpArgs) -> Outcome {
    logging::start(args.log_format);
    let plan = plan::load(&args.file)?;
    for warning in &plan.warnings {
        tracing::warn!("{warning}");
    }
    let key = super::peer_key(args.peer_key_file.as_deref())?;
    let options = UpOptions {
        program: program()?,
        ready_timeout: Duration::from_secs_f64(args.ready_timeout),
        logs: match args.log_format {
            LogFormat::Text => LogStyle::Text,
            LogFormat::Json => LogStyle::Json,
        },
        peer_key: Some(match &key {
            Some(key) => key.clone(),
            None => random_key().map_err(Failure::failed)?,
        }),
        agent_key: key,
    };
    let runtime = runtime::single()?;
    runtime
        .block_on(serve(&plan, &options))
        .map_err(|error| match error {
            Ended::Up(error) => up_failure(&error),
            Ended::Other(failure) => failure,
        })
}

enum Ended {
    Up(UpError),
    Other(Failure),
}

async fn serve(plan: &Plan, options: &UpOptions) -> Result<(), Ended> {
    let signals = runtime::StopSignals::new().map_err(Ended::Other)?;
    let (stop, stopped) = watch::channel(0);
    let (ready, is_ready) = oneshot::channel();
    let tell = async {
        if is_ready.await.is_ok() {
            let names: Vec<String> = plan
                .instances
                .iter()
                .map(|instance| format!("{} ({})", instance.name, instance.role))
                .collect();
            // A closed standard output ends the telling, not the serving.
            let _ = output::write(&format_args!(
                "ready: {} serves {} on {}\n",
                reachable_router_url(plan),
                plan.served_model_name,
                names.join(", ")
            ));
        }
        std::future::pending::<()>().await;
    };
    tokio::select! {
        ended = up(plan, options, stopped, ready) => ended.map_err(Ended::Up),
        () = signals.count(&stop) => Ok(()),
        () = tell => Ok(()),
    }
}

/// The binary that children run: this one, also when its file has been replaced meanwhile.
pub(crate) fn program() -> Result<PathBuf, Failure> {
    let path =
        std::env::current_exe().map_err(|error| Failure::failed(format!("own binary: {error}")))?;
    Ok(if path.exists() {
        path
    } else {
        PathBuf::from("/proc/self/exe")
    })
}

fn up_failure(error: &UpError) -> Failure {
    let code = match error {
        UpError::Ports(_) => Code::Unavailable,
        UpError::Place(_) => Code::Config,
        // A child that says why it ended says it for all.
        UpError::Failed { code: Some(64), .. } => Code::Config,
        UpError::Failed { code: Some(69), .. } => Code::Unavailable,
        UpError::Failed { .. } => Code::Failed,
    };
    // The lines of the processes stand above already.
    failed_with(code, error, true)
}

/// The reason comes last, after the log lines that tell more; `told` if those were shown as they came.
pub(crate) fn failed_with(code: Code, error: &UpError, told: bool) -> Failure {
    match error {
        UpError::Ports(ports) => {
            let line = |port: &PortProblem| {
                format!("{}; `{}` in the file changes it", port.message, port.key)
            };
            Failure::new(code, ports.iter().map(line).collect::<Vec<_>>().join("\n"))
        }
        UpError::Failed { log, .. } if !log.is_empty() && !told => {
            Failure::shown(code, format!("{log}twinfer: {error}"))
        }
        _ => Failure::new(code, error),
    }
}
