//! Ranks with real schedulers under random loads.

use super::*;
use crate::RequestId;
use crate::blocks::BlockPool;
use crate::scheduler::{FetchEnd, NewSeq, Plan, Scheduler, StepLimits, Work};
use proptest::prelude::*;
use std::collections::BTreeMap;

const BLOCK: usize = 4;

/// Sizes of all ranks.
#[derive(Clone, Copy, Debug)]
struct Sizes {
    ranks: usize,
    seqs: usize,
    tokens: usize,
    blocks: u32,
    drafts: usize,
}

#[derive(Clone, Copy, Debug)]
struct Arrival {
    /// Steps after the one before.
    gap: u64,
    rank: usize,
    prompt: usize,
    output: usize,
    /// Waits for the prompt of the request before it, if that is on the same rank.
    follows: bool,
    /// Bytes of scores for each token of its prompt, if it is computed here.
    scores: usize,
    /// Its KV comes from elsewhere, so many steps after it was asked for.
    fetch: Option<u64>,
    /// Its blocks are held for so many steps when it has ended.
    hold: Option<u64>,
    /// It is aborted so many steps after its arrival.
    abort: Option<u64>,
}

struct Rank {
    scheduler: Scheduler,
    phases: Phases,
    waiting: Waiting,
    plan: Plan,
    /// Output tokens still wanted.
    left: BTreeMap<u64, usize>,
    /// Decode steps that it could have used but were prefill steps, in a row.
    skipped: u32,
}

struct World {
    sizes: Sizes,
    policy: PhasePolicy,
    ranks: Vec<Rank>,
    step: u64,
    /// Steps without prompts in a row while a rank's age was past the longest wait.
    overdue: u32,
    held: Vec<(u64, usize, RequestId)>,
    fetching: Vec<(u64, usize, RequestId)>,
    /// Steps that a request's fetch takes.
    fetches: BTreeMap<u64, u64>,
    random: u64,
}

fn policies() -> impl Strategy<Value = PhasePolicy> {
    let mixing = prop_oneof![
        Just(Mixing::Apart),
        (1u32..12).prop_map(|tokens| Mixing::Chunks { tokens }),
    ];
    let threshold =
        (0u32..6, 0u64..40).prop_map(|(requests, tokens)| Threshold { requests, tokens });
    let longest_wait = prop_oneof![Just(0), 0u64..30, Just(u64::MAX)];
    (
        mixing,
        1u32..6,
        1u32..4,
        threshold,
        longest_wait,
        any::<bool>(),
    )
        .prop_map(
            |(mixing, prefill_any_interval, prefill_run, threshold, longest_wait, padded)| {
                PhasePolicy {
                    mixing,
                    prefill_any_interval,
                    prefill_run,
                    threshold,
                    longest_wait,
                    padded,
                }
            },
        )
}

fn sizes() -> impl Strategy<Value = Sizes> {
    (1usize..5, 1usize..7, 2usize..20, 12u32..30, 0usize..3).prop_map(
        |(ranks, seqs, tokens, blocks, drafts)| Sizes {
            ranks,
            seqs,
            tokens,
            blocks,
            drafts,
        },
    )
}

fn arrivals() -> impl Strategy<Value = Vec<Arrival>> {
    let often = |n: u32, range: std::ops::Range<u64>| prop_oneof![n => Just(None), 1 => range.prop_map(Some)];
    let arrival = (
        0u64..4,
        0usize..4,
        1usize..30,
        1usize..12,
        prop::bool::weighted(0.2),
        prop_oneof![4 => Just(0), 1 => 1usize..8],
        often(5, 1..20),
        often(5, 1..40),
        often(9, 0..30),
    );
    let arrival = arrival.prop_map(
        |(gap, rank, prompt, output, follows, scores, fetch, hold, abort)| Arrival {
            gap: gap * gap,
            rank,
            prompt,
            output,
            follows,
            scores: if fetch.is_some() { 0 } else { scores },
            fetch,
            hold,
            abort,
        },
    );
    prop::collection::vec(arrival, 0..60)
}

