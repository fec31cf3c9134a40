//! What a fake worker remembers of its clients, bounded.

use bytes::Bytes;
use parking_lot::Mutex;
use serde::Serialize;
use serde_json::Value;
use std::collections::VecDeque;
use std::time::{Duration, Instant};
use tokio::sync::watch;

/// A request as it arrived.
#[derive(Clone, Debug)]
pub struct RecordedRequest {
    /// Number among the requests of inference routes, from 1; 0 for other routes.
    pub nth: u64,
    /// Connection it came on.
    pub connection: u64,
    /// Time since the worker started.
    pub at: Duration,
    /// Method.
    pub method: String,
    /// Path with query.
    pub path: String,
    /// Headers in their order, names in lower case.
    pub headers: Vec<(String, String)>,
    /// Body, dechunked.
    pub body: Bytes,
}

/// Something that happened to a connection.
#[derive(Clone, Debug, Serialize)]
pub struct ConnectionEvent {
    /// Connection, counted from 1.
    pub connection: u64,
    /// Time since the worker started.
    pub at: Duration,
    /// What.
    #[serde(flatten)]
    pub what: ConnectionWhat,
}

/// See [`ConnectionEvent`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case", tag = "event")]
pub enum ConnectionWhat {
    /// Accepted.
    Opened,
    /// The answer to request `nth` was written whole.
    Answered {
        /// Number of the request.
        nth: u64,
    },
    /// The client closed while request `nth` was being answered.
    ClientGone {
        /// Number of the request.
        nth: u64,
    },
    /// Closed, by either side.
    Closed,
}

/// Bounded logs and a signal of changes.
pub(super) struct Log {
    start: Instant,
    cap: usize,
    requests: Mutex<VecDeque<RecordedRequest>>,
    connections: Mutex<VecDeque<ConnectionEvent>>,
    version: watch::Sender<u64>,
}

impl RecordedRequest {
    /// First value of a header; `name` in lower case.
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers
            .iter()
            .find(|(n, _)| n == name)
            .map(|(_, v)| v.as_str())
    }

    /// Body as JSON; null when it is none.
    pub fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap_or_default()
    }

    pub(super) fn to_json(&self) -> Value {
        serde_json::json!({
            "nth": self.nth,
            "connection": self.connection,
            "at": self.at.as_secs_f64(),
            "method": self.method,
            "path": self.path,
            "headers": self.headers,
            "body": String::from_utf8_lossy(&self.body),
        })
    }
}

impl Log {
    pub(super) fn new(cap: usize) -> Self {
        Self {
            start: Instant::now(),
            cap,
            requests: Mutex::default(),
            connections: Mutex::default(),
            version: watch::Sender::new(0),
        }
    }

    pub(super) fn request(&self, request: impl FnOnce(Duration) -> RecordedRequest) {
        if self.cap > 0 {
            let mut requests = self.requests.lock();
            if requests.len() == self.cap {
                requests.pop_front();
            }
            requests.push_back(request(self.start.elapsed()));
        }
        self.changed();
    }

    pub(super) fn connection(&self, connection: u64, what: ConnectionWhat) {
        if self.cap > 0 {
            let mut connections = self.connections.lock();
            if connections.len() == self.cap {
                connections.pop_front();
            }
            connections.push_back(ConnectionEvent {
                connection,
                at: self.start.elapsed(),
                what,
            });
        }
        self.changed();
    }

    pub(super) fn changed(&self) {
        self.version.send_modify(|v| *v += 1);
    }

    pub(super) fn changes(&self) -> watch::Receiver<u64> {
        self.version.subscribe()
    }

    pub(super) fn requests(&self) -> Vec<RecordedRequest> {
        self.requests.lock().iter().cloned().collect()
    }

    pub(super) fn connections(&self) -> Vec<ConnectionEvent> {
        self.connections.lock().iter().cloned().collect()
    }
}
