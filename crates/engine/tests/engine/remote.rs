//! KV that comes from a prefill instance or is kept for a decode instance, and requests that go away.

use crate::common::*;
use twinfer_engine::{
    EngineConfig, Event, FinishReason, KvOutcome, KvSource, PromptSources, Request, RequestId,
};
use twinfer_protocol::{ApiError, ErrorKind};

fn remote(id: u64, len: usize, max_tokens: u32) -> Request {
    Request {
        kv: KvSource::Remote,
        ..request(id, prompt(id, len), sampled(id, max_tokens))
    }
}

fn held(id: u64, len: usize, max_tokens: u32) -> Request {
    Request {
        hold_kv: true,
        ..request(id, prompt(id, len), sampled(id, max_tokens))
    }
}

fn sources(bench: &Bench, id: u64) -> PromptSources {
    bench.got[&id].finish.as_ref().unwrap().sources
}

#[test]
fn with_remote_kv_only_the_last_prompt_token_is_computed_and_the_output_is_the_same() {
    for len in [2, 4, 5, 8, 9, 33] {
        let mut bench = bench(roomy(), 64);
        let asked = remote(1, len, 12);
        bench.engine.submit(asked.clone()).unwrap();
        bench.step();
        assert_eq!(bench.fetches[&1].1, 0..len as u32 - 1);
        assert!(!bench.engine.has_work());
        bench.load(1, &asked.prompt);
        bench.run();
        bench.got[&1].assert_same_output(&alone(&asked), &format!("prompt of {len}"));
        let n = len as u32;
        assert_eq!(
            sources(&bench, 1),
            PromptSources {
                computed: 1,
                remote: n - 1,
                cached: 0
            }
        );
        let totals = bench.engine.stats().prompt_tokens;
        assert_eq!((totals.computed, totals.remote), (1, u64::from(n) - 1));
        bench.assert_idle();
    }
}

/// The scripted model sees what stands in the blocks: this test shows that it would tell wrong KV.
#[test]
fn the_tests_would_see_foreign_kv() {
    let mut bench = bench(roomy(), 64);
    let asked = remote(1, 20, 12);
    bench.engine.submit(asked.clone()).unwrap();
    bench.step();
    bench.load(1, &prompt(2, 20));
    bench.run();
    assert_ne!(bench.got[&1].tokens, alone(&asked).tokens);
}

#[test]
fn a_prompt_of_one_token_has_nothing_to_fetch() {
    let mut bench = bench(roomy(), 64);
    bench.engine.submit(remote(1, 1, 5)).unwrap();
    bench.run();
    assert!(bench.fetches.is_empty());
    assert_eq!(
        sources(&bench, 1),
        PromptSources {
            computed: 1,
            remote: 0,
            cached: 0
        }
    );
    bench.assert_idle();
}

#[test]
fn requests_that_wait_for_kv_take_no_part_in_steps_and_hold_up_nobody() {
    let mut bench = bench(roomy(), 128);
    for id in 0..4 {
        bench.engine.submit(remote(id, 17, 6)).unwrap();
    }
    bench
        .engine
        .submit(request(9, prompt(9, 30), sampled(9, 20)))
        .unwrap();
    bench.run();
    assert_eq!(bench.ended, [9]);
    assert_eq!(bench.fetches.len(), 4);
    let load = bench.engine.stats().load;
    assert_eq!((load.running, load.kv_blocks.used), (4, 4 * 5));
    for id in [2, 0, 3, 1] {
        bench.load(id, &prompt(id, 17));
        bench.run();
        bench.got[&id].assert_same_output(&alone(&remote(id, 17, 6)), "after waiting");
    }
    bench.assert_idle();
}

#[test]
fn a_fetch_begins_even_if_streams_take_the_whole_budget() {
    let config = EngineConfig {
        max_num_batched_tokens: 1,
        ..roomy()
    };
    let mut bench = bench(config, 64);
    bench
        .engine
        .submit(request(1, prompt(1, 1), sampled(1, 30)))
        .unwrap();
    bench.step();
    bench.engine.submit(remote(2, 9, 4)).unwrap();
    bench.step();
    assert!(bench.fetches.contains_key(&2));
}

