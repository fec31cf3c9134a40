//! A model that costs nothing, for tests: its logits are a function of the tokens that stand in the KV
//! blocks at the time of the step. What a real model would get wrong - a stale, foreign or unfilled
//! block, a wrong position, a block table that is not the sequence's - changes its output too.

use crate::{DraftWork, ExecError, Executor, KvGeometry, SeqWork};
use serde_json::json;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::{fmt, io};
use twinfer_protocol::{BlockId, TokenId};
use twinfer_sys::{BlockArena, BlockError, BlockRead, BlockWrite};
use twinfer_text::{TextError, Tokenizer};

/// Bytes of one row: token, position, check.
const ROW: usize = 16;
/// Layers of the model itself; the draft layer comes behind them.
const LAYERS: usize = 2;
/// Logit of the token that a script names; all others have 0.
const NAMED: f32 = 10.0;

/// Id of `<s>` in [`byte_tokenizer`]; the ids below are bytes.
pub const BYTE_BOS: TokenId = 256;
/// Id of `</s>`, the end-of-sequence.
pub const BYTE_EOS: TokenId = 257;
/// Ids that [`byte_tokenizer`] knows.
pub const BYTE_VOCAB: usize = 258;

/// Sizes of a [`ScriptedExecutor`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ScriptedShape {
    /// Width of a logits row.
    pub vocab_size: usize,
    /// Tokens per block.
    pub block_size: usize,
    /// Blocks of the arena.
    pub num_blocks: u32,
    /// Longest sequence, in tokens.
    pub max_context: usize,
    /// With a draft layer. Its row at a position is of the token that follows, and it refuses to draft
    /// where one of the rows before is not.
    pub draft_layer: bool,
}

/// Names the next token from all tokens so far.
type NextToken = dyn Fn(&[TokenId]) -> TokenId + Send + Sync;
/// Sees each step before it runs; may wait, or make it fail.
type BeforeStep = dyn FnMut(&StepInfo) -> Result<(), ExecError> + Send;

/// What a step is about to do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StepInfo {
    /// Steps before it.
    pub step: u64,
    /// `(start, tokens)` of each sequence.
    pub works: Vec<(usize, usize)>,
}

/// The executor.
pub struct ScriptedExecutor {
    shape: ScriptedShape,
    arena: Arc<BlockArena>,
    next: Option<Arc<NextToken>>,
    draft: Option<Arc<NextToken>>,
    /// Start and tokens of each work of the last step.
    last: Vec<(usize, usize)>,
    before_step: Option<Box<BeforeStep>>,
    steps: u64,
    progress: Arc<AtomicU64>,
}

impl Default for ScriptedShape {
    /// Fits [`byte_tokenizer`].
    fn default() -> Self {
        Self {
            vocab_size: BYTE_VOCAB,
            block_size: 4,
            num_blocks: 256,
            max_context: 1024,
            draft_layer: false,
        }
    }
}

impl ScriptedExecutor {
    /// An executor whose logits are pseudo-random numbers, a function of all tokens so far.
    ///
    /// # Errors
    /// The arena could not be mapped.
    pub fn new(shape: ScriptedShape) -> io::Result<Self> {
        let arena = Arc::new(BlockArena::new(
            shape.num_blocks,
            shape.layers(),
            shape.block_size * ROW,
        )?);
        Ok(Self {
            shape,
            arena,
            next: None,
            draft: None,
            last: Vec::new(),
            before_step: None,
            steps: 0,
            progress: Arc::default(),
        })
    }

    /// Makes the best token the one that `next` names.
    #[must_use]
    pub fn with_script(
        mut self,
        next: impl Fn(&[TokenId]) -> TokenId + Send + Sync + 'static,
    ) -> Self {
        self.next = Some(Arc::new(next));
        self
    }

    /// Makes the draft after some tokens the one that `draft` names; without, it is a token that the model
    /// hardly ever draws. For a shape with a draft layer.
    #[must_use]
    pub fn with_drafts(
        mut self,
        draft: impl Fn(&[TokenId]) -> TokenId + Send + Sync + 'static,
    ) -> Self {
        self.draft = Some(Arc::new(draft));
        self
    }

    /// Calls `before` ahead of each step: to count, to hold the engine inside a step, to fail.
    #[must_use]
    pub fn with_before_step(
        mut self,
        before: impl FnMut(&StepInfo) -> Result<(), ExecError> + Send + 'static,
    ) -> Self {
        self.before_step = Some(Box::new(before));
        self
    }

