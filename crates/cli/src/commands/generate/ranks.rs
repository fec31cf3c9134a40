//! `generate --dp`: ranks are threads of this process, each with its part of the prompts.

use super::{Printer, bad_model, engine, failed, requests_of};
use crate::exit::{Failure, Outcome};
use std::ops::Range;
use std::sync::mpsc::sync_channel;
use std::sync::{Arc, Mutex, PoisonError};
use twinfer_config::GenerateConfig;
use twinfer_engine::exchange::RankLink;
use twinfer_engine::phase::PhasePolicy;
use twinfer_engine::{Generated, RankEngine, Request, RequestId, generate_together};
use twinfer_text::{ChatTemplate, Tokenizer};

use super::prompts::Line;

/// Results on their way to the printer, for each rank.
const RESULTS: usize = 16;

/// Loads the model over `links`, one for each rank, runs all prompts and prints the results in their order.
pub(super) fn run(
    config: &GenerateConfig,
    (tokenizer, template): (&Arc<Tokenizer>, &ChatTemplate),
    lines: &[Line],
    mut printer: Printer<'_>,
    links: Vec<Arc<RankLink>>,
) -> Outcome {
    let ranks = links.len();
    // Of the rank that failed first: the others' failures follow from it.
    let first: Mutex<Option<Failure>> = Mutex::new(None);
    let fail = |failure: Failure| {
        let mut first = first.lock().unwrap_or_else(PoisonError::into_inner);
        first.get_or_insert(failure);
    };
    std::thread::scope(|scope| {
        let (up, ups) = sync_channel(ranks);
        let (sender, results) = sync_channel::<Generated>(RESULTS * ranks);
        let mut parts = Vec::with_capacity(ranks);
        for (rank, link) in links.into_iter().enumerate() {
            let (part, own) = sync_channel::<Vec<Request>>(1);
            parts.push(part);
            let (up, sender, fail) = (up.clone(), sender.clone(), &fail);
            scope.spawn(move || {
                let live = || {
                    let engine = engine(config, tokenizer, Some((&link, rank)))?;
                    let shape = (engine.max_len(), engine.vocab_size());
                    let mut rank = RankEngine::new(engine, PhasePolicy::DEFAULT, link)
                        .map_err(|error| bad_model(&error))?;
                    // Nobody listens any more when another rank has failed.
                    let _ = up.send(shape);
                    drop(up);
                    let Ok(requests) = own.recv() else {
                        return Ok(());
                    };
                    let concurrency = config.max_num_seqs as usize;
                    generate_together(&mut rank, requests, concurrency, |result| {
                        let _ = sender.send(result.clone());
                    })
                    .map(drop)
                    .map_err(|error| failed(&error))
                };
                if let Err(failure) = live() {
                    fail(failure);
                }
            });
        }
        drop((up, sender));
        let shapes: Vec<(u32, usize)> = ups.iter().collect();
        let Some((max_len, vocab)) = shapes.first().copied().filter(|_| shapes.len() == ranks)
        else {
            // Why is told below.
            return;
        };
        let (requests, places) =
            match requests_of(config, (tokenizer, template), (max_len, vocab), lines) {
                Ok(made) => made,
                Err(failure) => {
                    drop(parts);
                    fail(failure);
                    return;
                }
            };
        printer.begin(places);
        for (part, requests) in parts.iter().zip(dealt(requests, ranks)) {
            let _ = part.send(requests);
        }
        for result in results {
            printer.take(&result);
        }
    });
    match first.into_inner().unwrap_or_else(PoisonError::into_inner) {
        Some(failure) => Err(failure),
        None => printer.end(),
    }
}

/// Requests by rank, in turn; choices of one prompt share its KV and stay together.
fn dealt(requests: Vec<Request>, ranks: usize) -> Vec<Vec<Request>> {
    let mut dealt: Vec<Vec<Request>> = (0..ranks).map(|_| Vec::new()).collect();
    let (mut next, mut leader): (usize, Option<RequestId>) = (0, None);
    for request in requests {
        let joins = request.leader.is_some() && request.leader == leader;
        if !joins {
            leader = request.leader;
            next += 1;
        }
        dealt[(next - 1) % ranks].push(request);
    }
    dealt
}

/// The part of `count` things of rank `rank` of `ranks`.
pub(super) fn part(count: usize, rank: usize, ranks: usize) -> Range<usize> {
    count * rank / ranks..count * (rank + 1) / ranks
}
