//! A TCP proxy that breaks what passes through it in a scripted way.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Barrier, Notify};
use tokio::time::timeout;
use tokio_util::sync::{CancellationToken, DropGuard};

/// Nothing came for so long: the server waits for its peer.
const QUIET: Duration = Duration::from_millis(100);

/// What happens to the bytes of one direction of one connection. Offsets count from its first byte.
#[derive(Clone, Debug, Default)]
pub(crate) enum Fault {
    #[default]
    None,
    /// Both directions end after so many bytes.
    CutAfter(usize),
    /// The byte at this place arrives with these bits flipped.
    Flip(usize, u8),
    /// The byte at this place never arrives; all others do.
    Drop(usize),
    /// After so many bytes nothing passes any more, and nothing is closed.
    StallAfter(usize),
    /// After so many bytes, one byte per interval.
    TrickleAfter(usize, Duration),
    /// The first chunks pass only after a pause each.
    Slow(Duration, usize),
    /// From this place on bytes are collected until none come for a while; the end of them is exchanged
    /// with that of the other connection that has this fault.
    Swap(usize, Arc<Exchange>),
}

/// Where two connections meet to exchange what they carry.
#[derive(Debug)]
pub(crate) struct Exchange {
    both: Barrier,
    left: Mutex<Vec<Vec<u8>>>,
    bytes: usize,
}

/// Listens on a port of loopback until dropped.
pub(crate) struct Proxy {
    pub(crate) addr: SocketAddr,
    /// Bytes from server to client, of all connections.
    pub(crate) carried: Arc<AtomicUsize>,
    /// Connections taken.
    pub(crate) connections: Arc<AtomicUsize>,
    _stop: DropGuard,
}

impl Exchange {
    /// Each connection puts in its last `bytes` bytes and takes the other's.
    pub(crate) fn new(bytes: usize) -> Arc<Self> {
        Arc::new(Self {
            both: Barrier::new(2),
            left: Mutex::new(Vec::new()),
            bytes,
        })
    }

    async fn swap(&self, mine: Vec<u8>) -> Vec<u8> {
        let place = {
            let mut left = self.left.lock().unwrap();
            left.push(mine);
            left.len() - 1
        };
        self.both.wait().await;
        self.left.lock().unwrap()[1 - place].clone()
    }
}

impl Proxy {
    /// The n-th connection suffers the n-th of `to_client` and `to_server`; further ones nothing.
    pub(crate) async fn start(
        server: SocketAddr,
        to_client: Vec<Fault>,
        to_server: Vec<Fault>,
    ) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let addr = listener.local_addr().unwrap();
        let stop = CancellationToken::new();
        let carried = Arc::new(AtomicUsize::new(0));
        let connections = Arc::new(AtomicUsize::new(0));
        let (carries, takes, ends) = (Arc::clone(&carried), Arc::clone(&connections), stop.clone());
        let accept = async move {
            let mut tasks = tokio::task::JoinSet::new();
            loop {
                let (client, _) = listener.accept().await.unwrap();
                let number = takes.fetch_add(1, Relaxed);
                let fault = |faults: &[Fault]| faults.get(number).cloned().unwrap_or_default();
                let (down, up) = (fault(&to_client), fault(&to_server));
                tasks.spawn(connection(client, server, down, up, Arc::clone(&carries)));
            }
        };
        let mut tasks = tokio::task::JoinSet::new();
        tasks.spawn(async move { ends.run_until_cancelled(accept).await });
        tasks.detach_all();
        Self {
            addr,
            carried,
            connections,
            _stop: stop.drop_guard(),
        }
    }
}

async fn connection(
    client: TcpStream,
    server: SocketAddr,
    down: Fault,
    up: Fault,
    carried: Arc<AtomicUsize>,
) {
    let Ok(server) = TcpStream::connect(server).await else {
        return;
    };
    client.set_nodelay(true).unwrap();
    server.set_nodelay(true).unwrap();
    let (client_read, client_write) = client.into_split();
    let (server_read, server_write) = server.into_split();
    let uncounted = AtomicUsize::new(0);
    tokio::select! {
        () = carry(server_read, client_write, down, &carried) => {}
        () = carry(client_read, server_write, up, &uncounted) => {}
    }
}

/// Ends when the connection is to be closed.
async fn carry(
    mut from: impl AsyncRead + Unpin,
    mut to: impl AsyncWrite + Unpin,
    mut fault: Fault,
    carried: &AtomicUsize,
) {
    let mut buffer = vec![0; 64 << 10];
    let mut seen = 0;
    loop {
        let Ok(count @ 1..) = from.read(&mut buffer).await else {
            return;
        };
        carried.fetch_add(count, Relaxed);
        let range = seen..seen + count;
        let mut bytes = buffer[..count].to_vec();
        seen += count;
        match fault {
            Fault::None => {}
            Fault::CutAfter(end) if seen >= end => {
                let _ = to.write_all(&bytes[..end - range.start]).await;
                return;
            }
            Fault::Flip(at, bits) if range.contains(&at) => bytes[at - range.start] ^= bits,
            Fault::Drop(at) if range.contains(&at) => {
                bytes.remove(at - range.start);
            }
            Fault::StallAfter(end) if seen > end => {
                let _ = to
                    .write_all(&bytes[..end.saturating_sub(range.start)])
                    .await;
                Notify::new().notified().await;
            }
            Fault::Slow(pause, ref mut chunks) if *chunks > 0 => {
                *chunks -= 1;
                tokio::time::sleep(pause).await;
            }
            Fault::TrickleAfter(end, interval) if seen > end => {
                let keep = end.saturating_sub(range.start);
                let _ = to.write_all(&bytes[..keep]).await;
                for byte in &bytes[keep..] {
                    tokio::time::sleep(interval).await;
                    if to.write_all(&[*byte]).await.is_err() {
                        return;
                    }
                }
                continue;
            }
            Fault::Swap(start, ref exchange) if seen > start => {
                let keep = start.saturating_sub(range.start);
                let _ = to.write_all(&bytes[..keep]).await;
                let mut mine = bytes[keep..].to_vec();
                while let Ok(read) = timeout(QUIET, from.read(&mut buffer)).await {
                    let Ok(count @ 1..) = read else { return };
                    mine.extend_from_slice(&buffer[..count]);
                }
                let end = mine.split_off(mine.len().saturating_sub(exchange.bytes));
                mine.extend(exchange.swap(end).await);
                bytes = mine;
                fault = Fault::None;
            }
            _ => {}
        }
        if to.write_all(&bytes).await.is_err() {
            return;
        }
    }
}
