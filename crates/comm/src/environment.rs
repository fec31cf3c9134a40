//! `RANK`, `WORLD_SIZE`, `LOCAL_RANK`, `MASTER_ADDR`, `MASTER_PORT` with one meaning: a rank is a process, and numbers
//! run over all nodes of one instance. Pure.
//!
//! Launchers give these names other meanings: for some `WORLD_SIZE` is the number of nodes and `RANK` that of a node.
//! A value that was inherited and does not say what the plan says is refused, never taken over.

use crate::topology::Topology;

/// Name of a variable and what it means here.
const MEANINGS: [(&str, &str); 5] = [
    (
        "RANK",
        "number of this rank among all ranks of the instance",
    ),
    ("WORLD_SIZE", "number of all ranks of the instance"),
    ("LOCAL_RANK", "number of this rank among those of its node"),
    (
        "MASTER_ADDR",
        "address of the node of rank 0 on the network that ranks use",
    ),
    (
        "MASTER_PORT",
        "port where rank 0 of the instance listens for the others",
    ),
];

/// One rank's place, as the five variables tell it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Placement {
    /// `RANK`: among all ranks of the instance.
    pub rank: u32,
    /// `WORLD_SIZE`: number of all ranks of the instance.
    pub world_size: u32,
    /// `LOCAL_RANK`: among the ranks of its node.
    pub local_rank: u32,
    /// `MASTER_ADDR`: the node of rank 0.
    pub master_addr: String,
    /// `MASTER_PORT`: where rank 0 listens.
    pub master_port: u16,
}

/// A variable that can't be right.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum EnvironmentError {
    /// It has no such value.
    #[error("{name} is {value:?}; allowed is {allowed}")]
    Value {
        /// Of the variable.
        name: &'static str,
        /// What it holds.
        value: String,
        /// What it may hold.
        allowed: String,
    },
    /// Some of the five are set, this one is not.
    #[error("{name} is not set, but {others} {verb}: set all of RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT or none", verb = verb(.others))]
    Missing {
        /// Of the variable.
        name: &'static str,
        /// Those that are set.
        others: String,
    },
    /// It was inherited and says something else than the plan.
    #[error(
        "{name} is inherited with the value {inherited} ({inherited_meaning}), but by the plan it is {planned} ({meaning}); unset it or correct the plan"
    )]
    Disagrees {
        /// Of the variable.
        name: &'static str,
        /// What the environment holds.
        inherited: String,
        /// What that value would be in this plan.
        inherited_meaning: String,
        /// What the plan says.
        planned: String,
        /// What the variable means here.
        meaning: &'static str,
    },
}

fn verb(others: &str) -> &'static str {
    match others.contains(", ") {
        true => "are",
        false => "is",
    }
}

fn meaning(name: &str) -> &'static str {
    MEANINGS
        .iter()
        .find(|(known, _)| *known == name)
        .map_or("", |(_, meaning)| meaning)
}

impl Placement {
    /// Place of `rank` in `topology`.
    pub fn planned(topology: &Topology, rank: u32, master_addr: &str, master_port: u16) -> Self {
        Self {
            rank,
            world_size: topology.world(),
            local_rank: topology.local_rank(rank),
            master_addr: master_addr.to_owned(),
            master_port,
        }
    }

