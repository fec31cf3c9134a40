//! How quantised weights are stored: ModelSlim, compressed-tensors, fp8 in blocks.
//!
//! A linear layer's scheme decides which tensors it has beside its matrix and what types they may
//! have. What is not announced is not read as something else: an unknown scheme is an error.

use super::WeightsError;
use super::files::read_text;
use super::shard::WeightDtype;
use serde_json::{Map, Value};
use std::collections::HashMap;
use std::path::Path;
use twinfer_config::model::{
    CompressedTensors, QuantizationConfig, QuantizedActivations, Strategy, TensorKind, TensorSpec,
    TensorSpecs,
};
use twinfer_kernels::Activation;

/// How a linear layer's weights are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Scheme {
    /// Plain numbers.
    Plain,
    /// int8 with `weight_scale`; activations by a scale per token.
    Dynamic(Strategy),
    /// compressed-tensors with `input_scale` and, if asymmetric, `input_zero_point`.
    Static {
        /// Of the weights.
        scales: Strategy,
        /// No zero point.
        symmetric: bool,
    },
    /// ModelSlim `W8A8`: `input_scale`, `input_offset`, `quant_bias`, `deq_scale`.
    SlimStatic,
    /// ModelSlim `W8A8_MIX`: the tensors of both; computed with a scale per token everywhere.
    SlimMix,
    /// fp8 with `weight_scale_inv`, one factor per block.
    BlockFp8 {
        /// Rows of a block.
        rows: usize,
        /// Columns of a block.
        cols: usize,
    },
}

/// What a model directory says of all its weights.
#[derive(Debug)]
pub(crate) enum Format {
    Plain,
    Compressed(CompressedTensors),
    BlockFp8 { rows: usize, cols: usize },
    ModelSlim(Map<String, Value>),
}

/// What a product of several matrices must have in common.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Float,
    PerToken,
    Static,
}

impl Scheme {
    fn kind(self) -> Kind {
        match self {
            Self::Plain | Self::BlockFp8 { .. } => Kind::Float,
            Self::Dynamic(_) | Self::SlimMix => Kind::PerToken,
            Self::Static { .. } | Self::SlimStatic => Kind::Static,
        }
    }
}

impl Kind {
    fn text(self) -> &'static str {
        match self {
            Self::Float => "not quantised",
            Self::PerToken => "int8 with a scale per token",
            Self::Static => "int8 with a fixed scale of its input",
        }
    }
}

/// Names the linear layers that lie below each other in one weight with this one, by parent and parts.
pub(crate) fn fused(spec: &TensorSpec) -> (&str, &str) {
    let module = spec.module();
    let (parent, part) = module.rsplit_once('.').unwrap_or(("", module));
    let parts = match part {
        "q_proj" | "k_proj" | "v_proj" => "q_proj, k_proj, v_proj",
        "gate_proj" | "up_proj" => "gate_proj, up_proj",
        "w1" | "w3" => "w1, w3",
        part => part,
    };
    (parent, parts)
}

/// Names the product that a linear layer is part of: that of one input, or that of all experts of a layer.
fn product(spec: &TensorSpec) -> String {
    let (parent, part) = fused(spec);
    let layer = match parent.rsplit_once(".experts.") {
        Some((layer, _)) => layer,
        None => parent,
    };
    format!("{layer} {part}")
}

/// Sentences for matrices that are multiplied together but quantised differently.
pub(super) fn unequal_partners(
    specs: &TensorSpecs,
    schemes: &HashMap<String, Scheme>,
) -> Vec<String> {
    let mut first: HashMap<String, (&str, Kind)> = HashMap::new();
    let mut wrong = Vec::new();
    let linear = specs
        .tensors
        .iter()
        .filter(|spec| spec.kind == TensorKind::Linear);
    for spec in linear {
        let kind = schemes
            .get(&spec.name)
            .map_or(Kind::Float, |scheme| scheme.kind());
        let (other, expected) = *first.entry(product(spec)).or_insert((&spec.name, kind));
        if kind != expected {
            wrong.push(format!(
                "{} is {}, but {other}, which is multiplied together with it, is {}; allowed: the same for both",
                spec.name,
                kind.text(),
                expected.text()
            ));
        }
    }
    wrong
}

/// Sentences for int8 matrices whose products could exceed 32 bits.
pub(super) fn too_long(specs: &TensorSpecs, schemes: &HashMap<String, Scheme>) -> Vec<String> {
    let activation = |spec: &TensorSpec| match schemes.get(&spec.name)?.kind() {
        Kind::Float => None,
        Kind::PerToken => Some(Activation::PerToken),
        Kind::Static => Some(Activation::Static {
            scale: 1.0,
            offset: 0,
        }),
    };
    let specs = specs.tensors.iter();
    specs
        .filter_map(|spec| too_long_for(spec, activation(spec)?))
        .collect()
}

