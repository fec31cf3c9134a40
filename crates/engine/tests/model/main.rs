//! Models: parity with the reference, equal bits, broken files.

#[cfg(test)]
mod executor;
#[cfg(test)]
mod golden;
#[cfg(test)]
mod support;
#[cfg(test)]
mod weights;
