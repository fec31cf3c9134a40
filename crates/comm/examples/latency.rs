//! How long one small all-reduce takes between processes, beside a bare futex barrier among as many: the floor.
//!
//! ```text
//! cargo run --release -p twinfer-comm --example latency -- [RANKS [CALLS [FIRST_PORT]]]
//! ```
//!
//! Prints p50 and p99 in microseconds for each way: shared memory, TCP on loopback, and two nodes that share memory
//! inside and are connected over loopback TCP. The barrier runs in turns with them, and again at the end.

use rustix::io::{FdFlags, fcntl_setfd};
use std::io::{Read, Write};
use std::net::Ipv4Addr;
use std::os::fd::AsRawFd;
use std::process::{Command, ExitCode, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};
use twinfer_comm::{
    At, Collective, Identity, JoinPlan, Op, Options, Topology, join, start_up_test,
};
use twinfer_protocol::{Epoch, Fingerprint};
use twinfer_sys::{SharedWords, futex_wait, futex_wake_all, set_parent_death_signal};

type Failure = Box<dyn std::error::Error>;

/// Values of the all-reduce: what ranks agree on before a step.
const VALUES: usize = 8;
const EPOCH: Epoch = Epoch(1);
const LIMIT: Duration = Duration::from_secs(30);

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let outcome = match arguments.first().map(String::as_str) {
        Some("rank") => rank(&arguments[1..]),
        _ => measure(&arguments),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("latency: {error}");
            ExitCode::FAILURE
        }
    }
}

fn measure(arguments: &[String]) -> Result<(), Failure> {
    let number = |place: usize, default: u32| -> Result<u32, Failure> {
        match arguments.get(place) {
            Some(text) => Ok(text.parse()?),
            None => Ok(default),
        }
    };
    let (ranks, calls, port) = (number(0, 4)?, number(1, 10_000)?, number(2, 21_350)?);
    let half = (ranks / 2).max(1);
    let nodes = format!("{half},{half}");
    let all = ranks.to_string();
    println!("{ranks} processes, {calls} calls of {VALUES} values each; microseconds");
    println!("{:<44} {:>8} {:>8}", "", "p50", "p99");
    row(
        "bare futex barrier (floor)",
        &["barrier", &all],
        ranks,
        calls,
        port,
    )?;
    row(
        "all-reduce, shared memory",
        &["group", &all, "true"],
        ranks,
        calls,
        port + 1,
    )?;
    row(
        "all-reduce, TCP on loopback",
        &["group", &all, "false"],
        ranks,
        calls,
        port + 2,
    )?;
    if ranks >= 2 {
        let ranks = half * 2;
        row(
            "all-reduce, 2 nodes: shared memory and TCP",
            &["group", &nodes, "true"],
            ranks,
            calls,
            port + 3,
        )?;
    }
    row(
        "bare futex barrier (floor), again",
        &["barrier", &all],
        ranks,
        calls,
        port,
    )
}

/// Runs one way on all processes and prints what the first measured.
fn row(name: &str, way: &[&str], ranks: u32, calls: u32, port: u32) -> Result<(), Failure> {
    let words = SharedWords::create(c"latency", 32, 8)?;
    // The processes of the bare barrier inherit it.
    fcntl_setfd(words.file(), FdFlags::empty())?;
    let file = words.file().as_raw_fd().to_string();
    let parent = std::process::id().to_string();
    let program = std::env::current_exe()?;
    let mut children = Vec::new();
    for rank in 0..ranks {
        let numbers = [&rank, &ranks, &calls, &port].map(u32::to_string);
        let child = Command::new(&program)
            .arg("rank")
            .args([&parent, &file])
            .args(&numbers)
            .args(way)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()?;
        children.push(child);
    }
    let mut first = String::new();
    for (rank, child) in children.iter_mut().enumerate() {
        let mut output = String::new();
        if let Some(stdout) = &mut child.stdout {
            stdout.read_to_string(&mut output)?;
        }
        let status = child.wait()?;
        if !status.success() {
            return Err(format!("{name}: rank {rank} ended with {status}").into());
        }
        if rank == 0 {
            first = output;
        }
    }
    let mut numbers = first.split_whitespace();
    let (p50, p99) = (numbers.next().unwrap_or("-"), numbers.next().unwrap_or("-"));
    println!("{name:<44} {p50:>8} {p99:>8}");
    Ok(())
}

