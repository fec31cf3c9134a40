use serde_json::Value;

/// How the tokenizer's decoder turns one token into bytes. Text is the lossy UTF-8 reading of all
/// bytes in a row, so decoding is linear and pieces of a stream join to the full text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Scheme {
    /// GPT-2's table of 256 characters, one for each byte.
    ByteLevel,
    /// sentencepiece: a mark for the space, `<0xE4>` for bytes without a token.
    Marked { space: char, byte_fallback: bool },
}

/// Bytes of every token, in one buffer.
#[derive(Debug)]
pub(crate) struct TokenBytes {
    scheme: Scheme,
    strip_start: usize,
    bytes: Vec<u8>,
    /// Token `i` is `bytes[ends[i - 1]..ends[i]]`.
    ends: Vec<u32>,
    special: Vec<bool>,
}

impl TokenBytes {
    /// Reads the `decoder` object of tokenizer.json. The error names the unsupported part.
    pub(crate) fn new(decoder: &Value) -> Result<Self, String> {
        let (scheme, strip_start) = scheme(decoder)?;
        Ok(Self {
            scheme,
            strip_start,
            bytes: Vec::new(),
            ends: Vec::new(),
            special: Vec::new(),
        })
    }

    /// Appends the next id's token; `None` for a hole, which decodes to nothing.
    pub(crate) fn push(&mut self, token: Option<&str>, special: bool) -> Result<(), String> {
        if let Some(token) = token {
            match self.scheme {
                Scheme::ByteLevel => push_byte_level(token, &mut self.bytes),
                Scheme::Marked {
                    space,
                    byte_fallback,
                } => match byte_fallback.then(|| fallback_byte(token)).flatten() {
                    Some(byte) => self.bytes.push(byte),
                    None => self.bytes.extend(token.replace(space, " ").as_bytes()),
                },
            }
        }
        let end =
            u32::try_from(self.bytes.len()).map_err(|_| "the tokens exceed 4 GiB".to_owned())?;
        self.ends.push(end);
        self.special.push(special);
        Ok(())
    }

    pub(crate) fn len(&self) -> usize {
        self.ends.len()
    }

    /// Bytes of a token; none for an id beyond the table.
    pub(crate) fn get(&self, id: u32) -> Option<&[u8]> {
        let i = id as usize;
        let end = *self.ends.get(i)? as usize;
        let start = if i == 0 { 0 } else { self.ends[i - 1] as usize };
        Some(&self.bytes[start..end])
    }

    /// Bytes of the longest token.
    pub(crate) fn longest(&self) -> usize {
        let starts = std::iter::once(&0).chain(&self.ends);
        let lengths = self.ends.iter().zip(starts).map(|(end, start)| end - start);
        lengths.max().unwrap_or(0) as usize
    }

    pub(crate) fn is_special(&self, id: u32) -> bool {
        self.special.get(id as usize).copied().unwrap_or(false)
    }

    /// Spaces that the decoder removes at the very start of a text, at most.
    pub(crate) fn strip_start(&self) -> usize {
        self.strip_start
    }
}

fn scheme(decoder: &Value) -> Result<(Scheme, usize), String> {
    match kind(decoder) {
        "ByteLevel" => Ok((Scheme::ByteLevel, 0)),
        "Metaspace" => {
            let space = only_char(&decoder["replacement"]).unwrap_or('\u{2581}');
            let prepended = decoder["prepend_scheme"].as_str() != Some("never");
            Ok((
                Scheme::Marked {
                    space,
                    byte_fallback: false,
                },
                usize::from(prepended),
            ))
        }
        "Sequence" => {
            let parts = decoder["decoders"]
                .as_array()
                .map(Vec::as_slice)
                .unwrap_or_default();
            match parts {
                [one] => scheme(one),
                _ => sequence(parts),
            }
        }
        other => Err(unsupported(other)),
    }
}

fn sequence(parts: &[Value]) -> Result<(Scheme, usize), String> {
    let (mut space, mut byte_fallback, mut fused, mut strip) = (None, false, false, 0);
    for part in parts {
        match kind(part) {
            "Replace" if part["content"] == " " && !fused => {
                space = only_char(&part["pattern"]["String"]);
                if space.is_none() {
                    return Err(
                        "decoder: Replace with a pattern other than one character is not supported"
                            .into(),
                    );
                }
            }
            "ByteFallback" => byte_fallback = true,
            "Fuse" => fused = true,
            "Strip" if fused && part["content"] == " " && part["stop"] == 0 => {
                strip = part["start"]
                    .as_u64()
                    .and_then(|n| usize::try_from(n).ok())
                    .unwrap_or(0);
            }
            other => return Err(unsupported(&format!("{other} inside Sequence"))),
        }
    }
    match space {
        Some(space) if fused => Ok((
            Scheme::Marked {
                space,
                byte_fallback,
            },
            strip,
        )),
        _ => Err(unsupported("Sequence without Replace and Fuse")),
    }
}

fn kind(decoder: &Value) -> &str {
    decoder["type"].as_str().unwrap_or("none")
}

fn unsupported(what: &str) -> String {
    format!(
        "decoder: {what} is not supported; supported are ByteLevel, Metaspace and sentencepiece's Sequence of Replace, ByteFallback, Fuse, Strip"
    )
}

fn only_char(value: &Value) -> Option<char> {
    let mut chars = value.as_str()?.chars();
    chars.next().filter(|_| chars.next().is_none())
}

/// `<0xE4>` is the byte E4.
fn fallback_byte(token: &str) -> Option<u8> {
    let hex = token.strip_prefix("<0x")?.strip_suffix('>')?;
    (hex.len() == 2)
        .then(|| u8::from_str_radix(hex, 16).ok())
        .flatten()
}

/// Inverse of GPT-2's `bytes_to_unicode`: printable Latin-1 characters stand for themselves, the
/// other 68 bytes in ascending order for U+0100 and following.
fn char_byte(c: char) -> Option<u8> {
    match u32::from(c) {
        n @ (0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff) => u8::try_from(n).ok(),
        n @ 0x100..=0x120 => u8::try_from(n - 0x100).ok(),
        n @ 0x121..=0x142 => u8::try_from(n - 0x121 + 0x7f).ok(),
        0x143 => Some(0xad),
        _ => None,
    }
}

/// A token with a character outside the table stands for its own UTF-8 bytes.
fn push_byte_level(token: &str, out: &mut Vec<u8>) {
    let start = out.len();
    for c in token.chars() {
        match char_byte(c) {
            Some(byte) => out.push(byte),
            None => {
                out.truncate(start);
                out.extend_from_slice(token.as_bytes());
                return;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn every_byte_has_one_character() {
        let mut seen = [false; 256];
        for n in 0..0x200 {
            if let Some(byte) = char::from_u32(n).and_then(char_byte) {
                assert!(
                    !std::mem::replace(&mut seen[usize::from(byte)], true),
                    "byte {byte} twice"
                );
            }
        }
        assert!(seen.iter().all(|&s| s));
        assert_eq!(char_byte('Ġ'), Some(b' '));
        assert_eq!(char_byte('Ċ'), Some(b'\n'));
    }

    #[test]
    fn unsupported_decoders_are_named() {
        for (decoder, name) in [
            (json!({"type": "WordPiece"}), "WordPiece"),
            (json!(null), "none"),
        ] {
            assert!(TokenBytes::new(&decoder).unwrap_err().contains(name));
        }
    }
}
