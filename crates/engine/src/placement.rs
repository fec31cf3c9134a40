//! Which rank has which experts, and the way of a row to them and back.
//!
//! Each rank has the same number of seats, places for one expert's weights in each layer. An expert sits in at
//! least one seat; with several, each row takes one of them by a fixed rule, and gets the same numbers from any.
//! A row goes once to each rank that has one of its experts ([`Dispatch`]), there the rows are sorted by
//! seat ([`Arrivals`]), and the output of every expert comes back on its own. The home rank sums them in
//! slot order ([`Dispatch::combine`]), the order of the model's choice, in which a rank alone sums them too.

mod dispatch;
mod seats;

pub use dispatch::{Arrivals, Dispatch, DispatchError, Item};
pub use seats::{ExpertPlacement, check_spread};
