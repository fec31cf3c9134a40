//! The first 160 bytes of a connection: both sides prove that they hold the peer key before either
//! says anything else. Pure: bytes in, bytes out.
//!
//! ```text
//! importer                       exporter
//! Hello (48 bytes)         ->
//!                          <-    Hello (48 bytes)
//! proof (32 bytes)         ->
//!                          <-    proof (32 bytes), or KEY_REFUSED
//! ```
//!
//! A proof is HMAC-SHA256 under the peer key over a label that names the side, and both hellos, which
//! hold version, roles and nonces: a proof cannot be replayed, nor sent back to its maker. The
//! importer proves first, so an exporter signs nothing for strangers: one whose proof is wrong gets
//! [`KEY_REFUSED`] in place of a proof, so that it can say why it is not served. Without a key (loopback only)
//! the same is computed under a public key: it proves nothing, but the connection's frames still get
//! tags that depend on both nonces.

use hmac::{Hmac, KeyInit, Mac};
use sha2::{Digest, Sha256};
use std::fmt;
use std::sync::Arc;

/// Bytes of a hello.
pub(crate) const HELLO_LEN: usize = 48;
/// Bytes of a proof.
pub(crate) const PROOF_LEN: usize = 32;
/// Bytes of a frame's tag.
pub(crate) const TAG_LEN: usize = 16;
/// Version of everything said on the KV channel, to be raised with any change of a message; another one is
/// refused. 2: fingerprints name the MTP layer. 3: a pull names its first block. 4: what was read is free.
pub(crate) const VERSION: u16 = 4;

const MAGIC: [u8; 8] = *b"twinfrKV";

/// What an exporter says in place of its proof to an importer whose proof is wrong. Anybody on the way
/// can say so too: the importer ends with an error then, as it would without an answer.
pub(crate) const KEY_REFUSED: [u8; PROOF_LEN] = *b"twinfrKV: peer key not accepted.";

/// The key that peers must prove. Never printed.
#[derive(Clone)]
pub struct PeerKey(Arc<[u8]>);

/// Who speaks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Side {
    /// Decode instance: dials.
    Importer,
    /// Prefill instance: listens.
    Exporter,
}

/// First words of a side.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Hello {
    pub(crate) side: Side,
    /// It has a peer key.
    pub(crate) keyed: bool,
    pub(crate) nonce: [u8; 32],
}

/// Why the first bytes of a peer are not accepted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum HelloError {
    #[error("does not speak the KV channel's protocol")]
    Magic,
    #[error("speaks version {0} of the KV channel's protocol, not {VERSION}")]
    Version(u16),
    #[error("has the same role on the KV channel")]
    Side,
    #[error("has no peer key, and this instance has one")]
    PeerUnkeyed,
    #[error("has a peer key, and this instance has none")]
    PeerKeyed,
    #[error("repeats this side's nonce")]
    Reflected,
    #[error("does not hold this instance's peer key")]
    Proof,
    #[error("does not accept this instance's peer key: the two instances have different keys")]
    KeyRefused,
}

/// Both hellos as they travelled.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Transcript {
    pub(crate) importer: [u8; HELLO_LEN],
    pub(crate) exporter: [u8; HELLO_LEN],
}

/// Key of one direction of one connection.
#[derive(Clone)]
pub(crate) struct SessionKey(Hmac<Sha256>);

impl PeerKey {
    /// The key's bytes; none if there are none, since an empty key protects nothing.
    pub fn new(bytes: &[u8]) -> Option<Self> {
        (!bytes.is_empty()).then(|| Self(bytes.into()))
    }
}

impl fmt::Debug for PeerKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("PeerKey(..)")
    }
}

impl fmt::Debug for SessionKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("SessionKey(..)")
    }
}

impl Side {
    fn byte(self) -> u8 {
        match self {
            Self::Importer => 1,
            Self::Exporter => 2,
        }
    }

    pub(crate) fn other(self) -> Self {
        match self {
            Self::Importer => Self::Exporter,
            Self::Exporter => Self::Importer,
        }
    }
}

impl Hello {
    /// Magic, version (le), side, 1 if keyed, nonce, four zero bytes.
    pub(crate) fn encode(&self) -> [u8; HELLO_LEN] {
        let mut out = [0; HELLO_LEN];
        out[..8].copy_from_slice(&MAGIC);
        out[8..10].copy_from_slice(&VERSION.to_le_bytes());
        out[10] = self.side.byte();
        out[11] = u8::from(self.keyed);
        out[12..44].copy_from_slice(&self.nonce);
        out
    }

