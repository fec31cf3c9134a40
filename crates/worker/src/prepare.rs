//! From a body to tokens: everything about a request that needs no engine and may take long, so it runs
//! on blocking threads.

use crate::app::{Caller, Instance};
use crate::engine::{NewRequest, Submission};
use crate::kv::Claim;
use bytes::Bytes;
use serde_json::Value;
use std::sync::Arc;
use tokio::sync::OwnedSemaphorePermit;
use twinfer_engine::output::OutputState;
use twinfer_engine::{KvSource, Request, SamplingParams};
use twinfer_protocol::openai::{
    ChatRequest, Common, CompletionRequest, Fields, Prompt, kv_transfer_params, shown,
};
use twinfer_protocol::{
    ApiError, ErrorKind, KvTransferParams, RESUME_FIELD, Resume, Role, TokenId,
};
use twinfer_text::TextError;

/// `max_tokens` of completions that say nothing.
const COMPLETION_TOKENS: u32 = 16;

/// Which of the two routes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Completion,
    Chat,
}

/// What a request is in the life of its prompt's KV.
#[derive(Debug)]
pub(crate) enum Leg {
    /// Prompt and output here.
    Plain,
    /// The prompt here, the output elsewhere: KV is kept.
    Prefill,
    /// The prompt elsewhere, the output here.
    Decode(Arc<Claim>),
}

/// A prompt's tokens, and its text if it is echoed.
#[derive(Debug)]
pub(crate) struct PromptTokens {
    pub(crate) ids: Arc<[TokenId]>,
    pub(crate) echo: Option<String>,
}

/// A request that is ready for the engine and has its places there.
#[derive(Debug)]
pub(crate) struct Prepared {
    pub(crate) kind: Kind,
    pub(crate) common: Common,
    pub(crate) prompts: Vec<PromptTokens>,
    pub(crate) leg: Leg,
    pub(crate) requests: Vec<NewRequest>,
    pub(crate) submission: Submission,
    /// Room for the log-probabilities of prompts.
    pub(crate) scores: Option<OwnedSemaphorePermit>,
    /// The answer has begun elsewhere.
    pub(crate) resume: Option<Resume>,
}

/// Splits off what names remote KV first, so that whatever is refused later releases it.
pub(crate) fn prepare(
    instance: &Instance,
    kind: Kind,
    body: &Bytes,
    caller: Caller,
) -> Result<Prepared, ApiError> {
    let fields = Fields::parse(body)?;
    let name = "kv_transfer_params";
    if !caller.peer && fields.raw(name).is_some() {
        let message = "kv_transfer_params are taken from peers only: present the peer key";
        return Err(ApiError::new(ErrorKind::KvParamsForbidden, message).with_param(name));
    }
    let leg = leg(instance, kv_transfer_params(&fields)?)?;
    if !caller.peer && fields.raw(RESUME_FIELD).is_some() {
        let message = format!("{RESUME_FIELD} is taken from peers only: present the peer key");
        return Err(ApiError::new(ErrorKind::KvParamsForbidden, message).with_param(RESUME_FIELD));
    }
    let resume = Resume::read(&fields)?;
    match kind {
        Kind::Completion => completion(instance, &fields, leg, resume),
        Kind::Chat => chat(instance, &fields, leg, resume),
    }
}

/// The model's name, if one is given, must be the served one.
pub(crate) fn check_model(instance: &Instance, model: Option<&str>) -> Result<(), ApiError> {
    match model {
        Some(name) if name != instance.card.model => Err(ApiError::new(
            ErrorKind::ModelNotFound,
            format!(
                "model {:?} does not exist here; {:?} is served",
                shown(name),
                instance.card.model
            ),
        )
        .with_param("model")),
        _ => Ok(()),
    }
}

