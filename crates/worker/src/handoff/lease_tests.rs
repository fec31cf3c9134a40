use super::*;
use proptest::prelude::*;
use std::collections::HashSet;

const LEASE: Duration = Duration::from_secs(30);
/// How often the owner of a table sweeps it at the latest.
const SWEEP: Duration = Duration::from_secs(1);

fn table(tombstones: usize) -> LeaseTable<u64> {
    LeaseTable::new(LeaseConfig {
        lease: LEASE,
        tombstones,
    })
}

fn register(table: &mut LeaseTable<u64>, now: Duration, nonce: u64, item: u64) -> HandleId {
    let id = table.reserve(nonce);
    table.register(now, id, item);
    id
}

fn at(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

#[test]
fn a_handle_has_one_name_and_comes_back_from_it() {
    let id = HandleId {
        generation: 7,
        nonce: 0xab,
    };
    assert_eq!(id.to_string(), "kv-7-00000000000000ab");
    assert_eq!(id.to_string().parse(), Ok(id));
    for bad in [
        "",
        "kv-",
        "kv-7",
        "kv-7-",
        "kv-+7-00000000000000ab",
        "kv-07-00000000000000ab",
        "kv-7-ab",
        "kv-7-00000000000000AB",
        "kv-7-00000000000000ab ",
        "kv--7-00000000000000ab",
        "kv-18446744073709551616-00000000000000ab",
        "kv-7-100000000000000ab",
        "cmpl-1",
    ] {
        assert_eq!(bad.parse::<HandleId>(), Err(NotAHandle), "{bad}");
    }
}

#[test]
fn nothing_is_freed_under_a_reader() {
    let mut table = table(8);
    let id = register(&mut table, at(0), 1, 100);
    let (pin, _) = table.begin_read(at(1), id).unwrap();
    assert!(
        table.expire(at(1000)).is_empty(),
        "the lease ended, the reader did not"
    );
    assert_eq!(table.begin_read(at(1000), id).unwrap_err(), Gone::Expired);
    assert_eq!(table.end_read(at(1001), pin, false), Some(100));
    assert_eq!(table.held(), 0);
}

#[test]
fn a_release_during_a_read_waits_for_it() {
    let mut table = table(8);
    let id = register(&mut table, at(0), 1, 100);
    let (first, _) = table.begin_read(at(1), id).unwrap();
    let (second, _) = table.begin_read(at(1), id).unwrap();
    assert_eq!(table.release(at(2), id), Release::Deferred);
    assert_eq!(table.release(at(2), id), Release::Gone(Gone::Released));
    assert_eq!(table.begin_read(at(2), id).unwrap_err(), Gone::Released);
    assert_eq!(table.end_read(at(3), first, true), None);
    assert_eq!(table.end_read(at(3), second, false), Some(100));
    assert_eq!(table.release(at(4), id), Release::Gone(Gone::Released));
}

#[test]
fn a_reader_that_broke_off_leaves_the_rest_of_the_lease_to_others() {
    let mut table = table(8);
    let id = register(&mut table, at(0), 1, 100);
    let (pin, _) = table.begin_read(at(1), id).unwrap();
    assert_eq!(table.end_read(at(2), pin, false), None);
    let (pin, item) = table.begin_read(at(3), id).unwrap();
    assert_eq!(*item, 100);
    assert_eq!(table.end_read(at(4), pin, true), Some(100));
}

#[test]
fn renewal_prolongs_and_cannot_revive() {
    let mut table = table(8);
    let id = register(&mut table, at(0), 1, 100);
    assert_eq!(table.renew(at(20), id), Ok(at(50)));
    assert!(table.expire(at(49)).is_empty());
    assert_eq!(
        table.renew(at(50), id),
        Err(Gone::Expired),
        "too late, though not swept yet"
    );
    assert_eq!(table.expire(at(50)), [100]);
    assert_eq!(table.renew(at(50), id), Err(Gone::Expired));
    assert_eq!(table.expired(), 1);
}

#[test]
fn an_overdue_lease_is_freed_by_the_release_that_comes_before_the_sweep() {
    let mut table = table(8);
    let id = register(&mut table, at(0), 1, 100);
    assert_eq!(table.release(at(31), id), Release::Freed(100));
    assert!(table.expire(at(31)).is_empty());
}

#[test]
fn foreign_handles_learn_nothing() {
    let mut table = table(8);
    let id = register(&mut table, at(0), 1, 100);
    let guessed = HandleId { nonce: 2, ..id };
    let future = HandleId {
        generation: 9,
        nonce: 1,
    };
    for foreign in [
        guessed,
        future,
        HandleId {
            generation: 0,
            nonce: 1,
        },
    ] {
        assert_eq!(table.begin_read(at(1), foreign).unwrap_err(), Gone::Unknown);
        assert_eq!(table.renew(at(1), foreign), Err(Gone::Unknown));
        assert_eq!(table.release(at(1), foreign), Release::Gone(Gone::Unknown));
    }
    assert_eq!(table.release(at(1), id), Release::Freed(100));
    assert_eq!(table.release(at(1), guessed), Release::Gone(Gone::Unknown));
}

#[test]
fn tombstones_are_bounded() {
    let mut table = table(3);
    let ids: Vec<_> = (0..10).map(|n| register(&mut table, at(0), n, n)).collect();
    for &id in &ids {
        assert!(matches!(table.release(at(1), id), Release::Freed(_)));
    }
    assert_eq!(table.tombstones.len(), 3);
    assert_eq!(table.buried.len(), 3);
    assert_eq!(table.release(at(2), ids[9]), Release::Gone(Gone::Released));
    assert_eq!(table.release(at(2), ids[0]), Release::Gone(Gone::Forgotten));
}

#[derive(Clone, Debug)]
enum Op {
    Register,
    Begin(usize),
    End(usize, bool),
    Renew(usize),
    Release(usize),
    Wait(u64),
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        2 => Just(Op::Register),
        3 => any::<usize>().prop_map(Op::Begin),
        3 => (any::<usize>(), any::<bool>()).prop_map(|(n, release)| Op::End(n, release)),
        1 => any::<usize>().prop_map(Op::Renew),
        1 => any::<usize>().prop_map(Op::Release),
        // Milliseconds; sometimes beyond a lease.
        4 => prop_oneof![0_u64..2_000, 20_000_u64..40_000].prop_map(Op::Wait),
    ]
}

