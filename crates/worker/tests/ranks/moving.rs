//! Experts that change their seats while requests run: no answer shows it, the bytes sent do.

use crate::answers::{Case, FORCED, Outcome, assert_equal};
use crate::mixtral::mixtral;
use crate::threads::together;
use twinfer_config::{Dtype, MoeComm};
use twinfer_engine::eplb::EplbOptions;
use twinfer_engine::phase::PhasePolicy;

fn weights_sent(outcomes: &[Outcome]) -> u64 {
    outcomes.iter().map(|rank| rank.sent.weights).sum()
}

#[test]
fn forced_swaps_change_no_answer() {
    for (case, numbers) in [
        (Case::QWEN, &[1, 2, 4, 8, 16][..]),
        (
            Case {
                quantize: true,
                comm: MoeComm::AllGather,
                ..Case::QWEN
            },
            &[2, 16],
        ),
        (
            Case {
                dtype: Dtype::F32,
                ..Case::QWEN
            },
            &[4],
        ),
        (
            Case {
                model: "deepseek_v3",
                quantize: true,
                ..Case::QWEN
            },
            &[2, 4],
        ),
        (
            Case {
                model: "deepseek_v3",
                drafts: 2,
                ..Case::QWEN
            },
            &[4],
        ),
    ] {
        let alone = case.alone();
        for &ranks in numbers {
            for redundant in [0, ranks] {
                let eplb = EplbOptions {
                    redundant,
                    ..FORCED
                };
                let moving = Case { eplb, ..case };
                let outcomes = together(&moving, &[ranks], true);
                assert_equal(&alone, &outcomes, &format!("{moving:?}, {ranks} ranks"));
                // A rank alone has nobody to send to.
                assert_eq!(weights_sent(&outcomes) > 0, ranks > 1, "{moving:?}");
            }
        }
    }
}

/// Static activations have a scale of each expert, which moves with it; also where an expert has a bias and another none.
#[test]
fn experts_of_int8_checkpoints_move_with_their_scales() {
    for model in [
        "w8a8/qwen3_moe_compressed",
        "w8a8/qwen3_moe_modelslim",
        "w8a8/deepseek_v3_modelslim_mix",
    ] {
        let case = Case {
            model,
            eplb: FORCED,
            requests: 7,
            ..Case::QWEN
        };
        let outcomes = together(&case, &[4], true);
        assert_equal(&case.alone(), &outcomes, model);
        assert!(weights_sent(&outcomes) > 0);
    }
}

/// Placements from counted loads, on one node and on two, after so many steps and after prefill.
#[test]
fn balancing_by_loads_changes_no_answer() {
    let dir = mixtral();
    let mixtral: &'static str = dir.path().to_str().unwrap().to_owned().leak();
    let apart = PhasePolicy {
        prefill_run: 1,
        ..PhasePolicy::AT_ONCE
    };
    for (model, counts, interval, after_prefill, redundant) in [
        ("qwen3_moe", &[4][..], 6, false, 0),
        ("qwen3_moe", &[4], 6, false, 8),
        ("qwen3_moe", &[2, 2], 0, true, 4),
        ("deepseek_v3", &[2, 2], 6, false, 4),
        (mixtral, &[2], 6, true, 2),
    ] {
        let eplb = EplbOptions {
            interval,
            after_prefill,
            redundant,
            forced: false,
        };
        let case = Case {
            model,
            eplb,
            policy: apart,
            ..Case::QWEN
        };
        let outcomes = together(&case, counts, true);
        assert_equal(&case.alone(), &outcomes, &format!("{case:?} on {counts:?}"));
        assert!(weights_sent(&outcomes) > 0, "{case:?} on {counts:?}");
    }
}

#[test]
fn nothing_moves_unless_it_is_asked() {
    let eplb = EplbOptions {
        redundant: 4,
        ..EplbOptions::default()
    };
    let case = Case { eplb, ..Case::QWEN };
    let outcomes = together(&case, &[4], true);
    assert_equal(&case.alone(), &outcomes, "redundant seats alone");
    assert_eq!(weights_sent(&outcomes), 0);
}

/// A swap of all seats sends each expert of a layer that goes to another rank once, and no more.
#[test]
fn the_bytes_of_moves_are_those_of_the_experts() {
    let case = Case {
        eplb: EplbOptions {
            interval: 5,
            ..FORCED
        },
        ..Case::QWEN
    };
    let outcomes = together(&case, &[16], true);
    let plans = outcomes[0].steps / 5;
    // In bf16 3 matrices of 64 by 48, with two heads of 24 bytes; one seat per rank, so all 16 move in each of 3 layers.
    let expert = 3 * 64 * 48 * 2 + 2 * 24;
    let sent = weights_sent(&outcomes);
    assert_eq!(sent % expert, 0, "{sent}");
    let moved = sent / expert;
    assert!(
        moved > 0 && moved.is_multiple_of(16) && moved <= plans * 3 * 16,
        "{moved} in {plans} plans"
    );
}

/// What redundant seats and experts on their way take is planned before anything is read.
#[test]
fn memory_for_seats_is_planned() {
    let plan = |eplb, ranks: u32| {
        let case = Case {
            eplb,
            requests: 1,
            ..Case::QWEN
        };
        let outcomes = together(&case, &[ranks], true);
        (outcomes[0].weight_bytes, outcomes[0].workspace_bytes)
    };
    let none = EplbOptions::default();
    let redundant = |redundant| EplbOptions { redundant, ..none };
    // In bf16, of 3 layers.
    let expert = 3 * 64 * 48 * 2;
    let (four, workspace) = plan(none, 4);
    assert_eq!(plan(redundant(4), 4), (four + 3 * expert, workspace));
    // All on one rank, some of them twice.
    let (one, workspace) = plan(none, 1);
    assert_eq!(plan(redundant(4), 1), (one + 4 * 3 * expert, workspace));
    // Five seats, one that is sent, and one from each rank.
    let moving = EplbOptions {
        interval: 1000,
        ..redundant(4)
    };
    let (bytes, with) = plan(moving, 4);
    let (same, without) = plan(redundant(4), 4);
    assert_eq!(bytes, same);
    assert_eq!(with - without, (5 + 1 + 4) * expert);
}
