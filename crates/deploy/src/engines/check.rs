//! Preflight: the machine's own tools on every node, read strictly. A timeout, an empty or an unknown output is a
//! failure, never a pass.

mod parse;
mod run;
#[cfg(test)]
mod tests;

use crate::engines::file::Kind;
use crate::engines::load::EngineDeployment;
use crate::engines::plan::{EnginePlan, PortKind};
use parse::Reading;
pub use run::{Machines, Outcome, Recorder, Replay, Runner};
use serde::Serialize;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

/// How a check ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "UPPERCASE")]
pub enum Verdict {
    /// Fine.
    Ok,
    /// A fault.
    Failed,
    /// No end in time.
    Timeout,
    /// No output.
    Empty,
    /// An output that is not known, or one that cannot tell.
    Unknown,
    /// Some parts have no answer.
    Partial,
}

/// One check of a node or device.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Check {
    /// Node.
    pub node: String,
    /// Device; none for the node itself.
    pub device: Option<u32>,
    /// What was checked.
    pub check: &'static str,
    /// How it ended.
    pub verdict: Verdict,
    /// What was found.
    pub detail: String,
}

/// All checks of a deployment: the receipt.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Checks {
    /// Deployment.
    pub deployment: String,
    /// Checks by node and device.
    pub checks: Vec<Check>,
}

/// A node to be checked.
struct Target<'p> {
    name: &'p str,
    host: &'p str,
    nic: Option<&'p str>,
    kind: Option<Kind>,
    pod: Option<&'p str>,
    devices: Vec<u32>,
    ports: Vec<(u32, u32)>,
}

/// What the first round read of a node, for checks across nodes.
#[derive(Default)]
struct Found {
    checks: Vec<Check>,
    /// Address, TLS switch, SDID and pod of each device.
    addresses: BTreeMap<u32, String>,
    tls: BTreeMap<u32, String>,
    pods: BTreeMap<u32, (String, String)>,
    gateways: BTreeMap<u32, Reading>,
}

/// Checks every node of a plan, nodes at the same time.
pub fn check(deployment: &EngineDeployment, plan: &EnginePlan, runner: &dyn Runner) -> Checks {
    let targets: Vec<Target<'_>> = plan
        .nodes
        .iter()
        .filter_map(|planned| {
            let node = deployment
                .file
                .nodes
                .iter()
                .find(|node| node.name == planned.name)?;
            let mut devices: Vec<u32> = plan
                .processes
                .iter()
                .filter(|process| process.node == node.name)
                .flat_map(|process| process.devices.iter().copied())
                .collect();
            devices.sort_unstable();
            devices.dedup();
            let owned = |kind: PortKind| {
                matches!(
                    kind,
                    PortKind::Http | PortKind::Rpc | PortKind::Handoff | PortKind::Router
                )
            };
            Some(Target {
                name: &node.name,
                host: &node.host,
                nic: node.nic.as_deref(),
                kind: node.kind,
                pod: node.pod.as_deref(),
                devices,
                ports: plan
                    .ports
                    .iter()
                    .filter(|port| port.node == node.name && owned(port.kind))
                    .map(|port| (port.first, port.last))
                    .collect(),
            })
        })
        .collect();
    let mut found: Vec<Found> = each(&targets, |target| first_round(target, runner));
    let addresses: Vec<(String, BTreeMap<u32, String>)> = targets
        .iter()
        .zip(&found)
        .map(|(target, found)| (target.name.to_owned(), found.addresses.clone()))
        .collect();
    let pings: Vec<Vec<Check>> = each(&targets, |target| pings(target, &addresses, runner));
    tls_equal(&targets, &mut found);
    gateways(&targets, &mut found);
    let clean: BTreeSet<&str> = targets
        .iter()
        .zip(&pings)
        .filter(|(_, pings)| {
            !pings.is_empty() && pings.iter().all(|ping| ping.verdict == Verdict::Ok)
        })
        .map(|(target, _)| target.name)
        .collect();
    pods(&targets, &mut found, &clean);
    let mut checks: Vec<Check> = found
        .into_iter()
        .flat_map(|found| found.checks)
        .chain(pings.into_iter().flatten())
        .collect();
    let order: BTreeMap<&str, usize> = targets
        .iter()
        .enumerate()
        .map(|(index, target)| (target.name, index))
        .collect();
    checks.sort_by_key(|check| (order.get(check.node.as_str()).copied(), check.device));
    Checks {
        deployment: plan.deployment.clone(),
        checks,
    }
}

/// One thread per node.
fn each<'t, T: Send>(
    targets: &'t [Target<'t>],
    work: impl Fn(&'t Target<'t>) -> T + Sync,
) -> Vec<T> {
    std::thread::scope(|scope| {
        let threads: Vec<_> = targets
            .iter()
            .map(|target| {
                let work = &work;
                scope.spawn(move || work(target))
            })
            .collect();
        threads
            .into_iter()
            .map(|thread| {
                thread
                    .join()
                    .unwrap_or_else(|panic| std::panic::resume_unwind(panic))
            })
            .collect()
    })
}

