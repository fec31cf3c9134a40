use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

/// `kv_transfer_params` of a request or an answer: the fields of vLLM's pull connectors and ours.
/// Unknown fields pass through in `other`.
///
/// Router to prefill: `do_remote_decode: true`, every `remote_*` null. Prefill to router to decode:
/// `do_remote_prefill: true` and the handle.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct KvTransferParams {
    /// The receiver keeps the prompt's KV for a decode instance.
    #[serde(default)]
    pub do_remote_decode: bool,
    /// The receiver reads the prompt's KV from the instance named here.
    #[serde(default)]
    pub do_remote_prefill: bool,
    /// Name and epoch of the prefill instance, `<name>-<epoch>`.
    #[serde(default)]
    pub remote_engine_id: Option<String>,
    /// The prefill instance's own id of the request.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub remote_request_id: Option<String>,
    /// Blocks at the prefill instance. vLLM sends a list, or a list per KV-cache group.
    #[serde(default)]
    pub remote_block_ids: Option<Value>,
    /// Host of the KV channel.
    #[serde(default)]
    pub remote_host: Option<String>,
    /// Port of the KV channel.
    #[serde(default)]
    pub remote_port: Option<u16>,
    /// Tokens per block at the prefill instance.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub remote_block_size: Option<u32>,
    /// Prompt tokens whose KV the handle covers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub remote_num_tokens: Option<u32>,
    /// Prompt tokens that prefill found in its prefix cache.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub remote_prefill_cached_tokens: Option<u32>,
    /// The token that prefill sampled.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_token_id: Option<u32>,
    /// The prompt as prefill tokenised it; decode uses it and never renders the template again.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub prompt_token_ids: Option<Vec<u32>>,
    /// Everything else, unchanged.
    #[serde(flatten)]
    pub other: Map<String, Value>,
}

/// Body of `POST /twinfer/kv/release`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct KvRelease {
    /// `remote_request_id` of the handle.
    pub remote_request_id: String,
    /// Epoch of the prefill instance that made the handle.
    pub epoch: crate::Epoch,
}
