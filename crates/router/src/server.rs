//! Routes of the router.

use crate::access::Access;
use crate::answer::RouterBody;
use crate::body::JsonObject;
use crate::clients::ClientKeys;
use crate::flow::{Ask, Exchange, Permit, Shared};
use crate::gate::Client;
use crate::headers::RequestId;
use bytes::Bytes;
use http::header::{ALLOW, CONTENT_TYPE, HeaderValue};
use http::{HeaderMap, Method, Request, Response, StatusCode};
use http_body_util::{Either, Full};
use hyper::body::Incoming;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::Instant;
use twinfer_config::WithoutPrefill;
use twinfer_http::{
    BodyRoom, Drain, METRICS_CONTENT_TYPE, check_content_type, error_response, read_body,
};
use twinfer_protocol::{ApiError, ErrorKind, Role};

/// For the body of a request to arrive.
pub(crate) const BODY_LIMIT: Duration = Duration::from_secs(60);
/// Bodies of the greatest length that requests may hold at the same time, until their answers begin. What
/// goes to an instance is made of one and takes as much again.
pub(crate) const LARGE_BODIES: u32 = 8;
/// Of a question to the metaserver.
const QUESTION_BYTES: u64 = 1 << 20;
const QUESTION_TIME: Duration = Duration::from_secs(10);
/// Bodies above this are cut on a thread of their own, so that others do not wait for it.
const INLINE: usize = 1 << 20;

/// What the routes need.
pub(crate) struct Server {
    pub(crate) shared: Arc<Shared>,
    pub(crate) drain: Drain,
    pub(crate) clients: ClientKeys,
    pub(crate) access_log: bool,
    pub(crate) bodies: BodyRoom,
}

/// A route. Names are labels of metrics.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Route {
    Completions,
    Chat,
    Tokenize,
    Detokenize,
    Models,
    Model,
    Health,
    Ready,
    Metrics,
    HealthCheck,
    Metaserver,
}

impl Route {
    const ALL: [Self; 11] = [
        Self::Completions,
        Self::Chat,
        Self::Tokenize,
        Self::Detokenize,
        Self::Models,
        Self::Model,
        Self::Health,
        Self::Ready,
        Self::Metrics,
        Self::HealthCheck,
        Self::Metaserver,
    ];

    const fn path(self) -> &'static str {
        match self {
            Self::Completions => "/v1/completions",
            Self::Chat => "/v1/chat/completions",
            Self::Tokenize => "/tokenize",
            Self::Detokenize => "/detokenize",
            Self::Models => "/v1/models",
            // With the model's name behind it, which may hold slashes.
            Self::Model => "/v1/models/",
            Self::Health => "/health",
            Self::Ready => "/ready",
            Self::Metrics => "/metrics",
            // As the public proxies name it.
            Self::HealthCheck => "/healthcheck",
            // Asked by decode instances, which send no key: the id in the question is what they know.
            Self::Metaserver => "/v1/metaserver",
        }
    }

    fn of(path: &str) -> Option<Self> {
        if path.starts_with(Self::Model.path()) {
            return Some(Self::Model);
        }
        Self::ALL.into_iter().find(|route| route.path() == path)
    }

    const fn is_post(self) -> bool {
        matches!(
            self,
            Self::Completions | Self::Chat | Self::Tokenize | Self::Detokenize | Self::Metaserver
        )
    }

    const fn is_open(self) -> bool {
        matches!(
            self,
            Self::Health | Self::Ready | Self::Metrics | Self::HealthCheck | Self::Metaserver
        )
    }
}

/// Paths that are served while the router drains.
pub(crate) fn is_control(path: &str) -> bool {
    Route::ALL
        .iter()
        .any(|route| route.is_open() && route.path() == path)
}

impl Server {
    /// Answers one request.
    pub(crate) async fn serve(self: Arc<Self>, request: Request<Incoming>) -> Response<RouterBody> {
        let path = request.uri().path();
        let Some(route) = Route::of(path) else {
            let shown: String = path.chars().take(100).collect();
            let error = ApiError::new(
                ErrorKind::NotFound,
                format!("no route {} {shown}", request.method()),
            );
            return self.refuse("unknown", &error);
        };
        let response = match self.checked(route, request).await {
            Ok(response) => response,
            Err(error) => {
                if self.access_log && !route.is_open() {
                    let (status, code) = (error.kind.status(), error.kind.code());
                    tracing::info!(
                        path = route.path(),
                        status,
                        code,
                        outcome = "refused",
                        "access"
                    );
                }
                return self.refuse(route.path(), &error);
            }
        };
        self.shared
            .metrics
            .answered(route.path(), response.status().as_u16());
        response
    }

