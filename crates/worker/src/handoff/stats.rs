//! What a connector counts. Counters only grow; gauges are taken when asked.

use crate::handoff::channel::ChannelError;
use serde::{Deserialize, Serialize};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use twinfer_comm::handshake::HelloError;
use twinfer_protocol::ErrorKind;

/// Failures by the code a request would end with.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct FailureCounts {
    /// Handle unknown, expired, released or of another epoch.
    pub stale: u64,
    /// Bytes damaged, short, swapped, or of other tokens.
    pub corrupt: u64,
    /// Other fingerprint, shape, protocol version or key.
    pub mismatch: u64,
    /// Connection failed or made no progress.
    pub transfer: u64,
    /// Anything else.
    pub other: u64,
}

/// Connections that an exporter closed before or instead of serving them, by reason.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RejectionCounts {
    /// Spoke another protocol, or broke this one.
    pub protocol: u64,
    /// Spoke another version.
    pub version: u64,
    /// Has no key, another key, or is not on loopback where no key is set.
    pub key: u64,
    /// Went silent, or closed, before its handshake was over.
    pub silent: u64,
    /// Had to make place for a newer connection before its handshake was over.
    pub evicted: u64,
    /// Came when all places were taken.
    pub busy: u64,
    /// Has another fingerprint.
    pub mismatch: u64,
}

/// Counters and gauges of an exporter.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExporterStats {
    /// Gauge: handles whose blocks are held.
    pub leases: u64,
    /// Gauge: reads in progress.
    pub readers: u64,
    /// Gauge: open connections.
    pub connections: u64,
    /// Handles given out.
    pub registered: u64,
    /// Leases that ended by time.
    pub expired: u64,
    /// Reads that the reader acknowledged.
    pub pulls: u64,
    /// Bytes of units sent.
    pub bytes: u64,
    /// Reads that failed.
    pub failures: FailureCounts,
    /// Connections not served.
    pub rejections: RejectionCounts,
}

/// Counters and gauges of an importer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ImporterStats {
    /// Gauge: handles kept alive for requests here.
    pub claims: u64,
    /// Gauge: open connections, pooled ones included.
    pub connections: u64,
    /// Fetches that ended well.
    pub pulls: u64,
    /// Bytes of units read, verified, by these.
    pub bytes: u64,
    /// Fetches that failed.
    pub failures: FailureCounts,
    /// Pooled connections that turned out dead in use and were replaced.
    pub redials: u64,
    /// Releases that reached their exporter.
    pub releases: u64,
    /// Releases that did not; the lease has to end there.
    pub releases_lost: u64,
}

impl RejectionCounts {
    /// Adds those of another.
    fn add(&mut self, other: &Self) {
        let Self {
            protocol,
            version,
            key,
            silent,
            evicted,
            busy,
            mismatch,
        } = other;
        self.protocol += protocol;
        self.version += version;
        self.key += key;
        self.silent += silent;
        self.evicted += evicted;
        self.busy += busy;
        self.mismatch += mismatch;
    }
}

impl ExporterStats {
    /// Adds those of another rank.
    pub(crate) fn add(&mut self, other: &Self) {
        let Self {
            leases,
            readers,
            connections,
            registered,
            expired,
            pulls,
            bytes,
            failures,
            rejections,
        } = other;
        self.leases += leases;
        self.readers += readers;
        self.connections += connections;
        self.registered += registered;
        self.expired += expired;
        self.pulls += pulls;
        self.bytes += bytes;
        self.failures.add(failures);
        self.rejections.add(rejections);
    }
}

impl ImporterStats {
    /// Adds those of another rank.
    pub(crate) fn add(&mut self, other: &Self) {
        let Self {
            claims,
            connections,
            pulls,
            bytes,
            failures,
            redials,
            releases,
            releases_lost,
        } = other;
        self.claims += claims;
        self.connections += connections;
        self.pulls += pulls;
        self.bytes += bytes;
        self.failures.add(failures);
        self.redials += redials;
        self.releases += releases;
        self.releases_lost += releases_lost;
    }
}

