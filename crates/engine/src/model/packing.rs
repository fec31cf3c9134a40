//! What becomes of stored weights, and how much memory that takes.

use crate::weights::{Checkpoint, Scheme, WeightDtype, WeightsError, fused, too_long_for};
use std::collections::{BTreeMap, HashMap};
use twinfer_config::ModelConfig;
use twinfer_config::model::{
    AttentionConfig, MlaConfig, TensorKind, TensorSpec, TensorSpecs, expert_of,
};
use twinfer_kernels::{Activation, Compute, DType, Format, Weight};

/// What becomes of weights that are stored as plain numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Packing {
    /// What layers compute in that are not quantised.
    pub(crate) float: Compute,
    /// Quantise linear layers to int8.
    pub(crate) quantize: bool,
}

impl Packing {
    /// What a linear layer that is stored as plain numbers computes in.
    pub(super) fn linear(self) -> Compute {
        if self.quantize {
            Compute::W8A8
        } else {
            self.float
        }
    }

    /// Refuses matrices that cannot become int8.
    pub(crate) fn check(self, specs: &TensorSpecs) -> Result<(), WeightsError> {
        let becomes_int8 = |spec: &&TensorSpec| match spec.kind {
            TensorKind::Linear => !spec.name.ends_with("kv_b_proj.weight"),
            TensorKind::Embedding => specs.tied_head,
            _ => false,
        };
        let linear = specs.tensors.iter().filter(becomes_int8);
        let wrong: Vec<String> = linear
            .filter(|_| self.quantize)
            .filter_map(|spec| too_long_for(spec, Activation::PerToken))
            .collect();
        match wrong.is_empty() {
            true => Ok(()),
            false => Err(WeightsError::Tensors {
                missing: Vec::new(),
                wrong,
            }),
        }
    }

    /// Bytes that the weights of `specs` will take, `None` on overflow. Fused matrices take a little less.
    pub(crate) fn bytes(
        self,
        config: &ModelConfig,
        specs: &TensorSpecs,
        checkpoint: &Checkpoint,
    ) -> Option<u64> {
        let mla = match &config.attention {
            AttentionConfig::Mla(mla) => Some(mla),
            AttentionConfig::Gqa(_) => None,
        };
        // Parts of different types that lie in one weight as they are stored are made f32.
        let mut types: HashMap<(&str, &str), DType> = HashMap::new();
        for spec in &specs.tensors {
            let stored = stored_type(spec, checkpoint);
            let joint = types.entry(fused(spec)).or_insert(stored);
            if *joint != stored {
                *joint = DType::F32;
            }
        }
        let mut total = 0u64;
        for spec in &specs.tensors {
            let joint = types.get(&fused(spec)).copied();
            let bytes = self.tensor_bytes(spec, joint?, mla, checkpoint)?;
            total = total.checked_add(bytes as u64)?;
            if specs.tied_head && spec.kind == TensorKind::Embedding {
                let stored = stored_type(spec, checkpoint);
                if !self.shares_embedding(stored) {
                    let format = Format::of(self.linear(), stored);
                    let head = Weight::packed_bytes(format, spec.shape[0], spec.shape[1])?;
                    total = total.checked_add(head as u64)?;
                }
            }
        }
        Some(total)
    }

    /// Bytes of each expert of a model, over all its layers, by number; `None` on overflow.
    pub(crate) fn expert_bytes(
        self,
        config: &ModelConfig,
        specs: &TensorSpecs,
        checkpoint: &Checkpoint,
    ) -> Option<BTreeMap<u32, u64>> {
        let mut none = specs.clone();
        none.tensors.clear();
        let mut of_experts: BTreeMap<u32, TensorSpecs> = BTreeMap::new();
        for spec in &specs.tensors {
            if let Some(expert) = expert_of(&spec.name) {
                let own = of_experts.entry(expert).or_insert_with(|| none.clone());
                own.tensors.push(spec.clone());
            }
        }
        let all = of_experts.into_iter();
        all.map(|(expert, specs)| Some((expert, self.bytes(config, &specs, checkpoint)?)))
            .collect()
    }

