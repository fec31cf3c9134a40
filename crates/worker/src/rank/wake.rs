//! When a group of ranks sleeps. A turn is a collective of all ranks, so either all take turns or none does.
//!
//! All ranks fall asleep by the same agreement, that of a turn in which no rank has work, and count these agreements.
//! The front wakes all of them by the number of the time awake, which is one more than the agreements so far; it does
//! so when a request arrives, and when a rank that sleeps says that it has work: a request that was still on its way
//! when the ranks agreed, or one whose KV has come. A rank that is still on its way to an agreement when the next waking
//! arrives knows by the number that it is for afterwards. So all ranks take the same turns, whatever arrives when.

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
    /// Time awake that the front was asked for.
    asked: u64,
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

    /// A rank says that all agreed to sleep.
    pub(crate) fn slept(&mut self, number: u64) {
        // Else another rank said so before, and they may have been woken since.
        if number == self.number {
            self.awake = false;
        }
    }

    /// A rank that sleeps asks for the time awake of this number; returns the number to wake all ranks with, if they
    /// have not been woken for it yet.
    pub(crate) fn asked(&mut self, number: u64) -> Option<u64> {
        if number > self.number {
            self.work()
        } else {
            None
        }
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

    /// This rank has work. Returns the time awake to ask the front for, once, if it sleeps.
    pub(crate) fn ask(&mut self) -> Option<u64> {
        let next = self.slept + 1;
        if self.is_awake() || self.asked == next {
            return None;
        }
        self.asked = next;
        Some(next)
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
        /// Steps of a request, and whether its KV is still to come.
        Work(u32, bool),
        Wake(u64),
    }

    enum Said {
        Over,
        Slept(u64),
        Asks(u64),
    }

    #[derive(Default)]
    struct Rank {
        wake: RankWake,
        inbox: VecDeque<Message>,
        outbox: VecDeque<Said>,
        /// Steps of those that wait for KV.
        stalled: Vec<u32>,
        /// Steps that its requests still take.
        work: VecDeque<u32>,
        /// It waits in the turn of this number, with this report.
        waits: Option<bool>,
        turns: u64,
    }

    impl Rank {
        fn ask(&mut self) {
            if !self.work.is_empty()
                && let Some(number) = self.wake.ask()
            {
                self.outbox.push_back(Said::Asks(number));
            }
        }
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

        fn submit(&mut self, rank: usize, steps: u32, remote: bool) {
            self.open += 1;
            self.ranks[rank]
                .inbox
                .push_back(Message::Work(steps, remote));
            let number = self.front.work();
            self.broadcast(number);
        }

        fn hear(&mut self, rank: usize) -> bool {
            let Some(news) = self.ranks[rank].outbox.pop_front() else {
                return false;
            };
            let number = match news {
                Said::Over => {
                    self.open -= 1;
                    None
                }
                Said::Slept(number) => {
                    self.front.slept(number);
                    None
                }
                Said::Asks(number) => self.front.asked(number),
            };
            self.broadcast(number);
            true
        }

        /// The KV of a request comes.
        fn load(&mut self, rank: usize) -> bool {
            let rank = &mut self.ranks[rank];
            // Heard between turns only.
            if rank.waits.is_some() {
                return false;
            }
            let Some(steps) = rank.stalled.pop() else {
                return false;
            };
            rank.work.push_back(steps);
            rank.ask();
            true
        }

        fn read(&mut self, rank: usize) -> bool {
            let rank = &mut self.ranks[rank];
            if rank.waits.is_some() {
                return false;
            }
            match rank.inbox.pop_front() {
                Some(Message::Work(steps, true)) => rank.stalled.push(steps),
                Some(Message::Work(steps, false)) => rank.work.push_back(steps),
                Some(Message::Wake(number)) => rank.wake.wake(number),
                None => return false,
            }
            rank.ask();
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
                        rank.outbox.push_back(Said::Over);
                    }
                }
                if !busy {
                    let number = rank.wake.agreed();
                    rank.outbox.push_back(Said::Slept(number));
                }
            }
            true
        }
    }

    proptest! {
        #[test]
        fn all_requests_end_and_all_ranks_sleep_then(
            ranks in 1_usize..5,
            schedule in prop::collection::vec((0_u8..7, any::<usize>(), 1_u32..5), 0..400),
        ) {
            let mut world = World { front: GroupWake::default(), ranks: Vec::new(), open: 0 };
            world.ranks.resize_with(ranks, Rank::default);
            for (action, pick, steps) in schedule {
                let rank = pick % ranks;
                match action {
                    0 => world.submit(rank, steps, pick % 3 == 0),
                    5 => { world.load(rank); }
                    1 => { world.hear(rank); }
                    2 => { world.read(rank); }
                    _ => { world.enter(rank); }
                }
            }
            // In the end everybody goes on until nothing can.
            for _ in 0..100_000 {
                let moved = (0..ranks)
                    .map(|rank| world.hear(rank) | world.read(rank) | world.load(rank) | world.enter(rank))
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
