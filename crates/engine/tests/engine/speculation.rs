//! Drafts: however many are made and stand, the output is that of a run without.

use crate::common::*;
use proptest::prelude::*;
use std::sync::Arc;
use twinfer_engine::testing::{BYTE_EOS, ScriptedExecutor, ScriptedShape};
use twinfer_engine::{
    Engine, EngineConfig, ExecError, FinishReason, KvOutcome, KvSource, Request, RequestId,
    SamplingParams,
};
use twinfer_protocol::TokenId;

fn config(drafts: u32) -> EngineConfig {
    EngineConfig {
        num_speculative_tokens: drafts,
        ..roomy()
    }
}

fn mixed_requests(n: u64) -> Vec<Request> {
    (0..n)
        .map(|i| {
            let mut params = sampled(100 + i, 1 + (i as u32 * 7) % 29);
            match i % 5 {
                0 => params.temperature = 0.0,
                1 => params.top_k = 7,
                2 => {
                    params.repetition_penalty = 1.3;
                    params.presence_penalty = 0.7;
                    params.frequency_penalty = 0.5;
                }
                3 => params.stop = vec!["a".to_owned(), "\u{7f}".to_owned()],
                _ => {
                    params.ignore_eos = false;
                    params.min_tokens = 3.min(params.max_tokens);
                    params.logit_bias = vec![(BYTE_EOS, 5.0)];
                }
            }
            request(i, prompt(i, 1 + (i as usize * 11) % 60), params)
        })
        .collect()
}

fn run_all(bench: &mut Bench, requests: &[Request], what: &str) {
    for request in requests {
        bench.engine.submit(request.clone()).unwrap();
    }
    bench.run();
    for request in requests {
        bench.got[&request.id.0].assert_same_output(&alone(request), what);
    }
    bench.assert_idle();
}

#[test]
fn any_number_of_drafts_gives_the_output_of_none() {
    let requests = mixed_requests(24);
    for drafts in 0..=5 {
        for percent in [0, 70, 100] {
            for adaptive_draft_length in [false, true] {
                let config = EngineConfig {
                    adaptive_draft_length,
                    ..config(drafts)
                };
                let mut bench = drafting(config, 1024, &requests, percent);
                let what = format!("{drafts} drafts, {percent} % right");
                run_all(&mut bench, &requests, &what);
                let stats = bench.engine.stats().speculation;
                let all: u64 = stats.drafted.iter().sum();
                let stood: u64 = stats.accepted.iter().sum();
                assert_eq!(all > 0, drafts > 0);
                assert!(percent != 0 || stood == 0);
                // A stop inside of a block ends it; then the drafts behind do not count as delivered.
                assert!(percent != 100 || stood * 10 >= all * 7, "{stats:?}");
                assert!(
                    stats
                        .accepted
                        .iter()
                        .zip(&stats.drafted)
                        .all(|(a, d)| a <= d)
                );
            }
        }
    }
}

#[test]
fn drafts_that_stand_save_steps_and_are_counted_by_place() {
    let asked = request(1, prompt(1, 9), sampled(1, 41));
    for (drafts, steps) in [(0, 41), (1, 21), (3, 11), (4, 9)] {
        let mut bench = drafting(config(drafts), 64, std::slice::from_ref(&asked), 100);
        run_all(&mut bench, std::slice::from_ref(&asked), "all right");
        let stats = bench.engine.stats();
        // The first token comes from the prompt's step; 40 more, each step `drafts + 1`.
        assert_eq!(stats.steps, steps, "{drafts} drafts");
        let rounds = if drafts > 0 { steps - 1 } else { 0 };
        let mut expected = [0; 5];
        expected[..drafts as usize].fill(rounds);
        assert_eq!(stats.speculation.rounds, rounds);
        assert_eq!(stats.speculation.drafted, expected);
        assert_eq!(stats.speculation.accepted, expected);
    }
}

