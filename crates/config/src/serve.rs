use crate::EnvironmentKeys;
use crate::flag::{MOST_SECONDS, body_bytes, count, port, port_in_use, seconds, tokens, whole};
use crate::ranges::{
    BLOCK_SIZE, DP, EPLB_INTERVAL, KV_LEASE, KV_TIMEOUT, MAX_BODY_BYTES, MAX_MODEL_LEN,
    MAX_NUM_BATCHED_TOKENS, MAX_NUM_SEQS, MAX_OUTPUT_TOKENS, MAX_WAITING, NUM_REDUNDANT_EXPERTS,
    NUM_SPECULATIVE_TOKENS, PREFILL_ANY_INTERVAL, PREFILL_CHUNK, PREFILL_LONGEST_WAIT, PREFILL_RUN,
    PREFILL_THRESHOLD_REQUESTS, PREFILL_THRESHOLD_TOKENS, THREADS,
};
use clap::{Args, ValueEnum};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::ops::RangeInclusive;
use std::path::PathBuf;

/// Compute and KV type of an instance.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum, Serialize, Deserialize, JsonSchema,
)]
#[serde(rename_all = "lowercase")]
pub enum Dtype {
    /// bf16 KV.
    #[default]
    Bf16,
    /// f32 throughout.
    F32,
}

/// What becomes of weights that the files hold as plain numbers.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum, Serialize, Deserialize, JsonSchema,
)]
#[serde(rename_all = "lowercase")]
pub enum Quantization {
    /// They stay what they are.
    #[default]
    None,
    /// Linear layers and head become int8, one scale per output; inputs one scale per token. MLA's
    /// kv_b_proj, routers and norms stay.
    W8a8,
}

/// How rows come to the ranks that have their experts. Outputs come back one by one either way.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum, Serialize, Deserialize, JsonSchema,
)]
#[serde(rename_all = "kebab-case")]
pub enum MoeComm {
    /// Each row goes to the ranks that have one of its experts.
    #[default]
    AllToAll,
    /// All rows go to all ranks.
    AllGather,
}

impl MoeComm {
    /// As it is typed.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::AllToAll => "all-to-all",
            Self::AllGather => "all-gather",
        }
    }
}

/// What a decode instance does when a handoff fails.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum, Serialize, Deserialize, JsonSchema,
)]
#[serde(rename_all = "lowercase")]
pub enum KvLoadFailurePolicy {
    /// The request ends with an error that names the reason.
    #[default]
    Fail,
    /// The prompt is computed here.
    Recompute,
}

/// Form of log lines.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum, Serialize, Deserialize, JsonSchema,
)]
#[serde(rename_all = "lowercase")]
pub enum LogFormat {
    /// One readable line per event.
    #[default]
    Text,
    /// One JSON object per event.
    Json,
}

