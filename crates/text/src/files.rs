use crate::TextError;
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// Larger files in a model directory are refused before they are read.
const MAX_FILE_BYTES: u64 = 256 << 20;

/// The texts of a model beside its weights, by file name: `config.json`, `tokenizer.json`, ...
#[derive(Clone, Debug)]
pub struct ModelTexts {
    path: PathBuf,
    /// None: `path` is a directory that holds them as files.
    given: Option<BTreeMap<&'static str, String>>,
}

/// The path of a file of a model directory, after links: it must stay inside, or in the blobs beside it
/// where the directory is a snapshot of the Hugging Face hub's cache, so that a model from a stranger
/// cannot make the server read other files.
///
/// # Errors
/// The file is absent ([`TextError::Read`]), or a link leads out of the directory
/// ([`TextError::Invalid`]).
pub fn inside(dir: &Path, name: &str) -> Result<PathBuf, TextError> {
    let path = dir.join(name);
    let io = |source| TextError::Read {
        path: path.clone(),
        source,
    };
    let real = std::fs::canonicalize(&path).map_err(io)?;
    let root = std::fs::canonicalize(dir).map_err(io)?;
    if real.starts_with(&root) {
        return Ok(real);
    }
    let hub_blobs = root
        .parent()
        .filter(|parent| parent.file_name().is_some_and(|name| name == "snapshots"))
        .and_then(Path::parent)
        .map(|repository| repository.join("blobs"));
    if hub_blobs.is_some_and(|blobs| real.starts_with(blobs)) {
        return Ok(real);
    }
    Err(TextError::Invalid {
        path,
        message: format!(
            "is a link out of the model directory, to {}",
            real.display()
        ),
    })
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
    /// The file cannot be read, is no regular file, lies outside of the directory, or is absurdly large.
    pub fn read(&self, name: &str) -> Result<Option<Vec<u8>>, TextError> {
        if let Some(texts) = &self.given {
            return Ok(texts.get(name).map(|text| text.clone().into_bytes()));
        }
        let real = match inside(&self.path, name) {
            Ok(path) => path,
            Err(TextError::Read { source, .. })
                if source.kind() == std::io::ErrorKind::NotFound =>
            {
                return Ok(None);
            }
            Err(error) => return Err(error),
        };
        let path = self.path.join(name);
        let failed = |source| TextError::Read {
            path: path.clone(),
            source,
        };
        let meta = match std::fs::metadata(&real) {
            Ok(meta) => meta,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(failed(error)),
        };
        let refused = |message: String| {
            Err(TextError::Invalid {
                path: path.clone(),
                message,
            })
        };
        // A FIFO would block in open().
        if !meta.is_file() {
            return refused("is not a regular file".to_owned());
        }
        if meta.len() > MAX_FILE_BYTES {
            let size = meta.len();
            return refused(format!(
                "the file has {size} bytes; allowed are {MAX_FILE_BYTES}"
            ));
        }
        std::fs::read(&real).map(Some).map_err(failed)
    }

    /// A text that must be there.
    ///
    /// # Errors
    /// As [`ModelTexts::read`], and when it is missing.
    pub fn required(&self, name: &str) -> Result<Vec<u8>, TextError> {
        self.read(name)?.ok_or_else(|| TextError::Read {
            path: self.path(name),
            source: std::io::ErrorKind::NotFound.into(),
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
