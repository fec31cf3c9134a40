//! Weight files: which files a model directory has, whether they are whole, where each tensor lies.
//!
//! What is accepted: one `model*.safetensors`, or several with `model.safetensors.index.json`, or
//! ModelSlim's `quant_model_weight*` with their description, with tensors in bf16 or f32, and quantised
//! ones of the schemes that config.json or the description announce; or one GGUF file, whose types
//! other than bf16 are decoded to f32. What is refused, by name: several files without an index, pickle
//! files, f16 matrices of safetensors, unannounced quantisation, layers that config.json does not know,
//! links that leave the directory (but for the hub cache's own layout, where `snapshots/<revision>/`
//! links into `blobs/` of the same repository).
//!
//! Names, shapes, types and schemes are checked before a byte of a tensor is read: [`Checkpoint::open`]
//! reads headers, and fixed scales of inputs. What the values of whole tensors show, such as offsets that are not 0, is found while
//! they are read.
//! Tensors are read by position, not mapped, so that a file truncated under the reader is an error
//! and not a SIGBUS.

mod files;
mod ggml;
mod hub;
mod inputs;
mod scheme;
mod shard;

pub(crate) use files::{inside, read_text};
pub use hub::hub_revision;
pub(crate) use inputs::fixed_input;
pub(crate) use scheme::{Format, Scheme, fused, too_long_for};
pub use shard::WeightDtype;

use files::WeightFiles;
use scheme::{telltale, too_long, unequal_partners};
use shard::{Info, Place, Shard};
use std::collections::{BTreeMap, HashMap, HashSet};
use std::fmt::Write;
use std::path::{Path, PathBuf};
use twinfer_config::gguf::{Gguf, GgufError};
use twinfer_config::model::{QuantizationConfig, TensorKind, TensorSpec, TensorSpecs};

/// Names shown in one message; a directory with the wrong model's files has tens of thousands.
const NAMES_SHOWN: usize = 200;

/// Why weight files were refused.
#[derive(Debug, thiserror::Error)]
pub enum WeightsError {
    /// The directory is not there, or not a directory.
    #[error("model directory {}: {reason}", path.display())]
    Directory {
        /// Directory.
        path: PathBuf,
        /// Why.
        reason: String,
    },
    /// The directory has no weights that are served, or more than one set.
    #[error("model directory {}: {reason}", path.display())]
    Layout {
        /// Directory.
        path: PathBuf,
        /// Why, and what is allowed.
        reason: String,
    },
    /// Files that the index names are not there.
    #[error("{} names files that are missing: {}{}", index.display(), missing.join(", "), hint(unnamed))]
    MissingFiles {
        /// Index file.
        index: PathBuf,
        /// Missing files.
        missing: Vec<String>,
        /// Weight files that the index does not name: one of them may be a missing one renamed.
        unnamed: Vec<String>,
    },
    /// A file cannot be opened or read.
    #[error("cannot read {}: {source}", path.display())]
    Io {
        /// File.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// A file is not what it should be.
    #[error("{}: {reason}", path.display())]
    File {
        /// File.
        path: PathBuf,
        /// What is wrong; sizes in bytes, expected and actual.
        reason: String,
    },
    /// A GGUF file was refused.
    #[error(transparent)]
    Gguf(#[from] Box<GgufError>),
    /// A file changed between the check and the end of loading.
    #[error("{} changed while it was loaded: expected {expected} bytes, found {actual}{}", path.display(),
        if expected == actual { " written at another time" } else { "" })]
    Changed {
        /// File.
        path: PathBuf,
        /// Bytes when it was checked.
        expected: u64,
        /// Bytes now.
        actual: u64,
    },
    /// Tensors are missing, have another shape or type than config.json asks for, or show that it is not
    /// the files' config.
    #[error("{}", tensor_report(missing, wrong))]
    Tensors {
        /// Names of missing tensors, each with the file that should hold it if the index says so.
        missing: Vec<String>,
        /// What is wrong with present ones.
        wrong: Vec<String>,
    },
}

/// Checked weight files of one model.
#[derive(Debug)]
pub struct Checkpoint {
    shards: Vec<Shard>,
    places: BTreeMap<String, Place>,
    /// By name of the matrix; those that are stored as plain numbers are left out.
    schemes: HashMap<String, Scheme>,
    format: Format,
    /// A head in the files although the embedding is the head.
    spare_head: Option<Place>,
    /// Worth telling, but no reason to refuse.
    pub warnings: Vec<String>,
}

