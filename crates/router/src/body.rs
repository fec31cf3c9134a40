//! Request bodies: the top level of the JSON object is cut into keys and values once; values that
//! nobody edits reach the instances byte for byte.

use crate::policy::Work;
use bytes::{BufMut, Bytes, BytesMut};
use serde::de::IgnoredAny;
use std::borrow::Cow;
use std::hash::{DefaultHasher, Hasher};
use std::ops::Range;
use twinfer_protocol::openai::cut_object;
use twinfer_protocol::{ApiError, ErrorKind, RESUME_FIELD};

/// Deepest nesting. Instances written in Python give up at about a thousand.
const MAX_DEPTH: usize = 256;

/// `kv_transfer_params` of the prefill leg: the receiver keeps the KV; nothing is known of a remote.
const PREFILL_PARAMS: &str = r#"{"do_remote_decode":true,"do_remote_prefill":false,"remote_engine_id":null,"remote_block_ids":null,"remote_host":null,"remote_port":null}"#;
/// Bytes of text that make a token, about.
const TOKEN_BYTES: u64 = 4;
/// Bytes of a prompt that one key stands for: some blocks of KV.
const PREFIX_BLOCK: usize = 256;
/// Blocks that are looked at.
const MAX_PREFIX_BLOCKS: usize = 512;
const KV_PARAMS: &str = "kv_transfer_params";

/// A JSON object, its values still as they came.
#[derive(Clone, Debug)]
pub(crate) struct JsonObject {
    bytes: Bytes,
    fields: Vec<Field>,
}

#[derive(Clone, Debug)]
struct Field {
    key: String,
    value: Range<usize>,
}

/// What becomes of one field of a copy.
enum Edit<'a> {
    Keep,
    Drop,
    Set(&'a str),
}

impl JsonObject {
    /// Cuts a body.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidRequest`]: those of [`cut_object`], or nested too deep.
    pub(crate) fn parse(bytes: Bytes) -> Result<Self, ApiError> {
        let start = bytes.as_ptr() as usize;
        let fields = cut_object(&bytes)?
            .into_iter()
            .map(|(key, raw)| {
                let from = raw.get().as_ptr() as usize - start;
                Field {
                    key: key.into_owned(),
                    value: from..from + raw.get().len(),
                }
            })
            .collect();
        if nested_deeper_than(MAX_DEPTH, &bytes) {
            return Err(ApiError::new(
                ErrorKind::InvalidRequest,
                format!("the body is nested deeper than {MAX_DEPTH} levels"),
            ));
        }
        Ok(Self { bytes, fields })
    }

    /// A value as it came.
    pub(crate) fn get(&self, key: &str) -> Option<&str> {
        self.field(key).map(|field| self.text(field))
    }

    /// A value as a slice of the body.
    pub(crate) fn slice(&self, key: &str) -> Option<Bytes> {
        self.field(key)
            .map(|field| self.bytes.slice(field.value.clone()))
    }

