//! The phase policies that are compared, and which of them is the default.

use super::{Lengths, Report, Workload};
use crate::phase::{PhasePolicy, Threshold};

/// A policy with a name.
#[derive(Clone, Debug, PartialEq)]
pub struct Candidate {
    /// What it does.
    pub name: String,
    /// The policy.
    pub policy: PhasePolicy,
}

/// What a policy must keep to be the default.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Limits {
    /// 99th percentile of the time between outputs over its median.
    pub gap_ratio: f64,
    /// 99th percentile of the time to the first token, in seconds.
    pub ttft_p99: f64,
}

/// Which of the measured policies is which, by place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Choice {
    /// Highest output rate within the limits.
    pub default: Option<usize>,
    /// Highest output rate at all.
    pub best: Option<usize>,
}

impl Default for Limits {
    /// 2 and 20 s.
    fn default() -> Self {
        Self {
            gap_ratio: 2.0,
            ttft_p99: 20.0,
        }
    }
}

impl Limits {
    /// Does a report keep them?
    pub fn hold(&self, report: &Report) -> bool {
        report.gap_p99 <= self.gap_ratio * report.gap_p50 && report.ttft_p99 <= self.ttft_p99
    }
}

/// The policies for a group of `ranks`: prompts at once, released from some number of requests per rank on,
/// in chunks; with padded and with true counts.
pub fn candidates(ranks: u32) -> Vec<Candidate> {
    let counts = |padded| if padded { "padded" } else { "true counts" };
    let mut all = Vec::new();
    for padded in [true, false] {
        all.push(Candidate {
            name: format!("prefill first, at once, {}", counts(padded)),
            policy: PhasePolicy {
                padded,
                ..PhasePolicy::AT_ONCE
            },
        });
        for interval in [8, 64] {
            all.push(Candidate {
                name: format!("apart, every {interval}th step, {}", counts(padded)),
                policy: PhasePolicy {
                    prefill_any_interval: interval,
                    prefill_run: 1,
                    padded,
                    ..PhasePolicy::AT_ONCE
                },
            });
        }
        for per_rank in [1, 2, 4, 8] {
            all.push(Candidate {
                name: format!("apart, from {per_rank} a rank, {}", counts(padded)),
                policy: PhasePolicy {
                    threshold: Threshold {
                        requests: per_rank * ranks,
                        tokens: 0,
                    },
                    prefill_run: 1,
                    longest_wait: u64::MAX,
                    padded,
                    ..PhasePolicy::AT_ONCE
                },
            });
        }
        for tokens in [32, 64, 128, 256, 512] {
            for filled in [false, true] {
                let fill = if filled { "filled on all ranks, " } else { "" };
                all.push(Candidate {
                    name: format!("chunks of {tokens}, {fill}{}", counts(padded)),
                    policy: PhasePolicy::chunks(ranks, tokens, filled, padded),
                });
            }
        }
    }
    all
}

/// The workload of the comparison: prompts of 1023 tokens, outputs uniform in 512 to 1536.
pub fn mixed_lengths(in_flight: u32, requests: u32) -> Workload {
    Workload {
        prompt: Lengths::Fixed(1023),
        output: Lengths::Uniform {
            low: 512,
            high: 1536,
        },
        in_flight,
        requests,
        seed: 1,
    }
}

/// The same with 1024 tokens out of every request.
pub fn equal_lengths(in_flight: u32, requests: u32) -> Workload {
    Workload {
        output: Lengths::Fixed(1024),
        ..mixed_lengths(in_flight, requests)
    }
}

