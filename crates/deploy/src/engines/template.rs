//! Templates: data files that say how an engine is started. A template is environment and arguments with
//! variables `${name}`; an item that names a variable without a value is left out.

use crate::engines::file::Api;
use serde::Deserialize;
use serde_json::{Map, Value};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// Values of the variables of one process.
pub(crate) type Variables = BTreeMap<String, Value>;

/// A template that could not be read.
#[derive(Debug, thiserror::Error)]
pub enum TemplateError {
    /// No such template.
    #[error("engine {name:?} is no template; allowed: native, {}, or the path of a template file (.yaml)", built_in_names().join(", "))]
    Unknown {
        /// Name.
        name: String,
    },
    /// It cannot be read.
    #[error("template {path}: {error}")]
    Io {
        /// Path.
        path: String,
        /// Why.
        error: std::io::Error,
    },
    /// It is malformed.
    #[error("template {name}: {message}")]
    Malformed {
        /// Name.
        name: String,
        /// Why.
        message: String,
    },
}

/// How an engine is started.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub(crate) struct Template {
    pub(crate) name: String,
    /// One sentence.
    pub(crate) summary: String,
    /// Template whose items this one adds to and overrides.
    #[serde(default)]
    pub(crate) extends: Option<String>,
    /// Version that is assumed.
    #[serde(default)]
    pub(crate) version: Option<String>,
    /// What `api` may be; the first is the default.
    #[serde(default)]
    pub(crate) api: Vec<Api>,
    /// Values of instance keys that are absent: `listen`, `port`, `rpc-port`, `kv-port`.
    #[serde(default)]
    pub(crate) defaults: Map<String, Value>,
    /// Names of options and their defaults; null: none.
    #[serde(default)]
    pub(crate) options: Map<String, Value>,
    /// Variables by name: a value, or `{value, when}`.
    #[serde(default)]
    pub(crate) environment: Map<String, Value>,
    /// Command and arguments.
    #[serde(default)]
    pub(crate) argv: Vec<Item>,
    /// Connectors by the engine's name.
    #[serde(default)]
    pub(crate) connectors: BTreeMap<String, Connector>,
    /// Connector if the file names none.
    #[serde(default)]
    pub(crate) default_connector: Option<String>,
    /// Ports that the engine takes on every node beside its own.
    #[serde(default)]
    pub(crate) port_ranges: Vec<PortRange>,
    /// What the engine cannot do.
    #[serde(default)]
    pub(crate) refuse: Vec<Refuse>,
    /// Variables whose values are secrets.
    #[serde(default)]
    pub(crate) secrets: Vec<Secret>,
    /// The HTTP server loads the model once for each of its workers.
    #[serde(default)]
    pub(crate) model_per_http_worker: bool,
}

/// One or two words of a command line.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub(crate) struct Item {
    /// A word of its own.
    #[serde(default)]
    pub(crate) word: Option<String>,
    /// A flag; without a value it stands alone.
    #[serde(default)]
    pub(crate) flag: Option<String>,
    /// Its value: text, or a tree that is written as JSON.
    #[serde(default)]
    pub(crate) value: Option<Value>,
    /// All must hold.
    #[serde(default)]
    pub(crate) when: Vec<String>,
}

/// A connector.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub(crate) struct Connector {
    /// Who is asked first.
    pub(crate) flow: Flow,
    /// First version that has it.
    #[serde(default)]
    pub(crate) since: Option<String>,
    /// First version that has it no more.
    #[serde(default)]
    pub(crate) until: Option<String>,
    /// Ports of the handoff; none: it listens on none of its own.
    #[serde(default)]
    pub(crate) span: Option<Span>,
    /// Ports that its transport draws at random.
    #[serde(default)]
    pub(crate) transport: Option<Transport>,
    /// Its configuration, value of `kv-transfer-config`.
    #[serde(default)]
    pub(crate) config: Option<Value>,
    /// Variables it needs.
    #[serde(default)]
    pub(crate) environment: Map<String, Value>,
    /// Only prefill instances listen.
    #[serde(default)]
    pub(crate) prefill_listens_alone: bool,
}

