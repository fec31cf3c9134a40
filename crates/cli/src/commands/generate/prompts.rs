//! Lines of a file to requests of the engine.

use super::Place;
use crate::exit::{Code, Failure};
use serde_json::{Value, json};
use std::io::Read;
use std::path::Path;
use std::sync::Arc;
use twinfer_config::{GenerateConfig, LineFormat};
use twinfer_engine::{KvSource, Request, RequestId, SamplingParams, check_length, check_prompt};
use twinfer_protocol::openai::{ChatRequest, Common, CompletionRequest, Prompt, SamplingOptions};
use twinfer_protocol::{ApiError, TokenId};
use twinfer_text::{ChatTemplate, Tokenizer};

/// A line with its number, from 1.
pub(super) struct Line {
    number: usize,
    what: What,
}

enum What {
    Text(String),
    Completion(Box<CompletionRequest>),
    Chat(Box<ChatRequest>),
}

/// A prompt.
struct Given<'l> {
    ids: Arc<[TokenId]>,
    /// Its text, if the output is to begin with it.
    echo: Option<String>,
    /// The request's own fields.
    common: Option<&'l Common>,
}

/// Larger files are no lists of prompts.
const MAX_BYTES: u64 = 1 << 30;

/// Reads a file; `-` is standard input. Empty lines are skipped.
pub(super) fn read(path: &Path, form: LineFormat) -> Result<Vec<Line>, Failure> {
    let wrong = |error: &dyn std::fmt::Display| {
        Failure::new(Code::Config, format!("{}: {error}", path.display()))
    };
    let mut text = String::new();
    let read = if path == Path::new("-") {
        std::io::stdin()
            .lock()
            .take(MAX_BYTES + 1)
            .read_to_string(&mut text)
    } else {
        std::fs::File::open(path)
            .and_then(|file| file.take(MAX_BYTES + 1).read_to_string(&mut text))
    };
    if read.map_err(|error| wrong(&error))? as u64 > MAX_BYTES {
        return Err(wrong(&format!("more than {MAX_BYTES} bytes")));
    }
    let mut lines = Vec::new();
    for (index, line) in text
        .lines()
        .enumerate()
        .filter(|(_, line)| !line.trim().is_empty())
    {
        let number = index + 1;
        let what = match form {
            LineFormat::Text => What::Text(line.to_owned()),
            LineFormat::Jsonl => {
                json_line(line).map_err(|error| wrong(&format!("line {number}: {error}")))?
            }
        };
        lines.push(Line { number, what });
    }
    if lines.is_empty() {
        return Err(wrong(&"there is no prompt in it"));
    }
    Ok(lines)
}

fn json_line(line: &str) -> Result<What, String> {
    let value: Value = serde_json::from_str(line).map_err(|error| format!("not JSON: {error}"))?;
    match value {
        Value::String(text) => Ok(What::Text(text)),
        Value::Object(object) if object.contains_key("messages") => {
            ChatRequest::parse(line.as_bytes())
                .map(|chat| What::Chat(Box::new(chat)))
                .map_err(|error| error.message)
        }
        Value::Object(_) => CompletionRequest::parse(line.as_bytes())
            .map(|completion| What::Completion(Box::new(completion)))
            .map_err(|error| error.message),
        _ => Err("a string or an object with `prompt` or `messages` is expected".to_owned()),
    }
}

impl Given<'_> {
    /// Alternatives to compute per prompt token: those asked for, or those of the output where the prompt is echoed.
    fn scores(&self, max_tokens: u32) -> Option<u32> {
        let common = self.common?;
        let echoed = common.logprobs.filter(|_| self.echo.is_some());
        // Nothing else to compute: the engine's word for a request without output.
        let nothing = (max_tokens == 0).then_some(0);
        common.prompt_logprobs.max(echoed).or(nothing)
    }
}

/// Makes requests.
pub(super) struct Source<'a> {
    pub(super) config: &'a GenerateConfig,
    pub(super) tokenizer: &'a Tokenizer,
    pub(super) template: &'a ChatTemplate,
    pub(super) max_len: u32,
    pub(super) vocab: usize,
}

