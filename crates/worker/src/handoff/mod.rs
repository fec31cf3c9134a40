//! Connector `pull`: a decode instance reads a prompt's KV from a prefill instance over TCP.
mod handshake;
mod lease;
mod params;
mod peers;
mod seal;
mod wire;
