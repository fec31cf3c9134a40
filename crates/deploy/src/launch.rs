//! Runs a plan on this machine: child processes of one binary, their logs, their readiness, their end.

use crate::agent::{Agents, Heard};
use crate::facts::is_local;
use crate::logs::{LogStyle, Logs};
use crate::plan::{Plan, PlannedInstance, PlannedNode, PlannedVariable};
use crate::ready;
use crate::supervise::{Action, Cause, Ended, Event, Exit, Limits, Supervisor};
use rustix::process::{PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use std::fmt::Write as _;
use std::net::TcpListener;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::process::Stdio;
use std::time::Duration;
use tokio::process::{Child, Command};
use tokio::sync::{mpsc, oneshot, watch};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep_until, timeout};
use twinfer_config::{RouterConfig, ServeConfig};
use twinfer_http::HostPort;
use twinfer_protocol::{PEER_KEY_ENV, PEER_KEY_ENV_COMPAT};

/// Environment variable by which a child learns the process id of the one that started it, so that it
/// can ask the kernel to end it with that one.
pub const SUPERVISOR_ENV: &str = "TWINFER_SUPERVISOR_PID";

/// How to run a plan.
#[derive(Clone, Debug)]
pub struct UpOptions {
    /// The `twinfer` binary.
    pub program: PathBuf,
    /// Time until every process must be ready.
    pub ready_timeout: Duration,
    /// Where the children's log lines go.
    pub logs: LogStyle,
    /// Key between the processes, for [`PEER_KEY_ENV`]; none leaves the environment as it is.
    pub peer_key: Option<String>,
    /// Key that agents of other nodes hold, too.
    pub agent_key: Option<String>,
}

/// Why a plan did not run to a clean end.
#[derive(Debug, thiserror::Error)]
pub enum UpError {
    /// Found before anything was started: ports in use or not to be had.
    #[error("{}", .0.iter().map(|p| p.message.as_str()).collect::<Vec<_>>().join("\n"))]
    Ports(Vec<PortProblem>),
    /// Found before anything was started: something that cannot run here.
    #[error("{0}")]
    Place(String),
    /// A process failed.
    #[error("{message}")]
    Failed {
        /// What happened, in one line.
        message: String,
        /// The last log lines of the processes that failed; empty if there are none.
        log: String,
        /// Exit code of the process that failed first, if it ended with one by itself.
        code: Option<i32>,
    },
}

/// A port that cannot be listened on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PortProblem {
    /// Which one, what for, and why not.
    pub message: String,
    /// Key of the deployment file that sets it.
    pub key: &'static str,
}

/// Log lines of a failed process that a message repeats.
const LAST_LINES: usize = 20;
/// After a process has ended its last output is waited for so long.
const OUTPUT_GRACE: Duration = Duration::from_millis(500);
/// What a drain may take beyond what the process was told.
const DRAIN_MARGIN: Duration = Duration::from_secs(5);

/// What tasks tell the main loop.
enum Note {
    Event(Event),
    /// Why a child is not ready yet.
    Waiting(usize, String),
    /// An agent passes on a line of a child.
    Line(usize, String),
}

