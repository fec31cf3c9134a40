//! The bundled model: its files stand in the binary and are written out for the instances to map.

use crate::exit::{Code, Failure};
use std::io::Write;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use xxhash_rust::xxh3::Xxh3;

const FILES: &[(&str, &[u8])] = &[
    (
        "config.json",
        include_bytes!("../../../../../models/demo/config.json"),
    ),
    (
        "generation_config.json",
        include_bytes!("../../../../../models/demo/generation_config.json"),
    ),
    (
        "model.safetensors",
        include_bytes!("../../../../../models/demo/model.safetensors"),
    ),
    (
        "tokenizer.json",
        include_bytes!("../../../../../models/demo/tokenizer.json"),
    ),
    (
        "tokenizer_config.json",
        include_bytes!("../../../../../models/demo/tokenizer_config.json"),
    ),
];

/// The model's files in a folder.
pub(super) enum Bundle {
    /// In the user's cache, for the next time too.
    Cached(PathBuf),
    /// In a folder of this run, removed with it.
    Temporary(tempfile::TempDir),
}

impl Bundle {
    pub(super) fn folder(&self) -> &Path {
        match self {
            Self::Cached(folder) => folder,
            Self::Temporary(folder) => folder.path(),
        }
    }
}

/// Writes the files, or finds them there from an earlier run.
pub(super) fn unpack() -> Result<Bundle, Failure> {
    if let Some(folder) =
        cache().map(|cache| cache.join("twinfer").join(format!("demo-{:032x}", hash())))
        && fill(&folder).is_ok()
    {
        return Ok(Bundle::Cached(folder));
    }
    let fail = |error| {
        Failure::new(
            Code::Failed,
            format!("the bundled model cannot be written: {error}"),
        )
    };
    let folder = tempfile::Builder::new()
        .prefix("twinfer-demo-")
        .tempdir()
        .map_err(fail)?;
    fill(folder.path()).map_err(fail)?;
    Ok(Bundle::Temporary(folder))
}

fn cache() -> Option<PathBuf> {
    let absolute = |name: &str| {
        std::env::var_os(name)
            .map(PathBuf::from)
            .filter(|path| path.is_absolute())
    };
    absolute("XDG_CACHE_HOME").or_else(|| absolute("HOME").map(|home| home.join(".cache")))
}

/// Over names and contents, so that another model gets another folder.
fn hash() -> u128 {
    let mut hash = Xxh3::new();
    for (name, bytes) in FILES {
        hash.update(name.as_bytes());
        hash.update(&(bytes.len() as u64).to_le_bytes());
        hash.update(bytes);
    }
    hash.digest128()
}

/// Makes the folder hold exactly these files. A file is compared with what it must be, since it may have
/// been cut or changed, and comes into place by a rename, since another demo may read it.
fn fill(folder: &Path) -> std::io::Result<()> {
    std::fs::DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(folder)?;
    for (name, bytes) in FILES {
        let path = folder.join(name);
        if std::fs::read(&path).is_ok_and(|found| found == *bytes) {
            continue;
        }
        let mut file = tempfile::NamedTempFile::new_in(folder)?;
        file.write_all(bytes)?;
        file.persist(&path).map_err(|error| error.error)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_damaged_or_missing_file_is_written_again() {
        let folder = tempfile::tempdir().unwrap();
        fill(folder.path()).unwrap();
        let weights = folder.path().join("model.safetensors");
        std::fs::write(&weights, b"cut").unwrap();
        std::fs::remove_file(folder.path().join("config.json")).unwrap();
        fill(folder.path()).unwrap();
        for (name, bytes) in FILES {
            assert!(
                std::fs::read(folder.path().join(name)).unwrap() == *bytes,
                "{name}"
            );
        }
        let count = std::fs::read_dir(folder.path()).unwrap().count();
        assert_eq!(count, FILES.len(), "a temporary file was left");
    }
}
