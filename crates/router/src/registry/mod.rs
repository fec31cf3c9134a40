//! The instances: what they are, whether they can be used, how busy they are.

mod facts;
mod health;
mod probe;

pub(crate) use facts::Facts;
pub(crate) use health::{Health, Signal};
pub(crate) use probe::probe_all;

use crate::instances::InstanceSpec;
use crate::metrics::RouterMetrics;
use crate::policy::{Picker, Tried};
use arc_swap::{ArcSwap, ArcSwapOption};
use parking_lot::Mutex;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use tokio::sync::Notify;
use twinfer_config::Policy;
use twinfer_http::Gauge;
use twinfer_protocol::{ApiError, ErrorKind, Role};

/// Instances whose problems a message tells.
const MAX_TOLD: usize = 4;

/// Place of an instance in the registry.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct InstanceId(pub(crate) u32);

/// Prefill and decode instances that may be paired with each other.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Group {
    pub(crate) prefill: Vec<InstanceId>,
    pub(crate) decode: Vec<InstanceId>,
}

/// What can be used for one model now.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Pools {
    pub(crate) groups: Vec<Group>,
    /// Colocated instances.
    pub(crate) both: Vec<InstanceId>,
    /// Every decode instance, paired or not.
    pub(crate) decode: Vec<InstanceId>,
    /// All of them.
    pub(crate) any: Vec<InstanceId>,
    /// Tokens of input and output together that some pair takes; none if a member does not say.
    pub(crate) pair_limit: Option<u64>,
}

/// What can be used now, by model name.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Table {
    pub(crate) models: BTreeMap<String, Pools>,
}

/// One instance.
pub(crate) struct Instance {
    pub(crate) id: InstanceId,
    pub(crate) spec: InstanceSpec,
    /// None until it has told.
    pub(crate) facts: ArcSwapOption<Facts>,
    health: Mutex<Health>,
    /// Asks for a probe now.
    poke: Notify,
    in_flight: Gauge,
    up: Gauge,
}

/// All instances.
pub(crate) struct Registry {
    instances: Vec<Instance>,
    picker: Mutex<Picker>,
    table: ArcSwap<Table>,
    rebuilding: Mutex<Told>,
}

/// What the log has said of pairs.
#[derive(Default)]
struct Told {
    /// They exchange KV.
    pairs: BTreeSet<(InstanceId, InstanceId)>,
    /// They cannot, and why.
    apart: BTreeMap<(InstanceId, InstanceId), String>,
}

/// A request counted at an instance, until dropped.
pub(crate) struct LoadGuard {
    registry: Arc<Registry>,
    id: InstanceId,
}

impl InstanceId {
    pub(crate) fn index(self) -> usize {
        self.0 as usize
    }
}

impl Pools {
    pub(crate) fn has_pair(&self) -> bool {
        self.groups
            .iter()
            .any(|group| !group.prefill.is_empty() && !group.decode.is_empty())
    }
}

impl Instance {
    /// Its own name, or its address until it has told.
    pub(crate) fn name(&self) -> String {
        match &*self.facts.load() {
            Some(facts) => facts.name.clone(),
            None => self.spec.endpoint.host_port().to_string(),
        }
    }

    /// Tells the log what has changed.
    fn tell(&self, health: &Health) {
        let (instance, role) = (self.name(), self.spec.role);
        match health.problem() {
            None => tracing::info!(instance, %role, "instance is up"),
            Some(problem) if health.ever_up() => {
                tracing::warn!(instance, %role, problem, "instance is not used");
            }
            Some(problem) => tracing::info!(instance, %role, problem, "waiting for instance"),
        }
    }

    /// Why it is not used; none if it is.
    pub(crate) fn problem(&self) -> Option<String> {
        self.health.lock().problem().map(str::to_owned)
    }
}

impl Registry {
    pub(crate) fn new(specs: Vec<InstanceSpec>, policy: Policy, metrics: &RouterMetrics) -> Self {
        let instances: Vec<Instance> = (0u32..)
            .zip(specs)
            .map(|(id, spec)| {
                let (in_flight, up) = metrics.of_instance(&spec);
                Instance {
                    id: InstanceId(id),
                    spec,
                    facts: ArcSwapOption::empty(),
                    health: Mutex::new(Health::default()),
                    poke: Notify::new(),
                    in_flight,
                    up,
                }
            })
            .collect();
        Self {
            picker: Mutex::new(Picker::new(policy, instances.len())),
            instances,
            table: ArcSwap::default(),
            rebuilding: Mutex::default(),
        }
    }

    pub(crate) fn instances(&self) -> &[Instance] {
        &self.instances
    }

