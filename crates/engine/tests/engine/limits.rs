//! What is refused, and what waits.

use crate::common::*;
use std::sync::{Arc, Mutex};
use twinfer_engine::testing::{BYTE_EOS, BYTE_VOCAB, ScriptedExecutor};
use twinfer_engine::{Engine, EngineConfig, ExecError, FinishReason, RequestId, SamplingParams};
use twinfer_protocol::ErrorKind;

/// C4.4.
#[test]
fn a_prompt_that_fills_the_context_is_refused_with_the_numbers_and_harms_nobody() {
    let config = EngineConfig {
        max_model_len: 40,
        ..roomy()
    };
    let mut bench = bench(config, 64);
    let last = request(1, prompt(1, 39), sampled(1, 1));
    bench.engine.submit(last).unwrap();
    for (id, len, max_tokens) in [(2, 40, 1), (3, 41, 1), (4, 400, 5)] {
        let error = bench
            .engine
            .submit(request(id, prompt(1, len), sampled(1, max_tokens)))
            .unwrap_err();
        assert_eq!(error.kind, ErrorKind::ContextLengthExceeded);
        assert_eq!(error.kind.status(), 400);
        for number in [
            len.to_string(),
            "40 tokens".to_owned(),
            "at most 39".to_owned(),
        ] {
            assert!(error.message.contains(&number), "{error}");
        }
    }
    let error = bench
        .engine
        .submit(request(5, prompt(1, 39), sampled(1, 5)))
        .unwrap_err();
    assert_eq!(
        (error.kind, error.param.as_deref()),
        (ErrorKind::ContextLengthExceeded, Some("max_tokens"))
    );
    bench.run();
    let finish = bench.got[&1].finish.clone().unwrap();
    assert_eq!(
        (finish.reason, finish.output_tokens),
        (FinishReason::Length, 1)
    );
    assert_eq!(bench.got.len(), 1);
    bench.assert_idle();
}

/// C4.11.
#[test]
fn a_request_that_can_never_fit_the_pool_is_refused_and_does_not_delay_others() {
    // 10 blocks of 4 tokens.
    let mut bench = bench(roomy(), 10);
    assert_eq!(bench.engine.max_len(), 40);
    for round in 0..100 {
        let id = round * 3;
        for (id, len, max_tokens) in [(id, 40, 1), (id + 1, 10, 31)] {
            let error = bench
                .engine
                .submit(request(id, prompt(id, len), sampled(1, max_tokens)))
                .unwrap_err();
            assert_eq!(error.kind.status(), 400);
            assert!(error.message.contains("40 tokens"), "{error}");
        }
        // This one needs the whole pool.
        bench
            .engine
            .submit(request(id + 2, prompt(id, 33), sampled(1, 7)))
            .unwrap();
        bench.run();
        assert_eq!(bench.got[&(id + 2)].tokens.len(), 7);
    }
    bench.assert_idle();
}

#[test]
fn token_ids_without_an_embedding_row_are_refused_wherever_they_stand() {
    let mut bench = bench(roomy(), 64);
    let bad = BYTE_VOCAB as u32;
    let mut biased = sampled(1, 4);
    biased.logit_bias = vec![(bad, 1.0)];
    let mut stopped = sampled(1, 4);
    stopped.stop_token_ids = vec![bad];
    let mut allowed = sampled(1, 4);
    allowed.allowed_token_ids = Some(vec![bad]);
    for (prompt, params) in [
        (Arc::from([1, bad]), sampled(1, 4)),
        (Arc::from([1]), biased),
        (Arc::from([1]), stopped),
        (Arc::from([1]), allowed),
        (Arc::from([]), sampled(1, 4)),
    ] {
        let error = bench.engine.submit(request(1, prompt, params)).unwrap_err();
        assert_eq!(
            (error.kind, error.param.is_some()),
            (ErrorKind::InvalidRequest, true)
        );
    }
    bench.assert_idle();
    bench
        .engine
        .submit(request(1, prompt(1, 3), sampled(1, 4)))
        .unwrap();
    bench.run();
    assert_eq!(bench.got[&1].tokens.len(), 4);
}

#[test]
fn an_allowed_list_that_min_tokens_masks_whole_is_refused() {
    let mut bench = bench(roomy(), 64);
    let params = |allowed: &[u32], min_tokens| SamplingParams {
        allowed_token_ids: Some(allowed.to_vec()),
        stop_token_ids: vec![65],
        min_tokens,
        ..SamplingParams::greedy(4)
    };
    let refused = request(1, prompt(1, 3), params(&[65, BYTE_EOS], 1));
    let error = bench.engine.submit(refused).unwrap_err();
    assert_eq!(error.param.as_deref(), Some("allowed_token_ids"));
    for good in [params(&[65, BYTE_EOS], 0), params(&[65, 66], 1)] {
        bench.engine.submit(request(1, prompt(1, 3), good)).unwrap();
        bench.run();
        bench.got.clear();
    }
    bench.assert_idle();
}

#[test]
fn a_full_queue_refuses_and_takes_again_when_it_has_moved() {
    let config = EngineConfig {
        max_num_seqs: 1,
        max_waiting: 2,
        ..roomy()
    };
    let mut bench = bench(config, 64);
    bench
        .engine
        .submit(request(0, prompt(0, 5), sampled(0, 3)))
        .unwrap();
    bench.step();
    for id in 1..=2 {
        bench
            .engine
            .submit(request(id, prompt(id, 5), sampled(id, 3)))
            .unwrap();
    }
    let error = bench
        .engine
        .submit(request(3, prompt(3, 5), sampled(3, 3)))
        .unwrap_err();
    assert_eq!(error.kind, ErrorKind::Overloaded);
    assert!(error.retry_after.is_some());
    bench.run();
    bench
        .engine
        .submit(request(3, prompt(3, 5), sampled(3, 3)))
        .unwrap();
    bench.run();
    assert_eq!(bench.ended, [0, 1, 2, 3]);
}

