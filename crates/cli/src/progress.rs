//! Progress bars, on standard error and only when it is a terminal.

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

/// A bar; nothing is drawn where nobody looks. Clones are the same bar.
#[derive(Clone)]
pub(crate) struct Bar(ProgressBar);

impl Bar {
    /// Counts bytes; the total comes with [`Bar::set`].
    pub(crate) fn bytes(what: &'static str) -> Self {
        Self::new(
            what,
            0,
            "{msg} {wide_bar} {bytes} of {total_bytes}, {eta} left",
        )
    }

    /// Counts things.
    pub(crate) fn count(what: &'static str, total: u64) -> Self {
        Self::new(what, total, "{msg} {wide_bar} {pos} of {len}, {eta} left")
    }

    fn new(what: &'static str, total: u64, template: &str) -> Self {
        // The target draws nothing when standard error is no terminal.
        let bar = ProgressBar::with_draw_target(Some(total), ProgressDrawTarget::stderr());
        if let Ok(style) = ProgressStyle::with_template(template) {
            bar.set_style(style);
        }
        bar.set_message(what);
        Self(bar)
    }

    pub(crate) fn set(&self, done: u64, total: u64) {
        self.0.set_length(total);
        self.0.set_position(done);
    }

    pub(crate) fn step(&self) {
        self.0.inc(1);
    }

    pub(crate) fn finish(&self) {
        self.0.finish_and_clear();
    }
}
