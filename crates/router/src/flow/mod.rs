//! A request's way through its instances: the pure state machine and what executes it.

mod exchange;
mod legs;
mod pull;

pub(crate) use exchange::{Ask, Exchange, Permit, Shared};
pub(crate) use pull::Failure;
