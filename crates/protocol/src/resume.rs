//! A stream that goes on at another instance: what the router records of it, and what it sends there.

use crate::openai::Fields;
use crate::{ApiError, TokenId};
use serde::{Deserialize, Serialize};

/// Name of the field of a body that holds a [`Resume`].
pub const RESUME_FIELD: &str = "twinfer_resume";
/// Most bytes of [`Resume::id`].
const MAX_ID: usize = 512;

/// `twinfer_resume` of a body: the answer has begun elsewhere, and only what follows is wanted. Taken from
/// peers only; one prompt, one choice. A prefill leg reads the two lists alone.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Resume {
    /// The prompt as it was tokenised; the body's own text is tokenised again if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub prompt_token_ids: Option<Vec<TokenId>>,
    /// The output that the client has been given, and tokens whose text was held back when that was.
    pub output_token_ids: Vec<TokenId>,
    /// Bytes of text that came of them; checked if given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub emitted_bytes: Option<u64>,
    /// `id` of the answer.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub id: Option<String>,
    /// `created` of the answer, Unix seconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub created: Option<u64>,
}

impl Resume {
    /// From a body; none if it has no such field.
    ///
    /// # Errors
    /// `InvalidRequest` that names the field.
    pub fn read(fields: &Fields<'_>) -> Result<Option<Self>, ApiError> {
        let what = "an object of prompt_token_ids, output_token_ids, emitted_bytes, id and created";
        let resume: Option<Self> = fields.read(RESUME_FIELD, what)?;
        if let Some(id) = resume.as_ref().and_then(|resume| resume.id.as_ref())
            && id.len() > MAX_ID
        {
            let message = format!(
                "{RESUME_FIELD}.id has {} bytes; at most {MAX_ID} are allowed",
                id.len()
            );
            return Err(ApiError::invalid(RESUME_FIELD, message));
        }
        Ok(resume)
    }
}

/// Comment lines before the events of a stream, for a peer that sends the header [`crate::IDS_HEADER`]: what
/// was output, without a look into the events.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum IdsLine {
    /// `: prompt=1,2,3`: the prompt, before the first event.
    Prompt(Vec<TokenId>),
    /// `: i=0 ids=4,5 at=17`: a choice has these further tokens with the event that follows.
    Output {
        /// Choice.
        choice: u32,
        /// Tokens since the line before.
        ids: Vec<TokenId>,
        /// Bytes of text of all tokens so far.
        at: u64,
    },
}

impl IdsLine {
    /// Adds the line, with its end, to `out`.
    pub fn write(&self, out: &mut Vec<u8>) {
        match self {
            Self::Prompt(ids) => {
                out.extend_from_slice(b": prompt=");
                write_ids(ids, out);
            }
            Self::Output { choice, ids, at } => write_output(*choice, ids, *at, out),
        }
        if matches!(self, Self::Prompt(_)) {
            out.push(b'\n');
        }
    }

    /// The line at the beginning of an event, and its length with its end; none if there is no such line.
    pub fn cut(event: &[u8]) -> Option<(Self, usize)> {
        let rest = event.strip_prefix(b": ")?;
        let end = rest.iter().position(|&byte| byte == b'\n')?;
        let line = std::str::from_utf8(&rest[..end]).ok()?;
        let length = 2 + end + 1;
        if let Some(ids) = line.strip_prefix("prompt=") {
            return Some((Self::Prompt(read_ids(ids)?), length));
        }
        let (choice, line) = line.strip_prefix("i=")?.split_once(" ids=")?;
        let (ids, at) = line.split_once(" at=")?;
        let output = Self::Output {
            choice: choice.parse().ok()?,
            ids: read_ids(ids)?,
            at: at.parse().ok()?,
        };
        Some((output, length))
    }
}

/// Adds the line of [`IdsLine::Output`] to `out`.
pub fn write_output(choice: u32, ids: &[TokenId], at: u64, out: &mut Vec<u8>) {
    use std::io::Write as _;
    // Writing to memory does not fail.
    let _ = write!(out, ": i={choice} ids=");
    write_ids(ids, out);
    let _ = writeln!(out, " at={at}");
}

fn write_ids(ids: &[TokenId], out: &mut Vec<u8>) {
    use std::io::Write as _;
    for (index, id) in ids.iter().enumerate() {
        let comma = if index > 0 { "," } else { "" };
        let _ = write!(out, "{comma}{id}");
    }
}

fn read_ids(text: &str) -> Option<Vec<TokenId>> {
    if text.is_empty() {
        return Some(Vec::new());
    }
    text.split(',').map(|id| id.parse().ok()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_read_as_they_were_written() {
        for line in [
            IdsLine::Prompt(vec![1, 0, u32::MAX]),
            IdsLine::Output {
                choice: 3,
                ids: vec![7],
                at: 12,
            },
            IdsLine::Output {
                choice: 0,
                ids: Vec::new(),
                at: 0,
            },
        ] {
            let mut event = Vec::new();
            line.write(&mut event);
            let length = event.len();
            event.extend_from_slice(b"data: {}\n\n");
            assert_eq!(IdsLine::cut(&event), Some((line, length)));
        }
    }

    #[test]
    fn other_comments_and_events_are_left_alone() {
        for event in [
            &b"data: : i=0 ids=1 at=2\n\n"[..],
            b": ping - 2026\n\n",
            b": i=0 ids=1,x at=2\n\n",
            b": i=0 ids=1",
            b": i=0 ids=4294967296 at=0\n",
            b"",
        ] {
            assert_eq!(IdsLine::cut(event), None);
        }
    }

    #[test]
    fn a_resume_is_an_object_of_known_shape() {
        let read = |text: &str| {
            let body = format!(r#"{{"twinfer_resume":{text}}}"#);
            Resume::read(&Fields::parse(body.as_bytes()).expect("a body"))
        };
        let resume = read(r#"{"output_token_ids":[1,2],"id":"cmpl-1","created":7}"#);
        let resume = resume.expect("a resume").expect("one");
        assert_eq!(resume.output_token_ids, [1, 2]);
        assert_eq!((resume.created, resume.emitted_bytes), (Some(7), None));
        assert_eq!(read("null").expect("nothing"), None);
        for bad in ["1", "{}", r#"{"output_token_ids":[-1]}"#] {
            let error = read(bad).expect_err(bad);
            assert_eq!(error.param.as_deref(), Some(RESUME_FIELD));
        }
        let long = format!(r#"{{"output_token_ids":[],"id":"{}"}}"#, "x".repeat(600));
        assert!(read(&long).is_err());
    }
}
