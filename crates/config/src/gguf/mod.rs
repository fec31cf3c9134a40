//! GGUF files: what one says about its model, in the words of a Hugging Face directory.
//!
//! A GGUF file holds config, tokenizer and tensors in one. Here its header is read and checked, and
//! turned into the texts that a directory would hold, so that there is one reader of model configs and
//! one of tokenizers. Format: `docs/gguf.md` of the ggml project, versions 2 and 3, little-endian.

mod model;
mod read;
mod tensors;
#[cfg(test)]
mod tests;
mod tokenizer;

pub use tensors::{GgufPart, GgufTensor, GgufType};

use std::collections::BTreeMap;
use std::fs::{File, Metadata};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use twinfer_sys::file::{FileError, open_regular, refuse_lfs_pointer};

/// An open GGUF file, its header checked against its size.
#[derive(Debug)]
pub struct Gguf {
    path: PathBuf,
    file: File,
    meta: Metadata,
    metadata: BTreeMap<String, MetaValue>,
    tensors: Vec<GgufTensor>,
}

/// A value of the metadata.
#[derive(Clone, Debug, PartialEq)]
pub enum MetaValue {
    /// Any unsigned integer.
    Unsigned(u64),
    /// Any signed integer.
    Signed(i64),
    /// f32 or f64.
    Float(f64),
    /// Truth.
    Bool(bool),
    /// UTF-8.
    Text(String),
    /// Values of one type.
    List(Vec<MetaValue>),
}

/// Why a GGUF file was refused.
#[derive(Debug, thiserror::Error)]
pub enum GgufError {
    /// It cannot be read.
    #[error("cannot read {}: {source}", path.display())]
    Io {
        /// File.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// It is not what it should be.
    #[error("{}: {reason}", path.display())]
    File {
        /// File.
        path: PathBuf,
        /// What is wrong, and what is allowed.
        reason: String,
    },
}

impl Gguf {
    /// Reads and checks the header; no tensor's data.
    ///
    /// # Errors
    /// The file cannot be read, is no GGUF file of version 2 or 3, is truncated, or holds a type of
    /// tensor that is not served.
    pub fn open(path: &Path) -> Result<Self, GgufError> {
        let io = |source| GgufError::Io {
            path: path.to_owned(),
            source,
        };
        let refused = |error| match error {
            FileError::Io(source) => io(source),
            other => GgufError::File {
                path: path.to_owned(),
                reason: other.to_string(),
            },
        };
        let (file, meta) = open_regular(path).map_err(refused)?;
        let size = meta.len();
        let mut start = [0; 512];
        let read = file.read_at(&mut start, 0).map_err(io)?;
        refuse_lfs_pointer(&start[..read], size).map_err(refused)?;
        let header =
            read::header(io::BufReader::with_capacity(1 << 20, &file), size).map_err(|error| {
                match error {
                    read::ReadError::Io(source) => io(source),
                    read::ReadError::Bad(reason) => GgufError::File {
                        path: path.to_owned(),
                        reason,
                    },
                }
            })?;
        Ok(Self {
            path: path.to_owned(),
            file,
            meta,
            metadata: header.metadata,
            tensors: header.tensors,
        })
    }

    /// File.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The open file.
    pub fn file(&self) -> &File {
        &self.file
    }

    /// What the system said of the file before its header was read.
    pub fn meta(&self) -> &Metadata {
        &self.meta
    }

    /// A value of the metadata.
    pub fn get(&self, key: &str) -> Option<&MetaValue> {
        self.metadata.get(key)
    }

    /// All tensors, as the file names them.
    pub fn tensors(&self) -> &[GgufTensor] {
        &self.tensors
    }

    fn bad(&self, reason: String) -> GgufError {
        GgufError::File {
            path: self.path.clone(),
            reason,
        }
    }

    fn text(&self, key: &str) -> Result<&str, GgufError> {
        match self.metadata.get(key) {
            Some(MetaValue::Text(text)) => Ok(text),
            found => Err(self.unexpected(key, found, "a text")),
        }
    }

    fn integer(&self, key: &str) -> Result<u64, GgufError> {
        self.integer_if(key)?
            .ok_or_else(|| self.unexpected(key, None, "an integer of 0 or more"))
    }

    fn integer_if(&self, key: &str) -> Result<Option<u64>, GgufError> {
        match self.metadata.get(key) {
            None => Ok(None),
            Some(MetaValue::Unsigned(value)) => Ok(Some(*value)),
            Some(MetaValue::Signed(value)) if *value >= 0 => Ok(Some(value.unsigned_abs())),
            found => Err(self.unexpected(key, found, "an integer of 0 or more")),
        }
    }

    fn float_if(&self, key: &str) -> Result<Option<f64>, GgufError> {
        match self.metadata.get(key) {
            None => Ok(None),
            Some(MetaValue::Float(value)) => Ok(Some(*value)),
            found => Err(self.unexpected(key, found, "a number")),
        }
    }

    fn flag_if(&self, key: &str) -> Result<Option<bool>, GgufError> {
        match self.metadata.get(key) {
            None => Ok(None),
            Some(MetaValue::Bool(value)) => Ok(Some(*value)),
            found => Err(self.unexpected(key, found, "true or false")),
        }
    }

    fn list(&self, key: &str) -> Result<&[MetaValue], GgufError> {
        match self.metadata.get(key) {
            Some(MetaValue::List(list)) => Ok(list),
            found => Err(self.unexpected(key, found, "a list")),
        }
    }

    fn unexpected(&self, key: &str, found: Option<&MetaValue>, allowed: &str) -> GgufError {
        self.bad(match found {
            None => format!("lacks {key}; it must be {allowed}"),
            Some(MetaValue::List(list)) => {
                format!("{key} is a list of {}; allowed: {allowed}", list.len())
            }
            Some(value) => format!("{key} is {value:?}; allowed: {allowed}"),
        })
    }
}
