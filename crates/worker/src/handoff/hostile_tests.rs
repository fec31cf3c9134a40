//! Peers that hold the key and speak the protocol, and mean harm or are wrong.

mod exporter;
mod importer;
mod random;

use crate::handoff::channel::{Channel, HANDSHAKE_TIME};
use crate::handoff::seal::token_hash;
use crate::handoff::wire::{Reply, Request, WireGeometry, WireHandle};
use crate::handoff::{Exporter, ExporterConfig, KvListener};
use std::sync::Arc;
use std::time::Duration;
use tokio::net::TcpStream;
use tokio::task::JoinSet;
use tokio::time::{Instant, timeout};
use tokio_util::sync::CancellationToken;
use twinfer_engine::{HeldKv, KvGeometry, RequestId};
use twinfer_protocol::{Epoch, Fingerprint, KvTransferParams};
use twinfer_sys::BlockArena;

const GEOMETRY: KvGeometry = KvGeometry {
    layers: 2,
    width: 4,
    value_bytes: 2,
    block_size: 4,
};
const EPOCH: u64 = 77;
const PROMPT: [u32; 6] = [1, 2, 3, 4, 5, 6];

/// A real exporter with one handle, and a proved connection to it.
struct Victim {
    exporter: Exporter,
    params: KvTransferParams,
    arena: Arc<BlockArena>,
    tasks: JoinSet<()>,
}

impl Victim {
    async fn start() -> Self {
        let arena = arena();
        for block in [4, 6] {
            let mut guard = arena.write(block).unwrap();
            (0..2).for_each(|layer| guard.unit_mut(layer).unwrap().fill(block as u8));
        }
        let listener = KvListener::bind("127.0.0.1", 0, None, false).await.unwrap();
        let config = ExporterConfig {
            name: "p".into(),
            epoch: Epoch(EPOCH),
            fingerprint: Fingerprint::default(),
            key: None,
            lease: Duration::from_secs(30),
            timeout: Duration::from_millis(300),
            geometry: GEOMETRY,
            arena: Arc::clone(&arena),
            wake: Box::new(|| {}),
        };
        let (exporter, server) = Exporter::on(listener, config).unwrap();
        let mut tasks = JoinSet::new();
        tasks.spawn(server.run(CancellationToken::new()));
        let held = HeldKv {
            blocks: vec![4, 6],
            tokens: 6,
        };
        let params = exporter
            .register(RequestId(1), held, &PROMPT, None)
            .await
            .unwrap();
        Self {
            exporter,
            params,
            arena,
            tasks,
        }
    }

    async fn dial(&self) -> Channel {
        let stream = TcpStream::connect(self.exporter.addr()).await.unwrap();
        Channel::import(stream, None, soon()).await.unwrap()
    }

    async fn open(&self) -> Channel {
        let mut channel = self.dial().await;
        channel
            .send(
                &Request::Open {
                    fingerprint: Fingerprint::default(),
                },
                soon(),
            )
            .await
            .unwrap();
        assert!(matches!(
            channel.receive(soon()).await.unwrap(),
            Reply::Welcome { epoch: EPOCH, .. }
        ));
        channel
    }

    fn handle(&self) -> WireHandle {
        let id = self
            .params
            .remote_request_id
            .as_deref()
            .unwrap()
            .parse()
            .unwrap();
        WireHandle::new(EPOCH, id)
    }

    fn pull(&self) -> Request {
        Request::Pull {
            handle: self.handle(),
            token_hash: token_hash(&PROMPT),
            tokens: 6,
            first: 0,
            blocks: 2,
            geometry: WireGeometry::new(GEOMETRY).unwrap(),
        }
    }

    /// Nothing was freed, nothing is pinned or borrowed.
    async fn is_unharmed(&self) {
        let calm = async {
            while self.exporter.stats().readers > 0 || self.arena.borrowed_blocks() > 0 {
                tokio::time::sleep(Duration::from_millis(2)).await;
            }
        };
        timeout(Duration::from_secs(3), calm)
            .await
            .expect("no pin is left");
        assert_eq!(self.exporter.stats().leases, 1);
        assert!(self.exporter.take_freed().is_empty());
        // And it serves.
        let mut channel = self.open().await;
        channel.send(&self.pull(), soon()).await.unwrap();
        assert!(matches!(
            channel.receive(soon()).await.unwrap(),
            Reply::Header {
                units: 4,
                payload: 96,
                ..
            }
        ));
        assert_eq!(self.tasks.len(), 1);
    }
}

fn soon() -> Instant {
    Instant::now() + HANDSHAKE_TIME
}

fn arena() -> Arc<BlockArena> {
    Arc::new(BlockArena::new(8, 2, 32).unwrap())
}
