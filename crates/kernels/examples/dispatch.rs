//! Cost of a section of the thread team: `cargo run --release -p twinfer-kernels --example dispatch [THREADS]`.

use std::time::{Duration, Instant};

use twinfer_kernels::{Isa, ThreadTeam};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let cpus = twinfer_sys::available_cpus()?;
    // Left to itself the system often puts both threads on one core for a while.
    twinfer_sys::pin_thread(&cpus[..1])?;
    let threads = match std::env::args().nth(1) {
        Some(text) => text.parse()?,
        None => cpus.len(),
    };
    for spin in [Duration::from_micros(20), Duration::ZERO] {
        let team = ThreadTeam::with_spin(threads, Some(&cpus), Isa::detect(None)?, spin)?;
        for gap in [0, 2, 10, 100] {
            let gap = Duration::from_micros(gap);
            let mut times = Vec::new();
            for _ in 0..3000 {
                let begin = Instant::now();
                while begin.elapsed() < gap {}
                let begin = Instant::now();
                team.run(threads, |_, _| {
                    // Long enough that every thread takes one.
                    let begin = Instant::now();
                    while begin.elapsed() < Duration::from_micros(5) {}
                })?;
                times.push(begin.elapsed());
            }
            times.sort();
            println!(
                "{threads} threads, spin {spin:?}, gap {gap:?}: tasks of 5 us each take {:?}, in the worst hundredth {:?}",
                times[times.len() / 2],
                times[times.len() * 99 / 100]
            );
        }
    }
    Ok(())
}
