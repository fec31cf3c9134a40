//! Seats of experts: where they are at first, and what they take.

use super::{LoadOptions, ModelError};
use crate::model::{Packing, Seating, Spread};
use crate::placement::ExpertPlacement;
use crate::weights::Checkpoint;
use std::collections::BTreeSet;
use std::sync::Arc;
use twinfer_config::ModelConfig;
use twinfer_config::model::{Routing, TensorSpecs, expert_of};

/// What a rank needs beside the experts that it reads once.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct SeatBytes {
    /// Seats of experts that it has in another seat already.
    pub(super) redundant: u64,
    /// Experts of one layer on their way: those for all seats, one that is sent, and one from each rank.
    pub(super) moving: u64,
}

/// Where experts are when there are other ranks; a model without experts has none to spread.
pub(super) fn spread(
    config: &ModelConfig,
    options: &LoadOptions<'_>,
) -> Result<Option<Spread>, ModelError> {
    let (Some(link), Some(moe)) = (&options.ranks, &config.moe) else {
        return Ok(None);
    };
    let experts = u32::try_from(moe.experts).unwrap_or(u32::MAX);
    let placement = ExpertPlacement::in_order(experts, options.eplb.redundant, link.ranks())
        .map_err(|error| ModelError::Ranks(error.message))?;
    Ok(Some(Spread {
        link: Arc::clone(link),
        placement: Arc::new(placement),
        comm: options.moe_comm,
        max_rows: options.max_num_batched_tokens,
    }))
}

/// When experts move, if they do.
pub(super) fn seating(
    config: &ModelConfig,
    spread: &Spread,
    options: &LoadOptions<'_>,
) -> Result<Option<Seating>, ModelError> {
    let Some(moe) = config.moe.as_ref().filter(|_| options.eplb.moves()) else {
        return Ok(None);
    };
    let groups = match moe.routing {
        Routing::SoftmaxOfChosen => 1,
        Routing::Softmax { groups, .. } | Routing::BiasedSigmoid { groups, .. } => groups as u32,
    };
    let link = Arc::clone(&spread.link);
    Seating::new(options.eplb, link, &spread.placement, groups)
        .map(Some)
        .map_err(|error| ModelError::Ranks(error.message))
}

/// Most bytes of other ranks' rows, of the outputs of their experts, and of what comes back for this rank's own rows: when
/// all rows of all ranks choose experts of this one.
pub(super) fn exchange_bytes(config: &ModelConfig, spread: &Spread) -> u64 {
    let Some(moe) = &config.moe else {
        return 0;
    };
    let own = spread.placement.seats_per_rank() as usize;
    let rows = spread.max_rows as u64;
    let came = rows.saturating_mul(spread.link.ranks().into());
    let items = came.saturating_mul(moe.top_k.min(own) as u64);
    let (hidden, inner) = (config.hidden_size as u64, moe.intermediate as u64);
    // Rows as they came and as numbers; outputs as numbers and on their way.
    let values = [
        came.saturating_mul(2 * hidden),
        items.saturating_mul(2 * hidden + inner),
        rows.saturating_mul(moe.top_k as u64 * hidden),
    ];
    values
        .into_iter()
        .fold(0_u64, u64::saturating_add)
        .saturating_mul(4)
}

impl SeatBytes {
    /// For this rank. `specs` are those of all experts.
    ///
    /// # Errors
    /// Experts would move, but not all are of one size.
    pub(super) fn of(
        packing: Packing,
        config: &ModelConfig,
        specs: &TensorSpecs,
        checkpoint: &Checkpoint,
        spread: &Spread,
        options: &LoadOptions<'_>,
    ) -> Result<Self, ModelError> {
        if options.eplb.redundant == 0 && !options.eplb.moves() {
            return Ok(Self::default());
        }
        let refuse = |what: &str| Err(ModelError::Ranks(what.to_owned()));
        let Some(bytes) = packing.expert_bytes(config, specs, checkpoint) else {
            return refuse("experts are larger than memory can be");
        };
        let own = spread.own_experts();
        let mut seen = BTreeSet::new();
        let again = own.iter().filter(|expert| !seen.insert(**expert));
        let redundant = again.filter_map(|expert| bytes.get(expert)).sum();
        let mut moving = 0;
        if options.eplb.moves() {
            let most = bytes.values().copied().max().unwrap_or(0);
            if bytes.values().any(|bytes| *bytes != most) {
                return refuse(
                    "the experts are stored in different forms, so none can take another's seat; \
                     allowed: no balancing",
                );
            }
            let first = specs.tensors.iter();
            let first = first.filter(|spec| expert_of(&spec.name) == Some(0));
            let layers: BTreeSet<&str> = first
                .filter_map(|spec| Some(spec.name.split_once(".experts.")?.0))
                .collect();
            let experts = own.len() as u64 + 1 + u64::from(spread.link.ranks());
            moving = experts.saturating_mul(most.div_ceil(layers.len().max(1) as u64));
        }
        Ok(Self { redundant, moving })
    }
}