/// Who is asked first.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, serde::Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Flow {
    /// Prefill computes, decode reads.
    #[default]
    PrefillFirst,
    /// Decode allocates, prefill writes.
    DecodeFirst,
}

/// Which ports a rank listens on: `base + rank * width .. + width`.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub(crate) struct Span {
    /// Variable with the first port.
    pub(crate) base: String,
    /// Environment variable that holds it.
    #[serde(default)]
    pub(crate) variable: Option<String>,
    /// First port if neither says it.
    #[serde(default)]
    pub(crate) default: Option<u16>,
    /// `global`, `local`, or `none` (one port per instance).
    pub(crate) rank: RankKind,
    /// Ports of a rank: the product of these (`tp`, `pp`, `pcp`).
    #[serde(default)]
    pub(crate) width: Vec<String>,
}

/// Which number of a rank counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum RankKind {
    Global,
    Local,
    None,
}

/// Ports that are drawn at random: `base .. base + devices * per-device`.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub(crate) struct Transport {
    pub(crate) base: u16,
    /// Environment variable that overrides the base.
    pub(crate) variable: String,
    pub(crate) per_device: u32,
    /// The same from this Mooncake version on.
    pub(crate) newer: Option<(String, u32)>,
}

/// Ports taken on a node.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub(crate) struct PortRange {
    pub(crate) what: String,
    pub(crate) base: u16,
    #[serde(default)]
    pub(crate) variable: Option<String>,
    pub(crate) count: u16,
}

/// What an engine cannot do.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub(crate) struct Refuse {
    pub(crate) when: Vec<String>,
    /// Key of the instance that is wrong.
    pub(crate) key: String,
    pub(crate) reason: String,
    pub(crate) instead: String,
}

/// A variable that holds a secret.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub(crate) struct Secret {
    pub(crate) name: String,
    #[serde(default)]
    pub(crate) when: Vec<String>,
}

const BUILT_IN: &[(&str, &str)] = &[
    ("vllm", include_str!("templates/vllm.yaml")),
    ("vllm-ascend", include_str!("templates/vllm-ascend.yaml")),
    ("deepinfer", include_str!("templates/deepinfer.yaml")),
    ("omniinfer", include_str!("templates/omniinfer.yaml")),
];

/// Longest chain of `extends`.
const DEEPEST: usize = 8;

/// Names of the templates that come with the program.
pub fn built_in_names() -> Vec<&'static str> {
    BUILT_IN.iter().map(|(name, _)| *name).collect()
}

impl Template {
    /// The template called `name`: built in, or a file, its path counted from `folder`.
    pub(crate) fn load(name: &str, folder: &Path) -> Result<Self, TemplateError> {
        Self::load_at(name, folder, 0)
    }

