//! Supervision of child processes: pidfds that become readable when a process ends, and death with the parent.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{
    Pid, PidfdFlags, Signal, WaitId, WaitIdOptions, pidfd_open, pidfd_send_signal, waitid,
};

/// How a process ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ExitStatus {
    /// It returned this code.
    Code(i32),
    /// This signal ended it.
    Signal(i32),
}

/// A handle to one process that can't come to mean another one when its number is used again.
///
/// The descriptor becomes readable when the process ends, so it can be registered with an event loop ([`AsFd`]).
#[derive(Debug)]
pub struct PidFd {
    fd: OwnedFd,
    pid: u32,
}

impl PidFd {
    /// Opens the handle. Race-free for a child that has not been waited for.
    ///
    /// # Errors
    /// `InvalidInput` for 0 or a number above `i32::MAX`, `NotFound`-like (`ESRCH`) when no such process exists.
    pub fn open(pid: u32) -> io::Result<Self> {
        let raw = i32::try_from(pid).ok().and_then(Pid::from_raw);
        let target = raw.ok_or_else(|| {
            io::Error::new(
                io::ErrorKind::InvalidInput,
                format!("{pid} is no process id"),
            )
        })?;
        Ok(Self {
            fd: pidfd_open(target, PidfdFlags::empty())?,
            pid,
        })
    }

    /// A handle to this process, to be passed to others: whoever receives it knows when this process ends, also from
    /// another process namespace.
    ///
    /// # Errors
    /// What `pidfd_open` reports.
    pub fn own() -> io::Result<Self> {
        Self::open(std::process::id())
    }

    /// A handle that came from another process.
    ///
    /// # Errors
    /// `InvalidInput` when the descriptor is no handle to a process; what reading `/proc` reports.
    pub fn received(fd: OwnedFd) -> io::Result<Self> {
        let info = std::fs::read_to_string(format!("/proc/self/fdinfo/{}", fd.as_raw_fd()))?;
        let pid = info
            .lines()
            .find_map(|line| line.strip_prefix("Pid:"))
            .and_then(|number| number.trim().parse::<i32>().ok())
            .ok_or_else(|| {
                io::Error::new(
                    io::ErrorKind::InvalidInput,
                    "a descriptor that is no handle to a process",
                )
            })?;
        // -1: it has ended; 0: it has no number in this namespace.
        let pid = u32::try_from(pid).unwrap_or(0);
        Ok(Self { fd, pid })
    }

    /// The process id this handle was opened for; 0 when it has none here.
    pub fn pid(&self) -> u32 {
        self.pid
    }

    /// Sends a signal, given by its number (`libc::SIGTERM` = 15, `libc::SIGKILL` = 9).
    ///
    /// # Errors
    /// `InvalidInput` for a number that is no signal, `ESRCH` when the process has ended and was waited for.
    pub fn signal(&self, number: i32) -> io::Result<()> {
        let signal = Signal::from_named_raw(number).ok_or_else(|| {
            io::Error::new(
                io::ErrorKind::InvalidInput,
                format!("{number} is no signal"),
            )
        })?;
        Ok(pidfd_send_signal(&self.fd, signal)?)
    }

