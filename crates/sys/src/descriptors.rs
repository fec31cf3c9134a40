//! Passing open descriptors to another process of the node, and asking who that is.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;

use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};

/// Most descriptors in one message; the kernel's limit is 253.
pub const MAX_DESCRIPTORS: usize = 250;

/// Who is at the other end of a socket, as the kernel saw it when they connected.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PeerCredentials {
    /// Process, by its number in this process's namespace; 0 when it has none there.
    pub pid: u32,
    /// User.
    pub uid: u32,
}

/// Sends `bytes`, and copies of `descriptors` with the first of them.
///
/// # Errors
/// `InvalidInput` without a byte or with more than [`MAX_DESCRIPTORS`]; `WriteZero` when the socket took only a part of
/// the bytes; what `sendmsg` reports otherwise.
pub fn send_descriptors(
    socket: &UnixStream,
    bytes: &[u8],
    descriptors: &[BorrowedFd<'_>],
) -> io::Result<()> {
    if bytes.is_empty() || descriptors.len() > MAX_DESCRIPTORS {
        let (length, count) = (bytes.len(), descriptors.len());
        return Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            format!(
                "a message of {length} bytes with {count} descriptors; it takes a byte and at most {MAX_DESCRIPTORS}"
            ),
        ));
    }
    let mut space = vec![MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_DESCRIPTORS))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !descriptors.is_empty() && !control.push(SendAncillaryMessage::ScmRights(descriptors)) {
        return Err(io::Error::other("no room for the descriptors"));
    }
    let sent = loop {
        match sendmsg(
            socket,
            &[IoSlice::new(bytes)],
            &mut control,
            SendFlags::NOSIGNAL,
        ) {
            Err(rustix::io::Errno::INTR) => {}
            outcome => break outcome?,
        }
    };
    if sent < bytes.len() {
        return Err(io::ErrorKind::WriteZero.into());
    }
    Ok(())
}

/// Receives at most as many bytes as `buffer` has, and the descriptors that came with them, which are closed on exec.
/// Respects the socket's read timeout. No bytes: the other side has closed.
///
/// # Errors
/// `InvalidData` when more descriptors came than [`MAX_DESCRIPTORS`]; what `recvmsg` reports otherwise.
pub fn receive_descriptors(
    socket: &UnixStream,
    buffer: &mut [u8],
) -> io::Result<(usize, Vec<OwnedFd>)> {
    let mut space = vec![MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_DESCRIPTORS))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let message = loop {
        match recvmsg(
            socket,
            &mut [IoSliceMut::new(buffer)],
            &mut control,
            RecvFlags::CMSG_CLOEXEC,
        ) {
            Err(rustix::io::Errno::INTR) => {}
            outcome => break outcome?,
        }
    };
    let mut descriptors = Vec::new();
    for part in control.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = part {
            descriptors.extend(rights);
        }
    }
    if message.flags.contains(ReturnFlags::CTRUNC) {
        return Err(io::Error::new(
            io::ErrorKind::InvalidData,
            format!("more than {MAX_DESCRIPTORS} descriptors in one message"),
        ));
    }
    Ok((message.bytes, descriptors))
}

/// Who connected `socket`, or made it.
///
/// # Errors
/// What `getsockopt` reports.
pub fn peer_credentials(socket: &UnixStream) -> io::Result<PeerCredentials> {
    // Not through rustix: its process ids can't be 0, which this one is for a peer of another namespace.
    let mut credentials = libc::ucred {
        pid: 0,
        uid: u32::MAX,
        gid: u32::MAX,
    };
    let mut length = size_of::<libc::ucred>() as libc::socklen_t;
    // SAFETY: the descriptor is open, and the system writes at most `length` bytes into `credentials`, a struct of
    // integers.
    let outcome = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEERCRED,
            (&raw mut credentials).cast(),
            &raw mut length,
        )
    };
    if outcome != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(PeerCredentials {
        pid: credentials.pid.unsigned_abs(),
        uid: credentials.uid,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Write};
    use std::os::fd::AsFd;

    #[test]
    fn a_pipe_passed_on_is_the_same_pipe() {
        let (left, right) = UnixStream::pair().unwrap();
        let (mut reader, writer) = io::pipe().unwrap();
        send_descriptors(&left, b"pipe", &[writer.as_fd()]).unwrap();
        drop(writer);
        let mut buffer = [0; 16];
        let (length, mut descriptors) = receive_descriptors(&right, &mut buffer).unwrap();
        assert_eq!((&buffer[..length], descriptors.len()), (&b"pipe"[..], 1));
        let mut passed = std::fs::File::from(descriptors.remove(0));
        passed.write_all(b"through").unwrap();
        drop(passed);
        let mut text = String::new();
        reader.read_to_string(&mut text).unwrap();
        assert_eq!(text, "through");
    }

    #[test]
    fn bytes_alone_pass_and_the_end_is_seen() {
        let (left, right) = UnixStream::pair().unwrap();
        send_descriptors(&left, b"x", &[]).unwrap();
        assert!(send_descriptors(&left, b"", &[]).is_err());
        let mut buffer = [0; 4];
        let (length, descriptors) = receive_descriptors(&right, &mut buffer).unwrap();
        assert_eq!((length, descriptors.len()), (1, 0));
        drop(left);
        assert_eq!(receive_descriptors(&right, &mut buffer).unwrap().0, 0);
    }

    #[test]
    fn the_other_end_is_this_process() {
        let (left, _right) = UnixStream::pair().unwrap();
        let credentials = peer_credentials(&left).unwrap();
        assert_eq!(credentials.pid, std::process::id());
        assert_eq!(credentials.uid, rustix::process::getuid().as_raw());
    }
}
