mod hashes;
mod int8;

use super::mla::PerHead;
use super::norm::Norm;
use super::packing::Packing;
use super::spread::{RowForm, Spread};
use super::stored::{Stored, e4m3_table};
use crate::sharing::{Entry, Recorder, Segment};
use crate::weights::{Checkpoint, Scheme, WeightDtype, WeightsError};
use crate::{ModelError, Progress};
use hashes::gather_hashes;
use int8::Scales;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use twinfer_kernels::{
    Activation, Compute, DType, Format, Int8Rows, KernelError, Matrix, Weight, bf16,
};
use twinfer_sys::{Piece, Pieces};
use xxhash_rust::xxh3::{Xxh3, xxh3_128};

/// Reads tensors by name into the forms the kernels want, from any number of threads, and hashes
/// their bytes on the way.
pub(crate) struct Builder<'a> {
    checkpoint: &'a Checkpoint,
    packing: Packing,
    source: Source,
    spread: Option<Spread>,
    /// Bytes that will be read.
    total: u64,
    hashes: Mutex<BTreeMap<String, u128>>,
    done: AtomicU64,
    progress: Option<Progress<'a>>,
    stop: AtomicBool,
}

/// Where packed weights come from.
enum Source {
    /// They are packed into this memory; what does not fit is allocated.
    Private(Pieces),
    /// As above, and it is noted where they are.
    Recorded(Pieces, Recorder),
    /// They are there.
    Ready(Arc<Segment>),
}

impl<'a> Builder<'a> {
    pub(crate) fn new(
        checkpoint: &'a Checkpoint,
        packing: Packing,
        memory: Pieces,
        progress: Option<Progress<'a>>,
    ) -> Self {
        Self::with_source(checkpoint, packing, Source::Private(memory), progress)
    }

    /// As [`Builder::new`] into fresh shared memory, for [`Builder::complete`].
    pub(crate) fn recorded(
        checkpoint: &'a Checkpoint,
        packing: Packing,
        memory: Pieces,
        progress: Option<Progress<'a>>,
    ) -> Self {
        let recorder = Recorder::new(&memory);
        let source = Source::Recorded(memory, recorder);
        Self::with_source(checkpoint, packing, source, progress)
    }

    /// Takes everything from a segment that was made of the same checkpoint and packing.
    pub(crate) fn ready(
        checkpoint: &'a Checkpoint,
        packing: Packing,
        segment: Arc<Segment>,
    ) -> Self {
        Self::with_source(checkpoint, packing, Source::Ready(segment), None)
    }

    fn with_source(
        checkpoint: &'a Checkpoint,
        packing: Packing,
        source: Source,
        progress: Option<Progress<'a>>,
    ) -> Self {
        Self {
            checkpoint,
            packing,
            source,
            spread: None,
            total: checkpoint.bytes(),
            hashes: Mutex::default(),
            done: AtomicU64::new(0),
            progress,
            stop: AtomicBool::new(false),
        }
    }

    /// Builds only the experts of a rank's seats.
    pub(crate) fn with_spread(mut self, spread: Option<Spread>) -> Self {
        if let Some(spread) = &spread {
            self.total = self.checkpoint.bytes_where(|name| spread.reads(name));
        }
        self.spread = spread;
        self
    }

    /// Where experts are, if not all here.
    pub(super) fn spread(&self) -> Option<&Spread> {
        self.spread.as_ref()
    }

    /// What rows may travel as to the layers that have these weights: that of which all make the same as of the rows
    /// themselves.
    pub(super) fn row_form(&self, mut weights: impl Iterator<Item = String>) -> RowForm {
        let form = |name: String| match self.checkpoint.scheme(&name) {
            Scheme::Plain | Scheme::BlockFp8 { .. } => match self.packing.linear() {
                Compute::F32 => RowForm::F32,
                Compute::Bf16 => RowForm::Bf16,
                Compute::W8A8 => RowForm::Int8,
            },
            Scheme::Dynamic(_) | Scheme::SlimMix => RowForm::Int8,
            // Every expert has a scale of its own for them.
            Scheme::Static { .. } | Scheme::SlimStatic => RowForm::F32,
        };
        let first = weights.next().map_or(RowForm::F32, form);
        match weights.all(|name| form(name) == first) {
            true => first,
            false => RowForm::F32,
        }
    }

