use super::ModelConfig;
use crate::Dtype;

/// Size of the KV of a model on one rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvShape {
    /// Layers that have KV.
    pub layers: usize,
    /// Values per token and layer.
    pub width: usize,
    /// Bytes per value.
    pub value_bytes: usize,
    /// Tokens per block.
    pub block_size: usize,
}

/// How much memory KV may take.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum KvBudget {
    /// So many bytes; too much is an error.
    Bytes(u64),
    /// This part, in (0, 1], of what is left after weights and workspace, but no more than `useful`
    /// bytes.
    Share {
        /// Part.
        part: f64,
        /// Bytes beyond which more blocks could never be used.
        useful: u64,
    },
}

/// The largest step that is to be served.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StepSize {
    /// Tokens.
    pub tokens: usize,
    /// Sequences.
    pub seqs: usize,
    /// Rows of logits.
    pub logits: usize,
    /// With the MTP layer: its buffers, and logits of a draft for each sequence.
    pub drafting: bool,
    /// Compute threads.
    pub threads: usize,
}

/// What a model takes beside its KV, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ModelBytes {
    /// Weights that are not in memory yet.
    pub weights: u64,
    /// Buffers of the largest step.
    pub workspace: u64,
    /// What packing weights takes for a while, before there are a workspace and KV.
    pub loading: u64,
}

/// Why memory could not be planned.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MemoryError {
    /// Weights and workspace alone do not fit.
    #[error(
        "the model needs {} for weights and {} for workspace, but {} are available",
        format_bytes(*weights), format_bytes(*workspace), format_bytes(*available)
    )]
    Model {
        /// Bytes of weights.
        weights: u64,
        /// Bytes of workspace.
        workspace: u64,
        /// Bytes available before loading.
        available: u64,
    },
    /// Weights cannot be packed.
    #[error(
        "the model needs {} for weights and {} to pack them, but {} are available",
        format_bytes(*weights), format_bytes(*loading), format_bytes(*available)
    )]
    Loading {
        /// Bytes of weights.
        weights: u64,
        /// Bytes that packing takes.
        loading: u64,
        /// Bytes available before loading.
        available: u64,
    },
    /// The requested KV does not fit beside the model.
    #[error(
        "kv-cache-memory is {} ({requested} bytes), but {} ({left} bytes) are available beside weights and workspace: \
         of {} that are available, {} go to weights and {} to workspace",
        format_bytes(*requested), format_bytes(*left), format_bytes(left.saturating_add(model.weights).saturating_add(model.workspace)),
        format_bytes(model.weights), format_bytes(model.workspace)
    )]
    Kv {
        /// Bytes asked for.
        requested: u64,
        /// Bytes left after weights and workspace.
        left: u64,
        /// The model's.
        model: ModelBytes,
    },
    /// Not even one block fits.
    #[error(
        "kv-cache-memory gives {} ({bytes} bytes), but one block takes {} ({block} bytes)",
        format_bytes(*bytes), format_bytes(*block)
    )]
    TooLittle {
        /// Bytes that KV would get.
        bytes: u64,
        /// Bytes of a block.
        block: u64,
    },
    /// Not a size.
    #[error(
        "{text:?} is not a size; allowed: a number with B, KiB, MiB, GiB, TiB, KB, MB, GB or TB, such as 512MiB"
    )]
    Size {
        /// What stands there.
        text: String,
    },
}

impl KvShape {
    /// The KV of a model under a KV type and block size.
    pub fn of(config: &ModelConfig, dtype: Dtype, block_size: usize) -> Self {
        let value_bytes = match dtype {
            Dtype::Bf16 => 2,
            Dtype::F32 => 4,
        };
        Self {
            layers: config.layers,
            width: config.kv_width(),
            value_bytes,
            block_size,
        }
    }

    /// Bytes of one layer's share of one block, the unit of handoff.
    pub fn unit_bytes(&self) -> usize {
        self.width * self.value_bytes * self.block_size
    }

    /// Bytes of one block over all layers.
    pub fn block_bytes(&self) -> u64 {
        self.layers as u64 * self.unit_bytes() as u64
    }

    /// Bytes of one token over all layers.
    pub fn token_bytes(&self) -> u64 {
        (self.layers * self.width * self.value_bytes) as u64
    }

    /// Bytes of the whole blocks that hold `tokens`.
    pub fn bytes_for(&self, tokens: usize) -> u64 {
        (tokens as u64)
            .div_ceil(self.block_size as u64)
            .saturating_mul(self.block_bytes())
    }

