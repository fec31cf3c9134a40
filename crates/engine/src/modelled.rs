//! Steps that are priced instead of computed: the real scheduler over an executor that knows what a step
//! would cost on some hardware, for one rank or for a group in virtual time. No clock: costs are numbers of
//! nanoseconds that the caller sleeps for or adds up.

mod costs;
mod executor;
mod group;
mod policies;
mod run;

pub use costs::{CostModel, Hardware, ModelSize, StepLoad};
pub use executor::{ModelledExecutor, ModelledShape, StepMeter};
pub use group::{Group, GroupConfig, GroupError, GroupStep};
pub use policies::{Candidate, Choice, Limits, candidates, choose, equal_lengths, mixed_lengths};
pub use run::{Lengths, Report, Workload, run};
