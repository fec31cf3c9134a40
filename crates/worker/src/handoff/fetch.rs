//! One read of sealed KV over one connection: ask, compare, fill, verify, acknowledge.

use crate::handoff::channel::{ChannelError, Pace, SLICES};
use crate::handoff::params::RemoteHandle;
use crate::handoff::pool::Connection;
use crate::handoff::seal::{Checksum, Sealed, TokenHash, Units, token_hash, unit_checksum};
use crate::handoff::wire::{Reply, Request, WireGeometry, WireHandle};
use std::io::IoSliceMut;
use std::ops::Range;
use std::time::Duration;
use tokio::time::Instant;
use twinfer_engine::KvGeometry;
use twinfer_protocol::{ApiError, BlockId, ErrorKind, TokenId};
use twinfer_sys::{BlockArena, BlockWrite};

/// Bytes that are read before they are verified: few enough to be still in the core's cache.
const WINDOW_BYTES: usize = 128 << 10;

/// What is asked for, computed from what this side knows: nothing the peer says changes a size.
#[derive(Debug)]
pub(crate) struct Fetch<'a> {
    handle: &'a RemoteHandle,
    geometry: KvGeometry,
    shape: WireGeometry,
    units: Units,
    token_hash: TokenHash,
    /// Blocks to fetch.
    wanted: Range<usize>,
}

/// How a fetch over one connection ends badly.
#[derive(Debug)]
pub(crate) enum FetchError {
    /// The connection failed; nothing is known about the KV.
    Channel(ChannelError),
    /// The exporter says no; the connection is still good.
    Refused(ApiError),
    /// What came is not what the handle stands for; the connection is of no more use.
    Wrong(ApiError),
}

impl<'a> Fetch<'a> {
    pub(crate) fn new(
        handle: &'a RemoteHandle,
        geometry: KvGeometry,
        shape: WireGeometry,
        prompt: &[TokenId],
        positions: Range<u32>,
    ) -> Result<Self, ApiError> {
        let units = Units::new(geometry, handle.tokens)
            .filter(|units| units.blocks() == handle.blocks.len())
            .ok_or_else(|| corrupt(handle, "its size is impossible"))?;
        let (first, needed) = (positions.start as usize, positions.end);
        if needed > handle.tokens {
            let covered = handle.tokens;
            return Err(corrupt(
                handle,
                &format!("it covers {covered} tokens, {needed} are needed"),
            ));
        }
        if positions.is_empty() || !first.is_multiple_of(geometry.block_size) {
            return Err(internal(format!(
                "KV of positions {positions:?} cannot be fetched: they begin no block, or are none"
            )));
        }
        let covered = prompt.get(..handle.tokens as usize).ok_or_else(|| {
            corrupt(
                handle,
                &format!(
                    "it covers {} tokens, the prompt has {}",
                    handle.tokens,
                    prompt.len()
                ),
            )
        })?;
        let wanted = first / geometry.block_size..units.blocks_for(needed);
        Ok(Self {
            handle,
            geometry,
            shape,
            units,
            token_hash: token_hash(covered),
            wanted,
        })
    }

    /// Bytes of the units that are fetched.
    pub(crate) fn payload(&self) -> u64 {
        self.units.payload(self.wanted.clone())
    }

    /// Blocks that are fetched.
    pub(crate) fn blocks(&self) -> u32 {
        u32::try_from(self.wanted.len()).unwrap_or(u32::MAX)
    }

