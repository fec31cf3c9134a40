//! What a step costs: a roofline of weights read, operations, attention and collectives, each with the share
//! of the hardware's peak that was seen to be reached.

use std::ops::AddAssign;

/// A node's devices and what connects them.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Hardware {
    /// Ranks per node, one device each.
    pub ranks_per_node: u32,
    /// Operations per second in the type of the weights.
    pub weight_ops: f64,
    /// Operations per second of attention.
    pub attention_ops: f64,
    /// Bytes per second from memory.
    pub memory_bytes: f64,
    /// Bytes per second of a rank to other nodes.
    pub outer_bytes: f64,
    /// Bytes per second of a rank inside its node.
    pub inner_bytes: f64,
    /// Seconds per collective, whatever its size.
    pub collective_seconds: f64,
    /// Seconds per step of host work and of the agreement on the phase.
    pub host_seconds: f64,
    /// Share of `memory_bytes` reached.
    pub memory_share: f64,
    /// Share of `weight_ops` reached.
    pub weight_share: f64,
    /// Share of `attention_ops` reached by rows that generate.
    pub decode_attention_share: f64,
    /// The same for rows of prompts.
    pub prefill_attention_share: f64,
    /// Load of the rank with the most expert work over the mean.
    pub expert_imbalance: f64,
}

/// A model, in numbers of values and operations.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ModelSize {
    /// Layers with experts.
    pub moe_layers: u32,
    /// All layers.
    pub layers: u32,
    /// Width of a row.
    pub hidden: u32,
    /// Weights that every row meets, in all layers, without the head.
    pub dense_weights: f64,
    /// Weights of the head.
    pub head_weights: f64,
    /// Weights of one expert in one layer.
    pub expert_weights: f64,
    /// Experts per layer.
    pub experts: u32,
    /// Experts of a row.
    pub top_k: u32,
    /// Bytes of weights that every rank reads in a step (no embedding), and of all experts of all layers.
    pub shared_bytes: f64,
    /// See above.
    pub expert_bytes: f64,
    /// Operations of a generating row per position it sees.
    pub decode_attention_ops: f64,
    /// The same for a row of a prompt.
    pub prefill_attention_ops: f64,
    /// Bytes of KV per position.
    pub kv_bytes: f64,
}

/// Nanoseconds per unit of work, and what a step has beside it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CostModel {
    /// Reading all weights of a rank once.
    pub weights: f64,
    /// Dense weights, per row.
    pub dense_row: f64,
    /// Routed experts, per row of the group's mean.
    pub expert_row: f64,
    /// Head, per row of logits.
    pub head_row: f64,
    /// Attention of a generating row, per position.
    pub decode_position: f64,
    /// Reading KV, per position of a sequence.
    pub kv_position: f64,
    /// Attention of a prompt's row, per position.
    pub prefill_position: f64,
    /// Collectives, per row.
    pub collective_row: f64,
    /// Per step.
    pub fixed: f64,
    /// Share of a layer in the whole model: a pass of the draft layer.
    pub draft_share: f64,
}

/// What a rank has in a step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StepLoad {
    /// Rows that generate or verify drafts.
    pub decode_rows: u64,
    /// Rows of prompts.
    pub prefill_rows: u64,
    /// Rows of logits.
    pub logits_rows: u64,
    /// Positions that generating rows see, summed over rows.
    pub decode_positions: u64,
    /// Positions of generating sequences, each once however many rows it has.
    pub kv_positions: u64,
    /// Positions that rows of prompts see, summed over rows.
    pub prefill_positions: u64,
    /// Rows of the draft layer.
    pub draft_rows: u64,
    /// Rows of logits of the draft layer.
    pub draft_logits_rows: u64,
}

impl StepLoad {
    /// A rank without work in a step of others: one row, as engines run that cannot run none.
    pub const DUMMY: Self = Self {
        decode_rows: 1,
        prefill_rows: 0,
        logits_rows: 1,
        decode_positions: 1,
        kv_positions: 1,
        prefill_positions: 0,
        draft_rows: 0,
        draft_logits_rows: 0,
    };

    /// Rows of the model itself.
    pub fn rows(&self) -> u64 {
        self.decode_rows + self.prefill_rows
    }
}

