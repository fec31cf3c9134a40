//! Exit codes and the way to them.

use std::fmt;
use std::io::Write;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::ExitCode;

/// Why the process ends. The numbers stand in `--help` and in docs/reference/flags.md.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Code {
    /// It did not work, or an answer was wrong.
    Failed = 1,
    /// Wrong arguments.
    Usage = 2,
    /// A file is wrong: deployment, model, key.
    Config = 64,
    /// A port is in use, too few files may be open, or a peer cannot be reached.
    Unavailable = 69,
    /// A bug.
    Internal = 70,
}

/// What `--help` says about exit codes.
pub(crate) const HELP: &str = "\
Exit codes:
  0   done, or ended by Ctrl-C or SIGTERM after a drain
  1   failed: an instance ended, an answer was wrong, a step could not be computed
  2   wrong arguments
  64  wrong configuration: deployment file, model directory, key file, address or limit
  69  unavailable: a port is in use, too few files may be open (ulimit -n), a peer cannot be reached
  70  internal error; please report it";

/// A failure on its way to standard error and the exit code.
#[derive(Debug)]
pub(crate) struct Failure {
    code: Code,
    message: String,
    /// The message brings its own form.
    plain: bool,
}

pub(crate) type Outcome = Result<(), Failure>;

impl Failure {
    pub(crate) fn new(code: Code, message: impl fmt::Display) -> Self {
        Self {
            code,
            message: message.to_string(),
            plain: false,
        }
    }

    /// A message that is shown as it is.
    pub(crate) fn shown(code: Code, message: String) -> Self {
        Self {
            code,
            message,
            plain: true,
        }
    }

    pub(crate) fn failed(message: impl fmt::Display) -> Self {
        Self::new(Code::Failed, message)
    }

    /// Says why, and gives the exit code.
    pub(crate) fn report(&self) -> ExitCode {
        // With standard error gone there is nobody to tell; the code still says it.
        let mut stderr = std::io::stderr().lock();
        let _ = if self.plain {
            writeln!(stderr, "{}", self.message.trim_end())
        } else {
            writeln!(stderr, "twinfer: {}", self.message.trim_end())
        };
        self.code.into()
    }
}

impl From<anyhow::Error> for Failure {
    fn from(error: anyhow::Error) -> Self {
        Self::failed(format!("{error:#}"))
    }
}

impl From<Code> for ExitCode {
    fn from(code: Code) -> Self {
        Self::from(code as u8)
    }
}

/// Runs `command` and gives the exit code, also when it panics.
pub(crate) fn guarded(command: impl FnOnce() -> Outcome) -> ExitCode {
    match catch_unwind(AssertUnwindSafe(command)) {
        Ok(Ok(())) => ExitCode::SUCCESS,
        Ok(Err(failure)) => failure.report(),
        // The hook has said what happened.
        Err(_) => Code::Internal.into(),
    }
}

/// A panic is a bug: one line that says where, no trace unless asked for.
pub(crate) fn install_panic_hook() {
    std::panic::set_hook(Box::new(|info| {
        let payload = info.payload();
        let message = payload
            .downcast_ref::<&str>()
            .copied()
            .or_else(|| payload.downcast_ref::<String>().map(String::as_str))
            .unwrap_or("unknown");
        let place = info
            .location()
            .map(|at| format!(" at {}:{}", at.file(), at.line()))
            .unwrap_or_default();
        let mut stderr = std::io::stderr().lock();
        let _ = writeln!(
            stderr,
            "twinfer: internal error{place}: {message}; please report it"
        );
        let trace = std::backtrace::Backtrace::capture();
        if trace.status() == std::backtrace::BacktraceStatus::Captured {
            let _ = writeln!(stderr, "{trace}");
        }
    }));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn outcomes_have_their_codes_and_a_panic_is_an_internal_error() {
        let shown = |code: ExitCode| format!("{code:?}");
        assert_eq!(shown(guarded(|| Ok(()))), shown(ExitCode::from(0)));
        assert_eq!(
            shown(guarded(|| Err(Failure::new(Code::Config, "x")))),
            shown(ExitCode::from(64))
        );
        assert_eq!(
            shown(guarded(|| Err(Failure::failed("x")))),
            shown(ExitCode::from(1))
        );
        assert_eq!(
            shown(guarded(|| panic!("a bug"))),
            shown(ExitCode::from(70))
        );
    }
}
