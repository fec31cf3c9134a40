use crate::args::PlanArgs;
use crate::exit::{Code, Failure, Outcome};
use crate::output;
use std::path::Path;
use twinfer_config::ServeConfig;
use twinfer_deploy::{Checks, Deployment, Diagnostics, LoadError, Plan, local_facts, resolve};
use twinfer_worker::ServeError;

pub(crate) fn run(args: &PlanArgs) -> Outcome {
    let plan = load(&args.file)?;
    if args.json {
        output::json(&plan)
    } else {
        output::write(&plan)
    }
}

/// Reads and resolves a file for this machine.
pub(crate) fn load(file: &Path) -> Result<Plan, Failure> {
    let deployment = Deployment::load(file).map_err(|error| match error {
        LoadError::Wrong(wrong) => diagnostics(&wrong),
        LoadError::Io { .. } => Failure::new(Code::Config, error),
    })?;
    for_this_machine(&deployment).map_err(|wrong| diagnostics(&wrong))
}

/// Resolves for this machine, with the instances' own checks.
pub(crate) fn for_this_machine(deployment: &Deployment) -> Result<Plan, Diagnostics> {
    let serve = |config: &ServeConfig| {
        let checked = twinfer_worker::validate(config)
            .and_then(|()| twinfer_worker::check_model_config(config));
        match checked {
            Err(ServeError::Flag(error)) => Err(error),
            // What is wrong with this machine or the model's files shows when something starts.
            _ => Ok(()),
        }
    };
    resolve(
        deployment,
        &local_facts(deployment),
        Checks {
            serve: Some(&serve),
        },
    )
}

/// A file's mistakes, and the exit code for them.
pub(crate) fn diagnostics(wrong: &Diagnostics) -> Failure {
    Failure::shown(Code::Config, wrong.to_string())
}
