//! Experts in seats.

use std::ops::Range;
use twinfer_protocol::ApiError;

/// The seats of one layer, over all ranks: rank r has seats `r·n..(r + 1)·n`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExpertPlacement {
    experts: u32,
    ranks: u32,
    /// Expert of each seat.
    seats: Vec<u32>,
    /// `of_expert[starts[e]..starts[e + 1]]` are the seats of expert `e`, ascending.
    starts: Vec<u32>,
    of_expert: Vec<u32>,
}

/// Can `experts` and `redundant` more seats be spread evenly over `ranks`?
///
/// # Errors
/// `InvalidRequest` that names the value that does not fit and the nearest ones that do.
pub fn check_spread(experts: u32, redundant: u32, ranks: u32) -> Result<(), ApiError> {
    if ranks == 0 || experts == 0 {
        let field = if ranks == 0 { "ranks" } else { "experts" };
        return Err(ApiError::invalid(
            field,
            format!("{field} is 0; allowed are numbers from 1"),
        ));
    }
    let seats = u64::from(experts) + u64::from(redundant);
    let ranks = u64::from(ranks);
    if seats.is_multiple_of(ranks) {
        return Ok(());
    }
    let fits = |ranks: &u64| seats.is_multiple_of(*ranks);
    let fewer = (1..ranks).rev().find(fits).unwrap_or(1);
    let more = (ranks + 1..=seats).find(fits);
    let more = more.map_or(String::new(), |more| format!(" or {more}"));
    let redundant_up = seats.next_multiple_of(ranks) - u64::from(experts);
    Err(ApiError::invalid(
        "ranks",
        format!(
            "{experts} experts and {redundant} redundant ones do not spread over {ranks} ranks; allowed are \
             {fewer}{more} ranks, or {redundant_up} redundant experts"
        ),
    ))
}

impl ExpertPlacement {
    /// As many experts, ranks and seats as `other`.
    pub fn has_shape_of(&self, other: &Self) -> bool {
        (self.experts(), self.ranks(), self.seats().len())
            == (other.experts(), other.ranks(), other.seats().len())
    }

    /// Experts by seat.
    ///
    /// # Errors
    /// `InvalidRequest` when the seats cannot be divided among the ranks, an expert does not exist, or one
    /// has no seat.
    pub fn new(experts: u32, ranks: u32, seats: Vec<u32>) -> Result<Self, ApiError> {
        let refuse = |what: String| Err(ApiError::invalid("expert_placement", what));
        if ranks == 0 || seats.is_empty() || !seats.len().is_multiple_of(ranks as usize) {
            return refuse(format!("{} seats for {ranks} ranks", seats.len()));
        }
        if u32::try_from(seats.len()).is_err() || experts as usize > seats.len() {
            return refuse(format!("{} seats for {experts} experts", seats.len()));
        }
        if let Some(expert) = seats.iter().find(|expert| **expert >= experts) {
            return refuse(format!("expert {expert} of {experts}"));
        }
        let mut starts = vec![0u32; experts as usize + 1];
        for expert in &seats {
            starts[*expert as usize + 1] += 1;
        }
        if let Some(missing) = starts[1..].iter().position(|count| *count == 0) {
            return refuse(format!("expert {missing} has no seat"));
        }
        for expert in 0..experts as usize {
            starts[expert + 1] += starts[expert];
        }
        let mut next = starts.clone();
        let mut of_expert = vec![0; seats.len()];
        for (seat, expert) in (0..).zip(&seats) {
            let next = &mut next[*expert as usize];
            of_expert[*next as usize] = seat;
            *next += 1;
        }
        Ok(Self {
            experts,
            ranks,
            seats,
            starts,
            of_expert,
        })
    }

