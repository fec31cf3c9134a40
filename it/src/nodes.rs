//! Nodes of a test: network and mount namespaces with a private /dev/shm each, joined by two networks.

use crate::{Process, binary};
use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::io::{self, BufRead, BufReader};
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};

/// Set in a process that is in namespaces of its own.
const INSIDE: &str = "TWINFER_TEST_NAMESPACES";
/// A command of the system ends within so many seconds.
const LIMIT: &str = "20";

/// Nodes, which end with this.
#[derive(Debug)]
pub struct Nodes {
    holders: Vec<Child>,
}

/// Has this process run in namespaces of its own, where it may make networks; it begins anew there with the same
/// arguments. Returns inside.
///
/// # Errors
/// What the system says; it needs `unshare` and, without root, user namespaces.
pub fn enter_namespaces() -> io::Result<()> {
    if std::env::var_os(INSIDE).is_some() {
        return Ok(());
    }
    // Built before anything waits for what it starts, and where a build finds the network.
    binary();
    let mut command = Command::new("unshare");
    command.args(["--net", "--mount"]);
    if !rustix::process::geteuid().is_root() {
        command.args(["--user", "--map-root-user"]);
    }
    let program = std::env::current_exe()?;
    Err(command
        .arg(program)
        .args(std::env::args_os().skip(1))
        .env(INSIDE, "1")
        .exec())
}

/// Runs a command of the system to its end.
fn run(program: &str, arguments: &[&str]) -> io::Result<()> {
    let status = Command::new("timeout")
        .args([LIMIT, program])
        .args(arguments)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .status()?;
    match status.success() {
        true => Ok(()),
        false => {
            let line = arguments.join(" ");
            Err(io::Error::other(format!("{program} {line}: {status}")))
        }
    }
}

fn ip(arguments: &str) -> io::Result<()> {
    run("ip", &arguments.split(' ').collect::<Vec<_>>())
}

impl Nodes {
    /// Makes `count` nodes on two networks: the one of [`Self::host`], which this process is on, too, and that of
    /// [`Self::rank_host`]. To be called inside [`enter_namespaces`].
    ///
    /// # Errors
    /// What the system says.
    pub fn new(count: usize) -> io::Result<Self> {
        ip("link set lo up")?;
        for (bridge, network) in [("hosts", 77), ("ranks", 78)] {
            ip(&format!("link add {bridge} type bridge"))?;
            ip(&format!("addr add 10.{network}.0.254/24 dev {bridge}"))?;
            ip(&format!("link set {bridge} up"))?;
        }
        let mut nodes = Self {
            holders: Vec::new(),
        };
        for node in 0..count {
            nodes.add(node)?;
        }
        Ok(nodes)
    }

    fn add(&mut self, node: usize) -> io::Result<()> {
        // It ends when its input is closed, and with it the namespaces.
        let script = "mount -t tmpfs tmpfs /dev/shm && ip link set lo up && echo made && exec cat";
        let mut holder = Command::new("unshare")
            .args(["--net", "--mount", "sh", "-c", script])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let stdout = holder.stdout.take();
        let id = holder.id();
        self.holders.push(holder);
        let mut line = String::new();
        if let Some(stdout) = stdout {
            BufReader::new(stdout).read_line(&mut line)?;
        }
        if line != "made\n" {
            return Err(io::Error::other("a node could not be made"));
        }
        for (bridge, network, device) in [("hosts", 77, "eth0"), ("ranks", 78, "eth1")] {
            let ours = format!("{bridge}{node}");
            ip(&format!(
                "link add {ours} type veth peer name {device} netns {id}"
            ))?;
            ip(&format!("link set {ours} master {bridge} up"))?;
            let number = node + 1;
            let inside = format!("-t {id} -n ip addr add 10.{network}.0.{number}/24 dev {device}");
            run("nsenter", &inside.split(' ').collect::<Vec<_>>())?;
            let inside = format!("-t {id} -n ip link set {device} up");
            run("nsenter", &inside.split(' ').collect::<Vec<_>>())?;
        }
        Ok(())
    }

    /// Address of a node on the network for HTTP and agents.
    pub fn host(node: usize) -> String {
        format!("10.77.0.{}", node + 1)
    }

    /// Address of a node on the network that ranks use.
    pub fn rank_host(node: usize) -> String {
        format!("10.78.0.{}", node + 1)
    }

    /// Starts `twinfer` on a node.
    ///
    /// # Panics
    /// When it cannot be started.
    pub fn start<S: AsRef<OsStr>>(
        &self,
        node: usize,
        arguments: &[S],
        environment: &[(&str, &str)],
    ) -> Process {
        let id = self.holders[node].id().to_string();
        let mut command = Command::new("nsenter");
        command
            .args(["-t", &id, "--net", "--mount", "--"])
            .arg(binary())
            .args(arguments);
        Process::run(&mut command, environment)
    }

    /// Cuts a node off from the network that ranks use, or joins it again.
    ///
    /// # Errors
    /// What the system says.
    pub fn cut(&self, node: usize, cut: bool) -> io::Result<()> {
        let state = if cut { "down" } else { "up" };
        ip(&format!("link set ranks{node} {state}"))
    }

    /// Processes on a node, by number, with their command lines; those that hold it up are left out.
    pub fn processes(&self, node: usize) -> BTreeMap<u32, String> {
        let holder = self.holders[node].id();
        let network = |id: u32| std::fs::read_link(format!("/proc/{id}/ns/net")).ok();
        let own = network(holder);
        let mut found = BTreeMap::new();
        for entry in std::fs::read_dir("/proc").into_iter().flatten().flatten() {
            let id = entry.file_name().to_string_lossy().parse::<u32>();
            let Ok(id) = id else { continue };
            if id == holder || network(id) != own || own.is_none() {
                continue;
            }
            let line = std::fs::read(format!("/proc/{id}/cmdline")).unwrap_or_default();
            // One that has ended and is not collected yet has none.
            if !line.is_empty() {
                let line = String::from_utf8_lossy(&line).replace('\0', " ");
                found.insert(id, line.trim_end().to_owned());
            }
        }
        found
    }

    /// Number of the process of a rank, wherever it is, by its variable RANK.
    pub fn rank(&self, rank: u32) -> Option<u32> {
        let wanted = format!("RANK={rank}");
        (0..self.holders.len())
            .flat_map(|node| self.processes(node).into_keys())
            .find(|id| {
                let environment = std::fs::read(format!("/proc/{id}/environ")).unwrap_or_default();
                let mut variables = environment.split(|byte| *byte == 0);
                variables.any(|variable| variable == wanted.as_bytes())
            })
    }

    /// Files in the /dev/shm of a node.
    pub fn shared_files(&self, node: usize) -> Vec<PathBuf> {
        let folder = format!("/proc/{}/root/dev/shm", self.holders[node].id());
        let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
        entries.map(|entry| entry.path()).collect()
    }
}

impl Drop for Nodes {
    fn drop(&mut self) {
        for holder in &mut self.holders {
            // Closes its input, too; an error means that it has ended already.
            let _ = holder.kill();
            let _ = holder.wait();
        }
    }
}
