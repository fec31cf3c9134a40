//! From output events to answers: whole, or as a stream of server-sent events.

use crate::app::Instance;
use crate::engine::{ChoiceEvent, End, Generation};
use crate::kv::Left;
use crate::logprobs::{self, Echoed, PromptLogprobs, Scored};
use crate::metrics::InstanceMetrics;
use crate::prepare::{Kind, Leg, Prepared, PromptTokens};
use axum::body::{Body, HttpBody};
use axum::response::Response;
use bytes::Bytes;
use futures_util::{StreamExt, stream};
use http::HeaderValue;
use http::header::{CONTENT_LENGTH, CONTENT_TYPE};
use serde::Serialize;
use std::convert::Infallible;
use std::sync::Arc;
use tokio::sync::OwnedSemaphorePermit;
use twinfer_engine::{FinishReason, OutputToken, TokenLogprobs};
use twinfer_http::sse;
use twinfer_protocol::openai::{
    ChatChoice, ChatChunk, ChatChunkChoice, ChatMessage, ChatResponse, Common, Completion,
    CompletionChoice, CompletionChunk, CompletionChunkChoice, Delta, SharedJson, StopReason, Usage,
};
use twinfer_protocol::resume::write_output;
use twinfer_protocol::{ApiError, ErrorKind, IdsLine, KvTransferParams, Resume, TokenId};

const COMPLETION: &str = "text_completion";
const CHAT: &str = "chat.completion";
const CHAT_CHUNK: &str = "chat.completion.chunk";

/// What an answer needs to know of its request.
pub(crate) struct Answer {
    pub(crate) instance: Arc<Instance>,
    pub(crate) metrics: InstanceMetrics,
    pub(crate) id: String,
    pub(crate) created: u64,
    kind: Kind,
    common: Common,
    prompts: Vec<PromptTokens>,
    /// The answer has begun elsewhere.
    resume: Option<Resume>,
    /// A peer wants to know the tokens of each event.
    ids: bool,
    /// It does not know those of the prompt.
    prompt_ids_unknown: bool,
    /// Room for its log-probabilities, until the answer has been sent.
    scores: Option<OwnedSemaphorePermit>,
}

/// A choice that has ended.
#[derive(Default)]
struct Collected {
    prompt_logprobs: Vec<TokenLogprobs>,
    text: String,
    tokens: Vec<OutputToken>,
    end: Option<End>,
}

/// What all choices of a prompt show of its log-probabilities.
struct PromptScores {
    /// `prompt_logprobs`, if asked for.
    asked: Option<SharedJson>,
    /// The part of `logprobs`, if the prompt is echoed.
    echoed: Option<Echoed>,
}

/// A whole answer's choices.
pub(crate) struct Outcome {
    choices: Vec<Collected>,
    /// Room for the log-probabilities of what was put out.
    room: Option<OwnedSemaphorePermit>,
}

/// State of a choice in a stream.
#[derive(Clone, Default)]
struct Progress {
    begun: bool,
    characters: u64,
    tokens: u64,
    cached: u64,
    /// Of the output's text.
    bytes: u64,
    /// Tokens that no line has told yet.
    untold: Vec<TokenId>,
}

struct EventStream {
    answer: Answer,
    generation: Generation,
    first: Option<ChoiceEvent>,
    choices: Vec<Progress>,
    /// By prompt, from the first event of its first choice on, which comes before those of the others.
    echoed: Vec<Option<Echoed>>,
    over: bool,
}

impl Answer {
    pub(crate) fn new(
        instance: Arc<Instance>,
        metrics: InstanceMetrics,
        id: String,
        created: u64,
        prepared: &mut Prepared,
        ids: bool,
    ) -> Self {
        Self {
            instance,
            metrics,
            id,
            created,
            kind: prepared.kind,
            common: prepared.common.clone(),
            prompts: std::mem::take(&mut prepared.prompts),
            resume: prepared.resume.take(),
            ids,
            // A text is tokenised the same anywhere; a chat template may look at the time.
            prompt_ids_unknown: prepared.kind == Kind::Chat
                && !matches!(prepared.leg, Leg::Decode(_)),
            scores: prepared.scores.take(),
        }
    }

