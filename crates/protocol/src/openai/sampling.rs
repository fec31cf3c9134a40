use super::fields::{Fields, number, read, shown};
use super::prompt::token_id;
use crate::limits::{
    MAX_BAD_WORD_BYTES, MAX_BAD_WORDS, MAX_LOGIT_BIASES, MAX_STOP_BYTES, MAX_STOP_TOKEN_IDS,
    MAX_STOPS,
};
use crate::{ApiError, TokenId};
use serde::de::{IgnoredAny, MapAccess, Visitor};
use serde_json::value::RawValue;
use std::fmt;

/// Biases beyond are cut to it, as vLLM does.
const MAX_BIAS: f32 = 100.0;

/// What bounds a number of output tokens.
const CONTEXT: &str = "what the model's context leaves";

/// How tokens are chosen and when to stop, as far as the request says. Ranges of numbers are checked
/// where the model's limits are known.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct SamplingOptions {
    /// `temperature`.
    pub temperature: Option<f32>,
    /// `top_p`.
    pub top_p: Option<f32>,
    /// `top_k`; 0 for both spellings of "all" (0 and -1).
    pub top_k: Option<u32>,
    /// `min_p`.
    pub min_p: Option<f32>,
    /// `repetition_penalty`.
    pub repetition_penalty: Option<f32>,
    /// `frequency_penalty`.
    pub frequency_penalty: Option<f32>,
    /// `presence_penalty`.
    pub presence_penalty: Option<f32>,
    /// `logit_bias`, -100 to 100.
    pub logit_bias: Vec<(TokenId, f32)>,
    /// `allowed_token_ids`.
    pub allowed_token_ids: Option<Vec<TokenId>>,
    /// `bad_words`: each has a character that is no white space.
    pub bad_words: Vec<String>,
    /// `seed`; negative ones keep their bits.
    pub seed: Option<u64>,
    /// `max_completion_tokens`, else `max_tokens`.
    pub max_tokens: Option<u32>,
    /// Which of the two names was given, for error messages.
    pub max_tokens_field: &'static str,
    /// `min_tokens`.
    pub min_tokens: u32,
    /// `ignore_eos`.
    pub ignore_eos: bool,
    /// `stop`: none of them empty.
    pub stop: Vec<String>,
    /// `stop_token_ids`.
    pub stop_token_ids: Vec<TokenId>,
    /// `include_stop_str_in_output`.
    pub include_stop_str_in_output: bool,
    /// `skip_special_tokens`, true if absent.
    pub skip_special_tokens: bool,
}

struct BiasVisitor;

impl SamplingOptions {
    /// Reads and refuses what is common to completions and chat.
    pub fn read(fields: &Fields<'_>) -> Result<Self, ApiError> {
        // A prompt that is echoed may be all that is wanted.
        let least = u32::from(fields.boolean("echo")? != Some(true));
        let newer = fields.count("max_completion_tokens", least, CONTEXT)?;
        let older = fields.count("max_tokens", least, CONTEXT)?;
        let max_tokens_field = if newer.is_some() {
            "max_completion_tokens"
        } else {
            "max_tokens"
        };
        let top_k = top_k(fields)?;
        let seed = fields.integer("seed", i64::MIN..=i64::MAX)?;
        Ok(Self {
            temperature: fields.number("temperature")?,
            top_p: fields.number("top_p")?,
            top_k,
            min_p: fields.number("min_p")?,
            repetition_penalty: fields.number("repetition_penalty")?,
            frequency_penalty: fields.number("frequency_penalty")?,
            presence_penalty: fields.number("presence_penalty")?,
            logit_bias: fields
                .raw("logit_bias")
                .map(logit_bias)
                .transpose()?
                .unwrap_or_default(),
            allowed_token_ids: fields.token_ids("allowed_token_ids")?,
            bad_words: fields
                .list("bad_words", MAX_BAD_WORDS, bad_word)?
                .unwrap_or_default(),
            seed: seed.map(i64::cast_unsigned),
            max_tokens: newer.or(older),
            max_tokens_field,
            min_tokens: fields.count("min_tokens", 0, "max_tokens")?.unwrap_or(0),
            ignore_eos: fields.boolean("ignore_eos")?.unwrap_or(false),
            stop: stop(fields)?,
            stop_token_ids: fields
                .list("stop_token_ids", MAX_STOP_TOKEN_IDS, token_id)?
                .unwrap_or_default(),
            include_stop_str_in_output: fields
                .boolean("include_stop_str_in_output")?
                .unwrap_or(false),
            skip_special_tokens: fields.boolean("skip_special_tokens")?.unwrap_or(true),
        })
    }
}