    /// Completes recorded memory; false when something lies elsewhere.
    pub(crate) fn complete(&self, key: &str) -> Result<bool, ModelError> {
        let Source::Recorded(memory, recorder) = &self.source else {
            return Ok(false);
        };
        let warning = self.spare_head_warning()?;
        let hash = self.weights_hash()?;
        Ok(recorder.finish(memory, key, &hash, warning.as_deref()))
    }

    /// Recorded memory.
    pub(crate) fn into_memory(self) -> Option<Pieces> {
        match self.source {
            Source::Recorded(memory, _) => Some(memory),
            _ => None,
        }
    }

    /// Room for packed bytes.
    fn take(&self, bytes: Option<usize>) -> Option<Piece> {
        let (Source::Private(memory) | Source::Recorded(memory, _)) = &self.source else {
            return None;
        };
        let piece = bytes.and_then(|bytes| memory.take(bytes));
        if piece.is_none()
            && let Source::Recorded(_, recorder) = &self.source
        {
            recorder.spill();
        }
        piece
    }

    /// Notes where a piece's values are.
    fn note(&self, name: &str, format: Format, (rows, cols): (usize, usize), piece: &Piece) {
        if let Source::Recorded(_, recorder) = &self.source {
            let entry = Entry {
                format,
                rows,
                cols,
                offset: piece.offset(),
            };
            recorder.note(name, entry);
        }
    }

    fn segment(&self) -> Option<&Arc<Segment>> {
        match &self.source {
            Source::Ready(segment) => Some(segment),
            _ => None,
        }
    }

    /// A matrix, moved to where others find it by `name` if weights are shared.
    fn settled(&self, name: &str, matrix: Matrix) -> Result<Matrix, ModelError> {
        let Source::Recorded(..) = &self.source else {
            return Ok(matrix);
        };
        let (rows, cols, dtype) = (matrix.rows(), matrix.cols(), matrix.dtype());
        let format = Format::Plain(dtype);
        let Some(mut piece) = self.take(Weight::packed_bytes(format, rows, cols)) else {
            return Ok(matrix);
        };
        Weight::pack_into(Compute::F32, &[&matrix], piece.as_mut_slice())?;
        self.note(name, format, (rows, cols), &piece);
        Ok(Matrix::from_shared(rows, cols, dtype, Arc::new(piece), 0)?)
    }

    /// As [`Builder::settled`], of values that are copied wherever they are used.
    fn settle_vector(&self, name: &str, values: &[f32]) {
        let Source::Recorded(..) = &self.source else {
            return;
        };
        let bytes: &[u8] = bytemuck::cast_slice(values);
        if let Some(mut piece) = self.take(Some(bytes.len())) {
            piece.as_mut_slice().copy_from_slice(bytes);
            let format = Format::Plain(DType::F32);
            self.note(name, format, (1, values.len()), &piece);
        }
    }

    /// A vector as f32.
    pub(crate) fn vector(&self, name: &str) -> Result<Vec<f32>, ModelError> {
        if let Some(segment) = self.segment() {
            return segment.vector(name);
        }
        let values = self.floats(name)?;
        self.settle_vector(name, &values);
        Ok(values)
    }

    /// A vector that is used in packing only.
    fn floats(&self, name: &str) -> Result<Vec<f32>, ModelError> {
        Ok(self.stored(name)?.floats())
    }

    fn floats_if(&self, name: &str) -> Result<Option<Vec<f32>>, ModelError> {
        match self.checkpoint.dtype(name) {
            None => Ok(None),
            Some(_) => self.floats(name).map(Some),
        }
    }

    /// A norm by its module, with what outlier suppression may have left there.
    pub(crate) fn norm(&self, module: &str, epsilon: f32) -> Result<Norm, ModelError> {
        let mut weight = self.vector(&format!("{module}.weight"))?;
        let mut bias = self.vector_if(&format!("{module}.bias"))?;
        if let Some(inner) = self.vector_if(&format!("{module}.module.weight"))? {
            weight = inner;
        }
        if let Some(inner) = self.vector_if(&format!("{module}.module.bias"))? {
            bias = Some(inner);
        }
        Ok(Norm {
            weight,
            bias,
            epsilon,
        })
    }

