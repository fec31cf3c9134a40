//! The scheduler's promises, on the scheduler alone: who waits for whom, and for how long at most.

use proptest::prelude::*;
use std::collections::{BTreeMap, HashMap, HashSet};
use twinfer_engine::blocks::BlockPool;
use twinfer_engine::scheduler::{Aborted, NewSeq, Plan, SURE_AFTER, Scheduler, StepLimits};
use twinfer_engine::{BlockKey, RequestId};
use twinfer_protocol::BlockId;

const BLOCK: usize = 4;

fn limits() -> StepLimits {
    StepLimits {
        max_num_seqs: 16,
        max_num_batched_tokens: 32,
        max_scored_tokens: 16,
        max_score_bytes: 64,
        prefill_any_interval: 1,
        max_drafts: 0,
    }
}

/// What one sequence asks for.
#[derive(Clone, Copy, Debug)]
struct Ask {
    prompt: usize,
    output: usize,
    /// Blocks in common with others of the same `family`.
    common: usize,
    family: u8,
    scored: bool,
}

struct Seq {
    ask: Ask,
    drawn: usize,
    /// Names of all blocks that it may ever fill.
    keys: Vec<BlockKey>,
    given: usize,
    submitted: u64,
    first_work: Option<u64>,
    prompt_done: Option<u64>,
    last_token: u64,
    preempted: u32,
}

/// Drives a scheduler as the engine does, and models what stands in each block.
struct World {
    limits: StepLimits,
    scheduler: Scheduler,
    plan: Plan,
    seqs: BTreeMap<u64, Seq>,
    ended: Vec<u64>,
    /// Content of blocks: the key of each full block that was filled, whoever filled it.
    content: HashMap<BlockId, BlockKey>,
    step: u64,
    most_preempted: u32,
    /// Steps that computed prompts while others generated.
    prefills: Vec<u64>,
    accept: usize,
}

fn key(parts: &[u64]) -> BlockKey {
    let fold = |hash: u128, part: &u64| {
        (hash ^ u128::from(*part)).wrapping_mul(0x2360_ED05_1FC6_5DA4_4385_DF64_9FCC_F645)
    };
    BlockKey(parts.iter().fold(0x9E37_79B9_7F4A_7C15, fold))
}

impl World {
    fn new(limits: StepLimits, blocks: u32) -> Self {
        Self {
            limits,
            scheduler: Scheduler::new(limits, BlockPool::new(blocks, BLOCK)),
            plan: Plan::default(),
            seqs: BTreeMap::new(),
            ended: Vec::new(),
            content: HashMap::new(),
            step: 0,
            most_preempted: 0,
            prefills: Vec::new(),
            accept: 0,
        }
    }

    /// A sequence whose prompt is fetched: it runs without a prefill step.
    fn add_stream(&mut self, id: u64, output: usize) {
        assert!(self.add_with(id, ask(2, output), true));
    }

    fn add(&mut self, id: u64, ask: Ask) -> bool {
        self.add_with(id, ask, false)
    }

    fn add_with(&mut self, id: u64, ask: Ask, remote: bool) -> bool {
        let max_len = ask.prompt + ask.output;
        let keys: Vec<_> = (0..max_len / BLOCK)
            .map(|at| match at < ask.common {
                true => key(&[1, ask.family.into(), at as u64]),
                false => key(&[2, id, at as u64]),
            })
            .collect();
        let given = ask.prompt / BLOCK;
        let new = NewSeq {
            prompt_len: ask.prompt,
            max_len,
            remote,
            keys: keys[..given].to_vec(),
            caches: true,
            score_bytes: if ask.scored { ask.prompt } else { 0 },
            leader: None,
        };
        let taken = self.scheduler.add(RequestId(id), new);
        if taken {
            let seq = Seq {
                ask,
                drawn: 0,
                keys,
                given,
                submitted: self.step,
                first_work: None,
                prompt_done: None,
                last_token: self.step,
                preempted: 0,
            };
            self.seqs.insert(id, seq);
        }
        taken
    }

