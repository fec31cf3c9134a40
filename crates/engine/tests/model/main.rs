//! Models: parity with the reference, equal bits, broken files.

#[cfg(test)]
mod announced;
#[cfg(test)]
mod executor;
#[cfg(test)]
mod fixture;
#[cfg(test)]
mod gguf;
mod golden;
#[cfg(test)]
mod loading;
#[cfg(test)]
mod mtp;
#[cfg(test)]
mod quantised;
#[cfg(test)]
mod reference;
#[cfg(test)]
mod split;
#[cfg(test)]
mod support;
#[cfg(test)]
mod weights;
