//! `twinfer machine`: what this machine can do at best, the floor that benchmarks are compared with.

use crate::args::MachineArgs;
use crate::exit::{Code, Failure, Outcome};
use crate::{output, progress};
use serde::Serialize;
use std::fmt;
use std::time::Duration;
use twinfer_deploy::CoreSet;
use twinfer_kernels::Isa;
use twinfer_kernels::peaks::{self, Peak};

/// The report.
#[derive(Serialize)]
struct Report {
    /// Cores that this process may use.
    cores: Vec<usize>,
    /// Cores' worth of time that the control group allows, if it limits it.
    cpu_quota: Option<f64>,
    /// Memory that this process can still take, in bytes.
    available_memory: Option<u64>,
    /// Instruction-set class of the kernels.
    isa: &'static str,
    rows: Vec<Row>,
}

/// Best rates with one number of threads.
#[derive(Serialize)]
struct Row {
    threads: usize,
    /// Reading memory front to back, 10^9 bytes per second.
    read: Rate,
    /// 10^9 operations per second, a multiply-add counts two.
    int8: Rate,
    bf16: Rate,
    f32: Rate,
}

#[derive(Serialize)]
struct Rate {
    giga_per_second: f64,
    instruction: &'static str,
}

impl From<Peak> for Rate {
    fn from(peak: Peak) -> Self {
        Self {
            giga_per_second: peak.giga_per_second,
            instruction: peak.instruction,
        }
    }
}

pub(crate) fn run(args: &MachineArgs) -> Outcome {
    let cores = twinfer_sys::available_cpus()
        .map_err(|error| Failure::failed(format!("permitted cores: {error}")))?;
    let isa = Isa::detect(None).map_err(|error| Failure::new(Code::Internal, error))?;
    let threads = if args.threads.is_empty() {
        steps(cores.len())
    } else {
        args.threads.clone()
    };
    let most = cores.len().max(1);
    if let Some(many) = threads.iter().find(|threads| **threads > most) {
        return Err(Failure::new(
            Code::Usage,
            format!(
                "--threads is {many}; allowed: 1 to {most}, the number of cores that this process may use"
            ),
        ));
    }
    let budget = Duration::from_secs_f64(args.seconds);
    let bar = progress::Bar::count("measuring", threads.len() as u64 * 4);
    let measure = |peak: Peak| {
        bar.step();
        Rate::from(peak)
    };
    let rows = threads
        .iter()
        .map(|&threads| Row {
            threads,
            read: measure(peaks::read_bandwidth(threads, budget, None)),
            int8: measure(peaks::int8_dot(threads, budget)),
            bf16: measure(peaks::bf16_dot(threads, budget)),
            f32: measure(peaks::f32_fma(threads, budget)),
        })
        .collect();
    bar.finish();
    let report = Report {
        cores,
        cpu_quota: twinfer_sys::cgroup_cpu_quota(),
        available_memory: twinfer_sys::memory_info()
            .ok()
            .map(|memory| memory.available()),
        isa: isa.name(),
        rows,
    };
    if args.json {
        output::json(&report)
    } else {
        output::write(&report)
    }
}

/// 1, 2, 4, ... and all.
fn steps(cores: usize) -> Vec<usize> {
    let mut steps: Vec<usize> = std::iter::successors(Some(1), |step| Some(step * 2))
        .take_while(|step| *step < cores)
        .collect();
    steps.push(cores.max(1));
    steps
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let cores: Vec<u32> = self
            .cores
            .iter()
            .filter_map(|core| u32::try_from(*core).ok())
            .collect();
        writeln!(f, "cores    {} ({})", CoreSet::text(&cores), cores.len())?;
        if let Some(quota) = self.cpu_quota {
            writeln!(f, "quota    {quota} cores' worth of time")?;
        }
        if let Some(memory) = self.available_memory {
            writeln!(
                f,
                "memory   {} available",
                twinfer_config::model::format_bytes(memory)
            )?;
        }
        writeln!(f, "kernels  {}\n", self.isa)?;
        writeln!(
            f,
            "{:>7}  {:>12}  {:>12}  {:>12}  {:>12}",
            "threads", "read GB/s", "int8 GOP/s", "bf16 GFLOP/s", "f32 GFLOP/s"
        )?;
        for row in &self.rows {
            writeln!(
                f,
                "{:>7}  {:>12.1}  {:>12.0}  {:>12.0}  {:>12.0}",
                row.threads,
                row.read.giga_per_second,
                row.int8.giga_per_second,
                row.bf16.giga_per_second,
                row.f32.giga_per_second
            )?;
        }
        if let Some(row) = self.rows.first() {
            writeln!(
                f,
                "\nloops: read {}, int8 {}, bf16 {}, f32 {}",
                row.read.instruction,
                row.int8.instruction,
                row.bf16.instruction,
                row.f32.instruction
            )?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threads_double_up_to_all_cores() {
        assert_eq!(steps(1), [1]);
        assert_eq!(steps(2), [1, 2]);
        assert_eq!(steps(6), [1, 2, 4, 6]);
        assert_eq!(steps(0), [1]);
    }
}
