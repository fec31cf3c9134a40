//! What `up` and agents say to each other.

use crate::supervise::Exit;
use serde::{Deserialize, Serialize};
use std::time::Duration;
use twinfer_comm::handshake::Protocol;

pub(super) static AGENT: Protocol = Protocol {
    magic: *b"twinfrAG",
    version: 1,
    label: b"twinfer agent link ",
};

/// How often each side says that it runs.
pub(super) const BEAT: Duration = Duration::from_millis(500);
/// One that says nothing for so long is gone, or the network is.
pub(super) const SILENT: Duration = Duration::from_secs(4);
/// To dial, and to prove the key.
pub(super) const HELLO: Duration = Duration::from_secs(5);
/// Longest line that is passed on in one piece, in bytes.
pub(super) const LINE: usize = 16 << 10;

/// From `up`.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum ToAgent {
    /// What is to be started: the first message.
    Hello { deployment: String, version: String },
    /// Start `twinfer serve` with these arguments.
    Serve { id: u32, arguments: Vec<String> },
    /// Ask a process to end.
    Terminate { id: u32 },
    /// End it.
    Kill { id: u32 },
    /// `up` runs.
    Beat,
}

/// From an agent.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum FromAgent {
    /// It takes orders.
    Welcome,
    /// It does not, and why.
    Refused(String),
    /// The process runs.
    Started { id: u32, process: u32 },
    /// It could not be started.
    StartFailed { id: u32, why: String },
    /// It wrote a line.
    Line { id: u32, text: String },
    /// It ended, and all of its lines have been passed on.
    Ended { id: u32, exit: Exit },
    /// The agent runs.
    Beat,
}
