//! Deployment file, plan and supervision: what `twinfer plan` prints and `twinfer up` runs.
#![forbid(unsafe_code)]

mod agent;
mod command;
mod cores;
mod diagnose;
mod diagnostic;
pub mod engines;
mod example;
mod facts;
mod file;
mod launch;
mod load;
mod logs;
mod plan;
mod ports;
mod ready;
mod resolve;
mod schema;
mod source;
mod supervise;

pub use agent::{AgentError, run_agent};
pub use diagnose::{Cause, Diagnosis};
pub use diagnostic::{Diagnostic, Diagnostics, Place};
pub use example::{example, schema};
pub use facts::local_facts;
pub use file::{
    Connector, DeploymentFile, Engine, HandoffSpec, InstanceSpec, ModelSpec, NodeSpec, OneOrList,
    RouterSpec,
};
pub use launch::{
    PortProblem, SUPERVISOR_ENV, UpError, UpOptions, random_key, reachable_router_url, up,
};
pub use load::{Deployment, LoadError};
pub use logs::LogStyle;
pub use plan::{
    Checks, Facts, Plan, PlannedInstance, PlannedNode, PlannedPort, PlannedRanks, PlannedRouter,
    PlannedVariable, ServeCheck, shell_line,
};
pub use resolve::resolve;
pub use twinfer_config::CoreSet;