    /// Waits until the process has ended, at most `timeout`; whether it has. Works for processes that are no children,
    /// and leaves the exit status of a child in place.
    ///
    /// # Errors
    /// What `poll` reports.
    pub fn wait_ended(&self, timeout: Duration) -> io::Result<bool> {
        let deadline = Instant::now() + timeout;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            let left = Timespec {
                tv_sec: left.as_secs().min(1 << 30) as i64,
                tv_nsec: left.subsec_nanos().into(),
            };
            let mut fds = [PollFd::new(&self.fd, PollFlags::IN)];
            match poll(&mut fds, Some(&left)) {
                Ok(ready) => return Ok(ready > 0),
                Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// Collects the exit status of an ended child; `None` while it runs. After `Some` its process id is free again.
    /// Not to be mixed with `std::process::Child::wait` on the same child, which collects it too.
    ///
    /// # Errors
    /// `ECHILD` when the process is no child or was collected before.
    pub fn reap(&self) -> io::Result<Option<ExitStatus>> {
        let options = WaitIdOptions::EXITED | WaitIdOptions::NOHANG;
        let Some(status) = waitid(WaitId::PidFd(self.fd.as_fd()), options)? else {
            return Ok(None);
        };
        let code = status.exit_status().map(ExitStatus::Code);
        Ok(code.or_else(|| status.terminating_signal().map(ExitStatus::Signal)))
    }
}

impl AsFd for PidFd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl AsRawFd for PidFd {
    fn as_raw_fd(&self) -> RawFd {
        self.fd.as_raw_fd()
    }
}

/// Asks the kernel to send this process `SIGKILL` when its parent's thread that started it ends. Called first thing in
/// a child; `expected_parent` is the parent's process id, told by the parent (argument or environment).
///
/// # Errors
/// What `prctl` reports; `NotConnected` when the parent has died before the call (then no signal will ever come, and
/// the caller should exit).
pub fn set_parent_death_signal(expected_parent: u32) -> io::Result<()> {
    rustix::process::set_parent_process_death_signal(Some(Signal::KILL))?;
    let parent =
        rustix::process::getppid().map_or(0, |pid| pid.as_raw_nonzero().get().unsigned_abs());
    if parent != expected_parent {
        return Err(io::Error::new(
            io::ErrorKind::NotConnected,
            format!("the parent process {expected_parent} has ended (the parent is now {parent})"),
        ));
    }
    Ok(())
}

#[cfg(test)]
#[expect(
    clippy::zombie_processes,
    reason = "children are collected through their pidfd"
)]
mod tests {
    use super::*;
    use std::process::{Command, Stdio};

    const LONG: Duration = Duration::from_secs(20);

    #[test]
    fn the_exit_code_of_a_child_arrives() {
        let child = Command::new("sh").args(["-c", "exit 7"]).spawn().unwrap();
        let handle = PidFd::open(child.id()).unwrap();
        assert!(handle.wait_ended(LONG).unwrap());
        assert_eq!(handle.reap().unwrap(), Some(ExitStatus::Code(7)));
        assert!(handle.reap().is_err());
        assert!(handle.signal(libc::SIGTERM).is_err());
    }

    #[test]
    fn a_running_child_is_neither_ended_nor_reaped_until_signalled() {
        // cat on an open pipe runs until the pipe closes or a signal comes.
        let mut child = Command::new("cat")
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        let handle = PidFd::open(child.id()).unwrap();
        assert!(!handle.wait_ended(Duration::ZERO).unwrap());
        assert_eq!(handle.reap().unwrap(), None);
        assert_eq!(
            handle.signal(12_345).unwrap_err().kind(),
            io::ErrorKind::InvalidInput
        );
        handle.signal(libc::SIGTERM).unwrap();
        assert!(handle.wait_ended(LONG).unwrap());
        assert_eq!(
            handle.reap().unwrap(),
            Some(ExitStatus::Signal(libc::SIGTERM))
        );
        drop(child.stdin.take());
    }

    #[test]
    fn numbers_that_are_no_process_are_refused() {
        assert_eq!(
            PidFd::open(0).unwrap_err().kind(),
            io::ErrorKind::InvalidInput
        );
        assert_eq!(
            PidFd::open(u32::MAX).unwrap_err().kind(),
            io::ErrorKind::InvalidInput
        );
        assert!(PidFd::open(i32::MAX as u32).is_err());
    }

    #[test]
    fn a_handle_passed_on_names_its_process_and_other_descriptors_are_refused() {
        let own = PidFd::own().unwrap();
        let passed = PidFd::received(own.fd.try_clone().unwrap()).unwrap();
        assert_eq!(passed.pid(), std::process::id());
        assert!(!passed.wait_ended(Duration::ZERO).unwrap());
        let file = std::fs::File::open("/proc/self/status").unwrap();
        let error = PidFd::received(file.into()).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::InvalidInput);
    }

    #[test]
    fn a_wrong_parent_is_reported() {
        // In a thread of its own: the setting belongs to the calling thread's process, and is cleared again below.
        assert_eq!(
            set_parent_death_signal(u32::MAX).unwrap_err().kind(),
            io::ErrorKind::NotConnected
        );
        rustix::process::set_parent_process_death_signal(None).unwrap();
    }
}
