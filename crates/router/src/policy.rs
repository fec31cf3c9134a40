//! Which instances serve a request. Pure: loads and turns are the only memory, no clock.
//!
//! Prefill and decode are picked as one pair. Ties go to the pair picked longest ago, so that an idle
//! pool is used evenly and every pair occurs.

use crate::registry::{InstanceId, Pools};
use std::collections::HashMap;
use twinfer_config::Policy;

/// A prefill and a decode instance.
pub(crate) type Pair = (InstanceId, InstanceId);

/// What a request must not get again.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Tried {
    /// Prefill instances that failed.
    pub(crate) prefill: Vec<InstanceId>,
    /// Decode (or whole) instances that failed.
    pub(crate) decode: Vec<InstanceId>,
    /// Pairs between which the handoff failed.
    pub(crate) pairs: Vec<Pair>,
}

/// Of more instances with equal load, this many take part in the choice of a pair.
const MAX_TIED: usize = 8;

/// Loads and turns of all instances.
#[derive(Debug)]
pub(crate) struct Picker {
    policy: Policy,
    turn: u64,
    load: Vec<u32>,
    last: Vec<u64>,
    last_pair: HashMap<Pair, u64>,
}

impl Tried {
    fn is_empty(&self) -> bool {
        self.prefill.is_empty() && self.decode.is_empty() && self.pairs.is_empty()
    }
}

impl Picker {
    pub(crate) fn new(policy: Policy, instances: usize) -> Self {
        Self {
            policy,
            turn: 0,
            load: vec![0; instances],
            last: vec![0; instances],
            last_pair: HashMap::new(),
        }
    }

    /// Picks a pair and counts both in: least load together; ties go to the pair, then to the
    /// instances, picked longest ago.
    pub(crate) fn pair(&mut self, pools: &Pools, tried: &Tried) -> Option<Pair> {
        let mut best: Option<((u64, u64, u64), Pair)> = None;
        for group in &pools.groups {
            let (prefill, decode) = if tried.is_empty() {
                (self.least(&group.prefill), self.least(&group.decode))
            } else {
                (group.prefill.clone(), group.decode.clone())
            };
            for &p in prefill.iter().filter(|p| !tried.prefill.contains(p)) {
                for &d in decode.iter().filter(|d| !tried.decode.contains(d)) {
                    let pair = (p, d);
                    if tried.pairs.contains(&pair) {
                        continue;
                    }
                    let last = self.last_pair.get(&pair).copied().unwrap_or(0);
                    let key = (
                        self.load(p) + self.load(d),
                        last,
                        self.last(p) + self.last(d),
                    );
                    if best.is_none_or(|(other, _)| key < other) {
                        best = Some((key, pair));
                    }
                }
            }
        }
        let (_, (p, d)) = best?;
        self.turn += 1;
        self.last_pair.insert((p, d), self.turn);
        self.take(p);
        self.take(d);
        Some((p, d))
    }

    /// Picks another decode instance for a prefill that is done, and counts it in.
    pub(crate) fn decode_for(
        &mut self,
        pools: &Pools,
        prefill: InstanceId,
        tried: &Tried,
    ) -> Option<InstanceId> {
        let group = pools
            .groups
            .iter()
            .find(|group| group.prefill.contains(&prefill))?;
        let decode = group
            .decode
            .iter()
            .copied()
            .filter(|d| !tried.decode.contains(d) && !tried.pairs.contains(&(prefill, *d)))
            .min_by_key(|&d| {
                let last_pair = self.last_pair.get(&(prefill, d)).copied().unwrap_or(0);
                (self.load(d), last_pair, self.last(d))
            })?;
        self.turn += 1;
        self.last_pair.insert((prefill, decode), self.turn);
        self.take(decode);
        Some(decode)
    }

    /// Picks one instance of a list, and counts it in.
    pub(crate) fn one(&mut self, from: &[InstanceId], not: &[InstanceId]) -> Option<InstanceId> {
        let id = from
            .iter()
            .copied()
            .filter(|id| !not.contains(id))
            .min_by_key(|&id| (self.load(id), self.last(id)))?;
        self.turn += 1;
        self.take(id);
        Some(id)
    }

    /// Counts an instance out.
    pub(crate) fn give_back(&mut self, id: InstanceId) {
        if let Some(load) = self.load.get_mut(id.index()) {
            *load = load.saturating_sub(1);
        }
    }