    /// Takes the blocks to fill; from here to the last verified byte nobody else can touch them.
    pub(crate) fn guards<'m>(
        &self,
        arena: &'m BlockArena,
        blocks: &[BlockId],
    ) -> Result<Vec<BlockWrite<'m>>, ApiError> {
        let blocks = blocks.get(..self.wanted.len()).ok_or_else(|| {
            internal(format!(
                "{} blocks are given for KV of {} blocks",
                blocks.len(),
                self.wanted.len()
            ))
        })?;
        blocks
            .iter()
            .map(|&block| {
                arena
                    .write(block)
                    .map_err(|error| internal(format!("KV cannot be filled: {error}")))
            })
            .collect()
    }

    /// Runs the exchange up to the last verified unit.
    pub(crate) async fn run(
        &self,
        connection: &mut Connection,
        guards: &mut [BlockWrite<'_>],
        timeout: Duration,
    ) -> Result<(), FetchError> {
        let handle = WireHandle::new(self.handle.epoch.0, self.handle.id);
        let answer_by = Instant::now() + connection.patience(timeout);
        let channel = &mut connection.channel;
        let pull = Request::Pull {
            handle,
            token_hash: self.token_hash,
            tokens: self.handle.tokens,
            first: u32::try_from(self.wanted.start).unwrap_or(u32::MAX),
            blocks: self.blocks(),
            geometry: self.shape,
        };
        channel.send(&pull, answer_by).await?;
        let reply = channel.receive::<Reply>(answer_by).await?;
        self.compare(handle, reply)?;

        let pace = Pace::new(timeout, self.payload());
        let mut checksums = vec![Checksum::default(); self.units.count()];
        channel
            .read_units(&mut [IoSliceMut::new(checksums.as_flattened_mut())], &pace)
            .await?;
        self.verify_seal(&checksums)?;
        let window = (WINDOW_BYTES / self.units.bytes(0).max(1)).clamp(1, SLICES);
        for layer in 0..self.units.layers() {
            let mut first = self.wanted.start;
            for batch in guards.chunks_mut(window) {
                let mut slices = Vec::with_capacity(batch.len());
                for (block, guard) in (first..).zip(batch.iter_mut()) {
                    let rows = guard
                        .unit_mut(layer)
                        .and_then(|unit| unit.get_mut(..self.units.bytes(block)));
                    slices.push(IoSliceMut::new(rows.ok_or_else(|| self.no_layer(layer))?));
                }
                channel.read_units(&mut slices, &pace).await?;
                for (block, guard) in (first..).zip(batch.iter()) {
                    let rows = guard
                        .unit(layer)
                        .and_then(|unit| unit.get(..self.units.bytes(block)));
                    let checksum = unit_checksum(rows.ok_or_else(|| self.no_layer(layer))?);
                    if checksum != checksums[self.units.index(layer, block)] {
                        let what = format!("block {block} of layer {layer} is damaged");
                        return Err(FetchError::Wrong(corrupt(self.handle, &what)));
                    }
                }
                first += batch.len();
            }
        }
        Ok(())
    }

    /// Tells the exporter that all has come. Returns whether that went out: if not, all is well here, but the
    /// exporter does not know.
    pub(crate) async fn acknowledge(&self, connection: &mut Connection, timeout: Duration) -> bool {
        let handle = WireHandle::new(self.handle.epoch.0, self.handle.id);
        let done = Request::Done { handle };
        let deadline = Instant::now() + timeout;
        connection.channel.send(&done, deadline).await.is_ok()
    }

    /// Does the answer announce what the handle stands for?
    fn compare(&self, handle: WireHandle, reply: Reply) -> Result<(), FetchError> {
        let wrong = |what: &str| Err(FetchError::Wrong(corrupt(self.handle, what)));
        match reply {
            Reply::Header { handle: theirs, .. } if theirs != handle => {
                wrong("the answer is for another handle")
            }
            Reply::Header { token_hash, .. } if token_hash != self.token_hash => {
                wrong("the answer is for other tokens")
            }
            Reply::Header {
                tokens,
                seal,
                units,
                payload,
                ..
            } => {
                if tokens != self.handle.tokens || seal != self.handle.seal.0 {
                    return wrong("the answer has another seal");
                }
                if units != self.units.count() as u64 || payload != self.payload() {
                    return wrong(&format!(
                        "{units} units and {payload} bytes are announced, {} and {} are right",
                        self.units.count(),
                        self.payload()
                    ));
                }
                Ok(())
            }
            Reply::Refused { reason, message } => Err(FetchError::Refused(reason.error(&message))),
            _ => Err(FetchError::Wrong(ApiError::new(
                ErrorKind::KvTransfer,
                "prefill instance does not answer a pull".to_owned(),
            ))),
        }
    }

    /// The seal binds the checksums to epoch, request, tokens and shape as this side knows them.
    fn verify_seal(&self, checksums: &[Checksum]) -> Result<(), FetchError> {
        let seal = Sealed {
            epoch: self.handle.epoch,
            id: self.handle.id,
            geometry: self.geometry,
            tokens: self.handle.tokens,
            token_hash: &self.token_hash,
            blocks: &self.handle.blocks,
            checksums,
        }
        .seal();
        match seal == self.handle.seal {
            true => Ok(()),
            false => Err(FetchError::Wrong(corrupt(
                self.handle,
                "its seal does not fit",
            ))),
        }
    }

    fn no_layer(&self, layer: usize) -> FetchError {
        FetchError::Wrong(internal(format!("KV memory has no layer {layer}")))
    }
}

impl From<ChannelError> for FetchError {
    fn from(error: ChannelError) -> Self {
        Self::Channel(error)
    }
}

fn corrupt(handle: &RemoteHandle, what: &str) -> ApiError {
    ApiError::new(
        ErrorKind::KvCorrupt,
        format!("KV of handle {} from {}: {what}", handle.id, handle.peer),
    )
}

fn internal(what: String) -> ApiError {
    tracing::error!(what, "KV handoff");
    ApiError::new(ErrorKind::Internal, what)
}
