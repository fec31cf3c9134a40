//! Names of KV blocks by what they contain: chained hashes, so that a block's name stands for its own
//! tokens and for all before them.

use twinfer_protocol::TokenId;
use xxhash_rust::xxh3::{Xxh3, xxh3_128_with_seed};

/// What a full block contains: its tokens, all tokens before them, and the chain's root.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BlockKey(pub u128);

/// Makes the keys of one sequence, block by block, as its tokens become known.
///
/// Keys are xxh3-128 over the hash of what is before and the block's tokens. The seed is a number that
/// clients do not know (of the fingerprint and a random part), so that nobody can make two texts of one
/// key. With a draft layer the token that follows the block is part of its key, because that layer's row
/// at the last position depends on it.
#[derive(Clone, Debug)]
pub struct BlockChain {
    seed: u64,
    draft_layer: bool,
    last: u128,
    hashed: usize,
}

impl BlockChain {
    /// The chain of a sequence whose blocks only sequences of the same `salt` may share.
    pub fn new(seed: u64, salt: Option<&str>, draft_layer: bool) -> Self {
        let mut root = vec![u8::from(salt.is_some())];
        root.extend_from_slice(salt.unwrap_or_default().as_bytes());
        Self::rooted(seed, xxh3_128_with_seed(&root, seed), draft_layer)
    }

    /// The chain of sequences that share with each other alone: choices of one request.
    pub fn private(seed: u64, group: u64, draft_layer: bool) -> Self {
        let mut root = [2; 9];
        root[1..].copy_from_slice(&group.to_le_bytes());
        Self::rooted(seed, xxh3_128_with_seed(&root, seed), draft_layer)
    }

    /// The next block's key, if `tokens`, the sequence from its start, fill one more block (and, with a
    /// draft layer, go on behind it).
    pub fn next(&mut self, tokens: &[TokenId], block_size: usize) -> Option<BlockKey> {
        let end = self.hashed + block_size;
        let block = tokens.get(self.hashed..end)?;
        let following = match self.draft_layer {
            true => Some(tokens.get(end)?),
            false => None,
        };
        let mut hasher = Xxh3::with_seed(self.seed);
        hasher.update(&self.last.to_le_bytes());
        for token in block {
            hasher.update(&token.to_le_bytes());
        }
        self.last = hasher.digest128();
        self.hashed = end;
        if let Some(token) = following {
            hasher.update(&token.to_le_bytes());
        }
        Some(BlockKey(hasher.digest128()))
    }

    fn rooted(seed: u64, root: u128, draft_layer: bool) -> Self {
        Self {
            seed,
            draft_layer,
            last: root,
            hashed: 0,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn keys(mut chain: BlockChain, tokens: &[TokenId]) -> Vec<BlockKey> {
        std::iter::from_fn(|| chain.next(tokens, 4)).collect()
    }

    #[test]
    fn only_full_blocks_have_keys_and_a_key_stands_for_all_before_it() {
        let text: Vec<TokenId> = (0..15).collect();
        let whole = keys(BlockChain::new(1, None, false), &text);
        assert_eq!(whole.len(), 3);
        assert_eq!(
            keys(BlockChain::new(1, None, false), &text[..11]),
            whole[..2]
        );
        for changed in 0..12 {
            let mut other = text.clone();
            other[changed] += 100;
            let other = keys(BlockChain::new(1, None, false), &other);
            let same = changed / 4;
            assert_eq!(other[..same], whole[..same]);
            for (a, b) in other[same..].iter().zip(&whole[same..]) {
                assert_ne!(a, b, "token {changed}");
            }
        }
        // The same tokens, one block later.
        assert_ne!(
            keys(BlockChain::new(1, None, false), &[7; 8])[0],
            keys(BlockChain::new(1, None, false), &[7; 8])[1]
        );
    }

    #[test]
    fn keys_belong_to_seed_salt_and_group() {
        let text: Vec<TokenId> = (0..4).collect();
        let chains = [
            BlockChain::new(1, None, false),
            BlockChain::new(2, None, false),
            BlockChain::new(1, Some(""), false),
            BlockChain::new(1, Some("a"), false),
            BlockChain::private(1, 0, false),
            BlockChain::private(1, 1, false),
        ];
        let mut all: Vec<_> = chains.into_iter().flat_map(|c| keys(c, &text)).collect();
        all.sort_unstable();
        all.dedup();
        assert_eq!(all.len(), 6);
    }

    #[test]
    fn a_chain_that_grows_token_by_token_gives_the_same_keys() {
        let text: Vec<TokenId> = (0..23).map(|i| i * i).collect();
        for draft_layer in [false, true] {
            let mut chain = BlockChain::new(9, Some("s"), draft_layer);
            let mut grown = Vec::new();
            for len in 0..=text.len() {
                grown.extend(chain.next(&text[..len], 4));
            }
            assert_eq!(
                grown,
                keys(BlockChain::new(9, Some("s"), draft_layer), &text)
            );
        }
    }

    #[test]
    fn with_a_draft_layer_the_following_token_is_part_of_a_key_and_of_no_other() {
        let chain = || BlockChain::new(1, None, true);
        let text: Vec<TokenId> = (0..13).collect();
        let whole = keys(chain(), &text);
        assert_eq!(whole.len(), 3);
        assert_eq!(keys(chain(), &text[..12]), whole[..2]);
        let mut other = text.clone();
        other[8] = 99;
        let other = keys(chain(), &other);
        assert_eq!(other[0], whole[0]);
        assert!(other[1] != whole[1] && other[2] != whole[2]);
        let mut other = text.clone();
        other[12] = 99;
        let other = keys(chain(), &other);
        assert_eq!(other[..2], whole[..2]);
        assert_ne!(other[2], whole[2]);
    }
}
