//! What the ranks of one instance do together in a step. Before each step every rank puts what it could do
//! into a small array ([`Wire`]), the arrays are reduced to one, and each rank derives the same
//! [`Decision`] from it: the phase, what each scheduler may plan, the size of the collectives. Ranks that
//! then have no rows run a dummy step, so that nobody waits in a collective for one that is not there.
//!
//! The rules, with "prompts" for requests with prompt tokens to compute and "somebody generates" for any
//! request on any rank that could generate now:
//! * Nothing to compute on any rank: the group sleeps. No collectives until a rank has something.
//! * Prompts only: a prefill step with the whole budget. Nobody would gain by waiting.
//! * No prompts: a decode step.
//! * Both: prompts wait until enough of them are there to fill a step on all ranks ([`Threshold`]), or one
//!   rank has had some for [`PhasePolicy::longest_wait`]; and until the last step that computed prompts
//!   is far enough back. Then they get steps of their own ([`Mixing::Apart`]) or a share of the decode step
//!   ([`Mixing::Chunks`]). A step costs the group as much as its slowest rank, with padded collectives
//!   nearly as much as if all ranks were like that one: a lone prompt at once is the most expensive choice.
//!
//! What counts is what a rank can admit ([`Hint`]), not what waits in its queue. A rank whose queue is full
//! of requests without slot or block asks for no prefill, so that the group neither stands still nor skips
//! decode steps for it; a preempted request does not change the phase before there is room for it again.
//!
//! Bounds, with R = `prefill_run`, N = `prefill_any_interval`, W = `longest_wait`:
//! * Work on any rank: the next step computes at least one row (with the exception of [`Scheduler::hint`]).
//! * Apart, somebody generates: of R + 1 steps in a row at least one is a decode step. With chunks every step is.
//! * A rank has prompts: a step that computes some comes within max(1, N − 1) + 1 steps after its age has
//!   reached W, or at once if nobody generates.
//!
//! [`Scheduler::hint`]: crate::scheduler::Scheduler::hint

#[cfg(test)]
mod tests;
mod wire;

pub use wire::{MAXIMA, MINIMA, SUMS, WIRE_LEN, Wire, reduce};

use crate::scheduler::{Hint, Permit};
use twinfer_protocol::ApiError;
use wire::{Field, field};

/// How prompts and generation share steps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mixing {
    /// A step computes either.
    Apart,
    /// A decode step takes up to `tokens` prompt tokens on each rank.
    Chunks {
        /// Prompt tokens per rank and step, at least 1.
        tokens: u32,
    },
}

/// How many prompts must be there before generation is disturbed: one of both numbers. With both 0 there is
/// nothing to wait for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Threshold {
    /// Requests on all ranks; 0: their number does not matter.
    pub requests: u32,
    /// Tokens on all ranks, of each rank no more than one step can take; 0: their number does not matter.
    pub tokens: u64,
}

/// Who computes when. Equal on all ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PhasePolicy {
    /// How prompts and generation share steps.
    pub mixing: Mixing,
    /// While somebody generates, prompts are computed in every Nth step at most, where `prefill_run` steps
    /// in a row count as one; at least 1.
    pub prefill_any_interval: u32,
    /// Steps in a row that compute prompts only, at most, while somebody generates; at least 1.
    pub prefill_run: u32,
    /// When prompts are enough.
    pub threshold: Threshold,
    /// A rank that has had prompts for so long without computing any no longer waits for the threshold; in
    /// the unit of [`Waiting`].
    pub longest_wait: u64,
    /// Collectives have one size, that of the fullest rank. Otherwise each rank sends what it has.
    pub padded: bool,
}

/// What all ranks do in a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// Prompts only.
    Prefill,
    /// Generation only.
    Decode,
    /// Both.
    Mixed,
}

