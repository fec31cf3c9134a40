//! Chat templates: Jinja as transformers runs it.

mod messages;
mod python;
mod source;

use crate::files::ModelTexts;
use crate::{TemplateError, TextError, Tokenizer};
use messages::{Size, normalise};
use minijinja::syntax::SyntaxConfig;
use minijinja::value::Serde;
use minijinja::{AutoEscape, Environment, Error, ErrorKind, Value};
use serde_json::{Map, Value as Json, json};
pub(crate) use source::read_sources;
use source::{Source, Sources};
use std::path::Path;
use std::time::SystemTime;

/// Work a template may always do: one unit is an instruction or 64 bytes of data, so this is about
/// 38 MiB and a tenth of a second.
const BASE_FUEL: u64 = 600_000;
/// Further work for each value in the messages and tools.
const FUEL_PER_VALUE: u64 = 100;
/// Bytes of messages and tools that allow one further unit: each byte may be copied 16 times.
const BYTES_PER_FUEL: u64 = 4;
/// No request may cost more: about one second.
const MAX_FUEL: u64 = 16_000_000;
/// Depth of macros and includes.
const MAX_RECURSION: usize = 100;

/// Names a template gets from us; `chat_template_kwargs` may not replace them.
const RESERVED: [&str; 14] = [
    "messages",
    "tools",
    "add_generation_prompt",
    "continue_final_message",
    "tokenize",
    "chat_template",
    "bos_token",
    "eos_token",
    "raise_exception",
    "strftime_now",
    "range",
    "namespace",
    "dict",
    "return_dict",
];

/// Can chats be rendered?
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TemplateState {
    /// Yes.
    Ready,
    /// The model directory has no template.
    Missing,
    /// The template cannot be used, for this reason.
    Broken(String),
}

/// A model's chat template. A missing or broken one is a state, not an error: completions work
/// without it, and each chat gets the reason.
#[derive(Debug)]
pub struct ChatTemplate {
    env: Environment<'static>,
    state: TemplateState,
    has_tool_use: bool,
    wants_parts: bool,
    bos_token: String,
    eos_token: String,
}

impl ChatTemplate {
    /// Reads `chat_template.jinja` or, without that file, `chat_template` of tokenizer_config.json: a
    /// string, or a list of `{name, template}` of which `default` is used, and `tool_use` for
    /// requests with tools.
    ///
    /// # Errors
    /// Only if a file exists and cannot be read.
    pub fn from_dir(dir: &Path, tokenizer: &Tokenizer) -> Result<Self, TextError> {
        Self::of(&ModelTexts::directory(dir), tokenizer)
    }

    /// As [`ChatTemplate::from_dir`], from a model's texts wherever they are from.
    ///
    /// # Errors
    /// Only if a file exists and cannot be read.
    pub fn of(texts: &ModelTexts, tokenizer: &Tokenizer) -> Result<Self, TextError> {
        let sources = read_sources(texts)?;
        Ok(Self::new(
            sources,
            tokenizer.bos_token().unwrap_or_default(),
            tokenizer.eos_token().unwrap_or_default(),
        ))
    }

    /// A template from its text.
    pub fn from_source(template: &str, bos_token: &str, eos_token: &str) -> Self {
        let source = Source {
            name: "default".to_owned(),
            template: template.to_owned(),
        };
        Self::new(
            Sources {
                list: vec![source],
                problem: None,
            },
            bos_token,
            eos_token,
        )
    }

    /// Can chats be rendered, and if not, why?
    pub fn state(&self) -> &TemplateState {
        &self.state
    }

    /// Text of a chat, with BOS and role markers: encode it without special tokens.
    ///
    /// `messages` is the request's array, `tools` its array or null, `kwargs` its
    /// `chat_template_kwargs`. A null content becomes an empty string; a list of text parts becomes one
    /// string, joined by newlines, unless the template handles lists; arguments of tool calls that are
    /// JSON text become objects.
    ///
    /// # Errors
    /// Every variant of [`TemplateError`].
    pub fn render(
        &self,
        messages: &Json,
        add_generation_prompt: bool,
        tools: Option<&Json>,
        kwargs: Option<&Map<String, Json>>,
    ) -> Result<String, TemplateError> {
        match &self.state {
            TemplateState::Ready => {}
            TemplateState::Missing => return Err(TemplateError::Missing),
            TemplateState::Broken(reason) => return Err(TemplateError::Broken(reason.clone())),
        }
        if let Some(name) = kwargs
            .iter()
            .flat_map(|map| map.keys())
            .find(|k| RESERVED.contains(&k.as_str()))
        {
            return Err(TemplateError::ReservedKwarg(name.clone()));
        }
        let messages = normalise(messages, self.wants_parts)?;
        let tools = match tools {
            None | Some(Json::Null) => None,
            Some(Json::Array(list)) => tools.filter(|_| !list.is_empty()),
            Some(_) => {
                let message = "must be a list of tools or null".to_owned();
                return Err(TemplateError::Messages {
                    param: "tools".to_owned(),
                    message,
                });
            }
        };
        self.run(&messages, add_generation_prompt, tools, kwargs)
            .map_err(|e| classify(&e))
    }

