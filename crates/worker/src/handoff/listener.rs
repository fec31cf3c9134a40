//! Where importers connect to: opened before the model is loaded, so that a port in use or an address that
//! nobody can dial is found out at once.

use crate::handoff::exporter::BindError;
use crate::handoff::peers::{Peer, address};
use std::net::SocketAddr;
use std::time::Duration;
use tokio::net::{TcpListener, TcpSocket, lookup_host};
use tokio::time::timeout;
use twinfer_http::Host;

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
        let wanted = Host::parse(host).map_err(|error| BindError::BadHost {
            host: named(),
            reason: error.problem,
        })?;
        let addr = listen_addr(&wanted, port).await?;
        if !keyed && !addr.ip().to_canonical().is_loopback() {
            return Err(BindError::NeedsKey { host: named() });
        }
        let advertised = match advertise_host {
            Some(text) => Host::parse(text)
                .ok()
                .filter(|host| !host.is_wildcard())
                .ok_or_else(|| BindError::BadAdvertise {
                    host: text.to_owned(),
                })?,
            None if addr.ip().is_unspecified() => {
                return Err(BindError::NeedsAdvertise { host: named() });
            }
            None => wanted,
        };
        let failed = |source| BindError::Listen { addr, source };
        let listener = listen(addr).map_err(failed)?;
        let port = listener.local_addr().map_err(failed)?.port();
        let peer = Peer::new(advertised, port);
        let peer = peer.ok_or_else(|| BindError::NeedsAdvertise { host: named() })?;
        Ok(Self { listener, peer })
    }

    /// `host:port` that importers dial.
    pub fn addr(&self) -> String {
        self.peer.to_string()
    }
}

async fn listen_addr(host: &Host, port: u16) -> Result<SocketAddr, BindError> {
    let name = host.to_string();
    let failed = |reason: String| BindError::Resolve {
        host: name.clone(),
        reason,
    };
    // As importers take the name, whatever the node's hosts file says first.
    if let Some(address) = address(host) {
        return Ok(SocketAddr::new(address, port));
    }
    let mut found = timeout(RESOLVE_TIME, lookup_host((name.as_str(), port)))
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
