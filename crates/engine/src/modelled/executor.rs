//! An executor without a model.

use super::StepLoad;
use crate::{DraftWork, ExecError, Executor, KvGeometry, MAX_DRAFTS, SeqWork};
use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use twinfer_protocol::TokenId;
use twinfer_sys::BlockArena;

/// Sizes of a [`ModelledExecutor`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModelledShape {
    /// Width of a logits row.
    pub vocab_size: usize,
    /// Tokens that come out, a part of the vocabulary.
    pub tokens: Range<TokenId>,
    /// Longest sequence, in tokens.
    pub max_context: usize,
    /// Blocks of the arena.
    pub num_blocks: u32,
    /// Shape of the KV. Nothing is written to it, so it takes address space only.
    pub kv: KvGeometry,
    /// Of 1000 drafts how many are right; none: the model has no draft layer.
    pub right_drafts: Option<u32>,
}

/// What the steps of an executor had to do, to be read while the executor is inside an engine.
#[derive(Debug, Default)]
pub struct StepMeter {
    last: Mutex<StepLoad>,
    steps: AtomicU64,
}

/// Answers with tokens that depend on the token before and its position only, whatever the batch.
#[derive(Debug)]
pub struct ModelledExecutor {
    shape: ModelledShape,
    arena: Arc<BlockArena>,
    meter: Arc<StepMeter>,
    progress: Arc<AtomicU64>,
    /// Start and length of each work of the last step.
    last: Vec<(usize, usize)>,
}

impl Default for ModelledShape {
    /// Printable bytes of the tokenizer for tests, blocks of 16 tokens, 64 Ki tokens of KV.
    fn default() -> Self {
        Self {
            vocab_size: crate::testing::BYTE_VOCAB,
            tokens: 0x20..0x7F,
            max_context: 1 << 17,
            num_blocks: 4096,
            kv: KvGeometry {
                layers: 1,
                width: 32,
                value_bytes: 2,
                block_size: 16,
            },
            right_drafts: None,
        }
    }
}

impl StepMeter {
    /// Load of the last step.
    pub fn last(&self) -> StepLoad {
        match self.last.lock() {
            Ok(load) => *load,
            Err(poisoned) => *poisoned.into_inner(),
        }
    }

    /// Steps, dummy ones included.
    pub fn steps(&self) -> u64 {
        self.steps.load(Ordering::Acquire)
    }

    fn change(&self, change: impl FnOnce(&mut StepLoad)) {
        match self.last.lock() {
            Ok(mut load) => change(&mut load),
            Err(poisoned) => change(&mut poisoned.into_inner()),
        }
    }

    fn begin(&self, load: StepLoad) {
        self.change(|last| *last = load);
        self.steps.fetch_add(1, Ordering::Release);
    }
}

impl ModelledExecutor {
    /// An executor and its meter.
    ///
    /// # Errors
    /// `InvalidInput` when a size is 0 or `tokens` is not part of the vocabulary; else what mapping the KV
    /// reports.
    pub fn new(shape: ModelledShape) -> io::Result<(Self, Arc<StepMeter>)> {
        let inside = !shape.tokens.is_empty() && shape.tokens.end as usize <= shape.vocab_size;
        if !inside || shape.right_drafts.is_some_and(|right| right > 1000) {
            let message = format!(
                "tokens {:?} of {}, {:?} right drafts of 1000",
                shape.tokens, shape.vocab_size, shape.right_drafts
            );
            return Err(io::Error::new(io::ErrorKind::InvalidInput, message));
        }
        let KvGeometry {
            layers,
            width,
            value_bytes,
            block_size,
        } = shape.kv;
        let unit = [width, value_bytes]
            .iter()
            .try_fold(block_size, |n, m| n.checked_mul(*m));
        let unit = unit.ok_or_else(|| io::Error::from(io::ErrorKind::InvalidInput))?;
        let arena = Arc::new(BlockArena::new(shape.num_blocks, layers, unit)?);
        let meter = Arc::<StepMeter>::default();
        let executor = Self {
            shape,
            arena,
            meter: Arc::clone(&meter),
            progress: Arc::default(),
            last: Vec::new(),
        };
        Ok((executor, meter))
    }

    /// The token after `token` at `position`.
    fn next(&self, token: TokenId, position: usize) -> TokenId {
        self.pick(mix(u64::from(token) << 32 ^ position as u64))
    }