/// One instance of the native engine: `twinfer serve MODEL`.
#[derive(Clone, Debug, PartialEq, Args, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct ServeConfig {
    /// Hugging Face model directory (config.json, safetensors, tokenizer.json), or a GGUF file.
    #[arg(value_name = "MODEL")]
    pub model: PathBuf,

    /// `both`: prefill and decode in this instance; `prefill`: compute prompts and keep their KV for
    /// a decode instance; `decode`: read KV from prefill instances and generate.
    #[arg(long, default_value = "both", value_parser = parse_role)]
    #[schemars(with = "String", extend("enum" = ["both", "prefill", "decode"]))]
    pub role: twinfer_protocol::Role,

    /// Revision of a model in the Hugging Face hub's cache: MODEL is then the repository's folder there
    /// (`models--OWNER--NAME`), and a branch, a tag or a commit of it is served. Other folders have none.
    #[arg(long)]
    pub model_revision: Option<String>,

    /// Model name that clients use; the directory's name if absent.
    #[arg(long)]
    pub served_model_name: Option<String>,

    /// Name of this instance in cards, logs and metrics; `<role>-<port>` if absent.
    #[arg(long)]
    pub name: Option<String>,

    /// Address to listen on for HTTP.
    #[arg(long, default_value = "127.0.0.1")]
    pub host: String,

    /// Port to listen on for HTTP; 0 picks a free one and prints it.
    #[arg(long, default_value_t = 8000, value_parser = port)]
    pub port: u16,

    /// Address to listen on for KV handoff; the HTTP address if absent, or 127.0.0.1 for role both
    /// without a peer key or on a wildcard. Anything but loopback needs a peer key.
    #[arg(long)]
    pub kv_host: Option<String>,

    /// Address that peers are told to dial for KV handoff; the listening address if absent. Needed
    /// when that one is a wildcard.
    #[arg(long)]
    pub kv_advertise_host: Option<String>,

    /// Port to listen on for KV handoff; 0 picks a free one. Of several ranks each listens on a port of its own: rank r on
    /// this port plus r, all of which must be free.
    #[arg(long, default_value_t = 0, value_parser = port)]
    pub kv_port: u16,

    /// Prefill instances whose KV a decode instance may read, as `host:port` of their KV channel,
    /// separated by commas. Absent: any peer on loopback, none elsewhere.
    #[arg(long, value_delimiter = ',')]
    #[serde(default)]
    pub pd_peers: Vec<String>,

    /// Seconds that a prompt's KV is kept for a decode instance, unless renewed.
    #[arg(long, default_value_t = 30, value_parser = count(KV_LEASE))]
    #[schemars(range(min = *KV_LEASE.start(), max = *KV_LEASE.end()))]
    pub kv_lease: u32,

    /// What a decode instance does when a handoff fails.
    #[arg(long, value_enum, default_value_t)]
    #[serde(default)]
    pub kv_load_failure_policy: KvLoadFailurePolicy,

    /// Seconds after which a handoff that makes no progress has failed.
    #[arg(long, default_value_t = 10, value_parser = count(KV_TIMEOUT))]
    #[schemars(range(min = *KV_TIMEOUT.start(), max = *KV_TIMEOUT.end()))]
    pub kv_timeout: u32,

    /// Compute and KV type.
    #[arg(long, value_enum, default_value_t)]
    #[serde(default)]
    pub dtype: Dtype,

    /// Quantise plain weights while loading. Checkpoints that are quantised already are served as their
    /// files say.
    #[arg(long, value_enum, default_value_t)]
    #[serde(default)]
    pub quantization: Quantization,

    /// Longest input and output together, in tokens; the model's own limit if absent.
    #[arg(long, value_parser = tokens(MAX_MODEL_LEN))]
    #[schemars(range(min = *MAX_MODEL_LEN.start()))]
    pub max_model_len: Option<u32>,

    /// Longest output of one request, in tokens; `max-model-len` if absent.
    #[arg(long, value_parser = tokens(MAX_OUTPUT_TOKENS))]
    #[schemars(range(min = *MAX_OUTPUT_TOKENS.start()))]
    pub max_output_tokens: Option<u32>,

    /// Sequences that run at the same time.
    #[arg(long, default_value_t = 32, value_parser = count(MAX_NUM_SEQS))]
    #[schemars(range(min = *MAX_NUM_SEQS.start(), max = *MAX_NUM_SEQS.end()))]
    pub max_num_seqs: u32,

    /// Tokens of one step: prompts longer than this are computed in chunks.
    #[arg(long, default_value_t = 512, value_parser = count(MAX_NUM_BATCHED_TOKENS))]
    #[schemars(range(min = *MAX_NUM_BATCHED_TOKENS.start(), max = *MAX_NUM_BATCHED_TOKENS.end()))]
    pub max_num_batched_tokens: u32,

    /// Requests that may wait; more are refused with 429.
    #[arg(long, default_value_t = 256, value_parser = count(MAX_WAITING))]
    #[schemars(range(min = *MAX_WAITING.start(), max = *MAX_WAITING.end()))]
    pub max_waiting: u32,

    /// Tokens per KV block.
    #[arg(long, default_value_t = 16, value_parser = count(BLOCK_SIZE))]
    #[schemars(range(min = *BLOCK_SIZE.start(), max = *BLOCK_SIZE.end()))]
    pub block_size: u32,

    /// Requests share the KV of equal prefixes, also of earlier requests; this is the default.
    #[arg(long, overrides_with = "no_enable_prefix_caching")]
    #[serde(default)]
    pub enable_prefix_caching: bool,

    /// Every request computes its own prompt; only choices of one request share it.
    #[arg(long, overrides_with = "enable_prefix_caching")]
    #[serde(default)]
    pub no_enable_prefix_caching: bool,

    /// Instances of this node that serve the same model, and say so too, share one copy of its packed weights. They must
    /// run as the same user and see each other's processes and the same /dev/shm, where only small files lie: the
    /// weights' size is not limited by it. Where that cannot be, weights are private and the log says why.
    #[arg(long)]
    #[serde(default)]
    pub share_weights: bool,

    /// Tokens that the model's MTP layer proposes per step, 0 to 5; more than one reuse the layer.
    #[arg(long, default_value_t = 0, value_parser = count(NUM_SPECULATIVE_TOKENS))]
    #[serde(default)]
    #[schemars(range(min = *NUM_SPECULATIVE_TOKENS.start(), max = *NUM_SPECULATIVE_TOKENS.end()))]
    pub num_speculative_tokens: u32,

    /// Propose fewer tokens where few were accepted, at least one.
    #[arg(long)]
    #[serde(default)]
    pub adaptive_draft_length: bool,

    /// Prompts are computed in every Nth step at most while other requests generate; 1: in any step.
    #[arg(long, default_value_t = 1, value_parser = count(PREFILL_ANY_INTERVAL))]
    #[serde(default = "one")]
    #[schemars(range(min = *PREFILL_ANY_INTERVAL.start(), max = *PREFILL_ANY_INTERVAL.end()))]
    pub prefill_any_interval: u32,

    /// Ranks: engines with their own scheduler and KV that step together, each a process with its share of the threads
    /// and of the experts. Limits of sequences and tokens are those of each rank.
    #[arg(long, alias = "data-parallel-size", default_value_t = 1, value_parser = count(DP))]
    #[serde(default = "one")]
    #[schemars(range(min = *DP.start(), max = *DP.end()))]
    pub dp: u32,

    /// Ranks on this node, the others being on further nodes, each with a `twinfer serve --headless`; all ranks if absent.
    #[arg(long, value_name = "RANKS", value_parser = count(DP))]
    #[serde(default)]
    #[schemars(range(min = *DP.start(), max = *DP.end()))]
    pub data_parallel_size_local: Option<u32>,

    /// With --headless: number of this node's first rank among all.
    #[arg(long, value_name = "RANK", value_parser = count(DP))]
    #[serde(default)]
    #[schemars(range(min = *DP.start(), max = *DP.end()))]
    pub data_parallel_start_rank: Option<u32>,

    /// With ranks on several nodes: the first node's address on the network that ranks use (MASTER_ADDR). There the
    /// other nodes find it; anything but loopback needs a peer key.
    #[arg(long, value_name = "ADDRESS")]
    #[serde(default)]
    pub data_parallel_address: Option<String>,

    /// With ranks on several nodes: port at that address where the other nodes find the first one.
    #[arg(long, value_name = "PORT", value_parser = port_in_use)]
    #[serde(default)]
    #[schemars(range(min = 1))]
    pub data_parallel_rpc_port: Option<u16>,

    /// Only ranks of an instance whose HTTP is on another node. This process ends with that one.
    #[arg(long, requires_all = ["data_parallel_size_local", "data_parallel_start_rank", "data_parallel_address", "data_parallel_rpc_port"])]
    #[serde(default)]
    pub headless: bool,

    /// With --headless: this node's address on the network that ranks use; the one from which it reaches the first node
    /// if absent.
    #[arg(long, value_name = "ADDRESS", requires = "headless")]
    #[serde(default)]
    pub rank_host: Option<std::net::IpAddr>,

    /// With several ranks: prompt tokens that a step of each rank takes beside generation; 0: prompts get steps of their
    /// own. 64 if absent.
    #[arg(long, value_parser = count(PREFILL_CHUNK))]
    #[serde(default)]
    pub prefill_chunk: Option<u32>,

    /// With several ranks and `prefill-chunk 0`: steps of prompts in a row, at most, while other requests generate; 1 if
    /// absent.
    #[arg(long, value_parser = count(PREFILL_RUN))]
    #[serde(default)]
    #[schemars(range(min = *PREFILL_RUN.start()))]
    pub prefill_run: Option<u32>,

    /// With several ranks: prompts, of all ranks together, that wait before they disturb generation; 0: their number does
    /// not matter, which is the default.
    #[arg(long, value_parser = count(PREFILL_THRESHOLD_REQUESTS))]
    #[serde(default)]
    pub prefill_threshold_requests: Option<u32>,

    /// As `prefill-threshold-requests`, in prompt tokens; what is reached first counts.
    #[arg(long, value_parser = whole)]
    #[serde(default)]
    #[schemars(range(max = *PREFILL_THRESHOLD_TOKENS.end()))]
    pub prefill_threshold_tokens: Option<u64>,

    /// Milliseconds after which prompts wait for no threshold any more; 300 if absent.
    #[arg(long, value_parser = count(PREFILL_LONGEST_WAIT))]
    #[serde(default)]
    pub prefill_longest_wait: Option<u32>,

    /// With several ranks: how rows come to the ranks that have their experts; `all-to-all` if absent.
    #[arg(long, value_enum)]
    #[serde(default)]
    pub moe_comm: Option<MoeComm>,

    /// With several ranks: steps after which experts may change their ranks, by how often each was chosen; never if
    /// absent. Answers do not depend on it.
    #[arg(long, value_parser = count(EPLB_INTERVAL))]
    #[serde(default)]
    #[schemars(range(min = *EPLB_INTERVAL.start()))]
    pub eplb_interval: Option<u32>,

    /// With several ranks: experts may change their ranks also after each step that computed prompts only.
    #[arg(long)]
    #[serde(default)]
    pub eplb_after_prefill: bool,

    /// With several ranks: seats for experts beside one for each, over all ranks: those chosen most often get more than
    /// one. The number of all seats is a multiple of the number of ranks. 0 if absent.
    #[arg(long, value_parser = count(NUM_REDUNDANT_EXPERTS))]
    #[serde(default)]
    #[schemars(range(min = *NUM_REDUNDANT_EXPERTS.start(), max = *NUM_REDUNDANT_EXPERTS.end()))]
    pub num_redundant_experts: Option<u32>,

    /// Memory for KV of each rank, such as `512MiB` or `4GiB`; if absent as much as `max-num-seqs` sequences of the
    /// greatest length need, but at most a quarter of what is available, over all ranks.
    #[arg(long)]
    pub kv_cache_memory: Option<String>,

    /// Compute threads, 1 to 1024; one per permitted core if absent.
    #[arg(long, value_parser = count(THREADS))]
    #[schemars(range(min = *THREADS.start(), max = *THREADS.end()))]
    pub threads: Option<u32>,

    /// Cores to run on, such as `0-3,8`; those permitted to the process if absent. Named cores are taken to be this
    /// process's own: its compute threads keep to one each and spin up to 20 microseconds for work before they park.
    #[arg(long)]
    pub cpus: Option<String>,

    /// Instruction set of the kernels: `avx512`, `avx2` or `portable`; else the environment variable
    /// TWINFER_ISA; else the fastest that the processor has. All give the same answers.
    #[arg(long, env = "TWINFER_ISA", hide_env = true)]
    pub isa: Option<String>,

    /// Seed of requests that bring none.
    #[arg(long, default_value_t = 0, value_parser = whole)]
    pub seed: u64,

    /// Largest request body, in bytes; less where a sixteenth of the available memory does not hold seven times as much.
    #[arg(long, default_value_t = 32 << 20, value_parser = body_bytes)]
    #[schemars(range(min = *MAX_BODY_BYTES.start(), max = *MAX_BODY_BYTES.end()))]
    pub max_body_bytes: u64,

    /// Seconds after SIGTERM in which arriving requests are still served, so that load balancers can
    /// see that readiness is gone.
    #[arg(long, default_value_t = 2.0, value_parser = seconds)]
    #[schemars(range(min = 0.0, max = MOST_SECONDS))]
    pub drain_settle: f64,

    /// Seconds after SIGTERM after which running requests are ended with an error.
    #[arg(long, default_value_t = 30.0, value_parser = seconds)]
    #[schemars(range(min = 0.0, max = MOST_SECONDS))]
    pub drain_timeout: f64,

    /// File of mode 0600 that holds the key clients must present; else the environment variable
    /// TWINFER_API_KEY; else clients need none.
    #[arg(long)]
    pub api_key_file: Option<PathBuf>,

    /// File of mode 0600 that holds the key peers must prove; else the environment variable
    /// TWINFER_PEER_KEY or OPENAI_API_KEY; else peers are accepted on loopback only.
    #[arg(long)]
    pub peer_key_file: Option<PathBuf>,

    /// Keys of the environment.
    #[arg(skip)]
    #[serde(skip)]
    pub environment_keys: EnvironmentKeys,

    /// With several ranks: folder for receipts, one JSON file for each failure, which names the rank that was lost, its last
    /// step and what that did. The log says so in any case.
    #[arg(long, value_name = "DIR")]
    #[serde(default)]
    pub receipts: Option<PathBuf>,

    /// Form of log lines.
    #[arg(long, value_enum, default_value_t)]
    #[serde(default)]
    pub log_format: LogFormat,
}

