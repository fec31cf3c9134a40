use super::*;
use proptest::prelude::*;
use std::collections::BTreeSet;

fn state(max_inside: u32, max_waiting: usize) -> State {
    State {
        max_inside,
        max_waiting,
        inside: 0,
        waiting: 0,
        next: 0,
        queues: BTreeMap::new(),
        turns: VecDeque::new(),
    }
}

#[test]
fn turns_go_round_among_clients() {
    let mut gate = state(1, 100);
    assert_eq!(gate.arrive(1), Arrival::In);
    let flood: Vec<Ticket> = (0..50)
        .map(|_| match gate.arrive(1) {
            Arrival::Wait(ticket) => ticket,
            other => panic!("{other:?}"),
        })
        .collect();
    let Arrival::Wait(other) = gate.arrive(2) else {
        panic!("there is room")
    };
    assert_eq!(gate.leave(), Some(flood[0]));
    assert_eq!(
        gate.leave(),
        Some(other),
        "not behind fifty of another client"
    );
    assert_eq!(gate.leave(), Some(flood[1]));
}

#[test]
fn a_full_queue_has_room_for_who_has_little_in_it() {
    let mut gate = state(1, 3);
    assert_eq!(gate.arrive(1), Arrival::In);
    let mut last = 0;
    for _ in 0..3 {
        let Arrival::Wait(ticket) = gate.arrive(1) else {
            panic!("there is room")
        };
        last = ticket;
    }
    assert_eq!(gate.arrive(1), Arrival::Full);
    assert!(matches!(gate.arrive(2), Arrival::Instead(_, lost) if lost == last));
    assert_eq!(gate.arrive(2), Arrival::Full, "both have as many");
}

#[tokio::test]
async fn who_waits_too_long_or_leaves_takes_no_place() {
    let gate = Arc::new(Gate::new(1, 2, Duration::from_millis(20)));
    let first = gate.enter(0).await.expect("room");
    assert_eq!(gate.enter(0).await.err(), Some(Refused::Waited));
    {
        let mut left = std::pin::pin!(gate.enter(0));
        assert!(futures_util::poll!(left.as_mut()).is_pending());
        assert_eq!(gate.counts(), (1, 1));
    }
    assert_eq!(gate.counts(), (1, 0));
    let mut second = std::pin::pin!(gate.enter(1));
    assert!(futures_util::poll!(second.as_mut()).is_pending());
    drop(first);
    let second = second.await.expect("its turn");
    assert_eq!(gate.counts(), (1, 0));
    // One that was let in and went away without hearing of it.
    {
        let mut third = std::pin::pin!(gate.enter(1));
        assert!(futures_util::poll!(third.as_mut()).is_pending());
        drop(second);
        assert_eq!(gate.counts(), (1, 0));
    }
    assert_eq!(gate.counts(), (0, 0));
}

#[tokio::test]
async fn without_a_queue_more_are_refused_at_once() {
    let gate = Arc::new(Gate::new(1, 0, Duration::from_secs(5)));
    let inside = gate.enter(0).await.expect("room");
    assert_eq!(gate.enter(1).await.err(), Some(Refused::Full));
    drop(inside);
    assert!(gate.enter(1).await.is_ok());
}

proptest! {
    /// Whatever comes and goes: the caps hold, nobody is let in twice or forgotten, no place stays empty while somebody
    /// waits.
    #[test]
    fn every_schedule_keeps_the_caps(
        max_inside in 1u32..5,
        max_waiting in 0usize..6,
        steps in proptest::collection::vec((0u8..3, 0u32..4, any::<proptest::sample::Index>()), 1..300),
    ) {
        let mut gate = state(max_inside, max_waiting);
        let mut waiting: Vec<(Client, Ticket)> = Vec::new();
        let mut inside = 0u32;
        let mut seen = BTreeSet::new();
        for (what, client, index) in steps {
            match what {
                0 => match gate.arrive(client) {
                    Arrival::In => inside += 1,
                    Arrival::Wait(ticket) => waiting.push((client, ticket)),
                    Arrival::Instead(ticket, lost) => {
                        waiting.retain(|(_, other)| *other != lost);
                        waiting.push((client, ticket));
                    }
                    Arrival::Full => prop_assert!(inside == max_inside && waiting.len() >= max_waiting),
                },
                1 if inside > 0 => match gate.leave() {
                    Some(ticket) => {
                        prop_assert!(seen.insert(ticket));
                        let at = waiting.iter().position(|(_, other)| *other == ticket);
                        waiting.remove(at.expect("it waited"));
                    }
                    None => {
                        prop_assert!(waiting.is_empty());
                        inside -= 1;
                    }
                },
                2 if !waiting.is_empty() => {
                    let (client, ticket) = waiting.remove(index.index(waiting.len()));
                    prop_assert!(gate.cancel(client, ticket));
                    prop_assert!(!gate.cancel(client, ticket));
                }
                _ => {}
            }
            prop_assert_eq!((gate.inside, gate.waiting), (inside, waiting.len()));
            prop_assert!(inside <= max_inside && waiting.len() <= max_waiting);
            prop_assert!(waiting.is_empty() || inside == max_inside);
        }
    }
}
