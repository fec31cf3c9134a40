//! A closed loop of requests on a group in virtual time, and what a client sees of it.

use super::group::GroupError;
use super::{Group, GroupConfig};
use crate::phase::Phase;
use crate::{EventRef, KvSource, Request, RequestId, SamplingParams};
use std::sync::Arc;
use twinfer_protocol::{ApiError, TokenId};
use twinfer_text::Tokenizer;

/// Lengths in tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lengths {
    /// All alike.
    Fixed(u32),
    /// Each from `low` to `high` alike often.
    Uniform {
        /// Least.
        low: u32,
        /// Most.
        high: u32,
    },
}

/// Requests, of which a fixed number is under way at any time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Workload {
    /// Prompts.
    pub prompt: Lengths,
    /// Outputs.
    pub output: Lengths,
    /// Requests under way.
    pub in_flight: u32,
    /// Requests in all. What is measured is the time from the end of the first `in_flight` of them to the
    /// submission of the last.
    pub requests: u32,
    /// Of the lengths.
    pub seed: u64,
}

/// What came of a workload, in virtual time.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Report {
    /// Output tokens per second.
    pub output_rate: f64,
    /// Time between two outputs of a request, in milliseconds: median, 99th percentile, longest.
    pub gap_p50: f64,
    /// See above.
    pub gap_p99: f64,
    /// See above.
    pub gap_max: f64,
    /// Mean over requests of the mean time per output token after the first, in milliseconds.
    pub tpot_mean: f64,
    /// Time to the first token, in seconds: mean and 99th percentile.
    pub ttft_mean: f64,
    /// See above.
    pub ttft_p99: f64,
    /// Steps in the whole run: prefill, decode, mixed.
    pub steps: [u64; 3],
}

struct Client {
    submitted: u64,
    first: Option<u64>,
    last: u64,
    tokens: u64,
}

/// What is collected inside the measured time.
#[derive(Default)]
struct Samples {
    tokens: u64,
    /// In microseconds, so that a run of millions takes little memory.
    gaps: Vec<u32>,
    ttfts: Vec<u32>,
    tpots: Vec<f64>,
    began: Option<u64>,
}

/// Runs a workload to its end.
///
/// # Errors
/// The configuration or a request is refused; the group broke an invariant, as `Internal`.
pub fn run(
    config: &GroupConfig,
    workload: &Workload,
    tokenizer: &Arc<Tokenizer>,
) -> Result<Report, ApiError> {
    let mut group = Group::new(config, tokenizer)?;
    let mut clients: Vec<Client> = Vec::with_capacity(workload.requests as usize);
    let mut samples = Samples::default();
    let mut steps = [0; 3];
    let mut finished = 0;
    let mut ended = None;
    let most = workload.in_flight.min(workload.requests);
    while clients.len() < most as usize {
        submit(&mut group, workload, &mut clients)?;
    }
    while finished < workload.requests && ended.is_none() {
        let step = group.step().map_err(|error| broken(&error))?;
        let Some(step) = step else {
            return Err(ApiError::new(
                twinfer_protocol::ErrorKind::Internal,
                format!(
                    "the group sleeps after {finished} of {} requests",
                    clients.len()
                ),
            ));
        };
        match step.phase() {
            Some(Phase::Prefill) => steps[0] += 1,
            Some(Phase::Decode) => steps[1] += 1,
            Some(Phase::Mixed) => steps[2] += 1,
            None => {}
        }
        let now = group.now();
        let before = finished;
        for event in group.events() {
            let EventRef::Output(output) = event else {
                continue;
            };
            let Some(client) = clients.get_mut(output.id.0 as usize) else {
                continue;
            };
            let tokens = output.tokens().len() as u64;
            client.output(now, tokens, &mut samples);
            if output.finish.is_some() {
                finished += 1;
                client.end(&mut samples);
            }
        }
        for _ in before..finished {
            if clients.len() < workload.requests as usize {
                submit(&mut group, workload, &mut clients)?;
            }
        }
        if finished >= workload.in_flight {
            samples.began.get_or_insert(now);
        }
        if clients.len() == workload.requests as usize {
            ended = Some(now);
        }
    }
    Ok(samples.report(ended.unwrap_or(group.now()), steps))
}

