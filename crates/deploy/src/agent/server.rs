//! `twinfer agent`.

use super::messages::{AGENT, BEAT, FromAgent, LINE, SILENT, ToAgent};
use crate::SUPERVISOR_ENV;
use crate::supervise::Exit;
use clap::Args;
use parking_lot::Mutex;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, mpsc};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use twinfer_comm::stream::{LinkError, Reader, Writer, remote_ends};
use twinfer_comm::{Acceptor, Channel, Event, PeerKey};
use twinfer_config::ServeConfig;
use twinfer_protocol::{PEER_KEY_ENV, PEER_KEY_ENV_COMPAT};

/// Deployments that an agent serves at the same time.
const SESSIONS: u32 = 16;
/// An agent looks for the next visitor in steps of this length.
const WAIT: Duration = Duration::from_secs(3600);
/// Messages on their way to a session.
const INBOX: usize = 64;
/// When `up` is gone its processes get this long to end.
const GRACE: Duration = Duration::from_secs(2);

/// Why an agent does not start, or ended.
#[derive(Debug, thiserror::Error)]
pub enum AgentError {
    /// Everybody could have processes started.
    #[error(
        "host is {0}, which is not on loopback, and there is no peer key; set TWINFER_PEER_KEY or peer-key-file"
    )]
    NeedsKey(SocketAddr),
    /// A port in use, or an address that is not this node's.
    #[error("cannot listen on {address}: {source}")]
    Listen {
        /// The address.
        address: SocketAddr,
        /// What the system says.
        source: std::io::Error,
    },
    /// The system refused something.
    #[error("{0}")]
    System(#[from] std::io::Error),
}

/// Listens at `address` and serves whoever proves `key`, until the process ends. `program` is the `twinfer` binary;
/// its processes get `key` by their environment. `on_listening` is told the address.
///
/// # Errors
/// [`AgentError`].
pub fn run_agent(
    address: SocketAddr,
    key: Option<&str>,
    program: PathBuf,
    on_listening: impl FnOnce(SocketAddr),
) -> Result<(), AgentError> {
    if key.is_none() && !address.ip().to_canonical().is_loopback() {
        return Err(AgentError::NeedsKey(address));
    }
    let failed = |source| AgentError::Listen { address, source };
    let listener = TcpListener::bind(address).map_err(failed)?;
    on_listening(listener.local_addr().map_err(failed)?);
    let proven = key.and_then(|key| PeerKey::new(key.as_bytes()));
    let mut acceptor = Acceptor::new(&AGENT, listener, proven, SESSIONS)?;
    let (program, key) = (Arc::new(program), key.map(Arc::<str>::from));
    let open = Arc::new(Mutex::new(0_u32));
    loop {
        let (channel, from, message) = match acceptor.next::<ToAgent>(&[], Instant::now() + WAIT)? {
            Event::Arrived {
                channel,
                from,
                message,
            } => (channel, from, message),
            Event::Turned { from, why } => {
                tracing::warn!(%from, %why, "a connection was turned away");
                continue;
            }
            Event::Gone(_) | Event::Time => continue,
        };
        let ToAgent::Hello {
            deployment,
            version,
        } = message
        else {
            tracing::warn!(%from, "a connection began with an order");
            continue;
        };
        let own = env!("CARGO_PKG_VERSION");
        let refusal = if version != own {
            Some(format!(
                "the agent runs version {own}, `up` runs version {version}"
            ))
        } else if *open.lock() >= SESSIONS {
            Some(format!("the agent serves {SESSIONS} deployments already"))
        } else {
            None
        };
        let mut channel = channel;
        if let Some(why) = refusal {
            // Who is gone already need not be told.
            let _ = channel.send(&FromAgent::Refused(why), Instant::now() + BEAT);
            continue;
        }
        *open.lock() += 1;
        let (program, key, open) = (Arc::clone(&program), key.clone(), Arc::clone(&open));
        // The kernel ends what a thread has started when that thread ends: a session and its processes are one.
        std::thread::Builder::new()
            .name("session".into())
            .spawn(move || {
                tracing::info!(%from, deployment, "serving");
                match session(channel, &program, key.as_deref()) {
                    Ok(()) => {
                        tracing::info!(%from, deployment, "gone; nothing of it runs any more")
                    }
                    Err(error) => tracing::error!(%from, deployment, %error, "session failed"),
                }
                *open.lock() -= 1;
            })?;
    }
}

enum Inside {
    Order(Result<ToAgent, LinkError>),
    Ended(u32, Exit),
}

/// A process that runs.
struct Running {
    handle: OwnedFd,
    waiter: JoinHandle<()>,
}

