use crate::weights::{Checkpoint, WeightDtype, WeightsError};
use crate::{ModelError, Progress};
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use twinfer_config::model::TensorSpecs;
use twinfer_kernels::{Matrix, bf16};
use xxhash_rust::xxh3::{Xxh3, xxh3_128};

/// Reads tensors by name into the forms the kernels want, from any number of threads, and hashes
/// their bytes on the way.
pub(crate) struct Builder<'a> {
    specs: &'a TensorSpecs,
    checkpoint: &'a Checkpoint,
    index: HashMap<&'a str, usize>,
    hashes: Vec<Mutex<u128>>,
    done: AtomicU64,
    progress: Option<Progress<'a>>,
    stop: AtomicBool,
}

/// Values as stored.
enum Stored {
    Bf16(Vec<bf16>),
    F32(Vec<f32>),
}

impl<'a> Builder<'a> {
    pub(crate) fn new(
        specs: &'a TensorSpecs,
        checkpoint: &'a Checkpoint,
        progress: Option<Progress<'a>>,
    ) -> Self {
        let index = specs
            .tensors
            .iter()
            .enumerate()
            .map(|(i, spec)| (spec.name.as_str(), i))
            .collect();
        let hashes = specs.tensors.iter().map(|_| Mutex::new(0)).collect();
        let (done, stop) = (AtomicU64::new(0), AtomicBool::new(false));
        Self {
            specs,
            checkpoint,
            index,
            hashes,
            done,
            progress,
            stop,
        }
    }

    /// A matrix `[out, in]`, type as stored.
    pub(crate) fn matrix(&self, name: &str) -> Result<Matrix, ModelError> {
        let (stored, shape) = self.stored(name)?;
        let (rows, cols) = (shape[0], shape[1]);
        Ok(match stored {
            Stored::Bf16(values) => Matrix::from_bf16(rows, cols, values)?,
            Stored::F32(values) => Matrix::from_f32(rows, cols, values)?,
        })
    }

    /// A vector as f32.
    pub(crate) fn vector(&self, name: &str) -> Result<Vec<f32>, ModelError> {
        Ok(match self.stored(name)?.0 {
            Stored::Bf16(values) => values.iter().map(|value| value.to_f32()).collect(),
            Stored::F32(values) => values,
        })
    }

    /// A matrix cut into consecutive pieces of `rows` rows each, a pattern that repeats over all
    /// rows; each piece a matrix of its own.
    pub(crate) fn pieces(&self, name: &str, pattern: &[usize]) -> Result<Vec<Matrix>, ModelError> {
        let (stored, shape) = self.stored(name)?;
        let cols = shape[1];
        let mut pieces = Vec::new();
        let mut row = 0;
        for rows in pattern.iter().cycle() {
            if row >= shape[0] {
                break;
            }
            let range = row * cols..(row + rows) * cols;
            row += rows;
            pieces.push(match &stored {
                Stored::Bf16(values) => Matrix::from_bf16(*rows, cols, values[range].to_vec())?,
                Stored::F32(values) => Matrix::from_f32(*rows, cols, values[range].to_vec())?,
            });
        }
        Ok(pieces)
    }

    /// Makes `count` parts by `make` on `threads` threads; the parts come in order.
    pub(crate) fn parts<T: Send>(
        &self,
        count: usize,
        threads: usize,
        make: impl Fn(usize) -> Result<T, ModelError> + Sync,
    ) -> Result<Vec<T>, ModelError> {
        let next = AtomicUsize::new(0);
        let made: Vec<Mutex<Option<Result<T, ModelError>>>> =
            (0..count).map(|_| Mutex::new(None)).collect();
        let work = || {
            while !self.stop.load(Ordering::Relaxed) {
                let part = next.fetch_add(1, Ordering::Relaxed);
                let Some(place) = made.get(part) else { return };
                let result = make(part);
                if result.is_err() {
                    self.stop.store(true, Ordering::Relaxed);
                }
                *place.lock().unwrap_or_else(PoisonError::into_inner) = Some(result);
            }
        };
        std::thread::scope(|scope| {
            for _ in 1..threads.min(count) {
                scope.spawn(work);
            }
            work();
        });
        let mut parts = Vec::with_capacity(count);
        let mut unmade = false;
        for place in made {
            match place.into_inner().unwrap_or_else(PoisonError::into_inner) {
                Some(part) => parts.push(part?),
                None => unmade = true,
            }
        }
        if unmade {
            Err(ModelError::Stopped)
        } else {
            Ok(parts)
        }
    }

    /// A warning if the files hold a head that differs from the embedding which is used as head. Valid
    /// once the embedding has been read.
    pub(crate) fn spare_head_warning(&self) -> Result<Option<String>, ModelError> {
        let Some(head) = self.checkpoint.read_spare_head()? else {
            return Ok(None);
        };
        let embedding = self.index.get("model.embed_tokens.weight").map(|tensor| {
            *self.hashes[*tensor]
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
        });
        let differs = embedding != Some(xxh3_128(&head));
        Ok(differs.then(|| {
            "tie_word_embeddings is true, but lm_head.weight differs from the embedding; the embedding is used".to_owned()
        }))
    }

    /// Hash over names, types, shapes and bytes of all tensors, independent of how they are spread
    /// over files. Valid once all have been read.
    pub(crate) fn weights_hash(&self) -> String {
        let mut hash = Xxh3::new();
        for (tensor, spec) in self.specs.tensors.iter().enumerate() {
            let bytes = *self.hashes[tensor]
                .lock()
                .unwrap_or_else(PoisonError::into_inner);
            hash.update(
                format!(
                    "{} {:?} {:?} {bytes:032x}\n",
                    spec.name,
                    self.checkpoint.dtype(tensor),
                    spec.shape
                )
                .as_bytes(),
            );
        }
        format!("{:032x}", hash.digest128())
    }

    fn stored(&self, name: &str) -> Result<(Stored, &'a [usize]), ModelError> {
        // Names come from the same config as the specs; a slip between the two is a bug, not bad input.
        let tensor = *self.index.get(name).ok_or_else(|| WeightsError::Tensors {
            missing: vec![name.to_owned()],
            wrong: Vec::new(),
        })?;
        let shape = &self.specs.tensors[tensor].shape;
        let count: usize = shape.iter().product();
        let stored = match self.checkpoint.dtype(tensor) {
            Some(WeightDtype::Bf16) => {
                let mut values = vec![bf16::ZERO; count];
                self.read(tensor, bytemuck::cast_slice_mut(&mut values))?;
                Stored::Bf16(values)
            }
            _ => {
                let mut values = vec![0f32; count];
                self.read(tensor, bytemuck::cast_slice_mut(&mut values))?;
                Stored::F32(values)
            }
        };
        Ok((stored, shape))
    }

    fn read(&self, tensor: usize, buffer: &mut [u8]) -> Result<(), ModelError> {
        self.checkpoint.read(tensor, buffer)?;
        *self.hashes[tensor]
            .lock()
            .unwrap_or_else(PoisonError::into_inner) = xxh3_128(buffer);
        let done =
            self.done.fetch_add(buffer.len() as u64, Ordering::Relaxed) + buffer.len() as u64;
        if let Some(progress) = self.progress {
            progress(done, self.checkpoint.bytes());
        }
        Ok(())
    }
}
