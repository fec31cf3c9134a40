//! How a group ends: one rank is named, what became of it, who noticed and where.

use crate::call::{Call, Misuse, REACHED_WORDS, Reached};
use std::fmt;
use std::time::Duration;
use twinfer_protocol::{ApiError, ErrorKind};

/// What became of the rank that a failure names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cause {
    /// Its process ended, or its connection closed without a word.
    Died,
    /// It ended its part of the group in order while others still needed it.
    Left,
    /// It did not come in time.
    Stalled {
        /// How long it was waited for.
        waited: Duration,
    },
    /// It is in another call than the rank that waited.
    OutOfStep,
    /// It sent another number of bytes than the call has.
    Unequal {
        /// Bytes the call has.
        expected: u64,
        /// Bytes it sent.
        got: u64,
    },
    /// It sent more bytes than the caller allows.
    TooLong {
        /// Bytes allowed.
        limit: u64,
        /// Bytes it sent.
        got: u64,
    },
    /// What came from it is damaged or no message.
    Damaged,
    /// It called a collective in a way that can't be right.
    Misused(Misuse),
    /// It was told to stop by its own process.
    Stopped,
    /// Its system refused something: an errno.
    System {
        /// The errno.
        errno: i32,
    },
}

/// Why a group ended. All its ranks tell the same, unless several failed at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Failure {
    /// The rank at fault: missing, out of step, or damaged.
    pub rank: u32,
    /// What became of it.
    pub cause: Cause,
    /// The rank that noticed.
    pub reporter: u32,
    /// The call the reporter was in; none between calls.
    pub during: Option<Reached>,
    /// The last call that the rank at fault is known to have reached.
    pub last: Option<Reached>,
}

/// A collective did not come to its end. Every later call of the group ends with the same error.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct CommError(Box<Failure>);

/// Words of 64 bits of a [`Failure`].
pub(crate) const FAILURE_WORDS: usize = 5 + 2 * REACHED_WORDS;

impl CommError {
    /// Who, where and why.
    pub fn failure(&self) -> &Failure {
        &self.0
    }

    /// The rank at fault.
    pub fn rank(&self) -> u32 {
        self.0.rank
    }

    /// The error that requests of the instance end with.
    pub fn api_error(&self) -> ApiError {
        ApiError::new(ErrorKind::Internal, self.to_string())
    }
}

impl From<Failure> for CommError {
    fn from(failure: Failure) -> Self {
        Self(Box::new(failure))
    }
}

impl Cause {
    /// One word for labels and receipts.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Died => "died",
            Self::Left => "left",
            Self::Stalled { .. } => "stalled",
            Self::OutOfStep => "out_of_step",
            Self::Unequal { .. } => "unequal",
            Self::TooLong { .. } => "too_long",
            Self::Damaged => "damaged",
            Self::Misused(_) => "misused",
            Self::Stopped => "stopped",
            Self::System { .. } => "system",
        }
    }

    pub(crate) fn stalled(waited: Duration) -> Self {
        // As it travels: to the millisecond.
        let waited = Duration::from_millis(u64::try_from(waited.as_millis()).unwrap_or(u64::MAX));
        Self::Stalled { waited }
    }

    fn words(self) -> [u64; 3] {
        match self {
            Self::Died => [1, 0, 0],
            Self::Left => [2, 0, 0],
            Self::Stalled { waited } => {
                [3, u64::try_from(waited.as_millis()).unwrap_or(u64::MAX), 0]
            }
            Self::OutOfStep => [4, 0, 0],
            Self::Unequal { expected, got } => [5, expected, got],
            Self::TooLong { limit, got } => [6, limit, got],
            Self::Damaged => [7, 0, 0],
            Self::Misused(misuse) => [8, misuse as u64, 0],
            Self::Stopped => [9, 0, 0],
            Self::System { errno } => [10, u64::from(errno.unsigned_abs()), 0],
        }
    }

    fn of_words([code, a, b]: [u64; 3]) -> Option<Self> {
        const MISUSES: [Misuse; 5] = [
            Misuse::Epoch,
            Misuse::StepBack,
            Misuse::Lengths,
            Misuse::TooManyValues,
            Misuse::UnevenNodes,
        ];
        Some(match code {
            1 => Self::Died,
            2 => Self::Left,
            3 => Self::Stalled {
                waited: Duration::from_millis(a),
            },
            4 => Self::OutOfStep,
            5 => Self::Unequal {
                expected: a,
                got: b,
            },
            6 => Self::TooLong { limit: a, got: b },
            7 => Self::Damaged,
            8 => Self::Misused(*MISUSES.get(usize::try_from(a).ok()?)?),
            9 => Self::Stopped,
            10 => Self::System {
                errno: i32::try_from(a).ok()?,
            },
            _ => return None,
        })
    }
}

impl From<std::io::Error> for Cause {
    fn from(error: std::io::Error) -> Self {
        Self::System {
            errno: error.raw_os_error().unwrap_or(0),
        }
    }
}

