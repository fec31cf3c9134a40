//! Forward passes. One file per family of models holds its weights and its order of operations;
//! what families share stands beside it.
//!
//! Contract: a row's result depends on that row and its own sequence only. Kernels keep it for
//! products, norms and attention; here it follows from there being no operation across rows.

mod build;
pub(crate) mod deepseek_v3;
mod kv;
mod moe;
mod probe;
mod rope;
mod rows;
mod scratch;

pub(crate) use build::Builder;
pub(crate) use kv::KvStep;
pub(crate) use probe::Taps;
pub use probe::{Probe, ProbeRows, Tap};
pub(crate) use scratch::Scratch;

/// Raised with every change of an order of operations in this module.
pub(crate) const MODEL_REVISION: u32 = 1;
