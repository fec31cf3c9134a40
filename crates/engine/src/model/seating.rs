//! Experts that change their seats between steps: loads are counted, all ranks derive the same placements from their
//! sums, and one layer after the other changes, its weights sent from rank to rank and written over those before. An
//! expert computes alike in every seat, so no answer depends on it.

mod content;

use super::Decoder;
use crate::ExecError;
use crate::eplb::{
    EplbAction, EplbOptions, EplbShape, LoadStats, Move, Rebalancing, moves, rebalance, rounds,
    worst_load,
};
use crate::exchange::{RankLink, Sent};
use crate::phase::Phase;
use crate::placement::ExpertPlacement;
use content::{append, longest, overwrite};
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use twinfer_protocol::ApiError;

/// Tag of the sums; those of layers are smaller.
const SUM_TAG: u32 = 1 << 20;
/// Tag of the first round of moves.
const MOVE_TAG: u32 = SUM_TAG + 1;

/// When experts move, and where to.
#[derive(Debug)]
pub(crate) struct Seating {
    link: Arc<RankLink>,
    shape: EplbShape,
    forced: bool,
    schedule: Rebalancing,
    plans: usize,
    /// Placements that layers will change to.
    next: BTreeMap<u32, ExpertPlacement>,
    sums: Vec<u64>,
    send: Vec<u8>,
    counts: Vec<usize>,
    /// Experts that came, until all of the layer have: the memory they go to may still be a source.
    staged: Vec<u8>,
    /// Where in it the content for which of this rank's seats is.
    places: Vec<(usize, Range<usize>)>,
}

impl Seating {
    /// `groups` is the number of groups that a row's experts are chosen from.
    ///
    /// # Errors
    /// The experts cannot be spread so.
    pub(crate) fn new(
        options: EplbOptions,
        link: Arc<RankLink>,
        placement: &ExpertPlacement,
        groups: u32,
    ) -> Result<Self, ApiError> {
        let shape = EplbShape {
            experts: placement.experts(),
            redundant: placement.seats().len() as u32 - placement.experts(),
            groups,
            nodes: link.nodes(),
            ranks: link.ranks(),
        };
        shape.validate()?;
        Ok(Self {
            link,
            shape,
            forced: options.forced,
            schedule: Rebalancing::new(options.interval, options.after_prefill),
            plans: 0,
            next: BTreeMap::new(),
            sums: Vec::new(),
            send: Vec::new(),
            counts: Vec::new(),
            staged: Vec::new(),
            places: Vec::new(),
        })
    }

    /// What is due after a step of this phase, which all ranks have run.
    ///
    /// # Errors
    /// The ranks cannot go on together, or their weights are not of one form.
    pub(crate) fn after_step(
        &mut self,
        phase: Phase,
        model: &mut Decoder,
        loads: &mut LoadStats,
        progress: &AtomicU64,
    ) -> Result<(), ExecError> {
        match self.schedule.after_step(phase) {
            EplbAction::None => Ok(()),
            EplbAction::Plan => self.plan(model, loads),
            EplbAction::Switch { layer } => self.switch(layer, model, progress),
        }
    }

    fn plan(&mut self, model: &mut Decoder, loads: &mut LoadStats) -> Result<(), ExecError> {
        self.add_up(loads)?;
        self.next.clear();
        let (mut before, mut after) = (0.0_f64, 0.0_f64);
        for (layer, moe) in model.expert_layers() {
            let Some(old) = moe.placement() else {
                continue;
            };
            let new = match self.forced {
                true => turned(old, self.plans),
                false => rebalance(old, loads.loads(layer), &self.shape),
            };
            let new = new.map_err(refused)?;
            let own = loads.loads(layer);
            let mean = own.iter().sum::<u64>() as f64 / f64::from(self.shape.ranks.max(1));
            if mean > 0.0 {
                before = before.max(worst_load(old, own) / mean);
                after = after.max(worst_load(&new, own) / mean);
            }
            if new != *old {
                self.next.insert(layer as u32, new);
            }
        }
        self.plans += 1;
        self.link.count_moves(|moves| {
            moves.plans += 1;
            moves.balance_before = before;
            moves.balance_after = after;
        });
        self.schedule.planned(self.next.keys().copied());
        Ok(())
    }

