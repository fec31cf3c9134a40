//! When to start, stop and kill the processes of a deployment: a pure state machine. The last child
//! is the router, all others are instances.

use serde::{Deserialize, Serialize};
use std::os::unix::process::ExitStatusExt;
use std::process::ExitStatus;
use std::time::Duration;

/// Deadlines.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Limits {
    /// From the start until every child is ready.
    pub ready: Duration,
    /// For the router to drain after a stop.
    pub drain_router: Duration,
    /// For the instances to drain once the router has ended.
    pub drain_instances: Duration,
}

/// After a failure, and after a second stop, children have this long before they are killed.
pub(crate) const GRACE: Duration = Duration::from_secs(4);
/// In that time they are asked a second time, which ends their drain.
pub(crate) const ASK_AGAIN: Duration = Duration::from_secs(2);
/// A killed process that has not ended after this cannot be killed.
pub(crate) const AFTER_KILL: Duration = Duration::from_secs(3);

/// What happened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Event {
    /// The process could not be started.
    StartFailed(usize, String),
    /// The child says that it is ready.
    Ready(usize),
    /// The process ended.
    Exited(usize, Exit),
    /// A person or a service manager asks for the end.
    Stop,
    /// A deadline may have passed.
    Tick,
}

/// How a process ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Exit {
    /// It returned this code.
    Code(i32),
    /// This signal ended it.
    Signal(i32),
    /// Nobody is left to say.
    Unknown,
}

impl Exit {
    /// What the system says of a process that has been waited for.
    pub(crate) fn of(status: ExitStatus) -> Self {
        match (status.code(), status.signal()) {
            (Some(code), _) => Self::Code(code),
            (None, Some(signal)) => Self::Signal(signal),
            (None, None) => Self::Unknown,
        }
    }
}

/// What to do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Action {
    /// Start the process.
    Start(usize),
    /// Send SIGTERM.
    Terminate(usize),
    /// Send SIGKILL.
    Kill(usize),
    /// Everything is ready.
    Ready,
    /// Nothing is left to do.
    Finish(Ended),
}

/// How it ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Ended {
    /// Why, if not because it was asked to.
    pub failure: Option<Cause>,
    /// Children that had to be killed.
    pub killed: Vec<usize>,
    /// Children that did not even end then.
    pub left: Vec<usize>,
}

/// The first thing that went wrong.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Cause {
    /// The process could not be started.
    StartFailed(usize, String),
    /// It ended by itself; before all were ready, or afterwards.
    Died {
        /// Which.
        child: usize,
        /// How.
        exit: Exit,
        /// Were all ready before?
        was_ready: bool,
    },
    /// These were not ready in time.
    NotReady(Vec<usize>),
    /// It ended with an error while it drained.
    BadDrain(usize, Exit),
}

/// State of one child.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Child {
    Running { ready: bool },
    Ended,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Starting {
        until: Duration,
    },
    Serving,
    /// The router drains, the instances still serve it.
    DrainRouter {
        until: Duration,
    },
    DrainInstances {
        until: Duration,
    },
    /// Asked to end at once.
    Ending {
        again: Option<Duration>,
        until: Duration,
    },
    Killed {
        until: Duration,
    },
    Finished,
}

/// The machine. `now` is a monotonic time since any moment.
#[derive(Debug)]
pub(crate) struct Supervisor {
    children: Vec<Child>,
    limits: Limits,
    phase: Phase,
    failure: Option<Cause>,
    killed: Vec<usize>,
}

impl Supervisor {
    /// Starts `children` processes, of which the last one is the router.
    pub(crate) fn start(children: usize, limits: Limits, now: Duration) -> (Self, Vec<Action>) {
        let this = Self {
            children: vec![Child::Running { ready: false }; children],
            limits,
            phase: Phase::Starting {
                until: now + limits.ready,
            },
            failure: None,
            killed: Vec::new(),
        };
        (this, (0..children).map(Action::Start).collect())
    }

    /// The next moment at which [`Event::Tick`] matters.
    pub(crate) fn next_deadline(&self) -> Option<Duration> {
        match self.phase {
            Phase::Starting { until }
            | Phase::DrainRouter { until }
            | Phase::DrainInstances { until }
            | Phase::Killed { until } => Some(until),
            Phase::Ending { again, until } => Some(again.unwrap_or(until)),
            Phase::Serving | Phase::Finished => None,
        }
    }

