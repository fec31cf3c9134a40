//! The annotated example file, made from the types and their doc comments, and the JSON schema.

use crate::file::{
    Connector, DeploymentFile, Engine, HandoffSpec, InstanceSpec, ModelSpec, NodeSpec, OneOrList,
    RouterSpec, inline_schema,
};
use crate::schema::one_line;
use crate::source::{Node, Value, parse};
use serde_json::Value as Json;
use std::collections::{BTreeMap, BTreeSet};
use std::num::NonZeroU16;
use twinfer_config::KvLoadFailurePolicy;
use twinfer_protocol::Role;

/// Comments are wrapped here.
const WIDTH: usize = 100;

/// The JSON schema of deployment files: of the native engine, or of one by template, by the key `engine`.
pub fn schema() -> Json {
    let native = inline_schema::<DeploymentFile>();
    let dialect = native.get("$schema").cloned().unwrap_or_default();
    serde_json::json!({
        "$schema": dialect,
        "title": "DeploymentFile",
        "if": {"properties": {"engine": {"const": "native"}}},
        "then": native,
        "else": crate::engines::schema(),
    })
}

/// A deployment file that explains itself: one prefill and one decode instance of the demo model.
pub fn example() -> String {
    let mut out = String::new();
    // Struct order survives in JSON text, and JSON is YAML.
    let tree = serde_json::to_string(&example_file())
        .ok()
        .and_then(|json| parse(&json).ok());
    if let Some(tree) = tree {
        let mut writer = Writer {
            out: &mut out,
            said: BTreeSet::new(),
        };
        writer.map(&inline_schema::<DeploymentFile>(), &tree, "", 0, false);
    }
    out
}

fn example_file() -> DeploymentFile {
    let instance = |name: &str, role, port: u16, kv_port: Option<u16>| InstanceSpec {
        name: name.to_owned(),
        role,
        count: 1,
        node: Some("local".to_owned()),
        ranks: None,
        threads: None,
        cpus: None,
        port: NonZeroU16::new(port).map(OneOrList::One),
        kv_port: kv_port.and_then(NonZeroU16::new).map(OneOrList::One),
        tp: 1,
        flags: BTreeMap::from([("max-num-seqs".to_owned(), Json::from(32))]),
    };
    DeploymentFile {
        name: "demo".to_owned(),
        engine: Engine::Native,
        model: ModelSpec {
            path: "models/demo".into(),
            name: Some("demo".to_owned()),
        },
        nodes: vec![NodeSpec {
            name: "local".to_owned(),
            host: "127.0.0.1".to_owned(),
            rank_host: None,
            agent: None,
            cores: None,
            share_cores: false,
        }],
        instances: vec![
            instance("prefill", Role::Prefill, 8100, Some(8500)),
            instance("decode", Role::Decode, 8200, None),
        ],
        handoff: HandoffSpec {
            connector: Connector::Pull,
            policy: KvLoadFailurePolicy::Fail,
            ..HandoffSpec::default()
        },
        router: RouterSpec {
            node: Some("local".to_owned()),
            flags: BTreeMap::from([("max-inflight".to_owned(), Json::from(1024))]),
            ..RouterSpec::default()
        },
    }
}

struct Writer<'o> {
    out: &'o mut String,
    /// Paths whose comment stands above already.
    said: BTreeSet<String>,
}

