use super::ModelConfigError;
use serde_json::{Map, Value};
use std::cell::RefCell;
use std::collections::BTreeSet;

/// Typed access to a JSON object with errors that name field, value and what is allowed. `null`
/// counts as absent, as in transformers.
pub(super) struct Fields<'a> {
    map: &'a Map<String, Value>,
    prefix: &'a str,
    read: RefCell<BTreeSet<String>>,
}

impl<'a> Fields<'a> {
    /// `prefix` goes before field names in errors, such as `rope_scaling.`.
    pub(super) fn new(map: &'a Map<String, Value>, prefix: &'a str) -> Self {
        Self {
            map,
            prefix,
            read: RefCell::new(BTreeSet::new()),
        }
    }

    pub(super) fn get(&self, field: &str) -> Option<&'a Value> {
        self.read.borrow_mut().insert(field.to_owned());
        self.map.get(field)
    }

    pub(super) fn given(&self, field: &str) -> bool {
        self.get(field).is_some_and(|value| !value.is_null())
    }

    /// Fields never asked for, but for those in `neutral` and those that are null.
    pub(super) fn unread(&self, neutral: &[&str]) -> Vec<String> {
        let read = self.read.borrow();
        self.map
            .iter()
            .filter(|(key, value)| {
                !value.is_null() && !read.contains(*key) && !neutral.contains(&key.as_str())
            })
            .map(|(key, _)| key.clone())
            .collect()
    }

    pub(super) fn bad(&self, field: &str, value: &Value, allowed: &str) -> ModelConfigError {
        ModelConfigError::Value {
            field: format!("{}{field}", self.prefix),
            value: shown(value),
            allowed: allowed.to_owned(),
        }
    }

    pub(super) fn bad_here(&self, field: &str, allowed: &str) -> ModelConfigError {
        self.bad(field, self.map.get(field).unwrap_or(&Value::Null), allowed)
    }

    pub(super) fn contradiction(&self, left: &str, right: &str) -> ModelConfigError {
        let show = |field: &str| {
            let value = self
                .map
                .get(field)
                .map_or_else(|| "absent".to_owned(), shown);
            format!("{}{field} is {value}", self.prefix)
        };
        ModelConfigError::Contradiction {
            left: show(left),
            right: show(right),
        }
    }

    fn missing(&self, field: &str, allowed: &str) -> ModelConfigError {
        ModelConfigError::Missing {
            field: format!("{}{field}", self.prefix),
            allowed: allowed.to_owned(),
        }
    }

    /// A whole number in `1..=most`.
    pub(super) fn size(&self, field: &str, most: usize) -> Result<usize, ModelConfigError> {
        self.size_from(field, 1, most)
    }

    /// A whole number in `least..=most`.
    pub(super) fn size_from(
        &self,
        field: &str,
        least: usize,
        most: usize,
    ) -> Result<usize, ModelConfigError> {
        let allowed = format!("a whole number from {least} to {most}");
        if !self.given(field) {
            return Err(self.missing(field, &allowed));
        }
        match self.count_or(field, 0, most) {
            Ok(n) if n >= least => Ok(n),
            _ => Err(self.bad_here(field, &allowed)),
        }
    }

    /// A whole number in `0..=most`, or `default`.
    pub(super) fn count_or(
        &self,
        field: &str,
        default: usize,
        most: usize,
    ) -> Result<usize, ModelConfigError> {
        if !self.given(field) {
            return Ok(default);
        }
        self.get(field)
            .and_then(Value::as_u64)
            .and_then(|n| usize::try_from(n).ok())
            .filter(|n| *n <= most)
            .ok_or_else(|| self.bad_here(field, &format!("a whole number from 0 to {most}")))
    }

    /// A finite number above 0, if given.
    pub(super) fn positive_if(&self, field: &str) -> Result<Option<f64>, ModelConfigError> {
        if !self.given(field) {
            return Ok(None);
        }
        self.get(field)
            .and_then(Value::as_f64)
            .filter(|x| *x as f32 > 0.0 && *x <= f64::from(f32::MAX))
            .map(Some)
            .ok_or_else(|| self.bad_here(field, "a number above 0"))
    }

    /// A finite number above 0.
    pub(super) fn positive(&self, field: &str) -> Result<f64, ModelConfigError> {
        self.positive_if(field)?
            .ok_or_else(|| self.missing(field, "a number above 0"))
    }

    /// A finite number of 0 or more, if given.
    pub(super) fn not_negative_if(&self, field: &str) -> Result<Option<f64>, ModelConfigError> {
        if !self.given(field) {
            return Ok(None);
        }
        self.get(field)
            .and_then(Value::as_f64)
            .filter(|x| *x >= 0.0 && *x <= f64::from(f32::MAX))
            .map(Some)
            .ok_or_else(|| self.bad_here(field, "a number of 0 or more"))
    }

    pub(super) fn flag_or(&self, field: &str, default: bool) -> Result<bool, ModelConfigError> {
        match self.get(field) {
            None | Some(Value::Null) => Ok(default),
            Some(Value::Bool(flag)) => Ok(*flag),
            Some(other) => Err(self.bad(field, other, "true or false")),
        }
    }

    /// A flag for which only one value is served.
    pub(super) fn only_flag(&self, field: &str, only: bool) -> Result<(), ModelConfigError> {
        if self.flag_or(field, only)? == only {
            Ok(())
        } else {
            Err(self.bad_here(field, &only.to_string()))
        }
    }

    /// A string among `allowed`, if given.
    pub(super) fn one_of(
        &self,
        field: &str,
        allowed: &[&str],
    ) -> Result<Option<&'a str>, ModelConfigError> {
        if !self.given(field) {
            return Ok(None);
        }
        self.get(field)
            .and_then(Value::as_str)
            .filter(|text| allowed.contains(text))
            .map(Some)
            .ok_or_else(|| self.bad_here(field, &allowed.join(", ")))
    }

    /// A string, if given.
    pub(super) fn text_if(&self, field: &str) -> Result<Option<String>, ModelConfigError> {
        match self.get(field) {
            None | Some(Value::Null) => Ok(None),
            Some(Value::String(text)) => Ok(Some(text.clone())),
            Some(other) => Err(self.bad(field, other, "a string")),
        }
    }

    /// A field that must not be there.
    pub(super) fn absent(&self, field: &str, allowed: &str) -> Result<(), ModelConfigError> {
        if self.given(field) {
            Err(self.bad_here(field, allowed))
        } else {
            Ok(())
        }
    }

    /// An object, if given.
    pub(super) fn object_if(
        &self,
        field: &str,
    ) -> Result<Option<&'a Map<String, Value>>, ModelConfigError> {
        match self.get(field) {
            None | Some(Value::Null) => Ok(None),
            Some(Value::Object(map)) => Ok(Some(map)),
            Some(other) => Err(self.bad(field, other, "an object or null")),
        }
    }
}

/// A JSON value on one line, at most 80 characters.
fn shown(value: &Value) -> String {
    let text = value.to_string();
    if text.chars().count() <= 80 {
        return text;
    }
    let mut short: String = text.chars().take(77).collect();
    short.push_str("...");
    short
}