    fn check(&self, work: &SeqWork<'_>) -> Result<(), ExecError> {
        let end = work.start + work.tokens.len();
        let room = work.blocks.len() * self.shape.block_size;
        if work.tokens.is_empty() || end > room || end > self.shape.max_context {
            let message = format!("positions {}..{end} with room for {room}", work.start);
            return Err(ExecError::OutOfRange(message));
        }
        match work
            .tokens
            .iter()
            .find(|&&token| token as usize >= self.shape.vocab_size)
        {
            Some(token) => Err(ExecError::OutOfRange(format!("token {token}"))),
            None => Ok(()),
        }
    }

    fn draft_one(&self, work: &DraftWork<'_>, drafts: &mut Vec<TokenId>) -> Result<(), ExecError> {
        let refuse = |what: String| Err(ExecError::OutOfRange(format!("draft: {what}")));
        let Some(&(start, len)) = self.last.get(work.work) else {
            return refuse(format!("no work {}", work.work));
        };
        let (rows, size) = (work.rows.clone(), self.shape.block_size);
        if rows.is_empty() || rows.end > len || rows.len() != work.next.len() {
            return refuse(format!("rows {rows:?} of {len}"));
        }
        let (first, end) = (start + rows.start, start + rows.end);
        let room = work.blocks.len() * size;
        if end + work.count.saturating_sub(1) > room {
            return refuse(format!("{} from {end} with room for {room}", work.count));
        }
        // Rows of further drafts, which are written over when their positions are settled.
        let extra = work.count.saturating_sub(1);
        let span = SeqWork {
            tokens: &vec![0; end + extra - first],
            start: first,
            blocks: work.blocks,
            logits_from: None,
        };
        let mut guards = Guards::take(&self.arena, &span, size)?;
        let layer = LAYERS..LAYERS + 1;
        for (position, &token) in (first..).zip(work.next) {
            guards.write_row(layer.clone(), position, token, size);
        }
        if work.count == 0 {
            return Ok(());
        }
        let (mut tokens, _) = guards.read_rows(0..1, end, size);
        let (following, _) = guards.read_rows(layer.clone(), end, size);
        if let Some(at) = (1..end).find(|&at| following[at - 1] != tokens[at]) {
            return refuse(format!(
                "the draft layer's row {} is of another token",
                at - 1
            ));
        }
        tokens.extend(work.next.last());
        for at in 0..work.count {
            let draft = match &self.draft {
                Some(draft) => draft(&tokens),
                None => (mix(tokens.len() as u64) % self.shape.vocab_size as u64) as TokenId,
            };
            if at > 0 {
                guards.write_row(layer.clone(), end + at - 1, tokens[tokens.len() - 1], size);
            }
            tokens.push(draft);
            drafts.push(draft);
        }
        Ok(())
    }

    fn push_logits(&self, tokens: &[TokenId], digest: u64, logits: &mut Vec<f32>) {
        match &self.next {
            Some(next) => {
                let start = logits.len();
                logits.resize(start + self.shape.vocab_size, 0.0);
                if let Some(logit) = logits.get_mut(start + next(tokens) as usize) {
                    *logit = NAMED;
                }
            }
            None => logits.extend((0..self.shape.vocab_size as u64).map(|id| {
                let unit = (mix(digest ^ mix(id)) >> 40) as f32 / (1u64 << 24) as f32;
                unit * 8.0 - 4.0
            })),
        }
    }
}

