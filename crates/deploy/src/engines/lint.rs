//! Rules about deployments by template. Texts, severities and sources stand in `lint/rules.yaml`; the
//! checks, one function per rule, in the modules below.

mod context;
mod handoff;
mod layout;
mod machines;
mod model;
mod operation;
mod scheduler;

use crate::diagnostic::{Diagnostic, Diagnostics};
use crate::engines::load::EngineDeployment;
use crate::engines::plan::EnginePlan;
use crate::engines::template::version;
use crate::source::Step;
pub(crate) use context::Context;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::sync::LazyLock;

/// How bad a finding is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Severity {
    /// Plan and render refuse.
    E,
    /// Likely not meant.
    W,
    /// Worth knowing.
    I,
}

/// A rule.
#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Rule {
    /// Number.
    pub number: u16,
    /// Severity, unless an exception fits.
    pub severity: Severity,
    /// What it is about.
    pub title: String,
    /// What is allowed.
    pub allowed: String,
    /// Where it comes from.
    pub source: String,
    /// Templates that it is about; all if empty.
    #[serde(default)]
    pub engines: Vec<String>,
    /// Exceptions, the first that fits counts.
    #[serde(default)]
    pub unless: Vec<Exception>,
}

/// Another severity for a connector or for versions.
#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Exception {
    /// Connector.
    #[serde(default)]
    pub connector: Option<String>,
    /// First version.
    #[serde(default)]
    pub from: Option<String>,
    /// First version that it is not about.
    #[serde(default)]
    pub until: Option<String>,
    /// Severity.
    pub severity: Severity,
}

/// Something that a rule found.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// Rule.
    pub rule: u16,
    /// Severity.
    pub severity: Severity,
    /// Line of the file.
    pub line: u32,
    /// What was found.
    pub found: String,
    /// What is allowed.
    pub allowed: String,
    /// Nearest valid value.
    pub nearest: Option<String>,
    /// Where the rule comes from.
    pub source: String,
    /// Permitted by number.
    pub permitted: bool,
}

/// All findings of a deployment.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Findings {
    /// File.
    pub file: String,
    /// Findings by severity, number and line.
    pub findings: Vec<Finding>,
}

static RULES: LazyLock<Vec<Rule>> = LazyLock::new(|| {
    // A malformed table is a mistake of this build; a test reads it.
    serde_saphyr::from_str(include_str!("lint/rules.yaml")).unwrap_or_default()
});

/// All rules.
pub fn rules() -> &'static [Rule] {
    &RULES
}

/// The rule of a number.
pub fn rule(number: u16) -> Option<&'static Rule> {
    RULES.iter().find(|rule| rule.number == number)
}

/// Where rules put what they find.
pub(crate) struct Sink<'c> {
    context: &'c Context<'c>,
    rule: &'static Rule,
    found: Vec<(Diagnostic, Finding)>,
}

impl Sink<'_> {
    /// Something found at the value of `path`, and the nearest value that is allowed.
    pub(crate) fn found(&mut self, path: &[Step], found: String, nearest: Option<String>) {
        let severity = self.context.severity(self.rule);
        self.found_as(severity, path, found, nearest);
    }

    /// The same with another severity than the rule's.
    pub(crate) fn found_as(
        &mut self,
        severity: Severity,
        path: &[Step],
        found: String,
        nearest: Option<String>,
    ) {
        let rule = self.rule;
        let help = match &nearest {
            Some(nearest) => format!("allowed: {}; nearest: {nearest}", rule.allowed),
            None => format!("allowed: {}", rule.allowed),
        };
        let message = format!("rule {}: {found}", rule.number);
        let diagnostic = self.context.deployment.wrong(path, message, Some(help));
        let finding = Finding {
            rule: rule.number,
            severity,
            line: diagnostic.place.line,
            found,
            allowed: rule.allowed.clone(),
            nearest,
            source: rule.source.clone(),
            permitted: false,
        };
        if !self.found.iter().any(|(_, other)| *other == finding) {
            self.found.push((diagnostic, finding));
        }
    }
}

type Check = fn(&Context<'_>, &mut Sink<'_>);

/// The check of every rule, by number.
const CHECKS: &[(u16, Check)] = &[
    (1, layout::devices),
    (2, layout::tiling),
    (3, layout::group),
    (4, layout::tp_ratio),
    (5, layout::decode_shape),
    (6, handoff::sizes),
    (7, handoff::equal_settings),
    (8, layout::partition),
    (9, layout::kinds),
    (10, layout::experts),
    (11, layout::heads),
    (12, handoff::engine_ids),
    (13, handoff::random_range),
    (14, handoff::spans),
    (15, handoff::taken),
    (16, handoff::ephemeral),
    (17, handoff::llmdd),
    (18, layout::stagger),
    (19, operation::endpoints),
    (20, handoff::roles),
    (21, handoff::flow),
    (22, handoff::module_path),
    (23, model::json),
    (24, handoff::legacy),
    (25, model::quantised),
    (26, model::float16),
    (27, model::types),
    (28, model::seeds),
    (29, operation::names),
    (30, model::text),
    (31, model::lengths),
    (32, model::prefill_budget),
    (33, model::decode_budget),
    (34, model::mc2),
    (35, model::blocks),
    (36, model::prefix_caching),
    (37, model::utilization),
    (38, model::graphs),
    (39, model::drafts),
    (40, scheduler::recompute),
    (41, scheduler::balance),
    (42, scheduler::dyntra),
    (43, scheduler::short_first),
    (44, scheduler::lmhead),
    (45, scheduler::finegrained),
    (46, scheduler::decode_only),
    (47, scheduler::shared_experts),
    (48, scheduler::exclusive),
    (49, scheduler::hierarchy),
    (50, scheduler::eplb),
    (51, scheduler::recompute_policy),
    (52, scheduler::local_prefill),
    (53, machines::interfaces),
    (54, machines::tls),
    (55, machines::links),
    (56, machines::pods),
    (57, machines::ranktable),
    (58, operation::hccn_conf),
    (59, machines::buffers),
    (60, machines::exec_timeout),
    (61, operation::proxies),
    (62, operation::warm_pairs),
    (63, machines::versions),
    (64, scheduler::eplb_pays),
    (65, scheduler::external_balancer),
    (66, operation::checkpoint_url),
    (67, operation::rendezvous),
    (68, operation::inherited),
    (69, operation::graph_interval),
    (70, operation::checkpoint_folder),
    (71, operation::caches),
    (72, operation::container_limits),
    (73, operation::http_workers),
    (74, operation::capacity),
    (75, operation::hybrid),
    (76, operation::compile_level),
    (77, operation::bridge),
    (78, operation::set_env),
    (79, operation::warmup),
];

