//! A row of a benchmark: what bench/targets.toml asks of it, and what was measured.

use super::{Sample, median};
use anyhow::{Result, bail};
use serde::{Deserialize, Serialize};

/// A row as bench/targets.toml asks for it.
#[derive(Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Target {
    pub(super) name: String,
    unit: String,
    better: Better,
    /// What the floor is.
    floor: String,
    /// Least `ratio` against a peer.
    #[serde(default)]
    pub(super) ratio: Option<f64>,
    /// Least share of the floor.
    #[serde(default)]
    share: Option<f64>,
    /// Least value, most where lower is better.
    #[serde(default)]
    bound: Option<f64>,
    /// One round is enough: nothing is timed.
    #[serde(default)]
    pub(super) once: bool,
    /// Heading in docs/benchmarks.md under which the limit is explained, if the row falls short.
    #[serde(default)]
    limit: Option<String>,
    /// Least figures that this explains; what is lower fails.
    #[serde(default)]
    explained_down_to: Least,
}

#[derive(Clone, Copy, PartialEq, Deserialize, Serialize)]
#[serde(rename_all = "lowercase")]
enum Better {
    Higher,
    Lower,
}

#[derive(Clone, Copy, Default, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
struct Least {
    ratio: Option<f64>,
    share: Option<f64>,
}

/// A row as measured.
#[derive(Serialize)]
pub(super) struct Row {
    pub(super) name: String,
    pub(super) unit: String,
    better: Better,
    pub(super) ours: f64,
    pub(super) peer: Option<f64>,
    pub(super) floor: f64,
    pub(super) floor_is: String,
    /// Times better than the peer.
    pub(super) ratio: Option<f64>,
    /// Share of the floor.
    pub(super) share: f64,
    target: Targets,
    explained_down_to: Least,
    /// No target is missed; so also if there is none.
    pub(super) met: bool,
    short: Vec<Short>,
    #[serde(skip)]
    pub(super) limit: Option<String>,
}

#[derive(Serialize)]
struct Targets {
    ratio: Option<f64>,
    share: Option<f64>,
    bound: Option<f64>,
}

/// A target that is missed.
#[derive(Debug, Serialize)]
struct Short {
    of: Kind,
    found: f64,
    wanted: f64,
}

#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[serde(rename_all = "lowercase")]
enum Kind {
    Ratio,
    Share,
    Bound,
}

impl Target {
    /// A limit is named where there is something that it explains, and nowhere else.
    pub(super) fn check(&self) -> Result<()> {
        let Least { ratio, share } = self.explained_down_to;
        if self.limit.is_some() != (ratio.is_some() || share.is_some()) {
            bail!(
                "row {:?}: limit and explained_down_to go together",
                self.name
            );
        }
        for (kind, explained, wanted) in
            [("ratio", ratio, self.ratio), ("share", share, self.share)]
        {
            let below = match (explained, wanted) {
                (Some(explained), Some(wanted)) => explained < wanted,
                (Some(_), None) => false,
                (None, _) => true,
            };
            if !below {
                bail!(
                    "row {:?}: explained_down_to is no {kind} below a target",
                    self.name
                );
            }
        }
        Ok(())
    }
}

impl Short {
    fn by_percent(&self) -> f64 {
        (1.0 - self.found / self.wanted) * 100.0
    }
}

impl Row {
    pub(super) fn of(target: &Target, samples: &[Sample]) -> Self {
        let ours = median(samples.iter().map(|sample| sample.ours));
        let floor = median(samples.iter().map(|sample| sample.floor));
        let times = |ours: f64, other: f64| match target.better {
            _ if ours == other => 1.0,
            Better::Higher => ours / other,
            Better::Lower => other / ours,
        };
        let share = median(samples.iter().map(|s| times(s.ours, s.floor)));
        let peers: Option<Vec<f64>> = samples.iter().map(|sample| sample.peer).collect();
        let ratios = samples
            .iter()
            .filter_map(|sample| sample.peer.map(|peer| times(sample.ours, peer)));
        let ratio = peers.as_ref().map(|_| median(ratios));
        let least = |of, found: Option<f64>, wanted: Option<f64>| {
            let (found, wanted) = found.zip(wanted)?;
            (found < wanted).then_some(Short { of, found, wanted })
        };
        let bound = target.bound.and_then(|wanted| {
            let met = match target.better {
                Better::Higher => ours >= wanted,
                Better::Lower => ours <= wanted,
            };
            (!met).then_some(Short {
                of: Kind::Bound,
                found: ours,
                wanted,
            })
        });
        let short: Vec<Short> = [
            least(Kind::Ratio, ratio, target.ratio),
            least(Kind::Share, Some(share), target.share),
            bound,
        ]
        .into_iter()
        .flatten()
        .collect();
        Self {
            name: target.name.clone(),
            unit: target.unit.clone(),
            better: target.better,
            ours,
            peer: peers.map(|peers| median(peers.into_iter())),
            floor,
            floor_is: target.floor.clone(),
            ratio,
            share,
            target: Targets {
                ratio: target.ratio,
                share: target.share,
                bound: target.bound,
            },
            explained_down_to: target.explained_down_to,
            met: short.is_empty(),
            short,
            limit: target.limit.clone(),
        }
    }