/// A sentence, if rows of a matrix are too long for int8 products.
pub(crate) fn too_long_for(spec: &TensorSpec, activation: Activation) -> Option<String> {
    let (cols, most) = (*spec.shape.get(1)?, activation.longest_row());
    (cols > most).then(|| {
        format!(
            "{} has rows of {cols} values; allowed in int8: up to {most}, whose sums fit 32 bits",
            spec.name
        )
    })
}

/// A tensor that a spec asks for under its scheme.
pub(super) struct Required {
    pub(super) name: String,
    /// Any of them.
    pub(super) shapes: Vec<Vec<usize>>,
    pub(super) dtypes: &'static [WeightDtype],
    pub(super) optional: bool,
}

const PLAIN: &[WeightDtype] = &[WeightDtype::Bf16, WeightDtype::F32];
const SCALES: &[WeightDtype] = &[WeightDtype::Bf16, WeightDtype::F32, WeightDtype::F16];
const OFFSETS: &[WeightDtype] = &[
    WeightDtype::I8,
    WeightDtype::I32,
    WeightDtype::Bf16,
    WeightDtype::F32,
    WeightDtype::F16,
];

/// Endings of tensors that only quantised or rotated checkpoints have.
const TELLTALES: &[&str] = &[
    ".weight_scale",
    ".weight_scale_inv",
    ".weight_offset",
    ".weight_packed",
    ".weight_shape",
    ".weight_zero_point",
    ".weight_g_idx",
    ".input_scale",
    ".input_offset",
    ".input_zero_point",
    ".deq_scale",
    ".quant_bias",
    ".qweight",
    ".qzeros",
    ".scales",
    ".g_idx",
    ".smooth_scale",
];

impl Format {
    /// From the description file, if there is one, or from config.json.
    pub(super) fn of(
        description: Option<&Path>,
        config: Option<&QuantizationConfig>,
    ) -> Result<Self, WeightsError> {
        let Some(path) = description else {
            return Ok(match config {
                None => Self::Plain,
                Some(QuantizationConfig::CompressedTensors(quant)) => {
                    Self::Compressed(quant.clone())
                }
                Some(QuantizationConfig::BlockFp8 { rows, cols }) => Self::BlockFp8 {
                    rows: *rows,
                    cols: *cols,
                },
            });
        };
        let bad = |reason: String| WeightsError::File {
            path: path.to_owned(),
            reason,
        };
        if config.is_some() {
            return Err(bad(
                "describes quantised weights, and so does quantization_config of config.json; allowed: one of the two".to_owned(),
            ));
        }
        let text = read_text(path)?;
        let map = match serde_json::from_str(&text) {
            Ok(Value::Object(map)) => map,
            Ok(_) => return Err(bad("is not a JSON object".to_owned())),
            Err(error) => return Err(bad(format!("is not JSON: {error}"))),
        };
        for (key, value) in &map {
            let lower = key.to_ascii_lowercase();
            let rotated = ["quarot", "rotat"].iter().any(|word| lower.contains(word))
                || (key == "optional" && value.to_string().to_ascii_lowercase().contains("rot"));
            if rotated && !matches!(value, Value::Null | Value::Bool(false)) {
                return Err(bad(format!(
                    "has {key}: rotated weights are not served; allowed: W8A8_DYNAMIC, W8A8, W8A8_MIX and FLOAT without rotation"
                )));
            }
        }
        Ok(Self::ModelSlim(map))
    }

