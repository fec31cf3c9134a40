use super::*;
use proptest::prelude::*;
use std::collections::BTreeMap;
use twinfer_protocol::{Epoch, Fingerprint};

fn topology() -> Topology {
    Topology::new(&[2, 3]).unwrap()
}

fn join(rank: u32, pid: u32) -> Join {
    let topology = topology();
    Join {
        identity: Identity {
            instance: "deep".to_owned(),
            epoch: Epoch(7),
            version: "1.0".to_owned(),
            fingerprint: Fingerprint {
                id: "aa".to_owned(),
                quantization: "w8a8".to_owned(),
                ..Fingerprint::default()
            },
        },
        counts: topology.counts(),
        shares: true,
        slot_bytes: 4096,
        info: RankInfo {
            pid,
            ..RankInfo::of(rank, &topology)
        },
    }
}

fn table() -> Table {
    Table::new(join(0, 100), &topology())
}

fn changed(rank: u32, change: impl FnOnce(&mut Join)) -> Join {
    let mut join = join(rank, 5);
    change(&mut join);
    join
}

#[test]
fn all_ranks_in_any_order_make_a_group() {
    let mut table = table();
    for rank in [3, 1, 4] {
        assert_eq!(table.join(join(rank, rank)), Verdict::Wait);
        assert_eq!(table.ranks(), None);
    }
    assert_eq!(table.join(join(2, 2)), Verdict::Complete);
    let ranks = table.ranks().unwrap();
    assert!(ranks.iter().map(|info| info.rank).eq(0..5));
    assert_eq!(
        (ranks[3].node, ranks[3].local_rank, ranks[3].pid),
        (1, 1, 3)
    );
}

#[test]
fn strangers_are_turned_away_and_the_group_waits_on() {
    let mut table = table();
    for stranger in [
        changed(1, |join| join.identity.instance = "other".to_owned()),
        changed(1, |join| join.identity.epoch = Epoch(8)),
    ] {
        let Verdict::Refuse(refusal) = table.join(stranger) else {
            panic!("a stranger was taken");
        };
        let text = refusal.to_string();
        assert!(
            text.contains("instance deep (epoch 0000000000000007)"),
            "{text}"
        );
    }
    assert_eq!(table.join(join(1, 1)), Verdict::Wait);
    let missing = table.missing(30).to_string();
    assert!(missing.contains("within 30 s: [2, 3, 4]"), "{missing}");
    assert!(
        missing.contains("turned away") && missing.contains("other"),
        "{missing}"
    );
}

#[test]
fn what_does_not_fit_is_named_with_both_values() {
    let cases: [(Join, &[&str]); 8] = [
        (
            changed(1, |join| join.identity.version = "0.9".to_owned()),
            &["version 1.0", "rank 1 runs version 0.9"],
        ),
        (
            changed(1, |join| join.counts = vec![2, 2]),
            &[
                "5 ranks ([2, 3] per node)",
                "rank 1 expects 4 ([2, 2] per node)",
            ],
        ),
        (
            changed(1, |join| {
                join.identity.fingerprint.quantization = "none".to_owned();
            }),
            &["quantization (rank 0 w8a8, it none)"],
        ),
        (
            changed(1, |join| join.identity.fingerprint.id = "bb".to_owned()),
            &["id (rank 0 aa, it bb)"],
        ),
        (
            changed(1, |join| join.slot_bytes = 8192),
            &["bytes of a slot is 4096 for rank 0 and 8192 for rank 1"],
        ),
        (
            changed(1, |join| join.info.rank = 5),
            &["rank is 5; allowed are 0 to 4"],
        ),
        (
            changed(2, |join| join.info.node = 0),
            &["local rank 0 of node 0", "local rank 0 of node 1"],
        ),
        (
            changed(0, |_| {}),
            &["two processes say they are rank 0: process 100 of node 0 and process 5 of node 0"],
        ),
    ];
    for (join, parts) in cases {
        let Verdict::Fail(refusal) = table().join(join) else {
            panic!("taken: {parts:?}");
        };
        let text = refusal.to_string();
        assert!(parts.iter().all(|part| text.contains(part)), "{text}");
    }
}

#[derive(Clone, Debug)]
enum Event {
    Join(u32),
    Foreign(u32),
    Gone(u32),
}

fn any_event() -> impl Strategy<Value = Event> {
    prop_oneof![
        4 => (1_u32..5).prop_map(Event::Join),
        1 => (0_u32..9).prop_map(Event::Foreign),
        2 => (0_u32..9).prop_map(Event::Gone),
    ]
}

proptest! {
    /// Ranks come and go, strangers knock: the group is complete exactly when all ranks are there, a rank that is there
    /// is never taken twice, and those said to be missing are.
    #[test]
    fn the_table_knows_who_is_there(events in prop::collection::vec(any_event(), 1..60)) {
        let mut table = table();
        let mut there = BTreeMap::from([(0, 100)]);
        for (turn, event) in events.into_iter().enumerate() {
            let pid = turn as u32;
            match event {
                Event::Join(rank) => {
                    let verdict = table.join(join(rank, pid));
                    let double = there.contains_key(&rank);
                    if double {
                        prop_assert!(matches!(verdict, Verdict::Fail(Refusal::Double { .. })), "{verdict:?}");
                    } else {
                        there.insert(rank, pid);
                        let expected = if there.len() == 5 { Verdict::Complete } else { Verdict::Wait };
                        prop_assert_eq!(verdict, expected);
                    }
                }
                Event::Foreign(rank) => {
                    let stranger = changed(rank.min(4), |join| {
                        join.info.rank = rank;
                        join.identity.epoch = Epoch(9);
                    });
                    let verdict = table.join(stranger);
                    prop_assert!(matches!(verdict, Verdict::Refuse(Refusal::Foreign { .. })), "{verdict:?}");
                }
                Event::Gone(rank) => {
                    table.gone(rank);
                    if rank != 0 {
                        there.remove(&rank);
                    }
                }
            }
            let ranks = table.ranks();
            prop_assert_eq!(ranks.is_some(), there.len() == 5);
            for info in ranks.unwrap_or_default() {
                prop_assert_eq!(there.get(&info.rank), Some(&info.pid));
            }
            let Refusal::Missing { ranks, notes, .. } = table.missing(1) else { panic!() };
            prop_assert!(ranks.iter().copied().eq((0..5).filter(|rank| !there.contains_key(rank))));
            prop_assert!(notes.len() <= NOTES);
        }
    }
}