    pub(crate) fn get(&self, id: InstanceId) -> Option<&Instance> {
        self.instances.get(id.index())
    }

    pub(crate) fn table(&self) -> Arc<Table> {
        self.table.load_full()
    }

    /// Picks and counts in a compatible pair.
    pub(crate) fn pick_pair(
        self: &Arc<Self>,
        pools: &Pools,
        tried: &Tried,
    ) -> Option<(LoadGuard, LoadGuard)> {
        let (prefill, decode) = self.picker.lock().pair(pools, tried)?;
        Some((self.guard(prefill), self.guard(decode)))
    }

    /// Picks and counts in another decode instance for a prefill that is done.
    pub(crate) fn pick_decode(
        self: &Arc<Self>,
        pools: &Pools,
        prefill: InstanceId,
        tried: &Tried,
    ) -> Option<LoadGuard> {
        let decode = self.picker.lock().decode_for(pools, prefill, tried)?;
        Some(self.guard(decode))
    }

    /// Picks and counts in one instance of a list.
    pub(crate) fn pick_one(
        self: &Arc<Self>,
        from: &[InstanceId],
        not: &[InstanceId],
    ) -> Option<LoadGuard> {
        let id = self.picker.lock().one(from, not)?;
        Some(self.guard(id))
    }

    /// Takes what a request or a probe has seen of an instance.
    pub(crate) fn signal(&self, id: InstanceId, signal: Signal) {
        let Some(instance) = self.get(id) else { return };
        let poke = signal.wants_probe();
        let changed = {
            let mut health = instance.health.lock();
            let before = health.is_up();
            let told = health.on(signal);
            if told {
                instance.tell(&health);
            }
            before != health.is_up()
        };
        if changed {
            self.rebuild();
        }
        if poke {
            instance.poke.notify_one();
        }
    }

    /// Takes what an instance says of itself.
    pub(crate) fn learn(&self, id: InstanceId, facts: Facts) {
        let Some(instance) = self.get(id) else { return };
        let same = instance.facts.load().as_deref() == Some(&facts);
        if !same {
            instance.facts.store(Some(Arc::new(facts)));
            self.rebuild();
        }
    }

    /// The error for a model that is not in the table: unknown (404), or its instances are down (503).
    pub(crate) fn unknown_model(&self, model: &str) -> ApiError {
        let knows = |instance: &Instance| match &*instance.facts.load() {
            Some(facts) => facts.models.iter().any(|m| m.id == model),
            // It has not told yet: it may serve this model.
            None => true,
        };
        if self.instances.iter().any(knows) {
            return self.nothing_up(model);
        }
        let shown: String = model.chars().take(100).collect();
        ApiError::new(
            ErrorKind::ModelNotFound,
            format!(
                "model {shown:?} is not served here; there is {}",
                self.served()
            ),
        )
        .with_param("model")
    }

    /// Names of the models that instances serve, some of them if there are many.
    pub(crate) fn served(&self) -> String {
        let names: BTreeSet<String> = self
            .instances
            .iter()
            .filter_map(|instance| instance.facts.load_full())
            .flat_map(|facts| {
                facts
                    .models
                    .iter()
                    .map(|m| m.id.clone())
                    .collect::<Vec<_>>()
            })
            .collect();
        let shown = names.iter().take(MAX_TOLD).map(|name| format!("{name:?}"));
        shown.collect::<Vec<_>>().join(", ")
    }

    /// The error when no instance can serve a model that is known.
    pub(crate) fn nothing_up(&self, model: &str) -> ApiError {
        let shown: String = model.chars().take(100).collect();
        let message = format!(
            "no instance can serve model {shown:?} now: {}",
            self.state()
        );
        ApiError::new(ErrorKind::NoInstance, message)
    }

    /// How many instances of each role are up, and why others are not.
    pub(crate) fn state(&self) -> String {
        let mut parts = Vec::new();
        for role in [Role::Prefill, Role::Decode, Role::Both] {
            let of_role = || self.instances.iter().filter(|i| i.spec.role == role);
            let (all, up) = (
                of_role().count(),
                of_role().filter(|i| i.problem().is_none()).count(),
            );
            if all > 0 {
                parts.push(format!("{role} {up} of {all} up"));
            }
        }
        let problems = self
            .instances
            .iter()
            .filter_map(|i| i.problem().map(|p| format!("{}: {p}", i.name())));
        parts.extend(problems.take(MAX_TOLD));
        let apart = self.mismatches().into_values();
        parts.extend(apart.take(MAX_TOLD));
        parts.join("; ")
    }