    /// Bytes of what `threads` threads hold at most besides packed weights while they read and convert, one
    /// layer's matrices of the same input each.
    pub(crate) fn loading_bytes(
        self,
        specs: &TensorSpecs,
        checkpoint: &Checkpoint,
        threads: usize,
    ) -> u64 {
        let mut groups: BTreeMap<(&str, bool), u64> = BTreeMap::new();
        for spec in specs.tensors.iter().filter(|spec| spec.shape.len() == 2) {
            let bytes = spec
                .len()
                .saturating_mul(self.transient(spec, specs, checkpoint))
                .saturating_add(checkpoint.beside(&spec.name));
            let module = spec.module();
            let (parent, part) = module.rsplit_once('.').unwrap_or(("", module));
            // Those that turn a block's own output back have another input.
            let back = part.starts_with('o') || part.starts_with("down") || part == "w2";
            let group = groups.entry((parent, back)).or_default();
            *group = group.saturating_add(bytes);
        }
        let mut groups: Vec<u64> = groups.into_values().collect();
        groups.sort_unstable_by(|a, b| b.cmp(a));
        let most = groups.into_iter().take(threads);
        most.fold(0, u64::saturating_add)
    }

    /// Bytes per value of a matrix that live beside its packed form at most.
    fn transient(self, spec: &TensorSpec, specs: &TensorSpecs, checkpoint: &Checkpoint) -> u64 {
        let stored = match checkpoint.dtype(&spec.name) {
            // Made f32, which is then what is packed.
            Some(WeightDtype::F16) => 2 + 4,
            Some(WeightDtype::F32) => 4,
            Some(WeightDtype::F8E4M3) => 1 + 4 + 2,
            Some(WeightDtype::I8) => 1,
            _ => 2,
        };
        match spec.kind {
            // Values on their own, and cut.
            TensorKind::Linear if spec.name.ends_with("kv_b_proj.weight") => stored + 4 + 4,
            TensorKind::Linear => stored,
            TensorKind::Embedding if specs.tied_head => stored,
            // Read to where they stay.
            _ if stored == 2 || stored == 4 => 0,
            _ => stored,
        }
    }

    /// MLA's kv_b_proj, cut into two small matrices per head.
    fn expansion_bytes(self, mla: &MlaConfig, stored: DType) -> Option<usize> {
        let format = Format::of(self.float, stored);
        let key = Weight::packed_bytes(format, mla.kv_lora_rank, mla.qk_nope_head_dim)?;
        let value = Weight::packed_bytes(format, mla.v_head_dim, mla.kv_lora_rank)?;
        key.checked_add(value)?.checked_mul(mla.heads)
    }

    fn tensor_bytes(
        self,
        spec: &TensorSpec,
        joint: DType,
        mla: Option<&MlaConfig>,
        checkpoint: &Checkpoint,
    ) -> Option<usize> {
        let (rows, cols) = match spec.shape[..] {
            [rows, cols] => (rows, cols),
            _ => return usize::try_from(spec.len()).ok()?.checked_mul(4),
        };
        let stored = stored_type(spec, checkpoint);
        let format = match spec.kind {
            TensorKind::Linear if spec.name.ends_with("kv_b_proj.weight") => {
                return self
                    .expansion_bytes(mla?, self.dense(checkpoint.scheme(&spec.name), stored));
            }
            TensorKind::Linear => match checkpoint.scheme(&spec.name) {
                Scheme::Plain | Scheme::BlockFp8 { .. } => Format::of(self.linear(), joint),
                _ => Format::Int8(Activation::PerToken),
            },
            _ => Format::Plain(stored),
        };
        Weight::packed_bytes(format, rows, cols)
    }

    /// Type of real values made of a matrix.
    pub(super) fn dense(self, scheme: Scheme, stored: DType) -> DType {
        match (scheme, self.float) {
            (Scheme::Plain, _) => stored,
            (_, Compute::F32) => DType::F32,
            _ => DType::Bf16,
        }
    }

    /// Is the packed head an exact copy of the embedding, so that rows can be looked up there?
    pub(super) fn shares_embedding(self, stored: DType) -> bool {
        match self.linear() {
            Compute::F32 => true,
            Compute::Bf16 => stored == DType::Bf16,
            Compute::W8A8 => false,
        }
    }
}

/// Type of a tensor's real values in memory, before packing.
fn stored_type(spec: &TensorSpec, checkpoint: &Checkpoint) -> DType {
    match checkpoint.dtype(&spec.name) {
        Some(WeightDtype::Bf16) => DType::Bf16,
        _ => DType::F32,
    }
}
