//! All of it together: models, types, ways, numbers of ranks, and experts that move or stay.

use crate::answers::{Case, FORCED, assert_equal};
use crate::threads::together;
use twinfer_config::{Dtype, MoeComm};
use twinfer_engine::eplb::EplbOptions;

#[test]
fn every_combination_gives_the_answers_of_one_rank() {
    for model in ["qwen3_moe", "deepseek_v3"] {
        for (dtype, quantize) in [
            (Dtype::Bf16, false),
            (Dtype::Bf16, true),
            (Dtype::F32, false),
        ] {
            let plain = Case {
                model,
                dtype,
                quantize,
                requests: 5,
                ..Case::QWEN
            };
            let alone = plain.alone();
            for comm in [MoeComm::AllToAll, MoeComm::AllGather] {
                for ranks in [1, 2, 4, 8, 16_u32] {
                    let moving = EplbOptions {
                        redundant: ranks,
                        ..FORCED
                    };
                    for eplb in [EplbOptions::default(), moving] {
                        let case = Case {
                            comm,
                            eplb,
                            ..plain
                        };
                        let outcomes = together(&case, &[ranks], true);
                        assert_equal(&alone, &outcomes, &format!("{case:?}, {ranks} ranks"));
                    }
                }
            }
        }
    }
}