    /// A string value; none if absent, null or no string.
    pub(crate) fn string(&self, key: &str) -> Option<Cow<'_, str>> {
        self.get(key)
            .and_then(|text| serde_json::from_str(text).ok())
    }

    /// Does `prompt` hold several prompts? One handle covers one prompt only.
    pub(crate) fn has_several_prompts(&self) -> bool {
        let Some(inner) = self.get("prompt").and_then(|text| text.strip_prefix('[')) else {
            return false;
        };
        inner.trim_start().starts_with(['"', '['])
            && self
                .get("prompt")
                .and_then(|text| serde_json::from_str::<Vec<IgnoredAny>>(text).ok())
                .is_some_and(|prompts| prompts.len() > 1)
    }

    /// Number of token ids, if `prompt` is a list of them.
    pub(crate) fn prompt_ids(&self) -> Option<u64> {
        let inner = self.get("prompt")?.strip_prefix('[')?.trim_start();
        let ids = inner.starts_with(|first: char| first.is_ascii_digit());
        ids.then(|| 1 + inner.bytes().filter(|&byte| byte == b',').count() as u64)
    }

    /// What it costs an instance; with the hashes of its prompt if some policy looks at them.
    pub(crate) fn work(&self, with_prefix: bool) -> Work {
        let text = self.get("messages").or_else(|| self.get("prompt"));
        let text = text.unwrap_or_default();
        let estimate = text.len() as u64 / TOKEN_BYTES;
        Work {
            prompt: self.prompt_ids().unwrap_or(estimate),
            bytes: self.bytes.len() as u64,
            prefix: match with_prefix {
                true => prefix_keys(text.as_bytes()),
                false => Vec::new(),
            },
        }
    }

    /// The body for an instance that does all of the request: what clients may not send is gone.
    pub(crate) fn plain(&self) -> Bytes {
        if self.field(KV_PARAMS).is_none() && self.field(RESUME_FIELD).is_none() {
            return self.bytes.clone();
        }
        self.edited(without_ours, &[])
    }

    /// Its length in bytes.
    pub(crate) fn len(&self) -> usize {
        self.bytes.len()
    }

    /// The body for an instance that goes on with a stream alone.
    pub(crate) fn plain_resumed(&self, resume: &str) -> Bytes {
        self.edited(without_ours, &[(RESUME_FIELD, resume)])
    }

    /// The body for the prefill leg: one token, no stream, KV kept; of a stream that goes on, that of its output too.
    pub(crate) fn for_prefill(&self, resume: Option<&str>) -> Bytes {
        self.prefill_body(PREFILL_PARAMS, resume)
    }

    /// The same, with parameters that name the transfer.
    pub(crate) fn for_prefill_with(&self, params: &str) -> Bytes {
        self.prefill_body(params, None)
    }

    fn prefill_body(&self, params: &str, resume: Option<&str>) -> Bytes {
        let edit = |key: &str| match key {
            "max_tokens" | "min_tokens" | "stream" | "stream_options" | KV_PARAMS
            | RESUME_FIELD => Edit::Drop,
            // Scores of the prompt are decode's to give; here they would only make the answer long.
            "echo" | "prompt_logprobs" => Edit::Drop,
            "max_completion_tokens" | "n" | "best_of" => Edit::Set("1"),
            _ => Edit::Keep,
        };
        // A minimum of one keeps an end token from ending the answer: some connectors export KV only
        // of an answer that ended by its length.
        let added = [
            ("max_tokens", "1"),
            ("min_tokens", "1"),
            ("stream", "false"),
            (KV_PARAMS, params),
            (RESUME_FIELD, resume.unwrap_or_default()),
        ];
        let used = added.len() - usize::from(resume.is_none());
        self.edited(edit, &added[..used])
    }

    /// The body for the decode leg: as the client sent it, with prefill's parameters.
    pub(crate) fn for_decode(&self, params: &str, resume: Option<&str>) -> Bytes {
        let added = [
            (KV_PARAMS, params),
            (RESUME_FIELD, resume.unwrap_or_default()),
        ];
        let used = added.len() - usize::from(resume.is_none());
        self.edited(without_ours, &added[..used])
    }

    fn field(&self, key: &str) -> Option<&Field> {
        self.fields.iter().find(|field| field.key == key)
    }

    fn text(&self, field: &Field) -> &str {
        // The ranges come from a text that was checked.
        self.bytes
            .get(field.value.clone())
            .and_then(|b| std::str::from_utf8(b).ok())
            .unwrap_or("null")
    }

    fn edited<'a>(&'a self, edit: impl Fn(&str) -> Edit<'a>, added: &[(&str, &'a str)]) -> Bytes {
        let extra: usize = added
            .iter()
            .map(|(key, value)| key.len() + value.len() + 4)
            .sum();
        let mut out = BytesMut::with_capacity(self.bytes.len() + extra + 2 * self.fields.len());
        out.put_u8(b'{');
        for field in &self.fields {
            let value = match edit(&field.key) {
                Edit::Keep => self.bytes.get(field.value.clone()).unwrap_or_default(),
                Edit::Set(value) => value.as_bytes(),
                Edit::Drop => continue,
            };
            put_field(&mut out, &field.key, value);
        }
        for (key, value) in added {
            put_field(&mut out, key, value.as_bytes());
        }
        out.put_u8(b'}');
        out.freeze()
    }
}

