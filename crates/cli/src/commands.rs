//! One module per command.

mod plan;
mod reference;

use crate::args::{Cli, Command};
use crate::exit::Outcome;
use crate::output;

/// Runs what was typed.
pub(crate) fn run(cli: Cli) -> Outcome {
    match cli.command {
        Command::Plan(args) => plan::run(&args),
        Command::Init => output::write(&twinfer_deploy::example()),
        Command::Reference(args) => reference::run(args.page),
    }
}