impl AddAssign for StepLoad {
    fn add_assign(&mut self, other: Self) {
        self.decode_rows += other.decode_rows;
        self.prefill_rows += other.prefill_rows;
        self.logits_rows += other.logits_rows;
        self.decode_positions += other.decode_positions;
        self.kv_positions += other.kv_positions;
        self.prefill_positions += other.prefill_positions;
        self.draft_rows += other.draft_rows;
        self.draft_logits_rows += other.draft_logits_rows;
    }
}

impl Hardware {
    /// Nodes of eight Ascend 910B3. Shares and collectives are those with which the published runs of
    /// DeepSeek-R1 on four such nodes come out (cann-recipes-infer, `pd-hybrid-dp-ep`: 1024 requests of
    /// 128 or 1024 tokens in, 1024 out).
    pub const ASCEND_910B3: Self = Self {
        ranks_per_node: 8,
        weight_ops: 626e12,
        attention_ops: 313e12,
        memory_bytes: 1.6e12,
        outer_bytes: 23e9,
        inner_bytes: 56e9,
        collective_seconds: 85e-6,
        host_seconds: 7e-3,
        memory_share: 0.80,
        weight_share: 0.40,
        decode_attention_share: 0.171,
        prefill_attention_share: 0.40,
        expert_imbalance: 1.25,
    };
}

impl ModelSize {
    /// DeepSeek-R1 in W8A8, `kv_b_proj`, head and router in bf16 (DeepSeek-V3 report, arXiv 2412.19437).
    pub const DEEPSEEK_R1: Self = Self {
        moe_layers: 58,
        layers: 61,
        hidden: 7168,
        dense_weights: 11.41e9 + 1.19e9 + 2.55e9,
        head_weights: 0.93e9,
        expert_weights: 44.04e6,
        experts: 256,
        top_k: 8,
        shared_bytes: 18.2e9,
        expert_bytes: 653.9e9,
        decode_attention_ops: 17.0e6,
        prefill_attention_ops: 2.0 * 128.0 * 320.0 * 61.0,
        kv_bytes: 70_272.0,
    };
}

impl CostModel {
    /// A group of `ranks` ranks over which the experts are spread, with two-stage all-gather and
    /// reduce-scatter of bf16 rows in each layer with experts.
    pub fn new(hardware: &Hardware, model: &ModelSize, ranks: u32) -> Self {
        let ns = 1e9;
        let ranks = f64::from(ranks.max(1));
        let per_node = f64::from(hardware.ranks_per_node.max(1)).min(ranks);
        let nodes = (ranks / per_node).ceil();
        let moe_layers = f64::from(model.moe_layers);
        let weight_ops = hardware.weight_ops * hardware.weight_share;
        let memory = hardware.memory_bytes * hardware.memory_share;
        let expert_ops = 2.0 * f64::from(model.top_k) * model.expert_weights * moe_layers;
        let row_bytes = 2.0 * f64::from(model.hidden) * 2.0;
        let fabric =
            (nodes - 1.0) / hardware.outer_bytes + nodes * (per_node - 1.0) / hardware.inner_bytes;
        let collectives = if ranks > 1.0 { 4.0 * moe_layers } else { 0.0 };
        Self {
            weights: ns * (model.shared_bytes + model.expert_bytes / ranks) / memory,
            dense_row: ns * 2.0 * model.dense_weights / weight_ops,
            expert_row: ns * hardware.expert_imbalance * expert_ops / weight_ops,
            head_row: ns * 2.0 * model.head_weights / weight_ops,
            decode_position: ns * model.decode_attention_ops
                / (hardware.attention_ops * hardware.decode_attention_share),
            kv_position: ns * model.kv_bytes / memory,
            prefill_position: ns * model.prefill_attention_ops
                / (hardware.attention_ops * hardware.prefill_attention_share),
            collective_row: ns * moe_layers * row_bytes * fabric,
            fixed: ns * (collectives * hardware.collective_seconds + hardware.host_seconds),
            draft_share: 1.0 / f64::from(model.layers.max(1)),
        }
    }

