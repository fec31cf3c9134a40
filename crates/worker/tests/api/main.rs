//! An instance over real HTTP on loopback, with the scripted executor.

mod chat;
mod completions;
mod faults;
mod keys;
mod life;
mod limits;
mod pair;
mod support;
