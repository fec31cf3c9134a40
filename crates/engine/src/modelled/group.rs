//! Ranks in virtual time: N real engines over modelled executors, stepped together as their phases say.

use super::{CostModel, ModelledExecutor, ModelledShape, StepLoad, StepMeter};
use crate::phase::{
    Decision, Disagreement, GroupShape, Phase, PhasePolicy, Phases, Waiting, reduce,
};
use crate::{Engine, EngineConfig, EventRef, ExecError, Request, StepOutput};
use std::sync::Arc;
use twinfer_protocol::{ApiError, ErrorKind};
use twinfer_text::Tokenizer;

/// Nanoseconds in the unit of [`PhasePolicy::longest_wait`].
const AGE_UNIT: u64 = 1_000_000;

/// A group of equal ranks.
#[derive(Clone, Debug)]
pub struct GroupConfig {
    /// Ranks, at least 1.
    pub ranks: u32,
    /// Each rank's limits. Its `prefill_any_interval` is that of the policy.
    pub engine: EngineConfig,
    /// Each rank's executor.
    pub shape: ModelledShape,
    /// Who computes when; ages are in milliseconds.
    pub policy: PhasePolicy,
    /// What steps cost.
    pub costs: CostModel,
}

/// The group.
pub struct Group {
    ranks: Vec<Rank>,
    costs: CostModel,
    loads: Vec<StepLoad>,
    now: u64,
}

struct Rank {
    engine: Engine,
    meter: Arc<StepMeter>,
    phases: Phases,
    waiting: Waiting,
    out: StepOutput,
}

/// A step of the group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GroupStep {
    /// What was agreed.
    pub decision: Decision,
    /// Rows computed, of all ranks.
    pub rows: usize,
    /// Ranks that ran a dummy step.
    pub dummies: usize,
    /// What it cost, in nanoseconds.
    pub nanoseconds: u64,
}

/// Why a group cannot go on.
#[derive(Debug, thiserror::Error)]
pub enum GroupError {
    /// A rank's step failed.
    #[error("rank {rank}: {error}")]
    Step {
        /// Rank.
        rank: usize,
        /// Why.
        error: ExecError,
    },
    /// The ranks do not agree.
    #[error(transparent)]
    Disagreement(#[from] Disagreement),
    /// From equal arrays ranks came to different decisions, or a rank did more than was decided.
    #[error("rank {rank} does not keep to the decision: {what}")]
    Broken {
        /// Rank.
        rank: usize,
        /// How.
        what: String,
    },
}

impl Group {
    /// An idle group at time 0.
    ///
    /// # Errors
    /// `InvalidRequest` that names a field of the configuration, `Internal` if the KV cannot be mapped.
    pub fn new(config: &GroupConfig, tokenizer: &Arc<Tokenizer>) -> Result<Self, ApiError> {
        let shape = GroupShape {
            ranks: config.ranks,
            step_tokens: config.engine.max_num_batched_tokens,
            drafts: (config.shape.right_drafts).map(|_| config.engine.num_speculative_tokens),
        };
        let ranks = (0..config.ranks).map(|_| {
            let made = ModelledExecutor::new(config.shape.clone());
            let (executor, meter) =
                made.map_err(|error| ApiError::new(ErrorKind::Internal, format!("KV: {error}")))?;
            let engine = EngineConfig {
                prefill_any_interval: 1,
                ..config.engine
            };
            let blocks = config.shape.num_blocks;
            let tokenizer = Arc::clone(tokenizer);
            Ok(Rank {
                engine: Engine::new(engine, Box::new(executor), tokenizer, blocks)?,
                meter,
                phases: Phases::new(config.policy, shape)?,
                waiting: Waiting::default(),
                out: StepOutput::new(),
            })
        });
        let ranks = ranks.collect::<Result<Vec<_>, ApiError>>()?;
        Ok(Self {
            loads: vec![StepLoad::default(); ranks.len()],
            ranks,
            costs: config.costs,
            now: 0,
        })
    }

