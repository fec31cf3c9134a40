//! `twinfer generate`: prompts from a file through the engine in this process.

mod prompts;
mod ranks;

use crate::exit::{Code, Failure, Outcome};
use crate::{logging, output, progress};
use prompts::Source;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use twinfer_config::model::parse_bytes;
use twinfer_config::ranges::THREADS;
use twinfer_config::{GenerateConfig, LineFormat, Quantization};
use twinfer_deploy::CoreSet;
use twinfer_engine::exchange::RankLink;
use twinfer_engine::{
    Engine, EngineConfig, FinishReason, GenerateError, Generated, KvMemory, LoadOptions, Request,
    generate, load, model_texts,
};
use twinfer_protocol::{ApiError, TokenId};
use twinfer_text::{ChatTemplate, Tokenizer};
use twinfer_worker::{PromptLogprobs, Scored, shown_logprob};

pub(crate) fn run(config: &GenerateConfig) -> Outcome {
    logging::start(config.log_format);
    super::check_threads(config.threads, config.cpus.as_deref())?;
    let is_jsonl = |path: &Path| {
        path.extension()
            .is_some_and(|extension| extension == "jsonl")
    };
    let input = config.input.unwrap_or(if is_jsonl(&config.prompts) {
        LineFormat::Jsonl
    } else {
        LineFormat::Text
    });
    let output = config.output.unwrap_or(input);
    // Prompts first: a mistake in them should not wait for the model.
    let lines = prompts::read(&config.prompts, input)?;
    let texts = model_texts(&config.model).map_err(|error| bad_model(&error))?;
    let tokenizer = Arc::new(Tokenizer::of(&texts).map_err(|error| bad_model(&error))?);
    let template = ChatTemplate::of(&texts, &tokenizer).map_err(|error| bad_model(&error))?;
    let mut printer = Printer::new(output, &tokenizer);
    if config.dp > 1 {
        let links = twinfer_worker::ranks_in_process(config.dp)
            .map_err(|error| Failure::failed(format!("ranks: {error}")))?;
        return ranks::run(config, (&tokenizer, &template), &lines, printer, links);
    }
    let mut engine = engine(config, &tokenizer, None)?;
    let shape = (engine.max_len(), engine.vocab_size());
    let (requests, places) = requests_of(config, (&tokenizer, &template), shape, &lines)?;
    printer.begin(places);
    let concurrency = config.max_num_seqs as usize;
    let generated = generate(&mut engine, requests, concurrency, |result| {
        printer.take(result);
    });
    match generated {
        Ok(_) => printer.end(),
        Err(error) => {
            let failure = printer.named(&error);
            printer.end().and(Err(failure))
        }
    }
}

fn bad_model(error: &dyn std::fmt::Display) -> Failure {
    Failure::new(Code::Config, error)
}

fn failed(error: &GenerateError) -> Failure {
    Failure::failed(error)
}

/// The requests of all lines, for sequences of so many tokens of so many.
fn requests_of(
    config: &GenerateConfig,
    (tokenizer, template): (&Arc<Tokenizer>, &ChatTemplate),
    (max_len, vocab): (u32, usize),
    lines: &[prompts::Line],
) -> Result<(Vec<Request>, Vec<Place>), Failure> {
    let source = Source {
        config,
        tokenizer,
        template,
        max_len,
        vocab,
    };
    source.requests(lines)
}

