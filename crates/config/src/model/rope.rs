use super::ModelConfigError;
use super::fields::Fields;
use std::f64::consts::PI;

/// YaRN (Peng et al. 2023, arXiv 2309.00071), as DeepSeek and transformers parameterise it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Yarn {
    /// Extension of the context.
    pub factor: f64,
    /// Context before the extension, in tokens.
    pub original: usize,
    /// Rotations inside the original context above which a frequency stays.
    pub beta_fast: f64,
    /// Rotations below which a frequency is divided by `factor`.
    pub beta_slow: f64,
    /// Weight of the correction on cos and sin.
    pub mscale: Option<f64>,
    /// Weight of the correction on the softmax scale.
    pub mscale_all_dim: Option<f64>,
    /// Factor on cos and sin, instead of the one that follows from `mscale`.
    pub attention_factor: Option<f64>,
    /// Round the ramp's ends to whole frequencies.
    pub truncate: bool,
}

/// The scaling of Llama 3.1 and later: slow frequencies are divided by `factor`, fast ones stay.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Llama3Rope {
    /// Divisor of slow frequencies.
    pub factor: f64,
    /// Rotations inside the original context below which a frequency is divided.
    pub low: f64,
    /// Rotations above which it stays.
    pub high: f64,
    /// Context before the extension, in tokens.
    pub original: usize,
}

/// How base frequencies are changed for longer contexts.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum RopeScaling {
    /// They are not.
    None,
    /// All are divided by a factor.
    Linear(f64),
    /// Llama 3.
    Llama3(Llama3Rope),
    /// YaRN.
    Yarn(Yarn),
}

/// Rotary position embedding: frequency `i` of a width `d` is `theta^(-2i/d)` before scaling.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rope {
    /// Base.
    pub theta: f64,
    /// Scaling.
    pub scaling: RopeScaling,
}

impl Rope {
    /// Reads `rope_theta`, `rope_scaling` and `rope_parameters` of the top level.
    pub(super) fn parse(f: &Fields<'_>) -> Result<Self, ModelConfigError> {
        let theta = f.positive_if("rope_theta")?;
        let old = f.object_if("rope_scaling")?;
        let new = f.object_if("rope_parameters")?;
        let old = old.map(|map| Fields::new(map, "rope_scaling."));
        let new = new.map(|map| Fields::new(map, "rope_parameters."));
        let mut thetas: Vec<f64> = theta.into_iter().collect();
        let mut scalings = Vec::new();
        for side in [&old, &new].into_iter().flatten() {
            thetas.extend(side.positive_if("rope_theta")?);
            scalings.push(parse_scaling(side)?);
            if let Some(field) = side.unread(&[]).first() {
                return Err(
                    side.bad_here(field, "absent: no such setting of this rope type is served")
                );
            }
        }
        if let Some(pair) = thetas.windows(2).find(|pair| pair[0] != pair[1]) {
            return Err(ModelConfigError::Contradiction {
                left: format!("rope_theta is {}", pair[0]),
                right: format!("another rope_theta is {}", pair[1]),
            });
        }
        if let [a, b] = scalings[..]
            && a != b
        {
            return Err(ModelConfigError::Contradiction {
                left: "rope_scaling says one thing".to_owned(),
                right: "rope_parameters another".to_owned(),
            });
        }
        let rope = Self {
            theta: thetas.first().copied().unwrap_or(10_000.0),
            scaling: scalings.first().copied().unwrap_or(RopeScaling::None),
        };
        if let RopeScaling::Yarn(yarn) = rope.scaling
            && f.given("original_max_position_embeddings")
        {
            let outer = f.size("original_max_position_embeddings", 1 << 30)?;
            if outer != yarn.original {
                return Err(ModelConfigError::Contradiction {
                    left: format!("original_max_position_embeddings is {outer}"),
                    right: format!("it is {} inside the rope settings", yarn.original),
                });
            }
        }
        if rope.theta <= 1.0 {
            return Err(f.bad_here("rope_theta", "a number above 1"));
        }
        Ok(rope)
    }

    /// Longest sequence for a config that announces `max_positions`. Under YaRN the length is
    /// `original * factor`; `max_position_embeddings` is that same length in published files, the
    /// unextended one in some, and never multiplied again.
    pub(super) fn context(&self, max_positions: usize) -> Result<usize, ModelConfigError> {
        let yarn = match self.scaling {
            RopeScaling::Yarn(yarn) => yarn,
            // The file announces the length before scaling, as vLLM reads it.
            RopeScaling::Linear(factor) => return Ok((max_positions as f64 * factor) as usize),
            RopeScaling::None | RopeScaling::Llama3(_) => return Ok(max_positions),
        };
        let extended = (yarn.original as f64 * yarn.factor).floor() as usize;
        if max_positions > extended {
            return Err(ModelConfigError::Contradiction {
                left: format!("max_position_embeddings is {max_positions}"),
                right: format!(
                    "original_max_position_embeddings * factor is {} * {} = {extended}",
                    yarn.original, yarn.factor
                ),
            });
        }
        Ok(extended)
    }

    /// Frequencies of a rotated width `dim`, `dim / 2` of them, in radians per position.
    pub fn frequencies(&self, dim: usize) -> Vec<f32> {
        let base = |i: usize| self.theta.powf(-2.0 * i as f64 / dim as f64);
        match self.scaling {
            RopeScaling::None => (0..dim / 2).map(|i| base(i) as f32).collect(),
            RopeScaling::Linear(factor) => {
                (0..dim / 2).map(|i| (base(i) / factor) as f32).collect()
            }
            RopeScaling::Llama3(llama) => (0..dim / 2)
                .map(|i| {
                    let turns = llama.original as f64 * base(i) / (2.0 * PI);
                    let r = ((turns - llama.low) / (llama.high - llama.low)).clamp(0.0, 1.0);
                    (r * base(i) + (1.0 - r) * base(i) / llama.factor) as f32
                })
                .collect(),
            RopeScaling::Yarn(yarn) => {
                let (low, high) = yarn.ramp(self.theta, dim);
                (0..dim / 2)
                    .map(|i| {
                        let r = ((i as f64 - low) / (high - low)).clamp(0.0, 1.0);
                        (base(i) * (1.0 - r) + base(i) / yarn.factor * r) as f32
                    })
                    .collect()
            }
        }
    }