/// One process.
fn rank(arguments: &[String]) -> Result<(), Failure> {
    let [
        parent,
        file,
        rank,
        ranks,
        calls,
        port,
        way,
        counts,
        shares @ ..,
    ] = arguments
    else {
        return Err("too few arguments".into());
    };
    set_parent_death_signal(parent.parse()?)?;
    let (rank, ranks, calls): (u32, u32, u32) = (rank.parse()?, ranks.parse()?, calls.parse()?);
    let warm_up = calls / 10;
    let mut times = Vec::with_capacity(calls as usize);
    let mut timed = |step: u32, start: Instant| {
        if step >= warm_up {
            times.push(start.elapsed());
        }
    };
    if way == "barrier" {
        let file = std::fs::OpenOptions::new()
            .read(true)
            .write(true)
            .open(format!("/proc/self/fd/{file}"))?;
        let words = SharedWords::open(file.into(), 32, 8)?;
        let (count, generation) = (&words.control()[0], &words.control()[16]);
        for step in 0..calls + warm_up {
            let start = Instant::now();
            barrier(count, generation, ranks)?;
            timed(step, start);
        }
    } else {
        let counts: Vec<u32> = counts
            .split(',')
            .map(str::parse)
            .collect::<Result<_, _>>()?;
        let plan = JoinPlan {
            identity: Identity {
                instance: "latency".to_owned(),
                epoch: EPOCH,
                version: env!("CARGO_PKG_VERSION").to_owned(),
                fingerprint: Fingerprint::default(),
            },
            topology: Topology::new(&counts)?,
            rank,
            master_addr: "127.0.0.1".to_owned(),
            master_port: port.parse()?,
            listen: Ipv4Addr::LOCALHOST.into(),
            port: 0,
            advertise: None,
            key: None,
            share_memory: shares.first().is_some_and(|word| word == "true"),
            limit: LIMIT,
            options: Options::default(),
        };
        let mut group = join(&plan)?.group;
        start_up_test(&mut group, EPOCH)?;
        for step in 0..calls + warm_up {
            let mut values = [u64::from(rank); VALUES];
            let start = Instant::now();
            group.all_reduce(
                At::new(EPOCH, 1 + u64::from(step), 0),
                &[Op::Max],
                &mut values,
            )?;
            timed(step, start);
            if values != [u64::from(ranks) - 1; VALUES] {
                return Err(format!("wrong values: {values:?}").into());
            }
        }
    }
    times.sort_unstable();
    let at = |share: f64| {
        let place = ((times.len() as f64 * share) as usize).min(times.len().saturating_sub(1));
        times
            .get(place)
            .map_or(0.0, |time| time.as_secs_f64() * 1e6)
    };
    writeln!(std::io::stdout(), "{:.1} {:.1}", at(0.5), at(0.99))?;
    Ok(())
}

/// The least that a meeting of processes takes: a count, a generation, a wake-up.
fn barrier(count: &AtomicU32, generation: &AtomicU32, ranks: u32) -> std::io::Result<()> {
    let before = generation.load(Ordering::Acquire);
    if count.fetch_add(1, Ordering::AcqRel) + 1 == ranks {
        count.store(0, Ordering::Relaxed);
        generation.fetch_add(1, Ordering::AcqRel);
        futex_wake_all(generation)?;
        return Ok(());
    }
    while generation.load(Ordering::Acquire) == before {
        futex_wait(generation, before, LIMIT)?;
    }
    Ok(())
}
