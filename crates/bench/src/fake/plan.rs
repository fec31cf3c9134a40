//! An answer as a list of steps, and what faults make of it. No I/O.

use super::wire;
use bytes::Bytes;
use std::time::Duration;
use twinfer_config::FaultKind;

/// A scripted answer: see [`super::FakeWorker::script`].
#[derive(Clone, Debug)]
pub enum Script {
    /// These bytes, head included, each piece by a write of its own.
    Raw {
        /// The answer in pieces.
        pieces: Vec<Bytes>,
        /// Wait between two pieces.
        gap: Duration,
        /// The connection is closed afterwards.
        close: bool,
    },
    /// A fault.
    Fault(FaultKind),
    /// As the configuration says.
    Plain,
}

/// One thing to do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Step {
    Write(Bytes),
    Wait(Duration),
    /// The prefill worker holds KV under this id from now on.
    Hold(String),
    /// The decode worker waits until the prefill worker holds this, however long that takes, and fetches it.
    Await {
        host: String,
        port: u16,
        transfer_id: String,
    },
    /// The decode worker asks for its prompt's KV, and waits for it for ever if it does not come.
    Metaserver {
        host: String,
        port: u16,
        path: String,
        body: String,
    },
    /// The decode worker fetches from the prefill worker's `/fake/pull`.
    Pull {
        host: String,
        port: u16,
        remote_request_id: String,
    },
}

/// How an answer ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum End {
    KeepAlive,
    Close,
    Reset,
    Hang,
}

/// An answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Plan {
    pub(super) steps: Vec<Step>,
    pub(super) end: End,
}

impl Plan {
    /// A whole answer with a length.
    pub(super) fn whole(
        status: u16,
        content_type: &str,
        body: &[u8],
        extra: &[(String, String)],
    ) -> Self {
        let mut bytes = wire::head(status, content_type, Some(body.len()), extra).to_vec();
        bytes.extend_from_slice(body);
        Self {
            steps: vec![Step::Write(Bytes::from(bytes))],
            end: End::KeepAlive,
        }
    }

    pub(super) fn json(status: u16, body: &serde_json::Value, extra: &[(String, String)]) -> Self {
        Self::whole(
            status,
            "application/json",
            body.to_string().as_bytes(),
            extra,
        )
    }

    pub(super) fn raw(pieces: Vec<Bytes>, gap: Duration, close: bool) -> Self {
        let mut steps = Vec::with_capacity(pieces.len() * 2);
        for piece in pieces {
            if !steps.is_empty() && gap > Duration::ZERO {
                steps.push(Step::Wait(gap));
            }
            steps.push(Step::Write(piece));
        }
        Self {
            steps,
            end: if close { End::Close } else { End::KeepAlive },
        }
    }

    /// Writes with nothing between them leave as one.
    pub(super) fn joined(self) -> Self {
        let mut steps: Vec<Step> = Vec::with_capacity(self.steps.len());
        let mut run: Vec<u8> = Vec::new();
        for step in self.steps {
            if let Step::Write(bytes) = step {
                run.extend_from_slice(&bytes);
                continue;
            }
            if !run.is_empty() {
                steps.push(Step::Write(std::mem::take(&mut run).into()));
            }
            steps.push(step);
        }
        if !run.is_empty() {
            steps.push(Step::Write(run.into()));
        }
        Self {
            steps,
            end: self.end,
        }
    }

    /// This answer, stopped after `limit` bytes, and then `end`.
    pub(super) fn stopped(mut self, limit: usize, end: End) -> Self {
        let mut left = limit;
        for at in 0..self.steps.len() {
            let Some(Step::Write(bytes)) = self.steps.get_mut(at) else {
                continue;
            };
            if bytes.len() > left {
                bytes.truncate(left);
                let keep = if left == 0 { at } else { at + 1 };
                self.steps.truncate(keep);
                break;
            }
            left -= bytes.len();
        }
        self.end = end;
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stopping_counts_bytes_over_steps() {
        let plan = Plan {
            steps: vec![
                Step::Write(Bytes::from_static(b"abc")),
                Step::Wait(Duration::from_secs(1)),
                Step::Write(Bytes::from_static(b"def")),
            ],
            end: End::KeepAlive,
        };
        let cut = plan.clone().stopped(4, End::Close);
        assert_eq!(
            cut.steps.last(),
            Some(&Step::Write(Bytes::from_static(b"d")))
        );
        assert_eq!(plan.clone().stopped(3, End::Hang).steps.len(), 2);
        assert_eq!(plan.clone().stopped(0, End::Reset).steps, vec![]);
        assert_eq!(plan.stopped(100, End::Close).steps.len(), 3);
    }
}