    /// What a stream that has begun elsewhere still needs where its output has ended there.
    pub(crate) fn end_of_stream(self) -> Response {
        let mut out = Vec::new();
        let tokens = self.resumed_tokens().len() as u64;
        self.usage_event(self.usage(tokens), &mut out);
        out.extend_from_slice(&sse::DONE);
        sse::event_stream(Body::from(out))
    }

    /// Output that the client has.
    fn resumed_tokens(&self) -> &[TokenId] {
        self.resume
            .as_ref()
            .map_or(&[], |resume| &resume.output_token_ids)
    }

    /// Where a choice of a stream begins.
    fn progress(&self) -> Progress {
        let Some(resume) = &self.resume else {
            return Progress::default();
        };
        let ids = &resume.output_token_ids;
        let prompt = self.prompts.first().filter(|prompt| prompt.echo.is_some());
        let tokenizer = &self.instance.tokenizer;
        let shown = prompt
            .map_or(&[][..], |prompt| &prompt.ids)
            .iter()
            .chain(ids);
        let counted = self.kind == Kind::Completion && self.common.logprobs.is_some();
        Progress {
            begun: true,
            characters: match counted {
                true => shown.map(|&id| logprobs::characters(tokenizer, id)).sum(),
                false => 0,
            },
            tokens: ids.len() as u64,
            cached: 0,
            bytes: resume.emitted_bytes.unwrap_or(0),
            untold: Vec::new(),
        }
    }

    /// The prompt that a handle covers.
    pub(crate) fn first_prompt(&self) -> &[TokenId] {
        self.prompts.first().map_or(&[], |prompt| &prompt.ids)
    }

    /// Waits for all choices. Errors: one of them failed; the others are aborted.
    pub(crate) async fn collect(&self, mut generation: Generation) -> Result<Outcome, ApiError> {
        let count = self.prompts.len() * self.common.n as usize;
        let mut choices: Vec<Collected> = (0..count).map(|_| Collected::default()).collect();
        let mut room = None;
        while let Some(event) = generation.next().await? {
            room = joined(room, event.room);
            if let Some(end) = &event.end {
                finish(&end.reason)?;
            }
            if let Some(choice) = choices.get_mut(event.choice as usize) {
                choice.prompt_logprobs.extend(event.prompt_logprobs);
                choice.text.push_str(&event.text);
                choice.tokens.extend(event.tokens);
                choice.end = event.end;
            }
        }
        Ok(Outcome { choices, room })
    }

    /// The whole answer.
    pub(crate) fn whole(
        mut self,
        mut outcome: Outcome,
        kv_transfer_params: Option<KvTransferParams>,
    ) -> Result<Response, ApiError> {
        let room = joined(self.scores.take(), outcome.room.take());
        let response = self.written(&outcome, kv_transfer_params)?;
        Ok(match room {
            None => response,
            Some(room) => with_room(response, room),
        })
    }

    fn written(
        &self,
        outcome: &Outcome,
        kv_transfer_params: Option<KvTransferParams>,
    ) -> Result<Response, ApiError> {
        let cached = outcome.choices.iter().map(Collected::cached_tokens);
        // Each prompt once: by its first choice.
        let cached = cached.step_by(self.common.n.max(1) as usize).sum();
        let usage = self
            .usage(outcome.choices.iter().map(Collected::output_tokens).sum())
            .with_cached(cached);
        match self.kind {
            Kind::Completion => {
                let prompts = (0..self.prompts.len()).map(|prompt| self.scores(prompt, outcome));
                let prompts = prompts.collect::<Result<Vec<_>, _>>()?;
                let n = self.common.n.max(1) as usize;
                let choices = outcome.choices.iter().enumerate();
                let choices = choices.map(|(i, choice)| {
                    let scores = prompts.get(i / n);
                    self.completion_choice(i, choice, scores)
                });
                json(&Completion {
                    id: &self.id,
                    object: COMPLETION,
                    created: self.created,
                    model: &self.instance.card.model,
                    choices: choices.collect::<Result<_, _>>()?,
                    service_tier: None,
                    system_fingerprint: None,
                    usage,
                    kv_transfer_params,
                })
            }
            Kind::Chat => {
                let choices = outcome.choices.iter().enumerate();
                let choices = choices.map(|(i, choice)| self.chat_choice(i, choice));
                json(&ChatResponse {
                    id: &self.id,
                    object: CHAT,
                    created: self.created,
                    model: &self.instance.card.model,
                    choices: choices.collect::<Result<_, _>>()?,
                    service_tier: None,
                    system_fingerprint: None,
                    usage,
                    prompt_logprobs: self.scores(0, outcome)?.asked,
                    prompt_token_ids: self.prompt_ids(0),
                    kv_transfer_params,
                })
            }
        }
    }

