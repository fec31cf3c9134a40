//! Bodies as vLLM, vLLM-Ascend and twinfer send them.
//!
//! Field lists: vLLM 0.32 and vLLM-Ascend 0.20.2 answers of `/v1/completions` and
//! `/v1/chat/completions`, MooncakeConnectorV1 and NixlConnector handles.

use super::plan::{End, Plan, Step};
use super::wire;
use bytes::Bytes;
use serde::Deserialize;
use serde_json::value::RawValue;
use serde_json::{Value, json};
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use twinfer_config::{Dialect, FakeConfig, FaultKind};
use twinfer_protocol::{Epoch, Role};

/// The fields that matter to a fake worker; all others are ignored, whatever they hold.
#[derive(Deserialize)]
pub(super) struct Ask<'a> {
    model: Option<String>,
    #[serde(borrow)]
    prompt: Option<&'a RawValue>,
    #[serde(borrow)]
    messages: Option<&'a RawValue>,
    stream: Option<bool>,
    stream_options: Option<StreamOptions>,
    #[serde(borrow)]
    max_tokens: Option<&'a RawValue>,
    #[serde(borrow)]
    max_completion_tokens: Option<&'a RawValue>,
    #[serde(borrow)]
    min_tokens: Option<&'a RawValue>,
    n: Option<u32>,
    kv_transfer_params: Option<Value>,
}

#[derive(Deserialize)]
struct StreamOptions {
    include_usage: Option<bool>,
}

/// What answers depend on beside the request.
pub(super) struct Context<'a> {
    pub(super) config: &'a FakeConfig,
    pub(super) name: &'a str,
    pub(super) epoch: Epoch,
    pub(super) own_port: u16,
    /// First of the block ids that this answer may use.
    pub(super) first_block: u64,
    pub(super) headers: &'a [(String, String)],
}

/// Everything of one answer but its form.
struct Draft<'a> {
    chat: bool,
    id: String,
    created: u64,
    model: &'a str,
    pieces: Vec<String>,
    finish: &'static str,
    choices: u32,
    prompt_tokens: usize,
    params: Value,
}

