use super::WeightsError;
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use twinfer_sys::file::{self, FileError};

const SUFFIX: &str = ".safetensors";
const INDEX_SUFFIX: &str = ".safetensors.index.json";
/// Stems of weight files; ModelSlim has its own.
const PLAIN: &str = "model";
const MODEL_SLIM: &str = "quant_model_weight";
/// ModelSlim's description, in all its names.
const DESCRIPTION: &str = "quant_model_description";

/// The weight files of a directory.
#[derive(Default)]
pub(super) struct WeightFiles {
    /// Files to open, without doubles, in order of name: name in the directory, and path after links.
    pub(super) shards: Vec<(String, PathBuf)>,
    /// Tensor to file name, as the index says; empty without an index.
    pub(super) map: BTreeMap<String, String>,
    /// Weight files that the index does not name.
    pub(super) unnamed: Vec<String>,
    /// ModelSlim's description of the weights, if there is one.
    pub(super) description: Option<PathBuf>,
}

impl WeightFiles {
    pub(super) fn find(dir: &Path) -> Result<Self, WeightsError> {
        let names = list(dir)?;
        let layout = |reason: String| WeightsError::Layout {
            path: dir.to_owned(),
            reason,
        };
        let with = |stem: &str, suffix: &str| -> Vec<&String> {
            let chosen = names
                .iter()
                .filter(|name| name.starts_with(stem) && name.ends_with(suffix));
            chosen.collect()
        };
        let description = match with(DESCRIPTION, ".json")[..] {
            [] => None,
            [one] => Some(inside(dir, one)?),
            [first, second, ..] => {
                return Err(layout(format!(
                    "has {first} and {second}; allowed: one description of the quantisation"
                )));
            }
        };
        let stem = if description.is_some() && !with(MODEL_SLIM, SUFFIX).is_empty() {
            MODEL_SLIM
        } else {
            PLAIN
        };
        let weights = with(stem, SUFFIX);
        let mut files = match with(stem, INDEX_SUFFIX)[..] {
            [index] => Self::indexed(dir, index, &weights)?,
            [first, second, ..] => {
                return Err(layout(format!(
                    "has {first} and {second}; allowed: one index"
                )));
            }
            [] => match weights[..] {
                [one] => Self {
                    shards: vec![((*one).clone(), inside(dir, one)?)],
                    map: BTreeMap::new(),
                    unnamed: Vec::new(),
                    description: None,
                },
                [] => return Err(layout(nothing_served(&names))),
                _ => {
                    let list: Vec<&str> = weights.iter().map(|name| name.as_str()).collect();
                    return Err(layout(format!(
                        "has {} weight files ({}) but no {stem}{INDEX_SUFFIX}; allowed: one {stem}.safetensors, or several files with an index",
                        list.len(),
                        list.join(", ")
                    )));
                }
            },
        };
        files.description = description;
        Ok(files)
    }