impl Executor for ScriptedExecutor {
    fn geometry(&self) -> KvGeometry {
        KvGeometry {
            layers: self.shape.layers(),
            width: ROW / 4,
            value_bytes: 4,
            block_size: self.shape.block_size,
        }
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

    fn progress(&self) -> Option<Arc<AtomicU64>> {
        Some(Arc::clone(&self.progress))
    }

    fn execute(&mut self, batch: &[SeqWork<'_>], logits: &mut Vec<f32>) -> Result<(), ExecError> {
        logits.clear();
        if let Some(before) = &mut self.before_step {
            let works = batch
                .iter()
                .map(|work| (work.start, work.tokens.len()))
                .collect();
            before(&StepInfo {
                step: self.steps,
                works,
            })?;
        }
        self.steps += 1;
        self.progress.fetch_add(LAYERS as u64, Ordering::Relaxed);
        // All guards of the step at once, as the real executor has them: two sequences that write one
        // block are found.
        let mut guards = Vec::with_capacity(batch.len());
        self.last.clear();
        for work in batch {
            self.check(work)?;
            self.last.push((work.start, work.tokens.len()));
            guards.push(Guards::take(&self.arena, work, self.shape.block_size)?);
        }
        for (work, guards) in batch.iter().zip(&mut guards) {
            for (offset, &token) in work.tokens.iter().enumerate() {
                let position = work.start + offset;
                guards.write_row(0..LAYERS, position, token, self.shape.block_size);
            }
            for row in work.tokens.len() - work.logits_rows()..work.tokens.len() {
                let end = work.start + row + 1;
                let (tokens, digest) = guards.read_rows(0..LAYERS, end, self.shape.block_size);
                self.push_logits(&tokens, digest, logits);
            }
        }
        Ok(())
    }

    fn draft_layers(&self) -> usize {
        usize::from(self.shape.draft_layer)
    }

    fn draft(
        &mut self,
        works: &[DraftWork<'_>],
        drafts: &mut Vec<TokenId>,
    ) -> Result<(), ExecError> {
        drafts.clear();
        works
            .iter()
            .try_for_each(|work| self.draft_one(work, drafts))
    }
}

impl ScriptedShape {
    fn layers(&self) -> usize {
        LAYERS + usize::from(self.draft_layer)
    }
}

impl fmt::Debug for ScriptedExecutor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ScriptedExecutor")
            .field("shape", &self.shape)
            .finish_non_exhaustive()
    }
}

/// Writes the rows of all `tokens` but the last, from position `first` on, which begins the first of
/// `blocks`, as a [`ScriptedExecutor`] would: what a handoff brings. The draft layer's rows, if the arena has that layer, need the token that follows.
///
/// # Errors
/// A block is in use or does not exist.
pub fn fill_kv(
    arena: &BlockArena,
    block_size: usize,
    blocks: &[BlockId],
    tokens: &[TokenId],
    first: usize,
) -> Result<(), BlockError> {
    let filled = tokens
        .get(first..tokens.len().saturating_sub(1))
        .unwrap_or(&[]);
    for (index, chunk) in filled.chunks(block_size).enumerate() {
        let block = blocks.get(index).copied().unwrap_or(BlockId::MAX);
        let mut guard = arena.write(block)?;
        for (offset, &token) in chunk.iter().enumerate() {
            let position = first + index * block_size + offset;
            write_row(&mut guard, 0..LAYERS, offset, position, token);
            let next = tokens[position + 1];
            write_row(&mut guard, LAYERS..LAYERS + 1, offset, position, next);
        }
    }
    Ok(())
}

/// A tokenizer in which every byte is a token, with `<s>` and `</s>`: text and tokens are easy to tell
/// from each other in a test's head.
///
/// # Errors
/// The directory for temporary files cannot be written.
pub fn byte_tokenizer() -> Result<Arc<Tokenizer>, TextError> {
    static MADE: AtomicU64 = AtomicU64::new(0);
    let number = MADE.fetch_add(1, Ordering::Relaxed);
    let dir = std::env::temp_dir().join(format!("twinfer-bytes-{}-{number}", std::process::id()));
    let written = write_byte_tokenizer(&dir);
    let tokenizer = written
        .map_err(|source| TextError::Read {
            path: dir.clone(),
            source,
        })
        .and_then(|()| Tokenizer::from_dir(&dir));
    // What cannot be removed is left to the system's own cleaning.
    let _ = std::fs::remove_dir_all(&dir);
    tokenizer.map(Arc::new)
}

/// Writes the files of [`byte_tokenizer`], with a chat template, into a directory.
///
/// # Errors
/// As writing does.
pub fn write_byte_tokenizer(dir: &Path) -> io::Result<()> {
    let mut vocab: serde_json::Map<String, serde_json::Value> = (0..=255u8)
        .map(|byte| (byte_char(byte).to_string(), json!(byte)))
        .collect();
    vocab.insert("<s>".to_owned(), json!(BYTE_BOS));
    vocab.insert("</s>".to_owned(), json!(BYTE_EOS));
    let special = |id: TokenId, content: &str| {
        json!({"id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false,
               "normalized": false, "special": true})
    };
    let byte_level = json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false});
    let tokenizer = json!({
        "version": "1.0",
        "truncation": null,
        "padding": null,
        "added_tokens": [special(BYTE_BOS, "<s>"), special(BYTE_EOS, "</s>")],
        "normalizer": null,
        "pre_tokenizer": byte_level,
        "post_processor": null,
        "decoder": byte_level,
        "model": {"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
                  "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "vocab": vocab,
                  "merges": []},
    });
    let settings = json!({
        "bos_token": "<s>",
        "eos_token": "</s>",
        "chat_template": "{% for m in messages %}{{ m['role'] }}:{{ m['content'] }}\n{% endfor %}",
    });
    std::fs::create_dir_all(dir)?;
    std::fs::write(dir.join("tokenizer.json"), tokenizer.to_string())?;
    std::fs::write(dir.join("tokenizer_config.json"), settings.to_string())
}

