//! How many tokens to propose, and what became of them. Which tokens those are never matters to the
//! output: each row's token is drawn from the model with its own position's random numbers, and a draft
//! stands if it equals what was drawn.

use crate::SpeculationStats;

/// Length of the next draft of one sequence.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DraftLength {
    most: usize,
    now: usize,
    adaptive: bool,
}

impl DraftLength {
    /// `most` tokens; fewer after rejections if `adaptive`.
    pub(crate) fn new(most: usize, adaptive: bool) -> Self {
        Self {
            most,
            now: most,
            adaptive,
        }
    }

    /// Tokens to propose next.
    pub(crate) fn get(self) -> usize {
        self.now
    }

    /// Of `drafted` tokens `accepted` stood: one more next time if all did, else one more than stood.
    pub(crate) fn verified(&mut self, drafted: usize, accepted: usize) {
        if self.adaptive && drafted > 0 {
            let next = if accepted == drafted {
                self.now.max(drafted) + 1
            } else {
                accepted + 1
            };
            self.now = next.clamp(self.most.min(1), self.most);
        }
    }
}

impl SpeculationStats {
    /// Counts a round.
    pub(crate) fn count(&mut self, drafted: usize, accepted: usize) {
        self.rounds += u64::from(drafted > 0);
        self.drafted.iter_mut().take(drafted).for_each(|n| *n += 1);
        self.accepted
            .iter_mut()
            .take(accepted)
            .for_each(|n| *n += 1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fixed_length_stays() {
        let mut length = DraftLength::new(3, false);
        for accepted in [0, 3, 1] {
            length.verified(3, accepted);
            assert_eq!(length.get(), 3);
        }
    }

    #[test]
    fn an_adaptive_length_follows_acceptance_and_never_reaches_zero() {
        let mut length = DraftLength::new(4, true);
        let mut seen = Vec::new();
        for (drafted, accepted) in [
            (4, 4),
            (4, 1),
            (2, 0),
            (1, 0),
            (1, 1),
            (2, 2),
            (3, 3),
            (0, 0),
        ] {
            length.verified(drafted, accepted);
            seen.push(length.get());
        }
        assert_eq!(seen, [4, 2, 1, 1, 2, 3, 4, 4]);
        let mut none = DraftLength::new(0, true);
        none.verified(0, 0);
        assert_eq!(none.get(), 0);
    }

    #[test]
    fn rounds_are_counted_by_place() {
        let mut stats = SpeculationStats::default();
        for (drafted, accepted) in [(3, 3), (3, 1), (0, 0), (2, 0)] {
            stats.count(drafted, accepted);
        }
        assert_eq!(stats.rounds, 3);
        assert_eq!(stats.drafted, [3, 3, 2, 0, 0]);
        assert_eq!(stats.accepted, [2, 1, 1, 0, 0]);
    }
}
