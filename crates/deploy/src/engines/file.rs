//! The deployment file of engines that are driven by a template: same sections as the native one, with
//! devices, data-parallel ranks on several nodes, containers, and flags that pass through.

use crate::file::inline_schema;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use twinfer_protocol::Role;

/// A deployment of an engine that a template describes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct EngineFile {
    /// Name of the deployment, for logs and plans.
    #[serde(default = "default_name")]
    pub name: String,

    /// Template: `vllm`, `vllm-ascend`, `deepinfer`, `omniinfer`, or the path of a template file
    /// (one that ends in `.yaml`), counted from the folder of this file.
    pub engine: String,

    /// Version of the engine, such as `0.20.2`; rules and flags depend on it. The template's own if absent.
    #[serde(default)]
    pub engine_version: Option<String>,

    /// Options that the template names, such as the path of its Python.
    #[serde(default)]
    pub engine_options: Map<String, Value>,

    /// The model that all instances serve.
    pub model: EngineModel,

    /// Hosts.
    #[schemars(length(min = 1))]
    pub nodes: Vec<EngineNode>,

    /// Environment of every instance.
    #[serde(default)]
    pub environment: Map<String, Value>,

    /// Flags of every instance; those of an instance win.
    #[serde(default)]
    pub flags: Map<String, Value>,

    /// Instances, in groups of equals. Keys that are not listed are flags of the engine and pass through.
    #[schemars(length(min = 1))]
    pub instances: Vec<EngineInstance>,

    /// How KV moves from prefill to decode instances.
    #[serde(default)]
    pub handoff: EngineHandoff,

    /// The router in front of the instances.
    #[serde(default)]
    pub router: EngineRouter,

    /// Container that every node's processes run in; none if absent.
    #[serde(default)]
    pub container: Option<Container>,

    /// Requests that are sent before a deployment counts as warm.
    #[serde(default)]
    pub warmup: Option<Warmup>,

    /// Load that `render` writes benchmark configurations for.
    #[serde(default)]
    pub benchmark: Option<Benchmark>,

    /// Rank table of LLMDataDist: its path on the nodes.
    #[serde(default)]
    pub ranktable: Option<String>,

    /// Variables that hold secrets; taken from the environment when a process starts.
    #[serde(default)]
    pub secrets: Vec<String>,

    /// Scripts that set the engine's environment, sourced before it starts.
    #[serde(default)]
    pub source: Vec<String>,

    /// Writable folder of compile caches, an own one per instance inside it.
    #[serde(default)]
    pub caches: Option<String>,
}

/// The model.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct EngineModel {
    /// Directory of the model on every node.
    pub path: String,

    /// Name that clients use; the directory's name if absent.
    #[serde(default)]
    pub name: Option<String>,

    /// Revision of the weights.
    #[serde(default)]
    pub revision: Option<String>,

    /// The model's config.json, for memory and shapes: a path counted from the folder of this file, or the
    /// object itself.
    #[serde(default)]
    pub config: Option<Value>,

    /// Quantisation of the checkpoint, such as `w8a8`; `none` for bf16.
    #[serde(default)]
    pub weights: Option<String>,
}

/// Generation of a node's devices.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema,
)]
pub enum Kind {
    /// Atlas A2: one chip per card, RoCE between nodes.
    A2,
    /// Atlas A3: two chips per card, HCCS inside a pod.
    A3,
    /// A GPU.
    GPU,
    /// No devices.
    CPU,
}

/// One host.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct EngineNode {
    /// Name, by which instances refer to the node.
    pub name: String,

    /// Address that others reach it at; it may stand in the private file instead.
    #[serde(default)]
    pub host: String,

    /// Network interface that has this address.
    #[serde(default)]
    pub nic: Option<String>,

    /// Generation of its devices.
    #[serde(default)]
    pub kind: Option<Kind>,

    /// Number of devices (chips).
    #[serde(default)]
    #[schemars(range(min = 0, max = 1024))]
    pub devices: u32,

    /// Memory of a device in GiB.
    #[serde(default)]
    pub device_memory: Option<f64>,

    /// Physical pod that it stands in, as its operator states it. Tools alone cannot tell.
    #[serde(default)]
    pub pod: Option<String>,

    /// Cores; only the native engine reads it.
    #[serde(default)]
    pub cores: Option<Value>,

    /// Sharing of cores; only the native engine reads it.
    #[serde(default)]
    pub share_cores: bool,

    /// Environment of its processes.
    #[serde(default)]
    pub environment: Map<String, Value>,

    /// What a check recorded of the node.
    #[serde(default)]
    pub facts: NodeFacts,
}