/// The answer to an inference request. `suffix` makes internal ids unique.
pub(super) fn infer(
    context: &Context<'_>,
    chat: bool,
    request_id: Option<&str>,
    suffix: &str,
    body: &[u8],
    fault: Option<&FaultKind>,
) -> Plan {
    let config = context.config;
    let headers = context.headers;
    let ask: Ask<'_> = match serde_json::from_slice(body) {
        Ok(ask) => ask,
        Err(e) => {
            return error(
                400,
                "BadRequestError",
                None,
                &format!("JSON decode error: {e}"),
                headers,
            );
        }
    };
    if let Some(model) = ask.model.as_deref().filter(|m| *m != config.model) {
        let message = format!("The model `{model}` does not exist.");
        return error(404, "NotFoundError", Some("model"), &message, headers);
    }
    let Some(prompt) = (if chat { ask.messages } else { ask.prompt }) else {
        let field = if chat { "messages" } else { "prompt" };
        return error(
            400,
            "BadRequestError",
            Some(field),
            &format!("Field required: {field}"),
            headers,
        );
    };
    let (prompt_text, prompt_tokens) = read_prompt(prompt.get(), chat);
    if prompt_tokens >= config.max_model_len as usize {
        let message = format!(
            "This model's maximum context length is {} tokens. However, your request has {prompt_tokens} input tokens.",
            config.max_model_len
        );
        return error(
            400,
            "BadRequestError",
            Some("input_tokens"),
            &message,
            headers,
        );
    }

    let limit = [ask.max_tokens, ask.max_completion_tokens]
        .into_iter()
        .flatten()
        .find_map(|v| v.get().parse().ok());
    let min: u32 = ask
        .min_tokens
        .and_then(|v| v.get().parse().ok())
        .unwrap_or(0);
    let ends_at_once = config.ends_at_once && min == 0;
    let own = if ends_at_once { 1 } else { config.tokens };
    let count = own.min(limit.unwrap_or(u32::MAX));
    let finish = if !ends_at_once && limit.is_some_and(|l| l <= own) {
        "length"
    } else {
        "stop"
    };

    let asked = ask.kv_transfer_params.as_ref();
    let flag = |name: &str| {
        asked
            .and_then(|p| p.get(name))
            .and_then(Value::as_bool)
            .unwrap_or(false)
    };
    let prefix = if chat { "chatcmpl" } else { "cmpl" };
    let id = format!("{prefix}-{}", request_id.unwrap_or(suffix));
    let keeps = flag("do_remote_decode")
        && config.role.can_prefill()
        && (finish == "length" || config.dialect != Dialect::VllmAscend)
        && fault != Some(&FaultKind::NoParams);
    let internal_id = if chat {
        format!("{id}-{suffix}")
    } else {
        format!("{id}-0-{suffix}")
    };
    // Where the router names the transfer, prefill gives no handle.
    let transfer_id = asked
        .and_then(|params| params.get("transfer_id"))
        .and_then(Value::as_str)
        .filter(|_| config.dialect == Dialect::Mooncake);
    let (internal_id, params) = match (transfer_id, keeps, config.dialect) {
        (Some(transfer_id), ..) => (transfer_id.to_owned(), Value::Null),
        (None, true, Dialect::Mooncake) => return missing("transfer_id", headers),
        (None, true, Dialect::MooncakeLayerwise) => {
            // It writes to the place that decode has named, and holds nothing.
            for field in [
                "request_id",
                "remote_block_ids",
                "remote_engine_id",
                "remote_host",
                "remote_port",
            ] {
                if asked.is_none_or(|params| params.get(field).is_none()) {
                    return missing(field, headers);
                }
            }
            (internal_id, Value::Null)
        }
        (None, true, _) => {
            let params = handle(context, &internal_id, prompt_tokens);
            (internal_id, params)
        }
        (None, false, _) => (internal_id, Value::Null),
    };
    let keeps = keeps && config.dialect != Dialect::MooncakeLayerwise;

    let mut steps = Vec::new();
    if flag("do_remote_prefill") && config.role.can_decode() {
        let asked = asked.unwrap_or(&Value::Null);
        let step = match config.dialect {
            Dialect::Mooncake => await_step(asked).map(Some),
            Dialect::MooncakeLayerwise => metaserver_step(context, asked, &id, chat).map(Some),
            _ => pull_step(asked),
        };
        match step {
            Ok(Some(step)) => steps.push(step),
            Ok(None) => {}
            Err(field) => return missing(field, headers),
        }
    }
    wait(&mut steps, config.ttft);
    if keeps {
        steps.push(Step::Hold(internal_id));
    }
    let draft = Draft {
        chat,
        id,
        created: SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .map_or(0, |d| d.as_secs()),
        model: &config.model,
        pieces: pieces(config, &prompt_text, count),
        finish,
        choices: ask.n.unwrap_or(1).clamp(1, 128),
        prompt_tokens,
        params,
    };
    if ask.stream == Some(true) {
        let usage = ask.stream_options.and_then(|o| o.include_usage) == Some(true);
        let error_after = match fault {
            Some(FaultKind::ErrorEvent(tokens)) => Some(*tokens as usize),
            _ => None,
        };
        stream(&draft, config, headers, usage, error_after, &mut steps);
    } else {
        for _ in 1..draft.pieces.len() {
            wait(&mut steps, config.token_time);
        }
        steps.extend(Plan::json(200, &whole(&draft), headers).steps);
    }
    Plan {
        steps,
        end: End::KeepAlive,
    }
    .joined()
}

/// vLLM's error shape.
pub(super) fn error(
    status: u16,
    kind: &str,
    param: Option<&str>,
    message: &str,
    headers: &[(String, String)],
) -> Plan {
    let body = json!({"error": {"message": message, "type": kind, "param": param, "code": status}});
    Plan::json(status, &body, headers)
}