fn submit(
    group: &mut Group,
    workload: &Workload,
    clients: &mut Vec<Client>,
) -> Result<(), ApiError> {
    let id = clients.len() as u64;
    let draw = |lengths: Lengths, salt: u64| lengths.draw(workload.seed ^ (2 * id + salt));
    let prompt = draw(workload.prompt, 0).max(1) as usize;
    // No two prompts begin alike: nothing comes from the prefix cache.
    let prompt = (0..prompt as u64).map(|at| ((id >> (7 * (at % 5))) & 0x7F) as TokenId);
    group.submit(Request {
        id: RequestId(id),
        prompt: prompt.collect(),
        params: SamplingParams {
            ignore_eos: true,
            ..SamplingParams::greedy(draw(workload.output, 1).max(1))
        },
        kv: KvSource::Compute,
        hold_kv: false,
        cache_salt: None,
        leader: None,
        resumed: 0,
    })?;
    clients.push(Client {
        submitted: group.now(),
        first: None,
        last: 0,
        tokens: 0,
    });
    Ok(())
}

impl Lengths {
    /// The length that belongs to a number.
    fn draw(self, number: u64) -> u32 {
        match self {
            Self::Fixed(length) => length,
            Self::Uniform { low, high } => {
                let width = u128::from(high.saturating_sub(low)) + 1;
                let mut z = number.wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ 0x2545_F491_4F6C_DD1D;
                z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
                z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
                z ^= z >> 31;
                // Below `width`.
                low + ((u128::from(z) * width) >> 64) as u32
            }
        }
    }
}

impl Client {
    fn output(&mut self, now: u64, tokens: u64, samples: &mut Samples) {
        if tokens == 0 {
            return;
        }
        self.tokens += tokens;
        let since = if self.first.is_some() {
            self.last
        } else {
            self.submitted
        };
        if samples.began.is_some() {
            samples.tokens += tokens;
            let time = u32::try_from((now - since) / 1000).unwrap_or(u32::MAX);
            match self.first {
                Some(_) => samples.gaps.push(time),
                None => samples.ttfts.push(time),
            }
        }
        self.first.get_or_insert(now);
        self.last = now;
    }

    fn end(&self, samples: &mut Samples) {
        if let (Some(first), Some(_)) = (self.first, samples.began)
            && self.tokens > 1
        {
            samples
                .tpots
                .push((self.last - first) as f64 / (self.tokens - 1) as f64);
        }
    }
}

impl Samples {
    fn report(mut self, ended: u64, steps: [u64; 3]) -> Report {
        let nanoseconds = ended.saturating_sub(self.began.unwrap_or(0)).max(1);
        let mean = |values: &[f64]| values.iter().sum::<f64>() / values.len().max(1) as f64;
        let ttfts: Vec<f64> = self
            .ttfts
            .iter()
            .map(|time| f64::from(*time) / 1e6)
            .collect();
        Report {
            output_rate: self.tokens as f64 * 1e9 / nanoseconds as f64,
            gap_p50: percentile(&mut self.gaps, 50) / 1e3,
            gap_p99: percentile(&mut self.gaps, 99) / 1e3,
            gap_max: f64::from(self.gaps.iter().copied().max().unwrap_or(0)) / 1e3,
            tpot_mean: mean(&self.tpots) / 1e6,
            ttft_mean: mean(&ttfts),
            ttft_p99: percentile(&mut self.ttfts, 99) / 1e6,
            steps,
        }
    }
}

/// The smallest value that `percent` of the values do not exceed, in microseconds; 0 of none.
fn percentile(values: &mut [u32], percent: usize) -> f64 {
    if values.is_empty() {
        return 0.0;
    }
    let rank = (values.len() * percent)
        .div_ceil(100)
        .clamp(1, values.len());
    f64::from(*values.select_nth_unstable(rank - 1).1)
}

fn broken(error: &GroupError) -> ApiError {
    ApiError::new(twinfer_protocol::ErrorKind::Internal, error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_values_that_occur() {
        let mut values: Vec<u32> = (1..=200).rev().collect();
        assert_eq!(percentile(&mut values, 50), 100.0);
        assert_eq!(percentile(&mut values, 99), 198.0);
        assert_eq!(percentile(&mut [7], 99), 7.0);
        assert_eq!(percentile(&mut [], 50), 0.0);
    }

    #[test]
    fn uniform_lengths_fill_their_range() {
        let lengths = Lengths::Uniform { low: 5, high: 8 };
        let mut seen = [0; 4];
        (0..4000).for_each(|n| seen[(lengths.draw(n) - 5) as usize] += 1);
        assert!(seen.iter().all(|n| (850..1150).contains(n)), "{seen:?}");
    }
}