    fn step(&mut self) {
        let can = self.scheduler.can_step();
        let mut plan = std::mem::take(&mut self.plan);
        self.scheduler.schedule(&mut plan);
        let planned = !(plan.works.is_empty() && plan.fetches.is_empty());
        assert_eq!(can, planned, "can_step keeps its word");
        self.step += 1;
        self.check(&plan);
        for id in &plan.preempted {
            let seq = self.seqs.get_mut(&id.0).unwrap();
            seq.preempted += 1;
            self.most_preempted = self.most_preempted.max(seq.preempted);
        }
        let mut written = HashSet::new();
        for work in &plan.works {
            let blocks = self.scheduler.blocks(work.id).to_vec();
            let seq = self.seqs.get_mut(&work.id.0).unwrap();
            // Everything before the work is what it should be, whoever computed it.
            for (at, block) in blocks.iter().enumerate().take(work.start / BLOCK) {
                assert_eq!(
                    self.content.get(block),
                    Some(&seq.keys[at]),
                    "block {at} of sequence {}",
                    work.id.0
                );
            }
            assert!(blocks.len() * BLOCK >= work.start + work.len);
            for &block in &blocks[work.start / BLOCK..(work.start + work.len).div_ceil(BLOCK)] {
                assert!(written.insert(block), "two sequences write block {block}");
                self.content.remove(&block);
            }
            let known = seq.ask.prompt + seq.drawn;
            let mut new = 0;
            if work.last {
                assert_eq!(work.start + work.len - work.drafts, known);
                seq.prompt_done.get_or_insert(self.step);
                seq.last_token = self.step;
                new = 1 + work.drafts.min(self.accept);
                new = new.min(seq.ask.output - seq.drawn);
                seq.drawn += new;
            }
            seq.first_work.get_or_insert(self.step);
            let settled = match work.last {
                true => known + new - 1,
                false => work.start + work.len,
            };
            for (at, &block) in blocks.iter().enumerate().take(settled / BLOCK) {
                self.content.insert(block, seq.keys[at]);
            }
            let end = seq.drawn == seq.ask.output;
            self.scheduler.append(work.id, new);
            let known = seq.ask.prompt + seq.drawn;
            while (seq.given + 1) * BLOCK <= known {
                self.scheduler.push_key(work.id, seq.keys[seq.given]);
                seq.given += 1;
            }
            let left = (seq.ask.output - seq.drawn).saturating_sub(1);
            let drafts = if work.last {
                self.limits.max_drafts.min(left)
            } else {
                0
            };
            self.scheduler.propose(work.id, drafts);
            self.scheduler.settle(work.id, settled);
            if end {
                self.scheduler.finish(work.id, false);
                self.ended.push(work.id.0);
            }
        }
        for fetch in &plan.fetches {
            self.scheduler.fetched(fetch.id, true);
        }
        self.scheduler.audit().unwrap();
        self.plan = plan;
    }

    fn check(&mut self, plan: &Plan) {
        let tokens: usize = plan.works.iter().map(|work| work.len).sum();
        assert!(tokens <= self.limits.max_num_batched_tokens);
        let ids: HashSet<_> = plan.works.iter().map(|work| work.id).collect();
        assert_eq!(ids.len(), plan.works.len(), "each sequence at most once");
        assert!(self.scheduler.running() <= self.limits.max_num_seqs);
        let is_prefill =
            |work: &twinfer_engine::scheduler::Work| work.len - work.drafts > 1 || !work.last;
        // Streams that ran before this step, not those that begin or return with it.
        let returns = |id| plan.hits.iter().any(|hit| hit.id == id);
        let generates = plan
            .works
            .iter()
            .any(|work| !is_prefill(work) && self.seqs[&work.id.0].drawn > 0 && !returns(work.id));
        if plan.works.iter().any(is_prefill) {
            if let Some(&before) = self.prefills.last().filter(|_| generates) {
                let gap = (self.step - before) as usize;
                assert!(gap >= self.limits.prefill_any_interval, "{gap} steps apart");
            }
            self.prefills.push(self.step);
        }
        let scored = plan.works.iter().filter(|work| {
            let seq = &self.seqs[&work.id.0];
            seq.ask.scored && seq.prompt_done.is_none()
        });
        let scored: usize = scored.map(|work| work.len).sum();
        assert!(scored <= self.limits.max_scored_tokens);
        // Scores that are being made, a byte each here.
        let holds = |(id, seq): &(&u64, &Seq)| {
            let placed = !self.scheduler.blocks(RequestId(**id)).is_empty();
            seq.ask.scored && seq.prompt_done.is_none() && placed
        };
        let held: Vec<usize> = self
            .seqs
            .iter()
            .filter(holds)
            .map(|(_, seq)| seq.ask.prompt)
            .collect();
        assert!(held.len() < 2 || held.iter().sum::<usize>() <= self.limits.max_score_bytes);
    }

    fn run(&mut self) {
        let mut steps = 0;
        while self.scheduler.can_step() {
            self.step();
            steps += 1;
            assert!(steps < 200_000, "no end");
        }
        assert!(self.scheduler.is_idle(), "somebody waits for ever");
        assert_eq!(self.ended.len(), self.seqs.len());
        assert_eq!(self.scheduler.pool().counts().used, 0);
    }
}

fn ask(prompt: usize, output: usize) -> Ask {
    Ask {
        prompt,
        output,
        common: 0,
        family: 0,
        scored: false,
    }
}

/// C4.10: the bound on preemptions, where a plain rule would preempt without end.
#[test]
fn nobody_is_preempted_more_often_than_promised() {
    for spare in 0..12 {
        let mut world = World::new(limits(), 150 + spare);
        for id in 0..8 {
            assert!(world.add(id, ask(20 + 13 * id as usize, 480 - 13 * id as usize)));
        }
        world.run();
        assert!(world.scheduler.preemptions() > 0);
        assert!(
            world.most_preempted <= SURE_AFTER,
            "{}",
            world.most_preempted
        );
        assert_eq!(world.ended.iter().position(|&id| id == 0), Some(0));
    }
}

