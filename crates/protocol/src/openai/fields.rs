use super::prompt::token_ids;
use crate::{ApiError, ErrorKind, TokenId};
use serde::de::{
    DeserializeOwned, DeserializeSeed, Error as _, IgnoredAny, MapAccess, SeqAccess, Visitor,
};
use serde_json::value::RawValue;
use std::borrow::Cow;
use std::collections::HashMap;
use std::fmt;
use std::ops::RangeInclusive;

/// Most keys at the top level of a body: far above what any client sends, and a bound on memory.
const MAX_KEYS: usize = 1024;
/// Characters of a bad value that an error message repeats.
const SHOWN: usize = 48;

/// The top level of a JSON object, each value still as it came. A value is read when its field is
/// asked for; null reads as absent.
#[derive(Debug)]
pub struct Fields<'a> {
    values: HashMap<Cow<'a, str>, &'a RawValue>,
}

/// Keys and values of a JSON object in their order, each value as it came.
pub type Pairs<'a> = Vec<(Cow<'a, str>, &'a RawValue)>;

struct PairsVisitor;
struct KeySeed;
struct ListVisitor<'n, T> {
    name: &'n str,
    most: usize,
    read: fn(&RawValue, &str) -> Result<T, ApiError>,
}

/// Cuts the top level of a body; the values are not interpreted.
///
/// # Errors
/// [`ErrorKind::InvalidRequest`]: empty, not UTF-8, not JSON, not an object, a key twice, more than 1024
/// keys.
pub fn cut_object(body: &[u8]) -> Result<Pairs<'_>, ApiError> {
    let bad = |message: String| ApiError::new(ErrorKind::InvalidRequest, message);
    if body.iter().all(u8::is_ascii_whitespace) {
        return Err(bad("the body is empty; a JSON object is expected".into()));
    }
    let text = std::str::from_utf8(body)
        .map_err(|e| bad(format!("the body is not UTF-8 (byte {})", e.valid_up_to())))?;
    pairs(text).map_err(|e| match e.classify() {
        serde_json::error::Category::Data => bad(format!("the body is refused: {e}")),
        _ => bad(format!("the body is not valid JSON: {e}")),
    })
}

fn pairs(text: &str) -> Result<Pairs<'_>, serde_json::Error> {
    let mut de = serde_json::Deserializer::from_str(text);
    let pairs = serde::Deserializer::deserialize_map(&mut de, PairsVisitor)?;
    de.end()?;
    Ok(pairs)
}

impl<'a> Fields<'a> {
    /// Splits a body. Errors: those of [`cut_object`].
    pub fn parse(body: &'a [u8]) -> Result<Self, ApiError> {
        Ok(Self::of(cut_object(body)?))
    }

    /// Splits a nested object, the value of field `name`.
    pub fn nested(raw: &'a RawValue, name: &str) -> Result<Self, ApiError> {
        pairs(raw.get()).map(Self::of).map_err(|e| {
            ApiError::invalid(
                name,
                format!("{name} is {}; an object is expected: {e}", shown(raw.get())),
            )
        })
    }

    fn of(pairs: Pairs<'a>) -> Self {
        Self {
            values: pairs.into_iter().collect(),
        }
    }