/// Runs `plan` until `stop` counts up (once: drain; twice: end now) or something fails. `ready` is told
/// when everything serves.
///
/// To be awaited on the main thread, not in a spawned task: the kernel ends the children when the
/// thread that started them ends.
///
/// # Errors
/// [`UpError`]; nothing is running any more then.
pub async fn up(
    plan: &Plan,
    options: &UpOptions,
    mut stop: watch::Receiver<u32>,
    ready: oneshot::Sender<()>,
) -> Result<(), UpError> {
    check_place(plan)?;
    check_ports(plan)?;
    let (notes, mut inbox) = mpsc::channel::<Note>(64);
    let agents = agents(plan, options, &notes)?;
    let mut run = Run {
        plan,
        options,
        agents,
        children: (0..=plan.instances.len()).map(|_| None).collect(),
        waiting: vec![String::new(); plan.instances.len() + 1],
        logs: Logs::new(names(plan), options.logs, LAST_LINES),
        tasks: JoinSet::new(),
        notes,
        ready: Some(ready),
    };
    let start = Instant::now();
    let (mut machine, mut actions) =
        Supervisor::start(run.children.len(), limits(plan, options), Duration::ZERO);
    let mut stops = *stop.borrow_and_update();
    let mut pending = stops;
    let ended = loop {
        let mut events = Vec::new();
        for action in actions.drain(..) {
            if let Action::Finish(ended) = action {
                return run.finish(&ended).await;
            }
            events.extend(run.act(&action));
        }
        if pending > 0 {
            pending -= 1;
            events.push(Event::Stop);
        }
        if events.is_empty() {
            let deadline = machine.next_deadline().map(|deadline| start + deadline);
            let event = tokio::select! {
                note = inbox.recv() => match note {
                    Some(Note::Event(event)) => event,
                    Some(Note::Waiting(child, why)) => {
                        run.waiting[child] = why;
                        continue;
                    }
                    Some(Note::Line(child, text)) => {
                        run.logs.take(child, &text);
                        continue;
                    }
                    // `run` keeps a sender, so this does not happen.
                    None => break Ended { failure: None, killed: Vec::new(), left: Vec::new() },
                },
                changed = stop.changed() => {
                    let now = if changed.is_ok() { *stop.borrow_and_update() } else { stops + 1 };
                    pending += now.saturating_sub(stops);
                    stops = now;
                    if changed.is_err() {
                        // Nobody can ask any more; do not ask again.
                        let (keep, quiet) = watch::channel(stops);
                        stop = quiet;
                        run.tasks.spawn(async move { keep.closed().await; });
                    }
                    continue;
                }
                () = async {
                    match deadline {
                        Some(deadline) => sleep_until(deadline).await,
                        None => std::future::pending().await,
                    }
                } => Event::Tick,
            };
            events.push(event);
        }
        for event in events {
            actions.extend(machine.handle(start.elapsed(), &event));
        }
    };
    run.finish(&ended).await
}

/// What is running.
struct Run<'p> {
    plan: &'p Plan,
    options: &'p UpOptions,
    /// Of the nodes that are not this machine.
    agents: Agents,
    /// Handles that signals go to, in the order of the plan, the router last.
    children: Vec<Option<OwnedFd>>,
    /// Why a child was not ready when it was last asked.
    waiting: Vec<String>,
    logs: Logs,
    tasks: JoinSet<()>,
    notes: mpsc::Sender<Note>,
    ready: Option<oneshot::Sender<()>>,
}

