//! Log lines of child processes: passed on with the child's name, the last ones kept.

use parking_lot::Mutex;
use std::collections::VecDeque;
use std::io::Write;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncReadExt};
use tokio::sync::oneshot;
use tokio::time::timeout;

/// Where log lines go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LogStyle {
    /// To standard error, the name in front.
    Text,
    /// To standard error as JSON objects with a field `instance`.
    Json,
    /// Nowhere; the last ones stand in the message when the child fails.
    Quiet,
}

/// Longer lines are cut into pieces.
const MAX_LINE: usize = 16 << 10;
/// Lines that wait for a slow reader of standard error; further ones are counted and left out.
const WAITING_LINES: usize = 4096;
/// For the last lines to be written.
const FLUSH: Duration = Duration::from_secs(1);

pub(crate) struct Logs {
    children: Vec<Arc<ChildLog>>,
    sink: Sink,
    style: LogStyle,
    flushed: oneshot::Receiver<()>,
}

/// The way to standard error. A reader that does not read (a stopped terminal) must stop neither the
/// supervision nor the children, so a thread of its own writes.
#[derive(Clone)]
struct Sink {
    lines: SyncSender<String>,
    lost: Arc<AtomicU64>,
}

struct ChildLog {
    name: String,
    width: usize,
    kept: usize,
    last: Mutex<VecDeque<String>>,
}

impl Logs {
    pub(crate) fn new(names: Vec<String>, style: LogStyle, kept: usize) -> Self {
        Self::with_writer(names, style, kept, std::io::stderr())
    }

    fn with_writer(
        names: Vec<String>,
        style: LogStyle,
        kept: usize,
        writer: impl Write + Send + 'static,
    ) -> Self {
        let width = names.iter().map(String::len).max().unwrap_or(0);
        let child = |name| {
            Arc::new(ChildLog {
                name,
                width,
                kept,
                last: Mutex::new(VecDeque::new()),
            })
        };
        let (lines, waiting) = sync_channel(WAITING_LINES);
        let (done, flushed) = oneshot::channel();
        let sink = Sink {
            lines,
            lost: Arc::new(AtomicU64::new(0)),
        };
        let lost = Arc::clone(&sink.lost);
        // Without the thread lines are lost and counted; the last ones are kept all the same.
        let _ = std::thread::Builder::new()
            .name("logs".to_owned())
            .spawn(move || {
                write_lines(&waiting, &lost, writer);
                let _ = done.send(());
            });
        Self {
            children: names.into_iter().map(child).collect(),
            sink,
            style,
            flushed,
        }
    }

    /// Waits until what was passed on is written, if somebody reads it. Followers must have ended.
    pub(crate) async fn flush(self) {
        drop(self.sink);
        let _ = timeout(FLUSH, self.flushed).await;
    }

    pub(crate) fn name(&self, child: usize) -> &str {
        &self.children[child].name
    }

    /// The last lines of a child, indented, each before a line break.
    pub(crate) fn last_lines(&self, child: usize) -> String {
        let log = &self.children[child];
        let last = log.last.lock();
        if last.is_empty() {
            return String::new();
        }
        let mut text = format!("last lines of {}:\n", log.name);
        for line in last.iter() {
            text.push_str("  ");
            text.push_str(line);
            text.push('\n');
        }
        text
    }

    /// Passes on a line that an agent has read.
    pub(crate) fn take(&self, child: usize, line: &str) {
        self.children[child].take(line, self.style, &self.sink);
    }

    /// Reads a pipe to its end.
    pub(crate) fn follow(
        &self,
        child: usize,
        pipe: impl AsyncRead + Unpin + Send + 'static,
    ) -> impl Future<Output = ()> + Send + 'static {
        let (log, sink, style) = (
            Arc::clone(&self.children[child]),
            self.sink.clone(),
            self.style,
        );
        read_lines(pipe, move |line| log.take(line, style, &sink))
    }
}

/// Writes lines until all senders are gone.
fn write_lines(waiting: &Receiver<String>, lost: &AtomicU64, mut writer: impl Write) {
    while let Ok(line) = waiting.recv() {
        // One write per line, so that lines of several children do not mix. With standard error gone the
        // deployment goes on.
        let _ = writer.write_all(line.as_bytes());
        let lost = lost.swap(0, Ordering::Relaxed);
        if lost > 0 {
            tracing::warn!(
                lost,
                "log lines left out: standard error is not read fast enough"
            );
        }
    }
}