    /// The value of a field as it came; none if absent or null.
    pub fn raw(&self, name: &str) -> Option<&'a RawValue> {
        self.values
            .get(name)
            .copied()
            .filter(|raw| raw.get() != "null")
    }

    /// Is a field there, and null?
    pub fn is_null(&self, name: &str) -> bool {
        self.values.get(name).is_some_and(|raw| raw.get() == "null")
    }

    /// Names of all fields that are not null.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.values
            .iter()
            .filter(|(_, raw)| raw.get() != "null")
            .map(|(name, _)| name.as_ref())
    }

    /// A field of any type; `expected` completes "… is X; … is expected".
    pub fn read<T: DeserializeOwned>(
        &self,
        name: &str,
        expected: &str,
    ) -> Result<Option<T>, ApiError> {
        self.raw(name)
            .map(|raw| read(raw, name, expected))
            .transpose()
    }

    /// A boolean.
    pub fn boolean(&self, name: &str) -> Result<Option<bool>, ApiError> {
        self.read(name, "true or false")
    }

    /// A string.
    pub fn string(&self, name: &str) -> Result<Option<String>, ApiError> {
        self.read(name, "a string")
    }

    /// A finite number.
    pub fn number(&self, name: &str) -> Result<Option<f32>, ApiError> {
        self.raw(name).map(|raw| number(raw, name)).transpose()
    }

    /// An integer in a range; `1.0` counts as `1`.
    pub fn integer(&self, name: &str, range: RangeInclusive<i64>) -> Result<Option<i64>, ApiError> {
        self.raw(name)
            .map(|raw| integer(raw, name, range))
            .transpose()
    }

    /// An integer from `least` whose largest value is known elsewhere: `most` says in words what it is.
    pub fn count(&self, name: &str, least: u32, most: &str) -> Result<Option<u32>, ApiError> {
        let Some(raw) = self.raw(name) else {
            return Ok(None);
        };
        let value = whole(raw).and_then(|value| u32::try_from(value).ok());
        match value.filter(|value| *value >= least) {
            Some(value) => Ok(Some(value)),
            None => Err(ApiError::invalid(
                name,
                format!(
                    "{name} is {}; an integer from {least} to {most} is expected",
                    shown(raw.get())
                ),
            )),
        }
    }

    /// A list of at most `most` elements, each read by `element`, which is told `name[index]`.
    pub fn list<T>(
        &self,
        name: &str,
        most: usize,
        element: fn(&RawValue, &str) -> Result<T, ApiError>,
    ) -> Result<Option<Vec<T>>, ApiError> {
        self.raw(name)
            .map(|raw| list(raw, name, most, element))
            .transpose()
    }

    /// A list of token ids; whether the model has them is not known here.
    pub fn token_ids(&self, name: &str) -> Result<Option<Vec<TokenId>>, ApiError> {
        self.raw(name).map(|raw| token_ids(raw, name)).transpose()
    }

    /// Refuses a field that holds more than `most` values, at whatever depth, before it is read.
    pub fn check_values(&self, name: &str, most: usize) -> Result<(), ApiError> {
        match self.raw(name) {
            Some(raw) if raw.get().len() > most && values(raw.get()) > most => Err(
                ApiError::invalid(name, format!("{name} has more than {most} values")),
            ),
            _ => Ok(()),
        }
    }

    /// Refuses a field unless it is absent, null or one of the `harmless` JSON texts.
    pub fn refuse(&self, name: &str, harmless: &[&str], why: &str) -> Result<(), ApiError> {
        match self.raw(name) {
            Some(raw) if !harmless.contains(&raw.get()) => Err(ApiError::invalid(
                name,
                format!("{name} is {}; it is not supported: {why}", shown(raw.get())),
            )),
            _ => Ok(()),
        }
    }
}

/// Values and keys of a JSON text, about: what stands between commas, colons and brackets.
fn values(json: &str) -> usize {
    let (mut count, mut quoted, mut escaped) = (1, false, false);
    for byte in json.bytes() {
        match byte {
            _ if escaped => escaped = false,
            b'\\' => escaped = true,
            b'"' => quoted = !quoted,
            b',' | b':' | b'[' | b'{' if !quoted => count += 1,
            _ => {}
        }
    }
    count
}

/// The beginning of a value for an error message.
pub fn shown(text: &str) -> String {
    match text.char_indices().nth(SHOWN) {
        Some((end, _)) => format!("{}...", &text[..end]),
        None => text.to_owned(),
    }
}

pub(super) fn read<T: DeserializeOwned>(
    raw: &RawValue,
    name: &str,
    expected: &str,
) -> Result<T, ApiError> {
    serde_json::from_str(raw.get()).map_err(|_| {
        ApiError::invalid(
            name,
            format!("{name} is {}; {expected} is expected", shown(raw.get())),
        )
    })
}

pub(super) fn number(raw: &RawValue, name: &str) -> Result<f32, ApiError> {
    let value: f64 = read(raw, name, "a number")?;
    let value = value as f32;
    if value.is_finite() {
        return Ok(value);
    }
    Err(ApiError::invalid(
        name,
        format!(
            "{name} is {}; a finite number is expected",
            shown(raw.get())
        ),
    ))
}

pub(super) fn integer(
    raw: &RawValue,
    name: &str,
    range: RangeInclusive<i64>,
) -> Result<i64, ApiError> {
    match whole(raw) {
        Some(value) if range.contains(&value) => Ok(value),
        _ => Err(ApiError::invalid(
            name,
            format!(
                "{name} is {}; an integer from {} to {} is expected",
                shown(raw.get()),
                range.start(),
                range.end()
            ),
        )),
    }
}

/// An integer, also one that is written as `1.0` or `1e3`.
fn whole(raw: &RawValue) -> Option<i64> {
    let text = raw.get();
    text.parse::<i64>().ok().or_else(|| {
        let number = text.parse::<f64>().ok()?;
        // Integral values that f64 holds exactly.
        (number.fract() == 0.0 && number.abs() <= 9_007_199_254_740_992.0).then_some(number as i64)
    })
}

/// Reads a JSON array without keeping more than `most` elements.
pub(super) fn list<T>(
    raw: &RawValue,
    name: &str,
    most: usize,
    element: fn(&RawValue, &str) -> Result<T, ApiError>,
) -> Result<Vec<T>, ApiError> {
    let mut de = serde_json::Deserializer::from_str(raw.get());
    let visitor = ListVisitor {
        name,
        most,
        read: element,
    };
    serde::Deserializer::deserialize_seq(&mut de, visitor).map_err(|_| {
        ApiError::invalid(
            name,
            format!("{name} is {}; a list is expected", shown(raw.get())),
        )
    })?
}

