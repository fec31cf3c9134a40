//! Text to [`EngineDeployment`]: shape, template, model.

use crate::diagnostic::{Diagnostic, Diagnostics};
use crate::engines::file::{EngineFile, schema};
use crate::engines::template::{Template, deep_merge};
use crate::load::{LoadError, at_value, read_text};
use crate::schema::{Checker, is_secret};
use crate::source::{Entry, Node, Step, canonical, parse, steps};
use serde_json::Value;
use std::path::{Path, PathBuf};
use twinfer_config::model::ModelFile;
use twinfer_config::{ModelConfig, ModelConfigError};

/// A deployment of an engine with a template: well-formed, not yet resolved.
#[derive(Clone, Debug)]
pub struct EngineDeployment {
    /// What it says.
    pub file: EngineFile,
    pub(crate) template: Template,
    /// The model's shape, where the file gives it and it is one that is known here.
    pub(crate) model: Option<ModelConfig>,
    /// Its config.json as it is.
    pub(crate) model_json: Option<Value>,
    name: String,
    text: String,
    root: Node,
}

/// Name of the engine by template that a file asks for; none: the native one, or the text is no YAML, which
/// reading it as a native deployment tells.
///
/// # Errors
/// The file cannot be read.
pub fn engine_of(path: &Path) -> Result<Option<String>, LoadError> {
    let text = read_text(path)?;
    let engine = parse(&text).ok();
    let engine = engine.as_ref().and_then(engine_in).map(str::to_owned);
    Ok(engine.filter(|engine| engine != "native"))
}

fn engine_in(root: &Node) -> Option<&str> {
    match &root.get("engine")?.node.value {
        crate::source::Value::Scalar(Value::String(name)) => Some(name),
        _ => None,
    }
}

impl EngineDeployment {
    /// Reads a file and, if given, the file with the private values that are merged over it.
    ///
    /// # Errors
    /// The file cannot be read, or what it says is wrong.
    pub fn load(path: &Path, private: Option<&Path>) -> Result<Self, LoadError> {
        let text = read_text(path)?;
        let folder = path
            .parent()
            .filter(|folder| !folder.as_os_str().is_empty())
            .unwrap_or(Path::new("."));
        let private = private.map(private_text).transpose()?;
        Ok(Self::parse(
            &path.display().to_string(),
            &text,
            private.as_deref(),
            folder,
        )?)
    }

    /// Parses text; `private` is merged over it. Relative paths count from `folder`.
    ///
    /// # Errors
    /// Every mistake of shape and type.
    pub fn parse(
        name: &str,
        text: &str,
        private: Option<&str>,
        folder: &Path,
    ) -> Result<Self, Diagnostics> {
        let fail = |found| Diagnostics::new(name, text, found);
        let root = parse(text).map_err(|diagnostic| fail(vec![diagnostic]))?;
        let template = |engine: &str| {
            Template::load(engine, folder).map_err(|error| {
                let wrong = at_value(&root, steps!["engine"], error.to_string(), None);
                fail(vec![wrong])
            })
        };
        // First, because what the file must say of an unknown engine is not known either.
        if let Some(engine) = engine_in(&root) {
            template(engine)?;
        }
        let mut checker = Checker {
            unknown: &unknown_reason,
            value: &|_, _| None,
            found: Vec::new(),
        };
        let mut json = checker.check(&schema(), &root, "");
        if !checker.found.is_empty() {
            return Err(fail(checker.found));
        }
        if let Some(private) = private {
            let over: Value = serde_saphyr::from_str(private)
                .map_err(|error| fail(vec![nowhere(format!("the private file: {error}"))]))?;
            merge_private(&mut json, &canonical_keys(&over, 3));
        }
        let file = serde_json::from_value::<EngineFile>(json)
            .map_err(|error| fail(vec![at_value(&root, &[], error.to_string(), None)]))?;
        let template = template(&file.engine)?;
        let (model, model_json) = model_of(&file, folder).map_err(|message| {
            fail(vec![at_value(
                &root,
                steps!["model", "config"],
                message,
                None,
            )])
        })?;
        Ok(Self {
            file,
            template,
            model,
            model_json,
            name: name.to_owned(),
            text: text.to_owned(),
            root,
        })
    }