    fn decode(bytes: &[u8; HELLO_LEN]) -> Result<Self, HelloError> {
        if bytes[..8] != MAGIC {
            return Err(HelloError::Magic);
        }
        let version = u16::from_le_bytes([bytes[8], bytes[9]]);
        if version != VERSION {
            return Err(HelloError::Version(version));
        }
        let side = match bytes[10] {
            1 => Side::Importer,
            2 => Side::Exporter,
            _ => return Err(HelloError::Magic),
        };
        if bytes[11] > 1 || bytes[44..] != [0; 4] {
            return Err(HelloError::Magic);
        }
        let mut nonce = [0; 32];
        nonce.copy_from_slice(&bytes[12..44]);
        Ok(Self {
            side,
            keyed: bytes[11] == 1,
            nonce,
        })
    }

    /// Reads the other side's hello and checks that it fits ours.
    pub(crate) fn check_peer(&self, bytes: &[u8; HELLO_LEN]) -> Result<(), HelloError> {
        let peer = Self::decode(bytes)?;
        if peer.side != self.side.other() {
            return Err(HelloError::Side);
        }
        match (self.keyed, peer.keyed) {
            (true, false) => return Err(HelloError::PeerUnkeyed),
            (false, true) => return Err(HelloError::PeerKeyed),
            _ => {}
        }
        if peer.nonce == self.nonce {
            return Err(HelloError::Reflected);
        }
        Ok(())
    }
}

impl Transcript {
    /// What `side` sends to show that it holds the key.
    pub(crate) fn proof(&self, key: Option<&PeerKey>, side: Side) -> [u8; PROOF_LEN] {
        self.mac(key, b"proof", side).finalize().into_bytes().into()
    }

    /// Checks the proof of `side`, in constant time.
    pub(crate) fn verify(
        &self,
        key: Option<&PeerKey>,
        side: Side,
        proof: &[u8; PROOF_LEN],
    ) -> Result<(), HelloError> {
        self.mac(key, b"proof", side)
            .verify_slice(proof)
            .map_err(|_| HelloError::Proof)
    }

    /// Key of the frames that `side` sends.
    pub(crate) fn session(&self, key: Option<&PeerKey>, side: Side) -> SessionKey {
        SessionKey(hmac(&self.mac(key, b"frame", side).finalize().into_bytes()))
    }

    fn mac(&self, key: Option<&PeerKey>, purpose: &[u8; 5], side: Side) -> Hmac<Sha256> {
        let mut mac = hmac(key.map_or(b"twinfer without a peer key".as_slice(), |key| &key.0));
        mac.update(b"twinfer kv channel ");
        mac.update(purpose);
        mac.update(&[side.byte()]);
        mac.update(&self.importer);
        mac.update(&self.exporter);
        mac
    }
}

impl HelloError {
    /// The two sides do not have the same key.
    pub(crate) fn is_about_keys(self) -> bool {
        matches!(
            self,
            Self::PeerUnkeyed | Self::PeerKeyed | Self::Proof | Self::KeyRefused
        )
    }
}

impl SessionKey {
    /// Tag of the `count`th frame, `signed` being its length and body.
    pub(crate) fn tag(&self, count: u64, signed: &[u8]) -> [u8; TAG_LEN] {
        let mut tag = [0; TAG_LEN];
        tag.copy_from_slice(&self.mac(count, signed).finalize().into_bytes()[..TAG_LEN]);
        tag
    }

    /// Checks a tag, in constant time.
    pub(crate) fn verify(&self, count: u64, signed: &[u8], tag: &[u8]) -> bool {
        tag.len() == TAG_LEN && self.mac(count, signed).verify_truncated_left(tag).is_ok()
    }

    fn mac(&self, count: u64, signed: &[u8]) -> Hmac<Sha256> {
        let mut mac = self.0.clone();
        mac.update(&count.to_le_bytes());
        mac.update(signed);
        mac
    }
}

fn hmac(key: &[u8]) -> Hmac<Sha256> {
    // As RFC 2104 has it; spelled out because the library's shorthand for slices returns a Result.
    let mut block = [0_u8; 64];
    match block.get_mut(..key.len()) {
        Some(place) => place.copy_from_slice(key),
        None => block[..32].copy_from_slice(&Sha256::digest(key)),
    }
    Hmac::new(&block.into())
}

#[cfg(test)]
#[path = "handshake_tests.rs"]
mod tests;
