use crate::flag::{MOST_SECONDS, body_bytes, port, positive, seconds};
use crate::ranges::MAX_BODY_BYTES;
use crate::{EnvironmentKeys, LogFormat};
use clap::{Args, ValueEnum};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::path::PathBuf;

/// How an instance is picked.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum, Serialize, Deserialize, JsonSchema,
)]
#[serde(rename_all = "kebab-case")]
pub enum Policy {
    /// The pair with the least work in flight; ties go to the one picked longest ago.
    #[default]
    LeastLoad,
    /// Each in turn.
    #[value(alias = "round_robin")]
    RoundRobin,
    /// Of two picked by chance the one with less work.
    #[value(alias = "power_of_two")]
    PowerOfTwo,
    /// The one that computed the longest part of the prompt last, unless it has much more work than another.
    #[value(aliases = ["cache_aware", "prefix_aware"])]
    PrefixAffinity,
    /// As the public P/D proxies score: bytes of bodies.
    PublicProxy,
}

/// What becomes of requests while decode instances are up and no prefill instance is.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum, Serialize, Deserialize, JsonSchema,
)]
#[serde(rename_all = "kebab-case")]
pub enum WithoutPrefill {
    /// They are refused with 503.
    #[default]
    Refuse,
    /// A decode instance computes the prompt itself.
    Decode,
}

/// How prefill and decode instances of vLLM and vLLM-Ascend hand KV over. Ours tell it themselves.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum, Serialize, Deserialize, JsonSchema,
)]
#[serde(rename_all = "kebab-case")]
pub enum KvConnector {
    /// Prefill first: its handle is passed to decode. NixlConnector, MooncakeConnectorV1, LLMDataDistCMgrConnector.
    #[default]
    #[value(aliases = ["nixl", "NixlConnector", "MooncakeConnectorV1", "LLMDataDistCMgrConnector"])]
    Pull,
    /// Both at once, under a transfer id that the router makes: MooncakeConnector of vLLM.
    #[value(alias = "MooncakeConnector")]
    Mooncake,
    /// Decode first, which asks the router's /v1/metaserver for prefill: MooncakeLayerwiseConnector of vLLM-Ascend.
    #[value(alias = "MooncakeLayerwiseConnector")]
    MooncakeLayerwise,
}

/// The process in front of instances: `twinfer router`.
#[derive(Clone, Debug, PartialEq, Args, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, rename_all = "kebab-case", default)]
pub struct RouterConfig {
    /// Address to listen on.
    #[arg(long, default_value = "127.0.0.1")]
    pub host: String,

    /// Port to listen on; 0 picks a free one and prints it.
    #[arg(long, default_value_t = 8000, value_parser = port)]
    pub port: u16,

    /// A prefill instance's URL; repeat the flag or separate by commas.
    #[arg(long, value_delimiter = ',')]
    pub prefill: Vec<String>,

    /// A decode instance's URL; repeat the flag or separate by commas.
    #[arg(long, value_delimiter = ',')]
    pub decode: Vec<String>,

    /// URL of an instance that does both; repeat the flag or separate by commas.
    #[arg(long, visible_alias = "worker-urls", value_delimiter = ',', num_args = 1..)]
    pub worker: Vec<String>,

    /// File with one instance per line: `prefill URL`, `decode URL` or `both URL`. Followed while the router runs:
    /// instances whose line goes are drained.
    #[arg(long)]
    pub instances_file: Option<PathBuf>,

    /// Hosts of prefill instances, as the public P/D proxies name them; as many as ports.
    #[arg(long, num_args = 1..)]
    pub prefiller_hosts: Vec<String>,

    /// Ports of prefill instances.
    #[arg(long, num_args = 1..)]
    pub prefiller_ports: Vec<String>,

    /// Hosts of decode instances; as many as ports.
    #[arg(long, num_args = 1..)]
    pub decoder_hosts: Vec<String>,

    /// Ports of decode instances.
    #[arg(long, num_args = 1..)]
    pub decoder_ports: Vec<String>,

    /// How an instance is picked.
    #[arg(long, value_enum, default_value_t)]
    pub policy: Policy,

    /// How a prefill instance is picked, if otherwise.
    #[arg(long, value_enum)]
    pub prefill_policy: Option<Policy>,

    /// How a decode instance is picked, if otherwise; instances that do both are picked so too.
    #[arg(long, value_enum)]
    pub decode_policy: Option<Policy>,

    /// How instances of vLLM and vLLM-Ascend hand KV over.
    #[arg(long, value_enum, default_value_t)]
    pub kv_connector: KvConnector,

    /// Port of the bootstrap servers of prefill instances with connector mooncake; 0: their own ports.
    #[arg(long, default_value_t = 8998, value_parser = port)]
    pub mooncake_bootstrap_port: u16,

    /// Host under which decode instances with connector mooncake-layerwise reach this router; --host if absent.
    #[arg(long)]
    pub metaserver_host: Option<String>,

    /// What becomes of requests while decode instances are up and no prefill instance is.
    #[arg(long, value_enum, default_value_t)]
    pub without_prefill: WithoutPrefill,

    /// Seconds between probes of an instance.
    #[arg(long, default_value_t = 2.0)]
    pub health_interval: f64,