impl ChildLog {
    fn take(&self, line: &str, style: LogStyle, sink: &Sink) {
        let shown = match style {
            LogStyle::Quiet => None,
            LogStyle::Text => Some(format!(
                "{:width$} | {line}\n",
                self.name,
                width = self.width
            )),
            LogStyle::Json => Some(json_line(&self.name, line)),
        };
        if let Some(shown) = shown
            && sink.lines.try_send(shown).is_err()
        {
            sink.lost.fetch_add(1, Ordering::Relaxed);
        }
        let mut last = self.last.lock();
        if last.len() == self.kept {
            last.pop_front();
        }
        last.push_back(line.to_owned());
    }
}

fn json_line(name: &str, line: &str) -> String {
    let name = serde_json::Value::from(name);
    match serde_json::from_str::<serde_json::Value>(line) {
        Ok(serde_json::Value::Object(mut object)) => {
            object.insert("instance".to_owned(), name);
            format!("{}\n", serde_json::Value::Object(object))
        }
        _ => format!(
            "{}\n",
            serde_json::json!({ "instance": name, "message": line })
        ),
    }
}

/// Calls `each` with every line, without its end, as text.
async fn read_lines(mut pipe: impl AsyncRead + Unpin, mut each: impl FnMut(&str)) {
    let mut buffer = Vec::new();
    let mut chunk = [0u8; 4096];
    loop {
        let read = match pipe.read(&mut chunk).await {
            Ok(0) | Err(_) => break,
            Ok(read) => read,
        };
        buffer.extend_from_slice(&chunk[..read]);
        let mut start = 0;
        while let Some(end) = buffer[start..].iter().position(|byte| *byte == b'\n') {
            each(String::from_utf8_lossy(&buffer[start..start + end]).trim_end_matches('\r'));
            start += end + 1;
        }
        buffer.drain(..start);
        if buffer.len() >= MAX_LINE {
            each(&String::from_utf8_lossy(&buffer));
            buffer.clear();
        }
    }
    if !buffer.is_empty() {
        each(&String::from_utf8_lossy(&buffer));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines(bytes: &[u8]) -> Vec<String> {
        let mut found = Vec::new();
        let runtime = tokio::runtime::Builder::new_current_thread()
            .build()
            .unwrap();
        runtime.block_on(read_lines(bytes, |line| found.push(line.to_owned())));
        found
    }

    #[test]
    fn lines_come_whole_also_the_last_one_without_an_end() {
        assert_eq!(lines(b"a\r\n\nb"), ["a", "", "b"]);
        assert_eq!(lines(b""), Vec::<String>::new());
        assert_eq!(lines(b"\xff\n"), ["\u{fffd}"]);
    }

    #[test]
    fn a_line_without_end_does_not_grow_for_ever() {
        let long = vec![b'x'; 3 * MAX_LINE];
        let found = lines(&long);
        assert!(found.len() >= 2);
        assert_eq!(found.iter().map(String::len).sum::<usize>(), long.len());
    }

    #[test]
    fn json_lines_carry_the_name() {
        assert_eq!(
            json_line("p", "{\"a\":1}"),
            "{\"a\":1,\"instance\":\"p\"}\n"
        );
        assert_eq!(
            json_line("p", "plain"),
            "{\"instance\":\"p\",\"message\":\"plain\"}\n"
        );
    }

    #[test]
    fn only_the_last_lines_are_kept() {
        let logs = Logs::new(vec!["p".to_owned()], LogStyle::Quiet, 2);
        for line in ["1", "2", "3"] {
            logs.children[0].take(line, LogStyle::Quiet, &logs.sink);
        }
        assert_eq!(logs.last_lines(0), "last lines of p:\n  2\n  3\n");
    }

    /// Writes nothing until it is let go.
    struct Stuck(Receiver<()>, Arc<Mutex<Vec<u8>>>);

    impl Write for Stuck {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            let _ = self.0.recv();
            self.1.lock().extend_from_slice(bytes);
            Ok(bytes.len())
        }

        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn a_reader_that_does_not_read_stops_nobody() {
        let (release, held) = sync_channel::<()>(0);
        let written = Arc::new(Mutex::new(Vec::new()));
        let names = vec!["p".to_owned()];
        let logs = Logs::with_writer(names, LogStyle::Text, 2, Stuck(held, Arc::clone(&written)));
        let lines = 2 * WAITING_LINES;
        // This would never return if it waited for the writer.
        for line in 0..lines {
            logs.children[0].take(&line.to_string(), LogStyle::Text, &logs.sink);
        }
        assert!(logs.sink.lost.load(Ordering::Relaxed) >= (WAITING_LINES - 1) as u64);
        drop(release);
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .unwrap();
        runtime.block_on(logs.flush());
        let written = String::from_utf8(written.lock().clone()).unwrap();
        assert!(
            written.starts_with("p | 0\np | 1\n") && written.lines().count() >= WAITING_LINES,
            "{}",
            written.len()
        );
    }
}
