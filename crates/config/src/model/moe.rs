use super::fields::Fields;
use super::{Architecture, MAX_LAYERS, ModelConfigError};
use serde_json::Value;

/// Most routed experts of a layer.
pub const MAX_EXPERTS: usize = 1024;
/// Most groups that they are cut into.
pub const MAX_GROUPS: usize = 64;

/// How a token's experts are chosen and weighed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Routing {
    /// Softmax over the logits of the chosen experts, which is the softmax over all, renormalised
    /// (Mixtral, Qwen3-MoE with `norm_topk_prob`).
    SoftmaxOfChosen,
    /// Softmax over all experts; the chosen keep their scores. With more than one group, only the
    /// `top_groups` groups with the best single expert are open (DeepSeek-V2 report, section 2.1.3).
    Softmax {
        /// Consecutive groups that the experts are cut into.
        groups: usize,
        /// Groups a token may use.
        top_groups: usize,
    },
    /// Sigmoid of each expert; a bias is added for the choice only. Groups are judged by the sum of
    /// their two best (DeepSeek-V3 report, section 2.1.2).
    BiasedSigmoid {
        /// Consecutive groups that the experts are cut into.
        groups: usize,
        /// Groups a token may use.
        top_groups: usize,
        /// Divide the chosen scores by their sum.
        normalize: bool,
    },
}

/// Routed and shared experts.
#[derive(Clone, Debug, PartialEq)]
pub struct MoeConfig {
    /// Routed experts per layer.
    pub experts: usize,
    /// Routed experts per token.
    pub top_k: usize,
    /// Choice and weights.
    pub routing: Routing,
    /// Factor on the routed experts' weights.
    pub scale: f32,
    /// Shared experts; they are one network of `shared * intermediate` width.
    pub shared: usize,
    /// Width inside an expert.
    pub intermediate: usize,
    /// For each layer whether it has experts; the others have a dense network.
    pub layers: Vec<bool>,
}

impl MoeConfig {
    /// The experts of an architecture that has them.
    pub(super) fn parse(
        f: &Fields<'_>,
        architecture: Architecture,
        layers: usize,
    ) -> Result<Option<Self>, ModelConfigError> {
        let moe = match architecture {
            Architecture::Mixtral => Self {
                experts: f.size("num_local_experts", MAX_EXPERTS)?,
                top_k: f.size("num_experts_per_tok", 256)?,
                routing: Routing::SoftmaxOfChosen,
                scale: 1.0,
                shared: 0,
                intermediate: f.size("intermediate_size", 1 << 18)?,
                layers: vec![true; layers],
            },
            Architecture::Qwen3Moe => Self::qwen3(f, layers)?,
            Architecture::DeepseekV2 | Architecture::DeepseekV3 => {
                Self::deepseek(f, architecture, layers)?
            }
            _ => return Ok(None),
        };
        let most = match moe.routing {
            Routing::Softmax { groups, top_groups }
            | Routing::BiasedSigmoid {
                groups, top_groups, ..
            } => top_groups * (moe.experts / groups),
            Routing::SoftmaxOfChosen => moe.experts,
        };
        if moe.top_k > most {
            return Err(f.bad_here(
                "num_experts_per_tok",
                &format!("1 to {most}, the experts a token may choose from"),
            ));
        }
        Ok(Some(moe))
    }

    fn qwen3(f: &Fields<'_>, layers: usize) -> Result<Self, ModelConfigError> {
        let step = match f.given("decoder_sparse_step") {
            true => f.size("decoder_sparse_step", MAX_LAYERS)?,
            false => 1,
        };
        let mut sparse: Vec<bool> = (0..layers)
            .map(|layer| (layer + 1).is_multiple_of(step))
            .collect();
        for layer in dense_layers(f)? {
            if let Some(sparse) = sparse.get_mut(layer) {
                *sparse = false;
            }
        }
        Ok(Self {
            experts: f.size("num_experts", MAX_EXPERTS)?,
            top_k: f.size("num_experts_per_tok", 256)?,
            routing: if f.flag_or("norm_topk_prob", false)? {
                Routing::SoftmaxOfChosen
            } else {
                Routing::Softmax {
                    groups: 1,
                    top_groups: 1,
                }
            },
            scale: 1.0,
            shared: 0,
            intermediate: f.size("moe_intermediate_size", 1 << 18)?,
            layers: sparse,
        })
    }

