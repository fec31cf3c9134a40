//! Running commands of the workspace, each within a deadline.

use anyhow::{Context, Result, bail};
use rustix::process::{Pid, Signal, kill_process_group};
use std::os::unix::process::CommandExt;
use std::process::{Command, Output, Stdio};
use std::time::Duration;
use twinfer_it::repository;

/// For a build of everything on two cores, with link-time optimisation.
pub(crate) const BUILD: Duration = Duration::from_secs(45 * 60);
/// For tests that are built, or little is left to build of them.
pub(crate) const TESTS: Duration = Duration::from_secs(30 * 60);
/// For one run of a peer's benchmark.
pub(crate) const PEER: Duration = Duration::from_secs(15 * 60);
/// For what takes seconds.
pub(crate) const SHORT: Duration = Duration::from_secs(3 * 60);
/// For a killed command to be gone.
const AFTER_KILL: Duration = Duration::from_secs(10);

/// The cargo that runs us, or the one on the path.
pub(crate) fn cargo() -> Command {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.current_dir(repository());
    command
}

/// Runs a command with our output streams; an exit code other than 0, and no end within `limit`, are
/// errors.
pub(crate) fn check(command: &mut Command, limit: Duration) -> Result<()> {
    let output = run(command, limit)?;
    if !output.status.success() {
        bail!("{} ended with {}", shown(command), output.status);
    }
    Ok(())
}

/// Runs a command and returns its exit code and both outputs as text; no end within `limit` is an
/// error.
pub(crate) fn capture(command: &mut Command, limit: Duration) -> Result<(Option<i32>, String)> {
    let output = run(command.stdout(Stdio::piped()).stderr(Stdio::piped()), limit)?;
    let mut text = String::from_utf8_lossy(&output.stdout).into_owned();
    text.push_str(&String::from_utf8_lossy(&output.stderr));
    Ok((output.status.code(), text))
}

/// The command gets a process group of its own, so that what it started ends with it.
fn run(command: &mut Command, limit: Duration) -> Result<Output> {
    eprintln!("$ {}", shown(command));
    let child = command
        .stdin(Stdio::null())
        .process_group(0)
        .spawn()
        .with_context(|| format!("cannot run {}", shown(command)))?;
    let group = i32::try_from(child.id()).ok().and_then(Pid::from_raw);
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    let ended = runtime.block_on(async {
        let mut waiting = tokio::task::spawn_blocking(move || child.wait_with_output());
        let why = tokio::select! {
            output = &mut waiting => return Ok(output??),
            () = tokio::time::sleep(limit) => format!("did not end within {} s", limit.as_secs()),
            _ = tokio::signal::ctrl_c() => "was interrupted".to_owned(),
        };
        if let Some(group) = group {
            // An error means that it has ended by itself just now.
            let _ = kill_process_group(group, Signal::KILL);
        }
        let _ = tokio::time::timeout(AFTER_KILL, waiting).await;
        bail!("{} {why}", shown(command))
    });
    // What a killed command left behind may hold its pipes open.
    runtime.shutdown_background();
    ended
}

fn shown(command: &Command) -> String {
    let mut text = command.get_program().to_string_lossy().into_owned();
    for argument in command.get_args() {
        text.push(' ');
        text.push_str(&argument.to_string_lossy());
    }
    text
}
