//! The routes of an instance.

use crate::app::{App, BODY_TIME, Caller, Instance, PREPARED_AT_ONCE, unix_seconds};
use crate::ids::RequestName;
use crate::prepare::{Kind, Leg, Prepared, check_model, prepare, render, too_many};
use crate::rank::RankStats;
use crate::respond::{Answer, json};
use axum::Router;
use axum::body::Body;
use axum::extract::rejection::PathRejection;
use axum::extract::{Path, Request, State};
use axum::response::Response;
use axum::routing::{get, post};
use bytes::Bytes;
use http::header::CONTENT_TYPE;
use http::{HeaderMap, HeaderValue};
use serde_json::{Value, json as value};
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::time::Instant;
use tokio::time::timeout;
use twinfer_http::{
    ClientAddr, METRICS_CONTENT_TYPE, RoomShare, check_content_type, error_response, parse_json,
    read_body, with_fallbacks,
};
use twinfer_protocol::openai::{ChatRequest, Fields, ModelCard, ModelList, Prompt};
use twinfer_protocol::{ApiError, ErrorKind, IDS_HEADER, KvRelease, LoadReport, TokenId};

/// Completions with bodies up to this many bytes are prepared on the spot.
const INLINE_BYTES: usize = 4 << 10;
/// Picks a rank of the instance (vLLM's name).
const RANK_HEADER: &str = "x-data-parallel-rank";
/// Body of `POST /twinfer/kv/release`.
const RELEASE_BYTES: u64 = 4 << 10;

/// All routes.
pub(crate) fn router(app: Arc<App>) -> Router {
    let router = Router::new()
        .route("/v1/completions", post(completions))
        .route("/v1/chat/completions", post(chat_completions))
        .route("/v1/models", get(models))
        .route("/v1/models/{*name}", get(model))
        .route("/tokenize", post(tokenize))
        .route("/detokenize", post(detokenize))
        .route("/health", get(health))
        .route("/ready", get(ready))
        .route("/metrics", get(metrics))
        .route("/twinfer/instance", get(instance_card))
        .route("/twinfer/load", get(load))
        .route("/twinfer/kv/release", post(kv_release));
    with_fallbacks(router).with_state(app)
}

async fn completions(State(app): State<Arc<App>>, request: Request) -> Response {
    answered(&app, generate(&app, Kind::Completion, request).await)
}

async fn chat_completions(State(app): State<Arc<App>>, request: Request) -> Response {
    answered(&app, generate(&app, Kind::Chat, request).await)
}

async fn generate(app: &Arc<App>, kind: Kind, request: Request) -> Result<Response, ApiError> {
    let arrived = Instant::now();
    let Begun {
        caller,
        instance,
        headers,
        rank,
        body,
        room,
    } = begin(app, request).await?;
    let mut prepared = if kind == Kind::Completion && body.len() <= INLINE_BYTES {
        prepare(&instance, kind, &body, caller)?
    } else {
        let (instance, body) = (Arc::clone(&instance), body.clone());
        off_thread(app, body.len(), move || {
            prepare(&instance, kind, &body, caller)
        })
        .await?
    };
    drop((body, room));
    let prefix = match kind {
        Kind::Completion => "cmpl",
        Kind::Chat => "chatcmpl",
    };
    let name = RequestName::new(prefix, &headers, prepared.common.request_id.as_deref());
    let stream = prepared.common.stream;
    let resume = prepared.resume.as_ref();
    let (id, created) = match resume {
        Some(resume) => (resume.id.clone(), resume.created),
        None => (None, None),
    };
    let resumed = resume.map(|resume| resume.output_token_ids.len());
    let ids = caller.peer && headers.get(IDS_HEADER).is_some_and(|value| value == "1");
    let answer = Answer::new(
        Arc::clone(&instance),
        app.metrics.clone(),
        id.unwrap_or_else(|| name.public.clone()),
        created.unwrap_or_else(unix_seconds),
        &mut prepared,
        ids,
    );
    let Prepared {
        leg,
        requests,
        submission,
        ..
    } = prepared;
    if let Some(tokens) = resumed {
        tracing::info!(request = %name.log, tokens, "resumed after tokens given elsewhere");
        if requests.is_empty() {
            return Ok(answer.end_of_stream());
        }
    }
    tracing::debug!(request = %name.log, ids = ?requests.first().map(|r| r.request.id.0), "admitted");
    let computed = requests
        .first()
        .map_or_else(|| Arc::from([]), |new| Arc::clone(&new.request.prompt));
    // Keeps the drain waiting for the KV that a prefill leg leaves behind.
    let left_behind = matches!(leg, Leg::Prefill).then(|| app.drain.enter().ok());
    let generation = submission.submit(requests, arrived, rank).await?;
    // The fetches hold the claim as long as they need it.
    drop(leg);
    if stream {
        return answer.stream(generation).await;
    }
    let mut outcome = answer.collect(generation).await?;
    let params = match (outcome.take_held(), left_behind) {
        (Some(left), Some(guard)) => Some(instance.handoff.export(left, &computed, guard).await?),
        _ => None,
    };
    if answer.shows_scores() {
        return off_thread(app, 0, move || answer.whole(outcome, params)).await;
    }
    answer.whole(outcome, params)
}

