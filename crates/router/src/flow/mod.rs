//! A request's way through its instances: the pure state machine and what executes it.

mod conduct;
mod exchange;
mod legs;
mod metaserver;
mod pull;
mod resume;
mod together;

pub(crate) use exchange::{Ask, Exchange, Permit, Shared};
pub(crate) use legs::Begun;
pub(crate) use metaserver::Metaserver;
pub(crate) use pull::Failure;
pub(crate) use resume::KeptBytes;