/// What a step is, the same on all ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Decision {
    /// What the ranks do; none: they sleep.
    pub phase: Option<Phase>,
    /// What each rank's scheduler may plan.
    pub permit: Permit,
    /// Rows that each rank's collectives have room for, if they are padded. No rank has more.
    pub padded_rows: Option<usize>,
    /// Passes of the draft layer after the step, those of dummy ranks included.
    pub draft_rounds: u32,
}

/// The ranks do not run the same step: the instance cannot go on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Disagreement {
    /// Not all ranks are in it, or some twice.
    #[error("{got} ranks reported, the group has {expected}")]
    Ranks {
        /// Reports.
        got: u64,
        /// Ranks.
        expected: u64,
    },
    /// Ranks are in different rounds.
    #[error("ranks are in rounds {least} to {most}, this one in {own}")]
    Round {
        /// Lowest.
        least: u64,
        /// Highest.
        most: u64,
        /// Here.
        own: u64,
    },
    /// Ranks were started with different policies or limits.
    #[error("ranks run different phase policies")]
    Policy,
}

/// What is the same on all ranks of a group beside the policy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GroupShape {
    /// Ranks, at least 1.
    pub ranks: u32,
    /// `max_num_batched_tokens` of each.
    pub step_tokens: u32,
    /// Drafts per sequence and step; none if the model has no draft layer (and then no pass of one).
    pub drafts: Option<u32>,
}

/// The part of one rank in the agreement. Equal arrays lead to equal states.
#[derive(Clone, Debug)]
pub struct Phases {
    policy: PhasePolicy,
    shape: GroupShape,
    round: u64,
    steps: u64,
    /// Steps in a row that computed prompts only while somebody generated.
    run: u32,
    /// Steps since the last that computed prompts, that one included.
    since_prefill: u32,
}

/// How long a rank has had prompts without computing any: since the first became admissible, or since the
/// last step that computed some. Time before that, in a queue for slots or blocks, does not count: else
/// under saturation every prompt would be overdue the moment it becomes admissible.
#[derive(Clone, Copy, Debug, Default)]
pub struct Waiting {
    since: Option<u64>,
}

impl PhasePolicy {
    /// The rule of the seed's design, as far as it does not hang: prompts at once, in padded steps of their own.
    pub const AT_ONCE: Self = Self {
        mixing: Mixing::Apart,
        prefill_any_interval: 1,
        prefill_run: u32::MAX,
        threshold: Threshold {
            requests: 0,
            tokens: 0,
        },
        longest_wait: 0,
        padded: true,
    };

    /// The default: of the policies compared in `modelled` the one with the highest output rate among those
    /// whose gaps between tokens and times to the first token stay short.
    pub const DEFAULT: Self = Self::chunks(1, 64, false, false);

    /// Chunks of `tokens` in decode steps; with `filled` only when seven tenths of a chunk are there on the
    /// ranks' average, or after 300 ms.
    pub const fn chunks(ranks: u32, tokens: u32, filled: bool, padded: bool) -> Self {
        let fill = ranks as u64 * tokens as u64 * 7 / 10;
        Self {
            mixing: Mixing::Chunks { tokens },
            threshold: Threshold {
                requests: 0,
                tokens: if filled { fill } else { 0 },
            },
            longest_wait: if filled { 300 } else { 0 },
            prefill_run: 1,
            padded,
            ..Self::AT_ONCE
        }
    }

    /// Checks ranges.
    ///
    /// # Errors
    /// `InvalidRequest` that names the field, its value and what is allowed.
    pub fn validate(&self) -> Result<(), ApiError> {
        let chunk = match self.mixing {
            Mixing::Apart => 1,
            Mixing::Chunks { tokens } => tokens,
        };
        for (field, value) in [
            ("prefill_any_interval", self.prefill_any_interval),
            ("prefill_run", self.prefill_run),
            ("prefill_chunk", chunk),
        ] {
            if value == 0 {
                let message = format!("{field} is 0; allowed are numbers from 1");
                return Err(ApiError::invalid(field, message));
            }
        }
        Ok(())
    }

