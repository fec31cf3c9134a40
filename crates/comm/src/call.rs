//! What a collective is called with, and the check that all ranks called the same. Pure.

use serde::{Deserialize, Serialize};
use std::fmt;
use twinfer_protocol::Epoch;

/// Where in a run a collective stands. All ranks name the same place, and every message carries it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct At {
    /// Incarnation of the instance.
    pub epoch: Epoch,
    /// Step of the engine; never goes back.
    pub step: u64,
    /// The caller's word for the place in the step: a layer, a phase.
    pub tag: u32,
}

/// How two values become one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Op {
    /// Their sum, modulo 2^64.
    Sum,
    /// The larger one.
    Max,
    /// The smaller one.
    Min,
}

/// Which way a gather takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Route {
    /// Every rank sends its bytes to every other.
    Flat,
    /// First between nodes among equal local ranks, then inside each node: between nodes travels 1/(ranks of a node)
    /// of what the flat way sends. Needs the same number of ranks on every node.
    TwoStage,
}

/// A collective.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Call {
    /// Element by element over all ranks.
    AllReduce,
    /// Equal sizes from all ranks to all.
    AllGather(Route),
    /// Any sizes from all ranks to all.
    AllGatherV(Route),
    /// From each rank to each, any sizes.
    AllToAll,
    /// Nothing but the meeting.
    Barrier,
}

/// A call of a collective, as counted by every rank of a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reached {
    /// Number of the call, from 1.
    pub seq: u64,
    /// Its place.
    pub at: At,
    /// What it is.
    pub call: Call,
}

/// What precedes a rank's bytes on every way they take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Head {
    pub(crate) reached: Reached,
    /// What else must be equal: the ops of a reduction, the stage and piece of a gather.
    pub(crate) detail: u32,
    /// Bytes that follow.
    pub(crate) length: u64,
}

/// Words of 64 bits of a [`Head`].
pub(crate) const HEAD_WORDS: usize = 6;
/// Words of 64 bits of a [`Reached`].
pub(crate) const REACHED_WORDS: usize = 4;

/// Numbers the calls of one rank and refuses those that can't be right.
#[derive(Debug)]
pub(crate) struct Sequence {
    epoch: Epoch,
    last: Option<Reached>,
}

/// A call that the rank itself got wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Misuse {
    /// The epoch is not the group's.
    Epoch,
    /// The step is before that of the last call.
    StepBack,
    /// Lengths of the arguments do not fit each other or the group.
    Lengths,
    /// A larger array than [`crate::MAX_REDUCE`].
    TooManyValues,
    /// The two-stage way with nodes of different sizes.
    UnevenNodes,
}

impl At {
    /// The place `tag` of `step` of the incarnation `epoch`.
    pub fn new(epoch: Epoch, step: u64, tag: u32) -> Self {
        Self { epoch, step, tag }
    }
}

impl fmt::Display for At {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "step {}, tag {}", self.step, self.tag)
    }
}

impl Op {
    /// What `a` and `b` become.
    pub fn apply(self, a: u64, b: u64) -> u64 {
        match self {
            Self::Sum => a.wrapping_add(b),
            Self::Max => a.max(b),
            Self::Min => a.min(b),
        }
    }
}

/// The ops as one number that is equal for equal ops: FNV-1a, 32 bits.
pub(crate) fn ops_code(ops: &[Op]) -> u32 {
    ops.iter().fold(0x811c_9dc5, |code: u32, op| {
        (code ^ (*op as u32 + 1)).wrapping_mul(0x0100_0193)
    })
}