    /// Part of the fingerprint.
    pub(crate) fn name(&self) -> &'static str {
        match self {
            Self::Plain => "none",
            Self::Compressed(_) => "compressed-tensors",
            Self::BlockFp8 { .. } => "fp8-block",
            Self::ModelSlim(_) => "modelslim",
        }
    }

    /// Weights that the description calls quantised; none without one.
    pub(super) fn announced(&self) -> impl Iterator<Item = (&str, &Value)> {
        let entries = match self {
            Self::ModelSlim(map) => Some(map.iter()),
            _ => None,
        };
        let entries = entries.into_iter().flatten();
        entries
            .map(|(name, value)| (name.as_str(), value))
            .filter(|(name, value)| name.ends_with(".weight") && *value != "FLOAT")
    }

    /// The scheme of a tensor; why it is not served, with its name.
    ///
    /// `stored` is its type in the files, if it is there: with fp8 the files say which layers were left
    /// alone.
    pub(super) fn scheme(
        &self,
        spec: &TensorSpec,
        stored: Option<WeightDtype>,
    ) -> Result<Scheme, String> {
        if spec.kind != TensorKind::Linear {
            return Ok(Scheme::Plain);
        }
        match self {
            Self::Plain => Ok(Scheme::Plain),
            Self::Compressed(quant) => Ok(match quant.scheme(spec.module()) {
                None => Scheme::Plain,
                Some((scales, QuantizedActivations::PerToken)) => Scheme::Dynamic(scales),
                Some((scales, QuantizedActivations::Static { symmetric })) => {
                    Scheme::Static { scales, symmetric }
                }
            }),
            Self::BlockFp8 { rows, cols } => Ok(match stored {
                Some(WeightDtype::Bf16 | WeightDtype::F32) => Scheme::Plain,
                _ => Scheme::BlockFp8 {
                    rows: *rows,
                    cols: *cols,
                },
            }),
            Self::ModelSlim(map) => {
                match map.get(&spec.name).map(|value| (value, value.as_str())) {
                    None | Some((_, Some("FLOAT"))) => Ok(Scheme::Plain),
                    Some((_, Some("W8A8_DYNAMIC"))) => Ok(Scheme::Dynamic(Strategy::Channel)),
                    Some((_, Some("W8A8"))) => Ok(Scheme::SlimStatic),
                    Some((_, Some("W8A8_MIX"))) => Ok(Scheme::SlimMix),
                    Some((value, _)) => Err(format!(
                        "{} has scheme {value}; allowed: FLOAT, W8A8_DYNAMIC, W8A8, W8A8_MIX",
                        spec.name
                    )),
                }
            }
        }
    }
}

impl Scheme {
    /// The tensors that `spec` needs.
    pub(super) fn required(self, spec: &TensorSpec) -> Vec<Required> {
        let dtypes: &'static [WeightDtype] = match self {
            Self::Plain => PLAIN,
            Self::BlockFp8 { .. } => &[WeightDtype::F8E4M3],
            _ => &[WeightDtype::I8],
        };
        let mut list = vec![Required {
            name: spec.name.clone(),
            shapes: vec![spec.shape.clone()],
            dtypes,
            optional: false,
        }];
        let (rows, cols) = match spec.shape[..] {
            [rows, cols] => (rows, cols),
            _ => return list,
        };
        let one = || vec![vec![1], vec![1, 1], vec![]];
        let per_row = || vec![vec![rows, 1], vec![rows]];
        let scales = |strategy| match strategy {
            Strategy::Channel => per_row(),
            Strategy::Tensor => one(),
        };
        let mut add = |part: &str, shapes, dtypes, optional| {
            list.push(Required {
                name: format!("{}.{part}", spec.module()),
                shapes,
                dtypes,
                optional,
            });
        };
        match self {
            Self::Plain => {}
            Self::Dynamic(strategy) => {
                add("weight_scale", scales(strategy), SCALES, false);
                add("weight_offset", scales(strategy), OFFSETS, true);
            }
            Self::Static {
                scales: strategy,
                symmetric,
            } => {
                add("weight_scale", scales(strategy), SCALES, false);
                add("input_scale", one(), SCALES, false);
                add("input_zero_point", one(), OFFSETS, symmetric);
            }
            Self::SlimStatic | Self::SlimMix => {
                let mix = self == Self::SlimMix;
                add("input_scale", one(), SCALES, false);
                add("input_offset", one(), OFFSETS, false);
                add("quant_bias", vec![vec![rows]], &[WeightDtype::I32], false);
                add(
                    "deq_scale",
                    vec![vec![rows]],
                    &[WeightDtype::F32, WeightDtype::I64],
                    false,
                );
                add("weight_scale", per_row(), SCALES, !mix);
                add("weight_offset", per_row(), OFFSETS, true);
            }
            Self::BlockFp8 {
                rows: block_rows,
                cols: block_cols,
            } => add(
                "weight_scale_inv",
                vec![vec![rows.div_ceil(block_rows), cols.div_ceil(block_cols)]],
                &[WeightDtype::F32, WeightDtype::Bf16],
                false,
            ),
        }
        list
    }
}

/// Does a tensor that nothing asks for show that the weights are not what they are taken for?
pub(super) fn telltale(name: &str, linear: impl Fn(&str) -> bool) -> bool {
    TELLTALES.iter().any(|end| name.ends_with(end))
        || name.to_ascii_lowercase().contains("rotation")
        || name.strip_suffix(".bias").is_some_and(linear)
}
