//! What lies in shared memory: a head, packed weights, and a table of them.
//!
//! The head takes [`HEAD`] bytes: a magic number, the key, place, length and checksum of the table. It is written last.
//! The table is text: a line with the hash of all weights, a line with a warning or an empty one, then a line for each
//! entry, its fields separated by tabs: name, format, rows, columns, offset.

use super::registry::Member;
use crate::ModelError;
use std::collections::{BTreeMap, HashMap};
use std::ffi::CStr;
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use twinfer_kernels::{Activation, DType, Format, Matrix, Weight, WeightBytes};
use twinfer_sys::{Piece, Pieces, SealedPages};
use xxhash_rust::xxh3::xxh3_128;

/// How shared weights show in `/proc`.
pub(crate) const SHARED_NAME: &CStr = c"twinfer-weights";

const MAGIC: &[u8; 16] = b"twinfer weights\0";
const HEAD: usize = 4096;
/// Bytes of an entry of the table beside its name, and what is lost to alignment.
const ENTRY: usize = 256;

/// Where packed bytes lie and how they are to be read; a vector is one row of f32.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Entry {
    pub(crate) format: Format,
    pub(crate) rows: usize,
    pub(crate) cols: usize,
    pub(crate) offset: usize,
}

/// Notes what is packed where.
#[derive(Debug)]
pub(crate) struct Recorder {
    head: Mutex<Option<Piece>>,
    entries: Mutex<BTreeMap<String, Entry>>,
    /// Something did not fit, so others could not find it.
    spilled: AtomicBool,
}

/// Sealed weights and their table.
#[derive(Debug)]
pub(crate) struct Segment {
    /// Goes first, so that nobody is led to what is gone.
    member: Option<Member>,
    pages: SealedPages,
    entries: HashMap<String, Entry>,
    /// Of all weights as they lie in the files.
    pub(crate) weights_hash: String,
    /// Worth telling about the files.
    pub(crate) warning: Option<String>,
}

/// Bytes to reserve for `entries` of `bytes` together; what is not used is never there.
pub(crate) fn shared_room(bytes: usize, entries: usize) -> usize {
    let table = entries.saturating_mul(ENTRY);
    bytes
        .saturating_add(bytes / 64)
        .saturating_add(table)
        .saturating_add(1 << 20)
}

impl Recorder {
    /// Takes the head, which must come first, out of fresh memory.
    pub(crate) fn new(memory: &Pieces) -> Self {
        Self {
            head: Mutex::new(memory.take(HEAD).filter(|piece| piece.offset() == 0)),
            entries: Mutex::default(),
            spilled: AtomicBool::new(false),
        }
    }

    pub(crate) fn note(&self, name: &str, entry: Entry) {
        let mut entries = self.entries.lock().unwrap_or_else(PoisonError::into_inner);
        entries.insert(name.to_owned(), entry);
    }

    /// Something is not in this memory.
    pub(crate) fn spill(&self) {
        self.spilled.store(true, Ordering::Relaxed);
    }

    /// Writes table and head; false if something is missing, which is then the caller's alone.
    pub(crate) fn finish(
        &self,
        memory: &Pieces,
        key: &str,
        weights_hash: &str,
        warning: Option<&str>,
    ) -> bool {
        let entries = self.entries.lock().unwrap_or_else(PoisonError::into_inner);
        let mut table = format!("{weights_hash}\n{}\n", warning.unwrap_or_default());
        for (name, entry) in entries.iter() {
            let Entry {
                format,
                rows,
                cols,
                offset,
            } = entry;
            let format = format_name(*format);
            table.push_str(&format!("{name}\t{format}\t{rows}\t{cols}\t{offset}\n"));
        }
        let mut head = self.head.lock().unwrap_or_else(PoisonError::into_inner);
        let (Some(mut head), Some(mut place)) = (head.take(), memory.take(table.len())) else {
            return false;
        };
        if self.spilled.load(Ordering::Relaxed) || key.len() != 32 {
            return false;
        }
        place.as_mut_slice().copy_from_slice(table.as_bytes());
        let numbers = [place.offset() as u64, table.len() as u64].map(u64::to_le_bytes);
        let checksum = xxh3_128(table.as_bytes()).to_le_bytes();
        let text = [MAGIC, key.as_bytes(), &numbers[0], &numbers[1], &checksum].concat();
        head.as_mut_slice()[..text.len()].copy_from_slice(&text);
        true
    }
}

