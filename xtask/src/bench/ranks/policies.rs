//! Phase policies on mixed lengths, in virtual time: the same on every machine.

use super::{Measured, Plan, Sample};
use anyhow::{Context, Result, anyhow, bail};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use twinfer_engine::EngineConfig;
use twinfer_engine::modelled::{
    CostModel, GroupConfig, Hardware, Limits, ModelSize, ModelledShape, Report, Workload,
    candidates, choose, equal_lengths, mixed_lengths, run,
};
use twinfer_engine::phase::PhasePolicy;
use twinfer_engine::testing::byte_tokenizer;
use twinfer_text::Tokenizer;

const BEST: &str = "mixed lengths, modelled: default policy over the best";
const EQUAL: &str = "mixed lengths, modelled: default policy over equal lengths";

/// Four nodes of eight, each rank with 32 requests under way.
const RANKS: u32 = 32;
const SEQUENCES: u32 = 32;
const REQUESTS: u32 = 3072;

pub(super) fn measure(plan: &Plan, measured: &mut Measured) -> Result<()> {
    if !plan.wants(BEST) && !plan.wants(EQUAL) {
        return Ok(());
    }
    let tokenizer = byte_tokenizer().map_err(|e| anyhow!("{e}"))?;
    let all = candidates(RANKS);
    let in_flight = RANKS * SEQUENCES;
    let mixed = mixed_lengths(in_flight, REQUESTS);
    let mut runs = vec![(PhasePolicy::AT_ONCE, equal_lengths(in_flight, REQUESTS))];
    runs.extend(all.iter().map(|candidate| (candidate.policy, mixed)));
    let mut reports = reports(&runs, &tokenizer)?;
    let equal = reports.remove(0);
    let note = |name: &str, report: &Report| {
        format!(
            "{name}: {:.0} tok/s, time per token {:.0} ms, to the first {:.1} s (p99 {:.1}), gap {:.0} ms (p99 {:.0}, longest {:.0})",
            report.output_rate,
            report.tpot_mean,
            report.ttft_mean,
            report.ttft_p99,
            report.gap_p50,
            report.gap_p99,
            report.gap_max
        )
    };
    let notes = &mut measured.notes;
    notes.push(note(
        "equal lengths, prefill first, at once, padded",
        &equal,
    ));
    let named = all.iter().zip(&reports);
    notes.extend(named.map(|(candidate, report)| note(&candidate.name, report)));
    let limits = Limits::default();
    let choice = choose(&reports, &limits);
    let best = choice.best.context("no policy was measured")?;
    let default = all
        .iter()
        .position(|candidate| candidate.policy == PhasePolicy::DEFAULT)
        .context("the default policy is not among those compared")?;
    let odd =
        |report: &Report| report.output_rate.partial_cmp(&0.0) != Some(std::cmp::Ordering::Greater);
    if odd(&equal) || reports.iter().any(odd) {
        bail!("a policy brought no tokens in the measured time");
    }
    if !limits.hold(&reports[default]) {
        bail!("the default policy does not keep the limits of gaps and first tokens");
    }
    notes.push(format!(
        "default: {}; best at all: {}; best within the limits: {}",
        all[default].name,
        all[best].name,
        choice.default.map_or("none", |place| &all[place].name)
    ));
    let rate = |report: &Report| report.output_rate;
    for (row, other) in [(BEST, rate(&reports[best])), (EQUAL, rate(&equal))] {
        let sample = Sample {
            ours: 100.0 * rate(&reports[default]) / other,
            floor: 100.0,
            peer: None,
        };
        measured.insert(0, row, sample);
    }
    Ok(())
}

/// Runs all, as many at a time as there are cores.
fn reports(runs: &[(PhasePolicy, Workload)], tokenizer: &Arc<Tokenizer>) -> Result<Vec<Report>> {
    let cores = std::thread::available_parallelism()?.get();
    let next = AtomicUsize::new(0);
    let mut reports = vec![None; runs.len()];
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..cores)
            .map(|_| {
                scope.spawn(|| -> Result<Vec<(usize, Report)>> {
                    let mut done = Vec::new();
                    loop {
                        let place = next.fetch_add(1, Ordering::Relaxed);
                        let Some((policy, workload)) = runs.get(place) else {
                            return Ok(done);
                        };
                        let report = run(&group(*policy), workload, tokenizer);
                        done.push((place, report.map_err(|e| anyhow!("{e}"))?));
                    }
                })
            })
            .collect();
        for thread in threads {
            let done = thread.join().map_err(|_| anyhow!("a group panicked"))?;
            for (place, report) in done? {
                reports[place] = Some(report);
            }
        }
        Ok::<_, anyhow::Error>(())
    })?;
    let all: Option<Vec<Report>> = reports.into_iter().collect();
    all.context("a policy was not run")
}

fn group(policy: PhasePolicy) -> GroupConfig {
    GroupConfig {
        ranks: RANKS,
        engine: EngineConfig {
            max_model_len: 4096,
            max_num_seqs: SEQUENCES,
            max_num_batched_tokens: 4096,
            max_waiting: 1 << 20,
            enable_prefix_caching: false,
            ..EngineConfig::default()
        },
        shape: ModelledShape {
            vocab_size: 128,
            num_blocks: SEQUENCES * 162,
            ..ModelledShape::default()
        },
        policy,
        costs: CostModel::new(&Hardware::ASCEND_910B3, &ModelSize::DEEPSEEK_R1, RANKS),
    }
}
