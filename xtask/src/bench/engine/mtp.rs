//! Drafts of the MTP layer: on the demo model those that it makes, on random weights scripted ones.

use super::ours::{options, prompt, timed_load};
use super::{CONTEXT, Machine};
use crate::bench::Sample;
use anyhow::{Context, Result, bail};
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;
use twinfer_engine::{
    CpuExecutor, DraftWork, Engine, EngineConfig, EventRef, ExecError, Executor, KvGeometry,
    KvSource, LoadOptions, Request, RequestId, SamplingParams, SeqWork, SpeculationStats,
    StepOutput, generate, load,
};
use twinfer_it::{demo_model, repository};
use twinfer_sys::BlockArena;
use twinfer_text::{ChatTemplate, Tokenizer};

use super::cost::Cost;

/// Longest answer to a question.
const ANSWER: u32 = 128;
/// Tokens after a prompt in the rounds that are timed.
const OUTPUT: u32 = 160;
const QUESTIONS: usize = 200;

/// The demo model with its MTP layer and without.
pub(super) struct Questions {
    plain: Asked,
    drafting: Asked,
    prompts: Vec<Vec<u32>>,
}

struct Asked {
    engine: Engine,
    /// Requests so far: ids are not used twice.
    next: u64,
}

/// What all answers took.
struct Answers {
    ids: Vec<Vec<u32>>,
    seconds: f64,
}

impl Questions {
    pub(super) fn open() -> Result<Self> {
        let folder = demo_model();
        let tokenizer = Arc::new(Tokenizer::from_dir(&folder)?);
        let template = ChatTemplate::from_dir(&folder, &tokenizer)?;
        let path = repository().join("bench/questions.json");
        let text = std::fs::read_to_string(&path).context("bench/questions.json")?;
        let file: serde_json::Value = serde_json::from_str(&text)?;
        let questions = file["questions"].as_array().context("no questions")?;
        if questions.len() != QUESTIONS {
            bail!("{} questions; {QUESTIONS} are needed", questions.len());
        }
        let mut prompts = Vec::new();
        for question in questions {
            let messages = serde_json::json!([{"role": "user", "content": question}]);
            let text = template.render(&messages, true, None, None)?;
            prompts.push(tokenizer.encode(&text, false)?);
        }
        Ok(Self {
            plain: Asked::open(&folder, &tokenizer, 0)?,
            drafting: Asked::open(&folder, &tokenizer, 1)?,
            prompts,
        })
    }

    /// Tokens per second of one draft per step beside plain decoding, and the share of drafts that stood;
    /// one question at a time.
    pub(super) fn measure(&mut self, turns: usize) -> Result<(Sample, Sample)> {
        let before = self.drafting.engine.stats().speculation;
        let (mut plain, mut drafting, mut tokens) = (0.0, 0.0, 0);
        for _ in 0..turns {
            let expected = self.plain.answer(&self.prompts)?;
            let answers = self.drafting.answer(&self.prompts)?;
            if answers.ids != expected.ids {
                bail!("answers with drafts are not those without");
            }
            tokens += answers.ids.iter().map(Vec::len).sum::<usize>();
            plain += expected.seconds;
            drafting += answers.seconds;
        }
        let accepted = acceptance(before, self.drafting.engine.stats().speculation)?;
        let (plain, drafting) = (tokens as f64 / plain, tokens as f64 / drafting);
        let speed = Sample {
            ours: drafting,
            floor: plain * (1.0 + accepted),
            peer: Some(plain),
        };
        let accepted = Sample {
            ours: accepted * 100.0,
            floor: 100.0,
            peer: None,
        };
        Ok((speed, accepted))
    }
}

impl Asked {
    fn open(model: &Path, tokenizer: &Arc<Tokenizer>, drafts: u32) -> Result<Self> {
        let options = LoadOptions {
            mtp: drafts > 0,
            ..options(false, 64)?
        };
        let loaded = load(model, &options)?;
        let engine = engine(Box::new(loaded.executor), tokenizer, 64, uncached(drafts))?;
        Ok(Self { engine, next: 0 })
    }

    fn answer(&mut self, prompts: &[Vec<u32>]) -> Result<Answers> {
        let requests = prompts
            .iter()
            .zip(self.next..)
            .map(|(prompt, id)| request(id, prompt, ANSWER, false))
            .collect();
        self.next += prompts.len() as u64;
        let start = Instant::now();
        let answers = generate(&mut self.engine, requests, 1, |_| {})?;
        Ok(Answers {
            seconds: start.elapsed().as_secs_f64(),
            ids: answers.iter().map(|answer| answer.token_ids()).collect(),
        })
    }
}

