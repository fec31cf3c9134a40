//! How much each expert had to do.

/// Rows per expert and layer: of the time since the last rearrangement, and of the time before, which counts
/// half as much each time. Experts are counted, not seats; padding and dummy rows are not.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LoadStats {
    experts: usize,
    /// `[layers, experts]`, of this rank.
    window: Vec<u64>,
    /// The same of all ranks.
    history: Vec<u64>,
}

impl LoadStats {
    /// Nothing counted yet.
    pub fn new(layers: usize, experts: usize) -> Self {
        Self {
            experts,
            window: vec![0; layers * experts],
            history: vec![0; layers * experts],
        }
    }

    /// Counts the chosen experts of this rank's own rows in a layer. Numbers out of range are not counted.
    pub fn count(&mut self, layer: usize, chosen: impl IntoIterator<Item = u32>) {
        let layer = self.window.chunks_mut(self.experts.max(1)).nth(layer);
        let Some(layer) = layer else {
            return;
        };
        for expert in chosen {
            if let Some(count) = layer.get_mut(expert as usize) {
                *count += 1;
            }
        }
    }

    /// This rank's counts `[layers, experts]`, for the ranks to add up.
    pub fn window(&self) -> &[u64] {
        &self.window
    }

    /// Takes the sums of all ranks' windows, and begins a new window. Sums of another length are left out.
    pub fn close(&mut self, sums: &[u64]) {
        if sums.len() == self.history.len() {
            for (history, sum) in self.history.iter_mut().zip(sums) {
                *history = (*history / 2).saturating_add(*sum);
            }
        }
        self.window.fill(0);
    }

    /// Loads of a layer's experts, of all ranks.
    pub fn loads(&self, layer: usize) -> &[u64] {
        self.history
            .chunks(self.experts.max(1))
            .nth(layer)
            .unwrap_or(&[])
    }
}
