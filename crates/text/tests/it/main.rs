//! Tests of the crate as its users see it.

#[cfg(test)]
mod common;
#[cfg(test)]
mod detokenize;
#[cfg(test)]
mod golden;
#[cfg(test)]
mod model_dir;
#[cfg(test)]
mod template;
