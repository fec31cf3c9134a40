//! The first rank's side of the rendezvous, and that of all others.

use super::acceptor::{Acceptor, Event};
use super::table::{Table, Verdict};
use super::{Answer, Join, RankInfo};
use crate::channel::{Channel, ChannelError, RANKS};
use crate::handshake::PeerKey;
use crate::start::{StartError, pause};
use crate::topology::Topology;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

/// Time to tell one rank the outcome.
const ANSWER_TIME: Duration = Duration::from_secs(2);
/// Between two attempts to reach the first rank.
const RETRY: Duration = Duration::from_millis(100);
/// Beyond its own deadline a rank waits for the first one to say who is missing.
const VERDICT_TIME: Duration = Duration::from_secs(2);

/// Waits until all ranks have come, and tells them.
pub(crate) fn host(
    listener: TcpListener,
    key: Option<&PeerKey>,
    own: Join,
    topology: &Topology,
    limit: Duration,
) -> Result<Vec<RankInfo>, StartError> {
    let until = Instant::now() + limit;
    let io = |source| StartError::Io {
        doing: "waiting for ranks",
        source,
    };
    let mut acceptor =
        Acceptor::new(&RANKS, listener, key.cloned(), topology.world()).map_err(io)?;
    let mut table = Table::new(own, topology);
    let mut joined: Vec<(u32, Channel<TcpStream>)> = Vec::new();
    loop {
        if let Some(ranks) = table.ranks() {
            let welcome = Answer::Welcome {
                ranks: ranks.clone(),
            };
            tell(&mut joined, &welcome);
            return Ok(ranks);
        }
        let watched: Vec<(u32, &TcpStream)> = joined
            .iter()
            .map(|(rank, channel)| (*rank, &channel.stream))
            .collect();
        let refusal = match acceptor.next::<Join>(&watched, until).map_err(io)? {
            Event::Arrived {
                channel, message, ..
            } => {
                let rank = message.info.rank;
                let verdict = table.join(message);
                let mut one = [(rank, channel)];
                match verdict {
                    Verdict::Wait | Verdict::Complete => {
                        joined.extend(one);
                        continue;
                    }
                    Verdict::Refuse(refusal) => {
                        tracing::warn!(%refusal, "a rank was turned away");
                        tell(&mut one, &Answer::Refused(refusal));
                        continue;
                    }
                    Verdict::Fail(refusal) => {
                        tell(&mut one, &Answer::Refused(refusal.clone()));
                        refusal
                    }
                }
            }
            Event::Turned { from, why } => {
                tracing::warn!(%from, %why, "a connection to the rendezvous was turned away");
                table.note(&format!("{from}: {why}"));
                continue;
            }
            Event::Gone(rank) => {
                table.gone(rank);
                joined.retain(|(other, _)| *other != rank);
                continue;
            }
            Event::Time => table.missing(limit.as_secs()),
        };
        tell(&mut joined, &Answer::Refused(refusal.clone()));
        return Err(StartError::Refused(Box::new(refusal)));
    }
}

fn tell(joined: &mut [(u32, Channel<TcpStream>)], answer: &Answer) {
    for (rank, channel) in joined {
        // Who can't be told has gone, and is missed when the others look for it.
        if let Err(error) = channel.send(answer, Instant::now() + ANSWER_TIME) {
            tracing::warn!(rank, %error, "a rank could not be told the outcome of the rendezvous");
        }
    }
}

/// Dials the first rank until it is there, and waits until all are.
pub(crate) fn join(
    addresses: &[SocketAddr],
    key: Option<&PeerKey>,
    own: &Join,
    limit: Duration,
) -> Result<Vec<RankInfo>, StartError> {
    let until = Instant::now() + limit;
    let mut tried = 0_usize;
    loop {
        let address = addresses[tried % addresses.len()];
        tried += 1;
        let left = until.saturating_duration_since(Instant::now());
        let outcome = match left.is_zero() {
            true => Err(ChannelError::Timeout),
            false => TcpStream::connect_timeout(&address, left)
                .map_err(ChannelError::from)
                .and_then(|stream| {
                    stream.set_nodelay(true)?;
                    Channel::dial(&RANKS, stream, key, until)
                }),
        };
        let why = match outcome {
            Ok(channel) => match ask(channel, own, until + VERDICT_TIME) {
                Ok(Answer::Welcome { ranks }) => return check(ranks, own),
                Ok(Answer::Refused(refusal)) => {
                    return Err(StartError::Refused(Box::new(refusal)));
                }
                Err(why) => return Err(StartError::Rendezvous { address, why }),
            },
            Err(why) => why,
        };
        // Nobody there yet, or no time for us: again. Somebody else there: for good.
        let again = matches!(why, ChannelError::Closed | ChannelError::Io(_));
        if !again || Instant::now() + RETRY >= until {
            return Err(StartError::Rendezvous { address, why });
        }
        pause(RETRY);
    }
}

fn ask(
    mut channel: Channel<TcpStream>,
    own: &Join,
    until: Instant,
) -> Result<Answer, ChannelError> {
    channel.send(own, until)?;
    channel.receive(until)
}

/// The first rank has proven the key; that its table fits the plan is checked all the same.
fn check(ranks: Vec<RankInfo>, own: &Join) -> Result<Vec<RankInfo>, StartError> {
    let world: u64 = own.counts.iter().map(|&count| u64::from(count)).sum();
    let fits = ranks.len() as u64 == world
        && ranks
            .iter()
            .enumerate()
            .all(|(place, info)| info.rank as usize == place);
    match fits {
        true => Ok(ranks),
        false => Err(StartError::Table),
    }
}
