//! Text to [`Deployment`]: shape and types, every mistake at once. What depends on several values or
//! on the machine is `resolve`'s.

use crate::diagnostic::{Diagnostic, Diagnostics};
use crate::file::{
    DeploymentFile, ROUTER_FLAGS_SAID_ELSEWHERE, SERVE_FLAGS_SAID_ELSEWHERE, inline_schema,
};
use crate::schema::{Checker, is_secret};
use crate::source::{Entry, Node, Step, Value, parse};
use std::io::Read;
use std::path::{Path, PathBuf};
use twinfer_protocol::{API_KEY_ENV, PEER_KEY_ENV};

/// A deployment file that has been read: well-formed, not yet resolved.
#[derive(Clone, Debug)]
pub struct Deployment {
    /// What it says.
    pub file: DeploymentFile,
    name: String,
    text: String,
    folder: PathBuf,
    root: Node,
}

/// Why a file could not be read.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// It cannot be opened or is no text.
    #[error("{path}: {error}")]
    Io {
        /// Its path.
        path: String,
        /// Why.
        error: std::io::Error,
    },
    /// What it says is wrong.
    #[error(transparent)]
    Wrong(#[from] Diagnostics),
}

/// A deployment file is written by hand; larger ones are a mistake.
const MAX_BYTES: u64 = 4 << 20;

impl Deployment {
    /// Reads a file.
    pub fn load(path: &Path) -> Result<Self, LoadError> {
        let text = read_text(path)?;
        let folder = path
            .parent()
            .filter(|folder| !folder.as_os_str().is_empty())
            .unwrap_or(Path::new("."));
        Ok(Self::parse(&path.display().to_string(), &text, folder)?)
    }

    /// Parses text. `name` is what messages call it; relative paths count from `folder`.
    pub fn parse(name: &str, text: &str, folder: &Path) -> Result<Self, Diagnostics> {
        let fail = |found| Diagnostics::new(name, text, found);
        let root = parse(text).map_err(|diagnostic| fail(vec![diagnostic]))?;
        let mut checker = Checker {
            unknown: &unknown_reason,
            value: &value_reason,
            found: Vec::new(),
        };
        let json = checker.check(&inline_schema::<DeploymentFile>(), &root, "");
        if !checker.found.is_empty() {
            return Err(fail(checker.found));
        }
        let file = serde_json::from_value::<DeploymentFile>(json).map_err(|error| {
            fail(vec![Diagnostic {
                place: root.place,
                message: error.to_string(),
                help: None,
                secret: false,
            }])
        })?;
        Ok(Self {
            file,
            name: name.to_owned(),
            text: text.to_owned(),
            folder: folder.to_owned(),
            root,
        })
    }

    /// Folder of the file.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// The model directory.
    pub fn model_path(&self) -> PathBuf {
        self.folder.join(&self.file.model.path)
    }

    /// All mistakes with the file's name and text.
    pub(crate) fn diagnostics(&self, found: Vec<Diagnostic>) -> Diagnostics {
        Diagnostics::new(&self.name, &self.text, found)
    }

    /// A mistake at the value of `path`.
    pub(crate) fn wrong(&self, path: &[Step], message: String, help: Option<String>) -> Diagnostic {
        at_value(&self.root, path, message, help)
    }

    /// Line of the value at `path`, for messages that name a second place.
    pub(crate) fn line(&self, path: &[Step]) -> u32 {
        self.root.at(path).place.line
    }
}

/// Text of a deployment file.
pub(crate) fn read_text(path: &Path) -> Result<String, LoadError> {
    let io = |error| LoadError::Io {
        path: path.display().to_string(),
        error,
    };
    // Not by the size that the system tells: a device or a pipe has none.
    let mut text = String::new();
    let read = std::fs::File::open(path)
        .and_then(|file| file.take(MAX_BYTES + 1).read_to_string(&mut text))
        .map_err(io)?;
    if read as u64 > MAX_BYTES {
        let message = format!("a deployment file has at most {MAX_BYTES} bytes");
        return Err(io(std::io::Error::new(
            std::io::ErrorKind::InvalidData,
            message,
        )));
    }
    Ok(text)
}

/// A mistake at the value of `path` under `root`.
pub(crate) fn at_value(
    root: &Node,
    path: &[Step],
    message: String,
    help: Option<String>,
) -> Diagnostic {
    let node = root.at(path);
    let place = match &node.value {
        Value::Map(entries) => entries.first().map_or(node.place, |entry| entry.key_place),
        _ => node.place,
    };
    Diagnostic {
        place,
        message,
        help,
        secret: false,
    }
}

