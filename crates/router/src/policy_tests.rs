use super::*;
use proptest::prelude::*;
use std::collections::{BTreeMap, BTreeSet};

use crate::registry::Group;

fn both(policy: Policy) -> Policies {
    Policies {
        prefill: policy,
        decode: policy,
    }
}

/// A request without history.
fn fresh() -> Wanted<'static> {
    static TRIED: Tried = Tried {
        prefill: Vec::new(),
        decode: Vec::new(),
        pairs: Vec::new(),
    };
    static WORK: Work = Work {
        prompt: 0,
        bytes: 0,
        prefix: Vec::new(),
    };
    Wanted {
        tried: &TRIED,
        work: &WORK,
        random: 0,
    }
}

fn back(picker: &mut Picker, side: Side, id: InstanceId) {
    picker.give_back(side, id, &Work::default(), false);
}

fn ids(range: std::ops::Range<u32>) -> Vec<InstanceId> {
    range.map(InstanceId).collect()
}

fn pools(prefill: std::ops::Range<u32>, decode: std::ops::Range<u32>) -> Pools {
    Pools {
        groups: vec![Group {
            prefill: ids(prefill),
            decode: ids(decode),
        }],
        ..Pools::default()
    }
}

/// C3.13: 2P2D, one and two requests at a time.
#[test]
fn c3_13_all_pairs_occur_and_every_instance_gets_its_share() {
    let pools = pools(0..2, 2..4);
    for policy in [Policy::LeastLoad, Policy::RoundRobin] {
        for concurrency in [1, 2] {
            let mut picker = Picker::new(both(policy));
            let mut share: BTreeMap<InstanceId, u32> = BTreeMap::new();
            let mut seen = BTreeSet::new();
            let mut running = std::collections::VecDeque::new();
            for _ in 0..100 {
                let (p, d) = picker.pair(&pools, fresh()).expect("a pair");
                *share.entry(p).or_default() += 1;
                *share.entry(d).or_default() += 1;
                seen.insert((p, d));
                // The prefill leg ends long before the decode leg.
                back(&mut picker, Side::Prefill, p);
                running.push_back(d);
                if running.len() == concurrency {
                    back(&mut picker, Side::Decode, running.pop_front().expect("one"));
                }
            }
            assert_eq!(seen.len(), 4, "{policy:?} {concurrency}: {seen:?}");
            assert!(
                share.values().all(|&n| n >= 40),
                "{policy:?} {concurrency}: {share:?}"
            );
        }
    }
}

#[test]
fn two_models_do_not_disturb_each_others_rotation() {
    let (a, b) = (pools(0..2, 2..4), pools(4..6, 6..8));
    let mut picker = Picker::new(both(Policy::RoundRobin));
    let mut seen = BTreeSet::new();
    for _ in 0..4 {
        seen.insert(picker.pair(&a, fresh()).expect("a pair"));
        picker.pair(&b, fresh());
        picker.pair(&b, fresh());
    }
    assert_eq!(seen.len(), 4);
}

#[test]
fn incompatible_instances_are_never_paired() {
    let pools = Pools {
        groups: vec![
            Group {
                prefill: ids(0..1),
                decode: ids(2..3),
            },
            Group {
                prefill: ids(1..2),
                decode: ids(3..4),
            },
        ],
        ..Pools::default()
    };
    let mut picker = Picker::new(both(Policy::LeastLoad));
    for _ in 0..20 {
        let (p, d) = picker.pair(&pools, fresh()).expect("a pair");
        assert_eq!(d.0, p.0 + 2);
    }
}

