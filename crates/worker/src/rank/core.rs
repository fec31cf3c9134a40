//! The engine half of a rank.

use super::messages::{News, Order, RankStats, TurnCounts};
use super::wake::RankWake;
use std::time::Instant;
use twinfer_engine::{Engine, ExecError, RankEngine, StepOutput};

/// An engine that takes orders and makes news.
pub(crate) struct RankCore {
    stepper: Stepper,
    published: RankStats,
    stopping: bool,
    /// Events of a step; kept so that steps need no new memory.
    out: StepOutput,
}

/// When a rank has to do something.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Patience {
    /// A step is due.
    Step,
    /// Only an order gives it work.
    Wait,
    /// It has ended.
    End,
}

enum Stepper {
    Alone(Box<Engine>),
    Together {
        rank: Box<RankEngine>,
        wake: RankWake,
        turns: TurnCounts,
        /// When time began, for the longest waits.
        base: Instant,
    },
}

impl RankCore {
    /// One rank for itself.
    pub(crate) fn alone(engine: Engine) -> Self {
        Self::new(Stepper::Alone(Box::new(engine)))
    }

    /// One of several, which sleeps until it is woken.
    pub(crate) fn among(rank: RankEngine) -> Self {
        Self::new(Stepper::Together {
            rank: Box::new(rank),
            wake: RankWake::default(),
            turns: TurnCounts::default(),
            base: Instant::now(),
        })
    }

    fn new(stepper: Stepper) -> Self {
        let mut core = Self {
            stepper,
            published: RankStats::default(),
            stopping: false,
            out: StepOutput::new(),
        };
        core.published = core.stats();
        core
    }

    /// What is due.
    pub(crate) fn patience(&self) -> Patience {
        let due = match &self.stepper {
            // Who stops it does not want the rest.
            Stepper::Alone(_) if self.stopping => false,
            Stepper::Alone(engine) => engine.has_work(),
            // The others count on it until all have agreed.
            Stepper::Together { wake, .. } => wake.is_awake(),
        };
        match (due, self.stopping) {
            (true, _) => Patience::Step,
            (false, true) => Patience::End,
            (false, false) => Patience::Wait,
        }
    }

    pub(crate) fn apply(&mut self, order: Order, news: &mut Vec<News>) {
        let engine = self.engine();
        match order {
            // Claims are the handoff's, which has taken them.
            Order::Submit {
                ticket, requests, ..
            } => {
                let mut taken = Vec::with_capacity(requests.len());
                let mut outcome = Ok(());
                for request in requests {
                    let id = request.id;
                    if let Err(error) = engine.submit(request) {
                        outcome = Err(error);
                        break;
                    }
                    taken.push(id);
                }
                if outcome.is_err() {
                    for id in taken {
                        engine.abort(id);
                    }
                }
                news.push(News::Taken { ticket, outcome });
            }
            Order::Abort(id) => engine.abort(id),
            Order::KvLoaded(id, outcome) => engine.kv_loaded(id, outcome),
            Order::ReleaseHeld(id) => {
                engine.release_held(id);
            }
            Order::Wake(number) => {
                if let Stepper::Together { wake, .. } = &mut self.stepper {
                    wake.wake(number);
                }
            }
            Order::Stop => self.stopping = true,
            // The handoff's.
            Order::Lease(_) | Order::EndLease { .. } | Order::Disclaim(_) => {}
        }
    }

    /// Asks to be woken if there is work and the group sleeps.
    pub(crate) fn ask(&mut self, news: &mut Vec<News>) {
        if let Stepper::Together { rank, wake, .. } = &mut self.stepper
            && rank.engine().has_work()
        {
            news.extend(wake.ask().map(News::Asks));
        }
    }

    /// The engine, for its memory.
    pub(crate) fn engine(&mut self) -> &mut Engine {
        match &mut self.stepper {
            Stepper::Alone(engine) => engine,
            Stepper::Together { rank, .. } => rank.engine(),
        }
    }

    /// A step, or a turn of all ranks.
    ///
    /// Errors: the engine cannot go on.
    pub(crate) fn step(&mut self, news: &mut Vec<News>) -> Result<(), ExecError> {
        let mut slept = None;
        match &mut self.stepper {
            Stepper::Alone(engine) => engine.step_into(&mut self.out)?,
            Stepper::Together {
                rank,
                wake,
                turns,
                base,
            } => {
                let now = u64::try_from(base.elapsed().as_millis()).unwrap_or(u64::MAX);
                let turn = rank.turn(now, false, &mut self.out)?;
                if let Some(phase) = turn.decision.phase {
                    turns.count(phase, turn.rows);
                }
                slept = (!turn.busy).then(|| wake.agreed());
            }
        }
        news.extend(self.out.drain_events().map(News::Event));
        news.extend(slept.map(News::Slept));
        Ok(())
    }

    /// Adds counters and gauges to `news` if they have changed.
    pub(crate) fn publish(&mut self, news: &mut Vec<News>) {
        let stats = self.stats();
        if stats != self.published {
            self.published = stats;
            news.push(News::Stats(Box::new(stats)));
        }
    }

    pub(crate) fn stats(&mut self) -> RankStats {
        match &mut self.stepper {
            Stepper::Alone(engine) => RankStats {
                engine: engine.stats(),
                ..RankStats::default()
            },
            Stepper::Together { rank, turns, .. } => RankStats {
                engine: rank.engine().stats(),
                turns: *turns,
                moves: rank.link().moves(),
                sent: rank.link().sent(),
            },
        }
    }
}
