//! `twinfer lint`.

use crate::args::{Format, LintArgs};
use crate::commands::plan;
use crate::exit::{Code, Failure, Outcome};
use crate::output;
use twinfer_deploy::engines::{EngineDeployment, lint, resolve_engines, rule, rules};

pub(crate) fn run(args: &LintArgs) -> Outcome {
    if let Some(number) = args.explain {
        let Some(rule) = rule(number) else {
            let message = format!("--explain is {number}; rules are 1 to {}", rules().len());
            return Err(Failure::new(Code::Usage, message));
        };
        return match args.format {
            Format::Table => output::write(rule),
            Format::Json => output::json(rule),
        };
    }
    let Some(file) = &args.file else {
        return Err(Failure::new(Code::Usage, "FILE is missing"));
    };
    if plan::engine(file)?.is_none() {
        // Everything that is checked of the native engine is checked by its plan.
        let plan = plan::load(file)?;
        return output::write(&format_args!(
            "{}: the plan is valid; the rules are about engines by template\n",
            plan.deployment
        ));
    }
    let deployment =
        EngineDeployment::load(file, args.engines.private.as_deref()).map_err(plan::wrong)?;
    let resolved = resolve_engines(&deployment, &args.engines.allow)
        .map_err(|error| plan::diagnostics(&error))?;
    let found = lint(&deployment, &resolved, &args.engines.allow);
    match args.format {
        Format::Table => output::write(&found)?,
        Format::Json => output::json(&found)?,
    }
    if found.stops() {
        return Err(Failure::new(
            Code::Config,
            "a finding of severity E; plan and render refuse this file (--allow N permits rule N)",
        ));
    }
    Ok(())
}
