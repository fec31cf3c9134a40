//! When experts move.

use crate::phase::Phase;

/// How experts are balanced. Equal on all ranks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EplbOptions {
    /// Steps between two plans; 0: no plans by their number.
    pub interval: u64,
    /// Plan also after each step that computed prompts only.
    pub after_prefill: bool,
    /// Seats beside one for each expert, over all ranks.
    pub redundant: u32,
    /// For tests: every plan changes every seat whose neighbour has another expert, whatever the loads are.
    pub forced: bool,
}

impl EplbOptions {
    /// Will experts ever move?
    pub fn moves(&self) -> bool {
        self.interval > 0 || self.after_prefill
    }
}

/// What the ranks do between two steps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EplbAction {
    /// Nothing.
    None,
    /// Add up loads, derive placements, tell [`Rebalancing::planned`] which layers change.
    Plan,
    /// Make the moves of this layer and switch it.
    Switch {
        /// Layer.
        layer: u32,
    },
}

/// Counts steps. The same on all ranks, because all run the same steps.
#[derive(Clone, Debug)]
pub struct Rebalancing {
    interval: u64,
    after_prefill: bool,
    /// Steps since the last plan.
    steps: u64,
    /// Layers still to switch, the next one last.
    layers: Vec<u32>,
}

impl Rebalancing {
    /// Plans every `interval` steps (0: never), with `after_prefill` also after each step that computed
    /// prompts only.
    pub fn new(interval: u64, after_prefill: bool) -> Self {
        Self {
            interval,
            after_prefill,
            steps: 0,
            layers: Vec::new(),
        }
    }

    /// After a step of this phase: what to do before the next. A plan that falls due while layers still
    /// switch waits for the last of them.
    pub fn after_step(&mut self, phase: Phase) -> EplbAction {
        self.steps = self.steps.saturating_add(1);
        if let Some(layer) = self.layers.pop() {
            return EplbAction::Switch { layer };
        }
        let due = self.interval > 0 && self.steps >= self.interval;
        if due || (self.after_prefill && phase == Phase::Prefill) {
            self.steps = 0;
            return EplbAction::Plan;
        }
        EplbAction::None
    }

    /// The layers that the plan changes; one switches after each of the next steps.
    pub fn planned(&mut self, layers: impl IntoIterator<Item = u32>) {
        self.layers = layers.into_iter().collect();
        self.layers.reverse();
    }

    /// Layers that still have to switch.
    pub fn is_moving(&self) -> bool {
        !self.layers.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn plans_come_by_interval_and_layers_one_by_one() {
        let mut rebalancing = Rebalancing::new(3, false);
        let mut seen = Vec::new();
        for step in 0..10 {
            let action = rebalancing.after_step(Phase::Prefill);
            if action == EplbAction::Plan {
                let layers: &[u32] = if step < 5 { &[2, 5, 7, 8] } else { &[] };
                rebalancing.planned(layers.iter().copied());
            }
            seen.push(match action {
                EplbAction::None => '.',
                EplbAction::Plan => 'p',
                EplbAction::Switch { layer } => char::from(b'0' + layer as u8),
            });
        }
        // The second is due after three steps, but layer 8 is still to switch then.
        assert_eq!(seen.iter().collect::<String>(), "..p2578p..");
        assert!(!rebalancing.is_moving());
    }

    #[test]
    fn a_prefill_step_may_be_the_sign() {
        let mut rebalancing = Rebalancing::new(0, true);
        let actions = [Phase::Decode, Phase::Mixed, Phase::Prefill, Phase::Decode];
        let actions = actions.map(|phase| rebalancing.after_step(phase));
        assert_eq!(
            actions.map(|action| action == EplbAction::Plan),
            [false, false, true, false]
        );
    }
}
