//! The prefix cache: what is found in it saves work and changes no output.

use crate::common::*;
use std::sync::Arc;
use twinfer_engine::{
    EngineConfig, KvOutcome, KvSource, PromptSources, Request, RequestId, SamplingParams,
};
use twinfer_protocol::TokenId;

fn sources(bench: &Bench, id: u64) -> PromptSources {
    bench.got[&id].finish.as_ref().unwrap().sources
}

fn cached(bench: &Bench, id: u64) -> u32 {
    let sources = sources(bench, id);
    assert_eq!(sources.remote, 0);
    sources.cached
}

fn run_one(bench: &mut Bench, asked: &Request) -> u32 {
    bench.engine.submit(asked.clone()).unwrap();
    bench.run();
    let id = asked.id.0;
    bench.got[&id].assert_same_output(&alone(asked), &format!("request {id}"));
    let sources = sources(bench, id);
    assert_eq!(
        (sources.computed + sources.cached) as usize,
        asked.prompt.len()
    );
    sources.cached
}

fn salted(asked: &Request, salt: &str) -> Request {
    Request {
        cache_salt: Some(Arc::from(salt)),
        ..asked.clone()
    }
}

/// C4.8: the same prompt twice, of every length around block edges.
#[test]
fn a_prompt_that_was_computed_is_found_but_for_its_last_token() {
    for len in 1..=4 * BLOCK + 1 {
        let mut bench = bench(roomy(), 64);
        let first = request(1, prompt(3, len), sampled(1, 6));
        let again = request(2, prompt(3, len), sampled(2, 6));
        assert_eq!(run_one(&mut bench, &first), 0);
        let full = (len - 1) / BLOCK * BLOCK;
        assert_eq!(
            run_one(&mut bench, &again) as usize,
            full,
            "prompt of {len}"
        );
        let stats = bench.engine.stats();
        assert_eq!(
            (stats.cache_queries as usize, stats.cache_hits as usize),
            (2 * len, full)
        );
        assert_eq!(stats.prompt_tokens.cached as usize, full);
        assert_eq!(stats.prompt_tokens.computed as usize, 2 * len - full);
        bench.assert_idle();
    }
}

#[test]
fn what_was_generated_is_found_as_part_of_a_longer_prompt() {
    let mut bench = bench(roomy(), 64);
    let first = request(1, prompt(3, 10), sampled(1, 15));
    run_one(&mut bench, &first);
    let mut longer = first.prompt.to_vec();
    longer.extend(bench.got[&1].ids());
    longer.extend([1, 2, 3]);
    // 25 tokens; the last one's KV was never computed.
    let next = request(2, longer.into(), sampled(2, 5));
    assert_eq!(run_one(&mut bench, &next), 24);
}

#[test]
fn a_shared_beginning_is_found_and_the_rest_is_computed() {
    let mut bench = bench(roomy(), 128);
    let common = prompt(3, 30);
    run_one(&mut bench, &request(1, Arc::clone(&common), sampled(1, 3)));
    for (id, same) in [
        (2u64, 0usize),
        (3, 3),
        (4, 4),
        (5, 17),
        (6, 28),
        (7, 29),
        (8, 30),
    ] {
        let mut other = common[..same].to_vec();
        other.extend((0..12).map(|i| (100 + 9 * id as TokenId + i) % 256));
        let found = run_one(&mut bench, &request(id, other.into(), sampled(id, 3)));
        assert_eq!(
            found as usize,
            same / BLOCK * BLOCK,
            "{same} tokens in common"
        );
    }
    bench.assert_idle();
}

#[test]
fn a_prompt_of_another_salt_is_not_found() {
    let mut bench = bench(roomy(), 128);
    let plain = request(1, prompt(3, 21), sampled(1, 3));
    run_one(&mut bench, &plain);
    for (id, salt, found) in [
        (2, "a", 0),
        (3, "b", 0),
        (4, "a", 20),
        (5, "", 0),
        (6, "b", 20),
    ] {
        let asked = salted(&request(id, prompt(3, 21), sampled(1, 3)), salt);
        assert_eq!(run_one(&mut bench, &asked), found, "request {id}");
    }
    let asked = request(7, prompt(3, 21), sampled(1, 3));
    assert_eq!(run_one(&mut bench, &asked), 20);
}

