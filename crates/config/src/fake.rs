use crate::LogFormat;
use crate::flag::{port, seconds};
use clap::{Args, ValueEnum};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;
use twinfer_protocol::Role;

/// Whose wire habits a fake worker has.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum, Serialize, Deserialize, JsonSchema,
)]
#[serde(rename_all = "kebab-case")]
pub enum Dialect {
    /// vLLM-Ascend 0.20.2 with MooncakeConnectorV1: flat block ids; params only for an answer that
    /// ended by its length.
    VllmAscend,
    /// vLLM with NixlConnector: block ids as a list per KV-cache group.
    Nixl,
    /// vLLM with MooncakeConnector: a transfer id of the router's, no handle; decode waits for prefill's KV. The
    /// bootstrap server is at the same port.
    Mooncake,
    /// vLLM-Ascend with MooncakeLayerwiseConnector: decode asks the metaserver for prefill, and waits.
    MooncakeLayerwise,
    /// twinfer: a superset of both, and the `/twinfer/*` routes.
    #[default]
    Twinfer,
}

/// What goes wrong, and for which requests.
///
/// Text form: `[FIRST[-[LAST]]=]KIND`, where requests of inference routes are counted from 1:
/// `status:503;retry-after=2` (every request), `3=cut:100` (the third), `2-5=hang:0`, `4-=empty`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct FakeFault {
    /// First request that suffers it, counted from 1.
    pub first: u64,
    /// Last request that suffers it.
    pub last: u64,
    /// What happens.
    pub kind: FaultKind,
}

/// What a fake worker does instead of a right answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FaultKind {
    /// `status:CODE[;retry-after=SECONDS][;body=TEXT]`: an error answer.
    Status {
        /// HTTP status.
        code: u16,
        /// `Retry-After` in seconds.
        retry_after: Option<u32>,
        /// Body; vLLM's error shape if absent.
        body: Option<String>,
    },
    /// `cut:N`: the connection is closed after N bytes of the answer, head included.
    Cut(usize),
    /// `reset:N`: the same by a TCP reset.
    Reset(usize),
    /// `hang:N`: nothing more after N bytes of the answer, head included; the connection stays open.
    Hang(usize),
    /// `error-event:N`: a stream carries an error event after N tokens, and ends.
    ErrorEvent(u32),
    /// `empty`: status 200 with an empty body.
    Empty,
    /// `no-params`: a prefill answer without `kv_transfer_params`.
    NoParams,
}

/// A scripted peer for tests, benchmarks and rehearsals: `twinfer fake`.
#[derive(Clone, Debug, PartialEq, Args, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, rename_all = "kebab-case", default)]
pub struct FakeConfig {
    /// `both`, `prefill` or `decode`.
    #[arg(long, default_value = "both", value_parser = |text: &str| text.parse::<Role>())]
    #[schemars(with = "String")]
    pub role: Role,

    /// Address to listen on.
    #[arg(long, default_value = "127.0.0.1")]
    pub host: String,

    /// Port to listen on; 0 picks a free one and prints it.
    #[arg(long, default_value_t = 0, value_parser = port)]
    pub port: u16,

    /// Whose wire habits it has.
    #[arg(long, value_enum, default_value_t)]
    pub dialect: Dialect,

    /// Model name it serves.
    #[arg(long, default_value = "fake")]
    pub model: String,

    /// Name of this instance; `fake-<role>-<port>` if absent.
    #[arg(long)]
    pub name: Option<String>,

    /// Longest input and output together, in tokens; a longer prompt is refused with 400.
    #[arg(long, default_value_t = 32768)]
    pub max_model_len: u32,

    /// Tokens per KV block.
    #[arg(long, default_value_t = 128)]
    pub block_size: u32,

    /// Host that handles name for the KV channel.
    #[arg(long, default_value = "127.0.0.1")]
    pub kv_host: String,

    /// Port that handles name for the KV channel. 0: its own HTTP port, where a fake decode worker
    /// then fetches (and so frees) what the prefill worker holds.
    #[arg(long, default_value_t = 0, value_parser = port)]
    pub kv_port: u16,

    /// Tensor-parallel size that handles name.
    #[arg(long, default_value_t = 1)]
    pub kv_tp_size: u32,

    /// Seconds to the first token, or to the answer of a prefill worker.
    #[arg(long, default_value_t = 0.0, value_parser = seconds)]
    pub ttft: f64,

