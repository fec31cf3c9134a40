//! The engine as its callers see it, over the scripted executor.
//! `cfg(test)` tells clippy that helpers outside of `#[test]` functions are tests too.

#[cfg(test)]
mod common;
#[cfg(test)]
mod fairness;
#[cfg(test)]
mod limits;
#[cfg(test)]
mod model;
#[cfg(test)]
mod output;
#[cfg(test)]
mod prefix;
#[cfg(test)]
mod random;
#[cfg(test)]
mod remote;
#[cfg(test)]
mod same;
#[cfg(test)]
mod scoring;
#[cfg(test)]
mod speculation;