impl Call {
    /// Name in messages.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::AllReduce => "all-reduce",
            Self::AllGather(Route::Flat) => "all-gather",
            Self::AllGather(Route::TwoStage) => "two-stage all-gather",
            Self::AllGatherV(Route::Flat) => "all-gather of any sizes",
            Self::AllGatherV(Route::TwoStage) => "two-stage all-gather of any sizes",
            Self::AllToAll => "all-to-all",
            Self::Barrier => "barrier",
        }
    }

    fn code(self) -> u8 {
        match self {
            Self::AllReduce => 1,
            Self::AllGather(Route::Flat) => 2,
            Self::AllGather(Route::TwoStage) => 3,
            Self::AllGatherV(Route::Flat) => 4,
            Self::AllGatherV(Route::TwoStage) => 5,
            Self::AllToAll => 6,
            Self::Barrier => 7,
        }
    }

    fn of_code(code: u8) -> Option<Self> {
        Some(match code {
            1 => Self::AllReduce,
            2 => Self::AllGather(Route::Flat),
            3 => Self::AllGather(Route::TwoStage),
            4 => Self::AllGatherV(Route::Flat),
            5 => Self::AllGatherV(Route::TwoStage),
            6 => Self::AllToAll,
            7 => Self::Barrier,
            _ => return None,
        })
    }
}

impl fmt::Display for Call {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl fmt::Display for Reached {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} at {} (call {})", self.call, self.at, self.seq)
    }
}

impl Reached {
    pub(crate) fn words(&self) -> [u64; REACHED_WORDS] {
        let place = u64::from(self.at.tag) << 32 | u64::from(self.call.code());
        [self.seq, self.at.epoch.0, self.at.step, place]
    }

    /// None if the words are no call.
    pub(crate) fn of_words(words: &[u64; REACHED_WORDS]) -> Option<Self> {
        let [seq, epoch, step, place] = *words;
        Some(Self {
            seq,
            at: At {
                epoch: Epoch(epoch),
                step,
                tag: (place >> 32) as u32,
            },
            call: Call::of_code(u8::try_from(place & 0xffff_ffff).ok()?)?,
        })
    }
}

impl Head {
    pub(crate) fn words(&self) -> [u64; HEAD_WORDS] {
        let [a, b, c, d] = self.reached.words();
        [a, b, c, d, u64::from(self.detail), self.length]
    }

    /// None if the words are no head.
    pub(crate) fn of_words(words: &[u64; HEAD_WORDS]) -> Option<Self> {
        let [a, b, c, d, detail, length] = *words;
        Some(Self {
            reached: Reached::of_words(&[a, b, c, d])?,
            detail: u32::try_from(detail).ok()?,
            length,
        })
    }

    /// Whether a peer that says `theirs` is in the same call. Lengths are not compared.
    pub(crate) fn agrees_with(&self, theirs: &Self) -> bool {
        self.reached == theirs.reached && self.detail == theirs.detail
    }

    pub(crate) fn with_length(self, length: usize) -> Self {
        Self {
            length: length as u64,
            ..self
        }
    }

    pub(crate) fn with_detail(self, detail: u32) -> Self {
        Self { detail, ..self }
    }
}

impl Sequence {
    pub(crate) fn new(epoch: Epoch) -> Self {
        Self { epoch, last: None }
    }

    pub(crate) fn epoch(&self) -> Epoch {
        self.epoch
    }

    /// Numbers the next call. A call that is refused has its number all the same.
    pub(crate) fn begin(&mut self, at: At, call: Call) -> (Reached, Result<(), Misuse>) {
        let seq = self.last.map_or(0, |last| last.seq) + 1;
        let reached = Reached { seq, at, call };
        let outcome = if at.epoch != self.epoch {
            Err(Misuse::Epoch)
        } else if self.last.is_some_and(|last| at.step < last.at.step) {
            Err(Misuse::StepBack)
        } else {
            Ok(())
        };
        self.last = Some(reached);
        (reached, outcome)
    }
}

impl fmt::Display for Misuse {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Epoch => "its epoch is not the group's",
            Self::StepBack => "its step is before that of its last call",
            Self::Lengths => "the lengths of its arguments do not fit each other or the group",
            Self::TooManyValues => "its array has more values than an all-reduce takes",
            Self::UnevenNodes => "the two-stage way needs the same number of ranks on every node",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn any_call() -> impl Strategy<Value = Call> {
        (1_u8..=7).prop_map(|code| Call::of_code(code).unwrap())
    }