    /// A number that differs where policies do, for nearly all pairs.
    fn digest(&self, shape: &GroupShape) -> u64 {
        let (apart, chunk) = match self.mixing {
            Mixing::Apart => (1, 0),
            Mixing::Chunks { tokens } => (0, tokens),
        };
        [
            apart,
            chunk.into(),
            self.prefill_any_interval.into(),
            self.prefill_run.into(),
            self.threshold.requests.into(),
            self.threshold.tokens,
            self.longest_wait,
            self.padded.into(),
            shape.step_tokens.into(),
            shape.drafts.map_or(0, |drafts| u64::from(drafts) + 1),
        ]
        .iter()
        .fold(0xCBF2_9CE4_8422_2325, |hash: u64, part| {
            (hash ^ part)
                .wrapping_mul(0x9E37_79B9_7F4A_7C15)
                .rotate_left(29)
        })
    }
}

impl Phases {
    /// The beginning, before the first step of a group.
    ///
    /// # Errors
    /// As [`PhasePolicy::validate`].
    pub fn new(policy: PhasePolicy, shape: GroupShape) -> Result<Self, ApiError> {
        policy.validate()?;
        for (field, value) in [("ranks", shape.ranks), ("step_tokens", shape.step_tokens)] {
            if value == 0 {
                let message = format!("{field} is 0; allowed are numbers from 1");
                return Err(ApiError::invalid(field, message));
            }
        }
        Ok(Self {
            policy,
            shape,
            round: 0,
            steps: 0,
            run: 0,
            since_prefill: u32::MAX,
        })
    }

    /// Steps that were decided, sleeping not counted.
    pub fn steps(&self) -> u64 {
        self.steps
    }

    /// This rank's array; `age` is that of [`Waiting::age`].
    pub fn report(&self, hint: &Hint, age: u64) -> Wire {
        let has_prompts = u64::from(hint.prompts > 0);
        let tokens = u64::from(hint.prompt_tokens);
        let mut wire = [0; WIRE_LEN];
        let digest = self.policy.digest(&self.shape);
        for (field, value) in [
            (Field::Ranks, 1),
            (Field::Prompts, hint.prompts.into()),
            (Field::PromptTokens, tokens.min(self.prompt_share())),
            (Field::Generating, hint.generating.into()),
            (Field::MostPromptTokens, tokens),
            (Field::MostGenerateRows, hint.generate_rows.into()),
            (Field::MostAge, age * has_prompts),
            (Field::MostRound, self.round),
            (Field::MostPolicy, digest),
            (Field::LeastRound, self.round),
            (Field::LeastPolicy, digest),
        ] {
            wire[field as usize] = value;
        }
        wire
    }

    /// What follows from the reduced array, whose content is not trusted further than that.
    ///
    /// # Errors
    /// The ranks are not in the same round of the same group.
    pub fn decide(&mut self, reduced: &Wire) -> Result<Decision, Disagreement> {
        let get = |name: Field| field(reduced, name);
        self.check(reduced)?;
        self.round += 1;
        let (prompts, generating) = (get(Field::Prompts), get(Field::Generating));
        let due = self.is_due(reduced);
        let phase = match (prompts > 0, generating > 0) {
            (false, false) => None,
            (true, false) => Some(Phase::Prefill),
            (false, true) => Some(Phase::Decode),
            (true, true) if !due => Some(Phase::Decode),
            (true, true) => Some(match self.policy.mixing {
                Mixing::Apart => Phase::Prefill,
                Mixing::Chunks { .. } => Phase::Mixed,
            }),
        };
        self.count(phase, generating > 0);
        let budget = self.shape.step_tokens as usize;
        let most = |name| usize::try_from(get(name)).unwrap_or(usize::MAX).min(budget);
        let prompt_rows = most(Field::MostPromptTokens);
        let generate_rows = most(Field::MostGenerateRows);
        let permit = match phase {
            None => Permit::NONE,
            Some(Phase::Prefill) => Permit {
                generate: false,
                prompt_tokens: prompt_rows,
                rows: prompt_rows,
                fill: false,
            },
            Some(Phase::Decode) => Permit {
                generate: true,
                prompt_tokens: 0,
                rows: generate_rows,
                fill: false,
            },
            Some(Phase::Mixed) => {
                let chunk = prompt_rows.min(self.prompt_share() as usize);
                Permit {
                    generate: true,
                    prompt_tokens: chunk,
                    rows: (generate_rows + chunk).min(budget),
                    // What a padded rank does not generate costs nothing more as prompt.
                    fill: self.policy.padded,
                }
            }
        };
        let padded = self.policy.padded && phase.is_some();
        Ok(Decision {
            phase,
            permit,
            padded_rows: padded.then_some(permit.rows),
            draft_rounds: self.draft_rounds(phase),
        })
    }

