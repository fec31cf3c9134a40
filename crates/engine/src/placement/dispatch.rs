//! The way of a step's rows to their experts and back, as lists of numbers; the caller moves the bytes.

use super::ExpertPlacement;
use std::ops::Range;
use twinfer_kernels::add_scaled;

/// One expert's work on one row, as it is told to the rank that does it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Item {
    /// Row among those that the sender sends to this rank (with all-gather: among all of the sender).
    pub row: u32,
    /// Seat.
    pub seat: u32,
}

/// Where the rows of one home rank go, and where their outputs come back. Buffers are kept from step to
/// step.
#[derive(Debug, Default)]
pub struct Dispatch {
    top_k: usize,
    /// Items in order of the rank they go to, then row, then slot.
    items: Vec<Item>,
    item_starts: Vec<u32>,
    /// Rows in order of the rank they go to, each at most once per rank.
    rows: Vec<u32>,
    row_starts: Vec<u32>,
    /// For each (row, slot) its place among the items.
    places: Vec<u32>,
    /// Buffers.
    seats: Vec<u32>,
    next: Vec<u32>,
}

/// What came to a rank in a step, sorted by seat.
#[derive(Debug, Default)]
pub struct Arrivals {
    /// `starts[s]..starts[s + 1]` are the places of the rank's `s`th seat.
    starts: Vec<u32>,
    /// For each place the row it takes, among all rows that came.
    sources: Vec<u32>,
    /// For each item, in order of sender and as sent, its place.
    places: Vec<u32>,
    /// Items before those of each sender.
    item_starts: Vec<u32>,
}

/// What does not fit: own mistakes and those of peers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DispatchError {
    /// An expert that does not exist.
    #[error("expert {expert} of {experts}")]
    Expert {
        /// Named.
        expert: u32,
        /// Number of experts.
        experts: u32,
    },
    /// A seat of another rank.
    #[error("seat {seat} from rank {sender} is not one of {first}..{end}")]
    Seat {
        /// Named.
        seat: u32,
        /// By.
        sender: usize,
        /// First of this rank.
        first: u32,
        /// Behind its last.
        end: u32,
    },
    /// A row that was not sent.
    #[error("row {row} from rank {sender}, which sent {rows}")]
    Row {
        /// Named.
        row: u32,
        /// By.
        sender: usize,
        /// Rows sent.
        rows: u32,
    },
    /// Lengths that do not belong together.
    #[error("{what}: {got} instead of {expected}")]
    Length {
        /// Of what.
        what: &'static str,
        /// Length.
        got: usize,
        /// What it should be.
        expected: usize,
    },
}

impl Dispatch {
    /// Plans the way of rank `home`'s rows, whose chosen experts are `experts` `[rows, top_k]` in slot order.
    ///
    /// # Errors
    /// An expert does not exist, or `experts` is not a number of rows. Nothing is planned then.
    pub fn plan(
        &mut self,
        placement: &ExpertPlacement,
        home: u32,
        experts: &[u32],
        top_k: usize,
    ) -> Result<(), DispatchError> {
        let (ranks, count) = (placement.ranks() as usize, experts.len());
        self.clear(top_k, ranks, count);
        if top_k == 0 || !count.is_multiple_of(top_k) {
            return Err(length("experts of rows", count, top_k));
        }
        // Counting sort by rank, stable in rows and slots: first seats and counts, then places.
        for (at, &expert) in experts.iter().enumerate() {
            let row = u32::try_from(at / top_k).unwrap_or(u32::MAX);
            let Some(seat) = placement.seat_for(expert, home, row) else {
                self.clear(top_k, ranks, 0);
                let experts = placement.experts();
                return Err(DispatchError::Expert { expert, experts });
            };
            self.seats.push(seat);
            self.item_starts[placement.rank_of(seat) as usize + 1] += 1;
        }
        for rank in 0..ranks {
            self.item_starts[rank + 1] += self.item_starts[rank];
        }
        self.next.extend_from_slice(&self.item_starts[..ranks]);
        self.items.resize(count, Item { row: 0, seat: 0 });
        for (at, &seat) in self.seats.iter().enumerate() {
            let next = &mut self.next[placement.rank_of(seat) as usize];
            let row = (at / top_k) as u32;
            self.items[*next as usize] = Item { row, seat };
            self.places.push(*next);
            *next += 1;
        }
        for rank in 0..ranks {
            let first = self.rows.len();
            for item in &mut self.items[range(&self.item_starts, rank)] {
                if self.rows[first..].last() != Some(&item.row) {
                    self.rows.push(item.row);
                }
                item.row = (self.rows.len() - first - 1) as u32;
            }
            self.row_starts[rank + 1] = self.rows.len() as u32;
        }
        Ok(())
    }

