//! Which instances serve a request. Pure: loads, turns and prefixes seen are the only memory; random numbers are
//! arguments, there is no clock.
//!
//! Prefill and decode are picked as one pair. Ties go to the pair picked longest ago, so that an idle
//! pool is used evenly and every pair occurs.

mod prefixes;
mod work;

use crate::registry::{InstanceId, Pools};
use prefixes::Prefixes;
use std::collections::HashMap;
use twinfer_config::Policy;
pub(crate) use work::Work;
use work::{Load, Side};

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

/// How each side of a pair is picked; whole requests are picked as decode's.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Policies {
    pub(crate) prefill: Policy,
    pub(crate) decode: Policy,
}

/// A request as the picker sees it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Wanted<'a> {
    pub(crate) tried: &'a Tried,
    pub(crate) work: &'a Work,
    /// Any number.
    pub(crate) random: u64,
}

/// Of more instances with equal load, this many take part in the choice of a pair.
const MAX_TIED: usize = 8;
/// The instance that has a prefix is passed over when its load is above twice the least and this many requests more.
const SPILL: u64 = 2 * work::REQUEST;

/// Loads and turns of all instances.
#[derive(Debug)]
pub(crate) struct Picker {
    policies: Policies,
    turn: u64,
    load: HashMap<InstanceId, Load>,
    last_pair: HashMap<Pair, u64>,
    prefixes: Prefixes,
}

impl Picker {
    pub(crate) fn new(policies: Policies) -> Self {
        Self {
            policies,
            turn: 0,
            load: HashMap::new(),
            last_pair: HashMap::new(),
            prefixes: Prefixes::default(),
        }
    }

