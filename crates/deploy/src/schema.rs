//! Checks a tree against the published JSON schema, so that what an editor accepts and what the
//! program accepts are one thing, and turns it into plain JSON. Knows the part of JSON schema that
//! our schemas use: type, enum, const, oneOf, anyOf, properties, required, additionalProperties,
//! items, minItems, minimum, maximum and integer formats.

use crate::CoreSet;
use crate::diagnostic::Diagnostic;
use crate::source::{Entry, Node, Value, canonical};
use serde_json::{Map, Value as Json};
use std::fmt::Write;

/// Keys that are refused with a reason of their own: their path from the root without list indices,
/// and the reason.
pub(crate) type Reasons<'a> = &'a dyn Fn(&str, &Entry) -> Option<String>;

pub(crate) struct Checker<'a> {
    /// Reasons for unknown keys that deserve more than "unknown".
    pub(crate) unknown: Reasons<'a>,
    /// Reasons for values that deserve more than "not allowed": path without indices and value.
    pub(crate) value: &'a dyn Fn(&str, &Node) -> Option<String>,
    pub(crate) found: Vec<Diagnostic>,
}

/// Names of more than this are not listed.
const LISTED: usize = 40;

impl Checker<'_> {
    /// Checks `node` and gives the JSON of all that is right in it. `path` is what messages call it.
    pub(crate) fn check(&mut self, schema: &Json, node: &Node, path: &str) -> Json {
        let schema = choose(schema, node);
        if let Some(message) = mismatch(schema, node) {
            let name = if path.is_empty() { "the file" } else { path };
            let reason = (self.value)(&without_indices(path), node);
            self.found.push(Diagnostic {
                place: node.place,
                message: format!("{name} is {}", node.describe()),
                help: Some(reason.unwrap_or_else(|| format!("allowed: {message}"))),
                secret: is_secret(path),
            });
            return Json::Null;
        }
        match &node.value {
            Value::Scalar(scalar) => scalar.clone(),
            Value::List(items) => {
                let empty = Json::Bool(true);
                let item_schema = schema.get("items").unwrap_or(&empty);
                Json::Array(
                    items
                        .iter()
                        .enumerate()
                        .map(|(i, item)| self.check(item_schema, item, &format!("{path}[{i}]")))
                        .collect(),
                )
            }
            Value::Map(entries) => self.map(schema, node, entries, path),
        }
    }

    fn map(&mut self, schema: &Json, node: &Node, entries: &[Entry], path: &str) -> Json {
        let none = Map::new();
        let properties = schema
            .get("properties")
            .and_then(Json::as_object)
            .unwrap_or(&none);
        let mut out = Map::new();
        let mut seen: Vec<(String, u32)> = Vec::new();
        // Names of environment variables and of foreign settings are not ours to rewrite.
        let open = schema
            .get("additionalProperties")
            .filter(|more| **more != Json::Bool(false));
        let verbatim =
            properties.is_empty() && (open.is_some() || schema.get("properties").is_none());
        for entry in entries {
            let key = if verbatim {
                entry.key.clone()
            } else {
                canonical(&entry.key)
            };
            let inner = if path.is_empty() {
                key.clone()
            } else {
                format!("{path}.{key}")
            };
            let free = Json::Bool(true);
            let more = if verbatim {
                Some(open.unwrap_or(&free))
            } else {
                open
            };
            let Some(property) = properties
                .get(&key)
                .or(more.filter(|_| verbatim || !is_secret(&key)))
            else {
                self.unknown_key(properties, entry, &inner, path);
                continue;
            };
            if let Some((_, line)) = seen.iter().find(|(other, _)| *other == key) {
                self.found.push(Diagnostic {
                    place: entry.key_place,
                    message: format!("{inner} is given twice"),
                    help: Some(format!("first given in line {line}")),
                    secret: false,
                });
                continue;
            }
            seen.push((key.clone(), entry.key_place.line));
            let value = self.check(property, &entry.node, &inner);
            out.insert(key, value);
        }
        for required in schema
            .get("required")
            .and_then(Json::as_array)
            .into_iter()
            .flatten()
            .filter_map(Json::as_str)
        {
            if !seen.iter().any(|(key, _)| key == required) {
                let name = if path.is_empty() {
                    required.to_owned()
                } else {
                    format!("{path}.{required}")
                };
                let about = properties
                    .get(required)
                    .and_then(|p| p.get("description"))
                    .and_then(Json::as_str);
                self.found.push(Diagnostic {
                    place: first_line(node),
                    message: format!("{name} is missing"),
                    help: about.map(|text| format!("{required}: {}", one_line(text))),
                    secret: false,
                });
            }
        }
        Json::Object(out)
    }

    fn unknown_key(
        &mut self,
        properties: &Map<String, Json>,
        entry: &Entry,
        path: &str,
        parent: &str,
    ) {
        let key = canonical(&entry.key);
        let help = (self.unknown)(&without_indices(path), entry).unwrap_or_else(|| {
            let near = properties
                .keys()
                .map(|name| (strsim::jaro_winkler(name, &key), name))
                .filter(|(score, _)| *score > 0.8)
                .max_by(|a, b| a.0.total_cmp(&b.0));
            let mut help = near
                .map(|(_, name)| format!("did you mean `{name}`? "))
                .unwrap_or_default();
            let names: Vec<&str> = properties.keys().map(String::as_str).take(LISTED).collect();
            let _ = write!(help, "allowed: {}", names.join(", "));
            help
        });
        let of = if parent.is_empty() {
            String::new()
        } else {
            format!(" in {parent}")
        };
        self.found.push(Diagnostic {
            place: entry.key_place,
            message: format!("unknown key `{}`{of}", entry.key.escape_debug()),
            help: Some(help),
            secret: is_secret(&key),
        });
    }
}

