//! Phase policies compared in virtual time: the real scheduler on N ranks, steps priced by a roofline of DeepSeek-R1 on
//! 910B3 nodes.
//!
//! `phases [--ranks N] [--requests N] [--only TEXT] [--policy KEY=VALUE,..]..`; a closed loop with 32 requests per rank.
//! Keys of a policy: `chunk` (tokens; without it prefill and decode are apart), `interval`, `run`, `requests`, `tokens`
//! (threshold), `wait` (milliseconds), `padded` (0 or 1). With policies of one's own no others run.

use std::time::Instant;
use twinfer_engine::EngineConfig;
use twinfer_engine::modelled::{
    Candidate, CostModel, GroupConfig, Hardware, Limits, ModelSize, ModelledShape, Report,
    Workload, candidates, choose, equal_lengths, mixed_lengths, run,
};
use twinfer_engine::phase::{Mixing, PhasePolicy};
use twinfer_engine::testing::byte_tokenizer;

/// Requests of a rank.
const SEQS: u32 = 32;

fn group(ranks: u32, policy: PhasePolicy) -> GroupConfig {
    GroupConfig {
        ranks,
        engine: EngineConfig {
            max_model_len: 4096,
            max_num_seqs: SEQS,
            max_num_batched_tokens: 4096,
            max_waiting: 1 << 20,
            enable_prefix_caching: false,
            ..EngineConfig::default()
        },
        shape: ModelledShape {
            vocab_size: 128,
            tokens: 0x20..0x7F,
            num_blocks: SEQS * 162,
            ..ModelledShape::default()
        },
        policy,
        costs: CostModel::new(&Hardware::ASCEND_910B3, &ModelSize::DEEPSEEK_R1, ranks),
    }
}

fn parse(text: &str) -> Result<PhasePolicy, Box<dyn std::error::Error>> {
    let mut policy = PhasePolicy {
        prefill_run: 1,
        ..PhasePolicy::AT_ONCE
    };
    for part in text.split(',') {
        let (key, value) = part
            .split_once('=')
            .ok_or(format!("{part} is not KEY=VALUE"))?;
        let value: u64 = value.parse()?;
        let small = u32::try_from(value)?;
        match key {
            "chunk" => policy.mixing = Mixing::Chunks { tokens: small },
            "interval" => policy.prefill_any_interval = small,
            "run" => policy.prefill_run = small,
            "requests" => policy.threshold.requests = small,
            "tokens" => policy.threshold.tokens = value,
            "wait" => policy.longest_wait = value,
            "padded" => policy.padded = value > 0,
            _ => return Err(format!("{key} is unknown").into()),
        }
    }
    Ok(policy)
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let (mut ranks, mut requests, mut only, mut own) = (32, 3072, String::new(), Vec::new());
    let mut arguments = std::env::args().skip(1);
    while let Some(name) = arguments.next() {
        let value = arguments.next().ok_or(format!("{name} needs a value"))?;
        match name.as_str() {
            "--ranks" => ranks = value.parse()?,
            "--requests" => requests = value.parse()?,
            "--only" => only = value,
            "--policy" => own.push(Candidate {
                policy: parse(&value)?,
                name: value,
            }),
            _ => return Err(format!("{name} is unknown").into()),
        }
    }
    let tokenizer = byte_tokenizer()?;
    let print = |name: &str, policy: PhasePolicy, workload: &Workload| {
        let began = Instant::now();
        let report = run(&group(ranks, policy), workload, &tokenizer)?;
        let steps: u64 = report.steps.iter().sum();
        let Report {
            output_rate,
            gap_p50,
            gap_p99,
            gap_max,
            tpot_mean,
            ttft_mean,
            ttft_p99,
            ..
        } = report;
        println!(
            "{name:50} {output_rate:7.0} tok/s  gap {gap_p50:4.0} {gap_p99:5.0} {gap_max:6.0} ms  tpot {tpot_mean:4.0} ms  \
             ttft {ttft_mean:5.1} {ttft_p99:5.1} s  steps {:5?}  {:5.0} steps/s",
            report.steps,
            steps as f64 / began.elapsed().as_secs_f64(),
        );
        Ok::<_, Box<dyn std::error::Error>>(report)
    };
    println!("gap: p50, p99, longest; ttft: mean, p99; steps: prefill, decode, mixed");
    let equal = print(
        "equal lengths, prefill first",
        PhasePolicy::AT_ONCE,
        &equal_lengths(SEQS * ranks, requests),
    )?;
    let mut all = if own.is_empty() {
        candidates(ranks)
    } else {
        own
    };
    all.retain(|candidate| candidate.name.contains(&only));
    let mut reports = Vec::new();
    for candidate in &all {
        reports.push(print(
            &candidate.name,
            candidate.policy,
            &mixed_lengths(SEQS * ranks, requests),
        )?);
    }
    let choice = choose(&reports, &Limits::default());
    if let (Some(default), Some(best)) = (choice.default, choice.best) {
        let rate = reports[default].output_rate;
        println!(
            "within the limits: {}: {:.3} of the best ({}), {:.3} of equal lengths",
            all[default].name,
            rate / reports[best].output_rate,
            all[best].name,
            rate / equal.output_rate
        );
    }
    Ok(())
}
