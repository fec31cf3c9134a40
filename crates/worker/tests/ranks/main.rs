//! One engine over many ranks gives the answers of one rank: same tokens, same log-probabilities, bit for bit.
#![expect(clippy::unwrap_used, reason = "a failed test ends here")]

mod answers;
mod matrix;
mod mixtral;
mod moving;
mod threads;
mod travel;