/// A prompt is through in the promised number of steps, and no stream stands longer than promised,
/// however many streams there are and however small the budget is.
#[test]
fn the_oldest_prompt_goes_on_beside_any_number_of_streams() {
    for (streams, budget, interval) in [
        (3, 4, 1),
        (8, 4, 1),
        (15, 1, 1),
        (15, 3, 4),
        (8, 32, 7),
        (2, 8, 64),
        (15, 16, 2),
    ] {
        let limits = StepLimits {
            max_num_batched_tokens: budget,
            prefill_any_interval: interval,
            ..limits()
        };
        let mut world = World::new(limits, 1 << 16);
        let n = 200;
        assert!(world.add(0, ask(n, 1)));
        for id in 1..=streams {
            world.add_stream(id, 10_000);
        }
        world.step();
        let turns = (limits.max_num_seqs + 1).div_ceil(budget);
        let mut steps = 0;
        while world.seqs[&0].prompt_done.is_none() {
            world.step();
            steps += 1;
            for id in 1..=streams {
                let stood = world.step - world.seqs[&id].last_token.max(2);
                assert!(
                    stood as usize <= turns,
                    "stream {id} of {streams}, budget {budget}: {stood} steps"
                );
            }
        }
        assert!(
            steps <= interval * (1 + turns * n),
            "{streams} streams, budget {budget}, interval {interval}: {steps} steps"
        );
        if let Some(share) = budget
            .checked_sub(limits.max_num_seqs)
            .filter(|&left| left > 0)
        {
            let chunks = n.div_ceil(share.div_ceil(2));
            assert!(
                steps <= interval * (chunks + 1),
                "{steps} steps for {chunks} chunks"
            );
        }
    }
}

#[test]
fn the_first_come_is_served_first() {
    let mut world = World::new(limits(), 40);
    for id in 0..20 {
        assert!(world.add(id, ask(30, 10)));
    }
    world.run();
    let starts: Vec<_> = world
        .seqs
        .values()
        .map(|seq| seq.first_work.unwrap())
        .collect();
    assert!(starts.is_sorted(), "{starts:?}");
    assert!(world.ended.is_sorted(), "{:?}", world.ended);
}

fn asks() -> impl Strategy<Value = Vec<(Ask, usize)>> {
    let one = (
        1usize..40,
        1usize..60,
        0usize..8,
        0u8..3,
        prop::bool::weighted(0.3),
    );
    let one = one.prop_map(|(prompt, output, common, family, scored)| Ask {
        prompt,
        output,
        common,
        family,
        scored,
    });
    prop::collection::vec((one, 0usize..12), 1..24)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    /// Whatever comes: books balance, nobody is handed a block of other content, nobody overtakes, nobody
    /// waits longer than promised, and all end.
    #[test]
    fn every_promise_holds_under_random_load(
        asks in asks(),
        blocks in 25u32..80,
        max_num_seqs in 1usize..10,
        budget in 1usize..40,
        interval in 1usize..6,
        max_drafts in 0usize..6,
        accept in 0usize..6,
        score_bytes in 1usize..100,
        aborts in prop::collection::vec(0usize..24, 0..4),
    ) {
        let limits = StepLimits {
            max_num_seqs,
            max_num_batched_tokens: budget,
            max_scored_tokens: 1 + budget / 3,
            max_score_bytes: score_bytes,
            prefill_any_interval: interval,
            max_drafts,
        };
        let mut world = World::new(limits, blocks);
        world.accept = accept;
        for (id, (ask, steps)) in asks.iter().enumerate() {
            let fits = ask.prompt + ask.output <= blocks as usize * BLOCK;
            prop_assert_eq!(world.add(id as u64, *ask), fits);
            for _ in 0..*steps {
                if world.scheduler.can_step() {
                    world.step();
                }
            }
            if let Some(&victim) = aborts.get(id % 5).filter(|victim| **victim <= id) {
                let victim = victim as u64;
                if world.scheduler.abort(RequestId(victim)) == Aborted::Freed {
                    world.seqs.remove(&victim);
                }
            }
        }
        world.run();
        prop_assert!(world.most_preempted <= SURE_AFTER);
        // Nobody begins before somebody who came earlier.
        let starts: Vec<_> = world.seqs.values().map(|seq| seq.first_work.unwrap()).collect();
        prop_assert!(starts.is_sorted(), "{:?}", starts);
        // A sequence is through when all before it are, and then its own tokens, each in its turn.
        let turns = (max_num_seqs + 1).div_ceil(budget) + 1;
        let mut bound = 0;
        for seq in world.seqs.values() {
            let own = (seq.ask.prompt + seq.ask.output) * interval * turns * (1 + SURE_AFTER as usize);
            bound = bound.max(seq.submitted as usize) + own;
            prop_assert!(seq.last_token as usize <= bound);
        }
    }
}
