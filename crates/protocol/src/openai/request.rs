use super::fields::{Fields, read, shown};
use super::prompt::Prompt;
use super::sampling::SamplingOptions;
use crate::limits::MAX_LOGPROBS;
use crate::{ApiError, ErrorKind, KvTransferParams};
use serde_json::value::RawValue;
use serde_json::{Map, Value};

/// Most choices per prompt.
pub const MAX_N: u32 = 128;
/// Most messages of a chat.
const MAX_MESSAGES: usize = 16_384;
/// Most parts of one message's content.
const MAX_PARTS: usize = 4096;
/// Most JSON values in one field that the chat template sees: each takes memory of its own.
const MAX_VALUES: usize = 1 << 18;

/// Longest `cache_salt`, in bytes.
const MAX_SALT_BYTES: usize = 1024;

const NO_GRAMMAR: &str = "constrained output is not built";
/// Names of the chat template's own variables, which `chat_template_kwargs` must not replace.
const RESERVED_KWARGS: &[&str] = &[
    "chat_template",
    "messages",
    "conversation",
    "tools",
    "documents",
    "add_generation_prompt",
    "continue_final_message",
    "tokenize",
    "bos_token",
    "eos_token",
];
/// Field, JSON texts of its harmless values, why others are refused. Same on both routes.
const UNSUPPORTED: &[(&str, &[&str], &str)] = &[
    ("use_beam_search", &["false"], "beam search is not built"),
    ("length_penalty", &["1", "1.0"], "beam search is not built"),
    ("guided_json", &[], NO_GRAMMAR),
    ("guided_regex", &[], NO_GRAMMAR),
    ("guided_choice", &[], NO_GRAMMAR),
    ("guided_grammar", &[], NO_GRAMMAR),
    ("guided_decoding_backend", &[], NO_GRAMMAR),
    ("guided_whitespace_pattern", &[], NO_GRAMMAR),
    ("structured_outputs", &[], NO_GRAMMAR),
    ("structural_tag", &[], NO_GRAMMAR),
    ("truncate_prompt_tokens", &[], "send a prompt that fits"),
    (
        "logits_processors",
        &["[]"],
        "code from requests is never run",
    ),
    ("prompt_embeds", &[], "prompts are text or token ids"),
    (
        "priority",
        &["0"],
        "requests are served in order of arrival",
    ),
    (
        "spaces_between_special_tokens",
        &["true"],
        "text is the exact text of the tokens",
    ),
    (
        "return_tokens_as_token_ids",
        &["false"],
        "use return_token_ids",
    ),
    ("logprob_token_ids", &["[]"], "use logprobs"),
    (
        "thinking_token_budget",
        &[],
        "thinking budgets are not built",
    ),
];
const UNSUPPORTED_COMPLETION: &[(&str, &[&str], &str)] = &[(
    "suffix",
    &["\"\""],
    "the model continues text, it does not fill in",
)];
const UNSUPPORTED_CHAT: &[(&str, &[&str], &str)] = &[
    (
        "chat_template",
        &[],
        "only the model's own chat template is used",
    ),
    ("functions", &["[]"], "use tools"),
    ("function_call", &["\"none\"", "\"auto\""], "use tools"),
    (
        "continue_final_message",
        &["false"],
        "send a completion instead",
    ),
    ("echo", &["false"], "a chat does not repeat its prompt"),
    ("audio", &[], "answers are text"),
    ("prediction", &[], "predicted outputs are not built"),
    ("web_search_options", &[], "there is no web search"),
    ("mm_processor_kwargs", &["{}"], "messages are text"),
    ("best_of", &["1"], "chat takes n only"),
];

/// What both kinds of request share.
#[derive(Clone, Debug, PartialEq)]
pub struct Common {
    /// `model`; whether it is served here is not known yet.
    pub model: Option<String>,
    /// `n`, 1 to [`MAX_N`].
    pub n: u32,
    /// `stream`.
    pub stream: bool,
    /// `stream_options.include_usage`: a last chunk with the counts.
    pub include_usage: bool,
    /// `stream_options.continuous_usage_stats`: counts in every chunk.
    pub continuous_usage: bool,
    /// Sampling and stopping.
    pub sampling: SamplingOptions,
    /// `logprobs` of completions, or `top_logprobs` of chats with `logprobs`: alternatives per token.
    pub logprobs: Option<u32>,
    /// `prompt_logprobs`: alternatives per prompt token; not with `stream`.
    pub prompt_logprobs: Option<u32>,
    /// `cache_salt`: only requests of the same salt share cached prefixes; not empty.
    pub cache_salt: Option<String>,
    /// `request_id`, vLLM's way to name a request in the body.
    pub request_id: Option<String>,
    /// `return_token_ids`: token ids of prompt and output in the answer.
    pub return_token_ids: bool,
}

