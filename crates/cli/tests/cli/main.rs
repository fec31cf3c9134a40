//! The built binary: exit codes, messages, what it leaves behind.
#![expect(clippy::unwrap_used, reason = "a failed test ends here")]

mod arguments;
mod demo;
mod files;
mod processes;
mod reference;

use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::time::{Duration, Instant};

fn model() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/demo")
}

/// The binary in an environment without keys, with a cache of its own.
fn twinfer() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_twinfer"));
    for name in [
        "TWINFER_PEER_KEY",
        "TWINFER_API_KEY",
        "OPENAI_API_KEY",
        "RUST_LOG",
    ] {
        command.env_remove(name);
    }
    command
        .env("XDG_CACHE_HOME", env!("CARGO_TARGET_TMPDIR"))
        .stdin(Stdio::null());
    command
}

/// Runs it to its end, at most a minute.
fn run(command: &mut Command) -> Output {
    let child = command
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let id = child.id();
    let (done, ended) = std::sync::mpsc::sync_channel::<()>(1);
    let guard = std::thread::spawn(move || {
        if ended.recv_timeout(Duration::from_secs(60)).is_err() {
            kill(id, rustix::process::Signal::KILL);
        }
    });
    let output = child.wait_with_output().unwrap();
    let _ = done.send(());
    guard.join().unwrap();
    output
}

fn stdout(output: &Output) -> String {
    String::from_utf8(output.stdout.clone()).unwrap()
}

fn stderr(output: &Output) -> String {
    String::from_utf8(output.stderr.clone()).unwrap()
}

fn kill(pid: u32, signal: rustix::process::Signal) {
    let pid = i32::try_from(pid)
        .ok()
        .and_then(rustix::process::Pid::from_raw)
        .unwrap();
    // It may have ended.
    let _ = rustix::process::kill_process(pid, signal);
}

/// A process that is killed when the test ends early.
struct Running(Child);

impl Running {
    fn start(command: &mut Command) -> Self {
        Self(command.spawn().unwrap())
    }

    fn signal(&self, signal: rustix::process::Signal) {
        kill(self.0.id(), signal);
    }

    fn wait(&mut self, limit: Duration) -> ExitStatus {
        until(limit, "the process ends", || self.0.try_wait().unwrap())
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Asks `ready` until it answers, at most `limit`.
fn until<T>(limit: Duration, what: &str, mut ready: impl FnMut() -> Option<T>) -> T {
    let end = Instant::now() + limit;
    let (_keep, never) = std::sync::mpsc::sync_channel::<()>(0);
    loop {
        if let Some(value) = ready() {
            return value;
        }
        assert!(
            Instant::now() < end,
            "after {limit:?} it is still not so: {what}"
        );
        let _ = never.recv_timeout(Duration::from_millis(20));
    }
}

/// Status of `GET path` on loopback, and the body.
fn get(port: u16, path: &str) -> Option<(u16, String)> {
    exchange(
        port,
        &format!("GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"),
    )
}

/// The same for a POST of JSON.
fn post(port: u16, path: &str, body: &str) -> Option<(u16, String)> {
    post_with_key(port, path, body, "none")
}

fn post_with_key(port: u16, path: &str, body: &str, key: &str) -> Option<(u16, String)> {
    let length = body.len();
    let head = format!(
        "POST {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-type: application/json\r\nauthorization: Bearer \
         {key}\r\ncontent-length: {length}\r\n\r\n"
    );
    exchange(port, &(head + body))
}

fn exchange(port: u16, request: &str) -> Option<(u16, String)> {
    use std::io::{Read, Write};
    let mut socket = std::net::TcpStream::connect(("127.0.0.1", port)).ok()?;
    socket
        .set_read_timeout(Some(Duration::from_secs(10)))
        .ok()?;
    socket.write_all(request.as_bytes()).ok()?;
    let mut answer = String::new();
    socket.read_to_string(&mut answer).ok()?;
    let status = answer.split(' ').nth(1)?.parse().ok()?;
    Some((
        status,
        answer
            .split_once("\r\n\r\n")
            .map_or_else(String::new, |(_, body)| body.to_owned()),
    ))
}
