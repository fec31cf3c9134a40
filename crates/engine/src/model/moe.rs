//! Routed experts: rows are sorted by expert, one grouped product runs per projection, and each row's
//! outputs are summed in slot order.

use super::ffn::{Ffn, FfnNames};
use super::routing::{Slot, choose};
use super::rows::{for_row_pairs, for_rows};
use super::scratch::{recycled, sized};
use super::spread::{ExpertLayer, RowForm, Spread, SpreadScratch};
use super::step::Step;
use super::{Builder, Scratch, Tap, Taps};
use crate::eplb::LoadStats;
use crate::placement::ExpertPlacement;
use crate::{ExecError, ModelError};
use std::ops::Range;
use std::sync::Arc;
use twinfer_config::model::{MoeConfig, Routing};
use twinfer_kernels::{
    KernelError, ThreadTeam, Weight, add_scaled, grouped_product_gated, grouped_product_gathered,
    product,
};

/// Rough time to look at one expert for one slot.
const CHOICE_NANOSECONDS: usize = 2;

/// Tag of the first exchange of layer 0; smaller ones are those of the turn.
const FIRST_TAG: u32 = 16;

/// Router, routed experts and shared experts of a layer.
#[derive(Debug)]
pub(crate) struct Moe {
    config: MoeConfig,
    /// `[experts, hidden]`, in f32.
    router: Weight,
    /// Added to scores for the choice only; empty where there is none.
    bias: Vec<f32>,
    /// All, or those of this rank's seats.
    experts: Vec<Ffn>,
    shared: Option<Ffn>,
    spread: Option<Spread>,
    /// What rows travel as.
    form: RowForm,
}

#[derive(Debug, Default)]
pub(crate) struct MoeScratch {
    logits: Vec<f32>,
    pub(super) slots: Vec<Slot>,
    /// For each slot its row in the order sorted by expert.
    places: Vec<u32>,
    starts: Vec<u32>,
    /// For each place the row that goes there.
    sources: Vec<u32>,
    pub(super) gate_up: Vec<f32>,
    pub(super) gated: Vec<f32>,
    pub(super) output: Vec<f32>,
    /// Groups for the kernels; empty between uses.
    pub(super) groups: Vec<(&'static Weight, Range<usize>)>,
    pub(super) spread: SpreadScratch,
    /// How often experts were chosen, if that is asked.
    pub(crate) loads: Option<LoadStats>,
}

impl Moe {
    /// `path` is that of the layer's network; `names` those of a network's matrices.
    pub(crate) fn build(
        config: &MoeConfig,
        builder: &Builder<'_>,
        path: &str,
        names: FfnNames,
    ) -> Result<Self, ModelError> {
        let own = match builder.spread() {
            Some(spread) => spread.own_experts(),
            None => (0..config.experts as u32).collect(),
        };
        let experts = own
            .into_iter()
            .map(|expert| Ffn::build(builder, &format!("{path}.experts.{expert}"), names));
        Ok(Self {
            config: config.clone(),
            router: builder.router(&format!("{path}.gate.weight"))?,
            bias: if matches!(config.routing, Routing::BiasedSigmoid { .. }) {
                builder.vector(&format!("{path}.gate.e_score_correction_bias"))?
            } else {
                Vec::new()
            },
            experts: experts.collect::<Result<_, _>>()?,
            shared: if config.shared > 0 {
                Some(Ffn::build(
                    builder,
                    &format!("{path}.shared_experts"),
                    names,
                )?)
            } else {
                None
            },
            spread: builder.spread().cloned(),
            form: builder.row_form((0..config.experts).map(|expert| {
                let gate = names.gate;
                format!("{path}.experts.{expert}.{gate}.weight")
            })),
        })
    }

