//! The deployment file: its types. Their doc comments are the schema's descriptions and the
//! comments of the example file.

use schemars::{JsonSchema, Schema, SchemaGenerator};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;
use std::net::IpAddr;
use std::num::NonZeroU16;
use std::path::PathBuf;
use twinfer_config::{CoreSet, KvLoadFailurePolicy, RouterConfig, ServeConfig};
use twinfer_protocol::Role;

/// A deployment: the instances of one model, their handoff and the router in front of them.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct DeploymentFile {
    /// Name of the deployment, for logs and plans.
    #[serde(default = "default_name")]
    pub name: String,

    /// Engine of all instances. `native` is twinfer's own, for CPUs.
    #[serde(default)]
    pub engine: Engine,

    /// The model that all instances serve.
    pub model: ModelSpec,

    /// Hosts that instances run on; the machine that starts the deployment if absent.
    #[serde(default = "default_nodes")]
    #[schemars(length(min = 1))]
    pub nodes: Vec<NodeSpec>,

    /// Instances, in groups of equals. Beside the keys below a group takes every flag of
    /// `twinfer serve` by its name, for example `max-num-seqs: 16`.
    #[schemars(length(min = 1))]
    pub instances: Vec<InstanceSpec>,

    /// How KV moves from prefill to decode instances.
    #[serde(default)]
    pub handoff: HandoffSpec,

    /// The router in front of the instances. Beside the keys below it takes the flags of
    /// `twinfer router` by their names, for example `max-inflight: 256`.
    #[serde(default)]
    pub router: RouterSpec,
}

/// What computes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Engine {
    /// twinfer's own engine, for CPUs.
    #[default]
    Native,
}

/// The model.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct ModelSpec {
    /// Hugging Face model directory; a relative path counts from the folder of this file.
    pub path: PathBuf,

    /// Name that clients use; the directory's name if absent.
    #[serde(default)]
    pub name: Option<String>,
}

/// One host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct NodeSpec {
    /// Name, by which instances refer to the node.
    pub name: String,

    /// Address that its instances listen on and that others reach them at.
    #[serde(default = "default_host")]
    pub host: String,

    /// Address on the network that ranks of an instance on several nodes use; `host` if absent.
    #[serde(default)]
    #[schemars(with = "Option<String>")]
    #[schemars(example = "10.0.0.1")]
    pub rank_host: Option<IpAddr>,

    /// Port of the node's agent (`twinfer agent`), which starts what runs there; not needed where `up` runs.
    #[serde(default)]
    #[schemars(example = 8900)]
    pub agent: Option<NonZeroU16>,

    /// Cores that the deployment may use, such as `0-3,8`; all that are permitted if absent.
    #[serde(default)]
    #[schemars(example = "0-3")]
    pub cores: Option<CoreSet>,

    /// Instances may share cores when there are fewer cores than threads asked for. They get in
    /// each other's way then.
    #[serde(default)]
    pub share_cores: bool,
}

/// A group of equal instances.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
#[schemars(transform = add_serve_flags)]
pub struct InstanceSpec {
    /// Name of the instance, unique in the file; with a count of more than one its instances are
    /// called `NAME-0`, `NAME-1` and so on.
    pub name: String,

    /// `prefill` computes prompts and keeps their KV for decode instances; `decode` reads that KV and
    /// generates; `both` does all in one instance.
    #[schemars(with = "String", extend("enum" = ["both", "prefill", "decode"]))]
    pub role: Role,

    /// How many instances.
    #[serde(default = "one")]
    #[schemars(range(min = 1, max = 1024))]
    pub count: u32,

    /// Name of the node they run on; the first one if absent.
    #[serde(default)]
    pub node: Option<String>,

    /// Ranks of each node, for an instance of role `both` over several of them: `{a: 8, b: 8}`. Ranks are numbered in the
    /// order in which `nodes` lists the nodes; HTTP is on the first. On one node `dp` does it.
    #[serde(default)]
    pub ranks: Option<BTreeMap<String, u32>>,

    /// Compute threads of each, one core each; an equal share of the node's free cores if absent.
    #[serde(default)]
    #[schemars(range(min = 1, max = 4096))]
    #[schemars(example = 1)]
    pub threads: Option<u32>,

