use super::moves::keep_in_place;
use super::*;
use crate::placement::ExpertPlacement;
use proptest::prelude::*;
use std::collections::{BTreeMap, BTreeSet};

/// The shapes and loads that a deployment can have.
fn cases() -> impl Strategy<Value = (EplbShape, Vec<u64>)> {
    shapes(any::<bool>())
}

/// Those with as many groups on every node.
fn grouped_cases() -> impl Strategy<Value = (EplbShape, Vec<u64>)> {
    shapes(Just(true))
}

fn shapes(grouped: impl Strategy<Value = bool>) -> impl Strategy<Value = (EplbShape, Vec<u64>)> {
    (1u32..4, 1u32..4, 1u32..4, 1u32..5, 0u32..4, grouped).prop_flat_map(
        |(nodes, per_node, groups, own, extra, grouped)| {
            let ranks = nodes * per_node;
            let groups = if grouped { groups * nodes } else { 1 };
            // Divisible by ranks and groups.
            let experts = ranks * groups * own;
            let shape = EplbShape {
                experts,
                redundant: extra * ranks,
                groups,
                nodes,
                ranks,
            };
            let load = prop_oneof![Just(0), 0u64..100, 0u64..100_000];
            let loads = prop::collection::vec(load, experts as usize..=experts as usize);
            (Just(shape), loads)
        },
    )
}

fn in_order(shape: &EplbShape) -> ExpertPlacement {
    ExpertPlacement::in_order(shape.experts, shape.redundant, shape.ranks).unwrap()
}

fn most_per_replica(placement: &ExpertPlacement, loads: &[u64]) -> f64 {
    let share =
        |(expert, load): (u32, &u64)| *load as f64 / placement.seats_of(expert).len() as f64;
    (0..).zip(loads).map(share).fold(0.0, f64::max)
}

