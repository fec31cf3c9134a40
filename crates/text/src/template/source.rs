use crate::TextError;
use crate::files::ModelTexts;
use serde_json::Value as Json;

/// One template of a model.
#[derive(Clone, Debug)]
pub(crate) struct Source {
    pub(crate) name: String,
    pub(crate) template: String,
}

/// What a model directory has, in the order of its files.
#[derive(Clone, Debug, Default)]
pub(crate) struct Sources {
    pub(crate) list: Vec<Source>,
    /// Why the list cannot be used.
    pub(crate) problem: Option<String>,
}

impl IntoIterator for Sources {
    type Item = Source;
    type IntoIter = std::vec::IntoIter<Source>;

    fn into_iter(self) -> Self::IntoIter {
        self.list.into_iter()
    }
}

/// `chat_template.jinja` wins over tokenizer_config.json.
pub(crate) fn read_sources(texts: &ModelTexts) -> Result<Sources, TextError> {
    if let Some(bytes) = texts.read("chat_template.jinja")? {
        return Ok(match String::from_utf8(bytes) {
            Ok(template) => Sources {
                list: vec![Source {
                    name: "default".to_owned(),
                    template,
                }],
                problem: None,
            },
            Err(error) => problem(format!(
                "chat_template.jinja is not UTF-8: {}",
                error.utf8_error()
            )),
        });
    }
    let config = texts.json("tokenizer_config.json")?;
    Ok(from_field(&config["chat_template"]))
}

fn from_field(field: &Json) -> Sources {
    let list = match field {
        Json::Null => return Sources::default(),
        Json::String(template) => {
            let source = Source {
                name: "default".to_owned(),
                template: template.clone(),
            };
            return Sources {
                list: vec![source],
                problem: None,
            };
        }
        Json::Array(list) => list,
        _ => {
            return problem(
                "chat_template is neither a string nor a list of {name, template}".to_owned(),
            );
        }
    };
    let mut sources = Sources::default();
    for (index, item) in list.iter().enumerate() {
        match (item["name"].as_str(), item["template"].as_str()) {
            (Some(name), Some(template)) => {
                sources.list.push(Source {
                    name: name.to_owned(),
                    template: template.to_owned(),
                });
            }
            _ => {
                return problem(format!(
                    "chat_template[{index}] needs the strings name and template"
                ));
            }
        }
    }
    sources
}

fn problem(text: String) -> Sources {
    Sources {
        list: Vec::new(),
        problem: Some(text),
    }
}
