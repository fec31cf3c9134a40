//! Command lines, read back by the same parser that will read them, so that a plan never holds one
//! that its process would refuse.

use crate::CoreSet;
use crate::diagnostic::Diagnostic;
use crate::load::Deployment;
use crate::plan::Checks;
use crate::resolve::Draft;
use crate::source::steps;
use clap::error::{ContextKind, ContextValue};
use clap::{Args, FromArgMatches};
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::Path;
use twinfer_config::{FlagError, KvLoadFailurePolicy, RouterConfig, ServeConfig};
use twinfer_protocol::Role;

/// Name of the program in plans.
pub(crate) const PROGRAM: &str = "twinfer";

/// `twinfer serve ...` of one instance.
pub(crate) fn serve(
    deployment: &Deployment,
    draft: &Draft<'_>,
    model: &Path,
    served_model_name: &str,
    pd_peers: &[String],
    checks: Checks<'_>,
    found: &mut Vec<Diagnostic>,
) -> Vec<String> {
    let handoff = &deployment.file.handoff;
    let mut line = Line::new("serve");
    line.word(&model.to_string_lossy());
    if !draft.is_headless() {
        line.flag("--served-model-name", served_model_name);
        line.flag("--name", &draft.name);
        line.flag("--role", draft.spec.role.as_str());
        line.flag("--host", &draft.node.host);
        line.flag("--port", &draft.port.to_string());
    }
    if let Some(ranks) = &draft.ranks {
        line.flag("--dp", &ranks.all.to_string());
        if ranks.count < ranks.all {
            line.flag("--data-parallel-size-local", &ranks.count.to_string());
            line.flag("--data-parallel-address", &ranks.master_addr);
            line.flag("--data-parallel-rpc-port", &ranks.rpc_port.to_string());
        }
        if ranks.first > 0 {
            line.words.push("--headless".to_owned());
            line.flag("--data-parallel-start-rank", &ranks.first.to_string());
            if let Some(address) = draft.node.rank_host {
                line.flag("--rank-host", &address.to_string());
            }
        }
    }
    if let Some(port) = draft.kv_port {
        line.flag("--kv-port", &port.to_string());
    }
    // Decode renews in time for its own.
    if draft.kv_port.is_some() || draft.spec.role == Role::Decode {
        line.flag("--kv-lease", &handoff.lease.to_string());
    }
    if draft.spec.role != Role::Both {
        line.flag("--kv-timeout", &handoff.timeout.to_string());
    }
    if draft.spec.role == Role::Decode {
        line.flag("--pd-peers", &pd_peers.join(","));
        line.flag(
            "--kv-load-failure-policy",
            match handoff.policy {
                KvLoadFailurePolicy::Fail => "fail",
                KvLoadFailurePolicy::Recompute => "recompute",
            },
        );
    }
    line.flag("--threads", &draft.cores.len().to_string());
    line.flag("--cpus", &CoreSet::text(&draft.cores));
    let mut flags = draft.spec.flags.clone();
    let files = ["api-key-file", "peer-key-file", "receipts"];
    absolute(deployment, &mut flags, &files);
    // The router in front is stopped first, so nobody has to notice that readiness is gone.
    flags
        .entry("drain-settle".to_owned())
        .or_insert_with(|| 0.into());
    // A prompt that no decode instance takes is not computed.
    if draft.spec.role == Role::Prefill
        && let Some(limit) = decode_limit(deployment)
    {
        let own = flags.entry("max-model-len".to_owned()).or_default();
        if own.is_null() || own.as_u64().is_some_and(|own| own > limit) {
            *own = limit.into();
        }
    }
    line.flags(&flags);
    // With cores or ports missing the line is not whole; that has been reported.
    if (draft.port != 0 || draft.is_headless()) && !draft.cores.is_empty() {
        let command = ServeConfig::augment_args(clap::Command::new("serve").no_binary_name(true));
        let prefix = format!("instances[{}]", draft.group);
        let at = |flag: &str| {
            deployment.wrong(steps!["instances", draft.group, flag], String::new(), None)
        };
        let matches = verify(command, &line.words[2..], &prefix, at, found);
        let config = matches.and_then(|matches| ServeConfig::from_arg_matches(&matches).ok());
        if let (Some(config), Some(check)) = (config, checks.serve)
            && let Err(error) = check(&config)
        {
            let refusal = refused(deployment, error, &prefix, at);
            // Instances that share a mistake in the model's path say it once.
            if !found.contains(&refusal) {
                found.push(refusal);
            }
        }
    }
    line.words
}

/// The greatest `max-model-len` of decode instances; none if there are none, or one has the model's own.
fn decode_limit(deployment: &Deployment) -> Option<u64> {
    let decode = deployment.file.instances.iter();
    let limits = decode
        .filter(|spec| spec.role == Role::Decode)
        .map(|spec| spec.flags.get("max-model-len").and_then(Value::as_u64));
    limits.collect::<Option<Vec<_>>>()?.into_iter().max()
}

