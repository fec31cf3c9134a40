use super::step::Span;
use std::ops::Range;

/// A named place in the forward pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Tap {
    /// Residual stream before a layer; layer `layers` is the output of the last. `[rows, hidden]`.
    Hidden,
    /// Query of grouped-query attention, after norm and rotation. `[rows, heads * head_dim]`.
    Query,
    /// Its keys, before they are rounded to the KV type. `[rows, kv_heads * head_dim]`.
    Key,
    /// Its values, before they are rounded to the KV type. `[rows, kv_heads * head_dim]`.
    Value,
    /// Query without position, after its norm and projection. `[rows, heads * nope]`.
    QueryNope,
    /// Query with position, after rotation. `[rows, heads * rope]`.
    QueryRope,
    /// Latent after its norm, before it is rounded to the KV type. `[rows, kv_lora_rank]`.
    Latent,
    /// Shared key after rotation, before it is rounded to the KV type. `[rows, rope]`.
    KeyRope,
    /// What attention adds to the residual stream. `[rows, hidden]`.
    AttentionOut,
    /// Chosen experts in slot order, as numbers. `[rows, top_k]`.
    RouterExperts,
    /// Their weights. `[rows, top_k]`.
    RouterWeights,
    /// What goes into the network, dense or of experts, and its router: behind the norm. `[rows, hidden]`.
    MlpIn,
    /// What the network, dense or of experts, adds to the residual stream. `[rows, hidden]`.
    MlpOut,
    /// Input of the head. `[rows, hidden]`.
    FinalNorm,
    /// Logits. `[rows, vocab]`.
    Logits,
    /// Output of the MTP layer behind its norm, first pass of a draft. `[rows, hidden]`.
    DraftNorm,
    /// Logits of it. `[rows, vocab]`.
    DraftLogits,
}

/// The rows of a step: for each its place in the batch and its position in its sequence.
#[derive(Clone, Copy, Debug)]
pub struct ProbeRows<'a> {
    /// Index of the row's work in the batch.
    pub works: &'a [u32],
    /// Position of the row in its sequence.
    pub positions: &'a [u32],
}

/// Sees activations on their way, for parity tests and to find the first divergence of two runs.
/// With a probe set, final norm and logits are computed for all rows; without one only for those
/// that ask, with equal bits.
pub trait Probe: Send {
    /// `values` is row-major, one row per entry of `rows`. `layer` is 0 for taps outside of layers.
    fn record(&mut self, tap: Tap, layer: usize, rows: ProbeRows<'_>, values: &[f32]);
}

/// The probe of a step, if any, and the rows it is told of.
pub(crate) struct Taps<'a> {
    probe: Option<&'a mut (dyn Probe + 'static)>,
    works: Vec<u32>,
    positions: Vec<u32>,
}

impl<'a> Taps<'a> {
    /// `spans` are the step's rows, each with the number of its work.
    pub(crate) fn new<'s>(
        probe: Option<&'a mut (dyn Probe + 'static)>,
        spans: impl Iterator<Item = (usize, &'s Span)>,
    ) -> Self {
        let mut taps = Self {
            probe,
            works: Vec::new(),
            positions: Vec::new(),
        };
        if taps.on() {
            for (work, span) in spans {
                for position in span.position..span.position + span.rows.len() {
                    taps.works.push(work as u32);
                    taps.positions.push(position as u32);
                }
            }
        }
        taps
    }

    /// Without a probe.
    pub(crate) fn off() -> Self {
        Self {
            probe: None,
            works: Vec::new(),
            positions: Vec::new(),
        }
    }

    /// Is a probe set?
    pub(crate) fn on(&self) -> bool {
        self.probe.is_some()
    }

    pub(crate) fn see(&mut self, tap: Tap, layer: usize, values: &[f32]) {
        if let Some(probe) = self.probe.as_deref_mut() {
            let rows = ProbeRows {
                works: &self.works,
                positions: &self.positions,
            };
            probe.record(tap, layer, rows, values);
        }
    }

    /// As [`Taps::see`] for columns `columns` of every `width` values.
    pub(crate) fn see_part(
        &mut self,
        tap: Tap,
        layer: usize,
        values: &[f32],
        width: usize,
        columns: Range<usize>,
    ) {
        if self.on() {
            let part: Vec<f32> = values
                .chunks_exact(width)
                .flat_map(|row| row[columns.clone()].iter().copied())
                .collect();
            self.see(tap, layer, &part);
        }
    }
}
