//! The ranks of one instance: what front and rank say to each other, who gets a request, when a group sleeps, and both
//! sides of a rank that is a process of its own.
//!
//! A rank's front half ([`crate::engine`]: who reads what, what is counted) gives [`Order`]s and hears [`News`]; its
//! engine half ([`core`]) takes orders and makes news. With one rank both stand in one thread, with more a socket lies
//! between them.

mod balance;
mod core;
mod front;
mod handoff;
mod headless;
mod messages;
mod nodes;
mod process;
mod receipt;
mod wake;

pub(crate) use balance::{Balancer, RankView};
pub(crate) use core::{Patience, RankCore};
pub(crate) use front::{RankStart, start};
pub(crate) use messages::{HandoffStats, Lease, News, Order, RankStats};

pub use front::RankProgram;
pub use headless::{HeadlessStop, serve_headless};
pub use process::run_rank;
