use crate::{TextError, Tokenizer};
use std::sync::Arc;
use twinfer_protocol::TokenId;

/// Complete text is held back together with the incomplete character behind it, but not more than
/// this many bytes.
const MAX_HELD: usize = 32;

/// Token ids in, text out. The pieces, joined with what [`Self::finish`] returns, equal
/// [`Tokenizer::decode`] of all ids; no piece ends inside a character.
///
/// A piece is held back while the text would end in an incomplete character. Bytes that can no longer
/// become a character are given out as U+FFFD at once, so garbage neither blocks nor costs more than
/// linear time; at most `MAX_HELD` + 3 bytes and one token are ever held.
#[derive(Clone, Debug)]
pub struct IncrementalDetokenizer {
    tokenizer: Arc<Tokenizer>,
    skip_special: bool,
    held: Vec<u8>,
    strip_left: usize,
}

impl IncrementalDetokenizer {
    /// At the start of a text. `skip_special` leaves special tokens out.
    pub fn new(tokenizer: Arc<Tokenizer>, skip_special: bool) -> Self {
        let strip_left = tokenizer.strip_start();
        let held = Vec::with_capacity(MAX_HELD + 3 + tokenizer.longest_token());
        Self {
            tokenizer,
            skip_special,
            held,
            strip_left,
        }
    }

    /// Takes the next token; returns the text that is complete now, often none.
    ///
    /// # Errors
    /// [`TextError::UnknownToken`]; the state is unchanged then.
    pub fn push(&mut self, id: TokenId) -> Result<String, TextError> {
        let mut piece = String::new();
        self.push_into(id, &mut piece)?;
        Ok(piece)
    }

    /// [`Self::push`] that adds the text to `out`.
    ///
    /// # Errors
    /// As [`Self::push`].
    pub fn push_into(&mut self, id: TokenId, out: &mut String) -> Result<(), TextError> {
        let bytes = self.tokenizer.token_bytes(id)?;
        if self.skip_special && self.tokenizer.is_special(id) {
            return Ok(());
        }
        self.held.extend_from_slice(bytes);
        let tail = scan(&self.held);
        let keep = match tail {
            Tail::Complete => 0,
            Tail::Incomplete { len, broken } => {
                if !broken && self.held.len() - len <= MAX_HELD {
                    return Ok(());
                }
                len
            }
        };
        self.emit(keep, out);
        Ok(())
    }

    /// Ends the text: what was held back, an incomplete character as U+FFFD.
    pub fn finish(&mut self) -> String {
        let mut piece = String::new();
        self.finish_into(&mut piece);
        piece
    }

    /// [`Self::finish`] that adds the text to `out`.
    pub fn finish_into(&mut self, out: &mut String) {
        self.emit(0, out);
    }

    /// Bytes that wait for the rest of a character.
    pub fn held_bytes(&self) -> usize {
        self.held.len()
    }

    fn emit(&mut self, keep: usize, out: &mut String) {
        let end = self.held.len() - keep;
        let mut text = &self.held[..end];
        while self.strip_left > 0 && !text.is_empty() {
            match text.strip_prefix(b" ") {
                Some(rest) => {
                    text = rest;
                    self.strip_left -= 1;
                }
                None => self.strip_left = 0,
            }
        }
        // As `String::from_utf8_lossy`, without its own memory.
        for chunk in text.utf8_chunks() {
            out.push_str(chunk.valid());
            if !chunk.invalid().is_empty() {
                out.push(char::REPLACEMENT_CHARACTER);
            }
        }
        self.held.drain(..end);
    }
}

enum Tail {
    Complete,
    /// The last `len` bytes may become a character; `broken` if bytes before them never will.
    Incomplete {
        len: usize,
        broken: bool,
    },
}

fn scan(bytes: &[u8]) -> Tail {
    let mut rest = bytes;
    let mut broken = false;
    loop {
        match std::str::from_utf8(rest) {
            Ok(_) => return Tail::Complete,
            Err(error) => match error.error_len() {
                Some(len) => {
                    broken = true;
                    rest = &rest[error.valid_up_to() + len..];
                }
                None => {
                    return Tail::Incomplete {
                        len: rest.len() - error.valid_up_to(),
                        broken,
                    };
                }
            },
        }
    }
}
