use crate::ServeError;
use std::fmt::Display;
use std::time::Duration;
use twinfer_config::model::parse_bytes;
use twinfer_config::{CoreSet, FlagError, MOST_SECONDS, ServeConfig};
use twinfer_engine::EngineConfig;
use twinfer_engine::phase::{Mixing, PhasePolicy, Threshold};
use twinfer_protocol::Role;

/// Milliseconds that prompts wait for a threshold unless told otherwise.
const LONGEST_WAIT: u64 = 300;
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
/// [`ServeError::Flag`] names the flag, the value and what is allowed.
pub fn validate(config: &ServeConfig) -> Result<(), ServeError> {
    Settings::of(config).map(drop)
}

impl Settings {
    pub(crate) fn of(config: &ServeConfig) -> Result<Self, ServeError> {
        let bad = |flag, value: &dyn Display, allowed: String| {
            Err(FlagError::new(flag, value, allowed).into())
        };
        for (flag, value, range) in config.numbers() {
            if let Some(value) = value.filter(|value| !range.contains(value)) {
                let (least, most) = (range.start(), range.end());
                let allowed = match value < *least && *most == u64::from(u32::MAX) {
                    true => format!("at least {least} is allowed"),
                    false => format!("{least} to {most} are allowed"),
                };
                return bad(flag, &value, allowed);
            }
        }
        if let Some(text) = &config.kv_cache_memory {
            kv_bytes(text)?;
        }
        cpus(config)?;
        ranks(config)?;
        nodes(config)?;
        let seconds = |flag, value: f64| {
            if (0.0..=MOST_SECONDS).contains(&value) {
                return Ok(Duration::from_secs_f64(value));
            }
            let allowed = format!("0 to {MOST_SECONDS} are allowed");
            Err(ServeError::from(FlagError::new(flag, value, allowed)))
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
                let allowed =
                    format!("1 to {MAX_NAME} bytes without control characters are allowed");
                return bad(flag, &format!("{name:?}"), allowed);
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
            enable_prefix_caching: config.prefix_caching(),
            num_speculative_tokens: config.num_speculative_tokens,
            adaptive_draft_length: config.adaptive_draft_length,
            // Ranks agree on it by their policy.
            prefill_any_interval: match config.dp {
                1 => config.prefill_any_interval,
                _ => 1,
            },
            // Drawn when the model is known.
            cache_seed: 0,
        }
    }
}

/// What is allowed of ranks, and of flags that only ranks have.
fn ranks(config: &ServeConfig) -> Result<(), ServeError> {
    let last = u32::from(config.kv_port) + config.dp - 1;
    if config.kv_port > 0 && last > u32::from(u16::MAX) {
        let allowed = format!(
            "0 to {} are allowed: {} ranks listen on this port and those after it",
            u32::from(u16::MAX) + 1 - config.dp,
            config.dp
        );
        return Err(FlagError::new("kv-port", config.kv_port, allowed).into());
    }
    let given = [
        ("prefill-chunk", config.prefill_chunk.map(u64::from)),
        ("prefill-run", config.prefill_run.map(u64::from)),
        (
            "prefill-threshold-requests",
            config.prefill_threshold_requests.map(u64::from),
        ),
        ("prefill-threshold-tokens", config.prefill_threshold_tokens),
        (
            "prefill-longest-wait",
            config.prefill_longest_wait.map(u64::from),
        ),
        ("eplb-interval", config.eplb_interval.map(u64::from)),
        (
            "num-redundant-experts",
            config.num_redundant_experts.map(u64::from),
        ),
    ];
    if config.dp == 1 {
        let numbers = given.into_iter().find_map(|(flag, value)| {
            let value = value?.to_string();
            Some((flag, value))
        });
        let comm = config
            .moe_comm
            .map(|comm| ("moe-comm", comm.as_str().to_owned()));
        let prefill = config
            .eplb_after_prefill
            .then(|| ("eplb-after-prefill", "true".to_owned()));
        if let Some((flag, value)) = numbers.or(comm).or(prefill) {
            let allowed =
                "it is for several ranks that step together: set dp above 1, or leave it out";
            return Err(FlagError::new(flag, value, allowed).into());
        }
    }
    Ok(())
}