impl Failure {
    pub(crate) fn words(&self) -> [u64; FAILURE_WORDS] {
        let mut out = [0; FAILURE_WORDS];
        out[..3].copy_from_slice(&self.cause.words());
        out[3] = u64::from(self.rank) << 32 | u64::from(self.reporter);
        out[4] = u64::from(self.during.is_some()) << 1 | u64::from(self.last.is_some());
        let (_, calls) = out.split_at_mut(5);
        let (during, last) = calls.split_at_mut(REACHED_WORDS);
        during.copy_from_slice(&self.during.map_or([0; REACHED_WORDS], |call| call.words()));
        last.copy_from_slice(&self.last.map_or([0; REACHED_WORDS], |call| call.words()));
        out
    }

    /// None if the words are no failure.
    pub(crate) fn of_words(words: &[u64; FAILURE_WORDS]) -> Option<Self> {
        let [code, a, b, ranks, present, calls @ ..] = *words;
        let [d0, d1, d2, d3, l0, l1, l2, l3] = calls;
        if present > 3 {
            return None;
        }
        let call = |is: bool, words| match is {
            true => Reached::of_words(&words).map(Some),
            false => Some(None),
        };
        Some(Self {
            rank: (ranks >> 32) as u32,
            cause: Cause::of_words([code, a, b])?,
            reporter: (ranks & 0xffff_ffff) as u32,
            during: call(present & 2 != 0, [d0, d1, d2, d3])?,
            last: call(present & 1 != 0, [l0, l1, l2, l3])?,
        })
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let rank = self.rank;
        match self.cause {
            Cause::Died => write!(
                f,
                "rank {rank} died (its process ended or its connection closed)"
            ),
            Cause::Left => write!(f, "rank {rank} left the group"),
            Cause::Stalled { waited } => {
                write!(f, "rank {rank} stalled: it did not come within {waited:?}")
            }
            Cause::OutOfStep => write!(f, "rank {rank} is out of step"),
            Cause::Unequal { expected, got } => write!(
                f,
                "rank {rank} sent {got} bytes to a call that has {expected}"
            ),
            Cause::TooLong { limit, got } => {
                write!(f, "rank {rank} sent {got} bytes; allowed are {limit}")
            }
            Cause::Damaged => write!(f, "what rank {rank} sent is damaged"),
            Cause::Misused(misuse) => write!(f, "rank {rank} made a wrong call: {misuse}"),
            Cause::Stopped => write!(f, "rank {rank} was told to stop"),
            Cause::System { errno } => {
                let error = std::io::Error::from_raw_os_error(errno);
                write!(f, "the system of rank {rank} failed: {error}")
            }
        }?;
        match self.during {
            Some(call) => write!(f, "; rank {} was in {call}", self.reporter)?,
            None => write!(f, "; rank {} noticed it between two calls", self.reporter)?,
        }
        match self.last {
            Some(call) => write!(f, "; the last that rank {rank} reached is {call}"),
            None => write!(f, "; no call that rank {rank} reached is known"),
        }
    }
}

/// As messages name a call that its caller got wrong.
pub(crate) fn misused(rank: u32, during: Reached, misuse: Misuse) -> Failure {
    Failure {
        rank,
        cause: Cause::Misused(misuse),
        reporter: rank,
        during: Some(during),
        last: Some(during),
    }
}

impl Failure {
    /// The call that the reporter was in.
    pub fn call(&self) -> Option<Call> {
        self.during.map(|during| during.call)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::call::At;
    use proptest::prelude::*;
    use twinfer_protocol::Epoch;

    fn reached(seq: u64, step: u64) -> Reached {
        Reached {
            seq,
            at: At::new(Epoch(3), step, 4),
            call: Call::AllToAll,
        }
    }

    fn any_failure() -> impl Strategy<Value = Failure> {
        let cause = (1_u64..=10, 0_u64..5, any::<u64>()).prop_map(|(code, a, b)| {
            Cause::of_words([code, a, if matches!(code, 5 | 6) { b } else { 0 }]).unwrap()
        });
        let call = prop::option::of((any::<u64>(), any::<u64>()).prop_map(|(s, t)| reached(s, t)));
        (any::<u32>(), cause, any::<u32>(), call.clone(), call).prop_map(
            |(rank, cause, reporter, during, last)| Failure {
                rank,
                cause,
                reporter,
                during,
                last,
            },
        )
    }

    proptest! {
        #[test]
        fn a_failure_comes_back_from_its_words(failure in any_failure()) {
            let back = Failure::of_words(&failure.words());
            prop_assert_eq!(back, Some(failure));
        }

        #[test]
        fn foreign_words_are_a_failure_or_none(words in any::<[u64; FAILURE_WORDS]>(), code in 0_u64..12) {
            let mut words = words;
            words[0] = code;
            let _ = Failure::of_words(&words);
        }
    }

    #[test]
    fn a_message_names_rank_cause_place_and_last_call() {
        let error = CommError::from(Failure {
            rank: 3,
            cause: Cause::Stalled {
                waited: Duration::from_secs(10),
            },
            reporter: 1,
            during: Some(reached(9, 12)),
            last: Some(reached(8, 11)),
        });
        assert_eq!(
            error.to_string(),
            "rank 3 stalled: it did not come within 10s; rank 1 was in all-to-all at step 12, tag 4 (call 9); \
             the last that rank 3 reached is all-to-all at step 11, tag 4 (call 8)"
        );
    }
}
