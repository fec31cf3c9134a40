use super::*;
use crate::local::{in_process, loopback};
use crate::selftest::start_up_test;
use proptest::prelude::*;

const EPOCH: Epoch = Epoch(11);

fn options() -> Options {
    Options {
        patience: Duration::from_secs(30),
        slot_bytes: 4096,
        ..Options::default()
    }
}

/// Runs `body` on every rank, each on a thread, and returns what they return, in the order of ranks.
fn on_all<R: Send>(groups: Vec<Group>, body: impl Fn(Group) -> R + Sync) -> Vec<R> {
    std::thread::scope(|scope| {
        let threads: Vec<_> = groups
            .into_iter()
            .map(|group| scope.spawn(|| body(group)))
            .collect();
        let outcomes = threads.into_iter().map(|thread| thread.join().unwrap());
        outcomes.collect()
    })
}

fn wirings() -> Vec<(Vec<u32>, bool)> {
    vec![
        (vec![1], true),
        (vec![4], true),
        (vec![3], false),
        (vec![2, 2], true),
        (vec![2, 2], false),
        (vec![1, 1, 1], true),
        (vec![3, 1, 2], true),
    ]
}

fn make(counts: &[u32], shares: bool, options: Options) -> Vec<Group> {
    loopback(&Topology::new(counts).unwrap(), shares, EPOCH, options).unwrap()
}

#[test]
fn every_collective_brings_the_right_bytes_over_every_wiring() {
    for (counts, shares) in wirings() {
        on_all(make(&counts, shares, options()), |mut group| {
            start_up_test(&mut group, EPOCH).unwrap_or_else(|error| panic!("{counts:?}: {error}"));
        });
    }
}

/// One call of a script, made from numbers that all ranks have.
fn step(group: &mut Group, at: At, kind: u32, seed: u32) -> Result<(), CommError> {
    let (rank, world) = (group.rank(), group.topology().world());
    let size =
        |a: u32, b: u32| ((seed ^ a.wrapping_mul(977) ^ b.wrapping_mul(131)) % 9000) as usize;
    let fill = |a: u32, b: u32, length: usize| vec![(a * 7 + b * 3 + seed) as u8; length];
    let even = group.topology().is_even();
    let route = match even && seed.is_multiple_of(2) {
        true => Route::TwoStage,
        false => Route::Flat,
    };
    let mut parts = Parts::new(world);
    match kind {
        0 => {
            let mut values = [u64::from(rank * seed), u64::from(rank ^ seed)];
            group.all_reduce(at, &[Op::Sum, Op::Max], &mut values)?;
            let sum: u64 = (0..world).map(|rank| u64::from(rank * seed)).sum();
            let max = (0..world).map(|rank| u64::from(rank ^ seed)).max();
            assert_eq!((values[0], Some(values[1])), (sum, max));
        }
        1 => {
            let length = size(0, 0);
            let mut all = vec![0; length * world as usize];
            group.all_gather(at, route, &fill(rank, 0, length), &mut all)?;
            let expected: Vec<u8> = (0..world).flat_map(|from| fill(from, 0, length)).collect();
            assert!(all == expected);
        }
        2 => {
            let mine = fill(rank, 1, size(rank, 0));
            group.all_gather_v(at, route, &mine, 9000, &mut parts)?;
            for (from, part) in (0..world).zip(parts.iter()) {
                assert!(part == fill(from, 1, size(from, 0)));
            }
        }
        3 => {
            let counts: Vec<usize> = (0..world).map(|to| size(rank, to)).collect();
            let send: Vec<u8> = (0..world)
                .flat_map(|to| fill(rank, to, size(rank, to)))
                .collect();
            group.all_to_all(at, &send, &counts, 9000, &mut parts)?;
            for (from, part) in (0..world).zip(parts.iter()) {
                assert!(part == fill(from, rank, size(from, rank)));
            }
        }
        _ => group.barrier(at)?,
    }
    Ok(())
}