    /// `scratch.normed` to `scratch.out`.
    pub(crate) fn forward(
        &self,
        step: &Step<'_>,
        layer: usize,
        scratch: &mut Scratch,
        taps: &mut Taps<'_>,
    ) -> Result<(), ExecError> {
        let count = step.rows * self.router.cols();
        self.route(step.team, &scratch.normed[..count], &mut scratch.moe)?;
        let slots = &scratch.moe.slots[..step.rows * self.config.top_k];
        if let Some(loads) = &mut scratch.moe.loads {
            loads.count(layer, slots.iter().map(|slot| slot.expert));
        }
        if taps.on() {
            let experts: Vec<f32> = slots.iter().map(|slot| slot.expert as f32).collect();
            let weights: Vec<f32> = slots.iter().map(|slot| slot.weight).collect();
            taps.see(Tap::RouterExperts, layer, &experts);
            taps.see(Tap::RouterWeights, layer, &weights);
        }
        let x = &scratch.normed[..count];
        let shared = match &self.shared {
            None => None,
            Some(ffn) => {
                let out = sized(&mut scratch.shared, count);
                ffn.forward(step.team, x, &mut scratch.gate_up, &mut scratch.gated, out)?;
                Some(&*out)
            }
        };
        let out = sized(&mut scratch.out, count);
        match &self.spread {
            None => self.run_experts(step.team, x, shared, &mut scratch.moe, out)?,
            Some(spread) => {
                let layer = self.expert_layer(layer);
                spread.run(step.team, layer, x, shared, &mut scratch.moe, out)?;
            }
        }
        Ok(())
    }

    /// Where the layer's experts are, if they are spread over ranks.
    pub(super) fn placement(&self) -> Option<&ExpertPlacement> {
        self.spread.as_ref().map(|spread| &*spread.placement)
    }

    /// Says where they are from now on.
    pub(super) fn set_placement(&mut self, placement: ExpertPlacement) {
        if let Some(spread) = &mut self.spread {
            spread.placement = Arc::new(placement);
        }
    }

    /// Experts in order of this rank's seats; all without other ranks.
    pub(super) fn experts(&self) -> &[Ffn] {
        &self.experts
    }

    /// The same, to change their weights.
    pub(super) fn experts_mut(&mut self) -> &mut [Ffn] {
        &mut self.experts
    }

    /// The part of a rank without rows in the others' step: its experts compute for them.
    pub(crate) fn serve(
        &self,
        team: &ThreadTeam,
        layer: usize,
        scratch: &mut Scratch,
    ) -> Result<(), ExecError> {
        let Some(spread) = &self.spread else {
            return Ok(());
        };
        let layer = self.expert_layer(layer);
        spread.run(team, layer, &[], None, &mut scratch.moe, &mut [])
    }

    fn expert_layer(&self, layer: usize) -> ExpertLayer<'_> {
        ExpertLayer {
            experts: &self.experts,
            tag: FIRST_TAG + 2 * layer as u32,
            hidden: self.router.cols(),
            intermediate: self.config.intermediate,
            top_k: self.config.top_k,
            form: self.form,
        }
    }

    /// Chooses experts for the rows of `x` into `scratch.slots` `[rows, top_k]`.
    fn route(
        &self,
        team: &ThreadTeam,
        x: &[f32],
        scratch: &mut MoeScratch,
    ) -> Result<(), KernelError> {
        let MoeConfig { experts, top_k, .. } = self.config;
        let rows = x.len() / self.router.cols();
        let logits = sized(&mut scratch.logits, rows * experts);
        product(team, x, &self.router, logits)?;
        let slots = sized(&mut scratch.slots, rows * top_k);
        let time = experts * top_k * CHOICE_NANOSECONDS;
        let (logits, slots) = ((logits, experts), (slots, top_k));
        for_row_pairs(team, time, logits, slots, |_, logits, slots| {
            choose(team.isa(), &self.config, logits, &self.bias, slots);
        })
    }