/// `kv_transfer_params` of a prefill answer.
fn handle(context: &Context<'_>, internal_id: &str, prompt_tokens: usize) -> Value {
    let config = context.config;
    let blocks = prompt_tokens.div_ceil(config.block_size.max(1) as usize) as u64;
    let ids: Vec<u64> = (context.first_block..context.first_block + blocks).collect();
    let port = if config.kv_port == 0 {
        context.own_port
    } else {
        config.kv_port
    };
    let engine = format!("{}-{}", context.name, context.epoch);
    match config.dialect {
        Dialect::VllmAscend => json!({
            "do_remote_prefill": true, "do_remote_decode": false, "remote_block_ids": ids,
            "remote_engine_id": engine, "remote_request_id": internal_id, "remote_host": config.kv_host,
            "remote_port": port, "remote_pcp_size": 1, "remote_dcp_size": 1, "remote_ptp_size": config.kv_tp_size,
            "last_token_id": 306, "remote_multi_nodes_meta_mapping": {}, "num_prompt_blocks": blocks,
        }),
        Dialect::Nixl => json!({
            "do_remote_prefill": true, "do_remote_decode": false, "remote_block_ids": [ids],
            "remote_engine_id": engine, "remote_request_id": internal_id, "remote_host": config.kv_host,
            "remote_port": port, "tp_size": config.kv_tp_size, "dcp_size": 1, "pp_size": 1,
            "remote_num_tokens": prompt_tokens, "remote_blocks_expiry_time": null, "transfer_mode": "pull",
            "remote_prefill_cached_tokens": 0,
        }),
        // Neither gives a handle.
        Dialect::Mooncake | Dialect::MooncakeLayerwise => Value::Null,
        Dialect::Twinfer => json!({
            "do_remote_prefill": true, "do_remote_decode": false, "remote_block_ids": ids,
            "remote_engine_id": engine, "remote_request_id": internal_id, "remote_host": config.kv_host,
            "remote_port": port, "remote_block_size": config.block_size, "remote_pcp_size": 1,
            "remote_dcp_size": 1, "remote_ptp_size": 1, "remote_num_tokens": prompt_tokens,
            "last_token_id": 306, "num_prompt_blocks": blocks,
            "prompt_token_ids": (0..prompt_tokens as u64).collect::<Vec<_>>(),
        }),
    }
}

/// The fetch that a handle asks for; the error names a missing field.
fn pull_step(params: &Value) -> Result<Option<Step>, &'static str> {
    let text = |name: &'static str| params.get(name).and_then(Value::as_str).ok_or(name);
    let host = text("remote_host")?.to_owned();
    let remote_request_id = text("remote_request_id")?.to_owned();
    text("remote_engine_id")?;
    let port = params
        .get("remote_port")
        .and_then(Value::as_u64)
        .and_then(|p| u16::try_from(p).ok());
    let port = port.ok_or("remote_port")?;
    let loopback = host
        .parse::<std::net::IpAddr>()
        .is_ok_and(|ip| ip.is_loopback());
    Ok(loopback.then_some(Step::Pull {
        host,
        port,
        remote_request_id,
    }))
}

fn missing(field: &str, headers: &[(String, String)]) -> Plan {
    let message = format!("kv_transfer_params lacks {field}");
    error(
        400,
        "BadRequestError",
        Some("kv_transfer_params"),
        &message,
        headers,
    )
}

/// Waiting for what the prefill worker will hold under the router's transfer id.
fn await_step(params: &Value) -> Result<Step, &'static str> {
    let text = |name: &'static str| params.get(name).and_then(Value::as_str).ok_or(name);
    let transfer_id = text("transfer_id")?.to_owned();
    text("remote_engine_id")?;
    let (host, port, _) = address(text("remote_bootstrap_addr")?).ok_or("remote_bootstrap_addr")?;
    Ok(Step::Await {
        host,
        port,
        transfer_id,
    })
}

/// The question for the prompt's KV, as the connector's scheduler asks it.
fn metaserver_step(
    context: &Context<'_>,
    params: &Value,
    id: &str,
    chat: bool,
) -> Result<Step, &'static str> {
    let url = params
        .get("metaserver")
        .and_then(Value::as_str)
        .ok_or("metaserver")?;
    let (host, port, path) = address(url).ok_or("metaserver")?;
    let request_id = if chat {
        id.to_owned()
    } else {
        format!("{id}-0")
    };
    let body = json!({
        "token_ids": [], "request_id": request_id, "do_remote_prefill": false, "do_remote_decode": true,
        "remote_block_ids": [[context.first_block]], "remote_block_size": [context.config.block_size],
        "remote_engine_id": format!("0-{}", context.epoch), "remote_host": context.config.kv_host,
        "remote_port": context.own_port, "remote_tp_size": context.config.kv_tp_size, "remote_pcp_size": 1,
        "remote_dcp_size": 1, "remote_cached_tokens": 0,
    });
    Ok(Step::Metaserver {
        host,
        port,
        path,
        body: body.to_string(),
    })
}

