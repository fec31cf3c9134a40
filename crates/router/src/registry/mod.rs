//! The instances: what they are, whether they can be used, how busy they are.

mod facts;
mod health;
mod probe;

pub(crate) use facts::Facts;
use health::Health;
pub(crate) use health::Signal;
pub(crate) use probe::probe_all;

use crate::instances::InstanceSpec;
use crate::metrics::RouterMetrics;
use crate::policy::{PickSide, Picker, Policies, Wanted, Work};
use arc_swap::{ArcSwap, ArcSwapOption};
use parking_lot::Mutex;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use tokio::sync::Notify;
use tokio::time::Instant;
use tokio_util::sync::{CancellationToken, WaitForCancellationFutureOwned};
use tokio_util::task::TaskTracker;
use twinfer_http::Gauge;
use twinfer_protocol::{ApiError, ErrorKind, Fingerprint, Role};

/// Between two looks at the health of an instance that something waits for.
pub(crate) const LOOK: Duration = Duration::from_secs(1);
/// Between two looks whether an instance that drains has requests.
const DRAIN_LOOK: Duration = Duration::from_millis(50);
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

/// Who put an instance into the registry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Source {
    /// The command line.
    Flags,
    /// The instances file: it goes when its line does.
    File,
    /// The admin API.
    Admin,
}

impl Source {
    pub(crate) const fn as_str(self) -> &'static str {
        match self {
            Self::Flags => "flags",
            Self::File => "file",
            Self::Admin => "admin",
        }
    }
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
    pub(crate) source: Source,
    /// It gets no new requests, and goes when those that it has have ended.
    draining: AtomicBool,
    /// It is out of the registry: what still runs on it is broken off.
    gone: CancellationToken,
    in_flight: Gauge,
    up: Gauge,
}

/// All instances.
pub(crate) struct Registry {
    /// By id.
    instances: ArcSwap<Vec<Arc<Instance>>>,
    /// Number of the next instance; held while the list changes.
    next: Mutex<u32>,
    /// There is an instance that is not probed yet.
    added: Notify,
    drains: TaskTracker,
    metrics: Arc<RouterMetrics>,
    /// Times of health are since then.
    started: Instant,
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
    instance: Arc<Instance>,
    side: PickSide,
    work: Work,
    prefilled: bool,
}

impl InstanceId {
    #[cfg(test)]
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

impl Pools {
    /// The same, with some instances only.
    pub(crate) fn only(&self, keep: impl Fn(InstanceId) -> bool) -> Self {
        let some = |ids: &[InstanceId]| ids.iter().copied().filter(|&id| keep(id)).collect();
        let group = |group: &Group| Group {
            prefill: some(&group.prefill),
            decode: some(&group.decode),
        };
        Self {
            groups: self.groups.iter().map(group).collect(),
            both: some(&self.both),
            decode: some(&self.decode),
            any: some(&self.any),
            pair_limit: self.pair_limit,
        }
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

    /// Does it answer no probes, does nobody listen there, or is it out of the registry?
    pub(crate) fn is_lost(&self) -> bool {
        self.gone.is_cancelled() || self.health.lock().is_lost()
    }

    /// Ends when it is out of the registry.
    pub(crate) fn gone(&self) -> WaitForCancellationFutureOwned {
        self.gone.clone().cancelled_owned()
    }

    /// Does it get no new requests?
    pub(crate) fn is_draining(&self) -> bool {
        self.draining.load(Ordering::Acquire)
    }

    /// Ends when it is found lost while something waits for it.
    pub(crate) async fn lost(&self) {
        while !self.is_lost() {
            tokio::select! {
                () = tokio::time::sleep(LOOK) => {}
                () = self.gone.cancelled() => {}
            }
        }
    }

    /// Why it is not used; none if it is.
    pub(crate) fn problem(&self) -> Option<String> {
        if self.is_draining() {
            return Some("it drains".to_owned());
        }
        self.health.lock().problem().map(str::to_owned)
    }
}

impl Registry {
    pub(crate) fn new(policies: Policies, metrics: &Arc<RouterMetrics>) -> Self {
        Self {
            instances: ArcSwap::default(),
            next: Mutex::new(0),
            added: Notify::new(),
            drains: TaskTracker::new(),
            metrics: Arc::clone(metrics),
            started: Instant::now(),
            picker: Mutex::new(Picker::new(policies)),
            table: ArcSwap::default(),
            rebuilding: Mutex::default(),
        }
    }

