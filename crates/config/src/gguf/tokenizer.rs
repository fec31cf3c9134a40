use super::{Gguf, GgufError, MetaValue};
use serde_json::{Map, Value, json};

/// Splits of the GPT-4 family; tokenizers differ in how many digits go together and in normalisation.
const LLAMA3: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const QWEN2: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const LLAMA3_NAMES: [&str; 3] = ["llama-bpe", "llama3", "llama-v3"];
const ALLOWED: &str = "llama-bpe, qwen2, smollm, gpt-2";

/// `tokenizer.ggml.token_type` of tokens that stand for themselves.
const CONTROL: u64 = 3;
const USER_DEFINED: u64 = 4;

impl Gguf {
    /// The text of the tokenizer.json that this file stands for.
    ///
    /// # Errors
    /// The tokenizer is not a byte-level BPE of a known kind, or its lists do not fit each other.
    pub fn tokenizer_json(&self) -> Result<String, GgufError> {
        let model = self.text("tokenizer.ggml.model")?;
        if model != "gpt2" {
            return Err(self.bad(format!(
                "tokenizer.ggml.model is {model:?}; allowed: gpt2 (byte-level BPE)"
            )));
        }
        if self.flag_if("tokenizer.ggml.add_eos_token")? == Some(true) {
            return Err(self.bad(
                "tokenizer.ggml.add_eos_token is true; allowed: false, a prompt that has ended cannot be continued".to_owned(),
            ));
        }
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
        let added: Vec<Value> = tokens
            .iter()
            .zip(&kinds)
            .enumerate()
            .filter(|(_, (_, kind))| [CONTROL, USER_DEFINED].contains(kind))
            .map(|(id, (token, kind))| {
                json!({
                    "id": id, "content": token, "special": *kind == CONTROL, "normalized": false,
                    "single_word": false, "lstrip": false, "rstrip": false,
                })
            })
            .collect();
        let (normalizer, pre_tokenizer, ignore_merges) = self.splitting()?;
        Ok(json!({
            "version": "1.0",
            "truncation": null,
            "padding": null,
            "added_tokens": added,
            "normalizer": normalizer,
            "pre_tokenizer": pre_tokenizer,
            "post_processor": self.post_processor(&tokens)?,
            "decoder": {"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true},
            "model": {
                "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
                "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false,
                "ignore_merges": ignore_merges, "vocab": vocab, "merges": merges,
            },
        })
        .to_string())
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

    /// Normalizer, pre-tokenizer, whether whole words in the vocabulary skip the merges.
    fn splitting(&self) -> Result<(Value, Value, bool), GgufError> {
        let byte_level = |regex: bool| json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": regex});
        let split = |pattern: &str| {
            json!({"type": "Sequence", "pretokenizers": [
                {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": false},
                byte_level(false),
            ]})
        };
        Ok(match self.text("tokenizer.ggml.pre")? {
            name if LLAMA3_NAMES.contains(&name) => (Value::Null, split(LLAMA3), true),
            "qwen2" => (json!({"type": "NFC"}), split(QWEN2), false),
            "smollm" => {
                let digits = json!({"type": "Digits", "individual_digits": true});
                let all = json!({"type": "Sequence", "pretokenizers": [digits, byte_level(true)]});
                (Value::Null, all, false)
            }
            "gpt-2" => (Value::Null, byte_level(true), false),
            other => {
                return Err(self.bad(format!(
                    "tokenizer.ggml.pre is {other:?}; allowed: {ALLOWED}"
                )));
            }
        })
    }

    fn post_processor(&self, tokens: &[&str]) -> Result<Value, GgufError> {
        // Llama 3's tokenizers begin every text with BOS unless the file says otherwise.
        let begins = LLAMA3_NAMES.contains(&self.text("tokenizer.ggml.pre")?);
        if !self
            .flag_if("tokenizer.ggml.add_bos_token")?
            .unwrap_or(begins)
        {
            return Ok(Value::Null);
        }
        let Some(bos) = self.special("bos", tokens)? else {
            return Err(self.bad(
                "tokenizer.ggml.add_bos_token is true, but tokenizer.ggml.bos_token_id is missing"
                    .to_owned(),
            ));
        };
        let id = self.integer("tokenizer.ggml.bos_token_id")?;
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

    fn special<'a>(&self, name: &str, tokens: &[&'a str]) -> Result<Option<&'a str>, GgufError> {
        let key = format!("tokenizer.ggml.{name}_token_id");
        let Some(id) = self.integer_if(&key)? else {
            return Ok(None);
        };
        let token = usize::try_from(id).ok().and_then(|id| tokens.get(id));
        token.copied().map(Some).ok_or_else(|| {
            self.bad(format!(
                "{key} is {id}; allowed: 0 to {}",
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
