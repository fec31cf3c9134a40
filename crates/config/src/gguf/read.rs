use super::MetaValue;
use super::tensors::{GgufTensor, GgufType};
use std::collections::{BTreeMap, BTreeSet};
use std::io::{self, Read};

/// Limits on what a stranger's file may make us allocate.
const MAX_KEYS: u64 = 1 << 16;
const MAX_TENSORS: u64 = 1 << 20;
const MAX_TEXT: u64 = 16 << 20;
/// Values of all lists together.
const MAX_VALUES: u64 = 1 << 23;
const MAX_DEPTH: usize = 3;
const DEFAULT_ALIGNMENT: u64 = 32;

pub(super) struct Header {
    pub(super) metadata: BTreeMap<String, MetaValue>,
    pub(super) tensors: Vec<GgufTensor>,
}

pub(super) enum ReadError {
    Io(io::Error),
    Bad(String),
}

struct Reader<R> {
    inner: R,
    at: u64,
    size: u64,
    /// List values that may still come.
    values: u64,
}

pub(super) fn header<R: Read>(inner: R, size: u64) -> Result<Header, ReadError> {
    let mut reader = Reader {
        inner,
        at: 0,
        size,
        values: MAX_VALUES,
    };
    let magic: [u8; 4] = reader.bytes()?;
    if &magic != b"GGUF" {
        return Err(ReadError::Bad(format!(
            "is no GGUF file ({size} bytes): it starts with {magic:02x?}"
        )));
    }
    let version = reader.u32()?;
    if !(2..=3).contains(&version) {
        let other = if version.swap_bytes() <= 3 {
            " in big-endian order"
        } else {
            ""
        };
        return Err(ReadError::Bad(format!(
            "has GGUF version {version}{other}; allowed: 2 and 3, little-endian"
        )));
    }
    let tensors = reader.count("tensors", MAX_TENSORS)?;
    let keys = reader.count("metadata keys", MAX_KEYS)?;
    let mut metadata = BTreeMap::new();
    for _ in 0..keys {
        let key = reader.text("a metadata key")?;
        let kind = reader.u32()?;
        let value = reader.value(kind, &key, 0)?;
        if metadata.insert(key.clone(), value).is_some() {
            return Err(ReadError::Bad(format!("{key} stands in it twice")));
        }
    }
    let alignment = match metadata.get("general.alignment") {
        None => DEFAULT_ALIGNMENT,
        Some(MetaValue::Unsigned(value)) if value.is_power_of_two() && *value <= 1 << 20 => *value,
        Some(value) => {
            return Err(ReadError::Bad(format!(
                "general.alignment is {value:?}; allowed: a power of two up to 1048576"
            )));
        }
    };
    let mut infos = Vec::new();
    let mut names = BTreeSet::new();
    for _ in 0..tensors {
        let tensor = reader.tensor()?;
        if !names.insert(tensor.name.clone()) {
            return Err(ReadError::Bad(format!(
                "{} stands in it twice",
                tensor.name
            )));
        }
        infos.push(tensor);
    }
    let start = reader.at.next_multiple_of(alignment);
    for tensor in &mut infos {
        if tensor.offset % alignment != 0 {
            return Err(ReadError::Bad(format!(
                "{} lies at {}, which is no multiple of the alignment {alignment}",
                tensor.name, tensor.offset
            )));
        }
        let end = start
            .checked_add(tensor.offset)
            .and_then(|offset| offset.checked_add(tensor.bytes));
        match end {
            Some(end) if end <= size => tensor.offset += start,
            _ => {
                return Err(ReadError::Bad(format!(
                    "is truncated: {} needs {} bytes at {} behind the header of {start}, the file has {size}",
                    tensor.name, tensor.bytes, tensor.offset
                )));
            }
        }
    }
    Ok(Header {
        metadata,
        tensors: infos,
    })
}

impl<R: Read> Reader<R> {
    fn bytes<const N: usize>(&mut self) -> Result<[u8; N], ReadError> {
        let mut bytes = [0; N];
        self.fill(&mut bytes)?;
        Ok(bytes)
    }

    fn fill(&mut self, bytes: &mut [u8]) -> Result<(), ReadError> {
        let end = self.at + bytes.len() as u64;
        if end > self.size {
            return Err(ReadError::Bad(format!(
                "is truncated in its header: needs {end} bytes, has {}",
                self.size
            )));
        }
        self.inner.read_exact(bytes).map_err(ReadError::Io)?;
        self.at = end;
        Ok(())
    }

    fn u32(&mut self) -> Result<u32, ReadError> {
        Ok(u32::from_le_bytes(self.bytes()?))
    }

    fn u64(&mut self) -> Result<u64, ReadError> {
        Ok(u64::from_le_bytes(self.bytes()?))
    }

