//! The plan of a deployment by template: every process with its devices, ranks, ports, environment and
//! arguments. Pure: equal files give equal plans.

use crate::engines::file::{Api, RouterProgram};
use crate::engines::memory::DeviceMemory;
use crate::engines::template::Flow;
use crate::plan::shell_line;
use serde::Serialize;
use serde_json::{Map, Value};
use std::fmt;
use twinfer_protocol::Role;

/// A deployment by template, resolved.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct EnginePlan {
    /// Name of the deployment.
    pub deployment: String,
    /// Engine.
    pub engine: String,
    /// Its version.
    pub engine_version: String,
    /// What it is, and what it is not.
    pub head: Vec<String>,
    /// Model directory on the nodes.
    pub model: String,
    /// Name that clients use.
    pub served_model_name: String,
    /// Connector between prefill and decode.
    pub connector: Option<String>,
    /// Who is asked first.
    pub flow: Option<Flow>,
    /// Nodes that run something.
    pub nodes: Vec<PlannedNode>,
    /// Engines.
    pub instances: Vec<EngineInstancePlan>,
    /// Processes, in the order in which they are started.
    pub processes: Vec<Process>,
    /// The router.
    pub router: Option<RouterPlan>,
    /// Ports by node.
    pub ports: Vec<PortUse>,
    /// What a request may ask of each pair.
    pub pairs: Vec<Pair>,
    /// Memory of a device of each instance, where the model's shape and the devices' memory are known.
    pub memory: Vec<DeviceMemory>,
    /// Numbers of lint rules whose findings were permitted.
    pub allowed: Vec<u16>,
}

/// A node.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct PlannedNode {
    /// Name.
    pub name: String,
    /// Address.
    pub host: String,
    /// Devices that the plan uses.
    pub devices_used: u32,
    /// Devices that it has.
    pub devices: u32,
}

/// One engine.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct EngineInstancePlan {
    /// Name.
    pub name: String,
    /// Number of its group in the file.
    #[serde(skip)]
    pub group: usize,
    /// Role.
    pub role: Role,
    /// Data-parallel size.
    pub dp: u32,
    /// Tensor-parallel size.
    pub tp: u32,
    /// Pipeline-parallel size.
    pub pp: u32,
    /// Context-parallel size.
    pub pcp: u32,
    /// Expert-parallel size; none without expert parallelism.
    pub ep: Option<u32>,
    /// API servers.
    pub api: Api,
    /// Node and its ranks, first and count.
    pub ranks: Vec<NodeRanks>,
    /// Endpoints, `host:port`.
    pub endpoints: Vec<String>,
    /// Where its ranks meet.
    pub rendezvous: String,
}

/// Ranks of an instance on one node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct NodeRanks {
    /// Node.
    pub node: String,
    /// First rank.
    pub first: u32,
    /// How many.
    pub count: u32,
}

/// One process.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Process {
    /// Name, unique in the plan.
    pub name: String,
    /// Instance.
    pub instance: String,
    /// Number of the instance in the plan.
    #[serde(skip)]
    pub instance_index: usize,
    /// Role.
    pub role: Role,
    /// Node.
    pub node: String,
    /// Devices on it.
    pub devices: Vec<u32>,
    /// First data-parallel rank.
    pub first_rank: u32,
    /// Data-parallel ranks.
    pub ranks: u32,
    /// HTTP port; none for a node that only computes.
    pub port: Option<u16>,
    /// Environment.
    pub environment: Vec<(String, String)>,
    /// Variables whose values come from the environment at the start.
    pub secrets: Vec<String>,
    /// Command and arguments.
    pub argv: Vec<String>,
    /// Flags by name without hyphens, as values.
    #[serde(skip)]
    pub settings: Map<String, Value>,
}

/// The router.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct RouterPlan {
    /// Program.
    pub program: RouterProgram,
    /// Node.
    pub node: String,
    /// Address.
    pub host: String,
    /// Port.
    pub port: u16,
    /// Prefill endpoints, `host:port`.
    pub prefill: Vec<String>,
    /// Decode endpoints.
    pub decode: Vec<String>,
    /// Endpoints of instances that do both.
    pub both: Vec<String>,
    /// Command and arguments.
    pub argv: Vec<String>,
}

/// Ports that are listened on, or drawn from, on a node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct PortUse {
    /// Node.
    pub node: String,
    /// First.
    pub first: u32,
    /// Last.
    pub last: u32,
    /// What for.
    pub what: String,
    /// Kind.
    pub kind: PortKind,
    /// Process, where one owns them.
    pub process: Option<String>,
    /// Instance, where one owns them.
    pub instance: Option<String>,
}

/// What ports are for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum PortKind {
    /// Requests.
    Http,
    /// Rendezvous of data-parallel ranks.
    Rpc,
    /// Handshakes of the handoff.
    Handoff,
    /// Drawn at random by the handoff's transport.
    Transport,
    /// The collective library's.
    Collective,
    /// The router's.
    Router,
    /// Drawn by the kernel for outgoing connections.
    Ephemeral,
}

