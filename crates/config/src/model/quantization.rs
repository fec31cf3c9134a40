use super::ModelConfigError;
use super::fields::Fields;
use regex::Regex;
use serde_json::{Map, Value};

/// Most entries of `ignore` and of a group's targets.
const MAX_MATCHERS: usize = 1 << 16;

/// What `quantization_config` says of the weight files.
#[derive(Clone, Debug, PartialEq)]
pub enum QuantizationConfig {
    /// compressed-tensors with int8 weights and int8 activations.
    CompressedTensors(CompressedTensors),
    /// DeepSeek's fp8: e4m3 weights with one f32 factor per block.
    BlockFp8 {
        /// Rows of a block.
        rows: usize,
        /// Columns of a block.
        cols: usize,
    },
}

/// How many weights share a scale.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Strategy {
    /// One per output.
    Channel,
    /// One for the matrix.
    Tensor,
}

/// How a projection's input becomes int8.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QuantizedActivations {
    /// One scale per token, computed from its values.
    PerToken,
    /// One scale in the file.
    Static {
        /// No zero point in the file.
        symmetric: bool,
    },
}

/// `quant_method` compressed-tensors, format int-quantized (llm-compressor, vLLM).
#[derive(Clone, Debug, PartialEq)]
pub struct CompressedTensors {
    groups: Vec<Group>,
    ignore: Vec<Matcher>,
}

#[derive(Clone, Debug, PartialEq)]
struct Group {
    targets: Vec<Matcher>,
    weights: Strategy,
    activations: QuantizedActivations,
}

/// A class name, a module name, or `re:` and an expression that matches from the start of a module
/// name, as Python's `re.match`.
#[derive(Clone, Debug)]
enum Matcher {
    Name(String),
    Expression(Regex),
}

impl PartialEq for Matcher {
    fn eq(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Name(a), Self::Name(b)) => a == b,
            (Self::Expression(a), Self::Expression(b)) => a.as_str() == b.as_str(),
            _ => false,
        }
    }
}

impl Matcher {
    fn matches(&self, module: &str) -> bool {
        match self {
            // Only linear layers are asked for.
            Self::Name(name) => name == module || name == "Linear",
            Self::Expression(expression) => expression.is_match(module),
        }
    }
}

impl CompressedTensors {
    /// The scheme of a linear layer, by its module name; none: it is stored as plain numbers.
    pub fn scheme(&self, module: &str) -> Option<(Strategy, QuantizedActivations)> {
        if self.ignore.iter().any(|ignore| ignore.matches(module)) {
            return None;
        }
        self.groups
            .iter()
            .find(|group| group.targets.iter().any(|target| target.matches(module)))
            .map(|group| (group.weights, group.activations))
    }

    fn parse(f: &Fields<'_>) -> Result<Self, ModelConfigError> {
        f.one_of("format", &["int-quantized"])?;
        f.one_of("quantization_status", &["compressed", "frozen"])?;
        f.absent("kv_cache_scheme", "absent or null (KV is not quantised)")?;
        for field in ["sparsity_config", "transform_config"] {
            if f.object_if(field)?.is_some_and(|map| !map.is_empty()) {
                return Err(f.bad_here(field, "absent or empty"));
            }
        }
        let Some(groups) = f.object_if("config_groups")?.filter(|map| !map.is_empty()) else {
            return Err(f.bad_here("config_groups", "an object with at least one group"));
        };
        let groups = groups
            .iter()
            .map(|(name, group)| Group::parse(name, group, f))
            .collect::<Result<_, _>>()?;
        Ok(Self {
            groups,
            ignore: matchers(f, "ignore")?,
        })
    }
}