async fn models(State(app): State<Arc<App>>, request: Request) -> Response {
    let list = || {
        app.caller(request.headers(), client(&request))?;
        json(&ModelList {
            object: "list".into(),
            data: vec![model_card(&app, app.instance()?)],
        })
    };
    answered(&app, list())
}

async fn model(
    State(app): State<Arc<App>>,
    name: Result<Path<String>, PathRejection>,
    request: Request,
) -> Response {
    let one = || {
        app.caller(request.headers(), client(&request))?;
        let instance = app.instance()?;
        // What is no UTF-8 is no model either.
        check_model(
            instance,
            Some(name.as_ref().map_or("", |name| name.as_str())),
        )?;
        json(&model_card(&app, instance))
    };
    answered(&app, one())
}

fn model_card(app: &App, instance: &Instance) -> ModelCard {
    ModelCard {
        id: instance.card.model.clone(),
        object: "model".into(),
        created: app.created,
        owned_by: "twinfer".into(),
        root: Some(instance.card.model.clone()),
        parent: None,
        max_model_len: Some(instance.card.limits.max_model_len),
    }
}

async fn tokenize(State(app): State<Arc<App>>, request: Request) -> Response {
    let run = async {
        let Begun {
            instance,
            body,
            room: _room,
            ..
        } = begin(&app, request).await?;
        let (tokens, strings) = {
            let instance = Arc::clone(&instance);
            off_thread(&app, body.len(), move || tokens_of(&instance, &body)).await?
        };
        json(&value!({
            "count": tokens.len(),
            "max_model_len": instance.card.limits.max_model_len,
            "tokens": tokens,
            "token_strs": strings,
        }))
    };
    answered(&app, run.await)
}

/// `prompt` as a completion has it, or `messages` as a chat has them.
fn tokens_of(
    instance: &Instance,
    body: &Bytes,
) -> Result<(Vec<TokenId>, Option<Vec<String>>), ApiError> {
    let fields = Fields::parse(body)?;
    check_model(instance, fields.string("model")?.as_deref())?;
    let tokenizer = &instance.tokenizer;
    let tokens = if fields.raw("messages").is_some() {
        render(instance, ChatRequest::read(&fields)?, countable(instance))?.1
    } else {
        let special = fields.boolean("add_special_tokens")?.unwrap_or(true);
        match Prompt::read_all(&fields)?.as_slice() {
            [Prompt::Text(text)] => tokenizer
                .encode_bounded(text, special, countable(instance))
                .map_err(|e| too_many(instance, e, "prompt"))?,
            _ => {
                return Err(ApiError::invalid(
                    "prompt",
                    "prompt is no string; one string is expected",
                ));
            }
        }
    };
    let strings = fields
        .boolean("return_token_strs")?
        .unwrap_or(false)
        .then(|| {
            tokens
                .iter()
                .map(|&id| tokenizer.token_text(id).unwrap_or_default())
                .collect()
        });
    Ok((tokens, strings))
}

/// Tokens that `/tokenize` and `/detokenize` take: some more than a prompt may have, so that one that is
/// too long can be counted.
fn countable(instance: &Instance) -> usize {
    4 * instance.card.limits.max_model_len as usize
}

async fn detokenize(State(app): State<Arc<App>>, request: Request) -> Response {
    let run = async {
        let Begun {
            instance,
            body,
            room: _room,
            ..
        } = begin(&app, request).await?;
        let text = off_thread(&app, body.len(), move || {
            let fields = Fields::parse(&body)?;
            check_model(&instance, fields.string("model")?.as_deref())?;
            let Some(ids) = fields.token_ids("tokens")? else {
                return Err(ApiError::invalid(
                    "tokens",
                    "tokens is missing; a list of token ids is expected",
                ));
            };
            let most = countable(&instance);
            if ids.len() > most {
                let message = format!("tokens has {} ids; at most {most} are allowed", ids.len());
                return Err(ApiError::invalid("tokens", message));
            }
            instance
                .tokenizer
                .check_ids(&ids)
                .map_err(|e| ApiError::from(e).with_param("tokens"))?;
            Ok(instance.tokenizer.decode(&ids, false)?)
        });
        json(&value!({ "prompt": text.await? }))
    };
    answered(&app, run.await)
}

/// Alive: the process answers and its engine has not failed.
async fn health(State(app): State<Arc<App>>) -> Response {
    let failed = app.loaded().filter(|instance| instance.engine.has_failed());
    match failed {
        Some(instance) => error_response(&ApiError::new(
            ErrorKind::NotReady,
            instance.engine.failure().message,
        )),
        None => plain(&value!({ "status": "ok" })),
    }
}

/// Ready: everything is up and nobody wants it down.
async fn ready(State(app): State<Arc<App>>) -> Response {
    match app.readiness() {
        Ok(()) => plain(&value!({ "status": "ready" })),
        Err(error) => error_response(&error),
    }
}