    fn clear(&mut self, top_k: usize, ranks: usize, count: usize) {
        self.top_k = top_k;
        for list in [
            &mut self.rows,
            &mut self.places,
            &mut self.seats,
            &mut self.next,
        ] {
            list.clear();
            list.reserve(count);
        }
        self.items.clear();
        for starts in [&mut self.item_starts, &mut self.row_starts] {
            starts.clear();
            starts.resize(ranks + 1, 0);
        }
    }

    /// Rows that go to a rank, ascending.
    pub fn rows_to(&self, rank: usize) -> &[u32] {
        &self.rows[range(&self.row_starts, rank)]
    }

    /// Items that go with them, in the order in which their outputs come back.
    pub fn items_to(&self, rank: usize) -> &[Item] {
        &self.items[range(&self.item_starts, rank)]
    }

    /// Place of the first output of a rank among all that come back, and the number of them: outputs lie in
    /// order of the ranks.
    pub fn outputs_from(&self, rank: usize) -> Range<usize> {
        range(&self.item_starts, rank)
    }

    /// The sum of a row's outputs in slot order, each times its weight, then `shared`, to `out` `[hidden]`.
    /// `outputs` is `[items, hidden]` in the order of [`Self::outputs_from`], `weights` `[top_k]`.
    ///
    /// # Errors
    /// A length does not fit.
    pub fn combine(
        &self,
        row: usize,
        weights: &[f32],
        outputs: &[f32],
        shared: Option<&[f32]>,
        out: &mut [f32],
    ) -> Result<(), DispatchError> {
        let hidden = out.len();
        let places = self.places.get(row * self.top_k..(row + 1) * self.top_k);
        let places =
            places.ok_or_else(|| length("rows", self.places.len() / self.top_k.max(1), row + 1))?;
        if weights.len() != self.top_k {
            return Err(length("weights", weights.len(), self.top_k));
        }
        if outputs.len() != self.items.len() * hidden {
            return Err(length("outputs", outputs.len(), self.items.len() * hidden));
        }
        if let Some(shared) = shared.filter(|shared| shared.len() != hidden) {
            return Err(length("shared", shared.len(), hidden));
        }
        out.fill(0.0);
        for (&place, &weight) in places.iter().zip(weights) {
            let output = &outputs[place as usize * hidden..][..hidden];
            // Lengths are equal by construction.
            let _ = add_scaled(out, output, weight);
        }
        if let Some(shared) = shared {
            out.iter_mut()
                .zip(shared)
                .for_each(|(out, shared)| *out += shared);
        }
        Ok(())
    }

    /// The items of another rank's rows that are this rank's to do, when all rows and choices were gathered
    /// instead of sent: the same as its [`Self::items_to`] would be, but that rows are counted among all
    /// rows of that rank.
    ///
    /// # Errors
    /// As [`Self::plan`].
    pub fn gathered(
        placement: &ExpertPlacement,
        rank: u32,
        home: u32,
        experts: &[u32],
        top_k: usize,
        items: &mut Vec<Item>,
    ) -> Result<(), DispatchError> {
        items.clear();
        if top_k == 0 || !experts.len().is_multiple_of(top_k) {
            return Err(length("experts of rows", experts.len(), top_k));
        }
        for (at, &expert) in experts.iter().enumerate() {
            let row = u32::try_from(at / top_k).unwrap_or(u32::MAX);
            let seat = placement
                .seat_for(expert, home, row)
                .ok_or(DispatchError::Expert {
                    expert,
                    experts: placement.experts(),
                })?;
            if placement.rank_of(seat) == rank {
                items.push(Item { row, seat });
            }
        }
        Ok(())
    }
}

