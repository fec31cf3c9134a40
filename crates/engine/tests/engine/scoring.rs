//! Log-probabilities of prompts.

use crate::common::*;
use proptest::prelude::*;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use twinfer_engine::testing::{ScriptedExecutor, ScriptedShape};
use twinfer_engine::{
    DraftWork, Engine, EngineConfig, ExecError, Executor, FinishReason, KvGeometry, KvSource,
    Request, RequestId, SamplingParams, SeqWork,
};
use twinfer_protocol::TokenId;
use twinfer_sys::BlockArena;

fn scored(id: u64, len: usize, max_tokens: u32, k: u32) -> Request {
    let params = SamplingParams {
        prompt_logprobs: Some(k),
        max_tokens,
        ..sampled(id, max_tokens.max(1))
    };
    request(id, prompt(id, len), params)
}

/// Drawing from the same row reports the same numbers: those of a prompt are those that its tokens would
/// have had as output.
#[test]
fn they_are_the_numbers_that_the_tokens_would_have_as_output() {
    let asked = scored(3, 13, 4, 5);
    let got = alone(&asked);
    assert_eq!(got.prompt_logprobs.len(), 12);
    for at in 1..13 {
        let forced = SamplingParams {
            allowed_token_ids: Some(vec![asked.prompt[at]]),
            logprobs: Some(5),
            ..sampled(0, 1)
        };
        let one = alone(&request(9, asked.prompt[..at].into(), forced));
        let (own, top) = one.tokens[0].logprobs.clone().unwrap();
        assert_eq!(own.token, asked.prompt[at]);
        assert_eq!(got.prompt_logprobs[at - 1], (own, top), "token {at}");
    }
    let free = alone(&request(3, asked.prompt.clone(), sampled(3, 4)));
    assert_eq!(got.tokens, free.tokens, "the output does not change");
}

#[test]
fn a_prompt_can_be_scored_without_any_output() {
    for len in [1, 2, 9] {
        let mut bench = bench(
            EngineConfig {
                max_model_len: 9,
                ..roomy()
            },
            64,
        );
        bench.engine.submit(scored(3, len, 0, 2)).unwrap();
        bench.run();
        let got = &bench.got[&3];
        assert_eq!(got.prompt_logprobs.len(), len - 1);
        assert!(got.tokens.is_empty() && got.text.is_empty());
        let finish = got.finish.clone().unwrap();
        assert_eq!(
            (finish.reason, finish.output_tokens),
            (FinishReason::Length, 0)
        );
        bench.assert_idle();
    }
    // Nor need it be scored: other choices of an answer without output are not.
    let mut bench = bench(roomy(), 64);
    let mut params = sampled(1, 1);
    params.max_tokens = 0;
    bench
        .engine
        .submit(request(1, prompt(1, 4), params))
        .unwrap();
    bench.run();
    let got = &bench.got[&1];
    assert!(got.tokens.is_empty() && got.prompt_logprobs.is_empty());
    let reason = got.finish.clone().unwrap().reason;
    assert_eq!(reason, FinishReason::Length);
    bench.assert_idle();
}

#[test]
fn a_prompt_from_another_instance_is_not_scored() {
    let mut bench = bench(roomy(), 64);
    let asked = Request {
        kv: KvSource::Remote,
        ..scored(1, 9, 3, 1)
    };
    let error = bench.engine.submit(asked).unwrap_err();
    assert_eq!(error.param.as_deref(), Some("prompt_logprobs"));
    bench.assert_idle();
}

