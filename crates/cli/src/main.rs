//! The `twinfer` binary: arguments to config structs to calls, results to text.
#![forbid(unsafe_code)]

mod args;
mod commands;
mod exit;
mod logging;
mod output;
mod progress;

use clap::FromArgMatches;
use clap::error::ErrorKind;
use std::process::ExitCode;

/// Prefill allocates and frees large buffers on many threads; the system's allocator serialises them.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> ExitCode {
    exit::install_panic_hook();
    if let Err(failure) = commands::follow_supervisor() {
        return failure.report();
    }
    exit::guarded(|| {
        match args::command()
            .try_get_matches()
            .and_then(|matches| args::Cli::from_arg_matches(&matches))
        {
            Ok(cli) => commands::run(cli),
            Err(error) => usage(&error),
        }
    })
}

/// Help and version are results, all else is a mistake in the arguments.
fn usage(error: &clap::Error) -> exit::Outcome {
    let text = error.render();
    match error.kind() {
        ErrorKind::DisplayHelp | ErrorKind::DisplayVersion => output::write(&text),
        _ => Err(exit::Failure::shown(exit::Code::Usage, text.to_string())),
    }
}
