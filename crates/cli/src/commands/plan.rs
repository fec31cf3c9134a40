use crate::args::{EngineArgs, Format, PlanArgs, PlanCommand};
use crate::exit::{Code, Failure, Outcome};
use crate::output;
use std::path::Path;
use twinfer_config::ServeConfig;
use twinfer_deploy::engines::{
    EngineDeployment, EnginePlan, engine_of, plan_diff, refuse, resolve_engines,
};
use twinfer_deploy::{Checks, Deployment, Diagnostics, LoadError, Plan, local_facts, resolve};
use twinfer_worker::ServeError;

pub(crate) fn run(args: &PlanArgs) -> Outcome {
    match (&args.command, &args.file) {
        (Some(PlanCommand::Diff { old, new }), _) => diff(old, new),
        (None, Some(file)) => {
            let json = args.json || args.format == Format::Json;
            match engine(file)? {
                None if json => output::json(&load_native(file, &args.engines)?),
                None => output::write(&load_native(file, &args.engines)?),
                Some(_) => {
                    let (_, plan) = load_engines(file, &args.engines)?;
                    if json {
                        output::json(&plan)
                    } else {
                        output::write(&plan)
                    }
                }
            }
        }
        (None, None) => Err(Failure::new(Code::Usage, "FILE is missing")),
    }
}

fn diff(old: &Path, new: &Path) -> Outcome {
    let tree = |file: &Path| -> Result<serde_json::Value, Failure> {
        let none = EngineArgs::default();
        let tree = match engine(file)? {
            None => serde_json::to_value(load(file)?),
            Some(_) => serde_json::to_value(load_engines(file, &none)?.1),
        };
        tree.map_err(Failure::failed)
    };
    let lines = plan_diff(&tree(old)?, &tree(new)?);
    let text: String = lines.iter().map(|line| format!("{line}\n")).collect();
    output::write(&text)
}

/// Name of the engine by template that a file asks for; none: the native one.
pub(crate) fn engine(file: &Path) -> Result<Option<String>, Failure> {
    engine_of(file).map_err(wrong)
}

fn load_native(file: &Path, args: &EngineArgs) -> Result<Plan, Failure> {
    if args.private.is_some() || !args.allow.is_empty() {
        let message =
            "--private and --allow are for engines by template; this file's engine is native";
        return Err(Failure::new(Code::Usage, message));
    }
    load(file)
}

/// Reads and resolves a deployment by template, and refuses what its rules refuse.
pub(crate) fn load_engines(
    file: &Path,
    args: &EngineArgs,
) -> Result<(EngineDeployment, EnginePlan), Failure> {
    let deployment = EngineDeployment::load(file, args.private.as_deref()).map_err(wrong)?;
    let plan = resolve_engines(&deployment, &args.allow).map_err(|error| diagnostics(&error))?;
    refuse(&deployment, &plan, &args.allow).map_err(|error| diagnostics(&error))?;
    Ok((deployment, plan))
}

/// A file that cannot be read or is wrong.
pub(crate) fn wrong(error: LoadError) -> Failure {
    match error {
        LoadError::Wrong(wrong) => diagnostics(&wrong),
        LoadError::Io { .. } => Failure::new(Code::Config, error),
    }
}

/// Reads and resolves a file for this machine.
pub(crate) fn load(file: &Path) -> Result<Plan, Failure> {
    let deployment = Deployment::load(file).map_err(wrong)?;
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