fn session(channel: Channel<TcpStream>, program: &Path, key: Option<&str>) -> std::io::Result<()> {
    let (reader, writer) = remote_ends(channel)?;
    let writer = Arc::new(Mutex::new(writer));
    let (sender, inbox) = mpsc::sync_channel(INBOX);
    let orders = sender.clone();
    let listening = std::thread::Builder::new()
        .name("orders".into())
        .spawn(move || listen(reader, &orders))?;
    let say = |message: &FromAgent| {
        // Its reader notices when it is gone.
        let _ = writer.lock().send(message);
    };
    say(&FromAgent::Welcome);
    let mut running: BTreeMap<u32, Running> = BTreeMap::new();
    let mut told = Instant::now();
    loop {
        if told.elapsed() >= BEAT {
            told = Instant::now();
            say(&FromAgent::Beat);
        }
        match inbox.recv_timeout(BEAT) {
            Err(mpsc::RecvTimeoutError::Timeout) => {}
            Err(mpsc::RecvTimeoutError::Disconnected) => break,
            Ok(Inside::Ended(id, exit)) => {
                running.remove(&id);
                say(&FromAgent::Ended { id, exit });
            }
            Ok(Inside::Order(Ok(ToAgent::Beat | ToAgent::Hello { .. }))) => {}
            Ok(Inside::Order(Ok(ToAgent::Serve { id, arguments }))) => {
                let started = match running.contains_key(&id) {
                    true => Err(std::io::Error::other("a process of that number runs")),
                    false => start(program, key, id, &arguments, &writer, &sender),
                };
                match started {
                    Ok((process, one)) => {
                        running.insert(id, one);
                        say(&FromAgent::Started { id, process });
                    }
                    Err(error) => {
                        let why = error.to_string();
                        say(&FromAgent::StartFailed { id, why });
                    }
                }
            }
            Ok(Inside::Order(Ok(ToAgent::Terminate { id }))) => signal(&running, id, Signal::TERM),
            Ok(Inside::Order(Ok(ToAgent::Kill { id }))) => signal(&running, id, Signal::KILL),
            Ok(Inside::Order(Err(error))) => {
                if !running.is_empty() {
                    tracing::warn!(%error, "`up` is gone: its processes are ended");
                }
                break;
            }
        }
    }
    // Nobody waits for room in it any more.
    drop(inbox);
    end_all(running);
    let _ = listening.join();
    Ok(())
}

fn listen(mut reader: Reader, sender: &mpsc::SyncSender<Inside>) {
    loop {
        let order = reader.next(Some(SILENT));
        let over = order.is_err();
        if sender.send(Inside::Order(order)).is_err() || over {
            return;
        }
    }
}

fn signal(running: &BTreeMap<u32, Running>, id: u32, signal: Signal) {
    // One that has ended meanwhile says so itself.
    let _ = running
        .get(&id)
        .map(|one| pidfd_send_signal(&one.handle, signal));
}

/// Asks all to end, then ends them.
fn end_all(running: BTreeMap<u32, Running>) {
    for number in [Signal::TERM, Signal::TERM, Signal::KILL] {
        for one in running.values() {
            let _ = pidfd_send_signal(&one.handle, number);
        }
        let until = Instant::now() + GRACE / 2;
        for one in running.values() {
            wait_ended(&one.handle, until);
        }
    }
    for one in running.into_values() {
        let _ = one.waiter.join();
    }
}

/// Waits until a process has ended, at most until `until`.
fn wait_ended(handle: &OwnedFd, until: Instant) {
    loop {
        let left = until.saturating_duration_since(Instant::now());
        let left = Timespec {
            tv_sec: left.as_secs().min(1 << 30) as i64,
            tv_nsec: left.subsec_nanos().into(),
        };
        let mut fds = [PollFd::new(handle, PollFlags::IN)];
        match poll(&mut fds, Some(&left)) {
            Err(rustix::io::Errno::INTR) => {}
            Ok(_) | Err(_) => return,
        }
    }
}

/// Only what `twinfer serve` takes is started, by this binary.
fn start(
    program: &Path,
    key: Option<&str>,
    id: u32,
    arguments: &[String],
    writer: &Arc<Mutex<Writer>>,
    sender: &mpsc::SyncSender<Inside>,
) -> std::io::Result<(u32, Running)> {
    let parser = ServeConfig::augment_args(clap::Command::new("serve").no_binary_name(true));
    parser
        .try_get_matches_from(arguments)
        .map_err(std::io::Error::other)?;
    let mut command = Command::new(program);
    command
        .arg("serve")
        .args(arguments)
        .process_group(0)
        .env(SUPERVISOR_ENV, std::process::id().to_string())
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    if let Some(key) = key {
        command
            .env(PEER_KEY_ENV, key)
            .env_remove(PEER_KEY_ENV_COMPAT);
    }
    let mut child = command.spawn()?;
    let process = child.id();
    // It has not been waited for, so the number is its own.
    let pid = i32::try_from(process).ok().and_then(Pid::from_raw);
    let pid = pid.ok_or_else(|| std::io::Error::other("the process has no number"))?;
    let handle = pidfd_open(pid, PidfdFlags::empty())?;
    let outputs = [
        child.stdout.take().map(|pipe| follow(pipe, id, writer)),
        child.stderr.take().map(|pipe| follow(pipe, id, writer)),
    ];
    let sender = sender.clone();
    let waiter = std::thread::Builder::new()
        .name("waiter".into())
        .spawn(move || wait(child, outputs, id, &sender))?;
    tracing::info!(process, "started");
    Ok((process, Running { handle, waiter }))
}

fn wait(
    mut child: Child,
    outputs: [Option<JoinHandle<()>>; 2],
    id: u32,
    sender: &mpsc::SyncSender<Inside>,
) {
    let exit = child.wait().map_or(Exit::Code(-1), Exit::of);
    // What it started in turn ends with it, and closes the pipes.
    for output in outputs.into_iter().flatten() {
        let _ = output.join();
    }
    let _ = sender.send(Inside::Ended(id, exit));
}

/// Passes on the lines of a pipe, until it is closed.
fn follow(
    pipe: impl Read + Send + 'static,
    id: u32,
    writer: &Arc<Mutex<Writer>>,
) -> JoinHandle<()> {
    let writer = Arc::clone(writer);
    std::thread::spawn(move || {
        let mut pipe = BufReader::new(pipe);
        loop {
            let mut line = Vec::new();
            match pipe.by_ref().take(LINE as u64).read_until(b'\n', &mut line) {
                Ok(0) | Err(_) => return,
                Ok(_) => {}
            }
            let text = String::from_utf8_lossy(&line);
            let text = text.trim_end_matches(['\n', '\r']).to_owned();
            // Without a reader the pipe is emptied all the same: the process must not stand still.
            let _ = writer.lock().send(&FromAgent::Line { id, text });
        }
    })
}
