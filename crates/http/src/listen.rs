use crate::HostPort;
use socket2::{Domain, Protocol, Socket, Type};
use std::io;
use std::net::SocketAddr;
use std::time::Duration;
use tokio::net::{TcpListener, lookup_host};
use tokio::time::timeout;

/// Connections that may wait to be accepted.
const BACKLOG: i32 = 1024;
/// To resolve the own name.
const LOOKUP: Duration = Duration::from_secs(10);

/// A listening socket.
#[derive(Debug)]
pub struct Listener {
    pub(crate) inner: TcpListener,
    addr: SocketAddr,
}

/// An address that cannot be listened on.
#[derive(Debug, thiserror::Error)]
pub enum BindError {
    /// Somebody else has it.
    #[error("{addr} is in use by another process; choose another port or stop that process")]
    InUse {
        /// The address.
        addr: String,
    },
    /// The address is not one of this host.
    #[error("{addr} is not an address of this host")]
    NotHere {
        /// The address.
        addr: String,
    },
    /// Everything else.
    #[error("cannot listen on {addr}: {source}")]
    Other {
        /// The address.
        addr: String,
        /// What the system said.
        source: io::Error,
    },
}

impl Listener {
    /// Listens on `host:port`; port 0 picks a free one ([`Self::addr`] tells which).
    ///
    /// # Errors
    /// [`BindError`] names the address.
    pub async fn bind(host: &str, port: u16) -> Result<Self, BindError> {
        let name = HostPort::display(host, port);
        let other = |source| BindError::Other {
            addr: name.clone(),
            source,
        };
        let bare = host
            .strip_prefix('[')
            .and_then(|h| h.strip_suffix(']'))
            .unwrap_or(host);
        let late = |_| {
            let why = format!("the name was not resolved within {} s", LOOKUP.as_secs());
            other(io::Error::new(io::ErrorKind::TimedOut, why))
        };
        let found = timeout(LOOKUP, lookup_host((bare, port))).await;
        let mut addrs = found.map_err(late)?.map_err(other)?;
        let addr = addrs
            .next()
            .ok_or_else(|| other(io::Error::other("the name has no address")))?;
        Self::bind_addr(addr)
    }

    /// Listens on an address. SO_REUSEADDR is set, so that connections of an earlier process in
    /// TIME_WAIT do not matter; a live listener still counts as in use.
    ///
    /// # Errors
    /// [`BindError`] names the address.
    pub fn bind_addr(addr: SocketAddr) -> Result<Self, BindError> {
        let bound = || -> io::Result<TcpListener> {
            let socket = Socket::new(Domain::for_address(addr), Type::STREAM, Some(Protocol::TCP))?;
            socket.set_reuse_address(true)?;
            socket.set_nonblocking(true)?;
            socket.bind(&addr.into())?;
            socket.listen(BACKLOG)?;
            TcpListener::from_std(socket.into())
        };
        let name = || addr.to_string();
        let inner = bound().map_err(|source| match source.kind() {
            io::ErrorKind::AddrInUse => BindError::InUse { addr: name() },
            io::ErrorKind::AddrNotAvailable => BindError::NotHere { addr: name() },
            _ => BindError::Other {
                addr: name(),
                source,
            },
        })?;
        let addr = inner.local_addr().map_err(|source| BindError::Other {
            addr: name(),
            source,
        })?;
        Ok(Self { inner, addr })
    }

    /// The address with its actual port.
    pub fn addr(&self) -> SocketAddr {
        self.addr
    }
}