/// A key whose value is a secret by its name; the name of a file that holds one is none.
pub(crate) fn is_secret(path: &str) -> bool {
    let key = canonical(path.rsplit('.').next().unwrap_or(path)).to_lowercase();
    !key.ends_with("-file")
        && ["key", "secret", "password", "api-token", "token"]
            .iter()
            .any(|word| key.ends_with(word))
}

/// `instances[0].port` to `instances.port`.
fn without_indices(path: &str) -> String {
    let mut out = String::new();
    let mut depth = 0;
    for c in path.chars() {
        match c {
            '[' => depth += 1,
            ']' => depth -= 1,
            c if depth == 0 => out.push(c),
            _ => {}
        }
    }
    out
}

/// A map's own place is that of its first key; underline that one, not all of it.
fn first_line(node: &Node) -> crate::diagnostic::Place {
    match &node.value {
        Value::Map(entries) => entries.first().map_or(node.place, |entry| entry.key_place),
        _ => node.place,
    }
}

/// Of alternatives the one whose type is the node's; else all of it.
fn choose<'s>(schema: &'s Json, node: &Node) -> &'s Json {
    let alternatives = schema.get("anyOf").and_then(Json::as_array);
    match alternatives.and_then(|list| list.iter().find(|one| kind_matches(one, node))) {
        Some(one) => choose(one, node),
        None => schema,
    }
}

/// What is allowed instead, if `node` itself (not what it holds) does not fit.
fn mismatch(schema: &Json, node: &Node) -> Option<String> {
    let fits = kind_matches(schema, node) && within(schema, node);
    (!fits).then(|| allowed(schema))
}

fn kind_matches(schema: &Json, node: &Node) -> bool {
    if let Some(list) = schema.get("anyOf").and_then(Json::as_array) {
        return list.iter().any(|one| kind_matches(one, node));
    }
    let types: Vec<&str> = match schema.get("type") {
        Some(Json::String(one)) => vec![one],
        Some(Json::Array(list)) => list.iter().filter_map(Json::as_str).collect(),
        _ => return true,
    };
    types.iter().any(|kind| match (*kind, &node.value) {
        ("null", Value::Scalar(Json::Null))
        | ("boolean", Value::Scalar(Json::Bool(_)))
        | ("string", Value::Scalar(Json::String(_)))
        | ("number", Value::Scalar(Json::Number(_)))
        | ("array", Value::List(_))
        | ("object", Value::Map(_)) => true,
        ("integer", Value::Scalar(Json::Number(number))) => number.is_u64() || number.is_i64(),
        _ => false,
    })
}