/// -1 and 0 keep all tokens, as does any number above the vocabulary's.
fn top_k(fields: &Fields<'_>) -> Result<Option<u32>, ApiError> {
    let name = "top_k";
    match fields.integer(name, -1..=i64::MAX) {
        Ok(k) => Ok(k.map(|k| u32::try_from(k.max(0)).unwrap_or(u32::MAX))),
        Err(error) => Err(ApiError {
            message: format!(
                "{name} is {}; an integer from 1 to the size of the vocabulary is expected, or -1 or 0 for all",
                fields
                    .raw(name)
                    .map(|raw| shown(raw.get()))
                    .unwrap_or_default()
            ),
            ..error
        }),
    }
}

fn stop(fields: &Fields<'_>) -> Result<Vec<String>, ApiError> {
    let Some(raw) = fields.raw("stop") else {
        return Ok(Vec::new());
    };
    match raw.get().as_bytes().first() {
        Some(b'"') => Ok(vec![stop_text(raw, "stop")?]),
        Some(b'[') => {
            let stops = fields.list("stop", MAX_STOPS, stop_text)?;
            Ok(stops.unwrap_or_default())
        }
        _ => Err(ApiError::invalid(
            "stop",
            format!(
                "stop is {}; a string or a list of at most {MAX_STOPS} strings is expected",
                shown(raw.get())
            ),
        )),
    }
}

fn stop_text(raw: &RawValue, name: &str) -> Result<String, ApiError> {
    let text: String = read(raw, name, "a string")?;
    if text.is_empty() || text.len() > MAX_STOP_BYTES {
        return Err(ApiError::invalid(
            name,
            format!(
                "{name} has {} bytes; 1 to {MAX_STOP_BYTES} are permitted",
                text.len()
            ),
        ));
    }
    Ok(text)
}

fn bad_word(raw: &RawValue, name: &str) -> Result<String, ApiError> {
    let word: String = read(raw, name, "a string")?;
    if word.trim_start().is_empty() || word.len() > MAX_BAD_WORD_BYTES {
        return Err(ApiError::invalid(
            name,
            format!(
                "{name} is {:?}; 1 to {MAX_BAD_WORD_BYTES} bytes are permitted, not all of them white space",
                shown(&word)
            ),
        ));
    }
    Ok(word)
}

fn logit_bias(raw: &RawValue) -> Result<Vec<(TokenId, f32)>, ApiError> {
    let name = "logit_bias";
    let mut de = serde_json::Deserializer::from_str(raw.get());
    serde::Deserializer::deserialize_map(&mut de, BiasVisitor).map_err(|_| {
        ApiError::invalid(
            name,
            format!("{name} is {}; an object is expected", shown(raw.get())),
        )
    })?
}

fn entry(
    biases: &[(TokenId, f32)],
    key: &str,
    value: &RawValue,
) -> Result<(TokenId, f32), ApiError> {
    let name = "logit_bias";
    if biases.len() == MAX_LOGIT_BIASES {
        return Err(ApiError::invalid(
            name,
            format!(
                "{name} has more than {MAX_LOGIT_BIASES} entries; {MAX_LOGIT_BIASES} are permitted"
            ),
        ));
    }
    let Ok(id) = key.parse::<TokenId>() else {
        return Err(ApiError::invalid(
            name,
            format!("{name} has the key {:?}; keys are token ids", shown(key)),
        ));
    };
    if biases.iter().any(|(other, _)| *other == id) {
        return Err(ApiError::invalid(
            name,
            format!("{name} has token {id} twice; once is permitted"),
        ));
    }
    let bias = number(value, &format!("{name}[{id}]"))?;
    Ok((id, bias.clamp(-MAX_BIAS, MAX_BIAS)))
}

