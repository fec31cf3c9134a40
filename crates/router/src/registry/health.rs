//! Whether an instance is used. Pure: probes and requests tell, nothing is timed here.

/// Probes in a row that find no answer before an instance is given up.
const SILENT_PROBES: u32 = 2;
/// Requests in a row that an instance breaks off before it is given up until the next good probe.
const BROKEN_REQUESTS: u32 = 3;

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
}

impl Default for Health {
    fn default() -> Self {
        Self {
            problem: Some("not probed yet".to_owned()),
            ever_up: false,
            silent: 0,
            broken: 0,
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

    pub(crate) fn problem(&self) -> Option<&str> {
        self.problem.as_deref()
    }

    /// Takes a signal; true when there is something new to tell.
    pub(crate) fn on(&mut self, signal: Signal) -> bool {
        let was = self.problem.clone();
        match signal {
            Signal::Ready => {
                *self = Self {
                    problem: None,
                    ever_up: true,
                    silent: 0,
                    broken: 0,
                };
            }
            Signal::NotReady(why) => {
                self.silent = 0;
                self.problem = Some(why);
            }
            Signal::ProbeRefused(why) | Signal::Refused(why) => self.problem = Some(why),
            Signal::ProbeSilent(why) => {
                self.silent += 1;
                if self.silent >= SILENT_PROBES || !self.is_up() {
                    self.problem = Some(why);
                }
            }
            Signal::Broke(why) => {
                self.broken += 1;
                if self.broken >= BROKEN_REQUESTS {
                    self.problem = Some(why);
                }
            }
            Signal::Answered => self.broken = 0,
        }
        was != self.problem
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn up() -> Health {
        let mut health = Health::default();
        assert!(health.on(Signal::Ready));
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
            assert!(!health.on(Signal::Answered));
        }
        assert!(health.is_up());
        assert!(health.on(Signal::Refused(why())));
        assert!(!health.is_up());
        health.on(Signal::Answered);
        assert!(!health.is_up(), "only a probe brings it back");
        assert!(health.on(Signal::Ready));
        assert!(health.is_up());
    }

    #[test]
    fn one_slow_probe_is_forgiven_and_one_broken_request_too() {
        let mut health = up();
        health.on(Signal::ProbeSilent(why()));
        assert!(health.is_up());
        health.on(Signal::Ready);
        health.on(Signal::ProbeSilent(why()));
        assert!(health.is_up(), "not in a row");
        health.on(Signal::ProbeSilent(why()));
        assert!(!health.is_up());

        let mut health = up();
        health.on(Signal::Broke(why()));
        health.on(Signal::Broke(why()));
        health.on(Signal::Answered);
        health.on(Signal::Broke(why()));
        assert!(health.is_up());
        health.on(Signal::Broke(why()));
        health.on(Signal::Broke(why()));
        assert!(!health.is_up());
    }

    #[test]
    fn not_ready_counts_at_once() {
        let mut health = up();
        assert!(health.on(Signal::NotReady("draining".to_owned())));
        assert_eq!(health.problem(), Some("draining"));
        assert!(
            !health.on(Signal::NotReady("draining".to_owned())),
            "told once"
        );
    }
}
