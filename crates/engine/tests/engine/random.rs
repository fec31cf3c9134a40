//! Random schedules: whatever requests come and go, in whatever order fetches answer, no block is lost,
//! every request ends exactly once, and those that end well have the output of a run alone.

use crate::common::*;
use proptest::prelude::*;
use std::collections::{BTreeMap, BTreeSet};
use twinfer_engine::{EngineConfig, FinishReason, KvOutcome, KvSource, Request, RequestId};
use twinfer_protocol::{ApiError, ErrorKind};

#[derive(Clone, Copy, Debug)]
enum Op {
    Submit {
        prompt_len: usize,
        max_tokens: u32,
        remote: bool,
        hold: bool,
    },
    Steps(usize),
    Abort(usize),
    /// Answer the n-th open fetch.
    Answer(usize, Answer),
    Release(usize),
}

#[derive(Clone, Copy, Debug)]
enum Answer {
    Loaded,
    Recompute,
    Failed,
}

fn ops() -> impl Strategy<Value = Vec<Op>> {
    let answer = prop_oneof![4 => Just(Answer::Loaded), 1 => Just(Answer::Recompute), 1 => Just(Answer::Failed)];
    let op = prop_oneof![
        4 => (1usize..30, 1u32..20, any::<bool>(), prop::bool::weighted(0.3))
            .prop_map(|(prompt_len, max_tokens, remote, hold)| Op::Submit { prompt_len, max_tokens, remote, hold }),
        5 => (1usize..6).prop_map(Op::Steps),
        1 => any::<usize>().prop_map(Op::Abort),
        3 => (any::<usize>(), answer).prop_map(|(which, answer)| Op::Answer(which, answer)),
        1 => any::<usize>().prop_map(Op::Release),
    ];
    prop::collection::vec(op, 1..60)
}

struct World {
    bench: Bench,
    /// What the submissions to come ask for, in order.
    planned: Vec<Request>,
    next: usize,
    submitted: BTreeMap<u64, Request>,
    aborted: BTreeSet<u64>,
    failed: BTreeSet<u64>,
    /// Fetches whose cancellation has been answered.
    cancels_answered: usize,
    steps_without_event: usize,
}

fn nth<T: Copy>(mut of: impl ExactSizeIterator<Item = T>, which: usize) -> Option<T> {
    let len = of.len();
    (len > 0).then(|| of.nth(which % len)).flatten()
}

impl World {
    fn new(config: EngineConfig, blocks: u32, ops: &[Op], percent: u64) -> Self {
        let mut planned: Vec<Request> = Vec::new();
        for op in ops {
            let Op::Submit {
                prompt_len,
                max_tokens,
                remote,
                hold,
            } = *op
            else {
                continue;
            };
            let id = planned.len() as u64;
            // Of five families, those of each begin alike.
            let asked = request(id, prompt(id % 5, prompt_len), sampled(id, max_tokens));
            let kv = if remote {
                KvSource::Remote
            } else {
                KvSource::Compute
            };
            let cache_salt = (id % 7 == 6).then(|| "salt".into());
            let leader = (id % 3 == 2).then(|| RequestId(id - 1));
            let twin = planned.last().filter(|_| leader.is_some() && !remote);
            let prompt = twin.map_or(asked.prompt.clone(), |twin| twin.prompt.clone());
            planned.push(Request {
                kv,
                hold_kv: hold,
                cache_salt,
                leader,
                prompt,
                ..asked
            });
        }
        Self {
            bench: drafting(config, blocks, &planned, percent),
            planned,
            next: 0,
            submitted: BTreeMap::new(),
            aborted: BTreeSet::new(),
            failed: BTreeSet::new(),
            cancels_answered: 0,
            steps_without_event: 0,
        }
    }

    fn apply(&mut self, op: Op) {
        match op {
            Op::Submit { .. } => {
                let asked = self.planned[self.next].clone();
                self.next += 1;
                let id = asked.id.0;
                let len = asked.prompt.len() + asked.params.max_tokens as usize;
                let fits = len <= self.bench.engine.max_len() as usize;
                match self.bench.engine.submit(asked.clone()) {
                    Ok(()) => {
                        assert!(fits);
                        self.submitted.insert(id, asked);
                    }
                    Err(error) => assert_eq!(
                        error.kind == ErrorKind::ContextLengthExceeded,
                        !fits,
                        "{error}"
                    ),
                }
            }
            Op::Steps(n) => (0..n).for_each(|_| self.step()),
            Op::Abort(which) => {
                if let Some(&id) = nth(self.submitted.keys(), which) {
                    self.bench.engine.abort(RequestId(id));
                    if self
                        .bench
                        .got
                        .get(&id)
                        .is_none_or(|got| got.finish.is_none())
                    {
                        self.aborted.insert(id);
                    }
                }
            }
            Op::Answer(which, answer) => {
                if let Some(&id) = nth(self.bench.fetches.keys(), which) {
                    self.answer(id, answer);
                }
            }
            Op::Release(which) => {
                if let Some(id) = nth(self.held().into_iter(), which) {
                    assert!(self.bench.engine.release_held(RequestId(id)));
                    assert!(!self.bench.engine.release_held(RequestId(id)));
                    self.forget_held(id);
                }
            }
        }
        self.bench.engine.audit().unwrap();
    }