    /// Seconds between tokens.
    #[arg(long, default_value_t = 0.0, value_parser = seconds)]
    pub token_time: f64,

    /// Tokens of an answer, unless the request's limit is lower.
    #[arg(long, default_value_t = 16)]
    pub tokens: u32,

    /// Tokens per event of a stream.
    #[arg(long, default_value_t = 1)]
    pub tokens_per_chunk: u32,

    /// Text of an answer, a token per word; `{prompt}` stands for the prompt. Numbered words if absent.
    #[arg(long)]
    pub text: Option<String>,

    /// The first token would end the answer unless the request forbids it by `min_tokens`.
    #[arg(long)]
    pub ends_at_once: bool,

    /// Further header of every answer, `Name: value`; repeat the flag.
    #[arg(long)]
    pub header: Vec<String>,

    /// What goes wrong: `[FIRST[-[LAST]]=]KIND` with KIND one of `status:CODE[;retry-after=S][;body=TEXT]`,
    /// `cut:BYTES`, `reset:BYTES`, `hang:BYTES`, `error-event:TOKENS`, `empty`, `no-params`; repeat the flag.
    #[arg(long, value_parser = |text: &str| text.parse::<FakeFault>())]
    #[schemars(with = "Vec<String>")]
    pub fault: Vec<FakeFault>,

    /// Requests and connection events kept for `/fake/requests` and `/fake/connections`.
    #[arg(long, default_value_t = 10_000)]
    pub record: usize,

    /// Form of log lines.
    #[arg(long, value_enum, default_value_t)]
    pub log_format: LogFormat,
}

impl Default for FakeConfig {
    fn default() -> Self {
        Self {
            role: Role::Both,
            host: "127.0.0.1".to_owned(),
            port: 0,
            dialect: Dialect::default(),
            model: "fake".to_owned(),
            name: None,
            max_model_len: 32768,
            block_size: 128,
            kv_host: "127.0.0.1".to_owned(),
            kv_port: 0,
            kv_tp_size: 1,
            ttft: 0.0,
            token_time: 0.0,
            tokens: 16,
            tokens_per_chunk: 1,
            text: None,
            ends_at_once: false,
            header: Vec::new(),
            fault: Vec::new(),
            record: 10_000,
            log_format: LogFormat::default(),
        }
    }
}

impl FakeFault {
    /// A fault of every request.
    pub fn always(kind: FaultKind) -> Self {
        Self {
            first: 1,
            last: u64::MAX,
            kind,
        }
    }

    /// A fault of the `nth` request, counted from 1.
    pub fn nth(nth: u64, kind: FaultKind) -> Self {
        Self {
            first: nth,
            last: nth,
            kind,
        }
    }

    /// Does the `nth` request suffer it?
    pub fn hits(&self, nth: u64) -> bool {
        (self.first..=self.last).contains(&nth)
    }
}

impl FromStr for FakeFault {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let starts_with_digit = text.starts_with(|c: char| c.is_ascii_digit());
        let (first, last, rest) = match text.split_once('=') {
            Some((range, rest)) if starts_with_digit => {
                let (first, last) = parse_range(range)?;
                (first, last, rest)
            }
            _ => (1, u64::MAX, text),
        };
        Ok(Self {
            first,
            last,
            kind: rest.parse()?,
        })
    }
}

impl FromStr for FaultKind {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let (head, options) = text
            .split_once(';')
            .map_or((text, None), |(h, o)| (h, Some(o)));
        let (name, number) = head
            .split_once(':')
            .map_or((head, None), |(n, a)| (n, Some(a)));
        if options.is_some() && name != "status" {
            return Err(format!(
                "fault {text:?}: only `status` takes options after `;`"
            ));
        }
        let need = |what: &str| {
            number
                .and_then(|n| n.parse::<u32>().ok())
                .ok_or_else(|| format!("fault {text:?}: `{name}` needs {what} after `:`"))
        };
        match name {
            "status" => {
                let code = need("a status code from 200 to 599")?;
                let code = u16::try_from(code)
                    .ok()
                    .filter(|c| (200..600).contains(c))
                    .ok_or_else(|| format!("fault {text:?}: status codes are 200 to 599"))?;
                let (retry_after, body) = parse_status_options(text, options)?;
                Ok(Self::Status {
                    code,
                    retry_after,
                    body,
                })
            }
            "cut" => Ok(Self::Cut(need("a number of bytes")? as usize)),
            "reset" => Ok(Self::Reset(need("a number of bytes")? as usize)),
            "hang" => Ok(Self::Hang(need("a number of bytes")? as usize)),
            "error-event" => Ok(Self::ErrorEvent(need("a number of tokens")?)),
            "empty" => Ok(Self::Empty),
            "no-params" => Ok(Self::NoParams),
            other => Err(format!(
                "fault {other:?} is unknown; allowed are status, cut, reset, hang, error-event, empty, no-params"
            )),
        }
    }
}

