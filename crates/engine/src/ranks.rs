//! One rank among others: before each step all agree on what it is ([`crate::phase`]), then each runs its part of it,
//! with rows of its own or without.

use crate::exchange::{Combine, RankLink};
use crate::generate::Run;
use crate::phase::{
    Decision, Disagreement, GroupShape, MAXIMA, PhasePolicy, Phases, SUMS, WIRE_LEN, Waiting, Wire,
};
use crate::{Engine, ExecError, GenerateError, Generated, Request, StepOutput};
use std::sync::Arc;
use twinfer_protocol::ApiError;

/// Tag of the agreement.
const TAG: u32 = 2;
/// Numbers that are agreed on: those of the phases, and whether any rank still expects work.
const NUMBERS: usize = WIRE_LEN + 1;

/// An engine that is stepped together with those of the other ranks.
pub struct RankEngine {
    engine: Engine,
    link: Arc<RankLink>,
    phases: Phases,
    waiting: Waiting,
    ops: [Combine; NUMBERS],
}

/// What became of a turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Turn {
    /// What was agreed, the same on all ranks.
    pub decision: Decision,
    /// Rows that this rank computed; without any it ran a dummy step if there was one.
    pub rows: usize,
    /// Some rank has something to do, or said that it expects it. Requests that wait for KV, or for blocks that are held,
    /// are nothing to do until that has come.
    pub busy: bool,
}

impl RankEngine {
    /// `engine` as one of the ranks behind `link`, over an executor that was loaded with it. All ranks have equal
    /// policies and limits.
    ///
    /// # Errors
    /// `InvalidRequest` that names a field of the policy.
    pub fn new(engine: Engine, policy: PhasePolicy, link: Arc<RankLink>) -> Result<Self, ApiError> {
        let config = engine.config();
        if config.prefill_any_interval != 1 {
            let message = format!(
                "prefill_any_interval is {} for a rank's own scheduler; allowed is 1: that of the policy counts",
                config.prefill_any_interval
            );
            return Err(ApiError::invalid("prefill_any_interval", message));
        }
        let shape = GroupShape {
            ranks: link.ranks(),
            step_tokens: config.max_num_batched_tokens,
            drafts: engine.drafts(),
        };
        let mut ops = [Combine::Min; NUMBERS];
        ops[SUMS].fill(Combine::Sum);
        ops[MAXIMA].fill(Combine::Max);
        ops[WIRE_LEN] = Combine::Max;
        Ok(Self {
            phases: Phases::new(policy, shape)?,
            waiting: Waiting::default(),
            engine,
            link,
            ops,
        })
    }

    /// The engine, to give it requests and to ask it.
    pub fn engine(&mut self) -> &mut Engine {
        &mut self.engine
    }

    /// The ways to the other ranks, for what is counted there.
    pub fn link(&self) -> &Arc<RankLink> {
        &self.link
    }

    /// Turns that were steps.
    pub fn steps(&self) -> u64 {
        self.phases.steps()
    }

    /// One turn of all ranks, which each calls as often. `now` is in the unit of [`PhasePolicy::longest_wait`];
    /// `expects` says that this rank will have something to do that it has not yet. What came out is in `out`.
    ///
    /// # Errors
    /// The ranks cannot be reached, do not agree, or this one's step failed. The engine cannot go on.
    pub fn turn(
        &mut self,
        now: u64,
        expects: bool,
        out: &mut StepOutput,
    ) -> Result<Turn, ExecError> {
        self.link.next_turn();
        let hint = self.engine.hint();
        let report = self.phases.report(&hint, self.waiting.age(now, &hint));
        let mut numbers = [0; NUMBERS];
        numbers[..WIRE_LEN].copy_from_slice(&report);
        numbers[WIRE_LEN] = u64::from(expects || self.engine.has_work());
        let place = self.link.place(TAG);
        self.link.open().reduce(place, &self.ops, &mut numbers)?;
        let [reduced @ .., busy] = numbers;
        let reduced: Wire = reduced;
        let decision = self.phases.decide(&reduced)?;
        self.link.pad_rows(decision.padded_rows);
        let rows = self.engine.step_within(decision.permit, out)?;
        if let Some(phase) = decision.phase {
            if rows == 0 {
                self.engine.dummy_step()?;
            }
            self.engine.rearrange(phase)?;
            self.waiting.stepped(&decision);
        }
        Ok(Turn {
            decision,
            rows,
            busy: busy > 0,
        })
    }
}

/// Runs `requests`, this rank's part of all, to their end together with the other ranks, which call it too, perhaps
/// without any. As [`crate::generate()`] but for that.
///
/// # Errors
/// The first refused request of this rank, a failed turn, or a standstill. The other ranks end with an error when this
/// one goes away.
pub fn generate_together(
    rank: &mut RankEngine,
    requests: Vec<Request>,
    concurrency: usize,
    mut each: impl FnMut(&Generated),
) -> Result<Vec<Generated>, GenerateError> {
    let mut run = Run::new(requests)?;
    let mut out = StepOutput::new();
    loop {
        run.fill(&mut rank.engine, concurrency)?;
        // Without a clock prompts do not age: no policy holds them back for ever, since others end.
        let expects = run.waits() || run.open() > 0;
        let turn = rank.turn(0, expects, &mut out)?;
        for event in out.drain_events() {
            run.take(event, &mut each);
        }
        if !turn.busy {
            return Ok(run.finish());
        }
        let idle = turn.decision.phase.is_none() && run.open() > 0;
        if idle && !rank.engine.has_work() {
            return Err(GenerateError::Stuck(run.open()));
        }
    }
}

impl From<Disagreement> for ExecError {
    fn from(error: Disagreement) -> Self {
        Self::Ranks(error.to_string())
    }
}
