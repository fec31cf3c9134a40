use crate::TextError;
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use twinfer_sys::file::{self, FileError};

/// Larger files in a model directory are refused before they are read.
const MAX_FILE_BYTES: u64 = 256 << 20;

/// The texts of a model beside its weights, by file name: `config.json`, `tokenizer.json`, ...
#[derive(Clone, Debug)]
pub struct ModelTexts {
    path: PathBuf,
    /// None: `path` is a directory that holds them as files.
    given: Option<BTreeMap<&'static str, String>>,
}

impl ModelTexts {
    /// The files of a directory in Hugging Face layout.
    pub fn directory(dir: &Path) -> Self {
        Self {
            path: dir.to_owned(),
            given: None,
        }
    }

    /// Texts taken out of one file, `path`.
    pub fn given(path: &Path, texts: BTreeMap<&'static str, String>) -> Self {
        Self {
            path: path.to_owned(),
            given: Some(texts),
        }
    }

    /// What errors call a text.
    pub fn path(&self, name: &str) -> PathBuf {
        match self.given {
            None => self.path.join(name),
            Some(_) => self.path.clone(),
        }
    }

    /// A text; none if the model does not have it.
    ///
    /// # Errors
    /// The file cannot be read, is no regular file, is a link out of the directory, a Git LFS pointer, or absurdly
    /// large.
    pub fn read(&self, name: &str) -> Result<Option<Vec<u8>>, TextError> {
        if let Some(texts) = &self.given {
            return Ok(texts.get(name).map(|text| text.clone().into_bytes()));
        }
        let read = file::inside(&self.path, name)
            .and_then(|path| file::read_regular(&path, MAX_FILE_BYTES));
        match read {
            Ok(bytes) => Ok(Some(bytes)),
            Err(error) if error.is_absent() => Ok(None),
            Err(FileError::Io(source)) => Err(TextError::Read {
                path: self.path.join(name),
                source,
            }),
            Err(error) => Err(TextError::Invalid {
                path: self.path.join(name),
                message: error.to_string(),
            }),
        }
    }

    /// A text that must be there.
    ///
    /// # Errors
    /// As [`ModelTexts::read`], and when it is missing.
    pub fn required(&self, name: &str) -> Result<Vec<u8>, TextError> {
        self.read(name)?.ok_or_else(|| TextError::Missing {
            path: self.path(name),
        })
    }

    /// A text as JSON; null if the model does not have it.
    ///
    /// # Errors
    /// As [`ModelTexts::read`], and when it is not JSON.
    pub fn json(&self, name: &str) -> Result<Value, TextError> {
        match self.read(name)? {
            Some(bytes) => serde_json::from_slice(&bytes).map_err(|error| TextError::Invalid {
                path: self.path(name),
                message: error.to_string(),
            }),
            None => Ok(Value::Null),
        }
    }
}
