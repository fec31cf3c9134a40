//! The access log: a line per request, when it is over. Never a body, never a key.

use crate::headers::RequestId;
use http::StatusCode;
use tokio::time::Instant;

/// What is told of a request.
#[derive(Debug)]
pub(crate) struct Access {
    on: bool,
    path: &'static str,
    client: String,
    arrived: Instant,
    first: Option<Instant>,
    status: Option<StatusCode>,
}

/// How an answer ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Outcome {
    /// The client has all of it.
    Whole,
    /// It was refused, or ended with an error.
    Error,
    /// The client went away before.
    ClientGone,
}

impl Outcome {
    const fn as_str(self) -> &'static str {
        match self {
            Self::Whole => "whole",
            Self::Error => "error",
            Self::ClientGone => "client_gone",
        }
    }
}

impl Access {
    pub(crate) fn new(on: bool, path: &'static str, client: &str, arrived: Instant) -> Self {
        Self {
            on,
            path,
            client: if on { client.to_owned() } else { String::new() },
            arrived,
            first: None,
            status: None,
        }
    }

    /// The head of the answer is known.
    pub(crate) fn answered(&mut self, status: StatusCode) {
        self.status = Some(status);
        self.first = Some(Instant::now());
    }

    /// The request is over.
    pub(crate) fn over(
        &mut self,
        id: &RequestId,
        prefill: Option<&str>,
        decode: &str,
        reason: &str,
        outcome: Outcome,
    ) {
        if !std::mem::take(&mut self.on) {
            return;
        }
        let millis = |at: Option<Instant>| at.map(|at| (at - self.arrived).as_secs_f64() * 1e3);
        tracing::info!(
            request = id.as_str(),
            client_request = id.client(),
            client = self.client,
            path = self.path,
            status = self.status.map(|status| status.as_u16()),
            prefill,
            decode,
            reason,
            first_ms = millis(self.first),
            total_ms = millis(Some(Instant::now())),
            outcome = outcome.as_str(),
            "access"
        );
    }
}
