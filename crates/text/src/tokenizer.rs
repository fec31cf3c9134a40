use crate::TextError;
use crate::files::ModelTexts;
use crate::template::read_sources;
use crate::token_bytes::TokenBytes;
use serde_json::Value;
use sha2::{Digest, Sha256};
use std::fmt::Write as _;
use std::path::Path;
use twinfer_protocol::TokenId;

/// No vocabulary is larger; guards the token table against an absurd id in tokenizer.json.
const MAX_VOCAB: u32 = 1 << 22;

/// More tokens than this beside the vocabulary are refused: the library's automaton of them would take
/// memory and seconds without bound.
const MAX_ADDED: usize = 1 << 16;
/// Normalisers may shorten a text before it is tokenised, but not to less than this part.
const SHORTENED: usize = 2;
/// Bytes of text per allowed token that are tokenised in any case; of a longer text that much is tried.
const TRIED_BYTES: usize = 16;
/// Tokens by which a text's beginning, taken alone, may have more than the same place in the whole.
const SEAM: usize = 1024;

/// A model's tokenizer: `tokenizer.json`, with the special tokens of `tokenizer_config.json` and the
/// end-of-sequence ids of `generation_config.json` or `config.json`.
#[derive(Debug)]
pub struct Tokenizer {
    inner: tokenizers::Tokenizer,
    table: TokenBytes,
    /// Bytes of the longest token.
    longest: usize,
    id_limit: u32,
    /// Rows of the model's embedding, if config.json tells.
    rows: Option<u32>,
    eos: Vec<TokenId>,
    bos: Option<TokenId>,
    bos_token: Option<String>,
    eos_token: Option<String>,
    hash: String,
}

impl Tokenizer {
    /// Bytes of the longest token.
    pub fn longest_token(&self) -> usize {
        self.longest
    }

    /// Loads from a model directory in Hugging Face layout. Only `tokenizer.json` must exist.
    ///
    /// # Errors
    /// A missing or unreadable file, bad JSON, ids that contradict each other, and decoders whose
    /// text cannot be streamed: file, field and value are named.
    pub fn from_dir(dir: &Path) -> Result<Self, TextError> {
        Self::of(&ModelTexts::directory(dir))
    }

    /// Loads from a model's texts, wherever they are from.
    ///
    /// # Errors
    /// As [`Tokenizer::from_dir`].
    pub fn of(texts: &ModelTexts) -> Result<Self, TextError> {
        let path = texts.path("tokenizer.json");
        let invalid = |message: String| TextError::Invalid {
            path: path.clone(),
            message,
        };
        let raw = texts.required("tokenizer.json")?;
        let parsed: Outline = serde_json::from_slice(&raw).map_err(|e| invalid(e.to_string()))?;
        let added = parsed.added_tokens.len();
        if added > MAX_ADDED {
            return Err(invalid(format!(
                "added_tokens has {added} entries; allowed are {MAX_ADDED}"
            )));
        }
        let mut inner =
            tokenizers::Tokenizer::from_bytes(&raw).map_err(|e| invalid(e.to_string()))?;
        inner
            .with_truncation(None)
            .map_err(|e| invalid(e.to_string()))?;
        inner.with_padding(None);
        for raw in &parsed.added_tokens {
            let AddedToken { id, content } =
                serde_json::from_str(raw.get()).map_err(|e| invalid(e.to_string()))?;
            let known = inner.token_to_id(&content);
            if known != Some(id) {
                return Err(invalid(format!(
                    "added_tokens: {content:?} has id {id}, which is taken or leaves a gap; it would get {}",
                    known.map_or("none".to_owned(), |id| id.to_string())
                )));
            }
        }

        let mut hash = Sha256::new();
        hash.update((raw.len() as u64).to_le_bytes());
        hash.update(&raw);
        drop(raw);
        for source in read_sources(texts)? {
            for part in [&source.name, &source.template] {
                hash.update((part.len() as u64).to_le_bytes());
                hash.update(part.as_bytes());
            }
        }

        let table = build_table(&inner, &parsed.decoder).map_err(invalid)?;
        let settings = texts.json("tokenizer_config.json")?;
        let generation = texts.json("generation_config.json")?;
        let config = texts.json("config.json")?;
        let rows = config["vocab_size"]
            .as_u64()
            .or_else(|| config["text_config"]["vocab_size"].as_u64());
        let rows = rows
            .and_then(|n| u32::try_from(n).ok())
            .filter(|n| (1..=MAX_VOCAB).contains(n));
        let known = u32::try_from(table.len()).unwrap_or(MAX_VOCAB);

        let bos_token = token_name(&settings["bos_token"]);
        let eos_token = token_name(&settings["eos_token"]);
        let mut tokenizer = Self {
            bos: None,
            eos: Vec::new(),
            id_limit: known.max(rows.unwrap_or(0)),
            rows,
            hash: hex(&hash.finalize()[..16]),
            inner,
            longest: table.longest(),
            table,
            bos_token,
            eos_token,
        };
        tokenizer.eos = tokenizer.find_eos(texts, &generation, &config)?;
        tokenizer.bos = match &tokenizer.bos_token {
            Some(name) => tokenizer.inner.token_to_id(name),
            None => None,
        };
        Ok(tokenizer)
    }