#[test]
fn a_cached_prefix_is_computed_again_for_them() {
    let mut bench = bench(roomy(), 64);
    let asked = scored(3, 21, 3, 2);
    let reference = alone(&asked);
    for id in 1..3 {
        bench
            .engine
            .submit(Request {
                id: RequestId(id),
                ..asked.clone()
            })
            .unwrap();
        bench.run();
        bench.got[&id].assert_same_output(&reference, "again");
        assert_eq!(bench.got[&id].finish.as_ref().unwrap().sources.cached, 0);
    }
    let plain = request(4, asked.prompt.clone(), sampled(3, 3));
    bench.engine.submit(plain).unwrap();
    bench.run();
    assert_eq!(bench.got[&4].finish.as_ref().unwrap().sources.cached, 20);
    bench.assert_idle();
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(60))]

    /// Chunks, preemption, drafts and neighbours change none of them.
    #[test]
    fn limits_change_no_log_probability(
        n in 1u64..8,
        spare_blocks in 0u32..10,
        budget in 1u32..30,
        drafts in 0u32..4,
    ) {
        let requests: Vec<_> = (0..n)
            .map(|i| match i % 3 {
                0 => request(i, prompt(i, 12), sampled(i, 30)),
                1 => scored(i, 1 + (i as usize * 7) % 30, 20, 3),
                _ => scored(i, 25, 0, 1),
            })
            .collect();
        let config = EngineConfig {
            max_num_batched_tokens: budget,
            num_speculative_tokens: drafts,
            ..roomy()
        };
        let mut bench = drafting(config, 13 + spare_blocks, &requests, 70);
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

/// Sees how many rows of logits a step wants.
struct Rows {
    inner: ScriptedExecutor,
    most: Arc<AtomicUsize>,
}

impl Executor for Rows {
    fn geometry(&self) -> KvGeometry {
        self.inner.geometry()
    }

    fn arena(&self) -> &Arc<BlockArena> {
        self.inner.arena()
    }

    fn vocab_size(&self) -> usize {
        self.inner.vocab_size()
    }

    fn max_context(&self) -> usize {
        self.inner.max_context()
    }

    fn execute(&mut self, batch: &[SeqWork<'_>], logits: &mut Vec<f32>) -> Result<(), ExecError> {
        let rows = batch.iter().map(SeqWork::logits_rows).sum();
        self.most.fetch_max(rows, Ordering::Relaxed);
        self.inner.execute(batch, logits)
    }

    fn draft_layers(&self) -> usize {
        self.inner.draft_layers()
    }

    fn draft(
        &mut self,
        works: &[DraftWork<'_>],
        drafts: &mut Vec<TokenId>,
    ) -> Result<(), ExecError> {
        self.inner.draft(works, drafts)
    }
}

/// Memory for logits is planned before anything is computed.
#[test]
fn a_step_wants_no_more_rows_of_logits_than_were_planned() {
    for drafts in [0, 3] {
        let shape = ScriptedShape {
            vocab_size: 1 << 20,
            draft_layer: drafts > 0,
            ..shape(64)
        };
        let inner = ScriptedExecutor::new(shape).unwrap().with_drafts(|_| 7);
        let most = Arc::new(AtomicUsize::new(0));
        let config = EngineConfig {
            max_num_seqs: 4,
            max_num_batched_tokens: 64,
            num_speculative_tokens: drafts,
            ..roomy()
        };
        let executor = Rows {
            inner,
            most: Arc::clone(&most),
        };
        let engine = Engine::new(config, Box::new(executor), tokenizer(), 64).unwrap();
        // 16 rows of a million logits for prompts, and those that are drawn from.
        let planned = engine.max_logits_rows();
        assert_eq!(planned, 16 + 4 * (drafts as usize + 1));
        let mut bench = Bench::new(engine);
        for id in 0..5 {
            let params = SamplingParams {
                prompt_logprobs: (id > 0).then_some(1),
                allowed_token_ids: Some(vec![7]),
                ..SamplingParams::greedy(6)
            };
            bench
                .engine
                .submit(request(id, prompt(id, 21), params))
                .unwrap();
        }
        bench.run();
        let most = most.load(Ordering::Relaxed);
        assert!((16..=planned).contains(&most), "{most} of {planned}");
        assert!((1..5).all(|id| bench.got[&id].prompt_logprobs.len() == 20));
    }
}