    /// Adds an instance; it is used from its first good probe on. One that drains at the same address stays beside
    /// it until it is gone.
    ///
    /// # Errors
    /// `InvalidRequest`: there is one at this address.
    pub(crate) fn add(
        &self,
        spec: InstanceSpec,
        source: Source,
    ) -> Result<Arc<Instance>, ApiError> {
        let mut next = self.next.lock();
        let all = self.instances();
        let address = spec.endpoint.host_port();
        if let Some(other) = all
            .iter()
            .find(|i| i.spec.endpoint.host_port() == address && !i.is_draining())
        {
            let message = format!("{address} is there already, with role {}", other.spec.role);
            return Err(ApiError::invalid("url", message));
        }
        let id = InstanceId(*next);
        *next += 1;
        let (in_flight, up) = self.metrics.of_instance(&spec);
        let instance = Arc::new(Instance {
            id,
            spec,
            facts: ArcSwapOption::empty(),
            health: Mutex::new(Health::default()),
            poke: Notify::new(),
            source,
            draining: AtomicBool::new(false),
            gone: CancellationToken::new(),
            in_flight,
            up,
        });
        tracing::info!(instance = instance.name(), role = %instance.spec.role, ?source, "instance is added");
        self.instances.rcu(|all| {
            let mut all = Vec::clone(all);
            all.push(Arc::clone(&instance));
            all
        });
        self.added.notify_one();
        Ok(instance)
    }

    /// Gives an instance no further requests, and removes it when its last one has ended, or `limit` has passed:
    /// then those that still run go on elsewhere, or end with an error.
    pub(crate) fn drain(self: &Arc<Self>, instance: &Arc<Instance>, limit: Duration) {
        if instance.draining.swap(true, Ordering::AcqRel) {
            return;
        }
        tracing::info!(
            instance = instance.name(),
            seconds = limit.as_secs_f64(),
            "instance drains"
        );
        self.rebuild();
        let (registry, instance) = (Arc::clone(self), Arc::clone(instance));
        self.drains.spawn(async move {
            let idle = async {
                while registry.in_flight(instance.id) > 0 {
                    tokio::time::sleep(DRAIN_LOOK).await;
                }
            };
            let ended = tokio::time::timeout(limit, idle).await.is_ok();
            registry.remove(&instance);
            tracing::info!(
                instance = instance.name(),
                all_ended = ended,
                "instance is removed"
            );
        });
    }

    fn remove(&self, instance: &Instance) {
        let next = self.next.lock();
        self.instances.rcu(|all| {
            let others = all.iter().filter(|other| other.id != instance.id);
            others.cloned().collect::<Vec<_>>()
        });
        drop(next);
        instance.gone.cancel();
        let address = instance.spec.endpoint.host_port();
        let twin = self.instances().iter().any(|other| {
            other.spec.endpoint.host_port() == address && other.spec.role == instance.spec.role
        });
        if !twin {
            self.metrics.forget_instance(&instance.spec);
        }
        self.picker.lock().forget(instance.id);
        let mut told = self.rebuilding.lock();
        let other =
            |pair: &(InstanceId, InstanceId)| pair.0 != instance.id && pair.1 != instance.id;
        told.pairs.retain(other);
        told.apart.retain(|pair, _| other(pair));
        drop(told);
        self.rebuild();
    }

    /// Requests at an instance.
    pub(crate) fn in_flight(&self, id: InstanceId) -> u32 {
        self.picker.lock().in_flight(id)
    }

    /// Makes those of the file what the file says: adds what is new, drains what is gone.
    pub(crate) fn follow_file(self: &Arc<Self>, wanted: &[InstanceSpec], drain: Duration) {
        let of_file = |i: &&Arc<Instance>| i.source == Source::File && !i.is_draining();
        for instance in self.instances().iter().filter(of_file) {
            if !wanted.contains(&instance.spec) {
                self.drain(instance, drain);
            }
        }
        for spec in wanted {
            let known = self
                .instances()
                .iter()
                .any(|i| i.spec == *spec && !i.is_draining());
            if !known && let Err(error) = self.add(spec.clone(), Source::File) {
                tracing::warn!(%error, "an instance of the file is not added");
            }
        }
    }

    pub(crate) fn instances(&self) -> Arc<Vec<Arc<Instance>>> {
        self.instances.load_full()
    }

    pub(crate) fn get(&self, id: InstanceId) -> Option<Arc<Instance>> {
        let all = self.instances.load();
        let at = all.binary_search_by_key(&id, |instance| instance.id).ok()?;
        all.get(at).cloned()
    }

    /// What must be equal for the same text; none for an engine that does not tell.
    pub(crate) fn fingerprint(&self, id: InstanceId) -> Option<Fingerprint> {
        let facts = self.get(id)?.facts.load_full()?;
        facts.fingerprint.clone()
    }

    pub(crate) fn table(&self) -> Arc<Table> {
        self.table.load_full()
    }