impl Group {
    fn parse(name: &str, group: &Value, f: &Fields<'_>) -> Result<Self, ModelConfigError> {
        let Value::Object(map) = group else {
            return Err(f.bad(&format!("config_groups.{name}"), group, "an object"));
        };
        let prefix = format!("quantization_config.config_groups.{name}.");
        let g = Fields::new(map, &prefix);
        g.one_of("format", &["int-quantized"])?;
        g.absent("output_activations", "absent or null")?;
        let (weights, activations) = (part(&g, "weights")?, part(&g, "input_activations")?);
        let prefix = format!("{prefix}weights.");
        let w = Fields::new(weights, &prefix);
        int8(&w)?;
        w.only_flag("symmetric", true)?;
        w.only_flag("dynamic", false)?;
        let strategy = match w.one_of("strategy", &["channel", "tensor"])? {
            Some("channel") => Strategy::Channel,
            Some(_) => Strategy::Tensor,
            None => return Err(w.bad_here("strategy", "channel, tensor")),
        };
        let prefix = format!("quantization_config.config_groups.{name}.input_activations.");
        let a = Fields::new(activations, &prefix);
        int8(&a)?;
        let symmetric = a.flag_or("symmetric", true)?;
        let kind = if a.flag_or("dynamic", false)? {
            a.only_flag("symmetric", true)?;
            match a.one_of("strategy", &["token"])? {
                Some(_) => QuantizedActivations::PerToken,
                None => return Err(a.bad_here("strategy", "token")),
            }
        } else {
            match a.one_of("strategy", &["tensor"])? {
                Some(_) => QuantizedActivations::Static { symmetric },
                None => return Err(a.bad_here("strategy", "tensor")),
            }
        };
        Ok(Self {
            targets: matchers(&g, "targets")?,
            weights: strategy,
            activations: kind,
        })
    }
}

impl QuantizationConfig {
    /// Reads `quantization_config`; a method or format that is not served is an error, never read as
    /// plain weights.
    pub(super) fn parse(f: &Fields<'_>) -> Result<Option<Self>, ModelConfigError> {
        f.absent("compression_config", "absent; use quantization_config")?;
        let Some(map) = f.object_if("quantization_config")? else {
            return Ok(None);
        };
        let q = Fields::new(map, "quantization_config.");
        match q.one_of("quant_method", &["compressed-tensors", "fp8"])? {
            Some("compressed-tensors") => {
                CompressedTensors::parse(&q).map(|quant| Some(Self::CompressedTensors(quant)))
            }
            Some(_) => block_fp8(&q).map(Some),
            None => Err(q.bad_here("quant_method", "compressed-tensors, fp8")),
        }
    }

    /// Is a linear layer of this name announced as quantised?
    pub fn covers(&self, module: &str) -> bool {
        match self {
            Self::CompressedTensors(quant) => quant.scheme(module).is_some(),
            // The files say which.
            Self::BlockFp8 { .. } => true,
        }
    }
}

fn block_fp8(q: &Fields<'_>) -> Result<QuantizationConfig, ModelConfigError> {
    q.one_of("fmt", &["e4m3"])?;
    q.one_of("activation_scheme", &["dynamic"])?;
    q.one_of("scale_fmt", &["ue8m0"])?;
    let allowed = "a list of two block sizes, rows and columns, such as [128, 128]";
    let sizes: Option<Vec<usize>> = q
        .get("weight_block_size")
        .and_then(Value::as_array)
        .and_then(|list| {
            list.iter()
                .map(|n| {
                    n.as_u64()
                        .and_then(|n| usize::try_from(n).ok())
                        .filter(|n| (1..=1 << 16).contains(n))
                })
                .collect()
        });
    match sizes.as_deref() {
        Some([rows, cols]) => Ok(QuantizationConfig::BlockFp8 {
            rows: *rows,
            cols: *cols,
        }),
        _ => Err(q.bad_here("weight_block_size", allowed)),
    }
}

fn part<'a>(g: &Fields<'a>, field: &str) -> Result<&'a Map<String, Value>, ModelConfigError> {
    g.object_if(field)?
        .ok_or_else(|| g.bad_here(field, "an object: weights and activations in int8"))
}

fn int8(f: &Fields<'_>) -> Result<(), ModelConfigError> {
    if f.count_or("num_bits", 8, usize::MAX)? != 8 {
        return Err(f.bad_here("num_bits", "8"));
    }
    f.one_of("type", &["int"])?;
    f.absent("group_size", "absent or null")?;
    f.absent("block_structure", "absent or null")?;
    f.absent("actorder", "absent or null")
}

fn matchers(f: &Fields<'_>, field: &str) -> Result<Vec<Matcher>, ModelConfigError> {
    let bad = || f.bad_here(field, "a list of names and re: expressions");
    let list = match f.get(field) {
        None | Some(Value::Null) => return Ok(Vec::new()),
        Some(Value::Array(list)) if list.len() <= MAX_MATCHERS => list,
        Some(_) => return Err(bad()),
    };
    list.iter()
        .map(|entry| {
            let text = entry.as_str().ok_or_else(bad)?;
            match text.strip_prefix("re:") {
                None => Ok(Matcher::Name(text.to_owned())),
                Some(expression) => Regex::new(&format!("^(?:{expression})"))
                    .map(Matcher::Expression)
                    .map_err(|_| f.bad(field, entry, "regular expressions without look-around")),
            }
        })
        .collect()
}
