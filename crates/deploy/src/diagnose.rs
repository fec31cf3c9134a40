//! Known failures in the logs of engines: cause, evidence, remedy. The failures stand in `diagnose.yaml`.

use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fmt;
use std::io::{self, BufRead};
use std::sync::LazyLock;

/// A failure that is known.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Failure {
    id: String,
    any: Vec<Vec<String>>,
    #[serde(default)]
    near: Vec<String>,
    cause: String,
    remedy: String,
    source: String,
}

/// A failure that a log shows.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Cause {
    /// Name of the failure.
    pub id: String,
    /// Why it happens.
    pub cause: String,
    /// Log that shows it first.
    pub log: String,
    /// Line, from 1.
    pub line: u64,
    /// That line.
    pub evidence: String,
    /// Lines that show it, over all logs.
    pub count: u64,
    /// What to do.
    pub remedy: String,
    /// Where this is described.
    pub source: String,
}

static FAILURES: LazyLock<Vec<Failure>> = LazyLock::new(|| {
    // A malformed table is a mistake of this build; a test reads it.
    serde_saphyr::from_str(include_str!("diagnose.yaml")).unwrap_or_default()
});

/// Lines around evidence in which `near` may stand.
const NEAR: u64 = 60;
/// Longer lines are cut.
const LINE_BYTES: usize = 16 << 10;
/// Characters of evidence that are shown.
const SHOWN: usize = 240;

/// What a set of logs shows, fed log by log.
#[derive(Debug, Default)]
pub struct Diagnosis {
    causes: BTreeMap<usize, Cause>,
}

impl Diagnosis {
    /// Reads a log. Bytes that are no text are replaced, over-long lines cut.
    ///
    /// # Errors
    /// The log cannot be read.
    pub fn read(&mut self, name: &str, mut log: impl BufRead) -> io::Result<()> {
        let mut number = 0u64;
        let mut line = Vec::new();
        // Evidence that waits for what must stand near it, and the lines where that stood last.
        let mut waiting: Vec<(usize, u64, String)> = Vec::new();
        let mut last_near: BTreeMap<usize, u64> = BTreeMap::new();
        while next_line(&mut log, &mut line)? {
            number += 1;
            let text = String::from_utf8_lossy(&line);
            let lower = text.to_lowercase();
            let holds = |part: &String| lower.contains(&part.to_lowercase());
            for (index, failure) in FAILURES.iter().enumerate() {
                if failure.near.iter().any(holds) {
                    last_near.insert(index, number);
                }
            }
            waiting.retain(|(index, at, evidence)| {
                let near = last_near
                    .get(index)
                    .is_some_and(|near| near.abs_diff(*at) <= NEAR);
                if near {
                    self.add(*index, name, *at, evidence);
                }
                !near && number.saturating_sub(*at) <= NEAR
            });
            let hit = FAILURES
                .iter()
                .position(|failure| failure.any.iter().any(|all| all.iter().all(holds)));
            let Some(index) = hit else { continue };
            let near = last_near
                .get(&index)
                .is_some_and(|near| number - near <= NEAR);
            if FAILURES[index].near.is_empty() || near {
                self.add(index, name, number, &text);
            } else {
                waiting.push((index, number, text.into_owned()));
            }
        }
        Ok(())
    }

    fn add(&mut self, index: usize, log: &str, line: u64, evidence: &str) {
        let failure = &FAILURES[index];
        let cause = self.causes.entry(index).or_insert_with(|| Cause {
            id: failure.id.clone(),
            cause: failure.cause.clone(),
            log: log.to_owned(),
            line,
            evidence: printable(evidence),
            count: 0,
            remedy: failure.remedy.clone(),
            source: failure.source.clone(),
        });
        cause.count += 1;
    }

    /// What was found, in the order of the table.
    pub fn causes(self) -> Vec<Cause> {
        self.causes.into_values().collect()
    }
}

/// The next line without its end; false at the end of the log.
fn next_line(log: &mut impl BufRead, line: &mut Vec<u8>) -> io::Result<bool> {
    line.clear();
    let mut any = false;
    loop {
        let chunk = log.fill_buf()?;
        if chunk.is_empty() {
            return Ok(any);
        }
        any = true;
        let end = chunk.iter().position(|byte| *byte == b'\n');
        let part = &chunk[..end.unwrap_or(chunk.len())];
        let room = LINE_BYTES.saturating_sub(line.len());
        line.extend_from_slice(&part[..part.len().min(room)]);
        let used = part.len() + usize::from(end.is_some());
        log.consume(used);
        if end.is_some() {
            return Ok(true);
        }
    }
}