    async fn checked(
        &self,
        route: Route,
        request: Request<Incoming>,
    ) -> Result<Response<RouterBody>, ApiError> {
        let client = match route.is_open() {
            true => 0,
            false => self.clients.check(request.headers())?,
        };
        let method = request.method();
        let fits = if route.is_post() {
            method == Method::POST
        } else {
            method == Method::GET || method == Method::HEAD
        };
        if !fits {
            let message = format!("{} does not take {method}", route.path());
            let mut response =
                error_response::<Full<Bytes>>(&ApiError::new(ErrorKind::MethodNotAllowed, message));
            let allowed = if route.is_post() { "POST" } else { "GET, HEAD" };
            response
                .headers_mut()
                .insert(ALLOW, HeaderValue::from_static(allowed));
            self.shared.metrics.error(ErrorKind::MethodNotAllowed);
            return Ok(response.map(Either::Left));
        }
        Ok(match route {
            Route::Health => json_response(&json!({"status": "ok"})),
            Route::Ready => json_response(&self.ready()?),
            Route::Metrics => {
                text_response(METRICS_CONTENT_TYPE, self.shared.metrics_text().into())
            }
            Route::HealthCheck => json_response(&self.counts()),
            Route::Metaserver => {
                let (parts, body) = request.into_parts();
                let body = read_body(&parts.headers, body, QUESTION_BYTES, QUESTION_TIME).await?;
                self.shared.metaserver.ask(&body).await?;
                json_response(&json!({"status": "ok"}))
            }
            Route::Models => {
                let data: Vec<Value> = self.models().into_values().collect();
                json_response(&json!({"object": "list", "data": data}))
            }
            Route::Model => json_response(&self.model_entry(request.uri().path())?),
            Route::Completions | Route::Chat | Route::Tokenize | Route::Detokenize => {
                return self.forward(route, client, request).await;
            }
        })
    }

    async fn forward(
        &self,
        route: Route,
        client: Client,
        request: Request<Incoming>,
    ) -> Result<Response<RouterBody>, ApiError> {
        let name = self.clients.name(client);
        let access = Access::new(self.access_log, route.path(), name, Instant::now());
        let permit = Permit::take(&self.shared, client).await?;
        let (parts, body) = request.into_parts();
        check_content_type(&parts.headers)?;
        let read = self.bodies.read(&parts.headers, body).await;
        let (bytes, room) = read.inspect_err(|error| {
            if error.kind == ErrorKind::PayloadTooLarge {
                tracing::warn!(path = route.path(), %error, "body refused");
            }
        })?;
        let object = if bytes.len() > INLINE {
            let cut = tokio::task::spawn_blocking(move || JsonObject::parse(bytes)).await;
            cut.map_err(|_| ApiError::new(ErrorKind::Internal, "the body could not be read"))??
        } else {
            JsonObject::parse(bytes)?
        };
        check_fields(route, &object)?;
        let id = RequestId::new(&parts.headers);
        let ask = Ask {
            path: route.path(),
            model: self.model(&object)?,
            object,
            room: Some(room),
            headers: parts.headers,
            generates: matches!(route, Route::Completions | Route::Chat),
        };
        self.check_length(&ask)?;
        Ok(Exchange::run(Arc::clone(&self.shared), id, ask, permit, access).await)
    }

    /// A prompt of ids that no pair takes whole is not computed for nothing: decode, which would refuse it,
    /// is asked last. The length of a text is not known here.
    fn check_length(&self, ask: &Ask) -> Result<(), ApiError> {
        let table = self.shared.registry.table();
        let Some(pools) = table.models.get(&ask.model) else {
            return Ok(());
        };
        if !ask.generates || !pools.has_pair() || !pools.both.is_empty() {
            return Ok(());
        }
        let (Some(limit), Some(prompt)) = (pools.pair_limit, ask.object.prompt_ids()) else {
            return Ok(());
        };
        let output = ask.object.get("max_tokens");
        let output = output.and_then(|text| text.parse::<u64>().ok());
        let total = prompt.saturating_add(output.unwrap_or(1).max(1));
        if total <= limit {
            return Ok(());
        }
        let message = format!(
            "this model's maximum context length is {limit} tokens, input and output together; {total} were \
             requested: {prompt} in the prompt, {} for the output",
            total - prompt
        );
        Err(ApiError::new(ErrorKind::ContextLengthExceeded, message).with_param("prompt"))
    }

    /// The model that a body names; the only one that is served if it names none.
    fn model(&self, object: &JsonObject) -> Result<String, ApiError> {
        match object.get("model").filter(|text| *text != "null") {
            Some(text) => match object.string("model") {
                Some(model) => Ok(model.into_owned()),
                None => {
                    let shown: String = text.chars().take(50).collect();
                    Err(ApiError::invalid(
                        "model",
                        format!("model is {shown}; a string is expected"),
                    ))
                }
            },
            None => {
                let table = self.shared.registry.table();
                let mut names = table.models.keys();
                match (names.next(), names.next()) {
                    (Some(only), None) => Ok(only.clone()),
                    (Some(_), Some(_)) => Err(ApiError::invalid(
                        "model",
                        "model is missing; several are served",
                    )),
                    (None, _) => Err(self.shared.registry.nothing_up("")),
                }
            }
        }
    }