/// Host, port and path of `http://host:port/path`.
fn address(url: &str) -> Option<(String, u16, String)> {
    let rest = url.strip_prefix("http://")?;
    let (authority, path) = rest.split_once('/').unwrap_or((rest, ""));
    let (host, port) = authority.rsplit_once(':')?;
    Some((host.to_owned(), port.parse().ok()?, format!("/{path}")))
}

/// Text and length of a prompt. Fake tokens: a start token and one per three bytes of text.
fn read_prompt(raw: &str, chat: bool) -> (String, usize) {
    let value: Value = serde_json::from_str(raw).unwrap_or_default();
    if chat {
        let mut contents = value
            .as_array()
            .into_iter()
            .flatten()
            .filter_map(|m| m.get("content"));
        let text = contents
            .next_back()
            .and_then(Value::as_str)
            .unwrap_or_default()
            .to_owned();
        return (text, 1 + raw.len().div_ceil(3));
    }
    match value {
        Value::String(text) => {
            let tokens = 1 + text.len().div_ceil(3);
            (text, tokens)
        }
        Value::Array(items) if items.iter().all(Value::is_u64) => (String::new(), items.len()),
        other => (other.to_string(), 1 + raw.len().div_ceil(3)),
    }
}

/// Words of the answer.
fn pieces(config: &FakeConfig, prompt: &str, count: u32) -> Vec<String> {
    let words: Vec<String> = match &config.text {
        Some(text) => words(&text.replace("{prompt}", prompt)),
        None => Vec::new(),
    };
    (0..count as usize)
        .map(|i| match words.len() {
            0 => format!(" tok{i}"),
            len => words.get(i % len).cloned().unwrap_or_default(),
        })
        .collect()
}

/// Splits before each space, so that a word brings the space before it, as tokens do.
fn words(text: &str) -> Vec<String> {
    let mut words = vec![String::new()];
    for c in text.chars() {
        match words.last_mut() {
            Some(word) if c != ' ' || word.is_empty() => word.push(c),
            _ => words.push(c.to_string()),
        }
    }
    words
}

fn whole(draft: &Draft<'_>) -> Value {
    let text = draft.pieces.concat();
    let completion = draft.pieces.len() * draft.choices as usize;
    let choices: Vec<Value> = (0..draft.choices)
        .map(|index| {
            if draft.chat {
                json!({
                    "index": index,
                    "message": {"role": "assistant", "content": text, "refusal": null, "annotations": null, "audio": null,
                        "function_call": null, "tool_calls": [], "reasoning_content": null},
                    "logprobs": null, "finish_reason": draft.finish, "stop_reason": null, "token_ids": null,
                })
            } else {
                json!({
                    "index": index, "text": text, "logprobs": null, "finish_reason": draft.finish, "stop_reason": null,
                    "token_ids": null, "prompt_logprobs": null, "prompt_token_ids": null,
                })
            }
        })
        .collect();
    json!({
        "id": draft.id, "object": if draft.chat { "chat.completion" } else { "text_completion" },
        "created": draft.created, "model": draft.model, "choices": choices, "service_tier": null,
        "system_fingerprint": null, "usage": usage(draft, completion), "kv_transfer_params": draft.params,
    })
}

fn usage(draft: &Draft<'_>, completion: usize) -> Value {
    json!({
        "prompt_tokens": draft.prompt_tokens, "total_tokens": draft.prompt_tokens + completion,
        "completion_tokens": completion, "prompt_tokens_details": null,
    })
}

