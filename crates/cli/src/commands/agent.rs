//! Starts processes of deployments on this node.

use super::runtime::{self, StopSignals};
use crate::args::AgentArgs;
use crate::exit::{Code, Failure, Outcome};
use crate::{logging, output};
use std::net::SocketAddr;
use twinfer_deploy::{AgentError, run_agent};

pub(crate) fn run(args: &AgentArgs) -> Outcome {
    logging::start(args.log_format);
    let key = super::peer_key(args.peer_key_file.as_deref())?;
    let program = super::up::program()?;
    let address = SocketAddr::new(args.host, args.port);
    let (ended, end) = tokio::sync::oneshot::channel();
    std::thread::Builder::new()
        .name("agent".into())
        .spawn(move || {
            let on_listening = |address: SocketAddr| {
                tracing::info!(%address, "listening");
                // Without a reader it serves all the same.
                let _ = output::write(&format_args!("{address}\n"));
            };
            let _ = ended.send(run_agent(address, key.as_deref(), program, on_listening));
        })
        .map_err(|error| Failure::new(Code::Internal, format!("cannot start a thread: {error}")))?;
    let runtime = runtime::single()?;
    runtime.block_on(async {
        let mut signals = StopSignals::new()?;
        tokio::select! {
            // What it has started ends with this process.
            () = signals.next() => Ok(()),
            ended = end => match ended {
                Ok(Err(error)) => Err(failure(&error)),
                _ => Err(Failure::new(Code::Internal, "the agent has ended")),
            },
        }
    })
}

fn failure(error: &AgentError) -> Failure {
    let code = match error {
        AgentError::NeedsKey(_) => Code::Config,
        AgentError::Listen { .. } => Code::Unavailable,
        AgentError::System(_) => Code::Internal,
    };
    Failure::new(code, error)
}
