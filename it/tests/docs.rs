//! Every command that README and docs show is run as it stands.

use rustix::process::Signal;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};
use twinfer_it::{Client, binary, demo_model, repository};

/// Commands that are shown elsewhere, and where: they build, or run the tests that this is one of.
const SHOWN_ELSEWHERE: &[(&str, &str)] = &[
    ("cargo run --release -- demo", "show slice.1"),
    ("cargo test --release --workspace", "show slice.1"),
    (".ci/run", "the gate itself"),
    ("cargo xtask cases --issue slice", "show slice.7"),
    ("cargo xtask hash --matrix slice", "show slice.4"),
    (
        "cargo xtask bench engine --peers DIR",
        "show engine.5; it needs the peers",
    ),
    (
        "cargo xtask bench handoff",
        "docs/benchmarks.md, whose figures it printed",
    ),
    (
        "cargo xtask bench router",
        "docs/benchmarks.md, whose figures it printed",
    ),
    (
        "cargo xtask bench ranks",
        "docs/benchmarks.md, whose figures it printed",
    ),
    ("cargo xtask soak", "show slice.8"),
    (
        "cargo xtask seeds",
        "the tests of crates/deploy that it runs",
    ),
];

/// Pages whose commands run in order in one directory.
fn pages() -> Vec<PathBuf> {
    let mut pages = vec![repository().join("README.md")];
    for folder in ["docs", "docs/guide"] {
        for entry in std::fs::read_dir(repository().join(folder)).expect("a folder") {
            let path = entry.expect("an entry").path();
            if path.extension().is_some_and(|extension| extension == "md") {
                pages.push(path);
            }
        }
    }
    pages.sort();
    pages
}

/// Indented lines, and lines between fences, without their comments.
fn commands(page: &Path) -> Vec<String> {
    let text = std::fs::read_to_string(page).expect("a page");
    let mut fenced = false;
    let mut found = Vec::new();
    for line in text.lines() {
        if line.trim_start().starts_with("```") {
            fenced = !fenced;
            continue;
        }
        let Some(code) = (if fenced {
            Some(line)
        } else {
            line.strip_prefix("    ")
        }) else {
            continue;
        };
        let command = code.split("  #").next().unwrap_or(code).trim();
        if !command.is_empty() && !command.starts_with('{') {
            found.push(command.to_owned());
        }
    }
    found
}

/// A folder that looks like a checkout with `twinfer` on the path.
struct Shell {
    folder: tempfile::TempDir,
    servers: Vec<std::process::Child>,
    /// Free ports for those that the pages name, which somebody else may have.
    ports: BTreeMap<u16, u16>,
}