    /// Cores of the instance, such as `0-3`; with a count of more than one a list, one entry each. The
    /// plan picks them if absent.
    #[serde(default)]
    #[schemars(example = "0")]
    pub cpus: Option<OneOrList<CoreSet>>,

    /// HTTP port of the first instance, the others count on from it; or a list, one entry each. The
    /// plan picks free numbers from 8100 on if absent.
    #[serde(default)]
    pub port: Option<OneOrList<NonZeroU16>>,

    /// Port that a prefill instance hands KV over at, as `port`; from 8500 on if absent.
    #[serde(default)]
    pub kv_port: Option<OneOrList<NonZeroU16>>,

    /// Tensor parallelism. The native engine has none, its threads share the work: only 1.
    #[serde(default = "one")]
    #[schemars(range(min = 1, max = 1024))]
    pub tp: u32,

    /// Further flags of `twinfer serve`.
    #[serde(flatten)]
    pub flags: BTreeMap<String, Value>,
}

/// How KV moves.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, rename_all = "kebab-case", default)]
pub struct HandoffSpec {
    /// `pull`: a decode instance reads the KV from the prefill instance.
    pub connector: Connector,

    /// Seconds that a prompt's KV is kept for a decode instance, unless renewed.
    #[schemars(range(min = 1, max = 86400))]
    pub lease: u32,

    /// Seconds after which a handoff that makes no progress has failed.
    #[schemars(range(min = 1, max = 3600))]
    pub timeout: u32,

    /// What a decode instance does when a handoff failed: `fail` ends the request with an error that
    /// names the reason, `recompute` computes the prompt again.
    #[schemars(with = "String", extend("enum" = ["fail", "recompute"]))]
    pub policy: KvLoadFailurePolicy,
}

/// The code that does a handoff.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Connector {
    /// The decode instance reads the KV from the prefill instance.
    #[default]
    Pull,
}

/// The router.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case", default)]
#[schemars(transform = add_router_flags)]
pub struct RouterSpec {
    /// Name of the node it runs on; the first one if absent.
    pub node: Option<String>,

    /// Address to listen on; the node's if absent.
    #[schemars(example = "127.0.0.1")]
    pub host: Option<String>,

    /// Port to listen on.
    pub port: NonZeroU16,

    /// Further flags of `twinfer router`.
    #[serde(flatten)]
    pub flags: BTreeMap<String, Value>,
}

/// One value, or one per instance of a group.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum OneOrList<T> {
    /// One.
    One(T),
    /// One per instance.
    List(Vec<T>),
}

const DEFAULT_ROUTER_PORT: NonZeroU16 = NonZeroU16::new(8000).unwrap();

/// Flags of `twinfer serve` that a deployment file says by other keys, and these keys.
pub(crate) const SERVE_FLAGS_SAID_ELSEWHERE: &[(&str, &str)] = &[
    ("model", "`model: path`"),
    ("served-model-name", "`model: name`"),
    ("host", "the node's `host`"),
    ("data-parallel-size-local", "`ranks`"),
    ("data-parallel-start-rank", "`ranks`"),
    ("data-parallel-address", "the node's `rank-host`"),
    ("data-parallel-rpc-port", "the plan"),
    ("headless", "`ranks`"),
    ("rank-host", "the node's `rank-host`"),
    ("pd-peers", "the plan: all prefill instances"),
    ("kv-lease", "`handoff: lease`"),
    ("kv-timeout", "`handoff: timeout`"),
    ("kv-load-failure-policy", "`handoff: policy`"),
];

/// The same for `twinfer router`.
pub(crate) const ROUTER_FLAGS_SAID_ELSEWHERE: &[(&str, &str)] = &[
    ("prefill", "`instances`"),
    ("decode", "`instances`"),
    ("worker", "`instances`"),
    ("instances-file", "`instances`"),
    ("prefiller-hosts", "`instances`"),
    ("prefiller-ports", "`instances`"),
    ("decoder-hosts", "`instances`"),
    ("decoder-ports", "`instances`"),
];

