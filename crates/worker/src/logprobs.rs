use serde_json::{Map, Value, json};
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
            best.entry(key)
                .or_insert_with(|| Value::from(finite(other.logprob)));
        }
        best
    }));
}

/// Log-probabilities of a prompt as vLLM reports them: null, then an object per token that maps ids to
/// `{logprob, rank, decoded_token}`.
pub fn prompt(tokenizer: &Tokenizer, prompt: Scored<'_>) -> Value {
    let entry = |l: &Logprob| {
        let decoded = text(tokenizer, l.token);
        let value = json!({"logprob": finite(l.logprob), "rank": l.rank, "decoded_token": decoded});
        (l.token.to_string(), value)
    };
    let first = prompt.ids.first().map(|_| Value::Null);
    let others = prompt.logprobs.iter().map(|(own, top)| {
        let top = top.iter().take(prompt.top as usize);
        Value::Object([own].into_iter().chain(top).map(entry).collect())
    });
    first.into_iter().chain(others).collect()
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
pub fn finite(value: f32) -> f32 {
    if value.is_nan() {
        LEAST
    } else {
        value.max(LEAST)
    }
}

fn text(tokenizer: &Tokenizer, token: TokenId) -> String {
    tokenizer.token_text(token).unwrap_or_default()
}

fn bytes(tokenizer: &Tokenizer, token: TokenId) -> Option<Vec<u8>> {
    tokenizer.token_bytes(token).ok().map(<[u8]>::to_vec)
}
