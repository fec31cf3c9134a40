//! Weight files: which files a model directory has, whether they are whole, where each tensor lies.
//!
//! What is accepted: one `model*.safetensors`, or several with `model.safetensors.index.json`;
//! tensors in bf16 or f32. What is refused, by name: several files without an index, pickle files,
//! f16 and quantised tensors, links that leave the directory (but for the hub cache's own layout,
//! where `snapshots/<revision>/` links into `blobs/` of the same repository).
//!
//! Everything is checked before a byte of a tensor is read: [`Checkpoint::open`] reads headers only.
//! Tensors are read by position, not mapped, so that a file truncated under the reader is an error
//! and not a SIGBUS.

mod files;
mod shard;

pub(crate) use files::{inside, read_text};
pub use shard::WeightDtype;

use files::WeightFiles;
use shard::{Place, Shard};
use std::collections::HashMap;
use std::path::{Path, PathBuf};
use twinfer_config::model::TensorSpecs;

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
    /// Tensors are missing or have another shape or type than config.json asks for.
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
    /// By index in the specs.
    places: Vec<Place>,
    /// A head in the files although the embedding is the head.
    spare_head: Option<Place>,
    /// Worth telling, but no reason to refuse.
    pub warnings: Vec<String>,
}

impl Checkpoint {
    /// Finds and checks the weight files of a directory against the tensors a config asks for.
    /// Reads headers only.
    ///
    /// # Errors
    /// See [`WeightsError`]; all missing and wrong tensors come in one error.
    pub fn open(dir: &Path, specs: &TensorSpecs) -> Result<Self, WeightsError> {
        let files = WeightFiles::find(dir)?;
        let mut shards = Vec::with_capacity(files.shards.len());
        for path in &files.shards {
            shards.push(Shard::open(path)?);
        }
        let mut found: HashMap<&str, (usize, &safetensors::tensor::TensorInfo)> = HashMap::new();
        let mut wrong = Vec::new();
        for (number, shard) in shards.iter().enumerate() {
            for (name, info) in shard.tensors() {
                if let Some((other, _)) = found.insert(name, (number, info)) {
                    wrong.push(format!(
                        "{name} stands in both {} and {}",
                        shards[other].name(),
                        shard.name()
                    ));
                }
            }
        }

        let mut missing = Vec::new();
        let mut warnings = Vec::new();
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
        let mut places = Vec::with_capacity(specs.tensors.len());
        for spec in &specs.tensors {
            let Some((number, info)) = found.remove(spec.name.as_str()) else {
                if !files.map.contains_key(&spec.name) {
                    missing.push(spec.name.clone());
                }
                continue;
            };
            match shards[number].place(number, info) {
                _ if info.shape != spec.shape => wrong.push(format!(
                    "{} has shape {:?}, config.json asks for {:?}",
                    spec.name, info.shape, spec.shape
                )),
                Ok(place) => places.push(place),
                Err(dtype) => wrong.push(format!("{} is {dtype}; allowed: BF16, F32", spec.name)),
            }
        }
        if !missing.is_empty() || !wrong.is_empty() {
            missing.sort();
            wrong.sort();
            return Err(WeightsError::Tensors { missing, wrong });
        }
        let spare_head = found
            .get("lm_head.weight")
            .filter(|_| specs.tied_head)
            .and_then(|(number, info)| shards[*number].place(*number, info).ok());
        let mut unknown: Vec<&str> = found
            .into_keys()
            .filter(|name| !specs.is_spare(name))
            .collect();
        unknown.sort_unstable();
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
        Ok(Self {
            shards,
            places,
            spare_head,
            warnings,
        })
    }

    /// Bytes of all tensors that will be read.
    pub fn bytes(&self) -> u64 {
        self.places.iter().map(|place| place.len as u64).sum()
    }

    /// Type of a tensor, by its index in the specs.
    pub fn dtype(&self, tensor: usize) -> Option<WeightDtype> {
        self.places.get(tensor).map(|place| place.dtype)
    }

    /// Reads a tensor, by its index in the specs, into `buffer` of just its size: little-endian,
    /// row-major.
    ///
    /// # Errors
    /// The file cannot be read, or has become shorter.
    pub fn read(&self, tensor: usize, buffer: &mut [u8]) -> Result<(), WeightsError> {
        let Some((place, shard)) = self
            .places
            .get(tensor)
            .and_then(|place| Some((place, self.shards.get(place.shard)?)))
        else {
            return Ok(());
        };
        shard.read(place.offset, buffer)
    }

    /// Bytes of a head that the files hold although the embedding is the head, if they do.
    ///
    /// # Errors
    /// As [`Checkpoint::read`].
    pub fn read_spare_head(&self) -> Result<Option<Vec<u8>>, WeightsError> {
        let Some((place, shard)) = self
            .spare_head
            .and_then(|place| Some((place, self.shards.get(place.shard)?)))
        else {
            return Ok(None);
        };
        let mut bytes = vec![0; place.len];
        shard.read(place.offset, &mut bytes)?;
        Ok(Some(bytes))
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