    /// What the draft layer proposes in its place.
    fn propose(&self, token: TokenId, position: usize) -> TokenId {
        let right = self.next(token, position);
        let dice = mix(!(u64::from(token) << 32 ^ position as u64)) % 1000;
        if dice < u64::from(self.shape.right_drafts.unwrap_or(0)) {
            return right;
        }
        match right + 1 {
            end if end == self.shape.tokens.end => self.shape.tokens.start,
            other => other,
        }
    }

    fn pick(&self, number: u64) -> TokenId {
        let Range { start, end } = self.shape.tokens;
        let width = u64::from(end - start);
        // Below `width`, which is a TokenId.
        start + ((u128::from(number) * u128::from(width)) >> 64) as TokenId
    }

    fn check(&self, work: &SeqWork<'_>) -> Result<(), ExecError> {
        let end = work.start + work.tokens.len();
        let room = work.blocks.len() * self.shape.kv.block_size;
        if work.tokens.is_empty() || end > room || end > self.shape.max_context {
            let message = format!("positions {}..{end} with room for {room}", work.start);
            return Err(ExecError::OutOfRange(message));
        }
        let outside = |token: &&TokenId| **token as usize >= self.shape.vocab_size;
        match work.tokens.iter().find(outside) {
            Some(token) => Err(ExecError::OutOfRange(format!("token {token}"))),
            None => Ok(()),
        }
    }
}

impl Executor for ModelledExecutor {
    fn geometry(&self) -> KvGeometry {
        self.shape.kv
    }

    fn arena(&self) -> &Arc<BlockArena> {
        &self.arena
    }

    fn vocab_size(&self) -> usize {
        self.shape.vocab_size
    }

    fn max_context(&self) -> usize {
        self.shape.max_context
    }

