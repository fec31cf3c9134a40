//! An instance over real HTTP on loopback, with the scripted executor.
#![expect(clippy::unwrap_used, reason = "a helper of a test fails its test")]

mod bounds;
mod chat;
mod completions;
mod engine;
mod faults;
mod keys;
mod life;
mod limits;
mod pair;
mod resume;
mod support;
