//! The least that a meeting of processes takes: a count, a generation, a wake-up.

use super::LIMIT;
use super::steps::Times;
use crate::ranks::{Ranks, placement};
use anyhow::Result;
use rustix::io::{FdFlags, fcntl_setfd};
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};
use twinfer_comm::Topology;
use twinfer_sys::{SharedWords, futex_wait, futex_wake_all};

/// Words of 32 bits; count and generation lie on lines of their own.
const CONTROL: usize = 32;
const DATA: usize = 8;
const PATIENCE: Duration = Duration::from_secs(30);

/// Memory that the processes of a barrier inherit.
pub(super) struct Barrier {
    words: SharedWords,
}

#[derive(clap::Args)]
pub(super) struct Args {
    /// Descriptor of the memory.
    file: i32,
    calls: u32,
}

impl Barrier {
    pub(super) fn new() -> Result<Self> {
        let words = SharedWords::create(c"barrier", CONTROL, DATA)?;
        fcntl_setfd(words.file(), FdFlags::empty())?;
        Ok(Self { words })
    }

    /// Times of a barrier among `ranks` processes, as the first of them sees them.
    pub(super) fn measure(&self, ranks: u32, calls: u32) -> Result<Times> {
        for word in self.words.control() {
            word.store(0, Ordering::Relaxed);
        }
        let file = self.words.file().as_raw_fd().to_string();
        let arguments = ["barrier".to_owned(), file, calls.to_string()];
        let topology = Topology::one_node(ranks)?;
        let texts = Ranks::start(&topology, "bench-rank", &arguments)?.finish(LIMIT)?;
        Ok(serde_json::from_str(&texts[0])?)
    }
}

/// The life of one process.
pub(super) fn rank(args: &Args) -> Result<()> {
    let ranks = placement()?.world_size;
    let file = std::fs::OpenOptions::new()
        .read(true)
        .write(true)
        .open(format!("/proc/self/fd/{}", args.file))?;
    let words = SharedWords::open(file.into(), CONTROL, DATA)?;
    let (count, generation) = (&words.control()[0], &words.control()[16]);
    let warm_up = args.calls / 10;
    let mut times = Vec::with_capacity(args.calls as usize);
    for call in 0..args.calls + warm_up {
        let start = Instant::now();
        meet(count, generation, ranks)?;
        if call >= warm_up {
            times.push(start.elapsed());
        }
    }
    println!("{}", serde_json::to_string(&Times::of(&mut times))?);
    Ok(())
}

fn meet(count: &AtomicU32, generation: &AtomicU32, ranks: u32) -> std::io::Result<()> {
    let before = generation.load(Ordering::Acquire);
    if count.fetch_add(1, Ordering::AcqRel) + 1 == ranks {
        count.store(0, Ordering::Relaxed);
        generation.fetch_add(1, Ordering::AcqRel);
        futex_wake_all(generation)?;
        return Ok(());
    }
    while generation.load(Ordering::Acquire) == before {
        futex_wait(generation, before, PATIENCE)?;
    }
    Ok(())
}