/// Loads the model, with a bar; as one of several ranks with its share of threads, cores and memory.
fn engine(
    config: &GenerateConfig,
    tokenizer: &Arc<Tokenizer>,
    rank: Option<(&Arc<RankLink>, usize)>,
) -> Result<Engine, Failure> {
    let usage = |flag: &str, error: String| Failure::new(Code::Usage, format!("--{flag}: {error}"));
    let cpus = match &config.cpus {
        None => None,
        Some(text) => Some(
            CoreSet::parse(text)
                .map_err(|error| usage("cpus", error))?
                .0,
        ),
    };
    let permitted = twinfer_sys::available_cpus()
        .map_err(|error| Failure::failed(format!("permitted cores: {error}")))?;
    let cpus: Option<Vec<usize>> =
        cpus.map(|cores| cores.into_iter().map(|core| core as usize).collect());
    if let Some(missing) = cpus.iter().flatten().find(|core| !permitted.contains(core)) {
        return Err(usage(
            "cpus",
            format!("core {missing} is not permitted to this process"),
        ));
    }
    let cores = cpus.as_ref().map_or(permitted.len(), Vec::len);
    let cores = cores.clamp(1, *THREADS.end() as usize);
    let threads = config.threads.map_or(cores, |threads| threads as usize);
    let ranks = config.dp.max(1) as usize;
    let (threads, cpus) = match (rank, cpus) {
        (None, cpus) => (threads, cpus),
        // With fewer cores than ranks none has one of its own.
        (Some((_, rank)), Some(cpus)) if cpus.len() >= ranks => {
            let own = cpus[ranks::part(cpus.len(), rank, ranks)].to_vec();
            ((threads / ranks).clamp(1, own.len()), Some(own))
        }
        (Some(_), _) => ((threads / ranks).max(1), None),
    };
    let kv = match &config.kv_cache_memory {
        None => KvMemory::Share(0.25 / ranks as f64),
        Some(text) => KvMemory::Bytes(
            parse_bytes(text).map_err(|error| usage("kv-cache-memory", error.to_string()))?,
        ),
    };
    // One bar is enough: ranks read alike.
    let bar = match rank {
        None | Some((_, 0)) => Some(progress::Bar::bytes("loading")),
        _ => None,
    };
    let report = |done, total| {
        if let Some(bar) = &bar {
            bar.set(done, total);
        }
    };
    let options = LoadOptions {
        quantize: config.quantization == Quantization::W8a8,
        dtype: config.dtype,
        threads,
        cpus,
        isa: config.isa.clone(),
        block_size: config.block_size as usize,
        kv,
        max_model_len: config.max_model_len.map(|length| length as usize),
        max_num_batched_tokens: config.max_num_batched_tokens as usize,
        max_num_seqs: config.max_num_seqs as usize,
        tokenizer_hash: tokenizer.content_hash().to_owned(),
        progress: Some(&report),
        ranks: rank.map(|(link, _)| Arc::clone(link)),
        ..LoadOptions::default()
    };
    let loaded =
        load(&config.model, &options).map_err(|error| Failure::new(Code::Config, error))?;
    if let Some(bar) = &bar {
        bar.finish();
        for warning in &loaded.warnings {
            tracing::warn!("{warning}");
        }
    }
    let limits = EngineConfig {
        max_model_len: u32::try_from(loaded.max_model_len).unwrap_or(u32::MAX),
        max_num_seqs: config.max_num_seqs,
        max_num_batched_tokens: config.max_num_batched_tokens,
        max_waiting: config.max_num_seqs,
        ..EngineConfig::default()
    };
    Engine::new(
        limits,
        Box::new(loaded.executor),
        Arc::clone(tokenizer),
        loaded.num_blocks,
    )
    .map_err(|error| Failure::new(Code::Config, error))
}

/// Where a request came from, for its result.
struct Place {
    line: usize,
    prompt: usize,
    choice: u32,
    /// Prompt.
    ids: Arc<[TokenId]>,
    /// Its text, if the output begins with it.
    echo: Option<String>,
    /// Are log-probabilities of the output to be shown?
    logprobs: bool,
    /// Alternatives to show per prompt token, if log-probabilities of the prompt were asked for.
    prompt_logprobs: Option<u32>,
}

/// Prints results in the order of the prompts, each as soon as all before it are there.
struct Printer<'a> {
    form: LineFormat,
    tokenizer: &'a Tokenizer,
    places: Vec<Place>,
    bar: Option<progress::Bar>,
    early: BTreeMap<usize, String>,
    next: usize,
    printed: Outcome,
    /// The first failure that a request ended with.
    error: Option<ApiError>,
}