impl<'de> Visitor<'de> for PairsVisitor {
    type Value = Pairs<'de>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let mut pairs: Pairs<'de> = Vec::with_capacity(16);
        while let Some(key) = map.next_key_seed(KeySeed)? {
            if pairs.len() == MAX_KEYS {
                return Err(A::Error::custom(format!("more than {MAX_KEYS} keys")));
            }
            if pairs.iter().any(|(other, _)| *other == key) {
                return Err(A::Error::custom(format!(
                    "key {:?} appears twice",
                    shown(&key)
                )));
            }
            pairs.push((key, map.next_value()?));
        }
        Ok(pairs)
    }
}

impl<'de> DeserializeSeed<'de> for KeySeed {
    type Value = Cow<'de, str>;

    fn deserialize<D: serde::Deserializer<'de>>(self, de: D) -> Result<Self::Value, D::Error> {
        de.deserialize_str(self)
    }
}

impl<'de> Visitor<'de> for KeySeed {
    type Value = Cow<'de, str>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a key")
    }

    fn visit_borrowed_str<E: serde::de::Error>(self, text: &'de str) -> Result<Self::Value, E> {
        Ok(Cow::Borrowed(text))
    }

    fn visit_str<E: serde::de::Error>(self, text: &str) -> Result<Self::Value, E> {
        Ok(Cow::Owned(text.to_owned()))
    }
}

impl<'de, T> Visitor<'de> for ListVisitor<'_, T> {
    type Value = Result<Vec<T>, ApiError>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a list")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Self::Value, A::Error> {
        let mut items = Vec::new();
        while let Some(raw) = seq.next_element::<&'de RawValue>()? {
            let refused = if items.len() == self.most {
                let (name, most) = (self.name, self.most);
                ApiError::invalid(
                    name,
                    format!("{name} has more than {most} elements; {most} are permitted"),
                )
            } else {
                match (self.read)(raw, &format!("{}[{}]", self.name, items.len())) {
                    Ok(item) => {
                        items.push(item);
                        continue;
                    }
                    Err(error) => error,
                }
            };
            // A list that is left before its end reads as broken JSON.
            while seq.next_element::<IgnoredAny>()?.is_some() {}
            return Ok(Err(refused));
        }
        Ok(Ok(items))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message(body: &[u8]) -> String {
        Fields::parse(body).unwrap_err().message
    }

    /// C3.17.
    #[test]
    fn bodies_that_are_no_object_are_refused_with_the_reason() {
        assert!(message(b"").contains("empty"));
        assert!(message(b" \n").contains("empty"));
        assert!(message(b"[]").contains("object"));
        assert!(message(b"\"a\"").contains("object"));
        assert!(message(b"{\"a\":1").contains("not valid JSON"));
        assert!(message(b"{\"a\":\xff}").contains("UTF-8"));
        assert!(message(b"{\"a\":1,\"a\":2}").contains("twice"));
        assert!(message(b"{} x").contains("not valid JSON"));
    }

    #[test]
    fn untouched_values_are_not_interpreted() {
        let body = format!(
            "{{\"x\":1e400,\"y\":{}1{}}}",
            "[".repeat(5000),
            "]".repeat(5000)
        );
        let fields = Fields::parse(body.as_bytes()).unwrap();
        assert_eq!(fields.raw("x").unwrap().get(), "1e400");
        assert!(fields.number("x").is_err());
    }

    #[test]
    fn null_is_absent_and_integral_floats_are_integers() {
        let fields = Fields::parse(br#"{"a":null,"n":1.0,"m":1.5,"s":"5","big":1e12}"#).unwrap();
        assert_eq!(fields.boolean("a").unwrap(), None);
        assert_eq!(fields.count("n", 1, "the context").unwrap(), Some(1));
        for name in ["m", "s", "big"] {
            let refused = fields.count(name, 1, "the context").unwrap_err();
            assert_eq!(refused.param.as_deref(), Some(name));
            let range = "an integer from 1 to the context is expected";
            assert!(refused.message.ends_with(range), "{}", refused.message);
        }
    }

    #[test]
    fn lists_stop_at_their_limit_and_name_the_element() {
        let fields = Fields::parse(br#"{"l":[1,2,3],"m":[1,"x",2,3]}"#).unwrap();
        let int: fn(&RawValue, &str) -> Result<i64, ApiError> =
            |raw, name| integer(raw, name, 0..=9);
        assert_eq!(fields.list("l", 3, int).unwrap(), Some(vec![1, 2, 3]));
        for most in [1, 2] {
            let refused = fields.list("l", most, int).unwrap_err().message;
            assert!(refused.contains(&format!("more than {most}")), "{refused}");
        }
        assert_eq!(
            fields.list("m", 9, int).unwrap_err().param.as_deref(),
            Some("m[1]")
        );
    }

    #[test]
    fn too_many_keys_are_refused() {
        let body = format!(
            "{{{}}}",
            (0..2000)
                .map(|i| format!("\"k{i}\":0"))
                .collect::<Vec<_>>()
                .join(",")
        );
        assert!(message(body.as_bytes()).contains("1024 keys"));
    }
}
