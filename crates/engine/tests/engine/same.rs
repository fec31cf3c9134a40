//! One answer: whatever else runs, however the prompt is cut, whether or not it was preempted.

use crate::common::*;
use proptest::prelude::*;
use twinfer_engine::testing::{BYTE_EOS, ScriptedExecutor};
use twinfer_engine::{EngineConfig, FinishReason, Request, SamplingParams, generate};

fn mixed_requests(n: u64) -> Vec<Request> {
    (0..n)
        .map(|i| {
            let mut params = sampled(100 + i, 1 + (i as u32 * 5) % 23);
            match i % 5 {
                0 => params.temperature = 0.0,
                1 => params.top_k = 7,
                2 => params.top_p = 0.6,
                3 => {
                    params.repetition_penalty = 1.3;
                    params.frequency_penalty = 0.5;
                    params.stop = vec!["a".to_owned()];
                }
                _ => {
                    params.ignore_eos = false;
                    params.min_tokens = 2;
                    params.logit_bias = vec![(BYTE_EOS, 5.0)];
                }
            }
            request(i, prompt(i, 1 + (i as usize * 11) % 60), params)
        })
        .collect()
}

fn assert_all_as_alone(bench: &Bench, requests: &[Request], what: &str) {
    for request in requests {
        bench.got[&request.id.0].assert_same_output(&alone(request), what);
    }
}

#[test]
fn a_request_gives_the_same_alone_and_in_a_batch() {
    let requests = mixed_requests(32);
    let mut bench = bench(roomy(), 1024);
    for request in &requests {
        bench.engine.submit(request.clone()).unwrap();
    }
    bench.run();
    assert_all_as_alone(&bench, &requests, "batch of 32");
    bench.assert_idle();
}

#[test]
fn a_request_gives_the_same_however_its_prompt_is_cut() {
    let requests = mixed_requests(20);
    for budget in [1, 2, 3, 8, 64] {
        let config = EngineConfig {
            max_num_batched_tokens: budget,
            ..roomy()
        };
        let mut bench = bench(config, 1024);
        for request in &requests {
            bench.engine.submit(request.clone()).unwrap();
        }
        bench.run();
        assert_all_as_alone(&bench, &requests, &format!("budget {budget}"));
    }
}

/// C4.10: a pool of one and a half requests.
#[test]
fn preempted_requests_end_with_the_tokens_and_logprobs_of_an_unconstrained_run() {
    let prompt_len = 20;
    let max_tokens = 60;
    // 80 tokens are 20 blocks.
    let mut bench = bench(roomy(), 30);
    let requests: Vec<_> = (0..8)
        .map(|i| request(i, prompt(i, prompt_len), sampled(i, max_tokens)))
        .collect();
    for request in &requests {
        bench.engine.submit(request.clone()).unwrap();
    }
    bench.run();
    let preemptions = bench.engine.stats().preemptions;
    assert!(preemptions > 0, "the pool was meant to run dry");
    assert!(preemptions <= 8 * 10, "{preemptions} preemptions");
    assert_all_as_alone(&bench, &requests, "preempted");
    assert_eq!(
        bench.ended[0], 0,
        "first come, first served: {:?}",
        bench.ended
    );
    assert!(
        bench.ended.is_sorted(),
        "equal requests end in the order they came: {:?}",
        bench.ended
    );
    let stats = bench.engine.stats();
    assert_eq!(
        stats.prompt_tokens.computed,
        8 * 20,
        "prompt tokens are counted once"
    );
    assert_eq!(
        stats.output_tokens,
        8 * 60,
        "output tokens are counted once"
    );
    bench.assert_idle();
}

/// C4.13: 64 prompts, budget 16.
#[test]
fn each_request_gets_exactly_its_max_tokens() {
    let config = EngineConfig {
        max_num_batched_tokens: 16,
        ..roomy()
    };
    let mut bench = bench(config, 1024);
    let requests: Vec<_> = (1..=64)
        .map(|i| {
            let params = SamplingParams {
                ignore_eos: true,
                ..SamplingParams::greedy(i as u32)
            };
            request(i, prompt(i, 9), params)
        })
        .collect();
    for request in &requests {
        bench.engine.submit(request.clone()).unwrap();
    }
    bench.run();
    for i in 1..=64 {
        let got = &bench.got[&i];
        assert_eq!(got.tokens.len() as u64, i);
        let finish = got.finish.as_ref().unwrap();
        assert_eq!(
            (&finish.reason, u64::from(finish.output_tokens)),
            (&FinishReason::Length, i)
        );
    }
    assert_all_as_alone(&bench, &requests, "64 at budget 16");
}

