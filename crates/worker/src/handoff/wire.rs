//! What is said on the KV channel after the handshake: control frames, and their bytes.
//!
//! A frame is `length: u32 le`, `body: postcard`, `tag: 16 bytes`. The tag is the start of an
//! HMAC-SHA256 over direction, frame number, length and body under the connection's session key, so
//! that a damaged, repeated or foreign frame is told from a good one even where no peer key is set.
//! Checksums and units follow a [`Reply::Header`] raw; both sides know their sizes beforehand.
//!
//! ```text
//! importer                                exporter
//! Open{fingerprint}                 ->
//!                                   <-    Welcome{epoch, fingerprint} | Refused
//! then any number of
//! Pull{handle, token hash, shape}   ->
//!                                   <-    Header{...} checksums units | Refused
//! Done{handle}                      ->
//! Release{handle}                   ->
//!                                   <-    Released{outcome} | Refused
//! Renew{handles}                    ->
//!                                   <-    Renewed{alive} | Refused
//! ```

use crate::handoff::lease::{Gone, HandleId};
use crate::handoff::seal::TokenHash;
use postcard::fixint;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use twinfer_comm::handshake::{Protocol, SessionKey, TAG_LEN};
use twinfer_engine::KvGeometry;
use twinfer_protocol::{ApiError, ErrorKind, Fingerprint};

/// The KV channel. Versions: 2, fingerprints name the MTP layer; 3, a pull names its first block; 4, what was read is
/// free.
pub(crate) static PROTOCOL: Protocol = Protocol {
    magic: *b"twinfrKV",
    version: 4,
    label: b"twinfer kv channel ",
};

/// Longest body of a control frame, in bytes. Fingerprints and 256 handles fit in.
pub(crate) const FRAME_CAP: usize = 16 << 10;
/// Most handles in one [`Request::Renew`].
pub(crate) const RENEW_CAP: usize = 256;
/// Longest sentence taken from a peer, in bytes.
const MESSAGE_CAP: usize = 300;

/// A handle as it travels.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct WireHandle {
    #[serde(with = "fixint::le")]
    pub(crate) epoch: u64,
    #[serde(with = "fixint::le")]
    pub(crate) generation: u64,
    #[serde(with = "fixint::le")]
    pub(crate) nonce: u64,
}

/// Shape of units as it travels.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct WireGeometry {
    pub(crate) layers: u32,
    pub(crate) width: u32,
    pub(crate) value_bytes: u32,
    pub(crate) block_size: u32,
}

/// From importer to exporter.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Request {
    /// First frame.
    Open {
        /// The importer's.
        fingerprint: Fingerprint,
    },
    /// Send `blocks` blocks, from number `first` on, of what is sealed under `handle`.
    Pull {
        handle: WireHandle,
        token_hash: TokenHash,
        /// Tokens that the handle covers.
        tokens: u32,
        first: u32,
        blocks: u32,
        geometry: WireGeometry,
    },
    /// All units came and were right; nobody else is to read it.
    Done { handle: WireHandle },
    /// Nobody is to read it.
    Release { handle: WireHandle },
    /// Somebody is still to read these, at most [`RENEW_CAP`].
    Renew { handles: Vec<WireHandle> },
}

/// From exporter to importer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Reply {
    /// Answer to `Open`.
    Welcome {
        epoch: u64,
        /// The exporter's.
        fingerprint: Fingerprint,
    },
    /// Answer to `Pull`; `units` checksums of 8 bytes and `payload` bytes of units follow.
    Header {
        handle: WireHandle,
        token_hash: TokenHash,
        tokens: u32,
        #[serde(with = "fixint::le")]
        seal: u128,
        units: u64,
        payload: u64,
    },
    /// Answer to `Release`.
    Released { outcome: ReleaseOutcome },
    /// Answer to `Renew`: which of the handles, in order, still live.
    Renewed { alive: Vec<bool> },
    /// Answer to anything; the connection is closed behind it unless the reason is `Gone`.
    Refused { reason: Refusal, message: String },
}

/// What became of a release.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ReleaseOutcome {
    /// The blocks are free.
    Freed,
    /// A reader has them; they are free when it ends.
    Deferred,
    /// They were free already.
    AlreadyGone,
    /// This incarnation never gave out such a handle.
    Unknown,
}

/// Why an exporter does not do what it was asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Refusal {
    /// The handle is of another epoch, unknown, released or expired.
    Gone,
    /// Sealed KV does not stand for these tokens, or is damaged at the exporter.
    Corrupt,
    /// Fingerprint or shape differ.
    Mismatch,
    /// Too many connections.
    Busy,
    /// Frame out of order or malformed.
    Protocol,
    /// Failure at the exporter.
    Internal,
}

/// Why bytes are no frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum FrameError {
    #[error("frame of {0} bytes; allowed are 1 to {FRAME_CAP}")]
    Length(u32),
    #[error("frame with a wrong tag")]
    Tag,
    #[error("frame that is no message")]
    Body,
}

