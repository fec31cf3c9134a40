use crate::eplb::LoadStats;
use crate::model::{
    Decoder, DraftScratch, KvBuffers, KvLayout, KvStep, Probe, Scratch, Seating, Span, Step, Taps,
    sized,
};
use crate::phase::Phase;
use crate::{DraftWork, ExecError, Executor, KvGeometry, SeqWork, Tap};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use twinfer_kernels::{DType, KernelError, ThreadTeam, Weight};
use twinfer_protocol::TokenId;
use twinfer_sys::BlockArena;

/// A model on this machine's cores.
pub struct CpuExecutor {
    model: Decoder,
    team: ThreadTeam,
    /// Core of the calling thread, until it is pinned.
    pin: Option<usize>,
    arena: Arc<BlockArena>,
    geometry: KvGeometry,
    vocab_size: usize,
    max_context: usize,
    scratch: Scratch,
    /// Rows of the last step, by its works; empty after a failure.
    spans: Vec<Span>,
    drafting: DraftScratch,
    kv_buffers: KvBuffers,
    progress: Arc<AtomicU64>,
    probe: Option<Box<dyn Probe>>,
    /// Passes of the draft layer behind every step of all ranks; none for a rank alone.
    draft_rounds: Option<usize>,
    /// If experts move between ranks.
    seating: Option<Seating>,
}

impl CpuExecutor {
    pub(crate) fn new(
        model: Decoder,
        team: ThreadTeam,
        pin: Option<usize>,
        arena: Arc<BlockArena>,
        geometry: KvGeometry,
        vocab_size: usize,
        max_context: usize,
    ) -> Self {
        // A sequence's blocks are listed in every step, more of them as it grows.
        let blocks = arena.num_blocks() as usize;
        let mut scratch = Scratch::default();
        scratch.attention.units.reserve(blocks);
        Self {
            model,
            team,
            pin,
            arena,
            geometry,
            vocab_size,
            max_context,
            scratch,
            spans: Vec::new(),
            drafting: DraftScratch::default(),
            kv_buffers: KvBuffers::with_room(blocks),
            progress: Arc::default(),
            probe: None,
            draft_rounds: None,
            seating: None,
        }
    }

    /// Moves experts between steps; there are `experts` in a layer.
    pub(crate) fn set_seating(&mut self, seating: Seating, experts: usize) {
        self.scratch.moe.loads = Some(LoadStats::new(self.model.layers(), experts));
        self.seating = Some(seating);
    }

    /// Runs `rounds` passes of the draft layer behind every step, as all ranks do, with or without rows.
    pub(crate) fn set_draft_rounds(&mut self, rounds: usize) {
        self.draft_rounds = Some(rounds);
    }

    /// Takes part in the rounds of drafting from `first` on without rows.
    fn serve_drafts(&mut self, first: usize) -> Result<(), ExecError> {
        for _ in first..self.draft_rounds.unwrap_or(0) {
            let scratch = &mut self.scratch;
            self.model
                .serve_draft(&self.team, &self.progress, scratch)?;
        }
        Ok(())
    }

    fn pin_once(&mut self) {
        if let Some(cpu) = self.pin.take() {
            // The worker was pinned beside it, so the core is permitted; unpinned it would only be slower.
            let _ = twinfer_sys::pin_thread(&[cpu]);
        }
    }

    /// Sets or takes away the probe that sees activations; returns the one before. Results are the
    /// same with and without.
    pub fn set_probe(&mut self, probe: Option<Box<dyn Probe>>) -> Option<Box<dyn Probe>> {
        std::mem::replace(&mut self.probe, probe)
    }

    /// The packed matrices of a layer's network that are gate above up, `[2 * width, hidden]`, to compare models by: one of a
    /// dense network, or those of this rank's routed experts in their order; none where there is no such layer.
    pub fn gate_up(&self, layer: usize) -> Vec<&Weight> {
        self.model.gate_up(layer)
    }

    /// Compute threads.
    pub fn threads(&self) -> usize {
        self.team.threads()
    }

    fn layout(&self) -> KvLayout {
        KvLayout {
            block_size: self.geometry.block_size,
            width: self.geometry.width,
            dtype: if self.geometry.value_bytes == 2 {
                DType::Bf16
            } else {
                DType::F32
            },
        }
    }

