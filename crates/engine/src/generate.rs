//! Requests run to their end in this thread, without HTTP.

use crate::{
    Engine, Event, ExecError, Finish, FinishReason, KvSource, OutputToken, Request, RequestId,
    TokenLogprobs,
};
use std::collections::HashMap;
use twinfer_protocol::{ApiError, ErrorKind, TokenId};

/// What became of one request.
#[derive(Clone, Debug, PartialEq)]
pub struct Generated {
    /// Request.
    pub id: RequestId,
    /// Log-probabilities of the prompt's tokens but the first, if asked for.
    pub prompt_logprobs: Vec<TokenLogprobs>,
    /// Output tokens, stop tokens too, with log-probabilities if asked for.
    pub tokens: Vec<OutputToken>,
    /// Text of them, cut at a stop text.
    pub text: String,
    /// How it ended.
    pub finish: Finish,
}

/// Why a run ended early.
#[derive(Debug, thiserror::Error)]
pub enum GenerateError {
    /// The engine refused a request.
    #[error("request {}: {error}", id.0)]
    Refused {
        /// The request.
        id: RequestId,
        /// Why.
        error: ApiError,
    },
    /// The engine cannot go on.
    #[error(transparent)]
    Exec(#[from] ExecError),
    /// Blocks are held or fetched into by others, so that nothing moves.
    #[error("{0} requests cannot go on: all KV blocks are kept by others")]
    Stuck(usize),
}

impl Generated {
    /// Ids of the output tokens.
    pub fn token_ids(&self) -> Vec<TokenId> {
        self.tokens.iter().map(|token| token.id).collect()
    }
}

/// Runs `requests` to their end, at most `concurrency` of them (0 counts as 1) inside the engine at a
/// time, and returns their results in the order of the requests. `each` sees every result as it comes,
/// for progress displays.
///
/// Requests compute their prompts here and hold no KV. The engine is idle before and afterwards; after
/// an error, requests may remain in it.
///
/// # Errors
/// The first refused request, a failed step, or a standstill.
pub fn generate(
    engine: &mut Engine,
    requests: Vec<Request>,
    concurrency: usize,
    mut each: impl FnMut(&Generated),
) -> Result<Vec<Generated>, GenerateError> {
    let mut run = Run::new(requests)?;
    while run.waits() || run.open() > 0 {
        run.fill(engine, concurrency)?;
        if !engine.has_work() {
            return Err(GenerateError::Stuck(run.open()));
        }
        for event in engine.step()? {
            run.take(event, &mut each);
        }
    }
    Ok(run.finish())
}

/// Requests on their way through an engine.
pub(crate) struct Run {
    queue: std::vec::IntoIter<Request>,
    /// The next one, when the engine had no place for it.
    ready: Option<Request>,
    open: HashMap<RequestId, Generated>,
    places: HashMap<RequestId, usize>,
    results: Vec<Option<Generated>>,
}

impl Run {
    pub(crate) fn new(requests: Vec<Request>) -> Result<Self, GenerateError> {
        let mut places = HashMap::with_capacity(requests.len());
        for (place, request) in requests.iter().enumerate() {
            let refuse = |kind, message: &str| GenerateError::Refused {
                id: request.id,
                error: ApiError::new(kind, message),
            };
            if request.kv != KvSource::Compute || request.hold_kv {
                return Err(refuse(
                    ErrorKind::InvalidRequest,
                    "KV is neither fetched nor held here",
                ));
            }
            if places.insert(request.id, place).is_some() {
                return Err(refuse(ErrorKind::Internal, "the id is in use"));
            }
        }
        let results = vec![None; requests.len()];
        let mut queue = requests.into_iter();
        let ready = queue.next();
        Ok(Self {
            queue,
            ready,
            open: HashMap::new(),
            places,
            results,
        })
    }

    /// Requests that the engine has.
    pub(crate) fn open(&self) -> usize {
        self.open.len()
    }

    /// Are there requests that the engine has not?
    pub(crate) fn waits(&self) -> bool {
        self.ready.is_some()
    }

    /// Gives the engine requests until it has `concurrency` of them.
    pub(crate) fn fill(
        &mut self,
        engine: &mut Engine,
        concurrency: usize,
    ) -> Result<(), GenerateError> {
        while self.open.len() < concurrency.max(1)
            && let Some(request) = self.ready.take()
        {
            let id = request.id;
            match engine.submit(request.clone()) {
                Ok(()) => {}
                Err(error) if error.kind == ErrorKind::Overloaded && !self.open.is_empty() => {
                    self.ready = Some(request);
                    break;
                }
                Err(error) => return Err(GenerateError::Refused { id, error }),
            }
            self.open.insert(id, Generated::empty(id));
            self.ready = self.queue.next();
        }
        Ok(())
    }

    /// Takes an event of the engine in.
    pub(crate) fn take(&mut self, event: Event, each: &mut impl FnMut(&Generated)) {
        let Event::Output {
            id,
            prompt_logprobs,
            tokens,
            text,
            finish,
        } = event
        else {
            return;
        };
        let Some(result) = self.open.get_mut(&id) else {
            return;
        };
        result.prompt_logprobs.extend(prompt_logprobs);
        result.tokens.extend(tokens);
        result.text.push_str(&text);
        if let Some(finish) = finish {
            result.finish = finish;
            if let (Some(result), Some(&place)) = (self.open.remove(&id), self.places.get(&id)) {
                each(&result);
                self.results[place] = Some(result);
            }
        }
    }

    pub(crate) fn finish(self) -> Vec<Generated> {
        self.results.into_iter().flatten().collect()
    }
}

impl Generated {
    fn empty(id: RequestId) -> Self {
        let finish = Finish {
            reason: FinishReason::Abort,
            sources: Default::default(),
            output_tokens: 0,
            held: None,
        };
        Self {
            id,
            prompt_logprobs: Vec::new(),
            tokens: Vec::new(),
            text: String::new(),
            finish,
        }
    }
}
