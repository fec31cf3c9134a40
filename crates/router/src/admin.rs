//! The admin listener: which instances there are, adding and draining them. Apart from the clients' listener, with a
//! key of its own.

use crate::flow::Shared;
use crate::instances::InstanceSpec;
use crate::registry::{Instance, Source};
use bytes::Bytes;
use http::header::{CONTENT_TYPE, HeaderValue};
use http::{Method, Request, Response, StatusCode};
use http_body_util::Full;
use hyper::body::Incoming;
use serde::Deserialize;
use serde_json::{Value, json};
use std::sync::Arc;
use std::time::Duration;
use twinfer_config::MOST_SECONDS;
use twinfer_http::{
    Endpoint, HostPort, METRICS_CONTENT_TYPE, Secret, check_bearer, check_content_type,
    error_response, parse_json, read_body,
};
use twinfer_protocol::{ApiError, ErrorKind, Role};

/// Largest body.
const BODY_BYTES: u64 = 64 << 10;
const BODY_TIME: Duration = Duration::from_secs(10);
/// Most instances that one request adds or removes.
const MOST: usize = 256;

/// What the routes need.
pub(crate) struct Admin {
    pub(crate) shared: Arc<Shared>,
    pub(crate) key: Option<Secret>,
}

/// Body of `POST /instances`.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Add {
    url: String,
    role: String,
}

/// Body of `POST /instances/add` and `/instances/remove`, as the public proxies have it.
#[derive(Deserialize)]
struct Many {
    #[serde(rename = "type")]
    role: String,
    instances: OneOrMore,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum OneOrMore {
    One(String),
    More(Vec<String>),
}

impl Admin {
    /// Answers one request.
    pub(crate) async fn serve(
        self: Arc<Self>,
        request: Request<Incoming>,
    ) -> Response<Full<Bytes>> {
        match self.answered(request).await {
            Ok(response) => response,
            Err(error) => {
                self.shared.metrics.error(error.kind);
                error_response(&error)
            }
        }
    }

    async fn answered(
        &self,
        request: Request<Incoming>,
    ) -> Result<Response<Full<Bytes>>, ApiError> {
        let path = request.uri().path().to_owned();
        if path != "/health" {
            check_bearer(request.headers(), self.key.as_ref())?;
        }
        let method = request.method().clone();
        let rest = path.strip_prefix("/instances");
        match (method, rest, path.as_str()) {
            (Method::GET, _, "/health") => Ok(reply(StatusCode::OK, &json!({"status": "ok"}))),
            (Method::GET, _, "/metrics") => {
                let text = self.shared.metrics_text();
                Ok(response(StatusCode::OK, METRICS_CONTENT_TYPE, text.into()))
            }
            (Method::GET, Some(""), _) => {
                let all = self.shared.registry.instances();
                let list: Vec<Value> = all.iter().map(|i| self.entry(i)).collect();
                Ok(reply(StatusCode::OK, &json!({"instances": list})))
            }
            (Method::POST, Some(""), _) => {
                let add: Add = body(request).await?;
                let instance = self.add(&add.role, &add.url)?;
                Ok(reply(StatusCode::CREATED, &self.entry(&instance)))
            }
            (Method::POST, Some("/add"), _) => {
                let many: Many = body(request).await?;
                for address in many.instances.list()? {
                    self.add(&many.role, &with_scheme(&address))?;
                }
                Ok(reply(StatusCode::OK, &self.public("added")))
            }
            (Method::POST, Some("/remove"), _) => {
                let many: Many = body(request).await?;
                let role = role(&many.role)?;
                let limit = self.shared.times.drain_timeout;
                let named = many.instances.list()?;
                let found: Vec<Arc<Instance>> = named
                    .iter()
                    .map(|name| self.find(name, Some(role), None))
                    .collect::<Result<_, _>>()?;
                for instance in found {
                    self.shared.registry.drain(&instance, limit);
                }
                Ok(reply(StatusCode::OK, &self.public("draining")))
            }
            (Method::DELETE, Some(name), _) if name.len() > 1 => {
                let asked = Asked::read(request.uri().query().unwrap_or_default())?;
                let name = crate::server::percent_decoded(&name[1..]);
                let instance = self.find(&name, None, asked.epoch.as_deref())?;
                let limit = asked.timeout.unwrap_or(self.shared.times.drain_timeout);
                self.shared.registry.drain(&instance, limit);
                Ok(reply(StatusCode::ACCEPTED, &self.entry(&instance)))
            }
            (_, Some(_), _) => Err(ApiError::new(
                ErrorKind::MethodNotAllowed,
                "GET and POST /instances, DELETE /instances/NAME, POST /instances/add and /instances/remove are there",
            )),
            (method, None, path) => {
                let shown: String = path.chars().take(100).collect();
                let message = format!("no route {method} {shown}");
                Err(ApiError::new(ErrorKind::NotFound, message))
            }
        }
    }

    fn add(&self, name: &str, url: &str) -> Result<Arc<Instance>, ApiError> {
        let role = role(name)?;
        let endpoint: Endpoint = url
            .trim()
            .parse()
            .map_err(|error| ApiError::invalid("url", format!("{error}")))?;
        let spec = InstanceSpec { role, endpoint };
        self.shared.registry.add(spec, Source::Admin)
    }