    /// Seconds to connect to an instance.
    #[arg(long, default_value_t = 2.0)]
    pub connect_timeout: f64,

    /// Seconds for the prefill leg, from sending to its whole answer.
    #[arg(long, default_value_t = 300.0)]
    pub prefill_timeout: f64,

    /// Seconds for the decode leg to send its first byte.
    #[arg(long, default_value_t = 300.0)]
    pub first_byte_timeout: f64,

    /// Seconds between two pieces of a stream.
    #[arg(long, default_value_t = 60.0)]
    pub idle_timeout: f64,

    /// Instances tried per leg before the client gets the error.
    #[arg(long, default_value_t = 3, value_parser = positive)]
    #[schemars(range(min = 1))]
    pub max_attempts: u32,

    /// Times that a stream whose instance dies goes on at another one of the same fingerprint; 0: it ends with an error.
    #[arg(long, default_value_t = 3)]
    pub max_resumes: u32,

    /// Requests in flight; more wait in the queue, or are refused with 429.
    #[arg(long, default_value_t = 1024, value_parser = positive)]
    #[schemars(range(min = 1))]
    pub max_inflight: u32,

    /// Requests that wait for one in flight to end, in turn by client key; more are refused with 429.
    #[arg(long, default_value_t = 0)]
    pub max_queued: u32,

    /// Seconds that a request waits in the queue at most.
    #[arg(long, default_value_t = 30.0, value_parser = seconds)]
    #[schemars(range(min = 0.0, max = MOST_SECONDS))]
    pub queue_timeout: f64,

    /// Largest request body, in bytes.
    #[arg(long, default_value_t = 32 << 20, value_parser = body_bytes)]
    #[schemars(range(min = *MAX_BODY_BYTES.start(), max = *MAX_BODY_BYTES.end()))]
    pub max_body_bytes: u64,

    /// Seconds after SIGTERM in which arriving requests are still served.
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

    /// File of mode 0600 with one `NAME KEY` per line: keys of several clients, who then get their turns in the queue
    /// each. Instead of --api-key-file.
    #[arg(long)]
    pub api_keys_file: Option<PathBuf>,

    /// Address of the admin listener.
    #[arg(long, default_value = "127.0.0.1")]
    pub admin_host: String,

    /// Port of the admin listener, where instances are listed, added and drained; 0 picks a free one. Without it there is
    /// none.
    #[arg(long, value_parser = port)]
    pub admin_port: Option<u16>,

    /// File of mode 0600 that holds the key of the admin listener; else the environment variable TWINFER_ADMIN_KEY; else
    /// it listens on loopback only.
    #[arg(long)]
    pub admin_key_file: Option<PathBuf>,

    /// File of mode 0600 that holds the key for instances; else the environment variable
    /// TWINFER_PEER_KEY or OPENAI_API_KEY.
    #[arg(long)]
    pub peer_key_file: Option<PathBuf>,

    /// Keys of the environment.
    #[arg(skip)]
    #[serde(skip)]
    pub environment_keys: EnvironmentKeys,

    /// Log a line per request: route, status, times, instances; never text.
    #[arg(long)]
    pub access_log: bool,

    /// Form of log lines.
    #[arg(long, value_enum, default_value_t)]
    pub log_format: LogFormat,
}

impl Default for RouterConfig {
    fn default() -> Self {
        Self {
            host: "127.0.0.1".to_owned(),
            port: 8000,
            prefill: Vec::new(),
            decode: Vec::new(),
            worker: Vec::new(),
            instances_file: None,
            prefiller_hosts: Vec::new(),
            prefiller_ports: Vec::new(),
            decoder_hosts: Vec::new(),
            decoder_ports: Vec::new(),
            policy: Policy::default(),
            prefill_policy: None,
            decode_policy: None,
            kv_connector: KvConnector::default(),
            mooncake_bootstrap_port: 8998,
            metaserver_host: None,
            without_prefill: WithoutPrefill::default(),
            health_interval: 2.0,
            connect_timeout: 2.0,
            prefill_timeout: 300.0,
            first_byte_timeout: 300.0,
            idle_timeout: 60.0,
            max_attempts: 3,
            max_resumes: 3,
            max_inflight: 1024,
            max_queued: 0,
            queue_timeout: 30.0,
            max_body_bytes: 32 << 20,
            drain_settle: 2.0,
            drain_timeout: 30.0,
            api_key_file: None,
            api_keys_file: None,
            admin_host: "127.0.0.1".to_owned(),
            admin_port: None,
            admin_key_file: None,
            peer_key_file: None,
            environment_keys: EnvironmentKeys::default(),
            access_log: false,
            log_format: LogFormat::default(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::{FromArgMatches, Parser};

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        config: RouterConfig,
    }

    #[test]
    fn defaults_of_flags_and_of_files_are_the_same() {
        let matches = <Line as clap::CommandFactory>::command()
            .try_get_matches_from(["router"])
            .expect("no flags");
        let line = Line::from_arg_matches(&matches).expect("defaults");
        assert_eq!(line.config, RouterConfig::default());
        let file: RouterConfig = serde_json::from_str("{}").expect("an empty file");
        assert_eq!(file, RouterConfig::default());
    }
}