impl Source<'_> {
    /// A request per prompt and choice, checked; its id is its index. The first mistake names its line.
    pub(super) fn requests(&self, lines: &[Line]) -> Result<(Vec<Request>, Vec<Place>), Failure> {
        let mut requests = Vec::new();
        let mut places = Vec::new();
        let mut shortened = 0u64;
        for line in lines {
            let wrong = |error: ApiError| {
                Failure::new(
                    Code::Config,
                    format!(
                        "{}: line {}: {}",
                        self.config.prompts.display(),
                        line.number,
                        error.message
                    ),
                )
            };
            for (index, given) in self.prompts(line).map_err(wrong)?.into_iter().enumerate() {
                let Given {
                    ids: prompt,
                    echo,
                    common,
                } = &given;
                let choices = common.map_or(1, |common| common.n);
                let leader = (choices > 1).then_some(RequestId(requests.len() as u64));
                for choice in 0..choices {
                    let params = self.params(&given, choice).map_err(wrong)?;
                    self.check(prompt, &params).map_err(wrong)?;
                    let own = common.and_then(|common| common.sampling.max_tokens);
                    if own.is_none() && params.max_tokens < self.config.max_tokens {
                        shortened += 1;
                    }
                    places.push(Place {
                        line: line.number,
                        prompt: index,
                        choice,
                        ids: Arc::clone(prompt),
                        echo: echo.clone(),
                        logprobs: common.is_some_and(|common| common.logprobs.is_some()),
                        prompt_logprobs: common.and_then(|common| common.prompt_logprobs),
                    });
                    requests.push(Request {
                        id: RequestId(requests.len() as u64),
                        prompt: Arc::clone(prompt),
                        params,
                        kv: KvSource::Compute,
                        hold_kv: false,
                        cache_salt: None,
                        leader,
                        resumed: 0,
                    });
                }
            }
        }
        if shortened > 0 {
            tracing::warn!(
                "--max-tokens is {}; the context of {} tokens has room for fewer behind {shortened} of {} prompts, \
                 which get as many as fit",
                self.config.max_tokens,
                self.max_len,
                requests.len()
            );
        }
        Ok((requests, places))
    }

    /// The prompts of a line.
    fn prompts<'l>(&self, line: &'l Line) -> Result<Vec<Given<'l>>, ApiError> {
        let encode = |text: &str, special| {
            self.tokenizer
                .encode(text, special)
                .map(Arc::<[TokenId]>::from)
                .map_err(ApiError::from)
        };
        let plain = |ids, common| Given {
            ids,
            echo: None,
            common,
        };
        match &line.what {
            What::Text(text) if self.config.chat => {
                let messages = json!([{"role": "user", "content": text}]);
                let rendered = self.template.render(&messages, true, None, None)?;
                Ok(vec![plain(encode(&rendered, false)?, None)])
            }
            What::Text(text) => Ok(vec![plain(encode(text, true)?, None)]),
            What::Chat(chat) => {
                let mut kwargs = chat.template_kwargs.clone();
                if let Some(documents) = &chat.documents {
                    kwargs.insert("documents".to_owned(), documents.clone());
                }
                let messages = Value::Array(chat.messages.clone());
                let rendered = self.template.render(
                    &messages,
                    chat.add_generation_prompt,
                    chat.tools.as_ref(),
                    Some(&kwargs),
                )?;
                let ids = encode(&rendered, chat.add_special_tokens)?;
                Ok(vec![plain(ids, Some(&chat.common))])
            }
            What::Completion(completion) => completion
                .prompts
                .iter()
                .map(|prompt| {
                    let ids = match prompt {
                        Prompt::Text(text) => encode(text, completion.add_special_tokens)?,
                        Prompt::Ids(ids) => Arc::from(ids.as_slice()),
                    };
                    let echo = match prompt {
                        _ if !completion.echo => None,
                        Prompt::Text(text) => Some(text.clone()),
                        Prompt::Ids(ids) => Some(self.tokenizer.decode(ids, false)?),
                    };
                    let common = Some(&completion.common);
                    Ok(Given { ids, echo, common })
                })
                .collect(),
        }
    }

    /// The request's own values, else those of the flags.
    fn params(&self, given: &Given<'_>, choice: u32) -> Result<SamplingParams, ApiError> {
        let (flags, common) = (self.config, given.common);
        let none = SamplingOptions {
            skip_special_tokens: true,
            ..SamplingOptions::default()
        };
        let own = common.map_or(&none, |common| &common.sampling);
        let room = self
            .max_len
            .saturating_sub(u32::try_from(given.ids.len()).unwrap_or(u32::MAX))
            .max(1);
        let max_tokens = own.max_tokens.unwrap_or_else(|| flags.max_tokens.min(room));
        let bad_words = self.tokenizer.word_forms(&own.bad_words)?;
        Ok(SamplingParams {
            temperature: own.temperature.unwrap_or(flags.temperature),
            top_p: own.top_p.unwrap_or(flags.top_p),
            top_k: own.top_k.unwrap_or(flags.top_k),
            min_p: own.min_p.unwrap_or(0.0),
            repetition_penalty: own.repetition_penalty.unwrap_or(1.0),
            frequency_penalty: own.frequency_penalty.unwrap_or(0.0),
            presence_penalty: own.presence_penalty.unwrap_or(0.0),
            logit_bias: own.logit_bias.clone(),
            bad_words,
            allowed_token_ids: own.allowed_token_ids.clone(),
            seed: own.seed.unwrap_or(flags.seed),
            choice,
            max_tokens,
            min_tokens: own.min_tokens,
            ignore_eos: own.ignore_eos || flags.ignore_eos,
            stop: own.stop.clone(),
            stop_token_ids: own.stop_token_ids.clone(),
            include_stop_str_in_output: own.include_stop_str_in_output,
            logprobs: common.and_then(|common| common.logprobs),
            prompt_logprobs: given.scores(max_tokens),
            skip_special_tokens: own.skip_special_tokens,
        })
    }

    fn check(&self, prompt: &[TokenId], params: &SamplingParams) -> Result<(), ApiError> {
        check_prompt(prompt, self.vocab)?;
        params.validate(self.vocab)?;
        check_length(prompt.len(), params.max_tokens, self.max_len)
    }
}