    /// A stream of events. The first event of the engine is waited for, so that a request that fails
    /// before its first token is answered with a status.
    pub(crate) async fn stream(self, mut generation: Generation) -> Result<Response, ApiError> {
        let first = generation.next().await?;
        if let Some(ChoiceEvent { end: Some(end), .. }) = &first {
            finish(&end.reason)?;
        }
        let count = self.prompts.len() * self.common.n as usize;
        let choices = vec![self.progress(); count];
        let echoed = self.prompts.iter().map(|_| None).collect();
        let state = EventStream {
            answer: self,
            generation,
            first,
            choices,
            echoed,
            over: false,
        };
        let events = stream::unfold(state, |mut state| async move {
            let frame = state.next_frame().await?;
            Some((Ok::<Bytes, Infallible>(frame), state))
        });
        Ok(sse::event_stream(Body::from_stream(events)))
    }

    fn completion_choice(
        &self,
        index: usize,
        choice: &Collected,
        scores: Option<&PromptScores>,
    ) -> Result<CompletionChoice, ApiError> {
        let prompt = index / self.common.n as usize;
        let (finish_reason, stop_reason) = choice.finish()?;
        let mut text = self
            .prompts
            .get(prompt)
            .and_then(|p| p.echo.clone())
            .unwrap_or_default();
        text.push_str(&choice.text);
        let wanted = self.common.logprobs.is_some();
        Ok(CompletionChoice {
            index: number(index),
            text,
            logprobs: wanted
                .then(|| {
                    let echoed = scores.and_then(|scores| scores.echoed.as_ref());
                    let tokenizer = &self.instance.tokenizer;
                    logprobs::completion(tokenizer, echoed, &choice.tokens, &mut 0)
                })
                .flatten(),
            finish_reason,
            stop_reason,
            token_ids: self.token_ids(&choice.tokens),
            prompt_logprobs: scores.and_then(|scores| scores.asked.clone()),
            prompt_token_ids: self.prompt_ids(prompt),
        })
    }

    fn chat_choice(&self, index: usize, choice: &Collected) -> Result<ChatChoice, ApiError> {
        let (finish_reason, stop_reason) = choice.finish()?;
        let wanted = self.common.logprobs.is_some();
        Ok(ChatChoice {
            index: number(index),
            logprobs: wanted
                .then(|| logprobs::chat(&self.instance.tokenizer, &choice.tokens))
                .flatten(),
            finish_reason,
            stop_reason,
            token_ids: self.token_ids(&choice.tokens),
            message: ChatMessage {
                role: "assistant",
                content: choice.text.clone(),
                refusal: None,
                annotations: None,
                audio: None,
                function_call: None,
                tool_calls: Vec::new(),
                reasoning_content: None,
            },
        })
    }

    /// The prompt's part of `logprobs`, if the prompt is echoed.
    fn echoed(&self, prompt: usize, logprobs: &[TokenLogprobs]) -> Option<Echoed> {
        let top = self.common.logprobs?;
        let prompt = self.prompts.get(prompt).filter(|p| p.echo.is_some())?;
        let scored = Scored {
            ids: &prompt.ids,
            logprobs,
            top,
        };
        Some(Echoed::new(&self.instance.tokenizer, scored))
    }

    /// What a prompt's choices show of its log-probabilities.
    fn scores(&self, prompt: usize, outcome: &Outcome) -> Result<PromptScores, ApiError> {
        let logprobs = outcome.prompt_logprobs(prompt, self.common.n);
        let asked = match (self.prompts.get(prompt), self.common.prompt_logprobs) {
            (Some(prompt), Some(top)) => {
                let scored = Scored {
                    ids: &prompt.ids,
                    logprobs,
                    top,
                };
                let shown = PromptLogprobs::new(&self.instance.tokenizer, scored);
                Some(SharedJson::of(&shown).map_err(|error| unwritten(&error))?)
            }
            _ => None,
        };
        Ok(PromptScores {
            asked,
            echoed: self.echoed(prompt, logprobs),
        })
    }

