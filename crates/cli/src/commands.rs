//! One module per command.

mod agent;
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
use std::path::Path;
use twinfer_config::{EnvironmentKeys, KeyVariable};
use twinfer_deploy::CoreSet;
use twinfer_http::Secret;
use twinfer_protocol::PEER_KEY_ENV;

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
        Command::Agent(args) => agent::run(&args),
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

/// The key between the processes of a deployment: that of `file`, if given, else the environment's. The public proxies'
/// variable does not count here: it may well hold a key for somebody else's service, which processes should not send to
/// each other.
fn peer_key(file: Option<&Path>) -> Result<Option<String>, Failure> {
    let value = std::env::var(PEER_KEY_ENV).ok();
    let value = value.filter(|value| !value.is_empty());
    let variable = value.map(|value| KeyVariable {
        name: PEER_KEY_ENV,
        value,
    });
    let key = Secret::load("peer-key-file", file, variable.as_ref())
        .map_err(|error| Failure::new(Code::Config, error))?;
    Ok(key.map(|key| String::from_utf8_lossy(key.expose()).into_owned()))
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
