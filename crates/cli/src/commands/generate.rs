//! `twinfer generate`: prompts from a file through the engine in this process.

mod prompts;

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
use twinfer_engine::{
    Engine, EngineConfig, FinishReason, GenerateError, Generated, KvMemory, LoadOptions, Request,
    generate, load, model_texts,
};
use twinfer_protocol::TokenId;
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
    let bad_model = |error: &dyn std::fmt::Display| Failure::new(Code::Config, error);
    let texts = model_texts(&config.model).map_err(|error| bad_model(&error))?;
    let tokenizer = Arc::new(Tokenizer::of(&texts).map_err(|error| bad_model(&error))?);
    let template = ChatTemplate::of(&texts, &tokenizer).map_err(|error| bad_model(&error))?;
    let mut engine = engine(config, &tokenizer)?;
    let source = Source {
        config,
        tokenizer: &tokenizer,
        template: &template,
        max_len: engine.max_len(),
        vocab: engine.vocab_size(),
    };
    let (requests, places) = source.requests(&lines)?;
    run_requests(
        &mut engine,
        requests,
        &places,
        &tokenizer,
        config.max_num_seqs,
        output,
    )
}

/// Loads the model, with a bar.
fn engine(config: &GenerateConfig, tokenizer: &Arc<Tokenizer>) -> Result<Engine, Failure> {
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
    let kv = match &config.kv_cache_memory {
        None => KvMemory::Share(0.25),
        Some(text) => KvMemory::Bytes(
            parse_bytes(text).map_err(|error| usage("kv-cache-memory", error.to_string()))?,
        ),
    };
    let bar = progress::Bar::bytes("loading");
    let report = |done, total| bar.set(done, total);
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
        ..LoadOptions::default()
    };
    let loaded =
        load(&config.model, &options).map_err(|error| Failure::new(Code::Config, error))?;
    bar.finish();
    for warning in &loaded.warnings {
        tracing::warn!("{warning}");
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

/// Runs all and prints the results in the order of the prompts, each as soon as all before it are there.
fn run_requests(
    engine: &mut Engine,
    requests: Vec<Request>,
    places: &[Place],
    tokenizer: &Tokenizer,
    concurrency: u32,
    form: LineFormat,
) -> Outcome {
    let bar = progress::Bar::count("generating", requests.len() as u64);
    let mut early: BTreeMap<usize, String> = BTreeMap::new();
    let mut next = 0;
    let mut printed: Outcome = Ok(());
    let generated = generate(engine, requests, concurrency as usize, |result| {
        bar.step();
        let index = usize::try_from(result.id.0).unwrap_or(usize::MAX);
        let Some(place) = places.get(index) else {
            return;
        };
        early.insert(index, shown(result, place, form, tokenizer));
        while let Some(text) = early.remove(&next) {
            next += 1;
            if printed.is_ok() {
                printed = output::write(&text);
            }
        }
    });
    bar.finish();
    printed?;
    let generated = generated.map_err(|error| match &error {
        GenerateError::Refused { id, error } => {
            let line = usize::try_from(id.0)
                .ok()
                .and_then(|index| places.get(index))
                .map_or(0, |place| place.line);
            Failure::failed(format!("prompt of line {line}: {error}"))
        }
        GenerateError::Exec(_) | GenerateError::Stuck(_) => Failure::failed(error),
    })?;
    match generated
        .iter()
        .find_map(|result| match &result.finish.reason {
            FinishReason::Error(error) => Some(error),
            _ => None,
        }) {
        Some(error) => Err(Failure::failed(error)),
        None => Ok(()),
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
