//! What starts the processes of a plan on other nodes: `twinfer agent` there, and its client in `up`.
//!
//! An agent starts `twinfer serve` of its own binary and nothing else, for whoever has proven the peer key, and ends all
//! that it started for a connection when that connection ends, or when it ends itself.

mod client;
mod messages;
mod server;

pub(crate) use client::{Agents, Heard};
pub use server::{AgentError, run_agent};