    fn run(&mut self, batch: &[SeqWork<'_>], logits: &mut Vec<f32>) -> Result<(), ExecError> {
        let layout = self.layout();
        let blocks = batch.iter().map(|work| work.blocks);
        let buffers = std::mem::take(&mut self.kv_buffers);
        let places = self.spans.iter().zip(blocks);
        let mut kv = KvStep::open(&self.arena, layout, buffers, places)?;
        let step = Step {
            team: &self.team,
            spans: &self.spans,
            rows: self.spans.last().map_or(0, |span| span.rows.end),
            kv_type: layout.dtype,
            block_size: layout.block_size,
            progress: &self.progress,
        };
        let mut taps = Taps::new(self.probe.as_deref_mut(), self.spans.iter().enumerate());
        self.model.forward(
            &step,
            batch,
            &mut kv,
            &mut self.scratch,
            &mut self.drafting.known,
            &mut taps,
            logits,
        )?;
        self.kv_buffers = kv.close();
        Ok(())
    }

    /// One pass of the MTP layer: in round 0 over the settled rows of all works, later over the last
    /// draft of those that want more.
    fn draft_round(
        &mut self,
        works: &[DraftWork<'_>],
        round: usize,
        drafts: &mut [TokenId],
    ) -> Result<(), ExecError> {
        let layout = self.layout();
        let (width, vocab) = (self.model.hidden(), self.vocab_size);
        let state = &mut self.drafting;
        state.works.clear();
        state.spans.clear();
        let mut rows = 0;
        for (index, work) in works.iter().enumerate() {
            if round > 0 && work.count <= round {
                continue;
            }
            let base = self.spans[work.work].position;
            let (first, count) = match round {
                0 => (work.rows.start, work.rows.len()),
                later => (work.rows.end - 1 + later, 1),
            };
            state.works.push(index);
            state.spans.push(Span {
                rows: rows..rows + count,
                position: base + first,
            });
            rows += count;
        }
        let step = Step {
            team: &self.team,
            spans: &state.spans,
            rows,
            kv_type: layout.dtype,
            block_size: layout.block_size,
            progress: &self.progress,
        };
        let blocks = state.works.iter().map(|index| works[*index].blocks);
        let buffers = std::mem::take(&mut self.kv_buffers);
        let places = state.spans.iter().zip(blocks);
        let mut kv = KvStep::open(&self.arena, layout, buffers, places)?;
        let (joined, scratch) = (&mut state.joined, &mut self.scratch);
        if round == 0 {
            let (known, spans) = (&state.known, &self.spans);
            let rows = works.iter().flat_map(|work| {
                let first = spans[work.work].rows.start;
                let rows = work.rows.clone().zip(work.next);
                rows.map(move |(row, token)| (*token, &known[(first + row) * width..][..width]))
            });
            self.model.draft(&step, rows, &mut kv, joined, scratch)?;
        } else {
            let (last, starts) = (&state.last, &state.starts);
            let rows = state.works.iter().map(|index| {
                let token = drafts[starts[*index] + round - 1];
                (token, &last[index * width..][..width])
            });
            self.model.draft(&step, rows, &mut kv, joined, scratch)?;
        }
        self.kv_buffers = kv.close();
        let logits = &mut state.logits;
        if round == 0
            && let Some(probe) = self.probe.as_deref_mut()
        {
            self.model
                .draft_logits(&self.team, 0..rows, scratch, logits)?;
            let works = state.works.iter().map(|index| works[*index].work);
            let mut taps = Taps::new(Some(probe), works.zip(&state.spans));
            taps.see(Tap::DraftNorm, 0, &scratch.wanted_normed[..rows * width]);
            taps.see(Tap::DraftLogits, 0, &logits[..rows * vocab]);
        }
        let (round_works, spans) = (&state.works, &state.spans);
        let wanted = || {
            let all = round_works.iter().zip(spans);
            all.filter(|(index, _)| works[**index].count > round)
        };
        let ends = wanted().map(|(_, span)| span.rows.end - 1);
        self.model.draft_logits(&self.team, ends, scratch, logits)?;
        let last = sized(&mut state.last, works.len() * width);
        for (place, (index, _)) in wanted().enumerate() {
            let normed = &scratch.wanted_normed[place * width..][..width];
            last[index * width..][..width].copy_from_slice(normed);
            let row = &logits[place * vocab..][..vocab];
            drafts[state.starts[*index] + round] = likeliest(row);
        }
        Ok(())
    }

    fn check_drafts(&self, works: &[DraftWork<'_>]) -> Result<(), ExecError> {
        let bad = |index: usize, what: &str| {
            Err(ExecError::OutOfRange(format!("draft work {index}: {what}")))
        };
        if !self.model.has_mtp() {
            return Err(ExecError::OutOfRange(
                "the model has no draft layer".to_owned(),
            ));
        }
        for (index, work) in works.iter().enumerate() {
            let Some(span) = self.spans.get(work.work) else {
                return bad(index, "no such work in the last step");
            };
            if work.rows.is_empty() || work.rows.end > span.rows.len() {
                return bad(index, "rows that the last step did not compute");
            }
            if work.next.len() != work.rows.len() {
                return bad(index, "not one next token per row");
            }
            if let Some(token) = work.next.iter().find(|t| **t as usize >= self.vocab_size) {
                return bad(
                    index,
                    &format!("token {token}; allowed are 0 to {}", self.vocab_size - 1),
                );
            }
        }
        Ok(())
    }

    fn check(&self, batch: &[SeqWork<'_>]) -> Result<(), ExecError> {
        for (index, work) in batch.iter().enumerate() {
            let end = work.start.checked_add(work.tokens.len());
            if work.tokens.is_empty() || end.is_none_or(|end| end > self.max_context) {
                return Err(ExecError::OutOfRange(format!(
                    "work {index} has {} tokens from position {}; allowed are 1 or more up to position {}",
                    work.tokens.len(),
                    work.start,
                    self.max_context
                )));
            }
            if let Some(from) = work.logits_from.filter(|from| *from > work.tokens.len()) {
                return Err(ExecError::OutOfRange(format!(
                    "logits of work {index} from row {from}; allowed are 0 to {}",
                    work.tokens.len()
                )));
            }
            if let Some(token) = work
                .tokens
                .iter()
                .find(|token| **token as usize >= self.vocab_size)
            {
                return Err(ExecError::OutOfRange(format!(
                    "token {token} of work {index}; allowed are 0 to {}",
                    self.vocab_size - 1
                )));
            }
        }
        Ok(())
    }
}

impl Executor for CpuExecutor {
    fn geometry(&self) -> KvGeometry {
        self.geometry
    }

    fn arena(&self) -> &Arc<BlockArena> {
        &self.arena
    }

    fn vocab_size(&self) -> usize {
        self.vocab_size
    }

    fn max_context(&self) -> usize {
        self.max_context
    }

    fn execute(&mut self, batch: &[SeqWork<'_>], logits: &mut Vec<f32>) -> Result<(), ExecError> {
        self.spans.clear();
        if batch.is_empty() {
            logits.clear();
            return Ok(());
        }
        self.check(batch).inspect_err(|_| logits.clear())?;
        self.pin_once();
        let mut rows = 0;
        for work in batch {
            self.spans.push(Span {
                rows: rows..rows + work.tokens.len(),
                position: work.start,
            });
            rows += work.tokens.len();
        }
        let result = self.run(batch, logits);
        if result.is_err() {
            self.spans.clear();
            logits.clear();
        }
        result
    }

    fn draft_layers(&self) -> usize {
        usize::from(self.model.has_mtp())
    }

    fn draft(
        &mut self,
        works: &[DraftWork<'_>],
        drafts: &mut Vec<TokenId>,
    ) -> Result<(), ExecError> {
        drafts.clear();
        if works.is_empty() {
            return self.serve_drafts(0);
        }
        self.check_drafts(works)?;
        let state = &mut self.drafting;
        state.starts.clear();
        let mut total = 0;
        for work in works {
            state.starts.push(total);
            total += work.count;
        }
        drafts.resize(total, 0);
        let rounds = works.iter().map(|work| work.count).max().unwrap_or(0);
        let rounds = rounds.max(1);
        if let Some(most) = self.draft_rounds.filter(|most| rounds > *most) {
            return Err(ExecError::OutOfRange(format!(
                "{rounds} drafts; the ranks agreed on {most} at most"
            )));
        }
        for round in 0..rounds {
            self.draft_round(works, round, drafts)?;
        }
        self.serve_drafts(rounds)
    }

    fn dummy(&mut self) -> Result<(), ExecError> {
        self.pin_once();
        self.spans.clear();
        let scratch = &mut self.scratch;
        self.model.serve(&self.team, &self.progress, scratch)?;
        self.serve_drafts(0)
    }

    fn rearrange(&mut self, phase: Phase) -> Result<(), ExecError> {
        match (&mut self.seating, &mut self.scratch.moe.loads) {
            (Some(seating), Some(loads)) => {
                seating.after_step(phase, &mut self.model, loads, &self.progress)
            }
            _ => Ok(()),
        }
    }

    fn progress(&self) -> Option<Arc<AtomicU64>> {
        Some(Arc::clone(&self.progress))
    }
}

impl std::fmt::Debug for CpuExecutor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("CpuExecutor")
            .field("geometry", &self.geometry)
            .field("threads", &self.team.threads())
            .field("isa", &self.team.isa().name())
            .finish_non_exhaustive()
    }
}

/// The first of the largest values.
fn likeliest(logits: &[f32]) -> TokenId {
    let mut best = (0, f32::NEG_INFINITY);
    for (token, value) in logits.iter().enumerate() {
        if *value > best.1 {
            best = (token, *value);
        }
    }
    best.0 as TokenId
}

impl From<KernelError> for ExecError {
    fn from(error: KernelError) -> Self {
        match error {
            KernelError::Panicked(message) => Self::Thread(message),
            KernelError::Shape(_) => Self::OutOfRange(error.to_string()),
        }
    }
}