#[test]
fn a_fetched_stream_goes_on_during_the_prefill_of_an_older_request() {
    let config = EngineConfig {
        max_num_batched_tokens: 4,
        ..roomy()
    };
    let mut bench = bench(config, 128);
    bench
        .engine
        .submit(request(1, prompt(1, 200), sampled(1, 2)))
        .unwrap();
    bench.engine.submit(remote(2, 9, 30)).unwrap();
    bench.step();
    bench.load(2, &prompt(2, 9));
    for _ in 0..30 {
        bench.step();
    }
    assert_eq!(bench.ended, [2]);
    bench.run();
    assert_eq!(bench.ended, [2, 1]);
    bench.assert_idle();
}

/// Only fetched sequences can outnumber the budget: others are admitted while some of it is left.
#[test]
fn more_streams_than_budget_take_turns() {
    let config = EngineConfig {
        max_num_batched_tokens: 4,
        ..roomy()
    };
    let mut bench = bench(config, 256);
    for id in 0..6 {
        bench.engine.submit(remote(id, 9, 40)).unwrap();
    }
    bench.step();
    for id in 0..6 {
        bench.load(id, &prompt(id, 9));
    }
    for _ in 0..30 {
        bench.step();
    }
    let lens: Vec<_> = bench.got.values().map(|got| got.tokens.len()).collect();
    assert_eq!(lens, [20; 6]);
    bench.run();
    assert!(bench.got.values().all(|got| got.tokens.len() == 40));
    bench.assert_idle();
}

#[test]
fn a_failed_fetch_ends_the_request_with_its_error_and_frees_its_blocks() {
    let mut bench = bench(roomy(), 64);
    bench.engine.submit(remote(1, 20, 5)).unwrap();
    bench.step();
    let error = ApiError::new(ErrorKind::KvCorrupt, "unit 3 of block 2 is damaged");
    bench
        .engine
        .kv_loaded(RequestId(1), KvOutcome::Failed(error.clone()));
    assert!(bench.engine.has_work());
    bench.run();
    let got = &bench.got[&1];
    assert!(got.tokens.is_empty() && got.text.is_empty());
    assert_eq!(
        got.finish.as_ref().unwrap().reason,
        FinishReason::Error(error)
    );
    bench.assert_idle();
}

#[test]
fn recompute_gives_the_same_output_with_everything_computed_here() {
    let mut bench = bench(roomy(), 64);
    let asked = remote(1, 21, 8);
    bench.engine.submit(asked.clone()).unwrap();
    bench.step();
    bench.engine.kv_loaded(RequestId(1), KvOutcome::Recompute);
    bench.run();
    bench.got[&1].assert_same_output(&alone(&asked), "recomputed");
    assert_eq!(
        sources(&bench, 1),
        PromptSources {
            computed: 21,
            remote: 0,
            cached: 0
        }
    );
    bench.assert_idle();
}

#[test]
fn an_abort_during_a_fetch_frees_the_blocks_only_when_the_fetch_has_answered() {
    let answers = [
        KvOutcome::Loaded,
        KvOutcome::Recompute,
        KvOutcome::Failed(ApiError::new(ErrorKind::Internal, "x")),
    ];
    for outcome in answers {
        let mut bench = bench(roomy(), 64);
        bench.engine.submit(remote(1, 20, 5)).unwrap();
        bench.step();
        bench.engine.abort(RequestId(1));
        bench.engine.abort(RequestId(1));
        bench.run();
        assert_eq!(bench.cancels, [1]);
        assert_eq!(
            bench.got[&1].finish.as_ref().unwrap().reason,
            FinishReason::Abort
        );
        let load = bench.engine.stats().load;
        assert_eq!(
            (load.running, load.kv_blocks.used),
            (0, 5),
            "the fetch still writes"
        );
        assert!(
            bench
                .engine
                .submit(request(1, prompt(1, 3), sampled(1, 1)))
                .is_err(),
            "id is in use"
        );
        bench.engine.kv_loaded(RequestId(1), outcome);
        bench.run();
        bench.assert_idle();
    }
}

#[test]
fn an_answer_that_overtakes_the_abort_needs_no_cancellation() {
    let mut bench = bench(roomy(), 64);
    bench.engine.submit(remote(1, 20, 5)).unwrap();
    bench.step();
    bench.engine.abort(RequestId(1));
    bench.load(1, &prompt(1, 20));
    bench.run();
    assert!(bench.cancels.is_empty());
    assert_eq!(
        bench.got[&1].finish.as_ref().unwrap().reason,
        FinishReason::Abort
    );
    assert!(bench.got[&1].tokens.is_empty());
    bench.assert_idle();
}