/// What a check recorded of a node; rules about machines read it, and say nothing where it is absent.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, rename_all = "kebab-case", default)]
pub struct NodeFacts {
    /// Addresses by interface.
    pub interfaces: Option<Map<String, Value>>,
    /// TLS switch of each device.
    pub tls: Option<Vec<u32>>,
    /// Link state of each device, `UP` or `DOWN`.
    pub links: Option<Vec<String>>,
    /// Address of each device.
    pub device_addresses: Option<Vec<String>>,
    /// Super pod id of each device (A3).
    pub super_pod_ids: Option<Vec<String>>,
    /// SDID of each device (A3).
    pub super_device_ids: Option<Vec<String>>,
    /// Versions by package: `driver`, `cann`, `torch-npu`, `vllm`, `vllm-ascend`.
    pub versions: Option<Map<String, Value>>,
    /// `net.ipv4.ip_local_port_range`: first and last.
    pub ephemeral_ports: Option<[u16; 2]>,
    /// `net.ipv4.ip_local_reserved_ports`.
    pub reserved_ports: Option<String>,
}

/// How an instance answers HTTP.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Api {
    /// One API server for all ranks.
    One,
    /// One process and API server per rank.
    PerRank,
}

/// How steps are captured as graphs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Graph {
    /// Eager.
    None,
    /// Decode steps only.
    Decode,
}

/// Drafts.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct Speculative {
    /// Method, such as `deepseek_mtp`.
    pub method: String,
    /// Drafts per step.
    #[schemars(range(min = 1, max = 64))]
    pub tokens: u32,
}

/// A group of equal instances.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub struct EngineInstance {
    /// Name, unique in the file; with a count of more than one its instances are called `NAME-0`, `NAME-1`.
    pub name: String,

    /// `prefill`, `decode` or `both`.
    #[schemars(with = "String", extend("enum" = ["both", "prefill", "decode"]))]
    pub role: Role,

    /// How many instances, each on the node given or, with a list in `nodes`, on one of these each.
    #[serde(default = "one")]
    #[schemars(range(min = 1, max = 1024))]
    pub count: u32,

    /// Node of all its ranks; the first one if absent.
    #[serde(default)]
    pub node: Option<String>,

    /// One node for each instance of the group.
    #[serde(default)]
    pub nodes: Option<Vec<String>>,

    /// Data-parallel ranks by node, in the order of their numbers: `{node-a: 16, node-b: 16}`.
    #[serde(default)]
    pub ranks: Option<Map<String, Value>>,

    /// Number of the first rank on a node, where it is not the sum of those before.
    #[serde(default)]
    pub rank_start: Map<String, Value>,

    /// Data-parallel size; the sum of `ranks` if absent.
    #[serde(default)]
    #[schemars(range(min = 1, max = 65536))]
    pub dp: Option<u32>,

    /// Tensor parallelism.
    #[serde(default = "one")]
    #[schemars(range(min = 1, max = 1024))]
    pub tp: u32,

    /// Pipeline parallelism.
    #[serde(default = "one")]
    #[schemars(range(min = 1, max = 1024))]
    pub pp: u32,

    /// Context parallelism of prefill.
    #[serde(default = "one")]
    #[schemars(range(min = 1, max = 1024))]
    pub pcp: u32,

    /// One API server, or one per rank; the template's choice if absent.
    #[serde(default)]
    pub api: Option<Api>,

    /// First device on each node; the first that no earlier instance uses if absent.
    #[serde(default)]
    pub first_device: Option<u32>,

    /// Address to listen on.
    #[serde(default)]
    pub listen: Option<String>,

    /// HTTP port, of the first rank with `api: per-rank`; the others count on.
    #[serde(default)]
    pub port: Option<u16>,

    /// Port of the ranks' rendezvous.
    #[serde(default)]
    pub rpc_port: Option<u16>,

    /// Address of the ranks' rendezvous; that of the node of rank 0 if absent.
    #[serde(default)]
    pub rpc_address: Option<String>,

    /// First port of the handoff.
    #[serde(default)]
    pub kv_port: Option<u16>,

    /// Engine id of the handoff.
    #[serde(default)]
    pub engine_id: Option<String>,

    /// Drafts.
    #[serde(default)]
    pub speculative: Option<Speculative>,

    /// Graphs.
    #[serde(default)]
    pub graph: Option<Graph>,

    /// Environment.
    #[serde(default)]
    pub environment: Map<String, Value>,

    /// Variables that hold secrets, beside those of the file.
    #[serde(default)]
    pub secrets: Vec<String>,

    /// Keys of this list that differ on a node.
    #[serde(default)]
    pub per_node: Map<String, Value>,

    /// Compute threads; only the native engine reads it.
    #[serde(default)]
    pub threads: Option<u32>,

    /// Cores; only the native engine reads it.
    #[serde(default)]
    pub cpus: Option<Value>,

    /// Flags of the engine.
    #[serde(flatten)]
    pub flags: Map<String, Value>,
}

