use parking_lot::{Condvar, Mutex};
use std::collections::VecDeque;

/// Commands on their way to the engine thread.
///
/// Nothing is ever dropped for want of room, because an abort or a release that got lost would leak
/// blocks; the length is bounded by what may be sent: a submission needs admission permits, and every
/// other command belongs to a request that was admitted, a few per request.
#[derive(Debug)]
pub(super) struct Mailbox<T> {
    queue: Mutex<Queue<T>>,
    arrived: Condvar,
}

#[derive(Debug)]
struct Queue<T> {
    commands: VecDeque<T>,
    closed: bool,
}

impl<T> Mailbox<T> {
    pub(super) fn new() -> Self {
        Self {
            queue: Mutex::new(Queue {
                commands: VecDeque::new(),
                closed: false,
            }),
            arrived: Condvar::new(),
        }
    }

    /// Sends; gives the command back when nobody will read it any more.
    pub(super) fn push(&self, command: T) -> Result<(), T> {
        let mut queue = self.queue.lock();
        if queue.closed {
            return Err(command);
        }
        queue.commands.push_back(command);
        drop(queue);
        self.arrived.notify_one();
        Ok(())
    }

    /// Moves all commands to `into`; blocks until there is one if `wait`. False when closed.
    pub(super) fn take(&self, wait: bool, into: &mut VecDeque<T>) -> bool {
        let mut queue = self.queue.lock();
        while wait && queue.commands.is_empty() && !queue.closed {
            self.arrived.wait(&mut queue);
        }
        into.append(&mut queue.commands);
        !queue.closed
    }

    /// Ends it; what was not read is dropped.
    pub(super) fn close(&self) {
        let mut queue = self.queue.lock();
        queue.closed = true;
        let unread = std::mem::take(&mut queue.commands);
        drop(queue);
        self.arrived.notify_all();
        drop(unread);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;

    #[test]
    fn commands_arrive_in_order_and_wake_a_waiting_reader() {
        let mailbox = Arc::new(Mailbox::new());
        let sender = Arc::clone(&mailbox);
        let thread = std::thread::spawn(move || {
            for i in 0..100 {
                sender.push(i).unwrap();
            }
        });
        let (mut got, mut inbox) = (Vec::new(), VecDeque::new());
        while got.len() < 100 {
            assert!(mailbox.take(true, &mut inbox));
            got.extend(inbox.drain(..));
        }
        thread.join().unwrap();
        assert_eq!(got, (0..100).collect::<Vec<_>>());
    }

    #[test]
    fn closing_wakes_the_reader_and_gives_commands_back() {
        let mailbox = Arc::new(Mailbox::new());
        let reader = Arc::clone(&mailbox);
        let thread = std::thread::spawn(move || reader.take(true, &mut VecDeque::<u8>::new()));
        mailbox.close();
        assert!(!thread.join().unwrap());
        assert_eq!(mailbox.push(7), Err(7));
    }
}
