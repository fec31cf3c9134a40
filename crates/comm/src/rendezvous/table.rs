//! Who has come, and whether they belong together. Pure: no clock, no sockets.

use super::{Identity, Join, RankInfo, Refusal, printable};
use crate::topology::Topology;

/// Most notes kept of those who were turned away.
const NOTES: usize = 8;

/// The table that the first rank keeps.
#[derive(Debug)]
pub(crate) struct Table {
    own: Join,
    topology: Topology,
    places: Vec<Option<RankInfo>>,
    notes: Vec<String>,
}

/// What becomes of one who came.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// Taken; others are missing.
    Wait,
    /// Taken, and it was the last.
    Complete,
    /// A stranger: turned away, the group waits on.
    Refuse(Refusal),
    /// One of this incarnation that does not fit: there can be no group.
    Fail(Refusal),
}

impl Table {
    /// The table with the rank that keeps it.
    pub(crate) fn new(own: Join, topology: &Topology) -> Self {
        let mut places = vec![None; topology.world() as usize];
        if let Some(place) = places.get_mut(own.info.rank as usize) {
            *place = Some(own.info.clone());
        }
        Self {
            own,
            topology: topology.clone(),
            places,
            notes: Vec::new(),
        }
    }

    pub(crate) fn join(&mut self, join: Join) -> Verdict {
        match self.check(&join) {
            Ok(()) => {}
            Err(refusal @ Refusal::Foreign { .. }) => {
                self.note(&refusal.to_string());
                return Verdict::Refuse(refusal);
            }
            Err(refusal) => return Verdict::Fail(refusal),
        }
        let rank = join.info.rank;
        match self.places.get_mut(rank as usize) {
            Some(Some(first)) => Verdict::Fail(Refusal::Double {
                rank,
                first: first.to_string(),
                second: join.info.to_string(),
            }),
            Some(place) => {
                *place = Some(join.info);
                match self.is_complete() {
                    true => Verdict::Complete,
                    false => Verdict::Wait,
                }
            }
            None => Verdict::Fail(Refusal::NoRank {
                rank,
                world: self.topology.world(),
            }),
        }
    }

    fn check(&self, join: &Join) -> Result<(), Refusal> {
        let (own, rank) = (&self.own, join.info.rank);
        let (host, joiner) = (&own.identity, &join.identity);
        if host.instance != joiner.instance || host.epoch != joiner.epoch {
            return Err(Refusal::Foreign {
                host: host.instance.clone(),
                host_epoch: host.epoch,
                joiner: printable(&joiner.instance),
                joiner_epoch: joiner.epoch,
            });
        }
        if host.version != joiner.version {
            return Err(Refusal::Version {
                rank,
                host: host.version.clone(),
                joiner: printable(&joiner.version),
            });
        }
        if own.counts != join.counts {
            return Err(Refusal::World {
                rank,
                host: own.counts.clone(),
                joiner: join.counts.iter().take(64).copied().collect(),
            });
        }
        if let Some(difference) = difference(host, joiner) {
            return Err(Refusal::Fingerprint { rank, difference });
        }
        let settings = [
            (
                "shared memory",
                own.shares.to_string(),
                join.shares.to_string(),
            ),
            (
                "bytes of a slot",
                own.slot_bytes.to_string(),
                join.slot_bytes.to_string(),
            ),
        ];
        for (setting, host, joiner) in settings {
            if host != joiner {
                let setting = setting.to_owned();
                return Err(Refusal::Setting {
                    rank,
                    setting,
                    host,
                    joiner,
                });
            }
        }
        if rank >= self.topology.world() {
            let world = self.topology.world();
            return Err(Refusal::NoRank { rank, world });
        }
        let planned = (self.topology.node_of(rank), self.topology.local_rank(rank));
        if (join.info.node, join.info.local_rank) != planned {
            return Err(Refusal::Place {
                rank,
                node: join.info.node,
                local_rank: join.info.local_rank,
                planned_node: planned.0,
                planned_local: planned.1,
            });
        }
        Ok(())
    }

    /// A rank that had come is gone again: its place is free.
    pub(crate) fn gone(&mut self, rank: u32) {
        if rank == self.own.info.rank {
            return;
        }
        let place = self.places.get_mut(rank as usize);
        if let Some(info) = place.and_then(Option::take) {
            self.note(&format!("rank {rank} ({info}) came and went"));
        }
    }

    /// Somebody who was turned away, for the message when the group does not come about.
    pub(crate) fn note(&mut self, what: &str) {
        if self.notes.len() < NOTES {
            self.notes.push(what.to_owned());
        }
    }

    fn is_complete(&self) -> bool {
        self.places.iter().all(Option::is_some)
    }

    /// Where all are, when all have come.
    pub(crate) fn ranks(&self) -> Option<Vec<RankInfo>> {
        self.places.iter().cloned().collect()
    }

    /// The error when those who are missing do not come.
    pub(crate) fn missing(&self, seconds: u64) -> Refusal {
        let places = self.places.iter().enumerate();
        Refusal::Missing {
            world: self.topology.world(),
            ranks: places
                .filter(|(_, place)| place.is_none())
                .map(|(rank, _)| rank as u32)
                .collect(),
            seconds,
            notes: self.notes.clone(),
        }
    }
}

/// Names the parts in which two fingerprints differ; none if they are equal.
fn difference(host: &Identity, joiner: &Identity) -> Option<String> {
    let (host, joiner) = (&host.fingerprint, &joiner.fingerprint);
    if host == joiner {
        return None;
    }
    let (ours, theirs) = (host.parts(), joiner.parts());
    let differing: Vec<String> = ours
        .iter()
        .zip(&theirs)
        .filter(|((_, a), (_, b))| a != b)
        .map(|((name, a), (_, b))| {
            let (a, b) = (printable(a), printable(b));
            format!("{name} (rank 0 {a}, it {b})")
        })
        .collect();
    Some(match differing.is_empty() {
        true => {
            let (a, b) = (printable(&host.id), printable(&joiner.id));
            format!("id (rank 0 {a}, it {b})")
        }
        false => differing.join(", "),
    })
}

#[cfg(test)]
#[path = "table_tests.rs"]
mod tests;
