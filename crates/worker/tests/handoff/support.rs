//! A prefill and a decode side in one process, with their own KV memory each.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;
use tokio::sync::Notify;
use tokio::time::{Instant, timeout};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use twinfer_engine::{HeldKv, KvGeometry, RequestId};
use twinfer_protocol::{
    ApiError, BlockId, Epoch, Fingerprint, KvRelease, KvTransferParams, TokenId,
};
use twinfer_sys::BlockArena;
use twinfer_worker::handoff::{
    Exporter, ExporterConfig, FetchReport, Importer, ImporterConfig, KvListener, PeerKey,
    ReleaseOutcome,
};

pub(crate) const GEOMETRY: KvGeometry = KvGeometry {
    layers: 3,
    width: 5,
    value_bytes: 2,
    block_size: 4,
};
/// Blocks of each side's memory.
pub(crate) const BLOCKS: u32 = 64;

/// What differs from test to test.
#[derive(Clone)]
pub(crate) struct Options {
    pub(crate) geometry: KvGeometry,
    pub(crate) blocks: u32,
    pub(crate) key: Option<&'static str>,
    pub(crate) lease: Duration,
    pub(crate) timeout: Duration,
    pub(crate) renew_every: Duration,
    pub(crate) fingerprint: Fingerprint,
    pub(crate) epoch: u64,
    pub(crate) port: u16,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            geometry: GEOMETRY,
            blocks: BLOCKS,
            key: Some("the peers' key"),
            lease: Duration::from_secs(30),
            timeout: Duration::from_secs(1),
            renew_every: Duration::from_secs(5),
            fingerprint: Fingerprint {
                id: "f".into(),
                weights: "w".into(),
                ..Fingerprint::default()
            },
            epoch: 0xe1,
            port: 0,
        }
    }
}

/// KV memory whose rows can be told apart.
#[derive(Clone)]
pub(crate) struct Memory {
    pub(crate) arena: Arc<BlockArena>,
    pub(crate) geometry: KvGeometry,
}

impl Memory {
    pub(crate) fn new(options: &Options) -> Self {
        let geometry = options.geometry;
        let unit = geometry.width * geometry.value_bytes * geometry.block_size;
        Self {
            arena: Arc::new(BlockArena::new(options.blocks, geometry.layers, unit).unwrap()),
            geometry,
        }
    }

    /// What position `position` of the prompt with this seed has in `layer`.
    fn row(&self, seed: u64, layer: usize, position: usize) -> Vec<u8> {
        let mut state = seed
            ^ ((layer as u64) << 32)
            ^ (position as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        (0..self.geometry.width * self.geometry.value_bytes)
            .map(|_| {
                state = state
                    .wrapping_mul(6_364_136_223_846_793_005)
                    .wrapping_add(1_442_695_040_888_963_407);
                (state >> 56) as u8
            })
            .collect()
    }

    /// Fills positions `0..tokens`.
    pub(crate) fn fill(&self, blocks: &[BlockId], tokens: usize, seed: u64) {
        let row_bytes = self.geometry.width * self.geometry.value_bytes;
        for (index, &block) in blocks.iter().enumerate() {
            let mut guard = self.arena.write(block).unwrap();
            for layer in 0..self.geometry.layers {
                let unit = guard.unit_mut(layer).unwrap();
                for (row, place) in unit.chunks_exact_mut(row_bytes).enumerate() {
                    let position = index * self.geometry.block_size + row;
                    if position < tokens {
                        place.copy_from_slice(&self.row(seed, layer, position));
                    }
                }
            }
        }
    }

    /// Are positions `0..tokens` what [`Self::fill`] makes?
    pub(crate) fn holds(&self, blocks: &[BlockId], tokens: usize, seed: u64) -> bool {
        let row_bytes = self.geometry.width * self.geometry.value_bytes;
        (0..tokens).all(|position| {
            let guard = self
                .arena
                .read(blocks[position / self.geometry.block_size])
                .unwrap();
            let start = position % self.geometry.block_size * row_bytes;
            (0..self.geometry.layers).all(|layer| {
                guard.unit(layer).unwrap()[start..start + row_bytes]
                    == self.row(seed, layer, position)
            })
        })
    }
}

/// A prefill instance without its engine.
pub(crate) struct Prefill {
    pub(crate) exporter: Exporter,
    pub(crate) memory: Memory,
    pub(crate) stop: CancellationToken,
    tasks: TaskTracker,
    woken: Arc<Notify>,
    requests: AtomicU64,
}

impl Prefill {
    pub(crate) async fn start(options: &Options) -> Self {
        let memory = Memory::new(options);
        let woken = Arc::new(Notify::new());
        let wake = Arc::clone(&woken);
        let config = ExporterConfig {
            name: "prefill-0".into(),
            epoch: Epoch(options.epoch),
            fingerprint: options.fingerprint.clone(),
            key: key(options),
            lease: options.lease,
            timeout: options.timeout,
            geometry: options.geometry,
            arena: Arc::clone(&memory.arena),
            wake: Box::new(move || wake.notify_one()),
        };
        let listener = KvListener::bind("127.0.0.1", options.port, None, config.key.is_some());
        let (exporter, server) = Exporter::on(listener.await.unwrap(), config).unwrap();
        let (stop, tasks) = (CancellationToken::new(), TaskTracker::new());
        tasks.spawn(server.run(stop.clone()));
        Self {
            exporter,
            memory,
            stop,
            tasks,
            woken,
            requests: AtomicU64::new(0),
        }
    }

    pub(crate) fn addr(&self) -> SocketAddr {
        self.exporter.addr().parse().unwrap()
    }

