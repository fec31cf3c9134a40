//! The ways between the ranks of one instance, as the engine wants them.

use std::io;
use std::sync::Arc;
use std::time::Duration;
use twinfer_comm::{
    At, Collective, CommError, Group, Op, Options, Parts, Route, in_process, start_up_test,
};
use twinfer_engine::exchange::{Combine, Exchange, ExchangeError, Place, RankLink};
use twinfer_protocol::Epoch;

/// Ranks that have read their weights wait so long for the slowest.
pub(crate) const LOADING: Duration = Duration::from_secs(600);

/// The links of ranks that are threads of this process, whose start-up test has passed: each for its own thread.
///
/// # Errors
/// What the system reports; a number of ranks that is no group.
pub fn ranks_in_process(ranks: u32) -> io::Result<Vec<Arc<RankLink>>> {
    let options = Options::default();
    let epoch = Epoch(1);
    let groups = in_process(ranks, epoch, options)?;
    let tested = std::thread::scope(|scope| {
        let tests: Vec<_> = groups
            .into_iter()
            .map(|mut group| {
                scope.spawn(move || {
                    start_up_test(&mut group, epoch).map_err(io::Error::other)?;
                    Ok(group)
                })
            })
            .collect();
        let ended = tests.into_iter().map(|test| test.join());
        let panicked = |_| Err(io::Error::other("a start-up test panicked"));
        ended
            .map(|test| test.unwrap_or_else(panicked))
            .collect::<io::Result<Vec<Group>>>()
    });
    let link = |group| {
        let exchange = GroupExchange::new(group, options.patience, LOADING);
        Arc::new(RankLink::new(Box::new(exchange)))
    };
    Ok(tested?.into_iter().map(link).collect())
}

/// A group of ranks whose engines step together.
#[derive(Debug)]
pub struct GroupExchange {
    group: Group,
    epoch: Epoch,
    /// How long a rank is waited for once all have loaded.
    patience: Duration,
    loading: bool,
    received: Parts,
    ops: Vec<Op>,
}

impl GroupExchange {
    /// Over `group`, whose start-up test has passed. Ranks read their weights at their own speed, so before the first
    /// turn they are waited for as long as `loading` says.
    pub fn new(mut group: Group, patience: Duration, loading: Duration) -> Self {
        group.set_patience(loading);
        Self {
            epoch: group.epoch(),
            received: Parts::new(group.topology().world()),
            group,
            patience,
            loading: true,
            ops: Vec::new(),
        }
    }

    fn at(&mut self, place: Place) -> At {
        if place.turn > 0 && self.loading {
            self.loading = false;
            self.group.set_patience(self.patience);
        }
        At::new(self.epoch, place.turn, place.tag)
    }
}

impl Exchange for GroupExchange {
    fn rank(&self) -> u32 {
        self.group.rank()
    }

    fn ranks(&self) -> u32 {
        self.group.topology().world()
    }

    fn reduce(
        &mut self,
        place: Place,
        ops: &[Combine],
        values: &mut [u64],
    ) -> Result<(), ExchangeError> {
        let at = self.at(place);
        self.ops.clear();
        self.ops.extend(ops.iter().map(|op| match op {
            Combine::Sum => Op::Sum,
            Combine::Max => Op::Max,
            Combine::Min => Op::Min,
        }));
        self.group
            .all_reduce(at, &self.ops, values)
            .map_err(|error| told(&error))
    }

    fn all_to_all(
        &mut self,
        place: Place,
        send: &[u8],
        counts: &[usize],
        limit: usize,
    ) -> Result<(), ExchangeError> {
        let at = self.at(place);
        self.group
            .all_to_all(at, send, counts, limit, &mut self.received)
            .map_err(|error| told(&error))
    }

    fn all_gather(&mut self, place: Place, mine: &[u8], limit: usize) -> Result<(), ExchangeError> {
        let at = self.at(place);
        // In two stages less travels between nodes; with one rank per node both ways are the same.
        let nodes = self.nodes();
        let route = match nodes > 1 && nodes < self.ranks() {
            true => Route::TwoStage,
            false => Route::Flat,
        };
        self.group
            .all_gather_v(at, route, mine, limit, &mut self.received)
            .map_err(|error| told(&error))
    }

    fn received(&self, rank: u32) -> &[u8] {
        self.received.part(rank)
    }

    fn nodes(&self) -> u32 {
        let topology = self.group.topology();
        match topology.is_even() {
            true => topology.nodes(),
            false => 1,
        }
    }
}

fn told(error: &CommError) -> ExchangeError {
    ExchangeError {
        rank: error.rank(),
        message: error.to_string(),
    }
}
