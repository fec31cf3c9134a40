//! `twinfer check`.

use crate::args::{CheckArgs, Format};
use crate::commands::plan;
use crate::exit::{Code, Failure, Outcome};
use crate::output;
use twinfer_deploy::engines::{Machines, Recorder, Replay, Runner, check};

pub(crate) fn run(args: &CheckArgs) -> Outcome {
    if plan::engine(&args.file)?.is_none() {
        let message =
            "check is about engines by template; `twinfer up` checks what the native engine needs";
        return Err(Failure::new(Code::Config, message));
    }
    let (deployment, resolved) = plan::load_engines(&args.file, &args.engines)?;
    let machines = Machines {
        user: args.user.clone(),
    };
    let runner: Box<dyn Runner> = match (&args.replay, &args.record) {
        (Some(folder), _) => Box::new(Replay {
            folder: folder.clone(),
        }),
        (None, Some(folder)) => Box::new(Recorder {
            inner: machines,
            folder: folder.clone(),
        }),
        (None, None) => Box::new(machines),
    };
    let checks = check(&deployment, &resolved, runner.as_ref());
    match args.format {
        Format::Table => output::write(&checks)?,
        Format::Json => output::json(&checks)?,
    }
    let failures = checks.failures().count();
    if failures > 0 {
        return Err(Failure::failed(format!(
            "{failures} of {} checks are not OK",
            checks.checks.len()
        )));
    }
    Ok(())
}
