//! Experts spread over the ranks of an instance: rows travel to the ranks that have their experts, each expert's output
//! comes back on its own, and the home rank sums them in slot order, as a rank alone does. Every element is the result of
//! the same operations in the same order, so answers are those of one rank bit for bit.
//!
//! A part of the first exchange is `rows, items: u32`, then `items` times `row, seat: u32`, then `rows` rows
//! ([`RowForm`]). If all rows go to all ranks ([`MoeComm::AllGather`]) it is `rows, 0: u32`, then the chosen experts
//! `[rows, top_k]: u32`, then the rows, and zeros up to the length of the fullest rank's if parts are padded. A part of
//! the second is the items' outputs in order. Numbers are in the machine's order of bytes: ranks are of one numerics class.

mod travel;

use super::ffn::Ffn;
use super::moe::MoeScratch;
use super::rows::for_rows;
use super::scratch::{recycled, sized};
use crate::ExecError;
use crate::exchange::{RankLink, Sent};
use crate::placement::{Arrivals, Dispatch, DispatchError, ExpertPlacement, Item};
use std::ops::Range;
use std::sync::Arc;
use twinfer_config::MoeComm;
use twinfer_config::model::expert_of;
use twinfer_kernels::{ThreadTeam, Weight, grouped_product_gated, grouped_product_gathered};

use travel::PackedRows;
pub(crate) use travel::RowForm;

/// Bytes before the items.
const HEAD: usize = 8;
const ITEM: usize = 8;
/// A row's expert in one slot.
const CHOICE: usize = 4;
const VALUE: usize = 4;

/// Which experts are where, and the way there.
#[derive(Clone, Debug)]
pub(crate) struct Spread {
    pub(crate) link: Arc<RankLink>,
    pub(crate) placement: Arc<ExpertPlacement>,
    pub(crate) comm: MoeComm,
    /// Rows of a rank's step at most.
    pub(crate) max_rows: usize,
}

/// Buffers, kept between steps.
#[derive(Debug, Default)]
pub(crate) struct SpreadScratch {
    chosen: Vec<u32>,
    weights: Vec<f32>,
    dispatch: Dispatch,
    arrivals: Arrivals,
    packed: PackedRows,
    send: Vec<u8>,
    counts: Vec<usize>,
    /// Those of one sender.
    gathered: Vec<Item>,
    /// What came: items and rows of all senders, and how many of each.
    items: Vec<Item>,
    rows: Vec<f32>,
    parts: Vec<(Range<usize>, u32)>,
    outputs: Vec<f32>,
}

/// What a layer's exchanges are about.
#[derive(Clone, Copy)]
pub(super) struct ExpertLayer<'a> {
    /// Those of [`Spread::own_experts`].
    pub(super) experts: &'a [Ffn],
    /// Tag of the first of the layer's two exchanges.
    pub(super) tag: u32,
    pub(super) hidden: usize,
    pub(super) intermediate: usize,
    pub(super) top_k: usize,
    pub(super) form: RowForm,
}

impl Spread {
    /// Experts that this rank has, in order of its seats.
    pub(crate) fn own_experts(&self) -> Vec<u32> {
        let own = self.placement.seats_of_rank(self.link.rank());
        let seats = self.placement.seats();
        own.filter_map(|seat| seats.get(seat as usize).copied())
            .collect()
    }

    /// Does this rank read the tensor? All but the experts of others.
    pub(crate) fn reads(&self, tensor: &str) -> bool {
        expert_of(tensor).is_none_or(|expert| {
            let rank = self.link.rank();
            let mut seats = self.placement.seats_of(expert).iter();
            seats.any(|seat| self.placement.rank_of(*seat) == rank)
        })
    }

    /// The weighted sums of the experts chosen in `scratch.slots` for the rows of `x`, in slot order, to `out`; `shared`,
    /// if any, is added last. The layer's experts also compute what other ranks' rows want of them, so a rank without
    /// rows takes part too.
    pub(super) fn run(
        &self,
        team: &ThreadTeam,
        layer: ExpertLayer<'_>,
        x: &[f32],
        shared: Option<&[f32]>,
        scratch: &mut MoeScratch,
        out: &mut [f32],
    ) -> Result<(), ExecError> {
        let ExpertLayer { hidden, top_k, .. } = layer;
        let count = x.len() / hidden * top_k;
        let spread = &mut scratch.spread;
        spread.chosen.clear();
        spread.weights.clear();
        for slot in &scratch.slots[..count] {
            spread.chosen.push(slot.expert);
            spread.weights.push(slot.weight);
        }
        let home = self.link.rank();
        spread
            .dispatch
            .plan(&self.placement, home, &spread.chosen, top_k)?;
        spread.packed.pack(layer.form, team.isa(), x, hidden)?;
        spread.items.clear();
        spread.rows.clear();
        spread.parts.clear();
        match self.comm {
            MoeComm::AllToAll => self.send_rows(layer, spread)?,
            MoeComm::AllGather => self.gather_rows(layer, spread)?,
        }
        self.compute(team, layer, scratch)?;
        self.return_outputs(layer, scratch)?;

        let SpreadScratch {
            dispatch,
            weights,
            outputs,
            ..
        } = &scratch.spread;
        let outputs = &outputs[..count * hidden];
        Ok(for_rows(team, out, hidden, |row, out| {
            let weights = &weights[row * top_k..(row + 1) * top_k];
            let shared = shared.map(|shared| &shared[row * hidden..(row + 1) * hidden]);
            // Lengths are equal by construction.
            let _ = dispatch.combine(row, weights, outputs, shared, out);
        })?)
    }