#[test]
fn without_the_cache_nothing_is_found_or_kept() {
    let config = EngineConfig {
        enable_prefix_caching: false,
        ..roomy()
    };
    let mut bench = bench(config, 64);
    for id in 0..3 {
        assert_eq!(
            run_one(&mut bench, &request(id, prompt(3, 21), sampled(id, 3))),
            0
        );
    }
    let stats = bench.engine.stats();
    assert_eq!((stats.cache_queries, stats.load.kv_blocks.cached), (0, 0));
}

/// C4.8: the cache is evicted between.
#[test]
fn a_cached_prompt_makes_room_for_others_and_is_computed_again() {
    let mut bench = bench(roomy(), 12);
    let first = |id| request(id, prompt(3, 21), sampled(id, 3));
    run_one(&mut bench, &first(1));
    assert_eq!(bench.engine.stats().load.kv_blocks.cached, 5);
    // 11 of 12 blocks: all but one of the cached ones go, those of the end first.
    run_one(&mut bench, &request(2, prompt(4, 41), sampled(2, 2)));
    assert_eq!(run_one(&mut bench, &first(3)), 4);
    run_one(&mut bench, &request(4, prompt(5, 45), sampled(4, 2)));
    assert_eq!(run_one(&mut bench, &first(5)), 0);
    bench.assert_idle();
}

/// C4.11: room for one block of cache.
#[test]
fn a_pool_without_room_for_a_cache_works_as_without_one() {
    let mut bench = bench(roomy(), 6);
    for round in 0..50 {
        // All six blocks, then five of them.
        run_one(
            &mut bench,
            &request(2 * round, prompt(round % 3, 20), sampled(round, 4)),
        );
        run_one(
            &mut bench,
            &request(2 * round + 1, prompt(round % 3, 17), sampled(round, 3)),
        );
    }
    bench.assert_idle();
}

/// C4.8: 16 at the same time, in chunks and in one step.
#[test]
fn concurrent_equal_prompts_give_the_same_as_each_alone() {
    for budget in [5, 512] {
        let config = EngineConfig {
            max_num_batched_tokens: budget,
            ..roomy()
        };
        let mut bench = bench(config, 512);
        let all: Vec<_> = (0..16)
            .map(|id| request(id, prompt(3, 40), sampled(id, 12)))
            .collect();
        for asked in &all {
            bench.engine.submit(asked.clone()).unwrap();
        }
        bench.run();
        for asked in &all {
            bench.got[&asked.id.0].assert_same_output(&alone(asked), "one of 16");
        }
        let stats = bench.engine.stats();
        assert_eq!(stats.cache_queries, 16 * 40);
        assert_eq!(
            stats.prompt_tokens.cached + stats.prompt_tokens.computed,
            16 * 40
        );
        bench.assert_idle();
    }
}

#[test]
fn a_preempted_request_takes_its_own_blocks_back_from_the_cache() {
    let run = |enable_prefix_caching| {
        let config = EngineConfig {
            enable_prefix_caching,
            ..roomy()
        };
        let mut bench = bench(config, 30);
        let all: Vec<_> = (0..8)
            .map(|i| request(i, prompt(i, 20), sampled(i, 60)))
            .collect();
        for asked in &all {
            bench.engine.submit(asked.clone()).unwrap();
        }
        bench.run();
        for asked in &all {
            bench.got[&asked.id.0].assert_same_output(&alone(asked), "preempted");
            assert_eq!(
                cached(&bench, asked.id.0),
                0,
                "what was computed counts as computed"
            );
        }
        assert!(bench.engine.stats().preemptions > 0);
        bench.assert_idle();
        bench.engine.stats().steps
    };
    run(true);
    run(false);
}

#[test]
fn kv_that_was_handed_over_is_found_by_the_next_request_once_it_is_verified() {
    let remote = |id| Request {
        kv: KvSource::Remote,
        ..request(id, prompt(3, 21), sampled(id, 4))
    };
    for (outcome, found) in [
        (KvOutcome::Loaded, 20),
        (KvOutcome::Recompute, 20),
        (
            KvOutcome::Failed(twinfer_protocol::ApiError::invalid("kv", "damaged")),
            0,
        ),
    ] {
        let mut bench = bench(roomy(), 64);
        bench.engine.submit(remote(1)).unwrap();
        bench.step();
        // While the fetch runs nobody sees the blocks.
        assert_eq!(
            run_one(&mut bench, &request(2, prompt(3, 12), sampled(2, 1))),
            0
        );
        if outcome == KvOutcome::Loaded {
            bench.load(1, &prompt(3, 21));
        } else {
            // Foreign bytes may be in the blocks by now.
            bench.load_foreign(1, &prompt(77, 21), outcome.clone());
        }
        bench.run();
        let next = request(3, prompt(3, 21), sampled(3, 4));
        let expected = if found == 0 { 12 } else { found };
        assert_eq!(run_one(&mut bench, &next), expected, "{outcome:?}");
    }
}

