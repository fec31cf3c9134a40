//! One instance: HTTP in front, the engine on its own thread, KV handoff to and from other instances.
//!
//! A request's way: `routes` reads it, `prepare` makes tokens of it on a blocking thread, `engine` runs
//! it, `respond` writes what comes out. [`serve()`] is the life of the whole.
#![forbid(unsafe_code)]

mod app;
mod defaults;
mod engine;
mod error;
pub mod handoff;
mod ids;
mod kv;
mod load;
mod logprobs;
mod metrics;
mod model;
mod prepare;
mod rank;
mod ranks;
mod respond;
mod room;
mod routes;
mod serve;
mod settings;

pub use defaults::SamplingDefaults;
pub use error::{ExitClass, ServeError};
pub use load::{LoadProgress, Model};
pub use logprobs::{PromptLogprobs, Scored, shown as shown_logprob};
pub use model::{check_model_config, load_model};
pub use rank::{HeadlessStop, RankProgram, run_rank, serve_headless};
pub use ranks::{GroupExchange, ranks_in_process};
pub use serve::{Hooks, PEER_CONNECTIONS, Ready, pin_process, serve, serve_with};
pub use settings::validate;