/// Token ids of a chat of at most about `limit` tokens.
pub(crate) fn render(
    instance: &Instance,
    chat: ChatRequest,
    limit: usize,
) -> Result<(Common, Vec<TokenId>), ApiError> {
    let ChatRequest {
        common,
        messages,
        tools,
        documents,
        template_kwargs: mut kwargs,
        add_generation_prompt,
        add_special_tokens,
    } = chat;
    if let Some(documents) = documents {
        kwargs.insert("documents".into(), documents);
    }
    let text = instance.template.render(
        &Value::Array(messages),
        add_generation_prompt,
        tools.as_ref(),
        Some(&kwargs),
    )?;
    let tokenizer = &instance.tokenizer;
    let ids = tokenizer.encode_bounded(&text, add_special_tokens, limit);
    Ok((common, ids.map_err(|e| too_many(instance, e, "messages"))?))
}

/// The same words for a prompt that was not tokenised to its end as for one that was.
pub(crate) fn too_many(instance: &Instance, error: TextError, param: &str) -> ApiError {
    match error {
        TextError::TooLong { limit } => {
            let message = format!(
                "this model's maximum context length is {} tokens, input and output together; \
                 the prompt has more than {limit}",
                instance.card.limits.max_model_len
            );
            ApiError::new(ErrorKind::ContextLengthExceeded, message).with_param(param)
        }
        other => other.into(),
    }
}

/// Prompt tokens that a request can use, and no more are made of its text.
fn context(instance: &Instance) -> usize {
    instance.card.limits.max_model_len as usize
}

fn leg(instance: &Instance, params: Option<KvTransferParams>) -> Result<Leg, ApiError> {
    let name = "kv_transfer_params";
    let role = instance.card.role;
    let leg = match params {
        None => Leg::Plain,
        Some(params) => match (params.do_remote_decode, params.do_remote_prefill) {
            (false, false) => Leg::Plain,
            (true, true) => {
                let message = "kv_transfer_params has both do_remote_decode and do_remote_prefill";
                return Err(ApiError::invalid(name, message));
            }
            (true, false) if role.can_prefill() => Leg::Prefill,
            (false, true) if role.can_decode() => Leg::Decode(instance.handoff.claim(params)?),
            _ => {
                let message =
                    format!("this instance has role {role} and cannot be this leg of a pair");
                return Err(ApiError::invalid(name, message));
            }
        },
    };
    if matches!(leg, Leg::Plain) && role == Role::Prefill {
        let message = "this instance has role prefill: it serves requests with \
                       kv_transfer_params.do_remote_decode only; send others to a router or a decode instance";
        return Err(ApiError::invalid(name, message));
    }
    Ok(leg)
}

fn completion(
    instance: &Instance,
    fields: &Fields<'_>,
    leg: Leg,
    resume: Option<Resume>,
) -> Result<Prepared, ApiError> {
    let CompletionRequest {
        mut common,
        mut prompts,
        echo,
        add_special_tokens,
    } = CompletionRequest::read(fields)?;
    check_model(instance, common.model.as_deref())?;
    if matches!(leg, Leg::Prefill) {
        // A handle covers one prompt; a decode instance computes the others.
        prompts.truncate(1);
    }
    let submission = admit(instance, &mut common, prompts.len(), &leg)?;
    let known = known_prompt(&leg, resume.as_ref(), &common, prompts.len())?;
    let mut tokens = Vec::with_capacity(prompts.len());
    for (index, prompt) in prompts.into_iter().enumerate() {
        let known = known.clone().filter(|_| index == 0);
        tokens.push(tokenise(instance, prompt, known, echo, add_special_tokens)?);
    }
    let open = match fields.is_null("max_tokens") {
        // As vLLM: null, unlike a field that is not there, leaves the length open.
        true => None,
        false => Some(COMPLETION_TOKENS),
    };
    let kind = Kind::Completion;
    let output = (kind, open);
    finish(instance, output, common, tokens, leg, submission, resume)
}

fn chat(
    instance: &Instance,
    fields: &Fields<'_>,
    leg: Leg,
    resume: Option<Resume>,
) -> Result<Prepared, ApiError> {
    let mut chat = ChatRequest::read(fields)?;
    check_model(instance, chat.common.model.as_deref())?;
    let submission = admit(instance, &mut chat.common, 1, &leg)?;
    let known = known_prompt(&leg, resume.as_ref(), &chat.common, 1)?;
    let (common, ids) = match known {
        // As they were rendered before: never twice.
        Some(ids) => (chat.common, ids),
        None => {
            let (common, ids) = render(instance, chat, context(instance))?;
            (common, ids.into())
        }
    };
    let tokens = vec![PromptTokens { ids, echo: None }];
    finish(
        instance,
        (Kind::Chat, None),
        common,
        tokens,
        leg,
        submission,
        resume,
    )
}