/// What is allowed of ranks on several nodes.
fn nodes(config: &ServeConfig) -> Result<(), ServeError> {
    let bad = |flag, value: &dyn Display, allowed: String| {
        Err(FlagError::new(flag, value, allowed).into())
    };
    let here = config.ranks_here();
    if !(1..=config.dp).contains(&here) {
        let allowed = format!("at most {}, the number of all ranks (dp)", config.dp);
        return bad("data-parallel-size-local", &here, allowed);
    }
    let start = config.data_parallel_start_rank;
    match (config.headless, start) {
        (true, Some(start)) if !(1..=config.dp - here).contains(&start) => {
            let allowed = match config.dp - here {
                0 => format!(
                    "with {here} of {here} ranks here no other node has any: leave --headless out"
                ),
                last => format!(
                    "1 to {last} are allowed: this node has {here} of {} ranks",
                    config.dp
                ),
            };
            return bad("data-parallel-start-rank", &start, allowed);
        }
        (true, None) => {
            let allowed = "it is needed with --headless: the number of this node's first rank";
            return bad("data-parallel-start-rank", &"absent", allowed.to_owned());
        }
        (false, Some(start)) => {
            let allowed = "it is for --headless: the node that serves HTTP has rank 0";
            return bad("data-parallel-start-rank", &start, allowed.to_owned());
        }
        _ => {}
    }
    let several = config.headless || here < config.dp;
    if several && config.role != Role::Both {
        let allowed = format!(
            "both is allowed with ranks on several nodes; {here} of {} are here",
            config.dp
        );
        return bad("role", &config.role, allowed);
    }
    let given = [
        (
            "data-parallel-address",
            config.data_parallel_address.clone(),
        ),
        (
            "data-parallel-rpc-port",
            config.data_parallel_rpc_port.map(|port| port.to_string()),
        ),
    ];
    for (flag, value) in given {
        match (several, value) {
            (true, None) => {
                let allowed = format!(
                    "it is needed where {here} of {} ranks are on this node: the others find the first node there",
                    config.dp
                );
                return bad(flag, &"absent", allowed);
            }
            (false, Some(value)) => {
                let allowed = "it is for ranks on several nodes: set data-parallel-size-local below dp, or leave it out";
                return bad(flag, &value, allowed.to_owned());
            }
            _ => {}
        }
    }
    Ok(())
}

/// Who computes when, for an instance of several ranks. Ages are in milliseconds.
pub(crate) fn phase_policy(config: &ServeConfig) -> PhasePolicy {
    let default = PhasePolicy::DEFAULT;
    PhasePolicy {
        mixing: match config.prefill_chunk {
            None => default.mixing,
            Some(0) => Mixing::Apart,
            Some(tokens) => Mixing::Chunks { tokens },
        },
        prefill_any_interval: config.prefill_any_interval,
        prefill_run: config.prefill_run.unwrap_or(default.prefill_run),
        threshold: Threshold {
            requests: config.prefill_threshold_requests.unwrap_or(0),
            tokens: config.prefill_threshold_tokens.unwrap_or(0),
        },
        longest_wait: config.prefill_longest_wait.map_or(LONGEST_WAIT, u64::from),
        ..default
    }
}

/// Bytes of `kv-cache-memory`; whether they suffice is the model's business.
pub(crate) fn kv_bytes(text: &str) -> Result<u64, FlagError> {
    parse_bytes(text).map_err(|_| {
        let allowed =
            "allowed: a number with B, KiB, MiB, GiB, TiB, KB, MB, GB or TB, such as 512MiB";
        FlagError::new("kv-cache-memory", format!("{text:?}"), allowed)
    })
}

/// Cores of `cpus`; every one must be permitted to this process.
pub(crate) fn cpus(config: &ServeConfig) -> Result<Option<Vec<usize>>, ServeError> {
    let Some(text) = &config.cpus else {
        return Ok(None);
    };
    let refused = |allowed: String| FlagError::new("cpus", format!("{text:?}"), allowed);
    let cpus: Vec<usize> = CoreSet::parse(text)
        .map_err(refused)?
        .0
        .into_iter()
        .map(|core| core as usize)
        .collect();
    let source = |source| ServeError::System {
        what: "find out which cores are permitted",
        source,
    };
    let permitted = twinfer_sys::available_cpus().map_err(source)?;
    match cpus.iter().find(|cpu| !permitted.contains(cpu)) {
        Some(cpu) => {
            let permitted: Vec<u32> = permitted
                .iter()
                .filter_map(|&c| c.try_into().ok())
                .collect();
            Err(refused(format!(
                "core {cpu} is not permitted to this process; allowed: {}",
                CoreSet::text(&permitted)
            ))
            .into())
        }
        None => Ok(Some(cpus)),
    }
}
