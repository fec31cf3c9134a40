use crate::ranges::MAX_BODY_BYTES;
use std::ops::RangeInclusive;

/// Most seconds of `drain-settle` and `drain-timeout`.
pub const MOST_SECONDS: f64 = 86_400.0;

/// A flag whose value cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{flag} is {value}; {allowed}")]
pub struct FlagError {
    /// Name of the flag, without hyphens in front; also its key in files.
    pub flag: &'static str,
    /// The value as it was given.
    pub value: String,
    /// What is allowed, a sentence without its full stop.
    pub allowed: String,
}

impl FlagError {
    /// For a value that can be shown.
    pub fn new(
        flag: &'static str,
        value: impl std::fmt::Display,
        allowed: impl Into<String>,
    ) -> Self {
        Self {
            flag,
            value: value.to_string(),
            allowed: allowed.into(),
        }
    }
}

/// Reads a whole number of 64 bits; clap's own parser does not say what is allowed.
pub(crate) fn whole(text: &str) -> Result<u64, String> {
    text.parse()
        .map_err(|_| format!("allowed: whole numbers from 0 to {}", u64::MAX))
}

/// Reads a port.
pub(crate) fn port(text: &str) -> Result<u16, String> {
    text.parse()
        .map_err(|_| "allowed: a port from 1 to 65535, or 0 for a free one".to_owned())
}

/// Reads a whole number. What is no number of 32 bits is refused with the range that the field has; whether another one
/// is in that range is checked with the rest of the config.
pub(crate) fn count(range: RangeInclusive<u32>) -> impl Fn(&str) -> Result<u32, String> + Clone {
    move |text| {
        text.parse().map_err(|_| {
            let (least, most) = (range.start(), range.end());
            format!("allowed: whole numbers from {least} to {most}")
        })
    }
}

/// [`count`] that refuses at once what is not in the range.
pub(crate) fn count_in(range: RangeInclusive<u32>) -> impl Fn(&str) -> Result<u32, String> + Clone {
    move |text| match text.parse() {
        Ok(value) if range.contains(&value) => Ok(value),
        _ => {
            let (least, most) = (range.start(), range.end());
            Err(format!("allowed: whole numbers from {least} to {most}"))
        }
    }
}

/// Reads a number of tokens that only the model bounds; as [`count`].
pub(crate) fn tokens(range: RangeInclusive<u32>) -> impl Fn(&str) -> Result<u32, String> + Clone {
    move |text| {
        text.parse().map_err(|_| {
            let least = range.start();
            format!("allowed: whole numbers from {least} to the model's context length")
        })
    }
}

/// [`tokens`] that refuses less than the least at once.
pub(crate) fn tokens_in(
    range: RangeInclusive<u32>,
) -> impl Fn(&str) -> Result<u32, String> + Clone {
    move |text| match text.parse() {
        Ok(tokens) if range.contains(&tokens) => Ok(tokens),
        _ => {
            let least = range.start();
            Err(format!(
                "allowed: whole numbers from {least} to the model's context length"
            ))
        }
    }
}

/// Reads a number that has no bound but the machine's.
pub(crate) fn positive(text: &str) -> Result<u32, String> {
    text.parse()
        .map_err(|_| "allowed: whole numbers from 1".to_owned())
}

/// Reads a port that others must know: 0 is none.
pub(crate) fn port_in_use(text: &str) -> Result<u16, String> {
    match text.parse() {
        Ok(port) if port > 0 => Ok(port),
        _ => Err("allowed: 1 to 65535".to_owned()),
    }
}

/// Reads a time in seconds that may be 0.
pub(crate) fn seconds(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(value) if (0.0..=MOST_SECONDS).contains(&value) => Ok(value),
        _ => Err(format!(
            "allowed: a number of seconds from 0 to {MOST_SECONDS}"
        )),
    }
}

/// Reads a size of request bodies.
pub(crate) fn body_bytes(text: &str) -> Result<u64, String> {
    match text.parse() {
        Ok(bytes) if MAX_BODY_BYTES.contains(&bytes) => Ok(bytes),
        _ => Err(format!(
            "allowed: whole numbers of bytes from {} to {}",
            MAX_BODY_BYTES.start(),
            MAX_BODY_BYTES.end()
        )),
    }
}