#[test]
fn seeds_decide_and_nothing_else_does() {
    let ids = |seed, choice| {
        let params = SamplingParams {
            choice,
            ..sampled(seed, 24)
        };
        alone(&request(1, prompt(5, 10), params)).ids()
    };
    assert_eq!(ids(7, 0), ids(7, 0));
    assert_ne!(ids(7, 0), ids(8, 0));
    assert_ne!(ids(7, 0), ids(7, 1));
    let other_id = alone(&request(99, prompt(5, 10), sampled(7, 24))).ids();
    assert_eq!(
        ids(7, 0),
        other_id,
        "the request's id is no part of the key"
    );
}

/// The first token that a prefill instance draws is the one that decode draws; what follows a prefix of
/// the output is the same when that prefix is part of the prompt (as it is after a resume elsewhere).
#[test]
fn random_numbers_belong_to_positions() {
    let whole = alone(&request(1, prompt(5, 10), sampled(7, 24))).ids();
    let one = alone(&request(1, prompt(5, 10), sampled(7, 1))).ids();
    assert_eq!(one, whole[..1]);
    let mut longer = prompt(5, 10).to_vec();
    longer.extend(&whole[..9]);
    let rest = alone(&request(1, longer.into(), sampled(7, 15))).ids();
    assert_eq!(rest, whole[9..]);
}

/// A stream that goes on at another engine, after every token of every request: penalties, stops and numbers of tokens
/// count what was output before, and text goes on where it was.
#[test]
fn what_follows_a_resume_is_the_rest_of_the_output() {
    for (number, request) in mixed_requests(24).into_iter().enumerate() {
        let mut request = request;
        request.params.prompt_logprobs = None;
        if number % 2 == 0 {
            request.params.repetition_penalty = 1.3;
            request.params.frequency_penalty = 0.5;
            request.params.min_tokens = 3.min(request.params.max_tokens);
        }
        let whole = alone(&request);
        for cut in 0..whole.tokens.len() {
            let before = &whole.ids()[..cut];
            let mut state =
                twinfer_engine::output::OutputState::new(&request.params, &tokenizer()).unwrap();
            let mut text = String::new();
            assert_eq!(state.replay(before, &mut text), None);
            let resumed = Request {
                prompt: request.prompt.iter().chain(before).copied().collect(),
                resumed: u32::try_from(cut).unwrap(),
                ..request.clone()
            };
            let rest = alone(&resumed);
            assert_eq!(
                rest.tokens,
                whole.tokens[cut..],
                "request {number} after {cut}"
            );
            assert_eq!(
                format!("{text}{}", rest.text),
                whole.text,
                "request {number} after {cut}"
            );
            let (ours, theirs) = (rest.finish.unwrap(), whole.finish.clone().unwrap());
            assert_eq!(ours.reason, theirs.reason);
            assert_eq!(ours.output_tokens, theirs.output_tokens);
        }
        // An output that has ended does not go on.
        let ended = Request {
            prompt: request.prompt.iter().copied().chain(whole.ids()).collect(),
            resumed: u32::try_from(whole.tokens.len()).unwrap(),
            ..request
        };
        let mut bench = bench(roomy(), 256);
        assert!(bench.engine.submit(ended).is_err());
    }
}

#[test]
fn generate_returns_results_in_order_and_the_same_for_any_concurrency() {
    let requests = mixed_requests(12);
    let run = |concurrency| {
        let mut engine = engine_with(
            EngineConfig {
                max_waiting: 2,
                max_num_seqs: 4,
                ..roomy()
            },
            ScriptedExecutor::new(shape(256)).unwrap(),
        );
        let mut seen = 0;
        let results = generate(&mut engine, requests.clone(), concurrency, |_| seen += 1).unwrap();
        assert_eq!(seen, 12);
        assert!(engine.is_idle());
        results
    };
    let one = run(1);
    assert!(
        one.iter()
            .zip(&requests)
            .all(|(result, request)| result.id == request.id)
    );
    for concurrency in [3, 100] {
        assert_eq!(run(concurrency), one);
    }
    for (result, request) in one.iter().zip(&requests) {
        let alone = alone(request);
        assert_eq!((&result.tokens, &result.text), (&alone.tokens, &alone.text));
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(60))]

    /// Any pool in which each request fits alone, any budget, any number of places.
    #[test]
    fn limits_change_no_output(
        n in 1u64..12,
        spare_blocks in 0u32..12,
        max_num_seqs in 1u32..9,
        budget in 1u32..40,
    ) {
        let requests = mixed_requests(n);
        let longest = requests.iter().map(|r| r.prompt.len() + r.params.max_tokens as usize).max();
        let blocks = longest.unwrap().div_ceil(BLOCK) as u32 + spare_blocks;
        let config = EngineConfig { max_num_seqs, max_num_batched_tokens: budget, ..roomy() };
        let mut bench = bench(config, blocks);
        for request in &requests {
            bench.engine.submit(request.clone()).unwrap();
        }
        bench.run();
        for request in &requests {
            bench.got[&request.id.0].assert_same_output(&alone(request), "limited");
        }
        bench.assert_idle();
    }
}
