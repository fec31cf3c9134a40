//! Grouped sigmoid routing and routed experts (DeepSeek-V3 report, section 2.1.2).

use super::rows::for_rows;
use super::scratch::sized;
use std::ops::Range;
use twinfer_config::model::{MAX_EXPERTS, MAX_GROUPS, MoeConfig};
use twinfer_kernels::{
    KernelError, Matrix, ThreadTeam, add_scaled, grouped_linear, linear, sigmoid_in_place, silu_mul,
};

/// One gated network: down(silu(gate(x)) * up(x)).
#[derive(Debug)]
pub(crate) struct Ffn {
    pub(crate) gate: Matrix,
    pub(crate) up: Matrix,
    pub(crate) down: Matrix,
}

/// Router and routed experts of a layer.
#[derive(Debug)]
pub(crate) struct Experts {
    /// `[experts, hidden]`.
    pub(crate) router: Matrix,
    /// Added to scores for the choice only.
    pub(crate) bias: Vec<f32>,
    pub(crate) experts: Vec<Ffn>,
}

/// A chosen expert. A row's slots stand in the order of choice: descending biased score, ties by
/// lower expert.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Slot {
    pub(crate) expert: u32,
    pub(crate) weight: f32,
}

#[derive(Debug, Default)]
pub(crate) struct MoeScratch {
    scores: Vec<f32>,
    pub(crate) slots: Vec<Slot>,
    /// For each slot its row in the order sorted by expert.
    places: Vec<u32>,
    starts: Vec<u32>,
    /// Rows sorted by expert: input, gate, up, output.
    input: Vec<f32>,
    gate: Vec<f32>,
    up: Vec<f32>,
    output: Vec<f32>,
}

impl Ffn {
    /// `x` `[rows, hidden]` to `out` `[rows, hidden]`.
    pub(crate) fn forward(
        &self,
        team: &ThreadTeam,
        x: &[f32],
        gate: &mut Vec<f32>,
        up: &mut Vec<f32>,
        out: &mut [f32],
    ) -> Result<(), KernelError> {
        let rows = x.len() / self.gate.cols();
        let gate = sized(gate, rows * self.gate.rows());
        let up = sized(up, rows * self.up.rows());
        linear(team, x, &self.gate, gate)?;
        linear(team, x, &self.up, up)?;
        silu_mul(team, gate, up)?;
        linear(team, gate, &self.down, out)
    }
}

impl Experts {
    /// Chooses experts for the rows of `x` into `scratch.slots` `[rows, top_k]`.
    pub(crate) fn route(
        &self,
        team: &ThreadTeam,
        config: &MoeConfig,
        x: &[f32],
        scratch: &mut MoeScratch,
    ) -> Result<(), KernelError> {
        let rows = x.len() / self.router.cols();
        let scores = sized(&mut scratch.scores, rows * config.experts);
        linear(team, x, &self.router, scores)?;
        for_rows(team, scores, config.experts, |_, row| {
            sigmoid_in_place(team.isa(), row)
        })?;
        let slots = sized(&mut scratch.slots, rows * config.top_k);
        let scores = &*scores;
        for_rows(team, slots, config.top_k, |row, slots| {
            choose(
                config,
                &scores[row * config.experts..][..config.experts],
                &self.bias,
                slots,
            );
        })
    }

