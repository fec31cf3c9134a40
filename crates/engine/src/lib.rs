//! The serving engine: models, weights, KV blocks, scheduler, sampler and `step()`. Synchronous, no
//! sockets, no clock.
#![forbid(unsafe_code)]

pub mod api;

pub use api::*;