/// The prompt as it was tokenised before: by the prefill instance, or when the answer began.
fn known_prompt(
    leg: &Leg,
    resume: Option<&Resume>,
    common: &Common,
    prompts: usize,
) -> Result<Option<Arc<[TokenId]>>, ApiError> {
    let Some(resume) = resume else {
        return Ok(leg.prompt());
    };
    let refuse = |message: String| Err(ApiError::invalid(RESUME_FIELD, message));
    let choices = prompts * common.n as usize;
    if choices != 1 {
        return refuse(format!(
            "{RESUME_FIELD} is given with {choices} choices in the answer; one is allowed"
        ));
    }
    if !common.stream && !matches!(leg, Leg::Prefill) {
        return refuse(format!("{RESUME_FIELD} is given without stream: true"));
    }
    let Some(handed_over) = leg.prompt() else {
        return Ok(resume.prompt_token_ids.clone().map(Into::into));
    };
    // What prefill computed is the prompt and the output that there is of it.
    let prompt = handed_over.strip_suffix(resume.output_token_ids.as_slice());
    let fits = |prompt: &[TokenId]| {
        let given = resume.prompt_token_ids.as_deref();
        given.is_none_or(|given| given == prompt)
    };
    match prompt {
        Some(prompt) if fits(prompt) => Ok(Some(prompt.into())),
        _ => refuse(format!(
            "{RESUME_FIELD} and kv_transfer_params.prompt_token_ids are not of the same tokens"
        )),
    }
}

/// Places in the engine come before the work of tokenising.
fn admit(
    instance: &Instance,
    common: &mut Common,
    prompts: usize,
    leg: &Leg,
) -> Result<Submission, ApiError> {
    if matches!(leg, Leg::Prefill) {
        if common.stream {
            let message = "stream is true; a prefill leg answers with a handle, which is no stream";
            return Err(ApiError::invalid("stream", message));
        }
        // One handle, whatever the number of choices: they share the prompt.
        common.n = 1;
    }
    let sequences = u32::try_from(prompts)
        .unwrap_or(u32::MAX)
        .saturating_mul(common.n);
    let capacity = instance.engine.capacity();
    if sequences > capacity {
        let param = if prompts > 1 { "prompt" } else { "n" };
        return Err(ApiError::invalid(
            param,
            format!(
                "{prompts} prompts with n {} are {sequences} sequences; {capacity} are allowed",
                common.n
            ),
        ));
    }
    instance.engine.admit(sequences)
}

fn tokenise(
    instance: &Instance,
    prompt: Prompt,
    known: Option<Arc<[TokenId]>>,
    echo: bool,
    add_special_tokens: bool,
) -> Result<PromptTokens, ApiError> {
    let tokenizer = &instance.tokenizer;
    let (ids, text) = match (known, prompt) {
        (Some(ids), Prompt::Text(text)) => (ids, Some(text)),
        (Some(ids), Prompt::Ids(_)) => (ids, None),
        (None, Prompt::Text(text)) => {
            let ids = tokenizer.encode_bounded(&text, add_special_tokens, context(instance));
            let ids = ids.map_err(|e| too_many(instance, e, "prompt"))?;
            (ids.into(), Some(text))
        }
        (None, Prompt::Ids(ids)) => (ids.into(), None),
    };
    let echo = match (echo, text) {
        (false, _) => None,
        (true, Some(text)) => Some(text),
        (true, None) => Some(tokenizer.decode(&ids, false)?),
    };
    Ok(PromptTokens { ids, echo })
}