    /// A step of a group, in nanoseconds: the slowest rank's own work, then the collectives. Experts and
    /// collectives have the rows of all ranks to do: `padded_rows` from each, or what each has.
    pub fn step(&self, loads: &[StepLoad], padded_rows: Option<usize>) -> u64 {
        if loads.is_empty() {
            return 0;
        }
        let ranks = loads.len() as f64;
        let mean = |of: fn(&StepLoad) -> u64| loads.iter().map(of).sum::<u64>() as f64 / ranks;
        let rows = match padded_rows {
            Some(rows) => rows as f64,
            None => mean(StepLoad::rows),
        };
        let draft_rows = mean(|load| load.draft_rows);
        let slowest = loads
            .iter()
            .map(|load| self.own(load, rows, draft_rows))
            .fold(0.0, f64::max);
        let drafting = if draft_rows > 0.0 {
            self.draft_share
        } else {
            0.0
        };
        let collectives = self.collective_row * (rows + draft_rows * self.draft_share);
        (slowest + collectives + self.fixed * (1.0 + drafting)) as u64
    }

    /// A rank's own work: `rows` of experts, its own of the rest.
    fn own(&self, load: &StepLoad, rows: f64, draft_rows: f64) -> f64 {
        let operations = self.dense_row * load.rows() as f64
            + self.expert_row * rows
            + self.head_row * load.logits_rows as f64;
        let attention = (self.decode_position * load.decode_positions as f64)
            .max(self.kv_position * load.kv_positions as f64)
            + self.prefill_position * load.prefill_positions as f64;
        let draft_operations = self.draft_share
            * (self.dense_row * load.draft_rows as f64 + self.expert_row * draft_rows)
            + self.head_row * load.draft_logits_rows as f64;
        let draft_weights = if draft_rows > 0.0 {
            self.draft_share * self.weights
        } else {
            0.0
        };
        operations.max(self.weights) + attention + draft_operations.max(draft_weights)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const RANKS: usize = 32;

    fn costs() -> CostModel {
        CostModel::new(
            &Hardware::ASCEND_910B3,
            &ModelSize::DEEPSEEK_R1,
            RANKS as u32,
        )
    }

    fn decode(rows: u64, context: u64) -> StepLoad {
        StepLoad {
            decode_rows: rows,
            logits_rows: rows,
            decode_positions: rows * context,
            kv_positions: rows * context,
            ..StepLoad::default()
        }
    }

    fn prefill(prompts: u64, len: u64) -> StepLoad {
        StepLoad {
            prefill_rows: prompts * len,
            logits_rows: prompts,
            prefill_positions: prompts * len * len / 2,
            ..StepLoad::default()
        }
    }

    fn milliseconds(loads: &[StepLoad], padded: Option<usize>) -> f64 {
        costs().step(loads, padded) as f64 / 1e6
    }

    #[track_caller]
    fn close(got: f64, wanted: f64, share: f64) {
        assert!((got / wanted - 1.0).abs() < share, "{got} is not {wanted}");
    }

    #[test]
    fn the_published_steps_come_out() {
        // 96.9 and 106 ms per token at 32 requests a rank and mean contexts of 640 and 1536; 5.83 s for
        // four prompts of 1023 tokens a rank.
        close(milliseconds(&[decode(32, 640); RANKS], None), 96.9, 0.01);
        close(milliseconds(&[decode(32, 1536); RANKS], None), 106.0, 0.01);
        close(milliseconds(&[prefill(4, 1023); RANKS], None), 5830.0, 0.03);
    }

    #[test]
    fn one_prompt_costs_a_padded_group_nearly_what_one_on_each_rank_costs() {
        let mut loads = [StepLoad::DUMMY; RANKS];
        loads[7] = prefill(1, 1023);
        let everywhere = milliseconds(&[prefill(1, 1023); RANKS], Some(1023));
        close(milliseconds(&loads, Some(1023)), everywhere, 0.001);
        assert!(milliseconds(&loads, None) < everywhere / 5.0);
    }

    #[test]
    fn a_step_costs_at_least_its_weights_and_its_fixed_part() {
        let costs = costs();
        let least = (costs.weights + costs.fixed) as u64;
        assert!(costs.step(&[StepLoad::DUMMY; RANKS], None) >= least);
        assert_eq!(costs.step(&[], None), 0);
    }
}