/// Names of a checkpoint's tensors, each with the number of its shard.
type Found<'a> = HashMap<&'a str, (usize, &'a Info)>;

impl Checkpoint {
    /// Finds and checks the weight files of a directory against the tensors a config asks for.
    /// Reads headers, and the fixed scales of inputs, only.
    ///
    /// # Errors
    /// See [`WeightsError`]; all missing and wrong tensors come in one error.
    pub fn open(
        dir: &Path,
        specs: &TensorSpecs,
        quantization: Option<&QuantizationConfig>,
    ) -> Result<Self, WeightsError> {
        let files = WeightFiles::find(dir)?;
        let format = Format::of(files.description.as_deref(), quantization)?;
        let mut shards = Vec::with_capacity(files.shards.len());
        for (name, path) in &files.shards {
            shards.push(Shard::open(name, path)?);
        }
        Self::check(shards, &files, format, specs)
    }

    /// As [`Checkpoint::open`], for a GGUF file.
    ///
    /// # Errors
    /// As there; also a tensor that has no place in a Hugging Face checkpoint.
    pub fn open_gguf(gguf: &Gguf, specs: &TensorSpecs) -> Result<Self, WeightsError> {
        let shards = vec![Shard::open_gguf(gguf)?];
        Self::check(
            shards,
            &WeightFiles::default(),
            Format::of(None, None)?,
            specs,
        )
    }

    fn check(
        shards: Vec<Shard>,
        files: &WeightFiles,
        format: Format,
        specs: &TensorSpecs,
    ) -> Result<Self, WeightsError> {
        let mut wrong = Vec::new();
        let mut found: Found<'_> = HashMap::new();
        for (number, shard) in shards.iter().enumerate() {
            for info in shard.tensors() {
                if let Some((other, _)) = found.insert(&info.name, (number, info)) {
                    wrong.push(format!(
                        "{} stands in both {} and {}",
                        info.name,
                        shards[other].name(),
                        shard.name()
                    ));
                }
            }
        }
        wrong.extend(specs.contradictions(found.keys().copied()));

        let mut missing = Vec::new();
        for (name, file) in &files.map {
            match found.get(name.as_str()) {
                Some((number, _)) if shards[*number].name() == *file => {}
                Some((number, _)) => wrong.push(format!(
                    "{name} stands in {}, the index says {file}",
                    shards[*number].name()
                )),
                None if specs.is_spare(name) => {}
                None => missing.push(format!("{name} (the index says it is in {file})")),
            }
        }
        for (name, scheme) in format.announced() {
            if !found.contains_key(name) && !specs.is_spare(name) {
                missing.push(format!("{name} (described with scheme {scheme})"));
            }
        }
        let mut places = BTreeMap::new();
        let mut schemes = HashMap::new();
        for spec in &specs.tensors {
            let stored = found
                .get(spec.name.as_str())
                .and_then(|(number, info)| info.place(*number).ok())
                .map(|place| place.dtype);
            let scheme = match format.scheme(spec, stored) {
                Ok(scheme) => scheme,
                Err(reason) => {
                    wrong.push(reason);
                    continue;
                }
            };
            if scheme != Scheme::Plain {
                schemes.insert(spec.name.clone(), scheme);
            }
            for required in scheme.required(spec).into_iter().chain(norm_parts(spec)) {
                let Some((number, info)) = found.remove(required.name.as_str()) else {
                    if !required.optional && !files.map.contains_key(&required.name) {
                        missing.push(required.name);
                    }
                    continue;
                };
                let place = info.place(number);
                let allowed =
                    || -> Vec<&str> { required.dtypes.iter().map(|dtype| dtype.name()).collect() };
                match place {
                    _ if !required.shapes.contains(&info.shape) => wrong.push(format!(
                        "{} has shape {:?}, config.json asks for {:?}",
                        required.name,
                        info.shape,
                        required.shapes.first().cloned().unwrap_or_default()
                    )),
                    Ok(place) if required.dtypes.contains(&place.dtype) => {
                        places.insert(required.name, place);
                    }
                    Ok(place) => wrong.push(format!(
                        "{} is {}; allowed: {}",
                        required.name,
                        place.dtype.name(),
                        allowed().join(", ")
                    )),
                    Err(dtype) => wrong.push(format!(
                        "{} is {dtype}; allowed: {}",
                        required.name,
                        allowed().join(", ")
                    )),
                }
            }
        }
        wrong.extend(unequal_partners(specs, &schemes));
        wrong.extend(too_long(specs, &schemes));
        let spare_head = found
            .get("lm_head.weight")
            .filter(|_| specs.tied_head)
            .and_then(|(number, info)| info.place(*number).ok());
        let warnings = leftovers(specs, files, found, &mut wrong);
        if !missing.is_empty() || !wrong.is_empty() {
            missing.sort();
            wrong.sort();
            return Err(WeightsError::Tensors { missing, wrong });
        }
        let mut checkpoint = Self {
            shards,
            places,
            schemes,
            format,
            spare_head,
            warnings,
        };
        let mut wrong = checkpoint.wrong_inputs(specs)?;
        if !wrong.is_empty() {
            wrong.sort();
            return Err(WeightsError::Tensors {
                missing: Vec::new(),
                wrong,
            });
        }
        if checkpoint.schemes.values().any(|s| *s == Scheme::SlimMix) {
            checkpoint.warnings.push(
                "scheme W8A8_MIX would give other answers in prefill than in decode; its layers are computed with a scale per token in both"
                    .to_owned(),
            );
        }
        Ok(checkpoint)
    }

    /// Bytes of all tensors that will be read.
    pub fn bytes(&self) -> u64 {
        self.places.values().map(|place| place.len as u64).sum()
    }

    /// Bytes of the tensors that `wanted` names.
    pub(crate) fn bytes_where(&self, wanted: impl Fn(&str) -> bool) -> u64 {
        let places = self.places.iter().filter(|(name, _)| wanted(name));
        places.map(|(_, place)| place.len as u64).sum()
    }

    /// Tensors that will be read.
    pub fn tensors(&self) -> usize {
        self.places.len()
    }

    /// Type of a tensor, if the files have it.
    pub fn dtype(&self, name: &str) -> Option<WeightDtype> {
        self.places.get(name).map(|place| place.dtype)
    }

    /// Bytes that reading a tensor takes beside its values.
    pub(crate) fn beside(&self, name: &str) -> u64 {
        self.places
            .get(name)
            .map_or(0, |place| place.beside() as u64)
    }

    /// Shape of a tensor, if the files have it.
    pub fn shape(&self, name: &str) -> Option<&[usize]> {
        self.places.get(name).map(|place| place.shape.as_slice())
    }

    /// How the weights are stored.
    pub(crate) fn format(&self) -> &Format {
        &self.format
    }

    /// How a matrix is stored.
    pub(crate) fn scheme(&self, name: &str) -> Scheme {
        self.schemes.get(name).copied().unwrap_or(Scheme::Plain)
    }

    /// Are matrices stored as integers?
    pub(crate) fn has_int8(&self) -> bool {
        self.schemes
            .values()
            .any(|scheme| !matches!(scheme, Scheme::Plain | Scheme::BlockFp8 { .. }))
    }

    /// Names every quantised matrix with its scheme, in order of names: what the stored bytes alone do
    /// not tell of how they are computed. Part of the fingerprint; empty for plain numbers.
    pub(crate) fn schemes(&self) -> String {
        let mut list: Vec<_> = self.schemes.iter().collect();
        list.sort_unstable_by_key(|(name, _)| *name);
        list.into_iter()
            .map(|(name, scheme)| format!("{name} {scheme:?}\n"))
            .collect()
    }

    /// Reads a tensor into `buffer` of just its size: little-endian, row-major.
    ///
    /// # Errors
    /// The file cannot be read, or has become shorter; no such tensor was checked, or it has another size.
    pub fn read(&self, name: &str, buffer: &mut [u8]) -> Result<(), WeightsError> {
        let Some((place, shard)) = self
            .places
            .get(name)
            .and_then(|place| Some((place, self.shards.get(place.shard)?)))
        else {
            return Err(WeightsError::Tensors {
                missing: vec![name.to_owned()],
                wrong: Vec::new(),
            });
        };
        if buffer.len() != place.len {
            let wrong = format!("{name} has {} bytes, not {}", place.len, buffer.len());
            return Err(WeightsError::Tensors {
                missing: Vec::new(),
                wrong: vec![wrong],
            });
        }
        shard.read(place, buffer)
    }

    /// Bytes of a head that the files hold although the embedding is the head, if they do.
    ///
    /// # Errors
    /// As [`Checkpoint::read`].
    pub fn read_spare_head(&self) -> Result<Option<Vec<u8>>, WeightsError> {
        let Some((place, shard)) = self
            .spare_head
            .as_ref()
            .and_then(|place| Some((place, self.shards.get(place.shard)?)))
        else {
            return Ok(None);
        };
        let mut bytes = vec![0; place.len];
        shard.read(place, &mut bytes)?;
        Ok(Some(bytes))
    }

    /// Writes what tells these files, and what is read of them, from others: device, inode, size, times of change of
    /// each; place, type and scheme of each tensor. Waits some milliseconds if a file is brand new: what is written to
    /// it from now on must show in its times.
    ///
    /// # Errors
    /// A file's times cannot be had.
    pub(crate) fn write_identity(&self, out: &mut impl Write) -> std::fmt::Result {
        for shard in &self.shards {
            shard.write_identity(out)?;
        }
        let schemes: BTreeMap<_, _> = self.schemes.iter().collect();
        write!(out, "{:?} {schemes:?} {:?}", self.places, self.format)
    }

    /// To be called after the last read: a file written to in the meantime may have given old bytes
    /// for one tensor and new ones for the next.
    ///
    /// # Errors
    /// A file's size or modification time is not what it was.
    pub fn check_unchanged(&self) -> Result<(), WeightsError> {
        self.shards.iter().try_for_each(Shard::check_unchanged)
    }
}

/// What outlier suppression leaves at a norm: a bias, or a changed norm and a bias beside the old one
/// (ModelSlim, current and older spelling).
fn norm_parts(spec: &TensorSpec) -> Vec<scheme::Required> {
    let module = spec.module();
    if spec.kind != TensorKind::Vector || !spec.name.ends_with("norm.weight") {
        return Vec::new();
    }
    ["bias", "module.weight", "module.bias"]
        .into_iter()
        .map(|part| scheme::Required {
            name: format!("{module}.{part}"),
            shapes: vec![spec.shape.clone()],
            dtypes: &[WeightDtype::Bf16, WeightDtype::F32],
            optional: true,
        })
        .collect()
}

/// Judges the tensors that nothing asked for; returns warnings.
fn leftovers(
    specs: &TensorSpecs,
    files: &WeightFiles,
    found: Found<'_>,
    wrong: &mut Vec<String>,
) -> Vec<String> {
    let linear: HashSet<&str> = specs
        .tensors
        .iter()
        .filter(|spec| spec.kind == TensorKind::Linear)
        .map(TensorSpec::module)
        .collect();
    let mut unknown = Vec::new();
    for name in found.into_keys().filter(|name| !specs.is_spare(name)) {
        if telltale(name, |module| linear.contains(module)) {
            wrong.push(format!(
                "{name} would change the result, but neither config.json nor a description of the quantisation announces it"
            ));
        } else {
            unknown.push(name);
        }
    }
    unknown.sort_unstable();
    let mut warnings = Vec::new();
    if !unknown.is_empty() {
        warnings.push(format!(
            "{} tensors that this architecture does not have are ignored: {}",
            unknown.len(),
            joined(&unknown)
        ));
    }
    if !files.unnamed.is_empty() {
        warnings.push(format!(
            "files that the index does not name are ignored: {}",
            files.unnamed.join(", ")
        ));
    }
    warnings
}

/// Names, comma-separated, at most [`NAMES_SHOWN`].
fn joined<S: AsRef<str>>(names: &[S]) -> String {
    let shown: Vec<&str> = names.iter().take(NAMES_SHOWN).map(AsRef::as_ref).collect();
    let mut text = shown.join(", ");
    if names.len() > NAMES_SHOWN {
        text.push_str(&format!(" and {} more", names.len() - NAMES_SHOWN));
    }
    text
}

fn hint(unnamed: &[String]) -> String {
    if unnamed.is_empty() {
        return String::new();
    }
    format!(
        "; the directory also has {}, which the index does not name",
        unnamed.join(", ")
    )
}

fn tensor_report(missing: &[String], wrong: &[String]) -> String {
    let mut parts = Vec::new();
    if !missing.is_empty() {
        parts.push(format!(
            "{} tensors are missing: {}",
            missing.len(),
            joined(missing)
        ));
    }
    if !wrong.is_empty() {
        parts.push(format!(
            "{} tensors do not fit: {}",
            wrong.len(),
            joined(wrong)
        ));
    }
    parts.join("; ")
}
