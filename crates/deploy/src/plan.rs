//! A deployment resolved: every process with its cores, ports, environment and command line. Pure:
//! equal files and facts give equal plans.

use serde::Serialize;
use std::collections::BTreeMap;
use std::fmt::{self, Write as _};
use std::path::PathBuf;
use twinfer_config::{FlagError, ServeConfig};
use twinfer_http::HostPort;
use twinfer_protocol::Role;

/// What `resolve` must know of the machines.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Facts {
    /// Cores that may be used, by name of the node. A node that is not here must list its cores in
    /// the file.
    pub cores: BTreeMap<String, Vec<u32>>,
    /// Why the model cannot be served, if that is known.
    pub model_problem: Option<String>,
}

/// What the processes themselves would refuse, known before they are started.
#[derive(Clone, Copy, Default)]
pub struct Checks<'a> {
    /// Checks the configuration of an instance.
    pub serve: Option<&'a ServeCheck>,
}

/// Checks the configuration of an instance.
pub type ServeCheck = dyn Fn(&ServeConfig) -> Result<(), FlagError>;

/// The whole plan.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Plan {
    /// Name of the deployment.
    pub deployment: String,
    /// Model directory.
    pub model: PathBuf,
    /// Name that clients use.
    pub served_model_name: String,
    /// Nodes that something of the plan runs on.
    pub nodes: Vec<PlannedNode>,
    /// Instances in the order of the file. One with ranks on several nodes is an entry for each of them.
    pub instances: Vec<PlannedInstance>,
    /// The router.
    pub router: PlannedRouter,
    /// What is allowed but likely not meant.
    pub warnings: Vec<String>,
}

/// One node.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct PlannedNode {
    /// Name.
    pub name: String,
    /// Address that others reach it at.
    pub host: String,
    /// Port of its agent.
    pub agent: Option<u16>,
}

/// Ranks of one node, of an instance that has some on several.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct PlannedRanks {
    /// Number of the first.
    pub first: u32,
    /// How many.
    pub count: u32,
    /// Of all nodes.
    pub all: u32,
    /// The first node's address on the network that ranks use.
    pub master_addr: String,
    /// Port where the first node waits for the others.
    pub rpc_port: u16,
}

/// One instance, or one node's ranks of it.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct PlannedInstance {
    /// Name, unique in the plan.
    pub name: String,
    /// Role.
    pub role: Role,
    /// Name of its node.
    pub node: String,
    /// Cores, its own unless the node shares cores.
    pub cores: Vec<u32>,
    /// Its ranks, if it is on several nodes.
    pub ranks: Option<PlannedRanks>,
    /// Address that it listens on.
    pub host: String,
    /// HTTP port; 0 for ranks whose HTTP is on another node.
    pub port: u16,
    /// Port that it hands KV over at.
    pub kv_port: Option<u16>,
    /// All of them: one for each rank.
    pub kv_ports: Vec<u16>,
    /// Environment.
    pub environment: Vec<PlannedVariable>,
    /// Command line.
    pub command: Vec<String>,
}

/// The router.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct PlannedRouter {
    /// Name of its node.
    pub node: String,
    /// Address that it listens on.
    pub host: String,
    /// HTTP port.
    pub port: u16,
    /// Environment.
    pub environment: Vec<PlannedVariable>,
    /// Command line.
    pub command: Vec<String>,
}

/// An environment variable by name; plans hold no secrets.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct PlannedVariable {
    /// Name.
    pub name: String,
    /// Where its value comes from.
    pub source: &'static str,
}

/// A port that a plan listens on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PlannedPort<'p> {
    /// Address.
    pub host: &'p str,
    /// Number.
    pub number: u16,
    /// What for.
    pub what: String,
    /// Key of the deployment file that sets it.
    pub key: &'static str,
}

impl PlannedInstance {
    /// Does it answer HTTP? Else it is ranks of an instance that does so on another node.
    pub fn answers(&self) -> bool {
        self.ranks.as_ref().is_none_or(|ranks| ranks.first == 0)
    }

    /// `http://host:port`.
    pub fn url(&self) -> String {
        format!("http://{}", HostPort::display(&self.host, self.port))
    }
}