/// How KV moves.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, rename_all = "kebab-case", default)]
pub struct EngineHandoff {
    /// Connector by the engine's name; the template's own if absent.
    pub connector: Option<String>,
    /// Merged into the connector's configuration of every instance.
    pub config: Map<String, Value>,
    /// Directory that prefill and decode share, for the connector `checkpoint`.
    pub checkpoint_dir: Option<String>,
    /// Mode of that directory.
    pub checkpoint_mode: Option<String>,
    /// URL of prefill that decode asks, for the connector `checkpoint`; the plan's if absent.
    pub prefill_url: Option<String>,
    /// Mooncake's version.
    pub mooncake_version: Option<String>,
    /// Seconds that KV is kept; only the native engine reads it.
    pub lease: Option<u32>,
    /// Seconds without progress; only the native engine reads it.
    pub timeout: Option<u32>,
    /// After a failed handoff `fail` or `recompute`.
    pub policy: Option<String>,
}

/// What routes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum RouterProgram {
    /// `twinfer router`.
    #[default]
    Twinfer,
    /// vllm-ascend's `load_balance_proxy_server_example.py`: prefill first.
    Proxy,
    /// vllm-ascend's `load_balance_proxy_layerwise_server_example.py`: decode first.
    ProxyLayerwise,
    /// None: clients ask the one instance.
    None,
}

/// The router.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case", default)]
pub struct EngineRouter {
    /// Program.
    pub program: RouterProgram,
    /// Name of the node it runs on; the first one if absent.
    pub node: Option<String>,
    /// Address to listen on; the node's if absent.
    pub host: Option<String>,
    /// Port to listen on; 8000 if absent.
    pub port: Option<u16>,
    /// Folder of the proxy's script on the node.
    pub folder: Option<String>,
    /// HTTP proxy variables of the nodes that must not reach its calls.
    pub http_proxy: Option<String>,
    /// Hosts that those variables except.
    pub no_proxy: Option<String>,
    /// Prefill endpoints, where they are not those of the plan: `host:port`.
    pub prefill: Option<Vec<String>>,
    /// Decode endpoints, where they are not those of the plan: `host:port`.
    pub decode: Option<Vec<String>>,
    /// Further flags.
    #[serde(flatten)]
    pub flags: Map<String, Value>,
}

/// A container.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct Container {
    /// Image.
    pub image: String,
    /// `host`, or `bridge` with the ports of the plan published.
    #[serde(default = "host_network")]
    pub network: String,
    /// Ports that a bridge network publishes.
    #[serde(default)]
    pub publish: Vec<String>,
    /// Shared memory, such as `500g`.
    #[serde(default)]
    pub shm: Option<String>,
    /// Most main memory, such as `900g`.
    #[serde(default)]
    pub memory: Option<String>,
    /// Most locked memory, such as `-1`.
    #[serde(default)]
    pub memlock: Option<String>,
    /// Most processes.
    #[serde(default)]
    pub pids: Option<u32>,
    /// All devices and capabilities of the host.
    #[serde(default)]
    pub privileged: bool,
    /// Restart policy.
    #[serde(default = "no")]
    pub restart: String,
    /// Further devices beside the accelerators.
    #[serde(default)]
    pub devices: Vec<String>,
    /// Mounts, `FROM:TO` or `FROM:TO:ro`.
    #[serde(default)]
    pub mounts: Vec<String>,
}

/// Requests before anything is measured.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct Warmup {
    /// Requests for each pair of prefill and decode.
    #[serde(default = "one")]
    pub requests: u32,
    /// File of the engine's own warm-up workload.
    #[serde(default)]
    pub workload: Option<String>,
}

/// A load.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct Benchmark {
    /// Name of the model that requests carry; the served one if absent.
    #[serde(default)]
    pub model: Option<String>,
    /// Host that is asked; the router's if absent.
    #[serde(default)]
    pub host: Option<String>,
    /// Port that is asked; the router's if absent.
    #[serde(default)]
    pub port: Option<u16>,
    /// Tokens of a prompt.
    pub input: u32,
    /// Tokens of an answer.
    pub output: u32,
    /// Number of requests.
    pub requests: u32,
    /// Requests at the same time.
    pub concurrency: u32,
    /// Requests per second; unlimited if absent.
    #[serde(default)]
    pub rate: Option<f64>,
}

/// The JSON schema of such files.
pub(crate) fn schema() -> Value {
    inline_schema::<EngineFile>()
}

fn default_name() -> String {
    "twinfer".to_owned()
}

const fn one() -> u32 {
    1
}

fn host_network() -> String {
    "host".to_owned()
}

fn no() -> String {
    "no".to_owned()
}