    fn count(&mut self, what: &str, most: u64) -> Result<u64, ReadError> {
        let count = self.u64()?;
        if count > most {
            return Err(ReadError::Bad(format!(
                "says it has {count} {what}; allowed: up to {most}"
            )));
        }
        Ok(count)
    }

    fn text(&mut self, what: &str) -> Result<String, ReadError> {
        let length = self.u64()?;
        if length > MAX_TEXT {
            return Err(ReadError::Bad(format!(
                "has {what} of {length} bytes; allowed: up to {MAX_TEXT}"
            )));
        }
        if length > self.size - self.at {
            return Err(ReadError::Bad(format!(
                "is truncated in its header: {what} needs {length} bytes, {} are left",
                self.size - self.at
            )));
        }
        let mut bytes = vec![0; usize::try_from(length).unwrap_or(0)];
        self.fill(&mut bytes)?;
        String::from_utf8(bytes).map_err(|_| ReadError::Bad(format!("has {what} that is no UTF-8")))
    }

    fn value(&mut self, kind: u32, key: &str, depth: usize) -> Result<MetaValue, ReadError> {
        Ok(match kind {
            0 => MetaValue::Unsigned(u64::from(self.bytes::<1>()?[0])),
            1 => MetaValue::Signed(i64::from(i8::from_le_bytes(self.bytes()?))),
            2 => MetaValue::Unsigned(u64::from(u16::from_le_bytes(self.bytes()?))),
            3 => MetaValue::Signed(i64::from(i16::from_le_bytes(self.bytes()?))),
            4 => MetaValue::Unsigned(u64::from(self.u32()?)),
            5 => MetaValue::Signed(i64::from(i32::from_le_bytes(self.bytes()?))),
            6 => MetaValue::Float(f64::from(f32::from_le_bytes(self.bytes()?))),
            7 => match self.bytes::<1>()?[0] {
                0 => MetaValue::Bool(false),
                1 => MetaValue::Bool(true),
                other => {
                    return Err(ReadError::Bad(format!(
                        "{key} is the truth value {other}; allowed: 0 and 1"
                    )));
                }
            },
            8 => MetaValue::Text(self.text(&format!("in {key} a text"))?),
            9 if depth < MAX_DEPTH => {
                let kind = self.u32()?;
                let count = self.count(&format!("values in {key}"), self.values)?;
                self.values -= count;
                let mut list = Vec::new();
                for _ in 0..count {
                    list.push(self.value(kind, key, depth + 1)?);
                }
                MetaValue::List(list)
            }
            10 => MetaValue::Unsigned(self.u64()?),
            11 => MetaValue::Signed(i64::from_le_bytes(self.bytes()?)),
            12 => MetaValue::Float(f64::from_le_bytes(self.bytes()?)),
            other => {
                return Err(ReadError::Bad(format!(
                    "{key} has type {other} at depth {depth}; allowed: 0 to 12, lists up to {MAX_DEPTH} deep"
                )));
            }
        })
    }

    fn tensor(&mut self) -> Result<GgufTensor, ReadError> {
        let name = self.text("a tensor name")?;
        let dimensions = self.u32()?;
        if !(1..=4).contains(&dimensions) {
            return Err(ReadError::Bad(format!(
                "{name} has {dimensions} dimensions; allowed: 1 to 4"
            )));
        }
        let mut shape = Vec::new();
        for _ in 0..dimensions {
            let length = self.u64()?;
            shape.push(
                usize::try_from(length)
                    .ok()
                    .filter(|length| (1..=1 << 32).contains(length))
                    .ok_or_else(|| {
                        ReadError::Bad(format!(
                            "{name} has a dimension of {length}; allowed: 1 to 4294967296"
                        ))
                    })?,
            );
        }
        // The fastest dimension comes first in the file.
        shape.reverse();
        let number = self.u32()?;
        let kind = GgufType::of(number).ok_or_else(|| {
            ReadError::Bad(format!(
                "{name} is stored as ggml type {number}; allowed: {}",
                GgufType::names()
            ))
        })?;
        let offset = self.u64()?;
        let width = shape.last().copied().unwrap_or(0);
        if width % kind.block_values() != 0 {
            return Err(ReadError::Bad(format!(
                "{name} has rows of {width} values; {} needs a multiple of {}",
                kind.name(),
                kind.block_values()
            )));
        }
        let bytes = shape
            .iter()
            .try_fold(1u64, |product, length| product.checked_mul(*length as u64))
            .and_then(|values| {
                (values / kind.block_values() as u64).checked_mul(kind.block_bytes() as u64)
            })
            .ok_or_else(|| {
                ReadError::Bad(format!("{name} has shape {shape:?}, which is too large"))
            })?;
        Ok(GgufTensor {
            name,
            shape,
            kind,
            offset,
            bytes,
        })
    }
}