impl Shell {
    fn new() -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let models = folder.path().join("models");
        std::fs::create_dir(&models).expect("a folder");
        std::os::unix::fs::symlink(demo_model(), models.join("demo")).expect("a link");
        let examples = folder.path().join("examples");
        std::os::unix::fs::symlink(repository().join("examples"), examples).expect("a link");
        std::fs::write(
            folder.path().join("prompts.txt"),
            "Once upon a time\nThe capital of France is\n",
        )
        .expect("written");
        Self {
            folder,
            servers: Vec::new(),
            ports: BTreeMap::new(),
        }
    }

    /// The text with a free port for every port in it.
    fn with_free_ports(&mut self, text: &str) -> String {
        let mut out = String::new();
        let mut rest = text;
        while let Some(at) = rest.find(|c: char| c.is_ascii_digit()) {
            let end = rest[at..]
                .find(|c: char| !c.is_ascii_digit())
                .map_or(rest.len(), |n| at + n);
            out.push_str(&rest[..at]);
            let digits = &rest[at..end];
            let port = digits
                .parse()
                .ok()
                .filter(|port| (8000..10_000).contains(port));
            match port {
                Some(port) => {
                    let free = self.ports.entry(port).or_insert_with(twinfer_it::free_port);
                    out.push_str(&free.to_string());
                }
                None => out.push_str(digits),
            }
            rest = &rest[end..];
        }
        out + rest
    }

    fn bash(&self, command: &str) -> Command {
        let mut bash = Command::new("bash");
        let path = std::env::var("PATH").unwrap_or_default();
        let bin = binary().parent().expect("a folder").display().to_string();
        bash.args(["-c", command])
            .current_dir(self.folder.path())
            .env("PATH", format!("{bin}:{path}"))
            .env_remove("TWINFER_PEER_KEY")
            .env_remove("TWINFER_API_KEY")
            .env_remove("OPENAI_API_KEY")
            .stdin(Stdio::null());
        bash
    }

    fn run(&self, command: &str) {
        let mut child = self.bash(&format!("exec timeout 60 bash -c {}", quoted(command)));
        let output = child.output().expect("bash");
        let text = String::from_utf8_lossy(&output.stdout);
        assert!(
            output.status.success(),
            "{command}: {}\n{text}{}",
            output.status,
            String::from_utf8_lossy(&output.stderr)
        );
        if command.starts_with("curl") {
            assert!(text.contains("\"choices\""), "{command}: {text}");
        }
    }

    async fn serve(&mut self, command: &str, port: u16, ready: &str) {
        let path = self.folder.path().join(format!("{port}.log"));
        let log = std::fs::File::create(&path).expect("a log");
        let both = log.try_clone().expect("a log");
        let mut bash = self.bash(&format!("exec {command}"));
        let child = bash.stdout(log).stderr(both).spawn().expect("bash");
        self.servers.push(child);
        let client = Client::new(format!("127.0.0.1:{port}"));
        let end = Instant::now() + Duration::from_secs(60);
        while !client
            .get(ready)
            .await
            .is_ok_and(|answer| answer.status == 200)
        {
            let log = || std::fs::read_to_string(&path).unwrap_or_default();
            let child = self.servers.last_mut().expect("a server");
            assert!(
                child.try_wait().expect("wait").is_none(),
                "{command} ended:\n{}",
                log()
            );
            assert!(Instant::now() < end, "{command} is not ready:\n{}", log());
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }

    /// Ends the servers, last first.
    async fn stop(&mut self) {
        while let Some(mut child) = self.servers.pop() {
            let pid = rustix::process::Pid::from_raw(child.id() as i32).expect("a pid");
            for _ in 0..2 {
                // It may have ended meanwhile.
                let _ = rustix::process::kill_process(pid, Signal::TERM);
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
            let end = Instant::now() + Duration::from_secs(30);
            while child.try_wait().expect("wait").is_none() {
                assert!(Instant::now() < end, "a server does not end");
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        }
    }
}

impl Drop for Shell {
    fn drop(&mut self) {
        for child in &mut self.servers {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

fn quoted(text: &str) -> String {
    format!("'{}'", text.replace('\'', r"'\''"))
}

/// Port after a flag.
fn port_of(command: &str) -> u16 {
    command
        .split_once("--port ")
        .and_then(|(_, rest)| rest.split_whitespace().next())
        .map_or(8000, |port| port.parse().expect("a port"))
}

/// The pages use the default ports, so this test runs its pages one after the other.
#[tokio::test]
async fn every_command_of_the_pages_works() {
    let elsewhere: BTreeMap<&str, &str> = SHOWN_ELSEWHERE.iter().copied().collect();
    let mut ran = 0;
    for page in pages() {
        let mut shell = Shell::new();
        for command in commands(&page) {
            println!(
                "{}: {command}",
                page.file_name().expect("a name").to_string_lossy()
            );
            let base = command.split("  ").next().unwrap_or(&command).trim();
            if elsewhere.keys().any(|known| {
                base == *known
                    || base
                        .strip_prefix(known)
                        .is_some_and(|rest| rest.starts_with(" --"))
            }) {
                continue;
            }
            ran += 1;
            let serves =
                command.starts_with("twinfer serve") || command.starts_with("twinfer router");
            let named = if serves && !command.contains("--port") {
                format!("{command} --port 8000")
            } else {
                command
            };
            let command = shell.with_free_ports(&named);
            let words: Vec<&str> = command.split_whitespace().collect();
            match words[..] {
                ["twinfer", "serve" | "router", ..] => {
                    shell.serve(&command, port_of(&command), "/ready").await;
                }
                ["twinfer", "up", ..] => {
                    shell.stop().await;
                    let file = shell.folder.path().join("deploy.yaml");
                    let text = std::fs::read_to_string(&file).expect("the page made it");
                    let text = shell.with_free_ports(&text);
                    std::fs::write(&file, text).expect("written");
                    let port = shell.ports[&8000];
                    shell.serve(&command, port, "/ready").await;
                    shell.stop().await;
                }
                ["twinfer", "fake", ..] => {
                    shell.serve(&command, port_of(&command), "/health").await
                }
                ["twinfer" | "curl" | "export", ..] => shell.run(&command),
                _ => panic!("{}: {command:?} is run by no test", page.display()),
            }
        }
        shell.stop().await;
    }
    assert!(ran > 10, "only {ran} commands found");
}
