//! Cases are black-box failures seen in the field; `it/cases.toml` names the tests that guard each.

use crate::run::{BUILD, capture, cargo};
use anyhow::{Context, Result, bail};
use serde::Deserialize;
use std::collections::{BTreeMap, BTreeSet};
use twinfer_it::repository;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct CaseFile {
    issue: BTreeMap<String, Issue>,
    case: BTreeMap<String, Case>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Issue {
    cases: Vec<String>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Case {
    /// What the case protects.
    about: String,
    /// `package/target/test`: target is an integration test's name, or `lib`.
    tests: Vec<String>,
}

/// Tests of one test target.
type Target = (String, String);

pub(crate) fn run(issue: &str) -> Result<()> {
    let path = repository().join("it/cases.toml");
    let text = std::fs::read_to_string(&path)
        .with_context(|| format!("cannot read {}", path.display()))?;
    let file: CaseFile = toml::from_str(&text).context("it/cases.toml")?;
    let Some(wanted) = file.issue.get(issue) else {
        bail!(
            "no issue {issue:?} in it/cases.toml; there are {:?}",
            file.issue.keys().collect::<Vec<_>>()
        );
    };

    let mut by_target: BTreeMap<Target, BTreeSet<&str>> = BTreeMap::new();
    let mut missing = Vec::new();
    for id in &wanted.cases {
        let Some(case) = file.case.get(id) else {
            missing.push(format!("{id}: not in it/cases.toml"));
            continue;
        };
        if case.tests.is_empty() {
            missing.push(format!("{id}: has no test"));
        }
        for test in &case.tests {
            let (package, target, name) = split(test)?;
            by_target
                .entry((package.to_owned(), target.to_owned()))
                .or_default()
                .insert(name);
        }
    }

    let mut passed: BTreeSet<String> = BTreeSet::new();
    for ((package, target), names) in &by_target {
        let mut command = cargo();
        command.args(["test", "--release", "--package", package]);
        if target == "lib" {
            command.arg("--lib");
        } else {
            command.args(["--test", target]);
        }
        command.args(["--", "--exact"]).args(names);
        let (code, output) = capture(&mut command, BUILD)?;
        for line in output.lines() {
            let Some(name) = line
                .strip_prefix("test ")
                .and_then(|rest| rest.strip_suffix(" ... ok"))
            else {
                continue;
            };
            passed.insert(format!("{package}/{target}/{name}"));
        }
        if code != Some(0) {
            println!("{output}");
        }
    }

    let mut failed = missing;
    for id in &wanted.cases {
        let Some(case) = file.case.get(id) else {
            continue;
        };
        let bad: Vec<&String> = case
            .tests
            .iter()
            .filter(|test| !passed.contains(*test))
            .collect();
        let verdict = if bad.is_empty() && !case.tests.is_empty() {
            "ok"
        } else {
            "FAILED"
        };
        println!(
            "{id:<6} {verdict:<6} {} ({} tests)",
            case.about,
            case.tests.len()
        );
        for test in bad {
            failed.push(format!("{id}: {test} did not pass or does not exist"));
        }
    }
    if !failed.is_empty() {
        bail!("cases of {issue}:\n  {}", failed.join("\n  "));
    }
    println!(
        "{} cases of {issue}, {} tests, all passed",
        wanted.cases.len(),
        passed.len()
    );
    Ok(())
}

fn split(test: &str) -> Result<(&str, &str, &str)> {
    let mut parts = test.splitn(3, '/');
    match (parts.next(), parts.next(), parts.next()) {
        (Some(package), Some(target), Some(name)) => Ok((package, target, name)),
        _ => bail!("it/cases.toml: test is {test:?}; it has the form package/target/test"),
    }
}
