use rustix::process::{Pid, Signal, kill_process};
use std::ffi::OsStr;
use std::fs::File;
use std::io;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU16, Ordering::Relaxed};
use std::time::{Duration, Instant, SystemTime};

/// A child process whose output goes to a file; killed when dropped.
#[derive(Debug)]
pub struct Process {
    child: Child,
    log: tempfile::NamedTempFile,
}

/// Root of the repository.
pub fn repository() -> PathBuf {
    let manifest = Path::new(env!("CARGO_MANIFEST_DIR"));
    manifest.parent().unwrap_or(manifest).to_path_buf()
}

/// The bundled model.
pub fn demo_model() -> PathBuf {
    repository().join("models/demo")
}

/// The cargo profile that this program was built with.
pub fn profile() -> String {
    let name = std::env::current_exe().ok().and_then(|own| {
        let mut folders = own.ancestors().skip(1).filter_map(Path::file_name);
        let folder = folders.find(|name| *name != OsStr::new("deps"))?;
        Some(folder.to_string_lossy().into_owned())
    });
    match name {
        Some(name) if name != "debug" => name,
        _ => "dev".to_owned(),
    }
}

/// The `twinfer` binary of the profile that runs the tests; built once per test process when a source
/// is newer than it. (`cargo test --workspace` has built it already.)
///
/// # Panics
/// When the binary does not build.
pub fn binary() -> &'static Path {
    static BINARY: OnceLock<PathBuf> = OnceLock::new();
    BINARY.get_or_init(|| {
        let own = std::env::current_exe().expect("the own path");
        // Tests lie in `deps`, beside what is built for people.
        let folder = own
            .ancestors()
            .skip(1)
            .find(|folder| folder.file_name() != Some(OsStr::new("deps")))
            .expect("a folder");
        let binary = folder.join("twinfer");
        let built = modified(&binary);
        if built.is_none() || built < newest(&repository().join("crates")) {
            let mut build =
                Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
            build.current_dir(repository()).args([
                "build",
                "--quiet",
                "--workspace",
                "--bin",
                "twinfer",
                "--profile",
                &profile(),
            ]);
            let status = build.status().expect("cargo runs");
            assert!(status.success(), "twinfer does not build");
        }
        binary
    })
}

fn modified(path: &Path) -> Option<SystemTime> {
    path.metadata()
        .and_then(|metadata| metadata.modified())
        .ok()
}

/// Time of the last change to a file below `folder`.
fn newest(folder: &Path) -> Option<SystemTime> {
    let entries = std::fs::read_dir(folder).ok()?;
    entries
        .flatten()
        .filter_map(|entry| {
            let path = entry.path();
            if path.is_dir() {
                newest(&path)
            } else {
                modified(&path)
            }
        })
        .max()
}

/// The first of `count` free ports in a row, all of them the caller's.
pub fn free_ports(count: u16) -> u16 {
    loop {
        let first = free_port();
        if (1..count).all(|further| Some(free_port()) == first.checked_add(further)) {
            return first;
        }
    }
}

/// Processes that `process` has started and that run, or were not collected.
///
/// # Panics
/// When it has ended.
pub fn children(process: u32) -> Vec<u32> {
    let tasks = std::fs::read_dir(format!("/proc/{process}/task")).expect("it runs");
    let mut found: Vec<u32> = tasks
        .flatten()
        .flat_map(|task| {
            let children = std::fs::read_to_string(task.path().join("children"));
            let children = children.unwrap_or_default();
            let ids = children.split_whitespace().map(|id| id.parse::<u32>());
            ids.flatten().collect::<Vec<_>>()
        })
        .collect();
    found.sort_unstable();
    found
}

/// Time that a process has computed, to a hundredth of a second.
///
/// # Panics
/// When it has ended.
pub fn cpu_time(process: u32) -> Duration {
    let stat = std::fs::read_to_string(format!("/proc/{process}/stat")).expect("it runs");
    // Behind the name, which may contain anything.
    let fields: Vec<&str> = stat
        .rsplit(')')
        .next()
        .unwrap_or_default()
        .split(' ')
        .collect();
    let ticks: u64 = [12, 13]
        .iter()
        .map(|field| fields[*field].parse::<u64>().expect("a time"))
        .sum();
    Duration::from_millis(10 * ticks)
}