#[test]
fn answers_that_nobody_waits_for_are_ignored() {
    let mut bench = bench(roomy(), 64);
    let asked = remote(1, 20, 5);
    bench.engine.kv_loaded(RequestId(1), KvOutcome::Loaded);
    bench.engine.submit(asked.clone()).unwrap();
    bench.engine.kv_loaded(RequestId(1), KvOutcome::Loaded);
    bench.step();
    bench.load(1, &asked.prompt);
    bench.step();
    bench.engine.kv_loaded(RequestId(1), KvOutcome::Recompute);
    bench.engine.kv_loaded(
        RequestId(1),
        KvOutcome::Failed(ApiError::new(ErrorKind::Internal, "late")),
    );
    bench.run();
    bench.got[&1].assert_same_output(&alone(&asked), "with stray answers");
    bench.engine.kv_loaded(RequestId(1), KvOutcome::Loaded);
    bench.assert_idle();
}

#[test]
fn a_request_whose_remote_kv_was_preempted_is_computed_here() {
    let mut bench = bench(roomy(), 20);
    let (first, second) = (request(1, prompt(1, 8), sampled(1, 60)), remote(2, 21, 40));
    bench.engine.submit(first.clone()).unwrap();
    bench.engine.submit(second.clone()).unwrap();
    bench.step();
    bench.load(2, &second.prompt);
    bench.run();
    assert!(bench.engine.stats().preemptions > 0);
    bench.got[&1].assert_same_output(&alone(&first), "first");
    bench.got[&2].assert_same_output(&alone(&second), "second");
    assert_eq!(
        sources(&bench, 2),
        PromptSources {
            computed: 1,
            remote: 20,
            cached: 0
        }
    );
    bench.assert_idle();
}

#[test]
fn held_blocks_cover_the_prompt_and_stay_until_released_once() {
    let mut bench = bench(roomy(), 64);
    bench.engine.submit(held(1, 10, 7)).unwrap();
    bench.run();
    let kv = bench.got[&1].finish.clone().unwrap().held.unwrap();
    assert_eq!((kv.blocks.len(), kv.tokens), (3, 10));
    let counts = bench.engine.stats().load.kv_blocks;
    assert_eq!((counts.used, counts.held), (0, 3));
    bench.engine.abort(RequestId(1));
    bench.run();
    assert_eq!(
        bench.engine.stats().load.kv_blocks.held,
        3,
        "a reader may be at them: abort comes too late"
    );
    assert!(bench.engine.release_held(RequestId(1)));
    assert!(!bench.engine.release_held(RequestId(1)));
    bench.assert_idle();
}

/// What decode reads from the held blocks gives the output of a colocated run.
#[test]
fn held_blocks_contain_the_prompts_kv() {
    let mut prefill = bench(roomy(), 64);
    let mut decode = bench(roomy(), 64);
    let whole = remote(1, 19, 15);
    prefill.engine.submit(held(1, 19, 1)).unwrap();
    prefill.run();
    let kv = prefill.got[&1].finish.clone().unwrap().held.unwrap();
    // Others run while the blocks are held.
    prefill
        .engine
        .submit(request(2, prompt(2, 40), sampled(2, 30)))
        .unwrap();
    prefill.run();
    decode.engine.submit(whole.clone()).unwrap();
    decode.step();
    let (blocks, positions) = decode.fetches.remove(&1).unwrap();
    let geometry = decode.engine.geometry();
    let row = geometry.width * geometry.value_bytes;
    for (index, (&to, &from)) in blocks.iter().zip(&kv.blocks).enumerate() {
        let rows = (positions.end as usize - index * BLOCK).min(BLOCK);
        let from = prefill.engine.arena().read(from).unwrap();
        let mut to = decode.engine.arena().write(to).unwrap();
        for layer in 0..geometry.layers {
            to.unit_mut(layer).unwrap()[..rows * row]
                .copy_from_slice(&from.unit(layer).unwrap()[..rows * row]);
        }
    }
    decode.engine.kv_loaded(RequestId(1), KvOutcome::Loaded);
    decode.run();
    decode.got[&1].assert_same_output(&alone(&whole), "handed over");
    assert_eq!(prefill.got[&1].tokens, decode.got[&1].tokens[..1]);
    assert!(prefill.engine.release_held(RequestId(1)));
    prefill.assert_idle();
    decode.assert_idle();
}