/// Blocks that a decode instance may be reading are shared, and not written to.
#[test]
fn held_blocks_are_found_and_stay_as_they_are() {
    let mut bench = bench(roomy(), 20);
    let held = Request {
        hold_kv: true,
        ..request(1, prompt(3, 21), sampled(1, 1))
    };
    bench.engine.submit(held).unwrap();
    bench.run();
    let kv = bench.got[&1].finish.clone().unwrap().held.unwrap();
    let bytes = |bench: &Bench| -> Vec<u8> {
        let units = kv
            .blocks
            .iter()
            .map(|&block| bench.engine.arena().read(block).unwrap());
        units
            .flat_map(|guard| guard.unit(0).unwrap().to_vec())
            .collect()
    };
    let before = bytes(&bench);
    let same = request(2, prompt(3, 21), sampled(2, 9));
    assert_eq!(run_one(&mut bench, &same), 20);
    run_one(&mut bench, &request(3, prompt(4, 40), sampled(3, 9)));
    assert_eq!(bytes(&bench), before);
    assert_eq!(bench.engine.stats().load.kv_blocks.held, 6);
    assert!(bench.engine.release_held(RequestId(1)));
    bench.assert_idle();
    let again = request(4, prompt(3, 21), sampled(4, 2));
    assert_eq!(
        run_one(&mut bench, &again),
        20,
        "what was held is cached afterwards"
    );
}

/// A request whose step fails leaves nothing in the cache; nor does one whose logits are no numbers.
#[test]
fn aborted_requests_leave_only_what_was_computed() {
    let config = EngineConfig {
        max_num_batched_tokens: 6,
        ..roomy()
    };
    let mut bench = bench(config, 64);
    bench
        .engine
        .submit(request(1, prompt(3, 41), sampled(1, 4)))
        .unwrap();
    // 12 of 41 tokens.
    bench.step();
    bench.step();
    bench.engine.abort(RequestId(1));
    bench.run();
    let next = request(2, prompt(3, 41), sampled(2, 4));
    assert_eq!(run_one(&mut bench, &next), 12);
    bench.assert_idle();
}

#[test]
fn choices_share_the_prompt_with_and_without_the_cache() {
    for enable_prefix_caching in [true, false] {
        for len in [1, 4, 5, 8, 9, 30] {
            let config = EngineConfig {
                enable_prefix_caching,
                max_num_batched_tokens: 16,
                ..roomy()
            };
            let mut bench = bench(config, 128);
            let choices: Vec<_> = (0..4)
                .map(|choice| {
                    let params = SamplingParams {
                        choice: choice as u32,
                        ..sampled(7, 12)
                    };
                    Request {
                        leader: Some(RequestId(10)),
                        ..request(10 + choice, prompt(3, len), params)
                    }
                })
                .collect();
            for asked in &choices {
                bench.engine.submit(asked.clone()).unwrap();
            }
            let mut most = 0;
            while bench.engine.has_work() {
                bench.step();
                most = most.max(bench.engine.stats().load.kv_blocks.used);
            }
            let shared = (len - 1) / BLOCK;
            let own = (len + 12usize).div_ceil(BLOCK) - shared;
            assert!(
                most as usize <= shared + 4 * own,
                "{most} blocks for a prompt of {len}"
            );
            for (place, asked) in choices.iter().enumerate() {
                let got = &bench.got[&asked.id.0];
                got.assert_same_output(&alone(asked), &format!("choice {place} of {len}"));
                let expected = if place == 0 { 0 } else { shared * BLOCK };
                assert_eq!(cached(&bench, asked.id.0) as usize, expected);
            }
            let mut outputs: Vec<_> = bench.got.values().map(Got::ids).collect();
            outputs.sort();
            outputs.dedup();
            assert_eq!(
                outputs.len(),
                4,
                "choices are drawn with numbers of their own"
            );
            // Others do not profit without the cache.
            let stranger = request(50, prompt(3, len), sampled(1, 3));
            let found = run_one(&mut bench, &stranger) as usize;
            assert_eq!(
                found,
                if enable_prefix_caching {
                    shared * BLOCK
                } else {
                    0
                }
            );
            bench.assert_idle();
        }
    }
}

