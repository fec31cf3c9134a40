//! Every rule of `lint` has an example that fails it and one that passes it.

use serde_json::{Map, Value};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use twinfer_deploy::engines::{EngineDeployment, Finding, lint, resolve_engines, rules};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn examples() -> Value {
    let text =
        std::fs::read_to_string(root().join("testdata/lint/examples.yaml")).expect("the examples");
    serde_saphyr::from_str(&text).expect("YAML")
}

/// `base` with the value at each path set, or removed by null.
fn changed(base: &Value, changes: &Value) -> Value {
    let mut out = base.clone();
    for (path, value) in changes.as_object().into_iter().flatten() {
        let (parents, key) = path.rsplit_once('.').unwrap_or(("", path));
        let mut at = &mut out;
        for step in parents.split('.').filter(|step| !step.is_empty()) {
            at = match at {
                Value::Array(list) => &mut list[step.parse::<usize>().expect("an index")],
                Value::Object(map) => map.entry(step).or_insert_with(|| Value::Object(Map::new())),
                other => panic!("{path}: {other} has no {step}"),
            };
        }
        let map = at.as_object_mut().unwrap_or_else(|| panic!("{path}"));
        match value {
            Value::Null => drop(map.remove(key)),
            value => drop(map.insert(key.to_owned(), value.clone())),
        }
    }
    out
}

fn findings(file: &Value) -> Vec<Finding> {
    let folder = root().join("examples/models");
    let text = serde_json::to_string_pretty(file).expect("JSON");
    let deployment = EngineDeployment::parse("example.yaml", &text, None, &folder)
        .unwrap_or_else(|e| panic!("{e}"));
    let plan = resolve_engines(&deployment, &[]).unwrap_or_else(|e| panic!("{e}"));
    lint(&deployment, &plan, &[]).findings
}

#[test]
fn bases_are_clean() {
    let all = examples();
    for (name, base) in all["bases"].as_object().expect("bases") {
        let found = findings(base);
        // Two DeepInfer engines have one path of caches each on their own node.
        assert!(found.is_empty(), "{name}: {found:#?}");
    }
}

#[test]
fn every_rule_has_a_failing_and_a_passing_example() {
    let all = examples();
    let mut seen = BTreeSet::new();
    let mut wrong = Vec::new();
    for example in all["examples"].as_array().expect("examples") {
        let rule = example["rule"].as_u64().expect("a number") as u16;
        let base = &all["bases"][example["base"].as_str().expect("a base")];
        seen.insert(rule);
        let failing = findings(&changed(base, &example["fail"]));
        let says = example["says"].as_str().expect("says");
        let hit = failing
            .iter()
            .find(|found| found.rule == rule && found.found.contains(says));
        match hit {
            None => wrong.push(format!(
                "rule {rule}: {says:?} not found: {:#?}",
                failing
                    .iter()
                    .map(|f| (f.rule, &f.found))
                    .collect::<Vec<_>>()
            )),
            Some(hit) => {
                if let Some(nearest) = example["nearest"].as_str()
                    && !hit
                        .nearest
                        .as_ref()
                        .is_some_and(|own| own.contains(nearest))
                {
                    wrong.push(format!(
                        "rule {rule}: nearest is {:?}, not {nearest:?}",
                        hit.nearest
                    ));
                }
                if let Some(severity) = example["severity"].as_str()
                    && hit.severity.to_string() != severity
                {
                    wrong.push(format!(
                        "rule {rule}: severity is {}, not {severity}",
                        hit.severity
                    ));
                }
                if hit.line == 0 || hit.allowed.is_empty() || hit.source.is_empty() {
                    wrong.push(format!("rule {rule}: {hit:?}"));
                }
            }
        }
        let passing = findings(&changed(base, &example["pass"]));
        if let Some(found) = passing.iter().find(|found| found.rule == rule) {
            wrong.push(format!(
                "rule {rule}: the passing example fails: {}",
                found.found
            ));
        }
    }
    let missing: Vec<u16> = rules()
        .iter()
        .map(|rule| rule.number)
        .filter(|number| !seen.contains(number))
        .collect();
    assert!(missing.is_empty(), "no example of {missing:?}");
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn upstream_configurations_give_their_findings() {
    let base = &examples()["bases"]["ascend"];
    let text = std::fs::read_to_string(root().join("testdata/lint/upstream.yaml"))
        .expect("the configurations");
    let all: Value = serde_saphyr::from_str(&text).expect("YAML");
    let mut wrong = Vec::new();
    for one in all.as_array().expect("a list") {
        let found = findings(&changed(base, &one["change"]));
        for (rule, severity) in one["finds"].as_object().expect("rules") {
            let hit = found.iter().any(|hit| {
                hit.rule.to_string() == *rule
                    && hit.severity.to_string() == severity.as_str().expect("a severity")
            });
            if !hit {
                let all: Vec<_> = found
                    .iter()
                    .map(|hit| (hit.rule, hit.severity, &hit.found))
                    .collect();
                wrong.push(format!(
                    "{}: no {severity} of rule {rule} in {all:#?}",
                    one["name"]
                ));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}
