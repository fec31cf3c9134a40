//! What a step made known, in buffers that are used again and again: a step that only generates allocates
//! nothing.

use crate::{Event, Finish, Logprob, OutputToken, RequestId, TokenLogprobs};
use std::ops::Range;
use twinfer_protocol::{BlockId, TokenId};

/// Events of a step, in order.
#[derive(Debug, Default)]
pub struct StepOutput {
    events: Vec<Entry>,
    tokens: Vec<Token>,
    logprobs: Vec<Logprob>,
    text: String,
}

/// A view of one event; see [`Event`].
#[derive(Clone, Copy, Debug)]
pub enum EventRef<'a> {
    /// As [`Event::Output`].
    Output(OutputRef<'a>),
    /// As [`Event::KvFetch`].
    KvFetch {
        /// Request.
        id: RequestId,
        /// Blocks in order of position.
        blocks: &'a [BlockId],
        /// Positions to fill.
        positions: &'a Range<u32>,
    },
    /// As [`Event::KvFetchCancel`].
    KvFetchCancel {
        /// Request.
        id: RequestId,
    },
}

/// New output of a request.
#[derive(Clone, Copy, Debug)]
pub struct OutputRef<'a> {
    /// Request.
    pub id: RequestId,
    /// Log-probabilities of the prompt's tokens but the first.
    pub prompt_logprobs: &'a [TokenLogprobs],
    /// Text that became certain.
    pub text: &'a str,
    /// Set on the last event of the request.
    pub finish: Option<&'a Finish>,
    tokens: &'a [Token],
    logprobs: &'a [Logprob],
}

/// One output token.
#[derive(Clone, Copy, Debug)]
pub struct TokenRef<'a> {
    /// Token.
    pub id: TokenId,
    /// Its own log-probability and the best tokens, if asked for.
    pub logprobs: Option<(Logprob, &'a [Logprob])>,
}

#[derive(Debug)]
enum Entry {
    Output {
        id: RequestId,
        prompt_logprobs: Vec<TokenLogprobs>,
        tokens: Range<usize>,
        text: Range<usize>,
        finish: Option<Finish>,
    },
    Fetch {
        id: RequestId,
        blocks: Vec<BlockId>,
        positions: Range<u32>,
    },
    Cancel(RequestId),
}

#[derive(Clone, Debug)]
struct Token {
    id: TokenId,
    own: Option<Logprob>,
    top: Range<usize>,
}

impl StepOutput {
    /// No events.
    pub fn new() -> Self {
        Self::default()
    }

    /// The events in order.
    pub fn events(&self) -> impl ExactSizeIterator<Item = EventRef<'_>> {
        self.events.iter().map(|entry| match entry {
            Entry::Output {
                id,
                prompt_logprobs,
                tokens,
                text,
                finish,
            } => EventRef::Output(OutputRef {
                id: *id,
                prompt_logprobs,
                text: &self.text[text.clone()],
                finish: finish.as_ref(),
                tokens: &self.tokens[tokens.clone()],
                logprobs: &self.logprobs,
            }),
            Entry::Fetch {
                id,
                blocks,
                positions,
            } => EventRef::KvFetch {
                id: *id,
                blocks,
                positions,
            },
            Entry::Cancel(id) => EventRef::KvFetchCancel { id: *id },
        })
    }

    /// Takes the events out, in order; the memory stays for the next step.
    pub fn drain_events(&mut self) -> impl ExactSizeIterator<Item = Event> + '_ {
        let (tokens, logprobs, texts) = (&self.tokens, &self.logprobs, &self.text);
        self.events.drain(..).map(move |entry| match entry {
            Entry::Output {
                id,
                prompt_logprobs,
                tokens: range,
                text,
                finish,
            } => Event::Output {
                id,
                prompt_logprobs,
                tokens: tokens[range]
                    .iter()
                    .map(|token| token.view(logprobs).to_token())
                    .collect(),
                text: texts[text].to_owned(),
                finish,
            },
            Entry::Fetch {
                id,
                blocks,
                positions,
            } => Event::KvFetch {
                id,
                blocks,
                positions,
            },
            Entry::Cancel(id) => Event::KvFetchCancel { id },
        })
    }

    /// Empties it; there is room for so many bytes of text then.
    pub(crate) fn clear(&mut self, text: usize) {
        self.events.clear();
        self.tokens.clear();
        self.logprobs.clear();
        self.text.clear();
        self.text.reserve(text);
    }

    pub(crate) fn fetch(&mut self, id: RequestId, blocks: Vec<BlockId>, positions: Range<u32>) {
        self.events.push(Entry::Fetch {
            id,
            blocks,
            positions,
        });
    }

    pub(crate) fn cancel(&mut self, id: RequestId) {
        self.events.push(Entry::Cancel(id));
    }

    /// Begins an output; what is pushed from here on is its own. Returns its place.
    pub(crate) fn output(&mut self, id: RequestId, prompt_logprobs: Vec<TokenLogprobs>) -> usize {
        let (tokens, text) = (self.tokens.len(), self.text.len());
        self.events.push(Entry::Output {
            id,
            prompt_logprobs,
            tokens: tokens..tokens,
            text: text..text,
            finish: None,
        });
        self.events.len() - 1
    }

    /// Where log-probabilities of the next token go, before [`Self::token`].
    pub(crate) fn logprobs(&mut self) -> &mut Vec<Logprob> {
        &mut self.logprobs
    }

    /// A token of the output that was begun last; its best tokens are those from `top` on.
    pub(crate) fn token(&mut self, id: TokenId, own: Option<Logprob>, top: usize) {
        self.tokens.push(Token {
            id,
            own,
            top: top..self.logprobs.len(),
        });
        if let Some(Entry::Output { tokens, .. }) = self.events.last_mut() {
            tokens.end = self.tokens.len();
        }
    }

    /// Adds to the text of the output that was begun last.
    pub(crate) fn text<T>(&mut self, add: impl FnOnce(&mut String) -> T) -> T {
        let result = add(&mut self.text);
        if let Some(Entry::Output { text, .. }) = self.events.last_mut() {
            text.end = self.text.len();
        }
        result
    }

    /// Ends the output at this place.
    pub(crate) fn finish(&mut self, place: usize, end: Finish) {
        if let Some(Entry::Output { finish, .. }) = self.events.get_mut(place) {
            *finish = Some(end);
        }
    }
}

impl<'a> OutputRef<'a> {
    /// Tokens of this step.
    pub fn tokens(&self) -> impl ExactSizeIterator<Item = TokenRef<'a>> {
        let all = self.logprobs;
        self.tokens.iter().map(move |token| token.view(all))
    }
}

impl Token {
    fn view<'a>(&self, all: &'a [Logprob]) -> TokenRef<'a> {
        TokenRef {
            id: self.id,
            logprobs: self.own.map(|own| (own, &all[self.top.clone()])),
        }
    }
}

impl TokenRef<'_> {
    /// The token on its own.
    pub fn to_token(&self) -> OutputToken {
        OutputToken {
            id: self.id,
            logprobs: self.logprobs.map(|(own, top)| (own, top.to_vec())),
        }
    }
}