    /// Computes a prompt: fills the blocks and registers them.
    pub(crate) async fn hold(&self, prompt: &[TokenId], blocks: &[BlockId]) -> KvTransferParams {
        self.memory.fill(blocks, prompt.len(), seed(prompt));
        self.hold_filled(prompt, blocks).await
    }

    /// As [`Self::hold`] for blocks that have been filled before.
    pub(crate) async fn hold_filled(
        &self,
        prompt: &[TokenId],
        blocks: &[BlockId],
    ) -> KvTransferParams {
        let held = HeldKv {
            blocks: blocks.to_vec(),
            tokens: prompt.len() as u32,
        };
        let request = RequestId(self.requests.fetch_add(1, Relaxed));
        self.exporter
            .register(request, held, prompt, Some(7))
            .await
            .unwrap()
    }

    /// Ends a lease early, as the release route does.
    pub(crate) fn release(&self, params: &KvTransferParams) -> ReleaseOutcome {
        let engine = params.remote_engine_id.as_deref().unwrap();
        let (_, epoch) = engine.rsplit_once('-').unwrap();
        self.exporter.release(&KvRelease {
            remote_request_id: params.remote_request_id.clone().unwrap(),
            epoch: epoch.parse().unwrap(),
        })
    }

    /// The ids that come back within a second, once there are `count`.
    pub(crate) async fn freed(&self, count: usize) -> Vec<u64> {
        let mut freed = Vec::new();
        let all = async {
            while freed.len() < count {
                freed.extend(self.exporter.take_freed().iter().map(|id| id.0));
                if freed.len() < count {
                    self.woken.notified().await;
                }
            }
        };
        let in_time = timeout(Duration::from_secs(3), all).await;
        freed.sort_unstable();
        assert!(in_time.is_ok(), "only {freed:?} came back");
        freed
    }

    /// Nothing is held, read or borrowed, and nothing else comes back.
    pub(crate) async fn is_idle(&self) {
        eventually("prefill is idle", || {
            let stats = self.exporter.stats();
            (stats.leases, stats.readers) == (0, 0) && self.memory.arena.borrowed_blocks() == 0
        })
        .await;
        assert!(self.exporter.take_freed().is_empty(), "given back twice");
    }

    pub(crate) async fn shut_down(&self) {
        self.stop.cancel();
        self.tasks.close();
        timeout(Duration::from_secs(3), self.tasks.wait())
            .await
            .expect("the server stops");
    }
}

/// A decode instance without its engine.
pub(crate) struct Decode {
    pub(crate) importer: Importer,
    pub(crate) memory: Memory,
    pub(crate) stop: CancellationToken,
    tasks: TaskTracker,
}

impl Decode {
    pub(crate) fn start(options: &Options) -> Self {
        let memory = Memory::new(options);
        let config = ImporterConfig {
            fingerprint: options.fingerprint.clone(),
            key: key(options),
            peers: Vec::new(),
            timeout: options.timeout,
            renew_every: options.renew_every,
            geometry: options.geometry,
            arena: Arc::clone(&memory.arena),
        };
        let (importer, keeper) = Importer::new(config).unwrap();
        let (stop, tasks) = (CancellationToken::new(), TaskTracker::new());
        tasks.spawn(keeper.run(stop.clone()));
        Self {
            importer,
            memory,
            stop,
            tasks,
        }
    }

    pub(crate) async fn is_idle(&self) {
        eventually("decode is idle", || {
            self.importer.stats().claims == 0 && self.memory.arena.borrowed_blocks() == 0
        })
        .await;
    }

    pub(crate) async fn shut_down(&self) {
        self.stop.cancel();
        self.tasks.close();
        timeout(Duration::from_secs(3), self.tasks.wait())
            .await
            .expect("the keeper stops");
    }
}

/// A claim that is read at once.
pub(crate) trait Fetch {
    /// Fills positions `0..tokens`.
    fn fetch(
        &self,
        params: &KvTransferParams,
        prompt: &[TokenId],
        blocks: &[BlockId],
        tokens: u32,
    ) -> impl Future<Output = Result<FetchReport, ApiError>> + Send;
}

impl Fetch for Importer {
    async fn fetch(
        &self,
        params: &KvTransferParams,
        prompt: &[TokenId],
        blocks: &[BlockId],
        tokens: u32,
    ) -> Result<FetchReport, ApiError> {
        let claim = self.claim(self.check(params)?);
        claim.fetch(prompt, blocks, 0..tokens).await
    }
}

fn key(options: &Options) -> Option<PeerKey> {
    options.key.and_then(|key| PeerKey::new(key.as_bytes()))
}

/// A prompt that no other number has.
pub(crate) fn prompt(number: u32, tokens: usize) -> Vec<TokenId> {
    (0..tokens as u32)
        .map(|position| number * 1000 + position % 97)
        .collect()
}

/// What [`Memory::fill`] fills a prompt's KV from.
pub(crate) fn seed(prompt: &[TokenId]) -> u64 {
    prompt.iter().fold(prompt.len() as u64, |seed, &id| {
        seed.wrapping_mul(31).wrapping_add(u64::from(id))
    })
}

/// The same handle, as if the KV channel listened elsewhere.
pub(crate) fn redirect(params: &KvTransferParams, to: SocketAddr) -> KvTransferParams {
    KvTransferParams {
        remote_host: Some(to.ip().to_string()),
        remote_port: Some(to.port()),
        ..params.clone()
    }
}

/// Waits until something is so, 3 s at the most.
pub(crate) async fn eventually(what: &str, is_so: impl Fn() -> bool) {
    let end = Instant::now() + Duration::from_secs(3);
    while !is_so() {
        assert!(Instant::now() < end, "never: {what}");
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}
