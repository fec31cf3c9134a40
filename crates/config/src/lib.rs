//! Every configuration struct of twinfer, once. A field's doc comment is its help text, schema
//! description and reference entry; its `clap` attributes are its flag.
#![forbid(unsafe_code)]

mod cpus;
mod fake;
mod generate;
pub mod model;
mod router;
mod serve;

pub use cpus::parse_cpus;
pub use fake::{Dialect, FakeConfig, FakeFault, FaultKind};
pub use generate::{GenerateConfig, LineFormat};
pub use model::{ModelConfig, ModelConfigError};
pub use router::{Policy, RouterConfig, WithoutPrefill};
pub use serve::{Dtype, KvLoadFailurePolicy, LogFormat, ServeConfig};