/// The time of a round for one share of accepted drafts.
pub(super) struct Round {
    seconds: f64,
    /// Bytes that it must read.
    bytes: f64,
    /// All but the read bandwidth.
    note: String,
}

impl Round {
    /// Beside the time that its bytes take at the machine's read bandwidth, and a note.
    pub(super) fn beside(&self, machine: &Machine) -> (Sample, String) {
        let sample = Sample {
            ours: self.seconds * 1e3,
            floor: self.bytes / machine.read * 1e3,
            peer: None,
        };
        (sample, self.note.clone())
    }
}

/// A round for each share of accepted drafts; notes tell how that stands to plain decoding.
pub(super) fn rounds(model: &Path, cost: &Cost, accepted: &[f64]) -> Result<Vec<Round>> {
    let length = CONTEXT as u32 + OUTPUT;
    let blocks = length.div_ceil(16) + 2;
    let options = LoadOptions {
        mtp: true,
        ..options(true, blocks)?
    };
    let (loaded, _) = timed_load(model, &options)?;
    let tokenizer = Arc::new(Tokenizer::from_dir(model)?);
    let executor = Arc::new(Mutex::new(loaded.executor));
    let run = |script: Option<Script>| -> Result<(Vec<u32>, f64, SpeculationStats)> {
        let drafts = u32::from(script.is_some());
        let scripted = Box::new(Scripted::new(&executor, script));
        let mut engine = engine(scripted, &tokenizer, blocks, uncached(drafts))?;
        let (ids, seconds) = timed(&mut engine)?;
        Ok((ids, seconds, engine.stats().speculation))
    };
    // The first run finds the tokens; its time would include first touches.
    let (tokens, ..) = run(None)?;
    let known: Arc<[u32]> = [prompt(CONTEXT, 0), tokens.clone()].concat().into();
    let middle = CONTEXT + OUTPUT as usize / 2;
    let mut results = Vec::new();
    for &wanted in accepted {
        let script = Script {
            known: Arc::clone(&known),
            accepted: wanted,
            owed: 0.5,
        };
        let (_, before, _) = run(None)?;
        let (ids, seconds, stats) = run(Some(script))?;
        let (_, after, _) = run(None)?;
        if ids != tokens {
            bail!("tokens with scripted drafts are not those without");
        }
        let share = acceptance(SpeculationStats::default(), stats)?;
        let round = seconds / stats.rounds.max(1) as f64;
        let step = (before + after) / 2.0 / f64::from(OUTPUT - 1);
        let bytes = cost.round_bytes(share, middle);
        let as_plain = step * bytes / cost.bytes(1, middle);
        let note = format!(
            "MTP on the DeepSeek shape: {:.0} % of {} drafts accepted, {:.2} tokens per round; a round {:.2} ms, a plain \
             step {:.2} ms, {:.2} times the bytes of a step; {:.0} tok/s with drafts, {:.0} without; at the rate at \
             which the plain step reads, a round would take {:.2} ms, {:.2} of what it takes",
            share * 100.0,
            stats.rounds,
            f64::from(OUTPUT - 1) / stats.rounds.max(1) as f64,
            round * 1e3,
            step * 1e3,
            bytes / cost.bytes(1, middle),
            f64::from(OUTPUT - 1) / seconds,
            1.0 / step,
            as_plain * 1e3,
            as_plain / round,
        );
        results.push(Round {
            seconds: round,
            bytes,
            note,
        });
    }
    Ok(results)
}

/// Tokens of one request, and the time from the first to the last of them.
fn timed(engine: &mut Engine) -> Result<(Vec<u32>, f64)> {
    let submitted = engine.submit(request(0, &prompt(CONTEXT, 0), OUTPUT, true));
    submitted.map_err(|error| anyhow::anyhow!("{error}"))?;
    let (mut out, mut tokens) = (StepOutput::new(), Vec::new());
    let mut first = None;
    while engine.has_work() {
        engine.step_into(&mut out)?;
        for event in out.events() {
            if let EventRef::Output(output) = event {
                tokens.extend(output.tokens().map(|token| token.id));
            }
        }
        if first.is_none() && !tokens.is_empty() {
            first = Some(Instant::now());
        }
    }
    let first = first.context("no token came")?;
    if tokens.len() != OUTPUT as usize {
        bail!("{} tokens came; {OUTPUT} were wanted", tokens.len());
    }
    Ok((tokens, first.elapsed().as_secs_f64()))
}

