use crate::args::{Cli, Page};
use crate::exit::{self, Outcome};
use crate::output;
use clap::{Arg, ArgAction, Command, CommandFactory};
use std::fmt::Write;

pub(crate) fn run(page: Page) -> Outcome {
    match page {
        Page::Flags => output::write(&flags()),
        Page::Schema => output::json(&twinfer_deploy::schema()),
        Page::Example => output::write(&twinfer_deploy::example()),
    }
}

/// docs/reference/flags.md
fn flags() -> String {
    let mut root = Cli::command();
    root.build();
    let mut page = String::from(
        "# Flags\n\n<!-- Made by `cargo run --release -- reference flags`; a test fails when this page is stale. -->\n\n",
    );
    let _ = writeln!(page, "```text\n{}\n```\n", exit::HELP);
    let commands: Vec<&Command> = root
        .get_subcommands()
        .filter(|command| !command.is_hide_set() && command.get_name() != "help")
        .collect();
    for command in &commands {
        let _ = writeln!(page, "- [`twinfer {0}`](#twinfer-{0})", command.get_name());
    }
    for command in commands {
        section(&mut page, command);
    }
    page
}

fn section(page: &mut String, command: &Command) {
    let _ = writeln!(page, "\n## `twinfer {}`\n", command.get_name());
    if let Some(about) = command.get_long_about().or_else(|| command.get_about()) {
        let _ = writeln!(page, "{about}\n");
    }
    let arguments: Vec<&Arg> = command
        .get_arguments()
        .filter(|arg| !arg.is_hide_set() && !matches!(arg.get_id().as_str(), "help" | "version"))
        .collect();
    if !arguments.is_empty() {
        page.push_str("| flag | default | meaning |\n| --- | --- | --- |\n");
        for argument in arguments {
            row(page, argument);
        }
    }
    if let Some(help) = command.get_after_help() {
        let _ = writeln!(page, "\n```text\n{help}\n```");
    }
}

fn row(page: &mut String, argument: &Arg) {
    let value = argument
        .get_value_names()
        .into_iter()
        .flatten()
        .map(ToString::to_string)
        .collect::<Vec<_>>()
        .join(" ");
    let takes_value = matches!(argument.get_action(), ArgAction::Set | ArgAction::Append);
    let mut name = match argument.get_long() {
        // A value's name that only repeats the flag's says nothing.
        Some(long) if takes_value && value != long.to_uppercase().replace('-', "_") => {
            format!("`--{long} {value}`")
        }
        Some(long) => format!("`--{long}`"),
        None => format!("`{value}`"),
    };
    for alias in argument.get_visible_aliases().into_iter().flatten() {
        let _ = write!(name, ", `--{alias}`");
    }
    let default: Vec<String> = argument
        .get_default_values()
        .iter()
        .map(|value| format!("`{}`", value.to_string_lossy()))
        .collect();
    let help = argument
        .get_long_help()
        .or_else(|| argument.get_help())
        .map(ToString::to_string)
        .unwrap_or_default();
    let mut help = help
        .split_whitespace()
        .collect::<Vec<_>>()
        .join(" ")
        .replace('|', "\\|");
    let choices: Vec<String> = argument
        .get_possible_values()
        .iter()
        .filter(|choice| takes_value && !choice.is_hide_set())
        .map(|choice| match choice.get_help() {
            Some(about) => format!(
                "`{}`: {}",
                choice.get_name(),
                about.to_string().trim_end_matches('.').replace('|', "\\|")
            ),
            None => format!("`{}`", choice.get_name()),
        })
        .collect();
    if !choices.is_empty() {
        let _ = write!(help, " ({})", choices.join("; "));
    }
    if argument.is_required_set() {
        help.push_str("; required");
    }
    let _ = writeln!(page, "| {name} | {} | {help} |", default.join(", "));
}