impl Segment {
    /// Checks that `pages` hold what `key` names and reads the table.
    pub(crate) fn read(pages: SealedPages, key: &str) -> io::Result<Self> {
        let bad = |what: &str| io::Error::new(io::ErrorKind::InvalidData, what.to_owned());
        let bytes = pages.as_slice();
        let head = bytes.get(..HEAD).ok_or_else(|| bad("no head"))?;
        let (magic, rest) = head.split_at(MAGIC.len());
        let (name, rest) = rest.split_at(32);
        if magic != MAGIC || name != key.as_bytes() {
            return Err(bad("other weights"));
        }
        let number = |at: usize| {
            let bytes = rest[at..].first_chunk::<8>().copied().unwrap_or_default();
            usize::try_from(u64::from_le_bytes(bytes)).unwrap_or(usize::MAX)
        };
        let (start, length) = (number(0), number(8));
        let table = start
            .checked_add(length)
            .and_then(|end| bytes.get(start..end))
            .ok_or_else(|| bad("the table lies outside"))?;
        if rest[16..32] != xxh3_128(table).to_le_bytes() {
            return Err(bad("the table is damaged"));
        }
        let table = std::str::from_utf8(table).map_err(|_| bad("the table is no text"))?;
        let mut lines = table.lines();
        let weights_hash = lines.next().unwrap_or_default().to_owned();
        let warning = lines.next().filter(|text| !text.is_empty());
        let warning = warning.map(str::to_owned);
        let mut entries = HashMap::new();
        for line in lines {
            let (name, entry) = parse_entry(line).ok_or_else(|| bad("a broken entry"))?;
            if !entry.offset.is_multiple_of(64) {
                return Err(bad("an entry that is not aligned"));
            }
            entries.insert(name.to_owned(), entry);
        }
        Ok(Self {
            member: None,
            pages,
            entries,
            weights_hash,
            warning,
        })
    }

    /// The descriptor's number.
    pub(super) fn number(&self) -> u32 {
        self.pages.number()
    }

    /// Others are led here until this is dropped.
    pub(super) fn join(&mut self, member: Member) {
        self.member = Some(member);
    }

    pub(crate) fn has(&self, name: &str) -> bool {
        self.entries.contains_key(name)
    }

    pub(crate) fn weight(self: &Arc<Self>, name: &str) -> Result<Weight, ModelError> {
        let entry = self.entry(name)?;
        let owner = Arc::clone(self) as Arc<dyn WeightBytes>;
        let Entry {
            format,
            rows,
            cols,
            offset,
        } = entry;
        Ok(Weight::from_packed(format, rows, cols, owner, offset)?)
    }

    pub(crate) fn matrix(self: &Arc<Self>, name: &str) -> Result<Matrix, ModelError> {
        let entry = self.entry(name)?;
        let Format::Plain(dtype) = entry.format else {
            return Err(ModelError::Shared(format!("{name} is packed")));
        };
        let owner = Arc::clone(self) as Arc<dyn WeightBytes>;
        Ok(Matrix::from_shared(
            entry.rows,
            entry.cols,
            dtype,
            owner,
            entry.offset,
        )?)
    }

    pub(crate) fn vector(self: &Arc<Self>, name: &str) -> Result<Vec<f32>, ModelError> {
        let matrix = self.matrix(name)?;
        let mut values = vec![0.0; matrix.cols()];
        matrix.dense_row_f32(0, &mut values)?;
        Ok(values)
    }

    fn entry(&self, name: &str) -> Result<Entry, ModelError> {
        let entry = self.entries.get(name).copied();
        entry.ok_or_else(|| ModelError::Shared(format!("{name} is not among them")))
    }
}

impl WeightBytes for Segment {
    fn bytes(&self) -> &[u8] {
        self.pages.as_slice()
    }
}