#[test]
fn no_more_sequences_run_than_permitted_and_none_overtakes() {
    let config = EngineConfig {
        max_num_seqs: 3,
        ..roomy()
    };
    let mut bench = bench(config, 256);
    for id in 0..9 {
        bench
            .engine
            .submit(request(id, prompt(id, 5), sampled(id, 6)))
            .unwrap();
    }
    while bench.engine.has_work() {
        bench.step();
        assert!(bench.engine.stats().load.running <= 3);
    }
    assert!(bench.ended.is_sorted());
    bench.assert_idle();
}

#[test]
fn a_step_computes_no_more_tokens_than_the_budget_and_streams_go_on_during_a_long_prefill() {
    let steps = Arc::new(Mutex::new(Vec::new()));
    let log = Arc::clone(&steps);
    let executor = ScriptedExecutor::new(shape(256))
        .unwrap()
        .with_before_step(move |info| {
            log.lock().unwrap().push(info.works.clone());
            Ok(())
        });
    let config = EngineConfig {
        max_num_batched_tokens: 8,
        ..roomy()
    };
    let mut bench = Bench::new(engine_with(config, executor));
    bench
        .engine
        .submit(request(0, prompt(0, 3), sampled(0, 60)))
        .unwrap();
    bench.step();
    bench
        .engine
        .submit(request(1, prompt(1, 200), sampled(1, 4)))
        .unwrap();
    bench.run();
    let steps = steps.lock().unwrap();
    assert!(
        steps
            .iter()
            .all(|works| works.iter().map(|w| w.1).sum::<usize>() <= 8)
    );
    // 200 tokens at 7 a step, beside one token of the stream in every step.
    let prefill: Vec<_> = steps
        .iter()
        .filter(|works| works.iter().any(|w| w.1 > 1))
        .skip(1)
        .collect();
    assert_eq!(prefill.len(), 200usize.div_ceil(7));
    assert!(
        prefill.iter().all(|works| works.iter().any(|w| w.1 == 1)),
        "{prefill:?}"
    );
}

#[test]
fn a_newcomer_is_admitted_only_if_it_need_not_go_again_at_once() {
    let mut bench = bench(roomy(), 5);
    bench
        .engine
        .submit(request(0, prompt(0, 5), sampled(0, 8)))
        .unwrap();
    bench.step();
    // It would take the three blocks that are left; the first needs one of them three steps later.
    bench
        .engine
        .submit(request(1, prompt(1, 9), sampled(1, 6)))
        .unwrap();
    bench.run();
    assert_eq!(bench.engine.stats().preemptions, 0);
    assert_eq!(bench.ended, [0, 1]);
    bench.assert_idle();
}

#[test]
fn a_request_id_is_used_once_at_a_time() {
    let mut bench = bench(roomy(), 64);
    bench
        .engine
        .submit(request(1, prompt(1, 5), sampled(1, 3)))
        .unwrap();
    assert!(
        bench
            .engine
            .submit(request(1, prompt(2, 5), sampled(1, 3)))
            .is_err()
    );
    bench.run();
    assert_eq!(bench.ended, [1]);
    bench
        .engine
        .submit(request(1, prompt(1, 5), sampled(1, 3)))
        .unwrap();
    bench.engine.abort(RequestId(1));
    assert_eq!(
        bench.engine.stats().load.waiting,
        1,
        "an abort waits for the step"
    );
}

#[test]
fn sizes_that_cannot_work_are_refused_at_start() {
    let refusal = |change: &dyn Fn(&mut EngineConfig), num_blocks| {
        let mut config = roomy();
        change(&mut config);
        let executor = ScriptedExecutor::new(shape(8)).unwrap();
        let error = Engine::new(config, Box::new(executor), tokenizer(), num_blocks)
            .err()
            .unwrap();
        error.param.unwrap()
    };
    assert_eq!(refusal(&|c| c.max_model_len = 100_000, 8), "max_model_len");
    assert_eq!(refusal(&|c| c.max_model_len = 1, 8), "max_model_len");
    assert_eq!(refusal(&|c| c.max_num_seqs = 0, 8), "max_num_seqs");
    assert_eq!(
        refusal(&|c| c.max_num_batched_tokens = 0, 8),
        "max_num_batched_tokens"
    );
    assert_eq!(refusal(&|_| (), 0), "num_blocks");
    assert_eq!(refusal(&|_| (), 9), "num_blocks");
}

#[test]
fn a_failed_step_is_an_error_and_no_output() {
    let executor = ScriptedExecutor::new(shape(64))
        .unwrap()
        .with_before_step(|info| match info.step {
            3 => Err(ExecError::Thread("killed".to_owned())),
            _ => Ok(()),
        });
    let mut engine = engine_with(roomy(), executor);
    engine
        .submit(request(1, prompt(1, 5), SamplingParams::greedy(20)))
        .unwrap();
    for _ in 0..3 {
        assert!(engine.step().is_ok());
    }
    assert!(matches!(engine.step(), Err(ExecError::Thread(_))));
    assert!(
        matches!(engine.step(), Err(ExecError::AfterFailure)),
        "nothing is computed on what the failed step left behind"
    );
}
