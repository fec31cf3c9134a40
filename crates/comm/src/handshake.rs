//! The first 160 bytes of a connection between peers, ranks or instances: both sides prove that they hold the peer key
//! before either says anything else. Pure: bytes in, bytes out.
//!
//! ```text
//! dialer                         listener
//! Hello (48 bytes)         ->
//!                          <-    Hello (48 bytes)
//! proof (32 bytes)         ->
//!                          <-    proof (32 bytes), or a refusal
//! ```
//!
//! A proof is HMAC-SHA256 under the peer key over a label that names the side, and both hellos, which
//! hold version, sides and nonces: a proof cannot be replayed, nor sent back to its maker. The
//! dialer proves first, so a listener signs nothing for strangers: one whose proof is wrong gets
//! [`Protocol::refusal`] in place of a proof, so that it can say why it is not served. Without a key (loopback only)
//! the same is computed under a public key: it proves nothing, but the connection's frames still get
//! tags that depend on both nonces.

use hmac::{Hmac, KeyInit, Mac};
use sha2::{Digest, Sha256};
use std::fmt;
use std::sync::Arc;

/// Bytes of a hello.
pub const HELLO_LEN: usize = 48;
/// Bytes of a proof.
pub const PROOF_LEN: usize = 32;
/// Bytes of a frame's tag.
pub const TAG_LEN: usize = 16;
/// What is said after the handshake; ends of another protocol or version refuse each other.
#[derive(Debug)]
pub struct Protocol {
    /// First bytes of a hello.
    pub magic: [u8; 8],
    /// Version of everything said on the connection, to be raised with any change of a message.
    pub version: u16,
    /// What proofs and keys of frames are made for, so that those of one protocol are worth nothing in another.
    pub label: &'static [u8],
}

/// The key that peers must prove. Never printed.
#[derive(Clone)]
pub struct PeerKey(Arc<[u8]>);

/// Who speaks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// Dials.
    Dialer,
    /// Listens.
    Listener,
}

/// First words of a side.
#[derive(Clone, Copy, Debug)]
pub struct Hello {
    /// What it speaks.
    pub protocol: &'static Protocol,
    /// Whose.
    pub side: Side,
    /// It has a peer key.
    pub keyed: bool,
    /// Drawn for this connection.
    pub nonce: [u8; 32],
}

/// Why the first bytes of a peer are not accepted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum HelloError {
    /// Something else.
    #[error("does not speak the protocol of this port")]
    Magic,
    /// Another version.
    #[error("speaks version {theirs} of the protocol, not {ours}")]
    Version {
        /// The peer's.
        theirs: u16,
        /// This side's.
        ours: u16,
    },
    /// Both dial or both listen.
    #[error("has the same side of the connection")]
    Side,
    /// Only this side has a key.
    #[error("has no peer key, and this side has one")]
    PeerUnkeyed,
    /// Only the other side has a key.
    #[error("has a peer key, and this side has none")]
    PeerKeyed,
    /// This side's own bytes came back.
    #[error("repeats this side's nonce")]
    Reflected,
    /// Another key: this side found it.
    #[error("does not hold this side's peer key")]
    Proof,
    /// Another key: the other side found it.
    #[error("does not accept this side's peer key: the two have different keys")]
    KeyRefused,
}

/// Both hellos as they travelled.
#[derive(Clone, Copy, Debug)]
pub struct Transcript {
    /// What both speak.
    pub protocol: &'static Protocol,
    /// The dialer's hello.
    pub dialer: [u8; HELLO_LEN],
    /// The listener's hello.
    pub listener: [u8; HELLO_LEN],
}

/// Key of one direction of one connection.
#[derive(Clone)]
pub struct SessionKey(Hmac<Sha256>);

impl Protocol {
    /// What a listener says in place of its proof to a dialer whose proof is wrong: the magic, then `: peer key not
    /// accepted.`. Anybody on the way can say so too: the dialer ends with an error then, as it would without an answer.
    pub fn refusal(&self) -> [u8; PROOF_LEN] {
        let mut out = *b"........: peer key not accepted.";
        out[..8].copy_from_slice(&self.magic);
        out
    }
}

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
            Self::Dialer => 1,
            Self::Listener => 2,
        }
    }

    /// The other one.
    pub fn other(self) -> Self {
        match self {
            Self::Dialer => Self::Listener,
            Self::Listener => Self::Dialer,
        }
    }
}

