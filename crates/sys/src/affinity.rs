//! Which cores this process may use, and pinning threads to them.

use std::io;
use std::path::Path;

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

/// The cores the calling thread may run on, ascending. Cpusets of cgroups and `taskset` are already applied by the
/// kernel; a bandwidth quota is not, see [`cgroup_cpu_quota`].
///
/// # Errors
/// What `sched_getaffinity` reports.
pub fn available_cpus() -> io::Result<Vec<usize>> {
    let set = sched_getaffinity(None)?;
    Ok((0..CpuSet::MAX_CPU)
        .filter(|&cpu| set.is_set(cpu))
        .collect())
}

/// Restricts the calling thread to `cpus`.
///
/// # Errors
/// `InvalidInput` when `cpus` is empty or names a core above the kernel's limit, otherwise what `sched_setaffinity`
/// reports (for instance when none of the cores is permitted).
pub fn pin_thread(cpus: &[usize]) -> io::Result<()> {
    if let Some(cpu) = cpus.iter().find(|&&cpu| cpu >= CpuSet::MAX_CPU) {
        let limit = CpuSet::MAX_CPU;
        return Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            format!("core {cpu} is not below {limit}"),
        ));
    }
    if cpus.is_empty() {
        return Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            "no core given to pin the thread to",
        ));
    }
    let mut set = CpuSet::new();
    for &cpu in cpus {
        set.set(cpu);
    }
    Ok(sched_setaffinity(None, &set)?)
}

/// Cores' worth of time the cgroup grants this process (2.5 = two and a half cores), from cgroup v2 `cpu.max` of the
/// process's group and its parents or v1 `cpu.cfs_quota_us`; `None` without a limit.
pub fn cgroup_cpu_quota() -> Option<f64> {
    let groups = std::fs::read_to_string("/proc/self/cgroup").ok()?;
    let v2 = crate::memory::v2_directories(&groups, Path::new("/sys/fs/cgroup"))
        .iter()
        .filter_map(|directory| {
            parse_cpu_max(&std::fs::read_to_string(directory.join("cpu.max")).ok()?)
        })
        .reduce(f64::min);
    let v1 = || {
        let directory = Path::new("/sys/fs/cgroup/cpu");
        let read = |name: &str| {
            std::fs::read_to_string(directory.join(name))
                .ok()?
                .trim()
                .parse::<f64>()
                .ok()
        };
        let (quota, period) = (read("cpu.cfs_quota_us")?, read("cpu.cfs_period_us")?);
        (quota > 0.0 && period > 0.0).then_some(quota / period)
    };
    v2.or_else(v1)
}

/// `cpu.max` is `QUOTA PERIOD` in microseconds, or `max PERIOD` without a limit.
fn parse_cpu_max(text: &str) -> Option<f64> {
    let mut words = text.split_whitespace();
    let quota: f64 = words.next()?.parse().ok()?;
    let period: f64 = words.next()?.parse().ok()?;
    (quota > 0.0 && period > 0.0).then_some(quota / period)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pinned_thread_sees_only_its_core() {
        let cpus = available_cpus().unwrap();
        assert!(!cpus.is_empty() && cpus.is_sorted());
        let last = *cpus.last().unwrap();
        let seen = std::thread::spawn(move || {
            pin_thread(&[last]).unwrap();
            available_cpus().unwrap()
        });
        assert_eq!(seen.join().unwrap(), [last]);
        assert_eq!(available_cpus().unwrap(), cpus);
    }

    #[test]
    fn impossible_cores_are_refused() {
        assert_eq!(
            pin_thread(&[]).unwrap_err().kind(),
            io::ErrorKind::InvalidInput
        );
        assert_eq!(
            pin_thread(&[usize::MAX]).unwrap_err().kind(),
            io::ErrorKind::InvalidInput
        );
    }

    #[test]
    fn quota_is_a_number_of_cores_or_absent() {
        assert_eq!(parse_cpu_max("250000 100000\n"), Some(2.5));
        assert_eq!(parse_cpu_max("max 100000\n"), None);
        assert_eq!(parse_cpu_max(""), None);
        assert_eq!(parse_cpu_max("100000 0"), None);
    }
}
