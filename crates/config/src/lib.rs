//! Every configuration struct of twinfer, once. A field's doc comment is its help text, schema
//! description and reference entry; its `clap` attributes are its flag.
#![forbid(unsafe_code)]

mod cores;
mod fake;
mod flag;
mod generate;
pub mod gguf;
mod keys;
pub mod model;
pub mod ranges;
mod router;
mod serve;

pub use cores::CoreSet;
pub use fake::{Dialect, FakeConfig, FakeFault, FaultKind};
pub use flag::{FlagError, MOST_SECONDS};
pub use generate::{GenerateConfig, LineFormat};
pub use keys::{EnvironmentKeys, KeyVariable};
pub use model::{ModelConfig, ModelConfigError};
pub use router::{KvConnector, Policy, RouterConfig, WithoutPrefill};
pub use serve::{Dtype, KvLoadFailurePolicy, LogFormat, MoeComm, Quantization, ServeConfig};