/// Writes or reads the frames of one direction of one connection.
#[derive(Debug)]
pub(crate) struct FrameCodec {
    key: SessionKey,
    count: u64,
}

impl FrameCodec {
    pub(crate) fn new(key: SessionKey) -> Self {
        Self { key, count: 0 }
    }

    /// Bytes of the next frame.
    pub(crate) fn encode<T: Serialize>(&mut self, message: &T) -> Result<Vec<u8>, FrameError> {
        let frame = postcard::to_extend(message, vec![0_u8; 4]).map_err(|_| FrameError::Body)?;
        let mut frame: Vec<u8> = frame;
        let length = u32::try_from(frame.len() - 4).unwrap_or(u32::MAX);
        check_length(length)?;
        frame[..4].copy_from_slice(&length.to_le_bytes());
        let tag = self.key.tag(self.count, &frame);
        self.count += 1;
        frame.extend_from_slice(&tag);
        Ok(frame)
    }

    /// Bytes that follow the length: body and tag. To be asked before anything is allocated.
    pub(crate) fn rest_len(prefix: [u8; 4]) -> Result<usize, FrameError> {
        Ok(check_length(u32::from_le_bytes(prefix))? + TAG_LEN)
    }

    /// The message of the next frame: `frame` is length, body and tag.
    pub(crate) fn decode<T: DeserializeOwned>(&mut self, frame: &[u8]) -> Result<T, FrameError> {
        let (signed, tag) = frame
            .len()
            .checked_sub(TAG_LEN)
            .and_then(|at| frame.split_at_checked(at))
            .ok_or(FrameError::Body)?;
        let (prefix, body) = signed.split_first_chunk::<4>().ok_or(FrameError::Body)?;
        if check_length(u32::from_le_bytes(*prefix))? != body.len() {
            return Err(FrameError::Body);
        }
        if !self.key.verify(self.count, signed, tag) {
            return Err(FrameError::Tag);
        }
        self.count += 1;
        match postcard::take_from_bytes(body) {
            Ok((message, [])) => Ok(message),
            _ => Err(FrameError::Body),
        }
    }
}

fn check_length(length: u32) -> Result<usize, FrameError> {
    let bytes = length as usize;
    (1..=FRAME_CAP)
        .contains(&bytes)
        .then_some(bytes)
        .ok_or(FrameError::Length(length))
}

impl WireHandle {
    pub(crate) fn new(epoch: u64, id: HandleId) -> Self {
        Self {
            epoch,
            generation: id.generation,
            nonce: id.nonce,
        }
    }

    pub(crate) fn id(self) -> HandleId {
        HandleId {
            generation: self.generation,
            nonce: self.nonce,
        }
    }
}

impl WireGeometry {
    /// None if a number does not fit 32 bits.
    pub(crate) fn new(geometry: KvGeometry) -> Option<Self> {
        Some(Self {
            layers: geometry.layers.try_into().ok()?,
            width: geometry.width.try_into().ok()?,
            value_bytes: geometry.value_bytes.try_into().ok()?,
            block_size: geometry.block_size.try_into().ok()?,
        })
    }
}

impl ReleaseOutcome {
    /// What a caller is told of a handle that ended before.
    pub(crate) fn of_gone(gone: Gone) -> Self {
        match gone {
            Gone::Released | Gone::Expired | Gone::Forgotten => Self::AlreadyGone,
            Gone::Unknown => Self::Unknown,
        }
    }
}

impl Refusal {
    /// The error a request ends with.
    pub(crate) fn error(self, message: &str) -> ApiError {
        let kind = match self {
            Self::Gone => ErrorKind::KvStale,
            Self::Corrupt => ErrorKind::KvCorrupt,
            Self::Mismatch => ErrorKind::KvMismatch,
            Self::Busy | Self::Protocol | Self::Internal => ErrorKind::KvTransfer,
        };
        ApiError::new(
            kind,
            format!("prefill instance refused the KV: {}", printable(message)),
        )
    }
}

/// Foreign text for messages and logs: bounded, without control characters.
pub(crate) fn printable(text: &str) -> String {
    let mut out = String::new();
    for c in text.chars() {
        if out.len() + c.len_utf8() > MESSAGE_CAP {
            out.push('…');
            break;
        }
        out.push(if c.is_control() { '?' } else { c });
    }
    out
}

/// Names the parts in which two fingerprints differ; none if they are equal.
pub(crate) fn difference(ours: &Fingerprint, theirs: &Fingerprint) -> Option<String> {
    if ours == theirs {
        return None;
    }
    let differing: Vec<String> = ours
        .differences(theirs)
        .iter()
        .map(|(name, a, b)| format!("{name} (ours {}, theirs {})", printable(a), printable(b)))
        .collect();
    Some(match differing.is_empty() {
        true => format!(
            "id (ours {}, theirs {})",
            printable(&ours.id),
            printable(&theirs.id)
        ),
        false => differing.join(", "),
    })
}

#[cfg(test)]
#[path = "wire_tests.rs"]
mod tests;
