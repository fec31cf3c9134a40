use super::scratch::recycled;
use super::step::Span;
use crate::ExecError;
use std::ops::Range;
use twinfer_kernels::{DType, store_f32};
use twinfer_protocol::BlockId;
use twinfer_sys::{BlockArena, BlockError, BlockRead, BlockWrite};

/// Borrows of all blocks that a step touches: for each sequence the blocks before its first new
/// position for reading, the others for writing.
pub(crate) struct KvStep<'a> {
    reads: Vec<BlockRead<'a>>,
    writes: Vec<BlockWrite<'a>>,
    seqs: Vec<SeqKv>,
    block_size: usize,
    row_bytes: usize,
    dtype: DType,
}

/// Memory of a [`KvStep`], kept between steps.
#[derive(Default)]
pub(crate) struct KvBuffers {
    reads: Vec<BlockRead<'static>>,
    writes: Vec<BlockWrite<'static>>,
    seqs: Vec<SeqKv>,
}

impl KvBuffers {
    /// For up to `blocks` blocks, so that sequences can grow without new memory.
    pub(crate) fn with_room(blocks: usize) -> Self {
        Self {
            reads: Vec::with_capacity(blocks),
            writes: Vec::new(),
            seqs: Vec::new(),
        }
    }
}

struct SeqKv {
    /// Of the blocks borrowed for reading; they hold the positions before those of `writes`.
    reads: Range<usize>,
    writes: Range<usize>,
    start: usize,
    tokens: usize,
}

/// Shape of a position's KV in one layer.
#[derive(Clone, Copy, Debug)]
pub(crate) struct KvLayout {
    pub(crate) block_size: usize,
    /// Values per position.
    pub(crate) width: usize,
    pub(crate) dtype: DType,
}

impl<'a> KvStep<'a> {
    /// Borrows the blocks of a batch: spans of rows, each with its block table.
    pub(crate) fn open<'b>(
        arena: &'a BlockArena,
        layout: KvLayout,
        buffers: KvBuffers,
        works: impl Iterator<Item = (&'b Span, &'b [BlockId])>,
    ) -> Result<Self, ExecError> {
        let mut kv = Self {
            reads: recycled(buffers.reads),
            writes: recycled(buffers.writes),
            seqs: recycled(buffers.seqs),
            block_size: layout.block_size,
            row_bytes: layout.width * layout.dtype.size(),
            dtype: layout.dtype,
        };
        for (span, blocks) in works {
            let end = span.position + span.rows.len();
            let needed = end.div_ceil(layout.block_size);
            let blocks = blocks.get(..needed).ok_or_else(|| {
                ExecError::OutOfRange(format!(
                    "{end} positions in {} blocks of {}",
                    blocks.len(),
                    layout.block_size
                ))
            })?;
            let (old, new) = blocks.split_at(span.position / layout.block_size);
            let (reads, writes) = (kv.reads.len(), kv.writes.len());
            for block in old {
                kv.reads.push(arena.read(*block).map_err(refused)?);
            }
            for block in new {
                kv.writes.push(arena.write(*block).map_err(refused)?);
            }
            kv.seqs.push(SeqKv {
                reads: reads..kv.reads.len(),
                writes: writes..kv.writes.len(),
                start: span.position,
                tokens: span.rows.len(),
            });
        }
        Ok(kv)
    }

    /// Gives the blocks back.
    pub(crate) fn close(self) -> KvBuffers {
        KvBuffers {
            reads: recycled(self.reads),
            writes: recycled(self.writes),
            seqs: recycled(self.seqs),
        }
    }

    /// Rounds the batch's rows `[rows, width]` to the KV type and stores them.
    pub(crate) fn write(&mut self, layer: usize, rows: &[f32]) -> Result<(), ExecError> {
        let width = self.row_bytes / self.dtype.size();
        let mut rows = rows.chunks_exact(width);
        for seq in &self.seqs {
            let first_block = seq.start / self.block_size;
            let writes = &mut self.writes[seq.writes.clone()];
            for (position, row) in (seq.start..seq.start + seq.tokens).zip(&mut rows) {
                let offset = position % self.block_size * self.row_bytes;
                let unit = writes
                    .get_mut(position / self.block_size - first_block)
                    .and_then(|block| block.unit_mut(layer))
                    .and_then(|unit| unit.get_mut(offset..offset + self.row_bytes))
                    .ok_or_else(|| no_unit(layer))?;
                store_f32(self.dtype, row, unit)
                    .map_err(|error| ExecError::OutOfRange(error.to_string()))?;
            }
        }
        Ok(())
    }

    /// Appends the units of a layer to `units`: those of each sequence in order of position, as many as
    /// [`KvStep::blocks`] says.
    pub(crate) fn units<'s>(
        &'s self,
        layer: usize,
        units: &mut Vec<&'s [u8]>,
    ) -> Result<(), ExecError> {
        for seq in &self.seqs {
            for block in &self.reads[seq.reads.clone()] {
                units.push(block.unit(layer).ok_or_else(|| no_unit(layer))?);
            }
            for block in &self.writes[seq.writes.clone()] {
                units.push(block.unit(layer).ok_or_else(|| no_unit(layer))?);
            }
        }
        Ok(())
    }

    /// Blocks of each sequence, as ranges of what [`KvStep::units`] appends.
    pub(crate) fn blocks(&self) -> impl Iterator<Item = Range<usize>> {
        let mut end = 0;
        self.seqs.iter().map(move |seq| {
            let start = end;
            end += seq.reads.len() + seq.writes.len();
            start..end
        })
    }
}

fn no_unit(layer: usize) -> ExecError {
    ExecError::OutOfRange(format!("the KV arena has no such unit in layer {layer}"))
}

fn refused(error: BlockError) -> ExecError {
    match error {
        BlockError::Busy { block, .. } => ExecError::BlockBusy { block },
        BlockError::OutOfRange { .. } => ExecError::OutOfRange(error.to_string()),
    }
}
