//! Experts spread over ranks give the bits of one rank, with real experts.

use super::*;
use crate::model::Packing;
use crate::model::ffn::USUAL_NAMES;
use crate::placement::{Arrivals, Dispatch, ExpertPlacement, Item};
use crate::weights::{Checkpoint, read_text};
use std::path::Path;
use twinfer_config::ModelConfig;
use twinfer_kernels::{Compute, Isa};
use twinfer_sys::Pieces;

const ROWS: usize = 13;

/// A layer's experts, the width of a row, and the outputs of shared experts for it.
fn build(path: &str, packing: Packing) -> (Moe, usize) {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../../testdata/golden")
        .join(path);
    let text = read_text(&dir.join("config.json")).unwrap();
    let config = ModelConfig::parse(&text).unwrap();
    let specs = config.tensors(false);
    let checkpoint = Checkpoint::open(&dir, &specs, config.quantization.as_ref()).unwrap();
    let builder = Builder::new(
        &checkpoint,
        packing,
        Pieces::private(1 << 20).unwrap(),
        None,
    );
    let moe = config.moe.unwrap();
    let layer = moe.layers.iter().position(|is_moe| *is_moe).unwrap();
    let path = format!("model.layers.{layer}.mlp");
    (
        Moe::build(&moe, &builder, &path, USUAL_NAMES).unwrap(),
        config.hidden_size,
    )
}

/// The outputs of the experts in a rank's seats for what came.
fn run_seats(
    moe: &Moe,
    team: &ThreadTeam,
    placement: &ExpertPlacement,
    rank: u32,
    arrivals: &Arrivals,
    x: &[f32],
) -> Vec<f32> {
    let (count, width) = (arrivals.sources().len(), moe.config.intermediate);
    let groups = |part: fn(&Ffn) -> &Weight| -> Vec<(&Weight, Range<usize>)> {
        placement
            .seats_of_rank(rank)
            .enumerate()
            .map(|(at, seat)| {
                let expert = placement.seats()[seat as usize] as usize;
                (part(&moe.experts[expert]), arrivals.places_of_seat(at))
            })
            .filter(|(_, rows)| !rows.is_empty())
            .collect()
    };
    let mut gate_up = vec![0.0; count * 2 * width];
    let mut output = vec![0.0; count * moe.router.cols()];
    let sources = arrivals.sources();
    grouped_product_gathered(team, x, sources, &groups(|ffn| &ffn.gate_up), &mut gate_up).unwrap();
    let down = groups(|ffn| &ffn.down);
    grouped_product_gated(team, &gate_up, &down, &mut Vec::new(), &mut output).unwrap();
    output
}