    fn check(&self, reduced: &Wire) -> Result<(), Disagreement> {
        let get = |name: Field| field(reduced, name);
        let (got, expected) = (get(Field::Ranks), u64::from(self.shape.ranks));
        if got != expected {
            return Err(Disagreement::Ranks { got, expected });
        }
        let (least, most) = (get(Field::LeastRound), get(Field::MostRound));
        if least != most || most != self.round {
            let own = self.round;
            return Err(Disagreement::Round { least, most, own });
        }
        let digest = self.policy.digest(&self.shape);
        if get(Field::LeastPolicy) != digest || get(Field::MostPolicy) != digest {
            return Err(Disagreement::Policy);
        }
        Ok(())
    }

    /// May prompts disturb generation now?
    fn is_due(&self, reduced: &Wire) -> bool {
        let Threshold { requests, tokens } = self.policy.threshold;
        let enough = (requests == 0 && tokens == 0)
            || (requests > 0 && field(reduced, Field::Prompts) >= requests.into())
            || (tokens > 0 && field(reduced, Field::PromptTokens) >= tokens)
            || field(reduced, Field::MostAge) >= self.policy.longest_wait;
        let within_run = self.run > 0 && self.run < self.policy.prefill_run;
        let apart = match self.policy.mixing {
            Mixing::Apart if self.run >= self.policy.prefill_run => 2,
            _ => 1,
        };
        let interval = self.policy.prefill_any_interval.max(apart);
        enough && (within_run || self.since_prefill >= interval)
    }

    fn count(&mut self, phase: Option<Phase>, generating: bool) {
        let Some(phase) = phase else {
            return;
        };
        self.steps += 1;
        self.run = match phase {
            Phase::Prefill if generating => self.run.saturating_add(1),
            _ => 0,
        };
        self.since_prefill = match phase {
            Phase::Decode => self.since_prefill.saturating_add(1),
            _ => 1,
        };
    }

    /// Prompt tokens of one rank that a step can take while others generate.
    fn prompt_share(&self) -> u64 {
        match self.policy.mixing {
            Mixing::Apart => self.shape.step_tokens.into(),
            Mixing::Chunks { tokens } => tokens.min(self.shape.step_tokens).into(),
        }
    }

    /// Requests draft after each step in which they got a token; the layer's KV is filled in any case.
    fn draft_rounds(&self, phase: Option<Phase>) -> u32 {
        match (phase, self.shape.drafts) {
            (None, _) | (_, None) => 0,
            (Some(_), Some(drafts)) => drafts.max(1),
        }
    }
}

impl Waiting {
    /// Age at `now`, in any unit that the caller keeps to. Called once per round.
    pub fn age(&mut self, now: u64, hint: &Hint) -> u64 {
        if hint.prompts == 0 {
            self.since = None;
            return 0;
        }
        now.saturating_sub(*self.since.get_or_insert(now))
    }

    /// The rank's step computed prompts, of `decision`; the age starts anew.
    pub fn stepped(&mut self, decision: &Decision) {
        if matches!(decision.phase, Some(Phase::Prefill | Phase::Mixed)) {
            self.since = None;
        }
    }
}