impl fmt::Display for FakeFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.first, self.last) {
            (1, u64::MAX) => {}
            (first, u64::MAX) => write!(f, "{first}-=")?,
            (first, last) if first == last => write!(f, "{first}=")?,
            (first, last) => write!(f, "{first}-{last}=")?,
        }
        self.kind.fmt(f)
    }
}

impl fmt::Display for FaultKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Status {
                code,
                retry_after,
                body,
            } => {
                write!(f, "status:{code}")?;
                if let Some(seconds) = retry_after {
                    write!(f, ";retry-after={seconds}")?;
                }
                if let Some(body) = body {
                    write!(f, ";body={body}")?;
                }
                Ok(())
            }
            Self::Cut(n) => write!(f, "cut:{n}"),
            Self::Reset(n) => write!(f, "reset:{n}"),
            Self::Hang(n) => write!(f, "hang:{n}"),
            Self::ErrorEvent(n) => write!(f, "error-event:{n}"),
            Self::Empty => f.write_str("empty"),
            Self::NoParams => f.write_str("no-params"),
        }
    }
}

impl TryFrom<String> for FakeFault {
    type Error = String;

    fn try_from(text: String) -> Result<Self, Self::Error> {
        text.parse()
    }
}

impl From<FakeFault> for String {
    fn from(fault: FakeFault) -> Self {
        fault.to_string()
    }
}

fn parse_range(range: &str) -> Result<(u64, u64), String> {
    let bad = || format!("fault range {range:?}; allowed are N, N-M and N-, with 1 <= N <= M");
    let number = |text: &str| text.parse::<u64>().map_err(|_| bad());
    let (first, last) = match range.split_once('-') {
        None => {
            let n = number(range)?;
            (n, n)
        }
        Some((first, "")) => (number(first)?, u64::MAX),
        Some((first, last)) => (number(first)?, number(last)?),
    };
    if first == 0 || first > last {
        return Err(bad());
    }
    Ok((first, last))
}

fn parse_status_options(
    fault: &str,
    options: Option<&str>,
) -> Result<(Option<u32>, Option<String>), String> {
    let mut rest = options.unwrap_or_default();
    let mut retry_after = None;
    if let Some(value) = rest.strip_prefix("retry-after=") {
        let (seconds, tail) = value.split_once(';').unwrap_or((value, ""));
        let seconds = seconds
            .parse()
            .map_err(|_| format!("fault {fault:?}: retry-after is a number of seconds"))?;
        retry_after = Some(seconds);
        rest = tail;
    }
    if rest.is_empty() {
        return Ok((retry_after, None));
    }
    match rest.strip_prefix("body=") {
        Some(body) => Ok((retry_after, Some(body.to_owned()))),
        None => Err(format!(
            "fault {fault:?}: options are retry-after=SECONDS, then body=TEXT"
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fault_texts_round_trip() {
        for text in [
            "status:503",
            "status:429;retry-after=2",
            "status:400;retry-after=1;body={\"a\":\"b;c=d\"}",
            "status:400;body=x",
            "3=cut:100",
            "2-5=reset:0",
            "4-=hang:7",
            "error-event:3",
            "1=empty",
            "no-params",
        ] {
            let fault: FakeFault = text.parse().expect(text);
            assert_eq!(fault.to_string(), text);
        }
    }

    #[test]
    fn bad_fault_texts_name_what_is_allowed() {
        for text in [
            "",
            "boom",
            "cut",
            "cut:x",
            "status:99",
            "status:503;x=1",
            "0=empty",
            "5-2=empty",
            "cut:1;body=x",
        ] {
            let error = text.parse::<FakeFault>().expect_err(text);
            assert!(error.contains("fault"), "{text}: {error}");
        }
    }
}
