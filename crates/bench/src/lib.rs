//! Measuring and rehearsing: protocol-true fake workers (see [`fake`]).
#![forbid(unsafe_code)]

pub mod fake;
