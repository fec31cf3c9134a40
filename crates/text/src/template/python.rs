//! What Jinja templates expect of Python: printing, `json.dumps`, string methods, `strftime`.

use minijinja::value::{Kwargs, ValueKind, from_args};
use minijinja::{Error, ErrorKind, Output, State, Value};
use minijinja_contrib::pycompat::unknown_method_callback;
use std::fmt::{self, Write as _};
use std::time::{SystemTime, UNIX_EPOCH};

/// Nested deeper than this, a value is not printed.
const MAX_DEPTH: usize = 64;

/// The message of `raise_exception`, kept as the source of the engine's error.
#[derive(Debug)]
struct Raised(String);

impl fmt::Display for Raised {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Raised {}

pub(super) fn raise_exception(message: String) -> Result<Value, Error> {
    Err(Error::new(ErrorKind::InvalidOperation, "raise_exception").with_source(Raised(message)))
}

/// The message if the error comes from `raise_exception`.
pub(super) fn raised(error: &Error) -> Option<&str> {
    let mut source = std::error::Error::source(error);
    while let Some(error) = source {
        if let Some(Raised(message)) = error.downcast_ref::<Raised>() {
            return Some(message);
        }
        source = error.source();
    }
    None
}

/// Templates mark the assistant's text by `{% generation %}` for training; rendering ignores it.
/// `if true` in its place keeps the white-space control.
pub(super) fn without_generation_marks(template: &str) -> String {
    let mut out = String::with_capacity(template.len());
    let mut rest = template;
    while let Some(start) = rest.find("{%") {
        let Some(len) = rest[start..].find("%}") else {
            break;
        };
        let tag = &rest[start..start + len];
        let word = tag[2..]
            .trim_start_matches(['-', '+'])
            .trim_end_matches(['-', '+'])
            .trim();
        out.push_str(&rest[..start]);
        match word {
            "generation" => out.push_str(&tag.replace("generation", "if true")),
            "endgeneration" => out.push_str(&tag.replace("endgeneration", "endif")),
            _ => out.push_str(tag),
        }
        rest = &rest[start + len..];
    }
    out.push_str(rest);
    out
}

/// String methods that the compatibility layer lacks.
pub(super) fn method(
    state: &mut State,
    value: &Value,
    name: &str,
    args: &[Value],
) -> Result<Value, Error> {
    if let Some(text) = value.as_str() {
        match name {
            "removeprefix" => {
                let (prefix,): (&str,) = from_args(args)?;
                return Ok(Value::from(text.strip_prefix(prefix).unwrap_or(text)));
            }
            "removesuffix" => {
                let (suffix,): (&str,) = from_args(args)?;
                return Ok(Value::from(text.strip_suffix(suffix).unwrap_or(text)));
            }
            // The library formats first and charges afterwards.
            "format" => state.consume_fuel(format_cost(text, args))?,
            "partition" | "rpartition" => {
                let (sep,): (&str,) = from_args(args)?;
                let halves = if name == "partition" {
                    text.split_once(sep)
                } else {
                    text.rsplit_once(sep)
                };
                let parts = match halves {
                    Some((head, tail)) => [head, sep, tail],
                    None if name == "partition" => [text, "", ""],
                    None => ["", "", text],
                };
                return Ok(parts.into_iter().map(Value::from).collect());
            }
            _ => {}
        }
    }
    unknown_method_callback(state, value, name, args)
}

/// Upper bound of what `str.format` writes, in units of 64 bytes: every number in the text may be a
/// width, every field may show all of the longest argument.
fn format_cost(text: &str, args: &[Value]) -> u64 {
    let widths = text
        .split(|c: char| !c.is_ascii_digit())
        .filter(|run| !run.is_empty());
    let widths = widths.fold(0_u64, |sum, run| {
        sum.saturating_add(run.parse().unwrap_or(u64::MAX))
    });
    let fields = text.matches('{').count() as u64;
    let longest = args.iter().map(shown_bytes).max().unwrap_or(0);
    widths.saturating_add(fields.saturating_mul(longest)) / 64
}

/// Bytes that a value prints at most, with all that it holds; `u64::MAX` for more than any template may
/// write, so that values that hold each other many times over are not walked to their end.
fn shown_bytes(value: &Value) -> u64 {
    /// Longest escape of a byte in a quoted string.
    const ESCAPE: u64 = 6;
    /// Brackets, a number, a separator.
    const FRAME: u64 = 64;
    const MOST: u64 = 1 << 26;
    const DEEPEST: usize = 128;
    let (mut sum, mut pending) = (0_u64, vec![(value.clone(), 0)]);
    while let Some((value, depth)) = pending.pop() {
        let text = value.as_str().map_or(0, |text| text.len() as u64);
        sum = sum.saturating_add(FRAME + text.saturating_mul(ESCAPE));
        if sum > MOST || depth > DEEPEST {
            return u64::MAX;
        }
        if value.as_str().is_some() {
            continue;
        }
        let room = (MOST / FRAME) as usize;
        for part in value.try_iter().into_iter().flatten().take(room) {
            if value.kind() == ValueKind::Map {
                pending.extend(value.get_item(&part).ok().map(|held| (held, depth + 1)));
            }
            pending.push((part, depth + 1));
        }
    }
    sum
}

/// `{{ value }}` as Python's `str()`.
pub(super) fn print(out: &mut Output, state: &mut State, value: &Value) -> Result<(), Error> {
    match value.kind() {
        ValueKind::String => out
            .write_str(value.as_str().unwrap_or_default())
            .map_err(Error::from),
        ValueKind::Undefined => Ok(()),
        _ => {
            let text = string(state, value)?;
            out.write_str(text.as_str().unwrap_or_default())
                .map_err(Error::from)
        }
    }
}

/// The filter `string`.
pub(super) fn string(state: &State, value: &Value) -> Result<Value, Error> {
    if value.as_str().is_some() {
        return Ok(value.clone());
    }
    let mut out = String::new();
    Writer {
        state,
        out: &mut out,
        style: Style::Python,
    }
    .write(value, 0)?;
    Ok(Value::from(out))
}

/// `json.dumps(value, ensure_ascii=False, indent=…, separators=…, sort_keys=…)`.
#[expect(
    clippy::needless_pass_by_value,
    reason = "the template engine passes keyword arguments so"
)]
pub(super) fn tojson(
    state: &State,
    value: &Value,
    indent: Option<Value>,
    args: Kwargs,
) -> Result<Value, Error> {
    let indent = match indent {
        Some(indent) => Some(indent),
        None => args.get::<Option<Value>>("indent")?,
    };
    let indent = indent.filter(|v| !v.is_none() && !v.is_undefined());
    let indent = match indent {
        Some(value) => Some(usize::try_from(value)?.min(16)),
        None => None,
    };
    let separators = args.get::<Option<Vec<String>>>("separators")?;
    let (item, key) = match separators.as_deref() {
        Some([item, key]) => (item.clone(), key.clone()),
        Some(_) => {
            return Err(Error::new(
                ErrorKind::InvalidOperation,
                "tojson: separators must be two strings",
            ));
        }
        None if indent.is_some() => (",".to_owned(), ": ".to_owned()),
        None => (", ".to_owned(), ": ".to_owned()),
    };
    let style = Style::Json {
        indent,
        item,
        key,
        ascii: args.get::<Option<bool>>("ensure_ascii")?.unwrap_or(false),
        sort: args.get::<Option<bool>>("sort_keys")?.unwrap_or(false),
    };
    args.assert_all_used()?;
    let mut out = String::new();
    Writer {
        state,
        out: &mut out,
        style,
    }
    .write(value, 0)?;
    Ok(Value::from(out))
}