    /// Adds up the loads of all ranks.
    fn add_up(&mut self, loads: &mut LoadStats) -> Result<(), ExecError> {
        let own: &[u8] = bytemuck::cast_slice(loads.window());
        let mut exchange = self.link.open();
        exchange.all_gather(self.link.place(SUM_TAG), own, own.len())?;
        self.sums.clear();
        self.sums.resize(loads.window().len(), 0);
        for from in 0..self.link.ranks() {
            let part = exchange.received(from);
            match bytemuck::try_cast_slice::<u8, u64>(part) {
                Ok(counts) if counts.len() == self.sums.len() => {
                    for (sum, count) in self.sums.iter_mut().zip(counts) {
                        *sum = sum.saturating_add(*count);
                    }
                }
                _ => return Err(malformed(from, part.len(), "loads of experts")),
            }
        }
        loads.close(&self.sums);
        Ok(())
    }

    /// Makes the moves of a layer.
    fn switch(
        &mut self,
        layer: u32,
        model: &mut Decoder,
        progress: &AtomicU64,
    ) -> Result<(), ExecError> {
        let new = self.next.remove(&layer);
        let moe = model.expert_layers().find(|(at, _)| *at == layer as usize);
        let (Some(new), Some((_, moe))) = (new, moe) else {
            return Ok(());
        };
        let Some(old) = moe.placement().cloned() else {
            return Ok(());
        };
        let all = moves(&old, &new, &self.shape).map_err(refused)?;
        let rank = self.link.rank();
        let own = old.seats_of_rank(rank);
        let seat_of = |seat: u32| (seat - own.start) as usize;
        self.staged.clear();
        self.places.clear();
        let local = |step: &&Move| own.contains(&step.seat) && own.contains(&step.from);
        for step in all.iter().filter(local) {
            let start = self.staged.len();
            append(&moe.experts()[seat_of(step.from)], &mut self.staged);
            let place = start..self.staged.len();
            self.places.push((seat_of(step.seat), place));
        }
        let limit = moe.experts().iter().map(longest).max().unwrap_or(0);
        for (number, round) in (0..).zip(rounds(&old, &all)) {
            self.send.clear();
            self.counts.clear();
            self.counts.resize(self.link.ranks() as usize, 0);
            for step in round.iter().filter(|step| own.contains(&step.from)) {
                append(&moe.experts()[seat_of(step.from)], &mut self.send);
                self.counts[old.rank_of(step.seat) as usize] = self.send.len();
            }
            let mut exchange = self.link.open();
            let place = self.link.place(MOVE_TAG + number);
            exchange.all_to_all(place, &self.send, &self.counts, limit)?;
            self.link.count(Sent::Weights, self.counts.iter().copied());
            for step in round.iter().filter(|step| own.contains(&step.seat)) {
                let came = exchange.received(old.rank_of(step.from));
                let start = self.staged.len();
                self.staged.extend_from_slice(came);
                let place = start..self.staged.len();
                self.places.push((seat_of(step.seat), place));
            }
            progress.fetch_add(1, Ordering::Relaxed);
        }
        for (seat, place) in &self.places {
            let content = &self.staged[place.clone()];
            overwrite(&mut moe.experts_mut()[*seat], content).map_err(|error| {
                ExecError::Ranks(format!("an expert for layer {layer} that came: {error}"))
            })?;
        }
        let seats = self.places.len() as u64;
        self.link.count_moves(|moves| {
            moves.layers += 1;
            moves.seats += seats;
        });
        moe.set_placement(new);
        Ok(())
    }
}

/// The placement of which each seat has its neighbour's expert, or that of one further off, in turn.
fn turned(old: &ExpertPlacement, turn: usize) -> Result<ExpertPlacement, ApiError> {
    let mut seats = old.seats().to_vec();
    let count = seats.len();
    if count > 1 {
        seats.rotate_left(1 + turn % (count - 1));
    }
    ExpertPlacement::new(old.experts(), old.ranks(), seats)
}

fn refused(error: ApiError) -> ExecError {
    ExecError::Ranks(error.message)
}

fn malformed(rank: u32, bytes: usize, what: &str) -> ExecError {
    ExecError::Ranks(format!("rank {rank} sent {bytes} bytes that are no {what}"))
}