impl Arrivals {
    /// Sorts what came to `rank`: for each sender its items and the number of rows that it sent, which lie
    /// behind each other in order of the senders. What senders say is checked.
    ///
    /// # Errors
    /// An item names a seat of another rank or a row that was not sent. Nothing has arrived then.
    pub fn sort<'a>(
        &mut self,
        placement: &ExpertPlacement,
        rank: u32,
        senders: impl Iterator<Item = (&'a [Item], u32)> + Clone,
    ) -> Result<(), DispatchError> {
        self.clear();
        let own = placement.seats_of_rank(rank);
        self.starts.resize(own.len() + 1, 0);
        for (sender, (items, rows)) in senders.clone().enumerate() {
            for &Item { row, seat } in items {
                let wrong = if !own.contains(&seat) {
                    Some(DispatchError::Seat {
                        seat,
                        sender,
                        first: own.start,
                        end: own.end,
                    })
                } else if row >= rows {
                    Some(DispatchError::Row { row, sender, rows })
                } else {
                    None
                };
                if let Some(wrong) = wrong {
                    self.clear();
                    return Err(wrong);
                }
                self.starts[(seat - own.start) as usize + 1] += 1;
            }
        }
        for seat in 0..own.len() {
            self.starts[seat + 1] += self.starts[seat];
        }
        let count = self.starts.last().copied().unwrap_or(0) as usize;
        self.sources.resize(count, 0);
        self.item_starts.push(0);
        let mut first_row = 0;
        for (items, rows) in senders {
            for item in items {
                let next = &mut self.starts[(item.seat - own.start) as usize];
                self.sources[*next as usize] = u32::saturating_add(first_row, item.row);
                self.places.push(*next);
                *next += 1;
            }
            first_row = u32::saturating_add(first_row, rows);
            self.item_starts.push(self.places.len() as u32);
        }
        // Every start has moved to its end, the next one's start.
        self.starts.rotate_right(1);
        self.starts[0] = 0;
        Ok(())
    }

    fn clear(&mut self) {
        for list in [
            &mut self.starts,
            &mut self.sources,
            &mut self.places,
            &mut self.item_starts,
        ] {
            list.clear();
        }
    }

    /// For each place the row it takes, among all rows that came.
    pub fn sources(&self) -> &[u32] {
        &self.sources
    }

    /// Places of the rank's `seat`th seat.
    pub fn places_of_seat(&self, seat: usize) -> Range<usize> {
        range(&self.starts, seat)
    }

    /// Places of a sender's items, in the order in which it wants their outputs.
    pub fn places_for(&self, sender: usize) -> &[u32] {
        &self.places[range(&self.item_starts, sender)]
    }
}

/// From a list of starts; empty where there is none.
fn range(starts: &[u32], at: usize) -> Range<usize> {
    match (starts.get(at), starts.get(at + 1)) {
        (Some(&start), Some(&end)) => start as usize..end as usize,
        _ => 0..0,
    }
}