fn words(line: &str) -> Vec<String> {
    line.split_whitespace().map(str::to_owned).collect()
}

/// Turns an outcome into a verdict; `read` sees only outputs of commands that ended well, or `any_code`.
fn judge(outcome: &Outcome, read: impl FnOnce(&str) -> Reading) -> (Verdict, String) {
    if outcome.timed_out {
        return (Verdict::Timeout, "no end in time".to_owned());
    }
    if let Some(failure) = parse::failure(&outcome.text) {
        return (Verdict::Failed, failure);
    }
    if outcome.text.trim().is_empty() {
        return (Verdict::Empty, "no output".to_owned());
    }
    match read(&outcome.text) {
        Reading::Bad(text) => (Verdict::Failed, text),
        Reading::Good(_) if outcome.code != Some(0) => {
            (Verdict::Failed, format!("exit code {}", code(outcome)))
        }
        Reading::Good(text) => (Verdict::Ok, text),
        Reading::Unknown(text) => (Verdict::Unknown, text),
    }
}

fn code(outcome: &Outcome) -> String {
    outcome
        .code
        .map_or("unknown".to_owned(), |code| code.to_string())
}

fn first_round(target: &Target<'_>, runner: &dyn Runner) -> Found {
    let mut found = Found::default();
    let run = |line: &str| runner.run(target.name, target.host, &words(line));
    let mut add =
        |device: Option<u32>, check: &'static str, (verdict, detail): (Verdict, String)| {
            found.checks.push(Check {
                node: target.name.to_owned(),
                device,
                check,
                verdict,
                detail,
            });
        };
    let interface = run("ip -o addr");
    add(
        None,
        "interface",
        judge(&interface, |text| {
            parse::interface(text, target.nic, target.host)
        }),
    );
    let listening = run("ss -Htln");
    add(None, "ports", ports(&listening, &target.ports));
    let ascend = matches!(target.kind, Some(Kind::A2 | Kind::A3));
    if !ascend {
        return found;
    }
    let files = run("ls /dev");
    add(
        None,
        "device files",
        judge(&files, |text| device_files(text, &target.devices)),
    );
    let conf = run("cat /etc/hccn.conf");
    add(
        None,
        "hccn.conf",
        judge(&conf, |text| match text.contains("address_") {
            true => Reading::Good("readable".to_owned()),
            false => Reading::Unknown(parse::short(text)),
        }),
    );
    let smi = run("npu-smi info");
    add(None, "processes", judge(&smi, parse::processes));
    let a3 = target.kind == Some(Kind::A3);
    let mut addresses = BTreeMap::new();
    let mut tls = BTreeMap::new();
    let mut spods = BTreeMap::new();
    let mut gateways = BTreeMap::new();
    for &device in &target.devices {
        let tool = |arguments: &str| run(&format!("hccn_tool -i {device} {arguments}"));
        let keep = |map: &mut BTreeMap<u32, String>, judged: &(Verdict, String)| {
            if judged.0 == Verdict::Ok {
                map.insert(device, judged.1.clone());
            }
        };
        add(Some(device), "link", judge(&tool("-link -g"), parse::link));
        let health = tool("-net_health -g");
        let detect = health
            .text
            .contains("Init")
            .then(|| tool("-netdetect -g").text);
        add(
            Some(device),
            "health",
            judge(&health, |text| parse::health(text, detect.as_deref())),
        );
        let address = judge(
            &tool(if a3 { "-vnic -g" } else { "-ip -g" }),
            parse::address,
        );
        keep(&mut addresses, &address);
        add(Some(device), "address", address);
        let switch = judge(&tool("-tls -g"), parse::tls);
        keep(&mut tls, &switch);
        add(Some(device), "TLS", switch);
        if a3 {
            let line = format!(
                "npu-smi info -t spod-info -i {} -c {}",
                device / 2,
                device % 2
            );
            let spod = judge(&run(&line), parse::spod);
            if let (Verdict::Ok, Some((sdid, pod))) = (spod.0, spod.1.split_once(' ')) {
                spods.insert(device, (sdid.to_owned(), pod.to_owned()));
            } else {
                add(Some(device), "pod", spod);
            }
        } else {
            add(
                Some(device),
                "neighbour",
                judge(&tool("-lldp -g"), parse::neighbour),
            );
            gateways.insert(device, parse::gateway(&tool("-gateway -g").text));
        }
    }
    found.addresses = addresses;
    found.tls = tls;
    found.pods = spods;
    found.gateways = gateways;
    found
}