#[test]
fn choices_go_on_when_the_first_is_gone() {
    for wait in 0..4 {
        let config = EngineConfig {
            max_num_batched_tokens: 6,
            ..roomy()
        };
        let mut bench = bench(config, 128);
        let choices: Vec<_> = (1..4)
            .map(|id| Request {
                leader: Some(RequestId(1)),
                ..request(id, prompt(3, 15), sampled(id, 5))
            })
            .collect();
        for asked in &choices {
            bench.engine.submit(asked.clone()).unwrap();
        }
        for _ in 0..wait {
            bench.step();
        }
        bench.engine.abort(RequestId(1));
        bench.run();
        for asked in &choices[1..] {
            bench.got[&asked.id.0].assert_same_output(&alone(asked), "after the first");
        }
        bench.assert_idle();
    }
}

fn handed_over(id: u64, prompt: Arc<[TokenId]>) -> Request {
    Request {
        kv: KvSource::Remote,
        ..request(id, prompt, sampled(id, 9))
    }
}

/// Of a prompt that is handed over only what is not in the cache is fetched.
#[test]
fn what_is_cached_of_a_prompt_that_is_handed_over_is_not_fetched() {
    for len in 2..=4 * BLOCK + 2 {
        for same in 0..=len {
            let mut bench = bench(roomy(), 64);
            let mut known = prompt(3, len)[..same].to_vec();
            known.push(255);
            run_one(&mut bench, &request(1, known.into(), sampled(1, 1)));
            let asked = handed_over(2, prompt(3, len));
            bench.engine.submit(asked.clone()).unwrap();
            bench.step();
            let found = same.min(len - 1) / BLOCK * BLOCK;
            let what = format!("{same} of {len} tokens are known");
            match bench.fetches.get(&2) {
                Some((_, positions)) => {
                    assert_eq!(*positions, found as u32..len as u32 - 1, "{what}");
                    bench.load(2, &asked.prompt);
                }
                None => assert_eq!(found, len - 1, "{what}"),
            }
            bench.run();
            bench.got[&2].assert_same_output(&alone(&asked), &what);
            let expected = PromptSources {
                computed: 1,
                remote: (len - 1 - found) as u32,
                cached: found as u32,
            };
            assert_eq!(sources(&bench, 2), expected, "{what}");
            let totals = bench.engine.stats().prompt_tokens;
            assert_eq!(
                (totals.remote as usize, totals.cached as usize),
                (len - 1 - found, found)
            );
            bench.assert_idle();
        }
    }
}

/// With the draft layer a block is the same only if the token behind it is.
#[test]
fn drafts_are_made_from_what_was_cached_and_what_was_fetched() {
    let asked = handed_over(2, prompt(3, 4 * BLOCK + 3));
    for same in [BLOCK, BLOCK + 1, 2 * BLOCK, 2 * BLOCK + 1, 4 * BLOCK + 3] {
        let config = EngineConfig {
            num_speculative_tokens: 3,
            ..roomy()
        };
        let mut bench = drafting(config, 64, std::slice::from_ref(&asked), 100);
        let mut known = asked.prompt[..same].to_vec();
        known.push(255);
        run_one(&mut bench, &request(1, known.into(), sampled(1, 1)));
        bench.engine.submit(asked.clone()).unwrap();
        bench.step();
        let found = (same - 1) / BLOCK * BLOCK;
        match bench.fetches.get(&2) {
            Some((_, positions)) => assert_eq!(positions.start as usize, found),
            None => panic!("{same} tokens are known, not all but the last"),
        }
        bench.load(2, &asked.prompt);
        bench.run();
        bench.got[&2].assert_same_output(&alone(&asked), &format!("{same} tokens are known"));
        bench.assert_idle();
    }
}