/// Beside the kind stands the length of an output that the request leaves open, if it is not as long as may be.
fn finish(
    instance: &Instance,
    (kind, open): (Kind, Option<u32>),
    common: Common,
    prompts: Vec<PromptTokens>,
    leg: Leg,
    submission: Submission,
    mut resume: Option<Resume>,
) -> Result<Prepared, ApiError> {
    let mut requests = Vec::with_capacity(prompts.len() * common.n as usize);
    let mut scored = 0;
    let bad_words = instance
        .tokenizer
        .word_forms(&common.sampling.bad_words)
        .map_err(|error| ApiError::from(error).with_param("bad_words"))?;
    let cache_salt: Option<Arc<str>> = common.cache_salt.as_deref().map(Into::into);
    let resumed: Vec<TokenId> = match &resume {
        Some(resume) => {
            let ids = instance.tokenizer.check_ids(&resume.output_token_ids);
            ids.map_err(|e| ApiError::from(e).with_param(RESUME_FIELD))?;
            resume.output_token_ids.clone()
        }
        None => Vec::new(),
    };
    for (index, prompt) in prompts.iter().enumerate() {
        let max_tokens = output_limit(instance, (kind, open), &common, prompt.ids.len())?;
        // Those of a prompt went out with the first event.
        let scores = match resume {
            Some(_) => None,
            None => scores(&common, prompt, &leg),
        };
        check_scores(instance, &common, prompt, scores, &mut scored)?;
        let tokens: Arc<[TokenId]> = match resumed.as_slice() {
            [] => Arc::clone(&prompt.ids),
            resumed => prompt.ids.iter().chain(resumed).copied().collect(),
        };
        let claim = match &leg {
            // Nothing to fetch for a single token: its KV is computed with it.
            // Log-probabilities of a prompt need all of it computed.
            Leg::Decode(claim) if index == 0 && tokens.len() > 1 && scores.is_none() => {
                claim.set_use(&tokens);
                Some(Arc::clone(claim))
            }
            _ => None,
        };
        let first = instance.new_id();
        for choice in 0..common.n {
            let mut params = instance.defaults.params(
                &common.sampling,
                bad_words.clone(),
                instance.seed,
                choice,
                max_tokens,
                common.logprobs,
            );
            // The first one's are shown with all.
            if choice == 0 {
                params.prompt_logprobs = scores;
            }
            if let Some(resume) = resume.as_mut().filter(|_| !matches!(leg, Leg::Prefill))
                && replayed(instance, &params, resume)?
            {
                continue;
            }
            // The others find the KV that the first one fetched or computed.
            let claim = claim.clone().filter(|_| choice == 0);
            requests.push(NewRequest {
                choice: u32::try_from(requests.len()).unwrap_or(u32::MAX),
                request: Request {
                    id: if choice == 0 {
                        first
                    } else {
                        instance.new_id()
                    },
                    prompt: Arc::clone(&tokens),
                    resumed: match leg {
                        // It only computes them.
                        Leg::Prefill => 0,
                        _ => u32::try_from(resumed.len()).unwrap_or(u32::MAX),
                    },
                    params,
                    kv: if claim.is_some() {
                        KvSource::Remote
                    } else {
                        KvSource::Compute
                    },
                    hold_kv: matches!(leg, Leg::Prefill),
                    cache_salt: cache_salt.clone(),
                    leader: (common.n > 1).then_some(first),
                },
                claim,
            });
        }
    }
    let prefills = matches!(leg, Leg::Prefill);
    Ok(Prepared {
        kind,
        common,
        prompts,
        leg,
        requests,
        submission,
        scores: instance.engine.scores().take(scored)?,
        resume: resume.filter(|_| !prefills),
    })
}

/// Runs the output so far through text and stops, notes the bytes of its text, and says whether it has ended:
/// then only the end of the stream was lost.
fn replayed(
    instance: &Instance,
    params: &SamplingParams,
    resume: &mut Resume,
) -> Result<bool, ApiError> {
    let mut text = String::new();
    let ids = &resume.output_token_ids;
    let ended = OutputState::new(params, &instance.tokenizer)?.replay(ids, &mut text);
    let bytes = text.len() as u64;
    if let Some(given) = resume.emitted_bytes
        && given != bytes
    {
        let message = format!(
            "{RESUME_FIELD}.emitted_bytes is {given}; the text of its tokens has {bytes}: another \
             instance would have given another text"
        );
        return Err(ApiError::invalid(RESUME_FIELD, message));
    }
    resume.emitted_bytes = Some(bytes);
    Ok(ended.is_some() || params.max_tokens == 0)
}

