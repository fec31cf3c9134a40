//! How much memory this process may use: the node's and the limits of its cgroups (v1 and v2).

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};

use rustix::param::page_size;
use rustix::process::{Resource, getrlimit};

/// Memory of the node and of the cgroup, in bytes, at the time of the call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MemoryInfo {
    /// `MemTotal` of the node.
    pub node_total: u64,
    /// `MemAvailable` of the node: what can be used without swapping.
    pub node_available: u64,
    /// The smallest limit of the process's cgroup and its parents, if any.
    pub cgroup_limit: Option<u64>,
    /// What that limit leaves: limit − usage, page cache that can be dropped counted as free.
    pub cgroup_available: Option<u64>,
}

impl MemoryInfo {
    /// What this process can still take: the smaller of the node's and the cgroup's share.
    pub fn available(&self) -> u64 {
        self.node_available
            .min(self.cgroup_available.unwrap_or(u64::MAX))
    }

    /// What this process could ever take: the smaller of the node's memory and the cgroup's limit.
    pub fn limit(&self) -> u64 {
        self.node_total.min(self.cgroup_limit.unwrap_or(u64::MAX))
    }
}

/// Reads `/proc/meminfo` and the cgroup files.
///
/// # Errors
/// When `/proc/meminfo` can't be read or lacks a field; an absent cgroup is no error.
pub fn memory_info() -> io::Result<MemoryInfo> {
    let meminfo = std::fs::read_to_string("/proc/meminfo")?;
    let field = |name: &str| {
        meminfo_field(&meminfo, name).ok_or_else(|| {
            io::Error::new(
                io::ErrorKind::InvalidData,
                format!("/proc/meminfo has no {name}"),
            )
        })
    };
    let groups = std::fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    let cgroup = cgroup_room(&groups, Path::new("/sys/fs/cgroup"));
    Ok(MemoryInfo {
        node_total: field("MemTotal")?,
        node_available: field("MemAvailable")?,
        cgroup_limit: cgroup.map(|room| room.limit),
        cgroup_available: cgroup.map(|room| room.available),
    })
}

/// Bytes this process can still take: what [`MemoryInfo::available`] says, within the limit on its address space.
///
/// # Errors
/// As [`memory_info`].
pub fn available_memory() -> io::Result<u64> {
    Ok(memory_info()?.available().min(address_space()))
}

/// What a limit on this process's address space (`ulimit -v`) leaves; everything without one.
fn address_space() -> u64 {
    let Some(limit) = getrlimit(Resource::As).current else {
        return u64::MAX;
    };
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap_or_default();
    let pages = statm.split(' ').next().and_then(|n| n.parse::<u64>().ok());
    limit.saturating_sub(pages.unwrap_or(0) * page_size() as u64)
}