enum Style {
    /// `repr()` of containers and what is in them.
    Python,
    Json {
        indent: Option<usize>,
        item: String,
        key: String,
        ascii: bool,
        sort: bool,
    },
}

struct Writer<'a, 's, 't> {
    state: &'a State<'s, 't>,
    out: &'a mut String,
    style: Style,
}

impl Writer<'_, '_, '_> {
    fn write(&mut self, value: &Value, depth: usize) -> Result<(), Error> {
        if depth > MAX_DEPTH {
            return Err(Error::new(
                ErrorKind::InvalidOperation,
                "the value is nested too deeply",
            ));
        }
        self.state.consume_fuel(1)?;
        let json = matches!(self.style, Style::Json { .. });
        match value.kind() {
            ValueKind::Undefined if json => {
                return Err(Error::new(
                    ErrorKind::BadSerialization,
                    "tojson: the value is undefined",
                ));
            }
            ValueKind::Undefined => {}
            ValueKind::None => self.out.push_str(if json { "null" } else { "None" }),
            ValueKind::Bool => self.out.push_str(match (value.is_true(), json) {
                (true, true) => "true",
                (false, true) => "false",
                (true, false) => "True",
                (false, false) => "False",
            }),
            ValueKind::Number if value.is_integer() => {
                let _ = write!(self.out, "{value}");
            }
            ValueKind::Number => self.out.push_str(&float(f64::try_from(value.clone())?)),
            ValueKind::String => self.text(value.as_str().unwrap_or_default())?,
            ValueKind::Map => self.map(value, depth)?,
            ValueKind::Seq | ValueKind::Iterable => self.list(value, depth)?,
            _ if json => {
                let message = format!("tojson: a {} cannot be written", value.kind());
                return Err(Error::new(ErrorKind::BadSerialization, message));
            }
            _ => {
                let _ = write!(self.out, "{value}");
            }
        }
        Ok(())
    }

    fn list(&mut self, value: &Value, depth: usize) -> Result<(), Error> {
        let (open, close) = if value.is_tuple() && matches!(self.style, Style::Python) {
            ('(', ')')
        } else {
            ('[', ']')
        };
        self.out.push(open);
        let mut count = 0;
        for item in value.try_iter()?.checked() {
            self.separate(count, depth + 1)?;
            self.write(&item?, depth + 1)?;
            count += 1;
        }
        self.close(count, depth, close)
    }

    fn map(&mut self, value: &Value, depth: usize) -> Result<(), Error> {
        let mut keys = value.try_iter()?.checked().collect::<Result<Vec<_>, _>>()?;
        if matches!(self.style, Style::Json { sort: true, .. }) {
            keys.sort();
        }
        self.out.push('{');
        let mut count = 0;
        for key in keys {
            self.separate(count, depth + 1)?;
            match (&self.style, key.as_str()) {
                (Style::Json { .. }, None) => {
                    self.out.push('"');
                    self.write(&key, depth + 1)?;
                    self.out.push('"');
                }
                _ => self.write(&key, depth + 1)?,
            }
            match &self.style {
                Style::Json { key, .. } => self.out.push_str(key),
                Style::Python => self.out.push_str(": "),
            }
            self.write(&value.get_item(&key)?, depth + 1)?;
            count += 1;
        }
        self.close(count, depth, '}')
    }

    fn separate(&mut self, count: usize, depth: usize) -> Result<(), Error> {
        match &self.style {
            Style::Python if count > 0 => self.out.push_str(", "),
            Style::Python => {}
            Style::Json {
                indent, item, key, ..
            } => {
                let spaces = indent.map_or(0, |n| n * depth);
                self.state
                    .consume_fuel(((spaces + item.len() + key.len()) / 64) as u64)?;
                if count > 0 {
                    self.out.push_str(item);
                }
                if indent.is_some() {
                    newline(self.out, spaces);
                }
            }
        }
        Ok(())
    }

    fn close(&mut self, count: usize, depth: usize, bracket: char) -> Result<(), Error> {
        if let Style::Json {
            indent: Some(indent),
            ..
        } = self.style
            && count > 0
        {
            self.state.consume_fuel((indent * depth / 64) as u64)?;
            newline(self.out, indent * depth);
        }
        self.out.push(bracket);
        Ok(())
    }

    fn text(&mut self, text: &str) -> Result<(), Error> {
        self.state.consume_fuel(text.len() as u64 / 32)?;
        match self.style {
            Style::Json { ascii, .. } => json_text(self.out, text, ascii),
            Style::Python => repr_text(self.out, text),
        }
        Ok(())
    }
}

