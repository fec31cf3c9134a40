//! Harness for tests with real processes: starts the built binary on loopback, talks to it with a
//! client of its own, ends every process by its id.
#![forbid(unsafe_code)]

mod checkpoint;
mod client;
mod cluster;
mod metrics;
mod nodes;
mod process;

pub use checkpoint::{Checkpoint, Tensor, Tensors, refused, shard_name};
pub use client::{Answer, Body, Client, Stream, chat_body, completion_body};
pub use cluster::{Cluster, ClusterOptions, Instance};
pub use metrics::Metrics;
pub use nodes::{Nodes, enter_namespaces};
pub use process::{
    Process, binary, children, cpu_time, demo_model, free_port, free_ports, profile, repository,
};
