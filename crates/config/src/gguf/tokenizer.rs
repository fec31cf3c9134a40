mod kinds;
mod pieces;

use super::{Gguf, GgufError, MetaValue};
use kinds::Kind;
use serde_json::{Map, Value, json};

/// `tokenizer.ggml.model`.
const BYTE_LEVEL: &str = "gpt2";
const PIECES: &str = "llama";

/// `tokenizer.ggml.token_type` of tokens that stand for themselves.
const UNKNOWN: u64 = 2;
const CONTROL: u64 = 3;
const USER_DEFINED: u64 = 4;

/// What all tokenizers hold.
struct Common<'a> {
    tokens: Vec<&'a str>,
    kinds: Vec<u64>,
    vocab: Map<String, Value>,
}

impl Gguf {
    /// The text of the tokenizer.json that this file stands for.
    ///
    /// # Errors
    /// The tokenizer is neither a byte-level BPE of a known kind nor SentencePiece's with bytes, or its
    /// lists do not fit each other.
    pub fn tokenizer_json(&self) -> Result<String, GgufError> {
        let model = self.text("tokenizer.ggml.model")?;
        if ![BYTE_LEVEL, PIECES].contains(&model) {
            return Err(self.bad(format!(
                "tokenizer.ggml.model is {model:?}; allowed: {BYTE_LEVEL} (byte-level BPE), {PIECES} (SentencePiece with scores)"
            )));
        }
        if self.flag_if("tokenizer.ggml.add_eos_token")? == Some(true) {
            return Err(self.bad(
                "tokenizer.ggml.add_eos_token is true; allowed: false, a prompt that has ended cannot be continued".to_owned(),
            ));
        }
        let common = self.common()?;
        let json = if model == PIECES {
            self.pieces_json(&common)?
        } else {
            self.byte_level_json(&common)?
        };
        Ok(json.to_string())
    }