fn newline(out: &mut String, spaces: usize) {
    out.push('\n');
    out.extend(std::iter::repeat_n(' ', spaces));
}

fn json_text(out: &mut String, text: &str, ascii: bool) {
    out.push('"');
    for c in text.chars() {
        match c {
            '"' => out.push_str("\\\""),
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            '\u{8}' => out.push_str("\\b"),
            '\u{c}' => out.push_str("\\f"),
            c if c < ' ' || (ascii && !c.is_ascii()) => {
                for unit in c.encode_utf16(&mut [0; 2]) {
                    let _ = write!(out, "\\u{unit:04x}");
                }
            }
            c => out.push(c),
        }
    }
    out.push('"');
}

/// Python's `repr` of a string: single quotes unless that needs escapes and double quotes do not.
fn repr_text(out: &mut String, text: &str) {
    let quote = if text.contains('\'') && !text.contains('"') {
        '"'
    } else {
        '\''
    };
    out.push(quote);
    for c in text.chars() {
        match c {
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            c if c == quote => {
                out.push('\\');
                out.push(c);
            }
            c if c.is_control() => {
                let _ = write!(out, "\\x{:02x}", u32::from(c));
            }
            c => out.push(c),
        }
    }
    out.push(quote);
}

/// Python's `repr` of a float: shortest digits, exponent form below 1e-4 and from 1e16.
fn float(x: f64) -> String {
    if x.is_nan() {
        return "NaN".to_owned();
    }
    if x.is_infinite() {
        return if x > 0.0 { "Infinity" } else { "-Infinity" }.to_owned();
    }
    let size = x.abs();
    if size != 0.0 && !(1e-4..1e16).contains(&size) {
        let text = format!("{x:e}");
        let (digits, exponent) = text.split_once('e').unwrap_or((&text, "0"));
        let exponent: i32 = exponent.parse().unwrap_or(0);
        let sign = if exponent < 0 { '-' } else { '+' };
        return format!("{digits}e{sign}{:02}", exponent.abs());
    }
    let text = format!("{x}");
    if text.contains('.') {
        text
    } else {
        format!("{text}.0")
    }
}

