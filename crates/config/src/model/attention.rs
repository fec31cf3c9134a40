use super::fields::Fields;
use super::{Architecture, ModelConfigError};

/// Attention of a model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AttentionConfig {
    /// Grouped queries over keys and values of their own.
    Gqa(GqaConfig),
    /// One latent for all heads.
    Mla(MlaConfig),
}

/// Grouped-query attention (Ainslie et al. 2023, arXiv 2305.13245): query head `h` uses key/value
/// head `h / (heads / kv_heads)`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GqaConfig {
    /// Query heads.
    pub heads: usize,
    /// Key/value heads, a divisor of `heads`.
    pub kv_heads: usize,
    /// Width of a head, even; need not be `hidden_size / heads`.
    pub head_dim: usize,
    /// Query, key and value projections have a bias.
    pub qkv_bias: bool,
    /// The output projection has a bias.
    pub out_bias: bool,
    /// Every query and key head is normed before it rotates.
    pub head_norms: bool,
}

/// Multi-head latent attention (DeepSeek-V2 report, section 2.1).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MlaConfig {
    /// Query heads.
    pub heads: usize,
    /// Width of the query's low-rank form; none: one plain query projection.
    pub q_lora_rank: Option<usize>,
    /// Width of the latent that is cached.
    pub kv_lora_rank: usize,
    /// Part of a query head without position.
    pub qk_nope_head_dim: usize,
    /// Part of a query head, and width of the shared key, that rotates with the position.
    pub qk_rope_head_dim: usize,
    /// Width of a head's output.
    pub v_head_dim: usize,
}

impl AttentionConfig {
    pub(super) fn parse(
        f: &Fields<'_>,
        architecture: Architecture,
        hidden_size: usize,
    ) -> Result<Self, ModelConfigError> {
        if architecture.is_mla() {
            MlaConfig::parse(f).map(Self::Mla)
        } else {
            GqaConfig::parse(f, architecture, hidden_size).map(Self::Gqa)
        }
    }

    /// Query heads.
    pub fn heads(&self) -> usize {
        match self {
            Self::Gqa(gqa) => gqa.heads,
            Self::Mla(mla) => mla.heads,
        }
    }

    /// Width of the output projection's input.
    pub(super) fn out_width(&self) -> usize {
        match self {
            Self::Gqa(gqa) => gqa.heads * gqa.head_dim,
            Self::Mla(mla) => mla.heads * mla.v_head_dim,
        }
    }

    /// Values of a token's buffers in a step.
    pub(super) fn workspace_values(&self) -> usize {
        match self {
            Self::Gqa(gqa) => (3 * gqa.heads + 4 * gqa.kv_heads + 1) * gqa.head_dim,
            Self::Mla(mla) => {
                mla.heads
                    * (mla.qk_nope_head_dim
                        + mla.qk_rope_head_dim
                        + 2 * mla.kv_lora_rank
                        + mla.v_head_dim)
                    + 2 * mla.q_lora_rank.unwrap_or(0)
                    + mla.kv_lora_rank
                    + 2 * mla.qk_rope_head_dim
            }
        }
    }

    pub(super) fn identity(&self) -> String {
        match self {
            Self::Gqa(gqa) => format!(
                "gqa {}/{} of {} bias {} {} norms {}",
                gqa.heads, gqa.kv_heads, gqa.head_dim, gqa.qkv_bias, gqa.out_bias, gqa.head_norms
            ),
            Self::Mla(mla) => {
                let query = mla
                    .q_lora_rank
                    .map_or_else(|| "plain".to_owned(), |rank| rank.to_string());
                format!(
                    "mla {} q {query} kv {} nope {} rope {} v {}",
                    mla.heads,
                    mla.kv_lora_rank,
                    mla.qk_nope_head_dim,
                    mla.qk_rope_head_dim,
                    mla.v_head_dim
                )
            }
        }
    }
}

impl GqaConfig {
    fn parse(
        f: &Fields<'_>,
        architecture: Architecture,
        hidden_size: usize,
    ) -> Result<Self, ModelConfigError> {
        let heads = f.size("num_attention_heads", 4096)?;
        let kv_heads = if f.given("num_key_value_heads") {
            f.size("num_key_value_heads", 4096)?
        } else {
            heads
        };
        if !heads.is_multiple_of(kv_heads) {
            return Err(f.bad_here(
                "num_key_value_heads",
                &format!("a divisor of num_attention_heads ({heads})"),
            ));
        }
        let head_dim = if f.given("head_dim") {
            f.size("head_dim", 1 << 14)?
        } else if hidden_size.is_multiple_of(heads) {
            hidden_size / heads
        } else {
            return Err(f.bad_here(
                "num_attention_heads",
                &format!("a divisor of hidden_size ({hidden_size}) while head_dim is absent"),
            ));
        };
        if !head_dim.is_multiple_of(2) {
            return Err(f.bad_here("head_dim", "an even number"));
        }
        let (qkv_bias, out_bias) = match architecture {
            // Its code has them whatever the file says, and never one on the output.
            Architecture::Qwen2 => {
                f.get("attention_bias");
                (true, false)
            }
            _ => {
                let bias = f.flag_or("attention_bias", false)?;
                (bias, bias)
            }
        };
        Ok(Self {
            heads,
            kv_heads,
            head_dim,
            qkv_bias,
            out_bias,
            head_norms: matches!(architecture, Architecture::Qwen3 | Architecture::Qwen3Moe),
        })
    }
}

impl MlaConfig {
    fn parse(f: &Fields<'_>) -> Result<Self, ModelConfigError> {
        let heads = f.size("num_attention_heads", 4096)?;
        if f.given("num_key_value_heads") && f.size("num_key_value_heads", 4096)? != heads {
            return Err(f.contradiction("num_key_value_heads", "num_attention_heads"));
        }
        let mla = Self {
            heads,
            q_lora_rank: if f.given("q_lora_rank") {
                Some(f.size("q_lora_rank", 1 << 16)?)
            } else {
                None
            },
            kv_lora_rank: f.size("kv_lora_rank", 1 << 14)?,
            qk_nope_head_dim: f.size("qk_nope_head_dim", 1 << 14)?,
            qk_rope_head_dim: f.size("qk_rope_head_dim", 1 << 14)?,
            v_head_dim: f.size("v_head_dim", 1 << 14)?,
        };
        if !mla.qk_rope_head_dim.is_multiple_of(2) {
            return Err(f.bad_here("qk_rope_head_dim", "an even number"));
        }
        if f.given("qk_head_dim")
            && f.size("qk_head_dim", 1 << 15)? != mla.qk_nope_head_dim + mla.qk_rope_head_dim
        {
            return Err(f.contradiction("qk_head_dim", "qk_nope_head_dim"));
        }
        Ok(mla)
    }
}