    /// The only instance of this name or address that does not drain yet.
    fn find(
        &self,
        name: &str,
        role: Option<Role>,
        epoch: Option<&str>,
    ) -> Result<Arc<Instance>, ApiError> {
        let shown: String = name.chars().take(100).collect();
        let address: Option<HostPort> = with_scheme(name)
            .parse::<Endpoint>()
            .ok()
            .map(|endpoint| endpoint.host_port().clone());
        let all = self.shared.registry.instances();
        let mut found = all.iter().filter(|instance| {
            let named = instance.name() == name
                || address.as_ref() == Some(instance.spec.endpoint.host_port());
            named && !instance.is_draining() && role.is_none_or(|role| role == instance.spec.role)
        });
        let (Some(instance), None) = (found.next(), found.next()) else {
            let message =
                format!("{shown:?} is not the name or the address of exactly one instance");
            return Err(ApiError::new(ErrorKind::NotFound, message));
        };
        let own = instance.facts.load_full().and_then(|facts| facts.epoch);
        let own = own.map(|epoch| epoch.to_string());
        match epoch {
            Some(epoch) if own.as_deref() != Some(epoch) => {
                let own = own.as_deref().unwrap_or("none");
                let message = format!("{shown:?} has epoch {own} now: it is another process");
                Err(ApiError::invalid("epoch", message))
            }
            _ => Ok(Arc::clone(instance)),
        }
    }

    fn entry(&self, instance: &Instance) -> Value {
        let facts = instance.facts.load_full();
        let facts = facts.as_deref();
        let models: Vec<&str> = facts
            .map(|facts| facts.models.iter().map(|model| model.id.as_str()).collect())
            .unwrap_or_default();
        let problem = instance.problem();
        json!({
            "name": instance.name(),
            "url": instance.spec.endpoint.to_string(),
            "role": instance.spec.role.as_str(),
            "source": instance.source.as_str(),
            "state": match (instance.is_draining(), &problem) {
                (true, _) => "draining",
                (false, None) => "up",
                (false, Some(_)) => "down",
            },
            "problem": problem,
            "in_flight": self.shared.registry.in_flight(instance.id),
            "models": models,
            "max_model_len": facts.and_then(|facts| facts.max_model_len()),
            "epoch": facts.and_then(|facts| facts.epoch).map(|epoch| epoch.to_string()),
            "fingerprint": facts.and_then(|facts| facts.fingerprint.as_ref()).map(|f| f.id.as_str()),
        })
    }

    /// The answer that callers of the public proxies read.
    fn public(&self, what: &str) -> Value {
        let all = self.shared.registry.instances();
        let of = |role: Role| -> Vec<String> {
            let used = all
                .iter()
                .filter(|i| i.spec.role == role && !i.is_draining());
            used.map(|i| i.spec.endpoint.host_port().to_string())
                .collect()
        };
        json!({
            "message": format!("instances {what}"),
            "current_prefill_instances": of(Role::Prefill),
            "current_decode_instances": of(Role::Decode),
        })
    }
}

/// The query of a DELETE.
#[derive(Debug, Default)]
struct Asked {
    epoch: Option<String>,
    timeout: Option<Duration>,
}

impl Asked {
    fn read(query: &str) -> Result<Self, ApiError> {
        let mut asked = Self::default();
        for part in query.split('&').filter(|part| !part.is_empty()) {
            let (name, value) = part.split_once('=').unwrap_or((part, ""));
            match name {
                "epoch" => asked.epoch = Some(value.to_owned()),
                "timeout" => {
                    let seconds: Option<f64> = value.parse().ok();
                    let seconds = seconds.filter(|s| (0.0..=MOST_SECONDS).contains(s));
                    let Some(seconds) = seconds else {
                        let shown: String = value.chars().take(50).collect();
                        let message = format!(
                            "timeout is {shown:?}; 0 to {MOST_SECONDS} seconds are allowed"
                        );
                        return Err(ApiError::invalid("timeout", message));
                    };
                    asked.timeout = Some(Duration::from_secs_f64(seconds));
                }
                other => {
                    let shown: String = other.chars().take(50).collect();
                    let message =
                        format!("there is no parameter {shown:?}; epoch and timeout are known");
                    return Err(ApiError::new(ErrorKind::InvalidRequest, message));
                }
            }
        }
        Ok(asked)
    }
}

impl OneOrMore {
    fn list(self) -> Result<Vec<String>, ApiError> {
        let list = match self {
            Self::One(one) => vec![one],
            Self::More(list) => list,
        };
        if list.is_empty() || list.len() > MOST {
            let message = format!(
                "instances has {} elements; 1 to {MOST} are allowed",
                list.len()
            );
            return Err(ApiError::invalid("instances", message));
        }
        Ok(list)
    }
}

fn role(name: &str) -> Result<Role, ApiError> {
    name.parse()
        .map_err(|problem: String| ApiError::invalid("role", problem))
}

/// `host:port` as a URL.
fn with_scheme(address: &str) -> String {
    if address.contains("://") {
        address.to_owned()
    } else {
        format!("http://{address}")
    }
}

async fn body<T: serde::de::DeserializeOwned>(request: Request<Incoming>) -> Result<T, ApiError> {
    let (parts, body) = request.into_parts();
    check_content_type(&parts.headers)?;
    let bytes = read_body(&parts.headers, body, BODY_BYTES, BODY_TIME).await?;
    parse_json(&bytes)
}

fn reply(status: StatusCode, value: &Value) -> Response<Full<Bytes>> {
    response(status, "application/json", value.to_string().into())
}

fn response(status: StatusCode, content_type: &'static str, body: Bytes) -> Response<Full<Bytes>> {
    let mut response = Response::new(Full::new(body));
    *response.status_mut() = status;
    let headers = response.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static(content_type));
    response
}