    fn new(sources: Sources, bos_token: &str, eos_token: &str) -> Self {
        let mut template = Self {
            env: environment(),
            state: TemplateState::Ready,
            has_tool_use: false,
            wants_parts: false,
            bos_token: bos_token.to_owned(),
            eos_token: eos_token.to_owned(),
        };
        template.state = match template.load(sources) {
            Ok(state) => state,
            Err(reason) => TemplateState::Broken(reason),
        };
        if template.state == TemplateState::Ready {
            template.probe();
        }
        template
    }

    fn load(&mut self, sources: Sources) -> Result<TemplateState, String> {
        if let Some(problem) = sources.problem {
            return Err(problem);
        }
        if sources.list.is_empty() {
            return Ok(TemplateState::Missing);
        }
        let mut names = Vec::new();
        let mut has_default = false;
        for Source { name, template } in sources.list {
            has_default |= name == "default";
            self.has_tool_use |= name == "tool_use";
            names.push(name.clone());
            if name != "default" && name != "tool_use" {
                continue;
            }
            self.env
                .add_template_owned(name.clone(), python::without_generation_marks(&template))
                .map_err(|e| format!("template {name}: {}", describe(&e)))?;
        }
        if !has_default {
            return Err(format!(
                "templates are named {}; one must be named default",
                names.join(", ")
            ));
        }
        Ok(TemplateState::Ready)
    }

    /// Renders a short chat, so that a filter, test or function that does not exist is known at start,
    /// and finds out whether the template reads lists of parts.
    fn probe(&mut self) {
        const MARK: &str = "probe-7f3a";
        let plain = json!([{"role": "user", "content": MARK}]);
        if let Err(error) = self.run(&plain, true, None, None) {
            if matches!(
                error.kind(),
                ErrorKind::UnknownFilter
                    | ErrorKind::UnknownTest
                    | ErrorKind::UnknownFunction
                    | ErrorKind::UnknownMethod
                    | ErrorKind::SyntaxError
                    | ErrorKind::OutOfFuel
            ) {
                self.state = TemplateState::Broken(describe(&error));
            }
            return;
        }
        let parts = json!([{"role": "user", "content": [{"type": "text", "text": MARK}]}]);
        self.wants_parts = self.run(&parts, true, None, None).is_ok_and(|text| {
            text.contains(MARK) && !text.contains("'text'") && !text.contains("\"text\"")
        });
    }

    fn run(
        &self,
        messages: &Json,
        add_generation_prompt: bool,
        tools: Option<&Json>,
        kwargs: Option<&Map<String, Json>>,
    ) -> Result<String, Error> {
        let mut size = Size::default();
        size.add(messages);
        tools.iter().for_each(|t| size.add(t));
        kwargs
            .iter()
            .flat_map(|map| map.values())
            .for_each(|v| size.add(v));
        let fuel = BASE_FUEL + size.values * FUEL_PER_VALUE + size.bytes / BYTES_PER_FUEL;
        let mut env = self.env.clone();
        env.set_fuel(Some(fuel.min(MAX_FUEL)));

        let name = if tools.is_some() && self.has_tool_use {
            "tool_use"
        } else {
            "default"
        };
        let mut variables: Vec<(String, Value)> = vec![
            ("messages".into(), Value::from(Serde(messages))),
            (
                "tools".into(),
                tools.map_or(Value::from(()), |t| Value::from(Serde(t))),
            ),
            ("documents".into(), Value::from(())),
            (
                "add_generation_prompt".into(),
                Value::from(add_generation_prompt),
            ),
            ("bos_token".into(), Value::from(self.bos_token.as_str())),
            ("eos_token".into(), Value::from(self.eos_token.as_str())),
        ];
        if let Some(map) = kwargs {
            variables.extend(map.iter().map(|(k, v)| (k.clone(), Value::from(Serde(v)))));
        }
        env.get_template(name)?.render(Value::from_pairs(variables))
    }
}

/// The environment of `transformers.utils.chat_template_utils`.
fn environment() -> Environment<'static> {
    let mut env = Environment::new();
    if let Ok(syntax) = SyntaxConfig::builder()
        .trim_blocks(true)
        .lstrip_blocks(true)
        .build()
    {
        env.set_syntax(syntax);
    }
    env.set_auto_escape_callback(|_| AutoEscape::None);
    env.set_recursion_limit(MAX_RECURSION);
    env.set_unknown_method_callback(python::method);
    env.set_formatter(python::print);
    env.add_filter("tojson", python::tojson);
    env.add_filter("string", python::string);
    env.add_function("raise_exception", python::raise_exception);
    env.add_function("strftime_now", |format: &str| {
        python::strftime(format, SystemTime::now())
    });
    env
}

fn classify(error: &Error) -> TemplateError {
    if let Some(message) = python::raised(error) {
        return TemplateError::Refused(message.to_owned());
    }
    match error.kind() {
        ErrorKind::OutOfFuel => TemplateError::Limit("work and memory for messages of this size"),
        _ => TemplateError::Failed(describe(error)),
    }
}

/// Kind, detail and line, without the template's source.
fn describe(error: &Error) -> String {
    let detail = error.detail().map(|d| format!(": {d}")).unwrap_or_default();
    let line = error
        .line()
        .map(|l| format!(" (line {l})"))
        .unwrap_or_default();
    format!("{}{detail}{line}", error.kind())
}