    fn ready(&self) -> Result<Value, ApiError> {
        if !self.drain.is_serving() {
            return Err(self.drain.refusal());
        }
        let registry = &self.shared.registry;
        let alone = self.shared.without_prefill == WithoutPrefill::Decode;
        let table = registry.table();
        let serves = table.models.values().any(|pools| {
            pools.has_pair() || !pools.both.is_empty() || (alone && !pools.decode.is_empty())
        });
        if serves {
            Ok(json!({"status": "ready"}))
        } else {
            Err(ApiError::new(
                ErrorKind::NotReady,
                format!("no set of instances can serve: {}", registry.state()),
            ))
        }
    }

    fn counts(&self) -> Value {
        let of_role = |role| {
            let instances = self.shared.registry.instances();
            instances.iter().filter(|i| i.spec.role == role).count()
        };
        json!({
            "status": "ok",
            "prefill_instances": of_role(Role::Prefill),
            "decode_instances": of_role(Role::Decode),
            "request_num": self.shared.gate.counts().0,
        })
    }

    /// One entry per model, as decode has it, with the context that every instance of the model allows.
    fn models(&self) -> BTreeMap<String, Value> {
        let registry = &self.shared.registry;
        let mut entries: BTreeMap<String, (Value, Option<u64>)> = BTreeMap::new();
        let instances = registry.instances();
        let used = |instance: &&Arc<crate::registry::Instance>| instance.problem().is_none();
        let prefill_last = [Role::Both, Role::Decode, Role::Prefill];
        for role in prefill_last {
            for instance in instances
                .iter()
                .filter(|i| i.spec.role == role)
                .filter(used)
            {
                let Some(facts) = instance.facts.load_full() else {
                    continue;
                };
                for model in &facts.models {
                    let entry = entries
                        .entry(model.id.clone())
                        .or_insert_with(|| (model.entry.clone(), None));
                    entry.1 = entry.1.into_iter().chain(model.max_model_len).min();
                }
            }
        }
        entries
            .into_iter()
            .map(|(id, (mut entry, max_model_len))| {
                if let (Some(object), Some(limit)) = (entry.as_object_mut(), max_model_len) {
                    object.insert("max_model_len".to_owned(), limit.into());
                }
                (id, entry)
            })
            .collect()
    }

    /// The entry of the model that a path names, percent-encoded.
    fn model_entry(&self, path: &str) -> Result<Value, ApiError> {
        let encoded = path.strip_prefix(Route::Model.path()).unwrap_or_default();
        let name = percent_decoded(encoded);
        self.models()
            .remove(&name)
            .ok_or_else(|| self.shared.registry.unknown_model(&name))
    }

    fn refuse(&self, route: &'static str, error: &ApiError) -> Response<RouterBody> {
        self.shared.metrics.answered(route, error.kind.status());
        self.shared.metrics.error(error.kind);
        error_response::<Full<Bytes>>(error).map(Either::Left)
    }
}

/// What every instance would refuse is refused before any is asked.
fn check_fields(route: Route, object: &JsonObject) -> Result<(), ApiError> {
    let present = |name: &str| object.get(name).filter(|text| *text != "null");
    match route {
        Route::Chat => match present("messages") {
            None => Err(ApiError::invalid(
                "messages",
                "messages is missing; a list is expected",
            )),
            Some(text) if !text.starts_with('[') => {
                Err(ApiError::invalid("messages", "messages is no list"))
            }
            Some(_) => Ok(()),
        },
        Route::Completions if present("prompt").is_none() => Err(ApiError::invalid(
            "prompt",
            "prompt is missing; a string or token ids are expected",
        )),
        _ => Ok(()),
    }
}

/// A part of a path; what is no UTF-8 is replaced, and then the name of nothing.
pub(crate) fn percent_decoded(text: &str) -> String {
    let hex = |byte: u8| char::from(byte).to_digit(16);
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((&first, behind)) = rest.split_first() {
        rest = behind;
        let code = match (first, behind) {
            (b'%', &[high, low, ..]) => hex(high).zip(hex(low)),
            _ => None,
        };
        match code.and_then(|(high, low)| u8::try_from(16 * high + low).ok()) {
            Some(byte) => {
                bytes.push(byte);
                rest = &behind[2..];
            }
            None => bytes.push(first),
        }
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

fn json_response(value: &Value) -> Response<RouterBody> {
    text_response("application/json", value.to_string().into())
}

fn text_response(content_type: &'static str, body: Bytes) -> Response<RouterBody> {
    let mut headers = HeaderMap::new();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static(content_type));
    let mut response = Response::new(Either::Left(Full::new(body)));
    *response.status_mut() = StatusCode::OK;
    *response.headers_mut() = headers;
    response
}
