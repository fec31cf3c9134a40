//! Everything at once: requests that are read, cancelled, released from elsewhere, damaged or forgotten,
//! on blocks that are used again as soon as they are given back.
//!
//! A block that is given back while somebody reads it, or twice, shows at once: the engine cannot write
//! it, or two prompts write it, and a reader gets the wrong rows.

use crate::proxy::{Fault, Proxy};
use crate::support::{Decode, Options, Prefill, eventually, prompt, redirect, seed};
use proptest::prelude::*;
use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};
use twinfer_engine::{HeldKv, RequestId};
use twinfer_protocol::{BlockId, ErrorKind, KvRelease};

/// What happens to a request.
#[derive(Clone, Debug)]
struct Fate {
    tokens: usize,
    /// Wait before decode comes, in milliseconds.
    wait: u64,
    act: Act,
}

#[derive(Clone, Debug)]
enum Act {
    Fetch,
    /// Dropped after so many microseconds.
    Cancel(u64),
    /// Claimed and dropped.
    Refuse,
    /// Nobody comes.
    Forget,
    /// The router releases while decode fetches.
    ReleaseMeanwhile,
    /// Two choices.
    Twice,
    Damage(usize),
    Cut(usize),
}

/// An engine's pool of blocks.
#[derive(Debug)]
struct Pool {
    free: Mutex<Vec<BlockId>>,
    held: Mutex<HashMap<u64, Vec<BlockId>>>,
}

fn fate() -> impl Strategy<Value = Fate> {
    let act = prop_oneof![
        4 => Just(Act::Fetch),
        2 => (0_u64..3000).prop_map(Act::Cancel),
        1 => Just(Act::Refuse),
        1 => Just(Act::Forget),
        1 => Just(Act::ReleaseMeanwhile),
        1 => Just(Act::Twice),
        1 => (0_usize..700).prop_map(Act::Damage),
        1 => (0_usize..700).prop_map(Act::Cut),
    ];
    let wait = prop_oneof![4 => Just(0_u64), 1 => 0_u64..150];
    (2_usize..30, wait, act).prop_map(|(tokens, wait, act)| Fate { tokens, wait, act })
}

impl Pool {
    fn new(blocks: u32) -> Arc<Self> {
        Arc::new(Self {
            free: Mutex::new((0..blocks).collect()),
            held: Mutex::default(),
        })
    }

    async fn take(&self, count: usize) -> Vec<BlockId> {
        loop {
            {
                let mut free = self.free.lock().unwrap();
                if free.len() >= count {
                    // From the front: what came back last is used again soon.
                    return free.drain(..count).collect();
                }
            }
            sleep(Duration::from_millis(1)).await;
        }
    }

    fn put(&self, blocks: Vec<BlockId>) {
        self.free.lock().unwrap().splice(0..0, blocks);
    }

    fn hold(&self, request: u64, blocks: Vec<BlockId>) {
        self.held.lock().unwrap().insert(request, blocks);
    }

    fn release_held(&self, request: u64) {
        let blocks = self.held.lock().unwrap().remove(&request);
        self.put(blocks.expect("given back once"));
    }
}

struct Stage {
    prefill: Prefill,
    decode: Decode,
    options: Options,
    source: Arc<Pool>,
    target: Arc<Pool>,
    requests: AtomicU64,
}

