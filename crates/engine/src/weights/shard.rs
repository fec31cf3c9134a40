use super::files::refused;
use super::{WeightsError, ggml};
use safetensors::Dtype;
use safetensors::tensor::Metadata;
use std::fs::File;
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};
use twinfer_config::gguf::{Gguf, GgufType};
use twinfer_sys::file::{open_regular, refuse_lfs_pointer};

/// The format's own limit on its header.
const MAX_HEADER: u64 = 100_000_000;
const HEADER_LENGTH: u64 = 8;
/// File systems keep times in steps no longer than this.
const TIME_STEP: Duration = Duration::from_millis(20);

/// Type of a tensor's values on disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WeightDtype {
    /// bfloat16.
    Bf16,
    /// float32.
    F32,
    /// float16.
    F16,
    /// fp8 e4m3fn: no infinity, 0x7f and 0xff are no numbers.
    F8E4M3,
    /// Signed bytes.
    I8,
    /// Signed 32-bit numbers.
    I32,
    /// Signed 64-bit numbers.
    I64,
}

/// Where a tensor lies.
#[derive(Clone, Debug)]
pub(super) struct Place {
    pub(super) shard: usize,
    /// Type of the values as they are read.
    pub(super) dtype: WeightDtype,
    pub(super) shape: Vec<usize>,
    /// Bytes of the values as they are read.
    pub(super) len: usize,
    source: Source,
}

/// A tensor as a file's header describes it.
#[derive(Debug)]
pub(super) struct Info {
    pub(super) name: String,
    pub(super) shape: Vec<usize>,
    /// Its name in the format if it is none of [`WeightDtype`].
    dtype: Result<WeightDtype, String>,
    source: Source,
}

/// Bytes of the file, and what makes values of them.
#[derive(Clone, Copy, Debug)]
struct Source {
    offset: u64,
    len: usize,
    ggml: Option<Ggml>,
}

/// A tensor of a GGUF file: blocks to decode, rows to bring in order.
#[derive(Clone, Copy, Debug)]
struct Ggml {
    kind: GgufType,
    paired_heads: Option<usize>,
}

/// One open weight file whose header was checked against its size.
#[derive(Debug)]
pub(super) struct Shard {
    path: PathBuf,
    name: String,
    file: File,
    size: u64,
    modified: Option<SystemTime>,
    tensors: Vec<Info>,
}

impl WeightDtype {
    /// Bytes of one value.
    pub const fn bytes(self) -> usize {
        match self {
            Self::F8E4M3 | Self::I8 => 1,
            Self::Bf16 | Self::F16 => 2,
            Self::F32 | Self::I32 => 4,
            Self::I64 => 8,
        }
    }

    /// Name in the safetensors format.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Bf16 => "BF16",
            Self::F32 => "F32",
            Self::F16 => "F16",
            Self::F8E4M3 => "F8_E4M3",
            Self::I8 => "I8",
            Self::I32 => "I32",
            Self::I64 => "I64",
        }
    }

    fn of(dtype: Dtype) -> Option<Self> {
        Some(match dtype {
            Dtype::BF16 => Self::Bf16,
            Dtype::F32 => Self::F32,
            Dtype::F16 => Self::F16,
            Dtype::F8_E4M3 => Self::F8E4M3,
            Dtype::I8 => Self::I8,
            Dtype::I32 => Self::I32,
            Dtype::I64 => Self::I64,
            _ => return None,
        })
    }
}