fn script() -> impl Strategy<Value = Vec<(u32, u32)>> {
    prop::collection::vec((0_u32..5, 0_u32..10_000), 1..40)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(16))]

    /// Any calls in any order, with messages of many slots and of none, over every wiring.
    #[test]
    fn any_script_of_calls_comes_out_right(script in script(), wiring in any::<prop::sample::Index>()) {
        let (counts, shares) = wiring.get(&wirings()).clone();
        on_all(make(&counts, shares, options()), |mut group| {
            for (place, &(kind, seed)) in script.iter().enumerate() {
                step(&mut group, At::new(EPOCH, place as u64, seed), kind, seed).unwrap();
            }
        });
    }

    /// One rank stops at any place of a script, by any way: every rank ends, at most one call from there, and each
    /// that ends with an error names that rank.
    #[test]
    fn a_rank_that_ends_anywhere_is_named_by_all(
        script in script(),
        wiring in 1_usize..7,
        who in any::<prop::sample::Index>(),
        place in any::<prop::sample::Index>(),
        way in 0..3,
    ) {
        let (counts, shares) = wirings()[wiring].clone();
        let world: u32 = counts.iter().sum();
        let (who, place) = (who.index(world as usize) as u32, place.index(script.len()));
        let errors = on_all(make(&counts, shares, options()), |mut group| {
            for (turn, &(kind, seed)) in script.iter().enumerate() {
                let mut at = At::new(EPOCH, turn as u64, seed);
                if turn == place && group.rank() == who {
                    match way {
                        // Drops its end.
                        0 => return None,
                        // Is told to stop.
                        1 => group.stopper().stop(),
                        // Makes another call than the others.
                        _ => at.tag ^= 1,
                    }
                }
                if let Err(error) = step(&mut group, at, kind, seed) {
                    // The same error again, at once.
                    let again = group.barrier(At::new(EPOCH, u64::MAX, 0)).unwrap_err();
                    assert_eq!(again, error);
                    return Some((turn, error));
                }
            }
            let end = At::new(EPOCH, script.len() as u64, 0);
            group.barrier(end).err().map(|error| (script.len(), error))
        });
        for (rank, outcome) in errors.iter().enumerate() {
            match outcome {
                Some((turn, error)) => {
                    let near = place.saturating_sub(1)..=place + 1;
                    prop_assert!(near.contains(turn), "{turn} {error}");
                    // Who is out of step with all others finds them to be.
                    let alone = way == 2 && (rank as u32 == who || error.failure().reporter == who);
                    // With two ranks nobody can tell who is out of step, and with more a node may ask the wrong one.
                    let unclear = way == 2;
                    prop_assert!(alone || unclear || error.rank() == who, "{rank}: {error}");
                }
                None => prop_assert!(way == 0 && rank as u32 == who),
            }
        }
    }
}

#[test]
fn a_rank_that_does_not_come_is_named_with_the_last_call_it_reached() {
    for (counts, shares) in [(vec![3], true), (vec![3], false), (vec![2, 2], true)] {
        let brief = Options {
            patience: Duration::from_secs(1),
            ..options()
        };
        let absent = 1;
        let (sender, receiver) = std::sync::mpsc::sync_channel::<()>(8);
        let receiver = parking_lot::Mutex::new(receiver);
        let errors = on_all(make(&counts, shares, brief), |mut group| {
            let sender = sender.clone();
            group.barrier(At::new(EPOCH, 4, 40)).unwrap();
            if group.rank() == absent {
                // Stays, silent, until the others have ended.
                for _ in 1..group.topology().world() {
                    receiver.lock().recv().unwrap();
                }
                // Over TCP the others' part of the call it missed is there: the next one fails.
                let mut again = |step| group.barrier(At::new(EPOCH, step, 50)).err();
                return (5..8).find_map(&mut again).unwrap();
            }
            let error = group.barrier(At::new(EPOCH, 5, 50)).unwrap_err();
            sender.send(()).unwrap();
            error
        });
        for error in errors {
            let failure = error.failure();
            assert_eq!(failure.rank, absent, "{counts:?}: {error}");
            assert!(matches!(failure.cause, Cause::Stalled { .. }), "{error}");
            let last = failure.last.unwrap();
            assert_eq!((last.at, last.call), (At::new(EPOCH, 4, 40), Call::Barrier));
            assert_eq!(failure.during.unwrap().at.step, 5);
        }
    }
}

