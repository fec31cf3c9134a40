//! Watches the processes of the other members of a board: when one ends, the group has failed. Sleeps until then.

use crate::board::Shared;
use crate::error::{Cause, Failure};
use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::thread::JoinHandle;
use twinfer_sys::PidFd;

/// The watching thread; ends when this is dropped.
#[derive(Debug)]
pub(crate) struct Watch {
    stop: Arc<OwnedFd>,
    thread: Option<JoinHandle<()>>,
}

impl Watch {
    /// `peers`: the other members, by their place, and a handle to the process of each.
    pub(crate) fn start(shared: Arc<Shared>, peers: Vec<(usize, PidFd)>) -> io::Result<Self> {
        let stop = Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?);
        let stopped = Arc::clone(&stop);
        let thread = std::thread::Builder::new()
            .name("comm-watch".to_owned())
            .spawn(move || watch(&shared, &peers, &stopped))?;
        Ok(Self {
            stop,
            thread: Some(thread),
        })
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        // An eventfd takes a first 1 always.
        let _ = rustix::io::write(&*self.stop, &1_u64.to_ne_bytes());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn watch(shared: &Shared, peers: &[(usize, PidFd)], stop: &OwnedFd) {
    let mut fds: Vec<PollFd<'_>> = peers
        .iter()
        .map(|(_, process)| PollFd::new(process, PollFlags::IN))
        .collect();
    fds.push(PollFd::new(stop, PollFlags::IN));
    loop {
        match poll(&mut fds, None) {
            Ok(_) => break,
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => {
                tracing::error!(%error, "cannot watch the other ranks' processes; a rank that dies will be seen by its deadline only");
                return;
            }
        }
    }
    let ended = fds
        .iter()
        .zip(peers)
        .find(|(fd, _)| !fd.revents().is_empty())
        .map(|(_, (member, _))| *member);
    if let Some(member) = ended {
        shared.fail(&Failure {
            rank: shared.rank_of(member),
            cause: Cause::Died,
            reporter: shared.own_rank(),
            during: None,
            last: shared.last_of(member),
        });
    }
}