impl World {
    fn new(sizes: Sizes, policy: PhasePolicy) -> Self {
        let limits = StepLimits {
            max_num_seqs: sizes.seqs,
            max_num_batched_tokens: sizes.tokens,
            max_scored_tokens: sizes.tokens,
            max_score_bytes: 100,
            prefill_any_interval: 1,
            max_drafts: sizes.drafts,
        };
        let shape = GroupShape {
            ranks: sizes.ranks as u32,
            step_tokens: sizes.tokens as u32,
            drafts: (sizes.drafts > 0).then_some(sizes.drafts as u32),
        };
        let rank = |_| Rank {
            scheduler: Scheduler::new(limits, BlockPool::new(sizes.blocks, BLOCK)),
            phases: Phases::new(policy, shape).unwrap(),
            waiting: Waiting::default(),
            plan: Plan::default(),
            left: BTreeMap::new(),
            skipped: 0,
        };
        Self {
            sizes,
            policy,
            ranks: (0..sizes.ranks).map(rank).collect(),
            step: 0,
            overdue: 0,
            held: Vec::new(),
            fetching: Vec::new(),
            fetches: BTreeMap::new(),
            random: 1,
        }
    }

    fn random(&mut self, below: usize) -> usize {
        self.random = self
            .random
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1);
        (self.random >> 33) as usize % below.max(1)
    }

    fn submit(&mut self, id: u64, arrival: &Arrival) {
        let capacity = self.sizes.blocks as usize * BLOCK;
        let rank = &mut self.ranks[arrival.rank % self.sizes.ranks];
        let prompt_len = arrival.prompt.min(capacity - 12);
        let new = NewSeq {
            prompt_len,
            max_len: prompt_len + arrival.output,
            remote: arrival.fetch.is_some(),
            score_bytes: arrival.scores * prompt_len,
            leader: id.checked_sub(1).filter(|_| arrival.follows).map(RequestId),
            ..NewSeq::default()
        };
        assert!(rank.scheduler.add(RequestId(id), new));
        self.fetches.extend(arrival.fetch.map(|steps| (id, steps)));
        rank.left.insert(id, arrival.output);
    }

    /// All reports reduced, in an order that differs from step to step.
    fn reduced(&mut self, hints: &[Hint]) -> (Wire, u64) {
        let mut wires = Vec::new();
        let mut oldest = 0;
        for (rank, hint) in self.ranks.iter_mut().zip(hints) {
            let age = rank.waiting.age(self.step, hint);
            oldest = oldest.max(age);
            wires.push(rank.phases.report(hint, age));
        }
        while wires.len() > 1 {
            let (at, len) = (self.random(wires.len()), wires.len());
            let other = wires.swap_remove(at);
            let into = self.random(len - 1);
            reduce(&mut wires[into], &other);
        }
        (wires[0], oldest)
    }

    /// One step of the group; false if it sleeps and no rank had anything to do for itself.
    fn step(&mut self) -> bool {
        self.step += 1;
        let hints: Vec<Hint> = self
            .ranks
            .iter()
            .map(|rank| rank.scheduler.hint())
            .collect();
        for (rank, hint) in self.ranks.iter().zip(&hints) {
            let nothing = hint.is_idle() && !hint.local;
            assert_eq!(nothing, !rank.scheduler.can_step(), "{hint:?}");
        }
        let (reduced, oldest) = self.reduced(&hints);
        let decisions = self
            .ranks
            .iter_mut()
            .map(|rank| rank.phases.decide(&reduced).unwrap());
        let decisions: Vec<Decision> = decisions.collect();
        let decision = decisions[0];
        assert!(decisions.iter().all(|other| *other == decision));
        let all_idle = hints.iter().all(Hint::is_idle);
        assert_eq!(decision.phase.is_none(), all_idle);
        let (mut rows, mut preempted) = (0, false);
        for (index, hint) in hints.iter().enumerate() {
            let plan = {
                let rank = &mut self.ranks[index];
                let mut plan = std::mem::take(&mut rank.plan);
                rank.scheduler.schedule_within(decision.permit, &mut plan);
                plan
            };
            let own: usize = plan.works.iter().map(|work| work.len).sum();
            self.check_rank(index, hint, &decision, &plan, own);
            rows += own;
            preempted |= !plan.preempted.is_empty();
            for fetch in &plan.fetches {
                let until = self.step + self.fetches[&fetch.id.0];
                self.fetching.push((until, index, fetch.id));
            }
            plan.works.iter().for_each(|work| self.compute(index, work));
            let rank = &mut self.ranks[index];
            rank.plan = plan;
            rank.waiting.stepped(&decision);
            rank.scheduler.audit().unwrap();
        }
        if all_idle {
            assert_eq!(rows, 0);
            return hints.iter().any(|hint| hint.local);
        }
        assert!(
            rows > 0 || preempted,
            "nothing computed: {decision:?} {hints:?}"
        );
        self.check_wait(&decision, oldest);
        true
    }

    fn check_rank(
        &mut self,
        index: usize,
        hint: &Hint,
        decision: &Decision,
        plan: &Plan,
        own: usize,
    ) {
        let rank = &mut self.ranks[index];
        let most = decision.padded_rows.unwrap_or(self.sizes.tokens);
        assert!(own <= most, "{own} rows, {most} agreed");
        let generates = |work: &&Work| work.last && work.len == work.drafts + 1;
        let generating = plan.works.iter().filter(generates).count();
        let quiet = plan.preempted.is_empty();
        rank.skipped = match decision.phase {
            Some(Phase::Prefill) if hint.generating > 0 => rank.skipped + 1,
            _ => 0,
        };
        assert!(
            rank.skipped <= self.policy.prefill_run,
            "generation stands still"
        );
        match decision.phase {
            None => assert!(plan.works.is_empty()),
            Some(Phase::Prefill) => {
                assert!(
                    hint.prompts == 0 || own > 0 || !quiet,
                    "prompts and no row: {hint:?} {decision:?} {plan:?}"
                );
            }
            Some(Phase::Decode) => {
                assert_eq!(generating, plan.works.len(), "a prompt in a decode step");
                assert!(
                    hint.generating == 0 || own > 0 || !quiet,
                    "nobody generates"
                );
            }
            Some(Phase::Mixed) => {
                let room = (hint.generate_rows as usize) < self.sizes.tokens;
                let prompt =
                    generating < plan.works.len() || plan.works.iter().any(|work| work.start == 0);
                // Drafts come first, and may have taken the blocks that the prompt would have had.
                let taken = self.sizes.drafts > 0 && rank.scheduler.hint().prompt_tokens == 0;
                assert!(
                    hint.prompts == 0 || !room || prompt || !quiet || taken,
                    "no prompt in a mixed step: {hint:?} {decision:?} {plan:?}"
                );
            }
        }
    }

    fn check_wait(&mut self, decision: &Decision, oldest: u64) {
        let overdue = oldest >= self.policy.longest_wait && decision.phase == Some(Phase::Decode);
        // Without prompts there is no age.
        let has_prompts = oldest > 0 || self.policy.longest_wait > 0;
        self.overdue = if overdue && has_prompts {
            self.overdue + 1
        } else {
            0
        };
        let most = (self.policy.prefill_any_interval - 1).max(1);
        assert!(
            self.overdue <= most,
            "prompts wait {} steps too long",
            self.overdue
        );
    }

    /// As the engine after a step: a token from the last known one, drafts accepted as it happens.
    fn compute(&mut self, index: usize, work: &Work) {
        let accepted = self.random(work.drafts + 1);
        let wanted = self.random(self.sizes.drafts + 1);
        let rank = &mut self.ranks[index];
        let (id, left) = (work.id, rank.left[&work.id.0]);
        if !work.last {
            rank.scheduler.settle(id, work.start + work.len);
            return;
        }
        let new = (accepted + 1).min(left);
        rank.scheduler.append(id, new);
        let settled = work.start + work.len - work.drafts + new - 1;
        let left = left - new;
        rank.left.insert(id.0, left);
        if left > 0 {
            let room = (rank.scheduler.room(id) + 1).saturating_sub(settled);
            rank.scheduler.propose(id, wanted.min(left - 1).min(room));
        }
        rank.scheduler.settle(id, settled);
    }

    /// Ends what has all its tokens.
    fn end(&mut self, arrivals: &[Arrival]) {
        for (index, rank) in self.ranks.iter_mut().enumerate() {
            let done: Vec<u64> = rank
                .left
                .iter()
                .filter(|(_, left)| **left == 0)
                .map(|(id, _)| *id)
                .collect();
            for id in done {
                rank.left.remove(&id);
                let hold = arrivals[id as usize].hold;
                let kept = rank.scheduler.finish(RequestId(id), hold.is_some());
                if let (Some(_), Some(steps)) = (kept, hold) {
                    self.held.push((self.step + steps, index, RequestId(id)));
                }
            }
        }
        let step = self.step;
        for (_, rank, id) in self.held.extract_if(.., |(until, ..)| *until <= step) {
            assert!(self.ranks[rank].scheduler.release_held(id));
        }
        for (_, rank, id) in self.fetching.extract_if(.., |(until, ..)| *until <= step) {
            let end = self.ranks[rank].scheduler.fetched(id, id.0 % 3 > 0);
            assert_ne!(end, FetchEnd::Unknown);
        }
    }
}

