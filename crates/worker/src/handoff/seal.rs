//! What makes a wrong byte visible: a checksum per unit, a hash of the tokens, and one seal over both
//! that travels inside the handle.
//!
//! The owner seals once, when the prompt's KV is complete; nothing is sealed anew on the way. A unit
//! is the valid rows of one layer's share of one block, so that what lies behind the last token of
//! the last block neither counts nor travels.

use crate::handoff::lease::HandleId;
use sha2::{Digest, Sha256};
use std::fmt;
use std::ops::Range;
use std::str::FromStr;
use twinfer_engine::KvGeometry;
use twinfer_protocol::{BlockId, Epoch, TokenId};
use xxhash_rust::xxh3::{Xxh3Default, xxh3_64};

/// Hash over the ids of the tokens whose KV is handed over.
pub(crate) type TokenHash = [u8; 32];
/// Checksum of a unit, xxh3-64, little-endian.
pub(crate) type Checksum = [u8; 8];

/// Hash over everything that a handle stands for. In `kv_transfer_params` as `remote_kv_seal`,
/// 32 hexadecimal digits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Seal(pub u128);

/// A text that is no [`Seal`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NotASeal;

/// What is under a seal.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sealed<'a> {
    pub(crate) epoch: Epoch,
    pub(crate) id: HandleId,
    pub(crate) geometry: KvGeometry,
    pub(crate) tokens: u32,
    pub(crate) token_hash: &'a TokenHash,
    /// Blocks at the owner, in order of position.
    pub(crate) blocks: &'a [BlockId],
    /// One per unit, all blocks of layer 0 first.
    pub(crate) checksums: &'a [Checksum],
}

/// Shape of `tokens` tokens' KV in units.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Units {
    geometry: KvGeometry,
    /// Tokens that are sealed.
    tokens: usize,
}

/// SHA-256 over the number of tokens and their ids: a collision cannot be made from chosen prompts.
pub(crate) fn token_hash(prompt: &[TokenId]) -> TokenHash {
    let mut hash = Sha256::new();
    hash.update(b"twinfer tokens 1");
    hash.update((prompt.len() as u64).to_le_bytes());
    let mut bytes = [0_u8; 4 * 256];
    for ids in prompt.chunks(256) {
        for (place, id) in bytes.chunks_exact_mut(4).zip(ids) {
            place.copy_from_slice(&id.to_le_bytes());
        }
        hash.update(&bytes[..4 * ids.len()]);
    }
    hash.finalize().into()
}

/// xxh3-64 over the valid rows of a unit.
pub(crate) fn unit_checksum(rows: &[u8]) -> Checksum {
    xxh3_64(rows).to_le_bytes()
}

impl Sealed<'_> {
    /// xxh3-128 over every field, each at a fixed place or behind its count.
    pub(crate) fn seal(&self) -> Seal {
        let mut hash = Xxh3Default::new();
        hash.update(b"twinfer kv seal 1");
        let geometry = self.geometry;
        for number in [
            self.epoch.0,
            self.id.generation,
            self.id.nonce,
            geometry.layers as u64,
            geometry.width as u64,
            geometry.value_bytes as u64,
            geometry.block_size as u64,
            u64::from(self.tokens),
            self.blocks.len() as u64,
            self.checksums.len() as u64,
        ] {
            hash.update(&number.to_le_bytes());
        }
        hash.update(self.token_hash);
        for block in self.blocks {
            hash.update(&block.to_le_bytes());
        }
        hash.update(self.checksums.as_flattened());
        Seal(hash.digest128())
    }
}

impl Units {
    /// None if a number is zero or a size does not fit 64 bits.
    pub(crate) fn new(geometry: KvGeometry, tokens: u32) -> Option<Self> {
        let KvGeometry {
            layers,
            width,
            value_bytes,
            block_size,
        } = geometry;
        let tokens = tokens as usize;
        let row = width.checked_mul(value_bytes)?;
        row.checked_mul(layers)?
            .checked_mul(tokens.checked_add(block_size)?)?;
        (row > 0 && layers > 0 && block_size > 0 && tokens > 0).then_some(Self { geometry, tokens })
    }

    /// Blocks that hold the first `tokens` tokens.
    pub(crate) fn blocks_for(&self, tokens: u32) -> usize {
        (tokens as usize).div_ceil(self.geometry.block_size)
    }

    /// Blocks that are sealed.
    pub(crate) fn blocks(&self) -> usize {
        self.tokens.div_ceil(self.geometry.block_size)
    }

    /// Layers that have KV.
    pub(crate) fn layers(&self) -> usize {
        self.geometry.layers
    }

    /// Units that are sealed.
    pub(crate) fn count(&self) -> usize {
        self.blocks() * self.geometry.layers
    }

    /// Index of a unit in the list of checksums.
    pub(crate) fn index(&self, layer: usize, block: usize) -> usize {
        layer * self.blocks() + block
    }

    /// Bytes of the valid rows of every unit of a block.
    pub(crate) fn bytes(&self, block: usize) -> usize {
        let before = block * self.geometry.block_size;
        let rows = self
            .tokens
            .saturating_sub(before)
            .min(self.geometry.block_size);
        rows * self.geometry.width * self.geometry.value_bytes
    }

