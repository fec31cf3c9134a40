//! One module per command.

mod check;
mod demo;
mod diagnose;
mod fake;
mod generate;
mod import;
mod lint;
mod machine;
mod plan;
mod rank;
mod reference;
mod render;
mod router;
mod runtime;
mod serve;
mod up;

use crate::args::{Cli, Command};
use crate::exit::{Code, Failure, Outcome};
use crate::output;
use twinfer_config::EnvironmentKeys;
use twinfer_deploy::CoreSet;

/// Runs what was typed.
pub(crate) fn run(cli: Cli) -> Outcome {
    match cli.command {
        Command::Serve(args) => serve::run(*args),
        Command::Router(args) => router::run(*args),
        Command::Plan(args) => plan::run(&args),
        Command::Lint(args) => lint::run(&args),
        Command::Render(args) => render::run(&args),
        Command::Check(args) => check::run(&args),
        Command::Import(args) => import::run(&args),
        Command::Diagnose(args) => diagnose::run(&args),
        Command::Up(args) => up::run(&args),
        Command::Demo(args) => demo::run(&args),
        Command::Fake(args) => fake::run(args),
        Command::Machine(args) => machine::run(&args),
        Command::Generate(args) => generate::run(&args.config),
        Command::Rank => rank::run(),
        Command::Init => output::write(&twinfer_deploy::example()),
        Command::Reference(args) => reference::run(args.page),
    }
}

/// A process that `up` started ends with it, however that one ends.
pub(crate) fn follow_supervisor() -> Outcome {
    let Ok(text) = std::env::var(twinfer_deploy::SUPERVISOR_ENV) else {
        return Ok(());
    };
    let name = twinfer_deploy::SUPERVISOR_ENV;
    let parent: u32 = text.parse().map_err(|_| {
        Failure::new(
            Code::Usage,
            format!("{name} is {text:?}; it is a process id"),
        )
    })?;
    twinfer_sys::set_parent_death_signal(parent)
        .map_err(|error| Failure::failed(format!("{name}: {error}")))
}

/// Keys for a server, from the environment.
fn environment_keys() -> EnvironmentKeys {
    EnvironmentKeys::read(|name| std::env::var(name).ok())
}

/// More threads than cores contradict each other: threads that share a core wait for each other.
fn check_threads(threads: Option<u32>, cpus: Option<&str>) -> Outcome {
    let Some(cpus) = cpus else { return Ok(()) };
    let cores = CoreSet::parse(cpus)
        .map_err(|error| Failure::new(Code::Usage, format!("--cpus: {error}")))?
        .0
        .len();
    match threads {
        Some(threads) if threads as usize > cores => {
            let noun = if cores == 1 { "core" } else { "cores" };
            Err(Failure::new(
                Code::Usage,
                format!("--threads is {threads}, but --cpus names {cores} {noun}"),
            ))
        }
        _ => Ok(()),
    }
}