    /// Pairs of instances that are up, serve one model and may not exchange KV, with the reason.
    fn mismatches(&self) -> BTreeMap<(InstanceId, InstanceId), String> {
        let up = |role: Role| {
            self.instances
                .iter()
                .filter(move |i| i.spec.role == role && i.problem().is_none())
                .filter_map(|i| Some((i, i.facts.load_full()?)))
        };
        up(Role::Prefill)
            .flat_map(|(prefill, ours)| {
                up(Role::Decode).filter_map(move |(decode, theirs)| {
                    let why = ours
                        .difference(&theirs)
                        .filter(|_| ours.same_model(&theirs))?;
                    let (p, d) = (prefill.name(), decode.name());
                    let text = format!("{p} and {d} cannot exchange KV: {why}");
                    Some(((prefill.id, decode.id), text))
                })
            })
            .collect()
    }

    fn guard(self: &Arc<Self>, id: InstanceId) -> LoadGuard {
        if let Some(instance) = self.get(id) {
            instance.in_flight.inc();
        }
        LoadGuard {
            registry: Arc::clone(self),
            id,
        }
    }

    fn rebuild(&self) {
        let mut told = self.rebuilding.lock();
        let mut table = Table::default();
        for instance in &self.instances {
            let up = instance.health.lock().is_up();
            instance.up.set(up.into());
            let facts = instance.facts.load_full();
            let (true, Some(facts)) = (up, facts) else {
                continue;
            };
            for model in &facts.models {
                table
                    .models
                    .entry(model.id.clone())
                    .or_default()
                    .add(instance, &facts, self);
            }
        }
        for pools in table.models.values_mut() {
            let limit = pools.groups.iter().map(|group| self.limit(group)).max();
            pools.pair_limit = limit.filter(|&limit| limit < u64::MAX);
            for group in &pools.groups {
                for &p in &group.prefill {
                    for &d in &group.decode {
                        if told.pairs.insert((p, d)) {
                            self.report_pair(p, d);
                        }
                    }
                }
            }
        }
        for (pair, text) in self.mismatches() {
            if told.apart.get(&pair) != Some(&text) {
                tracing::warn!("{text}");
                told.apart.insert(pair, text);
            }
        }
        self.table.store(Arc::new(table));
    }

    /// Tokens that the best pair of a group takes; the greatest number if a member does not say.
    fn limit(&self, group: &Group) -> u64 {
        let most = |ids: &[InstanceId]| {
            let limits = ids.iter().map(|&id| {
                let facts = self.get(id).and_then(|i| i.facts.load_full());
                facts.map_or(u64::MAX, |f| f.max_model_len().unwrap_or(u64::MAX))
            });
            limits.max().unwrap_or(0)
        };
        most(&group.prefill).min(most(&group.decode))
    }

    /// The limits that hold for requests through a pair, told once.
    fn report_pair(&self, prefill: InstanceId, decode: InstanceId) {
        let facts = |id| self.get(id).and_then(|instance| instance.facts.load_full());
        let (Some(p), Some(d)) = (facts(prefill), facts(decode)) else {
            return;
        };
        let effective = p.max_model_len().into_iter().chain(d.max_model_len()).min();
        tracing::info!(
            prefill = p.name,
            decode = d.name,
            max_model_len = effective,
            prefill_max_model_len = p.max_model_len(),
            decode_max_model_len = d.max_model_len(),
            max_output_tokens = d.limits.map(|limits| limits.max_output_tokens),
            "pair"
        );
    }
}

impl Pools {
    fn add(&mut self, instance: &Instance, facts: &Facts, registry: &Registry) {
        self.any.push(instance.id);
        match instance.spec.role {
            Role::Both => self.both.push(instance.id),
            Role::Prefill => self.group(facts, registry).prefill.push(instance.id),
            Role::Decode => {
                self.decode.push(instance.id);
                self.group(facts, registry).decode.push(instance.id);
            }
        }
    }

    /// The group of instances that may exchange KV with one of these facts.
    fn group(&mut self, facts: &Facts, registry: &Registry) -> &mut Group {
        let fits = |group: &Group| {
            let member = group.prefill.first().or(group.decode.first());
            let other = member
                .and_then(|&id| registry.get(id))
                .and_then(|i| i.facts.load_full());
            other.is_some_and(|other| other.may_exchange(facts))
        };
        let at = self.groups.iter().position(fits).unwrap_or_else(|| {
            self.groups.push(Group::default());
            self.groups.len() - 1
        });
        &mut self.groups[at]
    }
}

impl LoadGuard {
    pub(crate) fn id(&self) -> InstanceId {
        self.id
    }
}

impl Drop for LoadGuard {
    fn drop(&mut self) {
        self.registry.picker.lock().give_back(self.id);
        if let Some(instance) = self.registry.get(self.id) {
            instance.in_flight.dec();
        }
    }
}