    fn load_at(name: &str, folder: &Path, depth: usize) -> Result<Self, TemplateError> {
        if depth > DEEPEST {
            return Err(TemplateError::Malformed {
                name: name.to_owned(),
                message: format!("extends more than {DEEPEST} templates in a row"),
            });
        }
        let (text, folder): (std::borrow::Cow<'_, str>, PathBuf) =
            if let Some((_, text)) = BUILT_IN.iter().find(|(known, _)| *known == name) {
                ((*text).into(), folder.to_owned())
            } else if name.ends_with(".yaml") || name.ends_with(".yml") {
                let path = folder.join(name);
                let text = std::fs::read_to_string(&path).map_err(|error| TemplateError::Io {
                    path: path.display().to_string(),
                    error,
                })?;
                let parent = path.parent().unwrap_or(folder).to_owned();
                (text.into(), parent)
            } else {
                return Err(TemplateError::Unknown {
                    name: name.to_owned(),
                });
            };
        let malformed = |message: String| TemplateError::Malformed {
            name: name.to_owned(),
            message,
        };
        let own: Self =
            serde_saphyr::from_str(&text).map_err(|error| malformed(error.to_string()))?;
        for item in &own.argv {
            if item.word.is_some() == item.flag.is_some() {
                return Err(malformed(
                    "an item of argv has either `word` or `flag`".to_owned(),
                ));
            }
        }
        match own.extends.clone() {
            None => Ok(own),
            Some(base) => Ok(own.over(Self::load_at(&base, &folder, depth + 1)?)),
        }
    }

    /// This template's items over those of `base`.
    fn over(mut self, mut base: Self) -> Self {
        merge(&mut base.defaults, self.defaults);
        merge(&mut base.options, self.options);
        merge(&mut base.environment, self.environment);
        for item in self.argv {
            let same = base
                .argv
                .iter_mut()
                .find(|old| old.flag.is_some() && old.flag == item.flag && old.when == item.when);
            match same {
                Some(old) => *old = item,
                None => base.argv.push(item),
            }
        }
        base.connectors.append(&mut self.connectors);
        base.port_ranges.append(&mut self.port_ranges);
        base.refuse.append(&mut self.refuse);
        base.secrets.append(&mut self.secrets);
        if !self.api.is_empty() {
            base.api = self.api;
        }
        Self {
            name: self.name,
            summary: self.summary,
            extends: self.extends,
            version: self.version.or(base.version),
            default_connector: self.default_connector.or(base.default_connector),
            model_per_http_worker: self.model_per_http_worker || base.model_per_http_worker,
            ..base
        }
    }
}

fn merge(base: &mut Map<String, Value>, over: Map<String, Value>) {
    for (key, value) in over {
        base.insert(key, value);
    }
}

/// Maps are merged key by key, everything else is replaced.
pub(crate) fn deep_merge(base: &mut Value, over: &Value) {
    match (base, over) {
        (Value::Object(base), Value::Object(over)) => {
            for (key, value) in over {
                match base.get_mut(key) {
                    Some(old) => deep_merge(old, value),
                    None => {
                        base.insert(key.clone(), value.clone());
                    }
                }
            }
        }
        (base, over) => *base = over.clone(),
    }
}

/// A scalar as text.
pub(crate) fn plain(value: &Value) -> String {
    value
        .as_str()
        .map_or_else(|| value.to_string(), str::to_owned)
}

/// Do all conditions hold? `name`, `!name`, `name=value`, `name!=value`, `name<1.2`, `name>=1.2`.
pub(crate) fn holds(when: &[String], variables: &Variables) -> bool {
    when.iter().all(|condition| {
        let set = |name: &str| variables.get(name).filter(|value| !value.is_null());
        let is = |name: &str, text: &str| set(name).is_some_and(|value| plain(value) == text);
        if let Some((name, text)) = condition.split_once("!=") {
            !is(name, text)
        } else if let Some((name, text)) = condition.split_once(">=") {
            set(name).is_some_and(|value| version(&plain(value)) >= version(text))
        } else if let Some((name, text)) = condition.split_once('<') {
            set(name).is_some_and(|value| version(&plain(value)) < version(text))
        } else if let Some((name, text)) = condition.split_once('=') {
            is(name, text)
        } else if let Some(name) = condition.strip_prefix('!') {
            set(name).is_none_or(|value| *value == Value::Bool(false))
        } else {
            set(condition).is_some_and(|value| *value != Value::Bool(false))
        }
    })
}

/// A version's numbers; what is no number ends them.
pub(crate) fn version(text: &str) -> Vec<u32> {
    text.trim_start_matches('v')
        .split('.')
        .map_while(|part| {
            let digits: String = part.chars().take_while(char::is_ascii_digit).collect();
            digits.parse().ok()
        })
        .collect()
}

/// `text` with its variables; none if one has no value.
pub(crate) fn fill(text: &str, variables: &Variables) -> Option<String> {
    let mut out = String::new();
    let mut rest = text;
    while let Some(at) = rest.find("${") {
        out.push_str(&rest[..at]);
        let (name, tail) = rest[at + 2..].split_once('}')?;
        let name = name.strip_suffix(":text").unwrap_or(name);
        let value = variables.get(name).filter(|value| !value.is_null())?;
        out.push_str(&plain(value));
        rest = tail;
    }
    out.push_str(rest);
    Some(out)
}

/// A tree with its variables. Text that is one variable becomes that variable's value, as text with
/// `${name:text}`; map entries without a value are left out.
pub(crate) fn fill_tree(tree: &Value, variables: &Variables) -> Option<Value> {
    match tree {
        Value::String(text) => {
            let alone = text
                .strip_prefix("${")
                .and_then(|rest| rest.strip_suffix('}'))
                .filter(|name| !name.contains('$') && !name.ends_with(":text"));
            match alone {
                Some(name) => variables
                    .get(name)
                    .filter(|value| !value.is_null())
                    .cloned(),
                None => fill(text, variables).map(Value::String),
            }
        }
        Value::Array(items) => items
            .iter()
            .map(|item| fill_tree(item, variables))
            .collect::<Option<Vec<_>>>()
            .map(Value::Array),
        Value::Object(map) => Some(Value::Object(
            map.iter()
                .filter_map(|(key, value)| Some((key.clone(), fill_tree(value, variables)?)))
                .collect(),
        )),
        other => Some(other.clone()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn variables() -> Variables {
        Variables::from([
            ("port".to_owned(), json!(7100)),
            ("role".to_owned(), json!("prefill")),
            ("version".to_owned(), json!("0.9.1")),
            ("first".to_owned(), json!(false)),
        ])
    }

    #[test]
    fn text_without_a_value_is_left_out() {
        assert_eq!(fill("a${port}b", &variables()).as_deref(), Some("a7100b"));
        assert_eq!(fill("${nic}", &variables()), None);
    }

    #[test]
    fn a_tree_keeps_numbers_and_drops_what_is_absent() {
        let tree = json!({"n": "${port}", "t": "${port:text}", "gone": "${nic}"});
        assert_eq!(
            fill_tree(&tree, &variables()),
            Some(json!({"n": 7100, "t": "7100"}))
        );
    }

    #[test]
    fn conditions_compare_values_and_versions() {
        let yes = |text: &str| holds(&[text.to_owned()], &variables());
        assert!(yes("role=prefill") && !yes("role!=prefill"));
        assert!(yes("version<0.11") && !yes("version>=0.11") && yes("version>=0.9.1"));
        assert!(yes("!first") && !yes("first") && yes("!nic"));
    }

    #[test]
    fn built_in_templates_are_well_formed() {
        for name in built_in_names() {
            let template = Template::load(name, Path::new(".")).unwrap_or_else(|e| panic!("{e}"));
            assert!(
                !template.argv.is_empty() && !template.api.is_empty(),
                "{name}"
            );
        }
    }

    #[test]
    fn a_users_template_extends_a_built_in_one() {
        let folder = tempfile::tempdir().expect("a folder");
        let text = "name: mine\nsummary: x\nextends: vllm\nargv:\n  - {flag: --mine, value: '${port}'}\nenvironment: {A: b}\n";
        std::fs::write(folder.path().join("mine.yaml"), text).expect("written");
        let mine = Template::load("mine.yaml", folder.path()).unwrap_or_else(|e| panic!("{e}"));
        assert!(
            mine.argv
                .iter()
                .any(|item| item.flag.as_deref() == Some("--port"))
        );
        assert!(
            mine.argv
                .iter()
                .any(|item| item.flag.as_deref() == Some("--mine"))
        );
        assert!(matches!(
            Template::load("nothing", folder.path()),
            Err(TemplateError::Unknown { .. })
        ));
    }
}
