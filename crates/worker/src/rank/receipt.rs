//! What is kept of the end of an instance whose rank was lost.

use super::messages::RankStats;
use serde::Serialize;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};
use twinfer_protocol::{Epoch, Fingerprint};

/// What an instance is, for its receipts.
pub(super) struct Receipts {
    /// Where they are written; none: only to the log.
    pub(super) folder: Option<PathBuf>,
    pub(super) instance: String,
    pub(super) epoch: Epoch,
}

/// The record of a failure.
#[derive(Debug, Serialize)]
struct Receipt<'a> {
    kind: &'static str,
    instance: &'a str,
    epoch: Epoch,
    version: &'static str,
    fingerprint: &'a Fingerprint,
    /// Seconds since 1970.
    time: u64,
    reason: &'a str,
    /// The rank at fault.
    rank: u32,
    /// Its node, by the order of the plan.
    node: u32,
    /// Steps that it had finished, as far as the front has heard.
    step: u64,
    /// What the last of them did.
    phase: &'static str,
}

impl Receipts {
    /// Keeps that `rank` on `node` ended the instance.
    pub(super) fn write(
        &self,
        (rank, node): (u32, u32),
        stats: Option<&RankStats>,
        fingerprint: &Fingerprint,
        reason: &str,
    ) {
        let time = SystemTime::now().duration_since(UNIX_EPOCH);
        let turns = stats.map(|stats| stats.turns).unwrap_or_default();
        let receipt = Receipt {
            kind: "rank-failure",
            instance: &self.instance,
            epoch: self.epoch,
            version: env!("CARGO_PKG_VERSION"),
            fingerprint,
            time: time.map_or(0, |time| time.as_secs()),
            reason,
            rank,
            node,
            step: turns.named().iter().map(|(_, count)| count).sum(),
            phase: turns.last.name(),
        };
        tracing::error!(
            rank,
            node,
            step = receipt.step,
            phase = receipt.phase,
            "a rank was lost"
        );
        if let Some(folder) = &self.folder
            && let Err(error) = self.file(folder, &receipt)
        {
            tracing::error!(%error, folder = %folder.display(), "the receipt could not be written");
        }
    }

    fn file(&self, folder: &Path, receipt: &Receipt<'_>) -> std::io::Result<()> {
        std::fs::create_dir_all(folder)?;
        let text = serde_json::to_string_pretty(receipt).map_err(std::io::Error::other)?;
        // Names of instances may hold anything but control characters.
        let inside = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.' | '@');
        let name: String = self
            .instance
            .chars()
            .map(|c| if inside(c) { c } else { '_' })
            .collect();
        let path = folder.join(format!("rank-failure-{name}-{}.json", self.epoch));
        // Whoever looks into the folder finds it whole or not at all; only its owner may read it.
        let mut file = tempfile::NamedTempFile::new_in(folder)?;
        file.write_all(format!("{text}\n").as_bytes())?;
        file.persist(&path).map_err(|error| error.error)?;
        Ok(())
    }
}
