//! Expert load balancing: which expert sits in which seats, so that the fullest rank has as little to do as
//! possible. Answers never depend on it: an expert computes alike in every seat.
//!
//! Loads are counted by expert ([`LoadStats`]); every so many steps ([`Rebalancing`]) all ranks add theirs up and
//! derive the same new placement ([`rebalance`]), layer by layer; then one layer after the other moves between
//! two steps (`moves`).
//!
//! The algorithm is that of DeepSeek's EPLB: <https://github.com/deepseek-ai/EPLB>.

mod balance;
mod moves;
mod schedule;
mod stats;

pub use balance::{EplbShape, balance, rebalance, worst_load};
pub use moves::{Move, MoveCost, Round, cost, moves, rounds};
pub use schedule::{EplbAction, EplbOptions, Rebalancing};
pub use stats::LoadStats;

#[cfg(test)]
mod tests;