    /// Experts in order of their numbers, redundant seats behind them beginning with expert 0 again.
    ///
    /// # Errors
    /// As [`check_spread`].
    pub fn in_order(experts: u32, redundant: u32, ranks: u32) -> Result<Self, ApiError> {
        check_spread(experts, redundant, ranks)?;
        let seats = (0..experts.saturating_add(redundant)).map(|seat| seat % experts);
        Self::new(experts, ranks, seats.collect())
    }

    /// Number of experts.
    pub fn experts(&self) -> u32 {
        self.experts
    }

    /// Number of ranks.
    pub fn ranks(&self) -> u32 {
        self.ranks
    }

    /// Expert of each seat.
    pub fn seats(&self) -> &[u32] {
        &self.seats
    }

    /// Seats of each rank.
    pub fn seats_per_rank(&self) -> u32 {
        // At least one rank and seat, and no more seats than u32 counts: see `new`.
        self.seats.len() as u32 / self.ranks
    }

    /// Rank of a seat.
    pub fn rank_of(&self, seat: u32) -> u32 {
        seat / self.seats_per_rank()
    }

    /// Seats of a rank.
    pub fn seats_of_rank(&self, rank: u32) -> Range<u32> {
        let own = self.seats_per_rank();
        rank * own..(rank + 1) * own
    }

    /// Seats of an expert, ascending, at least one; none for an expert that does not exist.
    pub fn seats_of(&self, expert: u32) -> &[u32] {
        let expert = expert as usize;
        match (self.starts.get(expert), self.starts.get(expert + 1)) {
            (Some(&start), Some(&end)) => &self.of_expert[start as usize..end as usize],
            _ => &[],
        }
    }

    /// Seat that row `row` of rank `home` goes to for an expert: rows and ranks take turns, so that replicas
    /// are used alike. Known to every rank that knows the row's place.
    pub fn seat_for(&self, expert: u32, home: u32, row: u32) -> Option<u32> {
        let seats = self.seats_of(expert);
        let turn = u64::from(home) + u64::from(row);
        let at = turn.checked_rem(seats.len() as u64)?;
        seats.get(at as usize).copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spreads_that_do_not_fit_name_those_that_do() {
        assert!(check_spread(256, 32, 48).is_ok());
        assert!(check_spread(16, 0, 16).is_ok());
        let error = check_spread(256, 0, 48).unwrap_err();
        for part in ["48 ranks", "32 or 64 ranks", "32 redundant"] {
            assert!(error.message.contains(part), "{}", error.message);
        }
        assert!(check_spread(8, 0, 0).is_err() && check_spread(0, 0, 8).is_err());
    }

    #[test]
    fn placements_are_checked() {
        assert!(ExpertPlacement::new(4, 2, vec![0, 1, 2, 3]).is_ok());
        for (experts, ranks, seats) in [
            (4, 2, vec![0, 1, 2, 2]),
            (4, 2, vec![0, 1, 2, 4]),
            (4, 3, vec![0, 1, 2, 3]),
            (4, 0, vec![0, 1, 2, 3]),
            (5, 2, vec![0, 1, 2, 3]),
            (0, 1, vec![]),
        ] {
            let refused = ExpertPlacement::new(experts, ranks, seats.clone());
            assert!(refused.is_err(), "{experts} {ranks} {seats:?}");
        }
    }

    #[test]
    fn rows_take_turns_among_replicas() {
        let placement = ExpertPlacement::new(3, 2, vec![0, 1, 2, 0]).unwrap();
        assert_eq!(placement.seats_of(0), [0, 3]);
        let turns: Vec<_> = (0..4).map(|row| placement.seat_for(0, 0, row)).collect();
        assert_eq!(turns, [Some(0), Some(3), Some(0), Some(3)]);
        assert_eq!(placement.seat_for(0, 1, 0), Some(3));
        assert_eq!(placement.seat_for(3, 0, 0), None);
        assert_eq!((placement.rank_of(1), placement.rank_of(2)), (0, 1));
        assert_eq!(placement.seats_of_rank(1), 2..4);
    }
}
