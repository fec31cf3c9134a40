//! Tests of the crate as its users see it, over real sockets where sockets matter.

#[cfg(test)]
mod body;
#[cfg(test)]
mod client;
#[cfg(test)]
mod drain;
#[cfg(test)]
mod room;
#[cfg(test)]
mod server;
#[cfg(test)]
mod sse;
#[cfg(test)]
mod support;
mod tracked;
#[cfg(test)]
mod values;
