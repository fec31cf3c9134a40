//! Loads to placements.

use crate::placement::ExpertPlacement;
use twinfer_protocol::ApiError;

/// Bits behind the point of a replica's share of a load.
const SHARE_BITS: u32 = 32;

/// What experts are spread over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EplbShape {
    /// Experts per layer.
    pub experts: u32,
    /// Redundant ones beside them: further seats of experts that have one.
    pub redundant: u32,
    /// Groups of experts, from some of which a row's experts are chosen; 1 if there are none.
    pub groups: u32,
    /// Nodes.
    pub nodes: u32,
    /// Ranks on all nodes.
    pub ranks: u32,
}

impl EplbShape {
    /// Checks that everything divides.
    ///
    /// # Errors
    /// `InvalidRequest` that names the value and what fits.
    pub fn validate(&self) -> Result<(), ApiError> {
        crate::placement::check_spread(self.experts, self.redundant, self.ranks)?;
        for (field, value, whole, of) in [
            ("groups", self.groups, self.experts, "experts"),
            ("nodes", self.nodes, self.ranks, "ranks"),
        ] {
            // Nodes matter only where groups stay on them.
            let matters = field == "groups" || self.is_hierarchical();
            if value == 0 || (matters && !whole.is_multiple_of(value)) {
                let message = format!("{field} is {value}; allowed are divisors of {whole} {of}");
                return Err(ApiError::invalid(field, message));
            }
        }
        if self.experts.checked_add(self.redundant).is_none() {
            return Err(ApiError::invalid(
                "redundant",
                format!(
                    "redundant is {}; allowed are smaller numbers",
                    self.redundant
                ),
            ));
        }
        Ok(())
    }

    /// All seats of a group's experts are on one node. Otherwise seats are spread over all ranks alike.
    pub fn is_hierarchical(&self) -> bool {
        self.nodes > 0 && self.groups.is_multiple_of(self.nodes)
    }

    /// Ranks that experts move among at no cost of the network between nodes.
    pub(super) fn ranks_per_node(&self) -> usize {
        if self.nodes > 0 && self.ranks.is_multiple_of(self.nodes) {
            (self.ranks / self.nodes) as usize
        } else {
            1
        }
    }
}

/// A placement for the loads of one layer, `[experts]`.
///
/// # Errors
/// The shape does not divide, or `loads` is not of that length.
pub fn balance(loads: &[u64], shape: &EplbShape) -> Result<ExpertPlacement, ApiError> {
    shape.validate()?;
    check_loads(loads, shape)?;
    let (nodes, groups) = match shape.is_hierarchical() {
        true => (shape.nodes as usize, shape.groups as usize),
        false => (1, 1),
    };
    let loads: Vec<f64> = loads.iter().map(|load| *load as f64).collect();
    let group_size = loads.len() / groups;
    let group_loads: Vec<f64> = loads
        .chunks(group_size)
        .map(|group| group.iter().sum())
        .collect();
    let node_of_group = pack(&group_loads, nodes);
    let ranks = shape.ranks as usize / nodes;
    let seats_per_node = (shape.experts + shape.redundant) as usize / nodes;
    let mut seats = Vec::with_capacity(seats_per_node * nodes);
    for node in 0..nodes {
        let experts: Vec<usize> = in_bin(&node_of_group, node)
            .flat_map(|group| group * group_size..(group + 1) * group_size)
            .collect();
        let own: Vec<f64> = experts.iter().map(|expert| loads[*expert]).collect();
        let (replicas, counts) = replicate(&own, seats_per_node);
        let shares: Vec<f64> = replicas
            .iter()
            .map(|at| own[*at] / counts[*at] as f64)
            .collect();
        let rank_of_replica = pack(&shares, ranks);
        for rank in 0..ranks {
            let here = in_bin(&rank_of_replica, rank);
            // Below `shape.experts`.
            seats.extend(here.map(|replica| experts[replicas[replica]] as u32));
        }
    }
    ExpertPlacement::new(shape.experts, shape.ranks, seats)
}