/// What a request may ask of a prefill and a decode instance, or of one that does both.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Pair {
    /// Prefill instance.
    pub prefill: String,
    /// Decode instance.
    pub decode: String,
    /// Pairs with these limits; this is the first.
    pub count: u32,
    /// Most tokens of a prompt.
    pub max_prompt: Option<u64>,
    /// Most tokens of prompt and answer.
    pub max_len: Option<u64>,
    /// Sequences that decode steps really hold, over all its ranks.
    pub decode_seqs: Option<u64>,
}

impl fmt::Display for EnginePlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "deployment {}", self.deployment)?;
        writeln!(f, "engine     {} {}", self.engine, self.engine_version)?;
        writeln!(f, "model      {} as {}", self.model, self.served_model_name)?;
        for line in &self.head {
            writeln!(f, "           {line}")?;
        }
        for number in &self.allowed {
            writeln!(f, "allowed    rule {number}")?;
        }
        writeln!(f, "\nports")?;
        for port in &self.ports {
            let numbers = if port.first == port.last {
                port.first.to_string()
            } else {
                format!("{}-{}", port.first, port.last)
            };
            writeln!(f, "  {:<12} {:<13} {}", port.node, numbers, port.what)?;
        }
        if !self.pairs.is_empty() {
            writeln!(f, "\nlimits")?;
        }
        for pair in &self.pairs {
            let number =
                |value: Option<u64>| value.map_or("the model's".to_owned(), |n| n.to_string());
            let who = if pair.prefill == pair.decode {
                pair.decode.clone()
            } else {
                format!("{} -> {}", pair.prefill, pair.decode)
            };
            let who = if pair.count > 1 {
                format!("{who} and {} more", pair.count - 1)
            } else {
                who
            };
            let seqs = pair
                .decode_seqs
                .map(|seqs| format!(", {seqs} sequences in decode"))
                .unwrap_or_default();
            writeln!(
                f,
                "  {who}: prompt {}, prompt and answer {}{seqs}",
                number(pair.max_prompt),
                number(pair.max_len)
            )?;
        }
        if !self.memory.is_empty() {
            writeln!(f, "\nmemory of one device")?;
        }
        for memory in &self.memory {
            writeln!(f, "  {memory}")?;
        }
        for process in &self.processes {
            writeln!(f, "\nprocess    {}", process.name)?;
            writeln!(f, "  instance {} ({})", process.instance, process.role)?;
            writeln!(f, "  node     {}", process.node)?;
            let devices: Vec<String> = process.devices.iter().map(u32::to_string).collect();
            if !devices.is_empty() {
                writeln!(f, "  devices  {}", devices.join(","))?;
            }
            let last = process.first_rank + process.ranks.saturating_sub(1);
            writeln!(f, "  ranks    {}-{last}", process.first_rank)?;
            if let Some(port) = process.port {
                writeln!(f, "  http     {port}")?;
            }
            for (name, value) in &process.environment {
                writeln!(f, "  env      {name}={value}")?;
            }
            for name in &process.secrets {
                writeln!(f, "  env      {name} (from the environment)")?;
            }
            writeln!(f, "  command  {}", shell_line(&process.argv))?;
        }
        if let Some(router) = &self.router {
            writeln!(f, "\nrouter")?;
            writeln!(f, "  node     {}", router.node)?;
            writeln!(f, "  command  {}", shell_line(&router.argv))?;
        }
        Ok(())
    }
}

impl EnginePlan {
    /// The process's instance.
    pub fn instance(&self, process: &Process) -> Option<&EngineInstancePlan> {
        self.instances.get(process.instance_index)
    }

    /// Processes of an instance.
    pub fn processes_of(&self, instance: &str) -> impl Iterator<Item = &Process> {
        let index = self.instances.iter().position(|one| one.name == instance);
        // Processes stand in the order of their instances.
        let range = index.map_or(0..0, |index| {
            let from = self
                .processes
                .partition_point(|process| process.instance_index < index);
            let to = self
                .processes
                .partition_point(|process| process.instance_index <= index);
            from..to
        });
        self.processes[range].iter()
    }
}

impl Process {
    /// A setting as a number.
    pub fn number(&self, key: &str) -> Option<u64> {
        let value = self.settings.get(key)?;
        value
            .as_u64()
            .or_else(|| value.as_str().and_then(|text| text.parse().ok()))
    }

    /// A setting that is an object.
    pub fn object(&self, key: &str) -> Option<&Map<String, Value>> {
        self.settings.get(key)?.as_object()
    }

    /// A variable of the environment.
    pub fn variable(&self, name: &str) -> Option<&str> {
        let found = self.environment.iter().find(|(known, _)| known == name);
        found.map(|(_, value)| value.as_str())
    }

    /// Drafts of a step.
    pub fn drafts(&self) -> u64 {
        self.object("speculative-config")
            .and_then(|config| config.get("num_speculative_tokens"))
            .and_then(Value::as_u64)
            .unwrap_or(0)
    }
}