fn over_ranks(
    moe: &Moe,
    team: &ThreadTeam,
    placement: &ExpertPlacement,
    x: &[f32],
    slots: &[Slot],
    shared: Option<&[f32]>,
) -> Vec<f32> {
    let (hidden, top_k, ranks) = (
        moe.router.cols(),
        moe.config.top_k,
        placement.ranks() as usize,
    );
    // Rows live on ranks in turn.
    let rows_of = |rank: usize| (rank..ROWS).step_by(ranks);
    let dispatches: Vec<Dispatch> = (0..ranks)
        .map(|home| {
            let chosen = rows_of(home).flat_map(|row| &slots[row * top_k..(row + 1) * top_k]);
            let experts: Vec<u32> = chosen.map(|slot| slot.expert).collect();
            let mut dispatch = Dispatch::default();
            dispatch
                .plan(placement, home as u32, &experts, top_k)
                .unwrap();
            dispatch
        })
        .collect();
    let mut back: Vec<Vec<f32>> = (0..ranks)
        .map(|home| vec![f32::NAN; rows_of(home).count() * top_k * hidden])
        .collect();
    for rank in 0..ranks {
        let mut came = Vec::new();
        for (home, dispatch) in dispatches.iter().enumerate() {
            let own: Vec<usize> = rows_of(home).collect();
            let sent = dispatch.rows_to(rank).iter().map(|row| own[*row as usize]);
            came.extend(
                sent.flat_map(|row| &x[row * hidden..(row + 1) * hidden])
                    .copied(),
            );
        }
        let senders = dispatches.iter().map(|dispatch| {
            let items: &[Item] = dispatch.items_to(rank);
            (items, dispatch.rows_to(rank).len() as u32)
        });
        let mut arrivals = Arrivals::default();
        arrivals.sort(placement, rank as u32, senders).unwrap();
        let output = run_seats(moe, team, placement, rank as u32, &arrivals, &came);
        for (home, back) in back.iter_mut().enumerate() {
            let places = arrivals
                .places_for(home)
                .iter()
                .map(|place| *place as usize);
            let flat: Vec<f32> = places
                .flat_map(|place| &output[place * hidden..(place + 1) * hidden])
                .copied()
                .collect();
            let range = dispatches[home].outputs_from(rank);
            back[range.start * hidden..range.end * hidden].copy_from_slice(&flat);
        }
    }
    let mut out = vec![f32::NAN; ROWS * hidden];
    for home in 0..ranks {
        for (at, row) in rows_of(home).enumerate() {
            let own = row * hidden..(row + 1) * hidden;
            let chosen = &slots[row * top_k..(row + 1) * top_k];
            let weights: Vec<f32> = chosen.iter().map(|slot| slot.weight).collect();
            let shared = shared.map(|shared| &shared[own.clone()]);
            dispatches[home]
                .combine(at, &weights, &back[home], shared, &mut out[own])
                .unwrap();
        }
    }
    out
}

#[test]
fn any_number_of_ranks_and_any_placement_give_the_bits_of_one_rank() {
    let team = ThreadTeam::single(Isa::detect(None).unwrap());
    for (path, quantize) in [
        ("qwen3_moe", false),
        ("qwen3_moe", true),
        ("deepseek_v3", false),
        ("deepseek_v3", true),
    ] {
        let packing = Packing {
            float: Compute::F32,
            quantize,
        };
        let (moe, hidden) = build(path, packing);
        let mut number = 7u32;
        let x: Vec<f32> = (0..ROWS * hidden)
            .map(|_| {
                number = number.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                (number >> 8) as f32 / (1u32 << 23) as f32 - 1.0
            })
            .collect();
        let mut scratch = MoeScratch::default();
        moe.route(&team, &x, &mut scratch).unwrap();
        let slots = scratch.slots[..ROWS * moe.config.top_k].to_vec();
        let shared = moe.shared.as_ref().map(|ffn| {
            let mut out = vec![0.0; ROWS * hidden];
            ffn.forward(&team, &x, &mut Vec::new(), &mut Vec::new(), &mut out)
                .unwrap();
            out
        });
        let shared = shared.as_deref();
        let mut alone = vec![0.0; ROWS * hidden];
        moe.run_experts(&team, &x, shared, &mut scratch, &mut alone)
            .unwrap();
        let alone: Vec<u32> = alone.iter().map(|value| value.to_bits()).collect();
        let experts = moe.config.experts as u32;
        for (ranks, redundant) in [(1, 0), (2, 0), (4, 4), (8, 8), (8, 0)] {
            let seats = (0..experts + redundant).map(|seat| (seat * 5 + seat / experts) % experts);
            for placement in [
                ExpertPlacement::in_order(experts, redundant, ranks).unwrap(),
                ExpertPlacement::new(experts, ranks, seats.clone().collect()).unwrap(),
            ] {
                let out = over_ranks(&moe, &team, &placement, &x, &slots, shared);
                let out: Vec<u32> = out.iter().map(|value| value.to_bits()).collect();
                assert_eq!(out, alone, "{path}, quantised {quantize}, {ranks} ranks");
            }
        }
    }
}
