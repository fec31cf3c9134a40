//! The serving engine: models, weights, KV blocks, scheduler, sampler and `step()`. Synchronous, no
//! sockets, no clock.
#![forbid(unsafe_code)]

pub mod api;
pub mod blocks;
mod core;
mod generate;
pub mod output;
pub mod sampler;
pub mod scheduler;
pub mod weights;

pub use api::*;
pub use core::Engine;
pub use generate::{GenerateError, Generated, generate};
pub use sampler::{SamplingLimits, check_length, check_prompt};
