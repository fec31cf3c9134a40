//! Collectives of the ranks of one instance: in one process, between processes of a node through shared memory, and
//! between nodes over TCP.
//!
//! A rank joins its group with [`join()`] (or is made with [`in_process()`]), runs [`start_up_test()`] before it loads
//! weights, and then calls [`Collective`] from its engine thread. Every call carries its place ([`At`]), every wait has
//! a deadline, and a group that fails names the rank at fault and the last call it reached ([`Failure`]).
#![forbid(unsafe_code)]

mod board;
mod call;
mod channel;
mod collective;
mod ends;
mod environment;
mod error;
mod exchange;
mod frame;
mod group;
pub mod handshake;
mod link;
mod local;
mod mesh;
mod parts;
mod rendezvous;
mod schedule;
mod selftest;
mod start;
pub mod stream;
mod topology;
mod watch;

pub use board::MAX_SPIN;
pub use call::{At, Call, Misuse, Op, Reached, Route};
pub use channel::{Channel, ChannelError, Direction, Socket};
pub use collective::{Collective, MAX_REDUCE, Traffic};
pub use environment::{EnvironmentError, Placement};
pub use error::{Cause, CommError, Failure};
pub use group::{Group, Options, Stopper};
pub use handshake::{HelloError, PeerKey};
pub use local::{in_process, loopback};
pub use parts::{AlignedBytes, Parts};
pub use rendezvous::acceptor::{Acceptor, Event};
pub use rendezvous::{Identity, RankInfo, Refusal};
pub use selftest::{SelfTestError, start_up_test};
pub use start::{JoinPlan, Joined, StartError, join, join_at};
pub use topology::{MAX_WORLD, PeerClass, Topology, TopologyError};