#[test]
fn an_aborted_or_failed_request_holds_nothing() {
    let mut bench = bench(roomy(), 64);
    bench.engine.submit(held(1, 10, 50)).unwrap();
    bench.step();
    bench.engine.abort(RequestId(1));
    bench.run();
    assert_eq!(bench.got[&1].finish.as_ref().unwrap().held, None);
    assert!(!bench.engine.release_held(RequestId(1)));
    bench.assert_idle();
}

#[test]
fn requests_wait_without_spinning_for_held_blocks_and_go_on_when_they_are_free() {
    let mut bench = bench(roomy(), 10);
    bench.engine.submit(held(1, 30, 1)).unwrap();
    bench.run();
    bench
        .engine
        .submit(request(2, prompt(2, 20), sampled(2, 4)))
        .unwrap();
    bench.run();
    assert!(!bench.got.contains_key(&2));
    assert!(!bench.engine.has_work());
    assert_eq!(bench.engine.stats().load.waiting, 1);
    bench.engine.release_held(RequestId(1));
    bench.run();
    assert_eq!(bench.got[&2].tokens.len(), 4);
    bench.assert_idle();
}

/// A running request that needs one more block while the others are held keeps its place and its KV.
#[test]
fn a_running_request_waits_in_place_for_held_blocks() {
    let mut bench = bench(roomy(), 10);
    bench.engine.submit(held(1, 28, 1)).unwrap();
    bench.run();
    let asked = request(2, prompt(2, 6), sampled(2, 20));
    bench.engine.submit(asked.clone()).unwrap();
    bench.run();
    assert!(!bench.engine.has_work());
    assert_eq!(
        bench.got[&2].tokens.len(),
        7,
        "12 positions are filled, the last token has none"
    );
    bench.engine.release_held(RequestId(1));
    bench.run();
    assert_eq!(bench.engine.stats().preemptions, 0);
    bench.got[&2].assert_same_output(&alone(&asked), "after the wait");
    bench.assert_idle();
}

#[test]
fn an_abort_works_in_every_state_and_the_others_do_not_notice() {
    let config = EngineConfig {
        max_num_seqs: 3,
        ..roomy()
    };
    let mut bench = bench(config, 64);
    bench
        .engine
        .submit(request(1, prompt(1, 9), sampled(1, 40)))
        .unwrap();
    bench
        .engine
        .submit(request(2, prompt(2, 9), sampled(2, 40)))
        .unwrap();
    bench.engine.submit(remote(3, 9, 40)).unwrap();
    bench
        .engine
        .submit(request(4, prompt(4, 9), sampled(4, 40)))
        .unwrap();
    for _ in 0..5 {
        bench.step();
    }
    let load = bench.engine.stats().load;
    assert_eq!((load.running, load.waiting), (3, 1));
    for id in [2, 3, 4, 77] {
        bench.engine.abort(RequestId(id));
    }
    bench.step();
    for (id, tokens) in [(2, 5), (3, 0), (4, 0)] {
        let finish = bench.got[&id].finish.as_ref().unwrap();
        assert_eq!(
            (&finish.reason, finish.output_tokens),
            (&FinishReason::Abort, tokens),
            "request {id}"
        );
    }
    bench.engine.kv_loaded(RequestId(3), KvOutcome::Recompute);
    bench.run();
    bench.got[&1].assert_same_output(
        &alone(&request(1, prompt(1, 9), sampled(1, 40))),
        "the one that stayed",
    );
    assert_eq!(bench.ended.len(), 4);
    bench.assert_idle();
}

#[test]
fn an_abort_is_reported_also_when_there_is_nothing_to_compute() {
    let mut bench = bench(roomy(), 64);
    bench
        .engine
        .submit(request(1, prompt(1, 9), sampled(1, 40)))
        .unwrap();
    bench.engine.abort(RequestId(1));
    let events = bench.engine.step().unwrap();
    assert!(
        matches!(
            &events[..],
            [Event::Output {
                finish: Some(_),
                ..
            }]
        ),
        "{events:?}"
    );
    assert_eq!(bench.engine.stats().steps, 0);
    bench.assert_idle();
}