/// `datetime.now().strftime(format)`, in UTC.
pub(super) fn strftime(format: &str, now: SystemTime) -> Result<String, Error> {
    const MONTHS: [&str; 12] = [
        "January",
        "February",
        "March",
        "April",
        "May",
        "June",
        "July",
        "August",
        "September",
        "October",
        "November",
        "December",
    ];
    const DAYS: [&str; 7] = [
        "Thursday",
        "Friday",
        "Saturday",
        "Sunday",
        "Monday",
        "Tuesday",
        "Wednesday",
    ];
    let seconds = now.duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs());
    let (days, time) = (seconds / 86400, seconds % 86400);
    let (year, month, day) = civil(days);
    let weekday = DAYS[(days % 7) as usize];
    let month_name = MONTHS[(month - 1) as usize];
    let (hour, minute, second) = (time / 3600, time / 60 % 60, time % 60);
    let mut out = String::new();
    let mut chars = format.chars();
    while let Some(c) = chars.next() {
        if c != '%' {
            out.push(c);
            continue;
        }
        let mut code = chars.next();
        let plain = code == Some('-');
        if plain {
            code = chars.next();
        }
        let mut number = |n: u64, width: usize| {
            let width = if plain { 0 } else { width };
            let _ = write!(out, "{n:0width$}");
        };
        match code {
            Some('Y') => number(year, 4),
            Some('y') => number(year % 100, 2),
            Some('m') => number(month, 2),
            Some('d') => number(day, 2),
            Some('H') => number(hour, 2),
            Some('I') => number((hour + 11) % 12 + 1, 2),
            Some('M') => number(minute, 2),
            Some('S') => number(second, 2),
            Some('j') => number(days - days_to(year, 1, 1) + 1, 3),
            Some('e') => {
                let _ = write!(out, "{day:2}");
            }
            Some('B') => out.push_str(month_name),
            Some('b' | 'h') => out.push_str(&month_name[..3]),
            Some('A') => out.push_str(weekday),
            Some('a') => out.push_str(&weekday[..3]),
            Some('p') => out.push_str(if hour < 12 { "AM" } else { "PM" }),
            Some('F') => {
                let _ = write!(out, "{year:04}-{month:02}-{day:02}");
            }
            Some('T') => {
                let _ = write!(out, "{hour:02}:{minute:02}:{second:02}");
            }
            Some('Z') => out.push_str("UTC"),
            Some('z') => out.push_str("+0000"),
            Some('%') => out.push('%'),
            other => {
                let code = other.map(String::from).unwrap_or_default();
                let message = format!("strftime_now: %{code} is not supported");
                return Err(Error::new(ErrorKind::InvalidOperation, message));
            }
        }
    }
    Ok(out)
}

