//! Which cores an instance runs on.

use crate::CoreSet;

/// What an instance asks for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Ask {
    /// These cores.
    Named(Vec<u32>),
    /// So many.
    Count(u32),
    /// An equal share of what is left.
    Share,
}

#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Allotted {
    /// Cores of each ask.
    pub(crate) cores: Vec<Vec<u32>>,
    /// Some core serves two asks.
    pub(crate) shared: bool,
}

#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Wrong {
    /// Index of the ask that cannot be met.
    pub(crate) ask: usize,
    pub(crate) message: String,
    pub(crate) help: String,
}

/// Gives each ask its cores, lowest numbers first: disjoint sets, or with `share` sets that overlap
/// when there are too few cores.
pub(crate) fn allot(cores: &[u32], asks: &[Ask], share: bool) -> Result<Allotted, Wrong> {
    let mut free: Vec<u32> = cores.to_vec();
    for (ask, named) in asks.iter().enumerate().filter_map(|(i, ask)| match ask {
        Ask::Named(named) => Some((i, named)),
        _ => None,
    }) {
        let bad: Vec<u32> = named
            .iter()
            .filter(|core| !cores.contains(core))
            .copied()
            .collect();
        if !bad.is_empty() {
            let help = format!("allowed: {}", CoreSet::text(cores));
            return Err(Wrong {
                ask,
                message: format!("cpus names {}, which the node has not", CoreSet::text(&bad)),
                help,
            });
        }
        let taken: Vec<u32> = named
            .iter()
            .filter(|core| !free.contains(core))
            .copied()
            .collect();
        if !taken.is_empty() && !share {
            let message = format!(
                "cpus names {}, which another instance has",
                CoreSet::text(&taken)
            );
            let help = match free.is_empty() {
                true => "no core of the node is free".to_owned(),
                false => format!("free: {}", CoreSet::text(&free)),
            };
            return Err(Wrong { ask, message, help });
        }
        free.retain(|core| !named.contains(core));
    }
    let counted: usize = asks
        .iter()
        .map(|ask| {
            if let Ask::Count(n) = ask {
                *n as usize
            } else {
                0
            }
        })
        .sum();
    let sharers = asks.iter().filter(|ask| **ask == Ask::Share).count();
    let each = free
        .len()
        .saturating_sub(counted)
        .checked_div(sharers)
        .unwrap_or(0);
    let enough = counted <= free.len() && (sharers == 0 || each >= 1);
    if !enough && !share {
        return Err(too_few(cores.len(), free.len(), asks));
    }
    let mut out = Vec::with_capacity(asks.len());
    let mut next = 0;
    let pool = if free.is_empty() { cores } else { &free };
    for (ask, asked) in asks.iter().enumerate() {
        let want = match asked {
            Ask::Named(named) => {
                out.push(named.clone());
                continue;
            }
            Ask::Count(n) => *n as usize,
            Ask::Share => each.max(1),
        };
        if want > cores.len() || pool.is_empty() {
            return Err(Wrong {
                ask,
                message: format!("it asks for {want} cores, the node has {}", cores.len()),
                help: "ask for fewer threads".to_owned(),
            });
        }
        let pool = if want > pool.len() { cores } else { pool };
        let mut mine: Vec<u32> = (0..want).map(|k| pool[(next + k) % pool.len()]).collect();
        next += want;
        mine.sort_unstable();
        out.push(mine);
    }
    let mut all: Vec<u32> = out.iter().flatten().copied().collect();
    let count = all.len();
    all.sort_unstable();
    all.dedup();
    Ok(Allotted {
        cores: out,
        shared: all.len() != count,
    })
}

/// Names the first ask that finds no core.
fn too_few(cores: usize, free: usize, asks: &[Ask]) -> Wrong {
    let mut left = free;
    let needs = |ask: &Ask| match ask {
        Ask::Named(_) => 0,
        Ask::Count(n) => *n as usize,
        Ask::Share => 1,
    };
    let total: usize = asks.iter().map(needs).sum();
    for (ask, asked) in asks.iter().enumerate() {
        let need = needs(asked);
        if need > left {
            let noun = if need == 1 { "core" } else { "cores" };
            return Wrong {
                ask,
                message: format!("it needs {need} {noun}, {left} of {cores} are left"),
                help: format!(
                    "the instances need {total} cores together: lower `threads` or `count`, use another node, or set \
                     `share-cores: true` on the node"
                ),
            };
        }
        left -= need;
    }
    Wrong {
        ask: 0,
        message: "too few cores".to_owned(),
        help: String::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn asks() -> impl Strategy<Value = (Vec<u32>, Vec<Ask>, bool)> {
        let ask = prop_oneof![
            proptest::collection::btree_set(0u32..20, 1..4)
                .prop_map(|set| Ask::Named(set.into_iter().collect())),
            (1u32..6).prop_map(Ask::Count),
            Just(Ask::Share),
        ];
        (
            proptest::collection::btree_set(0u32..20, 1..16)
                .prop_map(|set| set.into_iter().collect()),
            proptest::collection::vec(ask, 1..6),
            any::<bool>(),
        )
    }

    proptest! {
        #[test]
        fn cores_are_disjoint_permitted_and_as_many_as_asked((cores, asks, share) in asks()) {
            if let Ok(allotted) = allot(&cores, &asks, share) {
                prop_assert_eq!(allotted.cores.len(), asks.len());
                let mut seen = std::collections::BTreeSet::new();
                let mut twice = false;
                for (mine, ask) in allotted.cores.iter().zip(&asks) {
                    prop_assert!(mine.iter().all(|core| cores.contains(core)));
                    match ask {
                        Ask::Named(named) => prop_assert_eq!(mine, named),
                        Ask::Count(n) => prop_assert_eq!(mine.len(), *n as usize),
                        Ask::Share => prop_assert!(!mine.is_empty()),
                    }
                    let own: std::collections::BTreeSet<u32> = mine.iter().copied().collect();
                    prop_assert_eq!(own.len(), mine.len(), "an instance has a core twice");
                    for core in own { twice |= !seen.insert(core); }
                }
                prop_assert_eq!(allotted.shared, twice);
                if !share { prop_assert!(!twice); }
            }
        }

        #[test]
        fn sharing_is_used_only_when_cores_are_short((cores, asks, _) in asks()) {
            if let Ok(apart) = allot(&cores, &asks, false) {
                prop_assert_eq!(allot(&cores, &asks, true), Ok(apart));
            }
        }
    }

    #[test]
    fn equal_shares_leave_the_rest() {
        let allotted = allot(&[0, 1, 2, 3, 4], &[Ask::Share, Ask::Share], false).unwrap();
        assert_eq!(allotted.cores, [[0, 1], [2, 3]]);
    }

    #[test]
    fn one_core_for_two_needs_sharing() {
        let wrong = allot(&[0], &[Ask::Share, Ask::Share], false).unwrap_err();
        assert_eq!(wrong.ask, 1);
        assert_eq!(wrong.message, "it needs 1 core, 0 of 1 are left");
        let shared = allot(&[0], &[Ask::Share, Ask::Share], true).unwrap();
        assert!(shared.shared);
    }
}
