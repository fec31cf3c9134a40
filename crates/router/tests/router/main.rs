//! The router before fake workers, over real sockets on loopback.

mod common;
mod life;
mod pair;
mod refuse;
mod resend;
mod stream;
