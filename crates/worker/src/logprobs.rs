use serde::ser::{SerializeMap, SerializeSeq};
use serde::{Serialize, Serializer};
use serde_json::{Map, Value};
use twinfer_engine::{Logprob, OutputToken, TokenLogprobs};
use twinfer_protocol::TokenId;
use twinfer_protocol::openai::{
    ChatLogprobs, ChatTokenLogprob, ChatTopLogprob, CompletionLogprobs,
};
use twinfer_text::Tokenizer;

/// What stands for minus infinity, which JSON does not have (as vLLM).
const LEAST: f32 = -9999.0;

/// A prompt with the log-probabilities of its tokens but the first.
#[derive(Clone, Copy)]
pub struct Scored<'a> {
    /// Prompt.
    pub ids: &'a [TokenId],
    /// One less than ids.
    pub logprobs: &'a [TokenLogprobs],
    /// Alternatives to show.
    pub top: u32,
}

/// A prompt's part of the log-probabilities of a completion, and its number of characters: made once, shown
/// with every choice.
#[derive(Clone, Debug, Default)]
pub(crate) struct Echoed {
    part: CompletionLogprobs,
    characters: u64,
}

impl Echoed {
    pub(crate) fn new(tokenizer: &Tokenizer, prompt: Scored<'_>) -> Self {
        let mut echoed = Self::default();
        let Self { part, characters } = &mut echoed;
        if let Some(&first) = prompt.ids.first() {
            push(tokenizer, part, characters, first, None);
        }
        for (own, top) in prompt.logprobs {
            let top = &top[..top.len().min(prompt.top as usize)];
            push(tokenizer, part, characters, own.token, Some((own, top)));
        }
        echoed
    }
}

/// Log-probabilities of some tokens as completions report them, after those of the prompt if that is
/// echoed; none if they were not asked for. `offset` is the number of characters before, and grows.
pub(crate) fn completion(
    tokenizer: &Tokenizer,
    prompt: Option<&Echoed>,
    tokens: &[OutputToken],
    offset: &mut u64,
) -> Option<CompletionLogprobs> {
    let mut out = CompletionLogprobs::default();
    if let Some(prompt) = prompt {
        out = prompt.part.clone();
        *offset += prompt.characters;
    }
    for token in tokens {
        let (own, top) = token.logprobs.as_ref()?;
        push(tokenizer, &mut out, offset, token.id, Some((own, top)));
    }
    Some(out)
}

/// A log-probability as every place of an answer writes it: the shortest decimal that is this f32, not the digits of
/// its f64.
pub fn shown(logprob: f32) -> Value {
    let value = finite(logprob);
    let shortest: f64 = value.to_string().parse().unwrap_or_else(|_| value.into());
    shortest.into()
}

fn push(
    tokenizer: &Tokenizer,
    out: &mut CompletionLogprobs,
    offset: &mut u64,
    id: TokenId,
    logprobs: Option<(&Logprob, &[Logprob])>,
) {
    let text = text(tokenizer, id);
    out.text_offset.push(*offset);
    *offset += text.chars().count() as u64;
    out.tokens.push(text);
    out.token_logprobs
        .push(logprobs.map(|(own, _)| finite(own.logprob)));
    out.top_logprobs.push(logprobs.map(|(own, top)| {
        let mut best = Map::new();
        for other in top.iter().chain([own]) {
            // Two tokens may read the same: the better one comes first and stays.
            let key = self::text(tokenizer, other.token);
            best.entry(key).or_insert_with(|| shown(other.logprob));
        }
        best
    }));
}

/// Log-probabilities of a prompt as vLLM reports them: null, then an object per token that maps ids to
/// `{logprob, rank, decoded_token}`. Written entry by entry, since a tree of them would take many times the text.
pub struct PromptLogprobs<'a> {
    tokenizer: &'a Tokenizer,
    prompt: Scored<'a>,
}

impl<'a> PromptLogprobs<'a> {
    /// Of `prompt`.
    pub fn new(tokenizer: &'a Tokenizer, prompt: Scored<'a>) -> Self {
        Self { tokenizer, prompt }
    }

    /// As a tree, for few.
    pub fn to_value(&self) -> Value {
        // Its text is always JSON.
        let text = serde_json::to_string(self).unwrap_or_default();
        serde_json::from_str(&text).unwrap_or_default()
    }
}

impl Serialize for PromptLogprobs<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let Self { tokenizer, prompt } = *self;
        let mut all = serializer.serialize_seq(None)?;
        if !prompt.ids.is_empty() {
            all.serialize_element(&())?;
        }
        for (own, top) in prompt.logprobs {
            let top = &top[..top.len().min(prompt.top as usize)];
            all.serialize_element(&Position {
                tokenizer,
                own,
                top,
            })?;
        }
        all.end()
    }
}

/// One token of a prompt and its alternatives.
struct Position<'a> {
    tokenizer: &'a Tokenizer,
    own: &'a Logprob,
    top: &'a [Logprob],
}

impl Serialize for Position<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        #[derive(Serialize)]
        struct Entry {
            logprob: f32,
            rank: u32,
            decoded_token: String,
        }
        let mut entries = serializer.serialize_map(None)?;
        let others = self.top.iter().filter(|l| l.token != self.own.token);
        for l in std::iter::once(self.own).chain(others) {
            let entry = Entry {
                logprob: finite(l.logprob),
                rank: l.rank,
                decoded_token: text(self.tokenizer, l.token),
            };
            entries.serialize_entry(&l.token, &entry)?;
        }
        entries.end()
    }
}

/// Log-probabilities of some tokens as chats report them; none if they were not asked for.
pub(crate) fn chat(tokenizer: &Tokenizer, tokens: &[OutputToken]) -> Option<ChatLogprobs> {
    let mut content = Vec::with_capacity(tokens.len());
    for token in tokens {
        let (own, top) = token.logprobs.as_ref()?;
        let other = |l: &Logprob| ChatTopLogprob {
            token: text(tokenizer, l.token),
            logprob: finite(l.logprob),
            bytes: bytes(tokenizer, l.token),
        };
        content.push(ChatTokenLogprob {
            token: text(tokenizer, own.token),
            logprob: finite(own.logprob),
            bytes: bytes(tokenizer, own.token),
            top_logprobs: top.iter().map(other).collect(),
        });
    }
    Some(ChatLogprobs { content })
}

/// A log-probability as JSON can hold it.
fn finite(value: f32) -> f32 {
    if value.is_nan() {
        LEAST
    } else {
        value.max(LEAST)
    }
}

/// Characters of a token's text, as offsets count them.
pub(crate) fn characters(tokenizer: &Tokenizer, token: TokenId) -> u64 {
    text(tokenizer, token).chars().count() as u64
}

fn text(tokenizer: &Tokenizer, token: TokenId) -> String {
    tokenizer.token_text(token).unwrap_or_default()
}

fn bytes(tokenizer: &Tokenizer, token: TokenId) -> Option<Vec<u8>> {
    tokenizer.token_bytes(token).ok().map(<[u8]>::to_vec)
}