    /// Takes an event.
    pub(crate) fn handle(&mut self, now: Duration, event: &Event) -> Vec<Action> {
        let mut actions = Vec::new();
        match event {
            Event::StartFailed(child, why) => {
                self.children[*child] = Child::Ended;
                self.fail(now, Cause::StartFailed(*child, why.clone()), &mut actions);
                if *child == self.router() && matches!(self.phase, Phase::DrainRouter { .. }) {
                    self.drain_instances(now, &mut actions);
                }
            }
            Event::Ready(child) => {
                if let Child::Running { ready } = &mut self.children[*child] {
                    *ready = true;
                }
                let all = self
                    .children
                    .iter()
                    .all(|child| *child == Child::Running { ready: true });
                if all && matches!(self.phase, Phase::Starting { .. }) {
                    self.phase = Phase::Serving;
                    actions.push(Action::Ready);
                }
            }
            Event::Exited(child, exit) => self.exited(now, *child, *exit, &mut actions),
            Event::Stop => self.stop(now, &mut actions),
            Event::Tick => {}
        }
        self.tick(now, &mut actions);
        if self.phase != Phase::Finished && !self.children.iter().any(is_running) {
            self.phase = Phase::Finished;
            actions.push(Action::Finish(self.ended()));
        }
        actions
    }

    fn exited(&mut self, now: Duration, child: usize, exit: Exit, actions: &mut Vec<Action>) {
        if !is_running(&self.children[child]) {
            return;
        }
        self.children[child] = Child::Ended;
        match self.phase {
            Phase::Starting { .. } | Phase::Serving => {
                let was_ready = self.phase == Phase::Serving;
                self.fail(
                    now,
                    Cause::Died {
                        child,
                        exit,
                        was_ready,
                    },
                    actions,
                );
            }
            Phase::DrainRouter { .. } | Phase::DrainInstances { .. } => {
                if exit != Exit::Code(0) && !self.killed.contains(&child) {
                    self.failure.get_or_insert(Cause::BadDrain(child, exit));
                }
                if child == self.router() && matches!(self.phase, Phase::DrainRouter { .. }) {
                    self.drain_instances(now, actions);
                }
            }
            Phase::Ending { .. } | Phase::Killed { .. } | Phase::Finished => {}
        }
    }

    fn stop(&mut self, now: Duration, actions: &mut Vec<Action>) {
        match self.phase {
            Phase::Starting { .. } => self.end(now, actions),
            Phase::Serving => {
                self.phase = Phase::DrainRouter {
                    until: now + self.limits.drain_router,
                };
                actions.push(Action::Terminate(self.router()));
            }
            Phase::DrainRouter { .. } | Phase::DrainInstances { .. } => self.end(now, actions),
            Phase::Ending { .. } => self.kill(now, actions),
            Phase::Killed { .. } | Phase::Finished => {}
        }
    }

    fn tick(&mut self, now: Duration, actions: &mut Vec<Action>) {
        match self.phase {
            Phase::Starting { until } if now >= until => {
                let late = |child: &Child| *child == Child::Running { ready: false };
                let late = (0..self.children.len())
                    .filter(|&child| late(&self.children[child]))
                    .collect();
                self.fail(now, Cause::NotReady(late), actions);
            }
            Phase::DrainRouter { until } if now >= until => {
                let router = self.router();
                self.killed.push(router);
                actions.push(Action::Kill(router));
                self.drain_instances(now, actions);
            }
            Phase::DrainInstances { until } if now >= until => self.kill(now, actions),
            Phase::Ending {
                again: Some(again),
                until,
            } if now >= again => {
                self.phase = Phase::Ending { again: None, until };
                actions.extend(self.running().map(Action::Terminate));
            }
            Phase::Ending { until, .. } if now >= until => self.kill(now, actions),
            Phase::Killed { until } if now >= until => {
                self.phase = Phase::Finished;
                actions.push(Action::Finish(self.ended()));
            }
            _ => {}
        }
    }

    /// Keeps the first cause and ends all.
    fn fail(&mut self, now: Duration, cause: Cause, actions: &mut Vec<Action>) {
        self.failure.get_or_insert(cause);
        if matches!(self.phase, Phase::Starting { .. } | Phase::Serving) {
            self.end(now, actions);
        }
    }

    fn drain_instances(&mut self, now: Duration, actions: &mut Vec<Action>) {
        self.phase = Phase::DrainInstances {
            until: now + self.limits.drain_instances,
        };
        let router = self.router();
        actions.extend(
            self.running()
                .filter(|child| *child != router)
                .map(Action::Terminate),
        );
    }

