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

/// Reads a time in seconds that may be 0.
pub(crate) fn seconds(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(value) if (0.0..=86_400.0).contains(&value) => Ok(value),
        _ => Err("allowed: a number of seconds from 0 to 86400".to_owned()),
    }
}