/// Body of `POST /v1/completions`.
#[derive(Clone, Debug, PartialEq)]
pub struct CompletionRequest {
    /// Common fields.
    pub common: Common,
    /// `prompt`: at least one.
    pub prompts: Vec<Prompt>,
    /// `echo`: the output begins with the prompt.
    pub echo: bool,
    /// `add_special_tokens`: text prompts get the tokenizer's BOS; true if absent.
    pub add_special_tokens: bool,
}

/// Author of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// `system`.
    System,
    /// `developer`: templates see it as it is.
    Developer,
    /// `user`.
    User,
    /// `assistant`.
    Assistant,
    /// `tool`.
    Tool,
}

/// Body of `POST /v1/chat/completions`.
#[derive(Clone, Debug, PartialEq)]
pub struct ChatRequest {
    /// Common fields.
    pub common: Common,
    /// `messages`, checked: each an object with a known `role` and textual `content`.
    pub messages: Vec<Value>,
    /// `tools`; only the template sees them.
    pub tools: Option<Value>,
    /// `documents`; only the template sees them.
    pub documents: Option<Value>,
    /// `chat_template_kwargs`, free of the template's own variables.
    pub template_kwargs: Map<String, Value>,
    /// `add_generation_prompt`, true if absent.
    pub add_generation_prompt: bool,
    /// `add_special_tokens`, false if absent: templates write BOS themselves.
    pub add_special_tokens: bool,
}

impl Common {
    fn read(fields: &Fields<'_>, logprobs: Option<u32>) -> Result<Self, ApiError> {
        for (name, harmless, why) in UNSUPPORTED {
            fields.refuse(name, harmless, why)?;
        }
        response_format(fields)?;
        let stream = fields.boolean("stream")?.unwrap_or(false);
        let (mut include_usage, mut continuous_usage) = (false, false);
        if let Some(raw) = fields.raw("stream_options") {
            if !stream {
                let message = "stream_options is given without stream: true";
                return Err(ApiError::invalid("stream_options", message));
            }
            let options = Fields::nested(raw, "stream_options")?;
            let flag = |name: &str| {
                options
                    .boolean(name)
                    .map(|b| b.unwrap_or(false))
                    .map_err(|e| ApiError {
                        param: Some(format!("stream_options.{name}")),
                        ..e
                    })
            };
            include_usage = flag("include_usage")?;
            continuous_usage = flag("continuous_usage_stats")?;
        }
        let n = fields.integer("n", 1..=i64::from(MAX_N))?.unwrap_or(1);
        Ok(Self {
            model: fields.string("model")?,
            n: u32::try_from(n).unwrap_or(1),
            stream,
            include_usage,
            continuous_usage,
            sampling: SamplingOptions::read(fields)?,
            logprobs,
            prompt_logprobs: prompt_logprobs(fields, stream)?,
            cache_salt: cache_salt(fields)?,
            request_id: fields.string("request_id")?,
            return_token_ids: fields.boolean("return_token_ids")?.unwrap_or(false),
        })
    }
}

impl CompletionRequest {
    /// Reads a body. Errors name the field, its value and what is expected.
    pub fn parse(body: &[u8]) -> Result<Self, ApiError> {
        Self::read(&Fields::parse(body)?)
    }

    /// Reads a body whose top level is split already.
    pub fn read(fields: &Fields<'_>) -> Result<Self, ApiError> {
        for (name, harmless, why) in UNSUPPORTED_COMPLETION {
            fields.refuse(name, harmless, why)?;
        }
        let logprobs = fields.integer("logprobs", 0..=i64::from(MAX_LOGPROBS))?;
        let common = Common::read(fields, logprobs.and_then(|k| u32::try_from(k).ok()))?;
        let best_of = fields.count("best_of", 1, "n")?;
        if best_of.is_some_and(|best_of| best_of != common.n) {
            return Err(ApiError::invalid(
                "best_of",
                "best_of differs from n; only the same is supported",
            ));
        }
        Ok(Self {
            common,
            prompts: Prompt::read_all(fields)?,
            echo: fields.boolean("echo")?.unwrap_or(false),
            add_special_tokens: fields.boolean("add_special_tokens")?.unwrap_or(true),
        })
    }
}

