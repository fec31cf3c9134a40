use crate::TemplateError;
use serde_json::{Map, Value as Json};

/// How much data a template works on.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Size {
    pub(super) values: u64,
    pub(super) bytes: u64,
}

impl Size {
    pub(super) fn add(&mut self, value: &Json) {
        self.values += 1;
        match value {
            Json::String(text) => self.bytes += text.len() as u64,
            Json::Array(list) => list.iter().for_each(|v| self.add(v)),
            Json::Object(map) => {
                for (key, value) in map {
                    self.bytes += key.len() as u64;
                    self.add(value);
                }
            }
            _ => {}
        }
    }
}

/// Messages in the shape that templates expect.
pub(super) fn normalise(messages: &Json, keep_parts: bool) -> Result<Json, TemplateError> {
    let list = messages
        .as_array()
        .ok_or_else(|| bad("messages", "must be a list of messages"))?;
    if list.is_empty() {
        return Err(bad("messages", "is empty; a chat has at least one message"));
    }
    let message = |(i, message): (usize, &Json)| {
        let map = message
            .as_object()
            .ok_or_else(|| bad(&format!("messages[{i}]"), "must be an object"))?;
        one(i, map, keep_parts).map(Json::Object)
    };
    list.iter()
        .enumerate()
        .map(message)
        .collect::<Result<Vec<_>, _>>()
        .map(Json::Array)
}

fn one(
    i: usize,
    map: &Map<String, Json>,
    keep_parts: bool,
) -> Result<Map<String, Json>, TemplateError> {
    if !map.get("role").is_some_and(Json::is_string) {
        return Err(bad(&format!("messages[{i}].role"), "must be a string"));
    }
    let mut out = map.clone();
    let calls = out
        .get("tool_calls")
        .is_some_and(|c| c.as_array().is_some_and(|c| !c.is_empty()));
    let field = format!("messages[{i}].content");
    match map.get("content") {
        None if calls => {
            out.insert("content".into(), Json::String(String::new()));
        }
        None | Some(Json::String(_)) => {}
        Some(Json::Null) => {
            out.insert("content".into(), Json::String(String::new()));
        }
        Some(Json::Array(parts)) => {
            let text = join(&field, parts)?;
            if !keep_parts {
                out.insert("content".into(), Json::String(text));
            }
        }
        Some(_) => {
            return Err(bad(
                &field,
                "must be a string, null or a list of text parts",
            ));
        }
    }
    if let Some(Json::Array(calls)) = out.get_mut("tool_calls") {
        calls.iter_mut().for_each(parse_arguments);
    }
    Ok(out)
}

fn join(field: &str, parts: &[Json]) -> Result<String, TemplateError> {
    let mut texts = Vec::with_capacity(parts.len());
    for (i, part) in parts.iter().enumerate() {
        match (part["type"].as_str(), part["text"].as_str()) {
            (Some("text") | None, Some(text)) => texts.push(text),
            (Some("text") | None, None) => {
                return Err(bad(&format!("{field}[{i}].text"), "must be a string"));
            }
            (Some(other), _) => {
                let message = format!("is {other:?}; this model takes only parts of type \"text\"");
                return Err(bad(&format!("{field}[{i}].type"), &message));
            }
        }
    }
    Ok(texts.join("\n"))
}

/// The API carries arguments as JSON text, templates expect the object.
fn parse_arguments(call: &mut Json) {
    let Some(arguments) = call
        .get_mut("function")
        .and_then(|f| f.get_mut("arguments"))
    else {
        return;
    };
    let parsed = arguments
        .as_str()
        .and_then(|text| serde_json::from_str::<Map<_, _>>(text).ok());
    if let Some(map) = parsed {
        *arguments = Json::Object(map);
    }
}

fn bad(param: &str, message: &str) -> TemplateError {
    TemplateError::Messages {
        param: param.to_owned(),
        message: message.to_owned(),
    }
}
