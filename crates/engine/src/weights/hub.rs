use super::WeightsError;
use super::files::read_text;
use std::path::{Path, PathBuf};

/// The folder of a revision in a repository of the Hugging Face hub's cache: `snapshots/<commit>`, where
/// `refs/<name>` holds the commit of a branch or tag.
///
/// # Errors
/// The folder is no such repository, the revision is no name, or it is not there.
pub fn hub_revision(repository: &Path, revision: &str) -> Result<PathBuf, WeightsError> {
    let bad = |reason: String| WeightsError::Directory {
        path: repository.to_owned(),
        reason,
    };
    let snapshots = repository.join("snapshots");
    if !snapshots.is_dir() {
        return Err(bad(format!(
            "model-revision is {revision:?}, but this is no repository of the hub's cache: it has no folder snapshots"
        )));
    }
    let plain = revision.split('/').all(|part| {
        !part.is_empty()
            && !part.starts_with('.')
            && part
                .bytes()
                .all(|byte| byte.is_ascii_alphanumeric() || b"._-".contains(&byte))
    });
    if !plain {
        return Err(bad(format!(
            "model-revision is {revision:?}; allowed: a branch, a tag or a commit"
        )));
    }
    let named = repository.join("refs").join(revision);
    let commit = if named.exists() {
        read_text(&named)?.trim().to_owned()
    } else {
        revision.to_owned()
    };
    let is_commit = commit.len() == 40 && commit.bytes().all(|byte| byte.is_ascii_hexdigit());
    let folder = snapshots.join(&commit);
    if is_commit && folder.is_dir() {
        return Ok(folder);
    }
    let mut there: Vec<String> = std::fs::read_dir(&snapshots)
        .map_err(|error| bad(error.to_string()))?
        .filter_map(|entry| entry.ok()?.file_name().into_string().ok())
        .collect();
    there.sort();
    Err(bad(format!(
        "model-revision is {revision:?}, which is not in the cache; there: {}",
        there.join(", ")
    )))
}
