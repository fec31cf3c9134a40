//! When a group of ranks sleeps. A turn is a collective of all ranks, so either all take turns or none does.
//!
//! All ranks fall asleep by the same agreement, that of a turn in which no rank has work, and count these agreements.
//! The front wakes all of them by the number of the time awake, which is one more than the agreements so far; it does
//! so when a request arrives and, once it hears of an agreement, when there are requests that the ranks did not have
//! yet when they agreed. A rank that is still on its way to an agreement when the next waking arrives knows by the
//! number that it is for afterwards. So all ranks take the same turns, whatever arrives when.

/// The front's side: is the group awake?
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct GroupWake {
    /// Number of the present time awake, or the last.
    number: u64,
    awake: bool,
}

/// One rank's side.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct RankWake {
    woken: u64,
    slept: u64,
}

impl GroupWake {
    /// There is work; returns the number to wake all ranks with, if they sleep.
    pub(crate) fn work(&mut self) -> Option<u64> {
        if self.awake {
            return None;
        }
        self.awake = true;
        self.number += 1;
        Some(self.number)
    }

    /// A rank says that all agreed to sleep; `work` says that some request is not over. Returns the number to wake all
    /// ranks with, if that must be.
    pub(crate) fn slept(&mut self, number: u64, work: bool) -> Option<u64> {
        if number != self.number || !self.awake {
            // Another rank said so before.
            return None;
        }
        self.awake = false;
        if work { self.work() } else { None }
    }
}

impl RankWake {
    /// The front wakes.
    pub(crate) fn wake(&mut self, number: u64) {
        self.woken = self.woken.max(number);
    }

    /// Is a turn to be taken?
    pub(crate) fn is_awake(&self) -> bool {
        self.woken > self.slept
    }

    /// A turn in which no rank had work; returns the number to tell the front.
    pub(crate) fn agreed(&mut self) -> u64 {
        self.slept += 1;
        self.slept
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::VecDeque;

    #[derive(Clone, Copy)]
    enum Message {
        Work(u32),
        Wake(u64),
    }

    #[derive(Default)]
    struct Rank {
        wake: RankWake,
        inbox: VecDeque<Message>,
        outbox: VecDeque<Result<u64, ()>>,
        /// Steps that its requests still take.
        work: VecDeque<u32>,
        /// It waits in the turn of this number, with this report.
        waits: Option<bool>,
        turns: u64,
    }

    /// Ranks with queues in both directions and a collective, stepped in any order.
    struct World {
        front: GroupWake,
        ranks: Vec<Rank>,
        open: usize,
    }

    impl World {
        fn broadcast(&mut self, number: Option<u64>) {
            if let Some(number) = number {
                for rank in &mut self.ranks {
                    rank.inbox.push_back(Message::Wake(number));
                }
            }
        }

        fn submit(&mut self, rank: usize, steps: u32) {
            self.open += 1;
            self.ranks[rank].inbox.push_back(Message::Work(steps));
            let number = self.front.work();
            self.broadcast(number);
        }

        fn hear(&mut self, rank: usize) -> bool {
            let Some(news) = self.ranks[rank].outbox.pop_front() else {
                return false;
            };
            let number = match news {
                Err(()) => {
                    self.open -= 1;
                    None
                }
                Ok(number) => self.front.slept(number, self.open > 0),
            };
            self.broadcast(number);
            true
        }

        fn read(&mut self, rank: usize) -> bool {
            let rank = &mut self.ranks[rank];
            if rank.waits.is_some() {
                return false;
            }
            match rank.inbox.pop_front() {
                Some(Message::Work(steps)) => rank.work.push_back(steps),
                Some(Message::Wake(number)) => rank.wake.wake(number),
                None => return false,
            }
            true
        }

        fn enter(&mut self, index: usize) -> bool {
            let rank = &mut self.ranks[index];
            if !rank.wake.is_awake() || rank.waits.is_some() {
                return false;
            }
            rank.waits = Some(!rank.work.is_empty());
            rank.turns += 1;
            let turn = rank.turns;
            if self.ranks.iter().any(|rank| rank.waits.is_none()) {
                return true;
            }
            // All are in the same turn.
            assert!(self.ranks.iter().all(|rank| rank.turns == turn));
            let busy = self.ranks.iter().any(|rank| rank.waits == Some(true));
            for rank in &mut self.ranks {
                rank.waits = None;
                if let Some(steps) = rank.work.front_mut() {
                    *steps -= 1;
                    if *steps == 0 {
                        rank.work.pop_front();
                        rank.outbox.push_back(Err(()));
                    }
                }
                if !busy {
                    let number = rank.wake.agreed();
                    rank.outbox.push_back(Ok(number));
                }
            }
            true
        }
    }

    proptest! {
        #[test]
        fn all_requests_end_and_all_ranks_sleep_then(
            ranks in 1_usize..5,
            schedule in prop::collection::vec((0_u8..5, any::<usize>(), 1_u32..5), 0..400),
        ) {
            let mut world = World { front: GroupWake::default(), ranks: Vec::new(), open: 0 };
            world.ranks.resize_with(ranks, Rank::default);
            for (action, pick, steps) in schedule {
                let rank = pick % ranks;
                match action {
                    0 => world.submit(rank, steps),
                    1 => { world.hear(rank); }
                    2 => { world.read(rank); }
                    _ => { world.enter(rank); }
                }
            }
            // In the end everybody goes on until nothing can.
            for _ in 0..100_000 {
                let moved = (0..ranks)
                    .map(|rank| world.hear(rank) | world.read(rank) | world.enter(rank))
                    .fold(false, |any, one| any | one);
                if !moved {
                    break;
                }
            }
            prop_assert_eq!(world.open, 0);
            for rank in &world.ranks {
                prop_assert!(!rank.wake.is_awake());
                prop_assert!(rank.waits.is_none(), "a rank waits for others that sleep");
                prop_assert_eq!(rank.turns, world.ranks[0].turns);
            }
            prop_assert!(!world.front.awake);
        }
    }
}
