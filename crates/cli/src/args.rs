//! What can be typed.

use crate::exit;
use clap::{Args, Parser, Subcommand, ValueEnum};
use std::path::PathBuf;

/// Serves Mixture-of-Experts language models with prefill and decode together or apart.
#[derive(Debug, Parser)]
#[command(
    name = "twinfer",
    version,
    propagate_version = true,
    arg_required_else_help = true
)]
#[command(after_help = exit::HELP, max_term_width = 100)]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Command,
}

/// A command.
#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Show what `up` would start: names, cores, ports, command lines.
    #[command(after_help = "\
Examples:
  twinfer plan deploy.yaml
  twinfer plan deploy.yaml --json | jq '.instances[].command'
  diff <(twinfer plan old.yaml) <(twinfer plan new.yaml)

Exit code 64 when the file is wrong; every mistake is shown with its line.")]
    Plan(PlanArgs),

    /// Print an annotated deployment file.
    #[command(after_help = "Example:\n  twinfer init > deploy.yaml")]
    Init,

    /// Print the reference pages made from the flags and config structs.
    #[command(hide = true)]
    Reference(ReferenceArgs),
}

/// Arguments of `plan`.
#[derive(Debug, Args)]
pub(crate) struct PlanArgs {
    /// Deployment file.
    #[arg(value_name = "FILE")]
    pub(crate) file: PathBuf,

    /// Print JSON.
    #[arg(long)]
    pub(crate) json: bool,
}

/// Arguments of `reference`.
#[derive(Debug, Args)]
pub(crate) struct ReferenceArgs {
    /// Page.
    #[arg(value_enum)]
    pub(crate) page: Page,
}

/// A page of the reference.
#[derive(Clone, Copy, Debug, ValueEnum)]
pub(crate) enum Page {
    /// docs/reference/flags.md
    Flags,
    /// docs/reference/deploy.schema.json
    Schema,
    /// docs/reference/deploy.example.yaml
    Example,
}