proptest! {
    #[test]
    fn every_expert_sits_and_every_rank_has_as_many_seats((shape, loads) in cases()) {
        let placement = balance(&loads, &shape).unwrap();
        prop_assert_eq!(placement.seats().len() as u32, shape.experts + shape.redundant);
        prop_assert_eq!(placement.seats_per_rank() * shape.ranks, shape.experts + shape.redundant);
        let sitting: BTreeSet<u32> = placement.seats().iter().copied().collect();
        prop_assert_eq!(sitting.len() as u32, shape.experts);
        for expert in 0..shape.experts {
            for seat in placement.seats_of(expert) {
                prop_assert_eq!(placement.seats()[*seat as usize], expert);
            }
        }
    }

    #[test]
    fn rounds_have_each_move_once_and_no_rank_twice((shape, loads) in cases(), turn in 0usize..9) {
        let old = in_order(&shape);
        let mut seats = balance(&loads, &shape).unwrap().seats().to_vec();
        let count = seats.len();
        seats.rotate_left(turn % count);
        let new = ExpertPlacement::new(shape.experts, shape.ranks, seats).unwrap();
        let all = moves(&old, &new, &shape).unwrap();
        let rounds = rounds(&old, &all);
        let mut seen = Vec::new();
        let (mut sent, mut got) = (BTreeMap::<u32, usize>::new(), BTreeMap::<u32, usize>::new());
        for round in &rounds {
            let (mut send, mut get) = (BTreeSet::new(), BTreeSet::new());
            for step in round {
                let (from, to) = (old.rank_of(step.from), old.rank_of(step.seat));
                prop_assert!(from != to && send.insert(from) && get.insert(to));
                *sent.entry(from).or_default() += 1;
                *got.entry(to).or_default() += 1;
                seen.push(step.seat);
            }
        }
        seen.sort_unstable();
        let far = all.iter().filter(|step| old.rank_of(step.from) != old.rank_of(step.seat));
        prop_assert_eq!(seen, far.map(|step| step.seat).collect::<Vec<_>>());
        // The first round that is free comes before the busiest sender's and receiver's moves are through.
        let most = |counts: &BTreeMap<u32, usize>| counts.values().copied().max().unwrap_or(0);
        prop_assert!(rounds.len() <= most(&sent) + most(&got));
    }

    #[test]
    fn a_group_stays_on_one_node((shape, loads) in grouped_cases()) {
        prop_assert!(shape.is_hierarchical());
        let placement = balance(&loads, &shape).unwrap();
        let mut nodes = BTreeMap::<u32, BTreeSet<u32>>::new();
        for (seat, expert) in (0..).zip(placement.seats()) {
            let node = placement.rank_of(seat) / (shape.ranks / shape.nodes);
            nodes.entry(expert / (shape.experts / shape.groups)).or_default().insert(node);
        }
        prop_assert!(nodes.values().all(|nodes| nodes.len() == 1), "{:?}", nodes);
    }

    #[test]
    fn no_replica_has_more_to_do_than_the_hottest_without_one((shape, loads) in cases()) {
        // One more seat per rank: the largest share of a replica does not grow.
        let more = EplbShape { redundant: shape.redundant + shape.ranks, ..shape };
        let (fewer, more) = (balance(&loads, &shape).unwrap(), balance(&loads, &more).unwrap());
        prop_assert!(most_per_replica(&more, &loads) <= most_per_replica(&fewer, &loads));
    }

    #[test]
    fn only_ratios_of_loads_matter((shape, loads) in cases()) {
        let doubled: Vec<u64> = loads.iter().map(|load| load * 2).collect();
        prop_assert_eq!(balance(&doubled, &shape).unwrap(), balance(&loads, &shape).unwrap());
    }

    #[test]
    fn a_rebalance_is_never_worse_than_what_was((shape, loads) in cases(), before in any::<u64>()) {
        // From the order of numbers, and from what other loads had led to.
        let others: Vec<u64> = loads.iter().rev().map(|load| load.rotate_left(7) ^ (before & 0xFFFF)).collect();
        for old in [in_order(&shape), balance(&others, &shape).unwrap()] {
            let new = rebalance(&old, &loads, &shape).unwrap();
            prop_assert!(worst_load(&new, &loads) <= worst_load(&old, &loads));
            let again = rebalance(&new, &loads, &shape).unwrap();
            prop_assert_eq!(&again, &new, "the same loads move nothing twice");
        }
    }

    #[test]
    fn moves_lead_from_old_to_new((shape, loads) in cases()) {
        let old = in_order(&shape);
        let new = rebalance(&old, &loads, &shape).unwrap();
        let moves = moves(&old, &new, &shape).unwrap();
        let mut seats = old.seats().to_vec();
        for step in &moves {
            prop_assert_eq!(old.seats()[step.from as usize], step.expert, "read from the old weights");
            seats[step.seat as usize] = step.expert;
        }
        prop_assert_eq!(&seats[..], new.seats());
        let cost = cost(&new, &moves, &shape, 1000);
        prop_assert_eq!(cost.local + cost.inner + cost.outer, moves.len() as u64);
        prop_assert_eq!(cost.bytes, (cost.inner + cost.outer) * 1000);
        prop_assert!(cost.most_per_rank <= new.seats_per_rank().into());
    }

    #[test]
    fn naming_in_place_changes_no_load_and_saves_moves((shape, loads) in cases()) {
        let old = in_order(&shape);
        let plain = balance(&loads, &shape).unwrap();
        let kept = keep_in_place(&old, &plain, &shape).unwrap();
        prop_assert_eq!(worst_load(&kept, &loads), worst_load(&plain, &loads));
        let alike = |placement: &ExpertPlacement| {
            placement.seats().iter().zip(old.seats()).filter(|(a, b)| a == b).count()
        };
        let same_ranks = |placement: &ExpertPlacement| {
            let mut ranks: Vec<Vec<u32>> = placement
                .seats()
                .chunks(placement.seats_per_rank() as usize)
                .map(|seats| { let mut seats = seats.to_vec(); seats.sort_unstable(); seats })
                .collect();
            ranks.sort();
            ranks
        };
        prop_assert_eq!(same_ranks(&kept), same_ranks(&plain));
        if shape.ranks == 1 {
            prop_assert!(alike(&kept) >= alike(&plain));
        }
    }
}

#[test]
fn placements_equal_those_of_the_published_implementation() {
    let path = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../../testdata/golden/eplb/eplb.json"
    );
    let golden: serde_json::Value = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
    let number = |case: &serde_json::Value, name: &str| case[name].as_u64().unwrap() as u32;
    let numbers = |list: &serde_json::Value| -> Vec<u64> {
        list.as_array()
            .unwrap()
            .iter()
            .map(|n| n.as_u64().unwrap())
            .collect()
    };
    let cases = golden["cases"].as_array().unwrap();
    assert_eq!(cases.len(), 7);
    for (index, case) in cases.iter().enumerate() {
        let experts = number(case, "experts");
        let shape = EplbShape {
            experts,
            redundant: number(case, "slots") - experts,
            groups: number(case, "groups"),
            nodes: number(case, "nodes"),
            ranks: number(case, "devices"),
        };
        for layer in 0..number(case, "layers") as usize {
            let loads = numbers(&case["weights"][layer]);
            let placement = balance(&loads, &shape).unwrap();
            let wanted = numbers(&case["physical_to_logical"][layer]);
            let got: Vec<u64> = placement
                .seats()
                .iter()
                .map(|expert| (*expert).into())
                .collect();
            assert_eq!(got, wanted, "case {index} layer {layer}");
            let counts: Vec<u64> = (0..experts)
                .map(|e| placement.seats_of(e).len() as u64)
                .collect();
            assert_eq!(
                counts,
                numbers(&case["replica_count"][layer]),
                "case {index}"
            );
            let mean = loads.iter().sum::<u64>() as f64 / f64::from(shape.ranks);
            let ratio = worst_load(&placement, &loads) / mean;
            let wanted = case["max_over_mean_device_load"][layer].as_f64().unwrap();
            assert!(
                (ratio - wanted).abs() < 1e-5,
                "case {index}: {ratio} {wanted}"
            );
        }
    }
}

