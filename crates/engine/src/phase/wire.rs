//! The array that the ranks reduce.

use std::ops::Range;

/// Numbers in a [`Wire`].
pub const WIRE_LEN: usize = 11;
/// A rank's report, or the reduction of several. Which operation applies to a number depends on its place:
/// [`SUMS`], [`MAXIMA`], [`MINIMA`]. All are associative and commutative, so the order of reduction does not
/// matter.
pub type Wire = [u64; WIRE_LEN];

/// Places that are added up, saturating.
pub const SUMS: Range<usize> = 0..4;
/// Places of which the largest counts.
pub const MAXIMA: Range<usize> = 4..9;
/// Places of which the smallest counts.
pub const MINIMA: Range<usize> = 9..WIRE_LEN;

#[derive(Clone, Copy)]
pub(super) enum Field {
    /// One each.
    Ranks,
    /// Requests with prompt tokens to compute.
    Prompts,
    /// Their tokens, of each rank as many as a step takes while others generate.
    PromptTokens,
    /// Requests that could generate.
    Generating,
    /// Prompt tokens that a step could have, on the fullest rank.
    MostPromptTokens,
    /// Rows of a step that only generates, on the fullest rank.
    MostGenerateRows,
    /// Age of the prompts that have waited longest.
    MostAge,
    MostRound,
    MostPolicy,
    LeastRound,
    LeastPolicy,
}

/// Reduces another report into one.
pub fn reduce(into: &mut Wire, other: &Wire) {
    for (place, (into, other)) in into.iter_mut().zip(other).enumerate() {
        *into = if SUMS.contains(&place) {
            into.saturating_add(*other)
        } else if MAXIMA.contains(&place) {
            (*into).max(*other)
        } else {
            (*into).min(*other)
        };
    }
}

pub(super) fn field(wire: &Wire, field: Field) -> u64 {
    wire[field as usize]
}