/// Everything that the rules find.
pub fn lint(deployment: &EngineDeployment, plan: &EnginePlan, allowed: &[u16]) -> Findings {
    let (_, findings) = run(deployment, plan, allowed);
    Findings {
        file: deployment.name().to_owned(),
        findings,
    }
}

/// The findings that stop plan and render, as mistakes of the file.
///
/// # Errors
/// An E that is not permitted.
pub fn refuse(
    deployment: &EngineDeployment,
    plan: &EnginePlan,
    allowed: &[u16],
) -> Result<(), Diagnostics> {
    let (mistakes, _) = run(deployment, plan, allowed);
    if mistakes.is_empty() {
        Ok(())
    } else {
        Err(deployment.diagnostics(mistakes))
    }
}

fn run(
    deployment: &EngineDeployment,
    plan: &EnginePlan,
    allowed: &[u16],
) -> (Vec<Diagnostic>, Vec<Finding>) {
    let context = Context::new(deployment, plan);
    let mut mistakes = Vec::new();
    let mut findings = Vec::new();
    for (number, check) in CHECKS {
        let Some(rule) = rule(*number).filter(|rule| context.about(rule)) else {
            continue;
        };
        let mut sink = Sink {
            context: &context,
            rule,
            found: Vec::new(),
        };
        check(&context, &mut sink);
        for (diagnostic, mut finding) in sink.found {
            finding.permitted = allowed.contains(number);
            if finding.severity == Severity::E && !finding.permitted {
                mistakes.push(diagnostic);
            }
            findings.push(finding);
        }
    }
    findings.sort_by_key(|finding| (finding.severity, finding.rule, finding.line));
    (mistakes, findings)
}

impl Findings {
    /// Does one stop plan and render?
    pub fn stops(&self) -> bool {
        self.findings
            .iter()
            .any(|finding| finding.severity == Severity::E && !finding.permitted)
    }
}

impl fmt::Display for Severity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::E => "E",
            Self::W => "W",
            Self::I => "I",
        })
    }
}

impl fmt::Display for Findings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for finding in &self.findings {
            let permitted = if finding.permitted { " (allowed)" } else { "" };
            writeln!(
                f,
                "{}:{}: {} {}{permitted}: {}",
                self.file, finding.line, finding.severity, finding.rule, finding.found
            )?;
            writeln!(f, "    allowed: {}", finding.allowed)?;
            if let Some(nearest) = &finding.nearest {
                writeln!(f, "    nearest: {nearest}")?;
            }
        }
        let count = |severity| {
            let of = |finding: &&Finding| finding.severity == severity;
            self.findings.iter().filter(of).count()
        };
        writeln!(
            f,
            "{}: {} E, {} W, {} I",
            self.file,
            count(Severity::E),
            count(Severity::W),
            count(Severity::I)
        )
    }
}

impl fmt::Display for Rule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "rule {}: {}", self.number, self.title)?;
        writeln!(f, "severity {}", self.severity)?;
        for exception in &self.unless {
            let mut when = Vec::new();
            if let Some(connector) = &exception.connector {
                when.push(format!("with {connector}"));
            }
            if let Some(from) = &exception.from {
                when.push(format!("from {from} on"));
            }
            if let Some(until) = &exception.until {
                when.push(format!("before {until}"));
            }
            writeln!(f, "  {} {}", exception.severity, when.join(" "))?;
        }
        if !self.engines.is_empty() {
            writeln!(f, "engines  {}", self.engines.join(", "))?;
        }
        writeln!(f, "allowed  {}", self.allowed)?;
        writeln!(f, "source   {}", self.source)
    }
}

impl Exception {
    fn fits(&self, context: &Context<'_>) -> bool {
        let here = &context.version;
        self.connector
            .as_deref()
            .is_none_or(|name| context.plan.connector.as_deref() == Some(name))
            && self.from.as_ref().is_none_or(|from| *here >= version(from))
            && self
                .until
                .as_ref()
                .is_none_or(|until| *here < version(until))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_rule_has_a_text_and_a_check() {
        let texts: Vec<u16> = rules().iter().map(|rule| rule.number).collect();
        let checks: Vec<u16> = CHECKS.iter().map(|(number, _)| *number).collect();
        assert_eq!(texts, (1..=79).collect::<Vec<u16>>());
        assert_eq!(checks, texts);
    }
}