    /// Picks and counts in a compatible pair.
    pub(crate) fn pick_pair(
        self: &Arc<Self>,
        pools: &Pools,
        wanted: Wanted<'_>,
    ) -> Option<(LoadGuard, LoadGuard)> {
        let (prefill, decode) = self.picker.lock().pair(pools, wanted)?;
        let prefill = self.guard(PickSide::Prefill, prefill, wanted.work);
        let decode = self.guard(PickSide::Decode, decode, wanted.work);
        Some((prefill?, decode?))
    }

    /// Picks and counts in another decode instance for a prefill that is done.
    pub(crate) fn pick_decode(
        self: &Arc<Self>,
        pools: &Pools,
        prefill: InstanceId,
        wanted: Wanted<'_>,
    ) -> Option<LoadGuard> {
        let decode = self.picker.lock().decode_for(pools, prefill, wanted)?;
        self.guard(PickSide::Decode, decode, wanted.work)
    }

    /// Picks and counts in a prefill instance of a list.
    pub(crate) fn pick_prefill(
        self: &Arc<Self>,
        from: &[InstanceId],
        wanted: Wanted<'_>,
    ) -> Option<LoadGuard> {
        let id = self.picker.lock().prefill(from, wanted)?;
        self.guard(PickSide::Prefill, id, wanted.work)
    }

    /// Picks and counts in one instance of a list.
    pub(crate) fn pick_one(
        self: &Arc<Self>,
        from: &[InstanceId],
        wanted: Wanted<'_>,
    ) -> Option<LoadGuard> {
        let id = self.picker.lock().one(from, wanted)?;
        self.guard(PickSide::Whole, id, wanted.work)
    }

    /// Does the policy look at the text of requests?
    pub(crate) fn wants_prefixes(&self) -> bool {
        self.picker.lock().wants_prefixes()
    }

    /// Takes what a request or a probe has seen of an instance.
    pub(crate) fn signal(&self, id: InstanceId, signal: Signal) {
        let Some(instance) = self.get(id) else { return };
        let poke = signal.wants_probe();
        let changed = {
            let mut health = instance.health.lock();
            let before = health.is_up();
            let told = health.on(signal, self.started.elapsed());
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
        if self.instances().iter().any(|instance| knows(instance)) {
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
            .instances()
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
        let instances = self.instances();
        let mut parts = Vec::new();
        for role in [Role::Prefill, Role::Decode, Role::Both] {
            let of_role = || instances.iter().filter(|i| i.spec.role == role);
            let (all, up) = (
                of_role().count(),
                of_role().filter(|i| i.problem().is_none()).count(),
            );
            if all > 0 {
                parts.push(format!("{role} {up} of {all} up"));
            }
        }
        if parts.is_empty() {
            parts.push("there are no instances".to_owned());
        }
        let problems = instances
            .iter()
            .filter_map(|i| i.problem().map(|p| format!("{}: {p}", i.name())));
        parts.extend(problems.take(MAX_TOLD));
        let apart = self.mismatches().into_values();
        parts.extend(apart.take(MAX_TOLD));
        parts.join("; ")
    }

    /// Pairs of instances that are up, serve one model and may not exchange KV, with the reason.
    fn mismatches(&self) -> BTreeMap<(InstanceId, InstanceId), String> {
        let instances = self.instances();
        let up = |role: Role| {
            instances
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

    /// None if the instance went away meanwhile.
    fn guard(self: &Arc<Self>, side: PickSide, id: InstanceId, work: &Work) -> Option<LoadGuard> {
        let Some(instance) = self.get(id) else {
            self.picker.lock().forget(id);
            return None;
        };
        instance.in_flight.inc();
        Some(LoadGuard {
            registry: Arc::clone(self),
            instance,
            side,
            work: Work {
                // Only to be counted out again.
                prefix: Vec::new(),
                ..*work
            },
            prefilled: false,
        })
    }

    fn rebuild(&self) {
        let mut told = self.rebuilding.lock();
        let mut table = Table::default();
        for instance in self.instances().iter() {
            let up = instance.health.lock().is_up() && !instance.is_draining();
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
        self.instance.id
    }

    pub(crate) fn instance(&self) -> &Arc<Instance> {
        &self.instance
    }

    /// The prompt is computed.
    pub(crate) fn prefilled(&mut self) {
        if !std::mem::replace(&mut self.prefilled, true) {
            let mut picker = self.registry.picker.lock();
            picker.prefilled(self.instance.id, &self.work);
        }
    }
}

impl Drop for LoadGuard {
    fn drop(&mut self) {
        let mut picker = self.registry.picker.lock();
        picker.give_back(self.side, self.instance.id, &self.work, self.prefilled);
        drop(picker);
        self.instance.in_flight.dec();
    }
}