    fn vector_if(&self, name: &str) -> Result<Option<Vec<f32>>, ModelError> {
        match self.checkpoint.dtype(name) {
            None => Ok(None),
            Some(_) => self.vector(name).map(Some),
        }
    }

    /// A matrix `[out, in]` of plain numbers, type as stored, to be kept.
    pub(crate) fn kept(&self, name: &str) -> Result<Matrix, ModelError> {
        if let Some(segment) = self.segment() {
            return segment.matrix(name);
        }
        let dtype = match self.checkpoint.dtype(name) {
            Some(WeightDtype::Bf16) => DType::Bf16,
            Some(WeightDtype::F32) => DType::F32,
            _ => return self.settled(name, self.plain(name)?),
        };
        let (rows, cols) = self.shape(name)?;
        let format = Format::Plain(dtype);
        let Some(mut piece) = self.take(Weight::packed_bytes(format, rows, cols)) else {
            return self.plain(name);
        };
        self.read_into(name, piece.as_mut_slice())?;
        self.note(name, format, (rows, cols), &piece);
        Ok(Matrix::from_shared(rows, cols, dtype, Arc::new(piece), 0)?)
    }

    /// Packs matrices below each other; others find the result by `name`.
    fn pack(&self, name: &str, compute: Compute, parts: &[&Matrix]) -> Result<Weight, KernelError> {
        let Some((first, others)) = parts.split_first() else {
            return Weight::pack(compute, parts);
        };
        let same = others.iter().all(|part| part.dtype() == first.dtype());
        let stored = if same { first.dtype() } else { DType::F32 };
        let (rows, cols) = (parts.iter().map(|part| part.rows()).sum(), first.cols());
        let format = Format::of(compute, stored);
        let Some(mut piece) = self.take(Weight::packed_bytes(format, rows, cols)) else {
            return Weight::pack(compute, parts);
        };
        Weight::pack_into(compute, parts, piece.as_mut_slice())?;
        self.note(name, format, (rows, cols), &piece);
        Weight::from_packed(format, rows, cols, Arc::new(piece), 0)
    }