impl Writer<'_> {
    /// Writes the entries of a map at `depth` spaces; `item` when the first one follows a list's hyphen.
    fn map(&mut self, schema: &Json, node: &Node, path: &str, depth: usize, item: bool) {
        let Value::Map(entries) = &node.value else {
            return;
        };
        let mut hyphen = item;
        for entry in entries {
            let property = schema
                .get("properties")
                .and_then(|properties| properties.get(&entry.key))
                .unwrap_or(&Json::Null);
            let inner = format!("{path}.{}", entry.key);
            let first = self.said.insert(inner.clone());
            let null = matches!(entry.node.value, Value::Scalar(Json::Null));
            let default = match &entry.node.value {
                Value::Scalar(scalar) => null || property.get("default") == Some(scalar),
                _ => false,
            };
            if !first && default {
                continue;
            }
            if first {
                if depth == 0 && !self.out.is_empty() {
                    self.out.push('\n');
                }
                self.comment(property, if hyphen { depth - 2 } else { depth });
            }
            let mut line = " ".repeat(depth);
            if null {
                let example = property.get("examples").and_then(|list| list.get(0));
                line.push_str("# ");
                line.push_str(&entry.key);
                line.push_str(": ");
                line.push_str(&example.map(scalar).unwrap_or_default());
                self.line(&line);
                continue;
            }
            if hyphen {
                line.replace_range(depth - 2..depth, "- ");
                hyphen = false;
            }
            line.push_str(&entry.key);
            line.push(':');
            match &entry.node.value {
                Value::Scalar(value) => {
                    line.push(' ');
                    line.push_str(&scalar(value));
                    self.line(&line);
                }
                Value::Map(_) => {
                    self.line(&line);
                    self.map(property, &entry.node, &inner, depth + 2, false);
                }
                Value::List(items) => {
                    self.line(&line);
                    let items_schema = property.get("items").unwrap_or(&Json::Null);
                    for one in items {
                        self.map(items_schema, one, &inner, depth + 4, true);
                    }
                }
            }
        }
    }

    fn line(&mut self, line: &str) {
        self.out.push_str(line.trim_end());
        self.out.push('\n');
    }

    fn comment(&mut self, property: &Json, depth: usize) {
        let Some(text) = property.get("description").and_then(Json::as_str) else {
            return;
        };
        let mut line = String::new();
        for word in one_line(text).split(' ') {
            if !line.is_empty() && depth + 2 + line.len() + 1 + word.len() > WIDTH {
                self.line(&format!("{}# {line}", " ".repeat(depth)));
                line.clear();
            }
            if !line.is_empty() {
                line.push(' ');
            }
            line.push_str(word);
        }
        self.line(&format!("{}# {line}", " ".repeat(depth)));
    }
}

fn scalar(value: &Json) -> String {
    match value {
        // Plain words need no quotes; anything that could be read as something else gets them.
        Json::String(text)
            if !text.is_empty()
                && text
                    .chars()
                    .all(|c| c.is_ascii_alphanumeric() || "-_./".contains(c))
                && text.chars().any(|c| c.is_ascii_alphabetic())
                && !matches!(
                    text.as_str(),
                    "true" | "false" | "null" | "yes" | "no" | "on" | "off" | "y" | "n"
                ) =>
        {
            text.clone()
        }
        other => other.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::load::Deployment;
    use std::path::Path;

    #[test]
    fn the_example_says_what_its_types_say() {
        let text = example();
        let read = Deployment::parse("example", &text, Path::new("."))
            .unwrap_or_else(|e| panic!("{e}\n{text}"));
        assert_eq!(read.file, example_file(), "{text}");
    }

    #[test]
    fn every_own_key_is_explained_once() {
        let text = example();
        for key in [
            "name",
            "engine",
            "path",
            "cores",
            "share-cores",
            "role",
            "kv-port",
            "tp",
            "lease",
            "policy",
            "port",
        ] {
            let at = text.lines().position(|line| {
                line.trim_start_matches([' ', '-', '#'])
                    .starts_with(&format!("{key}:"))
            });
            let at = at.unwrap_or_else(|| panic!("no {key} in\n{text}"));
            assert!(
                text.lines()
                    .nth(at - 1)
                    .is_some_and(|line| line.trim_start().starts_with("# ")),
                "{key} in\n{text}"
            );
        }
    }

    #[test]
    fn lines_are_not_too_long() {
        assert!(
            example().lines().all(|line| line.len() <= WIDTH),
            "{}",
            example()
        );
    }
}
