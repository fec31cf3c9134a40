use crate::{ExecError, SeqWork};
use std::ops::Range;
use twinfer_kernels::{DType, store_f32};
use twinfer_sys::{BlockArena, BlockError, BlockRead, BlockWrite};

/// Borrows of all blocks that a step touches: for each sequence the blocks before its first new
/// position for reading, the others for writing.
pub(crate) struct KvStep<'a> {
    seqs: Vec<SeqKv<'a>>,
    block_size: usize,
    row_bytes: usize,
    dtype: DType,
}

struct SeqKv<'a> {
    /// Blocks `0..reads.len()`.
    reads: Vec<BlockRead<'a>>,
    /// The blocks behind them.
    writes: Vec<BlockWrite<'a>>,
    start: usize,
    tokens: usize,
}

/// One layer's units of all sequences, in order of position.
pub(crate) struct LayerUnits<'a> {
    units: Vec<&'a [u8]>,
    ends: Vec<usize>,
}

impl<'a> KvStep<'a> {
    /// Borrows the blocks of a batch. `width` values of `dtype` per position.
    pub(crate) fn open(
        arena: &'a BlockArena,
        works: &[SeqWork<'_>],
        block_size: usize,
        width: usize,
        dtype: DType,
    ) -> Result<Self, ExecError> {
        let mut seqs = Vec::with_capacity(works.len());
        for work in works {
            let end = work.start + work.tokens.len();
            let blocks = work.blocks.get(..end.div_ceil(block_size)).ok_or_else(|| {
                ExecError::OutOfRange(format!(
                    "{end} positions in {} blocks of {block_size}",
                    work.blocks.len()
                ))
            })?;
            let (old, new) = blocks.split_at(work.start / block_size);
            seqs.push(SeqKv {
                reads: old
                    .iter()
                    .map(|block| arena.read(*block))
                    .collect::<Result<_, _>>()
                    .map_err(refused)?,
                writes: new
                    .iter()
                    .map(|block| arena.write(*block))
                    .collect::<Result<_, _>>()
                    .map_err(refused)?,
                start: work.start,
                tokens: work.tokens.len(),
            });
        }
        Ok(Self {
            seqs,
            block_size,
            row_bytes: width * dtype.size(),
            dtype,
        })
    }

    /// Rounds the batch's rows `[rows, width]` to the KV type and stores them.
    pub(crate) fn write(&mut self, layer: usize, rows: &[f32]) -> Result<(), ExecError> {
        let width = self.row_bytes / self.dtype.size();
        let mut rows = rows.chunks_exact(width);
        for seq in &mut self.seqs {
            let first_block = seq.reads.len();
            for (position, row) in (seq.start..seq.start + seq.tokens).zip(&mut rows) {
                let offset = position % self.block_size * self.row_bytes;
                let unit = seq
                    .writes
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

    /// The units of a layer.
    pub(crate) fn units(&self, layer: usize) -> Result<LayerUnits<'_>, ExecError> {
        let count = self
            .seqs
            .iter()
            .map(|seq| seq.reads.len() + seq.writes.len())
            .sum();
        let mut units = Vec::with_capacity(count);
        let mut ends = Vec::with_capacity(self.seqs.len());
        for seq in &self.seqs {
            for block in &seq.reads {
                units.push(block.unit(layer).ok_or_else(|| no_unit(layer))?);
            }
            for block in &seq.writes {
                units.push(block.unit(layer).ok_or_else(|| no_unit(layer))?);
            }
            ends.push(units.len());
        }
        Ok(LayerUnits { units, ends })
    }
}

impl LayerUnits<'_> {
    /// The units of one sequence.
    pub(crate) fn of(&self, work: usize) -> &[&[u8]] {
        let start = if work == 0 { 0 } else { self.ends[work - 1] };
        let range: Range<usize> = start..self.ends[work];
        &self.units[range]
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
