//! How rows come to their experts, and as what: answers are the same, bytes are not.

use crate::answers::{Case, Outcome, assert_equal};
use crate::mixtral::mixtral;
use crate::threads::together;
use twinfer_config::{Dtype, MoeComm};
use twinfer_engine::phase::PhasePolicy;

const GATHER: Case = Case {
    comm: MoeComm::AllGather,
    ..Case::QWEN
};

#[test]
fn rows_that_go_to_all_ranks_give_the_answers_of_one() {
    for (case, numbers) in [
        (GATHER, &[1, 2, 4, 8, 16][..]),
        (
            Case {
                quantize: true,
                ..GATHER
            },
            &[2, 4, 16],
        ),
        (
            Case {
                dtype: Dtype::F32,
                ..GATHER
            },
            &[4],
        ),
        (
            Case {
                model: "deepseek_v3",
                drafts: 2,
                ..GATHER
            },
            &[4],
        ),
        (
            Case {
                model: "deepseek_v3",
                quantize: true,
                ..GATHER
            },
            &[2],
        ),
    ] {
        // Drafts change no answer; their layer is part of the fingerprint.
        let alone = case.alone();
        for ranks in numbers {
            let outcomes = together(&case, &[*ranks], true);
            assert_equal(&alone, &outcomes, &format!("{case:?}, {ranks} ranks"));
        }
    }
}

/// Over two nodes rows go in two stages, padded or not.
#[test]
fn gathers_over_nodes_give_the_answers_of_one() {
    let alone = GATHER.alone();
    let gather = |padded, counts: &[u32]| {
        let policy = PhasePolicy {
            padded,
            ..PhasePolicy::DEFAULT
        };
        let case = Case { policy, ..GATHER };
        let outcomes = together(&case, counts, true);
        assert_equal(&alone, &outcomes, &format!("{counts:?} padded {padded}"));
        outcomes
    };
    let (exact, padded) = (gather(false, &[2, 2]), gather(true, &[2, 2]));
    gather(true, &[1, 3]);
    // Padded parts are as long on every rank, and longer than they must be.
    let rows = |outcomes: &[Outcome]| {
        outcomes
            .iter()
            .map(|rank| rank.sent.rows)
            .collect::<Vec<_>>()
    };
    let (exact, padded) = (rows(&exact), rows(&padded));
    assert!(padded.iter().all(|bytes| *bytes == padded[0]), "{padded:?}");
    assert!(
        exact.iter().sum::<u64>() < padded.iter().sum(),
        "{exact:?} {padded:?}"
    );
}

/// Checkpoints in int8: with a scale per token rows travel as int8; with fixed scales each expert has its own, so they
/// travel as they are.
#[test]
fn checkpoints_in_int8_give_the_answers_of_one_rank() {
    for model in [
        "w8a8/qwen3_moe_compressed",
        "w8a8/qwen3_moe_modelslim",
        "w8a8/deepseek_v3_compressed",
        "w8a8/deepseek_v3_modelslim",
        "w8a8/deepseek_v3_modelslim_mix",
    ] {
        for comm in [MoeComm::AllToAll, MoeComm::AllGather] {
            let case = Case {
                model,
                comm,
                requests: 7,
                ..Case::QWEN
            };
            assert_equal(
                &case.alone(),
                &together(&case, &[4], true),
                &format!("{case:?}"),
            );
        }
    }
}

/// What four ranks sent for rows, in f32, bf16 and int8.
fn in_all_forms(comm: MoeComm, requests: u64) -> [Vec<Outcome>; 3] {
    let forms = [
        (Dtype::F32, false),
        (Dtype::Bf16, false),
        (Dtype::Bf16, true),
    ];
    forms.map(|(dtype, quantize)| {
        let case = Case {
            dtype,
            quantize,
            comm,
            requests,
            ..Case::QWEN
        };
        let outcomes = together(&case, &[4], true);
        assert_equal(&case.alone(), &outcomes, &format!("{case:?}"));
        outcomes
    })
}

fn rows_sent(outcomes: &[Outcome]) -> u64 {
    outcomes.iter().map(|rank| rank.sent.rows).sum()
}

/// One request alone, whose rows all go to three other ranks in each of three layers: heads of 8 bytes from each rank in
/// each step, and for a row four choices and 64 values.
#[test]
fn a_row_has_the_bytes_of_its_form() {
    let all = in_all_forms(MoeComm::AllGather, 1);
    let prompts = all.iter().zip([256, 128, 68]).map(|(outcomes, form)| {
        let heads = outcomes[0].steps * 4 * 8;
        let bytes = rows_sent(outcomes) / 9 - heads;
        assert_eq!(rows_sent(outcomes) % 9, 0);
        assert_eq!(bytes % (16 + form), 0, "{bytes} in rows of {form}");
        let generated: usize = outcomes
            .iter()
            .flat_map(|rank| &rank.answers)
            .map(|(_, tokens)| tokens.len())
            .sum();
        bytes / (16 + form) + 1 - generated as u64
    });
    let prompts: Vec<u64> = prompts.collect();
    assert!(prompts[0] > 0);
    assert_eq!(prompts, [prompts[0]; 3]);
}

/// Other roundings choose other experts, so the ranks that rows go to are as many only nearly.
#[test]
fn rows_of_int8_models_are_shorter_on_the_way() {
    let [f32, bf16, int8] = in_all_forms(MoeComm::AllToAll, 13).map(|all| rows_sent(&all));
    assert!(bf16 < f32 * 7 / 10, "{bf16} of {f32}");
    assert!(int8 < f32 * 5 / 10, "{int8} of {f32}");
}

#[test]
fn mixtral_gives_the_answers_of_one_rank() {
    let dir = mixtral();
    let model: &'static str = dir.path().to_str().unwrap().to_owned().leak();
    for (quantize, comm) in [
        (false, MoeComm::AllToAll),
        (true, MoeComm::AllToAll),
        (true, MoeComm::AllGather),
    ] {
        let case = Case {
            model,
            quantize,
            comm,
            ..Case::QWEN
        };
        let alone = case.alone();
        for ranks in [1, 2, 4] {
            let outcomes = together(&case, &[ranks], true);
            assert_equal(&alone, &outcomes, &format!("{case:?}, {ranks} ranks"));
        }
    }
}
