//! Whether an instance is used. Pure: probes and requests tell, times are arguments.
//!
//! An instance that breaks requests off although its probes are good is ejected for a while; it returns half open: the
//! first request that it breaks off then ejects it again, for twice as long, and a few that it answers close the matter.

use std::time::Duration;

/// Probes in a row that find no answer before an instance is given up.
const SILENT_PROBES: u32 = 2;
/// Requests in a row that an instance breaks off before it is ejected.
const BROKEN_REQUESTS: u32 = 3;
/// Requests in a row that one on trial must answer.
const TRIALS: u32 = 3;
/// Length of a first ejection; each further one is twice as long.
const EJECTED: Duration = Duration::from_millis(500);
/// Of the longest.
const MAX_DOUBLINGS: u32 = 6;

/// What a probe or a request saw.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Signal {
    /// A probe: ready, and known.
    Ready,
    /// A probe: it answers, but is not ready or not what it should be.
    NotReady(String),
    /// A probe: nobody listens.
    ProbeRefused(String),
    /// A probe: no answer in time or a broken one.
    ProbeSilent(String),
    /// A request: nobody listens.
    Refused(String),
    /// A request: the connection broke or stayed silent.
    Broke(String),
    /// A request: an answer of whatever status.
    Answered,
}

/// State of one instance.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Health {
    problem: Option<String>,
    ever_up: bool,
    silent: u32,
    broken: u32,
    /// Nobody listens, or nobody answers probes.
    lost: bool,
    /// Not used before this time, whatever probes say.
    ejected_until: Option<Duration>,
    /// Ejections in a row.
    ejections: u32,
    /// Requests that it must answer before its ejections are forgotten.
    trial: u32,
}

impl Default for Health {
    fn default() -> Self {
        Self {
            problem: Some("not probed yet".to_owned()),
            ever_up: false,
            silent: 0,
            broken: 0,
            lost: false,
            ejected_until: None,
            ejections: 0,
            trial: 0,
        }
    }
}

impl Signal {
    /// Does a request's experience ask for a probe at once?
    pub(crate) fn wants_probe(&self) -> bool {
        matches!(self, Self::Refused(_) | Self::Broke(_))
    }
}

impl Health {
    pub(crate) fn is_up(&self) -> bool {
        self.problem.is_none()
    }

    /// Was it ever up? Until then it is probed more often.
    pub(crate) fn ever_up(&self) -> bool {
        self.ever_up
    }

    /// Does nobody listen there, or answer? What waits for it waits for nothing.
    pub(crate) fn is_lost(&self) -> bool {
        self.lost
    }

    pub(crate) fn problem(&self) -> Option<&str> {
        self.problem.as_deref()
    }

    /// Takes a signal at a time since some beginning; true when there is something new to tell.
    pub(crate) fn on(&mut self, signal: Signal, now: Duration) -> bool {
        let was = self.problem.clone();
        match signal {
            Signal::Ready => {
                (self.silent, self.lost) = (0, false);
                if self.ejected_until.is_none_or(|until| until <= now) {
                    self.ejected_until = None;
                    self.broken = 0;
                    self.problem = None;
                    self.ever_up = true;
                }
            }
            Signal::NotReady(why) => {
                (self.silent, self.lost) = (0, false);
                self.problem = Some(why);
            }
            Signal::ProbeRefused(why) => {
                self.lost = true;
                self.problem = Some(why);
            }
            // The probe that is made at once tells whether running requests are lost.
            Signal::Refused(why) => self.problem = Some(why),
            Signal::ProbeSilent(why) => {
                self.silent += 1;
                self.lost |= self.silent >= SILENT_PROBES;
                if self.lost || !self.is_up() {
                    self.problem = Some(why);
                }
            }
            Signal::Broke(why) => {
                self.broken += 1;
                // What was sent before an ejection may still break off.
                if self.ejected_until.is_none()
                    && (self.broken >= BROKEN_REQUESTS || self.trial > 0)
                {
                    let length = EJECTED * 2u32.pow(self.ejections.min(MAX_DOUBLINGS));
                    self.ejected_until = Some(now + length);
                    self.ejections += 1;
                    self.trial = TRIALS;
                    self.problem = Some(why);
                }
            }
            Signal::Answered => {
                self.broken = 0;
                if self.ejected_until.is_none() && self.trial > 0 {
                    self.trial -= 1;
                    self.ejections *= u32::from(self.trial > 0);
                }
            }
        }
        was != self.problem
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: Duration = Duration::from_secs(100);

    fn up() -> Health {
        let mut health = Health::default();
        assert!(health.on(Signal::Ready, NOW));
        health
    }

    fn why() -> String {
        "why".to_owned()
    }

    #[test]
    fn an_instance_is_not_used_before_its_first_good_probe() {
        assert!(!Health::default().is_up());
        assert!(up().is_up());
    }

    #[test]
    fn c3_15_answers_never_take_an_instance_out_and_refusals_do_at_once() {
        let mut health = up();
        for _ in 0..50 {
            assert!(!health.on(Signal::Answered, NOW));
        }
        assert!(health.is_up());
        assert!(health.on(Signal::Refused(why()), NOW));
        assert!(!health.is_up());
        health.on(Signal::Answered, NOW);
        assert!(!health.is_up(), "only a probe brings it back");
        assert!(health.on(Signal::Ready, NOW));
        assert!(health.is_up());
    }

    #[test]
    fn one_slow_probe_is_forgiven_and_one_broken_request_too() {
        let mut health = up();
        health.on(Signal::ProbeSilent(why()), NOW);
        assert!(health.is_up());
        health.on(Signal::Ready, NOW);
        health.on(Signal::ProbeSilent(why()), NOW);
        assert!(health.is_up(), "not in a row");
        health.on(Signal::ProbeSilent(why()), NOW);
        assert!(!health.is_up());

        let mut health = up();
        health.on(Signal::Broke(why()), NOW);
        health.on(Signal::Broke(why()), NOW);
        health.on(Signal::Answered, NOW);
        health.on(Signal::Broke(why()), NOW);
        assert!(health.is_up());
        health.on(Signal::Broke(why()), NOW);
        health.on(Signal::Broke(why()), NOW);
        assert!(!health.is_up());
    }

    #[test]
    fn not_ready_counts_at_once() {
        let mut health = up();
        assert!(health.on(Signal::NotReady("draining".to_owned()), NOW));
        assert_eq!(health.problem(), Some("draining"));
        assert!(
            !health.on(Signal::NotReady("draining".to_owned()), NOW),
            "told once"
        );
    }

    #[test]
    fn who_breaks_requests_off_is_ejected_and_returns_on_trial() {
        let mut health = up();
        let mut now = NOW;
        let mut length = EJECTED;
        for _ in 0..BROKEN_REQUESTS {
            health.on(Signal::Broke(why()), now);
        }
        for _ in 0..4 {
            assert!(!health.is_up());
            health.on(Signal::Ready, now + length / 2);
            assert!(
                !health.is_up(),
                "probes alone do not bring it back before its time"
            );
            now += length;
            health.on(Signal::Ready, now);
            assert!(health.is_up(), "half open");
            health.on(Signal::Broke(why()), now);
            length *= 2;
        }
        now += length;
        health.on(Signal::Ready, now);
        for _ in 0..TRIALS {
            health.on(Signal::Answered, now);
        }
        health.on(Signal::Broke(why()), now);
        assert!(health.is_up(), "one is forgiven again");
    }
}