    fn deepseek(
        f: &Fields<'_>,
        architecture: Architecture,
        layers: usize,
    ) -> Result<Self, ModelConfigError> {
        let experts = f.size("n_routed_experts", MAX_EXPERTS)?;
        let routing = if architecture == Architecture::DeepseekV3 {
            f.one_of("topk_method", &["noaux_tc"])?;
            f.one_of("scoring_func", &["sigmoid"])?;
            let (groups, top_groups) = groups(f, experts)?;
            if groups > 1 && experts / groups < 2 {
                let most = experts / 2;
                return Err(f.bad_here(
                    "n_group",
                    &format!("at most {most}: a group's score is the sum of its two best"),
                ));
            }
            Routing::BiasedSigmoid {
                groups,
                top_groups,
                normalize: f.flag_or("norm_topk_prob", true)?,
            }
        } else {
            f.one_of("scoring_func", &["softmax"])?;
            // Published engines differ in what it means here.
            f.only_flag("norm_topk_prob", false)?;
            let method = f.one_of("topk_method", &["greedy", "group_limited_greedy"])?;
            let (groups, top_groups) = match method {
                Some("group_limited_greedy") => groups(f, experts)?,
                _ => {
                    f.get("n_group");
                    f.get("topk_group");
                    (1, 1)
                }
            };
            Routing::Softmax { groups, top_groups }
        };
        let first = f.count_or("first_k_dense_replace", 0, MAX_LAYERS)?;
        let frequency = match f.given("moe_layer_freq") {
            true => f.size("moe_layer_freq", MAX_LAYERS)?,
            false => 1,
        };
        Ok(Self {
            experts,
            top_k: f.size("num_experts_per_tok", 256)?,
            routing,
            scale: f.positive("routed_scaling_factor")? as f32,
            shared: f.count_or("n_shared_experts", 0, 256)?,
            intermediate: f.size("moe_intermediate_size", 1 << 18)?,
            layers: (0..layers)
                .map(|layer| layer >= first && layer.is_multiple_of(frequency))
                .collect(),
        })
    }

    /// Values of a token's buffers in a step.
    pub(super) fn workspace_values(&self, hidden: usize) -> usize {
        self.experts + self.top_k * (2 * hidden + 3 * self.intermediate + 3)
    }

    pub(super) fn identity(&self) -> String {
        let layers: String = self
            .layers
            .iter()
            .map(|sparse| if *sparse { 'x' } else { '-' })
            .collect();
        format!(
            "experts {}/{} {:?} scale {:08x} shared {} expert {} layers {layers}",
            self.top_k,
            self.experts,
            self.routing,
            self.scale.to_bits(),
            self.shared,
            self.intermediate,
        )
    }
}

/// `n_group` and `topk_group`.
fn groups(f: &Fields<'_>, experts: usize) -> Result<(usize, usize), ModelConfigError> {
    let groups = f.size("n_group", MAX_GROUPS)?;
    let top_groups = f.size("topk_group", MAX_GROUPS)?;
    if !experts.is_multiple_of(groups) {
        return Err(f.bad_here(
            "n_group",
            &format!("a divisor of n_routed_experts ({experts})"),
        ));
    }
    if top_groups > groups {
        return Err(f.bad_here("topk_group", &format!("1 to n_group ({groups})")));
    }
    Ok((groups, top_groups))
}

/// `mlp_only_layers`.
fn dense_layers(f: &Fields<'_>) -> Result<Vec<usize>, ModelConfigError> {
    let bad = || f.bad_here("mlp_only_layers", "a list of layer numbers");
    match f.get("mlp_only_layers") {
        None | Some(Value::Null) => Ok(Vec::new()),
        Some(Value::Array(list)) => list
            .iter()
            .map(|layer| {
                layer
                    .as_u64()
                    .and_then(|layer| usize::try_from(layer).ok())
                    .ok_or_else(bad)
            })
            .collect(),
        Some(_) => Err(bad()),
    }
}