proptest! {
    /// Every request ends, whatever the policy; on the way the bounds of the module's description hold.
    #[test]
    fn nobody_starves_and_nothing_stands_still(
        sizes in sizes(), policy in policies(), arrivals in arrivals()
    ) {
        let mut world = World::new(sizes, policy);
        let mut due = 0;
        let times: Vec<u64> = arrivals.iter().map(|arrival| { due += arrival.gap; due }).collect();
        let mut next = 0;
        let most: u64 = 2000 + due + 100 * arrivals.len() as u64;
        loop {
            while next < times.len() && times[next] <= world.step {
                world.submit(next as u64, &arrivals[next]);
                next += 1;
            }
            for (id, arrival) in arrivals[..next].iter().enumerate() {
                if arrival.abort.is_some_and(|after| times[id] + after == world.step) {
                    let rank = &mut world.ranks[arrival.rank % sizes.ranks];
                    if rank.left.remove(&(id as u64)).is_some() {
                        rank.scheduler.abort(RequestId(id as u64));
                    }
                }
            }
            let waits = next < times.len() || !world.held.is_empty() || !world.fetching.is_empty();
            let awake = world.step();
            world.end(&arrivals);
            if !awake && !waits {
                break;
            }
            // The longest wait may be for ever: then prompts wait for others to stop generating.
            prop_assert!(world.step < most, "not done after {} steps", world.step);
        }
        prop_assert!(world.ranks.iter().all(|rank| rank.left.is_empty() && rank.scheduler.is_idle()));
        let steps: Vec<u64> = world.ranks.iter().map(|rank| rank.phases.steps()).collect();
        prop_assert!(steps.iter().all(|count| *count == steps[0]), "{:?}", steps);
    }
}

