use schemars::{JsonSchema, Schema, SchemaGenerator};
use serde::{Deserialize, Serialize};
use serde_json::Value;

/// Highest number of a core.
const MAX_CORE: u32 = 65_535;

/// Cores as a person writes them: `0-3,8`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CoreSet(pub Vec<u32>);

impl CoreSet {
    /// Parses `0-3,8`; sorted, each core once.
    ///
    /// # Errors
    /// A sentence that names the element and what is allowed.
    pub fn parse(text: &str) -> Result<Self, String> {
        let allowed = "allowed: core numbers up to 65535 and ranges, such as 0-3,8";
        let number = |part: &str| {
            let part = part.trim();
            let plain = part.bytes().all(|b| b.is_ascii_digit());
            match part.parse::<u32>() {
                Ok(core) if plain && core <= MAX_CORE => Ok(core),
                _ => Err(format!("{part:?} is no core number; {allowed}")),
            }
        };
        let mut cores = Vec::new();
        for part in text.split(',') {
            match part.split_once('-') {
                None => cores.push(number(part)?),
                Some((from, to)) => {
                    let (from, to) = (number(from)?, number(to)?);
                    if from > to {
                        return Err(format!("range {:?} runs backwards; {allowed}", part.trim()));
                    }
                    cores.extend(from..=to);
                }
            }
        }
        let count = cores.len();
        cores.sort_unstable();
        cores.dedup();
        if cores.len() != count {
            return Err(format!("{text:?} names a core twice"));
        }
        Ok(Self(cores))
    }

    /// The shortest form that [`CoreSet::parse`] reads.
    pub fn text(cores: &[u32]) -> String {
        let mut parts: Vec<String> = Vec::new();
        let mut rest = cores;
        while let Some((&first, _)) = rest.split_first() {
            let run = rest
                .iter()
                .zip(first..)
                .take_while(|(core, expected)| *core == expected)
                .count();
            parts.push(match run {
                1 => first.to_string(),
                _ => format!("{first}-{}", rest[run - 1]),
            });
            rest = &rest[run..];
        }
        parts.join(",")
    }
}

impl Serialize for CoreSet {
    fn serialize<S: serde::Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
        s.serialize_str(&Self::text(&self.0))
    }
}

impl<'de> Deserialize<'de> for CoreSet {
    fn deserialize<D: serde::Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        let text = match Value::deserialize(d)? {
            Value::String(text) => text,
            other => other.to_string(),
        };
        Self::parse(&text).map_err(serde::de::Error::custom)
    }
}

impl JsonSchema for CoreSet {
    fn schema_name() -> std::borrow::Cow<'static, str> {
        "CoreSet".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        schemars::json_schema!({ "type": ["string", "integer"], "minimum": 0, "format": "core-set" })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn core_sets_survive_their_text(cores in proptest::collection::btree_set(0u32..300, 1..40)) {
            let cores: Vec<u32> = cores.into_iter().collect();
            prop_assert_eq!(CoreSet::parse(&CoreSet::text(&cores)).unwrap().0, cores);
        }

        #[test]
        fn core_sets_never_panic(text in "\\PC{0,20}") {
            let _ = CoreSet::parse(&text);
        }
    }

    #[test]
    fn bad_core_sets_are_named() {
        for bad in [
            "",
            "a",
            "3-1",
            "1,1",
            "0-",
            "-1",
            "70000",
            "0-4294967295",
            "1;2",
            "+1",
            "0,,1",
        ] {
            assert!(CoreSet::parse(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn spaces_and_order_do_not_matter() {
        assert_eq!(CoreSet::parse(" 5 , 1-2").unwrap().0, [1, 2, 5]);
    }
}