    /// Packs int8 rows below each other; others find the result by `name`.
    fn pack_int8(
        &self,
        name: &str,
        cols: usize,
        parts: &[Int8Rows<'_>],
        activation: Activation,
    ) -> Result<Weight, KernelError> {
        let values: usize = parts.iter().map(|part| part.values.len()).sum();
        let rows = values / cols.max(1);
        let format = Format::Int8(activation);
        let Some(mut piece) = self.take(Weight::packed_bytes(format, rows, cols)) else {
            return Weight::pack_int8(cols, parts, activation);
        };
        Weight::pack_int8_into(cols, parts, activation, piece.as_mut_slice())?;
        self.note(name, format, (rows, cols), &piece);
        Weight::from_packed(format, rows, cols, Arc::new(piece), 0)
    }

    /// A matrix `[out, in]` of plain numbers, type as stored.
    fn plain(&self, name: &str) -> Result<Matrix, ModelError> {
        let (rows, cols) = self.shape(name)?;
        Ok(match self.stored(name)? {
            Stored::Bf16(values) => Matrix::from_bf16(rows, cols, values)?,
            other => Matrix::from_f32(rows, cols, other.floats())?,
        })
    }

    /// A router: computed in f32 whatever else is.
    pub(crate) fn router(&self, name: &str) -> Result<Weight, ModelError> {
        Ok(Weight::pack(Compute::F32, &[&self.kept(name)?])?)
    }

    /// Embedding `name` that is the head too, and the head; no embedding if the head's rows are exact copies of its.
    pub(crate) fn tied(&self, name: &str) -> Result<(Option<Matrix>, Weight), ModelError> {
        let stored = match self.checkpoint.dtype(name) {
            Some(WeightDtype::Bf16) => DType::Bf16,
            _ => DType::F32,
        };
        let compute = self.packing.linear();
        if compute == Compute::F32 {
            // As it lies: one copy for both.
            return Ok((None, Weight::pack(compute, &[&self.kept(name)?])?));
        }
        let (head, shares) = (
            format!("{name} as head"),
            self.packing.shares_embedding(stored),
        );
        if let Some(segment) = self.segment() {
            let embedding = (!shares).then(|| self.kept(name)).transpose()?;
            return Ok((embedding, segment.weight(&head)?));
        }
        if shares {
            let embedding = self.plain(name)?;
            return Ok((None, self.pack(&head, compute, &[&embedding])?));
        }
        let embedding = self.kept(name)?;
        let weight = self.pack(&head, compute, &[&embedding])?;
        Ok((Some(embedding), weight))
    }

    /// Linear layers with the same input, one below the other, with their biases.
    pub(crate) fn linear<S: AsRef<str>>(&self, modules: &[S]) -> Result<Weight, ModelError> {
        let joint = modules.iter().map(AsRef::as_ref).collect::<Vec<_>>();
        let joint = joint.join(" ");
        let joint_bias = format!("bias of {joint}");
        if let Some(segment) = self.segment() {
            let weight = segment.weight(&joint)?;
            return Ok(match segment.has(&joint_bias) {
                true => weight.with_bias(segment.vector(&joint_bias)?)?,
                false => weight,
            });
        }
        let name = |module: &S| format!("{}.weight", module.as_ref());
        let float = modules.iter().all(|module| {
            matches!(
                self.checkpoint.scheme(&name(module)),
                Scheme::Plain | Scheme::BlockFp8 { .. }
            )
        });
        let (weight, biases) = if float {
            let mut parts = Vec::with_capacity(modules.len());
            let mut biases = Vec::with_capacity(modules.len());
            for module in modules {
                parts.push(self.dense(&name(module))?);
                biases.push(self.floats_if(&format!("{}.bias", module.as_ref()))?);
            }
            let parts: Vec<&Matrix> = parts.iter().collect();
            let rows: Vec<usize> = parts.iter().map(|part| part.rows()).collect();
            (
                self.pack(&joint, self.packing.linear(), &parts)?,
                joined(biases, &rows),
            )
        } else {
            self.int8(&joint, modules)?
        };
        Ok(match biases {
            Some(bias) => {
                self.settle_vector(&joint_bias, &bias);
                weight.with_bias(bias)?
            }
            None => weight,
        })
    }

    /// A linear layer's matrix as real numbers.
    pub(crate) fn dense(&self, name: &str) -> Result<Matrix, ModelError> {
        let (rows, cols) = self.shape(name)?;
        let module = name.strip_suffix(".weight").unwrap_or(name);
        let scheme = self.checkpoint.scheme(name);
        let mut values = match scheme {
            Scheme::Plain => return self.plain(name),
            Scheme::BlockFp8 {
                rows: block_rows,
                cols: block_cols,
            } => {
                let Stored::F8(bytes) = self.stored(name)? else {
                    return Err(refused(format!("{name} is not F8_E4M3")));
                };
                let factors = self.floats(&format!("{module}.weight_scale_inv"))?;
                let table = e4m3_table();
                let per_row = cols.div_ceil(block_cols);
                let mut values = Vec::with_capacity(bytes.len());
                for (row, bytes) in bytes.chunks_exact(cols).enumerate() {
                    let factors = &factors[row / block_rows * per_row..][..per_row];
                    for (bytes, factor) in bytes.chunks(block_cols).zip(factors) {
                        values.extend(bytes.iter().map(|byte| table[usize::from(*byte)] * factor));
                    }
                }
                values
            }
            _ => {
                let quantised = self.quantised(module)?;
                let scales = match quantised.scales {
                    Scales::Channel(scales) => scales,
                    Scales::Dequant { scale, .. } => {
                        let Activation::Static { scale: input, .. } = quantised.activation else {
                            return Err(refused(format!("{name} has no static activations")));
                        };
                        scale.iter().map(|scale| scale / input).collect()
                    }
                };
                let values = quantised.values.chunks_exact(cols).zip(scales);
                values
                    .flat_map(|(row, scale)| row.iter().map(move |q| f32::from(*q) * scale))
                    .collect()
            }
        };
        if self.packing.dense(scheme, DType::F32) == DType::F32 || self.packing.quantize {
            return Ok(Matrix::from_f32(rows, cols, values)?);
        }
        twinfer_kernels::round_to_bf16(&mut values);
        let narrow = values.iter().map(|value| bf16::from_f32(*value)).collect();
        Ok(Matrix::from_bf16(rows, cols, narrow)?)
    }

    /// A linear layer of `heads` times `pattern` rows, cut so: for each head one matrix of the first and one of the
    /// second number of rows, the first ones transposed; in the type that is not quantised.
    pub(crate) fn expansions(
        &self,
        name: &str,
        pattern: [usize; 2],
        heads: usize,
    ) -> Result<[PerHead; 2], ModelError> {
        let part = |which: usize, head: usize| format!("{name} {which} {head}");
        let compute = self.packing.float;
        if let Some(segment) = self.segment() {
            let all = |which: usize| -> Result<PerHead, ModelError> {
                let names = (0..heads).map(|head| part(which, head));
                Ok(match compute {
                    Compute::F32 => {
                        let all = names.map(|name| segment.matrix(&name));
                        PerHead::Plain(all.collect::<Result<_, _>>()?)
                    }
                    _ => {
                        let all = names.map(|name| segment.weight(&name));
                        PerHead::Packed(all.collect::<Result<_, _>>()?)
                    }
                })
            };
            return Ok([all(0)?, all(1)?]);
        }
        let (mut first, mut second) = (Vec::new(), Vec::new());
        let mut pieces = self.pieces(name, &pattern)?.into_iter();
        while let (Some(a), Some(b)) = (pieces.next(), pieces.next()) {
            first.push(a.transposed());
            second.push(b);
        }
        let all = |which: usize, matrices: Vec<Matrix>| -> Result<PerHead, ModelError> {
            let named = matrices.into_iter().enumerate();
            let named = named.map(|(head, matrix)| (part(which, head), matrix));
            Ok(match compute {
                Compute::F32 => {
                    let all = named.map(|(name, matrix)| self.settled(&name, matrix));
                    PerHead::Plain(all.collect::<Result<_, _>>()?)
                }
                _ => {
                    let all = named.map(|(name, matrix)| self.pack(&name, compute, &[&matrix]));
                    PerHead::Packed(all.collect::<Result<_, _>>()?)
                }
            })
        };
        Ok([all(0, first)?, all(1, second)?])
    }

    /// A linear layer cut into consecutive pieces of `rows` rows each, a pattern that repeats over all
    /// rows; each piece a matrix of real numbers of its own.
    fn pieces(&self, name: &str, pattern: &[usize]) -> Result<Vec<Matrix>, ModelError> {
        let whole = self.dense(name)?;
        let mut floats = vec![0.0; whole.rows() * whole.cols()];
        for (row, floats) in floats.chunks_exact_mut(whole.cols()).enumerate() {
            whole.dense_row_f32(row, floats)?;
        }
        let mut values = floats.into_iter();
        let mut pieces = Vec::new();
        let mut row = 0;
        for rows in pattern.iter().cycle() {
            if row >= whole.rows() {
                break;
            }
            let values = values.by_ref().take(rows * whole.cols());
            pieces.push(match whole.dtype() {
                DType::Bf16 => {
                    Matrix::from_bf16(*rows, whole.cols(), values.map(bf16::from_f32).collect())?
                }
                DType::F32 => Matrix::from_f32(*rows, whole.cols(), values.collect())?,
            });
            row += rows;
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
                // What the part was made of would otherwise lie beside the next ones.
                twinfer_sys::return_freed_memory();
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
        if let Some(segment) = self.segment() {
            return Ok(segment.warning.clone());
        }
        let Some(head) = self.checkpoint.read_spare_head()? else {
            return Ok(None);
        };
        let hashes = self.hashes.lock().unwrap_or_else(PoisonError::into_inner);
        let differs = hashes.get("model.embed_tokens.weight") != Some(&xxh3_128(&head));
        Ok(differs.then(|| {
            "tie_word_embeddings is true, but lm_head.weight differs from the embedding; the embedding is used".to_owned()
        }))
    }

    /// Hash over names, types, shapes and bytes of all tensors, independent of how they are spread
    /// over files. Valid once all have been read.
    ///
    /// # Errors
    /// The other ranks, which have read the other experts, cannot be reached or have read other files.
    pub(crate) fn weights_hash(&self) -> Result<String, ModelError> {
        if let Some(segment) = self.segment() {
            return Ok(segment.weights_hash.clone());
        }
        let mut hash = Xxh3::new();
        let mut hashes = self.hashes.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(spread) = &self.spread {
            let known = |name: &str| self.checkpoint.dtype(name).is_some();
            gather_hashes(&spread.link, known, &mut hashes)?;
        }
        for (name, bytes) in hashes.iter() {
            hash.update(
                format!(
                    "{name} {:?} {:?} {bytes:032x}\n",
                    self.checkpoint.dtype(name),
                    self.checkpoint.shape(name).unwrap_or_default()
                )
                .as_bytes(),
            );
        }
        Ok(format!("{:032x}", hash.digest128()))
    }

    fn shape(&self, name: &str) -> Result<(usize, usize), ModelError> {
        match self.checkpoint.shape(name) {
            Some([rows, cols]) => Ok((*rows, *cols)),
            _ => Err(absent(name)),
        }
    }

    fn stored(&self, name: &str) -> Result<Stored, ModelError> {
        let (Some(dtype), Some(shape)) = (self.checkpoint.dtype(name), self.checkpoint.shape(name))
        else {
            return Err(absent(name));
        };
        let count: usize = shape.iter().product();
        Ok(match dtype {
            WeightDtype::Bf16 => Stored::Bf16(self.read(name, count)?),
            WeightDtype::F32 => Stored::F32(self.read(name, count)?),
            WeightDtype::F16 => Stored::F16(self.read(name, count)?),
            WeightDtype::F8E4M3 => Stored::F8(self.read(name, count)?),
            WeightDtype::I8 => Stored::I8(self.read(name, count)?),
            WeightDtype::I32 => Stored::I32(self.read(name, count)?),
            WeightDtype::I64 => Stored::I64(self.read(name, count)?),
        })
    }

    fn read<T: bytemuck::Pod>(&self, name: &str, count: usize) -> Result<Vec<T>, ModelError> {
        let mut values = vec![T::zeroed(); count];
        self.read_into(name, bytemuck::cast_slice_mut(&mut values))?;
        Ok(values)
    }

    fn read_into(&self, name: &str, buffer: &mut [u8]) -> Result<(), ModelError> {
        self.checkpoint.read(name, buffer)?;
        let hash = xxh3_128(buffer);
        let length = buffer.len() as u64;
        self.hashes
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .insert(name.to_owned(), hash);
        let done = self.done.fetch_add(length, Ordering::Relaxed) + length;
        if let Some(progress) = self.progress {
            // A rank may have an expert twice.
            progress(done.min(self.total), self.total);
        }
        Ok(())
    }
}

/// The biases of parts of `rows` rows each, one behind the other, with zeros for those that have none.
fn joined(biases: Vec<Option<Vec<f32>>>, rows: &[usize]) -> Option<Vec<f32>> {
    if biases.iter().all(Option::is_none) {
        return None;
    }
    let parts = biases.into_iter().zip(rows);
    Some(
        parts
            .flat_map(|(bias, rows)| bias.unwrap_or_else(|| vec![0.0; *rows]))
            .collect(),
    )
}

fn absent(name: &str) -> ModelError {
    // Names come from the same config as the specs; a slip between the two is a bug, not bad input.
    WeightsError::Tensors {
        missing: vec![name.to_owned()],
        wrong: Vec::new(),
    }
    .into()
}

fn refused(reason: String) -> ModelError {
    WeightsError::Tensors {
        missing: Vec::new(),
        wrong: vec![reason],
    }
    .into()
}
