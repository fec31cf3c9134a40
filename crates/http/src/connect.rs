use http::Uri;
use hyper_util::rt::TokioIo;
use std::future::Future;
use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::net::{TcpStream, lookup_host};
use tokio::time::timeout;
use tower::Service;

/// Why no connection came about; nothing was sent then.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ConnectError {
    #[error("the name cannot be resolved: {0}")]
    Resolve(io::Error),
    #[error("nobody listens there")]
    Refused,
    #[error("no answer within {0:?}")]
    TimedOut(Duration),
    #[error("{0}")]
    Other(io::Error),
}

/// Connects to the host and port of a URI, directly: proxy variables of the environment do not exist
/// for it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Connector {
    pub(crate) timeout: Duration,
}

impl Service<Uri> for Connector {
    type Response = TokioIo<TcpStream>;
    type Error = ConnectError;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, ConnectError>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), ConnectError>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, uri: Uri) -> Self::Future {
        let limit = self.timeout;
        Box::pin(async move {
            match timeout(limit, connect(&uri)).await {
                Ok(result) => result,
                Err(_) => Err(ConnectError::TimedOut(limit)),
            }
        })
    }
}

async fn connect(uri: &Uri) -> Result<TokioIo<TcpStream>, ConnectError> {
    let host = uri.host().unwrap_or_default();
    let host = host
        .strip_prefix('[')
        .and_then(|h| h.strip_suffix(']'))
        .unwrap_or(host);
    let addrs = lookup_host((host, uri.port_u16().unwrap_or(80)))
        .await
        .map_err(ConnectError::Resolve)?;
    let mut last = ConnectError::Resolve(io::Error::other("the name has no address"));
    for addr in addrs {
        match TcpStream::connect(addr).await {
            Ok(stream) => {
                stream.set_nodelay(true).map_err(ConnectError::Other)?;
                return Ok(TokioIo::new(stream));
            }
            Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {
                last = ConnectError::Refused
            }
            Err(error) => last = ConnectError::Other(error),
        }
    }
    Err(last)
}