fn device_files(text: &str, devices: &[u32]) -> Reading {
    let names: BTreeSet<&str> = text.split_whitespace().collect();
    let missing: Vec<String> = devices
        .iter()
        .map(|device| format!("davinci{device}"))
        .chain(["davinci_manager", "devmm_svm", "hisi_hdc"].map(str::to_owned))
        .filter(|name| !names.contains(name.as_str()))
        .collect();
    if missing.is_empty() {
        Reading::Good(format!("{} devices", devices.len()))
    } else {
        Reading::Bad(format!("/dev lacks {}", missing.join(", ")))
    }
}

/// Ports of the plan that somebody listens on. An empty table is a good one.
fn ports(outcome: &Outcome, planned: &[(u32, u32)]) -> (Verdict, String) {
    if outcome.timed_out {
        return (Verdict::Timeout, "no end in time".to_owned());
    }
    if outcome.code != Some(0) {
        return (Verdict::Unknown, parse::short(&outcome.text));
    }
    for line in outcome.text.lines() {
        let local = line.split_whitespace().nth(3);
        let port = local.and_then(|local| local.rsplit_once(':')?.1.parse::<u32>().ok());
        let Some(port) = port else {
            return (Verdict::Unknown, parse::short(line));
        };
        if planned
            .iter()
            .any(|(first, last)| (*first..=*last).contains(&port))
        {
            return (Verdict::Failed, format!("port {port} of the plan is taken"));
        }
    }
    (Verdict::Ok, "free".to_owned())
}

/// Every device to every device of the other nodes.
fn pings(
    target: &Target<'_>,
    addresses: &[(String, BTreeMap<u32, String>)],
    runner: &dyn Runner,
) -> Vec<Check> {
    let flag = match target.kind {
        Some(Kind::A3) => "-hccs_ping",
        Some(Kind::A2) => "-ping",
        _ => return Vec::new(),
    };
    if addresses.len() < 2 {
        return Vec::new();
    }
    let mut checks = Vec::new();
    for &device in &target.devices {
        let mut worst: Option<(Verdict, String)> = None;
        let mut asked = 0;
        for (node, list) in addresses.iter().filter(|(node, _)| node != target.name) {
            for (other, address) in list {
                asked += 1;
                let line = format!("hccn_tool -i {device} {flag} -g address {address}");
                let outcome = runner.run(target.name, target.host, &words(&line));
                let (verdict, detail) = judge(&outcome, parse::ping);
                if verdict != Verdict::Ok && worst.is_none() {
                    worst = Some((
                        verdict,
                        format!("to {node} device {other} ({address}): {detail}"),
                    ));
                }
            }
        }
        // Devices without an address have failed already; what is left of a node may be silent.
        let silent = addresses
            .iter()
            .any(|(node, list)| node != target.name && list.is_empty());
        let (verdict, detail) = match worst {
            Some(worst) => worst,
            None if silent => (Verdict::Partial, "a node has no address to ask".to_owned()),
            None => (Verdict::Ok, format!("{asked} devices")),
        };
        checks.push(Check {
            node: target.name.to_owned(),
            device: Some(device),
            check: "ping",
            verdict,
            detail,
        });
    }
    checks
}

