//! YAML text to a tree in which every key and value knows its place. Types are checked later, on
//! the tree, so that all mistakes of a file can be told at once.

use crate::diagnostic::{Diagnostic, Place};
use serde::de::{Deserialize, Deserializer, Error as _, MapAccess, SeqAccess, Visitor};
use serde_saphyr::{DuplicateKeyPolicy, Spanned};
use std::fmt;

/// A value of the file.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Node {
    pub(crate) value: Value,
    pub(crate) place: Place,
}

#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Value {
    /// Null, boolean, number or text.
    Scalar(serde_json::Value),
    List(Vec<Node>),
    Map(Vec<Entry>),
}

#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Entry {
    pub(crate) key: String,
    pub(crate) key_place: Place,
    pub(crate) node: Node,
}

/// Parses one YAML document.
pub(crate) fn parse(text: &str) -> Result<Node, Diagnostic> {
    let options = serde_saphyr::options! {
        duplicate_keys: DuplicateKeyPolicy::PassThrough,
        strict_booleans: true,
        with_snippet: false,
    };
    serde_saphyr::from_str_with_options::<Node>(text, options).map_err(|error| {
        let error = error.without_snippet();
        let place = error.location().map(|at| place(&at)).unwrap_or_default();
        let message = error.to_string();
        // The parser repeats the place at the end of its sentence.
        let message = message
            .split(" at line ")
            .next()
            .unwrap_or(&message)
            .to_owned();
        Diagnostic {
            place,
            message: format!("not readable as YAML: {message}"),
            help: None,
            secret: false,
        }
    })
}

impl Node {
    /// The value of key `key` (hyphens and underscores are the same).
    pub(crate) fn get(&self, key: &str) -> Option<&Entry> {
        match &self.value {
            Value::Map(entries) => entries.iter().find(|entry| canonical(&entry.key) == key),
            _ => None,
        }
    }

    /// The node at `path`, or its nearest ancestor that the file has.
    pub(crate) fn at(&self, path: &[Step]) -> &Self {
        let mut node = self;
        for step in path {
            let next = match step {
                Step::Key(key) => node.get(key).map(|entry| &entry.node),
                Step::Index(index) => match &node.value {
                    Value::List(items) => items.get(*index),
                    _ => None,
                },
            };
            match next {
                Some(next) => node = next,
                None => break,
            }
        }
        node
    }

    /// What a person would call this value.
    pub(crate) fn describe(&self) -> String {
        match &self.value {
            Value::Scalar(serde_json::Value::Null) => "empty".to_owned(),
            Value::Scalar(scalar) => scalar.to_string(),
            Value::List(_) => "a list".to_owned(),
            Value::Map(_) => "a map".to_owned(),
        }
    }
}

/// A step of the way from the root to a value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Step {
    Key(String),
    Index(usize),
}

/// A way from the root: `steps!["instances", 0, "port"]`.
macro_rules! steps {
    ($($step:expr),* $(,)?) => { &[$($crate::source::Step::from($step)),*] };
}
pub(crate) use steps;

impl From<&str> for Step {
    fn from(key: &str) -> Self {
        Self::Key(key.to_owned())
    }
}

impl From<usize> for Step {
    fn from(index: usize) -> Self {
        Self::Index(index)
    }
}

/// Keys are flag names; underscores are accepted for hyphens.
pub(crate) fn canonical(key: &str) -> String {
    key.replace('_', "-")
}

fn place(at: &serde_saphyr::Location) -> Place {
    let number = |value: u64| u32::try_from(value).unwrap_or(u32::MAX);
    Place {
        line: number(at.line()),
        column: number(at.column()),
        width: number(at.span().len()),
    }
}

impl<'de> Deserialize<'de> for Node {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let spanned = Spanned::<Value>::deserialize(deserializer)?;
        Ok(Self {
            value: spanned.value,
            place: place(&spanned.referenced),
        })
    }
}

