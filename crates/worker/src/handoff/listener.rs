//! Where importers connect to: opened before the model is loaded, so that a port in use or an address that
//! nobody can dial is found out at once.

use crate::handoff::exporter::BindError;
use crate::handoff::peers::{Peer, address};
use std::net::SocketAddr;
use std::time::Duration;
use tokio::net::{TcpListener, TcpSocket, lookup_host};
use tokio::time::timeout;

/// Longest time to resolve the listening host's name.
const RESOLVE_TIME: Duration = Duration::from_secs(2);
/// Connections that may wait to be accepted, as far as the system allows: a flood of them must not drop
/// those of peers, which would try again only after a second.
const BACKLOG: u32 = 4096;

/// A listening KV channel and the name it is dialled by.
#[derive(Debug)]
pub struct KvListener {
    pub(crate) listener: TcpListener,
    pub(crate) peer: Peer,
}

impl KvListener {
    /// Listens on `host:port`, 0 picks a free port. Peers are told `advertise_host`, else `host`.
    /// `keyed`: a peer key is set, so that other nodes may connect.
    pub async fn bind(
        host: &str,
        port: u16,
        advertise_host: Option<&str>,
        keyed: bool,
    ) -> Result<Self, BindError> {
        let named = || host.to_owned();
        let addr = listen_addr(host, port).await?;
        if !keyed && !addr.ip().to_canonical().is_loopback() {
            return Err(BindError::NeedsKey { host: named() });
        }
        let advertised = match advertise_host {
            Some(host) => {
                Peer::parse(&bracketed(host, 1))
                    .map_err(|_| BindError::BadAdvertise {
                        host: host.to_owned(),
                    })?
                    .host
            }
            None if addr.ip().is_unspecified() => {
                return Err(BindError::NeedsAdvertise { host: named() });
            }
            None => Peer::parse(&bracketed(host, 1))
                .map_or_else(|_| addr.ip().to_string(), |peer| peer.host),
        };
        let failed = |source| BindError::Listen { addr, source };
        let listener = listen(addr).map_err(failed)?;
        let port = listener.local_addr().map_err(failed)?.port();
        Ok(Self {
            listener,
            peer: Peer {
                host: advertised,
                port,
            },
        })
    }

    /// `host:port` that importers dial.
    pub fn addr(&self) -> String {
        self.peer.to_string()
    }
}

async fn listen_addr(host: &str, port: u16) -> Result<SocketAddr, BindError> {
    let failed = |reason: String| BindError::Resolve {
        host: host.to_owned(),
        reason,
    };
    let plain = host
        .strip_prefix('[')
        .and_then(|host| host.strip_suffix(']'))
        .unwrap_or(host);
    // As importers take the name, whatever the node's hosts file says first.
    if let Some(address) = address(&plain.to_ascii_lowercase()) {
        return Ok(SocketAddr::new(address, port));
    }
    let mut found = timeout(RESOLVE_TIME, lookup_host((plain, port)))
        .await
        .map_err(|_| failed(format!("no answer in {} s", RESOLVE_TIME.as_secs())))?
        .map_err(|error| failed(error.to_string()))?;
    found.next().ok_or_else(|| failed("none found".to_owned()))
}

fn listen(addr: SocketAddr) -> std::io::Result<TcpListener> {
    let socket = match addr {
        SocketAddr::V4(_) => TcpSocket::new_v4()?,
        SocketAddr::V6(_) => TcpSocket::new_v6()?,
    };
    // An instance that was restarted gets its port back at once.
    socket.set_reuseaddr(true)?;
    socket.bind(addr)?;
    socket.listen(BACKLOG)
}

fn bracketed(host: &str, port: u16) -> String {
    match host.contains(':') && !host.starts_with('[') {
        true => format!("[{host}]:{port}"),
        false => format!("{host}:{port}"),
    }
}