impl ChatRequest {
    /// Reads a body. Errors name the field, its value and what is expected.
    pub fn parse(body: &[u8]) -> Result<Self, ApiError> {
        Self::read(&Fields::parse(body)?)
    }

    /// Reads a body whose top level is split already.
    pub fn read(fields: &Fields<'_>) -> Result<Self, ApiError> {
        for (name, harmless, why) in UNSUPPORTED_CHAT {
            fields.refuse(name, harmless, why)?;
        }
        for name in [
            "messages",
            "tools",
            "tool_choice",
            "documents",
            "chat_template_kwargs",
        ] {
            fields.check_values(name, MAX_VALUES)?;
        }
        let wanted = fields.boolean("logprobs")?.unwrap_or(false);
        let top = fields.integer("top_logprobs", 0..=i64::from(MAX_LOGPROBS))?;
        if !wanted && top.is_some_and(|k| k > 0) {
            return Err(ApiError::invalid(
                "top_logprobs",
                "top_logprobs is given without logprobs: true",
            ));
        }
        let logprobs = wanted.then(|| top.and_then(|k| u32::try_from(k).ok()).unwrap_or(0));
        let common = Common::read(fields, logprobs)?;
        modalities(fields)?;
        let messages = fields
            .list("messages", MAX_MESSAGES, message)?
            .unwrap_or_default();
        if messages.is_empty() {
            return Err(ApiError::invalid(
                "messages",
                "messages is missing or empty; at least one is expected",
            ));
        }
        Ok(Self {
            common,
            messages,
            tools: tools(fields)?,
            documents: fields
                .list("documents", MAX_PARTS, object)?
                .filter(|d| !d.is_empty())
                .map(Value::Array),
            template_kwargs: template_kwargs(fields)?,
            add_generation_prompt: fields.boolean("add_generation_prompt")?.unwrap_or(true),
            add_special_tokens: fields.boolean("add_special_tokens")?.unwrap_or(false),
        })
    }
}

impl Role {
    /// By its name in `messages[].role`.
    pub fn parse(name: &str) -> Option<Self> {
        Some(match name {
            "system" => Self::System,
            "developer" => Self::Developer,
            "user" => Self::User,
            "assistant" => Self::Assistant,
            "tool" => Self::Tool,
            _ => return None,
        })
    }
}

/// `kv_transfer_params` alone: they must be known even where the rest of a request is refused, so that
/// the KV they name is released.
pub fn kv_transfer_params(fields: &Fields<'_>) -> Result<Option<KvTransferParams>, ApiError> {
    const NAME: &str = "kv_transfer_params";
    let Some(raw) = fields.raw(NAME) else {
        return Ok(None);
    };
    if let Ok(params) = serde_json::from_str(raw.get()) {
        return Ok(Some(params));
    }
    // It is wrong somewhere: look for the field.
    let within = |e: ApiError| {
        let param = format!("{NAME}.{}", e.param.unwrap_or_default());
        ApiError::invalid(param, format!("{NAME}.{}", e.message))
    };
    let inner = Fields::nested(raw, NAME)?;
    for name in ["do_remote_decode", "do_remote_prefill"] {
        inner.boolean(name).map_err(within)?;
    }
    for name in ["remote_engine_id", "remote_request_id", "remote_host"] {
        inner.string(name).map_err(within)?;
    }
    for (name, most) in [
        ("remote_port", i64::from(u16::MAX)),
        ("remote_block_size", i64::from(u32::MAX)),
        ("remote_num_tokens", i64::from(u32::MAX)),
        ("last_token_id", i64::from(u32::MAX)),
    ] {
        inner.integer(name, 0..=most).map_err(within)?;
    }
    inner.token_ids("prompt_token_ids").map_err(within)?;
    fields.read(NAME, "an object of handoff parameters")
}

fn prompt_logprobs(fields: &Fields<'_>, stream: bool) -> Result<Option<u32>, ApiError> {
    let name = "prompt_logprobs";
    let k = fields.integer(name, 0..=i64::from(MAX_LOGPROBS))?;
    if stream && k.is_some() {
        let message =
            "prompt_logprobs is given with stream: true; send stream: false, or echo with logprobs";
        return Err(ApiError::invalid(name, message));
    }
    Ok(k.and_then(|k| u32::try_from(k).ok()))
}