/// C4.5: near the end of the context and of the output.
#[test]
fn no_draft_leads_beyond_max_tokens_or_the_context() {
    const CONTEXT: usize = 32;
    for drafts in 1..=5u32 {
        for before_end in 0..=drafts as usize + 1 {
            for max_tokens in [1, 2, drafts, drafts + 1, drafts + 2] {
                let len = CONTEXT - before_end.max(1);
                let fits = len + max_tokens as usize <= CONTEXT;
                let asked = request(1, prompt(1, len), sampled(1, max_tokens));
                let config = EngineConfig {
                    max_model_len: CONTEXT as u32,
                    ..config(drafts)
                };
                // Exactly the blocks of the context.
                let mut bench = drafting(
                    config,
                    (CONTEXT / BLOCK) as u32,
                    std::slice::from_ref(&asked),
                    100,
                );
                let taken = bench.engine.submit(asked.clone());
                assert_eq!(taken.is_ok(), fits);
                if fits {
                    bench.run();
                    let got = &bench.got[&1];
                    got.assert_same_output(
                        &alone(&asked),
                        &format!("{drafts} drafts, {len} + {max_tokens}"),
                    );
                    assert_eq!(got.tokens.len(), max_tokens as usize);
                    assert_eq!(got.finish.as_ref().unwrap().reason, FinishReason::Length);
                }
                bench.assert_idle();
            }
        }
    }
}

/// An engine whose greedy output is `script`, all drafts right.
fn scripted(script: &'static [TokenId], drafts: u32) -> Engine {
    let next = |tokens: &[TokenId]| *script.get(tokens.len() - 1).unwrap_or(&32);
    let shape = ScriptedShape {
        draft_layer: true,
        ..shape(64)
    };
    let executor = ScriptedExecutor::new(shape)
        .unwrap()
        .with_script(next)
        .with_drafts(next);
    engine_with(config(drafts), executor)
}

/// C4.6: the end at each place of an accepted block, and the request that comes next in its slot.
#[test]
fn nothing_behind_a_stop_inside_an_accepted_block_is_shown_or_counted() {
    const E: TokenId = BYTE_EOS;
    const TEXTS: [&[TokenId]; 9] = [
        &[E, 97, 98, 99, 100, 101, 102, 103, 104],
        &[97, E, 98, 99, 100, 101, 102, 103, 104],
        &[97, 98, E, 99, 100, 101, 102, 103, 104],
        &[97, 98, 99, E, 100, 101, 102, 103, 104],
        &[97, 98, 99, 100, E, 101, 102, 103, 104],
        &[97, 98, 99, 100, 101, E, 102, 103, 104],
        &[97, 98, 99, 100, 101, 102, E, 103, 104],
        &[97, 98, 99, 100, 101, 102, 103, E, 104],
        &[97, 98, 99, 100, 101, 102, 103, 104, E],
    ];
    for (place, text) in TEXTS.into_iter().enumerate() {
        let letters: String = ('a'..).take(place + 1).collect();
        let before = &letters[..place];
        let greedy = || SamplingParams::greedy(20);
        let stop_token = SamplingParams {
            ignore_eos: true,
            stop_token_ids: vec![E],
            ..greedy()
        };
        // The letter behind the end-of-sequence, which is ignored here and not shown.
        let behind = char::from(97 + place as u8).to_string();
        let stop_text = SamplingParams {
            ignore_eos: true,
            stop: vec![behind.clone()],
            ..greedy()
        };
        let long_stop = SamplingParams {
            stop: vec![letters.clone()],
            ..stop_text.clone()
        };
        let cut = SamplingParams {
            max_tokens: place as u32 + 1,
            ignore_eos: true,
            ..greedy()
        };
        for (params, tokens, shown, reason) in [
            (greedy(), place + 1, before, FinishReason::Eos),
            (stop_token, place + 1, before, FinishReason::StopToken(E)),
            (stop_text, place + 2, before, FinishReason::StopText(behind)),
            (
                long_stop,
                place + 2,
                "",
                FinishReason::StopText(letters.clone()),
            ),
            (cut, place + 1, before, FinishReason::Length),
        ] {
            // The last text ends with the end-of-sequence.
            if place == 8 && matches!(reason, FinishReason::StopText(_)) {
                continue;
            }
            for drafts in [0, 3, 5] {
                let mut bench = Bench::new(scripted(text, drafts));
                for id in 1..3 {
                    let asked = request(id, [b'>' as TokenId].into(), params.clone());
                    bench.engine.submit(asked).unwrap();
                    bench.run();
                    let got = &bench.got[&id];
                    assert_eq!(got.ids(), text[..tokens], "{drafts} drafts, {params:?}");
                    assert_eq!(got.text, shown);
                    let finish = got.finish.as_ref().unwrap();
                    assert_eq!(finish.reason, reason);
                    assert_eq!(finish.output_tokens as usize, tokens);
                }
                assert_eq!(bench.engine.stats().output_tokens as usize, 2 * tokens);
                bench.assert_idle();
            }
        }
    }
}