    /// Requests in flight at an instance.
    pub(crate) fn in_flight(&self, id: InstanceId) -> u32 {
        self.load.get(id.index()).copied().unwrap_or(0)
    }

    /// Those of the least load; of many, those picked longest ago.
    fn least(&self, from: &[InstanceId]) -> Vec<InstanceId> {
        let Some(least) = from.iter().map(|&id| self.load(id)).min() else {
            return Vec::new();
        };
        let mut tied: Vec<InstanceId> = from
            .iter()
            .copied()
            .filter(|&id| self.load(id) == least)
            .collect();
        if tied.len() > MAX_TIED {
            tied.select_nth_unstable_by_key(MAX_TIED - 1, |&id| self.last(id));
            tied.truncate(MAX_TIED);
        }
        tied
    }

    fn take(&mut self, id: InstanceId) {
        if let Some(load) = self.load.get_mut(id.index()) {
            *load += 1;
        }
        if let Some(last) = self.last.get_mut(id.index()) {
            *last = self.turn;
        }
    }

    fn load(&self, id: InstanceId) -> u64 {
        match self.policy {
            Policy::LeastLoad => u64::from(self.in_flight(id)),
            Policy::RoundRobin => 0,
        }
    }

    fn last(&self, id: InstanceId) -> u64 {
        self.last.get(id.index()).copied().unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::registry::Group;
    use proptest::prelude::*;
    use std::collections::{BTreeMap, BTreeSet};

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
                let mut picker = Picker::new(policy, 4);
                let mut share: BTreeMap<InstanceId, u32> = BTreeMap::new();
                let mut seen = BTreeSet::new();
                let mut running = std::collections::VecDeque::new();
                for _ in 0..100 {
                    let (p, d) = picker.pair(&pools, &Tried::default()).expect("a pair");
                    *share.entry(p).or_default() += 1;
                    *share.entry(d).or_default() += 1;
                    seen.insert((p, d));
                    // The prefill leg ends long before the decode leg.
                    picker.give_back(p);
                    running.push_back(d);
                    if running.len() == concurrency {
                        picker.give_back(running.pop_front().expect("one"));
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
        let mut picker = Picker::new(Policy::RoundRobin, 8);
        let mut seen = BTreeSet::new();
        for _ in 0..4 {
            seen.insert(picker.pair(&a, &Tried::default()).expect("a pair"));
            picker.pair(&b, &Tried::default());
            picker.pair(&b, &Tried::default());
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
        let mut picker = Picker::new(Policy::LeastLoad, 4);
        for _ in 0..20 {
            let (p, d) = picker.pair(&pools, &Tried::default()).expect("a pair");
            assert_eq!(d.0, p.0 + 2);
        }
    }

    proptest! {
        #[test]
        fn load_decides_and_nothing_tried_comes_back(
            policy in prop_oneof![Just(Policy::LeastLoad), Just(Policy::RoundRobin)],
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
            let mut picker = Picker::new(policy, 8);
            let mut running: Vec<InstanceId> = Vec::new();
            let mut count = [0u32; 8];
            for (what, at) in steps {
                if what == 3 && !running.is_empty() {
                    let id = running.swap_remove(at % running.len());
                    picker.give_back(id);
                    count[id.index()] -= 1;
                    continue;
                }
                let open = |p: u32, d: u32| {
                    let (p, d) = (InstanceId(p), InstanceId(d));
                    !tried.prefill.contains(&p) && !tried.decode.contains(&d) && !tried.pairs.contains(&(p, d))
                };
                let possible = (0..4).any(|p| (4..8).any(|d| open(p, d)));
                match picker.pair(&pools, &tried) {
                    None => prop_assert!(!possible),
                    Some((p, d)) => {
                        prop_assert!(open(p.0, d.0));
                        if policy == Policy::LeastLoad {
                            let sums = (0..4).flat_map(|p| (4..8).map(move |d| (p, d)));
                            let sums = sums.filter(|&(p, d)| open(p, d));
                            let least = sums.map(|(p, d)| count[p as usize] + count[d as usize]).min();
                            prop_assert_eq!(Some(count[p.index()] + count[d.index()]), least);
                        }
                        for id in [p, d] {
                            running.push(id);
                            count[id.index()] += 1;
                        }
                    }
                }
            }
            for id in running {
                picker.give_back(id);
            }
            for id in 0..8 {
                prop_assert_eq!(picker.in_flight(InstanceId(id)), 0);
            }
        }
    }
}