/// Borrows of one sequence's blocks: those before the written ones for reading.
struct Guards<'a> {
    read: Vec<BlockRead<'a>>,
    write: Vec<BlockWrite<'a>>,
}

impl<'a> Guards<'a> {
    fn take(
        arena: &'a BlockArena,
        work: &SeqWork<'_>,
        block_size: usize,
    ) -> Result<Self, ExecError> {
        let first = work.start / block_size;
        let end = (work.start + work.tokens.len()).div_ceil(block_size);
        let busy = |error| match error {
            BlockError::Busy { block, .. } => ExecError::BlockBusy { block },
            BlockError::OutOfRange { .. } => ExecError::OutOfRange(error.to_string()),
        };
        let read = work.blocks[..first]
            .iter()
            .map(|&id| arena.read(id))
            .collect::<Result<_, _>>();
        let write = work.blocks[first..end]
            .iter()
            .map(|&id| arena.write(id))
            .collect::<Result<_, _>>();
        Ok(Self {
            read: read.map_err(busy)?,
            write: write.map_err(busy)?,
        })
    }

    fn write_row(
        &mut self,
        layers: Range<usize>,
        position: usize,
        token: TokenId,
        block_size: usize,
    ) {
        let index = (position / block_size).checked_sub(self.read.len());
        if let Some(guard) = index.and_then(|index| self.write.get_mut(index)) {
            write_row(guard, layers, position % block_size, position, token);
        }
    }

    /// Tokens at positions `0..end`, and a digest of all bytes of their rows.
    fn read_rows(
        &self,
        layers: Range<usize>,
        end: usize,
        block_size: usize,
    ) -> (Vec<TokenId>, u64) {
        let first = layers.start;
        let mut tokens = Vec::with_capacity(end);
        let mut digest = 0;
        for position in 0..end {
            let index = position / block_size;
            for layer in layers.clone() {
                let unit = match index.checked_sub(self.read.len()) {
                    None => self.read[index].unit(layer),
                    Some(index) => self.write.get(index).and_then(|guard| guard.unit(layer)),
                };
                let at = position % block_size * ROW;
                let row = unit.and_then(|unit| unit.get(at..at + ROW)).unwrap_or(&[]);
                for word in row.chunks_exact(4) {
                    let word = u32::from_le_bytes([word[0], word[1], word[2], word[3]]);
                    digest = mix(digest ^ u64::from(word));
                }
                if layer == first
                    && let Some(token) = row.first_chunk()
                {
                    tokens.push(u32::from_le_bytes(*token));
                }
            }
        }
        (tokens, digest)
    }
}

fn write_row(
    guard: &mut BlockWrite<'_>,
    layers: Range<usize>,
    offset: usize,
    position: usize,
    token: TokenId,
) {
    for layer in layers {
        let check = mix(mix(position as u64 ^ (layer as u64) << 56) ^ u64::from(token));
        let Some(row) = guard
            .unit_mut(layer)
            .and_then(|unit| unit.get_mut(offset * ROW..(offset + 1) * ROW))
        else {
            continue;
        };
        row[..4].copy_from_slice(&token.to_le_bytes());
        row[4..8].copy_from_slice(&(position as u32).to_le_bytes());
        row[8..].copy_from_slice(&check.to_le_bytes());
    }
}

/// The finaliser of splitmix64.
fn mix(value: u64) -> u64 {
    let mut z = value.wrapping_add(0x9E37_79B9_7F4A_7C15);
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

/// The character that stands for a byte in byte-level vocabularies (GPT-2's table): printable Latin-1
/// characters stand for themselves, the others for those from U+0100 on.
fn byte_char(byte: u8) -> char {
    let plain = |b: u8| matches!(b, b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF);
    if plain(byte) {
        return char::from(byte);
    }
    let before = (0..byte).filter(|&b| !plain(b)).count() as u32;
    char::from_u32(0x100 + before).unwrap_or('\u{FFFD}')
}