fn shape() -> GroupShape {
    GroupShape {
        ranks: 2,
        step_tokens: 100,
        drafts: Some(3),
    }
}

fn prompts(requests: u32, tokens: u32) -> Hint {
    Hint {
        prompts: requests,
        prompt_tokens: tokens,
        ..Hint::default()
    }
}

fn generating(requests: u32) -> Hint {
    Hint {
        generating: requests,
        generate_rows: requests,
        ..Hint::default()
    }
}

/// What two ranks with these hints and ages decide.
fn decide(phases: &mut Phases, hints: [(Hint, u64); 2]) -> Decision {
    let mut wire = phases.report(&hints[0].0, hints[0].1);
    reduce(&mut wire, &phases.report(&hints[1].0, hints[1].1));
    phases.decide(&wire).unwrap()
}

#[test]
fn a_threshold_holds_prompts_back_until_enough_or_too_old() {
    let policy = PhasePolicy {
        threshold: Threshold {
            requests: 3,
            tokens: 150,
        },
        longest_wait: 20,
        ..PhasePolicy::AT_ONCE
    };
    let mut phases = Phases::new(policy, shape()).unwrap();
    let mut phase = |a, b| decide(&mut phases, [a, b]).phase;
    let decode = (generating(2), 0);
    assert_eq!(
        phase((prompts(2, 90), 0), (Hint::default(), 0)),
        Some(Phase::Prefill)
    );
    assert_eq!(phase((prompts(2, 90), 0), decode), Some(Phase::Decode));
    assert_eq!(phase((prompts(3, 90), 0), decode), Some(Phase::Prefill));
    assert_eq!(phase((prompts(2, 90), 19), decode), Some(Phase::Decode));
    assert_eq!(phase((prompts(2, 90), 20), decode), Some(Phase::Prefill));
    let both = Hint {
        prompts: 1,
        prompt_tokens: 80,
        ..generating(2)
    };
    assert_eq!(phase((prompts(1, 70), 0), (both, 0)), Some(Phase::Prefill));
    assert_eq!(phase((Hint::default(), 0), (Hint::default(), 0)), None);
}

#[test]
fn sizes_follow_the_fullest_rank() {
    let padded = PhasePolicy::chunks(2, 30, false, true);
    let mixed = Hint {
        generate_rows: 8,
        ..generating(5)
    };
    let mut phases = Phases::new(padded, shape()).unwrap();
    let decision = decide(&mut phases, [(prompts(1, 90), 0), (mixed, 0)]);
    assert_eq!(decision.phase, Some(Phase::Mixed));
    assert_eq!(decision.padded_rows, Some(38));
    assert_eq!(
        (decision.permit.rows, decision.permit.prompt_tokens),
        (38, 30)
    );
    assert!(decision.permit.fill);
    assert_eq!(decision.draft_rounds, 3);
    let decision = decide(&mut phases, [(mixed, 0), (generating(9), 0)]);
    assert_eq!(decision.padded_rows, Some(9));
    let decision = decide(&mut phases, [(prompts(4, 90), 0), (prompts(1, 20), 0)]);
    assert_eq!(
        (decision.phase, decision.padded_rows),
        (Some(Phase::Prefill), Some(90))
    );
    let counted = PhasePolicy {
        padded: false,
        ..padded
    };
    let mut phases = Phases::new(counted, shape()).unwrap();
    let decision = decide(&mut phases, [(prompts(1, 90), 0), (mixed, 0)]);
    assert_eq!(
        (decision.padded_rows, decision.permit.prompt_tokens),
        (None, 30)
    );
    assert!(!decision.permit.fill);
    let asleep = decide(&mut phases, [(Hint::default(), 0); 2]);
    assert_eq!((asleep.permit, asleep.draft_rounds), (Permit::NONE, 0));
}