    fn execute(&mut self, batch: &[SeqWork<'_>], logits: &mut Vec<f32>) -> Result<(), ExecError> {
        logits.clear();
        self.last.clear();
        batch.iter().try_for_each(|work| self.check(work))?;
        let mut load = StepLoad::default();
        let vocab = self.shape.vocab_size;
        for work in batch {
            self.last.push((work.start, work.tokens.len()));
            load += work_load(work);
            let from = work.tokens.len() - work.logits_rows();
            for (row, &token) in work.tokens.iter().enumerate().skip(from) {
                let first = logits.len();
                logits.resize(first + vocab, 0.0);
                logits[first + self.next(token, work.start + row) as usize] = 1.0;
            }
        }
        self.meter.begin(load);
        self.progress.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }

    fn draft_layers(&self) -> usize {
        usize::from(self.shape.right_drafts.is_some())
    }

    fn draft(
        &mut self,
        works: &[DraftWork<'_>],
        drafts: &mut Vec<TokenId>,
    ) -> Result<(), ExecError> {
        drafts.clear();
        let (mut rows, mut logits_rows) = (0, 0);
        for work in works {
            let known = self
                .last
                .get(work.work)
                .filter(|(_, len)| work.rows.end <= *len);
            let (Some((start, _)), Some(&last)) = (known, work.next.last()) else {
                return Err(ExecError::OutOfRange(format!(
                    "draft: no work {}",
                    work.work
                )));
            };
            let mut token = last;
            for at in 0..work.count {
                token = self.propose(token, start + work.rows.end + at);
                drafts.push(token);
            }
            rows += (work.rows.len() + work.count.saturating_sub(1)) as u64;
            logits_rows += work.count as u64;
        }
        self.meter.change(|load| {
            load.draft_rows = rows;
            load.draft_logits_rows = logits_rows;
        });
        Ok(())
    }

    fn dummy(&mut self) -> Result<(), ExecError> {
        self.last.clear();
        let draft = u64::from(self.shape.right_drafts.is_some());
        self.meter.begin(StepLoad {
            draft_rows: draft,
            draft_logits_rows: draft,
            ..StepLoad::DUMMY
        });
        self.progress.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }

    fn progress(&self) -> Option<Arc<AtomicU64>> {
        Some(Arc::clone(&self.progress))
    }
}

fn work_load(work: &SeqWork<'_>) -> StepLoad {
    let (start, len) = (work.start as u64, work.tokens.len() as u64);
    let positions = len * start + len * (len + 1) / 2;
    let logits_rows = work.logits_rows() as u64;
    // A sequence that generates wants logits of the last known token and of each draft behind it.
    let generates = logits_rows == len && work.tokens.len() <= 1 + MAX_DRAFTS;
    let load = StepLoad {
        logits_rows,
        ..StepLoad::default()
    };
    if generates {
        StepLoad {
            decode_rows: len,
            decode_positions: positions,
            kv_positions: start + len,
            ..load
        }
    } else {
        StepLoad {
            prefill_rows: len,
            prefill_positions: positions,
            ..load
        }
    }
}

/// The finaliser of splitmix64.
fn mix(value: u64) -> u64 {
    let mut z = value.wrapping_add(0x9E37_79B9_7F4A_7C15);
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::byte_tokenizer;
    use crate::{Engine, EngineConfig, Event, KvSource, Request, RequestId, SamplingParams};

    fn ids(
        config: EngineConfig,
        right: Option<u32>,
        prompts: &[usize],
    ) -> (Vec<Vec<TokenId>>, Engine) {
        let shape = ModelledShape {
            right_drafts: right,
            ..ModelledShape::default()
        };
        let blocks = shape.num_blocks;
        let (executor, _) = ModelledExecutor::new(shape).unwrap();
        let tokenizer = byte_tokenizer().unwrap();
        let mut engine = Engine::new(config, Box::new(executor), tokenizer, blocks).unwrap();
        for (id, len) in prompts.iter().enumerate() {
            engine
                .submit(Request {
                    id: RequestId(id as u64),
                    prompt: vec![id as TokenId; *len].into(),
                    params: SamplingParams {
                        ignore_eos: true,
                        ..SamplingParams::greedy(40)
                    },
                    kv: KvSource::Compute,
                    hold_kv: false,
                    cache_salt: None,
                    leader: None,
                    resumed: 0,
                })
                .unwrap();
        }
        let mut got = vec![Vec::new(); prompts.len()];
        while engine.has_work() {
            for event in engine.step().unwrap() {
                if let Event::Output { id, tokens, .. } = event {
                    got[id.0 as usize].extend(tokens.iter().map(|token| token.id));
                }
            }
        }
        (got, engine)
    }

    #[test]
    fn tokens_do_not_depend_on_batch_chunks_or_drafts() {
        let prompts = [3, 100, 17, 1];
        let (alone, _) = ids(EngineConfig::default(), None, &prompts);
        let chunks = EngineConfig {
            max_num_batched_tokens: 7,
            max_num_seqs: 2,
            ..EngineConfig::default()
        };
        assert_eq!(ids(chunks, None, &prompts).0, alone);
        let drafts = EngineConfig {
            num_speculative_tokens: 3,
            ..EngineConfig::default()
        };
        assert_eq!(ids(drafts, Some(700), &prompts).0, alone);
        assert!(alone.iter().all(|ids| ids.len() == 40));
        assert_ne!(alone[0], alone[1]);
    }

    #[test]
    fn drafts_are_right_as_often_as_asked_for() {
        let drafts = EngineConfig {
            num_speculative_tokens: 1,
            ..EngineConfig::default()
        };
        let (_, engine) = ids(drafts, Some(700), &[5; 60]);
        let stats = engine.stats().speculation;
        let share = stats.accepted[0] as f64 / stats.drafted[0] as f64;
        assert!((share - 0.7).abs() < 0.05, "{share}");
    }

    #[test]
    fn the_meter_counts_rows_and_positions() {
        let (mut executor, meter) = ModelledExecutor::new(ModelledShape::default()).unwrap();
        let blocks: Vec<u32> = (0..10).collect();
        let prompt = SeqWork {
            tokens: &[7; 20],
            start: 10,
            blocks: &blocks,
            logits_from: Some(19),
        };
        let single = SeqWork {
            tokens: &[7],
            start: 99,
            blocks: &blocks,
            logits_from: Some(0),
        };
        let mut logits = Vec::new();
        executor.execute(&[prompt, single], &mut logits).unwrap();
        let load = meter.last();
        assert_eq!(
            (load.prefill_rows, load.decode_rows, load.logits_rows),
            (20, 1, 2)
        );
        // Row i of the prompt sees positions 0 to 10 + i.
        assert_eq!(load.prefill_positions, (11..=30).sum::<u64>());
        assert_eq!((load.decode_positions, load.kv_positions), (100, 100));
        executor.dummy().unwrap();
        assert_eq!((meter.last(), meter.steps()), (StepLoad::DUMMY, 2));
        let outside = SeqWork {
            blocks: &blocks[..1],
            ..single
        };
        assert!(executor.execute(&[outside], &mut logits).is_err());
    }
}
