//! Which experts a token goes to, and with what weights.
//!
//! Formulas: Mixtral (arXiv 2401.04088) section 2.1, DeepSeek-V2 report (arXiv 2405.04434) section 2.1,
//! DeepSeek-V3 report (arXiv 2412.19437) section 2.1.2.

use twinfer_config::model::{MAX_EXPERTS, MAX_GROUPS, MoeConfig, Routing};
use twinfer_kernels::{Isa, math, sigmoid_in_place, softmax_in_place};

/// A chosen expert. A row's slots stand in the order of choice: descending score, ties by lower
/// expert.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Slot {
    pub(crate) expert: u32,
    pub(crate) weight: f32,
}

/// The experts of one row. `logits` are the router's, changed in the process; `bias` is added for the
/// choice only and empty where there is none. Groups and experts that are equal in score are taken in
/// the order of their numbers.
pub(super) fn choose(
    isa: Isa,
    config: &MoeConfig,
    logits: &mut [f32],
    bias: &[f32],
    slots: &mut [Slot],
) {
    let mut open = Choices::default();
    match config.routing {
        Routing::SoftmaxOfChosen => {
            open_groups(&mut open, config.experts, 1, 1, |_| 0.0);
            take(&mut open, config.experts, |expert| logits[expert], slots);
            let most = slots
                .first()
                .map_or(0.0, |slot| logits[slot.expert as usize]);
            let mut sum = 0.0;
            for slot in slots.iter_mut() {
                slot.weight = math::exp(logits[slot.expert as usize] - most);
                sum += slot.weight;
            }
            for slot in slots {
                slot.weight = slot.weight / sum * config.scale;
            }
        }
        Routing::Softmax { groups, top_groups } => {
            softmax_in_place(isa, logits);
            let size = config.experts / groups;
            open_groups(&mut open, config.experts, groups, top_groups, |group| {
                let scores = &logits[group * size..(group + 1) * size];
                scores.iter().copied().fold(f32::NEG_INFINITY, f32::max)
            });
            take(&mut open, config.experts, |expert| logits[expert], slots);
            for slot in slots {
                slot.weight = logits[slot.expert as usize] * config.scale;
            }
        }
        Routing::BiasedSigmoid {
            groups,
            top_groups,
            normalize,
        } => {
            sigmoid_in_place(isa, logits);
            let size = config.experts / groups;
            let biased = |expert: usize| logits[expert] + bias[expert];
            open_groups(&mut open, config.experts, groups, top_groups, |group| {
                let (mut first, mut second) = (f32::NEG_INFINITY, f32::NEG_INFINITY);
                for biased in (group * size..(group + 1) * size).map(biased) {
                    if biased > first {
                        (first, second) = (biased, first);
                    } else if biased > second {
                        second = biased;
                    }
                }
                first + second
            });
            take(&mut open, config.experts, biased, slots);
            let mut sum = 0.0;
            for slot in slots.iter_mut() {
                slot.weight = logits[slot.expert as usize];
                sum += slot.weight;
            }
            for slot in slots {
                if normalize {
                    slot.weight /= sum + 1e-20;
                }
                slot.weight *= config.scale;
            }
        }
    }
}

/// Opens the experts of the `top` groups that score best.
fn open_groups(
    open: &mut Choices,
    experts: usize,
    groups: usize,
    top: usize,
    score: impl Fn(usize) -> f32,
) {
    let size = experts / groups;
    if groups == 1 {
        (0..experts).for_each(|expert| open.set(expert));
        return;
    }
    let mut scores = [0.0; MAX_GROUPS];
    for (group, place) in scores.iter_mut().enumerate().take(groups) {
        *place = score(group);
    }
    let mut kept = Choices::default();
    for _ in 0..top {
        let group = best((0..groups).filter(|group| !kept.has(*group)), |group| {
            scores[group]
        });
        kept.set(group);
        (group * size..(group + 1) * size).for_each(|expert| open.set(expert));
    }
}

