//! Running a tool on a node: here, over ssh, or out of a recording.

use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// What became of a command.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Outcome {
    /// Exit code; none if a signal ended it, or it could not be started.
    pub code: Option<i32>,
    /// It did not end in time.
    pub timed_out: bool,
    /// Both outputs.
    pub text: String,
}

/// Runs commands on nodes.
pub trait Runner: Sync {
    /// Runs `command` on `node`, whose address is `host`.
    fn run(&self, node: &str, host: &str, command: &[String]) -> Outcome;
}

/// Longest output that is kept.
const MAX_BYTES: u64 = 1 << 20;
/// Seconds for one command.
const LIMIT: u32 = 20;
/// Exit codes of `timeout` when it ended its command, by the first signal or by the second.
const TIMED_OUT: [i32; 2] = [124, 137];

/// Runs commands on this machine, and over ssh on all others.
#[derive(Clone, Debug, Default)]
pub struct Machines {
    /// User of ssh; its own choice if absent.
    pub user: Option<String>,
}

impl Runner for Machines {
    fn run(&self, _: &str, host: &str, command: &[String]) -> Outcome {
        // `timeout` ends what it started, with its children; -k for what ignores the first signal.
        let mut process = Command::new("timeout");
        process.args(["-k", "2", &LIMIT.to_string()]);
        if crate::facts::is_local(host) {
            process.args(command);
        } else {
            let target = match &self.user {
                Some(user) => format!("{user}@{host}"),
                None => host.to_owned(),
            };
            process.args([
                "ssh",
                "-o",
                "BatchMode=yes",
                "-o",
                "ConnectTimeout=5",
                "--",
                &target,
            ]);
            // The remote end is ended there too, a little before the local one.
            let line = crate::plan::shell_line(command);
            process.arg(format!("timeout -k 2 {} {line}", LIMIT - 5));
        }
        bounded(process)
    }
}

/// Runs a command that ends in time by itself, and keeps the beginning of what it says.
fn bounded(mut command: Command) -> Outcome {
    let run = || -> std::io::Result<Outcome> {
        let (reader, writer) = std::io::pipe()?;
        command
            .stdin(Stdio::null())
            .stdout(writer.try_clone()?)
            .stderr(writer);
        let mut child = command.spawn()?;
        // The command holds the pipe's other end, and would keep it open.
        drop(command);
        let mut bytes = Vec::new();
        // What was read before an error is what there is. One that says more is ended by the closed pipe.
        let _ = reader.take(MAX_BYTES).read_to_end(&mut bytes);
        let code = child.wait()?.code();
        Ok(Outcome {
            code,
            timed_out: code.is_some_and(|code| TIMED_OUT.contains(&code)),
            text: String::from_utf8_lossy(&bytes).into_owned(),
        })
    };
    run().unwrap_or_else(|error| Outcome {
        text: error.to_string(),
        ..Outcome::default()
    })
}

/// Reads what [`Recorder`] wrote: `DIR/NODE/COMMAND.txt`, whose first line is `exit CODE`, `timeout` or `killed`.
#[derive(Clone, Debug)]
pub struct Replay {
    /// Folder of the recording.
    pub folder: PathBuf,
}

impl Runner for Replay {
    fn run(&self, node: &str, _: &str, command: &[String]) -> Outcome {
        let path = path_of(&self.folder, node, command);
        let mut text = String::new();
        let read = std::fs::File::open(&path)
            .and_then(|file| file.take(MAX_BYTES).read_to_string(&mut text));
        if let Err(error) = read {
            return Outcome {
                text: format!("not recorded: {}: {error}", path.display()),
                ..Outcome::default()
            };
        }
        let (head, rest) = text.split_once('\n').unwrap_or((&text, ""));
        Outcome {
            code: head
                .strip_prefix("exit ")
                .and_then(|code| code.trim().parse().ok()),
            timed_out: head.trim() == "timeout",
            text: rest.to_owned(),
        }
    }
}

/// Writes what another runner gave, for [`Replay`].
pub struct Recorder<R> {
    /// Runs.
    pub inner: R,
    /// Folder of the recording.
    pub folder: PathBuf,
}

impl<R: Runner> Runner for Recorder<R> {
    fn run(&self, node: &str, host: &str, command: &[String]) -> Outcome {
        let outcome = self.inner.run(node, host, command);
        let head = match (outcome.timed_out, outcome.code) {
            (true, _) => "timeout".to_owned(),
            (false, Some(code)) => format!("exit {code}"),
            (false, None) => "killed".to_owned(),
        };
        let path = path_of(&self.folder, node, command);
        let written = path
            .parent()
            .map_or(Ok(()), std::fs::create_dir_all)
            .and_then(|()| std::fs::write(&path, format!("{head}\n{}", outcome.text)));
        if let Err(error) = written {
            tracing::warn!("{}: {error}", path.display());
        }
        outcome
    }
}

fn path_of(folder: &Path, node: &str, command: &[String]) -> PathBuf {
    let safe = |text: &str| -> String {
        text.chars()
            .map(|c| {
                if c.is_ascii_alphanumeric() || "-.".contains(c) {
                    c
                } else {
                    '_'
                }
            })
            .collect()
    };
    let name: Vec<String> = command.iter().map(|word| safe(word)).collect();
    folder
        .join(safe(node))
        .join(format!("{}.txt", name.join("_")))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(text: &str) -> Vec<String> {
        text.split_whitespace().map(str::to_owned).collect()
    }

    #[test]
    fn a_command_on_this_machine_gives_its_code_and_both_outputs() {
        let machines = Machines::default();
        let command = ["sh", "-c", "echo out; echo err >&2; exit 3"].map(str::to_owned);
        let outcome = machines.run("n", "127.0.0.1", &command);
        assert_eq!((outcome.code, outcome.timed_out), (Some(3), false));
        assert!(outcome.text.contains("out") && outcome.text.contains("err"));
        let missing = machines.run("n", "127.0.0.1", &words("no-such-tool -x"));
        assert_ne!(missing.code, Some(0));
    }

    #[test]
    fn what_was_recorded_is_replayed() {
        let folder = tempfile::tempdir().expect("a folder");
        let recorder = Recorder {
            inner: Machines::default(),
            folder: folder.path().to_owned(),
        };
        let command = ["sh", "-c", "echo hello; exit 13"].map(str::to_owned);
        let first = recorder.run("n", "127.0.0.1", &command);
        let replay = Replay {
            folder: folder.path().to_owned(),
        };
        assert_eq!(replay.run("n", "127.0.0.1", &command), first);
        let other = replay.run("n", "127.0.0.1", &words("hccn_tool -i 0 -link -g"));
        assert_eq!((other.code, other.timed_out), (None, false));
        assert!(other.text.contains("not recorded"));
    }
}
