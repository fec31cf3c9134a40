//! The synchronous engine on a thread of its own: requests in by a mailbox, output by one bounded
//! channel per request, a watch over its steps, and a loud end when it cannot go on.

mod desk;
mod handle;
mod mailbox;
mod stall;
mod thread;

pub(crate) use desk::{ChoiceEvent, Command, Desk, End, Fetch, HeldBlocks, NewRequest};
pub(crate) use handle::{EngineHandle, Generation, Places, Shared, Submission};
pub(crate) use thread::{EngineParts, panic_text, run};