/// Alternatives to compute per prompt token: those asked for, or those of the output where the prompt is
/// echoed; none at all where only KV is wanted.
fn scores(common: &Common, prompt: &PromptTokens, leg: &Leg) -> Option<u32> {
    if matches!(leg, Leg::Prefill) {
        return None;
    }
    let echoed = common.logprobs.filter(|_| prompt.echo.is_some());
    match (common.prompt_logprobs, echoed) {
        (Some(asked), Some(echoed)) => Some(asked.max(echoed)),
        (asked, echoed) => asked.or(echoed),
    }
}

/// Adds to `scored` the log-probabilities that an answer shows of a prompt, once for each choice.
///
/// Errors: they are too many.
fn check_scores(
    instance: &Instance,
    common: &Common,
    prompt: &PromptTokens,
    scores: Option<u32>,
    scored: &mut u64,
) -> Result<(), ApiError> {
    let Some(alternatives) = scores else {
        return Ok(());
    };
    let each = (u64::from(alternatives) + 1).saturating_mul(prompt.ids.len() as u64);
    *scored = scored.saturating_add(each.saturating_mul(common.n.into()));
    let most = instance.engine.scores().most();
    if *scored <= most {
        return Ok(());
    }
    let param = match common.prompt_logprobs {
        Some(_) => "prompt_logprobs",
        None => "logprobs",
    };
    Err(ApiError::invalid(
        param,
        format!(
            "{param} with these prompts and n {} asks for {scored} log-probabilities of prompt tokens; \
             {most} are allowed",
            common.n
        ),
    ))
}

/// Output tokens a request may have. What it asks for must fit; what it leaves open is the model's `max_new_tokens`, else
/// filled up.
fn output_limit(
    instance: &Instance,
    (kind, open): (Kind, Option<u32>),
    common: &Common,
    prompt: usize,
) -> Result<u32, ApiError> {
    let limits = instance.card.limits;
    let context = limits.max_model_len;
    let param = match kind {
        Kind::Completion => "prompt",
        Kind::Chat => "messages",
    };
    let prompt = u32::try_from(prompt).unwrap_or(u32::MAX);
    if prompt == 0 {
        return Err(ApiError::invalid(
            param,
            format!("{param} has no tokens; at least one is needed"),
        ));
    }
    let too_long = |message: String| {
        Err(ApiError::new(ErrorKind::ContextLengthExceeded, message).with_param(param))
    };
    let asked = common.sampling.max_tokens;
    // Without output the prompt may fill the context.
    let room = context.checked_sub(prompt);
    let Some(left) = room.filter(|left| *left > 0 || asked == Some(0)) else {
        return too_long(format!(
            "this model's maximum context length is {context} tokens, input and output together; \
             the prompt has {prompt}"
        ));
    };
    let field = common.sampling.max_tokens_field;
    match asked {
        Some(asked) if asked > limits.max_output_tokens => Err(ApiError::invalid(
            field,
            format!(
                "{field} is {asked}; at most {} are allowed",
                limits.max_output_tokens
            ),
        )),
        Some(asked) if asked > left => too_long(format!(
            "this model's maximum context length is {context} tokens; {} were requested: \
             {prompt} in the prompt, {asked} by {field}",
            u64::from(prompt) + u64::from(asked)
        )),
        Some(asked) => Ok(asked),
        None => {
            let most = left.min(limits.max_output_tokens);
            Ok(match open.or(instance.defaults.max_tokens) {
                Some(tokens) => most.min(tokens.max(common.sampling.min_tokens)),
                None => most,
            })
        }
    }
}

impl Leg {
    /// The prompt as prefill tokenised it, if it said so.
    fn prompt(&self) -> Option<Arc<[TokenId]>> {
        match self {
            Self::Decode(claim) => claim.prompt(),
            Self::Plain | Self::Prefill => None,
        }
    }
}