/// Chooses among reports; of equals the first.
pub fn choose(reports: &[Report], limits: &Limits) -> Choice {
    let most = |keep: &dyn Fn(&Report) -> bool| {
        let mut best: Option<usize> = None;
        for (index, report) in reports
            .iter()
            .enumerate()
            .filter(|(_, report)| keep(report))
        {
            if best.is_none_or(|best| report.output_rate > reports[best].output_rate) {
                best = Some(index);
            }
        }
        best
    };
    Choice {
        default: most(&|report| limits.hold(report)),
        best: most(&|_| true),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::EngineConfig;
    use crate::modelled::{CostModel, GroupConfig, Hardware, ModelSize, ModelledShape, run};
    use crate::testing::byte_tokenizer;

    const RANKS: u32 = 8;
    const SEQS: u32 = 16;

    fn measure(policy: PhasePolicy, workload: Workload, drafts: Option<u32>) -> Report {
        let hardware = Hardware {
            ranks_per_node: 4,
            ..Hardware::ASCEND_910B3
        };
        let config = GroupConfig {
            ranks: RANKS,
            engine: EngineConfig {
                max_num_seqs: SEQS,
                max_num_batched_tokens: 4096,
                enable_prefix_caching: false,
                num_speculative_tokens: u32::from(drafts.is_some()),
                ..EngineConfig::default()
            },
            shape: ModelledShape {
                vocab_size: 128,
                num_blocks: SEQS * 128,
                right_drafts: drafts,
                ..ModelledShape::default()
            },
            policy,
            costs: CostModel::new(&hardware, &ModelSize::DEEPSEEK_R1, RANKS),
        };
        run(&config, &workload, &byte_tokenizer().unwrap()).unwrap()
    }

    /// Half the lengths of the comparison.
    fn mixed() -> Workload {
        Workload {
            output: Lengths::Uniform {
                low: 256,
                high: 768,
            },
            ..mixed_lengths(RANKS * SEQS, 3 * RANKS * SEQS)
        }
    }

    #[test]
    fn the_default_keeps_the_limits_and_prefill_at_once_loses_a_third_and_more() {
        let default = measure(PhasePolicy::DEFAULT, mixed(), None);
        let at_once = measure(PhasePolicy::AT_ONCE, mixed(), None);
        let equal = Workload {
            output: Lengths::Fixed(512),
            ..mixed()
        };
        let equal = measure(PhasePolicy::AT_ONCE, equal, None);
        assert!(Limits::default().hold(&default), "{default:?}");
        assert!(
            at_once.output_rate < 0.66 * default.output_rate,
            "{at_once:?} {default:?}"
        );
        assert!(
            default.output_rate > 0.8 * equal.output_rate,
            "{default:?} {equal:?}"
        );
        assert!(default.steps[2] > 0 && at_once.steps[2] == 0);
        // Virtual time: the same again.
        assert_eq!(measure(PhasePolicy::DEFAULT, mixed(), None), default);
    }

    #[test]
    fn drafts_that_are_right_make_a_group_faster() {
        let plain = measure(PhasePolicy::DEFAULT, mixed(), None);
        let drafting = measure(PhasePolicy::DEFAULT, mixed(), Some(700));
        let faster = drafting.output_rate / plain.output_rate;
        assert!((1.2..1.7).contains(&faster), "{faster}");
    }

    #[test]
    fn the_choice_is_the_fastest_within_the_limits() {
        let report = |output_rate, gap_p99, ttft_p99| Report {
            output_rate,
            gap_p50: 100.0,
            gap_p99,
            ttft_p99,
            ..Report::default()
        };
        let reports = [
            report(50.0, 150.0, 3.0),
            report(90.0, 201.0, 3.0),
            report(70.0, 200.0, 20.0),
            report(80.0, 150.0, 21.0),
        ];
        let choice = choose(&reports, &Limits::default());
        assert_eq!((choice.default, choice.best), (Some(2), Some(1)));
        assert_eq!(choose(&[], &Limits::default()).best, None);
    }

    #[test]
    fn candidates_are_valid_and_named_apart() {
        let all = candidates(32);
        let names: std::collections::BTreeSet<&str> =
            all.iter().map(|one| one.name.as_str()).collect();
        assert_eq!(names.len(), all.len());
        assert!(all.iter().all(|one| one.policy.validate().is_ok()));
        assert!(
            all.iter().any(|one| one.policy == PhasePolicy::DEFAULT),
            "the default is compared"
        );
    }
}