    /// Does the answer show log-probabilities of prompts, which take long to write?
    pub(crate) fn shows_scores(&self) -> bool {
        let echoed = self.prompts.iter().any(|prompt| prompt.echo.is_some());
        self.common.prompt_logprobs.is_some() || (echoed && self.common.logprobs.is_some())
    }

    fn usage(&self, completion_tokens: u64) -> Usage {
        let prompts = self
            .prompts
            .iter()
            .map(|prompt| prompt.ids.len() as u64)
            .sum();
        Usage::new(prompts, completion_tokens)
    }

    fn token_ids(&self, tokens: &[OutputToken]) -> Option<Vec<TokenId>> {
        self.common
            .return_token_ids
            .then(|| tokens.iter().map(|token| token.id).collect())
    }

    fn prompt_ids(&self, prompt: usize) -> Option<Vec<TokenId>> {
        let prompt = self
            .prompts
            .get(prompt)
            .filter(|_| self.common.return_token_ids)?;
        Some(prompt.ids.to_vec())
    }
}

impl Collected {
    fn output_tokens(&self) -> u64 {
        self.end.as_ref().map_or(0, |end| end.output_tokens.into())
    }

    fn cached_tokens(&self) -> u64 {
        self.end.as_ref().map_or(0, |end| end.cached.into())
    }

    fn finish(&self) -> Result<(&'static str, Option<StopReason>), ApiError> {
        match &self.end {
            Some(end) => finish(&end.reason),
            None => Err(ApiError::new(ErrorKind::Internal, "a choice has no end")),
        }
    }
}

impl Outcome {
    /// Those of a prompt: its first choice brought them.
    fn prompt_logprobs(&self, prompt: usize, n: u32) -> &[TokenLogprobs] {
        let first = self.choices.get(prompt * n as usize);
        first.map_or(&[], |choice| &choice.prompt_logprobs)
    }

    /// What the first choice leaves for a decode instance.
    pub(crate) fn take_held(&mut self) -> Option<Left> {
        let choice = self.choices.first_mut()?;
        let end = choice.end.as_mut()?;
        Some(Left {
            held: end.held.take()?,
            last_token: choice.tokens.last().map(|token| token.id),
            cached: end.cached,
        })
    }
}

impl EventStream {
    /// All events that are there, as one piece; none when the stream is over.
    async fn next_frame(&mut self) -> Option<Bytes> {
        let mut out = Vec::new();
        while out.is_empty() {
            if self.over {
                return None;
            }
            let next = match self.first.take() {
                Some(event) => Ok(Some(event)),
                None => self.generation.next().await,
            };
            let written = match next {
                Ok(Some(event)) => self.write_all(event, &mut out),
                Ok(None) => Ok(()),
                Err(error) => Err(error),
            };
            if let Err(error) = written {
                self.answer.metrics.error(&error);
                out.extend_from_slice(&sse::error_events(&error));
                self.over = true;
            } else if self.generation.is_over() {
                self.write_usage(&mut out);
                out.extend_from_slice(&sse::DONE);
                self.over = true;
            }
        }
        Some(out.into())
    }

    fn write_all(&mut self, first: ChoiceEvent, out: &mut Vec<u8>) -> Result<(), ApiError> {
        self.write(first, out)?;
        while let Some(event) = self.generation.ready() {
            self.write(event, out)?;
        }
        Ok(())
    }