impl Hello {
    /// Magic, version (le), side, 1 if keyed, nonce, four zero bytes.
    pub fn encode(&self) -> [u8; HELLO_LEN] {
        let mut out = [0; HELLO_LEN];
        out[..8].copy_from_slice(&self.protocol.magic);
        out[8..10].copy_from_slice(&self.protocol.version.to_le_bytes());
        out[10] = self.side.byte();
        out[11] = u8::from(self.keyed);
        out[12..44].copy_from_slice(&self.nonce);
        out
    }

    /// Reads the other side's hello and checks that it fits ours.
    ///
    /// # Errors
    /// What does not fit.
    pub fn check_peer(&self, bytes: &[u8; HELLO_LEN]) -> Result<(), HelloError> {
        if bytes[..8] != self.protocol.magic {
            return Err(HelloError::Magic);
        }
        let (theirs, ours) = (
            u16::from_le_bytes([bytes[8], bytes[9]]),
            self.protocol.version,
        );
        if theirs != ours {
            return Err(HelloError::Version { theirs, ours });
        }
        let (side, keyed, nonce) = (bytes[10], bytes[11], &bytes[12..44]);
        if !(1..=2).contains(&side) || keyed > 1 || bytes[44..] != [0; 4] {
            return Err(HelloError::Magic);
        }
        if side == self.side.byte() {
            return Err(HelloError::Side);
        }
        match (self.keyed, keyed == 1) {
            (true, false) => return Err(HelloError::PeerUnkeyed),
            (false, true) => return Err(HelloError::PeerKeyed),
            _ => {}
        }
        if nonce == self.nonce {
            return Err(HelloError::Reflected);
        }
        Ok(())
    }
}

impl Transcript {
    /// What `side` sends to show that it holds the key.
    pub fn proof(&self, key: Option<&PeerKey>, side: Side) -> [u8; PROOF_LEN] {
        self.mac(key, b"proof", side).finalize().into_bytes().into()
    }

    /// Checks the proof of `side`, in constant time.
    ///
    /// # Errors
    /// [`HelloError::Proof`].
    pub fn verify(
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
    pub fn session(&self, key: Option<&PeerKey>, side: Side) -> SessionKey {
        SessionKey(hmac(&self.mac(key, b"frame", side).finalize().into_bytes()))
    }

    fn mac(&self, key: Option<&PeerKey>, purpose: &[u8; 5], side: Side) -> Hmac<Sha256> {
        let mut mac = hmac(key.map_or(b"twinfer without a peer key".as_slice(), |key| &key.0));
        mac.update(self.protocol.label);
        mac.update(purpose);
        mac.update(&[side.byte()]);
        mac.update(&self.dialer);
        mac.update(&self.listener);
        mac
    }
}

impl HelloError {
    /// Nobody that could make something of an answer: a listener says nothing then. Others get its hello, to name what
    /// differs.
    pub fn is_strange(self) -> bool {
        matches!(self, Self::Magic | Self::Reflected)
    }

    /// The two sides do not have the same key.
    pub fn is_about_keys(self) -> bool {
        matches!(
            self,
            Self::PeerUnkeyed | Self::PeerKeyed | Self::Proof | Self::KeyRefused
        )
    }
}

impl SessionKey {
    /// Tag of the `count`th frame, `signed` being its length and body.
    pub fn tag(&self, count: u64, signed: &[u8]) -> [u8; TAG_LEN] {
        let mut tag = [0; TAG_LEN];
        tag.copy_from_slice(&self.mac(count, signed).finalize().into_bytes()[..TAG_LEN]);
        tag
    }

    /// Checks a tag, in constant time.
    pub fn verify(&self, count: u64, signed: &[u8], tag: &[u8]) -> bool {
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

/// A key for tests of what is made with one.
#[cfg(test)]
pub(crate) fn test_session_key(seed: u8) -> SessionKey {
    SessionKey(hmac(&[seed; 32]))
}

#[cfg(test)]
#[path = "handshake_tests.rs"]
mod tests;