/// Without prefix cache, in which a second turn of the same prompts would find them.
fn uncached(drafts: u32) -> EngineConfig {
    EngineConfig {
        enable_prefix_caching: false,
        num_speculative_tokens: drafts,
        ..EngineConfig::default()
    }
}

/// As `config` says, but for the length, which is what so many blocks hold.
pub(super) fn engine(
    executor: Box<dyn Executor>,
    tokenizer: &Arc<Tokenizer>,
    blocks: u32,
    config: EngineConfig,
) -> Result<Engine> {
    let config = EngineConfig {
        max_model_len: (blocks * 16).min(u32::try_from(executor.max_context())?),
        ..config
    };
    Engine::new(config, executor, Arc::clone(tokenizer), blocks)
        .map_err(|error| anyhow::anyhow!("{error}"))
}

pub(super) fn request(id: u64, prompt: &[u32], output: u32, ignore_eos: bool) -> Request {
    Request {
        id: RequestId(id),
        prompt: prompt.into(),
        params: SamplingParams {
            ignore_eos,
            ..SamplingParams::greedy(output)
        },
        kv: KvSource::Compute,
        hold_kv: false,
        cache_salt: None,
        leader: None,
        resumed: 0,
    }
}

/// Share of the first drafts that stood since `before`.
fn acceptance(before: SpeculationStats, after: SpeculationStats) -> Result<f64> {
    let drafted = after.drafted[0] - before.drafted[0];
    if drafted == 0 {
        bail!("nothing was drafted");
    }
    Ok((after.accepted[0] - before.accepted[0]) as f64 / drafted as f64)
}

/// Right drafts for a share of the rounds, and wrong ones for the others.
struct Script {
    /// Prompt and output.
    known: Arc<[u32]>,
    accepted: f64,
    /// Right drafts due, less those that were given.
    owed: f64,
}

/// The model, one sequence at a time, with its drafts computed and then replaced; without a script as if
/// it had no draft layer.
struct Scripted {
    model: Arc<Mutex<CpuExecutor>>,
    arena: Arc<BlockArena>,
    geometry: KvGeometry,
    vocab: usize,
    context: usize,
    script: Option<Script>,
    /// Position of the last step's first row.
    start: usize,
}

impl Scripted {
    fn new(model: &Arc<Mutex<CpuExecutor>>, script: Option<Script>) -> Self {
        let inner = model.lock().unwrap_or_else(PoisonError::into_inner);
        Self {
            arena: Arc::clone(inner.arena()),
            geometry: inner.geometry(),
            vocab: inner.vocab_size(),
            context: inner.max_context(),
            script,
            start: 0,
            model: Arc::clone(model),
        }
    }

    fn model(&self) -> MutexGuard<'_, CpuExecutor> {
        self.model.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Executor for Scripted {
    fn geometry(&self) -> KvGeometry {
        self.geometry
    }
    fn arena(&self) -> &Arc<BlockArena> {
        &self.arena
    }
    fn vocab_size(&self) -> usize {
        self.vocab
    }
    fn max_context(&self) -> usize {
        self.context
    }
    fn execute(&mut self, batch: &[SeqWork<'_>], logits: &mut Vec<f32>) -> Result<(), ExecError> {
        self.start = batch.first().map_or(0, |work| work.start);
        self.model().execute(batch, logits)
    }
    fn draft_layers(&self) -> usize {
        usize::from(self.script.is_some())
    }
    fn draft(&mut self, works: &[DraftWork<'_>], drafts: &mut Vec<u32>) -> Result<(), ExecError> {
        self.model().draft(works, drafts)?;
        let (Some(script), Some(work)) = (&mut self.script, works.first()) else {
            return Ok(());
        };
        // The token behind the settled rows is known; drafts follow it.
        let next = self.start + work.rows.end + 1;
        for (position, draft) in (next..).zip(drafts.iter_mut()) {
            if let Some(&right) = script.known.get(position) {
                script.owed += script.accepted;
                let stands = script.owed >= 1.0;
                script.owed -= f64::from(u8::from(stands));
                *draft = if stands { right } else { right ^ 1 };
            }
        }
        Ok(())
    }
}