fn length(what: &'static str, got: usize, expected: usize) -> DispatchError {
    DispatchError::Length {
        what,
        got,
        expected,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const TOP_K: usize = 4;
    const HIDDEN: usize = 5;

    /// A group: experts in seats, and each rank's rows with their experts.
    #[derive(Clone, Debug)]
    struct World {
        placement: ExpertPlacement,
        choices: Vec<Vec<u32>>,
    }

    fn world() -> impl Strategy<Value = World> {
        (1u32..5, 1u32..4, 0u32..3).prop_flat_map(|(ranks, own, extra)| {
            let experts = (ranks * own).max(TOP_K as u32).next_multiple_of(ranks);
            let seats = experts + extra * ranks;
            let permuted =
                Just((0..seats).map(|seat| seat % experts).collect::<Vec<_>>()).prop_shuffle();
            let row = Just((0..experts).collect::<Vec<_>>()).prop_shuffle();
            let rows = prop::collection::vec(row.prop_map(|row| row[..TOP_K].to_vec()), 0..7);
            let ranks = ranks as usize;
            let choices = prop::collection::vec(rows, ranks..=ranks);
            (permuted, choices).prop_map(move |(seats, choices)| World {
                placement: ExpertPlacement::new(experts, ranks as u32, seats).unwrap(),
                choices: choices.into_iter().map(|rows| rows.concat()).collect(),
            })
        })
    }

    /// What an expert makes of a value: different for each expert, and rounded.
    fn expert_output(expert: u32, x: f32) -> f32 {
        (x * 1.37 + expert as f32).sin() * 10f32.powi(expert as i32 % 7 - 3)
    }

    fn input(rank: usize, row: usize) -> Vec<f32> {
        (0..HIDDEN)
            .map(|at| (rank * 100 + row * 10 + at) as f32 * 0.013)
            .collect()
    }

    fn weight(rank: usize, at: usize) -> f32 {
        1.0 / (1.0 + (rank * 31 + at * 7) as f32 % 11.0)
    }

    /// Outputs of all rows, summed at home: `by_gather` tells how rows and choices travel.
    fn over_ranks(world: &World, by_gather: bool) -> Vec<Vec<f32>> {
        let placement = &world.placement;
        let ranks = placement.ranks() as usize;
        let dispatches: Vec<Dispatch> = (0u32..)
            .zip(&world.choices)
            .map(|(home, choices)| {
                let mut dispatch = Dispatch::default();
                dispatch.plan(placement, home, choices, TOP_K).unwrap();
                dispatch
            })
            .collect();
        let mut back: Vec<Vec<f32>> = (dispatches.iter())
            .map(|dispatch| vec![f32::NAN; dispatch.items.len() * HIDDEN])
            .collect();
        for rank in 0..ranks {
            let (mut rows, mut sent) = (Vec::new(), Vec::new());
            for (home, dispatch) in dispatches.iter().enumerate() {
                let mut items = dispatch.items_to(rank).to_vec();
                let mut came: Vec<usize> = dispatch
                    .rows_to(rank)
                    .iter()
                    .map(|row| *row as usize)
                    .collect();
                if by_gather {
                    let choices = &world.choices[home];
                    Dispatch::gathered(
                        placement,
                        rank as u32,
                        home as u32,
                        choices,
                        TOP_K,
                        &mut items,
                    )
                    .unwrap();
                    came = (0..choices.len() / TOP_K).collect();
                }
                rows.extend(came.iter().map(|row| input(home, *row)));
                sent.push((items, came.len() as u32));
            }
            let mut arrivals = Arrivals::default();
            let senders = sent.iter().map(|(items, rows)| (items.as_slice(), *rows));
            arrivals.sort(placement, rank as u32, senders).unwrap();
            let mut outputs = vec![Vec::new(); arrivals.sources().len()];
            for (at, seat) in placement.seats_of_rank(rank as u32).enumerate() {
                let expert = placement.seats()[seat as usize];
                for place in arrivals.places_of_seat(at) {
                    let row = &rows[arrivals.sources()[place] as usize];
                    outputs[place] = row.iter().map(|x| expert_output(expert, *x)).collect();
                }
            }
            for (home, back) in back.iter_mut().enumerate() {
                let wanted = arrivals.places_for(home).iter();
                let flat: Vec<f32> = wanted
                    .flat_map(|place| outputs[*place as usize].clone())
                    .collect();
                let range = dispatches[home].outputs_from(rank);
                back[range.start * HIDDEN..range.end * HIDDEN].copy_from_slice(&flat);
            }
        }
        let mut all = Vec::new();
        for (home, choices) in world.choices.iter().enumerate() {
            for row in 0..choices.len() / TOP_K {
                let weights: Vec<f32> = (row * TOP_K..(row + 1) * TOP_K)
                    .map(|at| weight(home, at))
                    .collect();
                let mut out = vec![f32::NAN; HIDDEN];
                let shared = [0.25; HIDDEN];
                dispatches[home]
                    .combine(row, &weights, &back[home], Some(&shared), &mut out)
                    .unwrap();
                all.push(out);
            }
        }
        all
    }

    /// The same on one rank, as it sums: slot by slot, then the shared expert.
    fn alone(world: &World) -> Vec<Vec<f32>> {
        let mut all = Vec::new();
        for (home, choices) in world.choices.iter().enumerate() {
            for (row, experts) in choices.chunks(TOP_K).enumerate() {
                let mut out = vec![0.0; HIDDEN];
                for (slot, expert) in experts.iter().enumerate() {
                    let x = input(home, row);
                    let output: Vec<f32> = x.iter().map(|x| expert_output(*expert, *x)).collect();
                    add_scaled(&mut out, &output, weight(home, row * TOP_K + slot)).unwrap();
                }
                out.iter_mut().for_each(|out| *out += 0.25);
                all.push(out);
            }
        }
        all
    }

    fn bits(rows: &[Vec<f32>]) -> Vec<u32> {
        rows.iter().flatten().map(|value| value.to_bits()).collect()
    }

    proptest! {
        #[test]
        fn sums_over_ranks_have_the_bits_of_one_rank(world in world()) {
            let alone = bits(&alone(&world));
            prop_assert_eq!(&bits(&over_ranks(&world, false)), &alone);
            prop_assert_eq!(&bits(&over_ranks(&world, true)), &alone);
        }

        #[test]
        fn a_row_travels_once_to_each_rank_that_has_one_of_its_experts(world in world()) {
            let placement = &world.placement;
            for (home, choices) in (0u32..).zip(&world.choices) {
                let mut dispatch = Dispatch::default();
                dispatch.plan(placement, home, choices, TOP_K).unwrap();
                let mut items = 0;
                for rank in 0..placement.ranks() as usize {
                    let rows = dispatch.rows_to(rank);
                    prop_assert!(rows.is_sorted_by(|a, b| a < b));
                    let used: std::collections::BTreeSet<u32> =
                        dispatch.items_to(rank).iter().map(|item| item.row).collect();
                    prop_assert_eq!(used.len(), rows.len());
                    items += dispatch.items_to(rank).len();
                }
                prop_assert_eq!(items, choices.len());
            }
        }
    }

    #[test]
    fn what_peers_send_is_checked() {
        let placement = ExpertPlacement::in_order(4, 0, 2).unwrap();
        let mut arrivals = Arrivals::default();
        let mut sort = |row, seat| {
            let items = [Item { row, seat }];
            arrivals.sort(&placement, 1, [(&items[..], 3)].into_iter())
        };
        assert!(sort(2, 3).is_ok());
        assert!(matches!(sort(2, 1), Err(DispatchError::Seat { .. })));
        assert!(matches!(sort(2, u32::MAX), Err(DispatchError::Seat { .. })));
        assert!(matches!(sort(3, 3), Err(DispatchError::Row { .. })));
        assert!(arrivals.sources().is_empty());
    }

    #[test]
    fn lengths_and_experts_are_checked() {
        let placement = ExpertPlacement::in_order(4, 0, 2).unwrap();
        let mut dispatch = Dispatch::default();
        assert!(dispatch.plan(&placement, 0, &[0, 1, 2], 2).is_err());
        assert!(dispatch.plan(&placement, 0, &[0, 4], 2).is_err());
        dispatch.plan(&placement, 0, &[0, 3], 2).unwrap();
        let mut out = [0.0; 2];
        assert!(
            dispatch
                .combine(0, &[1.0; 2], &[0.0; 4], None, &mut out)
                .is_ok()
        );
        assert!(
            dispatch
                .combine(1, &[1.0; 2], &[0.0; 4], None, &mut out)
                .is_err()
        );
        assert!(
            dispatch
                .combine(0, &[1.0], &[0.0; 4], None, &mut out)
                .is_err()
        );
        assert!(
            dispatch
                .combine(0, &[1.0; 2], &[0.0; 3], None, &mut out)
                .is_err()
        );
    }
}
