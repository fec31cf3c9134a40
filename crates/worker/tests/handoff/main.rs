//! Connector `pull` over real sockets: what arrives, what is refused, what is given back.
//!
//! Faults come from a proxy between the two sides; nothing in the connector knows that it is tested.
#![expect(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod chaos;
mod damage;
mod intruders;
mod lifetime;
mod process;
mod proxy;
mod support;
mod transfer;
