//! Memory for request bodies. A body takes room as its bytes arrive, so that a length which is only
//! promised keeps nobody else waiting.

use crate::BoxError;
use crate::json::read_growing;
use bytes::Bytes;
use http::HeaderMap;
use http_body::Body;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::Instant;
use twinfer_protocol::ApiError;

/// Bodies up to this many bytes are read whatever else is being read.
const SMALL_BODY: u64 = 64 << 10;
/// Room is taken in pieces of this many bytes.
const PIECE: u64 = 64 << 10;

/// What all bodies of a listener may take together.
#[derive(Debug)]
pub struct BodyRoom {
    limit: u64,
    time: Duration,
    /// Pieces.
    shared: Arc<Semaphore>,
    /// Room for one whole body. Who gets it needs no more: bodies that are half read and wait for each
    /// other's room are so read one after the other.
    last: Arc<Semaphore>,
}

/// A body's share of a [`BodyRoom`], until dropped.
#[derive(Debug, Default)]
pub struct RoomShare {
    pieces: Option<OwnedSemaphorePermit>,
    last: Option<OwnedSemaphorePermit>,
}

impl BodyRoom {
    /// Room for `bodies` (at least 1) of the greatest length, `limit` bytes. Each is read within `time`,
    /// its waits for room included. Bodies of 64 KiB and less need no room.
    pub fn new(bodies: u32, limit: u64, time: Duration) -> Self {
        let pieces = u64::from(bodies.saturating_sub(1)).saturating_mul(limit.div_ceil(PIECE));
        let pieces = usize::try_from(pieces).unwrap_or(usize::MAX);
        Self {
            limit,
            time,
            shared: Arc::new(Semaphore::new(pieces.min(Semaphore::MAX_PERMITS))),
            last: Arc::new(Semaphore::new(1)),
        }
    }

    /// Reads a body whole. Its share lasts as long as the body, or what is made of it, should.
    ///
    /// # Errors
    /// Those of [`crate::read_body`], and `Overloaded` where there is no room in time.
    pub async fn read<B>(
        &self,
        headers: &HeaderMap,
        body: B,
    ) -> Result<(Bytes, RoomShare), ApiError>
    where
        B: Body<Data = Bytes>,
        B::Error: Into<BoxError>,
    {
        let mut share = RoomShare::default();
        let grow = Some((self, &mut share));
        let bytes = read_growing(headers, body, self.limit, self.time, grow).await?;
        Ok((bytes, share))
    }

    /// Waits until there is room for `bytes` in all; false when there is none by `deadline`.
    pub(crate) async fn grow(&self, share: &mut RoomShare, bytes: u64, deadline: Instant) -> bool {
        if bytes <= SMALL_BODY || share.last.is_some() {
            return true;
        }
        let have = share.pieces.as_ref().map_or(0, |p| p.num_permits()) as u64;
        let missing = bytes.div_ceil(PIECE).saturating_sub(have);
        let Ok(missing @ 1..) = u32::try_from(missing) else {
            return missing == 0;
        };
        tokio::select! {
            biased;
            Ok(more) = Arc::clone(&self.shared).acquire_many_owned(missing) => match &mut share.pieces {
                Some(pieces) => pieces.merge(more),
                None => share.pieces = Some(more),
            },
            Ok(last) = Arc::clone(&self.last).acquire_owned() => {
                *share = RoomShare { pieces: None, last: Some(last) };
            }
            () = tokio::time::sleep_until(deadline) => return false,
        }
        true
    }
}
