//! Connector `pull` over loopback, both sides in this process on runtimes of their own.

use super::{Round, Sample};
use anyhow::{Context, Result, anyhow, bail};
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio_util::sync::CancellationToken;
use twinfer_engine::{HeldKv, KvGeometry, RequestId};
use twinfer_protocol::{Epoch, Fingerprint};
use twinfer_sys::BlockArena;
use twinfer_worker::handoff::{
    Exporter, ExporterConfig, Importer, ImporterConfig, KvListener, PeerKey,
};

/// Shape of DeepSeek-V3's KV in bf16.
const GEOMETRY: KvGeometry = KvGeometry {
    layers: 61,
    width: 576,
    value_bytes: 2,
    block_size: 16,
};
/// Blocks of a pull: 64 MiB.
const BLOCKS: u32 = (64 << 20) / (61 * 576 * 2 * 16) as u32;
const PULLS: u64 = 8;
const LIMIT: Duration = Duration::from_secs(30);

pub(super) fn measure(rounds: usize) -> Result<Vec<Round>> {
    let side = || {
        tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()
    };
    let (prefill, decode) = (side()?, side()?);
    let unit = GEOMETRY.width * GEOMETRY.value_bytes * GEOMETRY.block_size;
    let arena = || BlockArena::new(BLOCKS, GEOMETRY.layers, unit).map(Arc::new);
    let (source, target) = (arena()?, arena()?);
    for block in 0..BLOCKS {
        let mut guard = source.write(block).map_err(|e| anyhow!("{e}"))?;
        for layer in 0..GEOMETRY.layers {
            let bytes = guard.unit_mut(layer).context("a unit")?;
            for (i, byte) in bytes.iter_mut().enumerate() {
                *byte = (i as u32)
                    .wrapping_mul(2_654_435_761)
                    .wrapping_add(block * 977 + layer as u32)
                    .to_le_bytes()[3];
            }
        }
    }
    let key = PeerKey::new(b"key of the bench");
    let exporter = ExporterConfig {
        name: "prefill".into(),
        epoch: Epoch(1),
        fingerprint: Fingerprint::default(),
        key: key.clone(),
        lease: LIMIT,
        timeout: LIMIT,
        geometry: GEOMETRY,
        arena: Arc::clone(&source),
        wake: Box::new(|| {}),
    };
    let listener = prefill.block_on(KvListener::bind("127.0.0.1", 0, None, true))?;
    let (exporter, server) = Exporter::on(listener, exporter)?;
    let stop = CancellationToken::new();
    let serving = prefill.handle().clone();
    let stopped = stop.clone();
    let server = std::thread::spawn(move || serving.block_on(server.run(stopped)));
    let importer = ImporterConfig {
        fingerprint: Fingerprint::default(),
        key,
        peers: Vec::new(),
        timeout: LIMIT,
        renew_every: LIMIT,
        geometry: GEOMETRY,
        arena: Arc::clone(&target),
    };
    let (importer, _keeper) = {
        let _inside = decode.enter();
        Importer::new(importer)?
    };

    let tokens = BLOCKS * GEOMETRY.block_size as u32;
    let prompt: Vec<u32> = (0..tokens).collect();
    let blocks: Vec<u32> = (0..BLOCKS).collect();
    let mut all = Vec::new();
    let mut request = 0;
    for _ in 0..rounds {
        let (mut bytes, mut seconds) = (0, 0.0);
        for pull in 0..=PULLS {
            request += 1;
            let held = HeldKv {
                blocks: blocks.clone(),
                tokens,
            };
            let params =
                prefill.block_on(exporter.register(RequestId(request), held, &prompt, None))?;
            let start = Instant::now();
            let claim = importer.claim(importer.check(&params)?);
            let report = decode.block_on(claim.fetch(&prompt, &blocks, 0..tokens))?;
            // The first one opens the connection and touches the pages.
            if pull > 0 {
                bytes += report.bytes;
                seconds += start.elapsed().as_secs_f64();
            }
        }
        let last = BLOCKS - 1;
        let (a, b) = (
            source.read(last).map_err(|e| anyhow!("{e}"))?,
            target.read(last).map_err(|e| anyhow!("{e}"))?,
        );
        if a.unit(60) != b.unit(60) {
            bail!("the last block did not arrive");
        }
        let floor = socket_rate(bytes as usize)?;
        let mut round = Round::new();
        round.insert(
            "pull over loopback TCP, 64 MiB".to_owned(),
            Sample {
                ours: bytes as f64 / seconds / 1e9,
                floor,
                peer: None,
            },
        );
        all.push(round);
    }
    stop.cancel();
    server
        .join()
        .map_err(|_| anyhow!("the exporter panicked"))?;
    Ok(all)
}

/// GB/s of one writer and one reader that touch nothing.
fn socket_rate(bytes: usize) -> Result<f64> {
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let mut sender = TcpStream::connect(listener.local_addr()?)?;
    let (mut receiver, _) = listener.accept()?;
    receiver.set_read_timeout(Some(LIMIT))?;
    sender.set_write_timeout(Some(LIMIT))?;
    let piece = vec![1u8; 1 << 20];
    let writing = std::thread::spawn(move || -> std::io::Result<()> {
        let mut left = bytes;
        while left > 0 {
            let n = left.min(piece.len());
            sender.write_all(&piece[..n])?;
            left -= n;
        }
        Ok(())
    });
    let mut buffer = vec![0; 1 << 20];
    let start = Instant::now();
    let mut left = bytes;
    while left > 0 {
        let n = receiver.read(&mut buffer)?;
        if n == 0 {
            bail!("the sender ended early");
        }
        left -= n;
    }
    let seconds = start.elapsed().as_secs_f64();
    writing
        .join()
        .map_err(|_| anyhow!("the sender panicked"))??;
    Ok(bytes as f64 / seconds / 1e9)
}
