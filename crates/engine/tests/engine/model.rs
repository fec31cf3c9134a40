//! One answer, with the demo model instead of the scripted one.

use crate::common::*;
use std::path::PathBuf;
use std::sync::Arc;
use twinfer_config::Dtype;
use twinfer_engine::{
    Engine, EngineConfig, Generated, KvMemory, KvOutcome, KvSource, LoadOptions, Request,
    RequestId, SamplingParams, generate, load,
};
use twinfer_protocol::TokenId;
use twinfer_text::Tokenizer;

const ENOUGH_BLOCKS: u32 = 512;

fn demo(dtype: Dtype, threads: usize, blocks: u32, config: EngineConfig) -> Engine {
    let dir = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../models/demo");
    let tokenizer = Arc::new(Tokenizer::from_dir(&dir).unwrap());
    let options = LoadOptions {
        dtype,
        threads,
        kv: KvMemory::Blocks(blocks),
        ..LoadOptions::default()
    };
    let model = load(&dir, &options).unwrap();
    Engine::new(config, Box::new(model.executor), tokenizer, blocks).unwrap()
}

fn requests() -> Vec<Request> {
    (0..10u64)
        .map(|i| {
            let len = 1 + (i as usize * 37) % 150;
            let prompt: Vec<TokenId> = (0..len as u64)
                .map(|at| (2 + (i * 911 + at * at * 7 + at * 131) % 1500) as TokenId)
                .collect();
            let params = SamplingParams {
                temperature: if i % 3 == 0 { 0.0 } else { 0.9 },
                ..sampled(i, 48)
            };
            request(i, prompt.into(), params)
        })
        .collect()
}

/// A token with the bits of all its log-probabilities.
type TokenBits = (TokenId, Vec<(TokenId, u32)>);

fn bits(results: &[Generated]) -> Vec<Vec<TokenBits>> {
    let token = |token: &twinfer_engine::OutputToken| {
        let (own, top) = token.logprobs.clone().unwrap();
        let all = [own].into_iter().chain(top);
        (
            token.id,
            all.map(|l| (l.token, l.logprob.to_bits())).collect(),
        )
    };
    results
        .iter()
        .map(|result| result.tokens.iter().map(token).collect())
        .collect()
}

#[test]
fn the_demo_model_gives_the_same_bits_alone_batched_chunked_preempted_and_on_two_threads() {
    for dtype in [Dtype::Bf16, Dtype::F32] {
        let reference = {
            let mut engine = demo(dtype, 1, ENOUGH_BLOCKS, roomy());
            bits(&generate(&mut engine, requests(), 1, |_| ()).unwrap())
        };
        for (what, threads, blocks, budget) in [
            ("batch", 1, ENOUGH_BLOCKS, 512),
            ("batch on two threads", 2, ENOUGH_BLOCKS, 512),
            ("chunks of 7", 1, ENOUGH_BLOCKS, 7),
            ("preempted", 2, 14, 64),
        ] {
            let config = EngineConfig {
                max_num_batched_tokens: budget,
                ..roomy()
            };
            let mut engine = demo(dtype, threads, blocks, config);
            let results = generate(&mut engine, requests(), 100, |_| ()).unwrap();
            assert_eq!(bits(&results), reference, "{what}, {dtype:?}");
            let preempted = engine.stats().preemptions > 0;
            assert_eq!(preempted, what == "preempted", "{what}");
        }
    }
}

#[test]
fn the_demo_model_gives_the_same_bits_after_a_handoff() {
    let asked = &requests()[3];
    let mut colocated = demo(Dtype::Bf16, 1, ENOUGH_BLOCKS, roomy());
    let reference = bits(&generate(&mut colocated, vec![asked.clone()], 1, |_| ()).unwrap());

    let mut prefill = Bench::new(demo(Dtype::Bf16, 2, 64, roomy()));
    let mut first = asked.clone();
    first.params.max_tokens = 1;
    first.hold_kv = true;
    prefill.engine.submit(first).unwrap();
    prefill.run();
    let held = prefill.got[&3].finish.clone().unwrap().held.unwrap();

    let mut engine = demo(Dtype::Bf16, 1, 64, roomy());
    let whole = Request {
        kv: KvSource::Remote,
        ..asked.clone()
    };
    engine.submit(whole).unwrap();
    let fetch = engine.step().unwrap().remove(0);
    let twinfer_engine::Event::KvFetch { blocks, .. } = fetch else {
        panic!("{fetch:?}")
    };
    for (&to, &from) in blocks.iter().zip(&held.blocks) {
        let from = prefill.engine.arena().read(from).unwrap();
        let mut to = engine.arena().write(to).unwrap();
        for layer in 0..engine.geometry().layers {
            to.unit_mut(layer)
                .unwrap()
                .copy_from_slice(from.unit(layer).unwrap());
        }
    }
    engine.kv_loaded(RequestId(3), KvOutcome::Loaded);
    let mut tokens = Vec::new();
    while engine.has_work() {
        for event in engine.step().unwrap() {
            if let twinfer_engine::Event::Output { tokens: new, .. } = event {
                tokens.extend(new);
            }
        }
    }
    let result = Generated {
        id: RequestId(3),
        prompt_logprobs: Vec::new(),
        tokens,
        text: String::new(),
        finish: prefill.got[&3].finish.clone().unwrap(),
    };
    assert_eq!(bits(&[result]), reference);
}