    fn write(&mut self, event: ChoiceEvent, out: &mut Vec<u8>) -> Result<(), ApiError> {
        let answer = &self.answer;
        let n = answer.common.n.max(1);
        if event.choice.is_multiple_of(n)
            && let Some(echoed) = self.echoed.get_mut((event.choice / n) as usize)
            && echoed.is_none()
        {
            *echoed = answer.echoed((event.choice / n) as usize, &event.prompt_logprobs);
        }
        let finish = event
            .end
            .as_ref()
            .map(|end| finish(&end.reason))
            .transpose()?;
        let Some(progress) = self.choices.get_mut(event.choice as usize) else {
            return Ok(());
        };
        let begins = !std::mem::replace(&mut progress.begun, true);
        progress.tokens += event.tokens.len() as u64;
        if answer.ids {
            let ids = event.tokens.iter().map(|token| token.id);
            progress.untold.extend(ids);
            if begins && event.choice == 0 && answer.prompt_ids_unknown {
                let ids = answer.first_prompt().to_vec();
                IdsLine::Prompt(ids).write(out);
            }
        }
        if let Some(end) = &event.end {
            let prompt = answer.prompts.get((event.choice / n) as usize);
            // Output that was computed elsewhere is no part of the prompt.
            let most = prompt.map_or(0, |prompt| prompt.ids.len() as u64);
            progress.cached = u64::from(end.cached).min(most);
        }
        let common = &answer.common;
        let per_token =
            common.logprobs.is_some() || common.return_token_ids || common.continuous_usage;
        let told = finish.is_some() || (per_token && !event.tokens.is_empty());
        let silent = event.text.is_empty() && !told;
        let prompt = event.choice as usize / common.n as usize;
        let usage = common.continuous_usage.then(|| {
            let prompt = answer.prompts.get(prompt).map_or(0, |p| p.ids.len() as u64);
            Usage::new(prompt, progress.tokens)
        });
        let tokenizer = &answer.instance.tokenizer;
        match answer.kind {
            Kind::Completion => {
                let echo = answer
                    .prompts
                    .get(prompt)
                    .and_then(|p| p.echo.as_deref())
                    .filter(|_| begins);
                if silent && echo.is_none() {
                    return Ok(());
                }
                progress.tell(answer.ids, event.choice, &event.text, out);
                let text = match echo {
                    Some(echo) => format!("{echo}{}", event.text),
                    None => event.text,
                };
                let logprobs = match common.logprobs {
                    Some(_) => {
                        let echoed = self.echoed.get(prompt).and_then(Option::as_ref);
                        let echoed = echoed.filter(|_| begins);
                        let characters = &mut progress.characters;
                        logprobs::completion(tokenizer, echoed, &event.tokens, characters)
                    }
                    None => None,
                };
                let (finish_reason, stop_reason) =
                    finish.map_or((None, None), |(f, s)| (Some(f), s));
                let choice = CompletionChunkChoice {
                    index: event.choice,
                    text,
                    logprobs,
                    finish_reason,
                    stop_reason,
                    prompt_token_ids: if begins {
                        answer.prompt_ids(prompt)
                    } else {
                        None
                    },
                    token_ids: answer.token_ids(&event.tokens),
                };
                answer.completion_event(&[choice], usage, out);
            }
            Kind::Chat => {
                let chunk = |delta, finish_reason| ChatChunkChoice {
                    index: event.choice,
                    delta,
                    logprobs: None,
                    finish_reason,
                    stop_reason: None,
                    token_ids: None,
                };
                if begins {
                    let role = Delta {
                        role: Some("assistant"),
                        content: Some(String::new()),
                    };
                    let usage = usage.map(|usage| Usage::new(usage.prompt_tokens, 0));
                    if answer.ids {
                        write_output(event.choice, &[], 0, out);
                    }
                    answer.chat_event(&[chunk(role, None)], usage, answer.prompt_ids(0), out);
                }
                if silent {
                    return Ok(());
                }
                progress.tell(answer.ids, event.choice, &event.text, out);
                let mut choice = chunk(
                    Delta {
                        role: None,
                        content: Some(event.text),
                    },
                    finish.as_ref().map(|f| f.0),
                );
                choice.stop_reason = finish.map(|(_, stop)| stop);
                choice.token_ids = answer.token_ids(&event.tokens);
                if common.logprobs.is_some() {
                    choice.logprobs = logprobs::chat(tokenizer, &event.tokens);
                }
                answer.chat_event(&[choice], usage, None, out);
            }
        }
        Ok(())
    }

    fn write_usage(&self, out: &mut Vec<u8>) {
        let cached = self.choices.iter().map(|choice| choice.cached);
        let cached = cached.step_by(self.answer.common.n.max(1) as usize).sum();
        let tokens = self.choices.iter().map(|choice| choice.tokens).sum();
        let usage = self.answer.usage(tokens).with_cached(cached);
        self.answer.usage_event(usage, out);
    }
}