impl Shard {
    pub(super) fn open(name: &str, path: &Path) -> Result<Self, WeightsError> {
        let io = |source| WeightsError::Io {
            path: path.to_owned(),
            source,
        };
        let bad = |reason: String| WeightsError::File {
            path: path.to_owned(),
            reason,
        };
        let (file, meta) = open_regular(path).map_err(|error| refused(path, error))?;
        let size = meta.len();
        if size == 0 {
            return Err(bad(
                "is empty: 0 bytes; expected a safetensors file".to_owned()
            ));
        }
        let mut start = vec![0; usize::try_from(size.min(512)).unwrap_or(512)];
        file.read_exact_at(&mut start, 0).map_err(io)?;
        refuse_lfs_pointer(&start, size).map_err(|error| refused(path, error))?;
        if let Some(reason) = web_page(&start, size) {
            return Err(bad(reason));
        }
        let Some(length) = start
            .first_chunk::<8>()
            .map(|bytes| u64::from_le_bytes(*bytes))
        else {
            return Err(bad(format!(
                "is {size} bytes; a safetensors file has at least 8"
            )));
        };
        if length > MAX_HEADER {
            return Err(bad(format!(
                "is no safetensors file ({size} bytes): its header would have {length} bytes, at most {MAX_HEADER} are allowed"
            )));
        }
        let data_start = HEADER_LENGTH + length;
        if data_start > size {
            return Err(bad(format!(
                "is truncated in its header: expected at least {data_start} bytes, found {size}"
            )));
        }
        let mut text = vec![0; usize::try_from(length).unwrap_or(0)];
        file.read_exact_at(&mut text, HEADER_LENGTH).map_err(io)?;
        let header: Metadata = serde_json::from_slice(&text).map_err(|error| {
            bad(format!(
                "has a broken safetensors header ({size} bytes): {error}"
            ))
        })?;
        let expected = data_start + header.data_len() as u64;
        if expected != size {
            let how = if size < expected {
                "is truncated"
            } else {
                "has bytes behind its last tensor"
            };
            return Err(bad(format!(
                "{how}: expected {expected} bytes, found {size}"
            )));
        }
        let tensors = header
            .offset_keys()
            .into_iter()
            .filter_map(|name| {
                let info = header.info(&name)?;
                let (begin, end) = info.data_offsets;
                Some(Info {
                    shape: info.shape.clone(),
                    dtype: WeightDtype::of(info.dtype).ok_or_else(|| format!("{:?}", info.dtype)),
                    source: Source {
                        offset: data_start + begin as u64,
                        len: end - begin,
                        ggml: None,
                    },
                    name,
                })
            })
            .collect();
        Ok(Self::new(
            name.to_owned(),
            path,
            file,
            size,
            meta.modified().ok(),
            tensors,
        ))
    }

    /// The tensors of a GGUF file under their names in a Hugging Face checkpoint.
    pub(super) fn open_gguf(gguf: &Gguf) -> Result<Self, WeightsError> {
        let path = gguf.path();
        let io = |source| WeightsError::Io {
            path: path.to_owned(),
            source,
        };
        let parts = gguf
            .parts()
            .map_err(|error| WeightsError::Gguf(Box::new(error)))?;
        // The file whose header was checked, whatever stands at its path by now.
        let file = gguf.file().try_clone().map_err(io)?;
        let meta = gguf.meta();
        let tensors = parts
            .into_iter()
            .map(|part| Info {
                name: part.name,
                shape: part.shape,
                // Everything but bf16 is decoded to f32, which holds all values of the other types.
                dtype: Ok(match part.kind {
                    GgufType::Bf16 => WeightDtype::Bf16,
                    _ => WeightDtype::F32,
                }),
                source: Source {
                    offset: part.offset,
                    len: usize::try_from(part.bytes).unwrap_or(usize::MAX),
                    ggml: Some(Ggml {
                        kind: part.kind,
                        paired_heads: part.paired_heads,
                    }),
                },
            })
            .collect();
        let name = path
            .file_name()
            .map(|name| name.to_string_lossy().into_owned())
            .unwrap_or_default();
        Ok(Self::new(
            name,
            path,
            file,
            meta.len(),
            meta.modified().ok(),
            tensors,
        ))
    }

    fn new(
        name: String,
        path: &Path,
        file: File,
        size: u64,
        modified: Option<SystemTime>,
        tensors: Vec<Info>,
    ) -> Self {
        Self {
            path: path.to_owned(),
            name,
            file,
            size,
            modified,
            tensors,
        }
    }

    pub(super) fn name(&self) -> &str {
        &self.name
    }

    pub(super) fn tensors(&self) -> &[Info] {
        &self.tensors
    }

    /// Reads a tensor's values into `buffer` of just its size.
    pub(super) fn read(&self, place: &Place, buffer: &mut [u8]) -> Result<(), WeightsError> {
        let Source { offset, len, ggml } = place.source;
        let Some(ggml) = ggml else {
            return self.read_bytes(offset, buffer);
        };
        let width = place.shape.last().copied().unwrap_or(1);
        let mut stored = vec![0; len];
        self.read_bytes(offset, &mut stored)?;
        if place.dtype == WeightDtype::Bf16 {
            let values: &[[u8; 2]] = bytemuck::cast_slice(&stored);
            ggml.in_order(values, width, buffer);
            return Ok(());
        }
        let mut values = vec![0f32; buffer.len() / size_of::<f32>()];
        ggml::decode(ggml.kind, &stored, &mut values);
        drop(stored);
        ggml.in_order(&values, width, buffer);
        Ok(())
    }

