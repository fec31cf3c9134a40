use crate::{Epoch, Role};
use serde::{Deserialize, Serialize};

/// What must be equal for KV or text to be exchanged, by part, so that a mismatch can be named.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Fingerprint {
    /// Hash over all parts, 32 hexadecimal digits.
    pub id: String,
    /// Hash of the model's config fields that matter to the forward pass.
    pub config: String,
    /// Hash of the weights' bytes.
    pub weights: String,
    /// Hash of the tokenizer and the chat template.
    pub tokenizer: String,
    /// `none` or the scheme.
    pub quantization: String,
    /// `bf16` or `f32`.
    pub kv_dtype: String,
    /// Tokens per block.
    pub block_size: u32,
    /// Version of the KV layout.
    pub kv_layout: u32,
    /// Instruction-set class, kernel revision, `exact` or `fast`.
    pub numerics: String,
    /// Is the MTP layer loaded (`--num-speculative-tokens` above 0)? Its KV is part of every block.
    #[serde(default)]
    pub mtp: bool,
}

impl Fingerprint {
    /// The parts with their names, so that two fingerprints can be compared part by part.
    pub fn parts(&self) -> [(&'static str, String); 9] {
        let drafts = if self.mtp { "above 0" } else { "0" };
        [
            ("num-speculative-tokens", drafts.to_owned()),
            ("config", self.config.clone()),
            ("weights", self.weights.clone()),
            ("tokenizer", self.tokenizer.clone()),
            ("quantization", self.quantization.clone()),
            ("kv_dtype", self.kv_dtype.clone()),
            ("block_size", self.block_size.to_string()),
            ("kv_layout", self.kv_layout.to_string()),
            ("numerics", self.numerics.clone()),
        ]
    }

    /// Parts in which two fingerprints differ: name, own value, other value. The weights of an MTP layer that only one
    /// side has loaded follow from that setting and are not named beside it.
    pub fn differences(&self, other: &Self) -> Vec<(&'static str, String, String)> {
        self.parts()
            .into_iter()
            .zip(other.parts())
            .filter(|((name, ours), (_, theirs))| {
                ours != theirs && !(*name == "weights" && self.mtp != other.mtp)
            })
            .map(|((name, ours), (_, theirs))| (name, ours, theirs))
            .collect()
    }
}

/// Limits that decide what a request may ask of an instance.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Limits {
    /// Input and output together, in tokens.
    pub max_model_len: u32,
    /// Output of one request, in tokens.
    pub max_output_tokens: u32,
    /// Sequences that run at the same time, per rank.
    pub max_num_seqs: u32,
    /// Tokens of one step, per rank.
    pub max_num_batched_tokens: u32,
}

/// Answer of `GET /twinfer/instance`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct InstanceCard {
    /// Name of the instance.
    pub name: String,
    /// Role.
    pub role: Role,
    /// Served model name.
    pub model: String,
    /// Fingerprint and its parts.
    pub fingerprint: Fingerprint,
    /// This incarnation.
    pub epoch: Epoch,
    /// Limits.
    pub limits: Limits,
    /// Tokens per KV block.
    pub block_size: u32,
    /// `host:port` of the KV channel; none for an instance that hands nothing over.
    pub kv_addr: Option<String>,
    /// Number of ranks.
    pub ranks: u32,
}

/// Counts of KV blocks of a rank.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct KvBlockCounts {
    /// Blocks of the pool.
    pub total: u32,
    /// In use by requests (held ones not counted).
    pub used: u32,
    /// Free, but still filled with a cached prefix.
    pub cached: u32,
    /// Kept for a decode instance.
    pub held: u32,
}

/// Load of one rank.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RankLoad {
    /// Prompt tokens not computed yet, of waiting and running requests.
    pub waiting_prefill_tokens: u64,
    /// Requests that have blocks.
    pub running: u32,
    /// Requests that have none yet.
    pub waiting: u32,
    /// KV blocks.
    pub kv_blocks: KvBlockCounts,
}

/// Answer of `GET /twinfer/load`: sums, and each rank.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LoadReport {
    /// Sums over the ranks.
    #[serde(flatten)]
    pub total: RankLoad,
    /// Each rank.
    pub ranks: Vec<RankLoad>,
}
