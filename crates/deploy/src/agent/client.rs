//! The side of `up`.

use super::messages::{AGENT, BEAT, FromAgent, HELLO, SILENT, ToAgent};
use crate::plan::PlannedNode;
use crate::supervise::Exit;
use parking_lot::Mutex;
use std::collections::{BTreeMap, BTreeSet};
use std::net::{TcpStream, ToSocketAddrs};
use std::sync::{Arc, mpsc};
use std::time::Instant;
use twinfer_comm::stream::{Reader, Writer, remote_ends};
use twinfer_comm::{Channel, PeerKey};
use twinfer_http::HostPort;

/// What an agent tells of a process, by its place in the plan.
pub(crate) enum Heard {
    StartFailed(usize, String),
    Line(usize, String),
    Ended(usize, Exit),
}

/// Connections to the agents of a plan, by node.
pub(crate) struct Agents {
    agents: BTreeMap<String, Agent>,
    /// Ends the beats when it goes.
    _beats: mpsc::SyncSender<()>,
}

struct Agent {
    writer: Arc<Mutex<Writer>>,
    /// Processes that were asked for and have not ended.
    open: Arc<Mutex<BTreeSet<u32>>>,
}

impl Agents {
    /// Reaches the agents of `nodes` and starts to listen; `tell` is called from threads, in order for each agent.
    ///
    /// # Errors
    /// A sentence that names the node.
    pub(crate) fn connect(
        nodes: &[&PlannedNode],
        deployment: &str,
        key: Option<&str>,
        tell: &(impl Fn(Heard) + Clone + Send + 'static),
    ) -> Result<Self, String> {
        let key = key.and_then(|key| PeerKey::new(key.as_bytes()));
        let mut agents = BTreeMap::new();
        for node in nodes {
            let Some(port) = node.agent else { continue };
            let at = HostPort::display(&node.host, port);
            let failed = |why: &dyn std::fmt::Display| {
                format!("the agent of node {} at {at}: {why}", node.name)
            };
            let (reader, mut writer) =
                dial(&node.host, port, key.as_ref()).map_err(|why| failed(&why))?;
            let hello = ToAgent::Hello {
                deployment: deployment.to_owned(),
                version: env!("CARGO_PKG_VERSION").to_owned(),
            };
            writer.send(&hello).map_err(|e| failed(&e))?;
            let mut reader = reader;
            match reader.next(Some(HELLO)).map_err(|e| failed(&e))? {
                FromAgent::Welcome => {}
                FromAgent::Refused(why) => return Err(failed(&why)),
                _ => return Err(failed(&"it answered something else")),
            }
            let open: Arc<Mutex<BTreeSet<u32>>> = Arc::default();
            let (inside, tell, name) = (Arc::clone(&open), tell.clone(), node.name.clone());
            std::thread::Builder::new()
                .name(format!("agent-{}", node.name))
                .spawn(move || listen(reader, &name, &inside, &tell))
                .map_err(|e| failed(&e))?;
            let writer = Arc::new(Mutex::new(writer));
            agents.insert(node.name.clone(), Agent { writer, open });
        }
        let (beats, ended) = mpsc::sync_channel::<()>(0);
        let writers: Vec<_> = agents
            .values()
            .map(|agent| Arc::clone(&agent.writer))
            .collect();
        std::thread::Builder::new()
            .name("agent-beats".into())
            .spawn(move || {
                while ended.recv_timeout(BEAT) == Err(mpsc::RecvTimeoutError::Timeout) {
                    for writer in &writers {
                        // Its reader notices when it is gone.
                        let _ = writer.lock().send(&ToAgent::Beat);
                    }
                }
            })
            .map_err(|e| format!("threads: {e}"))?;
        Ok(Self {
            agents,
            _beats: beats,
        })
    }

    /// Has `twinfer serve` with `arguments` started on `node`; what becomes of it is told.
    pub(crate) fn serve(
        &self,
        node: &str,
        child: usize,
        arguments: &[String],
    ) -> std::io::Result<()> {
        let Some(agent) = self.agents.get(node) else {
            return Err(std::io::Error::other(format!("node {node} has no agent")));
        };
        let id = number(child);
        agent.open.lock().insert(id);
        let message = ToAgent::Serve {
            id,
            arguments: arguments.to_vec(),
        };
        let sent = agent.writer.lock().send(&message);
        sent.map_err(|error| {
            agent.open.lock().remove(&id);
            std::io::Error::other(format!("the agent of node {node}: {error}"))
        })
    }

    /// Asks a process to end, or ends it.
    pub(crate) fn signal(&self, node: &str, child: usize, kill: bool) {
        let id = number(child);
        let message = match kill {
            true => ToAgent::Kill { id },
            false => ToAgent::Terminate { id },
        };
        if let Some(agent) = self.agents.get(node) {
            // Its reader notices when it is gone.
            let _ = agent.writer.lock().send(&message);
        }
    }
}

fn number(child: usize) -> u32 {
    u32::try_from(child).unwrap_or(u32::MAX)
}

fn dial(host: &str, port: u16, key: Option<&PeerKey>) -> Result<(Reader, Writer), String> {
    let until = Instant::now() + HELLO;
    let addresses = (host, port).to_socket_addrs().map_err(|e| e.to_string())?;
    let mut last = "no address".to_owned();
    for address in addresses {
        let stream = TcpStream::connect_timeout(&address, HELLO);
        let channel = stream
            .map_err(|e| e.to_string())
            .and_then(|stream| Channel::dial(&AGENT, stream, key, until).map_err(|e| e.to_string()))
            .and_then(|channel| remote_ends(channel).map_err(|e| e.to_string()));
        match channel {
            Ok(ends) => return Ok(ends),
            Err(why) => last = why,
        }
    }
    Err(last)
}

fn listen(mut reader: Reader, node: &str, open: &Mutex<BTreeSet<u32>>, tell: &impl Fn(Heard)) {
    loop {
        match reader.next(Some(SILENT)) {
            Ok(FromAgent::StartFailed { id, why }) => {
                if open.lock().remove(&id) {
                    tell(Heard::StartFailed(id as usize, why));
                }
            }
            Ok(FromAgent::Line { id, text }) => {
                if open.lock().contains(&id) {
                    tell(Heard::Line(id as usize, text));
                }
            }
            Ok(FromAgent::Ended { id, exit }) => {
                if open.lock().remove(&id) {
                    tell(Heard::Ended(id as usize, exit));
                }
            }
            // Whether it is ready is asked otherwise.
            Ok(
                FromAgent::Started { .. }
                | FromAgent::Beat
                | FromAgent::Welcome
                | FromAgent::Refused(_),
            ) => {}
            Err(error) => {
                // It ends all that it has started when it is gone, or when it does not hear `up` any more.
                for id in std::mem::take(&mut *open.lock()) {
                    let line = format!("the agent of node {node} is gone: {error}");
                    tell(Heard::Line(id as usize, line));
                    tell(Heard::Ended(id as usize, Exit::Unknown));
                }
                return;
            }
        }
    }
}