/// `twinfer router ...`.
pub(crate) fn router(
    deployment: &Deployment,
    host: &str,
    instances: &[(&str, Vec<String>); 3],
    found: &mut Vec<Diagnostic>,
) -> Vec<String> {
    let spec = &deployment.file.router;
    let mut line = Line::new("router");
    line.flag("--host", host);
    line.flag("--port", &spec.port.to_string());
    for (flag, urls) in instances {
        for url in urls {
            line.flag(flag, url);
        }
    }
    let mut flags = spec.flags.clone();
    absolute(
        deployment,
        &mut flags,
        &[
            "admin-key-file",
            "api-key-file",
            "api-keys-file",
            "peer-key-file",
        ],
    );
    // Instances end with the router: nobody would send requests elsewhere meanwhile.
    flags
        .entry("drain-settle".to_owned())
        .or_insert_with(|| 0.into());
    line.flags(&flags);
    let command = RouterConfig::augment_args(clap::Command::new("router").no_binary_name(true));
    verify(
        command,
        &line.words[2..],
        "router",
        |flag| deployment.wrong(steps!["router", flag], String::new(), None),
        found,
    );
    line.words
}

/// File names count from the file's folder, as `model: path` does.
fn absolute(deployment: &Deployment, flags: &mut BTreeMap<String, Value>, names: &[&str]) {
    for name in names {
        if let Some(Value::String(path)) = flags.get_mut(*name) {
            *path = deployment
                .folder()
                .join(&*path)
                .to_string_lossy()
                .into_owned();
        }
    }
}

struct Line {
    words: Vec<String>,
}

impl Line {
    fn new(command: &str) -> Self {
        Self {
            words: vec![PROGRAM.to_owned(), command.to_owned()],
        }
    }

    fn word(&mut self, word: &str) {
        // A path that begins with a hyphen would be read as a flag.
        self.words.push(if word.starts_with('-') {
            format!("./{word}")
        } else {
            word.to_owned()
        });
    }

    fn flag(&mut self, flag: &str, value: &str) {
        if value.starts_with('-') {
            self.words.push(format!("{flag}={value}"));
        } else {
            self.words.extend([flag.to_owned(), value.to_owned()]);
        }
    }

    fn flags(&mut self, flags: &BTreeMap<String, Value>) {
        for (key, value) in flags {
            let flag = format!("--{key}");
            match value {
                // What is on by default has a flag that switches it off.
                Value::Bool(false) if key.starts_with("enable-") => {
                    self.words.push(format!("--no-{key}"));
                }
                Value::Null | Value::Bool(false) => {}
                Value::Bool(true) => self.words.push(flag),
                Value::Array(items) => {
                    let items: Vec<String> = items.iter().map(plain).collect();
                    if !items.is_empty() {
                        self.flag(&flag, &items.join(","));
                    }
                }
                value => self.flag(&flag, &plain(value)),
            }
        }
    }
}

fn plain(value: &Value) -> String {
    value
        .as_str()
        .map_or_else(|| value.to_string(), str::to_owned)
}

/// Parses `words` as the process will; a refusal is reported at the key it names.
fn verify(
    mut command: clap::Command,
    words: &[String],
    prefix: &str,
    at: impl Fn(&str) -> Diagnostic,
    found: &mut Vec<Diagnostic>,
) -> Option<clap::ArgMatches> {
    let error = match command.try_get_matches_from_mut(words) {
        Ok(matches) => return Some(matches),
        Err(error) => error,
    };
    let text = |kind| match error.get(kind) {
        Some(ContextValue::String(text)) => Some(text.clone()),
        Some(ContextValue::Strings(texts)) => Some(texts.join(", ")),
        _ => None,
    };
    let argument = text(ContextKind::InvalidArg).unwrap_or_default();
    let flag = argument
        .trim_start_matches('-')
        .split([' ', '='])
        .next()
        .unwrap_or_default()
        .to_owned();
    let mut diagnostic = at(&flag);
    let message = error.to_string();
    let first = message
        .lines()
        .next()
        .unwrap_or_default()
        .trim_start_matches("error: ")
        .to_owned();
    diagnostic.message = match text(ContextKind::InvalidValue) {
        Some(value) => format!("{prefix}.{flag} is {value:?}"),
        None => format!("{prefix}: {first}"),
    };
    diagnostic.help = text(ContextKind::ValidValue)
        .map(|values| format!("allowed: {values}"))
        .or_else(|| std::error::Error::source(&error).map(ToString::to_string));
    found.push(diagnostic);
    None
}

/// What the process itself would refuse. The model stands in a section of its own.
fn refused(
    deployment: &Deployment,
    error: FlagError,
    prefix: &str,
    at: impl Fn(&str) -> Diagnostic,
) -> Diagnostic {
    if error.flag == "model" {
        let message = format!("model.path is {}", error.value);
        return deployment.wrong(steps!["model", "path"], message, Some(error.allowed));
    }
    let mut diagnostic = at(error.flag);
    diagnostic.message = format!("{prefix}.{} is {}", error.flag, error.value);
    diagnostic.help = Some(error.allowed);
    diagnostic
}