    fn indexed(dir: &Path, name: &str, weights: &[&String]) -> Result<Self, WeightsError> {
        let index = inside(dir, name)?;
        let whole = name.replace(INDEX_SUFFIX, SUFFIX);
        let bad = |reason: String| WeightsError::File {
            path: index.clone(),
            reason,
        };
        let text = read_text(&index)?;
        let root: Value = serde_json::from_str(&text)
            .map_err(|error| bad(format!("is not JSON ({} bytes): {error}", text.len())))?;
        let Some(entries) = root.get("weight_map").and_then(Value::as_object) else {
            return Err(bad(
                "has no object weight_map (tensor name to file name)".to_owned()
            ));
        };
        let mut map = BTreeMap::new();
        for (tensor, file) in entries {
            let file = file
                .as_str()
                .filter(|file| is_plain_name(file))
                .ok_or_else(|| {
                    bad(format!("weight_map: {tensor} is {file}; allowed: the name of a file in the same directory"))
                })?;
            map.insert(tensor.clone(), file.to_owned());
        }
        let named: BTreeSet<&String> = map.values().collect();
        if named.is_empty() {
            return Err(bad("weight_map is empty".to_owned()));
        }
        let unnamed: Vec<String> = weights
            .iter()
            .filter(|name| !named.contains(**name))
            .map(|name| (*name).clone())
            .collect();
        let missing: Vec<String> = named
            .iter()
            .filter(|name| fs::symlink_metadata(dir.join(name)).is_err())
            .map(|name| (*name).clone())
            .collect();
        if !missing.is_empty() {
            return Err(WeightsError::MissingFiles {
                index,
                missing,
                unnamed,
            });
        }
        if unnamed.contains(&whole) {
            return Err(WeightsError::Layout {
                path: dir.to_owned(),
                reason: format!(
                    "has {whole} and a {name} that does not name it; remove the one that is not meant"
                ),
            });
        }
        let shards = named
            .iter()
            .map(|name| Ok(((*name).clone(), inside(dir, name)?)))
            .collect::<Result<_, WeightsError>>()?;
        Ok(Self {
            shards,
            map,
            unnamed,
            description: None,
        })
    }
}

/// [`file::inside`] with the error of weight files.
pub(crate) fn inside(dir: &Path, name: &str) -> Result<PathBuf, WeightsError> {
    file::inside(dir, name).map_err(|error| refused(&dir.join(name), error))
}

/// Text of a file of the model directory.
///
/// # Errors
/// It is no regular file, larger than 256 MiB, unreadable, or not UTF-8.
pub(crate) fn read_text(path: &Path) -> Result<String, WeightsError> {
    const MOST: u64 = 256 << 20;
    let bytes = file::read_regular(path, MOST).map_err(|error| refused(path, error))?;
    String::from_utf8(bytes).map_err(|error| WeightsError::File {
        path: path.to_owned(),
        reason: format!("is not UTF-8: {}", error.utf8_error()),
    })
}

/// Why a file was not taken, with its name.
pub(super) fn refused(path: &Path, error: FileError) -> WeightsError {
    let path = path.to_owned();
    match error {
        FileError::Io(source) => WeightsError::Io { path, source },
        other => WeightsError::File {
            path,
            reason: other.to_string(),
        },
    }
}

fn list(dir: &Path) -> Result<BTreeSet<String>, WeightsError> {
    let bad = |reason: String| WeightsError::Directory {
        path: dir.to_owned(),
        reason,
    };
    let entries = fs::read_dir(dir).map_err(|error| bad(error.to_string()))?;
    let mut names = BTreeSet::new();
    for entry in entries {
        let entry = entry.map_err(|error| bad(error.to_string()))?;
        if let Ok(name) = entry.file_name().into_string() {
            names.insert(name);
        }
    }
    Ok(names)
}

fn is_plain_name(name: &str) -> bool {
    !name.is_empty() && name != "." && name != ".." && !name.contains(['/', '\\', '\0'])
}

/// Why a directory without `model*.safetensors` is refused.
fn nothing_served(names: &BTreeSet<String>) -> String {
    let with = |endings: &[&str]| -> Vec<&str> {
        names
            .iter()
            .map(String::as_str)
            .filter(|name| endings.iter().any(|end| name.ends_with(end)))
            .collect()
    };
    let allowed = "allowed: model.safetensors, or several model*.safetensors with model.safetensors.index.json";
    let pickles = with(&[".bin", ".pt", ".pth"]);
    if !pickles.is_empty() {
        return format!(
            "has weights as pickle files only ({}), which can run code when read; convert them to safetensors; {allowed}",
            pickles.join(", ")
        );
    }
    let others = with(&[".safetensors", ".gguf"]);
    if !others.is_empty() {
        return format!(
            "has {} but no model*.safetensors; {allowed}",
            others.join(", ")
        );
    }
    format!("has no weight files; {allowed}")
}
