use serde_json::{Map, Value};
use twinfer_engine::{Logprob, OutputToken};
use twinfer_protocol::TokenId;
use twinfer_protocol::openai::{
    ChatLogprobs, ChatTokenLogprob, ChatTopLogprob, CompletionLogprobs,
};
use twinfer_text::Tokenizer;

/// What stands for minus infinity, which JSON does not have (as vLLM).
const LEAST: f32 = -9999.0;

/// Log-probabilities of some tokens as completions report them; none if they were not asked for.
/// `offset` is the number of characters before, and grows.
pub(crate) fn completion(
    tokenizer: &Tokenizer,
    tokens: &[OutputToken],
    offset: &mut u64,
) -> Option<CompletionLogprobs> {
    let mut out = CompletionLogprobs::default();
    for token in tokens {
        let (own, top) = token.logprobs.as_ref()?;
        let text = text(tokenizer, own.token);
        out.text_offset.push(*offset);
        *offset += text.chars().count() as u64;
        out.token_logprobs.push(Some(finite(own.logprob)));
        let mut best = Map::new();
        for other in top.iter().chain([own]) {
            // Two tokens may read the same: the better one comes first and stays.
            let key = self::text(tokenizer, other.token);
            best.entry(key)
                .or_insert_with(|| Value::from(finite(other.logprob)));
        }
        out.top_logprobs.push(Some(best));
        out.tokens.push(text);
    }
    Some(out)
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

fn finite(value: f32) -> f32 {
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