impl Run<'_> {
    fn act(&mut self, action: &Action) -> Option<Event> {
        match action {
            &Action::Start(child) => match self.start(child) {
                Ok(()) => None,
                Err(error) => Some(Event::StartFailed(child, error.to_string())),
            },
            &Action::Terminate(child) => self.signal(child, Signal::TERM),
            &Action::Kill(child) => self.signal(child, Signal::KILL),
            Action::Ready => {
                // The one who waits for it may have gone.
                let _ = self.ready.take().map(|ready| ready.send(()));
                None
            }
            Action::Finish(_) => None,
        }
    }

    fn signal(&mut self, child: usize, signal: Signal) -> Option<Event> {
        if let Some(node) = self.elsewhere(child) {
            self.agents.signal(node, child, signal == Signal::KILL);
            return None;
        }
        // A child that has ended meanwhile says so itself.
        let _ = self.children[child]
            .as_ref()
            .map(|handle| pidfd_send_signal(handle, signal));
        None
    }

    /// The node of a child that an agent starts.
    fn elsewhere(&self, child: usize) -> Option<&str> {
        let instance = self.plan.instances.get(child)?;
        let node = self
            .plan
            .nodes
            .iter()
            .find(|node| node.name == instance.node);
        node.filter(|node| !is_local(&node.host))
            .map(|node| node.name.as_str())
    }

    /// Has somebody ask a child whether it is ready. Ranks without HTTP are when their instance's first node is.
    fn await_ready(&mut self, index: usize) {
        let (notes, url) = (self.notes.clone(), self.url(index));
        let answers = self.plan.instances.get(index);
        let answers = answers.is_none_or(PlannedInstance::answers);
        self.tasks.spawn(async move {
            let told = notes.clone();
            let on_wait = |why: String| {
                // The reason is told again soon if there is no room.
                let _ = told.try_send(Note::Waiting(index, why));
            };
            if !answers || ready::wait(&url, on_wait).await {
                let _ = notes.send(Note::Event(Event::Ready(index))).await;
            }
        });
    }

    fn start(&mut self, index: usize) -> std::io::Result<()> {
        let (command, environment) = self.command(index);
        if let Some(node) = self.elsewhere(index) {
            self.agents.serve(node, index, &command[2..])?;
            self.await_ready(index);
            return Ok(());
        }
        let mut process = Command::new(&self.options.program);
        process
            .args(&command[1..])
            .process_group(0)
            .kill_on_drop(true)
            .env(SUPERVISOR_ENV, std::process::id().to_string())
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        if let (Some(key), true) = (
            &self.options.peer_key,
            environment
                .iter()
                .any(|variable| variable.name == PEER_KEY_ENV),
        ) {
            process
                .env(PEER_KEY_ENV, key)
                .env_remove(PEER_KEY_ENV_COMPAT);
        }
        let mut child = process.spawn()?;
        // It has not been waited for, so the number is its own.
        let pid = child
            .id()
            .and_then(|pid| i32::try_from(pid).ok())
            .and_then(rustix::process::Pid::from_raw);
        let pid = pid.ok_or_else(|| std::io::Error::other("the process has no number"))?;
        self.children[index] = Some(pidfd_open(pid, PidfdFlags::empty())?);
        let mut outputs = JoinSet::new();
        child
            .stdout
            .take()
            .map(|pipe| outputs.spawn(self.logs.follow(index, pipe)));
        child
            .stderr
            .take()
            .map(|pipe| outputs.spawn(self.logs.follow(index, pipe)));
        self.watch(index, child, outputs);
        self.await_ready(index);
        Ok(())
    }

    /// Waits for the end of a child and then for its last output.
    fn watch(&mut self, index: usize, mut child: Child, mut outputs: JoinSet<()>) {
        let notes = self.notes.clone();
        self.tasks.spawn(async move {
            let exit = match child.wait().await {
                Ok(status) => Exit::of(status),
                Err(_) => Exit::Unknown,
            };
            let _ = timeout(OUTPUT_GRACE, async {
                while outputs.join_next().await.is_some() {}
            })
            .await;
            let _ = notes.send(Note::Event(Event::Exited(index, exit))).await;
        });
    }

    fn command(&self, index: usize) -> (Vec<String>, &[PlannedVariable]) {
        let (command, environment) = match self.plan.instances.get(index) {
            Some(instance) => (&instance.command, &instance.environment),
            None => (&self.plan.router.command, &self.plan.router.environment),
        };
        let mut command = command.clone();
        if self.options.logs == LogStyle::Json && !command.iter().any(|word| word == "--log-format")
        {
            command.extend(["--log-format".to_owned(), "json".to_owned()]);
        }
        (command, environment)
    }

    fn url(&self, index: usize) -> String {
        match self.plan.instances.get(index) {
            Some(instance) => instance.url(),
            None => reachable_router_url(self.plan),
        }
    }

    async fn finish(mut self, ended: &Ended) -> Result<(), UpError> {
        self.tasks.abort_all();
        while self.tasks.join_next().await.is_some() {}
        let name = |child: usize| self.logs.name(child).to_owned();
        let list = |children: &[usize]| {
            children
                .iter()
                .map(|&child| name(child))
                .collect::<Vec<_>>()
                .join(", ")
        };
        let mut code = None;
        let mut message = String::new();
        let mut log = String::new();
        match &ended.failure {
            None => {}
            Some(Cause::StartFailed(child, why)) => {
                let program = self.options.program.display();
                let _ = write!(
                    message,
                    "{} could not be started: {program}: {why}",
                    name(*child)
                );
            }
            Some(Cause::Died {
                child,
                exit,
                was_ready,
            }) => {
                if let Exit::Code(number) = exit {
                    code = Some(*number);
                }
                let when = if *was_ready {
                    ""
                } else {
                    " before everything was ready"
                };
                let _ = write!(
                    message,
                    "{} ended with {}{when}; all others were stopped",
                    name(*child),
                    exit_text(*exit)
                );
                log.push_str(&self.logs.last_lines(*child));
            }
            Some(Cause::NotReady(children)) => {
                let seconds = self.options.ready_timeout.as_secs_f64();
                let late: Vec<String> = children
                    .iter()
                    .map(|&child| match self.waiting[child].as_str() {
                        "" => name(child),
                        why => format!("{} ({why})", name(child)),
                    })
                    .collect();
                let _ = write!(
                    message,
                    "not ready within {seconds} s: {}; all were stopped",
                    late.join(", ")
                );
                for &child in children {
                    log.push_str(&self.logs.last_lines(child));
                }
            }
            Some(Cause::BadDrain(child, exit)) => {
                let _ = write!(
                    message,
                    "{} ended with {} while it drained",
                    name(*child),
                    exit_text(*exit)
                );
                log.push_str(&self.logs.last_lines(*child));
            }
        }
        if ended.failure.is_none() && !ended.killed.is_empty() {
            let _ = write!(
                message,
                "did not end in time and had to be killed: {}",
                list(&ended.killed)
            );
        }
        if !ended.left.is_empty() {
            let _ = write!(
                message,
                "; still running although killed: {}",
                list(&ended.left)
            );
        }
        self.logs.flush().await;
        if message.is_empty() {
            Ok(())
        } else {
            Err(UpError::Failed { message, log, code })
        }
    }
}

