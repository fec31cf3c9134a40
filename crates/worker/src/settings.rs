use crate::ServeError;
use std::time::Duration;
use twinfer_config::{ServeConfig, parse_cpus};
use twinfer_engine::EngineConfig;

/// Longest settle and drain times.
const MAX_SECONDS: f64 = 86_400.0;
/// Longest name of an instance or model.
const MAX_NAME: usize = 128;

/// What follows from a [`ServeConfig`] before anything is opened.
#[derive(Clone, Debug)]
pub(crate) struct Settings {
    pub(crate) model_name: String,
    pub(crate) settle: Duration,
    pub(crate) deadline: Duration,
}

/// Checks everything that needs neither the model nor a socket. [`crate::serve()`] does it too.
///
/// # Errors
/// [`ServeError::Config`] names the flag, the value and what is allowed.
pub fn validate(config: &ServeConfig) -> Result<(), ServeError> {
    Settings::of(config).map(drop)
}

impl Settings {
    pub(crate) fn of(config: &ServeConfig) -> Result<Self, ServeError> {
        let bad = |message: String| Err(ServeError::Config(message));
        // Flag, value, least and most that is allowed.
        let bounds = [
            ("max-num-seqs", config.max_num_seqs.into(), 1, 1 << 16),
            (
                "max-num-batched-tokens",
                config.max_num_batched_tokens.into(),
                1,
                1 << 20,
            ),
            ("max-waiting", config.max_waiting.into(), 0, 1 << 20),
            ("block-size", config.block_size.into(), 1, 4096),
            ("kv-lease", config.kv_lease.into(), 1, 86_400),
            ("kv-timeout", config.kv_timeout.into(), 1, 86_400),
            ("max-body-bytes", config.max_body_bytes, 1024, 1 << 30),
        ];
        for (flag, value, least, most) in bounds {
            if !(least..=most).contains(&value) {
                return bad(format!("{flag} is {value}; {least} to {most} are allowed"));
            }
        }
        for (flag, value) in [
            ("threads", config.threads),
            ("max-output-tokens", config.max_output_tokens),
        ] {
            if value == Some(0) {
                return bad(format!("{flag} is 0; at least 1 is allowed"));
            }
        }
        if config.max_model_len.is_some_and(|length| length < 2) {
            return bad("max-model-len is below 2; one token in, one out is the least".into());
        }
        cpus(config)?;
        let seconds = |flag: &str, value: f64| {
            if (0.0..=MAX_SECONDS).contains(&value) {
                return Ok(Duration::from_secs_f64(value));
            }
            Err(ServeError::Config(format!(
                "{flag} is {value}; 0 to {MAX_SECONDS} are allowed"
            )))
        };
        let (settle, deadline) = (
            seconds("drain-settle", config.drain_settle)?,
            seconds("drain-timeout", config.drain_timeout)?,
        );
        let model_name = match &config.served_model_name {
            Some(name) => name.clone(),
            None => config
                .model
                .canonicalize()
                .unwrap_or_else(|_| config.model.clone())
                .file_name()
                .map_or_else(
                    || "model".into(),
                    |name| name.to_string_lossy().into_owned(),
                ),
        };
        for (flag, name) in [
            ("served-model-name", Some(&model_name)),
            ("name", config.name.as_ref()),
        ] {
            if let Some(name) = name
                && (name.is_empty() || name.len() > MAX_NAME || name.chars().any(char::is_control))
            {
                return bad(format!(
                    "{flag} is {name:?}; 1 to {MAX_NAME} bytes without control characters are allowed"
                ));
            }
        }
        Ok(Self {
            model_name,
            settle,
            deadline,
        })
    }

    /// Limits of the engine; `max_model_len` is the model's business.
    pub(crate) fn engine(config: &ServeConfig) -> EngineConfig {
        EngineConfig {
            max_model_len: config.max_model_len.unwrap_or(u32::MAX),
            max_num_seqs: config.max_num_seqs,
            max_num_batched_tokens: config.max_num_batched_tokens,
            max_waiting: config.max_waiting,
        }
    }
}

/// Cores of `cpus`; every one must be permitted to this process.
pub(crate) fn cpus(config: &ServeConfig) -> Result<Option<Vec<usize>>, ServeError> {
    let Some(text) = &config.cpus else {
        return Ok(None);
    };
    let cpus = parse_cpus(text).map_err(ServeError::Config)?;
    let source = |source| ServeError::System {
        what: "find out which cores are permitted",
        source,
    };
    let permitted = twinfer_sys::available_cpus().map_err(source)?;
    match cpus.iter().find(|cpu| !permitted.contains(cpu)) {
        Some(cpu) => Err(ServeError::Config(format!(
            "cpus has {cpu}, which this process may not use; permitted are {permitted:?}"
        ))),
        None => Ok(Some(cpus)),
    }
}