fn unknown_reason(path: &str, _: &Entry) -> Option<String> {
    let (section, key) = path.rsplit_once('.').unwrap_or(("", path));
    if is_secret(key) {
        return Some(format!(
            "secrets do not stand in files like this: set the environment variable {API_KEY_ENV} or {PEER_KEY_ENV}, or name \
             a file of mode 0600 by `api-key-file` or `peer-key-file`"
        ));
    }
    let elsewhere = match section {
        "instances" => SERVE_FLAGS_SAID_ELSEWHERE,
        "router" => ROUTER_FLAGS_SAID_ELSEWHERE,
        _ => &[],
    };
    if let Some((_, place)) = elsewhere.iter().find(|(flag, _)| *flag == key) {
        return Some(format!("it is said by {place}"));
    }
    match (section, key) {
        ("instances", "ep" | "enable-expert-parallel") => {
            Some("experts are spread over the ranks of `dp`, always".to_owned())
        }
        ("instances", "data-parallel-size") => Some("it is called `dp`".to_owned()),
        ("instances", "tensor-parallel-size") => Some("it is called `tp`".to_owned()),
        _ => None,
    }
}

fn value_reason(path: &str, node: &Node) -> Option<String> {
    let Value::Scalar(serde_json::Value::String(text)) = &node.value else {
        return None;
    };
    match (path, text.as_str()) {
        ("engine", _) => Some(format!(
            "allowed here: native; `twinfer plan`, `lint` and `render` also know {}",
            crate::engines::built_in_names().join(", ")
        )),
        ("handoff.connector", "push" | "checkpoint") => {
            Some(format!("allowed: pull; {text} comes in a later version"))
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn errors(text: &str) -> String {
        Deployment::parse("deploy.yaml", text, Path::new("."))
            .unwrap_err()
            .to_string()
    }

    const HEAD: &str = "model: {path: m}\ninstances:\n  - name: a\n    role: both\n";

    #[test]
    fn a_small_file_takes_its_defaults() {
        let deployment = Deployment::parse("d", HEAD, Path::new("/x")).unwrap();
        assert_eq!(deployment.file.router.port.get(), 8000);
        assert_eq!(deployment.file.nodes[0].host, "127.0.0.1");
        assert_eq!(deployment.model_path(), Path::new("/x/m"));
    }

    #[test]
    fn every_mistake_is_told_with_its_place_and_what_is_allowed() {
        let text = "modell: {path: m}\nengine: vllm\ninstances:\n  - name: a\n    role: prefil\n    kv_port: abc\n    \
                    port: 70000\n    dtype: fp8\n  - role: both\nhandoff: {connector: push, lease: 0}\n";
        let errors = errors(text);
        for expected in [
            "deploy.yaml:1:1: unknown key `modell`",
            "did you mean `model`?",
            "deploy.yaml:2:9: engine is \"vllm\"",
            "allowed here: native; `twinfer plan`, `lint` and `render` also know vllm",
            "deploy.yaml:5:11: instances[0].role is \"prefil\"",
            "allowed: both, prefill, decode",
            "deploy.yaml:6:14: instances[0].kv-port is \"abc\"",
            "an integer from 1 to 65535, or a list of an integer from 1 to 65535",
            "deploy.yaml:7:11: instances[0].port is 70000",
            "deploy.yaml:8:12: instances[0].dtype is \"fp8\"",
            "allowed: bf16, f32",
            "deploy.yaml:9:5: instances[1].name is missing",
            "deploy.yaml:10:22: handoff.connector is \"push\"",
            "allowed: pull; push comes in a later version",
            "handoff.lease is 0",
            "an integer from 1 to 86400",
            "model is missing",
            "6 |     kv_port: abc\n  |              ^^^",
        ] {
            assert!(errors.contains(expected), "no {expected:?} in\n{errors}");
        }
    }

    #[test]
    fn a_key_given_twice_is_refused_also_with_an_underscore() {
        let text = format!("{HEAD}    kv-port: 1\n    kv_port: 2\n");
        assert!(
            errors(&text).contains("deploy.yaml:6:5: instances[0].kv-port is given twice"),
            "{}",
            errors(&text)
        );
    }

    #[test]
    fn a_flag_said_elsewhere_names_the_place() {
        let errors = errors(&format!(
            "{HEAD}    served-model-name: x\n    tensor-parallel-size: 2\n"
        ));
        assert!(errors.contains("it is said by `model: name`"), "{errors}");
        assert!(errors.contains("it is called `tp`"), "{errors}");
    }

    #[test]
    fn a_secret_in_the_file_is_refused_and_not_repeated() {
        let errors = errors(&format!(
            "{HEAD}    api-key: hunter2\n    peer_key: [hunter2]\n"
        ));
        assert!(errors.contains("TWINFER_API_KEY"), "{errors}");
        assert!(!errors.contains("hunter2"), "{errors}");
    }

    #[test]
    fn other_roots_than_a_map_are_refused() {
        for text in [
            "",
            "[]",
            "1",
            "null",
            "- a",
            "a: b: c",
            "\u{0}",
            "---\na: 1\n---\nb: 2\n",
        ] {
            assert!(errors(text).contains("deploy.yaml"), "{text}");
        }
    }
}
