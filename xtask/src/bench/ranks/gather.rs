//! Bytes between nodes of the two ways to gather: counted, so that once is enough.

use super::{Measured, Plan, Sample};
use crate::ranks::EPOCH;
use anyhow::{Result, bail};
use twinfer_comm::{At, Collective, Group, Options, Route, Topology, loopback};

/// Bytes of a rank.
const BYTES: usize = 64 << 10;

pub(super) fn measure(plan: &Plan, measured: &mut Measured) -> Result<()> {
    for (row, counts) in [
        (
            "bytes between nodes, gather in two stages over flat, 2 nodes of 8 ranks",
            &[8, 8][..],
        ),
        (
            "bytes between nodes, gather in two stages over flat, 4 nodes of 4 ranks",
            &[4, 4, 4, 4],
        ),
    ] {
        if !plan.wants(row) {
            continue;
        }
        let topology = Topology::new(counts)?;
        let flat = between_nodes(&topology, Route::Flat)?;
        let staged = between_nodes(&topology, Route::TwoStage)?;
        let sample = Sample {
            ours: staged as f64 / flat as f64,
            floor: 1.0 / f64::from(counts[0]),
            peer: None,
        };
        measured.insert(0, row, sample);
        measured.notes.push(format!(
            "{row}: {staged} bytes in two stages, {flat} flat, of {BYTES} bytes from each rank"
        ));
    }
    Ok(())
}

/// Bytes that all ranks together give to other nodes in one gather.
fn between_nodes(topology: &Topology, route: Route) -> Result<u64> {
    let groups = loopback(topology, true, EPOCH, Options::default())?;
    std::thread::scope(|scope| {
        let ranks: Vec<_> = groups
            .into_iter()
            .map(|group| scope.spawn(move || gather(group, route)))
            .collect();
        let ends: Vec<_> = ranks.into_iter().map(|rank| rank.join()).collect();
        ends.into_iter()
            .map(|end| end.unwrap_or_else(|_| bail!("a rank panicked")))
            .sum()
    })
}

fn gather(mut group: Group, route: Route) -> Result<u64> {
    let (rank, world) = (group.rank() as usize, group.topology().world() as usize);
    let byte = |rank: usize, place: usize| (rank * 31 + place) as u8;
    let mine: Vec<u8> = (0..BYTES).map(|place| byte(rank, place)).collect();
    let mut all = vec![0; world * BYTES];
    group.all_gather(At::new(EPOCH, 1, 0), route, &mine, &mut all)?;
    let mut parts = all.chunks_exact(BYTES).enumerate();
    if !parts.all(|(rank, part)| (0..BYTES).all(|place| part[place] == byte(rank, place))) {
        bail!("rank {rank} gathered other bytes than were sent");
    }
    Ok(group.traffic().inter_node)
}