impl<'de> Visitor<'de> for BiasVisitor {
    type Value = Result<Vec<(TokenId, f32)>, ApiError>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let mut biases: Vec<(TokenId, f32)> = Vec::new();
        while let Some((key, value)) = map.next_entry::<String, &'de RawValue>()? {
            match entry(&biases, &key, value) {
                Ok(bias) => biases.push(bias),
                Err(error) => {
                    // An object that is left before its end reads as broken JSON.
                    while map.next_entry::<IgnoredAny, IgnoredAny>()?.is_some() {}
                    return Ok(Err(error));
                }
            }
        }
        Ok(Ok(biases))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn options(body: &str) -> Result<SamplingOptions, ApiError> {
        SamplingOptions::read(&Fields::parse(body.as_bytes())?)
    }

    /// C5.13.
    #[test]
    fn null_is_the_same_as_absent() {
        let nulls = r#"{"temperature":null,"top_k":null,"stop":null,"max_tokens":null,"seed":null,
            "logit_bias":null,"bad_words":null,"min_tokens":null,"ignore_eos":null,"stop_token_ids":null,
            "allowed_token_ids":null,"skip_special_tokens":null}"#;
        assert_eq!(options(nulls).unwrap(), options("{}").unwrap());
        assert_eq!(
            options(r#"{"min_tokens":0,"stop":[]}"#).unwrap(),
            options("{}").unwrap()
        );
    }

    /// C9.8.
    #[test]
    fn numbers_out_of_bounds_are_named() {
        for (body, param) in [
            (r#"{"max_tokens":1000000000000}"#, "max_tokens"),
            (r#"{"max_tokens":-1}"#, "max_tokens"),
            (r#"{"max_tokens":0}"#, "max_tokens"),
            (r#"{"max_tokens":1.5}"#, "max_tokens"),
            (r#"{"max_tokens":"5"}"#, "max_tokens"),
            (r#"{"top_k":-2}"#, "top_k"),
            (r#"{"temperature":1e400}"#, "temperature"),
            (r#"{"stop":[""]}"#, "stop[0]"),
            (r#"{"stop":5}"#, "stop"),
            (r#"{"stop_token_ids":[-1]}"#, "stop_token_ids[0]"),
            (
                r#"{"stop_token_ids":[9223372036854775808]}"#,
                "stop_token_ids[0]",
            ),
            (
                r#"{"allowed_token_ids":[2147483648,-5]}"#,
                "allowed_token_ids[1]",
            ),
            (r#"{"logit_bias":{"-1":1}}"#, "logit_bias"),
            (r#"{"logit_bias":{"x":1}}"#, "logit_bias"),
            (r#"{"logit_bias":{"1":"x"}}"#, "logit_bias[1]"),
            (r#"{"logit_bias":[]}"#, "logit_bias"),
            (r#"{"bad_words":"x"}"#, "bad_words"),
            (r#"{"bad_words":["x",""]}"#, "bad_words[1]"),
            (r#"{"bad_words":[" \n"]}"#, "bad_words[0]"),
            (r#"{"bad_words":[5]}"#, "bad_words[0]"),
        ] {
            assert_eq!(
                options(body).unwrap_err().param.as_deref(),
                Some(param),
                "{body}"
            );
        }
        let many = (0..2000)
            .map(|i| format!("\"{i}\":1"))
            .collect::<Vec<_>>()
            .join(",");
        let refused = options(&format!("{{\"logit_bias\":{{{many}}}}}")).unwrap_err();
        assert!(refused.message.contains("more than 1024"), "{refused}");
        let stops = vec!["\"x\""; 40].join(",");
        let refused = options(&format!("{{\"stop\":[{stops}]}}")).unwrap_err();
        assert!(refused.message.contains("more than 32"), "{refused}");
        let words = vec!["\"x\""; 300].join(",");
        let refused = options(&format!("{{\"bad_words\":[{words}]}}")).unwrap_err();
        assert!(refused.message.contains("more than 256"), "{refused}");
        let long = "x".repeat(1 << 20);
        assert!(options(&format!("{{\"stop\":\"{long}\"}}")).is_err());
        assert!(options(&format!("{{\"bad_words\":[\"{long}\"]}}")).is_err());
    }

    /// They were refused.
    #[test]
    fn biases_beyond_100_are_cut_as_vllm_does() {
        let given = options(r#"{"logit_bias":{"1":100.5,"2":-1e9,"3":-7}}"#).unwrap();
        assert_eq!(given.logit_bias, [(1, 100.0), (2, -100.0), (3, -7.0)]);
    }

    #[test]
    fn the_newer_name_of_max_tokens_wins() {
        let both = options(r#"{"max_tokens":5,"max_completion_tokens":3}"#).unwrap();
        assert_eq!(
            (both.max_tokens, both.max_tokens_field),
            (Some(3), "max_completion_tokens")
        );
        let older = options(r#"{"max_tokens":5,"max_completion_tokens":null}"#).unwrap();
        assert_eq!(
            (older.max_tokens, older.max_tokens_field),
            (Some(5), "max_tokens")
        );
    }

    #[test]
    fn seeds_keep_their_bits() {
        assert_eq!(options(r#"{"seed":-1}"#).unwrap().seed, Some(u64::MAX));
    }
}
