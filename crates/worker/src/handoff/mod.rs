//! Connector `pull`: a decode instance reads a prompt's KV from a prefill instance over TCP.
//!
//! Prefill side: [`Exporter`] seals the KV of a finished prompt (a checksum per unit, a hash of its
//! tokens, one seal over all), leases it, and serves it to peers that prove the peer key. Decode side:
//! [`Importer`] judges the handle in `kv_transfer_params`, keeps it alive while its request waits,
//! reads the units straight into its own blocks and verifies each before it says that they are there.
//!
//! A lease is no fence. What keeps a block from being used for something else while it is read are
//! the borrows of the block arena; what keeps a block from being taken for something else is the seal
//! in the handle, which binds epoch, registration, tokens, shape, blocks and every checksum.

mod channel;
mod exporter;
mod fetch;
mod importer;
mod keeper;
mod lease;
mod listener;
mod params;
mod peers;
mod pool;
mod seal;
mod server;
mod stats;
mod wire;

pub use exporter::{BindError, Exporter, ExporterConfig};
pub use importer::{Claim, FetchReport, Importer, ImporterConfig, ImporterError};
pub use keeper::ImporterKeeper;
pub(crate) use keeper::RENEWALS;
pub use lease::HandleId;
pub use listener::KvListener;
pub(crate) use params::Judge;
pub use params::RemoteHandle;
pub use peers::{Peer, PeerListError};
pub use seal::Seal;
pub use server::ExporterServer;
pub use stats::{ExporterStats, FailureCounts, ImporterStats, RejectionCounts};
pub use twinfer_comm::PeerKey;
pub use wire::ReleaseOutcome;

#[cfg(test)]
mod hostile_tests;