impl Progress {
    /// Tells the tokens of the event that comes next, which shows `text`.
    fn tell(&mut self, wanted: bool, choice: u32, text: &str, out: &mut Vec<u8>) {
        self.bytes += text.len() as u64;
        if wanted {
            write_output(choice, &self.untold, self.bytes, out);
            self.untold.clear();
        }
    }
}

impl Answer {
    /// The last event, if it is asked for.
    fn usage_event(&self, usage: Usage, out: &mut Vec<u8>) {
        if !self.common.include_usage {
            return;
        }
        match self.kind {
            Kind::Completion => self.completion_event(&[], Some(usage), out),
            Kind::Chat => self.chat_event(&[], Some(usage), None, out),
        }
    }

    fn completion_event(
        &self,
        choices: &[CompletionChunkChoice],
        usage: Option<Usage>,
        out: &mut Vec<u8>,
    ) {
        let chunk = CompletionChunk {
            id: &self.id,
            object: COMPLETION,
            created: self.created,
            model: &self.instance.card.model,
            choices,
            usage,
        };
        event(&chunk, out);
    }

    fn chat_event(
        &self,
        choices: &[ChatChunkChoice],
        usage: Option<Usage>,
        prompt_token_ids: Option<Vec<TokenId>>,
        out: &mut Vec<u8>,
    ) {
        let chunk = ChatChunk {
            id: &self.id,
            object: CHAT_CHUNK,
            created: self.created,
            model: &self.instance.card.model,
            choices,
            usage,
            prompt_token_ids,
        };
        event(&chunk, out);
    }
}

/// A JSON answer with status 200.
pub(crate) fn json<T: Serialize>(body: &T) -> Result<Response, ApiError> {
    let bytes = serde_json::to_vec(body).map_err(|error| unwritten(&error))?;
    let mut response = Response::new(Body::from(bytes));
    response
        .headers_mut()
        .insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    Ok(response)
}

/// Both rooms, which are of one kind.
fn joined(
    a: Option<OwnedSemaphorePermit>,
    b: Option<OwnedSemaphorePermit>,
) -> Option<OwnedSemaphorePermit> {
    match (a, b) {
        (Some(mut a), Some(b)) => {
            a.merge(b);
            Some(a)
        }
        (a, b) => a.or(b),
    }
}

/// `response` that gives its `room` back when it has been sent, or nobody takes it any more.
fn with_room(response: Response, room: OwnedSemaphorePermit) -> Response {
    let (mut head, body) = response.into_parts();
    if let Some(length) = HttpBody::size_hint(&body).exact() {
        head.headers.insert(CONTENT_LENGTH, length.into());
    }
    let sent = stream::once(async move {
        drop(room);
        Ok(Bytes::new())
    });
    let body = Body::from_stream(body.into_data_stream().chain(sent));
    Response::from_parts(head, body)
}

fn unwritten(error: &serde_json::Error) -> ApiError {
    ApiError::new(
        ErrorKind::Internal,
        format!("the answer cannot be written: {error}"),
    )
}

fn event<T: Serialize>(chunk: &T, out: &mut Vec<u8>) {
    out.extend_from_slice(b"data: ");
    // Neither the types nor a vector can fail.
    let _ = serde_json::to_writer(&mut *out, chunk);
    out.extend_from_slice(b"\n\n");
}

/// `finish_reason` and `stop_reason`.
fn finish(reason: &FinishReason) -> Result<(&'static str, Option<StopReason>), ApiError> {
    Ok(match reason {
        FinishReason::Eos => ("stop", None),
        FinishReason::StopToken(id) => ("stop", Some(StopReason::Token(*id))),
        FinishReason::StopText(text) => ("stop", Some(StopReason::Text(text.clone()))),
        FinishReason::Length => ("length", None),
        FinishReason::Abort => {
            return Err(ApiError::new(
                ErrorKind::Internal,
                "the request was aborted",
            ));
        }
        FinishReason::Error(error) => return Err(error.clone()),
    })
}

fn number(index: usize) -> u32 {
    u32::try_from(index).unwrap_or(u32::MAX)
}
