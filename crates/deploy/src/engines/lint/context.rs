//! What rules look at.

use crate::engines::file::{EngineFile, EngineNode};
use crate::engines::lint::{Rule, Severity};
use crate::engines::load::EngineDeployment;
use crate::engines::plan::{EngineInstancePlan, EnginePlan, Process};
use crate::engines::template::{plain, version};
use crate::source::Step;
use serde_json::{Map, Value};
use std::collections::BTreeMap;
use twinfer_config::ModelConfig;
use twinfer_protocol::Role;

/// An instance with its first process.
type Side<'d> = (&'d EngineInstancePlan, &'d Process);

/// A deployment, its plan, and indices into both.
pub(crate) struct Context<'d> {
    pub(crate) deployment: &'d EngineDeployment,
    pub(crate) plan: &'d EnginePlan,
    pub(crate) version: Vec<u32>,
    /// Processes of each instance.
    processes: Vec<Vec<&'d Process>>,
    nodes: BTreeMap<&'d str, (usize, &'d EngineNode)>,
}

impl<'d> Context<'d> {
    pub(crate) fn new(deployment: &'d EngineDeployment, plan: &'d EnginePlan) -> Self {
        let mut processes = vec![Vec::new(); plan.instances.len()];
        for process in &plan.processes {
            if let Some(list) = processes.get_mut(process.instance_index) {
                list.push(process);
            }
        }
        Self {
            deployment,
            plan,
            version: version(&plan.engine_version),
            processes,
            nodes: deployment
                .file
                .nodes
                .iter()
                .enumerate()
                .map(|(i, node)| (node.name.as_str(), (i, node)))
                .collect(),
        }
    }

    pub(crate) fn file(&self) -> &'d EngineFile {
        &self.deployment.file
    }

    pub(crate) fn model(&self) -> Option<&'d ModelConfig> {
        self.deployment.model.as_ref()
    }

    pub(crate) fn about(&self, rule: &Rule) -> bool {
        let template = &self.deployment.template;
        rule.engines.is_empty()
            || rule.engines.iter().any(|name| {
                *name == template.name
                    || Some(name) == template.extends.as_ref() && template.name != "omniinfer"
            })
    }

    pub(crate) fn severity(&self, rule: &Rule) -> Severity {
        let exception = rule.unless.iter().find(|exception| exception.fits(self));
        exception.map_or(rule.severity, |exception| exception.severity)
    }

    /// All instances with their processes.
    pub(crate) fn instances(
        &self,
    ) -> impl Iterator<Item = (&'d EngineInstancePlan, &[&'d Process])> {
        self.plan
            .instances
            .iter()
            .zip(self.processes.iter().map(Vec::as_slice))
    }

    /// Instances of a role, with their first process.
    pub(crate) fn of(
        &self,
        role: Role,
    ) -> impl Iterator<Item = (&'d EngineInstancePlan, &'d Process)> {
        self.instances()
            .filter(move |(instance, _)| instance.role == role)
            .filter_map(|(instance, processes)| Some((instance, *processes.first()?)))
    }

    /// Every instance with its first process.
    pub(crate) fn first(&self) -> impl Iterator<Item = (&'d EngineInstancePlan, &'d Process)> {
        self.instances()
            .filter_map(|(instance, processes)| Some((instance, *processes.first()?)))
    }

    /// The first prefill and the first decode instance.
    pub(crate) fn sides(&self) -> Option<(Side<'d>, Side<'d>)> {
        Some((
            self.of(Role::Prefill).next()?,
            self.of(Role::Decode).next()?,
        ))
    }

    pub(crate) fn node(&self, name: &str) -> Option<&'d EngineNode> {
        self.nodes.get(name).map(|(_, node)| *node)
    }

    /// Way to a key of an instance.
    pub(crate) fn at(&self, instance: &EngineInstancePlan, key: &str) -> Vec<Step> {
        vec![
            Step::from("instances"),
            Step::from(instance.group),
            Step::from(key),
        ]
    }

    /// Way to a key of a node.
    pub(crate) fn at_node(&self, name: &str, key: &str) -> Vec<Step> {
        let index = self.nodes.get(name).map_or(0, |(index, _)| *index);
        vec![Step::from("nodes"), Step::from(index), Step::from(key)]
    }

    pub(crate) fn connector(&self) -> &str {
        self.plan.connector.as_deref().unwrap_or_default()
    }

    pub(crate) fn since(&self, text: &str) -> bool {
        self.version >= version(text)
    }

    /// Does the model's attention keep one latent for all heads?
    pub(crate) fn mla(&self) -> bool {
        matches!(
            self.model().map(|model| &model.attention),
            Some(twinfer_config::model::AttentionConfig::Mla(_))
        )
    }
}

/// `additional-config` of a process, `scheduler_config` laid over it.
pub(crate) fn additional(process: &Process) -> Map<String, Value> {
    let mut map = process
        .object("additional-config")
        .cloned()
        .unwrap_or_default();
    if let Some(Value::Object(inner)) = map.get("scheduler_config").cloned() {
        map.extend(inner);
    }
    map
}

/// Is a switch of a map on? An object with `enabled` counts as its value.
pub(crate) fn on(map: &Map<String, Value>, key: &str) -> bool {
    match map.get(key) {
        Some(Value::Bool(value)) => *value,
        Some(Value::Number(value)) => value.as_f64() != Some(0.0),
        Some(Value::Object(inner)) => inner.get("enabled") != Some(&Value::Bool(false)),
        Some(Value::String(text)) => text == "true" || text == "1",
        _ => false,
    }
}

/// A setting as text, `absent` if there is none.
pub(crate) fn setting(process: &Process, key: &str) -> String {
    process
        .settings
        .get(key)
        .map_or_else(|| "absent".to_owned(), plain)
}

/// Is a flag on?
pub(crate) fn flag(process: &Process, key: &str) -> bool {
    process.settings.get(key) == Some(&Value::Bool(true))
}

/// The connector's settings of a process.
pub(crate) fn transfer(process: &Process) -> Option<&Map<String, Value>> {
    process.object("kv-transfer-config")
}

/// A value of a map as text.
pub(crate) fn text(map: &Map<String, Value>, key: &str) -> Option<String> {
    map.get(key).filter(|value| !value.is_null()).map(plain)
}