/// Counter that many tasks add to.
#[derive(Debug, Default)]
pub(crate) struct Counter(AtomicU64);

#[derive(Debug, Default)]
pub(crate) struct Failures {
    stale: Counter,
    corrupt: Counter,
    mismatch: Counter,
    transfer: Counter,
    other: Counter,
}

#[derive(Debug, Default)]
pub(crate) struct Rejections {
    pub(crate) protocol: Counter,
    pub(crate) version: Counter,
    pub(crate) key: Counter,
    pub(crate) silent: Counter,
    pub(crate) evicted: Counter,
    pub(crate) busy: Counter,
    pub(crate) mismatch: Counter,
}

impl FailureCounts {
    /// Adds those of another.
    fn add(&mut self, other: &Self) {
        let Self {
            stale,
            corrupt,
            mismatch,
            transfer,
            other: rest,
        } = other;
        self.stale += stale;
        self.corrupt += corrupt;
        self.mismatch += mismatch;
        self.transfer += transfer;
        self.other += rest;
    }

    /// Code of the error table and count, in fixed order: labels of a metric.
    pub fn by_code(&self) -> [(&'static str, u64); 5] {
        [
            (ErrorKind::KvStale.code(), self.stale),
            (ErrorKind::KvCorrupt.code(), self.corrupt),
            (ErrorKind::KvMismatch.code(), self.mismatch),
            (ErrorKind::KvTransfer.code(), self.transfer),
            (ErrorKind::Internal.code(), self.other),
        ]
    }

    /// All of them.
    pub fn total(&self) -> u64 {
        self.by_code().iter().map(|(_, count)| count).sum()
    }
}

impl RejectionCounts {
    /// All of them.
    pub fn total(&self) -> u64 {
        self.protocol
            + self.version
            + self.key
            + self.silent
            + self.evicted
            + self.busy
            + self.mismatch
    }
}

impl Counter {
    pub(crate) fn add(&self, n: u64) {
        self.0.fetch_add(n, Relaxed);
    }

    pub(crate) fn sub(&self, n: u64) {
        self.0.fetch_sub(n, Relaxed);
    }

    pub(crate) fn get(&self) -> u64 {
        self.0.load(Relaxed)
    }
}

impl Failures {
    pub(crate) fn count(&self, kind: ErrorKind) {
        match kind {
            ErrorKind::KvStale => &self.stale,
            ErrorKind::KvCorrupt => &self.corrupt,
            ErrorKind::KvMismatch => &self.mismatch,
            ErrorKind::KvTransfer => &self.transfer,
            _ => &self.other,
        }
        .add(1);
    }

    pub(crate) fn get(&self) -> FailureCounts {
        FailureCounts {
            stale: self.stale.get(),
            corrupt: self.corrupt.get(),
            mismatch: self.mismatch.get(),
            transfer: self.transfer.get(),
            other: self.other.get(),
        }
    }
}

impl Rejections {
    /// A connection that ended before its handshake did.
    pub(crate) fn count(&self, error: &ChannelError) {
        match error {
            ChannelError::Hello(HelloError::Version { .. }) => &self.version,
            ChannelError::Hello(error) if error.is_about_keys() => &self.key,
            ChannelError::Hello(_) | ChannelError::Frame(_) => &self.protocol,
            ChannelError::Closed
            | ChannelError::Io(_)
            | ChannelError::Timeout(_)
            | ChannelError::Random(_) => &self.silent,
        }
        .add(1);
    }

    pub(crate) fn get(&self) -> RejectionCounts {
        RejectionCounts {
            protocol: self.protocol.get(),
            version: self.version.get(),
            key: self.key.get(),
            silent: self.silent.get(),
            evicted: self.evicted.get(),
            busy: self.busy.get(),
            mismatch: self.mismatch.get(),
        }
    }
}
