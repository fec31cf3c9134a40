//! A step in which nothing begins or ends allocates nothing, beside what the model itself does.
//! A test target of its own, because it counts with an allocator of its own.
#![cfg(test)]

use std::sync::Arc;
use twinfer_engine::testing::{ScriptedExecutor, ScriptedShape, byte_tokenizer};
use twinfer_engine::{
    DraftWork, Engine, EngineConfig, ExecError, Executor, KvGeometry, KvSource, Request, RequestId,
    SamplingParams, SeqWork, StepOutput,
};
use twinfer_protocol::TokenId;
use twinfer_sys::BlockArena;

const SEQUENCES: u64 = 16;
const STEPS: usize = 1000;

/// The scripted executor, whose own allocations do not count.
struct Uncounted(ScriptedExecutor);

impl Executor for Uncounted {
    fn geometry(&self) -> KvGeometry {
        self.0.geometry()
    }
    fn arena(&self) -> &Arc<BlockArena> {
        self.0.arena()
    }
    fn vocab_size(&self) -> usize {
        self.0.vocab_size()
    }
    fn max_context(&self) -> usize {
        self.0.max_context()
    }
    fn execute(&mut self, batch: &[SeqWork<'_>], logits: &mut Vec<f32>) -> Result<(), ExecError> {
        let mut result = Ok(());
        allocation_counter::opt_out(|| result = self.0.execute(batch, logits));
        result
    }
    fn draft_layers(&self) -> usize {
        self.0.draft_layers()
    }
    fn draft(
        &mut self,
        works: &[DraftWork<'_>],
        drafts: &mut Vec<TokenId>,
    ) -> Result<(), ExecError> {
        let mut result = Ok(());
        allocation_counter::opt_out(|| result = self.0.draft(works, drafts));
        result
    }
}

/// Allocations of `STEPS` steps in which 16 sequences generate, after `warm` steps.
fn allocations(params: &SamplingParams, drafts: u32, warm: usize) -> u64 {
    let tokens_per_step = drafts as usize + 1;
    let output = (warm + STEPS + 10) * tokens_per_step;
    let shape = ScriptedShape {
        block_size: 16,
        num_blocks: SEQUENCES as u32 * (output as u32 / 16 + 4),
        max_context: output + 64,
        draft_layer: drafts > 0,
        ..ScriptedShape::default()
    };
    // Drafts that stand and drafts that do not.
    let next = |tokens: &[TokenId]| (tokens.len() as TokenId * 7 + tokens[0]) % 200;
    let executor = ScriptedExecutor::new(shape)
        .unwrap()
        .with_script(next)
        .with_drafts(move |tokens| next(tokens) + TokenId::from(tokens.len() % 3 == 0));
    let config = EngineConfig {
        max_model_len: output as u32 + 64,
        max_num_seqs: SEQUENCES as u32,
        num_speculative_tokens: drafts,
        ..EngineConfig::default()
    };
    let tokenizer = byte_tokenizer().unwrap();
    let blocks = shape.num_blocks;
    let mut engine = Engine::new(config, Box::new(Uncounted(executor)), tokenizer, blocks).unwrap();
    for id in 0..SEQUENCES {
        let request = Request {
            id: RequestId(id),
            prompt: vec![id as TokenId; 9].into(),
            params: SamplingParams {
                max_tokens: output as u32,
                seed: id,
                ..params.clone()
            },
            kv: KvSource::Compute,
            hold_kv: false,
            cache_salt: None,
            leader: None,
            resumed: 0,
        };
        engine.submit(request).unwrap();
    }
    let mut out = StepOutput::new();
    let mut tokens = 0;
    let mut run = |engine: &mut Engine, steps: usize| {
        for _ in 0..steps {
            engine.step_into(&mut out).unwrap();
            for event in out.events() {
                if let twinfer_engine::EventRef::Output(output) = event {
                    assert!(output.finish.is_none());
                    tokens += output.tokens().len();
                }
            }
        }
    };
    run(&mut engine, warm);
    let info = allocation_counter::measure(|| run(&mut engine, STEPS));
    assert!(tokens >= SEQUENCES as usize * (warm + STEPS));
    info.count_total
}

fn plain() -> SamplingParams {
    SamplingParams {
        ignore_eos: true,
        ..SamplingParams::greedy(1)
    }
}

#[test]
fn a_thousand_decode_steps_of_sixteen_sequences_allocate_nothing() {
    let sampled = SamplingParams {
        temperature: 0.8,
        top_k: 40,
        top_p: 0.9,
        min_p: 0.01,
        stop: vec!["\u{1}never".to_owned()],
        ..plain()
    };
    for (what, params) in [("greedy", plain()), ("sampled", sampled)] {
        for logprobs in [None, Some(0), Some(20)] {
            // The scripted drafts read all tokens so far: once is enough.
            let with_drafts = logprobs == Some(20) && what == "sampled";
            for drafts in [0, 3].into_iter().take(1 + usize::from(with_drafts)) {
                let params = SamplingParams {
                    logprobs,
                    ..params.clone()
                };
                let count = allocations(&params, drafts, 20);
                assert_eq!(
                    count, 0,
                    "{what}, log-probabilities {logprobs:?}, {drafts} drafts"
                );
            }
        }
    }
}

/// The measurement sees an allocation when there is one: while requests come in.
#[test]
fn the_count_is_one() {
    assert!(allocations(&plain(), 0, 0) > 0);
}