/// The placement that a layer should change to: that of [`balance`], its nodes, ranks and seats named so that
/// most experts stay where they are; or `old` if the fullest rank would not have less to do.
///
/// # Errors
/// As [`balance`]; `old` is of another shape.
pub fn rebalance(
    old: &ExpertPlacement,
    loads: &[u64],
    shape: &EplbShape,
) -> Result<ExpertPlacement, ApiError> {
    let new = balance(loads, shape)?;
    if !new.has_shape_of(old) {
        return Err(ApiError::invalid(
            "expert_placement",
            "the placement in use is of another shape",
        ));
    }
    if worst_load(&new, loads) >= worst_load(old, loads) {
        return Ok(old.clone());
    }
    super::moves::keep_in_place(old, &new, shape)
}

/// Load of the fullest rank, if replicas of an expert share its load. Loads of experts that do not exist
/// count nowhere.
pub fn worst_load(placement: &ExpertPlacement, loads: &[u64]) -> f64 {
    // In fixed point, so that the order of a rank's seats does not matter.
    let share = |expert: &u32| {
        let replicas = placement.seats_of(*expert).len().max(1) as u128;
        let load = loads.get(*expert as usize).copied().unwrap_or(0);
        (u128::from(load) << SHARE_BITS) / replicas
    };
    let ranks = placement
        .seats()
        .chunks(placement.seats_per_rank() as usize);
    let worst = ranks
        .map(|seats| seats.iter().map(share).sum::<u128>())
        .max();
    worst.unwrap_or(0) as f64 / (1u64 << SHARE_BITS) as f64
}

fn check_loads(loads: &[u64], shape: &EplbShape) -> Result<(), ApiError> {
    if loads.len() == shape.experts as usize {
        return Ok(());
    }
    Err(ApiError::invalid(
        "loads",
        format!("{} loads of {} experts", loads.len(), shape.experts),
    ))
}

/// Bin of each item and its place there: equal numbers of items per bin, the heaviest item first into the
/// lightest bin that has room. With as many bins as items, each to its own.
fn pack(items: &[f64], bins: usize) -> Vec<(usize, usize)> {
    if bins == items.len() {
        return (0..bins).map(|bin| (bin, 0)).collect();
    }
    let room = items.len() / bins.max(1);
    let mut order: Vec<usize> = (0..items.len()).collect();
    order.sort_by(|a, b| items[*b].total_cmp(&items[*a]));
    let mut filled = vec![(0.0, 0); bins];
    let mut placed = vec![(0, 0); items.len()];
    for item in order {
        let mut lightest: Option<usize> = None;
        for (bin, (load, count)) in filled.iter().enumerate() {
            if *count < room && lightest.is_none_or(|best| *load < filled[best].0) {
                lightest = Some(bin);
            }
        }
        // There is one: items divide evenly among bins.
        let Some(bin) = lightest else {
            continue;
        };
        placed[item] = (bin, filled[bin].1);
        filled[bin].0 += items[item];
        filled[bin].1 += 1;
    }
    placed
}

/// The items of a bin in order of their places.
fn in_bin(placed: &[(usize, usize)], bin: usize) -> impl Iterator<Item = usize> {
    let mut own: Vec<(usize, usize)> = placed
        .iter()
        .enumerate()
        .filter(|(_, (of, _))| *of == bin)
        .map(|(item, (_, place))| (*place, item))
        .collect();
    own.sort_unstable();
    own.into_iter().map(|(_, item)| item)
}

/// Items by replica, the originals first, and the number of replicas of each: every further one goes to the
/// item with the largest share so far.
fn replicate(loads: &[f64], replicas: usize) -> (Vec<usize>, Vec<usize>) {
    let mut of: Vec<usize> = (0..loads.len()).collect();
    let mut counts = vec![1; loads.len()];
    while of.len() < replicas && !loads.is_empty() {
        let share = |item: usize| loads[item] / counts[item] as f64;
        let mut most = 0;
        for item in 1..loads.len() {
            if share(item) > share(most) {
                most = item;
            }
        }
        counts[most] += 1;
        of.push(most);
    }
    (of, counts)
}