    /// Picks a pair and counts both in: least load together; ties go to the pair, then to the
    /// instances, picked longest ago.
    pub(crate) fn pair(&mut self, pools: &Pools, wanted: Wanted<'_>) -> Option<Pair> {
        let tried = wanted.tried;
        let mut best: Option<((u64, u64, u64), Pair)> = None;
        for group in &pools.groups {
            let open = |ids: &[InstanceId], not: &[InstanceId]| -> Vec<InstanceId> {
                let ids = ids.iter().copied();
                ids.filter(|id| !not.contains(id)).collect()
            };
            let mut prefill = open(&group.prefill, &tried.prefill);
            let mut decode = open(&group.decode, &tried.decode);
            // Where single pairs are closed, the choice of one side must not take all of the other away.
            if tried.pairs.is_empty() {
                self.narrow(Side::Prefill, &mut prefill, wanted);
                self.narrow(Side::Decode, &mut decode, wanted);
            }
            for &p in &prefill {
                for &d in &decode {
                    let pair = (p, d);
                    if tried.pairs.contains(&pair) {
                        continue;
                    }
                    let last = self.last_pair.get(&pair).copied().unwrap_or(0);
                    let key = (
                        self.cost(Side::Prefill, p) + self.cost(Side::Decode, d),
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
        self.take(Side::Prefill, p, wanted.work);
        self.take(Side::Decode, d, wanted.work);
        Some((p, d))
    }

    /// Picks another decode instance for a prefill that is done, and counts it in.
    pub(crate) fn decode_for(
        &mut self,
        pools: &Pools,
        prefill: InstanceId,
        wanted: Wanted<'_>,
    ) -> Option<InstanceId> {
        let tried = wanted.tried;
        let group = pools
            .groups
            .iter()
            .find(|group| group.prefill.contains(&prefill))?;
        let mut decode: Vec<InstanceId> = group.decode.clone();
        decode.retain(|d| !tried.decode.contains(d) && !tried.pairs.contains(&(prefill, *d)));
        self.narrow(Side::Decode, &mut decode, wanted);
        let decode = decode.into_iter().min_by_key(|&d| {
            let last_pair = self.last_pair.get(&(prefill, d)).copied().unwrap_or(0);
            (self.cost(Side::Decode, d), last_pair, self.last(d))
        })?;
        self.turn += 1;
        self.last_pair.insert((prefill, decode), self.turn);
        self.take(Side::Decode, decode, wanted.work);
        Some(decode)
    }

    /// Picks one instance of a list, and counts it in.
    pub(crate) fn one(&mut self, from: &[InstanceId], wanted: Wanted<'_>) -> Option<InstanceId> {
        let not = &wanted.tried.decode;
        let mut open: Vec<InstanceId> = from.to_vec();
        open.retain(|id| !not.contains(id));
        self.narrow(Side::Whole, &mut open, wanted);
        let id = open
            .into_iter()
            .min_by_key(|&id| (self.cost(Side::Whole, id), self.last(id)))?;
        self.turn += 1;
        self.take(Side::Whole, id, wanted.work);
        Some(id)
    }

    /// Picks a prefill instance of a list, and counts it in.
    pub(crate) fn prefill(
        &mut self,
        from: &[InstanceId],
        wanted: Wanted<'_>,
    ) -> Option<InstanceId> {
        let mut open: Vec<InstanceId> = from.to_vec();
        self.narrow(Side::Prefill, &mut open, wanted);
        let id = open
            .into_iter()
            .min_by_key(|&id| (self.cost(Side::Prefill, id), self.last(id)))?;
        self.turn += 1;
        self.take(Side::Prefill, id, wanted.work);
        Some(id)
    }

    /// The prompt is computed: only its KV is still there.
    pub(crate) fn prefilled(&mut self, id: InstanceId, work: &Work) {
        if let Some(load) = self.load.get_mut(&id) {
            load.prefilled(work);
        }
    }

    /// Counts an instance out.
    pub(crate) fn give_back(&mut self, side: Side, id: InstanceId, work: &Work, prefilled: bool) {
        if let Some(load) = self.load.get_mut(&id) {
            load.give_back(side, work, prefilled);
        }
    }

    /// The instance is gone for good.
    pub(crate) fn forget(&mut self, id: InstanceId) {
        self.load.remove(&id);
        self.last_pair
            .retain(|pair, _| pair.0 != id && pair.1 != id);
        self.prefixes.forget(id);
    }

    /// Requests in flight at an instance.
    pub(crate) fn in_flight(&self, id: InstanceId) -> u32 {
        self.load.get(&id).map_or(0, |load| load.requests)
    }

    /// Does a request's text matter?
    pub(crate) fn wants_prefixes(&self) -> bool {
        let Policies { prefill, decode } = self.policies;
        [prefill, decode].contains(&Policy::PrefixAffinity)
    }

    /// Leaves those that the policy of a side lets take part.
    fn narrow(&self, side: Side, ids: &mut Vec<InstanceId>, wanted: Wanted<'_>) {
        match self.policy(side) {
            Policy::PowerOfTwo => two_of(ids, wanted.random.rotate_left(side as u32 * 20)),
            Policy::PrefixAffinity => {
                let least = ids.iter().map(|&id| self.cost(side, id)).min();
                let most = least.map_or(0, |least| 2 * least + SPILL);
                let fits = |id: InstanceId| ids.contains(&id) && self.cost(side, id) <= most;
                if let Some(owner) = self.prefixes.owner(side, &wanted.work.prefix, fits) {
                    *ids = vec![owner];
                }
            }
            Policy::LeastLoad | Policy::RoundRobin | Policy::PublicProxy => {}
        }
        if ids.len() > 1 && self.policy(side) != Policy::RoundRobin {
            self.least(side, ids);
        }
        if ids.len() > MAX_TIED && wanted.tried == &Tried::default() {
            ids.select_nth_unstable_by_key(MAX_TIED - 1, |&id| self.last(id));
            ids.truncate(MAX_TIED);
        }
    }

    /// Leaves those of the least load.
    fn least(&self, side: Side, ids: &mut Vec<InstanceId>) {
        let least = ids.iter().map(|&id| self.cost(side, id)).min();
        ids.retain(|&id| Some(self.cost(side, id)) == least);
    }

    fn take(&mut self, side: Side, id: InstanceId, work: &Work) {
        let load = self.load.entry(id).or_default();
        load.take(side, work);
        load.last = self.turn;
        if self.policy(side) == Policy::PrefixAffinity {
            self.prefixes.learn(side, &work.prefix, id);
        }
    }

    fn policy(&self, side: Side) -> Policy {
        match side {
            Side::Prefill => self.policies.prefill,
            Side::Decode | Side::Whole => self.policies.decode,
        }
    }

    fn cost(&self, side: Side, id: InstanceId) -> u64 {
        let load = self.load.get(&id);
        match self.policy(side) {
            Policy::RoundRobin => 0,
            Policy::PublicProxy => load.map_or(0, |load| load.proxy_score(side)),
            _ => load.map_or(0, |load| load.cost(side)),
        }
    }

    fn last(&self, id: InstanceId) -> u64 {
        self.load.get(&id).map_or(0, |load| load.last)
    }
}

/// Leaves two of a list, by chance.
fn two_of(ids: &mut Vec<InstanceId>, random: u64) {
    let n = ids.len() as u64;
    if n <= 2 {
        return;
    }
    let first = random % n;
    let second = (first + 1 + (random >> 32) % (n - 1)) % n;
    let at = |index: u64| {
        usize::try_from(index)
            .ok()
            .and_then(|index| ids.get(index).copied())
    };
    *ids = [first, second].into_iter().filter_map(at).collect();
}

pub(crate) use work::Side as PickSide;

#[cfg(test)]
#[path = "policy_tests.rs"]
mod tests;