fn cache_salt(fields: &Fields<'_>) -> Result<Option<String>, ApiError> {
    let name = "cache_salt";
    match fields.string(name)? {
        Some(salt) if salt.is_empty() || salt.len() > MAX_SALT_BYTES => Err(ApiError::invalid(
            name,
            format!(
                "{name} has {} bytes; 1 to {MAX_SALT_BYTES} are permitted",
                salt.len()
            ),
        )),
        salt => Ok(salt),
    }
}

fn response_format(fields: &Fields<'_>) -> Result<(), ApiError> {
    let Some(raw) = fields.raw("response_format") else {
        return Ok(());
    };
    let format = Fields::nested(raw, "response_format")?;
    match format.string("type")?.as_deref() {
        Some("text") => Ok(()),
        other => Err(ApiError::invalid(
            "response_format",
            format!(
                "response_format.type is {}; only \"text\" is supported: {NO_GRAMMAR}",
                other.map_or("missing".into(), |t| format!("{:?}", shown(t)))
            ),
        )),
    }
}

fn modalities(fields: &Fields<'_>) -> Result<(), ApiError> {
    let wanted: Vec<String> = fields
        .read("modalities", "a list of strings")?
        .unwrap_or_default();
    match wanted.iter().find(|m| *m != "text") {
        Some(other) => Err(ApiError::invalid(
            "modalities",
            format!(
                "modalities has {:?}; only \"text\" is supported",
                shown(other)
            ),
        )),
        None => Ok(()),
    }
}

/// Tools reach the template only where the answer is plain text anyway: calls are not parsed, and
/// markup of a call must not pass for content.
fn tools(fields: &Fields<'_>) -> Result<Option<Value>, ApiError> {
    let choice: Option<Value> = fields.read("tool_choice", "a string or an object")?;
    let tools = fields
        .list("tools", MAX_PARTS, object)?
        .filter(|tools| !tools.is_empty());
    match (&choice, &tools) {
        (Some(Value::String(name)), _) if name == "none" => Ok(tools.map(Value::Array)),
        (None, None) => Ok(None),
        (Some(Value::String(name)), None) if name == "auto" => Ok(None),
        _ => Err(ApiError::invalid(
            "tool_choice",
            format!(
                "tool_choice is {}; only \"none\" is supported with tools: tool calls are not parsed",
                choice.map_or_else(|| "absent".into(), |c| shown(&c.to_string()))
            ),
        )),
    }
}

fn template_kwargs(fields: &Fields<'_>) -> Result<Map<String, Value>, ApiError> {
    let kwargs: Map<String, Value> = fields
        .read("chat_template_kwargs", "an object")?
        .unwrap_or_default();
    match kwargs
        .keys()
        .find(|key| RESERVED_KWARGS.contains(&key.as_str()))
    {
        Some(key) => Err(ApiError::invalid(
            format!("chat_template_kwargs.{key}"),
            format!("chat_template_kwargs has {key:?}, which the request must not replace"),
        )),
        None => Ok(kwargs),
    }
}

fn object(raw: &RawValue, name: &str) -> Result<Value, ApiError> {
    read::<Map<String, Value>>(raw, name, "an object").map(Value::Object)
}

fn message(raw: &RawValue, name: &str) -> Result<Value, ApiError> {
    let mut message: Map<String, Value> = read(raw, name, "an object")?;
    let role = message.get("role").cloned().unwrap_or(Value::Null);
    if role.as_str().and_then(Role::parse).is_none() {
        return Err(ApiError::invalid(
            format!("{name}.role"),
            format!(
                "{name}.role is {}; system, developer, user, assistant and tool are known",
                shown(&role.to_string())
            ),
        ));
    }
    if role == "assistant" {
        tool_calls(&mut message, name)?;
    }
    let content = message.remove("content").unwrap_or(Value::Null);
    message.insert("content".into(), content_of(content, &role, name)?);
    Ok(message.into())
}

/// Null is legal where an assistant only called tools; templates want a string.
fn content_of(content: Value, role: &Value, name: &str) -> Result<Value, ApiError> {
    let param = format!("{name}.content");
    match content {
        Value::String(_) => Ok(content),
        Value::Null if role == "assistant" => Ok(Value::String(String::new())),
        Value::Array(parts) if parts.len() <= MAX_PARTS => {
            for (i, part) in parts.iter().enumerate() {
                if part["type"] != "text" || !part["text"].is_string() {
                    return Err(ApiError::invalid(
                        format!("{param}[{i}]"),
                        format!(
                            "{param}[{i}] is {}; only parts of type \"text\" are supported",
                            shown(&part.to_string())
                        ),
                    ));
                }
            }
            Ok(Value::Array(parts))
        }
        other => Err(ApiError::invalid(
            param.clone(),
            format!(
                "{param} is {}; a string or a list of at most {MAX_PARTS} text parts is expected",
                shown(&other.to_string())
            ),
        )),
    }
}

