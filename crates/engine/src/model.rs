//! Forward passes. One file per family of models holds its weights and its order of operations;
//! what families share stands beside it.
//!
//! Contract: a row's result depends on that row and its own sequence only. Kernels keep it for
//! products, norms and attention; here it follows from there being no operation across rows.

mod build;
#[cfg(test)]
mod build_tests;
mod decoder;
mod deepseek;
mod ffn;
mod gqa;
mod kv;
mod llama;
mod mla;
mod moe;
mod mtp;
mod norm;
mod packing;
mod probe;
mod qwen;
mod rope;
mod routing;
mod rows;
mod scratch;
mod seating;
mod spread;
mod step;
mod stored;

pub(crate) use build::Builder;
pub(crate) use decoder::Decoder;
pub(crate) use kv::{KvBuffers, KvLayout, KvStep};
pub(crate) use mtp::DraftScratch;
pub(crate) use packing::Packing;
pub(crate) use probe::Taps;
pub use probe::{Probe, ProbeRows, Tap};
pub(crate) use scratch::{Scratch, sized};
pub(crate) use seating::Seating;
pub(crate) use spread::Spread;
pub(crate) use step::{Span, Step};

/// Raised with every change of an order of operations in this module.
pub(crate) const MODEL_REVISION: u32 = 2;