    pub(super) fn has_target(&self) -> bool {
        let Targets {
            ratio,
            share,
            bound,
        } = self.target;
        ratio.is_some() || share.is_some() || bound.is_some()
    }

    /// Whether targets are met, or how far it falls short of what.
    pub(super) fn verdict(&self) -> String {
        if !self.has_target() {
            return "no target".to_owned();
        }
        if self.met {
            return "met".to_owned();
        }
        let each = self.short.iter().map(|short| {
            let (found, wanted, by) = (short.found, short.wanted, short.by_percent());
            match short.of {
                Kind::Ratio => format!(
                    "ratio to the best peer {found:.2} of the {wanted:.2} wanted, short by {by:.0} %"
                ),
                Kind::Share => format!(
                    "share of the floor {found:.2} of the {wanted:.2} wanted, short by {by:.0} %"
                ),
                Kind::Bound => format!("{found:.3} {} where {wanted} is wanted", self.unit),
            }
        });
        each.collect::<Vec<_>>().join("; ")
    }

    /// The same in the table's words; nothing without a target.
    pub(super) fn cell(&self) -> String {
        if self.met {
            let met = if self.has_target() { "met" } else { "" };
            return met.to_owned();
        }
        let each = self.short.iter().map(|short| {
            let (wanted, by) = (short.wanted, short.by_percent());
            match short.of {
                Kind::Ratio => format!("ratio {wanted:.2} wanted, short by {by:.0} %"),
                Kind::Share => format!("share {wanted:.2} wanted, short by {by:.0} %"),
                Kind::Bound => format!("{wanted} wanted"),
            }
        });
        each.collect::<Vec<_>>().join("; ")
    }

    /// Where it falls short by more than its limit's explanation covers.
    pub(super) fn beyond_explanation(&self) -> Vec<String> {
        let mut beyond = Vec::new();
        for short in &self.short {
            let (what, explained) = match short.of {
                Kind::Ratio => ("ratio to the best peer", self.explained_down_to.ratio),
                Kind::Share => ("share of the floor", self.explained_down_to.share),
                Kind::Bound => ("bound", None),
            };
            let found = short.found;
            match explained {
                Some(least) if found >= least => {}
                Some(least) => beyond.push(format!(
                    "{what} {found:.2}, explained down to {least:.2} only"
                )),
                None => beyond.push(format!(
                    "{what} {found:.2} of the {:.2} wanted, of which nothing is explained",
                    short.wanted
                )),
            }
        }
        beyond
    }
}

/// A row for tests, where higher is better unless told otherwise.
#[cfg(test)]
pub(super) fn target(toml: &str) -> Target {
    let better = if toml.contains("better") {
        ""
    } else {
        "better = \"higher\"\n"
    };
    toml::from_str(&format!(
        "name = \"row\"\nunit = \"tok/s\"\nfloor = \"what\"\n{better}{toml}"
    ))
    .unwrap()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample(ours: f64, floor: f64, peer: Option<f64>) -> Sample {
        Sample { ours, floor, peer }
    }

    #[test]
    fn medians_of_ratios_and_shares_are_compared() {
        let wanted = target("ratio = 2.0\nshare = 0.6");
        let rounds = [
            sample(100.0, 150.0, Some(40.0)),
            sample(90.0, 180.0, Some(50.0)),
            sample(110.0, 160.0, Some(50.0)),
        ];
        let row = Row::of(&wanted, &rounds);
        assert!(row.met, "{:?}", row.short);
        assert_eq!(
            (row.ours, row.peer, row.ratio),
            (100.0, Some(50.0), Some(2.2))
        );
        let row = Row::of(&wanted, &[sample(90.0, 180.0, Some(50.0))]);
        assert_eq!(row.short.len(), 2, "{:?}", row.short);
    }

    #[test]
    fn lower_is_better_and_bounds_hold_both_ways() {
        let most = target("better = \"lower\"\nbound = 0");
        assert!(Row::of(&most, &[sample(0.0, 0.0, None)]).met);
        assert!(!Row::of(&most, &[sample(1.0, 0.0, None)]).met);
        let share = target("better = \"lower\"\nshare = 0.8");
        assert!(Row::of(&share, &[sample(1.2, 1.0, None)]).met);
        assert!(!Row::of(&share, &[sample(1.3, 1.0, None)]).met);
        let least = target("better = \"higher\"\nbound = 0.5");
        assert!(!Row::of(&least, &[sample(0.4, 9.0, None)]).met);
    }

    #[test]
    fn a_limit_needs_figures_below_the_targets_that_it_explains() {
        let ok = |toml: &str| target(toml).check().is_ok();
        assert!(ok("share = 0.6"));
        assert!(ok(
            "share = 0.6\nlimit = \"a\"\nexplained_down_to = { share = 0.5 }"
        ));
        assert!(!ok("share = 0.6\nlimit = \"a\""));
        assert!(!ok("share = 0.6\nexplained_down_to = { share = 0.5 }"));
        assert!(!ok(
            "share = 0.6\nlimit = \"a\"\nexplained_down_to = { share = 0.7 }"
        ));
        assert!(!ok(
            "share = 0.6\nlimit = \"a\"\nexplained_down_to = { ratio = 0.5 }"
        ));
    }
}
