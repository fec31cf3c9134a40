//! What the ranks have read, each its share, as hashes of tensors.

use crate::ModelError;
use crate::exchange::RankLink;
use std::collections::BTreeMap;

/// Tag of the exchange, before all turns.
const TAG: u32 = 1;
/// Bytes from one rank at most: the largest models have less than 2^17 tensors.
const LIMIT: usize = 32 << 20;

/// Adds to `hashes` what the other ranks have read. Each rank sends lines of a tensor's name and its hash.
///
/// # Errors
/// A rank is missing, sends a tensor that the checkpoint does not have, or has read other bytes.
pub(super) fn gather_hashes(
    link: &RankLink,
    known: impl Fn(&str) -> bool,
    hashes: &mut BTreeMap<String, u128>,
) -> Result<(), ModelError> {
    let lines: String = hashes
        .iter()
        .map(|(name, hash)| format!("{name} {hash:032x}\n"))
        .collect();
    let ranks = link.ranks() as usize;
    let send = lines.repeat(ranks);
    let counts = vec![lines.len(); ranks];
    let mut exchange = link.open();
    exchange
        .all_to_all(link.place(TAG), send.as_bytes(), &counts, LIMIT)
        .map_err(|error| ModelError::Ranks(error.message))?;
    for rank in (0..link.ranks()).filter(|rank| *rank != link.rank()) {
        let refuse = |what: String| Err(ModelError::Ranks(format!("rank {rank} {what}")));
        let Ok(text) = std::str::from_utf8(exchange.received(rank)) else {
            return refuse("sent no text in place of its tensors' hashes".to_owned());
        };
        for line in text.lines() {
            let parts = line.split_once(' ').filter(|(name, _)| known(name));
            let parts = parts.and_then(|(name, hash)| {
                let hash = u128::from_str_radix(hash, 16).ok()?;
                Some((name, hash))
            });
            let Some((name, hash)) = parts else {
                return refuse("has read a tensor that this rank does not know".to_owned());
            };
            match hashes.get(name) {
                Some(own) if *own != hash => {
                    return refuse(format!(
                        "has read other bytes of {name}: its model is another one"
                    ));
                }
                Some(_) => {}
                None => {
                    hashes.insert(name.to_owned(), hash);
                }
            }
        }
    }
    Ok(())
}