    /// The five variables, to be set for a rank's process.
    pub fn variables(&self) -> [(&'static str, String); 5] {
        [
            ("RANK", self.rank.to_string()),
            ("WORLD_SIZE", self.world_size.to_string()),
            ("LOCAL_RANK", self.local_rank.to_string()),
            ("MASTER_ADDR", self.master_addr.clone()),
            ("MASTER_PORT", self.master_port.to_string()),
        ]
    }

    /// The place that the environment tells; none if it tells nothing. `lookup` reads a variable.
    ///
    /// # Errors
    /// A value that is no number of its kind, or only some of the variables.
    pub fn from_environment(
        lookup: impl Fn(&str) -> Option<String>,
    ) -> Result<Option<Self>, EnvironmentError> {
        let set: Vec<&str> = MEANINGS
            .iter()
            .map(|(name, _)| *name)
            .filter(|name| lookup(name).is_some())
            .collect();
        if set.is_empty() {
            return Ok(None);
        }
        let text = |name: &'static str| {
            lookup(name).ok_or_else(|| EnvironmentError::Missing {
                name,
                others: set.join(", "),
            })
        };
        let number = |name: &'static str, least: u32, most: u32| {
            let value = text(name)?;
            let parsed = value.trim().parse::<u32>().ok();
            parsed
                .filter(|number| (least..=most).contains(number))
                .ok_or_else(|| EnvironmentError::Value {
                    name,
                    value,
                    allowed: format!("{least} to {most}: the {}", meaning(name)),
                })
        };
        let world_size = number("WORLD_SIZE", 1, crate::MAX_WORLD)?;
        let last = world_size - 1;
        let master_addr = text("MASTER_ADDR")?.trim().to_owned();
        if master_addr.is_empty() {
            return Err(EnvironmentError::Value {
                name: "MASTER_ADDR",
                value: master_addr,
                allowed: meaning("MASTER_ADDR").to_owned(),
            });
        }
        Ok(Some(Self {
            rank: number("RANK", 0, last)?,
            world_size,
            local_rank: number("LOCAL_RANK", 0, last)?,
            master_addr,
            master_port: number("MASTER_PORT", 1, u16::MAX.into())? as u16,
        }))
    }

    /// Checks that nothing inherited says something else than this plan. What is not set is no matter.
    ///
    /// # Errors
    /// The first variable that disagrees, with what it means here and what the inherited value may have meant.
    pub fn check_environment(
        &self,
        topology: &Topology,
        lookup: impl Fn(&str) -> Option<String>,
    ) -> Result<(), EnvironmentError> {
        for (name, planned) in self.variables() {
            let Some(inherited) = lookup(name) else {
                continue;
            };
            let inherited = inherited.trim();
            let number = inherited.parse::<u32>().ok();
            let same = match planned.parse::<u32>() {
                Ok(planned) if name != "MASTER_ADDR" => number == Some(planned),
                _ => inherited.eq_ignore_ascii_case(&planned),
            };
            if !same {
                return Err(EnvironmentError::Disagrees {
                    name,
                    inherited: inherited.chars().take(100).collect(),
                    inherited_meaning: self.guess(name, number, topology),
                    planned,
                    meaning: meaning(name),
                });
            }
        }
        Ok(())
    }

    /// What an inherited value is the number of in this plan.
    fn guess(&self, name: &str, number: Option<u32>, topology: &Topology) -> String {
        let node = topology.node_of(self.rank);
        let on_node = topology.ranks_of(node).len() as u32;
        let guess = match (name, number) {
            ("WORLD_SIZE", Some(number)) if number == topology.nodes() => "the number of nodes",
            ("WORLD_SIZE", Some(number)) if number == on_node => "the number of ranks of this node",
            ("RANK", Some(number)) if number == node => "the number of this node",
            ("RANK", Some(number)) if number == self.local_rank => {
                "the number of this rank on its node"
            }
            ("LOCAL_RANK", Some(number)) if number == self.rank => {
                "the number of this rank among all"
            }
            ("RANK" | "WORLD_SIZE" | "LOCAL_RANK", Some(_)) => "no number of this plan",
            ("MASTER_ADDR" | "MASTER_PORT", _) => "the rendezvous of another instance or launcher",
            _ => "no number",
        };
        guess.to_owned()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;

    fn two_by_eight() -> Topology {
        Topology::new(&[8, 8]).unwrap()
    }

    fn plan(rank: u32) -> Placement {
        Placement::planned(&two_by_eight(), rank, "10.0.0.1", 29_500)
    }

    fn environment(pairs: &[(&str, &str)]) -> impl Fn(&str) -> Option<String> {
        let map: BTreeMap<String, String> = pairs
            .iter()
            .map(|(name, value)| ((*name).to_owned(), (*value).to_owned()))
            .collect();
        move |name: &str| map.get(name).cloned()
    }

    #[test]
    fn numbers_run_over_all_nodes() {
        let place = plan(11);
        let [rank, world, local, ..] = place.variables();
        assert_eq!(rank, ("RANK", "11".to_owned()));
        assert_eq!(world, ("WORLD_SIZE", "16".to_owned()));
        assert_eq!(local, ("LOCAL_RANK", "3".to_owned()));
        let variables = place.variables();
        let lookup = |name: &str| {
            let found = variables.iter().find(|(known, _)| *known == name);
            found.map(|(_, value)| value.clone())
        };
        assert_eq!(Placement::from_environment(lookup), Ok(Some(place.clone())));
        assert_eq!(place.check_environment(&two_by_eight(), lookup), Ok(()));
        assert_eq!(
            place.check_environment(&two_by_eight(), environment(&[])),
            Ok(())
        );
        assert_eq!(Placement::from_environment(environment(&[])), Ok(None));
    }

    #[test]
    fn an_inherited_value_with_another_meaning_is_refused_with_both() {
        type Set = &'static [(&'static str, &'static str)];
        let cases: [(Set, &[&str]); 5] = [
            (
                &[("WORLD_SIZE", "2")],
                &[
                    "WORLD_SIZE is inherited with the value 2 (the number of nodes)",
                    "16 (number of all ranks of the instance)",
                ],
            ),
            (
                &[("WORLD_SIZE", "8")],
                &["the number of ranks of this node", "it is 16"],
            ),
            (
                &[("RANK", "1")],
                &[
                    "RANK is inherited with the value 1 (the number of this node)",
                    "it is 11",
                ],
            ),
            (
                &[("RANK", "x")],
                &["RANK is inherited with the value x (no number)"],
            ),
            (
                &[("MASTER_ADDR", "10.0.0.2")],
                &[
                    "10.0.0.2 (the rendezvous of another",
                    "10.0.0.1 (address of the node",
                ],
            ),
        ];
        for (pairs, parts) in cases {
            let error = plan(11)
                .check_environment(&two_by_eight(), environment(pairs))
                .unwrap_err()
                .to_string();
            assert!(parts.iter().all(|part| error.contains(part)), "{error}");
        }
    }

    #[test]
    fn values_that_are_no_place_are_refused_by_name() {
        let good = [
            ("RANK", "1"),
            ("WORLD_SIZE", "2"),
            ("LOCAL_RANK", "0"),
            ("MASTER_ADDR", "host"),
            ("MASTER_PORT", "29500"),
        ];
        assert!(Placement::from_environment(environment(&good)).is_ok());
        for (name, value) in [
            ("RANK", "2"),
            ("RANK", "-1"),
            ("WORLD_SIZE", "0"),
            ("WORLD_SIZE", "100000"),
            ("LOCAL_RANK", ""),
            ("MASTER_ADDR", " "),
            ("MASTER_PORT", "0"),
            ("MASTER_PORT", "65536"),
        ] {
            let mut pairs = good;
            for pair in &mut pairs {
                if pair.0 == name {
                    pair.1 = value;
                }
            }
            let error = Placement::from_environment(environment(&pairs)).unwrap_err();
            assert!(error.to_string().starts_with(name), "{error}");
        }
        let error = Placement::from_environment(environment(&good[..2])).unwrap_err();
        let text = error.to_string();
        assert!(
            text.contains("is not set, but RANK, WORLD_SIZE are"),
            "{text}"
        );
    }
}