    /// Bytes of these blocks in all layers.
    pub(crate) fn payload(&self, blocks: Range<usize>) -> u64 {
        let before = |block: usize| self.tokens.min(block * self.geometry.block_size);
        let rows = before(blocks.end).saturating_sub(before(blocks.start));
        (rows * self.geometry.width * self.geometry.value_bytes * self.geometry.layers) as u64
    }
}

impl fmt::Display for Seal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", self.0)
    }
}

impl FromStr for Seal {
    type Err = NotASeal;

    fn from_str(text: &str) -> Result<Self, NotASeal> {
        let seal = Self(u128::from_str_radix(text, 16).map_err(|_| NotASeal)?);
        (seal.to_string() == text).then_some(seal).ok_or(NotASeal)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const GEOMETRY: KvGeometry = KvGeometry {
        layers: 3,
        width: 5,
        value_bytes: 2,
        block_size: 4,
    };

    #[test]
    fn units_of_a_partial_last_block_have_its_rows_only() {
        let units = Units::new(GEOMETRY, 9).unwrap();
        assert_eq!((units.blocks(), units.count()), (3, 9));
        assert_eq!(
            [
                units.bytes(0),
                units.bytes(1),
                units.bytes(2),
                units.bytes(3)
            ],
            [40, 40, 10, 0]
        );
        assert_eq!(
            [
                units.payload(0..0),
                units.payload(0..2),
                units.payload(0..3),
                units.payload(1..3),
                units.payload(2..3)
            ],
            [0, 240, 270, 150, 30]
        );
        assert_eq!(
            [
                units.blocks_for(0),
                units.blocks_for(8),
                units.blocks_for(9)
            ],
            [0, 2, 3]
        );
    }

    #[test]
    fn absurd_shapes_are_refused() {
        for geometry in [
            KvGeometry {
                layers: 0,
                ..GEOMETRY
            },
            KvGeometry {
                block_size: 0,
                ..GEOMETRY
            },
            KvGeometry {
                width: usize::MAX,
                ..GEOMETRY
            },
            KvGeometry {
                layers: usize::MAX / 4,
                ..GEOMETRY
            },
            KvGeometry {
                block_size: usize::MAX,
                ..GEOMETRY
            },
        ] {
            assert_eq!(Units::new(geometry, 9), None, "{geometry:?}");
        }
        assert_eq!(Units::new(GEOMETRY, 0), None);
    }

    #[test]
    fn token_hashes_tell_prompts_apart() {
        let long: Vec<u32> = (0..1000).collect();
        let mut other = long.clone();
        other[999] = 0;
        assert_ne!(token_hash(&long), token_hash(&other));
        assert_ne!(token_hash(&long), token_hash(&long[..999]));
        assert_ne!(token_hash(&[]), token_hash(&[0]));
        assert_eq!(token_hash(&long), token_hash(&long.clone()));
    }

    #[test]
    fn a_seal_has_one_name() {
        let seal = Seal(0xfe);
        assert_eq!(seal.to_string().parse(), Ok(seal));
        for bad in [
            "",
            "fe",
            "+00000000000000000000000000000fe",
            "000000000000000000000000000000FE",
        ] {
            assert_eq!(bad.parse::<Seal>(), Err(NotASeal), "{bad}");
        }
    }

    proptest! {
        /// Whatever is changed under a seal, the seal changes.
        #[test]
        fn a_seal_covers_every_field(
            checksums in proptest::collection::vec(any::<[u8; 8]>(), 2..12),
            blocks in proptest::collection::vec(any::<u32>(), 2..6),
            field in 0_usize..10, place in any::<proptest::sample::Index>(), bit in 0_u32..32,
        ) {
            let hash = token_hash(&blocks);
            let id = HandleId { generation: 3, nonce: 4 };
            let sealed = Sealed {
                epoch: Epoch(9), id, geometry: GEOMETRY, tokens: 9,
                token_hash: &hash, blocks: &blocks, checksums: &checksums,
            };
            let (mut hash2, mut blocks2, mut checksums2) = (hash, blocks.clone(), checksums.clone());
            let mut changed = sealed;
            match field {
                0 => changed.epoch.0 ^= 1 << bit,
                1 => changed.id.generation ^= 1 << bit,
                2 => changed.id.nonce ^= 1 << bit,
                3 => changed.geometry.layers ^= 1 << bit,
                4 => changed.geometry.width ^= 1 << bit,
                5 => changed.geometry.block_size ^= 1 << bit,
                6 => changed.tokens ^= 1 << bit,
                7 => hash2[place.index(32)] ^= 1 << (bit % 8),
                8 => blocks2[place.index(blocks.len())] ^= 1 << bit,
                _ => checksums2[place.index(checksums.len())][bit as usize % 8] ^= 1 << (bit / 8),
            }
            let changed = Sealed { token_hash: &hash2, blocks: &blocks2, checksums: &checksums2, ..changed };
            prop_assert_ne!(sealed.seal(), changed.seal());
        }
    }
}