    /// Token ids of a text. `add_special` adds what the tokenizer's post-processor adds (BOS): true for
    /// plain prompts, false for rendered chats, which already contain it.
    ///
    /// # Errors
    /// [`TextError::Encode`] if the library refuses the text.
    pub fn encode(&self, text: &str, add_special: bool) -> Result<Vec<TokenId>, TextError> {
        let encoding = self
            .inner
            .encode_fast(text, add_special)
            .map_err(|e| TextError::Encode(e.to_string()))?;
        Ok(encoding.get_ids().to_vec())
    }

    /// [`Self::encode`] for texts of strangers. The library takes a hundred bytes of memory per byte of
    /// text; one that cannot have as few as `limit` tokens is refused before that. One that has a few
    /// more may pass: the caller counts.
    ///
    /// # Errors
    /// [`TextError::TooLong`], and those of [`Self::encode`].
    pub fn encode_bounded(
        &self,
        text: &str,
        add_special: bool,
        limit: usize,
    ) -> Result<Vec<TokenId>, TextError> {
        let most = limit.saturating_mul(self.longest).saturating_mul(SHORTENED);
        if text.len() > most {
            return Err(TextError::TooLong { limit });
        }
        let tried = text.floor_char_boundary(limit.saturating_mul(TRIED_BYTES));
        if text.len() / 2 > tried && self.encode(&text[..tried], false)?.len() > limit + SEAM {
            return Err(TextError::TooLong { limit });
        }
        self.encode(text, add_special)
    }

    /// Token sequences that spell each of `words`, as vLLM's `bad_words` has them: the word without white space in
    /// front of it; and with one space in front, if that begins with another token and is as long: a token for
    /// "space and word". At most two for each word.
    ///
    /// # Errors
    /// Those of [`Self::encode`].
    pub fn word_forms(&self, words: &[String]) -> Result<Vec<Vec<TokenId>>, TextError> {
        let mut forms = Vec::with_capacity(words.len());
        for word in words {
            let word = word.trim_start();
            let plain = self.encode(word, false)?;
            let spaced = self.encode(&format!(" {word}"), false)?;
            let other = spaced.first() != plain.first() && spaced.len() == plain.len();
            // A normaliser may leave nothing of a word.
            forms.extend([Some(plain), other.then_some(spaced)].into_iter().flatten());
        }
        forms.retain(|form| !form.is_empty());
        Ok(forms)
    }

    /// Text of the ids; bytes that are not UTF-8 become U+FFFD. `skip_special` leaves out special
    /// tokens.
    ///
    /// # Errors
    /// [`TextError::UnknownToken`] for the first id that is out of range.
    pub fn decode(&self, ids: &[TokenId], skip_special: bool) -> Result<String, TextError> {
        let mut bytes = Vec::with_capacity(ids.len() * 4);
        for &id in ids {
            let token = self.token_bytes(id)?;
            if !(skip_special && self.is_special(id)) {
                bytes.extend_from_slice(token);
            }
        }
        let mut start = 0;
        while start < self.table.strip_start() && bytes.get(start) == Some(&b' ') {
            start += 1;
        }
        Ok(String::from_utf8_lossy(&bytes[start..]).into_owned())
    }

    /// Bytes of one token, exact also for parts of characters; empty for an id that the model has a
    /// row for but the tokenizer no token.
    ///
    /// # Errors
    /// [`TextError::UnknownToken`].
    pub fn token_bytes(&self, id: TokenId) -> Result<&[u8], TextError> {
        match self.table.get(id) {
            Some(bytes) => Ok(bytes),
            None if id < self.id_limit => Ok(&[]),
            None => Err(TextError::UnknownToken {
                id,
                limit: self.id_limit,
            }),
        }
    }

    /// Text of one token for logprobs, U+FFFD for parts of characters.
    ///
    /// # Errors
    /// [`TextError::UnknownToken`].
    pub fn token_text(&self, id: TokenId) -> Result<String, TextError> {
        Ok(String::from_utf8_lossy(self.token_bytes(id)?).into_owned())
    }

    /// The id of a token by its exact name in the vocabulary.
    pub fn token_id(&self, name: &str) -> Option<TokenId> {
        self.inner.token_to_id(name)
    }