async fn metrics(State(app): State<Arc<App>>) -> Response {
    if let Some(instance) = app.loaded() {
        instance.handoff.publish(&app.metrics.kv);
    }
    let mut response = Response::new(Body::from(app.metrics.encode(app.readiness().is_ok())));
    response
        .headers_mut()
        .insert(CONTENT_TYPE, HeaderValue::from_static(METRICS_CONTENT_TYPE));
    response
}

async fn instance_card(State(app): State<Arc<App>>, request: Request) -> Response {
    let card = || {
        app.peer(request.headers(), client(&request))?;
        json(&app.instance()?.card)
    };
    answered(&app, card())
}

async fn load(State(app): State<Arc<App>>, request: Request) -> Response {
    let report = || {
        app.peer(request.headers(), client(&request))?;
        let ranks = app.instance()?.engine.stats();
        json(&LoadReport {
            total: RankStats::total(&ranks).load,
            ranks: ranks.iter().map(|rank| rank.engine.load).collect(),
        })
    };
    answered(&app, report())
}

async fn kv_release(State(app): State<Arc<App>>, request: Request) -> Response {
    let run = async {
        app.peer(request.headers(), client(&request))?;
        let (parts, body) = request.into_parts();
        check_content_type(&parts.headers)?;
        let body = read_body(&parts.headers, body, RELEASE_BYTES, BODY_TIME).await?;
        let release: KvRelease = parse_json(&body)?;
        let outcome = app.instance()?.handoff.release(release).await?;
        json(&value!({ "outcome": outcome }))
    };
    answered(&app, run.await)
}

/// A request whose head was judged and whose body is there.
struct Begun {
    caller: Caller,
    instance: Arc<Instance>,
    headers: HeaderMap,
    /// The one it must go to.
    rank: Option<u32>,
    body: Bytes,
    /// The body's share of what all bodies may take.
    room: RoomShare,
}

/// Key, readiness, rank, content type and body, in this order.
async fn begin(app: &App, request: Request) -> Result<Begun, ApiError> {
    let caller = app.caller(request.headers(), client(&request))?;
    let instance = Arc::clone(app.instance()?);
    let (parts, body) = request.into_parts();
    let rank = pinned_rank(&parts.headers, instance.card.ranks)?;
    check_content_type(&parts.headers)?;
    let (body, room) = app.bodies.read(&parts.headers, body).await?;
    Ok(Begun {
        caller,
        instance,
        headers: parts.headers,
        rank,
        body,
        room,
    })
}

/// `X-data-parallel-rank` picks a rank; one that is not there is never replaced by another.
fn pinned_rank(headers: &HeaderMap, ranks: u32) -> Result<Option<u32>, ApiError> {
    let Some(value) = headers.get(RANK_HEADER) else {
        return Ok(None);
    };
    let rank = value
        .to_str()
        .ok()
        .and_then(|text| text.parse::<u32>().ok());
    match rank {
        Some(rank) if rank < ranks => Ok(Some(rank)),
        _ => Err(ApiError::invalid(
            RANK_HEADER,
            format!(
                "{RANK_HEADER} is {value:?}; 0 to {} are allowed",
                ranks.saturating_sub(1)
            ),
        )),
    }
}

/// Runs CPU work for a body of `bytes` on a blocking thread, little at a time.
async fn off_thread<T: Send + 'static>(
    app: &App,
    bytes: usize,
    work: impl FnOnce() -> Result<T, ApiError> + Send + 'static,
) -> Result<T, ApiError> {
    // Memory grows with the text: the largest are prepared alone.
    let share = u32::try_from(1 + (bytes >> 20)).unwrap_or(u32::MAX);
    let place = Arc::clone(&app.preparing).acquire_many_owned(share.min(PREPARED_AT_ONCE));
    let permit = match timeout(BODY_TIME, place).await {
        Ok(Ok(permit)) => permit,
        Ok(Err(_)) => {
            let message = "the instance is shutting down";
            return Err(ApiError::new(ErrorKind::Draining, message));
        }
        Err(_) => {
            let message = "too many large requests are being prepared";
            return Err(ApiError::new(ErrorKind::Overloaded, message));
        }
    };
    let work = tokio::task::spawn_blocking(move || {
        let _permit = permit;
        work()
    });
    work.await.unwrap_or_else(|e| {
        Err(ApiError::new(
            ErrorKind::Internal,
            format!("the request could not be prepared: {e}"),
        ))
    })
}

/// The other end of the connection; nobody's address where it is unknown, so that it is no peer.
fn client(request: &Request) -> SocketAddr {
    let unknown = SocketAddr::new(IpAddr::V4(Ipv4Addr::UNSPECIFIED), 0);
    request
        .extensions()
        .get::<ClientAddr>()
        .map_or(unknown, |client| client.0)
}

fn answered(app: &App, outcome: Result<Response, ApiError>) -> Response {
    outcome.unwrap_or_else(|error| {
        app.metrics.error(&error);
        error_response(&error)
    })
}

fn plain(body: &Value) -> Response {
    json(body).unwrap_or_else(|error| error_response(&error))
}
