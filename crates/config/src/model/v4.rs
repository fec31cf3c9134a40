use super::fields::Fields;
use super::{Architecture, MAX_EXPERTS, MAX_LAYERS, ModelConfigError, Rope};
use serde_json::{Map, Value};

/// Engines that serve DeepSeek-V4.
pub const V4_ENGINES: &[&str] = &["vllm", "vllm-ascend"];

/// What one layer of DeepSeek-V4 attends to, beside its sliding window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum V4Layer {
    /// Nothing.
    Window,
    /// Compressed history of so many tokens per entry, all of it.
    Compressed(usize),
    /// Compressed history, the best entries of it, chosen by an indexer.
    Indexed(usize),
}

/// DeepSeek-V4 and V4.1, read for planning; the native engine does not run it.
#[derive(Clone, Debug, PartialEq)]
pub struct V4Config {
    /// Family.
    pub architecture: Architecture,
    /// Rows of embedding and head.
    pub vocab_size: usize,
    /// Width of a residual stream.
    pub hidden_size: usize,
    /// Residual streams.
    pub streams: usize,
    /// Query heads; they share one key, which is the value too.
    pub heads: usize,
    /// Width of a head and of the key.
    pub head_dim: usize,
    /// Part of it that rotates.
    pub rope_dim: usize,
    /// Width of the query's low-rank form.
    pub q_lora_rank: usize,
    /// Groups of the output's low-rank form.
    pub out_groups: usize,
    /// Its width.
    pub out_lora_rank: usize,
    /// Tokens of the sliding window.
    pub window: usize,
    /// Layers of the model proper.
    pub layers: Vec<V4Layer>,
    /// MTP layers.
    pub mtp_layers: usize,
    /// Indexer heads.
    pub index_heads: usize,
    /// Width of an indexer head.
    pub index_head_dim: usize,
    /// Entries that the indexer chooses.
    pub index_top_k: usize,
    /// Routed experts per layer.
    pub experts: usize,
    /// Routed experts per token.
    pub top_k: usize,
    /// Shared experts.
    pub shared: usize,
    /// Width inside an expert.
    pub intermediate: usize,
    /// Leading layers whose experts follow from the token's id.
    pub hash_layers: usize,
    /// Factor on the routed experts' weights.
    pub scale: f32,
    /// Longest sequence.
    pub context: usize,
    /// Positions.
    pub rope: Rope,
    /// Base of the positions of compressed layers.
    pub compress_rope_theta: f64,
    /// Values of the experts, such as `fp4`, if the file says.
    pub expert_dtype: Option<String>,
}

impl V4Config {
    /// `map` is the top level; V4.1 keeps the text model in `text_config`.
    pub(super) fn parse(
        map: &Map<String, Value>,
        architecture: Architecture,
    ) -> Result<Self, ModelConfigError> {
        let outer = Fields::new(map, "");
        let inner = outer.object_if("text_config")?;
        let f = match inner {
            Some(inner) => Fields::new(inner, "text_config."),
            None => outer,
        };
        let count = f.size("num_hidden_layers", MAX_LAYERS)?;
        let mtp_layers = f.count_or("num_nextn_predict_layers", 0, 16)?;
        let rope = Rope::parse(&f)?;
        Ok(Self {
            architecture,
            vocab_size: f.size("vocab_size", 1 << 24)?,
            hidden_size: f.size("hidden_size", 1 << 17)?,
            streams: f.size("hc_mult", 64)?,
            heads: f.size("num_attention_heads", 4096)?,
            head_dim: f.size("head_dim", 1 << 14)?,
            rope_dim: f.size("qk_rope_head_dim", 1 << 14)?,
            q_lora_rank: f.size("q_lora_rank", 1 << 16)?,
            out_groups: f.size("o_groups", 4096)?,
            out_lora_rank: f.size("o_lora_rank", 1 << 16)?,
            window: f.size("sliding_window", 1 << 20)?,
            layers: layers(&f, count, mtp_layers)?,
            mtp_layers,
            index_heads: f.size("index_n_heads", 4096)?,
            index_head_dim: f.size("index_head_dim", 1 << 14)?,
            index_top_k: f.size("index_topk", 1 << 20)?,
            experts: f.size("n_routed_experts", MAX_EXPERTS)?,
            top_k: f.size("num_experts_per_tok", 256)?,
            shared: f.count_or("n_shared_experts", 0, 256)?,
            intermediate: f.size("moe_intermediate_size", 1 << 18)?,
            hash_layers: f.count_or("num_hash_layers", 0, MAX_LAYERS)?,
            scale: f.positive("routed_scaling_factor")? as f32,
            context: rope.context(f.size_from("max_position_embeddings", 2, 1 << 30)?)?,
            compress_rope_theta: f.positive_if("compress_rope_theta")?.unwrap_or(rope.theta),
            rope,
            expert_dtype: f.text_if("expert_dtype")?,
        })
    }

    /// Values cached per token, without the state of windows and open compressions: for each layer its
    /// compressed entries, and the indexer's.
    pub fn kv_values_per_token(&self) -> f64 {
        self.layers
            .iter()
            .map(|layer| match layer {
                V4Layer::Window => 0.0,
                V4Layer::Compressed(ratio) => self.head_dim as f64 / *ratio as f64,
                V4Layer::Indexed(ratio) => {
                    (self.head_dim + self.index_head_dim) as f64 / *ratio as f64
                }
            })
            .sum()
    }
}

/// `compress_ratios`, one per layer, the MTP layers' behind them.
fn layers(
    f: &Fields<'_>,
    count: usize,
    mtp_layers: usize,
) -> Result<Vec<V4Layer>, ModelConfigError> {
    let allowed = format!(
        "a list of {count} whole numbers (and {mtp_layers} more for MTP layers): 0 or 1 for the window alone, 2 to 4 with an indexer, more without"
    );
    let bad = || f.bad_here("compress_ratios", &allowed);
    let list = f
        .get("compress_ratios")
        .and_then(Value::as_array)
        .ok_or_else(bad)?;
    if list.len() < count || list.len() > count + mtp_layers.max(16) {
        return Err(bad());
    }
    list.iter()
        .take(count)
        .map(|ratio| {
            let ratio = ratio
                .as_u64()
                .and_then(|ratio| usize::try_from(ratio).ok())
                .filter(|ratio| *ratio <= 1 << 16)
                .ok_or_else(bad)?;
            Ok(match ratio {
                0 | 1 => V4Layer::Window,
                2..=4 => V4Layer::Indexed(ratio),
                _ => V4Layer::Compressed(ratio),
            })
        })
        .collect()
}