    /// Runs the experts chosen in `scratch.slots` and writes each row's weighted sum, in slot order,
    /// to `out`; `shared`, if any, is added last.
    pub(crate) fn forward(
        &self,
        team: &ThreadTeam,
        config: &MoeConfig,
        x: &[f32],
        shared: Option<&[f32]>,
        scratch: &mut MoeScratch,
        out: &mut [f32],
    ) -> Result<(), KernelError> {
        let hidden = self.router.cols();
        let rows = x.len() / hidden;
        let count = rows * config.top_k;
        let slots = &scratch.slots[..count];
        let places = sized(&mut scratch.places, count);
        sort_by_expert(slots, config.experts, &mut scratch.starts, places);
        let groups: Vec<(usize, Range<usize>)> = (0..config.experts)
            .map(|e| {
                (
                    e,
                    scratch.starts[e] as usize..scratch.starts[e + 1] as usize,
                )
            })
            .filter(|(_, rows)| !rows.is_empty())
            .collect();
        let of = |part: fn(&Ffn) -> &Matrix| -> Vec<(&Matrix, Range<usize>)> {
            groups
                .iter()
                .map(|(e, rows)| (part(&self.experts[*e]), rows.clone()))
                .collect()
        };

        let input = sized(&mut scratch.input, count * hidden);
        for (slot, place) in places.iter().enumerate() {
            let row = slot / config.top_k;
            input[*place as usize * hidden..][..hidden]
                .copy_from_slice(&x[row * hidden..][..hidden]);
        }
        let gate = sized(&mut scratch.gate, count * config.intermediate);
        let up = sized(&mut scratch.up, count * config.intermediate);
        grouped_linear(team, input, &of(|ffn| &ffn.gate), gate)?;
        grouped_linear(team, input, &of(|ffn| &ffn.up), up)?;
        silu_mul(team, gate, up)?;
        let output = sized(&mut scratch.output, count * hidden);
        grouped_linear(team, gate, &of(|ffn| &ffn.down), output)?;

        let (places, output) = (&*places, &*output);
        for_rows(team, out, hidden, |row, out| {
            out.fill(0.0);
            let chosen = row * config.top_k..(row + 1) * config.top_k;
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
}

/// The experts of one row. `scores` are the sigmoids, `bias` is added for the choice only. Groups and
/// experts that are equal in score are taken in the order of their numbers.
fn choose(config: &MoeConfig, scores: &[f32], bias: &[f32], slots: &mut [Slot]) {
    let group_size = config.experts / config.groups;
    let members = |group: usize| group * group_size..(group + 1) * group_size;
    let biased = |expert: usize| scores[expert] + bias[expert];
    let mut open = Choices::default();
    if config.groups == 1 {
        members(0).for_each(|expert| open.set(expert));
    } else {
        let mut group_scores = [0.0; MAX_GROUPS];
        for (group, score) in group_scores.iter_mut().enumerate().take(config.groups) {
            let (mut first, mut second) = (f32::NEG_INFINITY, f32::NEG_INFINITY);
            for biased in members(group).map(biased) {
                if biased > first {
                    (first, second) = (biased, first);
                } else if biased > second {
                    second = biased;
                }
            }
            *score = first + second;
        }
        let mut kept = Choices::default();
        for _ in 0..config.top_groups {
            let group = best(
                (0..config.groups).filter(|group| !kept.has(*group)),
                |group| group_scores[group],
            );
            kept.set(group);
            members(group).for_each(|expert| open.set(expert));
        }
    }
    let mut sum = 0.0;
    for slot in slots.iter_mut() {
        let expert = best(
            (0..config.experts).filter(|expert| open.has(*expert)),
            biased,
        );
        open.clear(expert);
        *slot = Slot {
            expert: expert as u32,
            weight: scores[expert],
        };
        sum += scores[expert];
    }
    for slot in slots {
        if config.normalize {
            slot.weight /= sum + 1e-20;
        }
        slot.weight *= config.scale;
    }
}

/// The first candidate whose score no other exceeds. A score that is not a number is never preferred
/// to an earlier candidate, so that broken activations still choose experts that exist.
fn best(candidates: impl Iterator<Item = usize>, score: impl Fn(usize) -> f32) -> usize {
    let mut best: Option<(usize, f32)> = None;
    for candidate in candidates {
        let score = score(candidate);
        if best.is_none_or(|(_, most)| score > most) {
            best = Some((candidate, score));
        }
    }
    best.map_or(0, |(candidate, _)| candidate)
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

/// A set of experts or groups.
#[derive(Default)]
struct Choices([u64; MAX_EXPERTS / 64]);

impl Choices {
    fn set(&mut self, index: usize) {
        self.0[index / 64] |= 1 << (index % 64);
    }

    fn clear(&mut self, index: usize) {
        self.0[index / 64] &= !(1 << (index % 64));
    }

    fn has(&self, index: usize) -> bool {
        self.0[index / 64] >> (index % 64) & 1 == 1
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(groups: usize, top_groups: usize, top_k: usize) -> MoeConfig {
        MoeConfig {
            experts: 8,
            top_k,
            groups,
            top_groups,
            shared: 0,
            intermediate: 1,
            dense_layers: 0,
            normalize: true,
            scale: 2.0,
        }
    }

    fn chosen(config: &MoeConfig, scores: &[f32], bias: &[f32]) -> Vec<(u32, f32)> {
        let mut slots = vec![Slot::default(); config.top_k];
        choose(config, scores, bias, &mut slots);
        slots
            .iter()
            .map(|slot| (slot.expert, slot.weight))
            .collect()
    }

    #[test]
    fn equal_scores_go_to_the_lower_group_and_expert() {
        let ids = |slots: Vec<(u32, f32)>| slots.into_iter().map(|(id, _)| id).collect::<Vec<_>>();
        assert_eq!(
            ids(chosen(&config(4, 2, 3), &[0.5; 8], &[0.0; 8])),
            [0, 1, 2]
        );
        assert_eq!(
            ids(chosen(&config(1, 1, 3), &[0.5; 8], &[0.0; 8])),
            [0, 1, 2]
        );
    }

    #[test]
    fn bias_chooses_but_does_not_weigh() {
        let scores = [0.1, 0.2, 0.3, 0.4, 0.1, 0.1, 0.1, 0.1];
        let mut bias = [0.0; 8];
        bias[0] = 1.0;
        let slots = chosen(&config(1, 1, 2), &scores, &bias);
        assert_eq!(slots[0].0, 0);
        assert_eq!(slots[1].0, 3);
        assert!(
            (slots[0].1 - 2.0 * 0.1 / 0.5).abs() < 1e-6
                && (slots[1].1 - 2.0 * 0.4 / 0.5).abs() < 1e-6
        );
    }

    #[test]
    fn dropped_groups_stay_out_even_when_all_biased_scores_are_negative() {
        // A fill of 0 for dropped groups would win over these.
        let scores = [0.1, 0.1, 0.2, 0.2, 0.3, 0.3, 0.4, 0.4];
        let ids: Vec<u32> = chosen(&config(4, 1, 2), &scores, &[-1.0; 8])
            .into_iter()
            .map(|(id, _)| id)
            .collect();
        assert_eq!(ids, [6, 7]);
    }

    #[test]
    fn a_group_counts_by_the_sum_of_its_two_best() {
        let scores = [0.9, 0.0, 0.6, 0.6, 0.0, 0.0, 0.0, 0.0];
        let ids: Vec<u32> = chosen(&config(4, 1, 2), &scores, &[0.0; 8])
            .into_iter()
            .map(|(id, _)| id)
            .collect();
        assert_eq!(ids, [2, 3]);
    }

    #[test]
    fn scores_that_are_no_numbers_still_choose_experts_that_exist() {
        for (id, _) in chosen(&config(4, 2, 4), &[f32::NAN; 8], &[0.0; 8]) {
            assert!(id < 8);
        }
    }

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