    /// A step does something exactly when the engine says so.
    fn step(&mut self) {
        let promised = self.bench.engine.has_work();
        let before = self.bench.engine.stats().steps;
        let events = self.bench.step();
        let did = events > 0 || self.bench.engine.stats().steps > before;
        assert_eq!(
            promised, did,
            "has_work says {promised}, the step did something: {did}"
        );
        self.steps_without_event = if events > 0 {
            0
        } else {
            self.steps_without_event + 1
        };
        // The longest prompt takes 30 steps at a budget of 1, times those before it in the queue.
        assert!(!promised || self.steps_without_event < 2_000, "no progress");
    }

    fn answer(&mut self, id: u64, answer: Answer) {
        let was_cancelled = self.bench.cancels.contains(&id);
        let gone = self.aborted.contains(&id);
        match answer {
            Answer::Loaded => self.bench.load(id, &self.submitted[&id].prompt),
            Answer::Recompute => self.load_wrong(id, KvOutcome::Recompute),
            Answer::Failed => {
                let error = ApiError::new(ErrorKind::KvTransfer, "broken");
                self.load_wrong(id, KvOutcome::Failed(error));
                if !gone {
                    self.failed.insert(id);
                }
            }
        }
        self.cancels_answered += usize::from(was_cancelled);
    }

    /// A fetch that left something else in the blocks.
    fn load_wrong(&mut self, id: u64, outcome: KvOutcome) {
        let len = self.submitted[&id].prompt.len();
        self.bench.load_foreign(id, &prompt(99, len), outcome);
    }

    fn held(&self) -> Vec<u64> {
        let holds = |got: &Got| {
            got.finish
                .as_ref()
                .is_some_and(|finish| finish.held.is_some())
        };
        self.bench
            .got
            .iter()
            .filter(|(_, got)| holds(got))
            .map(|(&id, _)| id)
            .collect()
    }

    fn forget_held(&mut self, id: u64) {
        let finish = self
            .bench
            .got
            .get_mut(&id)
            .and_then(|got| got.finish.as_mut());
        finish.unwrap().held = None;
    }

    /// Answers every fetch and releases what is held until nothing moves any more.
    fn finish(&mut self) {
        for _ in 0..10_000 {
            while self.bench.engine.has_work() {
                self.step();
            }
            if let Some(&id) = self.bench.fetches.keys().next() {
                self.answer(id, Answer::Loaded);
            } else if let Some(&id) = self.held().first() {
                assert!(self.bench.engine.release_held(RequestId(id)));
                self.forget_held(id);
            } else {
                return;
            }
        }
        panic!("the engine does not come to rest");
    }

    fn assert_outcomes(&self) {
        self.bench.assert_idle();
        assert_eq!(self.cancels_answered, self.bench.cancels.len());
        assert_eq!(
            self.bench.ended.len(),
            self.submitted.len(),
            "each request ends exactly once"
        );
        let mut prompt_tokens = 0;
        let mut output_tokens = 0;
        for (id, asked) in &self.submitted {
            let got = &self.bench.got[id];
            let finish = got.finish.as_ref().unwrap();
            let alone = alone(asked);
            let sources = finish.sources;
            let sources = sources.computed + sources.remote + sources.cached;
            prompt_tokens += u64::from(sources);
            output_tokens += got.tokens.len() as u64;
            match &finish.reason {
                FinishReason::Abort => {
                    assert!(self.aborted.contains(id));
                    assert_eq!(
                        got.tokens,
                        alone.tokens[..got.tokens.len()],
                        "what came before the abort"
                    );
                }
                FinishReason::Error(_) => {
                    assert!(self.failed.contains(id));
                    assert!(got.tokens.is_empty());
                }
                _ => {
                    assert!(!self.aborted.contains(id) && !self.failed.contains(id));
                    got.assert_same_output(&alone, &format!("request {id}"));
                    assert_eq!(sources as usize, asked.prompt.len());
                }
            }
        }
        let stats = self.bench.engine.stats();
        assert_eq!(
            stats.prompt_tokens.computed + stats.prompt_tokens.remote + stats.prompt_tokens.cached,
            prompt_tokens
        );
        assert_eq!(stats.output_tokens, output_tokens);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn nothing_is_lost_and_every_request_ends_once_with_its_own_output(
        ops in ops(),
        blocks in 8u32..40,
        max_num_seqs in 1u32..8,
        budget in 1u32..24,
        drafts in 0u32..6,
        interval in 1u32..4,
        cache in prop::bool::weighted(0.8),
        percent in 0u64..101,
    ) {
        let config = EngineConfig {
            max_num_seqs,
            max_num_batched_tokens: budget,
            num_speculative_tokens: drafts,
            prefill_any_interval: interval,
            enable_prefix_caching: cache,
            ..roomy()
        };
        let mut world = World::new(config, blocks, &ops, percent);
        for op in ops {
            world.apply(op);
        }
        world.finish();
        world.assert_outcomes();
    }
}