fn stream(
    draft: &Draft<'_>,
    config: &FakeConfig,
    headers: &[(String, String)],
    with_usage: bool,
    error_after: Option<usize>,
    steps: &mut Vec<Step>,
) {
    steps.push(Step::Write(wire::head(
        200,
        "text/event-stream; charset=utf-8",
        None,
        headers,
    )));
    let object = if draft.chat {
        "chat.completion.chunk"
    } else {
        "text_completion"
    };
    let event = |choices: Value, usage: Value| {
        let mut body = json!({
            "id": draft.id, "object": object, "created": draft.created, "model": draft.model, "choices": choices,
        });
        if !(draft.chat && usage.is_null()) {
            body["usage"] = usage;
        }
        wire::chunk(format!("data: {body}\n\n").as_bytes())
    };
    if draft.chat {
        for index in 0..draft.choices {
            let delta = json!({"role": "assistant", "content": ""});
            let choice =
                json!([{"index": index, "delta": delta, "logprobs": null, "finish_reason": null}]);
            steps.push(Step::Write(event(choice, Value::Null)));
        }
    }
    let per_chunk = config.tokens_per_chunk.max(1) as usize;
    let mut sent = 0;
    for group in draft.pieces.chunks(per_chunk) {
        if error_after.is_some_and(|after| sent >= after) {
            break;
        }
        for i in 0..group.len() {
            if sent + i > 0 {
                wait(steps, config.token_time);
            }
        }
        sent += group.len();
        let last = sent == draft.pieces.len();
        let finish = if last {
            Value::from(draft.finish)
        } else {
            Value::Null
        };
        for index in 0..draft.choices {
            let text = group.concat();
            let choice = if draft.chat {
                json!([{"index": index, "delta": {"content": text}, "logprobs": null, "finish_reason": finish, "stop_reason": null}])
            } else {
                json!([{"index": index, "text": text, "logprobs": null, "finish_reason": finish, "stop_reason": null}])
            };
            steps.push(Step::Write(event(choice, Value::Null)));
        }
    }
    if error_after.is_some() {
        let body = json!({"error": {"message": "engine failed", "type": "InternalServerError", "param": null, "code": 500}});
        steps.push(Step::Write(wire::chunk(
            format!("data: {body}\n\n").as_bytes(),
        )));
    } else if with_usage {
        let completion = draft.pieces.len() * draft.choices as usize;
        steps.push(Step::Write(event(json!([]), usage(draft, completion))));
    }
    steps.push(Step::Write(Bytes::from_static(
        b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n",
    )));
}

fn wait(steps: &mut Vec<Step>, seconds: f64) {
    if let Some(time) = Duration::try_from_secs_f64(seconds)
        .ok()
        .filter(|t| !t.is_zero())
    {
        match steps.last_mut() {
            Some(Step::Wait(before)) => *before += time,
            _ => steps.push(Step::Wait(time)),
        }
    }
}

/// Answer of `GET /v1/models`.
pub(super) fn models(config: &FakeConfig) -> Value {
    json!({"object": "list", "data": [{
        "id": config.model, "object": "model", "created": 1_700_000_000, "owned_by": "vllm", "root": config.model,
        "parent": null, "max_model_len": config.max_model_len, "permission": [],
    }]})
}

/// Answer of `GET /twinfer/instance`.
pub(super) fn card(context: &Context<'_>) -> Value {
    let config = context.config;
    let kv_addr = (config.role != Role::Decode).then(|| {
        let port = if config.kv_port == 0 {
            context.own_port
        } else {
            config.kv_port
        };
        format!("{}:{port}", config.kv_host)
    });
    json!({
        "name": context.name, "role": config.role, "model": config.model, "epoch": context.epoch,
        "fingerprint": {
            "id": format!("fake-{}", config.model), "config": "", "weights": config.model, "tokenizer": "",
            "quantization": "none", "kv_dtype": "bf16", "block_size": config.block_size, "kv_layout": 1, "numerics": "exact",
        },
        "limits": {
            "max_model_len": config.max_model_len, "max_output_tokens": config.max_model_len, "max_num_seqs": 1024,
            "max_num_batched_tokens": 8192,
        },
        "block_size": config.block_size, "kv_addr": kv_addr, "ranks": 1,
    })
}