/// Null is the same as absent: templates test whether the key is there.
fn tool_calls(message: &mut Map<String, Value>, name: &str) -> Result<(), ApiError> {
    match message.get("tool_calls") {
        None => Ok(()),
        Some(Value::Null) => {
            message.remove("tool_calls");
            Ok(())
        }
        Some(Value::Array(calls)) if calls.iter().all(Value::is_object) => Ok(()),
        Some(other) => Err(ApiError::new(
            ErrorKind::InvalidRequest,
            format!(
                "{name}.tool_calls is {}; a list of objects is expected",
                shown(&other.to_string())
            ),
        )
        .with_param(format!("{name}.tool_calls"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn completion(body: &str) -> Result<CompletionRequest, ApiError> {
        CompletionRequest::parse(body.as_bytes())
    }

    fn chat(rest: &str) -> Result<ChatRequest, ApiError> {
        let body = format!(r#"{{"messages":[{{"role":"user","content":"hi"}}]{rest}}}"#);
        ChatRequest::parse(body.as_bytes())
    }

    #[test]
    fn a_wrong_handoff_parameter_is_named() {
        for (field, value) in [
            ("remote_port", "\"7100\""),
            ("remote_port", "70000"),
            ("remote_host", "1"),
            ("do_remote_prefill", "\"yes\""),
            ("remote_num_tokens", "-1"),
        ] {
            let body = format!(r#"{{"kv_transfer_params":{{"{field}":{value}}}}}"#);
            let fields = Fields::parse(body.as_bytes()).unwrap();
            let error = kv_transfer_params(&fields).unwrap_err();
            let name = format!("kv_transfer_params.{field}");
            assert_eq!(error.param.as_deref(), Some(name.as_str()));
            assert!(
                error.message.starts_with(&format!("{name} is {value}; ")),
                "{error}"
            );
        }
        let fields = Fields::parse(br#"{"kv_transfer_params":{"remote_port":7100,"x":[]}}"#);
        assert!(kv_transfer_params(&fields.unwrap()).unwrap().is_some());
    }

    #[test]
    fn a_field_of_very_many_values_is_refused_before_it_is_read() {
        let many = format!("[{}0]", "0,".repeat(MAX_VALUES));
        let text = many.replace(['[', ']'], "");
        for (name, value) in [
            ("chat_template_kwargs", format!(r#"{{"x":{many}}}"#)),
            ("documents", format!(r#"[{{"x":{many}}}]"#)),
        ] {
            let error = chat(&format!(r#","{name}":{value}"#)).unwrap_err();
            assert_eq!(error.param.as_deref(), Some(name));
        }
        let long = format!(r#","documents":[{{"text":"\"{text}"}}]"#);
        assert!(chat(&long).is_ok(), "a long text is one value");
    }

    fn param<T: std::fmt::Debug>(result: Result<T, ApiError>) -> String {
        result.unwrap_err().param.unwrap_or_default()
    }

    /// C5.13.
    #[test]
    fn nulls_and_unknown_fields_are_tolerated() {
        let nulls = chat(
            r#","stream":null,"logprobs":null,"stop":null,"max_tokens":null,"tools":null,"seed":null,
            "user":null,"response_format":null,"tool_choice":null,"kv_transfer_params":null,"x_y":1e400,
            "stream_options":null,"chat_template_kwargs":null,"n":null,"top_logprobs":null"#,
        );
        assert_eq!(nulls.unwrap(), chat("").unwrap());
        assert_eq!(
            chat(r#","tools":[],"min_tokens":0,"n":1.0,"user":"u""#).unwrap(),
            chat("").unwrap()
        );
    }

    #[test]
    fn what_is_not_built_is_refused_by_name() {
        for rest in [
            r#""suffix":"x""#,
            r#""best_of":3"#,
            r#""prompt_logprobs":21"#,
            r#""prompt_logprobs":1,"stream":true"#,
            r#""cache_salt":"""#,
            r#""cache_salt":1"#,
            r#""guided_json":{}"#,
            r#""response_format":{"type":"json_object"}"#,
            r#""use_beam_search":true"#,
            r#""n":1000000"#,
            r#""n":0"#,
            r#""logprobs":21"#,
            r#""logprobs":-1"#,
            r#""stream_options":{}"#,
            r#""echo":3"#,
        ] {
            let name = rest.split('"').nth(1).unwrap();
            assert_eq!(
                param(completion(&format!("{{\"prompt\":\"x\",{rest}}}"))),
                name
            );
        }
        let echo = r#"{"prompt":"x","echo":true,"logprobs":1,"max_tokens":0}"#;
        assert_eq!(
            completion(echo).unwrap().common.sampling.max_tokens,
            Some(0)
        );
        assert!(completion(r#"{"prompt":"x","best_of":2,"n":2,"suffix":""}"#).is_ok());
        for (rest, name) in [
            (r#","chat_template":"{{ 1 }}""#, "chat_template"),
            (
                r#","chat_template_kwargs":{"chat_template":"x"}"#,
                "chat_template_kwargs.chat_template",
            ),
            (
                r#","chat_template_kwargs":{"messages":[]}"#,
                "chat_template_kwargs.messages",
            ),
            (
                r#","chat_template_kwargs":{"tools":[]}"#,
                "chat_template_kwargs.tools",
            ),
            (
                r#","chat_template_kwargs":{"tokenize":true}"#,
                "chat_template_kwargs.tokenize",
            ),
            (
                r#","chat_template_kwargs":{"add_generation_prompt":1}"#,
                "chat_template_kwargs.add_generation_prompt",
            ),
            (r#","tools":[{"type":"function"}]"#, "tool_choice"),
            (
                r#","tools":[{"type":"function"}],"tool_choice":"auto""#,
                "tool_choice",
            ),
            (r#","tool_choice":"required""#, "tool_choice"),
            (r#","top_logprobs":2"#, "top_logprobs"),
            (r#","logprobs":true,"top_logprobs":21"#, "top_logprobs"),
            (r#","logprobs":1"#, "logprobs"),
            (r#","modalities":["audio"]"#, "modalities"),
            (r#","stream":"yes""#, "stream"),
            (
                r#","stream":true,"stream_options":{"include_usage":1}"#,
                "stream_options.include_usage",
            ),
        ] {
            assert_eq!(param(chat(rest)), name, "{rest}");
        }
    }

    /// C5.3.
    #[test]
    fn messages_are_checked() {
        for (messages, name) in [
            ("null", "messages"),
            ("[]", "messages"),
            ("\"x\"", "messages"),
            ("[1]", "messages[0]"),
            (r#"[{"content":"x"}]"#, "messages[0].role"),
            (r#"[{"role":"king","content":"x"}]"#, "messages[0].role"),
            (r#"[{"role":"user"}]"#, "messages[0].content"),
            (r#"[{"role":"user","content":5}]"#, "messages[0].content"),
            (
                r#"[{"role":"user","content":[{"type":"image_url"}]}]"#,
                "messages[0].content[0]",
            ),
            (
                r#"[{"role":"assistant","content":"","tool_calls":5}]"#,
                "messages[0].tool_calls",
            ),
        ] {
            let body = format!("{{\"messages\":{messages}}}");
            assert_eq!(
                param(ChatRequest::parse(body.as_bytes())),
                name,
                "{messages}"
            );
        }
        let body = br#"{"messages":[{"role":"assistant","content":null},
            {"role":"user","content":[{"type":"text","text":"a"}]}]}"#;
        let chat = ChatRequest::parse(body).unwrap();
        assert_eq!(chat.messages[0]["content"], "");
        assert_eq!(chat.messages[1]["content"][0]["text"], "a");
    }

    #[test]
    fn deep_nesting_is_an_error() {
        let deep = format!("{}1{}", "[".repeat(100_000), "]".repeat(100_000));
        assert_eq!(
            param(chat(&format!(",\"tools\":[{{\"x\":{deep}}}]"))),
            "tools[0]"
        );
        assert!(chat(&format!(",\"unknown\":{deep}")).is_ok());
    }

    #[test]
    fn tools_reach_the_template_when_no_call_can_come_back() {
        let chat = chat(r#","tools":[{"type":"function"}],"tool_choice":"none""#).unwrap();
        assert_eq!(chat.tools.unwrap()[0]["type"], "function");
    }
}