fn format_name(format: Format) -> String {
    match format {
        Format::Plain(DType::F32) => "f32".to_owned(),
        Format::Plain(DType::Bf16) => "rows16".to_owned(),
        Format::Bf16 => "bf16".to_owned(),
        Format::Int8(Activation::PerToken) => "int8".to_owned(),
        Format::Int8(Activation::Static { scale, offset }) => {
            format!("int8 {:08x} {offset}", scale.to_bits())
        }
    }
}

fn parse_format(text: &str) -> Option<Format> {
    Some(match text {
        "f32" => Format::Plain(DType::F32),
        "rows16" => Format::Plain(DType::Bf16),
        "bf16" => Format::Bf16,
        "int8" => Format::Int8(Activation::PerToken),
        other => {
            let (scale, offset) = other.strip_prefix("int8 ")?.split_once(' ')?;
            Format::Int8(Activation::Static {
                scale: f32::from_bits(u32::from_str_radix(scale, 16).ok()?),
                offset: offset.parse().ok()?,
            })
        }
    })
}

fn parse_entry(line: &str) -> Option<(&str, Entry)> {
    let mut fields = line.split('\t');
    let (name, format) = (fields.next()?, parse_format(fields.next()?)?);
    let mut number = || fields.next()?.parse().ok();
    let entry = Entry {
        format,
        rows: number()?,
        cols: number()?,
        offset: number()?,
    };
    Some((name, entry))
}

#[cfg(test)]
mod tests {
    use super::*;

    const KEY: &str = "0123456789abcdef0123456789abcdef";

    fn sealed(key: &str) -> SealedPages {
        let memory = Pieces::shared(SHARED_NAME, shared_room(1 << 20, 4)).unwrap();
        let recorder = Recorder::new(&memory);
        let mut piece = memory.take(12).unwrap();
        for (bytes, value) in piece.as_mut_slice().chunks_mut(4).zip([1.0f32, 2.0, 3.0]) {
            bytes.copy_from_slice(&value.to_le_bytes());
        }
        let entry = Entry {
            format: Format::Plain(DType::F32),
            rows: 1,
            cols: 3,
            offset: piece.offset(),
        };
        recorder.note("a", entry);
        drop(piece);
        assert!(recorder.finish(&memory, key, "hash", Some("warned")));
        drop(recorder);
        memory.seal(|| {}).unwrap()
    }

    #[test]
    fn what_was_noted_is_found_and_nothing_else() {
        let segment = Arc::new(Segment::read(sealed(KEY), KEY).unwrap());
        assert_eq!(segment.vector("a").unwrap(), [1.0, 2.0, 3.0]);
        assert_eq!(segment.weights_hash, "hash");
        assert_eq!(segment.warning.as_deref(), Some("warned"));
        assert!(segment.has("a") && !segment.has("b"));
        assert!(matches!(segment.matrix("b"), Err(ModelError::Shared(_))));
    }

    #[test]
    fn other_weights_and_what_is_not_whole_are_refused() {
        let other = "f".repeat(32);
        assert!(Segment::read(sealed(&other), KEY).is_err());
        // Sealed before its head was written: all zeros there.
        let memory = Pieces::shared(SHARED_NAME, 1 << 20).unwrap();
        assert!(Segment::read(memory.seal(|| {}).unwrap(), KEY).is_err());
        // A part that did not fit makes the whole private.
        let memory = Pieces::shared(SHARED_NAME, 1 << 20).unwrap();
        let recorder = Recorder::new(&memory);
        recorder.spill();
        assert!(!recorder.finish(&memory, KEY, "hash", None));
    }

    #[test]
    fn formats_are_read_as_they_are_written() {
        let fixed = Activation::Static {
            scale: 0.1,
            offset: -7,
        };
        for format in [
            Format::Plain(DType::F32),
            Format::Plain(DType::Bf16),
            Format::Bf16,
            Format::Int8(Activation::PerToken),
            Format::Int8(fixed),
        ] {
            let name = format_name(format);
            assert_eq!(parse_format(&name), Some(format), "{name}");
        }
        for text in ["", "int8 x 1", "int8 3f800000", "int4"] {
            assert_eq!(parse_format(text), None, "{text}");
        }
    }
}
