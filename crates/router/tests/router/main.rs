//! The router before fake workers, over real sockets on loopback.

mod common;
mod connectors;
mod life;
mod pair;
mod queue;
mod refuse;
mod registry;
mod resend;
mod stream;