    /// The first exchange, into `items`, `rows` and `parts`: rows go where their experts are.
    fn send_rows(
        &self,
        layer: ExpertLayer<'_>,
        spread: &mut SpreadScratch,
    ) -> Result<(), ExecError> {
        let ExpertLayer {
            hidden,
            top_k,
            form,
            ..
        } = layer;
        spread.send.clear();
        spread.counts.clear();
        for to in 0..self.link.ranks() as usize {
            let start = spread.send.len();
            let (rows, items) = (spread.dispatch.rows_to(to), spread.dispatch.items_to(to));
            let head = [rows.len() as u32, items.len() as u32];
            spread.send.extend_from_slice(bytemuck::bytes_of(&head));
            for item in items {
                let item = [item.row, item.seat];
                spread.send.extend_from_slice(bytemuck::bytes_of(&item));
            }
            let rows = rows.iter().map(|row| *row as usize);
            spread.packed.write(form, rows, &mut spread.send);
            spread.counts.push(spread.send.len() - start);
        }
        let limit = HEAD + self.max_rows * top_k * ITEM + form.bytes(self.max_rows, hidden);
        let mut exchange = self.link.open();
        let at = self.link.place(layer.tag);
        exchange.all_to_all(at, &spread.send, &spread.counts, limit)?;
        self.link.count(Sent::Rows, spread.counts.iter().copied());
        for from in 0..self.link.ranks() {
            let part = exchange.received(from);
            self.take_sent(layer, part, spread)
                .ok_or_else(|| malformed(from, part.len()))?;
        }
        Ok(())
    }

    /// Rows and items of a part; none if it is no part.
    fn take_sent(
        &self,
        layer: ExpertLayer<'_>,
        part: &[u8],
        spread: &mut SpreadScratch,
    ) -> Option<()> {
        let (rows, items, rest) = self.head_of(part)?;
        (items as usize <= rows as usize * layer.top_k).then_some(())?;
        let (items, values) = rest.split_at_checked(items as usize * ITEM)?;
        let items: &[u32] = bytemuck::try_cast_slice(items).ok()?;
        let items = items.as_chunks::<2>().0.iter();
        let first = spread.items.len();
        spread.items.extend(items.map(|[row, seat]| Item {
            row: *row,
            seat: *seat,
        }));
        spread.parts.push((first..spread.items.len(), rows));
        let rows = rows as usize;
        layer
            .form
            .read(values, rows, layer.hidden, &mut spread.rows)
    }

    /// The first exchange, into `items`, `rows` and `parts`: all rows go to all ranks.
    fn gather_rows(
        &self,
        layer: ExpertLayer<'_>,
        spread: &mut SpreadScratch,
    ) -> Result<(), ExecError> {
        let rows = spread.chosen.len() / layer.top_k;
        let size =
            |rows: usize| HEAD + rows * layer.top_k * CHOICE + layer.form.bytes(rows, layer.hidden);
        spread.send.clear();
        let head = [rows as u32, 0];
        spread.send.extend_from_slice(bytemuck::bytes_of(&head));
        let chosen: &[u8] = bytemuck::cast_slice(&spread.chosen);
        spread.send.extend_from_slice(chosen);
        spread.packed.write(layer.form, 0..rows, &mut spread.send);
        let padded = self.link.padded_rows().min(self.max_rows);
        if spread.send.len() < size(padded) {
            spread.send.resize(size(padded), 0);
        }
        let mut exchange = self.link.open();
        let at = self.link.place(layer.tag);
        exchange.all_gather(at, &spread.send, size(self.max_rows))?;
        let ranks = self.link.ranks();
        self.link
            .count(Sent::Rows, (0..ranks).map(|_| spread.send.len()));
        for from in 0..ranks {
            let part = exchange.received(from);
            let known = self.head_of(part).filter(|(rows, ..)| {
                let own = size(*rows as usize);
                part.len() == own || (part.len() == size(padded) && own < part.len())
            });
            let (rows, _, rest) = known.ok_or_else(|| malformed(from, part.len()))?;
            let (chosen, rest) = rest.split_at(rows as usize * layer.top_k * CHOICE);
            let values = &rest[..layer.form.bytes(rows as usize, layer.hidden)];
            let chosen: &[u32] =
                bytemuck::try_cast_slice(chosen).map_err(|_| malformed(from, part.len()))?;
            let (own, items) = (self.link.rank(), &mut spread.gathered);
            Dispatch::gathered(&self.placement, own, from, chosen, layer.top_k, items)?;
            let first = spread.items.len();
            spread.items.extend_from_slice(items);
            spread.parts.push((first..spread.items.len(), rows));
            layer
                .form
                .read(values, rows as usize, layer.hidden, &mut spread.rows)
                .ok_or_else(|| malformed(from, part.len()))?;
        }
        Ok(())
    }