    fn any_head() -> impl Strategy<Value = Head> {
        let place = (any::<u64>(), any::<u64>(), any::<u64>(), any::<u32>());
        (place, any_call(), any::<u32>(), any::<u64>()).prop_map(
            |((seq, epoch, step, tag), call, detail, length)| Head {
                reached: Reached {
                    seq,
                    at: At::new(Epoch(epoch), step, tag),
                    call,
                },
                detail,
                length,
            },
        )
    }

    proptest! {
        #[test]
        fn a_head_comes_back_from_its_words(head in any_head()) {
            prop_assert_eq!(Head::of_words(&head.words()), Some(head));
        }

        #[test]
        fn foreign_words_are_a_head_or_none(words in any::<[u64; HEAD_WORDS]>()) {
            if let Some(head) = Head::of_words(&words) {
                prop_assert_eq!(head.words(), words);
            }
        }

        /// Two ranks follow scripts of calls that differ at one place: they agree before it and not there.
        #[test]
        fn the_first_difference_of_two_ranks_is_found(
            script in prop::collection::vec((0_u64..3, any::<u32>(), any_call()), 1..20),
            place in any::<prop::sample::Index>(),
            what in 0..4,
        ) {
            let (mut left, mut right) = (Sequence::new(Epoch(1)), Sequence::new(Epoch(1)));
            let place = place.index(script.len());
            let mut step = 0;
            for (turn, (advance, tag, call)) in script.iter().enumerate() {
                step += advance;
                let at = At::new(Epoch(1), step, *tag);
                let mut other = (at, *call);
                if turn == place {
                    match what {
                        0 => other.0.step += 1,
                        1 => other.0.tag = tag.wrapping_add(1),
                        2 => other.1 = if *call == Call::Barrier { Call::AllToAll } else { Call::Barrier },
                        // A call left out: the next one has the wrong number.
                        _ => { right.begin(at, *call).1.unwrap(); }
                    }
                }
                let (ours, outcome) = left.begin(at, *call);
                prop_assert!(outcome.is_ok());
                let (theirs, outcome) = right.begin(other.0, other.1);
                prop_assert!(outcome.is_ok());
                let head = |reached| Head { reached, detail: 0, length: 0 };
                prop_assert_eq!(head(ours).agrees_with(&head(theirs)), turn != place);
                if turn == place { break; }
            }
        }
    }

    #[test]
    fn a_foreign_epoch_and_an_earlier_step_are_refused() {
        let mut calls = Sequence::new(Epoch(7));
        let mut begin = |epoch, step| calls.begin(At::new(Epoch(epoch), step, 0), Call::Barrier).1;
        assert_eq!(begin(7, 5), Ok(()));
        assert_eq!(begin(8, 6), Err(Misuse::Epoch));
        assert_eq!(begin(7, 5), Err(Misuse::StepBack));
        let mut calls = Sequence::new(Epoch(7));
        assert_eq!(
            calls.begin(At::new(Epoch(7), 5, 9), Call::Barrier).1,
            Ok(())
        );
        assert_eq!(
            calls.begin(At::new(Epoch(7), 5, 0), Call::AllToAll).1,
            Ok(())
        );
    }

    #[test]
    fn different_ops_have_different_codes() {
        let all = [Op::Sum, Op::Max, Op::Min];
        let mut codes: Vec<u32> = Vec::new();
        codes.extend(all.iter().map(|op| ops_code(&[*op])));
        for first in all {
            codes.extend(all.iter().map(|op| ops_code(&[first, *op])));
        }
        let count = codes.len();
        codes.sort_unstable();
        codes.dedup();
        assert_eq!(codes.len(), count);
    }
}