impl ServeConfig {
    /// Ranks on this node.
    pub fn ranks_here(&self) -> u32 {
        self.data_parallel_size_local.unwrap_or(self.dp)
    }

    /// The flags that are whole numbers, each with its value, if it has one, and what is allowed.
    pub fn numbers(
        &self,
    ) -> impl Iterator<Item = (&'static str, Option<u64>, RangeInclusive<u64>)> {
        let narrow = [
            ("max-model-len", self.max_model_len, MAX_MODEL_LEN),
            (
                "max-output-tokens",
                self.max_output_tokens,
                MAX_OUTPUT_TOKENS,
            ),
            ("max-num-seqs", Some(self.max_num_seqs), MAX_NUM_SEQS),
            (
                "max-num-batched-tokens",
                Some(self.max_num_batched_tokens),
                MAX_NUM_BATCHED_TOKENS,
            ),
            ("max-waiting", Some(self.max_waiting), MAX_WAITING),
            ("block-size", Some(self.block_size), BLOCK_SIZE),
            (
                "num-speculative-tokens",
                Some(self.num_speculative_tokens),
                NUM_SPECULATIVE_TOKENS,
            ),
            ("dp", Some(self.dp), DP),
            (
                "data-parallel-size-local",
                self.data_parallel_size_local,
                DP,
            ),
            (
                "data-parallel-start-rank",
                self.data_parallel_start_rank,
                DP,
            ),
            (
                "prefill-any-interval",
                Some(self.prefill_any_interval),
                PREFILL_ANY_INTERVAL,
            ),
            ("prefill-chunk", self.prefill_chunk, PREFILL_CHUNK),
            ("prefill-run", self.prefill_run, PREFILL_RUN),
            (
                "prefill-threshold-requests",
                self.prefill_threshold_requests,
                PREFILL_THRESHOLD_REQUESTS,
            ),
            (
                "prefill-longest-wait",
                self.prefill_longest_wait,
                PREFILL_LONGEST_WAIT,
            ),
            ("eplb-interval", self.eplb_interval, EPLB_INTERVAL),
            (
                "num-redundant-experts",
                self.num_redundant_experts,
                NUM_REDUNDANT_EXPERTS,
            ),
            ("kv-lease", Some(self.kv_lease), KV_LEASE),
            ("kv-timeout", Some(self.kv_timeout), KV_TIMEOUT),
            ("threads", self.threads, THREADS),
        ];
        let wide = narrow.map(|(flag, value, range)| {
            let range = u64::from(*range.start())..=u64::from(*range.end());
            (flag, value.map(u64::from), range)
        });
        wide.into_iter().chain([
            (
                "prefill-threshold-tokens",
                self.prefill_threshold_tokens,
                PREFILL_THRESHOLD_TOKENS,
            ),
            ("max-body-bytes", Some(self.max_body_bytes), MAX_BODY_BYTES),
        ])
    }

    /// Is the prefix cache on?
    pub fn prefix_caching(&self) -> bool {
        self.enable_prefix_caching || !self.no_enable_prefix_caching
    }
}

pub(crate) fn one() -> u32 {
    1
}

fn parse_role(text: &str) -> Result<twinfer_protocol::Role, String> {
    text.parse()
}