#[test]
fn redundant_seats_go_to_the_hottest() {
    let shape = EplbShape {
        experts: 4,
        redundant: 2,
        groups: 1,
        nodes: 1,
        ranks: 2,
    };
    let placement = balance(&[10, 100, 40, 5], &shape).unwrap();
    let counts: Vec<usize> = (0..4)
        .map(|expert| placement.seats_of(expert).len())
        .collect();
    assert_eq!(counts, [1, 3, 1, 1]);
    // One rank has the 40, the 5 and a replica of the 100.
    let worst = worst_load(&placement, &[10, 100, 40, 5]);
    assert!((worst - (100.0 / 3.0 + 45.0)).abs() < 1e-6, "{worst}");
}

#[test]
fn a_small_change_of_loads_moves_few_experts() {
    let shape = EplbShape {
        experts: 64,
        redundant: 16,
        groups: 8,
        nodes: 2,
        ranks: 8,
    };
    let loads: Vec<u64> = (0..64u64)
        .map(|expert| 1000 + expert * expert * 37 % 911)
        .collect();
    let old = rebalance(&in_order(&shape), &loads, &shape).unwrap();
    assert!(moves(&old, &old, &shape).unwrap().is_empty());
    // Named anew, a placement that is the same but for its names moves nothing.
    let reversed: Vec<u32> = old.seats().chunks(10).rev().flatten().copied().collect();
    let reversed = ExpertPlacement::new(64, 8, reversed).unwrap();
    let kept = keep_in_place(&old, &reversed, &shape).unwrap();
    assert_eq!(kept, old);
}

#[test]
fn sources_of_moves_are_near() {
    let shape = EplbShape {
        experts: 4,
        redundant: 4,
        groups: 2,
        nodes: 2,
        ranks: 4,
    };
    let place = |seats: [u32; 8]| ExpertPlacement::new(4, 4, seats.to_vec()).unwrap();
    let old = place([0, 1, 2, 3, 0, 1, 2, 3]);
    let new = place([1, 0, 0, 2, 0, 1, 1, 3]);
    let moves = moves(&old, &new, &shape).unwrap();
    let from: Vec<(u32, u32)> = moves.iter().map(|step| (step.seat, step.from)).collect();
    // Own rank, own rank, own node, own rank, own node.
    assert_eq!(from, [(0, 1), (1, 0), (2, 0), (3, 2), (6, 5)]);
    let cost = cost(&new, &moves, &shape, 10);
    assert_eq!(
        (cost.local, cost.inner, cost.outer, cost.bytes),
        (3, 2, 0, 20)
    );
    assert_eq!(cost.most_per_rank, 2);
}

#[test]
fn shapes_and_lengths_are_checked() {
    let shape = EplbShape {
        experts: 8,
        redundant: 0,
        groups: 2,
        nodes: 2,
        ranks: 4,
    };
    assert!(balance(&[1; 8], &shape).is_ok());
    assert!(balance(&[1; 7], &shape).is_err());
    for wrong in [
        EplbShape { groups: 3, ..shape },
        EplbShape { groups: 0, ..shape },
        EplbShape { nodes: 0, ..shape },
        EplbShape { ranks: 3, ..shape },
        EplbShape {
            redundant: 2,
            ..shape
        },
        EplbShape {
            experts: 0,
            ..shape
        },
    ] {
        assert!(
            balance(&vec![1; wrong.experts as usize], &wrong).is_err(),
            "{wrong:?}"
        );
    }
    // Three nodes of two groups: spread over all ranks alike.
    let global = EplbShape { nodes: 3, ..shape };
    assert!(!global.is_hierarchical() && balance(&[1; 8], &global).is_ok());
}

#[test]
fn statistics_count_experts_and_fade() {
    let mut stats = LoadStats::new(2, 3);
    stats.count(1, [0, 2, 2, 7]);
    stats.count(9, [0]);
    assert_eq!(stats.window(), [0, 0, 0, 1, 0, 2]);
    stats.close(&[0, 0, 0, 4, 0, 8]);
    assert_eq!(stats.window(), [0; 6]);
    stats.close(&[0, 0, 0, 1, 1, 1]);
    assert_eq!(stats.loads(1), [3, 1, 5]);
    assert_eq!(
        (stats.loads(0), stats.loads(2)),
        (&[0u64, 0, 0][..], &[][..])
    );
    stats.close(&[1]);
    assert_eq!(stats.loads(1), [3, 1, 5]);
}
