//! Allocations of engine thread and compute threads while 16 sequences decode.

use super::mtp::{engine, request};
use super::ours::options;
use super::prompt;
use anyhow::{Result, bail};
use stats_alloc::{INSTRUMENTED_SYSTEM, Region};
use std::sync::Arc;
use twinfer_engine::{Engine, EngineConfig, EventRef, StepOutput, load};
use twinfer_it::demo_model;
use twinfer_text::Tokenizer;

const SEQUENCES: u64 = 16;
const STEPS: usize = 1000;
const WARM: usize = 50;
const PROMPT: usize = 20;

/// Allocations of 1000 decode steps of the demo model, in bf16 and in W8A8 together.
pub(super) fn measure(logprobs: Option<u32>) -> Result<usize> {
    let tokenizer = Arc::new(Tokenizer::from_dir(&demo_model())?);
    let output = (WARM + STEPS + 20) as u32;
    let blocks = (output + PROMPT as u32).div_ceil(16) + 1;
    let mut allocations = 0;
    for quantize in [false, true] {
        let blocks = blocks * SEQUENCES as u32;
        let loaded = load(&demo_model(), &options(quantize, blocks)?)?;
        // As served: with the prefix cache.
        let config = EngineConfig::default();
        let mut engine = engine(Box::new(loaded.executor), &tokenizer, blocks, config)?;
        for id in 0..SEQUENCES {
            let mut request = request(id, &prompt(PROMPT, id as usize), output, true);
            request.params.logprobs = logprobs;
            let submitted = engine.submit(request);
            submitted.map_err(|error| anyhow::anyhow!("{error}"))?;
        }
        let mut out = StepOutput::new();
        run(&mut engine, &mut out, WARM)?;
        // The whole process counts; nothing else runs in it now.
        let region = Region::new(&INSTRUMENTED_SYSTEM);
        let tokens = run(&mut engine, &mut out, STEPS)?;
        let change = region.change();
        if tokens != STEPS * SEQUENCES as usize {
            bail!("{tokens} tokens in {STEPS} steps of {SEQUENCES} sequences");
        }
        allocations += change.allocations + change.reallocations;
    }
    Ok(allocations)
}

/// Tokens of so many steps.
fn run(engine: &mut Engine, out: &mut StepOutput, steps: usize) -> Result<usize> {
    let mut tokens = 0;
    for _ in 0..steps {
        engine.step_into(out)?;
        for event in out.events() {
            if let EventRef::Output(output) = event {
                tokens += output.tokens().len();
            }
        }
    }
    Ok(tokens)
}
