//! Memory that requests and answers take beside the engine: bodies while they are read and turned into tokens, and
//! log-probabilities, which a small request can ask for by the million and a client can leave unread.

use std::sync::{Arc, OnceLock};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use twinfer_protocol::{ApiError, ErrorKind};

/// Bytes of one log-probability in memory, in the tree of an answer and in its text.
const SCORE_BYTES: u64 = 256;
/// Most that answers get.
const MOST_BYTES: u64 = 192 << 20;
/// Part of the available memory that they get at most.
const PART: u64 = 8;
/// Bodies of the greatest length that are in memory at the same time.
const LARGE_BODIES: u64 = 4;
/// Part of the available memory that bodies get at most.
const BODY_PART: u64 = 16;
/// Bytes that a request takes at most per byte of its body: a prompt of one-digit ids, or a chat that is rendered, takes 6 to
/// 6.5.
const PER_BODY_BYTE: u64 = 7;

/// Bytes that are available when this is asked first, before anything is loaded.
fn available() -> u64 {
    static BYTES: OnceLock<u64> = OnceLock::new();
    // Where it cannot be told, loading fails with the reason.
    *BYTES.get_or_init(|| twinfer_sys::available_memory().unwrap_or(0))
}

/// Bytes that answers may take, planned beside the model.
pub(crate) fn answer_bytes() -> u64 {
    MOST_BYTES.min(available() / PART)
}

/// What request bodies may take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct BodyPlan {
    /// Bytes of the longest.
    pub(crate) limit: u64,
    /// So many of that length at the same time, at least one.
    pub(crate) together: u32,
    /// Bytes that they take at most, planned beside the model.
    pub(crate) bytes: u64,
}

impl BodyPlan {
    /// Of bodies of at most `most` bytes.
    pub(crate) fn new(most: u64) -> Self {
        Self::within(most, available() / BODY_PART)
    }

    /// In `bytes`: bodies are shorter where they hold not one of the length asked for.
    fn within(most: u64, bytes: u64) -> Self {
        let limit = most.min(bytes / PER_BODY_BYTE);
        let each = limit.saturating_mul(PER_BODY_BYTE);
        let together = bytes.checked_div(each).unwrap_or(1).clamp(1, LARGE_BODIES);
        Self {
            limit,
            together: u32::try_from(together).unwrap_or(1),
            bytes: each.saturating_mul(together),
        }
    }
}

/// Room for log-probabilities in all answers together.
#[derive(Debug)]
pub(crate) struct ScoreRoom {
    most: u32,
    free: Arc<Semaphore>,
}

impl ScoreRoom {
    /// For answers of `bytes` in all.
    pub(crate) fn new(bytes: u64) -> Self {
        let most = u32::try_from(bytes / SCORE_BYTES).unwrap_or(u32::MAX);
        Self {
            most,
            free: Arc::new(Semaphore::new(most as usize)),
        }
    }

    /// Log-probabilities that one answer may show of prompts.
    pub(crate) fn most(&self) -> u64 {
        self.most.into()
    }

    /// Takes room for `scores` of prompts, to be kept until the answer has been sent; none for none.
    ///
    /// Errors: `Overloaded`, while others have it.
    pub(crate) fn take(&self, scores: u64) -> Result<Option<OwnedSemaphorePermit>, ApiError> {
        self.acquire(scores).map_err(|()| {
            ApiError::new(
                ErrorKind::Overloaded,
                format!(
                    "{scores} log-probabilities of prompt tokens were asked for; {} of {} may be shown while other \
                     answers are not sent",
                    self.free.available_permits(),
                    self.most
                ),
            )
        })
    }

    /// Takes room for `scores` of output that has come, to be kept until it has been sent; none for none.
    ///
    /// Errors: `Overloaded`, while what nobody has read yet has it.
    pub(crate) fn take_output(
        &self,
        scores: u64,
    ) -> Result<Option<OwnedSemaphorePermit>, ApiError> {
        self.acquire(scores).map_err(|()| {
            ApiError::new(
                ErrorKind::Overloaded,
                format!(
                    "the answer's log-probabilities have no room: {} of {} are free while this and other answers are not sent",
                    self.free.available_permits(),
                    self.most
                ),
            )
        })
    }

    fn acquire(&self, scores: u64) -> Result<Option<OwnedSemaphorePermit>, ()> {
        if scores == 0 {
            return Ok(None);
        }
        let wanted = u32::try_from(scores).unwrap_or(u32::MAX);
        let room = Arc::clone(&self.free).try_acquire_many_owned(wanted);
        room.map(Some).map_err(|_| ())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bodies_take_what_they_may_and_are_shorter_where_memory_is_small() {
        const MIB: u64 = 1 << 20;
        let large = BodyPlan::within(32 * MIB, 4096 * MIB);
        assert_eq!((large.limit, large.together), (32 * MIB, 4));
        assert_eq!(large.bytes, 4 * 7 * 32 * MIB);
        for most in [1024, MIB, 32 * MIB, 1024 * MIB] {
            for bytes in [0, 6, 100, 64 << 10, MIB, 50 * MIB, 500 * MIB, 1 << 40] {
                let plan = BodyPlan::within(most, bytes);
                assert!(plan.bytes <= bytes && plan.limit <= most, "{plan:?}");
                assert!((1..=4).contains(&plan.together), "{plan:?}");
                // Not shorter than it must be.
                assert!(
                    plan.limit == most || (plan.limit + 1) * 7 > bytes,
                    "{plan:?}"
                );
            }
        }
    }
}
