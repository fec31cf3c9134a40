//! The process in front of instances: picks a prefill and a decode instance as a pair, drives a
//! request through both, and passes decode's bytes to the client.
//!
//! A request's way through the modules: `server` (routes, keys, admission) → `body` (cut once) →
//! `policy` (which instances) → `flow` (what next) → `upstream` (the legs) → `relay` (the answer).
#![forbid(unsafe_code)]

mod access;
mod admin;
mod answer;
mod body;
mod clients;
mod flow;
mod gate;
mod headers;
mod instances;
mod metrics;
mod policy;
mod registry;
mod relay;
mod release;
mod run;
mod server;
mod upstream;
mod watch;

pub use instances::InstanceSpec;
pub use run::{RouterError, run, serve, upstream_connections};