#[test]
fn drafts_count_against_the_budget() {
    use std::sync::{Arc, Mutex};
    let log = Arc::new(Mutex::new(Vec::new()));
    let steps = Arc::clone(&log);
    let shape = ScriptedShape {
        draft_layer: true,
        ..shape(256)
    };
    let executor = ScriptedExecutor::new(shape)
        .unwrap()
        .with_script(|tokens| tokens.len() as TokenId % 256)
        .with_drafts(|tokens| tokens.len() as TokenId % 256)
        .with_before_step(move |info| {
            steps.lock().unwrap().push(info.works.clone());
            Ok::<(), ExecError>(())
        });
    let config = EngineConfig {
        max_num_batched_tokens: 10,
        ..config(5)
    };
    let mut bench = Bench::new(engine_with(config, executor));
    for id in 0..4 {
        let params = SamplingParams {
            ignore_eos: true,
            ..SamplingParams::greedy(60)
        };
        bench
            .engine
            .submit(request(id, prompt(id, 2), params))
            .unwrap();
    }
    bench.run();
    let steps = log.lock().unwrap();
    let sizes: Vec<usize> = steps
        .iter()
        .map(|works| works.iter().map(|w| w.1).sum())
        .collect();
    assert!(sizes.iter().all(|&size| size <= 10), "{sizes:?}");
    assert!(
        sizes[1..20].iter().all(|&size| size == 10),
        "the budget is used: {sizes:?}"
    );
    let shares: Vec<_> = steps[5].iter().map(|work| work.1).collect();
    assert!(
        shares.iter().all(|&share| share >= 2),
        "drafts are shared out: {shares:?}"
    );
}

/// Drafts take blocks only from what is left: they preempt nobody.
#[test]
fn drafts_take_no_blocks_from_others() {
    let requests: Vec<_> = (0..3)
        .map(|i| request(i, prompt(i, 8), sampled(i, 24)))
        .collect();
    for blocks in 24..30 {
        let mut plain = bench(roomy(), blocks);
        run_all(&mut plain, &requests, "plain");
        let mut bench = drafting(config(5), blocks, &requests, 60);
        run_all(&mut bench, &requests, "drafts");
        assert!(bench.engine.stats().speculation.rounds > 0);
        assert_eq!(bench.engine.stats().preemptions, 0, "{blocks} blocks");
    }
}

/// The scripted draft layer refuses to draft on a row that is of another token: the last row of a cached
/// block is one if another token follows it now.
#[test]
fn a_cached_block_is_computed_again_when_another_token_follows_it() {
    let base = prompt(3, 8);
    let mut other = base.to_vec();
    other.extend([1, 2, 3]);
    let mut third = base.to_vec();
    third.extend([7, 7]);
    let other: Arc<[TokenId]> = other.into();
    let requests = [
        request(1, base, sampled(1, 9)),
        request(2, Arc::clone(&other), sampled(2, 9)),
        request(3, third.into(), sampled(3, 9)),
        request(4, other, sampled(4, 9)),
    ];
    let mut bench = drafting(config(3), 64, &requests, 80);
    for (asked, cached) in requests.iter().zip([0, 4, 4, 8]) {
        run_all(&mut bench, std::slice::from_ref(asked), "after a hit");
        let finish = bench.got[&asked.id.0].finish.as_ref().unwrap();
        assert_eq!(finish.sources.cached, cached);
    }
}

