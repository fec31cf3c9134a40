//! The engine as its callers see it, over the scripted executor.

mod common;
mod limits;
mod output;
mod random;
mod remote;
mod same;
