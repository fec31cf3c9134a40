//! As much of a shell as launch scripts use: words, quotes, variables, continued lines.

use serde_json::Value;
use std::collections::BTreeMap;

pub(super) type Words = Vec<String>;

/// What a line says.
pub(super) enum Statement {
    /// Nothing that matters to a deployment.
    Nothing,
    /// A comment names the host of what follows: `# on 192.0.2.1`.
    Host(String),
    /// `export NAME=value`.
    Export(String, String),
    /// `source FILE`.
    Source(String),
    /// `vllm serve ...`, without these words.
    Serve(Words),
    /// `python launch_online_dp.py ...`.
    Launch(Words),
    /// `docker run ...`.
    Docker(Words),
    /// Not understood.
    Other(String),
}

/// Commands that change nothing of a deployment.
const HARMLESS: &[&str] = &[
    "set", "cd", "unset", "echo", "sleep", "mkdir", "wait", "shift",
];

/// The statements of a script with their first lines, from 1.
pub(super) fn statements(text: &str) -> Vec<(usize, Statement)> {
    let mut variables: BTreeMap<String, String> = BTreeMap::new();
    let mut out = Vec::new();
    for (line, logical) in logical_lines(text) {
        let trimmed = logical.trim();
        if let Some(comment) = trimmed.strip_prefix('#') {
            let comment = comment.trim();
            if let Some(host) = comment.strip_prefix("on ") {
                out.push((line, Statement::Host(host.trim().to_owned())));
            }
            continue;
        }
        if trimmed.is_empty() {
            continue;
        }
        let words = words(trimmed, &variables);
        let statement = statement(trimmed, words, &mut variables);
        out.push((line, statement));
    }
    out
}

fn statement(text: &str, mut words: Words, variables: &mut BTreeMap<String, String>) -> Statement {
    if words.first().is_some_and(|word| word == "exec") {
        words.remove(0);
    }
    let assigned = |word: &str| -> Option<(String, String)> {
        let (name, value) = word.split_once('=')?;
        let good = !name.is_empty() && name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_');
        good.then(|| (name.to_owned(), value.to_owned()))
    };
    let Some(first) = words.first().cloned() else {
        return Statement::Nothing;
    };
    let second = words.get(1).cloned().unwrap_or_default();
    match (first.as_str(), words.len()) {
        ("export", 2) => match assigned(&second) {
            Some((name, value)) => {
                variables.insert(name.clone(), value.clone());
                Statement::Export(name, value)
            }
            // A secret's name: its value comes from outside.
            None => Statement::Other(text.to_owned()),
        },
        ("source" | ".", 2) => Statement::Source(second),
        ("vllm", 2..) if second == "serve" => Statement::Serve(words.split_off(2)),
        ("docker", 2..) if second == "run" => Statement::Docker(words.split_off(2)),
        ("python" | "python3", 2..) if second.ends_with("launch_online_dp.py") => {
            Statement::Launch(words.split_off(2))
        }
        (name, _) if HARMLESS.contains(&name) => Statement::Nothing,
        (name, 1) => match assigned(name) {
            Some((name, value)) => {
                variables.insert(name, value);
                Statement::Nothing
            }
            None => Statement::Other(text.to_owned()),
        },
        _ => Statement::Other(text.to_owned()),
    }
}

/// Lines joined where a backslash or an open quote says so.
fn logical_lines(text: &str) -> Vec<(usize, String)> {
    let mut out = Vec::new();
    let mut open: Option<(usize, String)> = None;
    for (index, line) in text.lines().enumerate() {
        let (start, mut so_far) = open.take().unwrap_or((index + 1, String::new()));
        if so_far.is_empty() && line.trim_start().starts_with('#') {
            out.push((start, line.to_owned()));
            continue;
        }
        so_far.push_str(line);
        if let Some(whole) = so_far.strip_suffix('\\') {
            open = Some((start, format!("{whole} ")));
        } else if quote_open(&so_far) {
            so_far.push('\n');
            open = Some((start, so_far));
        } else {
            out.push((start, so_far));
        }
    }
    out.extend(open);
    out
}

fn quote_open(text: &str) -> bool {
    let mut quote = None;
    let mut chars = text.chars();
    while let Some(c) = chars.next() {
        match (quote, c) {
            (None, '\'' | '"') => quote = Some(c),
            (Some(open), c) if open == c => quote = None,
            (None | Some('"'), '\\') => drop(chars.next()),
            _ => {}
        }
    }
    quote.is_some()
}

/// Words of a line; known variables are put in, `$1` and unknown ones stay.
fn words(text: &str, variables: &BTreeMap<String, String>) -> Words {
    let mut out = Vec::new();
    let mut word: Option<String> = None;
    let mut quote = None;
    let mut chars = text.chars().peekable();
    while let Some(c) = chars.next() {
        match (quote, c) {
            (None, '#') if word.is_none() => break,
            (None, c) if c.is_whitespace() => out.extend(word.take()),
            (None, '\'' | '"') => {
                quote = Some(c);
                word.get_or_insert_default();
            }
            (Some(open), c) if open == c => quote = None,
            (None | Some('"'), '\\') => word.get_or_insert_default().extend(chars.next()),
            (None | Some('"'), '$') => {
                let braces = chars.peek() == Some(&'{');
                if braces {
                    chars.next();
                }
                let mut name = String::new();
                while let Some(&c) = chars.peek() {
                    let part = c.is_ascii_alphanumeric() || c == '_';
                    if !part
                        || !braces
                            && name.len() == 1
                            && name.starts_with(|c: char| c.is_ascii_digit())
                    {
                        break;
                    }
                    name.push(c);
                    chars.next();
                }
                if braces && chars.peek() == Some(&'}') {
                    chars.next();
                }
                let word = word.get_or_insert_default();
                match variables.get(&name) {
                    Some(value) => word.push_str(value),
                    None => {
                        word.push('$');
                        word.push_str(&name);
                    }
                }
            }
            (_, c) => word.get_or_insert_default().push(c),
        }
    }
    out.extend(word);
    out
}

/// A word as a number or boolean where it is one, else as text.
pub(super) fn scalar(text: &str) -> Value {
    match serde_json::from_str::<Value>(text) {
        // `0700` and `1e5` are text to whoever wrote them.
        Ok(value @ Value::Number(_)) => {
            let written = value.to_string();
            if written == text { value } else { text.into() }
        }
        Ok(value @ Value::Bool(_)) => value,
        _ => text.into(),
    }
}

/// A flag's value: JSON objects as such.
pub(super) fn value(text: &str) -> Value {
    match serde_json::from_str::<Value>(text) {
        Ok(value @ Value::Object(_)) => value,
        _ => scalar(text),
    }
}
