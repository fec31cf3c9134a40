//! Server-sent events (WHATWG HTML, "Server-sent events", parsing an event stream).

mod parser;
mod writer;

pub use parser::{SseError, SseEvent, SseParser};
pub use writer::{DONE, error_events, event_stream, json_event};