/// The router's URL from this machine, also when it listens on a wildcard.
pub fn reachable_router_url(plan: &Plan) -> String {
    let host = match plan.router.host.as_str() {
        "0.0.0.0" => "127.0.0.1",
        "::" | "[::]" => "::1",
        host => host,
    };
    format!("http://{}", HostPort::display(host, plan.router.port))
}

/// A key for one start.
///
/// # Errors
/// When the system gives no random bytes.
pub fn random_key() -> Result<String, String> {
    let mut bytes = [0u8; 32];
    getrandom::fill(&mut bytes).map_err(|error| format!("random bytes: {error}"))?;
    Ok(bytes.iter().fold(String::new(), |mut text, byte| {
        let _ = write!(text, "{byte:02x}");
        text
    }))
}

fn names(plan: &Plan) -> Vec<String> {
    plan.instances
        .iter()
        .map(|instance| instance.name.clone())
        .chain(["router".to_owned()])
        .collect()
}

fn exit_text(exit: Exit) -> String {
    match exit {
        Exit::Unknown => "nobody left to say how".to_owned(),
        Exit::Code(code) => format!("exit code {code}"),
        Exit::Signal(number) => match number {
            6 => "signal 6 (SIGABRT)".to_owned(),
            9 => "signal 9 (SIGKILL; the system may be out of memory)".to_owned(),
            11 => "signal 11 (SIGSEGV)".to_owned(),
            15 => "signal 15 (SIGTERM)".to_owned(),
            other => format!("signal {other}"),
        },
    }
}