    fn end(&mut self, now: Duration, actions: &mut Vec<Action>) {
        self.phase = Phase::Ending {
            again: Some(now + ASK_AGAIN),
            until: now + GRACE,
        };
        actions.extend(self.running().map(Action::Terminate));
    }

    fn kill(&mut self, now: Duration, actions: &mut Vec<Action>) {
        self.phase = Phase::Killed {
            until: now + AFTER_KILL,
        };
        let running: Vec<usize> = self.running().collect();
        actions.extend(running.iter().copied().map(Action::Kill));
        self.killed.extend(running);
        self.killed.sort_unstable();
        self.killed.dedup();
    }

    fn running(&self) -> impl Iterator<Item = usize> {
        self.children
            .iter()
            .enumerate()
            .filter(|(_, child)| is_running(child))
            .map(|(i, _)| i)
    }

    fn router(&self) -> usize {
        self.children.len() - 1
    }

    fn ended(&self) -> Ended {
        Ended {
            failure: self.failure.clone(),
            killed: self.killed.clone(),
            left: self.running().collect(),
        }
    }
}

fn is_running(child: &Child) -> bool {
    matches!(child, Child::Running { .. })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const LIMITS: Limits = Limits {
        ready: Duration::from_secs(60),
        drain_router: Duration::from_secs(40),
        drain_instances: Duration::from_secs(40),
    };

    fn secs(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    fn serving(children: usize) -> Supervisor {
        let (mut machine, actions) = Supervisor::start(children, LIMITS, secs(0));
        assert_eq!(
            actions,
            (0..children).map(Action::Start).collect::<Vec<_>>()
        );
        for child in 0..children {
            let actions = machine.handle(secs(1), &Event::Ready(child));
            let expected = if child + 1 == children {
                vec![Action::Ready]
            } else {
                vec![]
            };
            assert_eq!(actions, expected);
        }
        machine
    }

    #[test]
    fn a_stop_drains_the_router_before_its_instances() {
        let mut machine = serving(3);
        assert_eq!(
            machine.handle(secs(2), &Event::Stop),
            [Action::Terminate(2)]
        );
        assert_eq!(
            machine.handle(secs(3), &Event::Exited(2, Exit::Code(0))),
            [Action::Terminate(0), Action::Terminate(1)]
        );
        assert_eq!(
            machine.handle(secs(4), &Event::Exited(0, Exit::Code(0))),
            []
        );
        assert_eq!(
            machine.handle(secs(4), &Event::Exited(1, Exit::Code(0))),
            [Action::Finish(Ended {
                failure: None,
                killed: vec![],
                left: vec![]
            })]
        );
    }

    #[test]
    fn the_death_of_one_ends_all_within_ten_seconds() {
        let mut machine = serving(3);
        let died = Exit::Signal(9);
        assert_eq!(
            machine.handle(secs(5), &Event::Exited(1, died)),
            [Action::Terminate(0), Action::Terminate(2)]
        );
        // The others hang.
        let mut now = secs(5);
        let mut last = Vec::new();
        while let Some(deadline) = machine.next_deadline() {
            now = deadline;
            last = machine.handle(now, &Event::Tick);
        }
        assert!(now <= secs(15), "{now:?}");
        let failure = Some(Cause::Died {
            child: 1,
            exit: died,
            was_ready: true,
        });
        assert_eq!(
            last,
            [Action::Finish(Ended {
                failure,
                killed: vec![0, 2],
                left: vec![0, 2]
            })]
        );
    }

    #[test]
    fn a_death_during_start_up_is_told_apart() {
        let (mut machine, _) = Supervisor::start(2, LIMITS, secs(0));
        machine.handle(secs(1), &Event::Ready(1));
        assert_eq!(
            machine.handle(secs(1), &Event::Exited(0, Exit::Code(64))),
            [Action::Terminate(1)]
        );
        // The other one's end is no second cause, and a late word that it is ready changes nothing.
        assert_eq!(machine.handle(secs(1), &Event::Ready(1)), []);
        let failure = Some(Cause::Died {
            child: 0,
            exit: Exit::Code(64),
            was_ready: false,
        });
        assert_eq!(
            machine.handle(secs(2), &Event::Exited(1, Exit::Signal(15))),
            [Action::Finish(Ended {
                failure,
                killed: vec![],
                left: vec![]
            })]
        );
    }

    #[test]
    fn those_that_are_not_ready_in_time_are_named() {
        let (mut machine, _) = Supervisor::start(3, LIMITS, secs(0));
        machine.handle(secs(1), &Event::Ready(1));
        machine.handle(secs(60), &Event::Tick);
        assert_eq!(machine.failure, Some(Cause::NotReady(vec![0, 2])));
    }

    #[test]
    fn a_second_stop_does_not_wait_for_the_drain() {
        let mut machine = serving(2);
        machine.handle(secs(2), &Event::Stop);
        assert_eq!(
            machine.handle(secs(3), &Event::Stop),
            [Action::Terminate(0), Action::Terminate(1)]
        );
        assert_eq!(
            machine.handle(secs(3), &Event::Stop),
            [Action::Kill(0), Action::Kill(1)]
        );
        assert_eq!(machine.handle(secs(3), &Event::Stop), []);
    }

    fn events(children: usize) -> impl Strategy<Value = Vec<(u64, Event)>> {
        let exit = prop_oneof![
            Just(Exit::Code(0)),
            Just(Exit::Code(1)),
            Just(Exit::Signal(9))
        ];
        let event = prop_oneof![
            1 => (0..children).prop_map(|child| Event::StartFailed(child, "no".to_owned())),
            6 => (0..children).prop_map(Event::Ready),
            4 => (0..children, exit).prop_map(|(child, exit)| Event::Exited(child, exit)),
            2 => Just(Event::Stop),
            4 => Just(Event::Tick),
        ];
        proptest::collection::vec((0u64..20_000, event), 0..40)
    }

    proptest! {
        #[test]
        fn no_schedule_leaves_a_process_behind_or_waits_for_ever(
            (children, schedule) in (1usize..6).prop_flat_map(|n| (Just(n), events(n)))
        ) {
            let mut now = Duration::ZERO;
            let (mut machine, first) = Supervisor::start(children, LIMITS, now);
            let mut alive = vec![true; children];
            let mut asked = vec![false; children];
            let mut finish: Option<Ended> = None;
            let mut ready = 0;
            let mut unasked_death = false;
            prop_assert_eq!(first.len(), children);
            let feed = |machine: &mut Supervisor, now: Duration, event: &Event, alive: &mut Vec<bool>,
                        asked: &mut Vec<bool>, finish: &mut Option<Ended>, ready: &mut usize| {
                for action in machine.handle(now, event) {
                    assert!(finish.is_none(), "{action:?} after the end");
                    match action {
                        Action::Start(_) => panic!("a child is started again"),
                        Action::Terminate(child) | Action::Kill(child) => {
                            assert!(alive[child], "signal to child {child}, which has ended");
                            asked[child] = true;
                        }
                        Action::Ready => {
                            *ready += 1;
                            assert!(asked.iter().all(|asked| !asked));
                        }
                        Action::Finish(ended) => *finish = Some(ended),
                    }
                }
            };
            for (wait, event) in schedule {
                if finish.is_some() { break; }
                now += Duration::from_millis(wait);
                // A child ends once.
                if let Event::StartFailed(child, _) | Event::Exited(child, _) = event {
                    if !alive[child] { continue; }
                    alive[child] = false;
                    unasked_death |= !asked.iter().any(|asked| *asked);
                }
                feed(&mut machine, now, &event, &mut alive, &mut asked, &mut finish, &mut ready);
            }
            prop_assert!(ready <= 1);
            if finish.is_none() {
                // From a stop on, deadlines alone bring it to its end, and every child gets a signal.
                feed(&mut machine, now, &Event::Stop, &mut alive, &mut asked, &mut finish, &mut ready);
                let mut ticks = 0;
                while finish.is_none() {
                    ticks += 1;
                    prop_assert!(ticks < 20);
                    let deadline = machine.next_deadline();
                    prop_assert!(deadline.is_some(), "it would wait for ever");
                    now = now.max(deadline.unwrap_or_default());
                    feed(&mut machine, now, &Event::Tick, &mut alive, &mut asked, &mut finish, &mut ready);
                }
            }
            let ended = finish.clone().unwrap();
            for child in 0..children {
                prop_assert_eq!(ended.left.contains(&child), alive[child]);
                prop_assert!(!alive[child] || asked[child], "child {} was left without a signal", child);
                prop_assert!(!alive[child] || ended.killed.contains(&child));
            }
            if unasked_death { prop_assert!(ended.failure.is_some(), "a death went unnoticed"); }
        }
    }
}