impl<'a> Printer<'a> {
    fn new(form: LineFormat, tokenizer: &'a Tokenizer) -> Self {
        Self {
            form,
            tokenizer,
            places: Vec::new(),
            bar: None,
            early: BTreeMap::new(),
            next: 0,
            printed: Ok(()),
            error: None,
        }
    }

    /// Requests come from these places.
    fn begin(&mut self, places: Vec<Place>) {
        self.bar = Some(progress::Bar::count("generating", places.len() as u64));
        self.places = places;
    }

    fn take(&mut self, result: &Generated) {
        if let Some(bar) = &self.bar {
            bar.step();
        }
        let index = usize::try_from(result.id.0).unwrap_or(usize::MAX);
        let Some(place) = self.places.get(index) else {
            return;
        };
        if let (FinishReason::Error(error), None) = (&result.finish.reason, &self.error) {
            self.error = Some(error.clone());
        }
        let text = shown(result, place, self.form, self.tokenizer);
        self.early.insert(index, text);
        while let Some(text) = self.early.remove(&self.next) {
            self.next += 1;
            if self.printed.is_ok() {
                self.printed = output::write(&text);
            }
        }
    }

    /// An error with the line of the prompt that it is about.
    fn named(&self, error: &GenerateError) -> Failure {
        match error {
            GenerateError::Refused { id, error } => {
                let line = usize::try_from(id.0)
                    .ok()
                    .and_then(|index| self.places.get(index))
                    .map_or(0, |place| place.line);
                Failure::failed(format!("prompt of line {line}: {error}"))
            }
            GenerateError::Exec(_) | GenerateError::Stuck(_) => failed(error),
        }
    }

    fn end(self) -> Outcome {
        if let Some(bar) = &self.bar {
            bar.finish();
        }
        self.printed?;
        match self.error {
            Some(error) => Err(Failure::failed(error)),
            None => Ok(()),
        }
    }
}

/// With `echo` text, ids and log-probabilities begin with those of the prompt.
fn shown(result: &Generated, place: &Place, form: LineFormat, tokenizer: &Tokenizer) -> String {
    let text = format!("{}{}", place.echo.as_deref().unwrap_or(""), result.text);
    if form == LineFormat::Text {
        return format!("{text}\n");
    }
    let echoed: &[TokenId] = if place.echo.is_some() {
        &place.ids
    } else {
        &[]
    };
    let (reason, stop) = match &result.finish.reason {
        FinishReason::Eos => ("stop", json!(null)),
        FinishReason::StopToken(id) => ("stop", json!(id)),
        FinishReason::StopText(text) => ("stop", json!(text)),
        FinishReason::Length => ("length", json!(null)),
        FinishReason::Abort => ("abort", json!(null)),
        FinishReason::Error(_) => ("error", json!(null)),
    };
    let token_ids: Vec<TokenId> = [echoed, &result.token_ids()[..]].concat();
    let mut line = json!({
        "line": place.line,
        "prompt": place.prompt,
        "choice": place.choice,
        "text": text,
        "token_ids": token_ids,
        "finish_reason": reason,
        "stop_reason": stop,
        "prompt_tokens": place.ids.len(),
        "completion_tokens": result.finish.output_tokens,
    });
    if place.logprobs {
        // Nothing comes before the first token of a prompt.
        let first = echoed.first().map(|_| Value::Null);
        let scored = match place.echo {
            Some(_) => &result.prompt_logprobs[..],
            None => &[],
        };
        let scored = scored.iter().map(|(own, _)| own);
        let output = result
            .tokens
            .iter()
            .filter_map(|token| token.logprobs.as_ref());
        let others = scored.chain(output.map(|(own, _)| own));
        line["token_logprobs"] = first
            .into_iter()
            .chain(others.map(|own| shown_logprob(own.logprob)))
            .collect();
    }
    if let Some(top) = place.prompt_logprobs {
        let scored = Scored {
            ids: &place.ids,
            logprobs: &result.prompt_logprobs,
            top,
        };
        line["prompt_logprobs"] = PromptLogprobs::new(tokenizer, scored).to_value();
    }
    if let FinishReason::Error(error) = &result.finish.reason {
        line["error"] = json!(error.body().error);
    }
    format!("{line}\n")
}
