//! Engines that are driven by a template: vLLM, vLLM-Ascend and others.

mod argv;
mod check;
mod diff;
mod file;
mod head;
mod import;
mod limits;
mod lint;
mod load;
mod memory;
mod plan;
mod ports;
mod render;
mod resolve;
mod router;
mod template;

pub(crate) use file::schema;

pub use check::{Check, Checks, Machines, Outcome, Recorder, Replay, Runner, Verdict, check};
pub use diff::plan_diff;
pub use file::{Api, EngineFile, Graph, Kind, RouterProgram};
pub use import::{ImportError, Imported, NotUnderstood, import};
pub use lint::{Exception, Finding, Findings, Rule, Severity, lint, refuse, rule, rules};
pub use load::{EngineDeployment, engine_of};
pub use memory::DeviceMemory;
pub use plan::{
    EngineInstancePlan, EnginePlan, NodeRanks, Pair, PlannedNode, PortKind, PortUse, Process,
    RouterPlan,
};
pub use render::{RenderOptions, RenderedFile, render, write_files};
pub use resolve::resolve_engines;
pub use template::{Flow, TemplateError, built_in_names};