impl PlannedRouter {
    /// `http://host:port`.
    pub fn url(&self) -> String {
        format!("http://{}", HostPort::display(&self.host, self.port))
    }
}

impl Plan {
    /// Every port that the plan listens on.
    pub fn ports(&self) -> Vec<PlannedPort<'_>> {
        let mut ports = Vec::new();
        for instance in &self.instances {
            let mut add = |number, what, key| {
                ports.push(PlannedPort {
                    host: &instance.host,
                    number,
                    what: format!("instance {}, {what}", instance.name),
                    key,
                });
            };
            if instance.answers() {
                add(instance.port, "HTTP", "port");
            }
            for &port in &instance.kv_ports {
                add(port, "KV handoff", "kv-port");
            }
            if let Some(ranks) = instance.ranks.as_ref().filter(|ranks| ranks.first == 0) {
                ports.push(PlannedPort {
                    host: &ranks.master_addr,
                    number: ranks.rpc_port,
                    what: format!("instance {}, ranks of other nodes", instance.name),
                    key: "nodes: rank-host",
                });
            }
        }
        ports.push(PlannedPort {
            host: &self.router.host,
            number: self.router.port,
            what: "router, HTTP".to_owned(),
            key: "router: port",
        });
        ports
    }
}

impl fmt::Display for Plan {
    /// One line per fact, so that plans can be compared with `diff`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "deployment {}", self.deployment)?;
        writeln!(
            f,
            "model      {} as {}",
            self.model.display(),
            self.served_model_name
        )?;
        for node in &self.nodes {
            if let Some(port) = node.agent {
                let at = HostPort::display(&node.host, port);
                writeln!(f, "agent      {} at {at}", node.name)?;
            }
        }
        for instance in &self.instances {
            writeln!(f, "\ninstance   {}", instance.name)?;
            writeln!(f, "  role     {}", instance.role)?;
            writeln!(f, "  node     {}", instance.node)?;
            writeln!(f, "  cores    {}", crate::CoreSet::text(&instance.cores))?;
            if let Some(ranks) = &instance.ranks {
                writeln!(
                    f,
                    "  ranks    {} to {} of {}, first node at {}",
                    ranks.first,
                    ranks.first + ranks.count - 1,
                    ranks.all,
                    HostPort::display(&ranks.master_addr, ranks.rpc_port)
                )?;
            }
            if instance.answers() {
                writeln!(
                    f,
                    "  http     {}",
                    HostPort::display(&instance.host, instance.port)
                )?;
            }
            for &port in &instance.kv_ports {
                writeln!(f, "  kv       {}", HostPort::display(&instance.host, port))?;
            }
            process(f, &instance.environment, &instance.command)?;
        }
        writeln!(f, "\nrouter")?;
        writeln!(f, "  node     {}", self.router.node)?;
        writeln!(
            f,
            "  http     {}",
            HostPort::display(&self.router.host, self.router.port)
        )?;
        process(f, &self.router.environment, &self.router.command)?;
        for warning in &self.warnings {
            writeln!(f, "\nwarning: {warning}")?;
        }
        Ok(())
    }
}

fn process(
    f: &mut fmt::Formatter<'_>,
    environment: &[PlannedVariable],
    command: &[String],
) -> fmt::Result {
    for variable in environment {
        writeln!(f, "  env      {} ({})", variable.name, variable.source)?;
    }
    writeln!(f, "  command  {}", shell_line(command))
}

/// A command line as a shell reads it.
pub fn shell_line(command: &[String]) -> String {
    let mut line = String::new();
    for (index, word) in command.iter().enumerate() {
        if index > 0 {
            line.push(' ');
        }
        let plain = |c: char| c.is_ascii_alphanumeric() || "-_./:=,@%+[]".contains(c);
        // Brackets are patterns to a shell only when they match a file; quoting them is safer.
        if !word.is_empty() && word.chars().all(|c| plain(c) && c != '[' && c != ']') {
            line.push_str(word);
        } else {
            let _ = write!(line, "'{}'", word.replace('\'', "'\\''"));
        }
    }
    line
}
