use crate::model::{Decoder, KvBuffers, KvLayout, KvStep, Probe, Scratch, Span, Step, Taps};
use crate::{ExecError, Executor, KvGeometry, SeqWork};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use twinfer_kernels::{DType, KernelError, ThreadTeam};
use twinfer_sys::BlockArena;

/// A model on this machine's cores.
pub struct CpuExecutor {
    model: Decoder,
    team: ThreadTeam,
    arena: Arc<BlockArena>,
    geometry: KvGeometry,
    vocab_size: usize,
    max_context: usize,
    scratch: Scratch,
    spans: Vec<Span>,
    kv_buffers: KvBuffers,
    progress: Arc<AtomicU64>,
    probe: Option<Box<dyn Probe>>,
}

impl CpuExecutor {
    pub(crate) fn new(
        model: Decoder,
        team: ThreadTeam,
        arena: Arc<BlockArena>,
        geometry: KvGeometry,
        vocab_size: usize,
        max_context: usize,
    ) -> Self {
        Self {
            model,
            team,
            arena,
            geometry,
            vocab_size,
            max_context,
            scratch: Scratch::default(),
            spans: Vec::new(),
            kv_buffers: KvBuffers::default(),
            progress: Arc::default(),
            probe: None,
        }
    }

    /// Sets or takes away the probe that sees activations; returns the one before. Results are the
    /// same with and without.
    pub fn set_probe(&mut self, probe: Option<Box<dyn Probe>>) -> Option<Box<dyn Probe>> {
        std::mem::replace(&mut self.probe, probe)
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
        logits.clear();
        if batch.is_empty() {
            return Ok(());
        }
        self.check(batch)?;
        let layout = self.layout();
        self.spans.clear();
        let mut rows = 0;
        for work in batch {
            self.spans.push(Span {
                rows: rows..rows + work.tokens.len(),
                position: work.start,
            });
            rows += work.tokens.len();
        }
        let blocks = batch.iter().map(|work| work.blocks);
        let buffers = std::mem::take(&mut self.kv_buffers);
        let mut kv = KvStep::open(&self.arena, layout, buffers, self.spans.iter().zip(blocks))?;
        let step = Step {
            team: &self.team,
            spans: &self.spans,
            rows,
            kv_type: layout.dtype,
            block_size: layout.block_size,
            progress: &self.progress,
        };
        let mut taps = Taps::new(self.probe.as_deref_mut(), batch);
        let scratch = &mut self.scratch;
        self.model
            .forward(&step, batch, &mut kv, scratch, &mut taps, logits)?;
        self.kv_buffers = kv.close();
        Ok(())
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

impl From<KernelError> for ExecError {
    fn from(error: KernelError) -> Self {
        match error {
            KernelError::Panicked(message) => Self::Thread(message),
            KernelError::Shape(_) => Self::OutOfRange(error.to_string()),
        }
    }
}
