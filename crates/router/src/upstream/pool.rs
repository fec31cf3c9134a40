//! Idle connections, per instance and bounded.

use super::conn::Connection;
use parking_lot::Mutex;
use std::collections::HashMap;
use std::time::Duration;
use tokio::time::{Instant, interval};
use twinfer_http::{Endpoint, TransportError, connect};

/// An idle connection is closed after this, before instances close it themselves (uvicorn: 5 s).
const MAX_IDLE: Duration = Duration::from_secs(4);
/// Between two looks at all idle connections.
const SWEEP: Duration = Duration::from_secs(1);

/// Idle connections of all instances.
pub(super) struct Pool {
    connect_timeout: Duration,
    /// Idle connections kept, in all.
    max_idle: usize,
    idle: Mutex<HashMap<Endpoint, Vec<Connection>>>,
}

impl Pool {
    pub(super) fn new(connect_timeout: Duration, max_idle: usize) -> Self {
        Self {
            connect_timeout,
            max_idle,
            idle: Mutex::default(),
        }
    }

    /// The connection that was used last, if it is still good, else a new one.
    pub(super) async fn connection(&self, to: &Endpoint) -> Result<Connection, TransportError> {
        while let Some(mut connection) = self.take(to) {
            if connection.is_usable() {
                return Ok(connection);
            }
        }
        let stream = connect(to.host_port(), self.connect_timeout).await?;
        let connection = Connection::new(stream).await;
        connection.map_err(|error| TransportError::Connect {
            peer: to.host_port().to_string(),
            reason: error.to_string(),
        })
    }

    pub(super) fn put(&self, endpoint: &Endpoint, mut connection: Connection) {
        connection.put_aside();
        let mut idle = self.idle.lock();
        if idle.values().map(Vec::len).sum::<usize>() >= self.max_idle {
            return;
        }
        match idle.get_mut(endpoint) {
            Some(of_instance) => of_instance.push(connection),
            None => idle.entry(endpoint.clone()).or_default().push(connection),
        }
    }

    pub(super) async fn sweep_forever(&self) {
        let mut ticks = interval(SWEEP);
        loop {
            ticks.tick().await;
            let endpoints: Vec<Endpoint> = self.idle.lock().keys().cloned().collect();
            for endpoint in endpoints {
                self.sweep(&endpoint);
            }
        }
    }

    fn sweep(&self, endpoint: &Endpoint) {
        // Not under the lock: closing a connection is a system call.
        let mut connections = match self.idle.lock().get_mut(endpoint) {
            Some(of_instance) => std::mem::take(of_instance),
            None => return,
        };
        let now = Instant::now();
        connections.retain_mut(|connection| {
            let young = connection
                .idle_since()
                .is_some_and(|since| now.duration_since(since) < MAX_IDLE);
            young && connection.is_usable()
        });
        let mut idle = self.idle.lock();
        if let Some(of_instance) = idle.get_mut(endpoint) {
            // Those that came meanwhile are younger: they stay on top.
            connections.append(of_instance);
            *of_instance = connections;
        }
    }

    fn take(&self, to: &Endpoint) -> Option<Connection> {
        self.idle.lock().get_mut(to)?.pop()
    }
}
