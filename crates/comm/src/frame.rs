//! What travels between two ranks over TCP: heads of 88 bytes, each followed by its payload. Pure.
//!
//! ```text
//! 0   magic: u32 le, kind: u8, three zero bytes, rank of the sender: u32 le, four zero bytes
//! 16  number, epoch, step, place (tag, call) of the collective; detail; length of the payload: six u64 le
//! 64  xxh3-64 of the payload: u64 le
//! 72  tag: 16 bytes, the start of an HMAC-SHA256 over frame number and the 72 bytes before
//! ```
//!
//! The tag is made with the connection's session key, so that a head that is damaged, repeated, or from elsewhere is
//! told from a good one before its length is believed; the checksum tells a damaged payload.

use crate::call::{HEAD_WORDS, Head};
use crate::error::{FAILURE_WORDS, Failure};
use crate::handshake::{SessionKey, TAG_LEN};

/// Bytes of a head.
pub(crate) const FRAME_HEAD: usize = SIGNED + TAG_LEN;
const SIGNED: usize = 72;
const MAGIC: [u8; 4] = *b"twC1";
/// Bytes of the payload of [`FrameKind::Failed`].
pub(crate) const FAILURE_BYTES: usize = FAILURE_WORDS * 8;

/// What a frame is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FrameKind {
    /// Part of a collective.
    Data,
    /// The group has ended; the payload is the failure.
    Failed,
    /// The sender has left in order.
    Bye,
}

/// A frame's head.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Frame {
    pub(crate) kind: FrameKind,
    pub(crate) from: u32,
    /// The words of a [`Head`]; only the length counts in frames that are not data.
    pub(crate) words: [u64; HEAD_WORDS],
    pub(crate) checksum: u64,
}

impl Frame {
    pub(crate) fn data(from: u32, head: &Head, payload: &[u8]) -> Self {
        Self {
            kind: FrameKind::Data,
            from,
            words: head.with_length(payload.len()).words(),
            checksum: checksum(payload),
        }
    }

    pub(crate) fn control(kind: FrameKind, from: u32, payload: &[u8]) -> Self {
        let mut words = [0; HEAD_WORDS];
        words[HEAD_WORDS - 1] = payload.len() as u64;
        Self {
            kind,
            from,
            words,
            checksum: checksum(payload),
        }
    }

    pub(crate) fn length(&self) -> u64 {
        self.words[HEAD_WORDS - 1]
    }

    /// Bytes of the `count`th frame of a direction.
    pub(crate) fn encode(&self, key: &SessionKey, count: u64) -> [u8; FRAME_HEAD] {
        let mut out = [0; FRAME_HEAD];
        out[..4].copy_from_slice(&MAGIC);
        out[4] = self.kind.byte();
        out[8..12].copy_from_slice(&self.from.to_le_bytes());
        let words = self.words.iter().chain([&self.checksum]);
        for (place, word) in out[16..SIGNED].as_chunks_mut::<8>().0.iter_mut().zip(words) {
            *place = word.to_le_bytes();
        }
        let tag = key.tag(count, &out[..SIGNED]);
        out[SIGNED..].copy_from_slice(&tag);
        out
    }

    /// The `count`th frame of a direction; none if the bytes are not it.
    pub(crate) fn decode(bytes: &[u8; FRAME_HEAD], key: &SessionKey, count: u64) -> Option<Self> {
        let (signed, tag) = bytes.split_at(SIGNED);
        if signed[..4] != MAGIC || !key.verify(count, signed, tag) {
            return None;
        }
        let kind = FrameKind::of_byte(signed[4])?;
        let from = u32::from_le_bytes(*signed[8..].first_chunk()?);
        let mut words = [0; HEAD_WORDS + 1];
        for (word, place) in words.iter_mut().zip(signed[16..].as_chunks::<8>().0) {
            *word = u64::from_le_bytes(*place);
        }
        let [words @ .., checksum] = words;
        Some(Self {
            kind,
            from,
            words,
            checksum,
        })
    }
}

impl FrameKind {
    fn byte(self) -> u8 {
        match self {
            Self::Data => 1,
            Self::Failed => 2,
            Self::Bye => 3,
        }
    }

    fn of_byte(byte: u8) -> Option<Self> {
        match byte {
            1 => Some(Self::Data),
            2 => Some(Self::Failed),
            3 => Some(Self::Bye),
            _ => None,
        }
    }
}

pub(crate) fn checksum(payload: &[u8]) -> u64 {
    xxhash_rust::xxh3::xxh3_64(payload)
}

pub(crate) fn failure_bytes(failure: &Failure) -> [u8; FAILURE_BYTES] {
    let mut out = [0; FAILURE_BYTES];
    for (place, word) in out.as_chunks_mut::<8>().0.iter_mut().zip(failure.words()) {
        *place = word.to_le_bytes();
    }
    out
}

pub(crate) fn failure_of_bytes(bytes: &[u8; FAILURE_BYTES]) -> Option<Failure> {
    let mut words = [0; FAILURE_WORDS];
    for (word, place) in words.iter_mut().zip(bytes.as_chunks::<8>().0) {
        *word = u64::from_le_bytes(*place);
    }
    Failure::of_words(&words)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::call::{At, Call, Reached};
    use crate::handshake::test_session_key;
    use proptest::prelude::*;
    use twinfer_protocol::Epoch;

    fn head() -> Head {
        Head {
            reached: Reached {
                seq: 5,
                at: At::new(Epoch(1), 2, 3),
                call: Call::AllReduce,
            },
            detail: 9,
            length: 0,
        }
    }

    #[test]
    fn a_frame_comes_back_and_only_in_its_place() {
        let (ours, other) = (test_session_key(1), test_session_key(2));
        let frame = Frame::data(7, &head(), b"payload");
        let bytes = frame.encode(&ours, 4);
        assert_eq!(Frame::decode(&bytes, &ours, 4), Some(frame));
        assert_eq!(Frame::decode(&bytes, &ours, 5), None);
        assert_eq!(Frame::decode(&bytes, &other, 4), None);
        assert_eq!(Head::of_words(&frame.words), Some(head().with_length(7)));
    }

    proptest! {
        #[test]
        fn a_damaged_frame_is_refused(place in 0..FRAME_HEAD, bit in 0..8) {
            let key = test_session_key(1);
            let mut bytes = Frame::control(FrameKind::Bye, 1, b"").encode(&key, 0);
            bytes[place] ^= 1_u8 << bit;
            prop_assert_eq!(Frame::decode(&bytes, &key, 0), None);
        }
    }
}