/// Bytes of all last-level caches of the node together; `None` where the kernel does not tell.
pub fn last_level_cache_bytes() -> Option<u64> {
    cache_bytes(Path::new("/sys/devices/system/cpu"))
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Room {
    limit: u64,
    available: u64,
}

fn meminfo_field(meminfo: &str, name: &str) -> Option<u64> {
    let line = meminfo
        .lines()
        .find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
    line.trim()
        .strip_suffix("kB")?
        .trim()
        .parse::<u64>()
        .ok()?
        .checked_mul(1024)
}

/// The process's v2 directory and its parents up to the mount point. In a container the path of `/proc/self/cgroup`
/// may belong to the host's tree and not exist below the mount; the mount itself is then the container's group.
pub(crate) fn v2_directories(groups: &str, root: &Path) -> Vec<PathBuf> {
    let Some(path) = groups.lines().find_map(|line| line.strip_prefix("0::")) else {
        return Vec::new();
    };
    let own = root.join(path.trim().trim_start_matches('/'));
    own.ancestors()
        .take_while(|directory| directory.starts_with(root))
        .map(Path::to_path_buf)
        .collect()
}

fn v1_directories(groups: &str, root: &Path) -> Vec<PathBuf> {
    let own = groups.lines().find_map(|line| {
        let mut parts = line.splitn(3, ':');
        let (_, controllers, path) = (parts.next()?, parts.next()?, parts.next()?);
        controllers
            .split(',')
            .any(|controller| controller == "memory")
            .then(|| path.trim().trim_start_matches('/'))
    });
    let root = root.join("memory");
    let own = root.join(own.unwrap_or_default());
    own.ancestors()
        .take_while(|directory| directory.starts_with(&root))
        .map(Path::to_path_buf)
        .collect()
}

fn cache_bytes(cpus: &Path) -> Option<u64> {
    // Cores that share a cache name the same list; each list counts once.
    let mut caches = BTreeMap::new();
    for cpu in std::fs::read_dir(cpus).ok()?.flatten() {
        let Ok(indexes) = std::fs::read_dir(cpu.path().join("cache")) else {
            continue;
        };
        for index in indexes.flatten() {
            let read = |name: &str| std::fs::read_to_string(index.path().join(name)).ok();
            let (Some(level), Some(size), Some(shared)) =
                (read("level"), read("size"), read("shared_cpu_list"))
            else {
                continue;
            };
            let level = level.trim().parse::<u32>().ok();
            let size = size
                .trim()
                .strip_suffix('K')
                .and_then(|size| size.parse::<u64>().ok());
            if let (Some(level), Some(size)) = (level, size) {
                caches.insert((level, shared), size * 1024);
            }
        }
    }
    let last = caches.keys().map(|(level, _)| *level).max()?;
    Some(
        caches
            .iter()
            .filter(|((level, _), _)| *level == last)
            .map(|(_, size)| size)
            .sum(),
    )
}

fn cgroup_room(groups: &str, root: &Path) -> Option<Room> {
    let number = |path: PathBuf| {
        std::fs::read_to_string(path)
            .ok()?
            .trim()
            .parse::<u64>()
            .ok()
    };
    let stat = |path: PathBuf, key: &str| {
        let text = std::fs::read_to_string(path).unwrap_or_default();
        let value = text.lines().find_map(|line| {
            line.strip_prefix(key)?
                .strip_prefix(' ')?
                .trim()
                .parse::<u64>()
                .ok()
        });
        value.unwrap_or(0)
    };
    let room = |directory: &Path, limit: &str, usage: &str, cache: &str| {
        let limit = number(directory.join(limit))?;
        // v1 writes "no limit" as the largest multiple of the page size.
        if limit >= (i64::MAX as u64) / 2 {
            return None;
        }
        let usage = number(directory.join(usage)).unwrap_or(0);
        let cache = stat(directory.join("memory.stat"), cache);
        Some(Room {
            limit,
            available: limit.saturating_sub(usage.saturating_sub(cache)),
        })
    };
    let v2 = v2_directories(groups, root)
        .into_iter()
        .filter_map(|directory| room(&directory, "memory.max", "memory.current", "inactive_file"));
    let v1 = v1_directories(groups, root)
        .into_iter()
        .filter_map(|directory| {
            room(
                &directory,
                "memory.limit_in_bytes",
                "memory.usage_in_bytes",
                "total_inactive_file",
            )
        });
    v2.chain(v1).reduce(|a, b| Room {
        limit: a.limit.min(b.limit),
        available: a.available.min(b.available),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tree(files: &[(&str, &str)]) -> PathBuf {
        use std::sync::atomic::{AtomicU32, Ordering};
        static COUNTER: AtomicU32 = AtomicU32::new(0);
        let unique = COUNTER.fetch_add(1, Ordering::Relaxed);
        let root =
            std::env::temp_dir().join(format!("twinfer-sys-{}-{unique}", std::process::id()));
        for (path, text) in files {
            let path = root.join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        }
        root
    }

    #[test]
    fn this_node_has_memory() {
        let info = memory_info().unwrap();
        assert!(info.node_total > 0 && info.available() > 0 && info.available() <= info.node_total);
        assert!(info.limit() <= info.node_total);
    }

    #[test]
    fn fields_of_meminfo_are_kibibytes() {
        let text = "MemTotal:       24623732 kB\nMemFree: 1 kB\nMemAvailable:   100 kB\n";
        assert_eq!(meminfo_field(text, "MemTotal"), Some(24_623_732 * 1024));
        assert_eq!(meminfo_field(text, "MemAvailable"), Some(102_400));
        assert_eq!(meminfo_field(text, "Mem"), None);
    }

    #[test]
    fn the_tightest_group_of_a_v2_tree_counts() {
        let root = tree(&[
            ("memory.max", "max\n"),
            ("a/memory.max", "1000\n"),
            ("a/memory.current", "700\n"),
            ("a/memory.stat", "anon 1\ninactive_file 100\n"),
            ("a/b/memory.max", "5000\n"),
            ("a/b/memory.current", "600\n"),
        ]);
        assert_eq!(
            cgroup_room("0::/a/b\n", &root),
            Some(Room {
                limit: 1000,
                available: 400
            })
        );
        assert_eq!(cgroup_room("0::/elsewhere\n", &root), None);
        std::fs::remove_dir_all(root).unwrap();
    }

    #[test]
    fn every_last_level_cache_counts_once() {
        let cache = |cpu: u32, index: u32, level: u32, size: &str, shared: &str| {
            let directory = format!("cpu{cpu}/cache/index{index}");
            [
                ("level", level.to_string()),
                ("size", size.to_owned()),
                ("shared_cpu_list", shared.to_owned()),
            ]
            .map(|(name, text)| (format!("{directory}/{name}"), text))
        };
        let files: Vec<(String, String)> = [
            cache(0, 0, 1, "32K", "0"),
            cache(0, 3, 3, "32768K", "0-1"),
            cache(1, 3, 3, "32768K", "0-1"),
            cache(2, 3, 3, "16384K", "2"),
        ]
        .concat();
        let files: Vec<(&str, &str)> = files
            .iter()
            .map(|(path, text)| (path.as_str(), text.as_str()))
            .collect();
        let root = tree(&files);
        assert_eq!(cache_bytes(&root), Some(48 << 20));
        assert_eq!(cache_bytes(&root.join("cpu2")), None);
        std::fs::remove_dir_all(root).unwrap();
    }

    #[test]
    fn v1_limits_count_and_its_no_limit_does_not() {
        let root = tree(&[
            ("memory/memory.limit_in_bytes", "9223372036854771712\n"),
            ("memory/g/memory.limit_in_bytes", "4096\n"),
            ("memory/g/memory.usage_in_bytes", "1024\n"),
        ]);
        assert_eq!(
            cgroup_room("5:cpu:/x\n4:memory:/g\n", &root),
            Some(Room {
                limit: 4096,
                available: 3072
            })
        );
        assert_eq!(cgroup_room("4:memory:/\n", &root), None);
        std::fs::remove_dir_all(root).unwrap();
    }
}