/// A port that is free, each answer another one. None of those that the system gives to outgoing
/// connections: one of another test would take it before it is used.
///
/// # Panics
/// When no port is free.
pub fn free_port() -> u16 {
    static NEXT: AtomicU16 = AtomicU16::new(0);
    const LOWEST: u16 = 10_000;
    let range = std::fs::read_to_string("/proc/sys/net/ipv4/ip_local_port_range");
    let ephemeral = range
        .ok()
        .and_then(|text| text.split_whitespace().next()?.parse().ok());
    let count = ephemeral
        .unwrap_or(32_768_u16)
        .saturating_sub(LOWEST)
        .max(1);
    // Test processes that run at the same time begin at different places.
    let own = (std::process::id() % u32::from(count)) as u16;
    (0..count)
        .map(|_| {
            LOWEST
                + (u32::from(own).wrapping_mul(997) + u32::from(NEXT.fetch_add(1, Relaxed)))
                    .rem_euclid(count.into()) as u16
        })
        .find(|&port| TcpListener::bind(("127.0.0.1", port)).is_ok())
        .expect("a free port")
}

impl Process {
    /// Starts `twinfer` with arguments and environment.
    ///
    /// # Panics
    /// When it cannot be started.
    pub fn start<S: AsRef<OsStr>>(arguments: &[S], environment: &[(&str, &str)]) -> Self {
        Self::run(Command::new(binary()).args(arguments), environment)
    }

    /// As [`Self::start`], with at most `files` open files.
    ///
    /// # Panics
    /// When it cannot be started.
    pub fn start_limited<S: AsRef<OsStr>>(
        files: u32,
        arguments: &[S],
        environment: &[(&str, &str)],
    ) -> Self {
        let limited = format!("ulimit -n {files} && exec \"$0\" \"$@\"");
        let mut shell = Command::new("sh");
        shell.arg("-c").arg(limited).arg(binary()).args(arguments);
        Self::run(&mut shell, environment)
    }

    pub(crate) fn run(command: &mut Command, environment: &[(&str, &str)]) -> Self {
        let log = tempfile::NamedTempFile::new().expect("a log file");
        let out = File::options()
            .append(true)
            .open(log.path())
            .expect("the log file");
        let err = out.try_clone().expect("the log file");
        let child = command
            .env_remove("TWINFER_PEER_KEY")
            .env_remove("TWINFER_API_KEY")
            .env_remove("OPENAI_API_KEY")
            .envs(environment.iter().copied())
            .stdin(Stdio::null())
            .stdout(out)
            .stderr(err)
            .spawn()
            .expect("twinfer starts");
        Self { child, log }
    }

    /// The most memory that it has had, in bytes.
    ///
    /// # Panics
    /// When it has ended.
    pub fn peak_memory(&self) -> u64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.id()));
        let status = status.expect("the status of the process");
        let kib = status.lines().find_map(|line| {
            let value = line.strip_prefix("VmHWM:")?;
            value.trim().strip_suffix(" kB")?.parse::<u64>().ok()
        });
        kib.expect("VmHWM") << 10
    }

    /// Process id.
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// Everything it has printed so far.
    pub fn output(&self) -> String {
        String::from_utf8_lossy(&std::fs::read(self.log.path()).unwrap_or_default()).into_owned()
    }

    /// Sends a signal.
    ///
    /// # Errors
    /// When the process has ended.
    pub fn signal(&self, signal: Signal) -> io::Result<()> {
        let pid = i32::try_from(self.child.id())
            .ok()
            .and_then(Pid::from_raw)
            .ok_or(io::ErrorKind::InvalidInput)?;
        kill_process(pid, signal).map_err(Into::into)
    }

    /// The exit status, if it has ended.
    pub fn ended(&mut self) -> Option<ExitStatus> {
        self.child.try_wait().expect("wait works")
    }

    /// Waits for the end.
    ///
    /// # Panics
    /// When it still runs after `limit`.
    pub async fn wait(&mut self, limit: Duration) -> ExitStatus {
        let end = Instant::now() + limit;
        loop {
            if let Some(status) = self.ended() {
                return status;
            }
            assert!(
                Instant::now() < end,
                "process still runs after {limit:?}:\n{}",
                self.output()
            );
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    /// Kills it at once.
    pub fn kill(&mut self) {
        // An error means that it has ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.kill();
    }
}