fn default_name() -> String {
    "twinfer".to_owned()
}

fn default_host() -> String {
    "127.0.0.1".to_owned()
}

fn default_nodes() -> Vec<NodeSpec> {
    vec![NodeSpec {
        name: "local".to_owned(),
        host: default_host(),
        rank_host: None,
        agent: None,
        cores: None,
        share_cores: false,
    }]
}

const fn one() -> u32 {
    1
}

impl Default for HandoffSpec {
    fn default() -> Self {
        Self {
            connector: Connector::Pull,
            lease: 30,
            timeout: 10,
            policy: KvLoadFailurePolicy::Fail,
        }
    }
}

impl Default for RouterSpec {
    fn default() -> Self {
        Self {
            node: None,
            host: None,
            port: DEFAULT_ROUTER_PORT,
            flags: BTreeMap::new(),
        }
    }
}

impl<T: Clone> OneOrList<T> {
    /// The entries as written.
    pub fn to_vec(&self) -> Vec<T> {
        match self {
            Self::One(value) => vec![value.clone()],
            Self::List(values) => values.clone(),
        }
    }
}

impl<T: JsonSchema> JsonSchema for OneOrList<T> {
    fn schema_name() -> std::borrow::Cow<'static, str> {
        format!("OneOrList_{}", T::schema_name()).into()
    }

    fn json_schema(generator: &mut SchemaGenerator) -> Schema {
        let one = generator.subschema_for::<T>();
        schemars::json_schema!({ "anyOf": [one, { "type": "array", "items": one, "minItems": 1 }] })
    }
}

fn add_serve_flags(schema: &mut Schema) {
    add_flags(
        schema,
        &flag_properties::<ServeConfig>(),
        SERVE_FLAGS_SAID_ELSEWHERE,
    );
}

fn add_router_flags(schema: &mut Schema) {
    add_flags(
        schema,
        &flag_properties::<RouterConfig>(),
        ROUTER_FLAGS_SAID_ELSEWHERE,
    );
}

/// Properties of a config struct's schema.
fn flag_properties<T: JsonSchema>() -> Map<String, Value> {
    match inline_schema::<T>().get("properties") {
        Some(Value::Object(properties)) => properties.clone(),
        _ => Map::new(),
    }
}

/// The schema of `T`, without references.
pub(crate) fn inline_schema<T: JsonSchema>() -> Value {
    let settings = schemars::generate::SchemaSettings::draft2020_12()
        .with(|settings| settings.inline_subschemas = true);
    settings
        .into_generator()
        .into_root_schema_for::<T>()
        .to_value()
}

/// Adds the flags that the struct does not say by keys of its own, and forbids all else.
fn add_flags(schema: &mut Schema, flags: &Map<String, Value>, elsewhere: &[(&str, &str)]) {
    let object = schema.ensure_object();
    object.insert("additionalProperties".to_owned(), json!(false));
    let Some(Value::Object(own)) = object.get_mut("properties") else {
        return;
    };
    for (flag, property) in flags {
        if !own.contains_key(flag) && !elsewhere.iter().any(|(name, _)| name == flag) {
            own.insert(flag.clone(), property.clone());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_instance_takes_serve_flags_but_not_those_said_elsewhere() {
        let schema = inline_schema::<DeploymentFile>();
        let instance = &schema["properties"]["instances"]["items"];
        assert_eq!(instance["additionalProperties"], json!(false));
        let has = |key: &str| instance["properties"].get(key).is_some();
        assert!(has("max-num-seqs") && has("kv-cache-memory") && has("role"));
        for (flag, _) in SERVE_FLAGS_SAID_ELSEWHERE {
            assert!(!has(flag), "{flag}");
        }
        let known = flag_properties::<ServeConfig>();
        for (flag, _) in SERVE_FLAGS_SAID_ELSEWHERE {
            assert!(known.contains_key(*flag), "{flag} is no flag any more");
        }
        let known = flag_properties::<RouterConfig>();
        for (flag, _) in ROUTER_FLAGS_SAID_ELSEWHERE {
            assert!(known.contains_key(*flag), "{flag} is no flag any more");
        }
    }
}