    /// All mistakes with the file's name and text.
    pub(crate) fn diagnostics(&self, found: Vec<Diagnostic>) -> Diagnostics {
        Diagnostics::new(&self.name, &self.text, found)
    }

    /// A mistake at the value of `path`.
    pub(crate) fn wrong(&self, path: &[Step], message: String, help: Option<String>) -> Diagnostic {
        at_value(&self.root, path, message, help)
    }

    /// Line of the value at `path`, or of its nearest ancestor.
    pub(crate) fn line(&self, path: &[Step]) -> u32 {
        at_value(&self.root, path, String::new(), None).place.line
    }

    /// Name of the file, for messages.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The engine's version: the file's, else the template's.
    pub(crate) fn version(&self) -> String {
        let given = self.file.engine_version.clone();
        given
            .or_else(|| self.template.version.clone())
            .unwrap_or_else(|| "0".to_owned())
    }
}

fn nowhere(message: String) -> Diagnostic {
    Diagnostic {
        place: crate::diagnostic::Place::default(),
        message,
        help: None,
        secret: false,
    }
}

/// The private file: mode 0600, so that no other user reads addresses from it.
fn private_text(path: &Path) -> Result<String, LoadError> {
    use std::os::unix::fs::PermissionsExt;
    let io = |error| LoadError::Io {
        path: path.display().to_string(),
        error,
    };
    let mode = std::fs::metadata(path).map_err(io)?.permissions().mode() & 0o777;
    if mode & 0o077 != 0 {
        let message = format!("mode is {mode:04o}; allowed: 0600, it holds private values");
        return Err(io(std::io::Error::new(
            std::io::ErrorKind::PermissionDenied,
            message,
        )));
    }
    read_text(path)
}

/// Lists of named things (nodes, instances) are merged by name, all else as maps.
fn merge_private(base: &mut Value, over: &Value) {
    let (Value::Object(base), Value::Object(over)) = (&mut *base, over) else {
        return;
    };
    for (key, value) in over {
        match (base.get_mut(key), value) {
            (Some(Value::Array(list)), Value::Array(more))
                if key == "nodes" || key == "instances" =>
            {
                for one in more {
                    let name = one.get("name");
                    match list.iter_mut().find(|old| old.get("name") == name) {
                        Some(old) => deep_merge(old, one),
                        None => list.push(one.clone()),
                    }
                }
            }
            (Some(old), value) => deep_merge(old, value),
            (None, value) => {
                base.insert(key.clone(), value.clone());
            }
        }
    }
}

fn canonical_keys(value: &Value, depth: usize) -> Value {
    match value {
        Value::Object(map) if depth > 0 => Value::Object(
            map.iter()
                .map(|(key, value)| (canonical(key), canonical_keys(value, depth - 1)))
                .collect(),
        ),
        Value::Array(list) => {
            Value::Array(list.iter().map(|one| canonical_keys(one, depth)).collect())
        }
        other => other.clone(),
    }
}

/// Shape and text of the model's config.json.
fn model_of(
    file: &EngineFile,
    folder: &Path,
) -> Result<(Option<ModelConfig>, Option<Value>), String> {
    let json = match &file.model.config {
        None => return Ok((None, None)),
        Some(Value::String(path)) => {
            let path: PathBuf = folder.join(path);
            let text = std::fs::read_to_string(&path)
                .map_err(|error| format!("model.config: {}: {error}", path.display()))?;
            serde_json::from_str(&text)
                .map_err(|error| format!("model.config: {}: {error}", path.display()))?
        }
        Some(object @ Value::Object(_)) => object.clone(),
        Some(other) => {
            return Err(format!(
                "model.config is {other}; allowed: a path, or the object of a config.json"
            ));
        }
    };
    match ModelFile::parse(&json.to_string()) {
        Ok(ModelFile::Served(config)) => Ok((Some(config), Some(json))),
        Ok(ModelFile::V4(_))
        | Err(ModelConfigError::Architecture { .. } | ModelConfigError::OtherEngine { .. }) => {
            Ok((None, Some(json)))
        }
        Err(error) => Err(format!("model.config: {error}")),
    }
}

fn unknown_reason(path: &str, _: &Entry) -> Option<String> {
    let key = path.rsplit('.').next().unwrap_or(path);
    is_secret(key).then(|| {
        "secrets do not stand in files like this: name the variable under `secrets`, its value is taken from the \
         environment when a process starts"
            .to_owned()
    })
}