impl<'de> Deserialize<'de> for Value {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(ValueVisitor)
    }
}

struct ValueVisitor;

impl<'de> Visitor<'de> for ValueVisitor {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a value")
    }

    fn visit_unit<E>(self) -> Result<Value, E> {
        Ok(Value::Scalar(serde_json::Value::Null))
    }

    fn visit_none<E>(self) -> Result<Value, E> {
        Ok(Value::Scalar(serde_json::Value::Null))
    }

    fn visit_some<D: Deserializer<'de>>(self, deserializer: D) -> Result<Value, D::Error> {
        Value::deserialize(deserializer)
    }

    fn visit_bool<E>(self, value: bool) -> Result<Value, E> {
        Ok(Value::Scalar(value.into()))
    }

    fn visit_i64<E>(self, value: i64) -> Result<Value, E> {
        Ok(Value::Scalar(value.into()))
    }

    fn visit_u64<E>(self, value: u64) -> Result<Value, E> {
        Ok(Value::Scalar(value.into()))
    }

    fn visit_f64<E: serde::de::Error>(self, value: f64) -> Result<Value, E> {
        serde_json::Number::from_f64(value)
            .map(|number| Value::Scalar(number.into()))
            .ok_or_else(|| E::custom("a number must be finite"))
    }

    fn visit_str<E>(self, value: &str) -> Result<Value, E> {
        Ok(Value::Scalar(value.into()))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut access: A) -> Result<Value, A::Error> {
        let mut items = Vec::new();
        while let Some(item) = access.next_element::<Node>()? {
            items.push(item);
        }
        Ok(Value::List(items))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut access: A) -> Result<Value, A::Error> {
        let mut entries = Vec::new();
        while let Some((key, node)) = access.next_entry::<Node, Node>()? {
            let name = match key.value {
                Value::Scalar(serde_json::Value::String(text)) => text,
                Value::Scalar(serde_json::Value::Null) => {
                    return Err(A::Error::custom("a key is empty"));
                }
                Value::Scalar(scalar) => scalar.to_string(),
                Value::List(_) | Value::Map(_) => {
                    return Err(A::Error::custom("a key must be plain text"));
                }
            };
            entries.push(Entry {
                key: name,
                key_place: key.place,
                node,
            });
        }
        Ok(Value::Map(entries))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_are_those_of_the_text() {
        let node = parse("a:\n  - b: 7\n    c: [x, \"y z\"]\n").unwrap();
        let b = node.at(&["a".into(), 0.into(), "b".into()]);
        assert_eq!(
            b.place,
            Place {
                line: 2,
                column: 8,
                width: 1
            }
        );
        let y = node.at(&["a".into(), 0.into(), "c".into(), 1.into()]);
        assert_eq!((y.place.line, y.place.column), (3, 12));
        let entry = node.at(&["a".into(), 0.into()]).get("c").unwrap();
        assert_eq!((entry.key_place.line, entry.key_place.column), (3, 5));
    }

    #[test]
    fn a_missing_value_falls_back_to_its_ancestor() {
        let node = parse("a:\n  b: 1\n").unwrap();
        assert_eq!(node.at(&["a".into(), "zzz".into()]).place.line, 2);
    }

    #[test]
    fn broken_yaml_points_at_its_line() {
        let error = parse("a: 1\nb: [1,\nc: }\n").unwrap_err();
        assert!(error.place.line >= 2, "{error:?}");
    }

    #[test]
    fn nesting_and_alias_bombs_are_refused() {
        let deep = "[".repeat(100_000);
        assert!(parse(&deep).is_err());
        let mut bomb = String::from("a0: &a0 [x, x, x, x, x, x, x, x, x]\n");
        for i in 1..20 {
            let list = vec![format!("*a{}", i - 1); 9].join(", ");
            bomb.push_str(&format!("a{i}: &a{i} [{list}]\n"));
        }
        assert!(parse(&bomb).is_err());
    }
}