/// Reaches the agents of all nodes that are not this machine.
fn agents(plan: &Plan, options: &UpOptions, notes: &mpsc::Sender<Note>) -> Result<Agents, UpError> {
    let others = plan.nodes.iter().filter(|node| !is_local(&node.host));
    let others: Vec<&PlannedNode> = others.collect();
    let notes = notes.clone();
    // Called by threads of their own; with the supervision gone nobody wants to know.
    let tell = move |heard: Heard| {
        let note = match heard {
            Heard::StartFailed(child, why) => Note::Event(Event::StartFailed(child, why)),
            Heard::Line(child, text) => Note::Line(child, text),
            Heard::Ended(child, exit) => Note::Event(Event::Exited(child, exit)),
        };
        let _ = notes.blocking_send(note);
    };
    let key = options.agent_key.as_deref();
    Agents::connect(&others, &plan.deployment, key, &tell).map_err(UpError::Place)
}

fn check_place(plan: &Plan) -> Result<(), UpError> {
    let mut elsewhere = Vec::new();
    let has_agent = |name: &str| {
        let node = plan.nodes.iter().find(|node| node.name == name);
        node.is_some_and(|node| node.agent.is_some())
    };
    for instance in plan
        .instances
        .iter()
        .filter(|instance| !is_local(&instance.host) && !has_agent(&instance.node))
    {
        elsewhere.push(format!(
            "instance {} is on node {} ({}), which names no `agent`",
            instance.name, instance.node, instance.host
        ));
    }
    if !is_local(&plan.router.host) {
        elsewhere.push(format!("the router is on {}", plan.router.host));
    }
    if elsewhere.is_empty() {
        return Ok(());
    }
    Err(UpError::Place(format!(
        "{}; `up` starts the router and what has no agent on this machine only",
        elsewhere.join(", ")
    )))
}

/// Every port of the plan must be free before anything is started; all that are not are named.
fn check_ports(plan: &Plan) -> Result<(), UpError> {
    let mut problems = Vec::new();
    let mut held = Vec::new();
    for port in plan.ports().into_iter().filter(|port| is_local(port.host)) {
        let reason = match TcpListener::bind((port.host, port.number)) {
            Ok(listener) => {
                held.push(listener);
                continue;
            }
            Err(error) if error.kind() == std::io::ErrorKind::AddrInUse => " is in use".to_owned(),
            Err(error) => format!(": {error}"),
        };
        problems.push(PortProblem {
            message: format!(
                "port {} on {} ({}){reason}",
                port.number, port.host, port.what
            ),
            key: port.key,
        });
    }
    if problems.is_empty() {
        Ok(())
    } else {
        Err(UpError::Ports(problems))
    }
}

/// The drains that the processes were told, and some time to do it.
fn limits(plan: &Plan, options: &UpOptions) -> Limits {
    let of_instances = plan
        .instances
        .iter()
        .filter_map(|instance| parsed::<ServeConfig>(&instance.command))
        .map(|config| seconds(config.drain_settle) + seconds(config.drain_timeout))
        .max();
    let of_router = parsed::<RouterConfig>(&plan.router.command)
        .map(|config| seconds(config.drain_settle) + seconds(config.drain_timeout));
    Limits {
        ready: options.ready_timeout,
        drain_router: of_router.unwrap_or_default() + DRAIN_MARGIN,
        drain_instances: of_instances.unwrap_or_default() + DRAIN_MARGIN,
    }
}

fn parsed<T: clap::Args>(command: &[String]) -> Option<T> {
    let parser = T::augment_args(clap::Command::new("x").no_binary_name(true));
    let matches = parser.try_get_matches_from(command.get(2..)?).ok()?;
    T::from_arg_matches(&matches).ok()
}

fn seconds(value: f64) -> Duration {
    Duration::try_from_secs_f64(value)
        .unwrap_or_default()
        .min(Duration::from_secs(86_400))
}