/// Keys of the full blocks of a prompt, each over all before it. A chat's further turn begins with the text of all turns
/// before, so it begins with their keys.
fn prefix_keys(text: &[u8]) -> Vec<u64> {
    let mut hasher = DefaultHasher::new();
    let blocks = text.chunks_exact(PREFIX_BLOCK).take(MAX_PREFIX_BLOCKS);
    let key = |block: &[u8]| {
        hasher.write(block);
        hasher.finish()
    };
    blocks.map(key).collect()
}

/// Drops what only the router may say to an instance.
fn without_ours<'a>(key: &str) -> Edit<'a> {
    match key {
        KV_PARAMS | RESUME_FIELD => Edit::Drop,
        _ => Edit::Keep,
    }
}

fn put_field(out: &mut BytesMut, key: &str, value: &[u8]) {
    if out.len() > 1 {
        out.put_u8(b',');
    }
    // Writing a string to memory does not fail.
    let _ = serde_json::to_writer((&mut *out).writer(), key);
    out.put_u8(b':');
    out.put_slice(value);
}

/// Looks at brackets outside of strings; the text is valid JSON.
fn nested_deeper_than(limit: usize, text: &[u8]) -> bool {
    let mut depth = 0usize;
    let mut in_string = false;
    let mut escaped = false;
    for &byte in text {
        if in_string {
            match byte {
                _ if escaped => escaped = false,
                b'\\' => escaped = true,
                b'"' => in_string = false,
                _ => {}
            }
            continue;
        }
        match byte {
            b'"' => in_string = true,
            b'{' | b'[' => {
                depth += 1;
                if depth > limit {
                    return true;
                }
            }
            b'}' | b']' => depth = depth.saturating_sub(1),
            _ => {}
        }
    }
    false
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use serde_json::{Value, json};

    fn object(text: &str) -> JsonObject {
        JsonObject::parse(Bytes::copy_from_slice(text.as_bytes())).expect(text)
    }

    fn message(bytes: &[u8]) -> String {
        JsonObject::parse(Bytes::copy_from_slice(bytes))
            .expect_err("refused")
            .message
    }

    #[test]
    fn c3_17_bodies_that_are_no_object_are_refused_with_the_reason() {
        assert!(message(b"").contains("empty"));
        assert!(message(b" \n").contains("empty"));
        assert!(message(b"[]").contains("object"));
        assert!(message(b"\"a\"").contains("object"));
        assert!(message(b"{\"a\":1").contains("not valid JSON"));
        assert!(message(b"{\"a\":\xff}").contains("UTF-8"));
        assert!(message(b"{} x").contains("not valid JSON"));
        assert!(message(b"{\"a\":1,\"\\u0061\":2}").contains("twice"));
        let deep = format!("{{\"a\":{}{}}}", "[".repeat(100_000), "]".repeat(100_000));
        assert!(message(deep.as_bytes()).contains("deeper"));
        let wide: Vec<String> = (0..2000).map(|i| format!("\"k{i}\":0")).collect();
        assert!(message(format!("{{{}}}", wide.join(",")).as_bytes()).contains("1024 keys"));
    }

    #[test]
    fn brackets_in_strings_are_no_nesting() {
        let text = format!("{{\"a\":\"{}\\\"{}\"}}", "[".repeat(1000), "{".repeat(1000));
        object(&text);
    }

    #[test]
    fn prefill_gets_one_token_by_every_limit_and_a_fixed_order() {
        let body = object(
            r#"{"model":"m","prompt":"p","max_tokens":500,"min_tokens":100,"max_completion_tokens":500,"n":3,"stream":true,"stream_options":{"include_usage":true},"kv_transfer_params":{"remote_host":"evil"},"x_y":1e400}"#,
        );
        assert_eq!(
            body.for_prefill(None),
            concat!(
                r#"{"model":"m","prompt":"p","max_completion_tokens":1,"n":1,"x_y":1e400,"max_tokens":1,"min_tokens":1,"stream":false,"#,
                r#""kv_transfer_params":{"do_remote_decode":true,"do_remote_prefill":false,"remote_engine_id":null,"remote_block_ids":null,"remote_host":null,"remote_port":null}}"#
            )
        );
    }

    #[test]
    fn a_body_without_client_params_is_passed_as_it_came() {
        let text = "{ \"prompt\" : \"p\" , \"seed\" : 9223372036854775808 }";
        assert_eq!(object(text).plain(), text);
        let cleaned = object(r#"{"a":0.1,"kv_transfer_params":{"x":1},"b":2}"#).plain();
        assert_eq!(cleaned, r#"{"a":0.1,"b":2}"#);
    }

    #[test]
    fn several_prompts_are_seen_as_such() {
        for (prompt, several) in [
            (r#""a""#, false),
            ("[1,2,3]", false),
            (r#"["a"]"#, false),
            (r#"[ "a" , "b" ]"#, true),
            ("[[1],[2]]", true),
            ("[[1,2]]", false),
            ("[]", false),
            ("null", false),
        ] {
            assert_eq!(
                object(&format!("{{\"prompt\":{prompt}}}")).has_several_prompts(),
                several,
                "{prompt}"
            );
        }
    }

    proptest! {
        #[test]
        fn edits_keep_every_other_value_byte_for_byte(
            fields in proptest::collection::btree_map("x[a-z\"\\\\é]{0,6}", "(1e400|0\\.10|-0|\"é\\\\n\"|\\[1, 2\\]|\\{\"a\": null\\}|18446744073709551616)", 0..12),
            sent in proptest::option::of("\\{\"evil\":1\\}"),
        ) {
            let mut parts: Vec<String> =
                fields.iter().map(|(k, v)| format!("{} : {v}", Value::from(k.as_str()))).collect();
            parts.extend(sent.map(|v| format!("\"kv_transfer_params\": {v}")));
            let body = object(&format!("{{{}}}", parts.join(" , ")));
            for copy in [body.plain(), body.for_decode("{\"h\":1}", None), body.for_prefill(None)] {
                let copy = object(std::str::from_utf8(&copy).expect("UTF-8"));
                for (key, value) in &fields {
                    prop_assert_eq!(copy.get(key), Some(value.as_str()));
                }
            }
            let plain = body.plain();
            let plain = object(std::str::from_utf8(&plain).expect("UTF-8"));
            prop_assert_eq!(plain.get("kv_transfer_params"), None);
        }

        #[test]
        fn foreign_bytes_never_panic(bytes in proptest::collection::vec(any::<u8>(), 0..64)) {
            let _ = JsonObject::parse(Bytes::from(bytes));
        }
    }

    #[test]
    fn decode_gets_the_handle_verbatim() {
        let handle = r#"{"remote_block_ids": [[17]],"x":1.0}"#;
        let out = object(r#"{"prompt":"p","kv_transfer_params":{"a":1}}"#).for_decode(handle, None);
        assert_eq!(
            out,
            format!("{{\"prompt\":\"p\",\"kv_transfer_params\":{handle}}}")
        );
        let read: Value = serde_json::from_slice(&out).expect("JSON");
        assert_eq!(read["kv_transfer_params"]["x"], json!(1.0));
    }
}