    /// Can the model read and write these ids? A tokenizer may know more than the embedding has rows.
    ///
    /// # Errors
    /// [`TextError::UnknownToken`] for the first id that it cannot.
    pub fn check_ids(&self, ids: &[TokenId]) -> Result<(), TextError> {
        let limit = self.rows.unwrap_or(self.id_limit);
        match ids.iter().find(|&&id| id >= limit) {
            Some(&id) => Err(TextError::UnknownToken { id, limit }),
            None => Ok(()),
        }
    }

    /// Is this one of the special tokens that `skip_special` leaves out?
    pub fn is_special(&self, id: TokenId) -> bool {
        self.table.is_special(id)
    }

    /// Number of ids the tokenizer itself knows (highest id + 1, added tokens included).
    pub fn vocab_size(&self) -> u32 {
        u32::try_from(self.table.len()).unwrap_or(MAX_VOCAB)
    }

    /// First id that is refused: [`Self::vocab_size`] or `vocab_size` of config.json, which may be
    /// larger where the embedding is padded.
    pub fn id_limit(&self) -> u32 {
        self.id_limit
    }

    /// Ids that end a text, in the order of the model's files.
    pub fn eos_ids(&self) -> &[TokenId] {
        &self.eos
    }

    /// Id that begins a text.
    pub fn bos_id(&self) -> Option<TokenId> {
        self.bos
    }

    /// `bos_token` of tokenizer_config.json.
    pub fn bos_token(&self) -> Option<&str> {
        self.bos_token.as_deref()
    }

    /// `eos_token` of tokenizer_config.json.
    pub fn eos_token(&self) -> Option<&str> {
        self.eos_token.as_deref()
    }

    /// Hash over tokenizer.json and the chat templates, 32 hexadecimal digits, for the fingerprint.
    pub fn content_hash(&self) -> &str {
        &self.hash
    }

    pub(crate) fn strip_start(&self) -> usize {
        self.table.strip_start()
    }

    /// generation_config.json wins over config.json, which wins over tokenizer_config.json.
    fn find_eos(
        &self,
        texts: &ModelTexts,
        generation: &Value,
        config: &Value,
    ) -> Result<Vec<TokenId>, TextError> {
        for (file, value) in [
            ("generation_config.json", &generation["eos_token_id"]),
            ("config.json", &config["eos_token_id"]),
        ] {
            if value.is_null() {
                continue;
            }
            let bad = || TextError::Invalid {
                path: texts.path(file),
                message: format!(
                    "eos_token_id is {value}; allowed is an id below {} or a list of such",
                    self.id_limit
                ),
            };
            let list = match value {
                Value::Array(list) => list.as_slice(),
                one => std::slice::from_ref(one),
            };
            let id = |v: &Value| {
                v.as_u64()
                    .and_then(|n| u32::try_from(n).ok())
                    .filter(|&n| n < self.id_limit)
            };
            return list.iter().map(|v| id(v).ok_or_else(bad)).collect();
        }
        let named = self
            .eos_token
            .as_deref()
            .and_then(|name| self.inner.token_to_id(name));
        Ok(named.into_iter().collect())
    }
}

/// The parts of tokenizer.json that are read here.
#[derive(serde::Deserialize)]
struct Outline {
    #[serde(default)]
    decoder: Value,
    #[serde(default)]
    added_tokens: Vec<Box<serde_json::value::RawValue>>,
}

#[derive(serde::Deserialize)]
struct AddedToken {
    id: u32,
    content: String,
}

fn build_table(inner: &tokenizers::Tokenizer, decoder: &Value) -> Result<TokenBytes, String> {
    let mut table = TokenBytes::new(decoder)?;
    let added = inner.get_added_tokens_decoder();
    let highest = inner.get_vocab(true).into_values().max();
    let Some(highest) = highest.filter(|&id| id < MAX_VOCAB) else {
        return Err(format!(
            "highest token id is {highest:?}; allowed are 0 to {}",
            MAX_VOCAB - 1
        ));
    };
    for id in 0..=highest {
        let special = added.get(&id).is_some_and(|t| t.special);
        table.push(inner.id_to_token(id).as_deref(), special)?;
    }
    Ok(table)
}

/// A token in tokenizer_config.json is a string or an object with `content`.
fn token_name(value: &Value) -> Option<String> {
    value
        .as_str()
        .or_else(|| value["content"].as_str())
        .map(str::to_owned)
}

fn hex(bytes: &[u8]) -> String {
    let mut text = String::with_capacity(bytes.len() * 2);
    for byte in bytes {
        let _ = write!(text, "{byte:02x}");
    }
    text
}