    /// Factor on cos and sin.
    pub fn cos_sin_factor(&self) -> f32 {
        match self.scaling {
            RopeScaling::Yarn(yarn) => yarn.cos_sin_factor() as f32,
            _ => 1.0,
        }
    }

    /// Factor on MLA's softmax scale.
    pub fn softmax_correction(&self) -> f64 {
        match self.scaling {
            RopeScaling::Yarn(yarn) => yarn.mscale_all_dim.map_or(1.0, |m| yarn.msc(m).powi(2)),
            _ => 1.0,
        }
    }

    /// Part of [`super::ModelConfig::identity`].
    pub(super) fn identity(&self) -> String {
        match self.scaling {
            RopeScaling::None => format!("theta {:016x}", self.theta.to_bits()),
            RopeScaling::Linear(factor) => format!(
                "theta {:016x} linear {:016x}",
                self.theta.to_bits(),
                factor.to_bits()
            ),
            RopeScaling::Llama3(llama) => format!(
                "theta {:016x} llama3 {:016x} {:016x} {:016x} {}",
                self.theta.to_bits(),
                llama.factor.to_bits(),
                llama.low.to_bits(),
                llama.high.to_bits(),
                llama.original
            ),
            RopeScaling::Yarn(y) => format!(
                "theta {:016x} yarn {:016x} {} {:016x} {:016x} {:016x} {:016x} {}",
                self.theta.to_bits(),
                y.factor.to_bits(),
                y.original,
                y.beta_fast.to_bits(),
                y.beta_slow.to_bits(),
                y.cos_sin_factor().to_bits(),
                self.softmax_correction().to_bits(),
                y.truncate,
            ),
        }
    }
}

impl Yarn {
    fn msc(&self, weight: f64) -> f64 {
        if self.factor <= 1.0 {
            1.0
        } else {
            0.1 * weight * self.factor.ln() + 1.0
        }
    }

    fn cos_sin_factor(&self) -> f64 {
        match (self.attention_factor, self.mscale, self.mscale_all_dim) {
            (Some(factor), _, _) => factor,
            (None, Some(m), Some(all)) => self.msc(m) / self.msc(all),
            _ => self.msc(1.0),
        }
    }

    /// First frequency that is interpolated a little, first that is wholly.
    fn ramp(&self, theta: f64, dim: usize) -> (f64, f64) {
        let place = |rotations: f64| {
            dim as f64 * (self.original as f64 / (rotations * 2.0 * PI)).ln() / (2.0 * theta.ln())
        };
        let (mut low, mut high) = (place(self.beta_fast), place(self.beta_slow));
        if self.truncate {
            (low, high) = (low.floor(), high.ceil());
        }
        low = low.max(0.0);
        high = high.min(dim as f64 - 1.0);
        if low == high {
            high += 0.001;
        }
        (low, high)
    }
}

/// One of the two objects. transformers writes `rope_type`, older files `type`.
fn parse_scaling(f: &Fields<'_>) -> Result<RopeScaling, ModelConfigError> {
    const ALLOWED: &[&str] = &["default", "linear", "llama3", "yarn"];
    let old = f.one_of("type", ALLOWED)?;
    let new = f.one_of("rope_type", ALLOWED)?;
    if old.is_some() && new.is_some() && old != new {
        return Err(f.contradiction("type", "rope_type"));
    }
    let kind = new.or(old).unwrap_or("default");
    if kind == "default" {
        return Ok(RopeScaling::None);
    }
    let factor = f.positive("factor")?;
    if !(1.0..=65_536.0).contains(&factor) {
        return Err(f.bad_here("factor", "a number from 1 to 65536"));
    }
    match kind {
        "linear" => return Ok(RopeScaling::Linear(factor)),
        "llama3" => return parse_llama3(f, factor),
        _ => {}
    }
    let yarn = Yarn {
        factor,
        original: f.size("original_max_position_embeddings", 1 << 30)?,
        beta_fast: f.positive_if("beta_fast")?.unwrap_or(32.0),
        beta_slow: f.positive_if("beta_slow")?.unwrap_or(1.0),
        mscale: f.not_negative_if("mscale")?.filter(|m| *m != 0.0),
        mscale_all_dim: f.not_negative_if("mscale_all_dim")?.filter(|m| *m != 0.0),
        attention_factor: f.positive_if("attention_factor")?,
        truncate: f.flag_or("truncate", true)?,
    };
    if yarn.beta_fast < yarn.beta_slow {
        return Err(f.contradiction("beta_fast", "beta_slow"));
    }
    Ok(RopeScaling::Yarn(yarn))
}

fn parse_llama3(f: &Fields<'_>, factor: f64) -> Result<RopeScaling, ModelConfigError> {
    let llama = Llama3Rope {
        factor,
        low: f.positive("low_freq_factor")?,
        high: f.positive("high_freq_factor")?,
        original: f.size("original_max_position_embeddings", 1 << 30)?,
    };
    if llama.low >= llama.high {
        return Err(f.contradiction("low_freq_factor", "high_freq_factor"));
    }
    Ok(RopeScaling::Llama3(llama))
}