proptest! {
    #[test]
    fn load_decides_and_nothing_tried_comes_back(
        policy in prop_oneof![
            Just(Policy::LeastLoad),
            Just(Policy::RoundRobin),
            Just(Policy::PowerOfTwo),
            Just(Policy::PrefixAffinity),
            Just(Policy::PublicProxy),
        ],
        steps in proptest::collection::vec((0u8..4, 0usize..64), 1..200),
        tried_p in proptest::collection::vec(0u32..4, 0..3),
        tried_d in proptest::collection::vec(4u32..8, 0..3),
        tried_pairs in proptest::collection::vec((0u32..4, 4u32..8), 0..4),
    ) {
        let pools = pools(0..4, 4..8);
        let tried = Tried {
            prefill: tried_p.into_iter().map(InstanceId).collect(),
            decode: tried_d.into_iter().map(InstanceId).collect(),
            pairs: tried_pairs.into_iter().map(|(p, d)| (InstanceId(p), InstanceId(d))).collect(),
        };
        let mut picker = Picker::new(both(policy));
        let mut running: Vec<(Side, InstanceId)> = Vec::new();
        let mut count = [0u32; 8];
        for (what, at) in steps {
            if what == 3 && !running.is_empty() {
                let (side, id) = running.swap_remove(at % running.len());
                back(&mut picker, side, id);
                count[id.index()] -= 1;
                continue;
            }
            let open = |p: u32, d: u32| {
                let (p, d) = (InstanceId(p), InstanceId(d));
                !tried.prefill.contains(&p) && !tried.decode.contains(&d) && !tried.pairs.contains(&(p, d))
            };
            let possible = (0..4).any(|p| (4..8).any(|d| open(p, d)));
            match picker.pair(&pools, Wanted { tried: &tried, work: &Work::default(), random: at as u64 }) {
                None => prop_assert!(!possible),
                Some((p, d)) => {
                    prop_assert!(open(p.0, d.0));
                    if policy == Policy::LeastLoad {
                        let sums = (0..4).flat_map(|p| (4..8).map(move |d| (p, d)));
                        let sums = sums.filter(|&(p, d)| open(p, d));
                        let least = sums.map(|(p, d)| count[p as usize] + count[d as usize]).min();
                        prop_assert_eq!(Some(count[p.index()] + count[d.index()]), least);
                    }
                    for (side, id) in [(Side::Prefill, p), (Side::Decode, d)] {
                        running.push((side, id));
                        count[id.index()] += 1;
                    }
                }
            }
        }
        for (side, id) in running {
            back(&mut picker, side, id);
        }
        for id in 0..8 {
            prop_assert_eq!(picker.in_flight(InstanceId(id)), 0);
        }
    }
}

#[test]
fn a_long_prompt_counts_for_more_than_a_short_one() {
    let pools = pools(0..2, 2..3);
    let mut picker = Picker::new(both(Policy::LeastLoad));
    let of = |prompt| Work {
        prompt,
        ..Work::default()
    };
    let (long, short) = (of(8192), of(16));
    let mut pick = |work: &Work| {
        let pair = picker.pair(&pools, Wanted { work, ..fresh() });
        pair.expect("a pair").0
    };
    let busy = pick(&long);
    for _ in 0..8 {
        assert_ne!(pick(&short), busy);
    }
}

#[test]
fn a_prompt_that_is_computed_is_no_load_of_prefill_any_more() {
    let pools = pools(0..2, 2..3);
    let mut picker = Picker::new(both(Policy::LeastLoad));
    let work = Work {
        prompt: 8192,
        ..Work::default()
    };
    let (first, _) = picker
        .pair(
            &pools,
            Wanted {
                work: &work,
                ..fresh()
            },
        )
        .expect("a pair");
    picker.prefilled(first, &work);
    let (second, _) = picker.pair(&pools, fresh()).expect("a pair");
    assert_ne!(first, second, "idle both: the other is longer ago");
    let (third, _) = picker.pair(&pools, fresh()).expect("a pair");
    assert_eq!(third, first);
    picker.give_back(Side::Prefill, first, &work, true);
    assert_eq!(picker.in_flight(first), 1);
}

#[test]
fn a_known_prefix_returns_to_its_instance_until_that_is_too_busy() {
    let pools = pools(0..4, 4..8);
    let mut picker = Picker::new(both(Policy::PrefixAffinity));
    let work = |tail: u64| Work {
        prefix: vec![1, 2, tail],
        ..Work::default()
    };
    let mut pick = |tail| {
        let work = work(tail);
        picker
            .pair(
                &pools,
                Wanted {
                    work: &work,
                    ..fresh()
                },
            )
            .expect("a pair")
    };
    let home = pick(10);
    let mut others = 0;
    for tail in 11..14 {
        others += u32::from(pick(tail) != home);
    }
    assert_eq!(
        others, 1,
        "two more requests than the others have are too many"
    );
}

#[test]
fn of_two_by_chance_the_emptier_is_picked_and_chance_reaches_all() {
    let pools = pools(0..8, 8..9);
    let mut picker = Picker::new(both(Policy::PowerOfTwo));
    let mut seen = BTreeSet::new();
    let mut random = 0x9e37_79b9_7f4a_7c15_u64;
    for _ in 0..400 {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        let (p, d) = picker
            .pair(&pools, Wanted { random, ..fresh() })
            .expect("a pair");
        seen.insert(p);
        back(&mut picker, Side::Prefill, p);
        back(&mut picker, Side::Decode, d);
    }
    assert_eq!(seen.len(), 8);
    // One that is full is taken only against one that is as full.
    for _ in 0..50 {
        picker.take(Side::Prefill, InstanceId(0), &Work::default());
    }
    for step in 0..200u64 {
        let random = step.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let (p, d) = picker
            .pair(&pools, Wanted { random, ..fresh() })
            .expect("a pair");
        assert_ne!(p, InstanceId(0));
        back(&mut picker, Side::Prefill, p);
        back(&mut picker, Side::Decode, d);
    }
}