    /// Runs the experts chosen in `scratch.slots` and writes each row's weighted sum, in slot order,
    /// to `out`; `shared`, if any, is added last.
    fn run_experts(
        &self,
        team: &ThreadTeam,
        x: &[f32],
        shared: Option<&[f32]>,
        scratch: &mut MoeScratch,
        out: &mut [f32],
    ) -> Result<(), KernelError> {
        let MoeConfig {
            experts,
            top_k,
            intermediate,
            ..
        } = self.config;
        let hidden = self.router.cols();
        let count = x.len() / hidden * top_k;
        let slots = &scratch.slots[..count];
        let places = sized(&mut scratch.places, count);
        sort_by_expert(slots, experts, &mut scratch.starts, places);
        let (places, starts) = (&*places, &*scratch.starts);

        let sources = sized(&mut scratch.sources, count);
        for (slot, place) in places.iter().enumerate() {
            sources[*place as usize] = (slot / top_k) as u32;
        }
        let gate_up = sized(&mut scratch.gate_up, count * 2 * intermediate);
        let output = sized(&mut scratch.output, count * hidden);
        let mut groups = recycled(std::mem::take(&mut scratch.groups));
        groups.extend(self.groups(starts, |ffn| &ffn.gate_up));
        grouped_product_gathered(team, x, sources, &groups, gate_up)?;
        groups.clear();
        groups.extend(self.groups(starts, |ffn| &ffn.down));
        grouped_product_gated(team, gate_up, &groups, &mut scratch.gated, output)?;
        scratch.groups = recycled(groups);

        let output = &*output;
        for_rows(team, out, hidden, |row, out| {
            out.fill(0.0);
            let chosen = row * top_k..(row + 1) * top_k;
            for (slot, place) in slots[chosen.clone()].iter().zip(&places[chosen]) {
                let expert_out = &output[*place as usize * hidden..][..hidden];
                // Lengths are equal by construction.
                let _ = add_scaled(out, expert_out, slot.weight);
            }
            if let Some(shared) = shared {
                out.iter_mut()
                    .zip(&shared[row * hidden..])
                    .for_each(|(out, shared)| *out += shared);
            }
        })
    }

    /// The experts that have rows, each with one of its matrices.
    fn groups<'w>(
        &'w self,
        starts: &'w [u32],
        part: fn(&Ffn) -> &Weight,
    ) -> impl Iterator<Item = (&'w Weight, Range<usize>)> {
        self.experts
            .iter()
            .zip(starts.windows(2))
            .map(move |(ffn, ends)| (part(ffn), ends[0] as usize..ends[1] as usize))
            .filter(|(_, rows)| !rows.is_empty())
    }
}

/// Counting sort of slots by expert, stable in rows: `starts[e]..starts[e + 1]` are the places of
/// expert `e`, `places[slot]` is where a slot went.
fn sort_by_expert(slots: &[Slot], experts: usize, starts: &mut Vec<u32>, places: &mut [u32]) {
    starts.clear();
    starts.resize(experts + 1, 0);
    for slot in slots {
        starts[slot.expert as usize + 1] += 1;
    }
    for expert in 0..experts {
        starts[expert + 1] += starts[expert];
    }
    for (slot, place) in slots.iter().zip(places.iter_mut()) {
        let next = &mut starts[slot.expert as usize];
        *place = *next;
        *next += 1;
    }
    // Every start has moved to its end, the next one's start.
    starts.rotate_right(1);
    starts[0] = 0;
}

#[cfg(test)]
mod ranks_tests;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sorting_by_expert_is_stable_and_complete() {
        let slots: Vec<Slot> = [3, 1, 3, 0, 1]
            .iter()
            .map(|e| Slot {
                expert: *e,
                weight: 0.0,
            })
            .collect();
        let (mut starts, mut places) = (Vec::new(), vec![0; 5]);
        sort_by_expert(&slots, 4, &mut starts, &mut places);
        assert_eq!(starts, [0, 1, 3, 3, 5]);
        assert_eq!(places, [3, 1, 4, 0, 2]);
    }
}