    /// Virtual time, in nanoseconds.
    pub fn now(&self) -> u64 {
        self.now
    }

    /// Lets time pass while the group sleeps; never back.
    pub fn wait_until(&mut self, now: u64) {
        self.now = self.now.max(now);
    }

    /// The ranks' engines.
    pub fn engines(&self) -> impl ExactSizeIterator<Item = &Engine> {
        self.ranks.iter().map(|rank| &rank.engine)
    }

    /// Gives a request to the rank with the fewest waiting, then running requests, the first of them.
    ///
    /// # Errors
    /// As [`Engine::submit`].
    pub fn submit(&mut self, request: Request) -> Result<usize, ApiError> {
        let load = |rank: &Rank| {
            let load = rank.engine.stats().load;
            (load.waiting + load.running, load.waiting)
        };
        let least = self
            .ranks
            .iter_mut()
            .enumerate()
            .min_by_key(|(_, rank)| load(rank));
        match least {
            Some((index, rank)) => rank.engine.submit(request).map(|()| index),
            None => Err(ApiError::new(ErrorKind::Internal, "a group without ranks")),
        }
    }

    /// One step of all ranks; none if they sleep. [`Self::events`] tells what came out in either case.
    ///
    /// # Errors
    /// The group cannot go on.
    pub fn step(&mut self) -> Result<Option<GroupStep>, GroupError> {
        let decision = self.agree()?;
        let (mut rows, mut dummies) = (0, 0);
        for (index, rank) in self.ranks.iter_mut().enumerate() {
            let failed = |error| GroupError::Step { rank: index, error };
            let own = rank
                .engine
                .step_within(decision.permit, &mut rank.out)
                .map_err(failed)?;
            if decision.padded_rows.is_some_and(|most| own > most) {
                let what = format!("{own} rows in {decision:?}");
                return Err(GroupError::Broken { rank: index, what });
            }
            if decision.phase.is_none() {
                continue;
            }
            if own == 0 {
                rank.engine.dummy_step().map_err(failed)?;
                dummies += 1;
            }
            rank.waiting.stepped(&decision);
            rows += own;
            self.loads[index] = rank.meter.last();
        }
        if decision.phase.is_none() {
            return Ok(None);
        }
        let nanoseconds = self.costs.step(&self.loads, decision.padded_rows);
        self.now += nanoseconds;
        Ok(Some(GroupStep {
            decision,
            rows,
            dummies,
            nanoseconds,
        }))
    }

    /// Events of the last step, of all ranks.
    pub fn events(&self) -> impl Iterator<Item = EventRef<'_>> {
        self.ranks.iter().flat_map(|rank| rank.out.events())
    }

    /// Steps by phase are for the caller to count; this is how many there were.
    pub fn steps(&self) -> u64 {
        self.ranks.first().map_or(0, |rank| rank.phases.steps())
    }

    fn agree(&mut self) -> Result<Decision, GroupError> {
        let now = self.now / AGE_UNIT;
        let mut reduced = None;
        for rank in &mut self.ranks {
            let hint = rank.engine.hint();
            let report = rank.phases.report(&hint, rank.waiting.age(now, &hint));
            match &mut reduced {
                None => reduced = Some(report),
                Some(reduced) => reduce(reduced, &report),
            }
        }
        let reduced = reduced.unwrap_or_default();
        let mut agreed: Option<Decision> = None;
        for (index, rank) in self.ranks.iter_mut().enumerate() {
            let own = rank.phases.decide(&reduced)?;
            if *agreed.get_or_insert(own) != own {
                let what = format!("{own:?} instead of {agreed:?}");
                return Err(GroupError::Broken { rank: index, what });
            }
        }
        agreed.ok_or(GroupError::Disagreement(Disagreement::Ranks {
            got: 0,
            expected: 1,
        }))
    }
}

impl GroupStep {
    /// What the ranks did.
    pub fn phase(&self) -> Option<Phase> {
        self.decision.phase
    }
}
