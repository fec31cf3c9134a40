//! Server-sent events (WHATWG HTML, "Server-sent events", parsing an event stream).

mod parser;
mod writer;

pub use parser::{SseError, SseEvent, SseParser};
pub use writer::{DONE, comment, error_events, event_stream, json_event, text_event};
