//! Memory that answers take beside the engine: the log-probabilities of prompts, which a small request can ask for by
//! the million and a client can leave unread.

use std::sync::{Arc, OnceLock};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use twinfer_protocol::{ApiError, ErrorKind};

/// Bytes of one log-probability in memory, in the tree of an answer and in its text.
const SCORE_BYTES: u64 = 256;
/// Most that answers get.
const MOST_BYTES: u64 = 192 << 20;
/// Part of the available memory that they get at most.
const PART: u64 = 8;

/// Bytes that answers may take, planned beside the model: of what is available when this is asked first, before
/// anything is loaded.
pub(crate) fn answer_bytes() -> u64 {
    static BYTES: OnceLock<u64> = OnceLock::new();
    // Where it cannot be told, loading fails with the reason.
    *BYTES.get_or_init(|| MOST_BYTES.min(twinfer_sys::available_memory().unwrap_or(0) / PART))
}

/// Room for log-probabilities of prompts in all answers together.
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

    /// Log-probabilities that one answer may show.
    pub(crate) fn most(&self) -> u64 {
        self.most.into()
    }

    /// Takes room for `scores`, to be kept until the answer has been sent; none for none.
    ///
    /// Errors: `Overloaded`, while others have it.
    pub(crate) fn take(&self, scores: u64) -> Result<Option<OwnedSemaphorePermit>, ApiError> {
        if scores == 0 {
            return Ok(None);
        }
        let wanted = u32::try_from(scores).unwrap_or(u32::MAX);
        match Arc::clone(&self.free).try_acquire_many_owned(wanted) {
            Ok(room) => Ok(Some(room)),
            Err(_) => Err(ApiError::new(
                ErrorKind::Overloaded,
                format!(
                    "{scores} log-probabilities of prompt tokens were asked for; {} of {} may be shown while other \
                     answers are not sent",
                    self.free.available_permits(),
                    self.most
                ),
            )),
        }
    }
}
