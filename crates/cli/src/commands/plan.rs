use crate::args::PlanArgs;
use crate::exit::{Code, Failure, Outcome};
use crate::output;
use std::path::Path;
use twinfer_config::model::{KvShape, parse_bytes};
use twinfer_config::{FlagError, ModelConfig, ServeConfig};
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
    let serve = |config: &ServeConfig| match twinfer_worker::validate(config) {
        Err(ServeError::Flag(error)) => Err(error),
        // What is wrong with this machine shows when something starts on it.
        _ => check_kv_memory(config),
    };
    resolve(
        deployment,
        &local_facts(deployment),
        Checks {
            serve: Some(&serve),
        },
    )
}

/// Memory for KV holds at least one block, whose size the model says; nothing is less than a page.
fn check_kv_memory(config: &ServeConfig) -> Result<(), FlagError> {
    /// Less is a mistake whatever the model.
    const PAGE: u64 = 4096;
    let Some(text) = &config.kv_cache_memory else {
        return Ok(());
    };
    let path = config.model.join("config.json");
    // A pipe would make this wait; what is wrong with the file is told when the model is checked.
    let regular = std::fs::metadata(&path).is_ok_and(|meta| meta.is_file());
    let model = regular
        .then(|| std::fs::read_to_string(&path).ok())
        .flatten();
    let model = model.and_then(|text| ModelConfig::parse(&text).ok());
    let (least, why) = match model {
        Some(model) => {
            let shape = KvShape::of(&model, config.dtype, config.block_size as usize);
            (shape.block_bytes(), "one block of this model's KV")
        }
        None => (PAGE, "one page"),
    };
    match parse_bytes(text) {
        Ok(bytes) if bytes < least => Err(FlagError::new(
            "kv-cache-memory",
            format!("{text:?}"),
            format!("at least {least} bytes are needed, {why}"),
        )),
        _ => Ok(()),
    }
}

/// A file's mistakes, and the exit code for them.
pub(crate) fn diagnostics(wrong: &Diagnostics) -> Failure {
    Failure::shown(Code::Config, wrong.to_string())
}