#[test]
fn sizes_that_can_not_be_are_refused_before_they_are_taken() {
    for (counts, shares) in [(vec![2], true), (vec![2], false)] {
        let errors = on_all(make(&counts, shares, options()), |mut group| {
            let mine = vec![0; 10 + group.rank() as usize * 90];
            let limit = mine.len();
            let mut parts = Parts::new(2);
            let at = At::new(EPOCH, 0, 0);
            // Who sent too much learns of it in the next call.
            group
                .all_gather_v(at, Route::Flat, &mine, limit, &mut parts)
                .and_then(|()| group.barrier(At::new(EPOCH, 1, 0)))
                .unwrap_err()
        });
        // Rank 0 allows 10 bytes and is sent 100.
        for error in errors {
            let failure = error.failure();
            assert_eq!((failure.rank, failure.reporter), (1, 0), "{error}");
            assert!(matches!(failure.cause, Cause::TooLong { .. }), "{error}");
        }
        let errors = on_all(make(&counts, shares, options()), |mut group| {
            let mut values = vec![0; 1 + group.rank() as usize];
            let at = At::new(EPOCH, 0, 0);
            group.all_reduce(at, &[Op::Sum], &mut values).unwrap_err()
        });
        for error in errors {
            let cause = error.failure().cause;
            assert!(matches!(cause, Cause::Unequal { .. }), "{error}");
        }
    }
}

#[test]
fn calls_that_can_not_be_right_end_the_group_and_name_the_caller() {
    let at = At::new(EPOCH, 3, 0);
    type Wrong = fn(&mut Group, At) -> Result<(), CommError>;
    let wrong: [(Misuse, Wrong); 5] = [
        (Misuse::Epoch, |group, at| {
            group.barrier(At {
                epoch: Epoch(1),
                ..at
            })
        }),
        (Misuse::StepBack, |group, at| {
            group.barrier(At { step: 2, ..at })
        }),
        (Misuse::Lengths, |group, at| {
            group.all_to_all(at, &[1, 2], &[1, 2], 9, &mut Parts::new(2))
        }),
        (Misuse::TooManyValues, |group, at| {
            group.all_reduce(at, &[Op::Sum], &mut [0; MAX_REDUCE + 1])
        }),
        (Misuse::Lengths, |group, at| {
            group.all_reduce(at, &[Op::Sum; 2], &mut [0; 3])
        }),
    ];
    for (misuse, call) in wrong {
        let errors = on_all(in_process(2, EPOCH, options()).unwrap(), |mut group| {
            group.barrier(at).unwrap();
            match group.rank() {
                1 => call(&mut group, at).unwrap_err(),
                _ => group.barrier(at).unwrap_err(),
            }
        });
        for error in errors {
            assert_eq!(error.rank(), 1, "{error}");
            assert_eq!(error.failure().cause, Cause::Misused(misuse));
        }
    }
    let errors = on_all(make(&[2, 1], true, options()), |mut group| {
        group
            .all_gather(at, Route::TwoStage, &[1], &mut [0; 3])
            .unwrap_err()
    });
    for error in errors {
        assert_eq!(
            error.failure().cause,
            Cause::Misused(Misuse::UnevenNodes),
            "{error}"
        );
    }
}