/// A log may hold anything; a terminal must not be steered by it.
fn printable(text: &str) -> String {
    text.trim()
        .chars()
        .take(SHOWN)
        .map(|c| if c.is_control() { ' ' } else { c })
        .collect()
}

impl fmt::Display for Cause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}: {}", self.id, self.cause)?;
        let more = if self.count > 1 {
            format!(" ({} lines)", self.count)
        } else {
            String::new()
        };
        writeln!(f, "  {}:{}{more}: {}", self.log, self.line, self.evidence)?;
        writeln!(f, "  remedy: {}", self.remedy)?;
        writeln!(f, "  source: {}", self.source)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ids(log: &str) -> Vec<String> {
        let mut diagnosis = Diagnosis::default();
        diagnosis.read("log", log.as_bytes()).expect("read");
        diagnosis
            .causes()
            .into_iter()
            .map(|cause| cause.id)
            .collect()
    }

    #[test]
    fn failures_of_the_seeds_are_known() {
        for (line, id) in [
            (
                "RuntimeError: NPU out of memory. Tried to allocate 898.00 MiB (NPU 15; 60.96 GiB total capacity)",
                "memory-without-quantization",
            ),
            (
                "NPU function error: call aclnnQuantMatmulV4 failed",
                "float16-scale",
            ),
            (
                "Tensor scale not implemented for DT_FLOAT16, should be in dtype support list",
                "float16-scale",
            ),
            (
                "HCCL function error: HcclGetRootInfo(hcclID), error code is 6",
                "hccl-root-info",
            ),
            (
                "[ERROR] ERR02200 DIST call hccl api failed.",
                "hccl-root-info",
            ),
            (
                "zmq.error.ZMQError: Address already in use (addr='tcp://0.0.0.0:36000')",
                "address-in-use",
            ),
            (
                "ERROR: No matching distribution found for torch-npu==2.5.1.post1.dev20250619",
                "torch-npu-missing",
            ),
            (
                "Cannot install torch-npu==2.5.1.post1 and torch==2.5.1 because these package versions have conflicting dependencies.",
                "torch-conflict",
            ),
            (
                "fatal: unable to access: SSL certificate problem: self signed certificate in certificate chain",
                "certificate",
            ),
            (
                "ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization`",
                "kv-capacity",
            ),
            ("E EI0020: Recv unmatched ack", "hccl-port"),
        ] {
            assert_eq!(ids(&format!("INFO start\n{line}\n")), [id], "{line}");
        }
    }

    #[test]
    fn a_tls_column_counts_only_beside_a_timeout() {
        let table = "| dest_ip | Status | TlsStatus |\n";
        assert!(ids(table).is_empty());
        let after = format!("{table}| 10.0.0.1 | time out | ENABLE |\n");
        assert_eq!(ids(&after), ["tls-mismatch"]);
        let before =
            format!("wait socket establish timeout, role[0] rank[0] timeout[120 s]\n{table}");
        assert_eq!(ids(&before), ["tls-mismatch", "link-timeout"]);
        let far = format!("{table}{}a timeout\n", "x\n".repeat(100));
        assert!(ids(&far).is_empty());
    }

    #[test]
    fn no_remedy_switches_verification_off() {
        assert!(FAILURES.len() > 10);
        for failure in FAILURES.iter() {
            let text = failure.remedy.to_lowercase();
            for word in [
                "sslverify",
                "no_verify",
                "trusted-host",
                "--insecure",
                "verification off",
            ] {
                assert!(!text.contains(word), "{}", failure.id);
            }
        }
    }

    #[test]
    fn strange_bytes_and_endless_lines_are_read() {
        let mut log = vec![b'a'; 1 << 20];
        log.extend(b"\n\xff\xfe Address already in use \x1b[31m\n");
        let mut diagnosis = Diagnosis::default();
        diagnosis.read("log", log.as_slice()).expect("read");
        let causes = diagnosis.causes();
        assert_eq!((causes.len(), causes[0].line), (1, 2));
        assert!(!causes[0].evidence.contains('\u{1b}'));
    }
}