    fn read_bytes(&self, offset: u64, buffer: &mut [u8]) -> Result<(), WeightsError> {
        match self.file.read_exact_at(buffer, offset) {
            Ok(()) => Ok(()),
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => {
                self.check_unchanged()?;
                Err(WeightsError::Io {
                    path: self.path.clone(),
                    source: error,
                })
            }
            Err(source) => Err(WeightsError::Io {
                path: self.path.clone(),
                source,
            }),
        }
    }

    /// See [`super::Checkpoint::write_identity`].
    pub(super) fn write_identity(&self, out: &mut impl std::fmt::Write) -> std::fmt::Result {
        let stat = || self.file.metadata().map_err(|_| std::fmt::Error);
        let mut meta = stat()?;
        let changed = SystemTime::UNIX_EPOCH
            + Duration::new(
                u64::try_from(meta.ctime()).unwrap_or(0),
                u32::try_from(meta.ctime_nsec()).unwrap_or(0),
            );
        let age = SystemTime::now().duration_since(changed);
        if let Some(left) = TIME_STEP.checked_sub(age.unwrap_or(TIME_STEP)) {
            std::thread::park_timeout(left);
            meta = stat()?;
        }
        write!(
            out,
            "{} {} {} {}.{} {}.{} ",
            meta.dev(),
            meta.ino(),
            meta.size(),
            meta.mtime(),
            meta.mtime_nsec(),
            meta.ctime(),
            meta.ctime_nsec()
        )
    }

    pub(super) fn check_unchanged(&self) -> Result<(), WeightsError> {
        let now = self.file.metadata().map_err(|source| WeightsError::Io {
            path: self.path.clone(),
            source,
        })?;
        if now.len() != self.size || now.modified().ok() != self.modified {
            return Err(WeightsError::Changed {
                path: self.path.clone(),
                expected: self.size,
                actual: now.len(),
            });
        }
        Ok(())
    }
}

impl Info {
    /// Where the tensor lies, if it is in shard number `shard`; its type's name if that is none of
    /// [`WeightDtype`].
    pub(super) fn place(&self, shard: usize) -> Result<Place, String> {
        let dtype = self.dtype.clone()?;
        let values: usize = self.shape.iter().product();
        Ok(Place {
            shard,
            dtype,
            shape: self.shape.clone(),
            len: values * dtype.bytes(),
            source: self.source,
        })
    }
}

impl Place {
    /// Bytes that reading takes beside the values: blocks as they are stored, values in another order.
    pub(super) fn beside(&self) -> usize {
        let Some(ggml) = self.source.ggml else {
            return 0;
        };
        let ordered = if ggml.paired_heads.is_some() {
            self.len
        } else {
            0
        };
        match self.dtype {
            WeightDtype::Bf16 => self.source.len.saturating_add(ordered),
            _ => self.len.saturating_add(ordered.max(self.source.len)),
        }
    }
}

impl Ggml {
    fn in_order<T: bytemuck::Pod>(self, values: &[T], width: usize, buffer: &mut [u8]) {
        let copy = |values: &[T], buffer: &mut [u8]| {
            let bytes: &[u8] = bytemuck::cast_slice(values);
            buffer.copy_from_slice(bytes);
        };
        match self.paired_heads {
            None => copy(values, buffer),
            Some(heads) => copy(&ggml::halves_from_pairs(values, heads, width), buffer),
        }
    }
}

/// Recognises the error page that a download may leave.
fn web_page(start: &[u8], size: u64) -> Option<String> {
    let text: Vec<u8> = start
        .iter()
        .skip_while(|byte| byte.is_ascii_whitespace())
        .copied()
        .take(16)
        .collect();
    let lower = text.to_ascii_lowercase();
    if lower.starts_with(b"<!doctype") || lower.starts_with(b"<html") || lower.starts_with(b"<?xml")
    {
        return Some(format!(
            "is a web page of {size} bytes, not a safetensors file; download it again"
        ));
    }
    None
}