/// One switch everywhere: the rarer one is the fault.
fn tls_equal(targets: &[Target<'_>], found: &mut [Found]) {
    let mut count: BTreeMap<String, usize> = BTreeMap::new();
    for switch in found.iter().flat_map(|found| found.tls.values()) {
        *count.entry(switch.clone()).or_default() += 1;
    }
    let Some((common, _)) = count.iter().max_by_key(|(_, count)| **count) else {
        return;
    };
    for (target, found) in targets.iter().zip(found) {
        let odd: Vec<u32> = found
            .tls
            .iter()
            .filter(|(_, switch)| *switch != common)
            .map(|(device, _)| *device)
            .collect();
        for check in &mut found.checks {
            if check.check == "TLS" && check.device.is_some_and(|device| odd.contains(&device)) {
                check.verdict = Verdict::Failed;
                check.detail = format!(
                    "the switch of {} is not {common}, as elsewhere",
                    target.name
                );
            }
        }
    }
}

/// A gateway is needed where devices stand in several networks.
fn gateways(targets: &[Target<'_>], found: &mut [Found]) {
    let network = |address: &String| {
        address
            .rsplit_once('.')
            .map(|(network, _)| network.to_owned())
    };
    let networks: BTreeSet<Option<String>> = found
        .iter()
        .flat_map(|found| found.addresses.values().map(network))
        .collect();
    for (target, found) in targets.iter().zip(found) {
        for (device, reading) in &found.gateways {
            let (verdict, detail) = match reading {
                Reading::Good(address) => (Verdict::Ok, address.clone()),
                Reading::Bad(text) if networks.len() > 1 => (Verdict::Failed, text.clone()),
                Reading::Bad(_) => (Verdict::Ok, "none, one network".to_owned()),
                Reading::Unknown(text) => (Verdict::Unknown, text.clone()),
            };
            found.checks.push(Check {
                node: target.name.to_owned(),
                device: Some(*device),
                check: "gateway",
                verdict,
                detail,
            });
        }
    }
}

/// Unequal Super Pod IDs are a fault; equal ones alone tell nothing: that takes an equal stated pod and pings without loss.
fn pods(targets: &[Target<'_>], found: &mut [Found], clean: &BTreeSet<&str>) {
    let stated: BTreeSet<Option<&str>> = targets.iter().map(|target| target.pod).collect();
    let one_stated = stated.len() == 1 && !stated.contains(&None);
    let mut count: BTreeMap<String, usize> = BTreeMap::new();
    for (_, pod) in found.iter().flat_map(|found| found.pods.values()) {
        *count.entry(pod.clone()).or_default() += 1;
    }
    let Some(common) = count
        .iter()
        .max_by_key(|(_, count)| **count)
        .map(|(pod, _)| pod.clone())
    else {
        return;
    };
    let mut seen: BTreeMap<String, String> = BTreeMap::new();
    for (target, found) in targets.iter().zip(found) {
        for (device, (sdid, pod)) in &found.pods {
            let here = format!("{} device {device}", target.name);
            let twice = seen.insert(sdid.clone(), here);
            let (verdict, detail) = match twice {
                Some(other) => (
                    Verdict::Failed,
                    format!("SDID {sdid} is that of {other} too"),
                ),
                None if *pod != common => (
                    Verdict::Failed,
                    format!("Super Pod ID {pod}, elsewhere {common}"),
                ),
                None if targets.len() == 1 => (Verdict::Ok, format!("Super Pod ID {pod}")),
                None if !one_stated => (
                    Verdict::Unknown,
                    format!(
                        "Super Pod ID {pod} everywhere, but no equal `pod` is stated for all nodes"
                    ),
                ),
                None if clean.len() < targets.len() => (
                    Verdict::Unknown,
                    format!("Super Pod ID {pod} everywhere, but not all pings are free of loss"),
                ),
                None => (
                    Verdict::Ok,
                    format!("Super Pod ID {pod}, stated, pings free of loss"),
                ),
            };
            found.checks.push(Check {
                node: target.name.to_owned(),
                device: Some(*device),
                check: "pod",
                verdict,
                detail,
            });
        }
    }
}

impl Checks {
    /// Checks that are not OK.
    pub fn failures(&self) -> impl Iterator<Item = &Check> {
        self.checks
            .iter()
            .filter(|check| check.verdict != Verdict::Ok)
    }
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Ok => "ok",
            Self::Failed => "FAILED",
            Self::Timeout => "TIMEOUT",
            Self::Empty => "EMPTY",
            Self::Unknown => "UNKNOWN",
            Self::Partial => "PARTIAL",
        })
    }
}

impl fmt::Display for Checks {
    /// A matrix per node, then every failure.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut nodes: Vec<&str> = Vec::new();
        for check in &self.checks {
            if nodes.last() != Some(&check.node.as_str()) {
                nodes.push(&check.node);
            }
        }
        for node in nodes {
            let here: Vec<&Check> = self
                .checks
                .iter()
                .filter(|check| check.node == node)
                .collect();
            writeln!(f, "node {node}")?;
            for check in here.iter().filter(|check| check.device.is_none()) {
                writeln!(
                    f,
                    "  {:<13} {:<8} {}",
                    check.check, check.verdict, check.detail
                )?;
            }
            let mut columns: Vec<&str> = Vec::new();
            for check in here.iter().filter(|check| check.device.is_some()) {
                if !columns.contains(&check.check) {
                    columns.push(check.check);
                }
            }
            if columns.is_empty() {
                continue;
            }
            write!(f, "  {:<7}", "device")?;
            for column in &columns {
                write!(f, " {column:<9}")?;
            }
            writeln!(f)?;
            let devices: BTreeSet<u32> = here.iter().filter_map(|check| check.device).collect();
            for device in devices {
                write!(f, "  {device:<7}")?;
                for column in &columns {
                    let cell = here
                        .iter()
                        .find(|check| check.device == Some(device) && check.check == *column);
                    match cell {
                        Some(check) => write!(f, " {:<9}", check.verdict)?,
                        None => write!(f, " {:<9}", "-")?,
                    }
                }
                writeln!(f)?;
            }
        }
        for check in self.failures() {
            let device = check
                .device
                .map_or(String::new(), |device| format!(" device {device}"));
            writeln!(
                f,
                "{}{device}: {}: {} {}",
                check.node, check.check, check.verdict, check.detail
            )?;
        }
        Ok(())
    }
}
