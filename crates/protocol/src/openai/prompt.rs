use super::fields::{Fields, integer, list, read, shown};
use crate::{ApiError, TokenId};
use serde_json::value::RawValue;

/// Prompts of one request.
pub const MAX_PROMPTS: usize = 1024;

/// One prompt of a completion request.
#[derive(Clone, Debug, PartialEq)]
pub enum Prompt {
    /// Text, to be tokenised.
    Text(String),
    /// Tokens. Whether the model has them is not known here.
    Ids(Vec<TokenId>),
}

impl Prompt {
    /// Reads `prompt`: a string, a list of strings, token ids, or a list of id lists.
    pub fn read_all(fields: &Fields<'_>) -> Result<Vec<Self>, ApiError> {
        let name = "prompt";
        let raw = fields.raw(name).ok_or_else(|| {
            ApiError::invalid(
                name,
                "prompt is missing; a string, strings, token ids or lists of them",
            )
        })?;
        let text = raw.get();
        if text.starts_with('"') {
            return Ok(vec![Self::text(raw, name)?]);
        }
        let prompts = match first_of_list(text) {
            Some(b'"') => list(raw, name, MAX_PROMPTS, Self::text)?,
            Some(b'[') => list(raw, name, MAX_PROMPTS, Self::ids)?,
            Some(b']') => return Err(ApiError::invalid(name, "prompt is an empty list")),
            Some(_) => vec![Self::ids(raw, name)?],
            None => {
                return Err(ApiError::invalid(
                    name,
                    format!(
                        "prompt is {}; a string, strings, token ids or lists of them are expected",
                        shown(text)
                    ),
                ));
            }
        };
        Ok(prompts)
    }

    fn text(raw: &RawValue, name: &str) -> Result<Self, ApiError> {
        read(raw, name, "a string").map(Self::Text)
    }

    fn ids(raw: &RawValue, name: &str) -> Result<Self, ApiError> {
        let ids = token_ids(raw, name)?;
        if ids.is_empty() {
            return Err(ApiError::invalid(
                name,
                format!("{name} is an empty list of tokens"),
            ));
        }
        Ok(Self::Ids(ids))
    }
}

/// A list of token ids, bounded by the body.
pub(super) fn token_ids(raw: &RawValue, name: &str) -> Result<Vec<TokenId>, ApiError> {
    // The quick way first: a megabyte of ids is common.
    if let Ok(ids) = serde_json::from_str::<Vec<TokenId>>(raw.get()) {
        return Ok(ids);
    }
    list(raw, name, usize::MAX, token_id)
}

pub(super) fn token_id(raw: &RawValue, name: &str) -> Result<TokenId, ApiError> {
    let id = integer(raw, name, 0..=i64::from(TokenId::MAX))?;
    TokenId::try_from(id)
        .map_err(|_| ApiError::invalid(name, format!("{name} is {id}; no token id")))
}

/// First significant byte after the opening bracket.
fn first_of_list(text: &str) -> Option<u8> {
    let rest = text.strip_prefix('[')?;
    rest.bytes().find(|b| !b.is_ascii_whitespace())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn prompts(body: &str) -> Result<Vec<Prompt>, ApiError> {
        Prompt::read_all(&Fields::parse(body.as_bytes()).unwrap())
    }

    /// C5.16.
    #[test]
    fn the_four_forms_of_prompt() {
        assert_eq!(
            prompts(r#"{"prompt":"a"}"#).unwrap(),
            [Prompt::Text("a".into())]
        );
        assert_eq!(
            prompts(r#"{"prompt":[ "a","b"]}"#).unwrap(),
            [Prompt::Text("a".into()), Prompt::Text("b".into())]
        );
        assert_eq!(
            prompts(r#"{"prompt":[1,2]}"#).unwrap(),
            [Prompt::Ids(vec![1, 2])]
        );
        assert_eq!(
            prompts(r#"{"prompt":[[1],[2,3]]}"#).unwrap(),
            [Prompt::Ids(vec![1]), Prompt::Ids(vec![2, 3])]
        );
    }

    /// C9.9.
    #[test]
    fn bad_ids_are_named() {
        for (body, param) in [
            (r#"{"prompt":[1,-1]}"#, "prompt[1]"),
            (r#"{"prompt":[9223372036854775808]}"#, "prompt[0]"),
            (r#"{"prompt":[[1],[4294967296]]}"#, "prompt[1][0]"),
            (r#"{"prompt":[1,"a"]}"#, "prompt[1]"),
            (r#"{"prompt":["a",1]}"#, "prompt[1]"),
            (r#"{"prompt":[]}"#, "prompt"),
            (r#"{"prompt":[[]]}"#, "prompt[0]"),
            (r#"{"prompt":{}}"#, "prompt"),
            (r#"{"prompt":null}"#, "prompt"),
            (r#"{}"#, "prompt"),
        ] {
            assert_eq!(
                prompts(body).unwrap_err().param.as_deref(),
                Some(param),
                "{body}"
            );
        }
    }

    /// C9.8.
    #[test]
    fn prompt_lists_are_bounded() {
        let body = format!(
            "{{\"prompt\":[{}]}}",
            vec!["\"x\""; MAX_PROMPTS + 1].join(",")
        );
        assert!(prompts(&body).unwrap_err().message.contains("more than"));
    }
}