/// What an onlooker knows of a lease without looking into the table.
struct Seen {
    id: HandleId,
    readers: usize,
    /// Lease end, prolonged by renewals; moved here by a release.
    end: Duration,
    last_reader: Duration,
    freed: bool,
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 512, ..ProptestConfig::default() })]

    /// Any schedule: nothing is freed while read, nothing twice, nothing is kept longer than the
    /// lease and a second after its last reader, and in the end nothing is left.
    #[test]
    fn leases_under_random_schedules(ops in proptest::collection::vec(op(), 1..200), tombstones in 0_usize..6) {
        let mut table = table(tombstones);
        let mut seen: Vec<Seen> = Vec::new();
        let mut pins: Vec<(Pin, usize)> = Vec::new();
        let mut now = Duration::ZERO;
        let mut freed_now: Vec<u64> = Vec::new();
        for op in ops {
            match op {
                Op::Register => {
                    let index = seen.len() as u64;
                    let id = register(&mut table, now, index * 31, index);
                    seen.push(Seen { id, readers: 0, end: now + LEASE, last_reader: Duration::ZERO, freed: false });
                }
                Op::Begin(n) if !seen.is_empty() => {
                    let n = n % seen.len();
                    let begun = table.begin_read(now, seen[n].id);
                    prop_assert_eq!(begun.is_ok(), now < seen[n].end, "a lease is readable exactly until its end");
                    if let Ok((pin, &item)) = begun {
                        prop_assert_eq!(item, n as u64);
                        seen[n].readers += 1;
                        pins.push((pin, n));
                    }
                }
                Op::End(at, release) if !pins.is_empty() => {
                    let (pin, n) = pins.swap_remove(at % pins.len());
                    seen[n].readers -= 1;
                    seen[n].last_reader = now;
                    if release {
                        seen[n].end = seen[n].end.min(now);
                    }
                    freed_now.extend(table.end_read(now, pin, release));
                }
                Op::Renew(n) if !seen.is_empty() => {
                    let n = n % seen.len();
                    let renewed = table.renew(now, seen[n].id);
                    prop_assert_eq!(renewed.is_ok(), now < seen[n].end);
                    if let Ok(deadline) = renewed {
                        prop_assert_eq!(deadline, now + LEASE);
                        seen[n].end = deadline;
                    }
                }
                Op::Release(n) if !seen.is_empty() => {
                    let n = n % seen.len();
                    let outcome = table.release(now, seen[n].id);
                    let freed_before = seen[n].freed;
                    match outcome {
                        Release::Freed(item) => freed_now.push(item),
                        Release::Deferred => prop_assert!(seen[n].readers > 0),
                        Release::Gone(_) => prop_assert!(freed_before || seen[n].readers > 0),
                    }
                    seen[n].end = seen[n].end.min(now);
                }
                Op::Wait(milliseconds) => {
                    // The owner sweeps at least every second.
                    let target = now + Duration::from_millis(milliseconds);
                    while now < target {
                        now = target.min(now + SWEEP);
                        freed_now.extend(table.expire(now));
                    }
                }
                _ => {}
            }
            for item in freed_now.drain(..) {
                let lease = &mut seen[item as usize];
                prop_assert_eq!(lease.readers, 0, "freed under a reader");
                prop_assert!(!lease.freed, "freed twice");
                prop_assert!(lease.end <= now, "freed before its end");
                lease.freed = true;
            }
            for lease in seen.iter().filter(|lease| !lease.freed && lease.readers == 0) {
                prop_assert!(now <= lease.end.max(lease.last_reader) + SWEEP, "kept too long");
            }
            prop_assert_eq!(table.held(), seen.iter().filter(|lease| !lease.freed).count());
            prop_assert_eq!(table.readers(), pins.len());
            prop_assert!(table.tombstones.len() <= tombstones);
        }
        let mut left: HashSet<u64> = (0..seen.len() as u64).filter(|&n| !seen[n as usize].freed).collect();
        for (pin, n) in pins {
            if let Some(item) = table.end_read(now, pin, false) {
                prop_assert_eq!(item, n as u64);
                prop_assert!(left.remove(&item));
            }
        }
        for item in table.expire(now + LEASE) {
            prop_assert!(left.remove(&item));
        }
        prop_assert!(left.is_empty());
        prop_assert_eq!((table.held(), table.readers(), table.next_deadline()), (0, 0, None));
    }
}