/// Gregorian date of a day since 1970-01-01 (Howard Hinnant, "chrono-compatible low-level date
/// algorithms", civil_from_days).
fn civil(days: u64) -> (u64, u64, u64) {
    let z = days + 719_468;
    let (era, of_era) = (z / 146_097, z % 146_097);
    let year_of_era = (of_era - of_era / 1460 + of_era / 36_524 - of_era / 146_096) / 365;
    let day_of_year = of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let shifted = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * shifted + 2) / 5 + 1;
    let month = if shifted < 10 {
        shifted + 3
    } else {
        shifted - 9
    };
    (year_of_era + era * 400 + u64::from(month <= 2), month, day)
}

/// Inverse of [`civil`] (days_from_civil).
fn days_to(year: u64, month: u64, day: u64) -> u64 {
    let y = if month <= 2 { year - 1 } else { year };
    let (era, of_era) = (y / 400, y % 400);
    let shifted = if month > 2 { month - 3 } else { month + 9 };
    let day_of_year = (153 * shifted + 2) / 5 + day - 1;
    era * 146_097 + of_era * 365 + of_era / 4 - of_era / 100 + day_of_year - 719_468
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn floats_print_as_in_python() {
        for (x, text) in [
            (1.0, "1.0"),
            (0.1, "0.1"),
            (1e16, "1e+16"),
            (1e15, "1000000000000000.0"),
            (1.5e-5, "1.5e-05"),
            (0.0001, "0.0001"),
            (-2.5e300, "-2.5e+300"),
            (0.0, "0.0"),
        ] {
            assert_eq!(float(x), text);
        }
    }

    #[test]
    fn strftime_agrees_with_known_dates() {
        let at = |seconds| UNIX_EPOCH + Duration::from_secs(seconds);
        let cases = [
            (0, "%Y-%m-%d %A", "1970-01-01 Thursday"),
            (951_782_400, "%d %b %Y %j", "29 Feb 2000 060"),
            (
                1_735_689_599,
                "%F %T %p %I %-I",
                "2024-12-31 23:59:59 PM 11 11",
            ),
            (1_767_225_600, "%e|%-d|%B|%y|100%%", " 1|1|January|26|100%"),
        ];
        for (seconds, format, text) in cases {
            assert_eq!(strftime(format, at(seconds)).unwrap(), text);
        }
        assert!(strftime("%Q", at(0)).is_err());
    }

    #[test]
    fn generation_marks_vanish_and_keep_their_dashes() {
        let marked = "a {%- generation -%} b {%+ endgeneration %} {% set generation = 1 %}";
        let plain = "a {%- if true -%} b {%+ endif %} {% set generation = 1 %}";
        assert_eq!(without_generation_marks(marked), plain);
    }
}
