//! What is kept of a stream so that it can go on at another instance: the request, and what was given.

use super::exchange::{Ask, Shared};
use serde::Deserialize;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use twinfer_protocol::{Fingerprint, IdsLine, Resume, TokenId};

/// Bytes of bodies and handles that streams together may keep; a stream beyond it is not resumed.
const MAX_KEPT: usize = 256 << 20;

/// A stream that can go on elsewhere.
pub(crate) struct Resumable {
    pub(super) ask: Ask,
    /// Only instances of the same one give the same text.
    pub(super) fingerprint: Fingerprint,
    record: Record,
    /// `prompt_token_ids` of the handle are the prompt's.
    handle_prompt: Option<Vec<TokenId>>,
    _room: KeptRoom,
}

/// What the client has been given.
#[derive(Debug, Default, PartialEq, Eq)]
struct Record {
    prompt: Option<Vec<TokenId>>,
    ids: Vec<TokenId>,
    at: u64,
    /// `id` and `created` of the answer.
    head: Option<(String, u64)>,
    /// A line was for another choice, or an event had none though it should.
    lost: bool,
}

/// A share of [`MAX_KEPT`].
pub(super) struct KeptRoom {
    shared: Arc<Shared>,
    bytes: usize,
}

#[derive(Deserialize)]
struct Head {
    id: String,
    created: u64,
}

#[derive(Deserialize)]
struct PromptIds {
    prompt_token_ids: Option<Vec<TokenId>>,
}

impl KeptRoom {
    /// Room for so many bytes; none if there is none.
    pub(super) fn take(shared: &Arc<Shared>, bytes: usize) -> Option<Self> {
        let before = shared.kept_bytes.fetch_add(bytes, Ordering::AcqRel);
        let room = Self {
            shared: Arc::clone(shared),
            bytes,
        };
        (before + bytes <= MAX_KEPT).then_some(room)
    }
}

impl Drop for KeptRoom {
    fn drop(&mut self) {
        self.shared
            .kept_bytes
            .fetch_sub(self.bytes, Ordering::AcqRel);
    }
}

/// Bytes kept by all streams.
pub(crate) type KeptBytes = AtomicUsize;

impl Ask {
    /// Has its answer one choice, and does it come as a stream? Only then is it known what was given.
    pub(super) fn is_resumable(&self) -> bool {
        let object = &self.object;
        let one = |field: &str| object.get(field).is_none_or(|n| matches!(n, "1" | "null"));
        self.generates
            && object.get("stream") == Some("true")
            && one("n")
            && one("best_of")
            && !object.has_several_prompts()
    }
}

impl Resumable {
    pub(super) fn new(
        mut ask: Ask,
        fingerprint: Fingerprint,
        handle: Option<&[u8]>,
        room: KeptRoom,
    ) -> Self {
        // What arriving bodies may take is for them.
        ask.room = None;
        let prompt = handle.and_then(|handle| serde_json::from_slice::<PromptIds>(handle).ok());
        Self {
            ask,
            fingerprint,
            record: Record::default(),
            handle_prompt: prompt.and_then(|prompt| prompt.prompt_token_ids),
            _room: room,
        }
    }

    /// Takes note of a line before an event.
    pub(crate) fn note(&mut self, line: IdsLine) {
        self.record.note(line);
    }

    /// The first event's data; `told` if a line stood before it. An instance that tells no tokens gives streams that
    /// cannot go on.
    pub(crate) fn note_head(&mut self, data: &[u8], told: bool) {
        if self.record.head.is_none() {
            let head: Option<Head> = serde_json::from_slice(data).ok();
            self.record.head = head.map(|head| (head.id, head.created));
            self.record.lost |= !told;
        }
    }

    /// Is everything known that another instance needs?
    pub(crate) fn is_whole(&self) -> bool {
        self.record.head.is_some() && !self.record.lost
    }

    /// The field for the legs that go on.
    pub(super) fn field(&self) -> String {
        let (id, created) = self.record.head.clone().unzip();
        let prompt = self.record.prompt.as_ref().or(self.handle_prompt.as_ref());
        let resume = Resume {
            prompt_token_ids: prompt.cloned(),
            output_token_ids: self.record.ids.clone(),
            emitted_bytes: Some(self.record.at),
            id,
            created,
        };
        // Such a value is always JSON.
        serde_json::to_string(&resume).unwrap_or_default()
    }
}

impl Record {
    fn note(&mut self, line: IdsLine) {
        match line {
            IdsLine::Prompt(ids) => self.prompt = Some(ids),
            IdsLine::Output { choice: 0, ids, at } if at >= self.at => {
                self.ids.extend(ids);
                self.at = at;
            }
            IdsLine::Output { .. } => self.lost = true,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn output(choice: u32, ids: &[TokenId], at: u64) -> IdsLine {
        IdsLine::Output {
            choice,
            ids: ids.to_vec(),
            at,
        }
    }

    #[test]
    fn a_record_adds_up_and_knows_when_it_does_not() {
        let mut record = Record::default();
        record.note(IdsLine::Prompt(vec![9]));
        record.note(output(0, &[], 0));
        record.note(output(0, &[1, 2], 5));
        record.note(output(0, &[3], 5));
        assert_eq!((record.ids.as_slice(), record.at), (&[1, 2, 3][..], 5));
        assert!(!record.lost);
        record.note(output(1, &[4], 6));
        assert!(record.lost, "a second choice");
        let mut record = Record::default();
        record.note(output(0, &[1], 5));
        record.note(output(0, &[1], 4));
        assert!(record.lost, "text does not become shorter");
    }
}