#[test]
fn the_draft_layers_kv_is_handed_over_with_the_rest() {
    for drafts in [0, 1, 3] {
        for len in [2, 5, 8, 9, 17] {
            let whole = request(1, prompt(1, len), sampled(1, 20));
            let mut prefill = drafting(config(drafts), 64, &[], 0);
            let mut decode = drafting(config(3), 64, std::slice::from_ref(&whole), 100);
            let first = Request {
                hold_kv: true,
                ..request(1, prompt(1, len), sampled(1, 1))
            };
            prefill.engine.submit(first).unwrap();
            prefill.run();
            let held = prefill.got[&1].finish.clone().unwrap().held.unwrap();
            let remote = Request {
                kv: KvSource::Remote,
                ..whole.clone()
            };
            decode.engine.submit(remote).unwrap();
            decode.step();
            let (blocks, _) = decode.fetches.remove(&1).unwrap();
            let layers = prefill.engine.geometry().layers;
            assert_eq!(layers, 3);
            for (&to, &from) in blocks.iter().zip(&held.blocks) {
                let from = prefill.engine.arena().read(from).unwrap();
                let mut to = decode.engine.arena().write(to).unwrap();
                for layer in 0..layers {
                    to.unit_mut(layer)
                        .unwrap()
                        .copy_from_slice(from.unit(layer).unwrap());
                }
            }
            decode.engine.kv_loaded(RequestId(1), KvOutcome::Loaded);
            decode.run();
            decode.got[&1].assert_same_output(&alone(&whole), "handed over");
            assert_eq!(decode.engine.stats().steps, 6, "all drafts stood");
            prefill.engine.release_held(RequestId(1));
            prefill.assert_idle();
            decode.assert_idle();
        }
    }
}

#[test]
fn drafts_without_a_draft_layer_are_refused_at_start() {
    for (draft_layer, drafts) in [(false, 1), (true, 6)] {
        let shape = ScriptedShape {
            draft_layer,
            ..shape(8)
        };
        let executor = ScriptedExecutor::new(shape).unwrap();
        let error = Engine::new(config(drafts), Box::new(executor), tokenizer(), 8)
            .err()
            .unwrap();
        assert_eq!(error.param.as_deref(), Some("num_speculative_tokens"));
        assert!(error.message.contains(&drafts.to_string()), "{error}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(80))]

    /// Any pool in which each request fits alone, any budget, places and interval, cache on and off.
    #[test]
    fn limits_change_no_output(
        n in 1u64..10,
        spare_blocks in 0u32..16,
        max_num_seqs in 1u32..9,
        budget in 1u32..40,
        drafts in 0u32..6,
        percent in 0u64..101,
        interval in 1u32..6,
        cache in any::<bool>(),
        adaptive in any::<bool>(),
    ) {
        let mut requests = mixed_requests(n);
        // Some prompts begin alike.
        for i in (0..n as usize).step_by(3) {
            let mut text = requests[0].prompt.to_vec();
            text.extend(prompt(77, 30).iter().take(10 + i));
            text.extend([i as TokenId; 3]);
            requests[i].prompt = text.into();
        }
        let longest = requests.iter().map(|r| r.prompt.len() + r.params.max_tokens as usize).max();
        let blocks = longest.unwrap().div_ceil(BLOCK) as u32 + spare_blocks;
        let config = EngineConfig {
            max_num_seqs,
            max_num_batched_tokens: budget,
            prefill_any_interval: interval,
            enable_prefix_caching: cache,
            adaptive_draft_length: adaptive,
            ..config(drafts)
        };
        let mut bench = drafting(config, blocks, &requests, percent);
        run_all(&mut bench, &requests, "limited");
    }
}
