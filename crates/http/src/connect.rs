use crate::{Host, HostPort, TransportError};
use http::Uri;
use hyper_util::rt::TokioIo;
use rustix::io::Errno;
use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::net::{TcpStream, lookup_host};
use tokio::time::timeout;
use tower::Service;

/// Connects to a peer within `limit`, directly: proxy variables of the environment do not exist here.
///
/// # Errors
/// A [`TransportError`] that says that nothing was sent.
pub async fn connect(to: &HostPort, limit: Duration) -> Result<TcpStream, TransportError> {
    match timeout(limit, connect_to_any(to)).await {
        Ok(result) => result,
        Err(_) => Err(TransportError::ConnectTimeout {
            peer: to.to_string(),
            seconds: limit.as_secs_f64(),
        }),
    }
}

async fn connect_to_any(to: &HostPort) -> Result<TcpStream, TransportError> {
    let peer = || to.to_string();
    let unresolved = |reason: String| TransportError::Unresolved {
        peer: peer(),
        reason,
    };
    let exhausted = |error: &io::Error| TransportError::Exhausted {
        peer: peer(),
        reason: error.to_string(),
    };
    let addresses: Vec<SocketAddr> = match &to.host {
        Host::Ip(ip) => vec![SocketAddr::new(*ip, to.port)],
        Host::Name(name) => lookup_host((name.as_str(), to.port))
            .await
            .map_err(|error| match is_own(&error) {
                true => exhausted(&error),
                false => unresolved(error.to_string()),
            })?
            .collect(),
    };
    let mut last = unresolved("the name has no address".to_owned());
    for address in addresses {
        // Without NODELAY each small piece waits for the acknowledgement of the one before.
        let connected = TcpStream::connect(address)
            .await
            .and_then(|stream| stream.set_nodelay(true).map(|()| stream));
        last = match connected {
            Ok(stream) => return Ok(stream),
            Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {
                TransportError::Refused { peer: peer() }
            }
            Err(error) if is_own(&error) => exhausted(&error),
            Err(error) => TransportError::Connect {
                peer: peer(),
                reason: error.to_string(),
            },
        };
    }
    Err(last)
}

/// Did this process or its host run out of something?
fn is_own(error: &io::Error) -> bool {
    matches!(
        Errno::from_io_error(error),
        // The last one: no local port is left.
        Some(Errno::MFILE | Errno::NFILE | Errno::NOBUFS | Errno::NOMEM | Errno::ADDRNOTAVAIL)
    )
}

/// [`connect`] to the host and port of a URI, for hyper's client.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Connector {
    pub(crate) timeout: Duration,
}

impl Service<Uri> for Connector {
    type Response = TokioIo<TcpStream>;
    type Error = TransportError;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, TransportError>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), TransportError>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, uri: Uri) -> Self::Future {
        let limit = self.timeout;
        Box::pin(async move {
            let authority = uri.authority().map_or("", http::uri::Authority::as_str);
            let to: HostPort = authority.parse().map_err(|error: crate::AddressError| {
                TransportError::Unresolved {
                    peer: authority.to_owned(),
                    reason: error.problem,
                }
            })?;
            connect(&to, limit).await.map(TokioIo::new)
        })
    }
}