/// Whatever a fetch leaves in its own blocks, what was cached is kept and used.
#[test]
fn a_fetch_of_the_rest_that_fails_leaves_the_cached_beginning_as_it_is() {
    let broken = twinfer_protocol::ApiError::invalid("kv", "damaged");
    for outcome in [KvOutcome::Recompute, KvOutcome::Failed(broken)] {
        let mut bench = bench(roomy(), 64);
        run_one(&mut bench, &request(1, prompt(3, 9), sampled(1, 1)));
        let asked = handed_over(2, prompt(3, 21));
        bench.engine.submit(asked.clone()).unwrap();
        bench.step();
        assert_eq!(bench.fetches[&2].1, 8..20);
        bench.load_foreign(2, &prompt(77, 21), outcome.clone());
        bench.run();
        if outcome == KvOutcome::Recompute {
            bench.got[&2].assert_same_output(&alone(&asked), "recomputed");
            let expected = PromptSources {
                computed: 13,
                remote: 0,
                cached: 8,
            };
            assert_eq!(sources(&bench, 2), expected);
        }
        let next = request(3, prompt(3, 12), sampled(3, 4));
        assert_eq!(run_one(&mut bench, &next), 8);
        // Gone while it waits for the rest.
        bench.engine.submit(handed_over(4, prompt(3, 30))).unwrap();
        bench.step();
        bench.engine.abort(RequestId(4));
        bench.run();
        bench.load_foreign(4, &prompt(77, 30), KvOutcome::Loaded);
        bench.run();
        let again = request(5, prompt(3, 12), sampled(3, 4));
        assert_eq!(run_one(&mut bench, &again), 8);
        bench.assert_idle();
    }
}

#[test]
fn one_fetch_serves_all_choices() {
    for outcome in [KvOutcome::Loaded, KvOutcome::Recompute] {
        let mut bench = bench(roomy(), 128);
        let choices: Vec<_> = (1..4)
            .map(|id| Request {
                leader: Some(RequestId(1)),
                kv: if id == 1 {
                    KvSource::Remote
                } else {
                    KvSource::Compute
                },
                ..request(id, prompt(3, 15), sampled(id, 5))
            })
            .collect();
        for asked in &choices {
            bench.engine.submit(asked.clone()).unwrap();
        }
        bench.run();
        assert_eq!(bench.fetches.len(), 1);
        assert!(bench.got.is_empty(), "the others wait for it");
        if outcome == KvOutcome::Loaded {
            bench.load(1, &prompt(3, 15));
        } else {
            bench.load_foreign(1, &prompt(77, 15), outcome);
        }
        bench.run();
        for asked in &choices {
            bench.got[&asked.id.0].assert_same_output(&alone(asked), "one fetch");
        }
        assert_eq!((cached(&bench, 2), cached(&bench, 3)), (12, 12));
        bench.assert_idle();
    }
}

/// A fetch may take as long as its deadline; only those that need what it brings wait for it.
#[test]
fn others_pass_choices_that_wait_for_a_fetch() {
    let config = EngineConfig {
        max_num_seqs: 3,
        ..roomy()
    };
    let mut bench = bench(config, 128);
    let choices: Vec<_> = (1..5)
        .map(|id| Request {
            leader: Some(RequestId(1)),
            kv: match id {
                1 => KvSource::Remote,
                _ => KvSource::Compute,
            },
            ..request(id, prompt(3, 15), sampled(id, 5))
        })
        .collect();
    for asked in &choices {
        bench.engine.submit(asked.clone()).unwrap();
    }
    let others: Vec<_> = (20..30)
        .map(|id| request(id, prompt(id, 9), sampled(id, 6)))
        .collect();
    for asked in &others {
        bench.engine.submit(asked.clone()).unwrap();
    }
    bench.run();
    for asked in &others {
        bench.got[&asked.id.0].assert_same_output(&alone(asked), "passed");
    }
    assert_eq!(bench.got.len(), others.len(), "the choices wait");
    assert_eq!(bench.engine.stats().load.waiting, 3);
    // When it has come, they go before those that came after them.
    let late = request(40, prompt(40, 9), sampled(40, 9));
    bench.load(1, &prompt(3, 15));
    bench.engine.submit(late).unwrap();
    bench.run();
    for asked in &choices {
        bench.got[&asked.id.0].assert_same_output(&alone(asked), "after the fetch");
    }
    assert_eq!(bench.ended.last(), Some(&40));
    bench.assert_idle();
}