    fn common(&self) -> Result<Common<'_>, GgufError> {
        let tokens = self.texts("tokenizer.ggml.tokens")?;
        let kinds = self.kinds(tokens.len())?;
        let vocab: Map<String, Value> = tokens
            .iter()
            .enumerate()
            .map(|(id, token)| ((*token).to_owned(), json!(id)))
            .collect();
        if vocab.len() != tokens.len() {
            return Err(self.bad("tokenizer.ggml.tokens has a token twice".to_owned()));
        }
        Ok(Common {
            tokens,
            kinds,
            vocab,
        })
    }

    fn byte_level_json(&self, common: &Common<'_>) -> Result<Value, GgufError> {
        let name = self.text("tokenizer.ggml.pre")?;
        let kind = Kind::of(name).ok_or_else(|| {
            self.bad(format!(
                "tokenizer.ggml.pre is {name:?}; allowed: {}",
                Kind::names()
            ))
        })?;
        let merges: Vec<Value> = self
            .texts("tokenizer.ggml.merges")?
            .into_iter()
            .map(|merge| match merge.split_once(' ') {
                Some((left, right)) if !left.is_empty() && !right.is_empty() => {
                    Ok(json!([left, right]))
                }
                _ => Err(self.bad(format!(
                    "tokenizer.ggml.merges has {merge:?}; allowed: two tokens with a space between"
                ))),
            })
            .collect::<Result<_, _>>()?;
        Ok(json!({
            "version": "1.0",
            "truncation": null,
            "padding": null,
            "added_tokens": special_tokens(common),
            "normalizer": kind.normalizer(),
            "pre_tokenizer": kind.pre_tokenizer(),
            "post_processor": self.post_processor(kind.begins, &common.tokens)?,
            "decoder": {"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true},
            "model": {
                "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
                "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false,
                "ignore_merges": kind.ignore_merges, "vocab": common.vocab, "merges": merges,
            },
        }))
    }

    /// The text of the tokenizer_config.json that this file stands for.
    ///
    /// # Errors
    /// A special token's id is beyond the vocabulary, or the template is no text.
    pub fn tokenizer_config_json(&self) -> Result<String, GgufError> {
        let tokens = self.texts("tokenizer.ggml.tokens")?;
        let mut config = Map::new();
        for name in ["bos", "eos"] {
            if let Some(token) = self.special(name, &tokens)? {
                config.insert(format!("{name}_token"), json!(token));
            }
        }
        if self.get("tokenizer.chat_template").is_some() {
            let template = self.text("tokenizer.chat_template")?;
            config.insert("chat_template".to_owned(), json!(template));
        }
        Ok(Value::Object(config).to_string())
    }

    /// `begins`: texts begin with BOS unless the file says otherwise.
    fn post_processor(&self, begins: bool, tokens: &[&str]) -> Result<Value, GgufError> {
        if !self
            .flag_if("tokenizer.ggml.add_bos_token")?
            .unwrap_or(begins)
        {
            return Ok(Value::Null);
        }
        let Some(bos) = self.special("bos", tokens)? else {
            return Err(self.bad(
                "texts begin with BOS (tokenizer.ggml.add_bos_token), but tokenizer.ggml.bos_token_id is missing"
                    .to_owned(),
            ));
        };
        let id = self.special_id("bos")?;
        Ok(json!({
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": bos, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [
                {"SpecialToken": {"id": bos, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}},
                {"SpecialToken": {"id": bos, "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}},
            ],
            "special_tokens": {bos: {"id": bos, "ids": [id], "tokens": [bos]}},
        }))
    }

    /// Id of a special token. SentencePiece's own ids hold where the file has none.
    pub(super) fn special_id(&self, name: &str) -> Result<Option<u64>, GgufError> {
        if let Some(id) = self.integer_if(&format!("tokenizer.ggml.{name}_token_id"))? {
            return Ok(Some(id));
        }
        let pieces = self.get("tokenizer.ggml.model") == Some(&MetaValue::Text(PIECES.to_owned()));
        Ok(match name {
            "bos" if pieces => Some(1),
            "eos" if pieces => Some(2),
            _ => None,
        })
    }

    fn special<'a>(&self, name: &str, tokens: &[&'a str]) -> Result<Option<&'a str>, GgufError> {
        let Some(id) = self.special_id(name)? else {
            return Ok(None);
        };
        let token = usize::try_from(id).ok().and_then(|id| tokens.get(id));
        token.copied().map(Some).ok_or_else(|| {
            self.bad(format!(
                "tokenizer.ggml.{name}_token_id is {id}; allowed: 0 to {}",
                tokens.len().saturating_sub(1)
            ))
        })
    }

    fn texts(&self, key: &str) -> Result<Vec<&str>, GgufError> {
        self.list(key)?
            .iter()
            .map(|value| match value {
                MetaValue::Text(text) => Ok(text.as_str()),
                other => Err(self.bad(format!("{key} holds {other:?}; allowed: texts"))),
            })
            .collect()
    }

    fn kinds(&self, tokens: usize) -> Result<Vec<u64>, GgufError> {
        const KEY: &str = "tokenizer.ggml.token_type";
        let kinds: Vec<u64> = self
            .list(KEY)?
            .iter()
            .map(|value| match value {
                MetaValue::Unsigned(kind) => *kind,
                MetaValue::Signed(kind) => u64::try_from(*kind).unwrap_or(0),
                _ => 0,
            })
            .collect();
        if kinds.len() != tokens {
            return Err(self.bad(format!(
                "{KEY} has {} values, tokenizer.ggml.tokens {tokens}",
                kinds.len()
            )));
        }
        Ok(kinds)
    }
}

/// Tokens that stand for themselves in a text, as tokenizer.json lists them.
fn special_tokens(common: &Common<'_>) -> Vec<Value> {
    let kinds = common.tokens.iter().zip(&common.kinds).enumerate();
    kinds
        .filter(|(_, (_, kind))| [UNKNOWN, CONTROL, USER_DEFINED].contains(kind))
        .map(|(id, (token, kind))| {
            json!({
                "id": id, "content": token, "special": *kind != USER_DEFINED, "normalized": false,
                "single_word": false, "lstrip": false, "rstrip": false,
            })
        })
        .collect()
}