impl Stage {
    /// One request, from prefill to its end.
    async fn play(&self, fate: Fate) {
        let number = self.requests.fetch_add(1, Relaxed);
        let prompt = prompt(number as u32 + 1, fate.tokens);
        let count = fate.tokens.div_ceil(self.options.geometry.block_size);
        let blocks = self.source.take(count).await;
        // Fails if anybody still reads one of them.
        self.prefill
            .memory
            .fill(&blocks, fate.tokens, seed(&prompt));
        self.source.hold(number, blocks.clone());
        let held = HeldKv {
            blocks,
            tokens: fate.tokens as u32,
        };
        let params = self
            .prefill
            .exporter
            .register(RequestId(number), held, &prompt, None)
            .await
            .unwrap();
        sleep(Duration::from_millis(fate.wait)).await;
        let fault = match fate.act {
            Act::Damage(at) => Fault::Flip(at, 4),
            Act::Cut(at) => Fault::CutAfter(at),
            _ => Fault::None,
        };
        let proxy = Proxy::start(self.prefill.addr(), vec![fault], Vec::new()).await;
        let params = match fate.act {
            Act::Damage(_) | Act::Cut(_) => redirect(&params, proxy.addr),
            _ => params,
        };
        if matches!(fate.act, Act::Forget) {
            return;
        }
        let claim = self
            .decode
            .importer
            .claim(self.decode.importer.check(&params).unwrap());
        let fetch = async || {
            let targets = self.target.take(count).await;
            let wanted = fate.tokens - 1;
            let fetched = claim.fetch(&prompt, &targets, 0..wanted as u32).await;
            match &fetched {
                Ok(_) => assert!(
                    self.decode.memory.holds(&targets, wanted, seed(&prompt)),
                    "{fate:?}: wrong rows"
                ),
                Err(error) => assert!(
                    matches!(
                        error.kind,
                        ErrorKind::KvStale
                            | ErrorKind::KvCorrupt
                            | ErrorKind::KvTransfer
                            | ErrorKind::KvMismatch
                    ),
                    "{fate:?}: {error}"
                ),
            }
            self.target.put(targets);
            fetched
        };
        match fate.act {
            Act::Fetch if fate.wait == 0 => drop(fetch().await),
            Act::Fetch | Act::Damage(_) | Act::Cut(_) => drop(fetch().await),
            Act::Cancel(after) => {
                let targets = self.target.take(count).await;
                let wanted = fate.tokens as u32 - 1;
                let fetch = claim.fetch(&prompt, &targets, 0..wanted);
                let _ = timeout(Duration::from_micros(after), fetch).await;
                // The blocks are free as soon as the fetch is dropped.
                targets
                    .iter()
                    .for_each(|&block| drop(self.decode.memory.arena.write(block).unwrap()));
                self.target.put(targets);
            }
            Act::Twice => {
                let _ = tokio::join!(fetch(), fetch());
            }
            Act::ReleaseMeanwhile => {
                let release = KvRelease {
                    remote_request_id: params.remote_request_id.clone().unwrap(),
                    epoch: twinfer_protocol::Epoch(self.options.epoch),
                };
                let _ = tokio::join!(fetch(), async { self.prefill.exporter.release(&release) });
            }
            Act::Refuse | Act::Forget => {}
        }
    }
}

async fn play_all(fates: Vec<Fate>) {
    let options = Options {
        lease: Duration::from_millis(100),
        renew_every: Duration::from_millis(20),
        ..Options::default()
    };
    let stage = Arc::new(Stage {
        prefill: Prefill::start(&options).await,
        decode: Decode::start(&options),
        source: Pool::new(options.blocks),
        target: Pool::new(options.blocks),
        options,
        requests: AtomicU64::new(0),
    });
    let mut tasks = JoinSet::new();
    let give_back = Arc::clone(&stage);
    let engine = JoinSet::from_iter([async move {
        loop {
            for id in give_back.prefill.exporter.take_freed() {
                give_back.source.release_held(id.0);
            }
            sleep(Duration::from_micros(500)).await;
        }
    }]);
    for fate in fates {
        let stage = Arc::clone(&stage);
        tasks.spawn(async move { stage.play(fate).await });
    }
    while let Some(ended) = timeout(Duration::from_secs(20), tasks.join_next())
        .await
        .expect("nothing hangs")
    {
        ended.unwrap();
    }
    // Lease, and a second.
    eventually("everything is given back", || {
        let pools = [&stage.source, &stage.target];
        pools
            .iter()
            .all(|pool| pool.free.lock().unwrap().len() == stage.options.blocks as usize)
    })
    .await;
    stage.prefill.is_idle().await;
    stage.decode.is_idle().await;
    drop(engine);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 12, ..ProptestConfig::default() })]

    #[test]
    fn any_mixture_of_ends_gives_every_block_back_once(fates in proptest::collection::vec(fate(), 1..80)) {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
        runtime.block_on(play_all(fates));
    }
}
