//! Log lines go to standard error; `RUST_LOG` chooses them (default `info`).

use tracing_subscriber::EnvFilter;
use twinfer_config::LogFormat;

/// Starts logging. A second call changes nothing.
pub(crate) fn start(format: LogFormat) {
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new("info"));
    let builder = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr);
    let color = std::io::IsTerminal::is_terminal(&std::io::stderr());
    // Fails only when logging was started before.
    let _ = match format {
        LogFormat::Text => builder.with_ansi(color).with_target(false).try_init(),
        LogFormat::Json => builder.json().flatten_event(true).try_init(),
    };
}
