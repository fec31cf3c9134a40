//! The synchronous engine on a thread of its own: requests in by a mailbox, output by one bounded
//! channel per request, a watch over its steps, and a loud end when it cannot go on.

mod handle;
mod mailbox;
mod stall;
mod thread;

pub(crate) use handle::{EngineHandle, Generation, Submission};
pub(crate) use thread::{
    ChoiceEvent, End, EngineParts, Fetch, HeldBlocks, NewRequest, panic_text, run,
};
