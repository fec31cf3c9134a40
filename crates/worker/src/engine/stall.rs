use std::time::Duration;

/// No step is suspected before this, however short steps are.
const LEAST: Duration = Duration::from_secs(10);
/// Times the median step that may pass without progress.
const TIMES_MEDIAN: u32 = 20;
/// Steps the median is taken of.
const KEPT: usize = 64;

/// Tells a stalled step from a long one: a step is stalled when neither a layer nor the step itself
/// ended for max(10 s, 20 times the median step). Pure; `now` is time since any fixed moment.
#[derive(Debug, Default)]
pub(super) struct StallDetector {
    /// Durations of the last steps, in a ring.
    recent: Vec<Duration>,
    next: usize,
    in_step: bool,
    /// When progress was last made or the step began.
    last: Duration,
    progress: u64,
}

impl StallDetector {
    /// A step begins.
    pub(super) fn begin(&mut self, now: Duration) {
        self.in_step = true;
        self.last = now;
    }

    /// It ended after `took`.
    pub(super) fn end(&mut self, took: Duration) {
        self.in_step = false;
        if self.recent.len() < KEPT {
            self.recent.push(took);
        } else if let Some(slot) = self.recent.get_mut(self.next) {
            *slot = took;
        }
        self.next = (self.next + 1) % KEPT;
    }

    /// `progress` is any number that changes with every layer. Returns for how long nothing moved, if
    /// that is too long.
    pub(super) fn check(&mut self, now: Duration, progress: u64) -> Option<Duration> {
        if progress != self.progress {
            self.progress = progress;
            self.last = self.last.max(now);
        }
        let still = now.saturating_sub(self.last);
        (self.in_step && still > self.limit()).then_some(still)
    }

    fn limit(&self) -> Duration {
        let mut sorted = self.recent.clone();
        sorted.sort_unstable();
        let median = sorted.get(sorted.len() / 2).copied().unwrap_or_default();
        LEAST.max(median.saturating_mul(TIMES_MEDIAN))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn secs(s: u64) -> Duration {
        Duration::from_secs(s)
    }

    #[test]
    fn a_long_step_with_progress_is_no_stall() {
        let mut detector = StallDetector::default();
        detector.begin(secs(0));
        for t in 1..1000 {
            assert_eq!(detector.check(secs(t), t), None);
        }
    }

    #[test]
    fn a_step_without_progress_is_a_stall_after_ten_seconds() {
        let mut detector = StallDetector::default();
        detector.begin(secs(100));
        assert_eq!(detector.check(secs(110), 0), None);
        assert_eq!(detector.check(secs(111), 0), Some(secs(11)));
    }

    #[test]
    fn slow_machines_get_twenty_medians() {
        let mut detector = StallDetector::default();
        for _ in 0..10 {
            detector.end(secs(2));
        }
        detector.begin(secs(100));
        assert_eq!(detector.check(secs(140), 0), None);
        assert_eq!(detector.check(secs(141), 0), Some(secs(41)));
    }

    #[test]
    fn waiting_for_requests_is_no_stall() {
        let mut detector = StallDetector::default();
        detector.begin(secs(0));
        detector.end(secs(1));
        assert_eq!(detector.check(secs(100_000), 0), None);
    }
}
