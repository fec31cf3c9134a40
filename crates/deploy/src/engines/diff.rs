//! What two plans differ in: one line per value, lists of named things compared by name.

use serde_json::Value;

/// One line per difference: `+` new, `-` gone, `~` changed.
pub fn plan_diff(old: &Value, new: &Value) -> Vec<String> {
    let mut lines = Vec::new();
    walk("", old, new, &mut lines);
    lines
}

fn walk(path: &str, old: &Value, new: &Value, lines: &mut Vec<String>) {
    let join = |key: &str| {
        if path.is_empty() {
            key.to_owned()
        } else {
            format!("{path}.{key}")
        }
    };
    match (old, new) {
        (a, b) if a == b => {}
        (Value::Object(a), Value::Object(b)) => {
            for (key, value) in a {
                match b.get(key) {
                    Some(other) => walk(&join(key), value, other, lines),
                    None => lines.push(format!("- {}: {}", join(key), short(value))),
                }
            }
            for (key, value) in b.iter().filter(|(key, _)| !a.contains_key(*key)) {
                lines.push(format!("+ {}: {}", join(key), short(value)));
            }
        }
        (Value::Array(a), Value::Array(b)) => {
            let named = a.iter().chain(b).all(|item| name(item).is_some());
            if named {
                for item in a {
                    match b.iter().find(|other| name(other) == name(item)) {
                        Some(other) => {
                            walk(&join(name(item).unwrap_or_default()), item, other, lines)
                        }
                        None => lines.push(format!("- {}", join(name(item).unwrap_or_default()))),
                    }
                }
                for item in b
                    .iter()
                    .filter(|item| !a.iter().any(|other| name(other) == name(item)))
                {
                    lines.push(format!("+ {}", join(name(item).unwrap_or_default())));
                }
            } else {
                let (gone, added) = words(a, b);
                lines.extend(gone.iter().map(|word| format!("- {path}: {word}")));
                lines.extend(added.iter().map(|word| format!("+ {path}: {word}")));
                if gone.is_empty() && added.is_empty() {
                    lines.push(format!("~ {path}: another order"));
                }
            }
        }
        (a, b) => lines.push(format!("~ {path}: {} -> {}", short(a), short(b))),
    }
}

fn name(item: &Value) -> Option<&str> {
    item.get("name").and_then(Value::as_str)
}

/// Entries that only one side has. A flag of a command line goes with its value.
fn words(a: &[Value], b: &[Value]) -> (Vec<String>, Vec<String>) {
    let (a, mut left) = (entries(a), entries(b));
    let mut gone = Vec::new();
    for entry in a {
        match left.iter().position(|other| *other == entry) {
            Some(at) => drop(left.remove(at)),
            None => gone.push(entry),
        }
    }
    (gone, left)
}

fn entries(list: &[Value]) -> Vec<String> {
    let mut out: Vec<String> = Vec::new();
    let mut open = false;
    for value in list {
        let word = short(value);
        let flag = word.starts_with("--");
        match out.last_mut() {
            Some(last) if open && !flag => {
                last.push(' ');
                last.push_str(&word);
                open = false;
            }
            _ => {
                out.push(word);
                open = flag;
            }
        }
    }
    out
}

fn short(value: &Value) -> String {
    value
        .as_str()
        .map_or_else(|| value.to_string(), str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_flag_is_told_with_its_value_and_things_by_their_names() {
        let old = json!({"processes": [{"name": "a", "argv": ["x", "--seqs", "40", "--eager"]}, {"name": "b", "port": 1}]});
        let new = json!({"processes": [{"name": "c", "port": 1}, {"name": "a", "argv": ["x", "--seqs", "32", "--eager"]}]});
        assert_eq!(
            plan_diff(&old, &new),
            [
                "- processes.a.argv: --seqs 40",
                "+ processes.a.argv: --seqs 32",
                "- processes.b",
                "+ processes.c"
            ]
        );
        assert!(plan_diff(&old, &old).is_empty());
    }
}
