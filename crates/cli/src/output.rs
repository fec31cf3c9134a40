//! Standard output. A reader that leaves early (`twinfer plan f | head`) is no failure.

use crate::exit::{Failure, Outcome};
use std::fmt::Display;
use std::io::{ErrorKind, Write};

/// Writes text to standard output at once.
pub(crate) fn write(text: &impl Display) -> Outcome {
    let mut stdout = std::io::stdout().lock();
    let written = write!(stdout, "{text}").and_then(|()| stdout.flush());
    match written {
        Err(error) if error.kind() != ErrorKind::BrokenPipe => {
            Err(Failure::failed(format!("standard output: {error}")))
        }
        _ => Ok(()),
    }
}

/// A value as indented JSON.
pub(crate) fn json(value: &impl serde::Serialize) -> Outcome {
    let text = serde_json::to_string_pretty(value)
        .map_err(|error| Failure::failed(format!("JSON: {error}")))?;
    write(&format_args!("{text}\n"))
}
