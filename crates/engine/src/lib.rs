//! The serving engine: models, weights, KV blocks, scheduler, sampler and `step()`. Synchronous, no
//! sockets, no clock.
#![forbid(unsafe_code)]

pub mod api;
pub mod blocks;
mod core;
pub mod eplb;
pub mod exchange;
mod executor;
mod generate;
pub mod loader;
pub mod model;
pub mod modelled;
pub mod output;
mod outputs;
pub mod phase;
pub mod placement;
mod prefix;
mod ranks;
pub mod sampler;
pub mod scheduler;
mod scripted;
mod sharing;
mod speculation;
pub mod weights;

pub use api::*;
pub use core::Engine;
pub use executor::CpuExecutor;
pub use generate::{GenerateError, Generated, generate};
pub use loader::{
    CheckedModel, KvMemory, LoadOptions, LoadedModel, ModelError, ModelOutline, Progress, check,
    load, model_texts, outline,
};
pub use model::{Probe, ProbeRows, Tap};
pub use outputs::{EventRef, OutputRef, StepOutput, TokenRef};
pub use prefix::{BlockChain, BlockKey};
pub use ranks::{RankEngine, Turn, generate_together};
pub use sampler::{check_length, check_prompt};
pub use sharing::{Sharing, default_share_dir};
pub use weights::hub_revision;

/// An executor and a tokenizer without a model, for tests of this and other crates.
pub mod testing {
    pub use crate::scripted::{
        BYTE_BOS, BYTE_EOS, BYTE_VOCAB, ScriptedExecutor, ScriptedShape, StepInfo, byte_tokenizer,
        fill_kv, write_byte_tokenizer,
    };
}
