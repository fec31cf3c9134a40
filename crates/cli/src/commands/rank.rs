//! One rank of an instance: started by `serve`, never typed.

use super::runtime::{self, StopSignals};
use crate::exit::{Code, Failure, Outcome};
use crate::logging;
use std::ffi::OsString;
use twinfer_protocol::{API_KEY_ENV, PEER_KEY_ENV, PEER_KEY_ENV_COMPAT};
use twinfer_worker::{RankProgram, run_rank};

/// Word on the command line.
const COMMAND: &str = "rank";

/// This program as a rank of this process, with which it ends.
pub(super) fn program() -> Result<RankProgram, Failure> {
    let program = std::env::current_exe().map_err(|error| {
        Failure::new(Code::Internal, format!("cannot find this program: {error}"))
    })?;
    Ok(RankProgram {
        program,
        arguments: vec![OsString::from(COMMAND)],
        environment: vec![(
            twinfer_deploy::SUPERVISOR_ENV.to_owned(),
            std::process::id().to_string(),
        )],
        without: vec![API_KEY_ENV, PEER_KEY_ENV, PEER_KEY_ENV_COMPAT],
    })
}

pub(crate) fn run() -> Outcome {
    // Its front decides when it ends: signals to a whole group of processes are for that one.
    let runtime = runtime::single()?;
    let _signals = {
        let _inside = runtime.enter();
        StopSignals::new()?
    };
    match run_rank(|config| logging::start(config.log_format)) {
        Ok(true) => Ok(()),
        Ok(false) => Err(Failure::failed(
            "this rank has ended early; its front says why",
        )),
        Err(error) => Err(Failure::new(Code::Usage, error)),
    }
}