#[test]
fn another_thread_ends_a_wait() {
    for (counts, shares) in [(vec![2], true), (vec![2], false)] {
        let mut groups = make(&counts, shares, options());
        let other = groups.pop().unwrap();
        let mut group = groups.pop().unwrap();
        let stopper = group.stopper();
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| group.barrier(At::new(EPOCH, 0, 0)));
            stopper.lost(1);
            let error = waiting.join().unwrap().unwrap_err();
            assert_eq!((error.rank(), error.failure().cause), (1, Cause::Died));
        });
        drop(other);
    }
}

/// What a gather of `bytes` from every rank sends between nodes and inside them, all ranks together.
fn gathered(counts: &[u32], shares: bool, route: Route, bytes: usize) -> (u64, u64) {
    let traffic = on_all(make(counts, shares, options()), |mut group| {
        let world = group.topology().world() as usize;
        let mine = vec![group.rank() as u8; bytes];
        let mut all = vec![0; bytes * world];
        group
            .all_gather(At::new(EPOCH, 0, 0), route, &mine, &mut all)
            .unwrap();
        group.traffic()
    });
    let sum = |of: fn(&Traffic) -> u64| traffic.iter().map(of).sum();
    (
        sum(|traffic| traffic.inter_node),
        sum(|traffic| traffic.intra_node),
    )
}

#[test]
fn two_stages_send_one_share_of_the_flat_bytes_between_nodes() {
    for (nodes, per_node) in [(2, 4), (4, 2), (2, 8)] {
        let counts = vec![per_node; nodes];
        let world = u64::from(per_node) * nodes as u64;
        for shares in [true, false] {
            let (flat, _) = gathered(&counts, shares, Route::Flat, 1000);
            assert_eq!(flat, 1000 * world * (world - u64::from(per_node)));
            let (staged, inside) = gathered(&counts, shares, Route::TwoStage, 1000);
            assert_eq!(staged * u64::from(per_node), flat);
            // Inside a node every rank gives its column to every other.
            let column = 1000 * nodes as u64;
            assert_eq!(inside, column * world * u64::from(per_node - 1));
        }
    }
}

#[test]
fn a_steady_all_reduce_allocates_nothing() {
    for (counts, shares) in [(vec![3], true), (vec![3], false), (vec![2, 2], true)] {
        let allocated = on_all(make(&counts, shares, options()), |mut group| {
            let mut reduce = |step| {
                let mut values = [u64::from(group.rank()); 8];
                let ops = [Op::Sum];
                group
                    .all_reduce(At::new(EPOCH, step, 0), &ops, &mut values)
                    .unwrap();
            };
            (0..10).for_each(&mut reduce);
            allocation_counter::measure(|| (10..100).for_each(&mut reduce)).count_total
        });
        assert!(allocated.iter().all(|count| *count == 0), "{allocated:?}");
    }
}

#[test]
fn a_steady_all_to_all_keeps_its_memory() {
    let allocated = on_all(make(&[2, 2], true, options()), |mut group| {
        let mut parts = Parts::new(4);
        let mut exchange = |step: u64| {
            let counts = [step as usize * 10; 4];
            let send = [7; 4000];
            let at = At::new(EPOCH, 1000 - step, 0);
            group
                .all_to_all(at, &send[..step as usize * 40], &counts, 1000, &mut parts)
                .unwrap();
        };
        exchange(100);
        allocation_counter::measure(|| (0..100).rev().for_each(&mut exchange)).count_total
    });
    assert!(allocated.iter().all(|count| *count == 0), "{allocated:?}");
}

#[test]
fn many_reductions_stay_in_step() {
    on_all(in_process(3, EPOCH, options()).unwrap(), |mut group| {
        for step in 0..30_000 {
            let mut values = [u64::from(group.rank()) ^ step];
            let at = At::new(EPOCH, step, step as u32);
            group.all_reduce(at, &[Op::Max], &mut values).unwrap();
            assert_eq!(values[0], (0..3).map(|rank| rank ^ step).max().unwrap());
        }
    });
}