fn within(schema: &Json, node: &Node) -> bool {
    match &node.value {
        Value::Scalar(Json::Null) => true,
        Value::Scalar(scalar) => {
            if schema.get("format").and_then(Json::as_str) == Some("core-set") {
                let text = scalar
                    .as_str()
                    .map_or_else(|| scalar.to_string(), str::to_owned);
                return CoreSet::parse(&text).is_ok();
            }
            let choices = choices(schema);
            if !choices.is_empty() && !choices.contains(&scalar) {
                return false;
            }
            let (low, high) = range(schema);
            scalar.as_f64().is_none_or(|value| {
                low.is_none_or(|low| value >= low) && high.is_none_or(|high| value <= high)
            })
        }
        Value::List(items) => {
            let least = schema.get("minItems").and_then(Json::as_u64).unwrap_or(0);
            items.len() as u64 >= least
        }
        Value::Map(_) => true,
    }
}

fn choices(schema: &Json) -> Vec<&Json> {
    if let Some(list) = schema.get("enum").and_then(Json::as_array) {
        return list.iter().collect();
    }
    let of = schema.get("oneOf").and_then(Json::as_array);
    let mut found: Vec<&Json> = Vec::new();
    for one in of.into_iter().flatten() {
        found.extend(one.get("const"));
        found.extend(
            one.get("enum")
                .and_then(Json::as_array)
                .into_iter()
                .flatten(),
        );
    }
    found
}

/// Least and greatest value, from the bounds or from the integer's width.
fn range(schema: &Json) -> (Option<f64>, Option<f64>) {
    let bound = |key: &str| schema.get(key).and_then(Json::as_f64);
    let widest = match schema.get("format").and_then(Json::as_str) {
        Some("uint16") => Some(f64::from(u16::MAX)),
        Some("uint32") => Some(f64::from(u32::MAX)),
        _ => None,
    };
    (bound("minimum"), bound("maximum").or(widest))
}

/// What a schema allows, in words.
pub(crate) fn allowed(schema: &Json) -> String {
    if let Some(list) = schema.get("anyOf").and_then(Json::as_array) {
        let parts: Vec<String> = list
            .iter()
            .filter(|one| one.get("type").and_then(Json::as_str) != Some("null"))
            .map(allowed)
            .collect();
        return parts.join(", or ");
    }
    let choices = choices(schema);
    if !choices.is_empty() {
        let names: Vec<String> = choices
            .iter()
            .map(|choice| {
                choice
                    .as_str()
                    .map_or_else(|| choice.to_string(), str::to_owned)
            })
            .collect();
        return names.join(", ");
    }
    let format = schema.get("format").and_then(Json::as_str);
    if format == Some("core-set") {
        return "core numbers and ranges such as 0-3,8, each core once".to_owned();
    }
    let types: Vec<&str> = match schema.get("type") {
        Some(Json::String(one)) => vec![one],
        Some(Json::Array(list)) => list
            .iter()
            .filter_map(Json::as_str)
            .filter(|kind| *kind != "null")
            .collect(),
        _ => return "anything".to_owned(),
    };
    let words: Vec<String> = types
        .iter()
        .map(|kind| match *kind {
            "integer" | "number" => {
                let noun = if *kind == "integer" {
                    "an integer"
                } else {
                    "a number"
                };
                let (low, high) = range(schema);
                // A bound that is only the integer's width tells nobody anything.
                let high = high.filter(|high| *high < f64::from(u32::MAX));
                match (low, high) {
                    (Some(low), Some(high)) => format!("{noun} from {low} to {high}"),
                    (Some(low), None) => format!("{noun} of at least {low}"),
                    (None, Some(high)) => format!("{noun} of at most {high}"),
                    (None, None) => noun.to_owned(),
                }
            }
            "string" => "text".to_owned(),
            "boolean" => "true or false".to_owned(),
            "array" => match schema.get("items") {
                Some(items) if items.get("type").and_then(Json::as_str) == Some("object") => {
                    "a list of maps, at least one".to_owned()
                }
                Some(items) => format!("a list of {}", allowed(items)),
                None => "a list".to_owned(),
            },
            "object" => "a map".to_owned(),
            other => other.to_owned(),
        })
        .collect();
    words.join(" or ")
}

/// A doc comment as one line.
pub(crate) fn one_line(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}