    /// Blocks of KV within a budget, when `available` bytes are free before loading.
    ///
    /// # Errors
    /// The model does not fit, more is asked for than is left, or there is no room for one block.
    pub fn plan(
        &self,
        budget: KvBudget,
        available: u64,
        model: ModelBytes,
    ) -> Result<u32, MemoryError> {
        let ModelBytes {
            weights,
            workspace,
            loading,
        } = model;
        if weights.saturating_add(loading) > available {
            return Err(MemoryError::Loading {
                weights,
                loading,
                available,
            });
        }
        let left = available
            .checked_sub(weights)
            .and_then(|rest| rest.checked_sub(workspace))
            .ok_or(MemoryError::Model {
                weights,
                workspace,
                available,
            })?;
        let bytes = match budget {
            KvBudget::Bytes(requested) if requested > left => {
                return Err(MemoryError::Kv {
                    requested,
                    left,
                    model,
                });
            }
            KvBudget::Bytes(requested) => requested,
            KvBudget::Share { part, useful } => {
                ((left as f64 * part.clamp(0.0, 1.0)) as u64).min(useful)
            }
        };
        if bytes < self.block_bytes() {
            return Err(MemoryError::TooLittle {
                bytes,
                block: self.block_bytes(),
            });
        }
        Ok(u32::try_from(bytes / self.block_bytes()).unwrap_or(u32::MAX - 1))
    }
}

/// Buffers that a thread keeps for itself: attention's tile of keys and values, its stack.
const THREAD_BYTES: u64 = 2 << 20;

impl ModelConfig {
    /// Bytes of the buffers of a step of that size, all f32 but the sampler's.
    pub fn workspace_bytes(&self, step: &StepSize) -> u64 {
        let (hidden, vocab) = (self.hidden_size, self.vocab_size);
        // Known outputs and pairs for the MTP layer.
        let drafting = if step.drafting { 3 } else { 0 };
        let moe = self.moe.as_ref();
        let attention = self.attention.workspace_values();
        let shared = moe.map_or(0, |moe| moe.shared * moe.intermediate);
        let widest = self.intermediate_size.unwrap_or(0).max(shared);
        let experts = moe.map_or(0, |moe| moe.workspace_values(hidden));
        // Rows of the widest product's input as its kernel reads them: a value is four bytes at most.
        let dense_input = widest
            .max(self.attention.out_width())
            .max(hidden * if step.drafting { 2 } else { 1 });
        let packed = moe.map_or(dense_input, |moe| {
            dense_input.max(moe.top_k * hidden.max(moe.intermediate))
        });
        let per_token =
            ((4 + drafting) * hidden + attention + 3 * widest + experts + packed) as u64;
        let per_logits = (2 * hidden + vocab) as u64;
        let per_draft = (3 * hidden + vocab) as u64;
        let drafts = if step.drafting { step.seqs } else { 0 };
        // Values, weights, keys and ids of a row.
        let sampler = 6 * vocab as u64;
        let values = per_token
            .saturating_mul(step.tokens as u64)
            .saturating_add(per_logits.saturating_mul(step.logits as u64))
            .saturating_add(per_draft.saturating_mul(drafts as u64))
            .saturating_add(sampler);
        values
            .saturating_mul(4)
            .saturating_add(THREAD_BYTES.saturating_mul(step.threads as u64))
    }
}

/// Parses `512MiB`, `4GiB`, `1.5 GB` or a plain number of bytes.
///
/// # Errors
/// Not a number with a known unit, negative, or beyond 2^63.
pub fn parse_bytes(text: &str) -> Result<u64, MemoryError> {
    let bad = || MemoryError::Size {
        text: text.to_owned(),
    };
    let trimmed = text.trim();
    let cut = trimmed
        .find(|c: char| !c.is_ascii_digit() && c != '.')
        .unwrap_or(trimmed.len());
    let (number, unit) = trimmed.split_at(cut);
    let factor: u64 = match unit.trim() {
        "" | "B" => 1,
        "KiB" => 1 << 10,
        "MiB" => 1 << 20,
        "GiB" => 1 << 30,
        "TiB" => 1 << 40,
        "KB" | "kB" => 1_000,
        "MB" => 1_000_000,
        "GB" => 1_000_000_000,
        "TB" => 1_000_000_000_000,
        _ => return Err(bad()),
    };
    if let Ok(whole) = number.parse::<u64>() {
        return whole
            .checked_mul(factor)
            .filter(|n| *n < 1 << 63)
            .ok_or_else(bad);
    }
    let value = number.parse::<f64>().map_err(|_| bad())? * factor as f64;
    if value.is_finite() && (0.0..9.2e18).contains(&value) {
        Ok(value as u64)
    } else {
        Err(bad())
    }
}

/// `1.5 GiB`, `12.0 MiB`, `512 B`.
pub fn format_bytes(bytes: u64) -> String {
    const UNITS: &[(&str, u64)] = &[
        ("TiB", 1 << 40),
        ("GiB", 1 << 30),
        ("MiB", 1 << 20),
        ("KiB", 1 << 10),
    ];
    for (unit, size) in UNITS {
        if bytes >= *size {
            return format!("{:.1} {unit}", bytes as f64 / *size as f64);
        }
    }
    format!("{bytes} B")
}