#[test]
fn chunks_wait_until_they_fill_on_all_ranks() {
    let mut phases = Phases::new(PhasePolicy::chunks(2, 30, true, false), shape()).unwrap();
    let busy = |tokens| Hint {
        prompts: 1,
        prompt_tokens: tokens,
        ..generating(4)
    };
    // However long the prompt of one rank, it fills one chunk.
    let lone = decide(&mut phases, [(busy(100), 0), (generating(4), 0)]);
    assert_eq!(lone.phase, Some(Phase::Decode));
    let nearly = decide(&mut phases, [(busy(100), 299), (busy(11), 0)]);
    assert_eq!(nearly.phase, Some(Phase::Decode));
    let filled = decide(&mut phases, [(busy(100), 0), (busy(12), 0)]);
    assert_eq!(filled.phase, Some(Phase::Mixed));
    let old = decide(&mut phases, [(busy(100), 300), (generating(4), 0)]);
    assert_eq!(old.phase, Some(Phase::Mixed));
}

#[test]
fn ranks_that_do_not_belong_together_are_told_apart() {
    let mut phases = Phases::new(PhasePolicy::AT_ONCE, shape()).unwrap();
    let hint = generating(1);
    let own = phases.report(&hint, 0);
    assert_eq!(
        phases.decide(&own),
        Err(Disagreement::Ranks {
            got: 1,
            expected: 2
        })
    );
    let mut ahead = Phases::new(PhasePolicy::AT_ONCE, shape()).unwrap();
    decide(&mut ahead, [(hint, 0); 2]);
    let mut wire = own;
    reduce(&mut wire, &ahead.report(&hint, 0));
    let round = Disagreement::Round {
        least: 0,
        most: 1,
        own: 0,
    };
    assert_eq!(phases.decide(&wire), Err(round));
    let other = PhasePolicy {
        longest_wait: 1,
        ..PhasePolicy::AT_ONCE
    };
    let mut wire = own;
    reduce(
        &mut wire,
        &Phases::new(other, shape()).unwrap().report(&hint, 0),
    );
    assert_eq!(phases.decide(&wire), Err(Disagreement::Policy));
    // Nothing of that has changed the state.
    decide(&mut phases, [(hint, 0); 2]);
    assert_eq!(phases.steps(), 1);
}

#[test]
fn ages_count_from_when_a_prompt_can_run() {
    let mut waiting = Waiting::default();
    let decode = Decision {
        phase: Some(Phase::Decode),
        permit: Permit::ALL,
        padded_rows: None,
        draft_rounds: 0,
    };
    let prefill = Decision {
        phase: Some(Phase::Prefill),
        ..decode
    };
    assert_eq!(waiting.age(10, &generating(1)), 0);
    assert_eq!(waiting.age(11, &prompts(1, 5)), 0);
    waiting.stepped(&decode);
    assert_eq!(waiting.age(15, &prompts(1, 5)), 4);
    waiting.stepped(&prefill);
    assert_eq!(waiting.age(16, &prompts(1, 5)), 0);
    assert_eq!(waiting.age(20, &prompts(0, 0)), 0);
}

#[test]
fn policies_are_checked() {
    for policy in [
        PhasePolicy {
            prefill_any_interval: 0,
            ..PhasePolicy::AT_ONCE
        },
        PhasePolicy {
            prefill_run: 0,
            ..PhasePolicy::AT_ONCE
        },
        PhasePolicy {
            mixing: Mixing::Chunks { tokens: 0 },
            ..PhasePolicy::AT_ONCE
        },
    ] {
        assert!(Phases::new(policy, shape()).is_err(), "{policy:?}");
    }
    let none = GroupShape {
        ranks: 0,
        ..shape()
    };
    assert!(Phases::new(PhasePolicy::AT_ONCE, none).is_err());
}