/// Fills the slots with the open experts that score best.
fn take(open: &mut Choices, experts: usize, score: impl Fn(usize) -> f32, slots: &mut [Slot]) {
    for slot in slots {
        let expert = best((0..experts).filter(|expert| open.has(*expert)), &score);
        open.clear(expert);
        slot.expert = expert as u32;
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

    fn with(routing: Routing, top_k: usize) -> MoeConfig {
        MoeConfig {
            experts: 8,
            top_k,
            routing,
            shared: 0,
            intermediate: 1,
            layers: vec![true],
            scale: 2.0,
        }
    }

    fn config(groups: usize, top_groups: usize, top_k: usize) -> MoeConfig {
        let routing = Routing::BiasedSigmoid {
            groups,
            top_groups,
            normalize: true,
        };
        with(routing, top_k)
    }

    fn run(config: &MoeConfig, logits: &[f32], bias: &[f32]) -> Vec<(u32, f32)> {
        let isa = Isa::detect(None).unwrap();
        let mut slots = vec![Slot::default(); config.top_k];
        choose(isa, config, &mut logits.to_vec(), bias, &mut slots);
        slots
            .iter()
            .map(|slot| (slot.expert, slot.weight))
            .collect()
    }

    /// By sigmoids instead of logits.
    fn chosen(config: &MoeConfig, scores: &[f32], bias: &[f32]) -> Vec<(u32, f32)> {
        let logits: Vec<f32> = scores.iter().map(|s| (s / (1.0 - s)).ln()).collect();
        run(config, &logits, bias)
    }

    #[test]
    fn the_softmax_of_the_chosen_sums_to_one_and_follows_the_logits() {
        let logits = [0.0, 3.0, 1.0, 3.0, -1.0, 2.0, 0.5, 0.5];
        let slots = run(&with(Routing::SoftmaxOfChosen, 3), &logits, &[]);
        let ids: Vec<u32> = slots.iter().map(|slot| slot.0).collect();
        assert_eq!(ids, [1, 3, 5]);
        let sum: f32 = slots.iter().map(|slot| slot.1).sum();
        assert!(
            (sum - 2.0).abs() < 1e-6 && slots[0].1 == slots[1].1,
            "{slots:?}"
        );
        assert!(
            (slots[0].1 / slots[2].1 - 1f32.exp()).abs() < 1e-5,
            "{slots:?}"
        );
        // All experts alike: the weights are exact, so that a network cut into experts is itself.
        let even = run(&with(Routing::SoftmaxOfChosen, 8), &[0.7; 8], &[]);
        assert!(even.iter().all(|slot| slot.1 == 2.0 / 8.0), "{even:?}");
    }

    #[test]
    fn softmax_groups_count_by_their_best_and_weights_are_not_renormalised() {
        let routing = Routing::Softmax {
            groups: 4,
            top_groups: 1,
        };
        let logits = [2.0, -9.0, 1.5, 1.5, 0.0, 0.0, 0.0, 0.0];
        let slots = run(&with(routing, 2), &logits, &[]);
        assert_eq!((slots[0].0, slots[1].0), (0, 1));
        let total: f32 = logits.iter().map(|l: &f32| l.exp()).sum();
        assert!((slots[0].1 - 2.0 * 2f32.exp() / total).abs() < 1e-6);
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
        let scores = [0.9, 0.01, 0.6, 0.6, 0.01, 0.01, 0.01, 0.01];
        let ids: Vec<u32> = chosen(&config(4, 1, 2), &scores, &[0.0; 8])
            .into_iter()
            .map(|(id, _)| id)
            .collect();
        assert_eq!(ids, [2, 3]);
    }

    #[test]
    fn scores_that_are_no_numbers_still_choose_experts_that_exist() {
        let routings = [
            config(4, 2, 4).routing,
            Routing::SoftmaxOfChosen,
            Routing::Softmax {
                groups: 2,
                top_groups: 1,
            },
        ];
        for routing in routings {
            let ids = run(&with(routing, 4), &[f32::NAN; 8], &[0.0; 8]);
            assert!(ids.iter().all(|(id, _)| *id < 8), "{routing:?}: {ids:?}");
        }
    }
}