    /// Rows and items of a part by its head, and what is behind; none if no rank has as many rows.
    fn head_of<'a>(&self, part: &'a [u8]) -> Option<(u32, u32, &'a [u8])> {
        let (head, rest) = part.split_at_checked(HEAD)?;
        let [rows, items] = *bytemuck::try_cast_slice::<u8, u32>(head).ok()? else {
            return None;
        };
        (rows as usize <= self.max_rows).then_some((rows, items, rest))
    }

    /// Outputs of this rank's experts for all rows that came, into `scratch.output`.
    fn compute(
        &self,
        team: &ThreadTeam,
        layer: ExpertLayer<'_>,
        scratch: &mut MoeScratch,
    ) -> Result<(), ExecError> {
        let spread = &mut scratch.spread;
        let SpreadScratch { items, parts, .. } = spread;
        let senders = parts
            .iter()
            .map(|(range, rows)| (&items[range.clone()], *rows));
        let rank = self.link.rank();
        spread.arrivals.sort(&self.placement, rank, senders)?;
        let arrivals = &spread.arrivals;
        let count = arrivals.sources().len();
        let groups = |part: fn(&Ffn) -> &Weight| {
            let all = layer.experts.iter().enumerate();
            all.map(move |(seat, ffn)| (part(ffn), arrivals.places_of_seat(seat)))
                .filter(|(_, rows)| !rows.is_empty())
        };
        let gate_up = sized(&mut scratch.gate_up, count * 2 * layer.intermediate);
        let output = sized(&mut scratch.output, count * layer.hidden);
        let mut kept = recycled(std::mem::take(&mut scratch.groups));
        kept.extend(groups(|ffn| &ffn.gate_up));
        grouped_product_gathered(team, &spread.rows, arrivals.sources(), &kept, gate_up)?;
        kept.clear();
        kept.extend(groups(|ffn| &ffn.down));
        grouped_product_gated(team, gate_up, &kept, &mut scratch.gated, output)?;
        scratch.groups = recycled(kept);
        Ok(())
    }

    /// The second exchange, into `outputs`.
    fn return_outputs(
        &self,
        layer: ExpertLayer<'_>,
        scratch: &mut MoeScratch,
    ) -> Result<(), ExecError> {
        let ExpertLayer { hidden, top_k, .. } = layer;
        let spread = &mut scratch.spread;
        spread.send.clear();
        spread.counts.clear();
        for to in 0..self.link.ranks() as usize {
            let places = spread.arrivals.places_for(to);
            for &at in places {
                let output = &scratch.output[at as usize * hidden..][..hidden];
                spread.send.extend_from_slice(bytemuck::cast_slice(output));
            }
            spread.counts.push(places.len() * hidden * VALUE);
        }
        let limit = self.max_rows * top_k * hidden * VALUE;
        let mut exchange = self.link.open();
        let at = self.link.place(layer.tag + 1);
        exchange.all_to_all(at, &spread.send, &spread.counts, limit)?;
        self.link
            .count(Sent::Outputs, spread.counts.iter().copied());
        spread.outputs.clear();
        for from in 0..self.link.ranks() {
            let part = exchange.received(from);
            let wanted = spread.dispatch.outputs_from(from as usize).len() * hidden;
            match bytemuck::try_cast_slice::<u8, f32>(part) {
                Ok(values) if values.len() == wanted => spread.outputs.extend_from_slice(values),
                _ => return Err(malformed(from, part.len())),
            }
        }
        Ok(())
    }
}

fn malformed(rank: u32, bytes: usize) -> ExecError {
    ExecError::Ranks(format!(
        "rank {rank} sent {bytes} bytes that are not the rows or outputs of this step"
    ))
}

impl From<DispatchError> for ExecError {
    fn from(error: DispatchError) -> Self {
        Self::Ranks(error.to_string())
    }
}
