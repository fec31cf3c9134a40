//! Ranks as threads of this process: many shapes quickly.

use crate::answers::{Case, Outcome, assert_equal};
use twinfer_comm::{Options, Topology, loopback, start_up_test};
use twinfer_config::Dtype;
use twinfer_engine::phase::{Mixing, PhasePolicy};
use twinfer_protocol::Epoch;

const EPOCH: Epoch = Epoch(5);

pub(crate) fn together(case: &Case, counts: &[u32], shares: bool) -> Vec<Outcome> {
    let topology = Topology::new(counts).unwrap();
    let groups = loopback(&topology, shares, EPOCH, Options::default()).unwrap();
    std::thread::scope(|scope| {
        let ranks: Vec<_> = groups
            .into_iter()
            .map(|mut group| {
                scope.spawn(move || {
                    start_up_test(&mut group, EPOCH).unwrap();
                    case.as_rank(group).unwrap()
                })
            })
            .collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

#[test]
fn any_number_of_ranks_gives_the_answers_of_one() {
    for (case, numbers) in [
        (Case::QWEN, &[1, 2, 4, 8, 16][..]),
        (
            Case {
                quantize: true,
                ..Case::QWEN
            },
            &[2, 8],
        ),
        (
            Case {
                dtype: Dtype::F32,
                ..Case::QWEN
            },
            &[2],
        ),
        (
            Case {
                model: "deepseek_v2",
                ..Case::QWEN
            },
            &[2, 4],
        ),
        (
            Case {
                model: "deepseek_v3",
                quantize: true,
                ..Case::QWEN
            },
            &[2, 4],
        ),
    ] {
        let alone = case.alone();
        for ranks in numbers {
            let outcomes = together(&case, &[*ranks], true);
            assert_equal(&alone, &outcomes, &format!("{case:?}, {ranks} ranks"));
        }
    }
}

#[test]
fn drafts_change_no_answer_though_ranks_draft_differently() {
    for (drafts, quantize) in [(1, false), (3, false), (2, true)] {
        let plain = Case {
            model: "deepseek_v3",
            quantize,
            ..Case::QWEN
        };
        let case = Case { drafts, ..plain };
        // With the draft layer more of the files is read, which is another fingerprint.
        let alone = Outcome {
            fingerprint: case.alone().fingerprint,
            ..plain.alone()
        };
        let outcomes = together(&case, &[2], true);
        assert_equal(&alone, &outcomes, &format!("{drafts} drafts"));
    }
}

/// One request on each rank in turn, all others without work; and fewer and more requests than ranks.
#[test]
fn ranks_without_work_take_part() {
    for requests in [1, 2, 3, 5] {
        let case = Case {
            requests,
            ..Case::QWEN
        };
        let outcomes = together(&case, &[4], true);
        assert_equal(&case.alone(), &outcomes, &format!("{requests} requests"));
    }
}

#[test]
fn policies_and_nodes_change_no_answer() {
    let apart = PhasePolicy {
        prefill_run: 1,
        ..PhasePolicy::AT_ONCE
    };
    let mixed = PhasePolicy {
        mixing: Mixing::Chunks { tokens: 7 },
        padded: true,
        ..PhasePolicy::DEFAULT
    };
    let alone = Case::QWEN.alone();
    for (policy, counts, shares) in [
        (PhasePolicy::AT_ONCE, &[2, 2][..], true),
        (apart, &[2, 2], false),
        (mixed, &[1, 1], true),
    ] {
        let case = Case {
            policy,
            ..Case::QWEN
        };
        let outcomes = together(&case, counts, shares);
        assert_equal(&alone, &outcomes, &format!("{policy:?} {counts:?}"));
    }
}

/// With N ranks a rank reads and keeps 1/N of the experts beside all that is not an expert.
#[test]
fn a_rank_reads_its_own_experts_only() {
    let case = Case {
        requests: 1,
        ..Case::QWEN
    };
    let whole = case.alone();
    let share = |ranks: u32| {
        let outcomes = together(&case, &[ranks], true);
        let first = (outcomes[0].file_bytes, outcomes[0].weight_bytes);
        for outcome in &outcomes {
            assert_eq!((outcome.file_bytes, outcome.weight_bytes), first);
        }
        first
    };
    let (half, quarter) = (share(2), share(4));
    // whole = rest + experts, half = rest + experts / 2, quarter = rest + experts / 4.
    for (whole, half, quarter) in [
        (whole.file_bytes, half.0, quarter.0),
        (whole.weight_bytes, half.1, quarter.1),
    ] {
        assert!(half < whole);
        assert_eq!(whole - half, 2 * (half - quarter));
    }
    // 3 layers of 16 experts of 3 matrices of 64 by 48, in bf16.
    assert_eq!(whole.file_bytes - half.0, 3 * 8 * 3 * 64 * 48 * 2);
}
